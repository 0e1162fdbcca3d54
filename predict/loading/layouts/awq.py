"""AWQ checkpoints of AutoAWQ's "gemm" version (Lin et al. 2023).

qweight int32 [K, N / 8] and qzeros int32 [G, N / 8], 4 bits packed along N in the order of
`ORDER`; scales [G, N].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from predict.config.schemes import find
from predict.errors import UserError
from predict.loading.arrays import Shape
from predict.loading.layouts._stored import (
    WORDS,
    Stored,
    StoredPart,
    grouped,
    num_groups,
    unpacked,
)
from predict.loading.layouts.online import DENSE
from predict.schemes import Quantized
from predict.system.settings import refuse_unread, setting

SCHEME = find("int4").name
READ = "quant_method bits w_bit group_size q_group_size version format checkpoint_format zero_point"
UNREAD = """
    method backend modules_to_not_convert do_fuse fuse_max_seq_len modules_to_fuse exllama_config
    use_exllama max_input_length lm_head sym desc_act dynamic pack_dtype meta
    provider autoround_version"""
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word belongs to column ORDER[i] of its eight


class Awq(Stored):
    """Integer weights with zero points, packed along the output features."""

    schemes = frozenset({SCHEME})

    def __init__(self, config: Mapping[str, Any], where: str, *stored: Any):
        super().__init__(*stored)
        # Older files spell them w_bit and q_group_size.
        bits = setting(config, "bits", setting(config, "w_bit", 4, where, int), where, int)
        size = setting(config, "q_group_size", 128, where, int)
        self._size = setting(config, "group_size", size, where, int)
        refuse_unread(config, READ, UNREAD, where)
        layout = setting(config, "format", "gemm", where, str)
        layout = setting(config, "checkpoint_format", layout, where, str)
        version = setting(config, "version", layout, where, str)
        if self._size < 1 and self._size != -1:
            raise UserError(
                f"{where}: group_size {self._size} is not supported (allowed: a number of input "
                "features, -1 for all of them)"
            )
        if bits != 4:
            raise UserError(f"{where}: AWQ with {bits} bits is not supported (allowed: 4)")
        if version.lower() != "gemm":
            raise UserError(
                f"{where}: AWQ version {version!r} is not supported (allowed: gemm); quantize it "
                "again with version gemm"
            )

        has_zeros = any(name.endswith(".qzeros") for name in self.checkpoint.tensors)
        if not setting(config, "zero_point", True, where, bool) and not has_zeros:
            raise UserError(
                f"{where}: zero_point is false, and the files have no qzeros, which is not "
                "supported; quantize it again with zero_point true"
            )

    def part_scheme(self, part: StoredPart) -> str:
        return SCHEME if part["qweight"] in self.checkpoint.tensors else DENSE

    def part_group_size(self, part: StoredPart) -> int:
        return int(self._size)

    def part_expected(self, part: StoredPart) -> Mapping[str, Shape]:
        rows, columns = part.out_features, part.in_features
        groups = num_groups(part, self._size)
        return {
            part["qweight"]: (columns, rows // 8),
            part["qzeros"]: (groups, rows // 8),
            part["scales"]: (groups, rows),
        }

    def read_part(self, part: StoredPart) -> Quantized:
        read = self.checkpoint.read_as
        return grouped(
            Quantized(
                columns_in_order(read(part["qweight"], WORDS)).astype(np.int8),
                np.ascontiguousarray(self.scales(part["scales"]).T),
                columns_in_order(read(part["qzeros"], WORDS)).astype(np.float32),
            ),
            part,
        )


def columns_in_order(words: Any) -> Any:
    """Codes [N, rows] of int32 words [rows, N / 8]."""
    nibbles = unpacked(words, 4, 1).reshape(len(words), -1, 8)
    codes = np.empty_like(nibbles)
    codes[..., ORDER] = nibbles
    return np.ascontiguousarray(codes.reshape(len(words), -1).T)
