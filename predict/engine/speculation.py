"""Speculation, beside the scheduler: what is drafted, what stands, and what is learned of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import accumulate, takewhile
from typing import cast

from predict.engine.beams import Candidates
from predict.engine.blame import Blame
from predict.engine.draft_policy import ALLOWANCE, DraftPolicy
from predict.engine.drafts import (
    FAILED,
    MAX_DRAFT_TOKENS,
    Drafts,
    ProposeBehind,
    Proposer,
    StateProposer,
    Tapped,
    Verified,
    accepted_tokens,
    followable,
    forced_drafts,
)
from predict.engine.failures import apart
from predict.engine.request_state import Request, RequestStatus
from predict.engine.scheduled import ScheduledBatch, ScheduledSpan
from predict.engine.scheduler import Scheduler
from predict.engine.stats import with_accepted
from predict.engine.step import StepTokens
from predict.system.notes import LOG

# Rows that take little longer on a CPU than one: up to there the weights' bytes decide, and beyond
# it the products, where a drafted row costs as much as the step that it saves its request.
FEW_ROWS = 16
# Steps without a right draft after which hidden states are no longer asked for, and for how many;
# they are not either where drafts and the drafter's work lost as many steps as that pause may.
MOST_VAIN, PAUSE = 100, 4000
PLAIN_EVERY = 128  # steps with drafts behind which one has none, for its time
FEW_RIGHT, MANY_DRAFTS = 0.2, 1000  # of first drafts: what is said once, after how many


class Speculation:
    """Drafts of an engine's steps.

    A step goes through it thus: `limits` says how many drafts are wanted, `propose` has them, the
    scheduler puts them into a batch, `launched` is told of it, `accepted` says what stands of them,
    and `follow` and `stepped` learn, once the tokens are written back. Without a proposer there are
    the drafts alone that guides force.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        blame: Blame,
        runs_ahead: bool,
        proposer: Proposer | None = None,
        policy: DraftPolicy | None = None,
    ):
        """runs_ahead: whether steps do. proposer, policy: both, or none."""
        self.scheduler, self.blame, self.stats = scheduler, blame, scheduler.stats
        self.runs_ahead = runs_ahead
        self.proposer, self.policy = proposer, policy
        self._behind: Drafts = {}  # for requests whose last drafts the running step verifies
        self._forced: Drafts = {}  # drafts of the last step that guides force
        self._num_accepted = 0  # drafts of the last step, forced ones apart
        self._num_recorded = 0  # graphs, when the last step ended
        self._says = isinstance(proposer, StateProposer)  # whether few first drafts are right
        self._had_ready = False  # whether a request of the last step could have drafts
        self._num_drafted = 0  # steps with drafts since one without
        self._plain_every = 4  # of such steps, for now
        self._own = 0.0  # seconds of a StateProposer's work since the last step ended
        self._step_own = 0.0  # of that in the last step
        self._num_vain = 0  # steps since a draft stood; below 0: steps until the end of a pause
        if isinstance(proposer, StateProposer):
            scheduler.blocks.suits = proposer.suits

    @property
    def num_recorded(self) -> int:
        """Graphs recorded so far by the proposer's own network."""
        return 0 if self.proposer is None else self.proposer.num_recorded

    @property
    def taps(self) -> Sequence[str]:
        """The hidden states that the next step is to give."""
        reads = isinstance(self.proposer, StateProposer) and self._num_vain >= 0
        return cast(StateProposer, self.proposer).taps if reads else ()

    def limits(self, on_way: bool) -> dict[Request, int]:
        """How many drafts which requests are to have in the next step. See DraftPolicy.limits."""
        if self.proposer is None or self.policy is None:
            return {}
        decoding = self.scheduler.decoding
        if isinstance(self.proposer, StateProposer):
            decoding = [request for request in decoding if self.proposer.is_ready(request)]
            self._had_ready = bool(decoding)
            if self._num_drafted >= self._plain_every:
                self._plain_every = min(2 * self._plain_every, PLAIN_EVERY)
                return {}
        return self.policy.limits(decoding, on_way)

    def propose(self, limits: Mapping[Request, int]) -> Drafts:
        """The next step's drafts, by request id: at most these, and what guides force."""
        drafts: Drafts = {}
        if self.proposer is not None and self.policy is not None:
            drafts = self._proposed(self.proposer, self.policy, limits)
            self._behind = {}
        self._forced = self._forced_drafts(drafts, limits)
        return {**drafts, **self._forced} if self._forced else drafts

    def launched(self, batch: ScheduledBatch, drafts: Drafts) -> None:
        """Proposes behind the drafts of a batch that was just queued."""
        if drafts and self.proposer is not None and self.proposer.propose_behind is not None:
            self._behind = self._propose_behind(batch, self.proposer.propose_behind)

    def accepted(
        self,
        batch: ScheduledBatch,
        tokens: StepTokens | None,
        token_ids: Sequence[int | Candidates],
    ) -> list[int | Sequence[int] | Candidates]:
        """Per sampling span its token, or with drafts the accepted tokens.

        tokens: the step's, where it has drafts. token_ids: what they gave.
        """
        self._num_accepted = 0
        self._step_own, self._own = self._own, 0.0
        if self.proposer is None and not any(span.draft_token_ids for span in batch.spans):
            return list(token_ids)
        sampled: list[int | Sequence[int] | Candidates] = []
        start = 0
        for span in batch.spans:
            if not span.samples:
                continue
            chosen = token_ids[start : start + span.num_logits]
            start += span.num_logits
            if not span.draft_token_ids:
                sampled.append(chosen[0])
            elif span.request.status is RequestStatus.FINISHED:
                sampled.append(())  # aborted while the step ran
            else:
                try:  # a request with drafts has no beams
                    sampled.append(self._accepted(span, tokens, cast(Sequence[int], chosen)))
                except Exception as error:
                    self.blame.end(span.request, error)
                    sampled.append(())
        return sampled

    def follow(self, spans: Sequence[ScheduledSpan], tokens: StepTokens) -> None:
        """Hands on the hidden states of a step's spans, where the proposer's were asked for."""
        proposer = self.proposer
        if not isinstance(proposer, StateProposer) or set(proposer.taps) - set(tokens.hidden):
            return
        rows = accumulate((span.num_tokens for span in spans), initial=0)
        begin = time.perf_counter()
        apart(
            [Tapped(span, row) for span, row in zip(spans, rows, strict=False)],
            lambda tapped: proposer.follow(tapped, tokens.hidden),
            lambda each, error: self.blame.end(each.span.request, error),
        )
        self._own += time.perf_counter() - begin

    def stepped(
        self,
        batch: ScheduledBatch,
        decides: bool,
        waited: bool,
        seconds: float | None,
        num_recorded: int,
    ) -> None:
        """Reports a step's time and accepted drafts to the policy; looks up new drafts.

        decides, waited: see Step. seconds: that it took; None where that is not known.
        num_recorded: graphs so far.
        """
        recorded, self._num_recorded = num_recorded > self._num_recorded, num_recorded
        proposer, policy = self.proposer, self.policy
        if proposer is None or policy is None:
            return
        plain = batch.num_tokens == sum(span.num_logits for span in batch.spans)
        timed = seconds if plain and not recorded else None
        lengths: list[int] = []
        if decides:
            lengths = [len(span.draft_token_ids) for span in batch.spans if span.draft_token_ids]
        own, size = self._step_own, batch.num_samples
        policy.stepped(size, lengths, self._num_accepted, waited, timed or 0.0, own)
        if isinstance(proposer, StateProposer) and (self._had_ready or self._num_vain < 0):
            self._num_vain = 0 if self._num_accepted else self._num_vain + 1
            self._num_drafted = self._num_drafted + 1 if lengths else 0
            if self._num_vain == MOST_VAIN or policy.lost > ALLOWANCE * PAUSE:
                self._num_vain, policy.lost = -PAUSE, 0.0
            # Nothing that runs in a pause needs rows of drafts.
            self.scheduler.blocks.suits = None if self._num_vain < 0 else proposer.suits
            if self._says and self.stats.num_draft_spans >= MANY_DRAFTS:
                self._says = False
                self._say_few(proposer)
        if not proposer.looks_up:
            return
        wanting = [
            span.request
            for span in batch.spans
            if span.request.status is RequestStatus.RUNNING and policy.follow(span.request)
        ]
        if not wanting:
            return
        most = policy.max_length + self.runs_ahead  # the first is what the running step chooses
        for request, guess in self._proposals(proposer, wanting, [most] * len(wanting)):
            policy.guessed(request, guess)

    def _say_few(self, proposer: StateProposer) -> None:
        """Says so where few first drafts stand: a head for another model, or states of others."""
        share = (self.stats.num_accepted_by_position or (0,))[0] / self.stats.num_draft_spans
        if share < FEW_RIGHT:
            LOG.warning(
                f"{share:.0%} of the first {self.stats.num_draft_spans} first drafts were right; "
                f"the head reads the hidden states of {', '.join(proposer.taps)}: where it was "
                "trained with others, its config.json must name the layers"
            )

    def settle(self) -> None:
        """Has the proposer do its postponed work, while the device runs the next step."""
        if self.proposer is not None:
            self.blame.retried(self.proposer.settle)

    def forget(self, request_id: int) -> None:
        """Drops the state of an ended request."""
        self._behind.pop(request_id, None)
        if self.proposer is not None and self.policy is not None:
            self.proposer.forget(request_id)
            self.policy.forget(request_id)

    def _proposed(
        self, proposer: Proposer, policy: DraftPolicy, limits: Mapping[Request, int]
    ) -> Drafts:
        """Drafts by request id, at most as many as the limits."""
        if not limits:
            return {}
        if proposer.looks_up:
            return {r.request_id: policy.guess(r, limit) for r, limit in limits.items()}
        behind = {
            request.request_id: self._behind[request.request_id][:limit]
            for request, limit in limits.items()
            if request.request_id in self._behind
        }
        if behind:
            return behind
        if self.runs_ahead:  # a draft model's tokens stay on the device
            limits = {r: limit for r, limit in limits.items() if r.guide is None}
        if not limits:
            return {}
        begin = time.perf_counter()
        proposals = self._proposals(proposer, list(limits), list(limits.values()))
        if isinstance(proposer, StateProposer):
            self._own += time.perf_counter() - begin
        return {request.request_id: each for request, each in proposals}

    def _proposals(
        self, proposer: Proposer, requests: Sequence[Request], limits: Sequence[int]
    ) -> list[tuple[Request, Sequence[int]]]:
        """The proposals by request; requests for which the proposer fails end."""
        found: list[tuple[Request, Sequence[int]]] = []

        def propose(wanted: Sequence[tuple[Request, int]]) -> None:
            requests, limits = zip(*wanted, strict=True)
            for request, drafts in zip(requests, proposer.propose(requests, limits), strict=True):
                allowed = drafts if request.guide is None else request.guide.valid(drafts)
                found.append((request, _of_text(request, allowed)))

        def failed(wanted: tuple[Request, int], error: Exception) -> None:
            if not proposer.looks_up:  # a draft model proposes while no step runs
                self.blame.probe(wanted[0], error)
            self.blame.end(wanted[0], error)

        apart(list(zip(requests, limits, strict=True)), propose, failed)
        return found

    def _propose_behind(self, batch: ScheduledBatch, propose: ProposeBehind) -> Drafts:
        """Drafts for the step after `batch`, which was just queued and has drafts."""
        verified, lengths = followable(batch.spans, self.limits(on_way=True))
        found: Drafts = {}
        if not verified:
            return found

        def follow(wanted: Sequence[tuple[Verified, int]]) -> None:
            verified, lengths = zip(*wanted, strict=True)
            found.update(propose(verified, lengths))

        apart(
            list(zip(verified, lengths, strict=True)),
            follow,
            lambda wanted, error: self.blame.end(wanted[0].request, error),
        )
        return found

    def _forced_drafts(self, proposed: Drafts, limits: Mapping[Request, int]) -> Drafts:
        """Tokens that guides force in the next step, for requests without proposed drafts.

        Where steps run ahead, only for requests that may have drafts, since no step runs ahead
        then. Else as many as keep the step within FEW_ROWS.
        """
        if self.runs_ahead:
            return forced_drafts(proposed, limits, sum(limits.values()))
        decoding = self.scheduler.decoding
        num_spare = FEW_ROWS - len(decoding) - sum(map(len, proposed.values()))
        return forced_drafts(proposed, dict.fromkeys(decoding, MAX_DRAFT_TOKENS), num_spare)

    def _accepted(
        self, span: ScheduledSpan, tokens: StepTokens | None, chosen: Sequence[int]
    ) -> Sequence[int]:
        """The accepted drafts of a span, and one more token."""
        request, drafts = span.request, span.draft_token_ids
        if request.request_id in self._forced:
            accepted = accepted_tokens(drafts, chosen)
            self.stats.num_forced_tokens += len(accepted) - 1
            return accepted
        proposer, policy = self.proposer, self.policy
        assert proposer is not None
        assert policy is not None
        if not proposer.looks_up:
            assert tokens is not None
            known = tokens.known(drafts)
            drafts = known[: known.index(FAILED)] if FAILED in known else known
        accepted = accepted_tokens(drafts, chosen)
        num_accepted = len(accepted) - 1
        proposer.observe(request, drafts, chosen)
        policy.record(request, len(drafts), num_accepted)
        self._num_accepted += num_accepted
        request.num_draft_tokens += len(drafts)
        request.num_accepted_draft_tokens += num_accepted
        self.stats.num_draft_spans += 1
        self.stats.num_draft_tokens += len(drafts)
        self.stats.num_accepted_draft_tokens += num_accepted
        if num_accepted:
            counts = with_accepted(self.stats.num_accepted_by_position, num_accepted)
            self.stats.num_accepted_by_position = counts
        return accepted


def _of_text(request: Request, drafts: Sequence[int]) -> Sequence[int]:
    """Drafts up to the first placeholder of a picture, which prompts have and answers have not."""
    if request.pictures is None:
        return drafts
    placeholder = request.token_ids[request.pictures.placed[0].start]
    return list(takewhile(lambda token: token != placeholder, drafts))
