"""A progress bar with tokens per second, on terminals only."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from predict import console

REFRESH_SECONDS = 0.2


class Progress:
    """Counts finished requests and output tokens; shows them on stderr when it is a terminal."""

    def __init__(
        self, num_requests: int, enabled: bool | None = None, unit: str = "prompt"
    ) -> None:
        """`enabled`: None shows the bar when stderr is a terminal. unit: of what is counted."""
        self._bar: Any = None
        self._started = time.perf_counter()
        self._shown = self._started
        self.num_output_tokens = 0
        if sys.stderr.isatty() if enabled is None else enabled:
            from tqdm import tqdm

            self._bar = tqdm(
                total=num_requests,
                unit=unit,
                dynamic_ncols=True,
                leave=False,
                file=console.Unfailing(sys.stderr),
            )

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def on_step(self, prompt_tokens: int, output_tokens: int) -> None:
        """Counts the tokens of one engine step."""
        self.num_output_tokens += output_tokens
        now = time.perf_counter()
        if self._bar is not None and now - self._shown >= REFRESH_SECONDS:
            self._shown = now
            self._bar.set_postfix_str(f"{self.tokens_per_second:.1f} tokens/s")

    def on_finished(self) -> None:
        """Counts one finished request."""
        if self._bar is not None:
            self._bar.update()

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
        """Seconds since the start."""
        return time.perf_counter() - self._started

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second since the start."""
        return self.num_output_tokens / max(self.seconds, 1e-9)
