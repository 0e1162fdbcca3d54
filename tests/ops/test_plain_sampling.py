"""The plain twins of the operators from logits to tokens, and from step to step."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from predict.device import library
from predict.engine import beams
from predict.engine.choices import GREEDY
from predict.engine.logprobs import measure
from predict.engine.runner.transport import read_table
from predict.engine.window import WindowDrafts, loose_drafts, verified
from predict.ops import compiled, plain
from predict.ops.plain_sampling import _sample_row
from tests.support.step_operands import (
    BLOCK_SIZE,
    Case,
    adjust_logits_case,
    follow_drafts_case,
    likeliest_case,
    log_softmax_case,
    logprobs_case,
    random_spans,
    resolve_tokens_case,
    sample_step_case,
)

paddle = library.import_paddle()

# Compiled operators without a twin, each with the reason.
WITHOUT_TWIN = {
    "pack_quantized": "plain schemes read codes, scales and zeros as they are: nothing is packed"
}
# What the compiled operators have within: arithmetic of `sample`, and steps of blocks.
PARTS = {
    *("philox4x32", "uniform"),
    *("route", "experts", "gate"),
    *("split", "turn_and_keep_latents", "latent_attention", "delta_net", "short_conv"),
}


def operators(module: Any) -> dict[str, Any]:
    """The public functions and classes that a backend's module offers."""
    return {
        name: value
        for name, value in vars(module).items()
        if (inspect.isfunction(value) or inspect.isclass(value))
        and name[0] != "_"
        and value.__module__.startswith("predict.ops.")
    }


def test_every_compiled_operator_has_a_twin_of_its_signature() -> None:
    twins = operators(plain)
    for name, operator in operators(compiled).items():
        if name in WITHOUT_TWIN:
            assert name not in twins
            continue
        assert name in twins, f"predict.ops.plain has no {name}"
        assert inspect.signature(twins[name]) == inspect.signature(operator), name
    assert twins.keys() - operators(compiled).keys() == PARTS


def outcome(case: Case) -> tuple[list[Any], Any, Any]:
    return case.outcome(plain, paddle.CPUPlace())


def test_dense_weights_keep_their_rows() -> None:
    values = np.random.default_rng(0).standard_normal((5, 7), np.float32)
    packed = plain.pack_dense(paddle.to_tensor(values), "bfloat16")
    rounded = paddle.to_tensor(values).astype("bfloat16").astype("float32").numpy()
    np.testing.assert_array_equal(packed.astype("float32").numpy(), rounded)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_norms_are_folded_into_columns(dtype: str) -> None:
    generator = np.random.default_rng(0)
    values, norm = generator.standard_normal((5, 7), np.float32), np.arange(7, dtype=np.float32)
    weight = paddle.to_tensor(values).astype(dtype)
    before = weight.astype("float32").numpy()
    plain.fold_norm(weight, paddle.to_tensor(norm).astype(dtype))
    wanted = paddle.to_tensor(before * norm).astype(dtype).astype("float32").numpy()
    np.testing.assert_array_equal(weight.astype("float32").numpy(), wanted)


def test_what_is_changed_in_place_is_changed_in_the_tensors_that_share_it() -> None:
    memory = paddle.to_tensor(np.array([9, -1, -2, 9], np.int32))
    plain.resolve_tokens(memory[1:3], paddle.to_tensor(np.array([5, 6], np.int32)))
    assert memory.tolist() == [9, 5, 6, 9]


@pytest.mark.parametrize("vocab", [5, 199, 1024])
def test_log_softmax_changes_its_rows_alone(vocab: int) -> None:
    case = log_softmax_case(vocab)
    (got, _), _, _ = outcome(case)
    wanted = case.arrays[0].copy()
    changed = wanted[[8, 1, 3, 5]]
    beams.log_softmax(changed)
    wanted[[8, 1, 3, 5]] = changed
    np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("vocab", [5, 199, 1024])
@pytest.mark.parametrize("count", [1, 4, 48])
def test_likeliest_tokens_are_those_of_a_beam(vocab: int, count: int) -> None:
    case = likeliest_case(vocab, count)
    logits, rows = case.arrays
    _, found, values = outcome(case)
    for row, ids, own in zip(rows.tolist(), found[0].tolist(), values, strict=True):
        wanted = beams.Candidates([], [])
        if 0 <= row < len(logits) and not np.isnan(logits[row]).any():
            wanted = beams.likeliest(logits[row], count)
        assert ids == [*wanted.token_ids, *[-1] * (count - len(wanted.token_ids))]
        assert own[: len(wanted.log_probs)].tolist() == wanted.log_probs


def test_tokens_of_the_step_before_are_put_in() -> None:
    (ids, _), _, _ = outcome(resolve_tokens_case())
    assert ids.tolist() == [5, 70, 0, 72, -9, 71, -(2**31)]


@pytest.mark.parametrize("num_seqs", [1, 2, 7, 130])
def test_steps_move_to_where_a_verification_got(num_seqs: int) -> None:
    case = follow_drafts_case(num_seqs)
    ids, positions, slots, borders, ends, tables, choices, plan, tokens = (
        array.copy() for array in case.arrays
    )
    offsets = choices.reshape(-1)[6 * choices.shape[1] :][: 2 * choices.shape[1]].view(np.int64)
    for index, (count, row, num_chosen, *drafts) in enumerate(plan.tolist()):
        if count < 0:
            continue
        right = 0
        while right < count and tokens[row + right] == tokens[drafts[right]] >= 0:
            right += 1
        span = slice(borders[index], borders[index + 1])
        if num_chosen:
            ids[span] = [9, *tokens[row : row + right + 1]][-2:]
        positions[span] -= count - right
        slots[span] = [
            tables[index][place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
            for place in positions[span]
        ]
        ends[index] -= count - right
        offsets[index] -= count - right
    wanted = (ids, positions, slots, borders, ends, tables, choices, plan, tokens)
    got, _, _ = outcome(case)
    for left, right_array in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(left, right_array)


@pytest.mark.parametrize(("vocab", "first"), [(5, 0), (97, 0), (97, 2)])
def test_logits_are_adjusted_as_the_processors_adjust_them(vocab: int, first: int) -> None:
    case, rows = adjust_logits_case(vocab, first)
    (got, _, _, _, history, _), _, _ = outcome(case)
    slots = case.arrays[1][3]
    wanted = case.arrays[0].copy()
    for row, (adjustment, tokens, num_prompt) in enumerate(rows):
        if adjustment is None:
            continue
        whole = np.append(np.zeros(first, np.float32), wanted[row])
        adjustment.apply(whole, tokens, num_prompt)
        wanted[row] = whole[first:]
        assert history[slots[row], len(tokens) - 1] == tokens[-1]
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("vocab", [5, 1000])
@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_logprobs_are_measured(vocab: int, num_top: int) -> None:
    case = logprobs_case(vocab, num_top)
    logits, tokens = case.arrays
    table = read_table(
        plain.logprobs(paddle.to_tensor(logits), paddle.to_tensor(tokens), num_top).numpy()
    )
    wanted = measure(logits, tokens[: len(logits)].tolist(), num_top)
    np.testing.assert_array_equal(table.ranks, wanted.ranks)
    np.testing.assert_allclose(table.logprobs, wanted.logprobs, rtol=2e-6, atol=2e-6)
    finite = np.isfinite(wanted.top_logprobs)
    np.testing.assert_array_equal(table.top_token_ids[finite], wanted.top_token_ids[finite])
    assert (table.top_token_ids[~finite] == -1).all()
    np.testing.assert_allclose(table.top_logprobs, wanted.top_logprobs, rtol=2e-6, atol=2e-6)


def test_tokens_of_a_step_are_those_of_the_sampler() -> None:
    case, choices = sample_step_case(199)
    (logits, _, last), _, _ = outcome(case)
    wanted = []
    for row, choice in zip(logits, choices, strict=True):
        if choice is GREEDY:
            wanted.append(int(np.argmax(row)))
            continue
        temperature, top_k, top_p, seed, offset, *narrowing = choice
        u = plain.uniform(seed, offset)
        rounded = [float(np.float32(value)) for value in narrowing]
        wanted.append(
            _sample_row(
                row, float(np.float32(temperature)), top_k, float(np.float32(top_p)), u, *rounded
            )
        )
    assert last.tolist() == [*wanted, 77, 77, 77]
    assert wanted[5] == wanted[6] == -1


@pytest.mark.parametrize("vocab", [5, 97, 1000])
def test_drafts_stand_as_the_engine_says(vocab: int) -> None:
    generator = np.random.default_rng(vocab)
    num_rows = num_other = num_changed = 0
    for trial in range(30):
        spans = random_spans(generator, vocab, 12)
        window, most = 1 + trial % 3, 2 + trial % 9
        loose = WindowDrafts(window, most, loose_drafts(spans.rows, spans.choices))
        wanted = verified(spans.drawn.tolist(), spans.logits, loose, spans.choices)
        got = outcome(spans.case(window, most))[0][-1]
        assert got[-2:].tolist() == [77, 78]
        num_rows += len(wanted)
        num_other += int((got[:-2] != wanted).sum())
        num_changed += int((spans.drawn != wanted).sum())
    assert num_changed > num_rows / 20
    # A sum that reaches top_p exactly may fall either way with another rounding.
    assert num_other <= num_rows / 500
