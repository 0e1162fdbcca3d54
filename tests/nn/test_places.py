"""Where the tokens of a request stand, and what a step's inputs become by it."""

import numpy as np
import pytest

from predict.engine.batch import placed, span_inputs
from predict.engine.request_state import Request
from predict.engine.scheduled import ScheduledSpan
from predict.nn.inputs import StepInputs, empty_example
from predict.nn.places import Placing, PrefixPlacing, StepPlacing, fields_of, placing_of
from predict.nn.spec import PrefixSpec, RopeSpec
from predict.request import SamplingParams
from tests.support.records import llama_spec

END, GMASK, MASK = 9, 8, 7
PREFIX = PrefixPlacing(PrefixSpec(END, (GMASK, MASK)))
STEPS = RopeSpec(method="dynamic_steps", original_max_position=8)
SIZES = {"vocab_size": 10, "hidden_size": 8, "max_position": 8}


def inputs_of(placing: Placing, *spans: tuple[list[int], int, int]) -> StepInputs:
    """Of (prompt, start, number of tokens): tokens behind the prompt are generated ones."""
    scheduled = []
    for number, (prompt, start, count) in enumerate(spans):
        request = Request(number, prompt, SamplingParams())
        request.token_ids += [1] * (start + count - len(prompt))
        scheduled.append(ScheduledSpan(request, count, start, [0, 1, 2], True))
    return placed(span_inputs(scheduled, 16), scheduled, placing)


@pytest.mark.parametrize(
    ("prompt", "num_tokens", "mask_row"),
    [
        ([3, 4, GMASK, END], 3, 2),
        ([3, MASK, 4, 5, END, 2], 4, 1),
        ([MASK, GMASK, END, MASK], 2, 1),  # the first of the kinds, wherever the others are
        ([3, END, END], 1, 0),  # no mask: the last ahead of the end
        ([3, 4, 5], 3, 2),  # no end: all of it
        ([END, GMASK], 0, 1),
    ],
)
def test_a_prefix_ends_ahead_of_the_first_end(
    prompt: list[int], num_tokens: int, mask_row: int
) -> None:
    assert PREFIX.of(prompt).prefix == (num_tokens, mask_row)
    assert PREFIX.of(prompt).runs_whole


def test_tokens_behind_a_prefix_stay_at_its_mask_and_count_in_the_second_dimension() -> None:
    prompt = [3, GMASK, 4, END, 2]
    inputs = inputs_of(PREFIX, (prompt, 0, 5), (prompt, 6, 1), ([GMASK, END], 0, 2))
    assert inputs.positions.tolist() == [0, 1, 2, 1, 1, 1, 0, 0]
    assert inputs.block_positions.tolist() == [0, 0, 0, 1, 2, 4, 0, 1]
    assert inputs.prefix_lens.tolist() == [3, 3, 1]


def test_what_was_generated_does_not_join_the_prefix() -> None:
    """As when a preempted request runs again from its beginning."""
    inputs = inputs_of(PREFIX, ([3, GMASK, END], 0, 7))
    assert inputs.prefix_lens.tolist() == [2]
    assert inputs.block_positions.tolist() == [0, 0, 1, 2, 3, 4, 5]


def test_a_prompt_s_length_chooses_the_rows_of_all_its_tokens() -> None:
    placing = StepPlacing(STEPS, 64)
    lengths = [1, 8, 9, 16, 17, 32, 33]
    rows = [placing.of([1] * length).first_row for length in lengths]
    assert rows == [0, 0, 64, 64, 128, 128, 192]
    inputs = inputs_of(placing, ([1] * 8, 7, 3), ([1] * 9, 0, 9), ([1] * 17, 40, 1))
    assert inputs.positions.tolist() == [7, 8, 9, *range(64, 73), 168]
    assert inputs.block_positions is None
    assert inputs.prefix_lens is None


def test_few_networks_place_tokens() -> None:
    plain = llama_spec(1, 2, 2, 4, 8, **SIZES)
    assert placing_of(plain, 64) is None
    steps = llama_spec(1, 2, 2, 4, 8, **SIZES, ropes=(STEPS,))
    assert placing_of(steps, 8) is None  # no prompt is longer
    assert placing_of(steps, 9) == StepPlacing(STEPS, 9)
    prefixed = llama_spec(1, 2, 2, 4, 8, **SIZES, prefix=PREFIX.spec)
    assert placing_of(prefixed, 64) == PREFIX


def test_optional_fields_are_those_that_a_network_reads() -> None:
    plain, prefixed = (llama_spec(1, 2, 2, 4, 8, **SIZES, prefix=p) for p in (None, PREFIX.spec))
    names = [field.name for field in fields_of(plain)]
    assert names[-1] == "max_lens"
    found = [field.name for field in fields_of(prefixed)]
    assert found == [*names, "block_positions", "prefix_lens"]
    assert empty_example().prefix_lens is None
    assert np.array_equal(empty_example(fields=fields_of(prefixed)).prefix_lens, [0])
