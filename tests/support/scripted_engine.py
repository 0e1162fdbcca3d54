"""An engine without a model: its answers are scripts, piece by piece, of a real tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from predict.config.adapters import Change
from predict.config.rest import Rest
from predict.engine.embedding import Text
from predict.engine.samples import StreamOutput
from predict.engine.stats import EngineStats
from predict.errors import UserError
from predict.images.placed import Pictures
from predict.request import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from predict.server.engine_client import EngineDied
from predict.server.wire import AnswerMetrics, ModelInfo
from predict.text.tokenizer import Tokenizer

# What an answer consists of: texts, one for each time the engine sends; or why there is none.
Script = Callable[[str, SamplingParams], Sequence[str] | Exception]


class ScriptedAnswer:
    def __init__(self, engine: ScriptedEngine, prompt: Sequence[int], params: SamplingParams):
        self.request_id = engine.num_added
        self.metrics: AnswerMetrics | None = None
        self.output: RequestOutput | None = None
        self.is_aborted = False
        self._engine = engine
        self._prompt = list(prompt)
        self._params = params

    def __aiter__(self) -> AsyncIterator[list[StreamOutput]]:
        return self._pieces()

    def abort(self) -> None:
        self.is_aborted = True
        self._engine.moved.set()

    async def _pieces(self) -> AsyncIterator[list[StreamOutput]]:
        engine, params = self._engine, self._params
        script = engine.script(engine.tokenizer.decode(self._prompt, False), params)
        if isinstance(script, Exception):
            raise script
        sent: list[StreamOutput] = []
        reason: FinishReason = "stop"
        for text in script:
            await asyncio.sleep(0)
            while engine.is_held and not self.is_aborted and engine.failure is None:
                engine.moved.clear()
                await engine.moved.wait()
            if engine.failure is not None:
                raise EngineDied(engine.failure)
            if self.is_aborted:
                reason = "abort"
                break
            pieces = [self._piece(text, None, index) for index in range(params.n)]
            sent += pieces
            if self.streamed:
                yield pieces
        last = [
            StreamOutput("", (), "error", index, error="broken")
            if index in engine.failed
            else StreamOutput("", (), reason, index)
            for index in range(params.n)
        ]
        self._end(sent, last)
        if self.streamed:
            yield last

    streamed = True

    def _piece(self, text: str, reason: FinishReason | None, index: int) -> StreamOutput:
        ids = tuple(self._engine.tokenizer.encode(text, False))
        logprobs: tuple[TokenLogprobs, ...] | None = None
        if self._params.logprobs is not None:
            logprobs = tuple({i: Logprob(-0.5, 1)} for i in ids)
        return StreamOutput(text, ids, reason, index, 0, None, logprobs)

    def _end(self, sent: Sequence[StreamOutput], last: Sequence[StreamOutput]) -> None:
        outputs = []
        for index in range(self._params.n):
            own = [piece for piece in sent if piece.index == index]
            measured = [each for piece in own for each in piece.logprobs or ()]
            outputs.append(
                CompletionOutput(
                    index,
                    "".join(piece.text for piece in own),
                    tuple(token for piece in own for token in piece.token_ids),
                    last[index].finish_reason,
                    error=last[index].error,
                    logprobs=tuple(measured) if self._params.logprobs is not None else None,
                )
            )
        first = outputs[0]
        metrics = RequestMetrics(0.0, 0.0, (0.0,), 0.0)
        self.output = RequestOutput(
            *(
                self.request_id,
                tuple(self._prompt),
                first.token_ids,
                first.text,
                last[0].finish_reason,
                metrics,
            ),
            outputs=tuple(outputs),
        )
        count = sum(len(each.token_ids) for each in outputs)
        self.metrics = AnswerMetrics(
            *(len(self._prompt), count, 3, 0, 0.0, 0.0, 0.0, 0.0),
            finish_reasons=tuple(each.finish_reason or "" for each in last),
        )


class ScriptedEngine:
    """An Engine; `is_held` stops its answers, and `release` lets them go on."""

    def __init__(self, tokenizer: Path, script: Script, vocab_size: int = 342):
        self.tokenizer = Tokenizer.from_dir(tokenizer)
        self.script = script
        self.is_ready = True
        self.failure: str | None = None
        self.is_sleeping = False
        self.is_held = False
        self.failed: Sequence[int] = ()  # samples that end as "error"
        self.moved = asyncio.Event()
        self.num_added = 0
        self.added: list[tuple[list[int], SamplingParams, bool]] = []
        self.answers: list[ScriptedAnswer] = []
        self.adapters: dict[str, str] = {}  # loaded, prefixes too: paths by name
        self.prefixes: set[str] = set()
        self.adapter_error: Exception | None = None  # of the next changes
        self.info = ModelInfo(
            *("llama", "float32", "cpu", "dynamic", vocab_size, 256, 8, 64, 16, (1,), None),
            *("bfloat16", None, 0.1),
        )

    @property
    def is_alive(self) -> bool:
        return self.failure is None

    @property
    def num_in_flight(self) -> int:
        return sum(answer.metrics is None for answer in self.answers)

    async def ready(self) -> None:
        return

    def add(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        streamed: bool,
        pictures: Pictures | None = None,
    ) -> ScriptedAnswer:
        if self.failure is not None:
            raise EngineDied(self.failure)
        self.num_added += 1
        self.added.append((list(prompt_token_ids), params, streamed))
        answer = ScriptedAnswer(self, prompt_token_ids, params)
        answer.streamed = streamed
        self.answers.append(answer)
        return answer

    async def stats(self) -> EngineStats:
        if self.failure is not None:
            raise EngineDied(self.failure)
        return EngineStats()

    async def vectors(
        self, texts: Sequence[Text], scores: bool, adapter: str | None
    ) -> npt.NDArray[np.float32]:
        raise UserError("scripts have no vectors")

    async def rest(self, rest: Rest) -> None:
        raise UserError("scripts do not rest")

    async def change(self, change: Change) -> None:
        if self.failure is not None:
            raise EngineDied(self.failure)
        if self.adapter_error is not None:
            raise self.adapter_error
        names = self.prefixes if change.kind == "prefix" else set[str]()
        if change.path is None:
            del self.adapters[change.name]
            names.discard(change.name)
        else:
            self.adapters[change.name] = change.path
            names.add(change.name)

    def die(self, why: str) -> None:
        """Ends it: whoever waits hears of it."""
        self.is_ready, self.failure = False, why
        self.moved.set()

    def release(self) -> None:
        """Lets answers go on."""
        self.is_held = False
        self.moved.set()
