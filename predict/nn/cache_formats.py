"""How keys and values lie in the paged cache: one row per format, with its quantizer and unpacker.

The compiled operators' twin of the table is csrc/include/regatta/kv_format.h. A *row* is the key or
value of one head and token. Dims: N blocks, S block size, Hkv key/value heads, D head_dim.
Imports no Paddle until a function is called.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from predict.config.quantization import TURING
from predict.errors import UserError, one_of
from predict.system.files import FLOAT32_MAX, json_type, read_json_object

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.nn.spec import DecoderSpec

# The least max|x| or max - min that a scale is made from: a row of zeros keeps a scale above 0.
LEAST_RANGE = 1e-30
INT8_MAX, INT8_BIAS = 127.0, 128.0  # codes are stored as uint8, 128 is zero
INT4_MAX = 15.0
E4M3_MAX = 448.0
SCALES_FILE = "cachekv_scales.json"

ScalesOf = Literal["none", "head", "token"]


class HeadScales(NamedTuple):
    """Scales of one layer for formats that have them per head: one float for each kv head."""

    key: list[float]
    value: list[float]


class CacheTensor(NamedTuple):
    """Name, shape and dtype of one tensor of a layer's cache."""

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

    @property
    def tensors_per_layer(self) -> int:
        """Key and value, and the scales of both where there are any."""
        return 4 if self.scale_floats else 2

    def paged(self, cache: Sequence[Tensor]) -> Sequence[Tensor]:
        """Those of a layer's cache tensors that have a row per block."""
        return cache[:2] if self.scales == "head" else cache

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

    def bytes_per_token(self, spec: DecoderSpec, element_bytes: int) -> int:
        """Bytes of cache that one token takes over all layers, scales per token included."""
        row = self.row_bytes(spec.head_dim, element_bytes)
        if self.scales == "token":
            row += 4 * self.scale_floats
        return 2 * spec.num_layers * spec.num_kv_heads * row

    def layer_tensors(
        self,
        num_blocks: int | None,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: str,
    ) -> tuple[CacheTensor, ...]:
        """The tensors of one layer's cache, in the operators' order. num_blocks None: -1."""
        blocks = -1 if num_blocks is None else num_blocks
        lead = (blocks, num_kv_heads, block_size)
        if self.code_bits is None:
            row, stored = head_dim, dtype
        else:
            row, stored = self.row_bytes(head_dim, 1), "uint8"
        tensors = [CacheTensor(name, (*lead, row), stored) for name in ("key_cache", "value_cache")]
        if self.scale_floats:
            shape = lead if self.scales == "token" else (num_kv_heads,)
            if self.scale_floats > 1:
                shape = (*shape, self.scale_floats)
            tensors += [CacheTensor(n, shape, "float32") for n in ("key_scale", "value_scale")]
        return tuple(tensors)


def _codes(values: Tensor, least: float, most: float, bias: float = 0.0) -> Tensor:
    """uint8 codes: rounded to nearest even, clipped, moved by `bias`."""
    import paddle

    return (paddle.clip(paddle.round(values), least, most) + bias).astype("uint8")


def _keep(rows: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return rows, None


def _as_stored(rows: Tensor, scale: Tensor | None, head_dim: int) -> Tensor:
    return rows.astype("float32")


def quantize_int8(rows: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Codes round(x / scale) + 128, clipped to -127..127 first; scale per head, given."""
    assert scale is not None
    return _codes(rows * (1.0 / scale).unsqueeze(-1), -INT8_MAX, INT8_MAX, INT8_BIAS), scale


def quantize_int8_rows(rows: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """As `quantize_int8` with scale = max|x| / 127 of each row."""
    import paddle

    largest = paddle.clip(paddle.max(paddle.abs(rows), axis=-1), min=LEAST_RANGE)
    codes = _codes(rows * (INT8_MAX / largest).unsqueeze(-1), -INT8_MAX, INT8_MAX, INT8_BIAS)
    return codes, largest / INT8_MAX


def unpack_int8(codes: Tensor, scale: Tensor | None, head_dim: int) -> Tensor:
    """(code - 128) * scale, both int8 formats."""
    assert scale is not None
    return (codes.astype("float32") - INT8_BIAS) * scale.unsqueeze(-1)


def quantize_fp8(rows: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """e4m3 of x / scale, saturating at 448; scale per head, given."""
    import paddle

    assert scale is not None
    values = paddle.clip(rows * (1.0 / scale).unsqueeze(-1), -E4M3_MAX, E4M3_MAX)
    magnitude = paddle.abs(values)
    # Steps between neighbours: 2^-9 up to 2^-6, then an eighth of the power of two below.
    powers = paddle.to_tensor([2.0**e for e in range(-5, 9)], "float32")
    above = (magnitude.unsqueeze(-1) >= powers).astype("float32").sum(axis=-1)
    exponent = above - 6.0
    step = paddle.pow(paddle.full_like(exponent, 2.0), exponent - 3.0)
    eighths = paddle.round(magnitude / step)  # 0..7 below 2^-6, else 8..16
    code = above * 8.0 + eighths
    return (code + 128.0 * (values < 0).astype("float32")).astype("uint8"), scale


def _e4m3_values() -> list[float]:
    """What each of the 256 codes stands for. 127 and 255, NaN to others, are never written."""
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
    return packed, paddle.stack([extent / INT4_MAX, minimum], axis=-1)


def unpack_int4(codes: Tensor, scale: Tensor | None, head_dim: int) -> Tensor:
    """Codes times scale plus minimum; scale [..., 2] holds both."""
    import paddle

    assert scale is not None
    pairs = codes.astype("float32")
    high = paddle.floor(pairs / 16.0)
    both = paddle.stack([pairs - 16.0 * high, high], axis=-1)
    values = both.flatten(-2, -1)[..., :head_dim]
    return values * scale[..., 0:1] + scale[..., 1:2]


FORMATS: tuple[KvFormat, ...] = (
    KvFormat("dense", None, "none", 0, _keep, _as_stored),
    KvFormat("int8_static", 8, "head", 1, quantize_int8, unpack_int8, range_max=INT8_MAX),
    KvFormat("int8_dynamic", 8, "token", 1, quantize_int8_rows, unpack_int8),
    # Float8 needs a GPU with float8 units (Ada, Hopper and later).
    KvFormat("fp8", 8, "head", 1, quantize_fp8, unpack_fp8, range_max=E4M3_MAX, gpu=(8, 9)),
    KvFormat("int4", 4, "token", 2, quantize_int4, unpack_int4),
)
KV_FORMATS: tuple[str, ...] = tuple(row.name for row in FORMATS)


def kv_format_of(name: str) -> KvFormat:
    """The row of that name; raises UserError naming the known ones."""
    for row in FORMATS:
        if row.name == name:
            return row
    raise one_of("kv_format", name, KV_FORMATS)


def head_scales(
    kv_format: KvFormat, directory: str | Path, spec: DecoderSpec
) -> list[HeadScales] | None:
    """Scales of each layer from the directory's cachekv_scales.json; None where it takes none.

    The file is PaddleNLP's: "<model>.layers.N.self_attn.cachek_matmul.activation_quanter" (and
    cachev) holds the largest |x| of each query head, or of each key/value head; heads of a group
    share theirs. Without it the scales are the checkpoint's k_scale and v_scale, where it has them.
    fp8 does without both: e4m3 reaches 448, so that its scales are then 1.
    Raises UserError where int8_static finds none, or a layer's values are missing or wrong.
    """
    if kv_format.scales != "head":
        return None
    range_max = kv_format.range_max
    assert range_max is not None
    path = Path(directory) / SCALES_FILE
    if not path.exists():
        stored = _tensor_scales(kv_format, path.parent, spec)
        if stored is not None:
            return stored
        if kv_format.name == "fp8":
            ones = [1.0] * spec.num_kv_heads
            return [HeadScales(ones, ones)] * spec.num_layers
        raise UserError(
            f"{directory} holds no {SCALES_FILE}, which kv_format {kv_format.name} takes its "
            "scales from; calibrate them with quant/run_quantization.py, or use "
            "--cachekv_int8_type dynamic"
        )
    largest = read_json_object(path, constants=True)

    def scales(layer: int, which: str) -> list[float]:
        ending = f"layers.{layer}.self_attn.cache{which}_matmul.activation_quanter"
        found = [name for name in largest if name == ending or name.endswith("." + ending)]
        if len(found) != 1:
            raise UserError(f"{path} has {len(found)} entries that end in {ending}, not one")
        values = largest[found[0]]
        group = spec.num_heads // spec.num_kv_heads
        if not isinstance(values, list) or len(values) not in (spec.num_heads, spec.num_kv_heads):
            count = len(values) if isinstance(values, list) else json_type(values)
            raise UserError(
                f"{path}: {found[0]} holds {count} values (allowed: one for each of "
                f"{spec.num_heads} query heads, or of {spec.num_kv_heads} key/value heads)"
            )
        if len(values) == spec.num_heads:
            values = values[::group]
        for value in values:
            if type(value) not in (int, float) or not 0.0 <= value <= FLOAT32_MAX:
                raise UserError(
                    f"{path}: {found[0]} holds {repr(value)[:80]}; it must be a number from 0 to "
                    f"{FLOAT32_MAX:g}"
                )
        return [max(float(v), LEAST_RANGE) / range_max for v in values]

    return [HeadScales(scales(i, "k"), scales(i, "v")) for i in range(spec.num_layers)]


# A layer's scale in checkpoints of compressed-tensors, of its older versions, and of "fp8".
TENSOR_SCALES = {
    which: (f"{which}_scale", f"{which}_proj.output_scale", f"{which}_proj.{which}_scale")
    for which in "kv"
}


def _tensor_scales(
    kv_format: KvFormat, directory: Path, spec: DecoderSpec
) -> list[HeadScales] | None:
    """The scales that a checkpoint brings as tensors, one number or one per key/value head.

    None where it has none, or they are of another format: those of "fp8" checkpoints are e4m3's.
    """
    from predict.loading.checkpoint import Checkpoint, to_float32
    from predict.loading.layouts import cache_scheme
    from predict.nn.hf_config import ConfigReader

    if not any(directory.glob("*.safetensors")):
        return None
    scheme = cache_scheme(ConfigReader.from_dir(directory))
    if kv_format.name != ("int8_static" if scheme == "static" else "fp8"):
        return None
    checkpoint = Checkpoint(directory)

    def scales(layer: int, which: str) -> list[float] | None:
        endings = [f"layers.{layer}.self_attn.{name}" for name in TENSOR_SCALES[which]]
        found = [name for name in checkpoint.tensors if name.endswith(tuple(endings))]
        if not found:
            return None
        info = checkpoint.tensors[found[0]]
        count = math.prod(info.shape)
        if len(found) > 1 or count not in (1, spec.num_kv_heads):
            raise UserError(
                f"{directory}: {' and '.join(found)} hold {count} values (allowed: one tensor of "
                f"one value, or of one for each of {spec.num_kv_heads} key/value heads)"
            )
        values = to_float32(checkpoint.read(found[0])).reshape(-1)
        if not all(0.0 < value < math.inf for value in values.tolist()):
            raise UserError(f"{directory}: {found[0]} holds {values.tolist()}; it must be above 0")
        return [float(v) for v in values.tolist()] * (spec.num_kv_heads // count)

    pairs = [(scales(i, "k"), scales(i, "v")) for i in range(spec.num_layers)]
    if all(pair == (None, None) for pair in pairs):
        return None
    for layer, (key, value) in enumerate(pairs):
        if key is None or value is None:
            raise UserError(
                f"{directory}: layer {layer} has no {'k' if key is None else 'v'}_scale, and other "
                "layers have; the checkpoint is broken"
            )
    return [HeadScales(key, value) for key, value in pairs if key and value]


def save_head_scales(kv_format: KvFormat, directory: str | Path, layers: list[HeadScales]) -> None:
    """Writes the cachekv_scales.json that `head_scales` reads these scales from."""
    assert kv_format.range_max is not None
    values = {
        f"layers.{i}.self_attn.cache{which}_matmul.activation_quanter": [
            scale * kv_format.range_max for scale in scales
        ]
        for i, pair in enumerate(layers)
        for which, scales in zip("kv", pair, strict=True)
    }
    (Path(directory) / SCALES_FILE).write_text(json.dumps(values), encoding="utf-8")
