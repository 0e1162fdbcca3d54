"""compressed-tensors: what llm-compressor writes, and vLLM and transformers read; and we write.

pack-quantized: weight_packed int32 [N, K * bits / 32] of codes + 2^(bits - 1), weight_scale [N, G],
weight_shape; with zero points weight_zero_point int32 [N * bits / 32, G], packed along N; with
act-order weight_g_idx int32 [K] (codes stay in the original order of columns).
int-quantized, float-quantized, naive-quantized: weight int8 (of 4 bits too) or e4m3 [N, K],
weight_scale [1], [N, 1], [N, G] or [ceil(N / 128), ceil(K / 128)], and where activations are static
input_scale [1].
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from predict.config.schemes import FP8_BLOCK, SCHEMES, SchemeInfo, scheme_info
from predict.errors import UserError, quoted
from predict.loading.arrays import FLOAT_DTYPES, Shape
from predict.loading.layouts._stored import (
    WORDS,
    Array,
    Stored,
    StoredPart,
    grouped,
    in_group_order,
    num_groups,
    packed,
    unpacked,
)
from predict.loading.layouts.online import DENSE
from predict.schemes import Quantized
from predict.system.settings import pattern, refuse_unread, setting, texts

PACKED, INTS, FLOATS = "pack-quantized", "int-quantized", "float-quantized"
FORMATS = (PACKED, INTS, FLOATS, "naive-quantized")
READ = "quant_method format config_groups ignore kv_cache_scheme transform_config sparsity_config"
UNREAD = "quantization_status global_compression_ratio version run_compressed"
OF_GROUP = "targets weights input_activations format"
OF_WEIGHTS = "num_bits type symmetric strategy group_size block_structure"
OF_INPUTS = "num_bits type symmetric strategy group_size dynamic"
HOW_FOUND = "actorder dynamic observer observer_kwargs scale_dtype zp_dtype block_structure"
OFFLINE = ("weight_input", "weight_output")  # locations of transforms that the weights hold
KINDS = {"e4m3": "float8"}  # their names of codes, where ours differ
CLASS, PATTERN = "Linear", "re:"  # kinds of targets besides names
INT8_MIN, INT4_MIN = 128, 8  # what is added to signed codes before packing


class CompressedTensors(Stored):
    """Integer or float8 weights, packed or one a byte."""

    order_name = "weight_g_idx"

    # Scales of the cache are predict.loading.cache_scales.head_scales'.
    ignored = (
        *(".k_scale", ".v_scale", ".weight_shape"),
        *(".k_proj.output_scale", ".v_proj.output_scale"),
    )

    def __init__(self, config: Mapping[str, Any], where: str, *stored: Any):
        super().__init__(*stored)
        self.where = where
        refuse_unread(config, READ, UNREAD, where)
        _check_transforms(config, where)
        self.format = setting(config, "format", None, where, str)
        self.ignore = _targets(config, "ignore", where)
        self.groups = [
            Group(values, str(self.format), f"{where}, {name}")
            for name, values in setting(config, "config_groups", {}, where, dict).items()
        ]
        # Of two groups with the same target the later one has it.
        self.targets = {target: group for group in self.groups for target in group.targets}
        if not self.groups:
            raise UserError(f"{where} has no config_groups; the checkpoint's config.json is broken")

    @property
    def schemes(self) -> frozenset[str]:
        return frozenset(group.scheme for group in self.groups)

    def group_of(self, part: StoredPart) -> Group | None:
        """The config group of a quantized part; None for a dense one."""
        if any(_names(target, part.prefix) for target in self.ignore):
            return None
        matching = [t for t in self.targets if t == CLASS or _names(t, part.prefix)]
        if not matching or self._is_float(part):
            return None
        # As in compressed-tensors itself: a name before a pattern before a class.
        return self.targets[min(matching, key=lambda t: (t == CLASS, t.startswith(PATTERN), t))]

    def _is_float(self, part: StoredPart) -> bool:
        """Whether a targeted part was left alone, as embeddings that serve as head are."""
        stored = self.checkpoint.tensors.get(part["weight"])
        has_scale = part["weight_scale"] in self.checkpoint.tensors
        return stored is not None and stored.dtype in FLOAT_DTYPES and not has_scale

    def part_scheme(self, part: StoredPart) -> str:
        group = self.group_of(part)
        return DENSE if group is None else group.scheme

    def _group(self, part: StoredPart) -> Group:
        group = self.group_of(part)
        assert group is not None, part.prefix
        return group

    def part_group_size(self, part: StoredPart) -> int:
        group = self._group(part)
        return FP8_BLOCK[1] if group.block is not None else int(group.group_size)

    def part_expected(self, part: StoredPart) -> Mapping[str, Shape]:
        group, rows, columns = self.group_of(part), part.out_features, part.in_features
        if group is None:  # beside coded parts, and missing
            return {part["weight"]: (rows, columns)}
        names: dict[str, Shape] = {}
        if group.packed:
            groups, bits = num_groups(part, group.group_size), group.bits
            names[part["weight_packed"]] = (rows, -(-columns * bits // 32))
            if not group.symmetric:
                names[part["weight_zero_point"]] = (-(-rows * bits // 32), groups)
            if part["weight_g_idx"] in self.checkpoint.tensors:
                names[part["weight_g_idx"]] = (columns,)
        else:
            names[part["weight"]] = (rows, columns)
        names[part["weight_scale"]] = self._scale_shape(group, part)
        if group.static:
            stored = self.checkpoint.tensors.get(part["input_scale"])
            names[part["input_scale"]] = stored.shape if stored and stored.shape == () else (1,)
        return names

    def _scale_shape(self, group: Group, part: StoredPart) -> Shape:
        if group.block is not None:
            return -(-part.out_features // FP8_BLOCK[0]), -(-part.in_features // FP8_BLOCK[1])
        if group.strategy == "tensor":
            stored = self.checkpoint.tensors.get(part["weight_scale"])
            return stored.shape if stored and stored.shape in ((), (1, 1)) else (1,)
        return part.out_features, num_groups(part, group.group_size)

    def read_part(self, part: StoredPart) -> Quantized:
        group = self._group(part)
        scale = self.scales(part["weight_scale"])
        if group.packed:
            return self._read_packed(part, group, scale)
        codes = self.checkpoint.read(part["weight"])
        wanted = np.dtype(np.uint8 if group.floats else np.int8)
        if codes.dtype != wanted:
            stored = self.checkpoint.tensors[part["weight"]].dtype
            raise UserError(
                f"{self.checkpoint.directory}: {part['weight']} has dtype {stored}; "
                f"{group.scheme} needs {'F8_E4M3' if group.floats else 'I8'}"
            )
        if scheme_info(group.scheme).has_groups:
            return grouped(self._integers(part, group, codes, scale, None), part)
        act_scale = None
        if group.static:
            act_scale = float(self.scales(part["input_scale"]).reshape(-1)[0])
        if group.strategy == "channel":
            scale = scale[:, 0]
        elif group.strategy == "tensor":
            scale = scale.reshape(1)
            if not group.floats:
                scale = np.repeat(scale, part.out_features)
        return Quantized(codes, scale, act_scale=act_scale)

    def _read_packed(self, part: StoredPart, group: Group, scale: Array) -> Quantized:
        read, bits = self.checkpoint.read_as, group.bits
        codes = unpacked(read(part["weight_packed"], WORDS), bits, 1)[:, : part.in_features]
        zero = None
        if not group.symmetric:
            zero = unpacked(read(part["weight_zero_point"], WORDS), bits, 0)[: part.out_features]
        middle = 1 << bits - 1
        signed = codes.astype(np.int16) - middle
        weight = self._integers(
            part, group, signed, scale, None if zero is None else zero.astype(np.float32) - middle
        )
        group_of = self.group_of_columns(part)
        if group_of is not None:
            weight = in_group_order(weight, group_of, part, True)
        return grouped(weight, part)

    def _integers(
        self, part: StoredPart, group: Group, signed: Array, scale: Array, zero: Array | None
    ) -> Quantized:
        """Weight-only codes of signed integers; those of 4 bits become 0..15 around 8."""
        if group.bits == 4:
            signed = signed + INT4_MIN
            zero = np.full(scale.shape, INT4_MIN, np.float32) if zero is None else zero + INT4_MIN
        codes = np.ascontiguousarray(signed, np.int8)
        return Quantized(codes, scale, None if zero is None else zero.astype(np.float32))


class Group:
    """One entry of config_groups: which linears, and how they are stored."""

    def __init__(self, values: Mapping[str, Any], default_format: str, where: str):
        if not isinstance(values, Mapping):
            raise UserError(f"{where}: presets by name are not supported; write the group out")
        refuse_unread(values, OF_GROUP, "", where)
        weights = setting(values, "weights", {}, where, dict)
        inputs = setting(values, "input_activations", None, where, dict)
        self.targets = _targets(values, "targets", where) or (CLASS,)
        self.format = setting(values, "format", default_format, where, str)
        if self.format not in FORMATS:
            raise UserError(
                f"{where}: format {self.format!r} is not supported (allowed: {', '.join(FORMATS)})"
            )
        self.packed = self.format == PACKED
        inside = f"{where}, weights"
        refuse_unread(weights, OF_WEIGHTS, HOW_FOUND, inside)
        refuse_unread(inputs or {}, OF_INPUTS, HOW_FOUND, f"{where}, input_activations")
        self.bits = setting(weights, "num_bits", 8, inside, int)
        self.floats = setting(weights, "type", "int", inside, str) == "float"
        self.symmetric = setting(weights, "symmetric", True, inside, bool)
        self.strategy = setting(weights, "strategy", "tensor", inside, str)
        self.group_size = setting(weights, "group_size", -1, inside, int)
        if self.group_size < -1:
            raise UserError(f"{inside}: group_size is {self.group_size} (allowed: -1, 1 or more)")
        self.block = None
        if self.strategy == "block":
            self.block = setting(weights, "block_structure", None, inside, list)
        self.static = inputs is not None and not inputs.get("dynamic", False)
        self.scheme = self._scheme(inputs, where)

    def _scheme(self, inputs: Mapping[str, Any] | None, where: str) -> str:
        kind = f"{'float' if self.floats else 'int'}{self.bits}"
        acts = None
        if inputs is not None:
            acts = f"{inputs.get('type', 'int')}{inputs.get('num_bits', 8)}"
        schemes = {
            (
                KINDS.get(str(row.codes), row.codes),
                KINDS.get(str(row.activations), row.activations),
            ): row
            for row in SCHEMES.values()
            if row.codes != "e2m1"  # theirs have names of their own, and another layout
        }
        scheme = schemes.get((kind, acts))
        problem = None
        if scheme is None:
            known = "; ".join(f"{w} with {a or 'float'}" for w, a in schemes)
            problem = f"{kind} weights with {acts or 'float'} activations (known: {known})"
        elif inputs is not None and not inputs.get("symmetric", True):
            problem = "activations with zero points (known: symmetric ones)"
        elif not self.symmetric and not self.packed:
            problem = f"unpacked {kind} weights with zero points (known: symmetric ones)"
        elif self.block is not None and tuple(self.block) != FP8_BLOCK:
            problem = f"blocks of {self.block} (known: {list(FP8_BLOCK)})"
        elif self.strategy not in ("tensor", "channel", "group", "block"):
            problem = f"strategy {self.strategy!r} (known: tensor, channel, group, block)"
        elif scheme.has_groups and self.strategy not in ("channel", "group"):
            problem = f"{kind} weights with one scale per {self.strategy} (known: channel, group)"
        elif not scheme.has_groups and (self.packed or self.strategy == "group"):
            problem = f"{kind} weights in groups with {acts} activations (known: channel, tensor)"
        elif self.static and not scheme.has_static_scales:
            problem = "static activations of int4 weights (known: dynamic ones)"
        if scheme is None or problem is not None:
            raise UserError(f"{where}: {self.format} does not support {problem}")
        return scheme.name


def _check_transforms(config: Mapping[str, Any], where: str) -> None:
    """Raises UserError for what is done to inputs, or to codes, besides quantizing them."""
    sparsity = setting(config, "sparsity_config", {}, where, dict)
    if sparsity.get("format", "dense") != "dense":
        raise UserError(
            f"{where}: sparsity_config has the format {str(sparsity['format'])[:40]!r} (allowed: "
            "dense); save it again without compressing zeros"
        )
    transforms = setting(config, "transform_config", {}, where, dict)
    inside = f"{where}, transform_config"
    for group in setting(transforms, "config_groups", {}, inside, dict).values():
        applied = group.get("apply", []) if isinstance(group, Mapping) else [group]
        places = [each.get("location") if isinstance(each, Mapping) else each for each in applied]
        if online := [place for place in places if place not in OFFLINE]:
            raise UserError(
                f"{inside} turns {quoted(online[0])} while the model runs, which is not "
                f"supported (allowed: {', '.join(OFFLINE)}, which the weights hold already); "
                "quantize it again without transforms, or use the unquantized checkpoint"
            )


def _targets(config: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    """Names of linears and patterns of names, checked."""
    targets = texts(config, key, where)
    for target in targets:
        if target.startswith(PATTERN):
            pattern(target.removeprefix(PATTERN), where)
    return targets


def _names(target: str, prefix: str) -> bool:
    """Whether a target or an ignored name, maybe a regular expression, means a linear."""
    if target.startswith(PATTERN):
        return re.match(target.removeprefix(PATTERN), prefix) is not None
    return target == prefix


def linear_tensors(
    scheme: str, prefix: str, weight: Quantized, scale_dtype: str = "F32"
) -> dict[str, tuple[str, Array]]:
    """What a quantized matrix is stored as: name -> (safetensors dtype, array).

    One part of a linear; columns go back to their original order. Raises ValueError for a8w8 with
    shift or smooth, which this layout has no place for.
    """
    if weight.shift is not None or weight.smooth is not None:
        raise ValueError(f"{prefix}: compressed-tensors cannot hold shift and smooth")
    num_rows, num_columns = weight.codes.shape
    scale = np.asarray(weight.scale, np.float32)
    made: dict[str, tuple[str, Array]] = {}
    info = scheme_info(scheme)
    if info.has_groups:
        bits = info.bits
        scale = scale.reshape(num_rows, -1)
        codes = weight.codes.astype(np.int16) + (INT8_MIN if bits == 8 else 0)
        if weight.perm is not None:
            back = np.argsort(weight.perm)
            codes = codes[:, back]
            group_of = (np.arange(num_columns) // (num_columns // scale.shape[1]))[back]
            made["weight_g_idx"] = "I32", group_of.astype(np.int32)
        made["weight_packed"] = "I32", packed(codes, bits, 1)
        made["weight_shape"] = "I64", np.array([num_rows, num_columns], np.int64)
        middle = 0 if bits == 8 else INT4_MIN
        if weight.zero is not None and (weight.zero != middle).any():
            zero = weight.zero + (INT8_MIN if bits == 8 else 0)
            made["weight_zero_point"] = "I32", packed(zero.astype(np.uint8), bits, 0)
    else:
        made["weight"] = ("F8_E4M3" if info.codes == "e4m3" else "I8"), weight.codes
        if scale.ndim == 1 and len(scale) == num_rows:
            scale = scale[:, None]
        if weight.act_scale is not None:
            made["input_scale"] = "F32", np.array([weight.act_scale], np.float32)
    made["weight_scale"] = scale_dtype, scale
    return {f"{prefix}.{name}": value for name, value in made.items()}


def config(
    scheme: str,
    *,
    group_size: int = -1,
    symmetric: bool = True,
    static: bool = False,
    block: bool = False,
    per_tensor: bool = False,
    ignore: Sequence[str] = ("lm_head",),
    dynamic: Sequence[str] = (),
) -> dict[str, Any]:
    """The quantization_config of a checkpoint whose linears `linear_tensors` made.

    group_size: of the weight-only schemes, -1 per channel. block, per_tensor: of a8w8_fp8. ignore:
    names of linears that stay dense. dynamic: targets whose activation scales are not static, where
    others' are.
    """
    info = scheme_info(scheme)
    weights: dict[str, Any] = {
        "num_bits": info.bits,
        "type": "float" if info.codes == "e4m3" else "int",
        "symmetric": symmetric,
        "strategy": "channel",
        "dynamic": False,
    }
    if group_size != -1:
        weights |= {"strategy": "group", "group_size": group_size}
    if block:
        weights |= {"strategy": "block", "block_structure": list(FP8_BLOCK)}
    if per_tensor:
        weights["strategy"] = "tensor"
    inputs: dict[str, Any] | None = None
    if info.activations is not None:
        inputs = _activations(info, static, block)
    integers = FLOATS if info.codes == "e4m3" else INTS
    layout = PACKED if info.has_groups else integers

    def group(targets: Sequence[str], inputs: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "targets": list(targets),
            "weights": dict(weights),
            "input_activations": inputs,
            "output_activations": None,
            "format": layout,
        }

    groups = {"group_0": group(["Linear"], inputs)}
    if static and dynamic:
        groups["group_1"] = group(dynamic, _activations(info, False, block))
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }


def _activations(info: SchemeInfo, static: bool, block: bool) -> dict[str, Any]:
    """How a config group says that activations are quantized."""
    inputs = {
        "num_bits": 8,
        "type": "float" if info.activations == "e4m3" else "int",
        "symmetric": True,
        "strategy": "tensor" if static else "token",
        "dynamic": not static,
    }
    if block and not static:
        inputs |= {"strategy": "group", "group_size": FP8_BLOCK[1]}
    return inputs
