"""What a runner is, the network's two forms (dynamic, exported), and the CPU's runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from predict.engine.beams import Candidates
from predict.engine.sampler import Row, Sampler
from predict.kv_formats import KvFormat
from predict.nn.decoder import Decoder, forward
from predict.nn.inputs import ForwardInputs, LayerCache, to_tensors

if TYPE_CHECKING:
    from paddle import Tensor


class Tokens(Protocol):
    """The tokens of a step that may still run."""

    def take(self) -> list[int | Candidates]:
        """Waits for them; -1 for a row that nothing could be drawn from. Called once.

        A beam's row has candidates, none where nothing could be found.
        """
        ...


class Runner(Protocol):
    """Runs steps over its own caches.

    num_ahead: steps that may be launched before the oldest one's tokens are taken; their inputs
    then hold placeholders (see Scheduler.advance). penalizes_drafts: whether rows behind drafts may
    have penalties by earlier tokens.
    """

    num_ahead: int
    penalizes_drafts: bool

    def launch(self, inputs: ForwardInputs, rows: Sequence[Row], sampler: Sampler) -> Tokens:
        """Starts a step of NumPy inputs; `rows` are those of its logits."""
        ...

    def execute(self, inputs: ForwardInputs) -> Tensor:
        """float32 logits [L, vocab_size] of NumPy inputs; writes the step's keys and values."""
        ...

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Copies cache blocks before the next step: (from, to), no block both."""
        ...


class KnownTokens:
    """Tokens of a step that has ended."""

    def __init__(self, token_ids: list[int | Candidates]):
        self.token_ids = token_ids

    def take(self) -> list[int | Candidates]:
        """See Tokens."""
        return self.token_ids


Forward = Callable[[ForwardInputs], "Tensor"]  # inputs on the device -> logits [L, vocab_size]
BlockCopies = Sequence[tuple[int, int]]
CopyBlocks = Callable[[BlockCopies], None]


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


def block_copier(
    backend: ModuleType, caches: Sequence[LayerCache], kv_format: KvFormat
) -> CopyBlocks:
    """Copies blocks of all layers, scales per token included, in one call of the backend."""
    tensors = [tensor for cache in caches for tensor in kv_format.paged(cache)]
    return lambda copies: backend.copy_blocks(tensors, copies)


class HostRunner:
    """Runs steps on the CPU: each is over when `launch` returns. See Runner."""

    num_ahead = 0
    penalizes_drafts = True

    def __init__(self, forward: Forward, copy_blocks: CopyBlocks):
        self.forward = forward
        self.copy_blocks = copy_blocks

    def execute(self, inputs: ForwardInputs) -> Tensor:
        """See Runner."""
        import paddle

        with paddle.no_grad():
            return self.forward(to_tensors(inputs, paddle.CPUPlace()))

    def launch(self, inputs: ForwardInputs, rows: Sequence[Row], sampler: Sampler) -> Tokens:
        """See Runner."""
        logits = self.execute(inputs)
        return KnownTokens(sampler.sample(logits, rows) if rows else [])
