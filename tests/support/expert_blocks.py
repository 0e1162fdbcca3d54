"""Expert blocks with random weights, for the compiled operators and for their plain twins."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from predict.config.schemes import scheme_info
from predict.nn.blocks import (
    Activation,
    BlockStep,
    Linear,
    LinearSlot,
    Norm,
    NormSlot,
    NormWeights,
    Residual,
    TableSlot,
)
from predict.nn.decoder import map_tensors
from predict.nn.kinds.experts import ExpertBlock, Experts, Router
from predict.ops import compiled
from predict.ops import plain as reference
from predict.schemes import Quantized, scheme_of
from tests.support.cpu_kernels import Array, normal, numpy32, rounded, tensor

RMS, LAYER = Norm(epsilon=1e-5), Norm("layer", 1e-5, bias=True)

FORMS: dict[str, ExpertBlock] = {
    "mixtral": ExpertBlock(Router(8, 2, renormalize=True), 96, norm=RMS),
    "qwen2_moe": ExpertBlock(Router(6, 3), 64, norm=RMS, shared_size=96, shared_gate=True),
    "deepseek_v2": ExpertBlock(
        Router(12, 3, num_groups=4, top_groups=2, scale=2.5), 40, norm=RMS, shared_size=80
    ),
    "deepseek_v3": ExpertBlock(
        Router(16, 4, "sigmoid", True, 2.5, correction=True, num_groups=4, top_groups=2,
               group_score="top_two"),
        32, norm=RMS, shared_size=32,
    ),
    "gpt_oss": ExpertBlock(
        Router(8, 4, renormalize=True, bias=True), 72,
        Activation(clamp=0.8, slope=1.702, up_offset=1.0), norm=RMS, up_bias=True, down_bias=True,
    ),
    "biases, one expert": ExpertBlock(
        Router(1, 1, "sigmoid"), 64, norm=LAYER, up_bias=True, down_bias=True
    ),
    "no gate": ExpertBlock(Router(5, 2), 64, Activation("relu_squared", False), shared_size=40),
    "no gate, odd": ExpertBlock(Router(5, 5), 33, Activation("gelu", False), norm=None),
    "norms around": ExpertBlock(Router(4, 2), 96, norm=RMS, post_norm=RMS),
    "a sum normed": ExpertBlock(
        Router(4, 2), 96, norm=None, post_norm=LAYER, post_norm_of="sum",
        residual=Residual(input_scale=0.5, output_scale=1.5),
    ),
    "of the normed input": ExpertBlock(
        Router(4, 2), 96, norm=LAYER, residual=Residual("normed", 2.5)
    ),
}  # fmt: skip


def experts_of(
    block: ExpertBlock,
    hidden_size: int,
    dtype: str,
    schemes: tuple[str, str] = ("dense", "dense"),
    group_size: int = -1,
    seed: int = 0,
    changed: Callable[[Quantized, int], Quantized] = lambda weight, num_inputs: weight,
) -> tuple[Experts, Experts]:
    """Weights of the block: packed, and plain.

    schemes: of the experts, of the shared MLP. changed: what becomes of each quantized matrix of an
    expert.
    """
    rng = np.random.default_rng(seed)
    packed: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    for slot in block.slots(hidden_size):
        if isinstance(slot, LinearSlot):
            scheme = schemes[slot.num_experts == 0]
            pair = _linears(slot, scheme, dtype, group_size, rng, changed)
            packed[slot.name], plain[slot.name] = pair
        elif isinstance(slot, NormSlot):
            weight = tensor(1 + normal(rng, slot.size) / 4, dtype)
            bias = tensor(normal(rng, slot.size) / 4, dtype) if slot.norm.bias else None
            packed[slot.name] = plain[slot.name] = NormWeights(weight, bias)
        elif isinstance(slot, TableSlot):
            stored = "float32" if slot.is_float32 else dtype
            # Scores that differ by more than what rounding does to them.
            values = normal(rng, *slot.shape) * (0.3 if slot.is_float32 else 2 * hidden_size**-0.5)
            packed[slot.name] = plain[slot.name] = tensor(values, stored)
    return Experts(block, **packed), Experts(block, **plain)


def twin(weights: Experts, hidden: Array, dtype: str = "float32") -> Array:
    """What plain operators make of plain weights, in float32, of values of `dtype`.

    What the norm makes is one, and the router reads that.
    """

    def is_of(part: Any) -> bool:
        return str(part.dtype).endswith(dtype)

    wide = map_tensors(weights, lambda _, part: part.astype("float32") if is_of(part) else part)
    operators: Any = SimpleNamespace(**vars(reference))
    operators.norm = lambda *given: reference.norm(*given).astype(dtype).astype("float32")
    return numpy32(wide.run(operators, tensor(rounded(hidden, dtype), "float32"), BlockStep())[0])


def _linears(
    slot: LinearSlot,
    scheme: str,
    dtype: str,
    group_size: int,
    rng: np.random.Generator,
    changed: Callable[[Quantized, int], Quantized],
) -> tuple[Linear, Linear]:
    import paddle

    num_outputs, num_inputs = sum(slot.part_sizes), slot.in_features
    module = scheme_of(scheme)
    packed, plain = [], []
    for _ in range(slot.num_experts or 1):
        values = normal(rng, num_outputs, num_inputs) * num_inputs**-0.5
        size = group_size if "int4" in scheme else -1
        weight = module.quantize(values, scheme_info(scheme).group_size or size)
        if slot.num_experts:
            weight = changed(weight, num_inputs)
        packed.append(module.tensors(weight, dtype, compiled))
        plain.append(module.tensors(weight, dtype, None))

    def stacked(each: list[tuple[Any, ...]]) -> tuple[Any, ...]:
        parts = zip(*each, strict=True)
        return tuple(paddle.stack(part) for part in parts) if slot.num_experts else each[0]

    count = (slot.num_experts,) if slot.num_experts else ()
    bias = tensor(normal(rng, *count, num_outputs) / 4, dtype) if slot.has_bias else None
    sizes = num_inputs, num_outputs, slot.num_experts
    return (
        Linear(scheme, stacked(packed), bias, *sizes),
        Linear(scheme, stacked(plain), bias, *sizes),
    )


def hidden_of(num_rows: int, hidden_size: int, seed: int = 1) -> Array:
    """Rows that blocks read."""
    return normal(np.random.default_rng(seed), num_rows, hidden_size)
