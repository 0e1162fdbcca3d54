"""A process in which predict.nn.inputs has two rows more, which its networks read.

The rows are written into the module's source: that is all of the edit. What stands here besides is
what reads them (`reading`) and what knows their values (`giving`), as a network and its builder of
inputs do. `came_of` starts the process.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from tests.support.paths import ROOT

MODULE = "predict.nn.inputs"
END_OF_TABLE = "\n\n    @property\n    def given"
ROWS = """
    marks: Annotated[Any, Field("int32", ("T",), "read as positions", padding=5)] = None
    more_lens: Annotated[Any, Field("int32", ("B",), "read as context_lens", padding=1)] = None"""
PROMPTS = [[3, 14, 15, 92, 6], [5, 35], [89, 79, 32]]
NUM_TOKENS = 8


class EditedLoader(importlib.machinery.SourceFileLoader):
    """Loads MODULE with ROWS."""

    def get_code(self, fullname: str) -> CodeType:
        source = Path(self.path).read_text(encoding="utf-8")
        before, end, after = source.partition(END_OF_TABLE)
        assert end
        return compile(before + ROWS + end + after, self.path, "exec")


class EditedFinder(importlib.abc.MetaPathFinder):
    """Finds MODULE."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None
        assert spec.origin is not None
        return importlib.util.spec_from_loader(fullname, EditedLoader(fullname, spec.origin))


def reading(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` of a network that reads the fields."""

    def call(backend: ModuleType, decoder: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        # Changed places: an export has no inputs that nothing reads.
        changed = inputs._replace(
            positions=inputs.marks,
            marks=inputs.positions,
            context_lens=inputs.more_lens,
            more_lens=inputs.context_lens,
        )
        return forward(backend, decoder, changed, *rest, **named)

    return call


def giving(span_inputs: Callable[..., Any], scale: list[int]) -> Callable[..., Any]:
    """`span_inputs` that knows the fields: marks are places, `scale[0]` apart."""

    def call(*arguments: Any) -> Any:
        inputs = span_inputs(*arguments)
        return inputs._replace(marks=scale[0] * inputs.positions, more_lens=inputs.context_lens)

    return call


def main(device: str, folder: Path) -> dict[str, Any]:
    """Tokens and inputs with the rows, of every way to run that the device has."""
    sys.meta_path.insert(0, EditedFinder())
    from predict.engine import batch
    from predict.nn import decoder

    scale = [2]
    vars(decoder)["forward"] = reading(decoder.forward)
    vars(batch)["span_inputs"] = giving(batch.span_inputs, scale)

    from predict import LLM, EngineConfig, SamplingParams
    from tests.support import tiny

    params = SamplingParams(temperature=0.0, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    config = EngineConfig(
        model_name_or_path=str(tiny.write(folder / "model")),
        device=device,
        dtype="float32",
        max_length=64,
        batch_size=4,
        inference_model=True,
    )

    def tokens(llm: LLM) -> list[list[int]]:
        return [list(output.token_ids) for output in llm.generate(PROMPTS, params)]

    llm = LLM(config)
    result: dict[str, Any] = {"dynamic": tokens(llm)}
    if device == "gpu":
        return result | recorded(llm)
    scale[0] = 1
    result["without"] = tokens(llm)
    scale[0] = 2
    return result | exported(config, folder / "program", tokens)


def exported(config: Any, folder: Path, tokens: Callable[[Any], list[list[int]]]) -> dict[str, Any]:
    """What an exported program takes, and its tokens."""
    from export.export_model import export_model
    from predict import LLM
    from predict.loading.program_check import read_program

    export_model(config, folder)
    (path,) = (each for each in folder.glob("*.json") if each.with_suffix(".pdiparams").is_file())
    inputs = {name: str(kind) for name, kind in read_program(path, compiled=True).inputs.items()}
    static = LLM(config.changed(model_name_or_path=str(folder), mode="static"))
    return {"inputs": inputs, "static": tokens(static)}


def recorded(llm: Any) -> dict[str, Any]:
    """What a graph's buffers hold behind the last step of three requests."""
    runner = llm.engine.runner
    (graph,) = (graph for shape, graph in runner.graphs.items() if shape.num_tokens == 4)
    places = runner.layout.places
    names = ("positions", "marks", "context_lens", "more_lens")
    return {name: graph.buffer.arrays[places[name]].tolist() for name in names}


def came_of(device: str, folder: Path) -> dict[str, Any]:
    """What `main` returns in a process of its own; of a fake GPU where this process has it."""
    own = [str(ROOT), str(ROOT / "csrc")]
    path = os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.run(
        [sys.executable, "-m", "tests.support.added_fields", device, str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    from tests.fake_gpu import libraries

    if libraries.ENVIRONMENT in os.environ:
        libraries.select(Path(os.environ[libraries.ENVIRONMENT]))
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
