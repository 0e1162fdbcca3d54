"""PaddleNLP's own names, layouts and config.json of each family: the same greedy tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predict import LLM, convert
from predict.errors import UserError
from predict.loading.checkpoint import Checkpoint
from predict.models import family_of
from predict.nn.hf_config import ConfigReader
from predict.system.signals import Signals
from tests.support import paddle_families
from tests.support.golden import GOLDEN, MAX_LENGTH, check_greedy, config
from tests.support.paddle_families import FAMILIES, WRITERS, Stored, tensors_of, write_config

BAICHUAN = [case for case in FAMILIES if case.startswith("baichuan")]


def check_tokens(folder: Path, case: str) -> None:
    settings = {"batch_size": 3, "max_length": MAX_LENGTH, "attention": "append"}
    check_greedy(LLM(config(folder, inference_model=True, **settings)), case)


def write_params(folder: Path, case: str, change: Callable[[Stored], None], **fields: Any) -> None:
    """PaddleNLP's checkpoint with other tensors."""
    tensors = tensors_of(case)
    change(tensors)
    write_config(folder, case, **fields)
    paddle_families.write_params(folder, tensors)


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize("case", FAMILIES)
def test_each_family_answers_from_paddlenlps_files(tmp_path: Path, case: str, form: str) -> None:
    write_config(tmp_path, case)
    WRITERS[form](tmp_path, tensors_of(case))
    assert Checkpoint(tmp_path).is_paddle
    check_tokens(tmp_path, case)


def run(source: Path, target: Path, layout: str) -> None:
    assert convert.run([str(source), str(target), "--format", layout], Signals()) == 0


def values_of(folder: Path) -> dict[str, tuple[str, bytes]]:
    """A checkpoint's tensors as stored."""
    stored = Checkpoint(folder).stored
    return {
        name: (a.dtype, np.asarray(a.read(), order="C").tobytes()) for name, a in stored.items()
    }


@pytest.mark.parametrize("case", [case for case in FAMILIES if case != "baichuan_2_13b"])
def test_paddlenlps_files_come_back_bit_by_bit(tmp_path: Path, case: str) -> None:
    """From its names to Hugging Face's and back, and those are the names of its own tables."""
    source = tmp_path / "paddle"
    source.mkdir()
    write_config(source, case)
    paddle_families.write_safetensors(source, tensors_of(case))
    run(source, tmp_path / "hf", "hf")
    run(tmp_path / "hf", tmp_path / "back", "paddle")
    assert values_of(tmp_path / "back") == values_of(source)
    before, after = (
        json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "back")
    )
    for key in ("model_type", "alibi", "normalize_before", "max_sequence_length"):
        assert (key, before.get(key) or False) == (key, after.get(key) or False)
    check_tokens(tmp_path / "hf", case)


@pytest.mark.parametrize("case", FAMILIES)
def test_a_conversion_writes_paddlenlps_names_and_fields(tmp_path: Path, case: str) -> None:
    run(GOLDEN / case, tmp_path / "to", "paddle")
    wanted, found = tensors_of(case), Checkpoint(tmp_path / "to").stored
    assert set(found) == set(wanted)
    for name, (_, values) in wanted.items():
        assert found[name].shape == values.shape, name
    values = json.loads((tmp_path / "to" / "config.json").read_text())
    paddles = FAMILIES[case].config(json.loads((GOLDEN / case / "config.json").read_text()))
    needed = {"model_type", "normalize_before", "n_head", "hidden_size", "num_hidden_layers"}
    needed |= {"intermediate_size", "max_sequence_length", "max_position_embeddings"}
    for key in needed & paddles.keys():
        assert (key, values[key]) == (key, paddles[key])
    assert values.get("alibi", False) == paddles.get("alibi", False)
    if case != "baichuan_2_13b":  # its head is rounded once more, to bfloat16
        check_tokens(tmp_path / "to", case)


@pytest.mark.parametrize("case", ["ernie4_5_0_3b", "ernie4_5_moe_21b"])
def test_ernie_4_5s_names_may_begin_as_those_of_ernie_3_5(tmp_path: Path, case: str) -> None:
    tensors: Stored = {}
    for name, array in Checkpoint(GOLDEN / case).stored.items():
        values = np.asarray(array.read(), order="C")
        is_turned = name.endswith(("proj.weight", "gate.weight"))
        known = name.replace("model.", "ernie.")
        tensors[known] = array.dtype, np.ascontiguousarray(values.T if is_turned else values)
    (tmp_path / "config.json").write_text((GOLDEN / case / "config.json").read_text())
    paddle_families.write_safetensors(tmp_path, tensors)
    check_tokens(tmp_path, case)


@pytest.mark.parametrize("case", ["baichuan_7b", "baichuan_13b"])
def test_baichuan_comes_back_from_paddlenlps_llama(tmp_path: Path, case: str) -> None:
    """With ALiBi as Baichuan again, without as the Llama that it is: the same rows."""
    run(GOLDEN / case, tmp_path / "paddle", "paddle")
    run(tmp_path / "paddle", tmp_path / "hf", "hf")
    found = values_of(tmp_path / "hf")
    if case == "baichuan_13b":
        assert found == values_of(GOLDEN / case)
    for name, (_, data) in values_of(GOLDEN / case).items():
        parts = [name.replace("W_pack", f"{kind}_proj") for kind in "qkv"]
        assert data == b"".join(found[part][1] for part in ([name] if name in found else parts))


def test_rows_of_baichuan_2s_head_have_length_one_there(tmp_path: Path) -> None:
    run(GOLDEN / "baichuan_2_13b", tmp_path / "paddle", "paddle")
    head = Checkpoint(tmp_path / "paddle").read_float(["lm_head.weight"])
    lengths = np.linalg.norm((head.astype(np.uint32) << 16).view(np.float32), axis=1)
    np.testing.assert_allclose(lengths, 1, rtol=2**-8)


def test_queries_keys_and_values_of_opt_in_one_matrix_are_split(tmp_path: Path) -> None:
    def fuse(tensors: Stored) -> None:
        for layer in range(2):
            at = f"opt.decoder.layers.{layer}.self_attn."
            for kind in ("weight", "bias"):
                parts = [tensors.pop(f"{at}{part}_proj.{kind}") for part in "qkv"]
                heads = [np.split(values, 3, axis=-1) for _, values in parts]
                rows = [each[head] for head in range(3) for each in heads]
                tensors[f"{at}qkv_proj.{kind}"] = parts[0][0], np.concatenate(rows, axis=-1)

    write_params(tmp_path, "opt_350m", fuse, fuse_attention_qkv=True)
    check_tokens(tmp_path, "opt_350m")


def test_linears_of_the_older_chatglm2_are_joined(tmp_path: Path) -> None:
    def change(tensors: Stored) -> None:
        values = {name: each for name, (_, each) in tensors.items()}
        (dtype,) = {dtype for dtype, _ in tensors.values()}
        tensors.clear()
        for name, each in paddle_families.older(values).items():  # saved as the base model
            tensors[name.removeprefix("chatglm_v2.")] = dtype, each

    write_params(tmp_path, "chatglm_2_6b", change)
    check_tokens(tmp_path, "chatglm_2_6b")


def test_a_part_that_the_older_chatglm2_lacks_is_named(tmp_path: Path) -> None:
    older = "chatglm_v2.encoder.layers.0.self_attention.query.weight"
    write_params(
        tmp_path,
        "chatglm_2_6b",
        lambda tensors: tensors.update({older: ("F32", np.ones((32, 32)))}),
    )
    with pytest.raises(UserError, match=r"self_attention.query.weight.*do not make up one matrix"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("case", "table", "head"),
    [
        ("gemma_2b", "gemma.embed_tokens.weight", "lm_head.weight"),
        ("opt_125m", "opt.embeddings.word_embeddings.weight", "lm_head.decoder_weight"),
        ("bloom_7b", "bloom.word_embeddings.weight", "lm_head.decoder_weight"),
        ("chatglm_6b", "chatglm.transformer.word_embeddings.weight", "lm_head.decoder_weight"),
    ],
)
def test_heads_that_are_the_table_of_tokens_are_known(
    tmp_path: Path, case: str, table: str, head: str
) -> None:
    source = tmp_path / "paddle"
    source.mkdir()
    write_params(source, case, lambda tensors: tensors.update({head: tensors[table]}))
    run(source, tmp_path / "hf", "hf")
    found = Checkpoint(tmp_path / "hf")
    names = [
        name for name in found.tensors if re.search(r"(word_embeddings|embed_tokens)\.w", name)
    ]
    np.testing.assert_array_equal(found.read("lm_head.weight"), found.read(names[0]))
    check_tokens(source, case)


@pytest.mark.parametrize(
    ("fields", "same_as"),
    [
        ({"rope_scaling_type": "linear"}, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
        (
            {"rope_scaling_type": "dynamic_ntk"},
            {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
        ),
        ({"rope_scaling_type": "ntk"}, {"rope_theta": 500000.0 * 4.0 ** (32 / 30)}),
        ({"rope_scaling_type": None}, {}),
    ],
)
def test_paddlenlps_rotary_scaling_is_read(fields: dict[str, Any], same_as: dict[str, Any]) -> None:
    reader = ConfigReader.from_dir(GOLDEN / "llama_gqa")
    plain = {k: v for k, v in reader.values.items() if k != "rope_parameters"}
    plain["rope_theta"] = 500000.0

    def spec(**values: Any) -> Any:
        changed = ConfigReader({**plain, **values}, reader.path)
        return family_of(changed).spec(changed)

    assert spec(rope_scaling_factor=4.0, **fields) == spec(**same_as)


@pytest.mark.parametrize(
    ("case", "fields", "said"),
    [
        ("baichuan_7b", {"rope_scaling_type": "yarn"}, "rope_scaling_type.*allowed: linear, ntk"),
        ("bloom_7b", {"use_long_sequence_strategies": True}, "use_long_sequence_strategies"),
    ],
)
def test_what_no_network_here_does_is_refused(
    tmp_path: Path, case: str, fields: dict[str, Any], said: str
) -> None:
    write_params(tmp_path, case, lambda tensors: None, **fields)
    with pytest.raises(UserError, match=said):
        LLM(config(tmp_path))
