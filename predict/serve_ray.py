"""Starts a server whose model runs in many replicas, on Ray Serve.

    python -m predict.serve_ray --model_name_or_path DIR --dtype bfloat16 --max_replicas 8

It takes the flags of `python -m predict.server`, and answers as that does (pip install
"regatta[ray]"). Leaves with 0 after SIGTERM or Ctrl-C once what ran is finished; with 1 when
--drain_timeout broke something off; with 2 for wrong flags, files or a model that cannot be loaded;
at a second signal at once, with 128 + its number.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a script: import from the checkout, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from predict.cli.command import command
from predict.cli.flags import Flag, FlagValues, parse_flags, with_file
from predict.errors import UserError
from predict.scale_out.cluster import RAY_FLAGS, check_ray, connected, on_workers, share_of
from predict.server.flags import FLAGS as SERVER
from predict.server.flags import USAGE
from predict.system.console import say
from predict.system.flag import no_effect, not_here
from predict.system.ranges import MAX_COUNT, Range
from predict.system.signals import Interrupted, Signals

if TYPE_CHECKING:
    from predict.server.config import ServerConfig

PROG = "python -m predict.serve_ray"
DESCRIPTION = "Answers requests of OpenAI's API over HTTP with many replicas of a model, on Ray."
OWN_FLAGS = (
    Flag("Replicas", "min_replicas", "int", 1,
         "Processes with the whole model that there are always.",
         allowed=Range(1, 1 << 16)),
    Flag("Replicas", "max_replicas", "int", None,
         "Most of them, when there is much to do; when not given, --min_replicas.",
         allowed=Range(1, 1 << 16)),
    Flag("Replicas", "target_ongoing_requests", "float", None,
         "Requests of a replica above which there will be more replicas; when not given, "
         "--batch_size.",
         allowed=Range(0.0, MAX_COUNT, whole=False, above=True)),
    Flag("Replicas", "num_fronts", "int", 1,
         "Processes that speak HTTP and tokenize.",
         allowed=Range(1, 1 << 10)),
    *RAY_FLAGS,
)  # fmt: skip
_FIXED = not_here("replicas come and go, each with the adapters of --lora_modules.")
# Rows of the server that mean something else here.
_OTHERS = {
    "max_connections": no_effect("connections are taken by Ray Serve's proxy."),
    "allow_adapter_updates": _FIXED,
    "adapter_root": _FIXED,
    **dict.fromkeys(("enable_sleep_mode", "weights_root"), not_here("replicas do not sleep yet.")),
    **dict.fromkeys(
        ("model_folders", "max_models_bytes"), not_here("all replicas have one model.")
    ),
    "log_format": not_here("Ray writes the lines.", "json"),
}
SERVE_FLAGS = (
    *(replace(flag, availability=_OTHERS.get(flag.name, flag.availability)) for flag in SERVER),
    *OWN_FLAGS,
)


@command()
def main(words: Sequence[str], signals: Signals) -> int:
    """Runs a server to its end; the exit status."""
    words = with_file(words, SERVE_FLAGS)
    return run(parse_flags(words, SERVE_FLAGS, PROG, DESCRIPTION, USAGE), signals)


def run(flags: FlagValues, signals: Signals) -> int:
    """Runs a server to its end; the exit status. Raises UserError before Ray is started."""
    from predict.server.from_flags import server_config

    check_ray()
    min_replicas: int = flags["min_replicas"]
    max_replicas: int = flags["max_replicas"] or min_replicas
    if max_replicas < min_replicas:
        raise UserError(
            f"--max_replicas {max_replicas} is less than --min_replicas {min_replicas}; raise the "
            "one or lower the other"
        )
    config, notes = server_config(flags)
    share = share_of(config.engine.model.device, max_replicas, flags["cpus_per_replica"])
    config = replace(config, engine=on_workers(config.engine), port=free_port(config))
    for note in notes:
        say(f"note: {note}")
    with connected(flags["ray_address"], share, max_replicas):
        from predict.scale_out.serving.deploy import Scale, finish, start

        scale = Scale(
            min_replicas,
            max_replicas,
            flags["target_ongoing_requests"] or config.engine.scheduling.batch_size,
            flags["num_fronts"],
            share,
            is_cluster=flags["ray_address"] is not None,
        )
        start(config, scale)
        host = f"[{config.host}]" if ":" in config.host else config.host
        say(
            f"ready: {config.model_names[0]} in {min_replicas} to {max_replicas} replicas; "
            f"http://{host}:{config.port}/v1"
        )
        number = wait_for_signal()
        with signals.held("running requests are finished first"):
            name = signal.Signals(number).name
            say(
                f"{name}: running requests are finished first, new ones refused; once more ends "
                "at once"
            )
            return finish(config.drain_timeout, scale.is_cluster)


def free_port(config: ServerConfig) -> int:
    """The port of the config, or one that is free for 0. Raises UserError where it is taken."""
    from predict.server.run import listen

    with listen(config.host, config.port) as sock:
        port: int = sock.getsockname()[1]
    return port


def wait_for_signal() -> int:
    """The number of the first signal that comes."""
    try:
        while True:
            signal.pause()
    except Interrupted as error:
        return error.number


if __name__ == "__main__":
    sys.exit(main())
