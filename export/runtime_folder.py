"""The folder that the C++ runtime opens: a decoder and its weights as docs/runtime-format.md says.

`regatta.json` says what the blocks are, in the records that operators get anyway, and which tensors
each takes; `model.safetensors` holds these as the target's operators read them, each from a
multiple of 64 bytes on. Nothing is traced, and nothing here knows a family.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from export.output_place import Kind
from predict.loading.arrays import STORED_DTYPES, Computed, StoredArray, num_bytes
from predict.loading.generation_config import SAMPLING, Recommended
from predict.loading.manifest import FileDigest
from predict.loading.memory import token_values
from predict.loading.safetensors_writer import shard_name, shards_of, write_index, write_stored
from predict.nn.decoder import Decoder, map_tensors
from predict.nn.places import PrefixPlacing, StepPlacing, placing_of
from predict.ops import records
from predict.system.files import read_json_object

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.config.engine import EngineConfig
    from predict.nn.blocks import BlockWeights, Linear, NormWeights
    from predict.nn.blocks import Norm as NormRecord
    from predict.nn.cache_formats import HeadScales
    from predict.nn.spec import DecoderSpec

FILE_NAME = "regatta.json"
TEXT_FILE = "text.bin"
FORMAT, VERSION = "regatta", 1
# How the operators of a target read matrices. Panels of 32 columns serve all CPUs.
PACKINGS = {
    name: {"dense": "panels32", "codes": "panels32_quads"} for name in ("x86_64", "aarch64")
}
ALIGNMENT = 64  # bytes, of each tensor in its file: a cache line, and the widest vector
SHARD_BYTES = 5_000_000_000
PADDING = "padding."  # names of tensors that fill up to the next multiple
NUMPY_OF = {"int8": "I8", "uint8": "U8", "int32": "I32", "int64": "I64", **STORED_DTYPES}
COMPOSED = " composed=1"  # of a record: the block runs as smaller operators
FLOATS_OF_SCALES = "cache_scales"


@dataclass(frozen=True)
class TextPart:
    """The folder's text file, or why it has none."""

    data: bytes | None
    why: str = ""


def regatta_json(
    decoder: Decoder,
    spec: DecoderSpec,
    config: EngineConfig,
    target: str,
    stop_ids: Sequence[int],
    recommended: Recommended | None,
) -> dict[str, Any]:
    """What regatta.json says, but of files. config: with the model's defaults."""
    names = tensor_names(decoder)
    texts, layers = _layers(decoder, names)
    return {
        "format": FORMAT,
        "version": VERSION,
        "target": target,
        "packing": PACKINGS[target],
        "model_type": spec.model_type,
        "dtype": config.model.dtype,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "max_length": config.max_length,
        "block_size": config.cache.block_size,
        "step_values": token_values(spec),
        "positions": _positions(spec, config.max_length),
        "stop_ids": [int(each) for each in stop_ids],
        "sampling": _sampling(recommended),
        "embedding": _embedding(decoder, names),
        "records": texts,
        "layers": [
            {"blocks": blocks, "cache": cache}
            for blocks, cache in zip(layers, _caches(spec, config), strict=True)
        ],
        "head": _head(decoder, names),
    }


def tensor_names(decoder: Decoder) -> dict[int, str]:
    """The name of each of a decoder's tensors by its id: its first path in the tree."""
    names: dict[int, str] = {}
    map_tensors(decoder, lambda path, tensor: names.setdefault(id(tensor), path) and tensor)
    return names


def _layers(
    decoder: Decoder, names: Mapping[int, str]
) -> tuple[list[str], list[list[dict[str, Any]]]]:
    """The records that blocks have, and of each block which, with the names of its tensors."""
    texts: dict[str, int] = {}

    def described(block: BlockWeights, composed: bool) -> dict[str, Any]:
        of = block.block
        text = records.record(block) + (COMPOSED if composed and of.composes else "")
        number = texts.setdefault(text, len(texts))
        tensors = records.tensors(block, decoder.ropes)
        return {"record": number, "weights": [names[id(each)] for each in tensors]}

    layers = [
        # A program has the smaller operators of all blocks of such a layer.
        [described(each, not all(b.block.is_fused for b in layer)) for each in layer]
        for layer in decoder.layers
    ]
    return [*texts], layers


def _caches(spec: DecoderSpec, config: EngineConfig) -> Iterator[list[dict[str, Any]]]:
    """The cache tensors of each layer: shapes, -1 for blocks, or the name of one that is given."""
    row = spec.cache_format(config.kv_format)
    for layer, kept in enumerate(spec.kept):
        made = row.tensors(kept, None, config.cache.block_size, config.model.dtype)
        yield [
            {"tensor": f"{FLOATS_OF_SCALES}_{layer}_{each.name}"}
            if each.shape[:1] != (-1,)
            else {"name": each.name, "dtype": each.dtype, "shape": list(each.shape)}
            for each in made
        ]


def scale_tensors(
    spec: DecoderSpec, kv_format: str, scales: Mapping[int, HeadScales] | None
) -> dict[str, StoredArray]:
    """The scales of a cache that has one for each head, by the names that `_caches` gives."""
    if scales is None:
        return {}
    row = spec.cache_format(kv_format)
    found: dict[str, StoredArray] = {}
    for layer, kept in enumerate(spec.kept):
        made = row.tensors(kept, None, 1, "float32")[len(kept) :]
        for tensor, values in zip(made, scales[layer] if kept else (), strict=True):
            array = np.asarray(values, np.float32)
            name = f"{FLOATS_OF_SCALES}_{layer}_{tensor.name}"
            found[name] = Computed("F32", array.shape, (), partial(np.asarray, array))
    return found


def _positions(spec: DecoderSpec, max_length: int) -> dict[str, Any]:
    placing = placing_of(spec, max_length)
    if isinstance(placing, StepPlacing):
        original = placing.rope.original_max_position
        assert original is not None  # else there is one table
        return {"kind": "steps", "step_length": original, "step_rows": placing.num_positions}
    if isinstance(placing, PrefixPlacing):
        return {"kind": "prefix", **asdict(placing.spec)}
    return {"kind": "plain"}


def _sampling(recommended: Recommended | None) -> dict[str, Any]:
    """What a request has that says nothing itself, where generation_config.json does."""
    if recommended is None:
        return {}
    values = {name: recommended.values[name] for name in SAMPLING if name in recommended.values}
    if recommended.greedy:
        values["temperature"] = 0.0
    if recommended.max_new_tokens is not None:
        values["max_new_tokens"] = recommended.max_new_tokens
    return values


def _linear(linear: Linear | None, names: Mapping[int, str]) -> dict[str, Any] | None:
    if linear is None:
        return None
    return {
        "scheme": linear.scheme,
        "tensors": [names[id(each)] for each in linear.tensors],
        "bias": None if linear.bias is None else names[id(linear.bias)],
        "out_features": linear.out_features,
    }


def _norm(
    weights: NormWeights | None, norm: NormRecord | None, names: Mapping[int, str]
) -> dict[str, Any] | None:
    if weights is None or norm is None:
        return None
    return {
        "kind": norm.kind,
        "epsilon": norm.epsilon,
        "plus_one": norm.plus_one,
        "weight": names[id(weights.weight)],
        "bias": None if weights.bias is None else names[id(weights.bias)],
    }


def _embedding(decoder: Decoder, names: Mapping[int, str]) -> dict[str, Any]:
    of, head = decoder.embedding, decoder.head.linear
    table = head.tensors[0] if of.table is None else of.table
    return {
        "table": names[id(table)],
        "is_head": of.table is None,  # packed as a product reads it
        "width": head.in_features if of.table is None else of.table.shape[1],
        "scale": of.spec.scale,
        "projection": _linear(of.projection, names),
        "positions": None if of.positions is None else names[id(of.positions)],
        "norm": _norm(of.norm, of.spec.norm, names),
    }


def _head(decoder: Decoder, names: Mapping[int, str]) -> dict[str, Any]:
    head = decoder.head
    return {
        "norm": _norm(head.norm, head.spec.norm, names),
        "projection": _linear(head.projection, names),
        "linear": _linear(head.linear, names),
        "scale": head.spec.scale,
        "softcap": head.spec.softcap,
    }


def arrays_of(decoder: Decoder) -> dict[str, StoredArray]:
    """A decoder's tensors by name, each once, in the order in which a step reads them."""
    names = tensor_names(decoder)
    found: dict[str, StoredArray] = {}

    def add(_: str, tensor: Tensor) -> Tensor:
        dtype = NUMPY_OF[str(tensor.dtype).rpartition(".")[2]]
        found[names[id(tensor)]] = Computed(dtype, tuple(tensor.shape), (), tensor.numpy)
        return tensor

    map_tensors(decoder, add)
    return found


def aligned(arrays: Mapping[str, StoredArray]) -> dict[str, StoredArray]:
    """The arrays, and behind each that ends elsewhere one of zeros up to a multiple of 64 bytes."""
    made: dict[str, StoredArray] = {}
    for name, array in arrays.items():
        made[name] = array
        if missing := -num_bytes(array) % ALIGNMENT:
            zeros = partial(np.zeros, missing, np.uint8)
            made[PADDING + name] = Computed("U8", (missing,), (), zeros)
    return made


def write_weights(
    arrays: Mapping[str, StoredArray], folder: Path, max_bytes: int = SHARD_BYTES
) -> None:
    """Writes model.safetensors; above max_bytes files of at most that, and Hugging Face's index."""
    items = list(arrays.items())
    sizes = [num_bytes(array) + -num_bytes(array) % ALIGNMENT for _, array in items]
    shards = shards_of(sizes, max_bytes)
    held: dict[str, Iterable[str]] = {}
    for number, members in enumerate(shards):
        shard = aligned(dict(items[i] for i in members))
        name = shard_name(number, len(shards))
        write_stored(folder / name, shard, {"format": FORMAT}, alignment=ALIGNMENT)
        held[name] = [*shard]
    write_index(
        folder / "model.safetensors.index.json", {n: [*h] for n, h in held.items()}, sum(sizes)
    )


def write_described(folder: Path, values: Mapping[str, Any], text: TextPart) -> None:
    """Writes the text file and, last, regatta.json with the digests of all others."""
    if text.data is not None:
        (folder / TEXT_FILE).write_bytes(text.data)
    said = {"file": TEXT_FILE} if text.data is not None else {"why": text.why}
    files = {p.name: asdict(FileDigest.of(p)) for p in sorted(folder.iterdir())}
    body = json.dumps({**values, "text": said, "files": files}, indent=1, allow_nan=False)
    # The last key is the digest of the bytes ahead of its line.
    body = body.removesuffix("\n}") + ",\n"
    digest = hashlib.sha256(body.encode()).hexdigest()
    (folder / FILE_NAME).write_text(f'{body} "digest": "{digest}"\n}}\n', encoding="utf-8")


def _sizes(folder: Path) -> dict[str, int]:
    listed = read_json_object(folder / FILE_NAME)["files"]
    return {name: file["num_bytes"] for name, file in listed.items()}


OWN_FILES = ("model*.safetensors", "model*.safetensors.index.json", FILE_NAME, TEXT_FILE)
KIND = Kind("the runtime's folder", FILE_NAME, OWN_FILES, _sizes)
