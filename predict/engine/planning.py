"""Which spans of tokens run next, and whom they take their room from. Imports no Paddle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from predict.engine.failures import RequestError
from predict.engine.queue import Queue, chunk
from predict.engine.request_state import BeamGroup, Request, RequestStatus
from predict.engine.resources import CacheBlocks
from predict.engine.scheduled import ScheduledSpan, SchedulerConfig, prompt_span
from predict.engine.searches import Searches
from predict.engine.stats import EngineStats

Drafts = Mapping[int, Sequence[int]]  # request id -> proposed next tokens


class Planner:
    """Plans steps over the running requests, which it holds in the order of rank.

    Prompts of smaller priority numbers are planned first: they preempt requests behind them where
    they need their sequence or their blocks, and take their tokens of the step. Among requests of
    one number nothing is taken from anybody but blocks that an older one needs to go on.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        queue: Queue,
        blocks: CacheBlocks,
        searches: Searches,
        stats: EngineStats,
    ) -> None:
        self._config, self._queue, self._blocks = config, queue, blocks
        self._searches, self._stats = searches, stats
        self.running: list[Request] = []
        self.has_priorities = False  # whether a request ever had another number than 0
        self._prompts_are_next = True  # with separate_steps

    def plan(self, drafts: Drafts | None) -> tuple[list[ScheduledSpan], list[Request]]:
        """The spans of the next step, and the requests that were preempted for it.

        Raises RequestError where one request's part fails.
        """
        spans: list[ScheduledSpan] = []
        preempted: list[Request] = []
        separate = self._config.separate_steps
        if separate and (self._prompts_are_next or self._is_first_a_prompt()):
            urgent = self._urgent(preempted)
            self._prompts(spans, urgent, preempted)
        if spans:
            self._prompts_are_next = False
            return spans, preempted
        urgent = [] if separate else self._urgent(preempted)
        self._decodes(spans, urgent, preempted)
        if drafts:
            self._add_drafts(drafts, spans, urgent)
        self._prompts_are_next = bool(spans)
        if not (separate and spans):
            self._prompts(spans, urgent, preempted)
        return spans, preempted

    def _urgent(self, preempted: list[Request]) -> list[ScheduledSpan]:
        """Spans of prompts that go before running requests behind them, in the order of rank."""
        spans: list[ScheduledSpan] = []
        running, waiting = self.running, self._queue.requests
        if not self.has_priorities or not running:
            return spans
        budget, last = self._config.max_num_batched_tokens, running[-1].sampling_params.priority
        try:
            for request in running:
                if request.num_left == 1:
                    budget -= 1
                elif request.sampling_params.priority < last:
                    budget -= self._add_prompt(request, spans, budget, not spans)
        except Exception as error:
            raise RequestError(request) from error
        left = self._config.max_num_batched_tokens - sum(span.num_tokens for span in spans)
        while waiting and running and waiting[0].rank < running[-1].rank:
            rank = waiting[0].rank
            decoding = sum(each.num_left == 1 and each.rank < rank for each in running)
            begun = len(spans)
            if not self._queue.admit_ahead(
                running, left - decoding, spans, lambda: self._preempt_last(preempted)
            ):
                break
            left -= sum(span.num_tokens for span in spans[begun:])
        return [span for span in spans if span.request.status is RequestStatus.RUNNING]

    def _is_first_a_prompt(self) -> bool:
        """Whether a prompt that goes before running requests is the first of all."""
        running, waiting = self.running, self._queue.requests
        if not self.has_priorities or not running:
            return False
        first = running[0]
        if waiting and waiting[0].rank < first.rank:
            first = waiting[0]
        is_urgent = first.sampling_params.priority < running[-1].sampling_params.priority
        return is_urgent and (first is not running[0] or first.num_left > 1)

    def _is_behind(self, request: Request, urgent: Sequence[ScheduledSpan]) -> bool:
        """Whether a decoding request gives up its token to urgent prompts."""
        return bool(urgent) and urgent[0].request.rank < request.rank

    def _add_prompt(
        self, request: Request, spans: list[ScheduledSpan], budget: int, first: bool
    ) -> int:
        """Appends the next span of a prompt that has begun; its tokens, 0: there is no room."""
        start = request.num_computed_tokens
        num_tokens = chunk(self._config, request, start, budget, first, spans)
        if num_tokens:
            spans.append(prompt_span(request, start, num_tokens))
        return num_tokens

    def _decodes(
        self,
        spans: list[ScheduledSpan],
        urgent: list[ScheduledSpan],
        preempted: list[Request],
    ) -> None:
        """Appends a span per decoding request, while the step has tokens beside the urgent ones."""
        running = self.running
        block_size = self._config.block_size
        budget = self._config.max_num_batched_tokens - sum(span.num_tokens for span in urgent)
        planned = {span.request for span in urgent}  # of which some have one token left
        index = 0
        try:
            while index < len(running):  # preemption shortens it from the end
                request = running[index]
                index += 1
                num_tokens = len(request.token_ids)
                if request.num_left > 1 or num_tokens >= request.max_num_tokens:
                    continue  # a prompt, or its last token is on its way
                if planned and request in planned:
                    continue
                group = request.beam_group
                if group is not None:
                    # Of all beams with the first; the others follow it.
                    if request is group.beams[0]:
                        if len(group.beams) > budget and self._is_behind(request, urgent):
                            index += len(group.beams) - 1
                            continue
                        if not self._grow_beams(group, preempted):
                            break
                elif budget < 1 and self._is_behind(request, urgent):
                    continue
                elif request.prefix.num_reserved + num_tokens > len(
                    request.block_ids
                ) * block_size and not self._grow(request, preempted):
                    break
                budget -= 1
                start = request.num_computed_tokens
                spans.append(ScheduledSpan(request, 1, start, request.block_ids, True))
        except Exception as error:
            raise RequestError(request) from error
        if urgent and preempted:
            urgent[:] = [each for each in urgent if each.request.status is RequestStatus.RUNNING]

    def _add_drafts(
        self, drafts: Drafts, spans: list[ScheduledSpan], urgent: Sequence[ScheduledSpan]
    ) -> None:
        """Lengthens the decoding spans, in place, by the drafts that fit.

        Drafts are a bet. They come after every request has its block, so that they take free
        blocks but never preempt, and they leave one token of the budget to each other request.
        """
        num_spare = self._config.max_num_batched_tokens - len(self.running)
        num_spare -= sum(span.num_tokens - 1 for span in urgent)
        for index, span in enumerate(spans):
            request = span.request
            proposed = drafts.get(request.request_id, ())
            num_tokens = len(request.token_ids)
            # The step yields one token more than there are drafts.
            limit = min(len(proposed), num_spare, request.max_num_tokens - num_tokens - 1)
            if limit <= 0:
                continue
            limit = self._blocks.lengthen(request, limit)
            num_spare -= limit
            spans[index] = span._replace(
                num_tokens=1 + limit, draft_token_ids=tuple(proposed[:limit])
            )

    def _prompts(
        self,
        spans: list[ScheduledSpan],
        urgent: Sequence[ScheduledSpan],
        preempted: list[Request],
    ) -> None:
        """Gives the rest of the budget to prompts: the urgent, the begun, then waiting ones."""
        num_decodes = len(spans)
        spans += urgent
        budget = self._config.max_num_batched_tokens - sum(span.num_tokens for span in spans)
        planned = {span.request for span in urgent}
        try:
            for request in self.running:
                if request.num_left > 1 and request not in planned:
                    first = len(spans) == num_decodes
                    budget -= self._add_prompt(request, spans, budget, first)
        except Exception as error:
            raise RequestError(request) from error
        if self._queue.requests and not preempted:
            self._queue.admit(self.running, budget, num_decodes, spans)

    def _grow(self, request: Request, preempted: list[Request]) -> bool:
        """Gives `request` one more block, preempting from the last; False: itself preempted."""
        while self._blocks.manager.num_free_blocks == 0:
            if self._preempt_last(preempted) is request:
                return False
        request.block_ids += self._blocks.manager.allocate(1)
        return True

    def _grow_beams(self, group: BeamGroup, preempted: list[Request]) -> bool:
        """See Searches.grow. False: all of them preempted."""
        return self._searches.grow(
            group, lambda: self._preempt_last(preempted) is not group.request
        )

    def _preempt_last(self, preempted: list[Request]) -> Request:
        """Frees the blocks of the last running request and puts it back into the queue.

        Its tokens stay, but those of a beam search. Returns it.
        """
        running = self.running
        request = running.pop().owner
        while running and running[-1].owner is request:
            running.pop()
        self._queue.release(request)
        if request.beam_group is not None:
            request.beam_group.restart()
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self._stats.num_preemptions += 1
        self._queue.put(request)
        preempted.append(request)
        return request
