"""Speculative decoding's interfaces: proposers, drafts, and which drafts are accepted.

A proposer guesses the next tokens of a request; the engine verifies them in one step and keeps the
leading ones that the model itself would have chosen, so what a request returns does not depend on
them (see `accepted_tokens`). The proposers are the modules of predict.speculative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from predict.engine.batch import span_inputs
from predict.engine.choices import Row
from predict.engine.request_state import Request
from predict.engine.scheduled import ScheduledSpan

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.engine.sampler import Sampler
    from predict.engine.step import Choices, Followed, Runner, StepTokens
    from predict.nn.inputs import StepInputs


# A span of 16 rows with a group of 4 query heads fills one tile of the attention kernels.
MAX_DRAFT_TOKENS = 15
FAILED = -1  # in the place of a draft that could not be drawn; placeholders are below it


class Verified(NamedTuple):
    """A request whose drafts the running step verifies."""

    request: Request
    row: int  # logits row of the step behind the request's last known token
    drafts: Sequence[int]  # placeholders


class Follower(Protocol):
    """A draft model's runner that continues a target's step before the host has its result."""

    def launch_behind(
        self, inputs: StepInputs, choices: Choices, followed: Sequence[Followed], num_chosen: int
    ) -> StepTokens:
        """Queues a step behind the target's, as if all drafts that it follows were accepted.

        followed: one per request of the step. num_chosen: 0, or 2 tokens per request, which the
        device replaces by the target's last two choices (or the last known token and the choice).
        """


ProposeBehind: TypeAlias = "Callable[[Sequence[Verified], Sequence[int]], Drafts]"


Drafts = dict[int, Sequence[int]]  # by request id


@dataclass(frozen=True, kw_only=True)
class DraftNetwork:
    """A second network, with a cache of the target's block size for all of the target's blocks.

    runner: its tokens may be placeholders, below FAILED, which the target's next step resolves.
    num_blocks: the target's; the draft's cache has one more for each request of a batch behind
    them. token_budget: tokens of a step. follower: the runner, where it is a Follower.
    """

    runner: Runner
    sampler: Sampler
    block_size: int
    num_blocks: int
    token_budget: int
    follower: Follower | None = None


@dataclass(frozen=True, kw_only=True)
class StateDrafting:
    """What a StateProposer drafts with.

    runner: of the drafter; its tokens may be placeholders, as a DraftNetwork's. feed: what it reads
    states from (predict.nn.drafters.Feed). taps: of the target. num_heads: of Medusa. block_size,
    num_blocks: of the target's cache; a drafter's has one block more for each request of a batch.
    """

    runner: Runner
    feed: Any
    taps: Sequence[str]
    sampler: Sampler
    block_size: int
    num_blocks: int
    num_heads: int = 0

    def launch(
        self,
        spans: Sequence[DraftSpan],
        hidden: Mapping[str, Tensor],
        taps: Sequence[str],
        state_rows: Sequence[int],
        rows: Sequence[Row],
        key: Sequence[str] = (),
    ) -> StepTokens:
        """Starts a step on these rows of hidden states; a token per Row, as the target draws.

        Guides mask first drafts alone: what they allow behind these, GuideState.valid says. On a
        GPU requests with guides have no drafts. key: which step it is, in the place of the taps.
        """
        self.feed.give(hidden, taps, state_rows)
        choices = self.sampler.choices(rows)._replace(taps=key or taps, num_top=None)
        if self.runner.num_ahead or any(row.drafts for row in rows):
            choices = choices._replace(fill_masks=None)
        return self.runner.launch(span_inputs(spans, self.block_size), choices)


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Arguments of a proposer; sizes in tokens."""

    method: str
    max_ngram_size: int = 1
    draft: DraftNetwork | None = None  # of draft_model
    states: StateDrafting | None = None  # of methods that read hidden states


def drafting_of(config: SpeculativeConfig) -> StateDrafting:
    """What a method that reads hidden states drafts with."""
    if config.states is None:
        raise ValueError(f"{config.method} needs a network over the model's hidden states")
    return config.states


class Proposer(Protocol):
    """Proposes draft tokens. Holds state of a request until `forget`.

    looks_up: a proposal is a look-up on the host, without a step. The engine asks for one for
    every request as its tokens arrive, while steps run ahead, and compares it with later tokens;
    it verifies drafts where the comparison went well.

    propose_behind: drafts, by request id, that follow drafts which the running step verifies,
    before its result is known. None for a proposer without a Follower.
    """

    looks_up: bool
    propose_behind: ProposeBehind | None

    @property
    def num_recorded(self) -> int:
        """Runner.num_recorded of the proposer's own network; 0 without one."""

    def propose(
        self, requests: Sequence[Request], limits: Sequence[int]
    ) -> Sequence[Sequence[int]]:
        """Drafts behind the known tokens of each request, at most its limit (1 or more).

        Unless the proposer looks up, all tokens are known, and all but the last are in the cache.
        A draft below FAILED is a placeholder for a token on the device, known to the host after
        the step that verifies it (see predict.engine.step.StepTokens.known).
        """

    def observe(self, request: Request, drafts: Sequence[int], chosen: Sequence[int]) -> None:
        """Takes the result of a verification, before the request gets its new tokens.

        Not called for a request that was aborted. drafts: all known, up to the first that could
        not be drawn. chosen: the model's choices behind the last token and behind each draft.
        """

    def settle(self) -> None:
        """Does postponed work after a step was queued, while the device runs it.

        Raises RequestError where one request's work fails; another call continues with the rest.
        """

    def forget(self, request_id: int) -> None:
        """Drops the state of an ended request."""


class DraftSpan(NamedTuple):
    """The tokens of one request in a step of the draft model."""

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    num_logits: int
    num_prompt_logits: int = 0
    num_prefix_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class Tapped(NamedTuple):
    """A span of a step whose hidden states are there."""

    span: ScheduledSpan
    row: int  # of its first token among the step's


class StateProposer:
    """A Proposer that reads the hidden states of the model's own steps.

    taps: which (predict.nn.decoder.check_taps). lookahead: see BlockManager. Steps do not run ahead
    of it.
    """

    looks_up = False
    propose_behind: ProposeBehind | None = None
    lookahead = 0

    def __init__(self, drafting: StateDrafting):
        self.drafting, self.taps = drafting, drafting.taps

    @property
    def num_recorded(self) -> int:
        return self.drafting.runner.num_recorded

    def follow(self, tapped: Sequence[Tapped], hidden: Mapping[str, Tensor]) -> None:
        """Takes a step's hidden states [T, H], once its tokens are written back."""
        raise NotImplementedError

    def is_ready(self, request: Request) -> bool:
        """Whether it has all that it needs to draft for a request that decodes."""
        raise NotImplementedError

    def suits(self, block_id: int, digest: bytes) -> bool:
        """Whether a request that begins with this block of the prefix cache has drafts."""
        return True

    def propose(
        self, requests: Sequence[Request], limits: Sequence[int]
    ) -> Sequence[Sequence[int]]:
        """See Proposer; called for requests that are ready."""
        raise NotImplementedError

    def observe(self, request: Request, drafts: Sequence[int], chosen: Sequence[int]) -> None:
        """Changes nothing: `follow` brings what there is to know."""

    def settle(self) -> None:
        """Changes nothing: no work is put off."""

    def forget(self, request_id: int) -> None:
        """See Proposer."""
        raise NotImplementedError


def accepted_tokens(drafts: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """The tokens that a span with drafts yields: right drafts, then the model's own next choice.

    chosen: drawn from the model's distribution behind the last token and behind each draft, with
    the random numbers that those positions have without drafts. A choice is kept up to and with the
    first that differs from its draft: later ones stand behind a wrong prefix. So the tokens are
    exactly those of decoding one by one, greedy or sampled; this is rejection sampling (Leviathan
    et al. 2023) for a proposer that puts all its mass on one token.
    """
    accepted: list[int] = []
    for index, token in enumerate(chosen):
        accepted.append(token)
        if index == len(drafts) or token != drafts[index]:
            break
    return accepted


def forced_drafts(proposed: Drafts, limits: Mapping[Request, int], num_spare: int) -> Drafts:
    """Tokens that guides force, num_spare at most, for requests without proposed drafts."""
    found: Drafts = {}
    for request, limit in limits.items():
        if num_spare <= 0:
            break
        if request.guide is not None and not proposed.get(request.request_id):
            forced = request.guide.forced()[: min(limit, num_spare)]
            if forced:
                found[request.request_id] = forced
                num_spare -= len(forced)
    return found


def followable(
    spans: Sequence[ScheduledSpan], limits: Mapping[Request, int]
) -> tuple[list[Verified], list[int]]:
    """Spans of a step with drafts that more drafts may follow, and how many each."""
    verified: list[Verified] = []
    lengths: list[int] = []
    row = 0
    for span in spans:
        request, drafts = span.request, span.draft_token_ids
        # The room if all drafts of the batch are accepted.
        room = request.max_num_tokens - request.num_tokens - len(drafts) - 2
        length = min(limits.get(request, 0), room)
        # The guide's mask after these drafts is not known in time.
        if drafts and length > 0 and request.guide is None:
            verified.append(Verified(request, row, drafts))
            lengths.append(length)
        row += span.num_logits
    return verified, lengths
