"""Every format of checkpoints: found by its files, read as the same tensors, checked for parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from predict.errors import UserError
from predict.loading.checkpoint import Checkpoint, checkpoint_digest
from predict.loading.formats import FORMATS, INDEX
from predict.loading.pdparams import PickledArray
from predict.loading.safetensors_reader import read_header
from predict.loading.safetensors_writer import write
from predict.loading.torch_file import read_torch
from tests.support import stored_formats, tiny
from tests.support.stored_formats import WRITERS, change_params, write_model

STRANGE = {"layers.0.attention.wq.weight": ("F32", np.zeros((2, 2), np.float32))}
PART = "model_state.tp01.pdparams"
QUERIES = "llama.layers.0.self_attn.q_proj.weight"


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        Checkpoint(folder)
    return str(caught.value)


@pytest.mark.parametrize("name", WRITERS)
def test_each_format_gives_the_same_tensors(tmp_path: Path, name: str) -> None:
    wanted = write_model(tmp_path, name)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.tensors.keys() == wanted.keys()
    for tensor, values in wanted.items():
        assert checkpoint.tensors[tensor].shape == values.shape
        found = checkpoint.read(tensor)
        assert found.flags.c_contiguous
        np.testing.assert_array_equal(found, values, strict=True)


def test_files_of_torch_itself_are_read() -> None:
    """tests/data/torch/make.py made them: views, shared storages, float8, parameters, metadata."""
    folder = Path(__file__).parents[1] / "data" / "torch"
    wanted = read_header(folder / "state.safetensors")
    found = read_torch(folder / "state.bin")
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        read = np.asarray(found[name].read(), order="C")
        assert (found[name].dtype, read.shape) == (array.dtype, array.shape)
        assert read.tobytes() == array.read().tobytes()
    with pytest.raises(UserError, match=r"before version 1.6.*weights_only=True"):
        read_torch(folder / "old.bin")


def test_what_is_read_is_listed_where_nothing_is_found(tmp_path: Path) -> None:
    tiny.write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "flax_model.msgpack")
    message = refused(tmp_path)
    assert all(pattern in message for each in FORMATS for pattern in each.files)


def test_the_first_format_of_several_is_read(tmp_path: Path) -> None:
    wanted = write_model(tmp_path, "bin")
    stored_formats.save(tmp_path, {name: values + 1 for name, values in wanted.items()})
    found = Checkpoint(tmp_path).read("model.norm.weight")
    np.testing.assert_array_equal(found, wanted["model.norm.weight"] + 1)


def test_files_beside_the_weights_are_left_alone(tmp_path: Path) -> None:
    write_model(tmp_path, "pdparams of 2 ranks")
    for name in ("scheduler.pdparams", "optimizer.tp00.pdopt", "training_args.bin", "rng.pt"):
        (tmp_path / name).write_bytes(b"no weights")
    Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("safetensors in shards without index", "model-00003-of-00004.safetensors"),
        ("bin in shards without index", "pytorch_model-00005-of-00005.bin"),
        ("bin in shards", "pytorch_model-00001-of-00003.bin"),
        ("pdparams in shards", "model_state-00002-of-00004.pdparams"),
        ("pdparams of 4 ranks", "model_state.tp02.pdparams"),
        ("pdparams of 2 ranks and 3 stages", "model_state.tp00_pp02.pdparams"),
        ("pdparams of 3 stages", "model_state.pp01.pdparams"),
    ],
)
def test_a_missing_file_is_named(tmp_path: Path, name: str, file: str) -> None:
    write_model(tmp_path, name)
    (tmp_path / file).unlink()
    assert f"lacks {file}" in refused(tmp_path)


def test_an_index_names_files_of_its_own_kind(tmp_path: Path) -> None:
    write_model(tmp_path, "bin in shards")
    index = tmp_path / "pytorch_model.bin.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["model.norm.weight"] = "../pytorch_model.bin"
    index.write_text(json.dumps(values))
    assert "allowed are names of *.bin files in the same folder" in refused(tmp_path)


def test_parts_that_disagree_on_a_whole_tensor_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "pdparams of 2 ranks")

    def change(values: dict[str, Any]) -> None:
        values["llama.norm.weight"][1][3] += 1

    change_params(tmp_path / PART, change)
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(UserError, match=r"tp00.* and .*tp01.* different values of llama.norm"):
        checkpoint.read("model.norm.weight")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda values: values.pop("llama.norm.weight"), "only one has llama.norm.weight"),
        (
            lambda values: values.update({QUERIES: ("x", np.zeros((3, 64), np.float32))}),
            f"{QUERIES} cannot be merged: its parts do not fit",
        ),
        (
            lambda values: values.update({QUERIES: ("x", np.zeros((), np.float32))}),
            f"{QUERIES} cannot be merged: its parts do not fit",
        ),
    ],
    ids=["other tensors", "shapes that do not join", "no dimensions"],
)
def test_parts_that_do_not_belong_together_are_refused(
    tmp_path: Path, change: Any, said: str
) -> None:
    write_model(tmp_path, "pdparams of 2 ranks")
    change_params(tmp_path / PART, change)
    assert said in refused(tmp_path)


def test_parts_of_more_ranks_than_there_are_files_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "pdparams of 2 ranks", tensor_parallel_degree=4)
    assert "tensor_parallel_degree is 4" in refused(tmp_path)


def test_parts_with_other_numbers_are_refused_by_name(tmp_path: Path) -> None:
    write_model(tmp_path, "pdparams of 2 ranks")
    (tmp_path / PART).rename(tmp_path / "model_state.tp01_shard00.pdparams")
    assert "model_state.tp01_shard00.pdparams cannot be merged here" in refused(tmp_path)


def test_a_table_that_splits_is_joined_by_rows_and_its_head_by_columns(tmp_path: Path) -> None:
    tiny.write(tmp_path, {"vocab_size": 128})
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    held = stored_formats.as_paddle(tensors)
    table, head = held.pop("llama.embed_tokens.weight"), held.pop("lm_head.weight")
    for rank in range(2):
        part = stored_formats.rank_part(held, rank, 2)
        part["llama.embed_tokens.weight"] = np.split(table, 2)[rank]
        part["lm_head.weight"] = np.split(head, 2, axis=1)[rank]
        path = tmp_path / f"model_state.tp0{rank}.pdparams"
        path.write_bytes(stored_formats.paddle_file(part))
    checkpoint = Checkpoint(tmp_path)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        np.testing.assert_array_equal(checkpoint.read(name), tensors[name])


def test_queries_keys_and_values_of_another_model_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "pdparams, fused")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 6}))
    assert "are not those of 6 query heads and 2 key/value heads" in refused(tmp_path)


@pytest.mark.parametrize("name", ["bin", "pdparams of 2 ranks", "safetensors in shards"])
def test_the_digest_covers_the_files_of_each_format(tmp_path: Path, name: str) -> None:
    write_model(tmp_path, name)
    first = checkpoint_digest(tmp_path)
    assert first == checkpoint_digest(tmp_path)
    largest = max(tmp_path.iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[-3000] ^= 1  # a value
    largest.write_bytes(data)
    assert checkpoint_digest(tmp_path) != first


def test_matrices_in_one_are_read_once_for_those_that_are_cut_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = write_model(tmp_path, "pdparams, fused")
    checkpoint = Checkpoint(tmp_path)
    read: list[tuple[int, ...]] = []
    original = PickledArray.read

    def counted(array: PickledArray) -> Any:
        read.append(array.shape)
        return original(array)

    monkeypatch.setattr(PickledArray, "read", counted)
    for kind in "qkv":
        name = f"model.layers.0.self_attn.{kind}_proj.weight"
        np.testing.assert_array_equal(checkpoint.read(name), wanted[name])
    assert read == [(64, 256)]
    names = [f"model.layers.{layer}.mlp.gate_proj.weight" for layer in (0, 1, 0)]
    for name in names:  # in another order each is read anew
        values = checkpoint.read(name)
        values += 1  # its own: no other one changes
    assert read[1:] == [(64, 192)] * 3
    np.testing.assert_array_equal(checkpoint.read(names[0]), wanted[names[0]])


@pytest.mark.parametrize("has_index", [False, True])
def test_a_whole_model_is_read_alone_as_in_transformers(tmp_path: Path, has_index: bool) -> None:
    wanted = write_model(tmp_path, "safetensors in shards")
    if not has_index:
        (tmp_path / INDEX).unlink()
    stored_formats.save(tmp_path, {name: values + 1 for name, values in wanted.items()})
    write(tmp_path / "consolidated.safetensors", STRANGE)
    checkpoint = Checkpoint(tmp_path)
    found = checkpoint.read("model.norm.weight")
    np.testing.assert_array_equal(found, wanted["model.norm.weight"] + 1)
    left = ["consolidated.safetensors", *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))]
    assert checkpoint.files_left == left


def test_a_strange_file_among_shards_is_named(tmp_path: Path) -> None:
    wanted = write_model(tmp_path, "safetensors in shards")
    (tmp_path / INDEX).unlink()
    write(tmp_path / "old.safetensors", STRANGE)
    shapes = {name: values.shape for name, values in wanted.items()}
    with pytest.raises(UserError, match=r"nothing of old.safetensors belongs to the model: move"):
        Checkpoint(tmp_path).check(shapes, ())
