"""float8 checkpoints of Hugging Face: "fp8" (DeepSeek's blocks, or one scale) and "fbgemm_fp8".

weight e4m3 [N, K]; its scale is weight_scale_inv (a factor in spite of its name) or weight_scale:
[ceil(N / 128), ceil(K / 128)], [N, 1] or one number. Static activations: activation_scale or
input_scale, one number. fbgemm_fp8: activation_scale_ub is the largest |x| of a row that its scale
takes into account, 1200 as in transformers where the file has none.

Codes are kept where flags ask for nothing else. Where they do, as PaddleNLP's a8w8_fp8_wint4 does
of experts, the values that codes stand for are rounded as a dense checkpoint's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.config.schemes import FP8_BLOCK, find
from predict.errors import UserError
from predict.loading.arrays import Shape
from predict.loading.layouts._stored import Stored, StoredPart, parts_of
from predict.loading.layouts.online import DENSE, Online
from predict.loading.matrices import round_weight
from predict.nn.plans import LinearPlan
from predict.schemes import Quantized, scheme_of
from predict.schemes._e4m3 import values_of
from predict.system.settings import refuse_unread, setting

SCHEME = find("e4m3", "e4m3").name
READ = "quant_method weight_block_size activation_scheme fmt scale_fmt expert_dtype kv_cache_scheme"
ALLOWED = {
    "fmt": ("e4m3", "float8_e4m3fn"),
    "scale_fmt": ("float", "ue8m0"),
    "expert_dtype": ("fp8",),
}
LIMIT, OF_FBGEMM = "activation_scale_ub", "fbgemm_fp8"
DEFAULT_LIMIT = 1200.0
UNREAD = """
    modules_to_not_convert modules_to_convert ignored_layers
    weight_quantize_algo quant_round_type llm_int8_threshold weight_blocksize
    weight_double_quant_block_size weight_quant_method act_quant_method dtype"""
SCALES = ("weight_scale_inv", "weight_scale")
ACT_SCALES = ("activation_scale", "input_scale")


class Fp8(Stored):
    """e4m3 weights, with scales of blocks, of rows or of the whole."""

    schemes = frozenset({SCHEME})
    is_rounded = True
    # Scales of the cache are predict.loading.cache_scales.head_scales'.
    ignored = (".k_scale", ".v_scale", ".input_scale_ub")

    def __init__(self, config: Mapping[str, Any], where: str, *stored: Any):
        super().__init__(*stored)
        settings, source, plan = self.settings, self.source, self.plan
        self.by_row = config.get("quant_method") == OF_FBGEMM
        refuse_unread(config, f"{READ} {LIMIT}" if self.by_row else READ, UNREAD, where)
        for key, allowed in ALLOWED.items():
            value = setting(config, key, allowed[0], where, str)
            if value not in allowed:
                raise UserError(
                    f"{where}: {key} {value[:40]!r} is not supported (allowed: "
                    f"{', '.join(allowed)}); use the unquantized checkpoint and --quant_type"
                )
        if settings.block_size != -1:
            raise UserError(
                f"{where} says that the weights are stored as {SCHEME}, which --weight_block_size "
                "cannot change; leave --weight_block_size out"
            )
        asked = settings.scheme or SCHEME
        # What the checkpoint leaves in float stays so, unless flags ask for another type.
        self.online = Online(
            source, replace(settings, scheme=None if asked == SCHEME else asked), plan
        )
        # So does an LM head that is stored in codes; beside other types it is dense, as ever.
        head = settings.head_scheme or (SCHEME if asked == SCHEME else None)
        self.of_codes = Online(source, replace(settings, scheme=asked, head_scheme=head), plan)
        block = setting(config, "weight_block_size", None, where, list)
        self.block = block is not None
        if block is not None and tuple(block) != FP8_BLOCK:
            raise UserError(
                f"{where}: weight_block_size {block} is not supported (allowed: {list(FP8_BLOCK)})"
            )
        self.static = setting(config, "activation_scheme", "dynamic", where, str) == "static"
        limit = setting(config, LIMIT, DEFAULT_LIMIT, where, float, int)
        if not 0 < limit < math.inf:
            raise UserError(f"{where}: {LIMIT} is {limit} (allowed: finite numbers above 0)")
        self.limit = float(limit) if self.by_row and not self.block else None

    def _is_kept(self, plan: LinearPlan) -> bool:
        """As it is stored, in codes or in float."""
        return self._in_float(plan) or self.of_codes.scheme(plan) == SCHEME

    def scheme(self, plan: LinearPlan) -> str:
        return super().scheme(plan) if self._is_kept(plan) else self.of_codes.scheme(plan)

    def group_size(self, plan: LinearPlan) -> int:
        return super().group_size(plan) if self._is_kept(plan) else self.of_codes.group_size(plan)

    def expected(self, plan: LinearPlan) -> Mapping[str, Shape]:
        if not self._is_kept(plan):
            self.of_codes.expected(plan)  # refuses groups that do not divide the linear
        return super().expected(plan)

    def read(self, plan: LinearPlan) -> Quantized:
        if self._is_kept(plan):
            return super().read(plan)
        values = np.concatenate(list(map(self.part_values, parts_of(plan))))
        return scheme_of(self.scheme(plan)).quantize(values, self.group_size(plan), round_weight)

    def part_values(self, part: StoredPart) -> npt.NDArray[np.float32]:
        if self.part_scheme(part) == DENSE:
            return super().part_values(part)
        stored = self.read_part(part)
        values, scale = values_of(stored.codes), stored.scale
        if self.block:
            rows, columns = (np.arange(size) // FP8_BLOCK[0] for size in values.shape)
            return values * scale[rows][:, columns]
        return values * scale.reshape(-1, 1)

    def part_scheme(self, part: StoredPart) -> str:
        stored = self.checkpoint.tensors.get(part["weight"])
        if stored is not None and stored.dtype == "F8_E5M2":
            raise UserError(
                f"{self.checkpoint.directory}: {part['weight']} has dtype F8_E5M2 (allowed: "
                "F8_E4M3); use the unquantized checkpoint and --quant_type"
            )
        return SCHEME if stored is not None and stored.dtype == "F8_E4M3" else DENSE

    def part_group_size(self, part: StoredPart) -> int:
        return FP8_BLOCK[1] if self.block else -1

    def _name(self, part: StoredPart, names: tuple[str, ...]) -> str:
        found = [name for name in names if part[name] in self.checkpoint.tensors]
        return part[found[0] if found else names[0]]

    def part_expected(self, part: StoredPart) -> Mapping[str, Shape]:
        rows, columns = part.out_features, part.in_features
        scale = self._name(part, SCALES)
        if self.block:
            shape: Shape = (-(-rows // FP8_BLOCK[0]), -(-columns // FP8_BLOCK[1]))
        elif self.by_row:
            shape = (rows, 1)
        else:
            shape = self._single(scale)
        names: dict[str, Shape] = {part["weight"]: (rows, columns), scale: shape}
        if self.static:
            act = self._name(part, ACT_SCALES)
            names[act] = self._single(act)
        return names

    def _single(self, name: str) -> Shape:
        """The shape of one number, as stored: some tools write [], some [1] or [1, 1]."""
        stored = self.checkpoint.tensors.get(name)
        return stored.shape if stored is not None and set(stored.shape) <= {1} else (1,)

    def read_part(self, part: StoredPart) -> Quantized:
        scale = self.scales(self._name(part, SCALES))
        act_scale = None
        if self.static:
            act_scale = float(self.scales(self._name(part, ACT_SCALES)).reshape(-1)[0])
        return Quantized(
            self.checkpoint.read(part["weight"]),
            np.ascontiguousarray(scale if self.block else scale.reshape(-1)),
            act_scale=act_scale,
            act_limit=self.limit,
        )
