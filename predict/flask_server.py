"""PaddleNLP's command for a server: the same doors, and the flags of its `flask_server.py`.

    python predict/flask_server.py --model_name_or_path DIR --dtype bfloat16 --flask_port 8011

It is `python -m predict.server` under another name: that answers PaddleNLP's requests too. Here
--flask_port is the port of the API and --port that of the page, and each serves both. Requests that
do not say how to sample have PaddleNLP's top_p 0.7 and temperature 0.95.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a script: import from the checkout, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from collections.abc import Sequence
from dataclasses import replace

from predict.cli.command import command
from predict.cli.flags import Flag, FlagValues, parse_flags, with_file
from predict.server.config import PORTS
from predict.server.flags import FLAGS as SERVER
from predict.server.flags import USAGE
from predict.system.flag import no_effect, not_here
from predict.system.signals import Signals

PROG = "flask_server.py"
DESCRIPTION = "Answers requests over HTTP, with the flags of PaddleNLP's flask_server.py."
PORT = 8011
SAMPLING = {"top_p": 0.7, "temperature": 0.95}  # where neither flag nor request says it
_PAGE = "PaddleNLP's page"

OWN_FLAGS: tuple[Flag, ...] = (
    Flag(_PAGE, "port", "int", PORT, "Port of the page; the API is there too.", allowed=PORTS),
    Flag(_PAGE, "flask_port", "int", None,
         "Port of the API; the page is there too. When not given, --port alone.",
         aliases=("base_port",), allowed=PORTS),
    Flag(_PAGE, "title", "str", "LLM",
         "Title of the page.",
         availability=no_effect("the page shows the model's name.")),
    Flag(_PAGE, "sub_title", "str", "LLM-subtitle",
         "Line below it.",
         availability=no_effect("the page shows the model's name.")),
)  # fmt: skip
_ONE = not_here("its requests name no model; python -m predict.server has several.")
FLAGS = (
    *(
        replace(flag, availability=_ONE)
        if flag.name in ("model_folders", "max_models_bytes")
        else flag
        for flag in SERVER
        if flag.name not in {own.name for own in OWN_FLAGS}
    ),
    *OWN_FLAGS,
)


@command()
def main(words: Sequence[str], signals: Signals) -> int:
    """Runs a server to its end; the exit status, as of `python -m predict.server`."""
    flags = parse(words)
    from predict.server.from_flags import server_config

    config, notes = server_config(flags)
    from predict.server.run import run

    page, api = config.port, flags["flask_port"]
    if api is None or api == page:
        return run(config, notes)
    return run(replace(config, port=api), notes, [page])


def parse(argv: Sequence[str]) -> FlagValues:
    """The flags of a command line, with PaddleNLP's sampling where nothing else is said.

    Raises UserError; SystemExit(0) after --help.
    """
    flags = parse_flags(with_file(argv, FLAGS), FLAGS, PROG, DESCRIPTION, USAGE)
    if flags["decode_strategy"] == "greedy_search" or flags.given("generation_config"):
        return flags
    added = {name: value for name, value in SAMPLING.items() if not flags.given(name)}
    return FlagValues({**flags.values, **added}, flags.explicit.union(added), flags.notes)


if __name__ == "__main__":
    sys.exit(main())
