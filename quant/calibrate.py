"""Quantizes one layer from its inputs: transforms, scales, rounding, and the layer's output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from predict.config.schemes import scheme_info
from predict.errors import UserError
from predict.loading.platform import is_compiled
from predict.schemes import Quantized, scheme_of
from predict.schemes._e4m3 import encode
from quant.awq import output_error, search_clip, search_scale
from quant.config import QuantConfig
from quant.gptq import GptqConfig, gptq
from quant.grids import (
    E4M3_MAX,
    INT8_MAX,
    Array,
    QuantizedWeight,
    WeightGrid,
    round_to_nearest,
)
from quant.layer import KINDS, Captured, LayerWeights, run_layer
from quant.observers import make_observer
from quant.smooth import PiecewiseSearch, piecewise_search, shift_of, smooth_scale
from quant.stats import HeadObserver, InputStats, TensorObserver, Wanted

if TYPE_CHECKING:
    from paddle import Tensor

NORM_FED = ("qkv", "gate_up")
BLOCK = 128  # rows and columns of blockwise fp8
OnBatch = Callable[[Captured, int], None]


@dataclass(frozen=True)
class Batches:
    """The layer's inputs: hidden states [T, H] of all sequences, and how they form batches."""

    hidden: Array  # may be a memory map
    lengths: tuple[int, ...]  # tokens of each sequence
    batch_size: int  # sequences

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.batch_size)

    def bounds(self, batch: int) -> tuple[slice, tuple[int, ...]]:
        """Rows of hidden of one batch, and its sequences' lengths."""
        first = batch * self.batch_size
        lengths = self.lengths[first : first + self.batch_size]
        start = sum(self.lengths[:first])
        return slice(start, start + sum(lengths)), lengths


@dataclass
class QuantizedLayer:
    """What becomes of a layer. Keyed by kind; a kind that is skipped is in none of them."""

    weights: LayerWeights  # as transformed
    quantized: dict[str, list[Quantized]] = field(default_factory=dict)  # one for each part
    act_range: dict[str, float] = field(default_factory=dict)  # what becomes code 127, or 448
    key_range: Array | None = None  # [num_kv_heads]
    value_range: Array | None = None  # [num_kv_heads]
    loss: dict[str, float] = field(default_factory=dict)  # relative output error, where known


class LayerQuantizer:
    """Quantizes layer after layer of one model with one config."""

    def __init__(self, config: QuantConfig, backend: ModuleType) -> None:
        self.config = config
        self.backend = backend
        self.compiled = backend if is_compiled(backend) else None
        self.grid = WeightGrid(
            config.info.bits, config.group_size, config.symmetric, config.weight_search
        )

    # A pass over the batches runs the layer once; what it is for hangs on `on_batch`.
    def _run(
        self,
        layer: LayerWeights,
        batches: Batches,
        ropes: Sequence[Tensor],
        num_batches: int,
        on_batch: Sequence[OnBatch],
        plain: dict[str, Array] | None = None,
    ) -> None:
        records = layer.records(self.compiled, plain)
        for batch in range(min(num_batches, len(batches))):
            rows, lengths = batches.bounds(batch)
            captured = run_layer(
                self.backend, records, np.asarray(batches.hidden[rows]), lengths, ropes
            )
            for take in on_batch:
                take(captured, batch)

    def quantize(
        self,
        layer: LayerWeights,
        batches: Batches | None,
        ropes: Sequence[Tensor],
        output: Array | None,
    ) -> QuantizedLayer:
        """Quantizes `layer` (changed in place); writes its output [T, H] to `output`.

        batches, output: None where nothing is calibrated. Raises UserError naming the linear where
        calibration meets NaN.
        """
        config = self.config
        kinds = [k for k in KINDS if not config.skips(layer.linears[k].plan.prefixes)]
        result = QuantizedLayer(layer)
        stats: dict[str, InputStats] = {}
        # With rounded weights in place, later layers make up for what earlier ones lose.
        follow = config.uses_moments
        transforms = config.shift or config.smooth
        shifts: dict[str, Array] = {}
        if batches is not None:
            keep = None if output is None or follow else self._keep(batches, output)
            observers = {} if transforms else self._observers(kinds, shifts)
            caches = self._cache_observers()
            stats = {
                kind: InputStats(layer.linears[kind].weight.shape[1], self._wanted(kind))
                for kind in kinds
            }
            first = self._passes(layer, stats, observers, caches, keep)
            self._run(layer, batches, ropes, self._num_batches(stats, keep), first)
            shifts = self._transform(layer, kinds, stats)
            if transforms and config.static_activations:
                observers = self._observers(kinds, shifts)
                again = self._passes(layer, {}, observers, {}, None)
                self._run(layer, batches, ropes, config.ptq_step, again)
            for kind, observer in observers.items():
                result.act_range[kind] = observer.range()
            if caches:
                result.key_range = caches["key"].range()
                result.value_range = caches["value"].range()
        plain: dict[str, Array] = {}
        for kind in kinds:
            quantized, matrix = self._round(layer, kind, stats.get(kind), result, shifts)
            result.quantized[kind] = quantized
            if matrix is not None:
                plain[kind] = matrix
        if batches is not None and output is not None and follow:
            keep = self._keep(batches, output)
            self._run(layer, batches, ropes, len(batches), [keep], plain)
        return result

    def _wanted(self, kind: str) -> Wanted:
        config = self.config
        smooth = config.smooth and (kind in NORM_FED or config.smooth_all)
        shift = config.shift and (kind in NORM_FED or config.shift_all)
        steps = config.do_gptq * config.gptq_step, config.do_awq * config.awq_step
        return Wanted(
            hessian=max(*steps, config.auto_clip * config.autoclip_step),
            ranges=max(smooth * config.smooth_step, shift * config.shift_step),
            magnitudes=config.do_awq * config.awq_step,
            sample=(smooth and config.piecewise)
            * (config.smooth_step if config.smooth_many else 1),
        )

    def _num_batches(self, stats: dict[str, InputStats], keep: OnBatch | None) -> int:
        if keep is not None:
            return self.config.num_batches
        observed = self.config.static_activations or self.config.cachekv
        needed = [entry.wanted.num_batches for entry in stats.values()]
        return max(*needed, observed * self.config.ptq_step, 0)

    def _observers(
        self, kinds: Sequence[str], shifts: dict[str, Array]
    ) -> dict[str, TensorObserver]:
        config = self.config
        if not config.static_activations:
            return {}
        number_format = "fp8" if config.info.activations == "e4m3" else "int8"
        return {
            kind: TensorObserver(
                make_observer(config.act_method, number_format), config.ptq_step, shifts.get(kind)
            )
            for kind in kinds
        }

    def _cache_observers(self) -> dict[str, HeadObserver]:
        config = self.config
        if not config.cachekv:
            return {}
        return {
            name: HeadObserver(make_observer(config.cache_method), config.ptq_step)
            for name in ("key", "value")
        }

    def _keep(self, batches: Batches, output: Array) -> OnBatch:
        def keep(captured: Captured, batch: int) -> None:
            output[batches.bounds(batch)[0]] = captured.output

        return keep

    def _passes(
        self,
        layer: LayerWeights,
        stats: dict[str, InputStats],
        observers: dict[str, TensorObserver],
        caches: dict[str, HeadObserver],
        keep: OnBatch | None,
    ) -> list[OnBatch]:
        def observe(captured: Captured, batch: int) -> None:
            for takers in (stats, observers):
                for kind, taker in takers.items():
                    prefixes = layer.linears[kind].plan.prefixes
                    with _naming(f"the input of {', '.join(prefixes)}", batch):
                        taker.update(captured.inputs[kind])
            for name, cache in caches.items():
                with _naming(f"the {name} cache of layer {layer.index}", batch):
                    cache.update(captured.keys if name == "key" else captured.values)

        return [observe] if keep is None else [observe, keep]

    def _transform(
        self, layer: LayerWeights, kinds: Sequence[str], stats: dict[str, InputStats]
    ) -> dict[str, Array]:
        """Shifts by kind; smooth and AWQ scales go into the layer, and into the statistics."""
        config = self.config
        shifts: dict[str, Array] = {}
        scales: dict[str, Array] = {}
        for kind in kinds:
            linear, seen, sharing = layer.linears[kind], stats[kind], layer.sharing(kind)
            if config.shift and (kind in NORM_FED or config.shift_all):
                shifts[kind] = shift_of(*seen.range(config.shift_average))
            if config.smooth and (kind in NORM_FED or config.smooth_all):
                shift = shifts.get(kind, np.float32(0.0))
                low, high = seen.range(average=False)
                absmax = np.maximum(-(low + shift), high + shift)
                if config.piecewise:
                    scales[kind], _ = piecewise_search(
                        seen.sample + shift, absmax, linear.weight, self._search(), sharing
                    )
                else:
                    scales[kind] = smooth_scale(absmax, linear.weight, sharing=sharing)
            if config.do_awq:
                scales[kind], _, _ = search_scale(
                    linear.weight, seen.hessian, seen.mean_abs, self.grid, sharing
                )
        for kind, scale in scales.items():
            layer.scale_input(kind, scale)
            if kind in shifts:
                shifts[kind] = shifts[kind] / scale
            stats[kind].rescale(scale)
        return shifts

    def _search(self) -> PiecewiseSearch:
        config = self.config
        return PiecewiseSearch(
            config.k_piece, config.search_piece, *config.alpha_range, *config.scale_range
        )

    def _round(
        self,
        layer: LayerWeights,
        kind: str,
        stats: InputStats | None,
        result: QuantizedLayer,
        shifts: dict[str, Array],
    ) -> tuple[list[Quantized], Array | None]:
        """Codes of one linear's parts, and for weight-only types the matrix that they stand for."""
        config, linear = self.config, layer.linears[kind]
        sizes = linear.plan.part_sizes
        if not config.info.has_groups:  # calibrated as weights alone
            parts = [
                with_activations(
                    part,
                    config.scheme,
                    config.weight_method,
                    result.act_range.get(kind),
                    shifts.get(kind),
                )
                for part in np.split(linear.weight, np.cumsum(sizes)[:-1])
            ]
            if kind in shifts:
                # W x = W (x + shift) - W shift
                correction = linear.weight @ shifts[kind]
                bias = 0.0 if linear.bias is None else linear.bias
                linear.bias = (bias - correction).astype(np.float32)
            return parts, None
        weight = linear.weight
        name = ", ".join(linear.plan.prefixes)
        with _naming(name):
            if stats is not None and config.auto_clip and kind != "qkv":
                # Queries and keys are left alone: the softmax sharpens their errors.
                weight = search_clip(weight, stats.hessian, self.grid)
            if stats is not None and config.do_gptq:
                settings = GptqConfig(config.damping, config.act_order, config.static_groups)
                rounded = gptq(weight, stats.hessian, self.grid, settings)
            elif config.uses_moments or not (config.symmetric and config.weight_search):
                rounded = round_to_nearest(weight, self.grid)
            else:
                # Without calibration it is what --quant_type makes of the dense checkpoint.
                made = scheme_of(config.scheme).quantize(weight, config.group_size)
                return split(made, sizes), None
        matrix = rounded.plain()
        if stats is not None and stats.wanted.hessian:
            signal = output_error(linear.weight, stats.hessian)
            noise = output_error(matrix - linear.weight, stats.hessian)
            result.loss[kind] = noise / max(signal, 1e-30)
        return split(stored(rounded, self.grid), sizes), matrix


def with_activations(
    weight: Array,
    scheme: str,
    method: str,
    act_range: float | None,
    shift: Array | None,
) -> Quantized:
    """Rounded weight [N, K] of a scheme that quantizes activations too.

    method: which weights share a scale. act_range: what becomes the largest code of a static
    activation scale; None where it is found at run time. shift: [K], of the input.
    """
    info = scheme_info(scheme)
    whole = info.has_blocks and method in ("abs_max", "avg")
    if whole:
        scale = max(float(np.abs(weight).max()), 1e-12) / E4M3_MAX
        codes = encode(weight / np.float32(scale))
        quantized = Quantized(codes, np.array([scale], np.float32))
    else:
        group_size = BLOCK if method == "blockwise" else -1
        quantized = scheme_of(scheme).quantize(weight, group_size)
    if act_range is not None:
        largest = E4M3_MAX if info.activations == "e4m3" else INT8_MAX
        quantized = replace(quantized, act_scale=act_range / largest)
    return quantized if shift is None else replace(quantized, shift=shift)


def stored(rounded: QuantizedWeight, grid: WeightGrid) -> Quantized:
    """A weight-only matrix as the schemes take it."""
    codes, perm = rounded.codes, None
    if rounded.group_of is not None:
        perm = np.argsort(rounded.group_of, kind="stable").astype(np.int32)
        codes = codes[:, perm]
    if grid.bits == 8:
        signed = (codes.astype(np.int16) - grid.middle).astype(np.int8)
        scale = rounded.scale[:, 0] if rounded.scale.shape[1] == 1 else rounded.scale
        return Quantized(signed, scale, None, perm=perm)
    return Quantized(codes.astype(np.int8), rounded.scale, rounded.zero, perm=perm)


def split(weight: Quantized, sizes: Sequence[int]) -> list[Quantized]:
    """A weight with scales for each row, cut into parts of `sizes` rows."""
    borders = np.cumsum(sizes)[:-1]
    zeros = [None] * len(sizes) if weight.zero is None else np.split(weight.zero, borders)
    parts = zip(
        np.split(weight.codes, borders), np.split(weight.scale, borders), zeros, strict=True
    )
    return [replace(weight, codes=c, scale=s, zero=z) for c, s, z in parts]


@contextmanager
def _naming(what: str, batch: int | None = None) -> Iterator[None]:
    """Puts what was being calibrated in front of an error."""
    try:
        yield
    except UserError as error:
        where = "" if batch is None else f" (calibration batch {batch + 1})"
        raise UserError(f"{what}{where}: {error}") from None
