"""One hostile case: what is there, what is run, how it must end, and what must be as it was."""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

GOOD_LINES = ('{"src": "hello", "tgt": ""}', '{"src": "you", "tgt": ""}')
MAX_NEW_TOKENS = 4

# What each command runs, and the flags that a good run needs.
COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "predict": (
        "predict.predictor",
        (
            *("--model_name_or_path", "{model}", "--dtype", "float32", "--device", "cpu"),
            *("--chat_template", "none", "--data_file", "{data}", "--output_file", "{out}"),
            *("--max_new_tokens", str(MAX_NEW_TOKENS), "--src_length", "64"),
        ),
    ),
    "export": (
        "export.export_model",
        (
            *("--model_name_or_path", "{model}", "--dtype", "float32", "--device", "cpu"),
            *("--output_path", "{out}", "--max_length", "64"),
        ),
    ),
    "static": (  # of the export that `prepare` puts there
        "predict.predictor",
        (
            *("--model_name_or_path", "{folder}/export", "--mode", "static"),
            *("--chat_template", "none", "--data_file", "{data}", "--output_file", "{out}"),
            *("--max_new_tokens", str(MAX_NEW_TOKENS), "--src_length", "32"),
        ),
    ),
    "quantize": (
        "quant.run_quantization",
        (
            *("--model_name_or_path", "{model}", "--output_path", "{out}"),
            *("--quant_type", "weight_only_int8"),
        ),
    ),
    "evaluate": (
        "quant.evaluate",
        (
            *("--model_name_or_path", "{model}", "--quant_type", "weight_only_int8"),
            *("--data_file", "{data}", "--output_file", "{out}", "--device", "cpu"),
        ),
    ),
    "convert": ("predict.convert", ("{model}", "{out}", "--format", "hf")),
    "recipe": ("quant.run_quantization", ()),
    "kernels": ("predict.bench.kernels", ()),
    "throughput": (
        "predict.bench.throughput",
        ("--model_name_or_path", "{model}", "--dtype", "float32", "--device", "cpu"),
    ),
}


@dataclass
class Sandbox:
    """A folder of one case: a good tiny model, a good data file, and a name for the output."""

    folder: Path

    @property
    def model(self) -> Path:
        """A Llama of two small layers, with a byte-level tokenizer."""
        return self.folder / "model"

    @property
    def data(self) -> Path:
        """GOOD_LINES."""
        return self.folder / "prompts.jsonl"

    @property
    def out(self) -> Path:
        """Nothing is there yet."""
        return self.folder / "out.json"

    def edit_json(self, name: str, **changes: Any) -> None:
        """Changes keys of a JSON file of the model; `...` takes a key out."""
        path = self.model / name
        values = json.loads(path.read_text()) if path.exists() else {}
        values.update(changes)
        path.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))

    def fill(self, text: str) -> str:
        """`text` with {model}, {data}, {out} and {folder} replaced."""
        names = {"model": self.model, "data": self.data, "out": self.out, "folder": self.folder}
        for name, path in names.items():
            text = text.replace("{" + name + "}", str(path))
        return text

    def digest(self, name: str) -> str:
        """Of a file, or of all files of a folder; "absent" when there is none."""
        path = Path(self.fill(name)) if "{" in name else self.folder / name
        if not path.exists() and not path.is_symlink():
            return "absent"
        files = [path] if not path.is_dir() else sorted(p for p in path.rglob("*") if p.is_file())
        state = hashlib.sha256()
        for file in files:
            state.update(f"{file.relative_to(self.folder)}\0".encode())
            state.update(file.read_bytes())
        return state.hexdigest()


Prepare = Callable[[Sandbox], None]


@dataclass(frozen=True)
class Case:
    """One row of a table.

    argv: flags behind the command's own; {model}, {data}, {out}, {folder} stand for paths. A flag
    given here takes the place of the command's. says: words of stderr, in any order, any case.
    untouched: files or folders, relative to the sandbox, that must be as they were; the model and
    the data file always are.
    """

    name: str
    command: str
    argv: Sequence[str] = ()
    prepare: Prepare | None = None
    code: int = 2
    says: Sequence[str] = ()
    never_says: Sequence[str] = ("Traceback", "REGATTA_TRACEBACK")
    untouched: Sequence[str] = ()
    writes_output: bool = False  # else {out} must not come to be, or stay as it was

    def run(self, sandbox: Sandbox, capfd: pytest.CaptureFixture[str]) -> None:
        """Runs the command in this process and checks how it ended."""
        if self.prepare is not None:
            self.prepare(sandbox)
        watched = ["model", "prompts.jsonl", *self.untouched]
        if not self.writes_output:
            watched.append("out.json")
        before = {name: sandbox.digest(name) for name in watched}
        module, own = COMMANDS[self.command]
        argv = [sandbox.fill(word) for word in _merged(own, self.argv)]
        capfd.readouterr()
        try:
            code = importlib.import_module(module).main(argv)
        except SystemExit as error:  # argparse
            code = error.code
        said = capfd.readouterr()
        text = said.err
        assert code == self.code, f"left with {code}, not {self.code}:\n{text}"
        for word in self.says:
            assert word.lower() in text.lower(), f"{word!r} is not said:\n{text}"
        for word in self.never_says:
            assert word not in text, f"{word!r} is said:\n{text}"
        assert len(text) < 20_000, f"{len(text)} characters are said"
        after = {name: sandbox.digest(name) for name in watched}
        assert after == before, [name for name in watched if after[name] != before[name]]


def _merged(own: Sequence[str], given: Sequence[str]) -> list[str]:
    """The command's own flags less those that the case gives, then the case's."""
    names = {word.partition("=")[0] for word in given if word.startswith("--")}
    kept: list[str] = []
    for name, value in zip(own[::2], own[1::2], strict=True):
        if name not in names:
            kept += [name, value]
    return [*kept, *given]


def make_sandbox(folder: Path, template: Path) -> Sandbox:
    """A sandbox in `folder`, its model a copy of `template`."""
    sandbox = Sandbox(folder)
    shutil.copytree(template, sandbox.model)
    sandbox.data.write_text("\n".join(GOOD_LINES) + "\n")
    return sandbox


def link(name: str, target: str) -> Prepare:
    """Makes a link `name` to `target`, both in the sandbox."""
    return lambda sandbox: (sandbox.folder / name).symlink_to(sandbox.folder / target)


def lock_out(sandbox: Sandbox) -> None:
    """As another process does that exports there; ends with the sandbox."""
    file = (sandbox.folder / ".out.json.lock").open("w")
    file.write("4711\n")
    file.flush()
    fcntl.flock(file, fcntl.LOCK_EX)
    vars(sandbox)["lock"] = file
