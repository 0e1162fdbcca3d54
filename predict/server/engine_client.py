"""The front's side of the engine: prompts go in, pieces of answers come out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from predict.engine.samples import StreamOutput
from predict.request import RequestOutput, SamplingParams
from predict.server.wire import AnswerMetrics, ModelInfo, Stats

__all__ = ["Answer", "AnswerMetrics", "Engine", "EngineDied", "ModelInfo", "Stats"]


class EngineDied(RuntimeError):  # noqa: N818  # a state, as the wait for it is named
    """The engine's process has ended: no request can be answered any more."""


class Answer(Protocol):
    """The answers to one prompt.

    Iterating gives all pieces that have come since the last time; it waits where there are none.
    Whoever stops early calls `abort`. It raises UserError, first of all, where the engine refuses
    the request (400: only the engine knows some limits), and EngineDied. What fails later is a
    piece with finish_reason "error" and `error`; the other answers to the prompt go on.
    """

    request_id: int
    # Known when the iteration has ended; None after an abort of a request that never came to run.
    metrics: AnswerMetrics | None
    # Everything, of an answer that is not streamed, when the iteration has ended.
    output: RequestOutput | None

    def __aiter__(self) -> AsyncIterator[list[StreamOutput]]: ...

    def abort(self) -> None:
        """Ends it, when it has not ended; returns at once, and may be called at any time.

        The iteration then ends after pieces with finish_reason "abort", which come from the engine.
        """


class Engine(Protocol):
    """What answers prompts."""

    @property
    def info(self) -> ModelInfo:
        """What was loaded. Raises RuntimeError before it is."""

    @property
    def is_ready(self) -> bool:
        """Whether the model is loaded, and the engine alive."""

    @property
    def is_alive(self) -> bool:
        """Whether the process runs, loading or loaded."""

    @property
    def failure(self) -> str | None:
        """Why it has ended, in one sentence."""

    @property
    def num_in_flight(self) -> int:
        """Answers (n of each prompt) that were added and have not ended: ServerConfig.max_queue."""

    async def ready(self) -> None:
        """Returns once the model is loaded; raises EngineDied, or UserError where it cannot be."""

    def add(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, *, streamed: bool
    ) -> Answer:
        """Sends a prompt to the engine. Raises EngineDied.

        streamed: pieces come as they are made. Else they come at the end, one for each answer, and
        `output` is set: with logprobs of prompts, scores, and what best_of and beams chose.
        """

    async def stats(self) -> Stats:
        """Counts, between two steps. Raises EngineDied."""
