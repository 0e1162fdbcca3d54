"""The table of a step's inputs: what a row means for every way to run a network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from predict.engine.runner.buffers import FieldLayout, GraphShape
from predict.nn.inputs import FIELDS, Field, RowKind, empty_example, fields_with
from tests.support.processes import run_python


@pytest.mark.slow
def test_a_row_is_all_that_every_way_to_run_needs(tmp_path: Path) -> None:
    done = run_python("-m", "tests.support.added_fields", tmp_path, "cpu")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    names = [*(field.name for field in fields_with()), "marks", "more", "shift"]
    assert found["inputs"][: len(names)] == names
    (same, static_same), (other, static_other) = found["marks 0"], found["marks 1"]
    assert same == static_same != other == static_other
    assert found["graph"] == [[7, 5, 5], [8, 0, 0], [0.5, 2, 2]]  # and the rows' padding


@pytest.mark.parametrize("fields", [fields_with(), FIELDS])
def test_graphs_fill_every_field_on_the_device(fields: Sequence[Field]) -> None:
    layout = FieldLayout(fields)
    filled = [place for place, _, _ in (*layout.of_tokens, *layout.of_seqs, *layout.of_blocks)]
    filled += [layout.places[name] for name in ("cu_seqlens_q", "logit_indices")]  # not by padding
    assert sorted(filled) == list(range(layout.num_fields))
    assert {field.name for field in fields} - set(layout.places) == {"max_lens"}


@pytest.mark.parametrize("optional", [(), ("prefix_lens",), ("block_positions", "prefix_lens")])
def test_graphs_write_and_read_the_optional_fields_of_the_network(optional: Sequence[str]) -> None:
    fields = fields_with(optional)
    layout = FieldLayout(fields)
    shape = GraphShape(4, 4, 1, True)
    sizes = {"T": 4, "B": 4, "B+1": 5, "M": 3, "L": 4, "R": 2}
    arrays = [np.full(field.sized(sizes), 9, np.int32) for _, field in layout.device]
    step = empty_example(2, fields)
    step = step._replace(**{name: np.array([7], np.int32) for name in optional})
    layout.write(arrays, step, shape)
    buffer: Any = SimpleNamespace(tensors=[*arrays, "choices", "penalties"])
    inputs = layout.inputs(buffer, "max_lens")
    assert inputs.max_lens == "max_lens"
    assert inputs.slot_mapping.tolist() == [-1, -1, -1, -1]
    assert inputs.block_tables.tolist() == [[0, 0, 9], [0, 9, 9], [0, 9, 9], [0, 9, 9]]
    for name in ("block_positions", "prefix_lens"):
        values = getattr(inputs, name)
        assert values is None if name not in optional else values.tolist() == [7, 0, 0, 0]


def test_the_smallest_step_is_padding() -> None:
    step = empty_example(3)
    assert all(np.asarray(values).dtype == np.int32 for values in step.given)
    assert {
        name: value.tolist() for name, value in step._asdict().items() if value is not None
    } == {
        "token_ids": [0],
        "positions": [0],
        "slot_mapping": [-1],
        "cu_seqlens_q": [0, 1],
        "context_lens": [1],
        "block_tables": [[0, 0, 0]],
        "logit_indices": [0],
        "max_lens": [1, 1, 1, 0, RowKind.ALL],
    }
