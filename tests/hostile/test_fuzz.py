"""Every reader of files, given what is almost right: only our own errors leave it, and soon."""

from __future__ import annotations

import json
import pickle
import random
import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from predict.cli.data import read_data_file
from predict.errors import UserError
from predict.loading.adapters import Base, fitted, read_adapter
from predict.loading.cache_scales import head_scales
from predict.loading.checkpoint import Checkpoint
from predict.loading.formats import INDEX, PARAMS
from predict.loading.manifest import load_manifest
from predict.loading.model import read_spec
from predict.loading.npy import read_npy
from predict.nn.cache_formats import kv_format_of
from predict.nn.hf_config import ConfigReader
from predict.system.files import read_text
from predict.text.chat_template import JinjaTemplate
from predict.text.tokenizer import Tokenizer
from quant.state import RunState
from tests.support import tiny
from tests.support.adapter_folders import (
    Q,
    factors,
    paddlenlp_tensors,
    peft_tensors,
    write_paddlenlp,
    write_peft,
)
from tests.support.damage import changed_bytes
from tests.support.gguf_models import convert
from tests.support.gguf_tokens import add_byte_level
from tests.support.limits import cpu_seconds
from tests.support.manifests import MANIFEST
from tests.support.stored_formats import torch_file

TORCH = "pytorch_model.bin"
CORPUS = Path(__file__).parent / "corpus"
MAX_SECONDS = 10.0  # of processor time for one file; most take milliseconds
HIDDEN_SHAPE = (3, 4)
STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 1e300, -0.0, 2**31, 2**63, 10**299, float("nan")),
    *(float("inf"), "", "x", "x" * 10_000, "../x", "/etc/passwd", "\ud800", "\x1b[2J", "{{", "1"),
    *([], {}, [[]], [0] * 100, {"a": {"b": 1}}, "token\0", "model.safetensors", ["a", 1]),
)
# What pickles are made of: calls, memo, marks, claims of sizes, ends.
OPERATIONS = (
    *(b"(", b".", b"0", b"2", b"N", b"R", b"b", b"o", b"Q", b"t", b"u", b"s", b"e", b"a", b"]"),
    *(b"}", b")", b"\x81", b"\x92", b"\x93", b"\x94", b"h\x00", b"h\x05", b"j\xff\xff\xff\xff"),
    *(b"cos\nsystem\n", b"\x8e" + b"\xff" * 8, b"X\xff\xff\xff\x7f", b"\x95" + b"\x01" * 8),
    *(b"\x85", b"\x86", b"\x87", b"K\x00", b"J\xff\xff\xff\xff", b"\x8a\x09" + b"\xff" * 9),
    *(b"cnumpy\nndarray\n", b"cnumpy\ndtype\n", b"c_codecs\nencode\n", b"\x8c\x01a", b"C\x02ab"),
)


def changed_pickle(data: bytes, dice: random.Random) -> bytes:
    """Bytes as above, or operations put in where they do not belong."""
    if dice.random() < 0.4:
        return changed_bytes(data, dice)
    at = dice.choice((2, dice.randrange(2, len(data)), len(data) - 1))
    words = b"".join(dice.choice(OPERATIONS) for _ in range(dice.randint(1, 6)))
    return data[:at] + words + data[at + dice.choice((0, 0, 1, len(words))) :]


def changed_value(value: Any, dice: random.Random) -> Any:
    """A JSON value with another one somewhere inside, a key less, or a key of another's value."""
    if not isinstance(value, (dict, list)) or not value or dice.random() < 0.2:
        return dice.choice(STRANGE)
    made: Any = value.copy()
    keys = list(made) if isinstance(made, dict) else range(len(made))
    key = dice.choice(keys)
    kind = dice.randrange(8)
    if kind == 0:
        del made[key]
    elif kind == 1:
        made[key] = made[dice.choice(keys)]
    elif kind == 2 and isinstance(made, dict):
        made[dice.choice(("", "x" * 300, "\ud800", *made))] = made[key]
    else:
        made[key] = changed_value(made[key], dice)
    return made


def changed_json(data: bytes, dice: random.Random) -> bytes:
    """Values of other types and sizes, else bytes as above."""
    if dice.random() < 0.2:
        return changed_bytes(data, dice)
    value = json.loads(data)
    for _ in range(dice.randint(1, 3)):
        value = changed_value(value, dice)
    return json.dumps(value, ensure_ascii=dice.random() < 0.9).encode("utf-8", "surrogatepass")


def changed_header(data: bytes, dice: random.Random) -> bytes:
    """A safetensors file whose header is another JSON value."""
    if dice.random() < 0.3:
        return changed_bytes(data[:4000], dice) + data[4000:]
    (size,) = struct.unpack("<Q", data[:8])
    text = changed_json(data[8 : 8 + size], dice)
    return struct.pack("<Q", len(text)) + text + data[8 + size :]


def read_state(folder: Path) -> None:
    """A run's state, and the arrays and scales that it names."""
    state = RunState.open(folder, {"model": "m"}, 2, overwrite=False)
    state.read_hidden(1, HIDDEN_SHAPE)


def write_state(folder: Path) -> None:
    """A run of two layers, of which the first is done."""
    (folder / "config.json").unlink()  # which only a finished checkpoint has
    state = RunState.open(folder, {"model": "m"}, 2, overwrite=False)
    state.new_hidden(1, HIDDEN_SHAPE)[:] = 1
    shutil.copy(folder / "small.safetensors", state.layer_path(0, ".safetensors"))
    scales = {"act": {"a": 1.0}, "weight": {"a": [1.0, 2.0]}, "cache": {}, "loss": {"qkv": 0.5}}
    state.layer_path(0, ".json").write_text(json.dumps(scales))
    state.num_done = 1
    state.save()


def read_template(folder: Path) -> None:
    """A chat template of the folder, at work."""
    source = read_text(folder / "chat_template.jinja")
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    JinjaTemplate(source, tokens, "chat_template.jinja").render(
        [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}]
    )


def read_tokenizer(folder: Path) -> None:
    """A tokenizer at work, and its special tokens."""
    tokenizer = Tokenizer.from_dir(folder, chat_template="none")
    tokenizer.decode(tokenizer.encode("hello, you <s> \u00e9\n"))


def read_cache_scales(folder: Path) -> None:
    """Scales of a static cache."""
    head_scales(kv_format_of("int8_static"), folder, read_spec(folder)[0])


def read_checkpoint(folder: Path) -> None:
    """Every tensor, as it would be read for a model."""
    checkpoint = Checkpoint(folder)
    for name in list(checkpoint.tensors)[:3]:
        checkpoint.read(name)


def read_gguf_model(folder: Path) -> None:
    """All that a GGUF file says: a network, a tokenizer, tensors."""
    read_spec(folder)
    read_tokenizer(folder)
    read_checkpoint(folder)


def changed_gguf(data: bytes, dice: random.Random) -> bytes:
    """Bytes as above in the part that holds metadata and places, mostly among the first keys."""
    end = data.index(b"output_norm.weight") + 2000
    start = dice.randrange(dice.choice((1000, end)))
    window = slice(start, start + 300)
    return data[:start] + changed_bytes(data[window], dice) + data[start + 300 :]


def prepare_gguf(folder: Path) -> None:
    """A GGUF file in place of all others."""
    source = tiny.write(folder / "source", {"vocab_size": 512})
    convert(source, folder / "x.gguf", add_tokens=lambda w: add_byte_level(w, folder, "gpt-2"))
    shutil.rmtree(source)
    for path in folder.iterdir():
        if path.suffix != ".gguf":
            path.unlink()


def cut_checkpoint(folder: Path, *kept: str) -> None:
    """Leaves only the named ones of the files with tensors."""
    for name in (INDEX, PARAMS, "model.safetensors", "small.safetensors"):
        if name not in kept:
            (folder / name).unlink(missing_ok=True)


def changed_torch(data: bytes, dice: random.Random) -> bytes:
    """An archive with bytes changed in its pickle, in its directory, or anywhere."""
    directory = data.index(b"PK\x01\x02")
    kind = dice.randrange(4)
    if kind == 0:
        return changed_bytes(data, dice)
    if kind == 1:
        return data[:directory] + changed_bytes(data[directory:], dice)
    if kind == 2:  # one field of one record, the rest in order
        starts = [at for mark in (b"PK\x01\x02", b"PK\x03\x04") for at in places(data, mark)]
        at, width = dice.choice(starts) + dice.randrange(4, 46), dice.choice((1, 2, 4))
        value = dice.choice((0, 1, 255, 2**15, 2**32 - 1, dice.randrange(2**16)))
        return data[:at] + value.to_bytes(4, "little")[:width] + data[at + width :]
    begin = data.index(b"\x80\x02ccollections")  # of the pickle, whose length stays
    end = data.index(b"PK", begin)
    changed = changed_pickle(data[begin:end], dice)[: end - begin]
    return data[:begin] + changed.ljust(end - begin, b".") + data[end:]


def places(data: bytes, mark: bytes) -> list[int]:
    """Where a mark stands in the data."""
    return [match.start() for match in re.finditer(re.escape(mark), data)]


def prepare_torch(folder: Path) -> None:
    """A small file of torch.save."""
    cut_checkpoint(folder)
    values = {f"t{i}": np.arange(6, dtype=np.float32).reshape(2, 3) for i in range(3)}
    (folder / TORCH).write_bytes(torch_file(values))


def prepare_parts(folder: Path) -> None:
    """A small state_dict in two parts."""
    cut_checkpoint(folder)
    for rank in range(2):
        values = {f"llama.layers.{i}.mlp.up_proj.weight": np.ones((4, 2)) for i in range(3)}
        (folder / f"model_state.tp0{rank}.pdparams").write_bytes(pickle.dumps(values, protocol=4))


def read_array(folder: Path) -> None:
    """The array of an .npy file."""
    read_npy(folder / "a.npy").read()


LORA_BASE = Base(
    {name: values.shape for name, values in tiny.tensors(tiny.CONFIG).items()},
    frozenset({"model.embed_tokens.weight"}),
    frozenset(),
    "model.embed_tokens.weight",
    "lm_head.weight",
    is_tied=False,
    config=ConfigReader(tiny.CONFIG, Path("config.json")),
    takes_turns=False,
)


def read_lora(folder: Path) -> None:
    """An adapter, fitted to the tiny model, and its factors."""
    adapter = fitted(read_adapter(folder / "lora"), LORA_BASE)
    for linear in adapter.linears.values():
        linear.factors()


def prepare_peft(folder: Path) -> None:
    """A small adapter of PEFT's."""
    changes = {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {".*down_proj": 2}}
    write_peft(folder / "lora", peft_tensors(factors()), changes)


def prepare_lora(folder: Path) -> None:
    """A small adapter of PaddleNLP's, in two parts."""
    tensors = {
        name: values if "lora_A" in name else np.split(values, 2, axis=1)[0].copy()
        for name, values in paddlenlp_tensors(factors(names=(Q,))).items()
    }
    write_paddlenlp(folder / "lora", {})
    for rank in range(2):
        path = folder / "lora" / f"lora_model_state.tp0{rank}.pdparams"
        path.write_bytes(pickle.dumps(tensors, protocol=4))


def prepare_params(folder: Path) -> None:
    """A small state_dict as Paddle 2.1 and later write it."""
    cut_checkpoint(folder)
    values = {f"llama.layers.{i}.x": (f"t{i}", np.arange(4.0)) for i in range(3)}
    (folder / PARAMS).write_bytes(pickle.dumps(values, protocol=2))


def prepare_index(folder: Path) -> None:
    """An index of one file."""
    from safetensors import safe_open

    with safe_open(folder / "small.safetensors", "np") as file:
        places = dict.fromkeys(file.keys(), "small.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def prepare_scales(folder: Path) -> None:
    """cachekv_scales.json of the model."""
    names = [f"llama.layers.{i}.self_attn.cache{w}_matmul" for i in range(2) for w in "kv"]
    scales = {f"{name}.activation_quanter": [1.0, 2.0] for name in names}
    (folder / "cachekv_scales.json").write_text(json.dumps(scales))


@dataclass(frozen=True)
class Reader:
    """One kind of file: its name, how it is read, how it is damaged, what else it needs."""

    file: str
    read: Callable[[Path], object]
    change: Callable[[bytes, random.Random], bytes]
    prepare: Callable[[Path], object] = lambda folder: None
    examples: int = 60  # of a default run


TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m.content | trim }}{% if loop.last %}"
    "{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ bos_token }}{% endif %}"
)
READERS = {
    "safetensors": Reader(
        "small.safetensors",
        read_checkpoint,
        changed_header,
        lambda folder: cut_checkpoint(folder, "small.safetensors"),
        200,
    ),
    "index": Reader(INDEX, read_checkpoint, changed_json, prepare_index, 150),
    "pdparams": Reader(PARAMS, read_checkpoint, changed_pickle, prepare_params, 400),
    "torch": Reader(TORCH, read_checkpoint, changed_torch, prepare_torch, 400),
    "parts": Reader(
        "model_state.tp01.pdparams", read_checkpoint, changed_pickle, prepare_parts, 100
    ),
    "array": Reader(
        "a.npy",
        read_array,
        changed_bytes,
        lambda folder: np.save(folder / "a.npy", np.arange(6.0).reshape(2, 3)),
        150,
    ),
    "gguf": Reader("x.gguf", read_gguf_model, changed_gguf, prepare_gguf, 150),
    "peft_config": Reader("lora/adapter_config.json", read_lora, changed_json, prepare_peft, 150),
    "peft": Reader("lora/adapter_model.safetensors", read_lora, changed_header, prepare_peft, 200),
    "lora_config": Reader("lora/lora_config.json", read_lora, changed_json, prepare_lora, 150),
    "lora": Reader(
        "lora/lora_model_state.tp01.pdparams", read_lora, changed_pickle, prepare_lora, 200
    ),
    "npy": Reader("calibration/hidden-00001.npy", read_state, changed_bytes, write_state),
    "state": Reader("calibration/state.json", read_state, changed_json, write_state, 100),
    "layer": Reader("calibration/layer-00000.json", read_state, changed_json, write_state, 100),
    "config": Reader("config.json", read_spec, changed_json, examples=250),
    "scales": Reader("cachekv_scales.json", read_cache_scales, changed_json, prepare_scales, 100),
    "tokenizer": Reader("tokenizer.json", read_tokenizer, changed_json, examples=60),
    "tokenizer_config": Reader("tokenizer_config.json", read_tokenizer, changed_json, examples=40),
    "template": Reader(
        "chat_template.jinja",
        read_template,
        changed_bytes,
        lambda folder: (folder / "chat_template.jinja").write_text(TEMPLATE),
        10,
    ),
    "data": Reader(
        "data.jsonl",
        lambda folder: read_data_file(folder / "data.jsonl"),
        changed_bytes,
        lambda folder: (folder / "data.jsonl").write_text(
            '{"src": "hello", "tgt": ""}\n{"src": ["a", "b"], "tgt": ["c"], "seed": 5}\n'
        ),
        150,
    ),
    "data_list": Reader(
        "data.json",
        lambda folder: read_data_file(folder / "data.json"),
        changed_json,
        lambda folder: (folder / "data.json").write_text(
            '[{"src": "hello", "tgt": ""}, {"src": "you", "tgt": "", "max_new_tokens": 4}]'
        ),
        150,
    ),
    "manifest": Reader(
        "manifest.json",
        load_manifest,
        changed_json,
        MANIFEST.save,
        150,
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each reader a folder with all that it reads; the template's first."""
    from safetensors.numpy import save_file

    top = tmp_path_factory.mktemp("fuzz")
    model = tiny.write_with_tokenizer(top / "model")
    values = {f"t{i}": np.arange(6, dtype=np.float32).reshape(2, 3) for i in range(3)}
    save_file(values, model / "small.safetensors")
    (model / "model.safetensors").unlink()
    made = {}
    for name, reader in READERS.items():
        made[name] = top / name
        shutil.copytree(model, made[name])
        reader.prepare(made[name])
    return made


def names_around(folder: Path) -> set[Path]:
    """What is in a folder and beside it."""
    return {*folder.rglob("*"), *folder.parent.iterdir()}


def attempt(reader: Reader, folder: Path, data: bytes) -> None:
    """Reads a folder whose file has that content; anything but our own error leaves."""
    path = folder / reader.file
    good = path.read_bytes()
    before = names_around(folder)
    path.write_bytes(data)
    said = "nothing"
    try:
        with cpu_seconds(MAX_SECONDS):
            reader.read(folder)
    except UserError as error:
        said = str(error)
    finally:
        path.write_bytes(good)
    assert 0 < len(said) < 20_000
    assert names_around(folder) == before


def fuzz(name: str, folder: Path, examples: int) -> None:
    """`examples` files that are almost right."""
    reader = READERS[name]
    good = (folder / reader.file).read_bytes()

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(seed=st.integers(0, 2**32))
    def run(seed: int) -> None:
        attempt(reader, folder, reader.change(good, random.Random(seed)))

    run()


@pytest.mark.parametrize("name", READERS)
def test_good_files_are_read(name: str, folders: dict[str, Path]) -> None:
    READERS[name].read(folders[name])


@pytest.mark.parametrize("name", READERS)
def test_only_our_own_errors_leave_a_reader(name: str, folders: dict[str, Path]) -> None:
    fuzz(name, folders[name], READERS[name].examples)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_only_our_own_errors_leave_a_reader_in_many_tries(
    name: str, folders: dict[str, Path]
) -> None:
    fuzz(name, folders[name], 4 * READERS[name].examples)


SAVED = sorted(path for path in CORPUS.rglob("*") if path.is_file())


@pytest.mark.parametrize("path", SAVED, ids=[f"{p.parent.name}/{p.name}" for p in SAVED])
def test_saved_files_are_answered(path: Path, folders: dict[str, Path]) -> None:
    attempt(READERS[path.parent.name], folders[path.parent.name], path.read_bytes())
