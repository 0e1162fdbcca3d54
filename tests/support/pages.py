"""The blocks of code on the documentation's pages, and what their marks say."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from regatta.__main__ import COMMANDS as REGATTA
from tests.support.paths import ROOT

BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*?) -->\n)?```(?P<language>bash|python|text)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
FOLDERS = ("predict", "quant", "export", "csrc", "tests", "docs", "examples", "benchmarks")
# Command -> the module that has its `main`.
COMMANDS = {
    "predict/predictor.py": "predict.predictor",
    "export/export_model.py": "export.export_model",
    "quant/run_quantization.py": "quant.run_quantization",
    "quant/evaluate.py": "quant.evaluate",
    "predict.doctor": "predict.doctor",
    "predict.server": "predict.server.__main__",
    "predict.bench.compare": "predict.bench.compare",
    "predict.bench.throughput": "predict.bench.throughput",
    "predict.bench.kernels": "predict.bench.kernels",
    "predict.bench.tower": "predict.bench.tower",
    "predict.bench.peer": "predict.bench.peer",
    "predict.bench.serving": "predict.bench.serving.__main__",
}


@dataclass(frozen=True)
class Block:
    """A block of a page, and what it prints where the page says so."""

    mark: str
    language: str
    body: str
    output: str | None = None


def blocks(page: Path) -> list[Block]:
    """The blocks of bash and python, in their order."""
    found: list[Block] = []
    for match in BLOCK.finditer(page.read_text(encoding="utf-8")):
        mark, language, body = match["mark"] or "", match["language"], match["body"]
        if language != "text":
            found.append(Block(mark, language, body))
        elif mark == "output":
            found[-1] = Block(found[-1].mark, found[-1].language, found[-1].body, body)
    return found


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands(block: Block) -> list[list[str]]:
    lines = block.body.replace("\\\n", " ").splitlines()
    parts = [part for line in lines for part in re.split(r"\s&&\s", line)]
    return [words for part in parts if (words := shlex.split(part, comments=True))]


def own_command(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """The name in COMMANDS, or the script, and its arguments; None for other programs."""
    if words[0] == "regatta":
        count = 3 if words[1] == "bench" else 2
        module = REGATTA[" ".join(words[1:count])].module
        name = next((name for name, each in COMMANDS.items() if each == module), None)
        return None if name is None else (name, list(words[count:]))
    if words[0] != "python":
        return None
    if words[1] == "-m":
        return (words[2], list(words[3:])) if words[2] in COMMANDS else None
    script = str(Path(words[1]))
    return (script, list(words[2:])) if script.split("/")[0] in FOLDERS else None


def script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
