"""What an adapter changes in a model, whoever wrote it: low-rank products and whole tensors.

Nothing is read here but shapes; factors and tensors are when they are asked for. Names are those of
the base checkpoint's linears once `predict.loading.adapters.fit` has found them there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.device.place import to_float32
from predict.errors import UserError
from predict.loading.adapters.values import Floats, Values

MIN_NORM = 1e-12  # rows of zeros stay zeros
BLOCK_ROWS = 64  # of a matrix: as float32 they stay in a core's cache


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """What an adapter's own config file says, as far as it matters once it is trained."""

    format: str  # PEFT | PaddleNLP
    r: int  # of the linears that have no rank of their own
    alpha: float
    use_rslora: bool = False
    base_model: str | None = None
    ties_embeddings: bool = False  # a change of a tied embedding is one of the LM head, too


@dataclass(frozen=True)
class LowRank:
    """What is added to one matrix [out, in]: scaling * B @ mixer @ A.

    With a magnitude (DoRA), rows of the sum are then brought to these lengths. A table of tokens
    [num, width] is the matrix [width, num], stored the other way round.
    """

    name: str  # of the linear, without ".weight"
    a: Values  # [r, in]
    b: Values  # [out, r]
    scaling: float
    mixer: Values | None = None  # [r, r]
    magnitude: Values | None = None  # [out]
    bias: Values | None = None  # [out]; times scaling, it is added to the linear's
    is_table: bool = False
    is_transposed: bool = False  # the base checkpoint stores [in, out]

    def __post_init__(self) -> None:
        """Raises UserError where the factors are no matrices of one rank."""
        for values, what in ((self.a, "A"), (self.b, "B")):
            if len(values.shape) != 2 or 0 in values.shape:
                raise UserError(
                    f"{values.where} has the shape {list(values.shape)}; {what} of a low-rank "
                    "product is a matrix"
                )
        if self.a.shape[0] != self.b.shape[1]:
            raise UserError(
                f"{self.a.where} has rank {self.a.shape[0]}, and B of {self.name} has rank "
                f"{self.b.shape[1]}; the two do not belong together"
            )
        if self.mixer is not None and self.mixer.shape != (self.rank, self.rank):
            raise UserError(
                f"{self.mixer.where} has the shape {list(self.mixer.shape)}, and the rank is "
                f"{self.rank}; the two do not belong together"
            )

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def is_plain(self) -> bool:
        """Whether the product is all there is, so that it can run beside the linear."""
        return self.magnitude is None and self.bias is None and not self.is_table

    def factors(self) -> tuple[Floats, Floats]:
        """A [r, in] and B [out, r], scaling and mixer in B: what is added is B @ A.

        Raises UserError for values that are not finite.
        """
        a, b = self.a.read(), self.b.read()
        with np.errstate(over="ignore", invalid="ignore"):
            if self.mixer is not None:
                b = b @ self.mixer.read()
            b = b * np.float32(self.scaling)
        if not np.isfinite(b).all():
            raise UserError(
                f"{self.b.where} times its scaling {self.scaling:g} is more than float32 holds; "
                "the adapter is damaged: copy it, or train it, again"
            )
        return a, b

    def added_to(self, weight: npt.NDArray[Any]) -> Floats:
        """The changed matrix, new and in float32, as the base stores it; weight: any float's."""
        a, b = self.factors()
        left, right = (a.T, b.T) if self.is_transposed else (b, a)
        with np.errstate(over="ignore", invalid="ignore"):  # the sum is looked at
            made: Floats = left @ right

        def add(first: int) -> None:
            rows = slice(first, first + BLOCK_ROWS)
            np.add(made[rows], to_float32(weight[rows]), out=made[rows])

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(add, range(0, len(made), BLOCK_ROWS)))
        if self.magnitude is not None:
            lengths = np.linalg.norm(made, axis=0 if self.is_transposed else 1, keepdims=True)
            made *= self.magnitude.read().reshape(lengths.shape) / np.maximum(lengths, MIN_NORM)
        return made

    def added_to_bias(self, bias: Floats) -> Floats:
        if self.bias is None:
            return bias
        with np.errstate(over="ignore", invalid="ignore"):  # the sum is looked at
            return bias + np.float32(self.scaling) * self.bias.read()


@dataclass(frozen=True)
class Adapter:
    """An adapter of a directory."""

    directory: Path
    config: AdapterConfig
    linears: Mapping[str, LowRank]  # by the linear's name, without ".weight"
    replaced: Mapping[str, Values]  # by the tensor's whole name
    # Fitted to a model whose LM head is its embedding: the head becomes a matrix of its own.
    unties_head: bool = False

    @property
    def max_rank(self) -> int:
        """The largest rank of a linear; 0 without any."""
        return max((linear.rank for linear in self.linears.values()), default=0)
