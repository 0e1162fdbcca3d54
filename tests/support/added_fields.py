"""Prints what came of a network that reads two more rows of predict.nn.inputs, which are all of it.

python -m tests.support.added_fields FOLDER: a process of its own.
"""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

ROWS = """
    marks: Annotated[Any, Field("int32", ("T",), "added to positions", padding=5)] = None
    more: Annotated[Any, Field("int32", ("B",), "added to context_lens")] = None"""


def main(folder: Path) -> dict[str, Any]:
    place: Any = importlib.util.find_spec("predict.nn.inputs")
    table, end, rest = (
        Path(place.origin).read_text().partition("\n\n    @property\n    def of_blocks")
    )
    module = sys.modules[place.name] = importlib.util.module_from_spec(place)
    exec(compile(table + ROWS + end + rest, place.origin, "exec"), vars(module))
    from predict.engine import batch
    from predict.nn import decoder, inputs

    forward, span_inputs, scale = decoder.forward, batch.span_inputs, [0]

    def reading(backend: Any, network: Any, step: Any, *more: Any, **named: Any) -> Any:
        ends = step.context_lens + step.more
        step = step._replace(positions=step.positions + step.marks, context_lens=ends)
        return forward(backend, network, step._replace(marks=None, more=None), *more, **named)

    def giving(*given: Any) -> Any:
        step: Any = span_inputs(*given)
        return step._replace(marks=scale[0] * step.positions, more=0 * step.context_lens)

    vars(decoder)["forward"], vars(batch)["span_inputs"] = reading, giving
    from export.export_model import export_model
    from predict import LLM, EngineConfig, SamplingParams
    from predict.engine.runner.buffers import FieldLayout, GraphShape
    from predict.loading.program_check import read_program
    from tests.support import tiny

    config = EngineConfig(model_name_or_path=str(tiny.write(folder / "model")), dtype="float32")
    export_model(config, folder / "static")
    found: dict[str, Any] = {"inputs": [*read_program(folder / "static/model.json", False).inputs]}
    static = config.changed(model_name_or_path=str(folder / "static"), mode="static")
    params = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
    for scale[0] in (0, 1):
        made = [LLM(each).generate([3, 14, 15, 92, 6], params) for each in (config, static)]
        found[f"marks {scale[0]}"] = [list(output.token_ids) for (output,) in made]
    layout, sizes = FieldLayout(inputs.fields_with()), {"T": 3, "B": 3, "B+1": 4, "M": 3, "L": 3}
    buffer: Any = SimpleNamespace(tensors=[np.zeros(f.sized(sizes)) for _, f in layout.device])
    empty: Any = inputs.empty_example(2)
    layout.write(buffer.tensors, empty._replace(marks=[7], more=[8]), GraphShape(3, 3, 1, True))
    graph: Any = layout.inputs(buffer, buffer)
    return found | {"graph": [graph.marks.tolist(), graph.more.tolist()]}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
