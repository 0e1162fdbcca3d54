"""Formats of rows in the paged cache: one entry per format, with its quantizer and unpacker.

The compiled operators' table is csrc/include/regatta/kv_format.h. A *row* is the key, value or
latent of one head and token.
Dims: N blocks, S block size, D values of a row. Imports no Paddle until a function is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from predict.config.schemes import TURING
from predict.device.place import divided
from predict.errors import UserError, one_of

if TYPE_CHECKING:
    from paddle import Tensor

# The least max|x| or max - min that a scale is made from: a row of zeros keeps a scale above 0.
LEAST_RANGE = 1e-30
INT8_MAX, INT8_BIAS = 127.0, 128.0  # codes are stored as uint8, 128 is zero
INT4_MAX = 15.0
E4M3_MAX = 448.0

ScalesOf = Literal["none", "head", "token"]


class HeadScales(NamedTuple):
    """Scales of a layer's cache where they are per head: one float for each kv head."""

    key: list[float]
    value: list[float]


class CacheRows(NamedTuple):
    """A block's rows in the cache: `size` values per token and head.

    tail: the last values of a row, which no format quantizes.
    """

    name: str
    num_heads: int
    size: int
    tail: int = 0


def key_value_rows(num_kv_heads: int, head_dim: int) -> tuple[CacheRows, ...]:
    """Rows of keys, and rows of values."""
    return CacheRows("key", num_kv_heads, head_dim), CacheRows("value", num_kv_heads, head_dim)


class CacheTensor(NamedTuple):
    """Name, shape and dtype of one tensor of a block's cache."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class KvFormat:
    """One row of the table.

    quantize(rows [..., D] float32, scale) returns codes [..., row_bytes] uint8 and the scales that
    belong to them: [...] or [..., 2] made from the rows (scales "token"), or what was given, which
    is [..., 1]-broadcastable without its last dim (scales "head").
    unpack(codes, scale, D) returns float32 rows [..., D].
    """

    name: str
    code_bits: int | None  # None: rows are values of the model's dtype
    scales: ScalesOf  # none, per head (constant), or per head and token (each write makes them)
    scale_floats: int  # float32s per head, or per head and token
    quantize: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
    unpack: Callable[[Tensor, Tensor | None, int], Tensor]
    range_max: float | None = None  # scale = max|x| / this, where scales are per head
    gpu: tuple[int, int] = TURING  # from this compute capability on

    def kinds(self, kept: Sequence[CacheRows]) -> tuple[tuple[CacheRows, KvFormat], ...]:
        """The kinds of rows in a block's cache, each with its format.

        Tails, which a format with codes does not quantize, become their own kind.
        """
        kinds: list[tuple[CacheRows, KvFormat]] = []
        for rows in kept:
            if self.code_bits is None or rows.tail == 0:
                kinds.append((rows, self))
                continue
            coded = rows._replace(size=rows.size - rows.tail, tail=0)
            tail = rows._replace(name=f"{rows.name}_tail", size=rows.tail, tail=0)
            kinds += [(coded, self), (tail, DENSE)]
        return tuple(kinds)

    def num_tensors(self, kept: Sequence[CacheRows]) -> int:
        """Cache tensors of a block: the rows of each kind, and scales where there are any."""
        return sum(2 if row.scale_floats else 1 for _, row in self.kinds(kept))

    def paged(self, cache: Sequence[Tensor]) -> Sequence[Tensor]:
        """The cache tensors of a block with one entry per cache block."""
        return cache[: len(cache) // 2] if self.scales == "head" else cache

    def check_gpu(self, capability: tuple[int, int]) -> None:
        """Raises UserError where GPUs of this compute capability lack the format."""
        if capability >= self.gpu:
            return
        known = ", ".join(row.name for row in FORMATS if capability >= row.gpu)
        have, need = (f"sm_{major}{minor}" for major, minor in (capability, self.gpu))
        raise UserError(
            f"kv_format {self.name} needs a GPU of {need} or later, and this one is {have} "
            f"(allowed there: {known}); set --cachekv_int8_type to another one"
        )

    def row_bytes(self, head_dim: int, element_bytes: int) -> int:
        """Bytes of one row, scales apart. element_bytes: of the model's dtype."""
        if self.code_bits is None:
            return head_dim * element_bytes
        return -(-head_dim * self.code_bits // 8)

    def bytes_per_token(self, layers: Iterable[Sequence[CacheRows]], element_bytes: int) -> int:
        """Bytes of cache that one token takes over all layers, scales per token included."""
        return sum(
            rows.num_heads * (row.row_bytes(rows.size, element_bytes) + row.scale_bytes)
            for kept in layers
            for rows, row in self.kinds(kept)
        )

    @property
    def scale_bytes(self) -> int:
        """Bytes of one row's own scales."""
        return 4 * self.scale_floats if self.scales == "token" else 0

    def tensors(
        self, kept: Sequence[CacheRows], num_blocks: int | None, block_size: int, dtype: str
    ) -> tuple[CacheTensor, ...]:
        """The cache tensors of a block in the operators' order. num_blocks None: -1.

        The rows of each kind, [N, heads, S, row], then the scales of each.
        """
        blocks = -1 if num_blocks is None else num_blocks
        tensors, scales = [], []
        for rows, row in self.kinds(kept):
            lead = (blocks, rows.num_heads, block_size)
            if row.code_bits is None:
                width, stored = rows.size, dtype
            else:
                width, stored = row.row_bytes(rows.size, 1), "uint8"
            tensors.append(CacheTensor(f"{rows.name}_cache", (*lead, width), stored))
            if row.scale_floats == 0:
                continue
            shape = lead if row.scales == "token" else (rows.num_heads,)
            if row.scale_floats > 1:
                shape = (*shape, row.scale_floats)
            scales.append(CacheTensor(f"{rows.name}_scale", shape, "float32"))
        return (*tensors, *scales)


def _codes(values: Tensor, least: float, most: float, bias: float = 0.0) -> Tensor:
    """uint8 codes: rounded to nearest even, clipped, moved by `bias`."""
    import paddle

    return (paddle.clip(paddle.round(values), least, most) + bias).astype("uint8")


def quantize_int8(rows: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Codes round(x / scale) + 128, clipped to -127..127 first; scale per head, given."""
    assert scale is not None
    return _codes(rows * (1.0 / scale).unsqueeze(-1), -INT8_MAX, INT8_MAX, INT8_BIAS), scale


def quantize_int8_rows(rows: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """As `quantize_int8` with scale = max|x| / 127 of each row."""
    import paddle

    largest = paddle.clip(paddle.max(paddle.abs(rows), axis=-1), min=LEAST_RANGE)
    codes = _codes(rows * (INT8_MAX / largest).unsqueeze(-1), -INT8_MAX, INT8_MAX, INT8_BIAS)
    return codes, divided(largest, INT8_MAX)


def unpack_int8(codes: Tensor, scale: Tensor | None, head_dim: int) -> Tensor:
    """(code - 128) * scale, both int8 formats."""
    assert scale is not None
    return (codes.astype("float32") - INT8_BIAS) * scale.unsqueeze(-1)


def quantize_fp8(rows: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """e4m3 of x / scale, saturating at 448; scale per head, given."""
    assert scale is not None
    return _e4m3_codes(rows * (1.0 / scale).unsqueeze(-1)), scale


def quantize_fp8_rows(rows: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """As `quantize_fp8` with scale = max|x| / 448 of each row.

    Not the power of two above it: what tokens have in common would be rounded alike in all of them,
    and attention could not average that out. Measured on logits: 10 to 30 % more error.
    """
    import paddle

    largest = paddle.clip(paddle.max(paddle.abs(rows), axis=-1), min=LEAST_RANGE)
    return _e4m3_codes(rows * (E4M3_MAX / largest).unsqueeze(-1)), divided(largest, E4M3_MAX)


def _e4m3_codes(values: Tensor) -> Tensor:
    """uint8 e4m3, rounded to nearest even, saturating at 448."""
    import paddle

    values = paddle.clip(values, -E4M3_MAX, E4M3_MAX)
    magnitude = paddle.abs(values)
    # Steps between neighbours: 2^-9 up to 2^-6, then an eighth of the power of two below.
    powers = paddle.to_tensor([2.0**e for e in range(-5, 9)], "float32")
    above = (magnitude.unsqueeze(-1) >= powers).astype("float32").sum(axis=-1)
    exponent = above - 6.0
    step = paddle.pow(paddle.full_like(exponent, 2.0), exponent - 3.0)
    eighths = paddle.round(magnitude / step)  # 0..7 below 2^-6, else 8..16
    code = above * 8.0 + eighths
    return (code + 128.0 * (values < 0).astype("float32")).astype("uint8")


def _e4m3_values() -> list[float]:
    """The values of the 256 codes. 127 and 255, which stand for NaN, are never written."""
    values = []
    for code in range(128):
        exponent, mantissa = code >> 3, code & 7
        power = 2.0 ** (exponent - 10 if exponent else -9)
        values.append((8 + mantissa if exponent else mantissa) * power)
    return values + [-value for value in values]


def unpack_fp8(codes: Tensor, scale: Tensor | None, head_dim: int) -> Tensor:
    """e4m3 * scale."""
    import paddle

    assert scale is not None
    table = paddle.to_tensor(_e4m3_values(), "float32")
    values = paddle.gather(table, codes.astype("int32").reshape([-1])).reshape(codes.shape)
    return values * scale.unsqueeze(-1)


def quantize_int4(rows: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Codes round((x - minimum) / scale), scale = (max - min) / 15 of each row.

    Two to a byte, the even dim in the low four bits; an odd row's last high bits are 0.
    """
    import paddle

    minimum = paddle.min(rows, axis=-1)
    extent = paddle.clip(paddle.max(rows, axis=-1) - minimum, min=LEAST_RANGE)
    values = (rows - minimum.unsqueeze(-1)) * (INT4_MAX / extent).unsqueeze(-1)
    codes = paddle.clip(paddle.round(values), 0.0, INT4_MAX)
    low, high = codes[..., 0::2], codes[..., 1::2]
    if rows.shape[-1] % 2:
        high = paddle.concat([high, paddle.zeros_like(low[..., :1])], axis=-1)
    packed = (low + 16.0 * high).astype("uint8")
    return packed, paddle.stack([divided(extent, INT4_MAX), minimum], axis=-1)


def unpack_int4(codes: Tensor, scale: Tensor | None, head_dim: int) -> Tensor:
    """Codes times scale plus minimum; scale [..., 2] holds both."""
    import paddle

    assert scale is not None
    pairs = codes.astype("float32")
    high = paddle.floor(pairs / 16.0)
    both = paddle.stack([pairs - 16.0 * high, high], axis=-1)
    values = both.flatten(-2, -1)[..., :head_dim]
    return values * scale[..., 0:1] + scale[..., 1:2]


DENSE = KvFormat(
    *("dense", None, "none", 0),
    quantize=lambda rows, scale: (rows, None),
    unpack=lambda rows, scale, head_dim: rows.astype("float32"),
)
FORMATS: tuple[KvFormat, ...] = (
    DENSE,
    KvFormat("int8_static", 8, "head", 1, quantize_int8, unpack_int8, range_max=INT8_MAX),
    KvFormat("int8_dynamic", 8, "token", 1, quantize_int8_rows, unpack_int8),
    # Float8 needs a GPU with float8 units (Ada, Hopper and later).
    KvFormat("fp8", 8, "head", 1, quantize_fp8, unpack_fp8, range_max=E4M3_MAX, gpu=(8, 9)),
    KvFormat("int4", 4, "token", 2, quantize_int4, unpack_int4),
)
KV_FORMATS: tuple[str, ...] = tuple(row.name for row in FORMATS)
# Formats of latents. Scales are made with each row, and no float8 unit is needed.
LATENT_FORMATS: tuple[KvFormat, ...] = (
    DENSE,
    KvFormat("fp8", 8, "token", 1, quantize_fp8_rows, unpack_fp8),
)


def kv_format_of(name: str, formats: Sequence[KvFormat] | None = None) -> KvFormat:
    """The row of that name; raises UserError naming the known ones. formats: default FORMATS."""
    formats = FORMATS if formats is None else formats
    for row in formats:
        if row.name == name:
            return row
    raise one_of("kv_format", name, [row.name for row in formats])
