"""llama.cpp beside ours: one file for both, and turns."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from predict.bench import peer
from predict.bench.compare import read_recorded
from predict.bench.gguf_writer import TYPES, write_gguf
from predict.device import library
from predict.errors import UserError
from predict.loading.model import read_spec

TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-6,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
}
# Prints what llama-batched-bench does of --output-format jsonl, but not the first time: its log is
# at times not written when the process ends. Dies of prompts of 32.
PROGRAM = """#!/bin/sh
case "$1" in --version) echo "version: 1" >&2; exit;; esac
case "$*" in *mmap*) exit 1;; *"-npp 32"*) echo "an assertion" >&2; kill -ILL $$;; esac
test -e "$0.once" || { touch "$0.once"; exit; }
echo "load_tensors:          AMX model buffer size =   559.41 MiB" >&2
echo "a line of its log"
echo '{"n_kv_max": 256, "pp": 16, "tg": 2, "pl": 2, "t_pp": 2.0, "t_tg": 0.5, "speed": 1.0}'
"""


def folder_with(path: Path, config: dict[str, Any]) -> Path:
    (path / "tiny").mkdir()
    (path / "tiny" / "config.json").write_text(json.dumps({**TINY, **config}))
    return path / "tiny"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", TYPES)
def test_our_reader_finds_the_network_in_the_file(family: str, kind: str, tmp_path: Path) -> None:
    import gguf

    spec, _ = read_spec(folder_with(tmp_path, FAMILIES[family]))
    path = tmp_path / "x.gguf"
    write_gguf(path, spec, kind)
    again, _ = read_spec(path)
    sizes = ("vocab_size", "hidden_size", "max_context", "tie_word_embeddings", "layers", "head")
    assert [getattr(again, name) for name in sizes] == [getattr(spec, name) for name in sizes]
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    head = "token_embd.weight" if spec.tie_word_embeddings else "output.weight"
    assert found[head].tensor_type.name == TYPES[kind][0]
    queries = found["blk.0.attn_q.weight"]
    assert queries.tensor_type.name == kind
    assert 0.01 < gguf.quants.dequantize(queries.data, queries.tensor_type).std() < 0.03


@pytest.mark.parametrize("shape", ["gemma-3-1b", "llama-3.2-1b"])
def test_windows_and_scaled_positions_stand_in_the_file(shape: str, tmp_path: Path) -> None:
    spec, _ = read_spec(peer.folder_of(shape))
    spec = dataclasses.replace(spec, vocab_size=512, layers=spec.layers[:7])
    write_gguf(tmp_path / "x.gguf", spec, "Q4_0")
    again, _ = read_spec(tmp_path / "x.gguf")
    assert again.layers == spec.layers
    assert [rope.theta for rope in again.ropes] == [rope.theta for rope in spec.ropes]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "qwen3_moe", **FAMILIES["qwen3_moe"], "norm_topk_prob": False}, "layers"),
        ({"model_type": "cohere"}, "allowed: llama"),
    ],
    ids=["router", "family"],
)
def test_what_the_file_does_not_describe_is_refused(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    spec, _ = read_spec(folder_with(tmp_path, config))
    with pytest.raises(UserError, match=message):
        write_gguf(tmp_path / "x.gguf", spec, "F32")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shapes", "x,x"], "--shapes is empty, or has one twice"),
        (["--types", "Q5_K"], "allowed: F32, F16, BF16, Q8_0, Q4_0"),
        (["--cases", "1x2"], "REQUESTSxINPUTxOUTPUT"),
        (["--batched_bench", "nowhere"], "build llama.cpp's target llama-batched-bench"),
    ],
)
def test_what_cannot_be_measured_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        peer.parse(words)


def test_a_shape_is_a_name_or_a_folder(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, FAMILIES["llama"])
    assert peer.folder_of(str(folder)) == folder
    with pytest.raises(UserError, match=r"qwen3-30b-a3b, .*, a folder with a config"):
        peer.folder_of("qwen-9t")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "batched-bench"
    path.write_text(PROGRAM)
    path.chmod(0o755)
    return path


def words_of(folder: Path, program: Path, cases: str) -> list[str]:
    words = ["--shapes", str(folder), "--types", "Q4_0", "--cases", cases, "--turns", "1"]
    return [*words, "--batched_bench", str(program), "--num_threads", "1"]


def test_both_sides_read_one_file_in_turns(
    compiled: library.Library, program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "turns.json"
    words = words_of(folder_with(tmp_path, FAMILIES["llama"]), program, "2x32x65,2x16x65")
    assert peer.main([*words, "--output_file", str(written)]) == 0
    said = capsys.readouterr()
    assert "tiny, Q4_0, 2x16x65" in said.out
    assert "tiny, Q4_0: llama.cpp has its weights in AMX 559 MiB" in said.err
    assert "tiny, Q4_0, 2x32x65 is not measured, llama.cpp died: " in said.err
    assert "ended with signal SIGILL: an assertion" in said.err
    made = read_recorded(written)
    theirs = made.cases["llama.cpp: tiny, Q4_0, 2x16x65"]
    assert theirs["prompt_tokens_per_s"].median == 16.0
    assert theirs["decode_tokens_per_s"].median == 256.0
    assert made.cases["regatta: tiny, Q4_0, 2x16x65"]["prompt_tokens_per_s"].median > 0
    assert made.versions["llama.cpp"] == "version: 1"
    assert not any("2x32x65" in case for case in made.cases)


def test_a_peer_that_always_dies_is_said_and_nothing_of_ours_is_run(
    program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_with(tmp_path, FAMILIES["llama"])
    assert peer.main(words_of(folder, program, "1x32x1,1x32x65")) == 1
    said = capsys.readouterr().err
    assert said.count("is not measured, llama.cpp died") == said.count("signal SIGILL") == 2
