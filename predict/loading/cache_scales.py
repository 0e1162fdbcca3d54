"""Scales of cache formats that have one per head: from a file, or from the checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from predict.errors import UserError
from predict.loading.parallel_parts import paths_of_ranks
from predict.nn.cache_formats import LEAST_RANGE, HeadScales, KvFormat
from predict.nn.cuts import own_key_heads
from predict.system.files import FLOAT32_MAX, json_type, read_json_object
from predict.system.notes import LOG

if TYPE_CHECKING:
    from predict.nn.blocks import CachingBlock
    from predict.nn.shares import Ranges
    from predict.nn.spec import DecoderSpec


SCALES_FILE = "cachekv_scales.json"


def head_scales(
    kv_format: KvFormat, directory: str | Path, spec: DecoderSpec, fake: bool = False
) -> dict[int, HeadScales] | None:
    """Scales by layer from the directory's cachekv_scales.json; None where the format takes none.

    The file is PaddleNLP's: "<model>.layers.N.self_attn.cachek_matmul.activation_quanter" (and
    cachev) holds the largest |x| of each query head, or of each key/value head; heads of a group
    share theirs. Without it the scales are the checkpoint's k_scale and v_scale, where it has them.
    fp8 does without both: e4m3 reaches 448, so that its scales are then 1; so are int8_static's
    where they may be made up (fake).
    Raises UserError where int8_static finds none, or a layer's values are missing or wrong.
    """
    if kv_format.scales != "head":
        return None
    if spec.share is not None:
        whole = head_scales(kv_format, directory, spec.share.whole, fake)
        own = dict(zip(_layers(spec), own_key_heads(spec), strict=True))
        return whole and {n: HeadScales(*(_taken(v, own[n]) for v in s)) for n, s in whole.items()}
    range_max = kv_format.range_max
    assert range_max is not None
    layers = _layers(spec)
    path = Path(directory) / SCALES_FILE
    of_ranks = [] if path.exists() else paths_of_ranks(path)
    if not path.exists() and not of_ranks:
        stored = _tensor_scales(kv_format, path.parent, spec)
        if stored is not None:
            return stored
        if kv_format.name == "fp8" or fake:
            ones = {layer: [1.0] * _num_kv_heads(block) for layer, block in layers.items()}
            return {layer: HeadScales(values, values) for layer, values in ones.items()}
        raise UserError(
            f"{directory} holds no {SCALES_FILE}, which kv_format {kv_format.name} takes its "
            "scales from; calibrate them with quant/run_quantization.py, or use "
            "--cachekv_int8_type dynamic"
        )
    largest = _of_ranks(of_ranks) if of_ranks else read_json_object(path, constants=True)

    def scales(layer: int, which: str) -> list[float]:
        ending = f"layers.{layer}.self_attn.cache{which}_matmul.activation_quanter"
        found = [name for name in largest if name == ending or name.endswith("." + ending)]
        if len(found) != 1:
            raise UserError(f"{path} has {len(found)} entries that end in {ending}, not one")
        values = largest[found[0]]
        num_heads, num_kv_heads = layers[layer].num_heads, _num_kv_heads(layers[layer])
        if not isinstance(values, list) or len(values) not in (num_heads, num_kv_heads):
            count = len(values) if isinstance(values, list) else json_type(values)
            raise UserError(
                f"{path}: {found[0]} holds {count} values (allowed: one for each of "
                f"{num_heads} query heads, or of {num_kv_heads} key/value heads)"
            )
        if len(values) == num_heads:
            size = num_heads // num_kv_heads
            if any(values[at] != values[at - at % size] for at in range(num_heads)) and of_ranks:
                raise UserError(
                    f"{path}: {found[0]} of {len(of_ranks)} ranks holds other values for query "
                    f"heads of one key/value head; the files must hold those of each rank's own "
                    f"query heads, or one cachekv_scales.json those of {num_kv_heads} key/value "
                    "heads"
                )
            values = values[::size]
        for value in values:
            if type(value) not in (int, float) or not 0.0 <= value <= FLOAT32_MAX:
                raise UserError(
                    f"{path}: {found[0]} holds {repr(value)[:80]}; it must be a number from 0 to "
                    f"{FLOAT32_MAX:g}"
                )
        return [max(float(v), LEAST_RANGE) / range_max for v in values]

    return {layer: HeadScales(scales(layer, "k"), scales(layer, "v")) for layer in layers}


def _of_ranks(paths: Sequence[Path]) -> dict[str, Any]:
    """The values of all ranks, side by side; cachekv_scales_0.json and so on of their heads."""
    files = [read_json_object(path, constants=True) for path in paths]
    joined: dict[str, Any] = {}
    for name, first in files[0].items():
        parts = [each.get(name) for each in files]
        whole = all(isinstance(part, list) for part in parts)
        joined[name] = [value for part in parts for value in part or ()] if whole else first
    return joined


def _taken(values: Sequence[float], heads: Ranges) -> list[float]:
    return [value for begin, end in heads for value in values[begin:end]]


def _layers(spec: DecoderSpec) -> dict[int, CachingBlock]:
    """Those that keep rows in the cache, and their blocks that do."""
    kept = (index for index, rows in enumerate(spec.kept) if rows)
    return dict(zip(kept, spec.attention, strict=True))


def _num_kv_heads(block: CachingBlock) -> int:
    return block.cache_rows[0].num_heads


# A layer's scale in checkpoints of compressed-tensors, of its older versions, and of "fp8".
TENSOR_SCALES = {
    which: (f"{which}_scale", f"{which}_proj.output_scale", f"{which}_proj.{which}_scale")
    for which in "kv"
}


def _tensor_scales(
    kv_format: KvFormat, directory: Path, spec: DecoderSpec
) -> dict[int, HeadScales] | None:
    """The scales that a checkpoint brings as tensors, one number or one per key/value head.

    None where it has none, or they are of another format: those of "fp8" checkpoints are e4m3's.
    """
    from predict.device.place import to_float32
    from predict.loading.checkpoint import Checkpoint
    from predict.loading.formats import format_of
    from predict.loading.layouts import cache_scheme
    from predict.nn.hf_config import ConfigReader

    if format_of(directory) is None:
        return None
    scheme = cache_scheme(ConfigReader.from_dir(directory))
    if kv_format.name != ("int8_static" if scheme == "static" else "fp8"):
        return None
    checkpoint, layers = Checkpoint(directory), _layers(spec)

    def scales(layer: int, which: str) -> list[float] | None:
        endings = [f"layers.{layer}.self_attn.{name}" for name in TENSOR_SCALES[which]]
        found = [name for name in checkpoint.tensors if name.endswith(tuple(endings))]
        if not found:
            return None
        info = checkpoint.tensors[found[0]]
        count, num_kv_heads = math.prod(info.shape), _num_kv_heads(layers[layer])
        if len(found) > 1 or count not in (1, num_kv_heads):
            raise UserError(
                f"{directory}: {' and '.join(found)} hold {count} values (allowed: one tensor of "
                f"one value, or of one for each of {num_kv_heads} key/value heads)"
            )
        values = to_float32(checkpoint.read(found[0])).reshape(-1)
        if not all(0.0 < value < math.inf for value in values.tolist()):
            raise UserError(f"{directory}: {found[0]} holds {values.tolist()}; it must be above 0")
        return [float(v) for v in values.tolist()] * (num_kv_heads // count)

    pairs = {layer: (scales(layer, "k"), scales(layer, "v")) for layer in layers}
    if all(pair == (None, None) for pair in pairs.values()):
        if scheme is not None and kv_format.name == "fp8":
            LOG.warning(
                f"{directory}: kv_cache_scheme brings a cache of 8 bits, and the files have no "
                "k_scale and v_scale: all scales are 1; --cachekv_int8_type dynamic needs none, "
                "without kv_cache_scheme in config.json"
            )
        return None
    for layer, (key, value) in pairs.items():
        if key is None or value is None:
            raise UserError(
                f"{directory}: layer {layer} has no {'k' if key is None else 'v'}_scale, and other "
                "layers have; the checkpoint is broken"
            )
    return {layer: HeadScales(key, value) for layer, (key, value) in pairs.items() if key and value}


def save_head_scales(
    kv_format: KvFormat, directory: str | Path, layers: Mapping[int, HeadScales]
) -> None:
    """Writes the cachekv_scales.json that `head_scales` reads these scales from."""
    assert kv_format.range_max is not None
    values = {
        f"layers.{layer}.self_attn.cache{which}_matmul.activation_quanter": [
            scale * kv_format.range_max for scale in scales
        ]
        for layer, pair in layers.items()
        for which, scales in zip("kv", pair, strict=True)
    }
    (Path(directory) / SCALES_FILE).write_text(json.dumps(values), encoding="utf-8")
