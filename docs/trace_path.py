"""Prints the calls on the way from the command line to the first operator, and their files.

Runs one token of the demo model on the CPU. A hop is a call from one file of predict/ to another.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import sys
import tempfile
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

DATA = '{"src": "def add(a, b):", "tgt": "", "max_new_tokens": 1}\n'


def call_stack(frame: FrameType | None) -> list[tuple[str, str]]:
    """(file, function) of the frames that stand in predict/, outermost first."""
    found: list[tuple[str, str]] = []
    while frame is not None:
        path = Path(frame.f_code.co_filename).resolve()
        if path.is_relative_to(ROOT / "predict"):
            code = frame.f_code
            found.append((str(path.relative_to(ROOT)), getattr(code, "co_qualname", code.co_name)))
        frame = frame.f_back
    return found[::-1]


def trace() -> list[tuple[str, str]]:
    """The calls that are open when the first operator of a step begins."""
    from predict.engine.engine import Engine
    from predict.ops import compiled as ops
    from predict.predictor import main

    found: list[tuple[str, str]] = []
    real, step = ops._run, Engine.step
    in_step = False

    def watched_run() -> object:
        if in_step and not found:
            found.extend(call_stack(sys._getframe(1)))
        return real()

    def watched_step(engine: Engine) -> object:
        nonlocal in_step
        in_step = True
        return step(engine)

    ops._run, Engine.step = watched_run, watched_step  # type: ignore[assignment,method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder) / "prompts.jsonl"
            data.write_text(DATA)
            words = ["--model_name_or_path", str(ROOT / "examples" / "demo_model")]
            words += ["--dtype", "float32", "--device", "cpu", "--append_attn"]
            words += ["--data_file", str(data), "--output_file", str(Path(folder) / "out.json")]
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                main(words)
    finally:
        ops._run, Engine.step = real, step  # type: ignore[method-assign]
    return found


def main() -> int:
    """Prints the path."""
    path = trace()
    files = list(dict.fromkeys(file for file, _ in path))
    hops = sum(before[0] != after[0] for before, after in itertools.pairwise(path))
    for file, function in path:
        print(f"{file:<36} {function}")
    print(f"{hops} hops between files, {len(files)} files")
    return 0 if path else 1


if __name__ == "__main__":
    sys.exit(main())
