"""predict/merge_lora_params.py: the merged model in files of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from predict import LLM
from predict.cli.identity import folder_digest
from predict.device.place import to_float32
from predict.loading.adapters.model import Merging
from predict.loading.checkpoint import Checkpoint
from predict.merge_lora_params import main
from tests.support import tiny
from tests.support.adapter_folders import (
    ADAPTERS,
    ALPHA,
    CASES,
    DOWN,
    RANK,
    Q,
    factors,
    floats,
    golden,
    paddlenlp_tensors,
    peft_tensors,
    with_products,
    write_paddlenlp,
    write_peft,
)
from tests.support.golden import GOLDEN, config, greedy
from tests.support.schemes import logits_of
from tests.support.stored_formats import as_paddle

SCALING = ALPHA / RANK


def merge(model: Path, adapter: Path, out: Path, *words: str) -> int:
    names = ("--model_name_or_path", "--lora_path", "--output_path")
    given = [
        word for pair in zip(names, map(str, (model, adapter, out)), strict=True) for word in pair
    ]
    return main([*given, "--progress", "false", *words])


@pytest.mark.parametrize("case", CASES)
def test_merged_files_give_the_text_of_peft(case: str, tmp_path: Path) -> None:
    """In float32, as PEFT computed; GPT-2's [in, out] and tied heads among them."""
    wanted, out = golden(case), tmp_path / "out"
    assert merge(GOLDEN / wanted["base"], ADAPTERS / case, out, "--dtype", "float32") == 0
    llm = LLM(config(out, max_length=144))
    assert greedy(llm, wanted["prompts"], len(wanted["greedy"][0])) == wanted["greedy"]


def test_tensors_keep_their_dtypes_and_bits(tmp_path: Path) -> None:
    """What the adapter leaves alone is the same bit by bit; the rest is rounded once."""
    base, out = GOLDEN / "llama_mha", tmp_path / "out"
    weights, name = floats(base), "model.layers.1.mlp.up_proj"
    columns = weights[f"{name}.weight"].shape[1]
    a, b = np.ones((RANK, columns), np.float32), np.zeros((len(weights[f"{name}.weight"]), RANK))
    b[3] = 0.25
    tensors = peft_tensors({name: (a, b.astype(np.float32))})
    assert merge(base, write_peft(tmp_path / "lora", tensors), out) == 0
    before, after = Checkpoint(base), Checkpoint(out)
    assert list(after.tensors) == list(before.tensors)
    for each in before.tensors:
        old, new = before.read(each), after.read(each)
        assert new.dtype == old.dtype
        rows = slice(None) if each != f"{name}.weight" else np.arange(len(old)) != 3
        np.testing.assert_array_equal(new[rows], old[rows])
    row = weights[f"{name}.weight"][3] + SCALING * RANK * 0.25
    got = to_float32(after.read(f"{name}.weight"))[3]
    np.testing.assert_allclose(got, row, rtol=2**-8)


def paddle_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny.CONFIG))
    save_file(as_paddle(tiny.tensors(tiny.CONFIG)), folder / "model.safetensors")
    return folder


def test_paddlenlp_model_keeps_its_layout(tmp_path: Path) -> None:
    model, out = paddle_model(tmp_path / "model"), tmp_path / "out"
    tensors = {"lora_model_state.pdparams": paddlenlp_tensors(factors())}
    assert merge(model, write_paddlenlp(tmp_path / "lora", tensors), out) == 0
    before, after = (load_file(each / "model.safetensors") for each in (model, out))
    changed = with_products(factors(), SCALING)
    assert {name: v.shape for name, v in after.items()} == {n: v.shape for n, v in before.items()}
    for name in (Q, DOWN):
        theirs = name.replace("model.", "llama.", 1)
        np.testing.assert_allclose(
            after[f"{theirs}.weight"].T, changed[f"{name}.weight"], atol=1e-6
        )


def test_experts_in_one_tensor_are_merged_one_by_one(tmp_path: Path) -> None:
    base = GOLDEN / "gpt_oss_20b"  # whose matrices are [in, out]
    model = Checkpoint(base)
    name = "model.layers.0.mlp.experts.1.down_proj"
    columns, rows = model.tensors[f"{name}.weight"].shape
    generator = np.random.default_rng(0)
    a = generator.standard_normal((RANK, columns), np.float32)
    b = generator.standard_normal((rows, RANK), np.float32)
    adapter, out = write_peft(tmp_path / "lora", peft_tensors({name: (a, b)})), tmp_path / "out"
    assert merge(base, adapter, out, "--dtype", "float32") == 0
    assert list(Checkpoint(out).stored) == list(model.stored)
    np.testing.assert_allclose(logits_of(out), logits_of(base, lora_path=str(adapter)), atol=1e-5)


def test_shards_and_companions_are_those_of_a_checkpoint(tmp_path: Path) -> None:
    model = tiny.write_with_tokenizer(tmp_path / "model")
    adapter, out = write_peft(tmp_path / "lora", peft_tensors(factors())), tmp_path / "out"
    assert merge(model, adapter, out, "--max_shard_size", "100KB") == 0
    assert (out / "model.safetensors.index.json").exists()
    assert len(list(out.glob("model-*.safetensors"))) > 1
    assert (out / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    np.testing.assert_allclose(logits_of(out), logits_of(model, lora_path=str(adapter)), atol=1e-5)


def test_interrupted_merge_goes_on_with_the_same_adapter_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tiny.write(tmp_path / "model"), tmp_path / "out"
    adapter = write_peft(tmp_path / "lora", peft_tensors(factors()))
    other = write_peft(tmp_path / "other", peft_tensors(factors(rank=2)), {"r": 2})
    inputs = {"adapter": folder_digest(adapter, is_small=True)}
    left = iter(range(12))

    def stop() -> None:
        next(left)

    with pytest.raises(StopIteration):
        Merging(model, adapter, 100_000, inputs=inputs).run(out, stop)
    assert list(out.glob("model-*.safetensors"))
    words = ("--max_shard_size", "100KB")
    assert merge(model, other, out, *words) == 2
    assert "interrupted conversion of something else: adapter was" in capsys.readouterr().err
    assert merge(model, adapter, out, *words) == 0
    assert "were there" in capsys.readouterr().out
    np.testing.assert_allclose(logits_of(out), logits_of(model, lora_path=str(adapter)), atol=1e-5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--lora_path", "nowhere"), "was not found"),
        (("--output_path", "{model}/below"), "lies in the folder of --model_name_or_path"),
        (("--dtype", "int8"), "allowed: float32, bfloat16, float16"),
    ],
)
def test_wrong_folders_and_words_are_refused(
    words: tuple[str, str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny.write(tmp_path / "model")
    adapter = write_peft(tmp_path / "lora", peft_tensors(factors()))
    given = [word.format(model=model) for word in words]
    assert merge(model, adapter, tmp_path / "out", *given) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_paddlenlps_flags_are_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.write(tmp_path / "model")
    adapter = write_peft(tmp_path / "lora", peft_tensors(factors()))
    words: Any = ["--model_name_or_path", str(model), "--lora_path", str(adapter)]
    words += ["--merge_lora_model_path", str(tmp_path / "out"), "--device", "gpu"]
    assert main([*words, "--low_gpu_mem", "--safe_serialization", "false"]) == 0
    said = capsys.readouterr().err
    assert all(name in said for name in ("--device", "--low_gpu_mem", "--safe_serialization"))
    assert main(words[:4]) == 2
    assert "--output_path missing" in capsys.readouterr().err
