"""The command `regatta`: what this project does, each by a word. Imports what the word needs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from predict.errors import EXIT_USAGE
from predict.names import hint
from predict.system.console import say
from predict.system.interpreter import explained_absence
from regatta import __version__


class Command(NamedTuple):
    """The module whose `main(words)` it is, and what it does."""

    module: str
    does: str


COMMANDS: Mapping[str, Command] = {
    "serve": Command("predict.server.__main__", "answers OpenAI's API over HTTP"),
    "predict": Command("predict.predictor", "answers the prompts of a data file"),
    "export": Command("export.export_model", "writes a static program"),
    "quantize": Command("quant.run_quantization", "calibrates and quantizes a checkpoint"),
    "convert": Command("predict.convert", "writes a checkpoint in another layout"),
    "merge-lora": Command("predict.merge_lora_params", "merges an adapter into its model"),
    "evaluate": Command("quant.evaluate", "measures what quantization costs"),
    "doctor": Command("predict.doctor", "says what this machine can run"),
    "bench throughput": Command("predict.bench.throughput", "times an engine"),
    "bench serving": Command("predict.bench.serving.__main__", "puts load on a server"),
    "bench kernels": Command("predict.bench.kernels", "times one operator at a time"),
    "bench tower": Command("predict.bench.tower", "times a vision tower"),
    "bench compare": Command("predict.bench.compare", "compares two measurements"),
    "bench peer": Command("predict.bench.peer", "times llama.cpp beside this"),
}


def usage(first: str = "") -> str:
    """The commands that begin with a word, or all."""
    shown = {name: each for name, each in COMMANDS.items() if name.startswith(first)}
    lines = [f"  {name:<18}{command.does}" for name, command in shown.items()]
    head = f"usage: regatta {first}COMMAND ...   (regatta {first}COMMAND --help has its flags)\n"
    return "\n".join([head, *lines, *([] if first else ["\n  --version"])])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status; 2 for one that is not there."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words == ["--version"]:
        print(f"regatta {__version__}")
        return 0
    count = 2 if words[:1] == ["bench"] else 1
    name = " ".join(words[:count])
    if name not in COMMANDS:
        asks = words[count - 1 :] in ([], ["--help"], ["-h"])
        if asks or words == ["help"]:
            print(usage("bench " if count == 2 else ""))
            return 0
        known = ", ".join(COMMANDS)
        say(f"error: {name!r} is no command of regatta (there are: {known}){hint(name, COMMANDS)}")
        return EXIT_USAGE
    sys.argv = [f"regatta {name}", *words[count:]]  # what --help and messages call it
    try:
        module = import_module(COMMANDS[name].module)
    except ModuleNotFoundError as error:
        if (absence := explained_absence(error.name)) is None:
            raise
        say(f"error: {absence}")
        return EXIT_USAGE
    status: int = module.main(sys.argv[1:])
    return status


def alias() -> int:
    """Runs a command by its name of before: regatta-serve is `regatta serve`, and says so."""
    name = Path(sys.argv[0]).name.removeprefix("regatta-")
    say(f"note: regatta-{name} is `regatta {name}` now")
    return main([name, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
