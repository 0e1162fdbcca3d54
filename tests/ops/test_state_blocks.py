"""Blocks with a state per request: plain Paddle and C++ against a twin in NumPy, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from predict.device import library
from predict.nn.blocks import BlockStep, Linear, NormWeights
from predict.nn.inputs import StepInputs, empty_example, fields_with, max_lens_of, to_tensors
from predict.nn.kinds.delta_net import DeltaNetBlock
from predict.nn.kinds.short_conv import ShortConvBlock
from predict.ops import compiled as compiled_ops
from predict.ops import plain

OPERATOR = "delta_net"
Array = npt.NDArray[Any]
HIDDEN = 24
GDN = DeltaNetBlock(2, 4, 6, 20)
KDA = {"decay": "channel", "gate": "sigmoid"}
FORMS: dict[str, DeltaNetBlock] = {
    "as many key heads": DeltaNetBlock(3, 3, 8, 16, conv_width=2),
    "fewer key heads": GDN,
    "wide heads": DeltaNetBlock(1, 2, 16, 80),
    "tiled heads": replace(GDN, tiled_heads=True),
    "Kimi": DeltaNetBlock(2, 2, 6, 8, **KDA),  # type: ignore[arg-type]
    "Kimi, bounded": DeltaNetBlock(2, 2, 6, 8, **KDA, decay_bound=-5.0),  # type: ignore[arg-type]
    "strong writes": replace(GDN, write_scale=2.0),
    "Mamba 2": replace(
        GDN,
        delta=False,
        write="step",
        unit_keys=False,
        skip=True,
        conv_bias=True,
        norm_groups=2,
        gate_first=True,
    ),
}
CONVS = {"three taps": ShortConvBlock(20), "biases": ShortConvBlock(7, 4, conv_bias=True)}


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softplus(x: Array) -> Array:
    return np.logaddexp(0, x)


def convolved(x: Array, taps: Array, bias: Array | None) -> Array:
    padded = np.concatenate([np.zeros((taps.shape[1] - 1, x.shape[1])), x])
    made = np.stack([(padded[t : t + taps.shape[1]] * taps.T).sum(axis=0) for t in range(len(x))])
    return made if bias is None else made + bias


def delta_net(block: DeltaNetBlock, x: Array, weights: dict[str, Array]) -> Array:
    """A request's tokens [n, H] through a block's products and state, in float64."""
    made = x @ weights["qkvz"].T
    y, z = made[:, : block.conv_size], made[:, block.conv_size :]
    y = convolved(y, weights["conv"], weights.get("conv_bias"))
    y, ba = y * sigmoid(y), x @ weights["ba"].T
    heads, dim, width = block.num_value_heads, block.key_dim, block.value_dim
    outputs = np.zeros((len(x), heads, width))
    for head in range(heads):
        keys, group = block.num_key_heads, heads // block.num_key_heads
        at = (head % keys if block.tiled_heads else head // group) * dim
        state, count = np.zeros((dim, width)), block.decay_size // heads
        part = slice(head * count, (head + 1) * count)
        for t in range(len(x)):
            q, k = y[t, at : at + dim], y[t, block.key_size + at : block.key_size + at + dim]
            v = y[t, 2 * block.key_size + head * width :][:width]
            if block.unit_keys:
                q = q / np.sqrt((q * q).sum() + 1e-6) / np.sqrt(dim)
                k = k / np.sqrt((k * k).sum() + 1e-6)
            a = ba[t, -block.decay_size :][part] + weights["step_bias"][part]
            rate, step = np.exp(weights["decay"][head]), softplus(a)
            bound = block.decay_bound
            state = np.exp(bound * sigmoid(rate * a) if bound else -rate * step)[:, None] * state
            strength = step[0] if block.write == "step" else sigmoid(ba[t, head])
            new = v - state.T @ k if block.delta else v
            state = state + np.outer(k, block.write_scale * strength * new)
            outputs[t, head] = state.T @ q
            if block.skip:
                outputs[t, head] += weights["skip"][head] * v
    gate = sigmoid(z) if block.gate == "sigmoid" else z * sigmoid(z)
    o = outputs.reshape(len(x), -1)
    o = o * gate if block.gate_first else o
    parts = o.reshape(len(x), block.norm_groups or heads, -1)
    parts = parts / np.sqrt((parts**2).mean(axis=-1, keepdims=True) + block.out_norm.epsilon)
    factor = weights["out_norm"].reshape(-1, parts.shape[-1])
    o = (parts * factor).reshape(len(x), -1)
    return o if block.gate_first else o * gate


def short_conv(block: ShortConvBlock, x: Array, weights: dict[str, Array]) -> Array:
    b, c, values = np.split(x @ weights["bcx"].T, 3, axis=1)
    return c * convolved(b * values, weights["taps"], weights.get("taps_bias"))


def random_weights(block: Any, seed: int = 0) -> dict[str, Array]:
    generator, made = np.random.default_rng(seed), {}
    for slot in block.slots(HIDDEN):
        shape = getattr(slot, "shape", (getattr(slot, "size", 0),))
        if hasattr(slot, "part_sizes"):
            shape = (slot.out_features, slot.in_features)
        values = generator.standard_normal(shape)
        if slot.name in ("norm", "out_norm", "taps", "conv"):
            values = 1 + 0.3 * values
        elif slot.name not in ("decay", "step_bias", "skip"):
            values *= 1.5 / np.sqrt(shape[-1])
        made[slot.name] = values.astype(np.float32)
    return made


def weights_of(block: Any, arrays: dict[str, Array], ops: ModuleType, dtype: str) -> Any:
    import paddle

    def slot(name: str, values: Array) -> Any:
        tensor = paddle.to_tensor(values)
        if name in block.linears:
            packed = (ops.pack_dense(tensor, dtype),)
            return Linear("dense", packed, None, values.shape[1], values.shape[0])
        return NormWeights(tensor.astype(dtype)) if name == "norm" else tensor

    return block.weights({name: slot(name, v) for name, v in arrays.items()}, "dense", None)


def step_inputs(lengths: Sequence[int], src: Sequence[int], dst: Sequence[int]) -> StepInputs:
    count, total = len(lengths), sum(lengths)
    fields = fields_with(("state_src", "state_dst"))
    zeros = np.zeros(total, np.int32)
    inputs = empty_example(fields=fields)._replace(
        token_ids=zeros,
        positions=zeros,
        slot_mapping=zeros - 1,
        cu_seqlens_q=np.cumsum([0, *lengths], dtype=np.int32),
        context_lens=np.array(lengths, np.int32),
        block_tables=np.zeros((count, 1), np.int32),
        max_lens=max_lens_of(lengths, lengths),
        state_src=np.array(src, np.int32),
        state_dst=np.array(dst, np.int32),
    )
    import paddle

    return to_tensors(inputs, paddle.CPUPlace())


def outputs(
    ops: ModuleType,
    weights: Any,
    texts: Sequence[Array],
    cuts: Sequence[Sequence[int]],
    dtype: str = "float32",
) -> list[Array]:
    """Of each text [n, H]. cuts: tokens of each text in each step; slots change at every step."""
    import paddle

    count = len(texts)
    states = tuple(
        paddle.to_tensor(np.full((2 * count + 1, *each.shape), np.nan, np.float32))
        for each in weights.block.states
    )
    src, begins = [-1] * count, [0] * count
    made: list[list[Array]] = [[] for _ in texts]
    for step, lengths in enumerate(cuts):
        some = [i for i, length in enumerate(lengths) if length]
        dst = {i: 2 * i + step % 2 for i in some}
        parts = [texts[i][begins[i] : begins[i] + lengths[i]] for i in some]
        inputs = step_inputs([lengths[i] for i in some], [src[i] for i in some], [*dst.values()])
        hidden = paddle.to_tensor(np.concatenate(parts)).astype(dtype)
        out, _ = ops.block(hidden, weights, BlockStep(states, (), inputs))
        rows = out.astype("float32").numpy()
        for i, part in zip(
            some, np.split(rows, np.cumsum([lengths[i] for i in some])[:-1]), strict=True
        ):
            made[i].append(part)
            begins[i] += lengths[i]
            src[i] = dst[i]
    assert begins == [len(text) for text in texts]
    return [np.concatenate(parts) for parts in made]


def texts(seed: int = 1) -> list[Array]:
    generator = np.random.default_rng(seed)
    return [generator.standard_normal((n, HIDDEN)).astype(np.float32) for n in (9, 1, 14)]


WHOLE = [(9, 1, 14)]
CUTS = [(1, 1, 2), (3, 0, 1), (0, 0, 7), (5, 0, 1), (0, 0, 3)]
KINDS: dict[str, tuple[Any, Any]] = {
    **{name: (block, delta_net) for name, block in FORMS.items()},
    **{name: (block, short_conv) for name, block in CONVS.items()},
}


def wanted(name: str, arrays: dict[str, Array], text: Array) -> Array:
    block, twin = KINDS[name]
    x = text.astype(np.float64)
    normed = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + block.norm.epsilon)
    doubles = {key: value.astype(np.float64) for key, value in arrays.items()}
    return x + twin(block, normed * doubles["norm"], doubles) @ doubles["out"].T


@pytest.mark.parametrize("cuts", [WHOLE, CUTS])
@pytest.mark.parametrize("name", KINDS)
def test_plain_operators_equal_the_twin(name: str, cuts: Any) -> None:
    arrays = random_weights(KINDS[name][0])
    found = outputs(plain, weights_of(KINDS[name][0], arrays, plain, "float32"), texts(), cuts)
    for out, text in zip(found, texts(), strict=True):
        np.testing.assert_allclose(out, wanted(name, arrays, text), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_each_instruction_set_equals_the_twin_and_cuts_change_no_bit(
    name: str, candidate: str
) -> None:
    block = KINDS[name][0]
    arrays = random_weights(block)
    weights = weights_of(block, arrays, compiled_ops, "float32")
    found = outputs(compiled_ops, weights, texts(), WHOLE)
    for out, text in zip(found, texts(), strict=True):
        np.testing.assert_allclose(out, wanted(name, arrays, text), atol=2e-5, rtol=1e-4)
    cut = outputs(compiled_ops, weights, texts(), CUTS)
    assert all(map(np.array_equal, found, cut))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["fewer key heads", "Kimi", "three taps"])
def test_compiled_blocks_keep_to_the_twin_in_half_precision(
    name: str, dtype: str, compiled: library.Library
) -> None:
    block = KINDS[name][0]
    arrays = random_weights(block)
    found = outputs(
        compiled_ops, weights_of(block, arrays, compiled_ops, dtype), texts(), CUTS, dtype
    )
    for out, text in zip(found, texts(), strict=True):
        other = wanted(name, arrays, text)
        tolerance = np.abs(other).max() * (0.04 if dtype == "bfloat16" else 0.005)
        np.testing.assert_allclose(out, other, atol=tolerance, rtol=0)


@pytest.mark.parametrize("decay", [-80.0, 0.0])
@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_extreme_gates_and_equal_keys(
    decay: float, strength: float, operators: dict[str, Any]
) -> None:
    """Decays of exp(-80) and 1, nothing or all written, the same token again and again."""
    name = "fewer key heads"
    arrays, block = random_weights(FORMS[name]), FORMS[name]
    arrays["ba"][:] = 0.0
    arrays["step_bias"][:] = 100.0 if decay else -200.0
    arrays["decay"][:] = np.log(0.8)
    same = np.ones((14, HIDDEN), np.float32)
    arrays["ba"][: block.num_value_heads] = (1000.0 if strength else -1000.0) / HIDDEN
    arrays["norm"][:] = 1.0
    ops = compiled_ops if operators["inference_model"] else plain
    out = outputs(ops, weights_of(block, arrays, ops, "float32"), [same], [(14,)])[0]
    assert np.isfinite(out).all()
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(out, wanted(name, arrays, same), atol=2e-5, rtol=1e-4)


def test_long_texts_stay_finite(compiled: library.Library) -> None:
    block = DeltaNetBlock(1, 1, 8, 16)
    weights = weights_of(block, random_weights(block), compiled_ops, "float32")
    text = np.random.default_rng(2).standard_normal((32_000, HIDDEN)).astype(np.float32)
    whole = outputs(compiled_ops, weights, [text], [(32_000,)])[0]
    assert np.isfinite(whole).all()
    cut = outputs(compiled_ops, weights, [text], [(20_001,), (1,), (11_998,)])[0]
    assert np.array_equal(whole, cut)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"state_src": [9]}, r"state_src\[0\] is 9 \(allowed: -1 .. 2\)"),
        ({"state_dst": [-2]}, r"state_dst\[0\] is -2"),
        ({"state_src": [0, 0]}, "state_src"),
    ],
)
def test_slots_that_are_not_there_are_refused(
    changes: dict[str, Any], says: str, compiled: library.Library
) -> None:
    import paddle

    block = FORMS["fewer key heads"]
    weights = weights_of(block, random_weights(block), compiled_ops, "float32")
    states = tuple(paddle.zeros([3, *each.shape]) for each in block.states)
    inputs = step_inputs([2], [0], [1])
    given = {name: paddle.to_tensor(np.array(v, np.int32)) for name, v in changes.items()}
    hidden = paddle.ones([2, HIDDEN])
    with pytest.raises((ValueError, RuntimeError), match=says):
        compiled_ops.block(hidden, weights, BlockStep(states, (), inputs._replace(**given)))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_value_heads": 3},
        {"write": "step"},
        {"conv_width": 1},
        {"norm_groups": 3},
        {"decay_bound": 1.0},
    ],
)
def test_records_that_contradict_themselves_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"multiple|goes with|conv_width|norm_groups"):
        replace(GDN, **changes)
