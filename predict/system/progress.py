"""A progress bar with tokens per second, on terminals only."""

from __future__ import annotations

import sys
import time
from typing import Any

from predict.system import console

REFRESH_SECONDS = 0.2


class Progress:
    """Counts finished requests and output tokens; shows them on stderr when it is a terminal."""

    def __init__(
        self,
        num_requests: int,
        enabled: bool | None = None,
        unit: str = "prompt",
        num_tokens: int | None = None,
        label: str | None = None,
    ) -> None:
        """`enabled`: None shows the bar when stderr is a terminal. unit: of what is counted.

        num_tokens: what the bar counts in place of requests, output tokens up to so many: a lone
        answer, or answers that all take the same time. label: what stands in front.
        """
        self._bar: Any = None
        self._counts_tokens = num_tokens is not None
        self._num_counted = 0
        self.num_prompt_tokens = 0
        self._started = time.perf_counter()
        self._shown = self._started
        self.num_output_tokens = 0
        if sys.stderr.isatty() if enabled is None else enabled:
            from tqdm import tqdm

            self._bar = tqdm(
                total=num_tokens if self._counts_tokens else num_requests,
                unit="token" if self._counts_tokens else unit,
                desc=label,
                dynamic_ncols=True,
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
        now = time.perf_counter()
        if self._bar is not None and now - self._shown >= REFRESH_SECONDS:
            self._shown = now
            self._count_tokens()
            self._bar.set_postfix_str(self._postfix())

    def on_finished(self) -> None:
        if self._bar is not None and not self._counts_tokens:
            self._bar.update()

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


def draft_summary(num_drafts: int, num_accepted: int, num_spans: int) -> str:
    """How speculation went: tokens that were drafted, that stood, and what a step with drafts made.

    num_spans: steps of one sequence that had drafts; each yields its accepted drafts and one token.
    """
    if num_drafts == 0:
        return "no drafts were made"
    return (
        f"{num_accepted} of {num_drafts} drafts accepted ({num_accepted / num_drafts:.0%}), "
        f"{1 + num_accepted / num_spans:.2f} tokens per step with drafts"
    )
