"""The runner's interface, the network's two forms (dynamic, exported), and the CPU's runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from predict.engine.beams import Candidates
from predict.engine.choices import Row
from predict.engine.logprobs import LogprobTable, measure
from predict.engine.request_state import num_wanted
from predict.engine.sampler import Sampler
from predict.nn.cache_formats import KvFormat
from predict.nn.decoder import Decoder, LowRankPages, forward
from predict.nn.inputs import (
    Field,
    ForwardInputs,
    HostTensors,
    LayerCache,
    fields_with,
    to_tensors,
)

if TYPE_CHECKING:
    from paddle import Tensor


class Logprobs(NamedTuple):
    """Logprobs of a step's new tokens and of prompts' tokens; None where they are not wanted."""

    tokens: LogprobTable | None = None  # a row per Row of the step
    prompt: LogprobTable | None = None  # a row per target

    def copied(self) -> Logprobs:
        """A copy: the runner reuses the memory of these arrays some launches later."""
        copies = (table and LogprobTable(*(array.copy() for array in table)) for table in self)
        return Logprobs(*copies)


class PromptTargets(NamedTuple):
    """Tokens of prompts whose logprobs are wanted, one per row of logits behind the new tokens'."""

    token_ids: Sequence[int] = ()
    num_top: int = 0  # likeliest tokens to measure besides


NO_TARGETS = PromptTargets()


class Tokens(Protocol):
    """The tokens of a step that may still run."""

    def choose(self) -> None:
        """Queues what waits for the previous step's tokens: the choice under guides' masks.

        Called when those tokens are written back.
        """
        return

    def take(self) -> list[int | Candidates]:
        """Waits for the tokens; -1 for a row that nothing could be drawn from. Called once.

        A beam's row has Candidates, empty where nothing could be found.
        """

    def known(self, drafts: Sequence[int]) -> list[int]:
        """The step's drafts with tokens in place of placeholders; called after `take`.

        -1 for a draft that could not be drawn.
        """

    def logprobs(self) -> Logprobs:
        """Logprobs of the new tokens and of the prompts' tokens; called after `take`."""


class Runner(Protocol):
    """Runs steps over its own caches.

    num_ahead: steps that may be launched before the oldest one's tokens are taken; their inputs
    then hold placeholders (see Scheduler.advance).
    """

    num_ahead: int

    @property
    def num_recorded(self) -> int:
        """Graphs recorded so far; the step that records one takes longer than later ones."""

    def launch(
        self,
        inputs: ForwardInputs,
        rows: Sequence[Row],
        sampler: Sampler,
        prompt: PromptTargets = NO_TARGETS,
    ) -> Tokens:
        """Starts a step of NumPy inputs; `rows` describe its first logits, `prompt` the others."""

    def execute(self, inputs: ForwardInputs) -> Tensor:
        """float32 logits [L, vocab_size] of NumPy inputs; writes the step's keys and values."""

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Copies cache blocks before the next step: (from, to), no block both."""


class KnownTokens(Tokens):
    """Tokens, or placeholders, that the host need not wait for."""

    def __init__(self, token_ids: Sequence[int | Candidates], logprobs: Logprobs):
        self.token_ids = list(token_ids)
        self._logprobs = logprobs

    def take(self) -> list[int | Candidates]:
        return self.token_ids

    def known(self, drafts: Sequence[int]) -> list[int]:
        return list(drafts)

    def logprobs(self) -> Logprobs:
        return self._logprobs


Forward = Callable[[ForwardInputs], "Tensor"]  # inputs on the device -> logits [L, vocab_size]
BlockCopies = Sequence[tuple[int, int]]
CopyBlocks = Callable[[BlockCopies], None]


class DynamicForward:
    """Calls the decoder operator by operator, over caches of its own. See Forward."""

    def __init__(self, backend: ModuleType, decoder: Decoder, caches: Sequence[LayerCache]):
        self.backend, self.decoder, self.caches = backend, decoder, caches
        self._bound = backend.BoundLayers(decoder.layers, caches, decoder.ropes)

    def __call__(self, inputs: ForwardInputs) -> Tensor:
        return forward(self.backend, self.decoder, inputs, self.caches, bound=self._bound)[0]


def static_forward(
    program: Any, caches: Sequence[LayerCache], pages: Sequence[LowRankPages] = ()
) -> Forward:
    """Runs a program that `predict.loading.program.load_program` loaded.

    pages: of adapters, where the program takes some.
    """
    tensors = [tensor for cache in caches for tensor in cache]
    tensors += [tensor for each in pages for tensor in (each.a, each.b)]

    def run(inputs: ForwardInputs) -> Tensor:
        logits: Tensor = program.run([*inputs.given, *tensors])[0]
        return logits

    return run


@dataclass(frozen=True)
class Within:
    """Calls `forward` in a new context each time. See Forward."""

    context: Callable[[], AbstractContextManager[None]]
    forward: Forward

    def __call__(self, inputs: ForwardInputs) -> Tensor:
        with self.context():
            return self.forward(inputs)


def block_copier(
    backend: ModuleType, caches: Sequence[LayerCache], kv_format: KvFormat
) -> CopyBlocks:
    """Copies blocks of all layers, scales per token included, in one call of the backend."""
    tensors = [tensor for cache in caches for tensor in kv_format.paged(cache)]
    return lambda copies: backend.copy_blocks(tensors, copies)


class HostRunner:
    """Runs steps one by one: each is over when `launch` returns. See Runner."""

    num_ahead = 0
    num_recorded = 0

    def __init__(
        self,
        forward: Forward,
        copy_blocks: CopyBlocks,
        place: Any = None,
        fields: Sequence[Field] = fields_with(),
    ):
        """place: where the network is; None: on the CPU. fields: that it reads."""
        self.forward = forward
        self.copy_blocks = copy_blocks
        self._placed = (
            HostTensors(fields).filled if place is None else partial(to_tensors, place=place)
        )

    def execute(self, inputs: ForwardInputs) -> Tensor:
        import paddle

        with paddle.no_grad():
            return self.forward(self._placed(inputs))

    def launch(
        self,
        inputs: ForwardInputs,
        rows: Sequence[Row],
        sampler: Sampler,
        prompt: PromptTargets = NO_TARGETS,
    ) -> Tokens:
        logits = self.execute(inputs)
        num_top = num_wanted([row.request for row in rows])
        tokens: list[int | Candidates] = []
        of_tokens: LogprobTable | None = None
        of_prompt: LogprobTable | None = None
        if prompt.token_ids:
            values = logits[len(rows) : len(rows) + len(prompt.token_ids)].numpy()
            of_prompt = measure(values, prompt.token_ids, prompt.num_top)
            logits = logits[: len(rows)]
        if rows:
            raw = None if num_top is None else logits.numpy().copy()
            tokens = sampler.sample(logits, rows)
            if raw is not None and num_top is not None:
                # A request without a token ends, and beams have no logprobs: token 0 stands in.
                known = [max(token, 0) if isinstance(token, int) else 0 for token in tokens]
                of_tokens = measure(raw, known, num_top)
        return KnownTokens(tokens, Logprobs(of_tokens, of_prompt))
