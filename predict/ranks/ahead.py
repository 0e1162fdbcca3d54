"""Steps over ranks on GPUs: one is sent while the last one runs, as one GPU's runner does.

New tokens stay on each rank's GPU, where the next step's placeholders find them: all ranks make the
same choice of the same logits. The front reads rank 0's, one step behind.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from predict.engine.beams import Candidates
from predict.engine.step import Adjusted, Choices, KnownTokens, Logprobs, StepTokens
from predict.nn.inputs import StepInputs
from predict.ranks.front import RankFailed, Ranks, RanksRunner
from predict.ranks.messages import (
    Down,
    Up,
    arrays_tokens,
    choices_arrays,
    sent_behind,
    step_arrays,
    tokens_arrays,
)
from predict.ranks.rank import Rank
from predict.ranks.shared import Arrays


class TokensOfRanks(StepTokens):
    """Tokens of a step that ranks may still run, or that was not sent to them yet."""

    def __init__(self, on_way: OnWay, send: Callable[[], None]):
        self._on_way, self._send = on_way, send
        self.is_sent = False
        self.known_tokens: KnownTokens | None = None
        self._named: list[int] = []  # what placeholders of its inputs stand for

    def choose(self) -> None:
        if not self.is_sent:
            self.is_sent = True
            self._send()

    def arrived(self, arrays: Arrays) -> None:
        """Takes rank 0's answer."""
        self._named = cast(Any, arrays[0]).tolist()
        self.known_tokens = arrays_tokens(arrays[1:])

    def take(self) -> list[int | Candidates]:
        self.choose()
        while self.known_tokens is None:
            self._on_way.read_one()
        return self.known_tokens.take()

    def known(self, drafts: Sequence[int]) -> list[int]:
        return [draft if draft >= 0 else self._named[-1 - draft] for draft in drafts]

    def logprobs(self) -> Logprobs:
        assert self.known_tokens is not None
        return self.known_tokens.logprobs()


class OnWay:
    """Steps of all networks that were sent and not answered: answers come in their order."""

    def __init__(self, ranks: Ranks):
        self._ranks = weakref.proxy(ranks)  # they end with the last one who has them
        self._steps: deque[TokensOfRanks] = deque()  # oldest first

    def send(self, tokens: TokensOfRanks, arrays: Arrays) -> None:
        """Sends a step to all ranks, whose answer is for `tokens`."""
        self._ranks.post(Down.LAUNCH, arrays)
        self._steps.append(tokens)

    def read_one(self) -> None:
        """Waits for the tokens of the oldest step. Raises EngineError."""
        tokens = self._steps.popleft()
        try:
            tokens.arrived(self._ranks.answer())
        except RankFailed as error:  # steps behind it run already
            raise self._ranks.end(error) from None

    def settle(self) -> None:
        """Waits for the tokens of all. Raises EngineError."""
        while self._steps:
            self.read_one()


class AheadRunner(RanksRunner):
    """Runs steps on all ranks, one ahead of the tokens. See RanksRunner."""

    num_ahead = 1

    def __init__(self, ranks: Ranks, vocab_size: int, weight_bytes: int, which: int, on_way: OnWay):
        """on_way: of all runners over these ranks."""
        super().__init__(ranks, vocab_size, weight_bytes, which)
        self._on_way = on_way

    def launch(self, inputs: StepInputs, choices: Choices) -> StepTokens:
        # What changes logits by tokens that are on their way is sent when they are known.
        lengths = [0 if each is None else len(each.token_ids) for each in choices.adjusted or ()]

        def send() -> None:
            known, sent, self._sent = _as_known(choices, lengths), self._sent, {}
            asked = choices_arrays(known, self._vocab_size, sent)
            self._on_way.send(tokens, [*step_arrays(self._which, inputs), *asked])
            self._sent = sent_behind(known, sent)

        tokens = TokensOfRanks(self._on_way, send)
        tokens.hidden = self._new_states(choices.taps)
        rows = filter(None, choices.adjusted or ())
        unknown = any(len(each.token_ids) > each.num_known for each in rows)
        if not (unknown or (choices.waits and choices.fill_masks is not None)):
            tokens.choose()
        return tokens


def _as_known(choices: Choices, lengths: Sequence[int]) -> Choices:
    """Choices whose rows know the first `lengths` of their tokens, as they do by now."""

    def of(each: Adjusted | None, length: int) -> Adjusted | None:
        if each is None or each.num_known == length:
            return each
        return each._replace(token_ids=each.token_ids[:length], num_known=length)

    if choices.adjusted is None:
        return choices
    return choices._replace(adjusted=list(map(of, choices.adjusted, lengths)))


class Answers:
    """A rank's end of it: sends tokens to the front when they are there, on a thread of its own."""

    def __init__(self, rank: Rank):
        self._rank = rank
        self._tokens: queue.Queue[tuple[StepTokens, int]] = queue.Queue()
        rank.told, rank.settle = self.later, self._tokens.join
        threading.Thread(target=self._run, name="regatta-answers", daemon=True).start()

    def later(self, tokens: StepTokens, inputs: StepInputs) -> Arrays | None:
        """Has the tokens of a step waited for, which rank 0 tells of."""
        self._tokens.put((tokens, max(-int(inputs.token_ids.min(initial=0)), 0)))
        return None

    def _run(self) -> None:
        while True:
            tokens, num_named = self._tokens.get()
            try:
                found = tokens_arrays(tokens.take(), tokens.logprobs())
                named = tokens.known(range(-1, -1 - num_named, -1))
                if self._rank.rank == 0:
                    self._rank.tell(Up.ANSWER, [np.array(named, np.int64), *found])
            except Exception as error:  # of the device
                self._rank.tell_failure(error)
            self._tokens.task_done()
