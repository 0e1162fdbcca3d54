"""Expert blocks with random weights on the GPU, as they are and as a scheme's codes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from predict.device import devices
from predict.device.place import put_row
from predict.nn.blocks import Linear
from predict.nn.decoder import map_tensors
from predict.nn.kinds.experts import ExpertBlock, Experts
from predict.ops import compiled as ops
from predict.schemes import scheme_of
from tests.support.gpu_operands import Operands


def weights_of(operands: Operands, block: ExpertBlock, hidden: int) -> Experts:
    return Experts(block, **operands.weights(block, hidden))


def on_gpu(operands: Operands, weights: Experts) -> Experts:
    """As the kernels take them: a router's terms stay float32."""

    def placed(path: str, tensor: Any) -> Any:
        stays = path in ("router_bias", "correction")
        tensor = tensor if stays else tensor.astype(operands.dtype)
        return tensor._copy_to(operands.gpu.place(), True)

    return map_tensors(weights, placed)


def coded(
    operands: Operands, dense: Experts, scheme: str, group_size: int = -1
) -> tuple[Experts, Experts]:
    """The experts' matrices as codes: the plain block, and the GPU's. A shared MLP stays dense."""
    import paddle

    module, dtype = scheme_of(scheme), operands.dtype

    def linear(plain: Linear, compiled: Any, on: devices.Device | None) -> Linear:
        experts = [module.quantize(one, group_size) for one in plain.tensors[0].numpy()]
        where = None if on is None else on.place()
        parts = [module.tensors(one, dtype, compiled, where) for one in experts]
        stacked = tuple(paddle.empty([len(parts), *one.shape], one.dtype) for one in parts[0])
        for index, tensors in enumerate(parts):
            for whole, part in zip(stacked, tensors, strict=True):
                put_row(whole, index, part, on)
        return replace(plain, scheme=scheme, tensors=stacked)

    def block(of: Experts, compiled: Any, on: devices.Device | None) -> Experts:
        gate_up, down = (linear(one, compiled, on) for one in (dense.gate_up, dense.down))
        return replace(of, gate_up=gate_up, down=down)

    with operands.on_cpu():
        weights = block(dense, None, None)
    return weights, block(on_gpu(operands, dense), ops, operands.gpu)
