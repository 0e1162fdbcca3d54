"""One model's tensors in every format that is read, as the programs that write them do."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from tests.support import tiny
from tests.support.pickles import text

Tensors = dict[str, npt.NDArray[Any]]
FAMILY = "llama."
STORAGES = {
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "uint16": "BFloat16Storage",
    "float64": "DoubleStorage",
    "int64": "LongStorage",
}
WEIGHTS = "model.safetensors"


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def tensor_pickle(
    key: str,
    storage: str,
    count: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int = 0,
) -> bytes:
    """One tensor in a pickle of torch.save."""
    sizes, steps = (b"(" + b"".join(map(number, each)) + b"t" for each in (shape, strides))
    found = b"(" + text("storage") + b"ctorch\n" + storage.encode() + b"\n" + text(key)
    found += text("cpu") + number(count) + b"tQ"
    rest = number(offset) + sizes + steps + b"\x89ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + found + rest + b"tR"


def state_pickle(tensors: Mapping[str, bytes]) -> bytes:
    """A pickled state_dict; tensors: their pickles by name."""
    items = b"".join(text(name) + data for name, data in tensors.items())
    return b"\x80\x02ccollections\nOrderedDict\n)R(" + items + b"u."


def torch_zip(entries: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """An archive of entries below one folder."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in entries.items():
            archive.writestr(f"archive/{name}", data)
    return file.getvalue()


def torch_file(tensors: Tensors) -> bytes:
    """What torch.save writes; every second matrix is a turned view of its storage."""
    entries: dict[str, bytes] = {"data.pkl": b"", "byteorder": b"little", "version": b"3\n"}
    pickles = {}
    for key, (name, values) in enumerate(tensors.items()):
        steps = np.array(np.ascontiguousarray(values).strides) // values.itemsize
        stored = values
        if values.ndim == 2 and key % 2:
            stored, steps = values.T, np.array([1, values.shape[0]])
        entries[f"data/{key}"] = np.ascontiguousarray(stored).tobytes()
        storage = STORAGES[values.dtype.name]
        strides = tuple(map(int, steps))
        pickles[name] = tensor_pickle(str(key), storage, values.size, values.shape, strides)
    return torch_zip({**entries, "data.pkl": state_pickle(pickles)})


def paddle_file(tensors: Tensors) -> bytes:
    """What paddle.save writes: arrays with Paddle's own names of them."""
    values = {
        name: (f"linear_{index}.w_0", array) for index, (name, array) in enumerate(tensors.items())
    }
    return pickle.dumps(values, protocol=4)


def change_params(path: Path, change: Any) -> None:
    """Another content of a file of paddle.save."""
    values = pickle.loads(path.read_bytes())
    change(values)
    path.write_bytes(pickle.dumps(values, protocol=4))


def in_shards(tensors: Tensors, num_shards: int) -> list[Tensors]:
    """Shards of odd sizes: 1 tensor, 2, and so on, and the rest in the last one."""
    names = list(tensors)
    shards = []
    for index in range(num_shards):
        count = len(names) if index == num_shards - 1 else index + 1
        shards.append({name: tensors[name] for name in names[:count]})
        names = names[count:]
    return shards


def write_shards(
    folder: Path,
    tensors: Tensors,
    stem: str,
    ending: str,
    write: Callable[[Tensors], bytes],
    num_shards: int,
    with_index: bool,
) -> None:
    """Files of one format: one, or numbered ones; with_index: and the file that names them."""
    if num_shards == 1:
        (folder / f"{stem}{ending}").write_bytes(write(tensors))
        return
    places = {}
    for number_of, shard in enumerate(in_shards(tensors, num_shards), 1):
        name = f"{stem}-{number_of:05d}-of-{num_shards:05d}{ending}"
        (folder / name).write_bytes(write(shard))
        places.update(dict.fromkeys(shard, name))
    if with_index:
        text_of = json.dumps({"metadata": {"total_size": 0}, "weight_map": places})
        (folder / f"{stem}{ending}.index.json").write_text(text_of)


def safetensors_file(tensors: Tensors) -> bytes:
    from safetensors.numpy import save

    return save({name: np.ascontiguousarray(values) for name, values in tensors.items()})


def as_paddle(tensors: Tensors, fused: bool = False) -> Tensors:
    """PaddleNLP's names and order: matrices [in, out]; fused: of queries, keys and values one."""
    made: Tensors = {}
    for name, values in tensors.items():
        turned = values.ndim == 2 and "embed_tokens" not in name
        known = FAMILY + name.removeprefix("model.") if name.startswith("model.") else name
        made[known] = np.ascontiguousarray(values.T) if turned else values
    if not fused:
        return made
    kv_heads, head_dim = tiny.CONFIG["num_key_value_heads"], tiny.CONFIG["head_dim"]
    for layer in range(tiny.CONFIG["num_hidden_layers"]):
        at = f"{FAMILY}layers.{layer}."
        query, key, value = (made.pop(f"{at}self_attn.{kind}_proj.weight") for kind in "qkv")
        groups = np.split(query, kv_heads, axis=1)
        pieces = []
        for head, queries in enumerate(groups):
            columns = slice(head * head_dim, (head + 1) * head_dim)
            pieces += [queries, key[:, columns], value[:, columns]]
        made[f"{at}self_attn.qkv_proj.weight"] = np.concatenate(pieces, axis=1)
        gate, up = (made.pop(f"{at}mlp.{kind}_proj.weight") for kind in ("gate", "up"))
        made[f"{at}mlp.gate_up_fused_proj.weight"] = np.concatenate([gate, up], axis=1)
    return made


def rank_part(tensors: Tensors, rank: int, num_ranks: int) -> Tensors:
    """What one of `num_ranks` ranks has of PaddleNLP's tensors."""
    part = {}
    for name, values in tensors.items():
        if "gate_up_fused" in name:
            halves = np.split(values, 2, axis=1)
            cut = [np.split(half, num_ranks, axis=1)[rank] for half in halves]
            part[name] = np.concatenate(cut, axis=1)
        elif any(each in name for each in ("o_proj", "down_proj")) and values.ndim == 2:
            part[name] = np.split(values, num_ranks, axis=0)[rank]
        elif "embed_tokens" in name:
            # 199 tokens do not split: PaddleNLP then leaves the table whole.
            part[name] = values
        elif "norm" in name or "lm_head" in name or "down_proj" in name or "o_proj" in name:
            part[name] = values
        elif any(f"{kind}_proj" in name for kind in "kv") and num_ranks > 2:
            part[name] = values  # fewer key/value heads than ranks
        else:
            part[name] = np.split(values, num_ranks, axis=-1)[rank]
    return {name: np.ascontiguousarray(values) for name, values in part.items()}


def write_parts(folder: Path, tensors: Tensors, num_ranks: int, num_stages: int) -> None:
    """One file for each rank and stage; the last stage has a copy of the table of tokens."""
    names = list(tensors)
    for rank in range(num_ranks):
        part = rank_part(tensors, rank, num_ranks)
        for stage in range(num_stages):
            held = names[stage::num_stages]
            if stage == num_stages - 1:
                held = [*held, *(each for each in names if "embed_tokens" in each)]
            numbers = [f"tp{rank:02d}"] * (num_ranks > 1) + [f"pp{stage:02d}"] * (num_stages > 1)
            path = folder / f"model_state.{'_'.join(numbers)}.pdparams"
            path.write_bytes(paddle_file({name: part[name] for name in dict.fromkeys(held)}))


def _hugging_face(writer: Callable[[Tensors], bytes], stem: str, ending: str) -> Any:
    def made(num_shards: int, with_index: bool) -> Callable[[Path, Tensors], None]:
        return lambda folder, tensors: write_shards(
            folder, tensors, stem, ending, writer, num_shards, with_index
        )

    return made


_SAFETENSORS = _hugging_face(safetensors_file, "model", ".safetensors")
_TORCH = _hugging_face(torch_file, "pytorch_model", ".bin")
_PARAMS = _hugging_face(paddle_file, "model_state", ".pdparams")
WRITERS: dict[str, Callable[[Path, Tensors], None]] = {
    "safetensors in shards": _SAFETENSORS(3, True),
    "safetensors in shards without index": _SAFETENSORS(4, False),
    "bin": _TORCH(1, False),
    "bin in shards": _TORCH(3, True),
    "bin in shards without index": _TORCH(5, False),
    "pdparams": lambda f, t: _PARAMS(1, False)(f, as_paddle(t)),
    "pdparams in shards": lambda f, t: _PARAMS(4, True)(f, as_paddle(t)),
    "pdparams in shards without index": lambda f, t: _PARAMS(2, False)(f, as_paddle(t)),
    "pdparams, fused": lambda f, t: _PARAMS(1, False)(f, as_paddle(t, fused=True)),
    "pdparams of 2 ranks": lambda f, t: write_parts(f, as_paddle(t), 2, 1),
    "pdparams of 4 ranks": lambda f, t: write_parts(f, as_paddle(t), 4, 1),
    "pdparams of 2 ranks, fused": lambda f, t: write_parts(f, as_paddle(t, fused=True), 2, 1),
    "pdparams of 3 stages": lambda f, t: write_parts(f, as_paddle(t), 1, 3),
    "pdparams of 2 ranks and 3 stages": lambda f, t: write_parts(f, as_paddle(t), 2, 3),
    "Paddle's safetensors": lambda f, t: _SAFETENSORS(1, False)(f, as_paddle(t)),
    "Paddle's safetensors, fused, in shards": lambda f, t: _SAFETENSORS(3, True)(
        f, as_paddle(t, fused=True)
    ),
}


def rewrite(folder: Path, name: str) -> Tensors:
    """Puts a model's tensors into another format; returns them by Hugging Face's names."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    WRITERS[name](folder, tensors)
    return tensors


def write_model(folder: Path, name: str, **changes: Any) -> Tensors:
    """A tiny model in a format; returns its tensors by Hugging Face's names."""
    tiny.write(folder, changes)
    return rewrite(folder, name)


def save(folder: Path, tensors: Tensors) -> None:
    """A model's tensors as model.safetensors."""
    save_file(tensors, folder / WEIGHTS)
