"""What a runner is, the network's two forms (dynamic, exported), and the CPU's runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from predict.engine.sampler import Row, Sampler
from predict.nn.decoder import Decoder, forward
from predict.nn.inputs import ForwardInputs, LayerCache, to_tensors

if TYPE_CHECKING:
    from paddle import Tensor


class Tokens(Protocol):
    """The tokens of a step that may still run."""

    def take(self) -> list[int]:
        """Waits for them; -1 for a row that nothing could be drawn from. Called once."""
        ...


class Runner(Protocol):
    """Runs steps over its own caches.

    num_ahead: steps that may be launched before the oldest one's tokens are taken; their inputs
    then hold placeholders (see Scheduler.advance).
    """

    num_ahead: int

    def launch(self, inputs: ForwardInputs, rows: Sequence[Row], sampler: Sampler) -> Tokens:
        """Starts a step of NumPy inputs; `rows` are those of its logits."""
        ...

    def execute(self, inputs: ForwardInputs) -> Tensor:
        """float32 logits [L, vocab_size] of NumPy inputs; writes the step's keys and values."""
        ...


class KnownTokens:
    """Tokens of a step that has ended."""

    def __init__(self, token_ids: list[int]):
        self.token_ids = token_ids

    def take(self) -> list[int]:
        """See Tokens."""
        return self.token_ids


Forward = Callable[[ForwardInputs], "Tensor"]  # inputs on the device -> logits [L, vocab_size]


def dynamic_forward(backend: ModuleType, decoder: Decoder, caches: Sequence[LayerCache]) -> Forward:
    """Calls the decoder operator by operator."""
    return lambda inputs: forward(backend, decoder, inputs, caches)[0]


def static_forward(program: Any, caches: Sequence[LayerCache]) -> Forward:
    """Runs a program that `predict.engine.program.load_program` loaded."""
    tensors = [tensor for cache in caches for tensor in cache]

    def run(inputs: ForwardInputs) -> Tensor:
        logits: Tensor = program.run([*inputs, *tensors])[0]
        return logits

    return run


class HostRunner:
    """Runs steps on the CPU: each is over when `launch` returns. See Runner."""

    num_ahead = 0

    def __init__(self, forward: Forward):
        self.forward = forward

    def execute(self, inputs: ForwardInputs) -> Tensor:
        """See Runner."""
        import paddle

        with paddle.no_grad():
            return self.forward(to_tensors(inputs, paddle.CPUPlace()))

    def launch(self, inputs: ForwardInputs, rows: Sequence[Row], sampler: Sampler) -> Tokens:
        """See Runner."""
        logits = self.execute(inputs)
        return KnownTokens(sampler.sample(logits, rows) if rows else [])
