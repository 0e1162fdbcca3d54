"""Observers: the range that 8 bits should cover, from batches of values.

An observer has one or more independent groups (a tensor is one, a cache has one per key/value
head). `range()` is the absolute value that becomes the largest code; values beyond it are clipped.
Batches are summarised, not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from predict.errors import UserError, one_of
from quant.grids import round_fp8, round_int8

Observed = npt.NDArray[Any]
Rounding = Callable[[Observed, Any], Observed]  # (values, range) -> values on the 8-bit grid

NUM_BINS = 4096
SMALLEST_RANGE = 1e-8  # what a range of only zeros becomes, so that no scale is 0


class Observer(Protocol):
    """Finds the ranges of groups of values."""

    def update(self, values: Observed) -> None:
        """Takes one batch, [groups, n]; raises UserError on NaN and infinity."""
        ...

    def range(self) -> Observed:
        """[groups]; raises UserError when no batch has come."""
        ...


def batch_absmax(values: Observed) -> Observed:
    """Largest absolute value [groups] of values [groups, n]; UserError on NaN and infinity."""
    # One pass without a temporary as large as the batch; NaN and infinity survive min and max.
    absmax = np.maximum(-values.min(axis=1), values.max(axis=1)).astype(np.float32)
    if not np.isfinite(absmax).all():
        raise UserError("the values hold NaN or infinity")
    return absmax


def _seen(summary: Observed | None) -> Observed:
    """The summary of the batches; UserError where none came."""
    if summary is None or not len(summary):
        raise UserError("no calibration batch has been observed; give more calibration data")
    return summary


class AbsMax:
    """The largest absolute value of all batches."""

    def __init__(self, rounding: Rounding = round_int8) -> None:
        self._absmax: Observed | None = None

    def update(self, values: Observed) -> None:
        absmax = batch_absmax(values)
        self._absmax = absmax if self._absmax is None else np.maximum(self._absmax, absmax)

    def range(self) -> Observed:
        absmax = _seen(self._absmax)
        return np.maximum(absmax, np.float32(SMALLEST_RANGE))


class AverageAbsMax:
    """The mean over batches of each batch's largest absolute value (PaddleNLP's "avg")."""

    def __init__(self, rounding: Rounding = round_int8) -> None:
        self._sum: Observed | None = None
        self._num_batches = 0

    def update(self, values: Observed) -> None:
        absmax = batch_absmax(values).astype(np.float64)
        self._sum = absmax if self._sum is None else self._sum + absmax
        self._num_batches += 1

    def range(self) -> Observed:
        mean = (_seen(self._sum) / max(self._num_batches, 1)).astype(np.float32)
        return np.maximum(mean, np.float32(SMALLEST_RANGE))


class Histogram:
    """Counts of absolute values [groups, NUM_BINS]; the width doubles when a larger one comes."""

    def __init__(self) -> None:
        self.counts = np.zeros((0, NUM_BINS))
        self.top = np.zeros(0)  # [groups] right border of the last bin
        self.absmax = np.zeros(0, np.float32)  # [groups]

    def update(self, values: Observed) -> None:
        """Counts one batch, [groups, n]; raises UserError on NaN and infinity."""
        absmax = batch_absmax(values)
        if not len(self.counts):
            self.counts = np.zeros((len(values), NUM_BINS))
            self.top = np.zeros(len(values))
            self.absmax = np.zeros(len(values), np.float32)
        self.absmax = np.maximum(self.absmax, absmax)
        for group, largest in enumerate(absmax):
            if largest == 0:
                self.counts[group, 0] += values.shape[1]
                continue
            if self.top[group] == 0:
                self.top[group] = largest
            while self.top[group] < largest:
                pairs = self.counts[group].reshape(-1, 2).sum(axis=1)
                self.counts[group] = np.concatenate([pairs, np.zeros(NUM_BINS // 2)])
                self.top[group] *= 2
            found, _ = np.histogram(np.abs(values[group]), NUM_BINS, (0.0, self.top[group]))
            self.counts[group] += found

    def centers(self, group: int) -> Observed:
        """The middle of each bin."""
        centers: Observed = (np.arange(NUM_BINS) + 0.5) * self.top[group] / NUM_BINS
        return centers


class HistogramObserver:
    """An observer that chooses the range from a histogram."""

    def __init__(self, rounding: Rounding = round_int8) -> None:
        self.rounding = rounding
        self.histogram = Histogram()

    def update(self, values: Observed) -> None:
        self.histogram.update(values)

    def range(self) -> Observed:
        groups = range(len(_seen(self.histogram.counts)))
        found = [self.choose(group) if self.histogram.top[group] else 0.0 for group in groups]
        chosen = np.minimum(np.array(found, np.float32), self.histogram.absmax)
        return np.maximum(chosen, np.float32(SMALLEST_RANGE))

    def choose(self, group: int) -> float:
        """The range of one group with values other than 0."""
        raise NotImplementedError


class Percentile(HistogramObserver):
    """The value that SHARE of all absolute values do not exceed."""

    SHARE = 0.9999

    def choose(self, group: int) -> float:
        cumulative = np.cumsum(self.histogram.counts[group])
        index = int(np.searchsorted(cumulative, self.SHARE * cumulative[-1]))
        return float((index + 1) * self.histogram.top[group] / NUM_BINS)


class MeanSquaredError(HistogramObserver):
    """The range whose rounded values are nearest to the originals in mean square."""

    SHARES = np.arange(0.2, 1.0001, 0.01)

    def choose(self, group: int) -> float:
        centers = self.histogram.centers(group)
        counts = self.histogram.counts[group]
        absmax = float(self.histogram.absmax[group])
        used = counts > 0
        centers, counts = centers[used], counts[used]
        losses = [
            float(np.sum(counts * (self.rounding(centers, share * absmax) - centers) ** 2))
            for share in self.SHARES
        ]
        return float(self.SHARES[int(np.argmin(losses))]) * absmax


class KullbackLeibler(HistogramObserver):
    """The range whose rounded distribution loses the least information (Migacz 2017, TensorRT).

    Differs from it in that the levels are those of the number format, so that e4m3 works too.
    """

    FIRST_BIN, STEP = 128, 32

    def choose(self, group: int) -> float:
        counts = self.histogram.counts[group]
        centers = self.histogram.centers(group)
        width = self.histogram.top[group] / NUM_BINS
        last = int(np.flatnonzero(counts)[-1]) + 1
        candidates = [*range(min(self.FIRST_BIN, last), last, self.STEP), last]
        losses = [self._loss(counts, centers, bins, bins * width) for bins in candidates]
        return float(candidates[int(np.argmin(losses))] * width)

    def _loss(self, counts: Observed, centers: Observed, bins: int, top: float) -> float:
        """KL divergence of the clipped from the rounded distribution over the first `bins`."""
        kept = counts[:bins]
        clipped = kept.copy()
        clipped[-1] += counts[bins:].sum()
        _, level = np.unique(self.rounding(centers[:bins], top), return_inverse=True)
        used = kept > 0
        # A level's mass is spread evenly over those of its bins that hold something.
        mass = np.bincount(level, weights=kept)
        holders = np.bincount(level, weights=used)
        rounded = np.where(used, (mass / np.maximum(holders, 1))[level], 0.0)
        p, q = clipped / clipped.sum(), rounded / max(rounded.sum(), 1.0)
        both = p > 0
        # Mass that clipping moves to an empty bin has no counterpart: as bad as can be measured.
        return float(np.sum(p[both] * np.log(p[both] / np.maximum(q[both], 1e-12))))


OBSERVERS: dict[str, Callable[[Rounding], Observer]] = {
    "abs_max": AbsMax,
    "avg": AverageAbsMax,
    "percentile": Percentile,
    "mse": MeanSquaredError,
    "kl": KullbackLeibler,
}
ROUNDINGS: dict[str, Rounding] = {"int8": round_int8, "fp8": round_fp8}


def make_observer(method: str, number_format: str = "int8") -> Observer:
    """The observer of that name for "int8" or "fp8"; raises UserError naming the known ones."""
    if method not in OBSERVERS:
        raise one_of("observer", method, OBSERVERS)
    return OBSERVERS[method](ROUNDINGS[number_format])
