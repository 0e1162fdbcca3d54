"""The CPU's expert block: every form and scheme against the plain twin, and what it must not do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from predict.device.library import Library
from predict.nn.blocks import Activation, Linear, Residual
from predict.nn.kinds.experts import ExpertBlock, Experts, GroupScore, Router, Scoring
from predict.ops import compiled as ops
from predict.ops import plain
from predict.schemes import Quantized
from tests.support.cpu_kernels import DTYPES, Array, normal, numpy32, tensor, threads
from tests.support.expert_blocks import FORMS, RMS, experts_of, hidden_of, twin
from tests.support.schemes import relative_error
from tests.support.tolerances import BLOCK_ROUNDINGS, assert_close

OPERATOR = "expert_block"  # whose candidates the fixture `candidate` goes through

HIDDEN = 72
SCHEMES = ("dense", "weight_only_int8", "weight_only_int4", "w4a8", "a8w8")
# Relative to the twin, which rounds after each product where the block does not, and where int8
# activations lie elsewhere: theirs are blocks of 32 values, or fall to the other side of a half.
QUANTIZED_ERROR = {"float32": 0.004, "bfloat16": 0.02}


def run(weights: Experts, hidden: Array, dtype: str = "float32") -> Array:
    return numpy32(ops.block(tensor(hidden, dtype), weights)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", list(FORMS))
def test_every_form_equals_its_plain_twin(
    compiled: Library, candidate: str, form: str, dtype: str
) -> None:
    packed, weights = experts_of(FORMS[form], HIDDEN, dtype)
    for num_rows in (1, 2, 5, 37):
        hidden = hidden_of(num_rows, HIDDEN)
        got = run(packed, hidden, dtype)
        assert_close(got, twin(weights, hidden, dtype), dtype, BLOCK_ROUNDINGS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shared", ["dense", "weight_only_int4", "a8w8"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_equals_its_plain_twin(
    compiled: Library, candidate: str, scheme: str, shared: str, dtype: str
) -> None:
    for inner in (96, 64 + 8):
        block = replace(FORMS["qwen2_moe"], intermediate_size=inner, up_bias=True, down_bias=True)
        packed, weights = experts_of(block, 96, dtype, (scheme, shared), seed=3)
        for num_rows in (1, 3, 50):
            hidden = hidden_of(num_rows, 96)
            got, want = run(packed, hidden, dtype), twin(weights, hidden, dtype)
            assert relative_error(got, want) < QUANTIZED_ERROR[dtype]


@pytest.mark.parametrize("scheme", ["weight_only_int4", "w4a8"])
def test_groups_and_act_order_of_each_expert(
    compiled: Library, candidate: str, scheme: str
) -> None:
    rng = np.random.default_rng(5)

    def shuffled(weight: Quantized, num_inputs: int) -> Quantized:
        return replace(weight, perm=rng.permutation(num_inputs).astype(np.int32))

    block = FORMS["mixtral"]
    packed, weights = experts_of(block, 64, "float32", (scheme, "dense"), 32, changed=shuffled)
    hidden = hidden_of(23, 64)
    assert relative_error(run(packed, hidden), twin(weights, hidden)) < QUANTIZED_ERROR["float32"]


def test_a8w8_of_each_expert_has_its_scale_shift_and_smooth(
    compiled: Library, candidate: str
) -> None:
    rng = np.random.default_rng(6)

    def calibrated(weight: Quantized, num_inputs: int) -> Quantized:
        return replace(
            weight,
            act_scale=float(rng.uniform(0.02, 0.04)),
            shift=normal(rng, num_inputs) / 4,
            smooth=rng.uniform(0.5, 1.5, num_inputs).astype(np.float32),
        )

    packed, weights = experts_of(
        FORMS["mixtral"], 64, "float32", ("a8w8", "dense"), changed=calibrated
    )
    for num_rows in (1, 23):
        hidden = hidden_of(num_rows, 64)
        assert relative_error(run(packed, hidden), twin(weights, hidden)) < 0.01


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sixty_experts_of_inner_1408_top_6(compiled: Library, dtype: str) -> None:
    block = ExpertBlock(Router(60, 6), 1408, norm=RMS, shared_size=176, shared_gate=True)
    packed, weights = experts_of(block, 40, dtype)
    for num_rows in (1, 8, 33):
        hidden = hidden_of(num_rows, 40)
        assert_close(
            run(packed, hidden, dtype), twin(weights, hidden, dtype), dtype, BLOCK_ROUNDINGS
        )


# Blocks whose output says what the router chose: all products are 0, and expert e's bias is 1 in
# column e alone.


def telling(router: Router, weight: Array, correction: Array | None = None) -> Experts:
    """weight: of the router, [E, H]; H is at least E."""
    count, width = weight.shape
    block = ExpertBlock(
        router, 32, Activation(), None, down_bias=True, residual=Residual(input_scale=0.0)
    )
    packed, _ = experts_of(block, width, "float32")

    def silent(linear: Linear, bias: Any) -> Linear:
        return replace(linear, tensors=tuple(part * 0.0 for part in linear.tensors), bias=bias)

    return replace(
        packed,
        router=tensor(weight, "float32"),
        correction=None if correction is None else tensor(correction, "float32"),
        gate_up=silent(packed.gate_up, None),
        down=silent(packed.down, tensor(np.eye(count, width), "float32")),
    )


def wanted_weights(router: Router, logits: Array, correction: Array | None) -> Array:
    """[T, E] the weights of each row's experts, by sorting."""
    wide = logits.astype(np.float64)
    if router.scoring == "softmax":
        scores = np.exp(wide - wide.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
    else:
        scores = 1 / (1 + np.exp(-wide))
    result = np.zeros(logits.shape, np.float32)
    size = router.num_experts // router.num_groups
    for row, values in enumerate(scores):
        choice = values if correction is None else values + correction
        groups = choice.reshape(-1, size)
        ordered = np.sort(groups, axis=1)[:, ::-1]
        best = ordered[:, 0] if router.group_score == "max" else ordered[:, :2].sum(axis=1)
        kept = np.argsort(-best, kind="stable")[: router.top_groups]
        allowed = np.full_like(groups, -np.inf)
        allowed[kept] = groups[kept]
        chosen = np.argsort(-allowed.reshape(-1), kind="stable")[: router.top_k]
        weights = values[chosen] / (values[chosen].sum() if router.renormalize else 1.0)
        result[row, chosen] = weights * router.scale
    return result


def routers() -> Iterator[Any]:
    for scoring in ("softmax", "sigmoid"):
        for renormalize in (False, True):
            for with_correction in (False, True):
                for groups in ((1, 1, "max"), (6, 3, "max"), (6, 2, "top_two"), (3, 1, "top_two")):
                    yield scoring, renormalize, with_correction, groups


@pytest.mark.parametrize(("scoring", "renormalize", "with_correction", "groups"), list(routers()))
def test_a_router_chooses_and_weighs(
    compiled: Library,
    scoring: Scoring,
    renormalize: bool,
    with_correction: bool,
    groups: tuple[int, int, GroupScore],
) -> None:
    router = Router(
        24, 5, scoring, renormalize, 1.5, correction=with_correction, num_groups=groups[0],
        top_groups=groups[1], group_score=groups[2],
    )  # fmt: skip
    rng = np.random.default_rng(7)
    weight, hidden = normal(rng, 24, 30) * 0.3, normal(rng, 50, 30)
    correction = normal(rng, 24) * 0.1 if with_correction else None
    got = run(telling(router, weight, correction), hidden)[:, :24]
    assert_close(got, wanted_weights(router, hidden @ weight.T, correction), "float32")


@pytest.mark.parametrize("jitter", [0.01, 0.2, 2.0])
def test_the_sparse_mixer_weighs_a_choice_among_the_near_ones_that_are_left(
    compiled: Library, jitter: float
) -> None:
    router = Router(24, 3, "sparse_mixer", scale=1.5, jitter=jitter)
    rng = np.random.default_rng(7)
    weight, hidden = normal(rng, 24, 30) * 0.3, normal(rng, 50, 30)
    wanted = np.zeros((50, 24))
    for row, logits in enumerate((hidden @ weight.T).astype(np.float64)):
        left = logits.copy()
        for best in np.argsort(-logits)[:3]:
            most = logits[best]
            near = (most - logits) / np.maximum(np.abs(logits), most) <= 2 * jitter
            wanted[row, best] = 1.5 / np.exp(np.where(near, left, -np.inf) - most).sum()
            left[best] = -np.inf
    experts = telling(router, weight)
    got = run(experts, hidden)[:, :24]
    assert_close(got, wanted, "float32")
    ids, shares = plain.route(tensor(hidden, "float32"), experts)
    same = np.zeros((50, 24), np.float32)
    np.put_along_axis(same, ids.numpy(), shares.numpy(), axis=1)
    assert_close(same, wanted, "float32")


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("num_experts", [2, 7, 24, 512])
def test_of_equal_scores_the_lower_expert_is_chosen(
    compiled: Library, candidate: str, num_experts: int, scoring: Scoring
) -> None:
    """Logits are whole numbers of few kinds, the same in every order of summation."""
    rng = np.random.default_rng(8)
    router = Router(num_experts, min(6, num_experts), scoring)
    weight = rng.integers(-1, 2, (num_experts, 520)).astype(np.float32)
    weight[:, 3:] = 0
    hidden = rng.integers(-1, 2, (30, 520)).astype(np.float32)
    got = run(telling(router, weight), hidden)[:, :num_experts]
    want = wanted_weights(router, hidden @ weight.T, None)
    np.testing.assert_array_equal(got != 0, want != 0)
    assert_close(got, want, "float32")


def test_of_equal_groups_the_lower_is_chosen(compiled: Library) -> None:
    router = Router(12, 3, num_groups=4, top_groups=2)
    weight = np.zeros((12, 16), np.float32)
    weight[[4, 7], 0] = 1.0  # in groups 1 and 2
    hidden = np.eye(2, 16, dtype=np.float32)
    got = run(telling(router, weight), hidden)[:, :12]
    np.testing.assert_array_equal(got[0].nonzero()[0], [3, 4, 7])  # 3: the lower one of equals
    np.testing.assert_array_equal(got[1].nonzero()[0], [0, 1, 2])


@pytest.mark.parametrize("logit", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_row_with_a_nan_reaches_itself_alone(
    compiled: Library, candidate: str, scheme: str, dtype: str, logit: float
) -> None:
    packed, _ = experts_of(FORMS["qwen2_moe"], HIDDEN, dtype, (scheme, scheme))
    hidden = hidden_of(9, HIDDEN)
    sound = run(packed, hidden, dtype)
    hidden[4, 3] = logit
    got = run(packed, hidden, dtype)
    assert np.isnan(got[4]).all()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    np.testing.assert_array_equal(got[others], sound[others])


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_that_no_row_chose_are_not_read(
    compiled: Library, candidate: str, dtype: str
) -> None:
    import paddle

    block = ExpertBlock(Router(6, 2), 64, norm=RMS)
    packed, _ = experts_of(block, HIDDEN, dtype)
    router = numpy32(packed.router)
    router[[0, 2, 5]] = 0.0
    hidden = np.abs(hidden_of(11, HIDDEN))
    router[[1, 3, 4]] = np.abs(router[[1, 3, 4]])  # ahead of the others for rows above 0
    packed = replace(packed, router=tensor(router, dtype))
    sound = run(packed, hidden, dtype)

    def spoiled(linear: Linear) -> Linear:
        parts = []
        for part in linear.tensors:
            bad = paddle.full_like(part[:1], float("nan"))
            rows = [part[i : i + 1] if i in (1, 3, 4) else bad for i in range(6)]
            parts.append(paddle.concat(rows))
        return replace(linear, tensors=tuple(parts))

    spoiled_weights = replace(packed, gate_up=spoiled(packed.gate_up), down=spoiled(packed.down))
    np.testing.assert_array_equal(run(spoiled_weights, hidden, dtype), sound)
    assert np.isfinite(sound).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_rows_may_go_to_one_expert(
    compiled: Library, candidate: str, scheme: str, dtype: str
) -> None:
    """The block is then that expert's MLP."""
    block = ExpertBlock(Router(5, 1, renormalize=True), 64, norm=RMS)
    packed, weights = experts_of(block, 96, dtype, (scheme, scheme))
    router = np.zeros((5, 96), np.float32)
    router[3] = 1.0
    packed, weights = (replace(w, router=tensor(router, dtype)) for w in (packed, weights))
    for num_rows in (1, 4, 131):
        hidden = np.abs(hidden_of(num_rows, 96))
        got, want = run(packed, hidden, dtype), twin(weights, hidden, dtype)
        assert relative_error(got, want) < QUANTIZED_ERROR[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("inner", "scheme"),
    [(64, "weight_only_mxfp4"), *((inner, scheme) for inner in (64, 40) for scheme in SCHEMES)],
)
def test_a_row_does_not_depend_on_the_batch_or_the_threads(
    compiled: Library, candidate: str, inner: int, scheme: str, dtype: str
) -> None:
    block = replace(FORMS["qwen2_moe"], intermediate_size=inner)
    packed, _ = experts_of(block, 320, dtype, (scheme, scheme))
    hidden = hidden_of(150, 320)
    together = run(packed, hidden, dtype)
    for first, count in ((0, 1), (1, 2), (3, 6), (9, 7), (16, 12), (28, 20), (48, 102)):
        for num_threads in (1, 3):
            with threads(compiled, num_threads):
                part = run(packed, hidden[first : first + count], dtype)
            np.testing.assert_array_equal(part, together[first : first + count])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_long_prompt_equals_its_parts(compiled: Library, dtype: str) -> None:
    """So many rows come in several pieces, and the products of each in several stripes."""
    block = ExpertBlock(Router(16, 8), 256, norm=RMS, shared_size=64)
    packed, _ = experts_of(block, 128, dtype)
    hidden = hidden_of(5000, 128)
    whole = run(packed, hidden, dtype)
    parts = [run(packed, hidden[begin : begin + 1000], dtype) for begin in range(0, 5000, 1000)]
    np.testing.assert_array_equal(whole, np.concatenate(parts))


def test_rows_of_one_expert_may_be_more_than_stay_in_the_cache(compiled: Library) -> None:
    block = ExpertBlock(Router(2, 1), 32, norm=RMS)
    packed, _ = experts_of(block, 2048, "float32")
    router = np.zeros((2, 2048), np.float32)
    router[1] = 1.0
    packed = replace(packed, router=tensor(router, "float32"))
    hidden = np.abs(hidden_of(1100, 2048))
    whole = run(packed, hidden)
    parts = [run(packed, hidden[begin : begin + 550]) for begin in (0, 550)]
    np.testing.assert_array_equal(whole, np.concatenate(parts))


def test_no_rows_are_no_rows(compiled: Library) -> None:
    packed, _ = experts_of(FORMS["mixtral"], HIDDEN, "float32")
    assert run(packed, np.zeros((0, HIDDEN), np.float32)).shape == (0, HIDDEN)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("router", lambda w: w[:7], r"router has shape \[7, 72\].*\[8, 72\]"),
        ("gate_up", lambda w: w[:7], r"gate_up is \[7, .*\] .expected: \[8, \.\.\.\], one for e"),
        (
            "gate_up",
            lambda w: w[:, :5],
            r"gate_up: packed dense weight has shape \[5, 72, 32\], ex",
        ),
        (
            "down",
            lambda w: w[:, :, :90],
            r"down: packed dense weight has shape .*\[3, 96, 32\] for",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(
    compiled: Library, name: str, change: Any, said: str
) -> None:
    packed, _ = experts_of(FORMS["mixtral"], HIDDEN, "float32")
    value = getattr(packed, name)
    changes: dict[str, Any] = {}
    if isinstance(value, Linear):
        changes[name] = replace(value, tensors=tuple(map(change, value.tensors)))
    else:
        changes[name] = change(value)
    with pytest.raises(ValueError, match=said):
        run(replace(packed, **changes), hidden_of(2, HIDDEN))
