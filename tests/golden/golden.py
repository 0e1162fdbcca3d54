"""What a golden case consists of, whoever computes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Greedy:
    """One greedy continuation; logits [num_new_tokens, vocab_size] before each choice."""

    token_ids: list[int]
    logits: Array

    @property
    def min_margin(self) -> float:
        """The smallest lead of the chosen logit over the next."""
        top = np.sort(self.logits, axis=1)[:, -2:]
        return float((top[:, 1] - top[:, 0]).min())


class Model(Protocol):
    """A checkpoint that somebody computes in float32."""

    @property
    def vocab_size(self) -> int:
        """How many tokens it knows."""

    def generate(self, prompt: Sequence[int], num_new_tokens: int) -> Greedy:
        """The greedy continuation of a prompt."""

    def logits(self, tokens: Sequence[int]) -> Array:
        """Logits [len(tokens), vocab_size] of one pass over a prompt."""

    def has_close_choice(self, tokens: Sequence[int]) -> bool:
        """Whether which experts a token goes to hangs on rounding."""


class Source(Protocol):
    """Where the checkpoints of a case come from."""

    @property
    def min_distinct(self) -> float:
        """The least share of different tokens in the greedy continuations."""

    @property
    def made_with(self) -> dict[str, Any]:
        """What golden.json says of where it comes from."""

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """The prompts, the longest last."""

    def write(self, folder: Path, seed: int) -> None:
        """Write config.json and safetensors of a random model."""

    def load(self, folder: Path) -> Model:
        """The written checkpoint."""

    def without(self, folder: Path) -> Iterator[Model]:
        """The written checkpoint without each of the case's special features."""
