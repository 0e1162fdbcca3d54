"""A tower's weights from a checkpoint, in the model's dtype under every scheme of its text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.config.engine import EngineConfig
from predict.config.model import DTYPE_BYTES
from predict.config.quantization import QuantSettings
from predict.device.place import place_tensor, to_float32
from predict.errors import UserError
from predict.images.pixels import Pixels, read_pixels
from predict.loading.build import DecoderBuilder
from predict.loading.checkpoint import Checkpoint
from predict.loading.layouts.online import Online
from predict.loading.model import Weights, find_weights
from predict.loading.platform import Platform
from predict.loading.sources import CheckpointSource, RandomSource, WeightSource
from predict.nn.blocks import Block, Linear
from predict.nn.hf_config import ConfigReader
from predict.nn.plans import (
    LayerPlan,
    LinearPlan,
    NormPlan,
    WeightPlan,
    block_plan,
    norm_plan,
)
from predict.nn.spec import DecoderSpec
from predict.nn.tower import MergerWeights, Tower
from predict.nn.vision import CHANNELS, Base, Merger, Product, VisionSpec
from predict.schemes import Quantized, scheme_of

WIDTH = 32  # features between products are a multiple of it in memory


def patch_width(spec: VisionSpec) -> int:
    """Values of a patch in memory, zeros behind them included."""
    return -(-spec.patch_values // WIDTH) * WIDTH


class TowerLayout(Online):
    """A dense checkpoint, whose MLPs' slope is folded into the products around their function.

    x * sigmoid(s x) = silu(s x) / s: the first is multiplied by s, the last divided by it.
    Widths that fast products do not take are wider in memory, by zeros.
    """

    def __init__(
        self,
        source: WeightSource,
        plan: WeightPlan,
        spec: VisionSpec,
        stored: Mapping[tuple[str, ...], LinearPlan],
        products: Mapping[str, Product],
        scales: Mapping[str, str],
    ) -> None:
        """stored: the plans of what the checkpoint has, by prefixes. products: of mergers.

        scales: see TowerWeights.
        """
        super().__init__(source, QuantSettings(), plan)
        self._stored, self._products, self._width = stored, products, spec.hidden_size
        self._scales = scales
        names = spec.names
        factors = ((names.gate_up, spec.slope), (names.down, 1 / spec.slope))
        self._factors = {name: factor for ends, factor in factors for name in ends}

    def _factor(self, plan: LinearPlan) -> float:
        found = (f for name, f in self._factors.items() if plan.prefixes[0].endswith(f".{name}"))
        return next(found, 1.0)

    def read(self, plan: LinearPlan) -> Quantized:
        stored = self._stored[plan.prefixes]
        weight, factor = self._as_read(stored), self._factor(plan)
        if factor == 1 and stored == plan:
            return weight
        codes = _wide(to_float32(weight.codes) * np.float32(factor), stored, plan)
        more = plan.in_features - stored.in_features
        return replace(weight, codes=np.pad(codes, ((0, 0), (0, more))))

    def _as_read(self, plan: LinearPlan) -> Quantized:
        """As the network reads it: see Product."""
        prefix, inner = plan.prefixes[0], plan.in_features
        product = self._products.get(prefix)
        if product is not None and product.is_parameter:
            stored = self.source.host_matrix((prefix,), (inner, plan.out_features))
            return Quantized(np.ascontiguousarray(to_float32(stored).T), None)
        weight = super().read(plan)
        if prefix in self._scales:
            scale = self._scale(prefix)[:, None]
            weight = replace(weight, codes=to_float32(weight.codes) * scale)
        if product is None or not product.channels_first:
            return weight
        values = to_float32(weight.codes).reshape(plan.out_features, self._width, -1)
        ordered = np.ascontiguousarray(values.transpose(0, 2, 1))
        return replace(weight, codes=ordered.reshape(-1, inner))

    def _scale(self, prefix: str) -> npt.NDArray[np.float32]:
        return to_float32(self.source.vector(self._scales[prefix], self._width))

    def bias(self, plan: LinearPlan) -> Any:
        stored = self._stored[plan.prefixes]
        values, factor = super().bias(stored), max(self._factor(plan), 1.0)
        if values is not None and plan.prefixes[0] in self._scales:
            values = to_float32(values) * self._scale(plan.prefixes[0])
        # That of the last product is behind the function.
        if values is None or (factor == 1 and stored == plan):
            return values
        return _wide(to_float32(values) * np.float32(factor), stored, plan)


def _wide(values: Any, stored: LinearPlan, plan: LinearPlan) -> Any:
    """Rows of each of the stored parts, with rows of zeros behind them."""
    made = list[Any]()
    borders = np.cumsum(stored.part_sizes)[:-1]
    for part, size in zip(np.split(values, borders), plan.part_sizes, strict=True):
        made.append(np.pad(part, ((0, size - len(part)), *((0, 0),) * (values.ndim - 1))))
    return np.concatenate(made)


@dataclass(frozen=True)
class TowerWeights:
    """A tower whose tensors were checked; they are not read yet."""

    spec: VisionSpec
    text: Weights
    base: Base

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        return self.spec.num_weights * DTYPE_BYTES[self.text.config.model.dtype]

    @property
    def layers(self) -> tuple[LayerPlan, ...]:
        """The blocks, and where each of their weights comes from."""
        return self._layers(self.spec.layers)

    def _layers(self, blocks: Sequence[Sequence[Block]]) -> tuple[LayerPlan, ...]:
        names = replace(self.spec.names, layer=self.base.tower + self.spec.names.layer)
        return tuple(
            tuple(
                block_plan(names, self.spec.hidden_size, index, number, block)
                for number, block in enumerate(layer)
            )
            for index, layer in enumerate(blocks)
        )

    @property
    def mergers(self) -> tuple[tuple[NormPlan | None, tuple[LinearPlan, ...]], ...]:
        """The norm and the products of each merger."""
        return tuple(map(self._merger, self.spec.mergers))

    @property
    def norms(self) -> tuple[NormPlan | None, NormPlan | None]:
        """The norms ahead of all layers and behind them."""
        spec, base = self.spec, self.base.tower
        ends = (
            (spec.first_norm, spec.first_norm_name),
            (spec.last_norm, spec.last_norm_name),
        )
        first, last = (
            None if norm is None else norm_plan(norm, base + name, spec.hidden_size)
            for norm, name in ends
        )
        return first, last

    @property
    def products(self) -> dict[str, Product]:
        """The products of all mergers, by prefix."""
        found = [each for merger in self.spec.mergers for each in merger.products]
        return {self.base.merger + each.name: each for each in found}

    @property
    def scales(self) -> dict[str, str]:
        """Names of layers' factors, by the prefix of the product whose outputs they scale."""
        spec, base = self.spec, self.base.tower
        if spec.layer_scales is None:
            return {}
        ends = tuple(zip((*spec.names.out, *spec.names.down), spec.layer_scales, strict=True))
        layers = (spec.names.layer.format(layer=index) for index in range(len(spec.layers)))
        return {base + at + end: base + at + name for at in layers for end, name in ends}

    def _merger(self, merger: Merger) -> tuple[NormPlan | None, tuple[LinearPlan, ...]]:
        spec, base = self.spec, self.base.merger
        inner, linears = spec.values_of(merger), list[LinearPlan]()
        size = inner if merger.norms_cells else spec.hidden_size
        for product in merger.products:
            plan = LinearPlan(
                (base + product.name,), (product.out_features,), inner, product.has_bias
            )
            linears.append(plan)
            inner = product.out_features
        if merger.norm is None:
            return None, tuple(linears)
        return norm_plan(merger.norm, base + merger.norm_name, size), tuple(linears)

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all tensors."""
        return dict(self._expected())

    def _expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        spec, width, side = self.spec, self.spec.hidden_size, self.spec.pixels.patch_size
        patches = self.base.tower + spec.patch_name
        frames = (spec.frames,) if spec.frames else ()
        yield f"{patches}.weight", (width, CHANNELS, *frames, side, side)
        if spec.patch_bias:
            yield f"{patches}.bias", (width,)
        if spec.learned is not None:
            rows = spec.learned.side**2 + (spec.class_token is not None)
            yield self.base.tower + spec.learned.name, (*spec.learned.leading, rows, width)
        if spec.class_token is not None:
            yield self.base.tower + spec.class_token.name, spec.class_token.shape
        for name in self.scales.values():
            yield name, (width,)
        products = self.products
        norms = [n for n in (*(n for n, _ in self.mergers), *self.norms) if n is not None]
        linears = [linear for _, products in self.mergers for linear in products]
        for layer in self.layers:
            for block in layer:
                linears += [linear for _, linear in block.linears()]
                norms += [norm for _, norm in block.norms()]
        for linear in linears:
            for prefix, size in zip(linear.prefixes, linear.part_sizes, strict=True):
                if prefix in products and products[prefix].is_parameter:
                    yield prefix, (linear.in_features, size)
                    continue
                yield f"{prefix}.weight", (size, linear.in_features)
                if linear.has_bias:
                    yield f"{prefix}.bias", (size,)
        for norm in norms:
            yield norm.weight, (norm.size,)
            if norm.bias is not None:
                yield norm.bias, (norm.size,)

    def read(self) -> Tower:
        """The tower, its weights in place."""
        text, spec = self.text, self.spec
        source, model, platform = text.source, text.config.model, text.platform
        if isinstance(source, CheckpointSource):  # a GPU's own has ended its copies with the text
            source = CheckpointSource(source.checkpoint)
        wide = self._layers([[each.widened(WIDTH) for each in layer] for layer in spec.layers])
        linears = [linear for _, products in self.mergers for linear in products]
        linears += [each for layer in self.layers for block in layer for _, each in block.linears()]
        builder = DecoderBuilder(
            text.plan,
            source,
            TowerLayout(
                *(source, text.plan, spec),
                {each.prefixes: each for each in linears},
                self.products,
                self.scales,
            ),
            model.dtype,
            platform.compiled,
            0,
            place=platform.place,
        )
        mergers = []
        for merger, (norm, products) in zip(spec.mergers, self.mergers, strict=True):
            parts: list[Any] = [part and builder.slot(part) for part in (norm, *products)]
            mergers.append(MergerWeights(merger, parts[0], tuple(parts[1:])))
        layers = tuple(tuple(builder.block(block) for block in layer) for layer in wide)
        ends: list[Any] = [norm and builder.slot(norm) for norm in self.norms]
        return Tower(
            *(spec, self._patches(), layers, tuple(mergers)),
            first_norm=ends[0],
            last_norm=ends[1],
            learned=self._learned(),
            class_row=self._class_row(),
        )

    def _positions(self) -> npt.NDArray[np.float32] | None:
        """[rows, W] the table of positions, that of the class token first where there is one."""
        spec = self.spec
        if spec.learned is None:
            return None
        shape = (spec.learned.side**2 + (spec.class_token is not None), spec.hidden_size)
        stored = self.text.source.host_matrix((self.base.tower + spec.learned.name,), shape)
        return to_float32(stored).reshape(shape)

    def _learned(self) -> npt.NDArray[np.float32] | None:
        """[side, side, W] positions of patches, with the biases of these."""
        spec, table = self.spec, self._positions()
        if table is None or spec.learned is None:
            return None
        table = table[len(table) - spec.learned.side**2 :]
        if spec.patch_bias:
            name = f"{self.base.tower}{spec.patch_name}.bias"
            table = table + to_float32(self.text.source.vector(name, spec.hidden_size))
        return table.reshape(spec.learned.side, spec.learned.side, -1)

    def _class_row(self) -> Any:
        """[1, W] the class token with its position, on the device."""
        import paddle

        spec, table, text = self.spec, self._positions(), self.text
        if spec.class_token is None or table is None:
            return None
        name = self.base.tower + spec.class_token.name
        stored = text.source.host_matrix((name,), (1, spec.hidden_size))
        row, place = to_float32(stored).reshape(1, -1) + table[:1], text.platform.place
        if place is not None:
            return place_tensor(row, text.config.model.dtype, place)
        return paddle.to_tensor(row).astype(text.config.model.dtype)

    def _patches(self) -> Linear:
        """The product of a patch: a still picture's frames are one, and so are their weights."""
        spec, text = self.spec, self.text
        width, frames = spec.hidden_size, max(spec.frames, 1)
        shape, name = (width, frames * spec.patch_values), self.base.tower + spec.patch_name
        stored = to_float32(text.source.host_matrix((f"{name}.weight",), shape))
        values = stored.reshape(width, CHANNELS, frames, -1).sum(2).reshape(width, -1)
        size = patch_width(spec)
        values = np.pad(values, ((0, 0), (0, size - spec.patch_values)))
        dtype, platform = text.config.model.dtype, text.platform
        tensors = scheme_of("dense").tensors(
            Quantized(values, None), dtype, platform.compiled, platform.place
        )
        return Linear("dense", tensors, None, size, width)


def open_tower(text: Weights, spec: VisionSpec) -> TowerWeights:
    """The tower beside a text model's weights. Raises UserError where its tensors do not fit."""
    source = text.source
    if isinstance(source, RandomSource):
        return TowerWeights(spec, text, spec.bases[0])
    assert isinstance(source, CheckpointSource)
    checkpoint = source.checkpoint
    names = checkpoint.tensors
    found = (base for base in spec.bases if any(name.startswith(base.tower) for name in names))
    tower = TowerWeights(spec, text, next(found, spec.bases[0]))
    own = {name: each for name, each in names.items() if name.startswith(tuple(tower.base))}
    Checkpoint.of(checkpoint.directory, own).check(tower.expected(), spec.ignored)
    return tower


def open_tower_alone(
    config: EngineConfig, spec: DecoderSpec, reader: ConfigReader, platform: Platform
) -> TowerWeights | None:
    """The tower of a checkpoint, read apart from its text; None: it has none. Raises UserError."""
    if spec.vision is None:
        return None
    return open_tower(find_weights(config, spec, reader, platform), spec.vision)


def pixels_of(spec: VisionSpec, directory: str | Path, options: dict[str, Any]) -> Pixels:
    """How a model's pictures become patches. options: of --mm_processor_kwargs.

    Raises UserError where the folder's patches are not the tower's.
    """
    found = read_pixels(Path(directory), spec.pixels).changed(options, "mm_processor_kwargs")
    spec.pixels.check_fits(found, str(directory))
    if getattr(found, "do_pan_and_scan", False) and spec.placeholder.mark < 0:
        raise UserError(
            f"do_pan_and_scan is true, and prompts of {spec.model_type} have no place for crops "
            "(allowed: false)"
        )
    return found
