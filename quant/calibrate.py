"""Quantizes one layer from its inputs: transforms, scales, rounding, and the layer's output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from predict.config.schemes import scheme_info
from predict.errors import UserError
from predict.loading.platform import is_compiled
from predict.nn.kinds.experts import ExpertBlock
from predict.schemes import Quantized, scheme_of
from predict.schemes._e4m3 import E4M3_MAX, encode
from quant.awq import (
    candidate_scales,
    output_error,
    scale_losses,
    search_clip,
    search_scale,
)
from quant.config import QuantConfig
from quant.experts import RoutedRows, least_rows, named_experts
from quant.gptq import GptqConfig, gptq
from quant.grids import (
    INT8_MAX,
    Array,
    QuantizedWeight,
    Sharing,
    WeightGrid,
    round_to_nearest,
)
from quant.layer import (
    Captured,
    LayerWeights,
    expert_inner,
    expert_of,
    kind_of,
    run_layer,
)
from quant.observers import make_observer
from quant.smooth import PiecewiseSearch, piecewise_search, shift_of, smooth_scale
from quant.stats import InputStats, StatBatches, TensorObserver

if TYPE_CHECKING:
    from paddle import Tensor

# Kinds of linears that read what a norm made.
NORM_FED = ("qkv", "qkv_a", "q_b", "gate_up", "shared_gate_up", "expert_gate_up")
QUERIES = ("qkv", "qkv_a", "q_b")  # the softmax sharpens their errors
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
    """What becomes of a layer. Keyed as its linears; one that is skipped is in none of them."""

    weights: LayerWeights  # as transformed; weight-only ones as their codes stand for
    quantized: dict[str, list[Quantized]] = field(default_factory=dict)  # one for each part
    act_range: dict[str, float] = field(default_factory=dict)  # what becomes code 127, or 448
    key_range: Array | None = None  # [num_kv_heads]
    value_range: Array | None = None  # [num_kv_heads]
    losses: dict[str, list[float]] = field(default_factory=dict)  # relative output errors by kind
    notes: list[str] = field(default_factory=list)  # experts that calibration did not reach

    @property
    def loss(self) -> dict[str, float]:
        """Mean relative output error by kind, where known."""
        return {kind: sum(each) / len(each) for kind, each in self.losses.items()}


class LayerQuantizer:
    """Quantizes layer after layer of one model with one config."""

    def __init__(self, config: QuantConfig, backend: ModuleType) -> None:
        self.config = config
        self.backend = backend
        self.compiled = backend if is_compiled(backend) else None
        self.grid = WeightGrid(
            config.info.bits,
            config.weightonly_group_size,
            config.weight_symmetric,
            config.weight_search,
        )

    def _run(
        self,
        layer: LayerWeights,
        batches: Batches,
        ropes: Sequence[Tensor],
        num_batches: int,
        observe: OnBatch | None,
        output: Array | None,
    ) -> None:
        """One pass of the layer over the batches; what it computes [T, H] goes to `output`."""
        records = layer.records(self.compiled)
        for batch in range(min(num_batches, len(batches))):
            rows, lengths = batches.bounds(batch)
            captured = run_layer(
                self.backend, records, np.asarray(batches.hidden[rows]), lengths, ropes
            )
            if observe is not None:
                observe(captured, batch)
            if output is not None:
                output[rows] = captured.output

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
        keys = [k for k in layer.storable() if not config.skips(layer.linears[k].plan.prefixes)]
        kinds = [key for key in keys if expert_of(key) is None]
        experts = [key for key in keys if expert_of(key) is not None]
        result = QuantizedLayer(layer)
        stats: dict[str, InputStats] = {}
        # With rounded weights in place, later layers make up for what earlier ones lose.
        follow = config.uses_moments
        transforms = config.shift or config.smooth
        shifts: dict[str, Array] = {}
        routed: RoutedRows | None = None
        if batches is not None:
            kept = None if follow else output
            observers = {} if transforms else self._observers(kinds, shifts)
            caches = self._cache_observers(layer)
            stats = {key: self._stats(layer, key) for key in kinds}
            routed = self._routed(layer, experts)
            observe = self._observe(layer, stats, observers, caches, routed)
            num_routed = 0 if routed is None else routed.max_batches
            num_batches = max(self._num_batches(stats, kept), num_routed)
            self._run(layer, batches, ropes, num_batches, observe, kept)
            shifts = self._transform(layer, kinds, stats)
            if routed is not None:
                self._transform_experts(layer, keys, stats, routed)
            if transforms and config.static_activations:
                observers = self._observers(kinds, shifts)
                again = self._observe(layer, {}, observers, {}, None)
                self._run(layer, batches, ropes, config.ptq_step, again, None)
            for kind, observer in observers.items():
                result.act_range[kind] = float(observer.range()[0])
            if caches:
                result.key_range = caches["key"].range()
                result.value_range = caches["value"].range()
        if experts:
            self._experts(layer, experts, routed, result)
        for kind in kinds:
            self._round(layer, kind, stats.get(kind), result, shifts)
        if batches is not None and output is not None and follow:
            self._run(layer, batches, ropes, len(batches), None, output)
        return result

    def _stats(self, layer: LayerWeights, key: str) -> InputStats:
        return InputStats(layer.linears[key].plan.in_features, self._wanted(key))

    def _smooths(self, key: str) -> bool:
        config = self.config
        return config.smooth and (kind_of(key) in NORM_FED or config.smooth_all_linears)

    def _shifts(self, key: str) -> bool:
        config = self.config
        return config.shift and (kind_of(key) in NORM_FED or config.shift_all_linears)

    def _wanted(self, key: str) -> StatBatches:
        config = self.config
        smooth, shift = self._smooths(key), self._shifts(key)
        steps = config.do_gptq * config.gptq_step, config.do_awq * config.awq_step
        return StatBatches(
            hessian=max(*steps, config.auto_clip * config.autoclip_step),
            ranges=max(smooth * config.smooth_step, shift * config.shift_step),
            magnitudes=config.do_awq * config.awq_step,
            sample=(smooth and config.smooth_piecewise_search)
            * (config.smooth_step if config.smooth_sampler == "multi_step" else 1),
        )

    def _num_batches(self, stats: dict[str, InputStats], kept: Array | None) -> int:
        if kept is not None:
            return self.config.num_batches
        observed = self.config.static_activations or self.config.cachekv
        needed = [entry.wanted.num_batches for entry in stats.values()]
        return max(*needed, observed * self.config.ptq_step, 0)

    def _routed(self, layer: LayerWeights, experts: Sequence[str]) -> RoutedRows | None:
        """Takes the rows of experts, where a statistic of theirs is wanted."""
        block, config = layer.experts, self.config
        if block is None or not experts:
            return None
        wanted = max(self._wanted(key).num_batches for key in experts)
        wanted = max(wanted, config.static_experts * config.ptq_step)
        return RoutedRows(wanted) if wanted else None

    def _observers(
        self, kinds: Sequence[str], shifts: dict[str, Array]
    ) -> dict[str, TensorObserver]:
        config = self.config
        if not config.static_activations:
            return {}
        return {kind: self._observer(shifts.get(kind)) for kind in kinds}

    def _observer(self, shift: Array | None = None) -> TensorObserver:
        config = self.config
        number_format = "fp8" if config.info.activations == "e4m3" else "int8"
        observer = make_observer(config.act_quant_method, number_format)
        return TensorObserver(observer, config.ptq_step, shift)

    def _cache_observers(self, layer: LayerWeights) -> dict[str, TensorObserver]:
        config = self.config
        if not config.cachekv or not layer.spec.kept[layer.index]:
            return {}
        method = config.cachekv_quant_method.removesuffix("_headwise")
        names = ("key", "value")
        return {name: TensorObserver(make_observer(method), config.ptq_step) for name in names}

    def _observe(
        self,
        layer: LayerWeights,
        stats: dict[str, InputStats],
        observers: dict[str, TensorObserver],
        caches: dict[str, TensorObserver],
        routed: RoutedRows | None,
    ) -> OnBatch:
        def observe(captured: Captured, batch: int) -> None:
            for takers in (stats, observers):
                for kind, taker in takers.items():
                    _feed(layer, kind, taker, [captured.inputs[kind]], batch)
            for name, cache in caches.items():
                heads = captured.keys if name == "key" else captured.values
                assert heads is not None  # check_methods
                with _naming(f"the {name} cache of layer {layer.index}", batch):
                    cache.update(heads)
            if routed is not None:
                routed.update(captured.routed)

        return observe

    def _transform(
        self, layer: LayerWeights, kinds: Sequence[str], stats: dict[str, InputStats]
    ) -> dict[str, Array]:
        """Shifts by kind; smooth and AWQ scales go into the layer, and into the statistics."""
        config = self.config
        shifts: dict[str, Array] = {}
        scales: dict[str, Array] = {}
        for kind in kinds:
            linear, seen, sharing = layer.linears[kind], stats[kind], layer.sharing(kind)
            if self._shifts(kind):
                shifts[kind] = shift_of(*seen.range(config.shift_sampler == "ema"))
            if kind == "shared_gate_up" or not layer.scales_input(kind):
                continue  # the first: with the routed experts, which read the same
            if self._smooths(kind):
                shift = shifts.get(kind, np.float32(0.0))
                low, high = seen.range(average=False)
                absmax = np.maximum(-(low + shift), high + shift)
                sample = seen.sample + shift if config.smooth_piecewise_search else None
                readers = [] if sample is None else [(sample, linear.weight)]
                largest = np.abs(linear.weight).max(axis=0)
                scales[kind] = self._smooth_scale(readers, absmax, largest, sharing)
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

    def _smooth_scale(
        self,
        readers: Sequence[tuple[Array, Array]],
        absmax: Array,
        weight_absmax: Array,
        sharing: Sharing | None = None,
    ) -> Array:
        """SmoothQuant's scale, or the best of the search over sampled inputs of the readers."""
        config = self.config
        if config.smooth_piecewise_search:
            search = PiecewiseSearch(
                config.smooth_k_piece,
                config.smooth_search_piece,
                config.search_alpha_min,
                config.search_alpha_max,
                config.search_scale_min,
                config.search_scale_max,
            )
            return piecewise_search(readers, absmax, weight_absmax, search, sharing)[0]
        return smooth_scale(absmax, weight_absmax[None], sharing=sharing)

    def _transform_experts(
        self,
        layer: LayerWeights,
        keys: Sequence[str],
        stats: dict[str, InputStats],
        routed: RoutedRows,
    ) -> None:
        """The scale of what an expert block's norm makes: one for all that read it."""
        config = self.config
        readers = [k for k in keys if kind_of(k) in ("shared_gate_up", "expert_gate_up")]
        if not readers or not (config.do_awq or config.smooth):
            return
        wanted = replace(self._wanted(readers[0]), hessian=0, sample=0)
        whole = InputStats(layer.spec.hidden_size, wanted)
        _feed(layer, readers[0], whole, (batch.inputs for batch in routed.batches))
        if config.do_awq:
            scale = self._awq_scale(layer, readers, stats, routed, whole.mean_abs)
        else:
            weights = [layer.linears[key].weight for key in readers]
            largest = np.max([np.abs(weight).max(axis=0) for weight in weights], axis=0)
            pairs: list[tuple[Array, Array]] = []
            for key in readers if config.smooth_piecewise_search else ():
                seen = self._seen_by(layer, key, stats, routed)
                if seen is not None:
                    pairs.append((seen.sample, layer.linears[key].weight))
            scale = self._smooth_scale(pairs, whole.absmax, largest)
        layer.scale_input(readers[0], scale)
        routed.rescale(scale)
        if "shared_gate_up" in stats:
            stats["shared_gate_up"].rescale(scale)

    def _awq_scale(
        self,
        layer: LayerWeights,
        readers: Sequence[str],
        stats: dict[str, InputStats],
        routed: RoutedRows,
        mean_abs: Array,
    ) -> Array:
        """The scale with the least loss of all readers together, each over its own rows."""
        scales = candidate_scales(mean_abs)
        losses = np.zeros(len(scales))
        for key in readers:
            seen = self._seen_by(layer, key, stats, routed)
            if seen is not None:
                weight = layer.linears[key].weight
                losses += seen.num_rows * scale_losses(weight, seen.hessian, self.grid, scales)
        best: Array = scales[int(losses.argmin())]
        return best

    def _seen_by(
        self, layer: LayerWeights, key: str, stats: dict[str, InputStats], routed: RoutedRows
    ) -> InputStats | None:
        """The statistics of a linear that reads an expert block's norm; None: of no row."""
        expert = expert_of(key)
        if expert is None:
            return stats[key]
        seen = self._collect(layer, key, routed.of(expert))
        return seen if seen.num_batches else None

    def _collect(self, layer: LayerWeights, key: str, batches: Iterable[Array]) -> InputStats:
        """What a linear wants to know of its inputs [n, K], batch by batch."""
        seen = self._stats(layer, key)
        _feed(layer, key, seen, batches)
        return seen

    def _experts(
        self,
        layer: LayerWeights,
        keys: Sequence[str],
        routed: RoutedRows | None,
        result: QuantizedLayer,
    ) -> None:
        """Rounds one expert after another, with the statistics of its own rows."""
        block = layer.experts
        assert block is not None
        by_expert: dict[int, list[str]] = {}
        for key in keys:
            by_expert.setdefault(int(key.partition(".")[2]), []).append(key)
        unreached: list[str] = []
        few: list[str] = []
        for expert, pair in by_expert.items():
            inputs: dict[str, list[Array]] = {}
            if routed is not None:
                inputs = self._expert_inputs(layer, block, expert, pair, list(routed.of(expert)))
            stats = {key: self._collect(layer, key, rows) for key, rows in inputs.items()}
            # Of these, second moments are wanted of more inputs than the rows tell of.
            sparse = [
                key
                for key, seen in stats.items()
                if seen.wanted.hessian and seen.num_rows < least_rows(seen.in_features)
            ]
            if routed is not None and (sparse or not stats):
                name = layer.linears[pair[0]].plan.prefixes[0].rpartition(".")[0]
                (few if stats else unreached).append(name)
            for key in sparse:
                del stats[key]
            self._scale_down(layer, expert, stats, inputs)
            if self.config.static_experts:
                for key, batches in inputs.items():
                    observer = self._observer()
                    _feed(layer, key, observer, batches)
                    result.act_range[key] = float(observer.range()[0])
                continue  # rounded when the ranges of all are known
            for key in pair:
                self._round(layer, key, stats.get(key), result, {})
        if self.config.static_experts:
            self._round_static_experts(layer, keys, result)
        result.notes += [
            f"layer {layer.index}: calibration {what} {len(names)} of {block.router.num_experts} "
            f"experts, which are rounded to nearest without it ({named_experts(names)}); a longer "
            "or another --data_file may reach them"
            for names, what in ((unreached, "reached none of"), (few, "has too few rows for"))
            if names
        ]

    def _expert_inputs(
        self,
        layer: LayerWeights,
        block: ExpertBlock,
        expert: int,
        pair: Sequence[str],
        rows: list[Array],
    ) -> dict[str, list[Array]]:
        """What the linears of one expert read, by key and batch; nothing where it has no rows."""
        if not rows:
            return {}
        inputs = {key: rows for key in pair if kind_of(key) == "expert_gate_up"}
        for key in pair:
            if kind_of(key) == "expert_down":
                gate_up = layer.linear(f"expert_gate_up.{expert}", self.compiled)
                inner = [expert_inner(self.backend, gate_up, block, each) for each in rows]
                inputs[key] = [each.numpy() for each in inner]
        return inputs

    def _scale_down(
        self,
        layer: LayerWeights,
        expert: int,
        stats: dict[str, InputStats],
        inputs: dict[str, list[Array]],
    ) -> None:
        """The scale of an expert's second product goes into the up rows of its first."""
        key = f"expert_down.{expert}"
        seen = stats.get(key)
        if seen is None or not layer.scales_input(key):
            return
        weight = layer.linears[key].weight
        if self.config.do_awq:
            scale, _, _ = search_scale(weight, seen.hessian, seen.mean_abs, self.grid)
        elif self._smooths(key):
            readers = [(seen.sample, weight)] if self.config.smooth_piecewise_search else []
            scale = self._smooth_scale(readers, seen.absmax, np.abs(weight).max(axis=0))
        else:
            return
        layer.scale_input(key, scale)
        seen.rescale(scale)
        inputs[key] = [rows / scale for rows in inputs[key]]

    def _round_static_experts(
        self, layer: LayerWeights, keys: Sequence[str], result: QuantizedLayer
    ) -> None:
        """An expert that calibration did not reach takes the widest range of the others."""
        for key in keys:
            if key not in result.act_range:
                others = [k for k in keys if kind_of(k) == kind_of(key)]
                result.act_range[key] = max(result.act_range.get(k, 0.0) for k in others)
            self._round(layer, key, None, result, {})

    def _round(
        self,
        layer: LayerWeights,
        key: str,
        stats: InputStats | None,
        result: QuantizedLayer,
        shifts: dict[str, Array],
    ) -> None:
        """Puts the codes of a linear's parts into `result`.

        Of weight-only types the layer then has the matrix that they stand for.
        """
        config, linear = self.config, layer.linears[key]
        sizes = linear.plan.part_sizes
        if not config.info.has_groups:  # calibrated as weights alone
            result.quantized[key] = [
                with_activations(
                    part,
                    config.scheme,
                    config.weight_quant_method,
                    result.act_range.get(key),
                    shifts.get(key),
                )
                for part in np.split(linear.weight, np.cumsum(sizes)[:-1])
            ]
            if key in shifts:
                # W x = W (x + shift) - W shift
                correction = linear.weight @ shifts[key]
                bias = 0.0 if linear.bias is None else linear.bias
                linear.bias = (bias - correction).astype(np.float32)
            return
        if not config.uses_moments and config.weight_symmetric and config.weight_search:
            # Without calibration it is what --quant_type makes of the dense checkpoint.
            made = scheme_of(config.scheme).quantize(linear.weight, config.weightonly_group_size)
            result.quantized[key] = split(made, sizes)
            return
        weight = linear.weight
        with _naming(", ".join(linear.plan.prefixes)):
            if stats is not None and config.auto_clip and kind_of(key) not in QUERIES:
                weight = search_clip(weight, stats.hessian, self.grid)
            if stats is not None and config.do_gptq:
                settings = GptqConfig(
                    config.gptq_percdamp, config.gptq_actorder, config.gptq_static_groups
                )
                rounded = gptq(weight, stats.hessian, self.grid, settings)
            else:
                rounded = round_to_nearest(weight, self.grid)
                width = self.grid.width(weight.shape[1])
                if config.scatters_groups and width < weight.shape[1]:
                    # The experts of a layer are stored alike: this one's columns in their order.
                    columns = np.arange(weight.shape[1], dtype=np.int32)
                    rounded = replace(rounded, group_of=columns // np.int32(width))
        matrix = rounded.plain()
        if stats is not None and stats.wanted.hessian:
            signal = output_error(linear.weight, stats.hessian)
            noise = output_error(matrix - linear.weight, stats.hessian)
            result.losses.setdefault(kind_of(key), []).append(noise / max(signal, 1e-30))
        linear.weight = matrix
        result.quantized[key] = split(stored(rounded, self.grid), sizes)


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


def _feed(
    layer: LayerWeights,
    key: str,
    taker: InputStats | TensorObserver,
    batches: Iterable[Array],
    number: int | None = None,
) -> None:
    """Gives what a linear reads, batch by batch, to what is made of it; see `_naming`."""
    with _naming(f"the input of {', '.join(layer.linears[key].plan.prefixes)}", number):
        for rows in batches:
            taker.update(rows)


@contextmanager
def _naming(what: str, batch: int | None = None) -> Iterator[None]:
    """Puts what was being calibrated in front of an error."""
    try:
        yield
    except UserError as error:
        where = "" if batch is None else f" (calibration batch {batch + 1})"
        raise UserError(f"{what}{where}: {error}") from None
