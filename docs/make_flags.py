"""Writes docs/flags.md, and the tables of fields in docs/python-api.md, from the sources.

python docs/make_flags.py          # writes the pages
python docs/make_flags.py --check  # leaves with 1 where a page is not what it would write

A table of fields stands between `<!-- fields: MODULE.CLASS -->` and `<!-- /fields -->`. A field
says what it means as an option, or in comments beside and above it.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from predict.cli.flags import Flag, markdown_table  # noqa: E402
from predict.system.options import options_of  # noqa: E402

FLAGS_PAGE, FIELDS_PAGE = ROOT / "docs" / "flags.md", ROOT / "docs" / "python-api.md"
HEAD = """\
# Every flag

<!-- Made by docs/make_flags.py: do not edit. -->

`--flag`, `--flag true` and `--flag=false` all work. `--help` of each command lists its flags too.
A flag that is marked "Not in this release" is known and refused by name. A flag that is marked
"No effect" is accepted, and a note on stderr says why nothing changes.

A wrong spelling is an error that names the nearest flag.
"""


_PREDICTOR = " Takes the flags of the predictor, and these."
_SERVER = " Takes the flags of the server, and these."
_FILE = " The first argument may be a JSON file of flags."
# By command: where its own flags are, and what its module's first line does not say of it.
COMMANDS = {
    "predict/predictor.py": ("predict.cli.flags.FLAGS", ""),
    "predict.server": (
        "predict.server.flags.OWN_FLAGS",
        " Takes the flags of the predictor that make an engine or say how to sample, and these."
        f"{_FILE} Flags about files, benchmarks and beams are refused by name.",
    ),
    "predict/flask_server.py": ("predict.flask_server.OWN_FLAGS", _SERVER),
    "predict.batch_ray": (
        "predict.batch_ray.OWN_FLAGS",
        " Takes the flags of the predictor but for the benchmark's, and these.",
    ),
    "predict.serve_ray": ("predict.serve_ray.OWN_FLAGS", _SERVER),
    "export/export_model.py": ("export.export_model.OWN_FLAGS", _PREDICTOR),
    "quant/run_quantization.py": ("quant.config.FLAGS", _FILE),
    "predict.convert": ("predict.convert.FLAGS", ""),
    "predict/merge_lora_params.py": ("predict.merge_lora_params.FLAGS", ""),
    "quant/evaluate.py": ("quant.evaluate.FLAGS", ""),
    "predict.bench.throughput": ("predict.bench.throughput.OWN_FLAGS", _PREDICTOR),
    "predict.bench.compare": ("predict.bench.compare.FLAGS", ""),
    "predict.bench.peer": ("predict.bench.peer.FLAGS", ""),
    "predict.bench.kernels": ("predict.bench.kernels.FLAGS", ""),
    "predict.bench.serving": ("predict.bench.serving.__main__.FLAGS", ""),
}
MARKED = re.compile(r"(<!-- fields: ([\w.]+) -->\n).*?(<!-- /fields -->)", re.DOTALL)
LINE = re.compile(r"    (?:(?P<name>\w+): [^#]*)?(?:# ?(?P<said>.*))?")


def named(path: str) -> Any:
    """What a module has by that name."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def flags_page() -> str:
    """The page of all flags."""
    parts = [HEAD]
    for command, (path, more) in COMMANDS.items():
        flags: Sequence[Flag] = named(path)
        purpose = f"{_first_line(command)}{more}"
        # No links are meant; what stands between backticks is shown as it is.
        table = re.sub(
            r"`[^`]*`|\[", lambda m: m[0] if m[0] != "[" else r"\[", markdown_table(flags)
        )
        parts.append(f"\n## {command}\n\n{purpose}\n\n{table}\n")
    return "".join(parts)


def _first_line(command: str) -> str:
    """What the docstring of a command's module begins with."""
    module = import_module(command.removesuffix(".py").replace("/", "."))
    if hasattr(module, "__path__"):
        module = import_module(f"{module.__name__}.__main__")
    return str(module.__doc__).partition("\n")[0]


def fields_table(config: type) -> str:
    """The fields of a dataclass: name, default, and what they mean."""
    meanings = {each.name: said.help for each, said in options_of(config)} or _comments(config)
    rows = ["| field | default | meaning |", "| --- | --- | --- |"]
    for each in fields(config):
        default = "{}" if each.default_factory is not MISSING else repr(each.default)
        is_needed = each.default is MISSING and each.default_factory is MISSING
        shown = "needed" if is_needed else f"`{default}`"
        meaning = re.sub(r"([|*])", r"\\\1", meanings.get(each.name, ""))
        rows.append(f"| `{each.name}` | {shown} | {meaning} |")
    return "\n".join(rows)


def _comments(config: type) -> dict[str, str]:
    """What comments beside and above fields say."""
    found: dict[str, str] = {}
    above: list[str] = []
    for match in filter(None, map(LINE.fullmatch, inspect.getsource(config).splitlines())):
        if match["name"] is None:
            above = [*above, match["said"]] if match["said"] else []
        else:
            before = " ".join(above).removesuffix(".")
            found[match["name"]] = "; ".join(filter(None, (before, match["said"])))
            above = []
    return found


def fields_page() -> str:
    """docs/python-api.md with its tables made anew."""
    return MARKED.sub(
        lambda match: f"{match[1]}\n{fields_table(named(match[2]))}\n\n{match[3]}",
        FIELDS_PAGE.read_text(encoding="utf-8"),
    )


def main(words: Sequence[str]) -> int:
    """Writes the pages, or checks them."""
    status = 0
    for page, text in ((FLAGS_PAGE, flags_page()), (FIELDS_PAGE, fields_page())):
        if "--check" not in words:
            page.write_text(text, encoding="utf-8")
        elif page.read_text(encoding="utf-8") != text:
            print(f"{page} is not current; run: python docs/make_flags.py", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
