"""Sleep, wake-up and updates of a model whose answers run: each waits until nothing does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from predict.config.rest import Rest
from predict.errors import UserError
from predict.llm import LLM

Done = Callable[[Exception | None], None]


class Rests:
    """The rests of one LLM, in order. Not thread-safe.

    While one waits, what is added to `llm.answers` is held, and runs behind it: an answer has one
    set of weights from its first token to its last.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._waiting: deque[tuple[Rest, Done]] = deque()

    @property
    def is_waiting(self) -> bool:
        """Whether texts for vectors have to be held too."""
        return bool(self._waiting)

    def ask(self, rest: Rest, done: Done) -> None:
        """Queues a rest; done(error) is called by `settle`, or here where it cannot be."""
        try:
            self._llm.check_rest(rest)
        except UserError as error:
            done(error)
            return
        self._llm.answers.hold()
        if rest.mode == "abort":
            self._llm.answers.abort_all()
        self._waiting.append((rest, done))

    def fail(self, error: Exception) -> None:
        """Tells all that wait that nothing will be done."""
        while self._waiting:
            self._waiting.popleft()[1](error)

    def settle(self) -> None:
        """Does what waits, once nothing runs. To be called between two steps."""
        llm = self._llm
        if not self._waiting or not llm.answers.is_idle or llm.embedder.is_busy:
            return
        while self._waiting:
            rest, done = self._waiting.popleft()
            try:
                llm.rest(rest)
            except Exception as error:
                done(error)
            else:
                done(None)
        llm.answers.release()
