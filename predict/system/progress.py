"""How far a run is, with tokens per second: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from predict.system import console

REFRESH_SECONDS = 0.2  # of a bar
LINE_SECONDS = 30.0  # between lines, where no terminal is
COLUMNS = 80  # of a terminal that does not say its size


class Progress:
    """Counts finished requests and output tokens; shows them on stderr."""

    def __init__(
        self,
        num_requests: int,
        enabled: bool | None = None,
        unit: str = "prompt",
        num_tokens: int | None = None,
        label: str | None = None,
    ) -> None:
        """`enabled`: None: a bar when stderr is a terminal, else lines; False shows nothing.

        unit: of what is counted.

        num_tokens: what the bar counts in place of requests, output tokens up to so many: a lone
        answer, or answers that all take the same time. label: what stands in front.
        """
        self._bar: Any = None
        self._counts_tokens = num_tokens is not None
        self._total = num_requests if num_tokens is None else num_tokens
        self._unit = unit if num_tokens is None else "token"
        self._label = label
        self._num_finished = 0
        self._num_counted = 0
        self.num_prompt_tokens = 0
        self._started = time.perf_counter()
        self._shown = self._started
        self.num_output_tokens = 0
        is_terminal = sys.stderr.isatty()
        self._tells = enabled is None and not is_terminal
        if is_terminal if enabled is None else enabled:
            from tqdm import tqdm

            has_size = not is_terminal or all(os.get_terminal_size(sys.stderr.fileno()))
            self._bar = tqdm(
                total=self._total,
                unit=self._unit,
                desc=label,
                ncols=None if has_size else COLUMNS,  # in no columns, or rows, tqdm shows nothing
                dynamic_ncols=has_size,
                leave=False,
                file=console.Unfailing(sys.stderr),
            )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._bar is not None:
            self._count_tokens()
            self._bar.close()

    def on_step(self, prompt_tokens: int, output_tokens: int) -> None:
        self.num_prompt_tokens += prompt_tokens
        self.num_output_tokens += output_tokens
        if self._bar is None:
            self._tell()
        elif self._is_due(REFRESH_SECONDS):
            self._count_tokens()
            self._bar.set_postfix_str(self._postfix())

    def on_finished(self) -> None:
        self._num_finished += 1
        if self._bar is None:
            self._tell()
        elif not self._counts_tokens:
            self._bar.update()

    def _is_due(self, seconds: float) -> bool:
        """Whether nothing was shown for so long, and now is."""
        now = time.perf_counter()
        is_due = now - self._shown >= seconds
        if is_due:
            self._shown = now
        return is_due

    def _tell(self) -> None:
        """Says where the run is, where no bar does and it was not said lately."""
        if self._tells and self._is_due(LINE_SECONDS):
            done = self.num_output_tokens if self._counts_tokens else self._num_finished
            label = f"{self._label}: " if self._label else ""
            speed = f", {self._postfix()}" if self.num_prompt_tokens else ""
            console.say(f"{label}{done} of {self._total} {self._unit}s{speed}")

    def _count_tokens(self) -> None:
        """Moves a bar of tokens to where the run is."""
        if self._counts_tokens:
            self._bar.update(self.num_output_tokens - self._num_counted)
            self._num_counted = self.num_output_tokens

    def _postfix(self) -> str:
        if not self.num_output_tokens:  # a long prompt takes its time before the first token
            return f"{self.num_prompt_tokens} prompt tokens read"
        return f"{self.tokens_per_second:.1f} tokens/s"

    def print(self, text: str) -> bool:
        """Prints a text on stdout, above the bar; see console.show."""
        if self._bar is not None:
            self._bar.clear()
        shown = console.show(text)
        if self._bar is not None:
            self._bar.refresh()
        return shown

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second since the start."""
        return self.num_output_tokens / max(self.seconds, 1e-9)

    @property
    def speed(self) -> str:
        """How fast it went, in words."""
        return (
            f"{self.num_output_tokens} tokens in {self.seconds:.2f} s, "
            f"{self.tokens_per_second:.1f} tokens/s"
        )


def draft_summary(
    num_drafts: int, num_accepted: int, num_spans: int, by_position: Sequence[int] = ()
) -> str:
    """How speculation went: tokens that were drafted, that stood, and what a step with drafts made.

    num_spans: steps of one sequence that had drafts; each yields its accepted drafts and one token.
    by_position: drafts that stood, by their place among those of such a step.
    """
    if num_drafts == 0:
        return "no drafts were made"
    shares = " ".join(f"{count / num_spans:.0%}" for count in by_position)
    return (
        f"{num_accepted} of {num_drafts} drafts accepted ({num_accepted / num_drafts:.0%}), "
        f"{1 + num_accepted / num_spans:.2f} tokens per step with drafts"
        + (f" (by position {shares})" if shares else "")
    )
