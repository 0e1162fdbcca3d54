"""The network's two forms (dynamic, exported), and what runs them step by step on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from predict.engine.step import Choices, CopyBlocks, Network, StepTokens
from predict.errors import UserError
from predict.nn.blocks import LowRankPages
from predict.nn.cache_formats import KvFormat
from predict.nn.decoder import Decoder, StepOutputs, check_taps, forward
from predict.nn.inputs import (
    Field,
    HostTensors,
    LayerCache,
    StepInputs,
    fields_with,
    to_tensors,
)

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.engine.runner.host_chooser import HostChooser


class Forward(Protocol):
    """A network over its caches, as one call."""

    def __call__(self, inputs: StepInputs, rows: int, taps: Sequence[str] = ()) -> StepOutputs:
        """Outputs of inputs on the device. rows: the RowKind of these."""


class DynamicForward:
    """Calls the decoder operator by operator, over caches of its own. See Forward."""

    def __init__(
        self,
        backend: ModuleType,
        decoder: Decoder,
        caches: Sequence[LayerCache],
    ):
        # Of one of several ranks the logits are its own tokens'. See StepOutputs.share.
        self.share = decoder.head.share
        if self.share is not None:
            decoder = replace(decoder, head=replace(decoder.head, share=None))
        self.backend, self.decoder, self.caches = backend, decoder, caches
        self._bound = backend.BoundLayers(decoder.layers, caches, decoder.ropes)

    def rebind(self) -> None:
        """To be called when weights or caches have other memory."""
        self._bound.forget()

    def __call__(self, inputs: StepInputs, rows: int, taps: Sequence[str] = ()) -> StepOutputs:
        if taps:
            check_taps(taps, len(self.decoder.layers))
        outputs, _ = forward(
            *(self.backend, self.decoder, inputs, self.caches, None, self._bound, rows, taps)
        )
        return outputs if self.share is None else outputs._replace(share=self.share)


def static_forward(
    program: Any,
    caches: Sequence[LayerCache],
    pages: Sequence[LowRankPages] = (),
    taps: Sequence[str] = (),
    pictures: Sequence[Tensor] = (),
) -> Forward:
    """Runs a program that `predict.loading.program.load_program` loaded.

    pages: of adapters, where the program takes some. taps: the hidden states that it gives.
    pictures: see `picture_tensors` there.
    """
    tensors = [tensor for cache in caches for tensor in cache]
    tensors += [tensor for each in pages for tensor in (each.a, each.b)]
    tensors += pictures
    given = tuple(taps)

    def run(inputs: StepInputs, rows: int, taps: Sequence[str] = ()) -> StepOutputs:
        if not set(taps) <= set(given):
            has = f"those of {', '.join(given)} alone" if given else "none"
            raise UserError(
                f"hidden states of {', '.join(taps)} are wanted, and the exported program gives "
                f"{has}; export it with --task embed, or run the checkpoint it was made from, with "
                "mode dynamic"
            )
        logits, *others = program.run([*inputs.given, *tensors])
        hidden = dict(zip(given, others, strict=False))
        return StepOutputs(logits, {tap: hidden[tap] for tap in taps})

    return run


@dataclass(frozen=True)
class Within:
    """Calls `forward` in a new context each time. See Forward."""

    context: Callable[[], AbstractContextManager[None]]
    forward: Forward

    def __call__(self, inputs: StepInputs, rows: int, taps: Sequence[str] = ()) -> StepOutputs:
        with self.context():
            return self.forward(inputs, rows, taps)


def block_copier(
    backend: ModuleType, caches: Sequence[LayerCache], kv_format: KvFormat
) -> CopyBlocks:
    """Copies blocks of all layers, scales per token included, in one call of the backend."""
    tensors = [tensor for cache in caches for tensor in kv_format.paged(cache)]
    return lambda copies: backend.copy_blocks(tensors, copies)


class HostNetwork:
    """Runs a network operator by operator. See Network."""

    def __init__(
        self, forward: Forward, place: Any = None, fields: Sequence[Field] = fields_with()
    ):
        """place: where the network is; None: on the CPU. fields: that it reads."""
        self.forward = forward
        self._placed = (
            HostTensors(fields).filled if place is None else partial(to_tensors, place=place)
        )

    def run(self, inputs: StepInputs, taps: Sequence[str] = ()) -> StepOutputs:
        import paddle

        with paddle.no_grad():
            return self.forward(self._placed(inputs), inputs.row_kind, taps)


class HostRunner:
    """Runs steps one by one: each is over when `launch` returns. See Runner."""

    num_ahead = 0
    num_recorded = 0

    def __init__(self, network: Network, chooser: HostChooser, copy_blocks: CopyBlocks):
        self.network, self.chooser, self.copy_blocks = network, chooser, copy_blocks

    def run(self, inputs: StepInputs, taps: Sequence[str] = ()) -> StepOutputs:
        return self.chooser.whole(self.network.run(inputs, taps))

    def launch(self, inputs: StepInputs, choices: Choices) -> StepTokens:
        outputs = self.network.run(inputs, choices.taps)
        tokens = self.chooser.choose(outputs, choices)
        tokens.hidden = outputs.hidden
        return tokens
