"""LLM: a checkpoint (or an exported program) with an engine around it; prompts in, outputs out."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import replace
from typing import TYPE_CHECKING

from predict.build import build
from predict.config.adapters import AddonVerbs, Change
from predict.config.engine import EngineConfig, check_params
from predict.config.rest import Rest, RestVerbs
from predict.device import devices
from predict.device.devices import Device
from predict.engine.answers import AnswerLoop, News, Tell
from predict.engine.embedding import Embedder
from predict.engine.retrieval import no_text
from predict.engine.samples import FailedPrompt, Samples, StreamOutput
from predict.engine.scheduled import ScheduledBatch
from predict.engine.stats import EngineStats
from predict.errors import TokenizerError, UserError, quoted
from predict.images.placed import Pictures
from predict.loading.generation_config import read_recommended
from predict.ranks.front import RanksRunner
from predict.request import RequestOutput, SamplingParams
from predict.resting import ASLEEP
from predict.sight import prompt_parts
from predict.system.bounds import prompt_token_ids
from predict.system.notes import LOG
from predict.text.conversation import Message, PicturePart, conversation_messages
from predict.text.detokenizer import Detokenizer
from predict.text.guides import Guides
from predict.text.params import with_token_ids
from predict.text.tokenizer import Tokenizer
from predict.vectors import Prompt, PromptOrError, SeenPrompt, VectorVerbs, as_several

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from predict.config.keywords import Settings

Conversation = Sequence[Message]


def check_kind(params: SamplingParams) -> None:
    """Raises UserError unless `params` is a SamplingParams."""
    if not isinstance(params, SamplingParams):
        raise UserError(
            f"sampling_params has {quoted(params)} (allowed: a SamplingParams for all prompts, or "
            "a list with one for each)"
        )


def check_streamed(params: SamplingParams) -> None:
    """Raises UserError for answers that cannot be streamed."""
    check_kind(params)
    if params.num_samples > params.n:
        raise UserError(
            "best_of chooses among finished answers, which cannot be streamed; use generate, or n "
            "alone"
        )


def _wake(answers: AnswerLoop | None) -> None:
    if answers is not None:
        answers.wake()


class LLM(AddonVerbs[None], RestVerbs[None], VectorVerbs):
    """Answers prompts with one model.

    Raises UserError (a ValueError) before any weight is read when the directory, the flags and the
    machine do not fit together. Not thread-safe.
    """

    def __init__(
        self,
        model: EngineConfig | str | os.PathLike[str],
        tokenizer: Tokenizer | None = None,
        **settings: Unpack[Settings],
    ):
        """model: its directory, or a config. settings: of EngineConfig, by name.

        tokenizer: the model's, when the caller has it already; else read from its directory.
        """
        started = time.perf_counter()
        self.parts = parts = build(EngineConfig.of(model, **settings), tokenizer)
        self.config, self.platform, self.spec = parts.config, parts.platform, parts.spec
        self.tokenizer, self.decoder = parts.tokenizer, parts.decoder
        self.addons, self.engine = parts.addons, parts.engine
        self._resting = parts.resting
        self.answers = AnswerLoop(self.engine, self.platform.make_current)
        self.embedder = Embedder(self.engine, self.platform.backend.take)
        if isinstance(self.engine.runner, RanksRunner):
            answers = weakref.ref(self.answers)  # the ranks end with this LLM
            self.engine.runner.call_on_failure(lambda: _wake(answers()))
        self._detokenizer = None if self.tokenizer is None else Detokenizer(self.tokenizer)
        self._ids = itertools.count()
        self._compiler: Guides | None = None
        self._guides_lock = threading.Lock()
        self.startup_seconds = time.perf_counter() - started

    @property
    def device(self) -> Device | None:
        """The GPU that the model runs on; None for the CPU and for other devices."""
        return self.platform.gpu

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UserError("this model was loaded without a tokenizer; pass token ids")
            prompt = self.tokenizer.encode(prompt)  # a damaged one may make ids of any size
        return prompt_token_ids(prompt, self.spec.vocab_size - 1)

    def samples(
        self,
        prompt: SeenPrompt,
        params: SamplingParams,
        prompt_index: int = 0,
        streamed: bool = False,
        pictures: Pictures | None = None,
    ) -> Samples:
        """The requests of a prompt, checked, not queued. Raises UserError.

        pictures: whose tokens the prompt, token ids, has already.
        """
        check_kind(params)
        check_params(params, self.config)
        if not self.spec.makes_text:
            raise UserError(no_text(self.spec.model_type))
        params = with_token_ids(params, self.tokenizer, self.spec.vocab_size)
        if params.stop_strings and self.tokenizer is None:
            raise UserError(
                "stop needs a text, and this model was loaded without a tokenizer; use "
                "stop_token_ids"
            )
        adapter, prefix = self.addons.find(params.adapter)
        own, parts = prompt_parts(prompt) if isinstance(prompt, Mapping) else (prompt, ())
        token_ids = self._token_ids(own)
        if isinstance(parts, Pictures):
            pictures = parts
        elif pictures is None:
            token_ids, pictures = self.parts.sight.read(token_ids, parts, self.tokenizer)
        return Samples(
            token_ids,
            params,
            lambda: next(self._ids),
            self.tokenizer,
            self._detokenizer,
            prompt_index,
            streamed,
            self.engine.fail,
            None
            if params.guide is None
            else self._guides().states(params.guide, params.num_samples),
            adapter,
            prefix,
            pictures,
        )

    @property
    def is_sleeping(self) -> bool:
        """Whether the weights are not in their place: then no prompt is answered."""
        return self._resting.level > 0

    def check_rest(self, rest: Rest) -> None:
        """Raises UserError for a rest that cannot be now, or of this model."""
        self._resting.check(rest)

    def rest(self, rest: Rest) -> None:
        """Does what `rest` says. Raises UserError while answers run; predict.rests waits."""
        self._resting.check(rest)
        if rest.mode == "abort":
            self.answers.abort_all()
        if not self.answers.is_idle or self.embedder.is_busy:
            raise UserError(f"{rest.act}: answers run; end them first")
        while self.engine.step()[0] is not None:
            pass  # of requests that were aborted
        try:
            self._resting.act(rest, self.engine, self.addons)
        finally:
            self.answers.refusal = ASLEEP if self.is_sleeping else None

    def change(self, change: Change) -> None:
        """Loads or unloads an adapter or a prefix; see AddonVerbs."""
        if self.is_sleeping:
            raise UserError(ASLEEP)
        self.addons.change(change)

    def _guides(self) -> Guides:
        """The compiler of guides, made for the first guide."""
        with self._guides_lock:
            if self._compiler is None:
                if self.tokenizer is None:
                    raise UserError(
                        "a guide needs a tokenizer, and this model was loaded without one; leave "
                        "the guide out"
                    )
                self._compiler = Guides(
                    self.tokenizer, self.spec.vocab_size, sorted(self.engine.eos_token_ids)
                )
            return self._compiler

    def default_params(self) -> SamplingParams:
        """The parameters of the model's generation_config.json, or SamplingParams() without one.

        Raises UserError naming file and key.
        """
        found = read_recommended(self.config.model.model_name_or_path)
        for note in found.note if found else ():
            LOG.warning(note)
        return SamplingParams() if found is None else found.params

    def chat_prompt(self, messages: Conversation) -> SeenPrompt:
        """A conversation behind which the model answers: token ids, and pictures where it has some.

        Raises UserError.
        """
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            raise UserError(
                "chat needs a tokenizer with a chat template, and this model has none; give one "
                "with chat_template (a .jinja or .json file), or use generate"
            )
        parts: list[PicturePart] = []
        text = self.tokenizer.chat_template.render(conversation_messages(list(messages), "", parts))
        ids = self.tokenizer.encode_prompt(text, templated=True)
        return {"prompt": ids, "multi_modal_data": {"image": parts}} if parts else ids

    def generate(
        self,
        prompts: SeenPrompt | Sequence[PromptOrError],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_output: Callable[[int, RequestOutput], None] | None = None,
        on_step: Callable[[int, int], None] | None = None,
        skip: Container[int] = (),
    ) -> list[RequestOutput]:
        """Outputs in the prompts' order; of one prompt, given without a list, a list of one.

        A prompt is a text, or token ids, or the error of a tokenizer that failed on it. With
        pictures it is {"prompt": ..., "multi_modal_data": {"image": [...]}}, and a placeholder for
        each.
        sampling_params: for all, or one for each; None: default_params().
        on_output(index, output) is called the moment all answers to a prompt are finished, in any
        order. on_step(prompt_tokens, output_tokens) is called after each step and its outputs, with
        the tokens of prompts that it took in and of outputs that came: of a beam search at its end.
        skip: indices of prompts that are not run, and have no output; the others sample as if they
        were.
        Raises UserError or ValueError, with nothing queued, when a prompt can never run. An answer
        that fails, in whatever stage, has finish_reason "error" and says why, and the others are
        given. When the engine fails (EngineError) or is interrupted, the unfinished requests are
        aborted.
        """
        groups = self._groups(prompts, sampling_params)
        running = [group for group in groups if group.prompt_index not in skip]
        outputs: dict[int, RequestOutput] = {}
        news: list[News] = []
        stats = self.engine.scheduler.stats
        try:
            self._add(running, news.append)
            batch: ScheduledBatch | None = None
            while batch is not None or len(outputs) < len(running):
                before = stats.num_prompt_tokens, stats.num_output_tokens
                batch = self.step()
                for each in news:
                    if each.output is None:
                        raise each.error or AssertionError
                    outputs[each.samples.prompt_index] = each.output
                    if on_output:
                        on_output(each.samples.prompt_index, each.output)
                if news:
                    news.clear()
                    self.platform.make_current()
                if on_step and batch is not None:
                    on_step(
                        stats.num_prompt_tokens - before[0], stats.num_output_tokens - before[1]
                    )
        finally:
            self._abort(running)
        return [outputs[index] for index in sorted(outputs)]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """The answers to one conversation, or to each of several; see `generate`.

        A conversation is a list of {"role": ..., "content": ...}; the model's chat template makes
        the prompt. Raises UserError without one, and for a conversation that it refuses.
        """
        several = not all(isinstance(message, dict) for message in messages)
        conversations = messages if several else [messages]
        prompts: list[PromptOrError] = []
        for conversation in conversations:
            try:
                prompts.append(self.chat_prompt(conversation))  # type: ignore[arg-type]
            except TokenizerError as error:
                prompts.append(error)
        return self.generate(prompts, sampling_params)

    def stream(
        self,
        prompts: SeenPrompt | Sequence[SeenPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[StreamOutput, None, None]:
        """Yields the answers to one prompt, or to several, as they grow.

        Joined texts equal `generate`'s; text that may yet become a stop string waits, and the
        answers of a beam search come whole, at its end. Leaving the iterator early aborts the
        requests. An answer that fails ends with a piece that says so. Where all answers to a prompt
        fail, ValueError is raised once all others have ended.
        """
        groups = self._groups(prompts, sampling_params, streamed=True)
        news: list[News] = []
        num_ended = 0
        try:
            self._add(groups, news.append)
            while news or num_ended < len(groups):
                for each in news:
                    num_ended += each.is_last
                    yield from each.pieces
                news.clear()
                if num_ended < len(groups):
                    self.platform.make_current()
                    self.step()
            for group in groups:
                if group.error is not None:
                    raise ValueError(group.error)
        finally:
            self._abort(groups)

    def _groups(
        self,
        prompts: SeenPrompt | Sequence[PromptOrError],
        params: SamplingParams | Sequence[SamplingParams] | None,
        streamed: bool = False,
    ) -> list[Samples]:
        several = [prompts] if isinstance(prompts, Mapping) else as_several(prompts)
        params = self.default_params() if params is None else params
        each = params if isinstance(params, Sequence) else [params] * len(several)
        if len(each) != len(several):
            raise UserError(
                f"{len(each)} sampling_params for {len(several)} prompts (allowed: a "
                "SamplingParams for all prompts, or a list with one for each)"
            )
        if streamed:
            for param in each:
                check_streamed(param)
        groups: list[Samples] = []
        for index, (prompt, param) in enumerate(zip(several, each, strict=True)):
            try:
                if isinstance(prompt, TokenizerError):
                    raise prompt
                groups.append(self.samples(prompt, param, index, streamed))
            except TokenizerError as error:
                message = f"prompt {index} failed in stage tokenize: {error}"
                groups.append(FailedPrompt(next(self._ids), index, message))
        return groups

    def _add(self, groups: Sequence[Samples], tell: Tell) -> None:
        """Queues the requests of prompts, their guides compiled; see AnswerLoop.add."""
        wait([group.guide for group in groups if group.guide is not None])
        self.platform.make_current()
        self.answers.add(groups, tell)

    def _abort(self, groups: Sequence[Samples]) -> None:
        for group in groups:
            self.answers.abort(group)

    def step(self) -> ScheduledBatch | None:
        """Runs a step of all answers and tells their news; its batch, None where nothing ran.

        Raises EngineError where nothing can run and an answer has not ended, and what Engine.step
        raises: then the answers stay, to be aborted.
        """
        self.answers.prepare()
        batch, finished = self.engine.step()
        self.answers.settle(batch, finished)
        return batch

    def check(self) -> None:
        """Raises EngineError where ranks have ended while no step ran; `answers.wake` says when."""
        if isinstance(self.engine.runner, RanksRunner):
            self.engine.runner.check()

    def stats(self) -> EngineStats:
        """Counts so far."""
        scheduler, adapters = self.engine.scheduler, self.addons.adapters
        pool = None if adapters is None else adapters.pool
        peak, runner = devices.peak_bytes(self.platform.device), self.engine.runner
        by_rank = runner.memory_bytes if isinstance(runner, RanksRunner) else ()
        return replace(
            self.engine.stats,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_cache_blocks=scheduler.config.num_blocks,
            num_used_blocks=scheduler.block_manager.num_used_blocks,
            peak_memory_bytes=peak + sum(by_rank),
            rank_memory_bytes=by_rank,
            num_adapters=0 if adapters is None else len(adapters.names),
            num_adapter_pages=0 if pool is None else pool.num_pages,
            num_used_adapter_pages=0 if pool is None else pool.num_used_pages,
            num_adapters_written=0 if pool is None else pool.num_written,
            num_prefixes=len(self.addons.prefixes),
            num_prefix_blocks=scheduler.num_pinned_blocks,
        )

    def __repr__(self) -> str:
        model = self.config.model
        return f"LLM({model.model_name_or_path!r}, {model.dtype}, {model.mode})"
