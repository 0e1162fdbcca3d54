"""Prints what came of a network that reads three more rows of predict.nn.inputs, and no more code.

python -m tests.support.added_fields FOLDER DEVICE: a process of its own.
"""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.fake_gpu import chosen

ROWS = """
    marks: Annotated[Any, Field("int32", ("T",), "added to positions", padding=5)] = None
    more: Annotated[Any, Field("int32", ("B",), "added to context_lens")] = None
    shift: Annotated[Any, Field("float32", ("T", 64), "added to embeddings", padding=2)] = None"""


def main(folder: Path, device: str) -> dict[str, Any]:
    if (folder_of_libraries := chosen.folder()) is not None:
        chosen.select(folder_of_libraries)
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
        own: Any = SimpleNamespace(**vars(backend))
        shift = step.shift
        own.embed = lambda *given: backend.add(backend.embed(*given), shift)
        if device == "cpu":  # a graph takes no kernels of Paddle's own
            places, ends = step.positions + step.marks, step.context_lens + step.more
            step = step._replace(positions=places, context_lens=ends)
        step = step._replace(marks=None, more=None, shift=None)
        return forward(own, network, step, *more, **named)

    def giving(*given: Any) -> Any:
        step: Any = span_inputs(*given)
        shift = scale[0] * np.sin(np.arange(64) * step.positions[:, None], dtype=np.float32)
        marks = scale[0] * step.positions
        return step._replace(marks=marks, more=0 * step.context_lens, shift=shift)

    vars(decoder)["forward"], vars(batch)["span_inputs"] = reading, giving
    from export.export_model import export_model
    from predict import LLM, EngineConfig, SamplingParams
    from predict.engine.runner.buffers import FieldLayout, GraphShape
    from predict.loading.program_check import read_program
    from tests.support import tiny

    config = EngineConfig(model_name_or_path=str(tiny.write(folder / "model")), dtype="float32")
    config = config.changed(inference_model=False)  # programs of the others call no pd_op.add
    params = SamplingParams(temperature=0.0, max_new_tokens=16, ignore_eos=True)
    found: dict[str, Any] = {"recorded": 0}
    if device == "gpu":  # with graphs and without; programs call no other operators there
        settings: dict[str, Any] = {"device": "gpu", "inference_model": True, "attention": "append"}
        config = other = config.changed(batch_size=2, max_length=64, **settings)
    else:
        export_model(config, folder / "static")
        found["inputs"] = [*read_program(folder / "static/model.json", False).inputs]
        other = config.changed(model_name_or_path=str(folder / "static"), mode="static")
    for scale[0] in (0, 1):
        answers = found[f"marks {scale[0]}"] = list[Any]()
        for each in (config, other):
            llm: Any = LLM(each)
            if device == "gpu" and answers:
                llm.engine.runner.graphs.pool = None
            answers.append(llm.generate([3, 14, 15, 92, 6], params)[0].token_ids)
            found["recorded"] += llm.engine.num_recorded
    layout, sizes = FieldLayout(inputs.fields_with()), {"T": 3, "B": 3, "B+1": 4, "M": 3, "L": 3}
    buffer: Any = SimpleNamespace(
        tensors=[np.zeros(p.shape, p.dtype) for p in layout.pieces(sizes)]
    )
    smallest: Any = inputs.empty_example(2)
    empty = smallest._replace(marks=[7], more=[8], shift=[[0.5] * 64])
    layout.write(buffer.tensors, empty, GraphShape(3, 3, 1, True))
    graph: Any = layout.inputs(buffer, buffer)
    rows = [graph.marks.tolist(), graph.more.tolist(), graph.shift[:, 9].tolist()]
    return found | {"graph": rows}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2])))
