"""GGUF's types of blocks: codes and scales of rows, kept where a scheme holds the same values.

A value is code * scale, or code * scale + minimum, of 32 values (a sub-block) or of a whole block.
Ours is (code - zero) * scale with float32 scales and zeros: zero = -minimum / scale, which gives
the values of the file but for float32's own rounding. Types with scales for every 16 values (Q2_K,
Q6_K) or with values from a grid become floats. Source: ggml's src/ggml-quants.c.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from predict.config.schemes import find, scheme_info
from predict.errors import UserError
from predict.gguf.reader import PLAIN
from predict.loading.arrays import Shape
from predict.loading.gguf_tensors import GgufArray
from predict.loading.layouts._stored import Stored, StoredPart, parts_of
from predict.loading.layouts._target import Target
from predict.loading.layouts.online import DENSE, Online
from predict.nn.plans import LinearPlan
from predict.schemes import Quantized, for_row_blocks
from predict.system.notes import LOG

Array = npt.NDArray[Any]
Blocks = npt.NDArray[np.uint8]
INT4, INT8, E2M1 = find("int4").name, find("int8").name, find("e2m1").name
MIDDLE = 8  # of 4-bit codes
INT4_BITS = scheme_info(INT4).bits


class BlockCodes(NamedTuple):
    """What blocks [M, bytes] hold: values are codes * scale, or codes * scale + minimum."""

    codes: Array  # int8 [M, block]; of MXFP4 bits of e2m1
    scale: npt.NDArray[np.float32]  # [M, groups]
    minimum: npt.NDArray[np.float32] | None = None  # [M, groups]


class BlockType(NamedTuple):
    """A type of blocks that a scheme holds."""

    scheme: str
    group_size: int
    unpack: Callable[[Blocks], BlockCodes]
    has_minimum: bool = False


def holds(target: Target, kinds: Sequence[BlockType], in_features: int) -> bool:
    """Whether a linear of parts of these kinds keeps the values that the file has."""
    schemes = {kind.scheme for kind in kinds}
    if E2M1 in schemes and len(schemes) > 1:
        return False  # no scheme has both kinds of codes
    scheme = INT8 if INT8 in schemes else kinds[0].scheme
    size = min(kind.group_size for kind in kinds)
    if target.compiled and target.device != "cpu" and scheme != E2M1:
        # Scales are of the model's dtype there, and zeros whole numbers.
        is_exact = scheme == INT4 and not any(kind.has_minimum for kind in kinds)
        if not is_exact or target.dtype != "float16":
            return False
    group_size = -1 if size == in_features else size
    return in_features % size == 0 and target.runs(scheme, group_size, in_features)


def _half(blocks: Blocks, at: int) -> npt.NDArray[np.float32]:
    """[M, 1], a float16 at that byte."""
    values = np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)
    return values.astype(np.float32)


def _nibbles(data: Blocks) -> Array:
    """[M, 2 n] of bytes [M, n]: the lower halves of all, then the upper ones."""
    return np.concatenate([data & 15, data >> 4], axis=1)


def _fifth_bits(data: Blocks) -> Array:
    """[M, 32] of the bits of four bytes, the lowest first, in a code's fifth place."""
    return np.unpackbits(data, axis=1, bitorder="little") << 4


def _q4_0(blocks: Blocks) -> BlockCodes:
    return BlockCodes(_nibbles(blocks[:, 2:]).view(np.int8) - np.int8(MIDDLE), _half(blocks, 0))


def _q4_1(blocks: Blocks) -> BlockCodes:
    return BlockCodes(_nibbles(blocks[:, 4:]).view(np.int8), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Blocks) -> BlockCodes:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return BlockCodes(codes.view(np.int8) - np.int8(16), _half(blocks, 0))


def _q5_1(blocks: Blocks) -> BlockCodes:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return BlockCodes(codes.view(np.int8), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Blocks) -> BlockCodes:
    return BlockCodes(np.ascontiguousarray(blocks[:, 2:]).view(np.int8), _half(blocks, 0))


def _k_scales(blocks: Blocks) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Scales and minimums [M, 8] of Q4_K and Q5_K: six bits each, in bytes 4 to 15."""
    low, high, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 63, (mixed & 15) | (low >> 6) << 4], axis=1)
    minimums = np.concatenate([high & 63, (mixed >> 4) | (high >> 6) << 4], axis=1)
    return _half(blocks, 0) * scales, -_half(blocks, 2) * minimums


def _k_codes(data: Blocks) -> Array:
    """[M, 256] of 128 bytes: of 32 bytes the lower halves, then the upper ones, and so on."""
    quarters = data.reshape(len(data), 4, 1, 32)
    return np.concatenate([quarters & 15, quarters >> 4], axis=2).reshape(len(data), -1)


def _q4_k(blocks: Blocks) -> BlockCodes:
    return BlockCodes(_k_codes(blocks[:, 16:]).view(np.int8), *_k_scales(blocks))


def _q5_k(blocks: Blocks) -> BlockCodes:
    bits = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _k_codes(blocks[:, 48:]) | bits.reshape(len(blocks), -1) << 4
    return BlockCodes(codes.view(np.int8), *_k_scales(blocks))


def _q3_k(blocks: Blocks) -> BlockCodes:
    """Codes times the scales of 16 values are whole numbers of -124 to 128: less, and they fit."""
    masks, low, packed = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    count = len(blocks)
    pairs = low.reshape(count, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    bits = masks[:, None] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = pairs.reshape(count, 8, 32).astype(np.int8) - np.int8(4) * (1 - bits).astype(np.int8)
    four = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    two = packed[:, None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    scales = (four | two.reshape(count, -1) << 4).astype(np.int16) - 32
    products = codes.reshape(count, 16, 16) * scales[:, :, None]
    return BlockCodes((-products).astype(np.int8).reshape(count, -1), -_half(blocks, 108))


def _tq2_0(blocks: Blocks) -> BlockCodes:
    parts = blocks[:, :64].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    codes = (parts & 3).reshape(len(blocks), -1)
    return BlockCodes(codes.view(np.int8) - np.int8(1), _half(blocks, 64))


IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)


def _iq4_nl(blocks: Blocks) -> BlockCodes:
    return BlockCodes(IQ4_VALUES[_nibbles(blocks[:, 2:])], _half(blocks, 0))


def _iq4_xs(blocks: Blocks) -> BlockCodes:
    count = len(blocks)
    high = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16)
    two = high >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    four = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=2).reshape(count, -1)
    scales = (four | two << 4).astype(np.int16) - 32
    codes = _nibbles(blocks[:, 8:].reshape(-1, 16)).reshape(count, -1)
    return BlockCodes(IQ4_VALUES[codes], _half(blocks, 0) * scales.astype(np.float32))


def _mxfp4(blocks: Blocks) -> BlockCodes:
    exponents = blocks[:, :1].astype(np.float32)
    return BlockCodes(_nibbles(blocks[:, 1:]).view(np.int8), np.exp2(exponents - 127))


KINDS: Mapping[str, BlockType] = {
    "Q4_0": BlockType(INT4, 32, _q4_0),
    "Q4_1": BlockType(INT4, 32, _q4_1, has_minimum=True),
    "Q5_0": BlockType(INT8, 32, _q5_0),
    "Q5_1": BlockType(INT8, 32, _q5_1, has_minimum=True),
    "Q8_0": BlockType(INT8, 32, _q8_0),
    "Q3_K": BlockType(INT8, 128, _q3_k),
    "Q4_K": BlockType(INT4, 32, _q4_k, has_minimum=True),
    "Q5_K": BlockType(INT8, 32, _q5_k, has_minimum=True),
    "TQ2_0": BlockType(INT4, 128, _tq2_0),
    "IQ4_NL": BlockType(INT8, 32, _iq4_nl),
    "IQ4_XS": BlockType(INT8, 32, _iq4_xs),
    "MXFP4": BlockType(E2M1, 32, _mxfp4),
}


class Gguf(Stored):
    """See Layout. A linear keeps its codes where all its parts can; others are read as floats.

    Where flags ask for a scheme, those whose codes are of it and of its groups keep them, and the
    others are floats that it rounds. Logs what became of linears that are not stored as floats.
    """

    has_spare_biases = False
    is_rounded = True  # flags may ask for another scheme

    def __init__(self, *stored: Any):
        super().__init__(*stored)
        settings = self.settings
        self.is_asked = settings.scheme is not None or settings.expert_scheme is not None
        self.is_again = False  # whether codes of 4 bits are rounded to others of 4 bits
        if self.is_asked:
            self.online = Online(self.source, settings, self.plan)
        self._say()

    def _array(self, part: StoredPart) -> GgufArray | None:
        """The part's blocks; None where it has none: an adapter may have been merged into it."""
        array = self.checkpoint.tensors.get(part["weight"])
        return array if isinstance(array, GgufArray) else None

    def _kind(self, part: StoredPart) -> BlockType | None:
        array = self._array(part)
        return None if array is None else KINDS.get(array.kind)

    def _in_float(self, plan: LinearPlan) -> bool:
        if plan.is_stored_otherwise or plan.head_parts:
            return True
        if plan == self.plan.head and self.settings.head_scheme is not None:
            return True
        kinds = [self._kind(part) for part in parts_of(plan)]
        found = [kind for kind in kinds if kind is not None]
        if len(found) < len(kinds) or not holds(self.target, found, plan.in_features):
            return True
        if not self.is_asked:
            return False
        sizes = {self.settings.group_size, *(kind.group_size for kind in found)} - {-1}
        return len(sizes) > 1 or {self.online.scheme(plan)} != {kind.scheme for kind in found}

    def scheme(self, plan: LinearPlan) -> str:
        return self.online.scheme(plan) if self._in_float(plan) else super().scheme(plan)

    def part_scheme(self, part: StoredPart) -> str:
        kind = self._kind(part)
        return DENSE if kind is None else kind.scheme

    def part_group_size(self, part: StoredPart) -> int:
        kind = self._kind(part)
        return -1 if kind is None else kind.group_size

    def part_expected(self, part: StoredPart) -> Mapping[str, Shape]:
        return {part["weight"]: (part.out_features, part.in_features)}

    def read_part(self, part: StoredPart) -> Quantized:
        array, kind = self._array(part), self._kind(part)
        assert array is not None and kind is not None  # noqa: PT018  (else it is read in float)
        rows, tensor = array.blocks(), array.source.tensor
        groups = part.in_features // kind.group_size
        codes = np.empty((part.out_features, part.in_features), np.int8)
        scale = np.empty((part.out_features, groups), np.float32)
        zero = np.empty_like(scale) if kind.has_minimum or kind.scheme == INT4 else None

        def work(span: slice) -> None:
            found = kind.unpack(rows[span].reshape(-1, tensor.block_bytes))
            made = as_quantized(found, kind, groups)
            codes[span], scale[span] = made.codes, made.scale
            if zero is not None:
                zero[span] = made.zero

        for_row_blocks(len(rows), part.in_features, work)
        if not np.isfinite(scale).all() or not (zero is None or np.isfinite(zero).all()):
            raise UserError(
                f"{tensor.file}: {part.prefix} has scales that are not finite; the file is "
                "damaged: copy it, or quantize it, again"
            )
        return Quantized(codes, scale, zero)

    def _say(self) -> None:
        """What becomes of the linears' types, in one line of the log."""
        fates: Counter[str] = Counter()
        for linear in (*self.plan.linears(), self.plan.head):
            arrays = [self._array(part) for part in parts_of(linear)]
            kinds = {array.kind for array in arrays if array is not None}
            if kinds <= set(PLAIN):
                continue
            name = self.scheme(linear)
            fate = self.target.dtype if name == DENSE else name
            if not self._in_float(linear):
                fate = f"kept as {fate}"
            elif name != DENSE:
                fate = f"rounded to {fate}"
                codes = {KINDS[kind].scheme for kind in kinds if kind in KINDS}
                self.is_again |= INT4 in codes and scheme_info(name).bits == INT4_BITS
            fates[f"{'+'.join(sorted(kinds))} {fate}"] += 1
        if fates:
            listed = ", ".join(f"{count} {fate}" for fate, count in fates.items())
            LOG.info(f"{self.checkpoint.directory.name}: linears: {listed}")
        if self.is_again:
            LOG.warning(
                f"{self.checkpoint.directory.name}: codes of 4 bits are rounded to others of 4 "
                "bits, which loses a second time; leave --quant_type out, or take weight_only_int8 "
                "(--quant_type weight_only_int4 alone keeps them on a CPU)"
            )


def as_quantized(found: BlockCodes, kind: BlockType, groups: int) -> Quantized:
    """Codes of blocks as rows of a scheme. groups: of a row."""
    codes = found.codes.reshape(-1, groups, kind.group_size)
    count = len(codes)
    scale = _by_group(found.scale, count, groups)
    if found.minimum is None:
        if kind.scheme != INT4:
            return Quantized(codes.reshape(count, -1), scale)
        shifted = codes + np.int8(MIDDLE)
        return Quantized(shifted.reshape(count, -1), scale, np.full_like(scale, MIDDLE))
    minimum = _by_group(found.minimum, count, groups)
    flat = scale == 0  # all values are the minimum: the scale becomes that, and codes 1
    zero = np.where(flat, np.float32(0), -minimum / np.where(flat, np.float32(1), scale))
    if flat.any():
        codes = np.where(flat[:, :, None], np.int8(1), codes)
        scale = np.where(flat, minimum, scale)
    return Quantized(codes.reshape(count, -1), scale, zero)


def _by_group(values: npt.NDArray[np.float32], rows: int, groups: int) -> npt.NDArray[np.float32]:
    """[rows, groups]; values that blocks of several groups share are repeated."""
    each = values.reshape(rows, -1)
    return np.repeat(each, groups // each.shape[1], axis=1)
