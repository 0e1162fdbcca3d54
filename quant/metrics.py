"""Distances between the next-token distributions of two models. Pure NumPy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.errors import UserError

Logits = npt.NDArray[np.float32]  # [n, vocab_size]
MAX_ELEMENTS = 1 << 23  # of logits at once: large vocabularies would take gigabytes of temporaries


@dataclass
class Comparison:
    """Sums over positions, of the model in question against a reference; natural logarithms."""

    loss: float = 0.0  # -log p(next token)
    reference_loss: float = 0.0
    divergence: float = 0.0  # KL(reference || model)
    num_agreeing: int = 0  # positions with the same most likely token
    num_positions: int = 0

    def update(self, logits: Logits, reference: Logits, targets: npt.NDArray[Any]) -> None:
        """Adds positions: logits of both models [n, V], and the tokens [n] that follow.

        Raises UserError where logits hold NaN.
        """
        step = max(1, MAX_ELEMENTS // logits.shape[-1])
        for start in range(0, len(targets), step):
            part = slice(start, start + step)
            self._update(logits[part], reference[part], targets[part])

    def _update(self, logits: Logits, reference: Logits, targets: npt.NDArray[Any]) -> None:
        for name, values in (("model", logits), ("reference", reference)):
            if not np.isfinite(values).all():
                raise UserError(f"the logits of the {name} hold NaN or infinity")
        rows = np.arange(len(targets))
        own, other = log_softmax(logits), log_softmax(reference)
        self.loss -= float(own[rows, targets].sum(dtype=np.float64))
        self.reference_loss -= float(other[rows, targets].sum(dtype=np.float64))
        self.divergence += float(np.sum(np.exp(other) * (other - own), dtype=np.float64))
        self.num_agreeing += int(np.sum(logits.argmax(axis=1) == reference.argmax(axis=1)))
        self.num_positions += len(targets)

    @property
    def perplexity(self) -> float:
        """Of the model: the exponential of its mean loss."""
        return math.exp(self.loss / self.num_positions)

    @property
    def perplexity_ratio(self) -> float:
        """Over the reference's perplexity."""
        return math.exp((self.loss - self.reference_loss) / self.num_positions)

    @property
    def kl(self) -> float:
        """Mean divergence per position, nats."""
        return self.divergence / self.num_positions

    @property
    def top1_agreement(self) -> float:
        """Share of positions with the same most likely token."""
        return self.num_agreeing / self.num_positions


def log_softmax(logits: Logits) -> npt.NDArray[np.float32]:
    """Logarithms of the probabilities, over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    total = np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)
    result: npt.NDArray[np.float32] = (shifted - np.log(total)).astype(np.float32)
    return result
