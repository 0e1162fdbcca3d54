"""Files of a model folder that claim, hide, contradict or run something."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from predict.loading.formats import INDEX, PARAMS
from tests.hostile.case import Case, Prepare, Sandbox
from tests.support.pickles import PAYLOADS

WEIGHTS = "model.safetensors"
NORM = "model.norm.weight"
FIRST_NORM = "model.layers.0.input_layernorm.weight"
MARKER = "marker"
SCALES = "llama.layers.0.self_attn.cachek_matmul.activation_quanter"


def payload(name: str) -> Prepare:
    """The model's tensors in a pickle that would write a file."""

    def prepare(sandbox: Sandbox) -> None:
        (sandbox.model / WEIGHTS).unlink()
        data = PAYLOADS[name].made(sandbox.folder / MARKER)
        (sandbox.model / PARAMS).write_bytes(data)

    return prepare


def params(change: Callable[[bytes], bytes]) -> Prepare:
    """The model's tensors as a pickle, damaged."""

    def prepare(sandbox: Sandbox) -> None:
        held = load_file(sandbox.model / WEIGHTS)
        (sandbox.model / WEIGHTS).unlink()
        (sandbox.model / PARAMS).write_bytes(change(pickle.dumps(held, protocol=4)))

    return prepare


def header(change: Callable[[dict[str, Any]], Any], pad: bytes = b"") -> Prepare:
    """Another header of model.safetensors; pad: bytes behind the tensors."""

    def prepare(sandbox: Sandbox) -> None:
        path = sandbox.model / WEIGHTS
        data = path.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        values = json.loads(data[8 : 8 + size])
        made = change(values)
        text = made if isinstance(made, bytes) else json.dumps(made or values).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :] + pad)

    return prepare


def entry(name: str = NORM, **changes: Any) -> Prepare:
    """One tensor's entry of the header, changed; `...` takes a key out."""

    def change(values: dict[str, Any]) -> None:
        values[name].update(changes)
        values[name] = {k: v for k, v in values[name].items() if v is not ...}

    return header(change)


def set_entry(value: Any) -> Prepare:
    """One tensor's entry of the header, replaced."""
    return header(lambda values: {**values, NORM: value})


def overlapping(values: dict[str, Any]) -> None:
    """Two norms on the same bytes, so that others belong to none."""
    values[NORM]["data_offsets"] = values[FIRST_NORM]["data_offsets"]


def index(change: Callable[[dict[str, str]], Any]) -> Prepare:
    """Two shards with an index, whose weight_map is changed."""

    def prepare(sandbox: Sandbox) -> None:
        held = load_file(sandbox.model / WEIGHTS)
        (sandbox.model / WEIGHTS).unlink()
        names = sorted(held)
        files = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
        for file, inside in files.items():
            save_file({name: held[name] for name in inside}, sandbox.model / file)
        places = {name: file for file, inside in files.items() for name in inside}
        changed = change(places)
        (sandbox.model / INDEX).write_text(
            json.dumps({"weight_map": places if changed is None else changed})
        )

    return prepare


def outside(file: str) -> Prepare:
    """An index that names a pipe outside the folder: who opens it waits for ever."""

    def change(places: dict[str, str]) -> None:
        places[NORM] = file

    inner = index(change)

    def prepare(sandbox: Sandbox) -> None:
        inner(sandbox)
        os.mkfifo(sandbox.folder / "outside.safetensors")
        text = (sandbox.model / INDEX).read_text()
        (sandbox.model / INDEX).write_text(sandbox.fill(text))

    return prepare


def replaced(name: str, make: Callable[[Path], Any]) -> Prepare:
    """A file of the model replaced by what `make` puts under its name."""

    def prepare(sandbox: Sandbox) -> None:
        path = sandbox.model / name
        path.unlink(missing_ok=True)
        make(path)

    return prepare


def written(name: str, text: str | bytes) -> Prepare:
    """A file of the model with another content."""
    data = text if isinstance(text, bytes) else text.encode()
    return replaced(name, lambda path: path.write_bytes(data))


def twice(sandbox: Sandbox) -> None:
    """Two files with the same tensors, no index, and none of the whole model's name."""
    shutil.copy(sandbox.model / WEIGHTS, sandbox.model / "copy.safetensors")
    (sandbox.model / WEIGHTS).rename(sandbox.model / "first.safetensors")


def linked(sandbox: Sandbox) -> None:
    """Links, as the cache of Hugging Face has them."""
    for name in (WEIGHTS, "config.json", "tokenizer.json"):
        blob = sandbox.folder / f"blob-{name}"
        (sandbox.model / name).rename(blob)
        (sandbox.model / name).symlink_to(blob)


def cut(sandbox: Sandbox) -> None:
    """model.safetensors less its last byte."""
    path = sandbox.model / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1])


def quantization(**config: Any) -> Prepare:
    """A quantization_config in config.json."""
    return lambda sandbox: sandbox.edit_json("config.json", quantization_config=config)


def groups(**weights: Any) -> Prepare:
    """compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", **weights}}
    return quantization(
        quant_method="compressed-tensors", format="pack-quantized", config_groups={"group_0": group}
    )


STATIC = ("--cachekv_int8_type", "static")


def safetensors_case(name: str, prepare: Prepare, *says: str) -> Case:
    """A predictor's run on a wrong model.safetensors."""
    return Case(f"safetensors: {name}", "predict", prepare=prepare, says=(*says, WEIGHTS))


CASES = [
    *(
        Case(
            f"a pickle's code: {name}",
            "predict",
            prepare=payload(name),
            says=(PARAMS, PAYLOADS[name].says),
            untouched=(MARKER,),
        )
        for name in PAYLOADS
    ),
    *(
        Case(
            f"a pickle's code by {command}: {name}",
            command,
            prepare=payload(name),
            says=(PARAMS, PAYLOADS[name].says),
            untouched=(MARKER,),
        )
        for command in ("export", "quantize")
        for name in ("reduce, protocol 2", "eval", "stack_global")
    ),
    Case("a pickle of tensors", "predict", prepare=params(lambda d: d), code=2, says=("shape",)),
    Case("a pickle cut short", "predict", prepare=params(lambda d: d[:-40]), says=("end",)),
    Case("a pickle with a tail", "predict", prepare=params(lambda d: d + b"x"), says=("1 bytes",)),
    Case(
        "a zip archive as pickle",
        "predict",
        prepare=params(lambda d: b"PK\x03\x04" + d),
        says=(PARAMS, "zip archive", "PyTorch"),
    ),
    Case(
        "a pipe as pickle",
        "predict",
        prepare=lambda s: (replaced(WEIGHTS, lambda p: os.mkfifo(p.with_name(PARAMS))))(s),
        says=(PARAMS, "it is a pipe"),
    ),
    safetensors_case("cut by a byte", cut, "copy it again"),
    safetensors_case("tensors that overlap", header(overlapping), "they overlap"),
    safetensors_case("a tail", header(lambda v: v, b"hidden"), "and the file has"),
    safetensors_case("a hole", header(lambda v: v.pop(FIRST_NORM) and None), "belong to none"),
    safetensors_case("a negative size", entry(shape=[-64]), NORM, "has the size -64"),
    safetensors_case("a size of true", entry(shape=[True, 64]), "has the size True"),
    safetensors_case("a size of 64.0", entry(shape=[64.0]), "has the size 64.0"),
    safetensors_case("sizes beyond 64 bits", entry(shape=[2**40, 2**40]), "64 bits"),
    safetensors_case("sizes as text", entry(shape="64"), "is a text, not a list of sizes"),
    safetensors_case("offsets as texts", entry(data_offsets=["0", "256"]), "data_offsets"),
    safetensors_case("offsets before the data", entry(data_offsets=[-256, 0]), "data_offsets"),
    safetensors_case("offsets too near", entry(data_offsets=[0, 8]), "needs 256"),
    safetensors_case("a dtype of no one", entry(dtype="F33"), "F33", "readable: F64, F32"),
    safetensors_case("a dtype as list", entry(dtype=["F32"]), "has dtype a list"),
    safetensors_case("no shape", entry(shape=...), "has no shape"),
    safetensors_case("an entry as number", set_entry(5), "has no dtype and no shape"),
    safetensors_case("a header as list", header(lambda v: [v]), "its header is a list"),
    safetensors_case(
        "metadata of lists", header(lambda v: {**v, "__metadata__": {"a": []}}), "__me"
    ),
    safetensors_case("a header of noughts", header(lambda v: bytes(99)), "is not valid JSON"),
    safetensors_case("a header nested deeply", header(lambda v: b"[" * 9999), "nested too deeply"),
    safetensors_case(
        "a name twice",
        header(lambda v: json.dumps(v).encode()[:-1] + b', "%s": {}}' % NORM.encode()),
        NORM,
        "twice",
    ),
    safetensors_case(
        "8 bytes of 255", written(WEIGHTS, b"\xff" * 8), "header claims 18446744073709"
    ),
    safetensors_case("no bytes", written(WEIGHTS, b""), "it has 0 bytes"),
    safetensors_case("a pipe", replaced(WEIGHTS, os.mkfifo), "it is a pipe"),
    safetensors_case("a folder", replaced(WEIGHTS, Path.mkdir), "it is a folder"),
    safetensors_case(
        "a device", replaced(WEIGHTS, lambda p: p.symlink_to("/dev/zero")), "a device"
    ),
    Case(
        "safetensors: two files with one tensor",
        "predict",
        prepare=twice,
        says=("copy.safetensors", "first.safetensors", "both hold"),
    ),
    Case("links as in a cache", "predict", prepare=linked, code=0, writes_output=True),
    Case(
        "an index out of the folder",
        "predict",
        prepare=outside("../outside.safetensors"),
        says=(INDEX, "../outside.safetensors", "in the same folder"),
    ),
    Case(
        "an index with an absolute path",
        "predict",
        prepare=outside("{folder}/outside.safetensors"),
        says=(INDEX, "/outside.safetensors", "in the same folder"),
    ),
    Case(
        "an index that contradicts its files",
        "predict",
        prepare=index(lambda m: {**m, NORM: "a.safetensors"}),
        says=(INDEX, NORM, "is in a.safetensors, and b.safetensors has it"),
    ),
    Case(
        "an index with a tensor of no file",
        "predict",
        prepare=index(lambda m: {**m, "extra": "a.safetensors"}),
        says=(INDEX, "'extra' is in a.safetensors, and no file of it has it"),
    ),
    Case(
        "an index with a file that is not there",
        "predict",
        prepare=index(lambda m: {**m, NORM: "c.safetensors"}),
        says=("lacks c.safetensors", "complete the download"),
    ),
    Case(
        "an index of numbers", "predict", prepare=index(lambda m: {NORM: 5}), says=(INDEX, "a numb")
    ),
    Case(
        "an index as list", "predict", prepare=index(lambda m: list(m)), says=(INDEX, "is a list")
    ),
    Case("a whole index", "predict", prepare=index(lambda m: m), code=0, writes_output=True),
    Case(
        "config.json as pipe", "predict", prepare=replaced("config.json", os.mkfifo), says=("pipe",)
    ),
    Case(
        "config.json with a name twice",
        "predict",
        prepare=written("config.json", '{"model_type": "llama", "model_type": "qwen2"}'),
        says=("config.json", "'model_type' twice"),
    ),
    Case(
        "cache scales that are no list",
        "predict",
        STATIC,
        written("cachekv_scales.json", json.dumps({SCALES: "1"})),
        says=("cachekv_scales.json", SCALES, "a text", "allowed: one for each of 4 query heads"),
    ),
    Case(
        "cache scales beyond float32",
        "predict",
        STATIC,
        written("cachekv_scales.json", json.dumps({SCALES: [1e300, 1]})),
        says=("cachekv_scales.json", SCALES, "from 0 to 3.40282e+38"),
    ),
    Case(
        "cache scales of true",
        "predict",
        STATIC,
        written("cachekv_scales.json", json.dumps({SCALES: [True, 1]})),
        says=("cachekv_scales.json", SCALES, "holds True"),
    ),
    Case(
        "a quant_method as list",
        "predict",
        prepare=quantization(quant_method=["gptq"]),
        says=("quantization_config", "quant_method \"['gptq']\""),
    ),
    Case(
        "gptq with bits as list",
        "predict",
        prepare=quantization(quant_method="gptq", bits=[4]),
        says=("quantization_config", "bits is [4] (allowed: a whole number)"),
    ),
    Case(
        "awq with a group size of 0",
        "predict",
        prepare=quantization(quant_method="awq", group_size=0),
        says=("quantization_config", "group_size 0 is not supported"),
    ),
    Case(
        "fp8 with a block as number",
        "predict",
        prepare=quantization(quant_method="fp8", weight_block_size=128),
        says=("quantization_config", "weight_block_size is 128 (allowed: a list)"),
    ),
    Case(
        "compressed-tensors with a group size as text",
        "predict",
        prepare=groups(group_size="128"),
        says=("group_0, weights: group_size is '128' (allowed: a whole number)",),
    ),
    Case(
        "compressed-tensors with a pattern that takes ages",
        "predict",
        prepare=quantization(
            quant_method="compressed-tensors",
            format="pack-quantized",
            ignore=[r"re:(\w+\.?)*!"],
            config_groups={"group_0": {"weights": {"num_bits": 4, "strategy": "channel"}}},
        ),
        says=("quantization_config", "may take too long"),
    ),
    Case(
        "gptq's dynamic with a pattern that takes ages",
        "predict",
        prepare=quantization(quant_method="gptq", bits=4, dynamic={r"-:(a|\w)*+!(.*)*": {}}),
        says=("quantization_config, dynamic", "may take too long"),
    ),
    Case(
        "activation scales as list",
        "predict",
        prepare=lambda s: (
            quantization(quant_type="a8w8")(s),
            written("act_scales.json", "[]")(s),
            written("weight_scales.json", "{}")(s),
        )[-1],
        says=("act_scales.json holds a list; a JSON object is needed",),
    ),
    Case(
        "a weight scale of 0",
        "predict",
        prepare=lambda s: (
            quantization(quant_type="a8w8")(s),
            written("act_scales.json", "{}")(s),
            written("weight_scales.json", '{"llama.layers.0.mlp.up_proj.weight_quanter": 0}')(s),
        )[-1],
        says=("weight_scales.json", "up_proj.weight_quanter is 0; it must be above 0"),
    ),
    Case(
        "a pipe among a quantization's files",
        "quantize",
        prepare=replaced(WEIGHTS, os.mkfifo),
        says=(WEIGHTS, "it is a pipe"),
    ),
    Case(
        "a flag's JSON with a name twice",
        "predict",
        ("--logit_bias", '{"7": 1, "7": 2}'),
        says=("--logit_bias", "the key '7' twice"),
    ),
]
