"""Executes one step of the network: as a dynamic graph, or as an exported program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from predict.engine.program import load_program
from predict.nn.decoder import Decoder, forward
from predict.nn.inputs import ForwardInputs, LayerCache, to_tensors

if TYPE_CHECKING:
    from paddle import Tensor


class Runner(Protocol):
    """Runs steps over its own caches."""

    def execute(self, inputs: ForwardInputs) -> Tensor:
        """float32 logits [L, vocab_size] of NumPy inputs; writes the step's keys and values."""
        ...


class DynamicRunner:
    """Calls the decoder operator by operator."""

    def __init__(
        self,
        backend: ModuleType,
        decoder: Decoder,
        caches: Sequence[LayerCache],
        place: Any,
    ):
        self.backend = backend
        self.decoder = decoder
        self.caches = caches
        self.place = place

    def execute(self, inputs: ForwardInputs) -> Tensor:
        """See Runner."""
        import paddle

        with paddle.no_grad():
            tensors = to_tensors(inputs, self.place)
            logits, _ = forward(self.backend, self.decoder, tensors, self.caches)
        return logits


class StaticRunner:
    """Runs a program that `predict.engine.program.save_program` wrote, through paddle.inference."""

    def __init__(
        self,
        directory: Path,
        prefix: str,
        caches: Sequence[LayerCache],
        place: Any,
    ):
        self.predictor = load_program(directory, prefix)
        self.caches = [tensor for cache in caches for tensor in cache]
        self.place = place

    def execute(self, inputs: ForwardInputs) -> Tensor:
        """See Runner."""
        logits: Tensor = self.predictor.run([*to_tensors(inputs, self.place), *self.caches])[0]
        return logits
