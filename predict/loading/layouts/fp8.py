"""float8 checkpoints of Hugging Face: "fp8" (DeepSeek's blocks, or one scale) and "fbgemm_fp8".

weight e4m3 [N, K]; its scale is weight_scale_inv (a factor in spite of its name) or weight_scale:
[ceil(N / 128), ceil(K / 128)], [N, 1] or one number. Static activations: activation_scale or
input_scale, one number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from predict.config.schemes import FP8_BLOCK, find
from predict.errors import UserError
from predict.loading.layouts._stored import Part, Shape, Stored
from predict.loading.layouts.online import DENSE
from predict.schemes import Quantized
from predict.system.settings import setting

SCHEME = find("e4m3", "e4m3").name
SCALES = ("weight_scale_inv", "weight_scale")
ACT_SCALES = ("activation_scale", "input_scale")


class Fp8(Stored):
    """See predict.loading.layouts.Layout."""

    schemes = frozenset({SCHEME})
    # Scales of the cache are predict.loading.cache_scales.head_scales'.
    ignored = (".bias", ".k_scale", ".v_scale", ".input_scale_ub")

    def __init__(self, config: Mapping[str, Any], where: str, *stored: Any):
        """config: the quantization_config. where: for errors."""
        super().__init__(*stored)
        block = setting(config, "weight_block_size", None, where, list)
        self.block = block is not None
        if block is not None and tuple(block) != FP8_BLOCK:
            raise UserError(
                f"{where}: weight_block_size {block} is not supported (allowed: {list(FP8_BLOCK)})"
            )
        self.static = setting(config, "activation_scheme", "dynamic", where, str) == "static"
        self.by_row = config.get("quant_method") == "fbgemm_fp8"

    def part_scheme(self, part: Part) -> str:
        """See Stored."""
        stored = self.checkpoint.tensors.get(part["weight"])
        return SCHEME if stored is not None and stored.dtype == "F8_E4M3" else DENSE

    def part_group_size(self, part: Part) -> int:
        """See Stored."""
        return FP8_BLOCK[1] if self.block else -1

    def _name(self, part: Part, names: tuple[str, ...]) -> str:
        found = [name for name in names if part[name] in self.checkpoint.tensors]
        return part[found[0] if found else names[0]]

    def part_expected(self, part: Part) -> Mapping[str, Shape]:
        """See Stored."""
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

    def read_part(self, part: Part) -> Quantized:
        """See Stored."""
        scale = self.scales(self._name(part, SCALES))
        act_scale = None
        if self.static:
            act_scale = float(self.scales(self._name(part, ACT_SCALES)).reshape(-1)[0])
        return Quantized(
            self.checkpoint.read(part["weight"]),
            np.ascontiguousarray(scale if self.block else scale.reshape(-1)),
            act_scale=act_scale,
        )
