"""Writes from the sources what they say: docs/flags.md, parts of pages, and keywords of the API.

python docs/make_flags.py          # writes the pages, and predict/config/keywords.py
python docs/make_flags.py --check  # leaves with 1 where a file is not what it would write

A part of a page stands between `<!-- fields: MODULE.CLASS -->` and `<!-- /fields -->`: a table of
fields, of which each says what it means as an option, or in comments beside and above it; between
`<!-- calls: MODULE.CLASS METHOD ... -->` and `<!-- /calls -->`: signatures and docstrings; between
`<!-- file: PATH -->` and `<!-- /file -->`: that file, a page as it is, others as code.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from predict.cli.flags import Flag, markdown_table  # noqa: E402
from predict.config.engine import TOPICS  # noqa: E402
from predict.system.options import Option, options_of  # noqa: E402

FLAGS_PAGE, KEYWORDS = ROOT / "docs" / "flags.md", ROOT / "predict" / "config" / "keywords.py"
KEYWORDS_HEAD = '''\
"""Settings of EngineConfig as keywords, for those who check types.

Made by docs/make_flags.py: do not edit. No program imports it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypedDict


class Settings(TypedDict, total=False):
    """Those of a model's directory."""

'''
KEYWORDS_END = '''

class EngineSettings(Settings):
    """All of EngineConfig."""

    model_name_or_path: str | os.PathLike[str]


class ChangedSettings(Settings, total=False):
    """Any of EngineConfig."""

    model_name_or_path: str | os.PathLike[str]
'''
LANGUAGES = {".py": "py", ".md": ""}  # of a block; else C++
HEAD = """\
# Every flag

<!-- Made by docs/make_flags.py: do not edit. -->

`--flag`, `--flag true` and `--flag=false` all work. `--help` of each command lists its flags too.
A flag that is marked "Not in this release" is known and refused by name. A flag that is marked
"No effect" is accepted, and a note on stderr says why nothing changes.

A wrong spelling, or another tool's name, is an error that names the flag that was meant. `regatta`
has these commands by a word each: `regatta --help` lists them.
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
    "predict.bench.tower": ("predict.bench.tower.FLAGS", ""),
    "predict.bench.serving": ("predict.bench.serving.__main__.FLAGS", ""),
}
MARKED = re.compile(r"(<!-- (fields|calls|file): ([^\n]+) -->\n).*?(<!-- /\2 -->)", re.DOTALL)
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


def calls(path: str, *methods: str) -> str:
    """A class's docstring and signature, and those of methods, as paragraphs."""
    config = named(path)
    parts = [f"`{path}`", _doc(config)]
    if not (is_dataclass(config) or issubclass(config, Exception)):  # whose fields have a table
        parts += [_signature(config.__name__, config.__init__), _doc(config.__init__)]
    for name in methods:
        member = inspect.getattr_static(config, name)
        call = getattr(config, name) if isinstance(member, classmethod) else member
        shown = [f"`{name}`"] if isinstance(member, property) else [_signature(name, call)]
        parts += [*shown, _doc(call)]
    return "\n\n".join(filter(None, parts))


def _doc(call: Any) -> str:
    return inspect.getdoc(call) or ""


def _signature(name: str, call: Any) -> str:
    signature = re.sub(r"'([^']*)'", r"\1", str(inspect.signature(call)))
    return f"```py\n{name}{re.sub(r'^.self(, )?', '(', signature)}\n```"


def file_block(path: str) -> str:
    """A file of the tree as a page shows it."""
    text = (ROOT / path).read_text(encoding="utf-8").rstrip()
    language = LANGUAGES.get(Path(path).suffix, "cpp")
    return f"```{language}\n{text}\n```" if language else text


def part(kind: str, said: str) -> str:
    """What stands between a page's marks."""
    if kind == "fields":
        return fields_table(named(said))
    return calls(*said.split()) if kind == "calls" else file_block(said)


def page(path: Path) -> str:
    """A page, its parts made anew."""
    return MARKED.sub(
        lambda match: f"{match[1]}\n{part(match[2], match[3])}\n\n{match[4]}",
        path.read_text(encoding="utf-8"),
    )


def keywords() -> str:
    """predict/config/keywords.py: the settings' names and types."""
    rows = (row for topic in TOPICS.values() for row in options_of(topic))
    shown = [f"    {each.name}: {_keyword(each, said)}\n" for each, said in rows]
    return KEYWORDS_HEAD + "".join(shown[1:]) + KEYWORDS_END  # the first is the model


def _keyword(each: Field[Any], said: Option) -> str:
    """The type of what a field takes in."""
    kind = re.sub(r"tuple\[(\w+), \.\.\.\]", r"tuple[\1, ...] | list[\1]", str(each.type))
    if (said.cells or {}).get("kind") == "texts":
        kind = f"str | os.PathLike[str] | {kind}"
    return kind.replace("str", "str | os.PathLike[str]", 1) if said.is_file else kind


def main(words: Sequence[str]) -> int:
    """Writes the files, or checks them."""
    status = 0
    made = {FLAGS_PAGE: flags_page(), KEYWORDS: keywords()}
    made |= {each: page(each) for each in sorted((ROOT / "docs").glob("*.md")) if each not in made}
    for path, text in made.items():
        if "--check" not in words:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            print(f"{path} is not current; run: python docs/make_flags.py", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
