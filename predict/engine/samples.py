"""A prompt's requests, one per sample, and what is returned of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from predict.adapters.pool import ServedAdapter
from predict.adapters.prefixes import NO_PREFIX, ServedPrefix
from predict.engine.choices import NUM_SEEDS
from predict.engine.failures import explained
from predict.engine.logprobs import LogprobRecord
from predict.engine.request_state import Request
from predict.images.placed import Pictures
from predict.request import (
    CompletionOutput,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from predict.text.answer_parts import AnswerParts, Forms
from predict.text.answer_text import AnswerText
from predict.text.detokenizer import Detokenizer
from predict.text.guides import GuideState
from predict.text.params import hidden_in
from predict.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class StreamOutput:
    """A piece of a streamed answer: the new text and tokens, and the reason when it is the last."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    index: int = 0  # of the sample, where there are several
    prompt_index: int = 0  # of the prompt, likewise
    error: str | None = None  # what went wrong, where finish_reason is "error"
    logprobs: tuple[TokenLogprobs, ...] | None = None  # of the new tokens, where they are wanted


def sample_params(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of sample `index` as a request: one answer, its own seed.

    Only the first sample measures the prompt.
    """
    if params.num_samples == 1:
        return params
    return replace(
        params,
        n=1,
        best_of=None,
        seed=None if params.seed is None else (params.seed + index) % NUM_SEEDS,
        logprobs=params.num_logprobs,
        prompt_logprobs=params.prompt_logprobs if index == 0 else None,
    )


def mark_failed(request: Request, message: str) -> None:
    """Marks a request that does not run as failed."""
    request.finish_reason, request.error = "error", message


class Samples:
    """The requests of one prompt. The first one computes it, the others share its blocks.

    A request whose text cannot be decoded fails, alone.
    """

    def __init__(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        new_id: Callable[[], int],
        tokenizer: Tokenizer | None,
        detokenizer: Detokenizer | None,
        prompt_index: int = 0,
        streamed: bool = False,
        fail: Callable[[Request, str], None] = mark_failed,
        guide: Future[list[GuideState]] | None = None,
        adapter: ServedAdapter | None = None,
        prefix: ServedPrefix = NO_PREFIX,
        pictures: Pictures | None = None,
    ):
        """streamed: `pieces` will be asked for. fail: see Engine.fail.

        guide: where `params.guide` begins, of each request (see `settle_guide`).
        """
        self.params = params
        self.guide = guide
        self.streamed = streamed
        self._fail = fail
        self.prompt_index = prompt_index
        self._tokenizer = tokenizer
        self.requests = [
            Request(
                *(new_id(), prompt_token_ids, sample_params(params, index)),
                adapter=adapter,
                prefix=prefix,
                pictures=pictures,
            )
            for index in range(params.num_samples)
        ]
        self._num_sent = [0] * len(self.requests)
        self.begun_time: float | None = None  # perf_counter seconds: it was queued
        self.text_seconds = 0.0  # that `pieces` and `output` took
        for request in self.requests:
            if request is not self.requests[0]:
                request.leader = self.requests[0]
            own = request.sampling_params
            if detokenizer is not None and (streamed or own.stop_strings) and own.num_beams == 1:
                request.answer = self._begun(request, detokenizer)
            if own.logprobs is not None or own.prompt_logprobs is not None:
                request.logprobs = LogprobRecord(
                    own.logprobs, own.prompt_logprobs, request.num_prompt_tokens
                )

    def _begun(self, request: Request, detokenizer: Detokenizer) -> AnswerText | AnswerParts:
        own, prompt = request.sampling_params, request.prompt_token_ids
        ends = own.stop_strings, own.include_stop_str_in_output
        if own.answer_form is not None and own.stop_strings and self._tokenizer is not None:
            forms = Forms.of(own.answer_form)
            return AnswerParts(self._tokenizer, detokenizer, prompt, forms, *ends)
        stops = own.stop_strings
        hidden = hidden_in(stops, self._tokenizer) if stops and self._tokenizer else {}
        return AnswerText(detokenizer.stream(prompt), *ends, hidden)

    @property
    def is_finished(self) -> bool:
        """Whether all of them have ended."""
        return None not in [request.finish_reason for request in self.requests]

    @property
    def error(self) -> str | None:
        """The first one's message where all of them have failed: then there is no answer."""
        if all(request.finish_reason == "error" for request in self.requests):
            return self.requests[0].error
        return None

    def settle_guide(self) -> bool:
        """Gives each request its guide, waiting until that is compiled; False: all have failed."""
        if self.guide is None:
            return True
        try:
            for request, state in zip(self.requests, self.guide.result(), strict=True):
                request.guide = state
        except Exception as error:
            for request in self.requests:
                self._fail(request, explained(request, error))
        return self.error is None

    def pieces(self) -> list[StreamOutput]:
        """New text and tokens of each sample since the last call.

        A beam search yields all answers when it ends.
        """
        if self.params.num_beams > 1:
            if not self.is_finished or self._num_sent[0] < 0:
                return []
            self._num_sent[0] = -1
            return [
                StreamOutput(
                    *(each.text, each.token_ids, each.finish_reason, each.index),
                    *(self.prompt_index, each.error),
                )
                for each in self.output().outputs
            ]
        pieces: list[StreamOutput] = []
        for index, request in enumerate(self.requests):
            sent = self._num_sent[index]
            if sent < 0:
                continue  # its last piece is out
            first = len(request.prompt_token_ids) + sent
            new = tuple(request.token_ids[first : request.num_known_tokens])
            if not new and request.finish_reason is None:
                continue
            text = self._text_or_fail(request, self._new_text)
            reason = request.finish_reason
            self._num_sent[index] = sent + len(new) if reason is None else -1
            pieces.append(
                StreamOutput(
                    *(text, new, reason, index, self.prompt_index, request.error),
                    self._logprobs(request, sent, sent + len(new)),
                )
            )
        return pieces

    def _logprobs(self, request: Request, first: int, end: int) -> tuple[TokenLogprobs, ...] | None:
        """Logprobs of a request's output tokens from `first` to before `end`."""
        record = request.logprobs
        if record is None or self.params.logprobs is None:
            return None
        return tuple(record.tokens[first:end])

    def _text_or_fail(self, request: Request, text: Callable[[Request], str]) -> str:
        """text(request), or "" where that raises; the request fails then."""
        try:
            return text(request)
        except Exception as error:
            self._fail(request, explained(request, error))
            return ""

    def _new_text(self, request: Request) -> str:
        if request.answer is None:
            return ""
        if request.finish_reason is not None:
            request.answer.finish()
        return request.answer.take()

    def output(self) -> RequestOutput:
        """The samples so far; with best_of the likeliest n of them, the best first.

        Of a beam search its answers, once it has ended.
        """
        completions = [self._completion(index) for index in range(len(self.requests))]
        if self.params.num_beams > 1 and self.requests[0].finish_reason in ("stop", "length"):
            completions = self._found_by_beams() or completions
        if self.params.num_samples > self.params.n:
            completions.sort(key=lambda each: (each.error is not None, -_likelihood(each)))
            completions = [replace(each, index=i) for i, each in enumerate(completions)]
            if self.params.logprobs is None:
                completions = [replace(each, logprobs=None) for each in completions]
        first, request = completions[0], self.requests[0]
        record = request.logprobs
        wants_prompt = record is not None and record.num_prompt_top is not None
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=tuple(request.prompt_token_ids),
            token_ids=first.token_ids,
            text=first.text,
            finish_reason=first.finish_reason,
            metrics=request.metrics,
            outputs=tuple(completions[: self.params.n]),
            prompt_logprobs=tuple(record.prompt) if record and wants_prompt else None,
        )

    def _found_by_beams(self) -> list[CompletionOutput]:
        group = self.requests[0].beam_group
        assert group is not None
        found: list[CompletionOutput] = []
        for index, each in enumerate(group.returned):
            reason: FinishReason = each.finish_reason
            text, error = "", None
            try:
                text = self._decoded(each.token_ids)
            except Exception as failure:
                reason, error = "error", explained(self.requests[0], failure)
            token_ids = tuple(each.token_ids)
            found.append(
                CompletionOutput(index, text, token_ids, reason, error=error, score=each.score)
            )
        return found

    def _completion(self, index: int) -> CompletionOutput:
        request = self.requests[index]
        record = request.logprobs
        measured = record is not None and record.num_top is not None
        text = "" if self.params.num_beams > 1 else self._text_or_fail(request, self._text)
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=tuple(request.output_token_ids),
            finish_reason=request.finish_reason,
            cumulative_logprob=record.cumulative if record and measured else None,
            logprobs=tuple(record.tokens) if record and measured else None,
            error=request.error,
        )

    def _text(self, request: Request) -> str:
        if request.answer is not None:
            if request.finish_reason is not None:
                request.answer.finish()
            return request.answer.text
        return self._decoded(request.output_token_ids)

    def _decoded(self, token_ids: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        prompt_token_ids = self.requests[0].prompt_token_ids
        return self._tokenizer.decode_continuation(prompt_token_ids, token_ids)


class FailedPrompt(Samples):
    """Stands for a prompt that its tokenizer failed on: nothing runs, its output is an error."""

    def __init__(self, request_id: int, prompt_index: int, error: str):
        self.requests = []
        self.guide = None
        self.streamed = True
        self.prompt_index = prompt_index
        self.text_seconds = 0.0
        self._request_id = request_id
        self._error = error
        self._is_sent = False

    @property
    def error(self) -> str:
        return self._error

    def pieces(self) -> list[StreamOutput]:
        if self._is_sent:
            return []
        self._is_sent = True
        return [StreamOutput("", (), "error", 0, self.prompt_index, self._error)]

    def output(self) -> RequestOutput:
        now = time.perf_counter()
        return RequestOutput(
            request_id=self._request_id,
            prompt_token_ids=(),
            token_ids=(),
            text="",
            finish_reason="error",
            metrics=RequestMetrics(now, None, (), now),
            outputs=(CompletionOutput(0, "", (), "error", error=self._error),),
        )


def _likelihood(completion: CompletionOutput) -> float:
    assert completion.cumulative_logprob is not None
    return completion.cumulative_logprob
