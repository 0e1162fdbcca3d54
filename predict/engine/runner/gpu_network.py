"""The network on a GPU: what is queued of it, in graphs or by itself."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from predict.engine.runner.buffers import FieldLayout, GraphShape, StepBuffer
from predict.engine.runner.networks import Forward
from predict.nn.decoder import StepOutputs
from predict.nn.inputs import StepInputs, max_lens_of
from predict.ops import compiled as ops
from predict.ops.composed import whole

if TYPE_CHECKING:
    from paddle import Tensor


class GpuNetwork:
    """Queues a network whose inputs may be placeholders of `last_tokens`, the previous step's."""

    def __init__(
        self,
        forward: Forward,
        layout: FieldLayout,
        last_tokens: Tensor,
        followed: Tensor,
        block_size: int,
        always_adapted: bool,
        takes_all: bool = False,
    ):
        """followed: tokens of the runner whose steps it follows, which may be its own.

        always_adapted: steps without adapters run like those with adapters, with the same bits.
        takes_all: of a program, which takes the fields of pictures in steps without any.
        """
        import paddle

        self.forward = forward
        self.layout = layout
        self._last_tokens = last_tokens
        self._followed = followed
        self._block_size = block_size
        self._always_adapted, self._takes_all = always_adapted, takes_all
        # Operators read them when they are called, so that one tensor serves all steps.
        self._max_lens = paddle.to_tensor(max_lens_of([1], [1]), place=paddle.CPUPlace())
        lens = (ctypes.c_int32 * len(self._max_lens)).from_address(self._max_lens.data_ptr())
        self._max_lens_array = np.ctypeslib.as_array(lens)

    def reads_adapters(self, inputs: StepInputs) -> bool:
        """Whether the network reads adapters in a step of NumPy inputs."""
        ids: Any = inputs.adapter_ids
        return ids is not None and (self._always_adapted or bool((ids >= 0).any()))

    def queue(
        self, buffer: StepBuffer, max_lens: npt.NDArray[np.int32], shape: GraphShape
    ) -> StepOutputs:
        """Queues a step whose inputs are in the buffer's tensors."""
        self._max_lens_array[:] = max_lens
        inputs = self.layout.inputs(buffer, self._max_lens)
        if not shape.adapted:
            inputs = inputs._replace(adapter_ids=None, adapter_pages=None)
        if not (shape.pictured or self._takes_all):
            inputs = inputs._replace(image_rows=None, image_places=None)
        if shape.follows:
            choices, _, plan = buffer.tensors[self.layout.num_fields :]
            ops.follow_drafts(inputs, choices, plan, self._followed, self._block_size)
        ops.resolve_tokens(inputs.token_ids, self._last_tokens)
        outputs = self.forward(inputs, int(max_lens[4]), shape.taps)
        return outputs if shape.apart else whole(ops, outputs)
