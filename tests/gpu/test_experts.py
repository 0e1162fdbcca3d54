"""Expert blocks on the GPU: the router's choice and what becomes of it, against the plain twin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from predict.device import cuda, devices, library
from predict.nn.blocks import Activation, Norm
from predict.nn.kinds.experts import ExpertBlock, Experts, Router
from predict.ops import compiled as ops
from predict.ops import plain as reference
from tests.support.gpu_experts import coded, on_gpu, weights_of
from tests.support.gpu_operands import Operands, numpy_of
from tests.support.gpu_products import DISTANCE, skip_unless_here, skip_unless_product
from tests.support.schemes import relative_error
from tests.support.tolerances import assert_close

DTYPES = ("float32", "bfloat16", "float16")
SOFTMAX = Router(8, 2, renormalize=True)
BLOCKS = {
    "mixtral": ExpertBlock(SOFTMAX, 96),
    "many": ExpertBlock(Router(60, 6), 48),
    "one expert": ExpertBlock(Router(1, 1), 64),
    "all experts": ExpertBlock(Router(5, 5), 40),
    "shared": ExpertBlock(Router(12, 4), 48, shared_size=80, shared_gate=True),
    "deepseek": ExpertBlock(
        Router(32, 4, "sigmoid", True, 2.5, correction=True, num_groups=8, top_groups=3,
               group_score="top_two"),
        48,
        shared_size=64,
    ),
    "groups": ExpertBlock(Router(24, 3, num_groups=6, top_groups=2, scale=1.5), 48),
    "gpt_oss": ExpertBlock(
        Router(16, 4, renormalize=True, bias=True),
        64,
        Activation(clamp=1.0, slope=1.702, up_offset=1.0),
        up_bias=True,
        down_bias=True,
    ),
    "layer norm": ExpertBlock(SOFTMAX, 64, norm=Norm("layer", 1e-5, bias=True)),
    "a rank's": ExpertBlock(
        Router(32, 4, renormalize=True), 48, shared_size=64, up_bias=True, down_bias=True,
        own_experts=11, first_expert=13,
    ),
    "512 experts": ExpertBlock(Router(512, 10, renormalize=True), 16),
}  # fmt: skip
HIDDEN = 128
ROWS = (1, 3, 8, 17, 150, 700)
NUM_NOISES = 16
ROUNDINGS = 6  # norm, product, function, product, sum
# Of what experts make, whose block adds the input: in 16 bits that rounds it besides.
TIES_DISTANCE = {**DISTANCE, "float32": 1e-4}
# Of what e4m3 experts make. Activations of 16 bits tip codes over that float32 does not; kernels
# that norm in another order, far fewer.
CODES_DISTANCE, CODES_KERNEL_DISTANCE = 0.05, 0.02


def clear_rows(weights: Experts, hidden: Any, dtype: str) -> np.ndarray[Any, Any]:
    """The rows whose choice rounding does not change."""
    import paddle

    if weights.block.router.top_k == weights.block.router.num_experts:
        return np.arange(len(hidden))
    x = weights.normed(reference, hidden)
    generator, tries = np.random.default_rng(5), [x, x.astype(dtype).astype("float32")]
    for _ in range(NUM_NOISES):
        values = x.numpy() * (1 + 2.0**-8 * generator.uniform(-1, 1, x.shape))
        tries.append(paddle.to_tensor(values.astype(np.float32), place=paddle.CPUPlace()))
    choices = []
    for with_noise in tries:
        choices.append(np.sort(reference.route(with_noise, weights)[0].numpy(), axis=1))
    alike = [(choice == choices[0]).all(axis=1) for choice in choices]
    return np.nonzero(np.all(alike, axis=0))[0]


def twin_of(
    operands: Operands, weights: Experts, hidden: Any
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """What the plain twin makes, and the rows whose choice rounding does not change."""
    with operands.on_cpu():
        wanted = numpy_of(reference.block(hidden.plain, weights)[0])
        return wanted, clear_rows(weights, hidden.plain, operands.dtype)


# Block, hidden size and rows of what is compared in 16 bits alone.
HALF: dict[str, tuple[ExpertBlock, int, tuple[int, ...]]] = {
    # Rows of several rounds of a warp, and of no whole ones.
    "wide": (
        ExpertBlock(Router(64, 6, renormalize=True), 776, shared_size=136, shared_gate=True),
        2312,
        (1, 2, 5, 6),
    ),
    # 60 experts of 1,408 are no multiple of a tile's columns, nor of a warp's experts.
    "odd": (ExpertBlock(Router(60, 6), 1408), 256, (1, 2, 9, 300)),
}
COMPARED = [
    *((form, dtype) for form in BLOCKS for dtype in DTYPES),
    *((form, dtype) for form in HALF for dtype in DTYPES[1:]),
]


@pytest.mark.parametrize(("form", "dtype"), COMPARED)
def test_expert_blocks_equal_the_plain_twin(gpu: devices.Device, form: str, dtype: str) -> None:
    check_form(Operands(gpu, dtype), form)


def check_form(operands: Operands, form: str) -> None:
    """In the batch-invariant mode besides, whose kernels are others."""
    block, hidden_size, row_counts = HALF.get(form) or (BLOCKS[form], HIDDEN, ROWS)
    with operands.on_cpu():
        weights = weights_of(operands, block, hidden_size)
    placed = on_gpu(operands, weights)
    for rows in row_counts:
        hidden = operands.tensor(rows, hidden_size)
        wanted, clear = twin_of(operands, weights, hidden)
        assert len(clear) >= rows // 3
        for got in both_modes(placed, hidden):
            assert_close(got[clear], wanted[clear], operands.dtype, ROUNDINGS)


def both_modes(placed: Experts, hidden: Any) -> list[np.ndarray[Any, Any]]:
    """What a GPU's block makes, and what in the batch-invariant mode."""
    got = numpy_of(ops.block(hidden.device, placed)[0])
    with library.require().batch_invariant():
        return [got, numpy_of(ops.block(hidden.device, placed)[0])]


def tied_router(kind: str) -> np.ndarray[Any, Any]:
    """Of 60 experts. Products with it are exact, and so are ties, in whatever order sums are made.

    all: every logit is 0. pairs: two experts have the same value of the row. some: all have 0, but
    four that may have more or less.
    """
    router = np.zeros((60, HIDDEN), np.float32)
    if kind == "pairs":
        router[np.arange(60), 2 * (np.arange(60) // 2)] = 1.0
    elif kind == "some":
        router[[3, 17, 40, 59], [1, 5, 9, 13]] = 2.0
    return router


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["all", "pairs", "some"])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_of_equal_scores_the_lower_expert_is_chosen(
    gpu: devices.Device, scoring: Any, kind: str, dtype: str
) -> None:
    """Five are chosen: of pairs the last one is split."""
    operands = Operands(gpu, dtype)
    block = ExpertBlock(Router(60, 5, scoring, renormalize=True), 48)
    with operands.on_cpu():
        weights = weights_of(operands, block, HIDDEN)
        weights = replace(weights, router=operands.both(tied_router(kind)).plain)
    placed = on_gpu(operands, weights)
    for rows in (1, 2, 9, 300):
        hidden = operands.tensor(rows, HIDDEN)
        made = both_modes(placed, hidden)
        wanted, clear = twin_of(operands, weights, hidden)
        with operands.on_cpu():
            normed = weights.normed(reference, hidden.plain)
            ids = np.sort(reference.route(normed, weights)[0].numpy(), axis=1)[clear]
        assert len(clear) >= rows // 3
        if kind == "all":
            assert (ids == np.arange(5)).all()
        elif kind == "pairs":
            assert (np.sum(ids % 2 == 0, axis=1) == 3).all()
        *made, twin = ((each - numpy_of(hidden.plain))[clear] for each in (*made, wanted))
        for each in made:
            assert relative_error(each, twin) < TIES_DISTANCE[dtype], rows


# Kernels of older GPUs, forced. Those of sm_75 have no bfloat16, and e4m3 is from sm_89 on.
OLDER = ("experts=sm80", "experts=sm75")


@pytest.mark.parametrize(("form", "dtype"), [each for each in COMPARED if each[0] != "wide"])
@pytest.mark.parametrize("kernels", OLDER)
def test_forced_kernels_equal_the_plain_twin(
    gpu: devices.Device, monkeypatch: pytest.MonkeyPatch, kernels: str, form: str, dtype: str
) -> None:
    monkeypatch.setenv("REGATTA_KERNEL", kernels)
    check_form(Operands(gpu, dtype), form)


def coded_experts(
    operands: Operands, inner: int, hidden_size: int, scheme: str, group_size: int = -1
) -> tuple[Experts, Experts]:
    """16 of them, of which 3 are chosen: see tests.support.gpu_experts.coded."""
    with operands.on_cpu():
        dense = weights_of(operands, ExpertBlock(Router(16, 3), inner), hidden_size)
    return coded(operands, dense, scheme, group_size)


PACKED = [("weight_only_int8", -1), ("weight_only_int4", -1), ("weight_only_int4", 64)]


def check_codes(gpu: devices.Device, scheme: str, group_size: int, dtype: str) -> None:
    """Asserts that experts in codes are near the plain twin of the same codes."""
    skip_unless_product(scheme, group_size)
    bound = CODES_DISTANCE if scheme in ("a8w8", "a8w8_fp8") else DISTANCE[dtype]
    operands = Operands(gpu, dtype)
    # Of one row of fewer columns, e4m3 codes that tip over alone may be 0.06 off.
    hidden_size, inner = (2320, 784) if scheme == "a8w8_fp8" else (256, 128)
    weights, placed = coded_experts(operands, inner, hidden_size, scheme, group_size)
    for rows in (1, 8, 100, 700):
        hidden = operands.tensor(rows, hidden_size)
        got = numpy_of(ops.block(hidden.device, placed)[0])
        wanted, clear = twin_of(operands, weights, hidden)
        assert len(clear) > rows // 3
        made = [(each - numpy_of(hidden.plain))[clear] for each in (got, wanted)]
        assert relative_error(*made) < bound, rows


# Kernels, scheme and group size.
CODED = [
    *(("", *packed) for packed in (*PACKED, ("w4a8", -1), ("w4a8", 64), ("weight_only_mxfp4", 32))),
    *((kernels, *packed) for kernels in OLDER for packed in PACKED),
    *((kernels, "a8w8", -1) for kernels in ("", *OLDER)),
    ("experts=sm89", "a8w8_fp8", -1),
]


@pytest.mark.parametrize(
    ("kernels", "scheme", "group_size", "dtype"),
    [
        (*each, dtype)
        for each in CODED
        for dtype in DTYPES[1:]
        if (each[0], dtype) != ("experts=sm75", "bfloat16") or each[1] == "a8w8"
    ],
)
def test_experts_in_codes_are_near_the_plain_twin(
    gpu: devices.Device,
    monkeypatch: pytest.MonkeyPatch,
    kernels: str,
    scheme: str,
    group_size: int,
    dtype: str,
) -> None:
    monkeypatch.setenv("REGATTA_KERNEL", kernels)
    check_codes(gpu, scheme, group_size, dtype)


@pytest.mark.parametrize("kernels", OLDER)
def test_forced_kernels_are_no_others(
    gpu: devices.Device, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    """Experts in MXFP4 are Hopper's: without its kernels there is none."""
    skip_unless_product("weight_only_mxfp4", 32)
    operands = Operands(gpu, "bfloat16")
    _, placed = coded_experts(operands, 128, 256, "weight_only_mxfp4", 32)
    hidden = operands.tensor(3, 256).device
    if devices.driver_info().gpus[gpu.index].capability == (9, 0):
        assert np.isfinite(numpy_of(ops.block(hidden, placed)[0])).all()
    monkeypatch.setenv("REGATTA_KERNEL", kernels)
    named = kernels.replace("experts=sm", "sm_")
    with pytest.raises(ValueError, match=f"no kernel for M 9 in 16 groups.* on {named} "):
        ops.block(hidden, placed)


@pytest.mark.parametrize(
    ("kernels", "scheme", "dtype"),
    [
        *(("", "dense", dtype) for dtype in DTYPES),
        *(("experts=sm80", scheme, "bfloat16") for scheme, _ in PACKED[:2]),
    ],
)
def test_rows_do_not_depend_on_the_rows_beside_them(
    gpu: devices.Device, monkeypatch: pytest.MonkeyPatch, kernels: str, scheme: str, dtype: str
) -> None:
    monkeypatch.setenv("REGATTA_KERNEL", kernels)
    operands, hidden_size = Operands(gpu, dtype), HIDDEN if scheme == "dense" else 256
    if scheme == "dense":
        with operands.on_cpu():
            weights = weights_of(operands, BLOCKS["many"], hidden_size)
        placed = on_gpu(operands, weights)
    else:
        skip_unless_product(scheme, -1)
        _, placed = coded_experts(operands, 128, hidden_size, scheme)
    values = numpy_of(operands.tensor(300, hidden_size).plain)
    with library.require().batch_invariant():
        whole = numpy_of(ops.block(operands.both(values).device, placed)[0])
        for first, end in ((0, 1), (7, 8), (7, 15), (39, 40), (100, 180), (299, 300)):
            part = ops.block(operands.both(values[first:end]).device, placed)[0]
            np.testing.assert_array_equal(numpy_of(part), whole[first:end])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("hidden_size", "inner"), [(128, 48), (2320, 784)])
def test_e4m3_experts_are_near_the_plain_twin(
    gpu: devices.Device, dtype: str, hidden_size: int, inner: int
) -> None:
    skip_unless_here("a8w8_fp8")
    operands = Operands(gpu, dtype)
    weights, placed = coded_experts(operands, inner, hidden_size, "a8w8_fp8")
    for rows in (1, 2, 3, 20):
        hidden = operands.tensor(rows, hidden_size)
        wanted, clear = twin_of(operands, weights, hidden)
        assert len(clear) > 0
        every = (*both_modes(placed, hidden), wanted)
        made = [(each - numpy_of(hidden.plain))[clear] for each in every]
        assert relative_error(made[0], made[2]) < CODES_DISTANCE
        assert relative_error(made[0], made[1]) < CODES_KERNEL_DISTANCE


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_stays_in_its_row_and_in_its_expert(gpu: devices.Device, dtype: str) -> None:
    operands = Operands(gpu, dtype)
    block = BLOCKS["mixtral"]
    with operands.on_cpu():
        weights = weights_of(operands, block, HIDDEN)
        hidden = operands.tensor(9, HIDDEN)
        chosen = reference.route(weights.normed(reference, hidden.plain), weights)[0].numpy()
    values = numpy_of(hidden.plain)
    values[4] = np.nan
    kept = [row for row in range(9) if row != 4]
    unused = next(e for e in range(8) if not (chosen[kept[:2]] == e).any())
    damaged = numpy_of(weights.down.tensors[0])
    damaged[unused] = np.nan
    with operands.on_cpu():
        import paddle

        spoilt = replace(weights, down=replace(weights.down, tensors=(paddle.to_tensor(damaged),)))
    whole = ops.block(operands.both(values[[*kept[:2], 4]]).device, on_gpu(operands, spoilt))[0]
    wanted = ops.block(operands.both(values[kept[:2]]).device, on_gpu(operands, weights))[0]
    got = numpy_of(whole)
    assert np.isfinite(got[:2]).all()
    assert np.isnan(got[2]).all()
    assert_close(got[:2], numpy_of(wanted), dtype, 1)


@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("form", ["mixtral", "deepseek"])
def test_infinite_logits_spoil_the_row_and_no_more(
    gpu: devices.Device, form: str, rows: int
) -> None:
    operands = Operands(gpu, "bfloat16")
    with operands.on_cpu():
        weights = weights_of(operands, BLOCKS[form], HIDDEN)
        router = numpy_of(weights.router)
        router[3] = 0.0
        router[3, 0] = 1e38
        weights = replace(weights, router=operands.both(router).plain)
        values = numpy_of(operands.tensor(rows, HIDDEN).plain)
    values[0, 0] = 50.0  # its logit of expert 3 is infinite; those of other rows are 0
    values[1:, 0] = 0.0
    got = numpy_of(ops.block(operands.both(values).device, on_gpu(operands, weights))[0])
    assert np.isfinite(got[1:]).all()
    softmax = BLOCKS[form].router.scoring == "softmax"  # is NaN then, a sigmoid 1
    assert np.isnan(got[0]).all() if softmax else np.isfinite(got[0]).all()


def test_graph_replay_equals_eager(gpu: devices.Device) -> None:
    operands = Operands(gpu, "bfloat16")
    with operands.on_cpu():
        weights = weights_of(operands, BLOCKS["shared"], HIDDEN)
    placed = on_gpu(operands, weights)
    first, second = (operands.tensor(6, HIDDEN).device for _ in range(2))
    wanted = [numpy_of(ops.block(hidden, placed)[0]) for hidden in (first, second)]
    given = operands.placed(numpy_of(first), "bfloat16")
    graph = cuda.GraphPool(gpu).capture(lambda: (ops.block(given, placed)[0],))
    for hidden, want in zip((first, second), wanted, strict=True):
        given.set_value(hidden)
        graph.replay()
        np.testing.assert_array_equal(numpy_of(graph.outputs[0]), want)
