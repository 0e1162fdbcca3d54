"""Network inputs of a scheduled batch."""

import numpy as np
import pytest

from predict.engine.batch import span_inputs
from predict.engine.request_state import Request
from predict.engine.scheduled import ScheduledSpan
from predict.nn.inputs import FIELDS, RowKind
from predict.request import SamplingParams


def request(number: int, num_tokens: int) -> Request:
    return Request(number, list(range(100 * number, 100 * number + num_tokens)), SamplingParams())


def test_mixed_batch_of_decode_chunk_and_drafts() -> None:
    decode, chunk, drafts = request(1, 6), request(2, 9), request(3, 5)
    spans = (
        ScheduledSpan(decode, 1, 5, [7, 2], True),
        ScheduledSpan(chunk, 3, 2, [4, 0, 5], False),
        ScheduledSpan(drafts, 3, 4, [9, 3, 8], True, (11, 12)),
    )
    inputs = span_inputs(spans, block_size=4)
    assert inputs.token_ids.tolist() == [105, 202, 203, 204, 304, 11, 12]
    assert inputs.positions.tolist() == [5, 2, 3, 4, 4, 5, 6]
    assert inputs.slot_mapping.tolist() == [9, 18, 19, 0, 12, 13, 14]
    assert inputs.cu_seqlens_q.tolist() == [0, 1, 4, 7]
    assert inputs.context_lens.tolist() == [6, 5, 7]
    assert inputs.block_tables.tolist() == [[7, 2], [4, 0], [9, 3]]
    assert inputs.logit_indices.tolist() == [0, 4, 5, 6]
    assert inputs.max_lens.tolist() == [3, 7, 3, 0, RowKind.LISTED]


@pytest.mark.parametrize("few", [32, 0])
@pytest.mark.parametrize(
    ("spans", "kind"),
    [
        (((1, 1, 0), (1, 1, 0)), RowKind.ALL),
        (((3, 3, 0), (1, 1, 0)), RowKind.ALL),  # with drafts
        (((3, 1, 0), (1, 1, 0)), RowKind.LAST),
        (((3, 1, 0),), RowKind.LAST),
        (((3, 3, 0),), RowKind.ALL),
        (((3, 2, 0),), RowKind.LISTED),
        (((3, 0, 0), (1, 1, 0)), RowKind.LISTED),
        (((2, 0, 0), (2, 2, 0)), RowKind.LISTED),  # as many rows as requests
        (((2, 0, 2), (2, 2, 0)), RowKind.LISTED),  # as many as tokens, in another order
        (((3, 0, 0),), RowKind.NONE),
        (((3, 0, 0), (2, 0, 0)), RowKind.NONE),
    ],
)
def test_rows_are_tagged(
    spans: tuple[tuple[int, int, int], ...],
    kind: RowKind,
    few: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """spans: tokens, trailing rows, rows for the prompt's logprobs."""
    monkeypatch.setattr("predict.engine.batch.FEW_TOKENS", few)
    made = [
        ScheduledSpan(
            *(request(number, length), length, 0, [number], rows > 0, (7,) * (rows - 1), prompt)
        )
        for number, (length, rows, prompt) in enumerate(spans)
    ]
    inputs = span_inputs(made, 16)
    assert inputs.row_kind == kind
    if kind in (RowKind.LAST, RowKind.NONE):
        assert inputs.logit_indices.tolist() == (inputs.cu_seqlens_q[1:] - 1).tolist()


def test_block_tables_are_minus_one_past_the_end() -> None:
    spans = (
        ScheduledSpan(request(1, 2), 2, 0, [5], True),
        ScheduledSpan(request(2, 9), 9, 0, [1, 2, 3], True),
    )
    inputs = span_inputs(spans, block_size=4)
    assert inputs.block_tables.tolist() == [[5, -1, -1], [1, 2, 3]]


def test_inputs_of_few_tokens_are_those_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        spans = []
        for number in range(int(random.integers(1, 5))):
            length, start = random.integers(1, 7, 2).tolist()
            num_drafts = int(random.integers(0, length))
            samples = bool(random.integers(2))
            drafts = tuple(range(num_drafts)) if samples else ()
            blocks = random.permutation(20)[:8].tolist()
            num_prompt = 0 if drafts else int(random.integers(0, length + 1))
            tokens = request(number, start + length - len(drafts))
            spans.append(ScheduledSpan(tokens, length, start, blocks, samples, drafts, num_prompt))
        few = span_inputs(spans, 4)
        monkeypatch.setattr("predict.engine.batch.FEW_TOKENS", 0)
        many = span_inputs(spans, 4)
        monkeypatch.undo()
        for name, one, other in zip(FIELDS, few.given, many.given, strict=False):
            np.testing.assert_array_equal(one, other, str(name))
