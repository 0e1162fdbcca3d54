"""Operators from logits to tokens, and from step to step, on the GPU against their plain twins."""

from __future__ import annotations

import numpy as np
import pytest

from predict.device import devices, library
from predict.ops import compiled, plain
from tests.support.gpu_operands import Operands
from tests.support.step_operands import (
    Case,
    adjust_logits_case,
    follow_drafts_case,
    likeliest_case,
    log_softmax_case,
    logprobs_case,
    mask_logits_case,
    random_spans,
    resolve_tokens_case,
    sample_step_case,
)

VOCABS = (5, 199, 1024, 128_256)


def assert_alike(gpu: devices.Device, case: Case, tolerance: float = 0.0) -> None:
    """All operands are left alike, and results are; tolerance: of floats."""
    cpu = library.import_paddle().CPUPlace()
    arrays, found, floats = case.outcome(compiled, gpu.place())
    wanted_arrays, wanted, wanted_floats = case.outcome(plain, cpu)
    for got, expected in zip((*arrays, floats), (*wanted_arrays, wanted_floats), strict=True):
        if expected.dtype == np.float32:
            np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)
        else:
            np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("vocab", VOCABS)
def test_log_softmax(gpu: devices.Device, vocab: int) -> None:
    assert_alike(gpu, log_softmax_case(vocab), 2e-5)


@pytest.mark.parametrize("vocab", [*VOCABS, 32_000, 151_936])
@pytest.mark.parametrize("count", [1, 4, 48])
def test_likeliest(gpu: devices.Device, vocab: int, count: int) -> None:
    assert_alike(gpu, likeliest_case(vocab, count))


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_logprobs(gpu: devices.Device, vocab: int, num_top: int) -> None:
    assert_alike(gpu, logprobs_case(vocab, min(num_top, vocab)), 2e-5)


@pytest.mark.parametrize(("num_rows", "vocab"), [(1, 33), (5, 5120), (3, 128_256), (300, 1031)])
def test_mask_logits(gpu: devices.Device, num_rows: int, vocab: int) -> None:
    assert_alike(gpu, mask_logits_case(num_rows, vocab))


def test_resolve_tokens(gpu: devices.Device) -> None:
    assert_alike(gpu, resolve_tokens_case())


@pytest.mark.parametrize("num_seqs", [1, 2, 7, 130])
def test_follow_drafts(gpu: devices.Device, num_seqs: int) -> None:
    assert_alike(gpu, follow_drafts_case(num_seqs))


@pytest.mark.parametrize(("vocab", "first"), [*((vocab, 0) for vocab in VOCABS), (199, 2)])
def test_adjust_logits(gpu: devices.Device, vocab: int, first: int) -> None:
    assert_alike(gpu, adjust_logits_case(vocab, first)[0], 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_fold_norm(gpu: devices.Device, dtype: str) -> None:
    operands = Operands(gpu, dtype)
    weight, norm = operands.tensor(131, 72), operands.tensor(72)
    with operands.on_cpu():
        twin = weight.plain.astype(dtype)
        plain.fold_norm(twin, norm.plain.astype(dtype))
    compiled.fold_norm(weight.device, norm.device)
    got, wanted = (each.cpu().astype("float32").numpy() for each in (weight.device, twin))
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("vocab", [5, 199, 1024])
def test_sample_step(gpu: devices.Device, vocab: int) -> None:
    case, _ = sample_step_case(vocab, num_rows=400)
    got = case.outcome(compiled, gpu.place())[0][-1]
    wanted = case.outcome(plain, library.import_paddle().CPUPlace())[0][-1]
    assert got[400:].tolist() == wanted[400:].tolist() == [77, 77, 77]
    # A random number on the border between two tokens, or a sum that reaches top_p exactly, may
    # fall either way with another rounding.
    assert np.count_nonzero(got != wanted) <= 2
    assert len(np.unique(wanted)) > min(vocab, 50) / 2


@pytest.mark.parametrize("vocab", [5, 97, 1000, 32_003])
def test_verify_window(gpu: devices.Device, vocab: int) -> None:
    generator = np.random.default_rng(vocab)
    cpu = library.import_paddle().CPUPlace()
    num_rows = num_other = num_changed = 0
    for trial in range(6 if vocab > 1000 else 40):
        spans = random_spans(generator, vocab, 12)
        case = spans.case(1 + trial % 3, 2 + trial % 9)
        got, wanted = (
            case.outcome(ops, place)[0][-1]
            for ops, place in ((compiled, gpu.place()), (plain, cpu))
        )
        assert got[-2:].tolist() == [77, 78]
        num_rows += len(spans.rows)
        num_other += int((got != wanted).sum())
        num_changed += int((spans.drawn != wanted[:-2]).sum())
    assert num_changed > num_rows / 20
    assert num_other <= num_rows / 500
