"""What the engine and its drafters agree on: proposers, drafts, and which of them stand.

A proposer guesses the next tokens of a request; the engine verifies them in one step and keeps the
leading ones that the model itself would have chosen, so what a request returns does not depend on
them (see `accepted_tokens`). The proposers are the modules of predict.speculative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from predict.engine.request_state import Request

if TYPE_CHECKING:
    from predict.engine.choices import Row
    from predict.engine.runner import Runner, Tokens
    from predict.engine.sampler import Sampler
    from predict.nn.inputs import ForwardInputs


# A span of 16 rows with a group of 4 query heads fills one tile of the attention kernels.
MAX_DRAFT_TOKENS = 15
FAILED = -1  # in the place of a draft that could not be drawn; placeholders are below it


class Verified(NamedTuple):
    """A request whose drafts a step that runs verifies."""

    request: Request
    row: int  # of the step's: the choice behind the request's last token
    drafts: Sequence[int]  # placeholders


class Follower(Protocol):
    """A draft model's runner that begins where a step of the target's got, before anybody knows."""

    def launch_behind(
        self,
        inputs: ForwardInputs,
        rows: Sequence[Row],
        sampler: Sampler,
        verified: Sequence[Verified],
        num_chosen: int,
    ) -> Tokens:
        """Starts a step behind the target's; inputs and rows are as if all drafts were right.

        verified: of each request of the step. num_chosen: 0, or of each request's 2 tokens, which
        become the last two that the target chose, or the last known one and the one chosen.
        """
        ...


ProposeBehind: TypeAlias = "Callable[[Sequence[Verified], Sequence[int]], Drafts]"


Drafts = dict[int, Sequence[int]]  # by request id


@dataclass(frozen=True, kw_only=True)
class DraftNetwork:
    """A second network, with a cache of the target's block size for all of the target's blocks.

    runner: its steps' tokens may be placeholders, below FAILED, which the target's next step
    resolves.
    num_blocks: the target's; behind them the draft's cache has a block for each request of a batch.
    token_budget: tokens of a step. follower: the runner, where it can follow.
    """

    runner: Runner
    sampler: Sampler
    block_size: int
    num_blocks: int
    token_budget: int
    follower: Follower | None = None


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """What a proposer is made from; sizes in tokens."""

    method: str
    max_ngram_size: int = 1
    draft: DraftNetwork | None = None  # of draft_model


class Proposer(Protocol):
    """Guesses next tokens. Keeps what it likes about a request until `forget`.

    looks_up: a proposal is a look-up on the host, which takes no step. It is made for every request
    as its tokens come, while steps run ahead of it, and compared with what comes: drafts are
    verified where that went well.

    propose_behind: proposes for requests behind a step that runs and verifies their drafts, before
    its end is known, and goes on where it gets; by request id, for those for which it can. None
    where that is never so.
    """

    looks_up: bool
    propose_behind: ProposeBehind | None

    @property
    def num_recorded(self) -> int:
        """See Runner, of steps of the proposer's own."""
        ...

    def propose(
        self, requests: Sequence[Request], limits: Sequence[int]
    ) -> Sequence[Sequence[int]]:
        """For each request at most as many tokens as its limit (1 or more) that may follow.

        They follow the known tokens. Unless the proposer looks up, all tokens are known, and lie in
        the cache but for the last. A draft below FAILED is a placeholder for one that only the
        device knows; who waits for the step that verifies it learns it then (see
        predict.engine.runner.Tokens.known).
        """
        ...

    def observe(self, request: Request, drafts: Sequence[int], chosen: Sequence[int]) -> None:
        """What came of those of the last drafts that were verified, all of them known now.

        Called before tokens are added to the request, and not for one that was aborted meanwhile.
        drafts: up to the first that could not be drawn. chosen: the model's choice behind the
        request's last token, and behind each draft that ran.
        """
        ...

    def settle(self) -> None:
        """A step was queued: what need not be done before it, while the device works on it.

        Raises RequestError where one request's part fails; called again, it goes on with the rest.
        """
        ...

    def forget(self, request_id: int) -> None:
        """The request has ended."""
        ...


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
