"""Starts a server: `python -m predict.server --model_name_or_path DIR`.

Leaves with 0 after SIGTERM or Ctrl-C once what ran is finished; with 1 when the engine has ended or
--drain_timeout broke something off; with 2 for wrong flags, files or a model that cannot be loaded;
at a second signal at once, with 128 + its number.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from predict.cli.command import run_command
from predict.server.flags import parse
from predict.system.signals import Signals


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a server to its end; the exit status."""

    def action(signals: Signals) -> int:
        flags = parse(sys.argv[1:] if argv is None else argv)
        from predict.server.from_flags import server_config, several_configs

        several, notes = several_configs(flags), list[str]()
        if several is None:
            config, notes = server_config(flags)
        else:
            config = next(iter(several.values()))
        from predict.server.run import run

        return run(config, notes, several=several)

    return run_command(action)


if __name__ == "__main__":
    sys.exit(main())
