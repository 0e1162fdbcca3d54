"""What a rank has of a network's axes: heads, inner features, experts, tokens of the vocabulary.

A record says by which axis each of its slots is cut (Cut). A kind's `shared` says what of these
axes one of N ranks has. Of both a slot's rows and columns follow, whatever its kind is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import gcd, lcm
from typing import NamedTuple, TypeAlias

from predict.errors import UserError

Ranges: TypeAlias = tuple[tuple[int, int], ...]  # [begin, end) each, one behind the other
# Inner features that kernels of CPUs take at once, and those that all kernels of GPUs take: a share
# has whole ones if it can.
ALIGNED, LEAST_ALIGNED = 32, 16


@dataclass(frozen=True)
class Axis:
    """What a rank has of `size` heads, features or experts."""

    size: int
    ranges: Ranges

    @property
    def count(self) -> int:
        """Of this rank."""
        return num_places(self.ranges)

    def in_order(self, places: Sequence[int]) -> Axis:
        """The axis with the rank's share of `places`, which are all of it in another order."""
        own = (int(places[at]) for begin, end in self.ranges for at in range(begin, end))
        return Axis(self.size, joined((place, place + 1) for place in own))


class Cut(NamedTuple):
    """How ranks share a slot, by names of axes. Without any it is whole on each of them.

    rows: of each of its parts. parts: rows of these, where they are not the slot's own. columns:
    other ranks have other inputs, their products are summed, and the bias is the first rank's.
    experts: each rank has others. An axis that a rank does not have in `Block.shared` cuts nothing.
    """

    rows: tuple[str, ...] = ()
    columns: str = ""
    experts: str = ""
    parts: tuple[int, ...] = ()


class SlotShare(NamedTuple):
    """Rows and columns of a slot's whole matrix that a rank has, in its order; None: all.

    experts: those of it that a rank has.
    """

    rows: Ranges | None = None
    columns: Ranges | None = None
    experts: tuple[int, int] | None = None


@dataclass(frozen=True)
class Ranks:
    """Which one of `size` ranks this is, and how they share.

    unit: inner features that stay together, as groups of a scheme must. whole_experts: each rank
    has some experts, in place of a part of each.
    """

    rank: int
    size: int
    unit: int = 1
    whole_experts: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} of {self.size} (allowed: 0 to {self.size - 1})")

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def alike(self, count: int, name: str) -> Axis:
        """As many places for each rank. Raises UserError where they do not divide."""
        if count % self.size:
            raise UserError(
                f"{count} {name} do not divide among {self.size} ranks; use a "
                f"--tensor_parallel_degree that divides {count}"
            )
        each = count // self.size
        return Axis(count, ((self.rank * each, (self.rank + 1) * each),))

    def nearly_alike(self, count: int, name: str) -> Axis:
        """Floor or ceiling of count / ranks places. Raises UserError where a rank had none."""
        if count < self.size:
            raise UserError(
                f"there are {count} {name} for {self.size} ranks; use a --tensor_parallel_degree "
                f"of at most {count}"
            )
        return Axis(count, (part_of(count, self.rank, self.size),))

    def features(self, size: int) -> Axis:
        """Inner features in units, unevenly where need be; the last one may be smaller.

        Raises UserError for too few units.
        """
        units = (lcm(self.unit, ALIGNED), lcm(self.unit, LEAST_ALIGNED), self.unit)
        unit = next((u for u in units if size % u == 0 and size // u >= self.size), self.unit)
        name = "inner features" if unit == 1 else f"groups of {unit} inner features"
        ((begin, end),) = self.nearly_alike(-(-size // unit), name).ranges
        return Axis(size, ((begin * unit, min(end * unit, size)),))

    def key_heads(self, num_heads: int, num_kv_heads: int) -> Axis:
        """The key heads that a rank's query heads read; repeated where their groups are uneven.

        Each of them is read by as many of the rank's query heads.
        """
        ((begin, end),) = self.alike(num_heads, "query heads").ranges
        group = num_heads // num_kv_heads
        read = [head // group for head in range(begin, end)]
        each = gcd(*(len(list(alike)) for _, alike in groupby(read)))
        return Axis(num_kv_heads, joined((head, head + 1) for head in read[::each]))


def part_of(count: int, rank: int, size: int) -> tuple[int, int]:
    """[begin, end) of a rank among `size` that have nearly as many of `count` places each."""
    least, more = divmod(count, size)
    begin = rank * least + min(rank, more)
    return begin, begin + least + (rank < more)


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same places, neighbours in one range."""
    found: list[tuple[int, int]] = []
    for begin, end in ranges:
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return tuple(found)


def num_places(ranges: Ranges) -> int:
    """Places in all ranges together."""
    return sum(end - begin for begin, end in ranges)


def places(
    parts: Sequence[int], names: Sequence[str], axes: Mapping[str, Axis]
) -> tuple[Ranges, ...]:
    """Of each part of so many rows, those that an axis names, counted from the first part's first.

    A part has as many rows for each place of its axis.
    """
    found, first = [], 0
    for size, name in zip(parts, names, strict=True):
        axis = axes[name]
        each = size // axis.size
        found.append(tuple((first + b * each, first + e * each) for b, e in axis.ranges))
        first += size
    return tuple(found)
