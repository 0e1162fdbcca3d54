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

    def __init__(self, runner: AheadRunner, send: Callable[[], None]):
        self._runner, self._send = runner, send
        self.is_sent = False
        self.known_tokens: KnownTokens | None = None

    def choose(self) -> None:
        if not self.is_sent:
            self.is_sent = True
            self._send()

    def take(self) -> list[int | Candidates]:
        self.choose()
        while self.known_tokens is None:
            self._runner.read_one()
        return self.known_tokens.take()

    def known(self, drafts: Sequence[int]) -> list[int]:
        return list(drafts)

    def logprobs(self) -> Logprobs:
        assert self.known_tokens is not None
        return self.known_tokens.logprobs()


class AheadRunner(RanksRunner):
    """Runs steps on all ranks, one ahead of the tokens. See RanksRunner."""

    num_ahead = 1

    def __init__(self, ranks: Ranks, vocab_size: int, weight_bytes: int, which: int = 0):
        super().__init__(ranks, vocab_size, weight_bytes, which)
        self._on_way: deque[TokensOfRanks] = deque()  # sent, oldest first
        own = weakref.ref(self)  # ranks end with the last one who has them

        def settle() -> None:
            runner = own()
            while runner is not None and runner._on_way:
                runner.read_one()

        ranks.settle = settle

    def launch(self, inputs: StepInputs, choices: Choices) -> StepTokens:
        # What changes logits by tokens that are on their way is sent when they are known.
        lengths = [0 if each is None else len(each.token_ids) for each in choices.adjusted or ()]

        def send() -> None:
            known, sent, self._sent = _as_known(choices, lengths), self._sent, {}
            asked = choices_arrays(known, self._vocab_size, sent)
            self._ranks.post(Down.LAUNCH, [*step_arrays(self._which, inputs), *asked])
            self._sent = sent_behind(known, sent)
            self._on_way.append(tokens)

        tokens = TokensOfRanks(self, send)
        rows = filter(None, choices.adjusted or ())
        unknown = any(len(each.token_ids) > each.num_known for each in rows)
        if not (unknown or (choices.waits and choices.fill_masks is not None)):
            tokens.choose()
        return tokens

    def read_one(self) -> None:
        """Waits for the tokens of the oldest step that was sent. Raises EngineError."""
        tokens = self._on_way.popleft()
        try:
            tokens.known_tokens = arrays_tokens(self._ranks.answer())
        except RankFailed as error:  # steps behind it run already
            raise self._ranks.end(error) from None


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
        self._tokens: queue.Queue[StepTokens] = queue.Queue()
        rank.told, rank.settle = self.later, self._tokens.join
        threading.Thread(target=self._run, name="regatta-answers", daemon=True).start()

    def later(self, tokens: StepTokens) -> Arrays | None:
        """Has the tokens of a step waited for, which rank 0 tells of."""
        self._tokens.put(tokens)
        return None

    def _run(self) -> None:
        while True:
            tokens = self._tokens.get()
            try:
                found = tokens_arrays(tokens.take(), tokens.logprobs())
                if self._rank.rank == 0:
                    self._rank.tell(Up.ANSWER, found)
            except Exception as error:  # of the device
                self._rank.tell_failure(error)
            self._tokens.task_done()
