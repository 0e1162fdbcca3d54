"""Statistics of activations that calibration collects, batch by batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from predict.errors import UserError
from quant.gptq import Hessian
from quant.grids import Array
from quant.observers import Observer, batch_absmax

SAMPLE_ROWS = 512  # inputs that searches with rounded activations try scales on


@dataclass(frozen=True)
class StatBatches:
    """Number of batches for each statistic of a linear's input; 0: it is not collected."""

    hessian: int = 0
    ranges: int = 0
    magnitudes: int = 0
    sample: int = 0

    @property
    def num_batches(self) -> int:
        """Batches until every statistic is complete."""
        return max(self.hessian, self.ranges, self.magnitudes, self.sample)


class InputStats:
    """Statistics per input channel of one linear, over the first batches."""

    def __init__(self, in_features: int, wanted: StatBatches) -> None:
        self.in_features = in_features
        self.wanted = wanted
        self.num_batches = 0
        self._hessian = Hessian(in_features) if wanted.hessian else None
        self._lows: list[Array] = []
        self._highs: list[Array] = []
        self._sum_abs = np.zeros(in_features)
        self._num_rows = 0
        self._sample: list[Array] = []

    def update(self, inputs: Array) -> None:
        """Takes the inputs [T, K] of one batch; raises UserError on NaN and infinity."""
        batch = self.num_batches
        self.num_batches += 1
        batch_absmax(inputs.reshape(1, -1))
        if self._hessian is not None and batch < self.wanted.hessian:
            self._hessian.update(inputs)
        if batch < self.wanted.ranges:
            self._lows.append(inputs.min(axis=0))
            self._highs.append(inputs.max(axis=0))
        if batch < self.wanted.magnitudes:
            self._sum_abs += np.abs(inputs).sum(axis=0, dtype=np.float64)
            self._num_rows += len(inputs)
        if batch < self.wanted.sample:
            count = max(1, SAMPLE_ROWS // self.wanted.sample)
            rows = np.linspace(0, len(inputs) - 1, min(count, len(inputs))).round().astype(int)
            self._sample.append(inputs[rows])

    @property
    def num_rows(self) -> int:
        """Inputs that the second moments are of."""
        return 0 if self._hessian is None else self._hessian.num_rows

    def rescale(self, scale: Array) -> None:
        """Makes these the statistics of the inputs divided by scale [K]."""
        if self._hessian is not None:
            self._hessian.sum /= np.outer(scale, scale)
        self._lows = [low / scale for low in self._lows]
        self._highs = [high / scale for high in self._highs]
        self._sum_abs /= scale
        self._sample = [rows / scale for rows in self._sample]

    @property
    def hessian(self) -> Array:
        """mean(x x^T), [K, K]."""
        if self._hessian is None:
            raise UserError("the inputs' second moments were not collected")
        return self._hessian.mean()

    @property
    def absmax(self) -> Array:
        """[K] largest |x|."""
        low, high = self.range(average=False)
        return np.maximum(-low, high)

    @property
    def mean_abs(self) -> Array:
        """[K] mean |x|."""
        result: Array = (self._sum_abs / max(self._num_rows, 1)).astype(np.float32)
        return result

    @property
    def sample(self) -> Array:
        """Some inputs, [n, K]."""
        return np.concatenate(self._sample)

    def range(self, average: bool) -> tuple[Array, Array]:
        """Smallest and largest x [K]: of all batches, or the mean of each batch's."""
        if not self._lows:
            raise UserError("no calibration batch has been observed; give more calibration data")
        lows, highs = np.stack(self._lows), np.stack(self._highs)
        if average:
            return lows.mean(axis=0), highs.mean(axis=0)
        return lows.min(axis=0), highs.max(axis=0)


@dataclass
class TensorObserver:
    """An observer, for some batches: of a linear's input as a whole after a shift, or of heads."""

    observer: Observer
    max_batches: int
    shift: Array | None = None  # [K]
    num_batches: int = 0

    def update(self, inputs: Array) -> None:
        """Takes the inputs [T, K], or the heads [T, num_kv_heads, head_dim], of one batch."""
        if self.num_batches < self.max_batches:
            shifted = inputs if self.shift is None else inputs + self.shift
            heads = shifted[:, None] if shifted.ndim == 2 else shifted
            self.observer.update(heads.transpose(1, 0, 2).reshape(heads.shape[1], -1))
        self.num_batches += 1

    def range(self) -> Array:
        """The values of the largest codes: [1], or [num_kv_heads]."""
        return self.observer.range()
