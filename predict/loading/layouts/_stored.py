"""What all layouts of quantized checkpoints share: parts of a linear, one below the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.config.quantization import QuantSettings
from predict.config.schemes import FP8_BLOCK, GROUP_SIZES, scheme_info
from predict.device.place import to_float32
from predict.errors import UserError
from predict.loading.arrays import FLOAT_DTYPES, Shape
from predict.loading.checkpoint import Checkpoint
from predict.loading.layouts._target import Target
from predict.loading.layouts.online import DENSE, Online
from predict.loading.sources import WeightSource
from predict.nn.plans import LinearPlan, WeightPlan
from predict.schemes import Quantized, float_values

WORDS = "I32"  # dtype of codes that are packed
EXPONENTS = "F8_E8M0"  # dtype of scales that are bare exponents
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class StoredPart:
    """One matrix of a checkpoint: tensors start with `prefix`; [out_features, in_features]."""

    prefix: str
    out_features: int
    in_features: int
    is_expert: bool = False

    def __getitem__(self, ending: str) -> str:
        return f"{self.prefix}.{ending}"


class Stored:
    """Base of the layouts; a subclass says of each part its scheme, its tensors and its values.

    Linears that the checkpoint holds in float are read by `online`, which may round the LM head.
    """

    ignored: tuple[str, ...] = ()
    is_rounded = False
    reorders = False
    has_spare_biases = True  # some tools write biases to linears that have none
    mixes = True  # a product of codes and floats can be one of floats
    order_name = ""  # of a part's tensor that has each column's group, where act-order left some

    def __init__(
        self,
        checkpoint: Checkpoint,
        source: WeightSource,
        settings: QuantSettings,
        plan: WeightPlan,
        target: Target,
    ):
        self.checkpoint, self.source, self.target = checkpoint, source, target
        self.settings, self.plan = settings, plan
        self.online = Online(source, QuantSettings(head_scheme=settings.head_scheme), plan)

    def part_scheme(self, part: StoredPart) -> str:
        """The part's scheme, "dense" where it is stored in float."""
        raise NotImplementedError

    def part_expected(self, part: StoredPart) -> Mapping[str, Shape]:
        """Names and shapes of a quantized part's tensors."""
        raise NotImplementedError

    def read_part(self, part: StoredPart) -> Quantized:
        """A quantized part."""
        raise NotImplementedError

    def part_group_size(self, part: StoredPart) -> int:
        """Input features of a quantized part that share a scale; -1: all of them."""
        raise NotImplementedError

    def part_values(self, part: StoredPart) -> npt.NDArray[np.float32]:
        """What is stored of a part, as floats [out_features, in_features]."""
        name = self.part_scheme(part)
        if name == DENSE:
            return to_float32(self.checkpoint.read_float((part["weight"],)))
        return float_values(name, self.read_part(part))

    def group_size(self, plan: LinearPlan) -> int:
        if self._in_float(plan):
            return self.online.group_size(plan)
        coded = [part for part in parts_of(plan) if self.part_scheme(part) != DENSE]
        sizes = [self.part_group_size(part) for part in coded]
        size = min((size for size in sizes if size > 0), default=-1)  # as `merged`
        if scheme_info(self.scheme(plan)).has_groups and size == plan.in_features:
            return -1
        return min(size, max(GROUP_SIZES))  # `grouped` repeats the scales of larger ones

    def group_of_columns(self, part: StoredPart) -> Any:
        """Int [K], the group of each column; None where they are in order."""
        name = part[self.order_name]
        there = bool(self.order_name) and name in self.checkpoint.tensors
        return self.checkpoint.read_as(name, WORDS, "I64") if there else None

    def _order(self, part: StoredPart) -> Any:
        """The columns sorted by group; None where they are."""
        group_of = self.group_of_columns(part)
        if group_of is None or (np.diff(group_of) >= 0).all():
            return None
        return np.argsort(group_of, kind="stable")

    def scheme(self, plan: LinearPlan) -> str:
        """See Layout. Where codes stand beside floats, they become floats.

        So do parts whose columns were ordered differently: they share no gather.
        """
        name = self._scheme(plan)
        if name == DENSE or len(plan.prefixes) == 1 or self._in_float(plan):
            return name
        orders = [self._order(part) for part in parts_of(plan)]
        return name if all(np.array_equal(orders[0], order) for order in orders) else DENSE

    def _scheme(self, plan: LinearPlan) -> str:
        names = {part.prefix: self.part_scheme(part) for part in parts_of(plan)}
        rows = [scheme_info(name) for name in set(names.values())]
        if all(row.is_weight_only for row in rows):
            # Codes of 4 bits are codes of 8 bits, with a zero point.
            return max(rows, key=lambda row: row.bits).name
        if len(rows) > 1:
            if self.mixes and DENSE in names.values():
                return DENSE
            shown = ", ".join(f"{prefix} {name}" for prefix, name in names.items())
            raise UserError(
                f"{self.checkpoint.directory}: matrices that one product reads are stored in "
                f"different ways ({shown}); quantize all of them, or none"
            )
        name = names[plan.prefixes[0]]
        return self.online.scheme(plan) if name == DENSE else name

    def _in_float(self, plan: LinearPlan) -> bool:
        return all(self.part_scheme(part) == DENSE for part in parts_of(plan))

    def expected(self, plan: LinearPlan) -> Mapping[str, Shape]:
        """See Layout. Biases that linears of the family have not are among them, see `bias`."""
        parts, stored = parts_of(plan), self.checkpoint.tensors
        names: dict[str, Shape] = {}
        if self.has_spare_biases and not plan.has_bias:
            biases = ((part["bias"], (part.out_features,)) for part in parts)
            names.update((name, shape) for name, shape in biases if name in stored)
        if self._in_float(plan):
            return {**self.online.expected(plan), **names}
        for part in parts:
            if self.part_scheme(part) == DENSE and part["weight"] in stored:
                names[part["weight"]] = (part.out_features, part.in_features)
            else:
                names.update(self.part_expected(part))
        return names

    def read(self, plan: LinearPlan) -> Quantized:
        if self._in_float(plan):
            return self.online.read(plan)
        if self.scheme(plan) == DENSE:
            return Quantized(np.concatenate(list(map(self.part_values, parts_of(plan)))), None)
        return merged([self.read_part(part) for part in parts_of(plan)], plan.prefixes)

    def stored_bytes(self, plan: LinearPlan) -> int:
        return self.online.stored_bytes(plan) if self._in_float(plan) else 0

    def bias(self, plan: LinearPlan) -> Any:
        """See Layout. Some tools write biases of zeros to linears that have none."""
        found = [prefix + ".bias" in self.checkpoint.tensors for prefix in plan.prefixes]
        if plan.has_bias or not any(found):
            return self.online.bias(plan)
        parts = [
            to_float32(self.checkpoint.read_float((prefix + ".bias",))) if there else np.zeros(size)
            for prefix, size, there in zip(plan.prefixes, plan.part_sizes, found, strict=True)
        ]
        values = np.concatenate(parts).astype(np.float32)
        return values if values.any() else None

    def scales(self, name: str) -> npt.NDArray[np.float32]:
        """The float tensor; raises UserError where it holds a NaN or an infinity."""
        values = self.checkpoint.read_as(name, *FLOAT_DTYPES, EXPONENTS)
        if self.checkpoint.tensors[name].dtype == EXPONENTS:
            values = np.where(values == 255, np.nan, np.exp2(values.astype(np.float32) - 127))
        values = to_float32(values)
        if not np.isfinite(values).all():
            raise UserError(
                f"{self.checkpoint.directory}: {name} holds "
                f"{np.count_nonzero(~np.isfinite(values))} values that are not finite; the "
                "checkpoint is damaged: copy it, or quantize it, again"
            )
        return values


def parts_of(plan: LinearPlan) -> list[StoredPart]:
    """The matrices that make up a linear, in order."""
    return [
        StoredPart(prefix, size, plan.in_features, plan.is_expert)
        for prefix, size in zip(plan.prefixes, plan.part_sizes, strict=True)
    ]


def merged(parts: Sequence[Quantized], names: Sequence[str]) -> Quantized:
    """The parts, one below the other; scales take the finest form that a part has.

    Raises UserError where activations of the parts would be quantized in different ways.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    statics = [part.act_scale for part in parts]
    if any(s is None for s in statics) != all(s is None for s in statics):
        raise UserError(f"{', '.join(names)}: some have a static activation scale, some have none")
    for name in ("perm", "shift", "smooth"):
        values = [getattr(part, name) for part in parts]
        if not all(_alike(values[0], value) for value in values):
            raise UserError(f"{', '.join(names)} read the same input, and their {name} differs")
    scale, zero = _stacked_scales(parts)
    return replace(
        first,
        codes=np.concatenate([part.codes for part in parts]),
        scale=scale,
        zero=zero,
        # The widest range holds every part's; PaddleNLP and vLLM choose alike.
        act_scale=None if first.act_scale is None else max(s for s in statics if s is not None),
    )


def _alike(first: Array | None, second: Array | None) -> bool:
    if first is None or second is None:
        return first is second
    return np.array_equal(first, second)


def _stacked_scales(parts: Sequence[Quantized]) -> tuple[Array, Array | None]:
    scales = [part.scale for part in parts]
    rows = [len(part.codes) for part in parts]
    if all(scale.ndim == 1 for scale in scales):
        each = [np.broadcast_to(s, (n,)) for s, n in zip(scales, rows, strict=True)]
        return np.concatenate(each), None
    by_block = [len(s) != n for s, n in zip(scales, rows, strict=True)]
    if all(by_block) and all(n % FP8_BLOCK[0] == 0 for n in rows[:-1]):
        return np.concatenate(scales), None
    groups = max(scale.shape[1] if scale.ndim == 2 else 1 for scale in scales)

    def spread(values: Array | None, num_rows: int) -> Array:
        values = np.zeros((num_rows, 1), np.float32) if values is None else values
        values = values.reshape(len(values), -1)
        if len(values) != num_rows:
            values = np.repeat(values, FP8_BLOCK[0], axis=0)[:num_rows]
        return np.repeat(values, groups // values.shape[1], axis=1)

    zero = None
    if any(part.zero is not None for part in parts):
        zeros = [spread(part.zero, n) for part, n in zip(parts, rows, strict=True)]
        zero = np.concatenate(zeros).astype(np.float32)
    return np.concatenate([spread(s, n) for s, n in zip(scales, rows, strict=True)]), zero


def grouped(weight: Quantized, part: StoredPart) -> Quantized:
    """The weight with groups of a size that operators have; larger ones are repeated.

    scale and zero: [N, G]. Raises UserError where the group size is none of them.
    """
    groups = weight.scale.shape[1]
    size = part.in_features // groups
    if groups == 1 or size in GROUP_SIZES:
        return weight
    largest = max(GROUP_SIZES)
    if size % largest:
        allowed = ", ".join(str(s) for s in GROUP_SIZES if s > 0)
        raise UserError(
            f"{part.prefix} has groups of {size} input features (allowed: {allowed}, multiples of "
            f"{largest}, or one for each output feature); quantize it again with one of these"
        )
    count = size // largest
    zero = None if weight.zero is None else np.repeat(weight.zero, count, axis=1)
    return replace(weight, scale=np.repeat(weight.scale, count, axis=1), zero=zero)


def in_group_order(
    weight: Quantized, group_of: Array, part: StoredPart, is_scattered: bool
) -> Quantized:
    """Columns sorted by group, and `perm`, where act-order scattered them.

    group_of: int [K], the group of each column. is_scattered: what config.json says. One expert's
    may be sorted nevertheless, as those that calibration never reached are: it has a `perm` as the
    others have. Raises UserError where groups differ in size.
    """
    groups = weight.scale.shape[1]
    size = part.in_features // groups
    is_sorted = np.array_equal(group_of, np.arange(part.in_features) // size)
    if is_sorted and not (part.is_expert and is_scattered and groups > 1):
        return weight
    perm = np.argsort(group_of, kind="stable")
    if not np.array_equal(group_of[perm], np.arange(part.in_features) // size):
        raise UserError(
            f"{part.prefix}.g_idx does not put {size} input features into each of {groups} "
            "groups; the checkpoint is damaged: copy it, or quantize it, again"
        )
    return replace(weight, codes=weight.codes[:, perm], perm=perm.astype(np.int32))


def num_groups(part: StoredPart, group_size: int) -> int:
    """Groups of a part; raises UserError where the size does not divide it."""
    if group_size in (-1, 0):
        return 1
    if part.in_features % group_size:
        raise UserError(
            f"{part.prefix}: group size {group_size} does not divide its {part.in_features} input "
            "features; quantize it again with a group size that does, or per channel (-1)"
        )
    return part.in_features // group_size


def unpacked(words: Array, bits: int, axis: int) -> npt.NDArray[np.uint8]:
    """Codes of `bits` 4 or 8 from int32 words along `axis`, lowest bits first."""
    # Bytes in memory order: safetensors files and x86 are little-endian.
    data: Array = np.ascontiguousarray(np.moveaxis(words, axis, -1)).view(np.uint8)
    if bits == 4:
        data = np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], -1)
    return np.moveaxis(data, -1, axis)


def packed(codes: Array, bits: int, axis: int) -> npt.NDArray[np.int32]:
    """The inverse of `unpacked`; zeros fill the last word."""
    data: Array = np.moveaxis(codes.astype(np.uint8), axis, -1)
    missing = -data.shape[-1] % (32 // bits)
    data = np.pad(data, [(0, 0)] * (data.ndim - 1) + [(0, missing)])
    if bits == 4:
        data = data[..., 0::2] | data[..., 1::2] << 4
    words = np.ascontiguousarray(data).view(np.int32)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis))
