"""From a text's hidden states to its vector or score: pooling, dense layers, a length of 1.

All in float32 on the host: a text's hidden states come in parts, in order. Imports no Paddle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.config.model import POOLINGS
from predict.errors import UserError, quoted

Vectors = npt.NDArray[np.float32]
_ROWS = {"cls", "last"}  # poolings that read one token each


def check_pooling(pooling: str) -> None:
    """Raises UserError for an unknown pooling."""
    if pooling not in POOLINGS:
        raise UserError(
            f"pooling is {quoted(pooling)} (allowed: {', '.join(POOLINGS)}: the first or the last "
            "token's hidden state, or of all tokens the largest values, the mean, the sum over the "
            "root of their number, or the mean weighted by place)"
        )


def _erf(x: Vectors) -> Vectors:
    return np.vectorize(math.erf, otypes=[np.float32])(x)


def _sigmoid(x: Vectors) -> Vectors:
    ratio = np.exp(-np.abs(x))
    return np.where(x < 0, ratio, np.float32(1)) / (1 + ratio)


FUNCTIONS: Mapping[str, Callable[[Vectors], Vectors]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: x * np.float32(0.5) * (1 + _erf(x * np.float32(0.5**0.5))),
}


@dataclass(frozen=True)
class Dense:
    """function(weight x + bias), with a layer norm behind it where there is one."""

    weight: Vectors  # [out, in]
    bias: Vectors | None = None  # [out]
    function: str = "identity"  # of FUNCTIONS
    norm: tuple[Vectors, Vectors | None, float] | None = None  # factor, bias, epsilon

    def __call__(self, x: Vectors) -> Vectors:
        """[..., out] of [..., in]."""
        made = x @ self.weight.T
        made = FUNCTIONS[self.function](made if self.bias is None else made + self.bias)
        if self.norm is None:
            return made
        factor, bias, epsilon = self.norm
        centred = made - made.mean(axis=-1, keepdims=True)
        made = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + epsilon) * factor
        return made if bias is None else made + bias


@dataclass(frozen=True)
class Pooler:
    """What a text's hidden states, or its last token's logits, become.

    answers: the tokens of no and yes; the result is then the share of yes among the two, by the
    logits behind the text, and there are no poolings.
    """

    poolings: tuple[str, ...]  # of POOLINGS, joined one behind the other
    layers: tuple[Dense, ...] = ()
    normalize: bool = False
    answers: tuple[int, int] | None = None

    @property
    def reads_last(self) -> bool:
        """Whether only what stands behind the last token counts."""
        return self.answers is not None or self.poolings == ("last",)

    def of_logits(self, logits: Vectors) -> Vectors:
        """The share of yes, [1], of a row of logits."""
        assert self.answers is not None
        no, yes = logits[self.answers[0]], logits[self.answers[1]]
        return _sigmoid(np.array([yes - no], np.float32))

    def finished(self, pooled: Vectors) -> Vectors:
        """The layers of a pooled vector, and its length made 1 where that is asked for."""
        for layer in self.layers:
            pooled = layer(pooled)
        return normalized(pooled) if self.normalize else pooled


def normalized(vectors: Vectors) -> Vectors:
    """Vectors [..., size] made of length 1; a zero vector stays."""
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return (vectors / np.maximum(length, np.float32(1e-12))).astype(np.float32)


@dataclass
class Pooled:
    """The pooling of one text, whose hidden states come part by part.

    num_tokens: of the text. first: the first token that counts for means and maxima. The parts do
    not change the result: sums go from token to token.
    """

    pooler: Pooler
    num_tokens: int
    first: int = 0
    _kept: dict[str, Any] = field(default_factory=dict)

    def clear(self) -> None:
        """Forgets what was added."""
        self._kept.clear()

    def wanted(self, start: int, count: int) -> Sequence[int]:
        """Which of `count` tokens from `start` on are read, counted from `start`."""
        names = set(self.pooler.poolings)
        if not names <= _ROWS:
            return range(count)
        places = {"cls": self.first - start, "last": self.num_tokens - 1 - start}
        return sorted({places[name] for name in names if 0 <= places[name] < count})

    def add(self, rows: Vectors, start: int, count: int) -> None:
        """Takes hidden states of those of `count` tokens from `start` on that are `wanted`."""
        if set(self.pooler.poolings) <= _ROWS:
            for row, place in zip(rows, self.wanted(start, count), strict=True):
                for name, token in (("cls", self.first), ("last", self.num_tokens - 1)):
                    if start + place == token:
                        self._kept[name] = row.copy()
            return
        own = rows[max(self.first - start, 0) :]
        place = max(start - self.first, 0)  # of own[0] among those that count
        for name in self.pooler.poolings if len(own) else ():
            if name == "cls":
                self._kept.setdefault(name, own[0].copy())
            elif name == "last":
                self._kept[name] = own[-1].copy()
            elif name == "max":
                most = own.max(axis=0)
                self._kept[name] = np.maximum(self._kept.get(name, most), most)
            else:
                weighted = own
                if name == "weightedmean":
                    weights = np.arange(place + 1, place + 1 + len(own), dtype=np.float32)
                    weighted = own * weights[:, None]
                if name in self._kept:
                    weighted = np.concatenate([self._kept[name][None], weighted])
                self._kept[name] = np.add.reduce(weighted, axis=0)

    def _divisor(self, name: str) -> float:
        count = self.num_tokens - self.first
        if name == "weightedmean":
            return count * (count + 1) / 2
        return {"mean": count, "mean_sqrt_len": count**0.5}.get(name, 1)

    def result(self) -> Vectors:
        """The text's vector, once all of its tokens were added."""
        parts = [
            self._kept[name] / np.float32(self._divisor(name)) for name in self.pooler.poolings
        ]
        return self.pooler.finished(np.concatenate(parts).astype(np.float32))
