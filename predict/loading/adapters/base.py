"""The tensors of a checkpoint that an adapter may change, found by names of other files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from predict.loading.arrays import Shape
from predict.nn.hf_config import ConfigReader
from predict.nn.plans import WeightPlan
from predict.nn.weights import WeightNames

# What names of one network may begin with in one file and not in another.
PREFIXES = ("base_model", "model", "transformer", "language_model")
WEIGHT, BIAS = ".weight", ".bias"


@dataclass(frozen=True)
class Base:
    """The tensors of a checkpoint that a network is made of."""

    shapes: Mapping[str, Shape]
    tables: frozenset[str]  # rows are taken from them
    transposed: frozenset[str]  # stored [in, out]
    embedding: str
    head: str  # of a tied network, what its head would be called
    is_tied: bool
    config: ConfigReader
    takes_turns: bool | None  # see Checkpoint.takes_turns

    @classmethod
    def of(
        cls,
        plan: WeightPlan,
        names: WeightNames,
        shapes: Mapping[str, Shape],
        config: ConfigReader,
        takes_turns: bool | None,
    ) -> Base:
        """shapes: of the checkpoint's tensors; those that the plan does not read are left out."""
        linears = list(plan.stored_linears())
        transposed = {
            prefix + WEIGHT for linear in linears if linear.transposed for prefix in linear.prefixes
        }
        read = {name for name, _ in (*plan.matrices(), *plan.small_tensors())}
        read |= {p + end for each in linears for p in each.prefixes for end in (WEIGHT, BIAS)}
        return cls(
            {name: shape for name, shape in shapes.items() if name in read},
            frozenset(name for name, _ in plan.matrices()),
            frozenset(transposed),
            plan.embedding,
            names.head + WEIGHT,
            plan.spec.tie_word_embeddings,
            config,
            takes_turns,
        )

    @cached_property
    def every_shape(self) -> Mapping[str, Shape]:
        """With that of a tied network's head."""
        if not self.is_tied:
            return self.shapes
        return {**self.shapes, self.head: self.shapes[self.embedding]}

    def find(self, name: str) -> str | None:
        """The tensor that another file calls so; None where there is none, or several are."""
        if name in self.every_shape:
            return name
        alike = self._by_ending.get(_ending(name), [])
        return alike[0] if len(alike) == 1 else None

    @cached_property
    def _by_ending(self) -> Mapping[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in self.every_shape:
            found.setdefault(_ending(name), []).append(name)
        return found


def _ending(name: str) -> str:
    """A name without what differs between files of one network."""
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if part not in PREFIXES), len(parts))
    return ".".join(parts[first:])
