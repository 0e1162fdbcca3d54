"""The mutable state of a request while the engine has it: its tokens, its blocks, its beams.

Imports no Paddle.
"""

from __future__ import annotations

import copy
import enum
import time
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from predict.adapters.prefixes import NO_PREFIX, ServedPrefix
from predict.engine.beams import Candidates, Hypothesis, num_candidates
from predict.engine.stopping import finish_reason
from predict.errors import UserError
from predict.nn.places import Places
from predict.request import FinishReason, RequestMetrics, SamplingParams
from predict.system import bounds

if TYPE_CHECKING:
    from predict.adapters.pool import ServedAdapter
    from predict.engine.logprobs import LogprobRecord
    from predict.images.placed import Pictures
    from predict.text.answer_parts import AnswerParts
    from predict.text.answer_text import AnswerText
    from predict.text.guides import GuideState


class RequestStatus(enum.Enum):
    """A request is in the waiting queue (WAITING, PREEMPTED), in the batch, or done."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """The mutable state of one sequence. The scheduler is its only writer once it was added.

    `token_ids` is prompt then output and only ever grows; a preemption keeps it whole. Its last
    `num_placeholders` entries are negative: tokens that a running step is about to yield. The keys
    and values of its first `num_computed_tokens` tokens lie in the cache blocks `block_ids`, in
    order, behind those of its `prefix`, which has none of these tokens. Raises UserError for an
    empty prompt, and for a token id that is no whole number of 0..2**31 - 1.
    """

    request_id: int
    prompt_token_ids: Sequence[int]
    sampling_params: SamplingParams
    _: KW_ONLY
    arrival_time: float = field(default_factory=time.perf_counter)
    # Requests share cached blocks only under the same salt: an adapter that changes keys and
    # values, or a tenant who must not probe another's prompts, sets its own.
    cache_salt: bytes = b""
    adapter: ServedAdapter | None = None  # held by the pool of adapters while the request runs
    prefix: ServedPrefix = NO_PREFIX
    pictures: Pictures | None = None  # whose tokens are placeholders of the prompt
    token_ids: list[int] = field(init=False)
    num_computed_tokens: int = 0
    num_placeholders: int = 0
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None  # what went wrong, where finish_reason is "error"
    # Its text so far, where that decides when it ends.
    answer: AnswerText | AnswerParts | None = None
    logprobs: LogprobRecord | None = None  # where they are wanted; the engine adds them
    guide: GuideState | None = None  # behind the known tokens; set before Scheduler.add
    leader: Request | None = None  # has the same prompt, whose blocks this request waits for
    places: Places | None = None  # of its tokens, for a network that asks; set by Scheduler.add
    arrival_index: int = -1  # order of Scheduler.add
    rank: tuple[float, int] = (0.0, -1)  # see predict.engine.scheduler; set by Scheduler.add
    first_scheduled_time: float | None = None
    token_times: list[float] = field(default_factory=list)
    finish_time: float | None = None
    num_cached_tokens: int = 0  # of the prompt, at first admission
    num_preemptions: int = 0
    num_draft_tokens: int = 0  # that were verified
    num_accepted_draft_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    block_digests: list[bytes] = field(default_factory=list)  # of the full blocks hashed so far
    num_published_blocks: int = 0  # leading blocks of block_ids that others may match
    max_num_tokens: int = 0  # prompt + output, set by Scheduler.add
    max_num_blocks: int = 0  # blocks for max_num_tokens, set by Scheduler.add
    # Slots of its state (predict.engine.states), -1: none; that of the step that runs; the numbers
    # of tokens behind which it leaves one behind; tokens that the cache has, and no state.
    state_slot: int = -1
    next_state_slot: int = -1
    state_ends: tuple[int, ...] = ()
    num_stateless_tokens: int = 0
    beam_group: BeamGroup | None = None  # of a beam, or of a search; set by Scheduler.add

    def __post_init__(self) -> None:
        try:
            self.prompt_token_ids = bounds.prompt_token_ids(self.prompt_token_ids)
        except UserError as error:
            raise UserError(f"request {self.request_id}: {error}") from None
        if not self.prompt_token_ids:
            raise UserError(
                f"request {self.request_id}: the prompt has no tokens (at least 1 needed)"
            )
        self.token_ids = list(self.prompt_token_ids)
        adapter_salt = b"" if self.adapter is None else self.adapter.salt
        self.cache_salt += adapter_salt + self.prefix.salt

    def fork(self, request_id: int) -> Request:
        """A beam with the same tokens and blocks; the caller takes references of the blocks."""
        beam = copy.copy(self)
        beam.request_id = request_id
        beam.token_ids = list(self.token_ids)
        beam.block_ids = list(self.block_ids)
        beam.block_digests = list(self.block_digests)
        beam.logprobs = None
        return beam

    @property
    def owner(self) -> Request:
        """The request that was added: this one, or whose beam it is."""
        return self if self.beam_group is None else self.beam_group.request

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether logprobs of its prompt are missing: then the whole prompt must run."""
        return self.logprobs is not None and self.logprobs.wants_prompt

    @property
    def shares_blocks(self) -> bool:
        """Whether it may share cache blocks with others."""
        return self.places is None or not self.places.runs_whole

    @property
    def block_salt(self) -> bytes:
        """The salt of its blocks: its own, and the first row of its positions."""
        if self.places is None:
            return self.cache_salt
        return self.cache_salt + self.places.first_row.to_bytes(8, "little")

    @property
    def contents(self) -> Sequence[int]:
        """What its blocks are hashed by: its tokens, and what pictures stand for some of them."""
        return self.token_ids if self.pictures is None else self.pictures.content(self.token_ids)

    @property
    def num_left(self) -> int:
        """Tokens that are not in the cache; 1 while it decodes."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_slots(self) -> int:
        """Sequences of the batch that it takes; a search counts its beams before the first fork."""
        group = self.beam_group
        return 1 if group is None or group.request is not self else self.sampling_params.num_beams

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, placeholders included."""
        return len(self.token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output tokens without placeholders."""
        return len(self.token_ids) - self.num_placeholders

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens, an ending eos and placeholders included."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens that are known (a new list), an ending eos included."""
        return self.token_ids[len(self.prompt_token_ids) : self.num_known_tokens]

    @property
    def first_token_time(self) -> float | None:
        return self.token_times[0] if self.token_times else None

    @property
    def metrics(self) -> RequestMetrics:
        return RequestMetrics(
            arrival_time=self.arrival_time,
            first_scheduled_time=self.first_scheduled_time,
            token_times=tuple(self.token_times),
            finish_time=self.finish_time,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_draft_tokens=self.num_accepted_draft_tokens,
        )

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.value}, "
            f"prompt={self.num_prompt_tokens}, output={self.num_output_tokens}, "
            f"computed={self.num_computed_tokens}, blocks={len(self.block_ids)})"
        )


class BeamGroup:
    """The search of one request: its beams, what they have scored, and what is finished.

    `beams` are requests of the batch, best first; before the first fork the added request itself.
    The scheduler is their writer; a group decides from what the sampler found.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.spare_block_ids: list[int] = []  # reserved for the group, in no beam's table
        self.restart()

    def restart(self) -> None:
        """Drops everything but the prompt."""
        self.beams: list[Request] = [self.request]
        self.scores: list[np.float32] = [np.float32(0)]  # sums of log-probabilities, per beam
        self.finished: list[Hypothesis] = []  # best first, at most num_beams

    @property
    def returned(self) -> list[Hypothesis]:
        """The answers, best first, once the search has ended."""
        return self.finished[: self.request.sampling_params.n]

    def choose(
        self, candidates: Sequence[Candidates], eos_token_ids: Collection[int]
    ) -> list[tuple[int, int]]:
        """(index of beam, token) of the beams that go on, best first; empty: the search has ended.

        candidates: of each beam. Changes `scores` and `finished`; `beams` are the caller's to fork.
        """
        request, params = self.request, self.request.sampling_params
        num_generated = len(self.beams[0].token_ids) - request.num_prompt_tokens + 1
        num_tokens = request.num_prompt_tokens + num_generated
        beams, tokens, totals = self._continuations(candidates)
        order = np.lexsort((tokens, beams, -totals))[: num_candidates(params, eos_token_ids)]
        going_on: list[tuple[int, int]] = []
        scores: list[np.float32] = []
        ranked = zip(beams[order].tolist(), tokens[order].tolist(), totals[order], strict=True)
        for rank, (beam, token, total) in enumerate(ranked):
            reason = finish_reason(
                token, num_generated, num_tokens, request.max_num_tokens, params, eos_token_ids
            )
            if reason is None:
                going_on.append((beam, token))
                scores.append(total)
            elif rank < params.num_beams:
                generated = [*self.beams[beam].token_ids[request.num_prompt_tokens :], token]
                score = _penalized(total, num_generated, params.length_penalty)
                self.finished.append(Hypothesis(generated, score, reason))
        # Stable, so that of equal scores the older hypothesis stays.
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[params.num_beams :]
        del going_on[params.num_beams :], scores[params.num_beams :]
        self.scores = scores
        return going_on if going_on and self._may_improve(num_generated) else []

    def _continuations(
        self, candidates: Sequence[Candidates]
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], npt.NDArray[np.float32]]:
        """Beam indices, tokens and summed log-probabilities of all continuations."""
        counts = [len(each.token_ids) for each in candidates]
        log_probs = [log_prob for each in candidates for log_prob in each.log_probs]
        return (
            np.repeat(np.arange(len(counts)), counts),
            np.array([token for each in candidates for token in each.token_ids], np.intp),
            np.repeat(np.array(self.scores, np.float32), counts) + np.array(log_probs, np.float32),
        )

    def _may_improve(self, num_generated: int) -> bool:
        """Whether the search goes on after `num_generated` tokens."""
        request, params = self.request, self.request.sampling_params
        if len(self.finished) < params.num_beams:
            return True
        if params.early_stopping is True:
            return False
        length = num_generated
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = request.max_num_tokens - request.num_prompt_tokens
        best = _penalized(self.scores[0], length, params.length_penalty)
        return best > self.finished[-1].score


def _penalized(score: np.float32, length: int, length_penalty: float) -> float:
    return float(score / np.float32(length**length_penalty))


def num_wanted(requests: Sequence[Request], of_prompts: bool = False) -> int | None:
    """The largest number of top logprobs that a request wants; None where no request wants any.

    of_prompts: for the prompts' tokens, else for the new ones.
    """
    records = [request.logprobs for request in requests if request.logprobs is not None]
    numbers = [record.num_prompt_top if of_prompts else record.num_top for record in records]
    return max((number for number in numbers if number is not None), default=None)
