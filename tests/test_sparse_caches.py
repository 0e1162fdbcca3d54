"""Layers without attention keep nothing in the cache, in every way to run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.export_model import export_model
from predict import LLM
from predict.device import library
from predict.loading.cache_scales import SCALES_FILE
from predict.loading.memory import bytes_per_token
from predict.nn.kinds.attention import AttentionBlock
from predict.nn.kinds.mlp import MlpBlock
from tests.support import tiny
from tests.support.adapters import write_adapter
from tests.support.drafts import draft_always
from tests.support.prefixes import write_prefix
from tests.support.quantization import quantize
from tests.support.records import llama_spec
from tests.support.sparse_caches import (
    GREEDY,
    NETWORKS,
    PROMPTS,
    check_answers,
    check_logits,
    config,
    tokens,
    write_network,
)

pytestmark = pytest.mark.usefixtures("sparse_caches")
CODES = {"dynamic": 0.02, "static": 0.03, "fp8": 0.06, "int4": 0.2}  # of the largest logit
MLPS = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("network", NETWORKS)
def test_logits_and_tokens_are_numpys(
    network: str, operators: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_network(tmp_path / "model", network)
    answers = tokens(LLM(config(folder, **operators)))
    check_answers(folder, answers)
    for changes in ({"attention": "block"}, {"attention": "append", "max_num_batched_tokens": 7}):
        assert tokens(LLM(config(folder, **changes, **operators))) == answers
    check_logits(folder, LLM(config(folder, **operators)))
    export_model(config(folder, **operators), tmp_path / "static")
    static = LLM(config(tmp_path / "static", mode="static", **operators))
    assert tokens(static) == answers
    check_logits(folder, static)


def test_half_the_layers_take_half_the_cache(operators: dict[str, Any], tmp_path: Path) -> None:
    made = {
        network: LLM(config(write_network(tmp_path / network, network), **operators))
        for network in ("AAAAAA", "AMAMAM")
    }
    tensors = {name: [*map(len, llm.parts.caches)] for name, llm in made.items()}
    assert tensors == {"AAAAAA": [2] * 6, "AMAMAM": [2, 0] * 3}
    sizes = {name: bytes_per_token(llm.config, llm.spec) for name, llm in made.items()}
    assert sizes["AAAAAA"] == 2 * sizes["AMAMAM"] > 0


@pytest.mark.parametrize("network", NETWORKS)
def test_blocks_are_shared_and_drafts_stand(
    network: str, operators: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_network(tmp_path / "model", network)
    drafts = {"speculate_method": "lookahead", "speculate_max_draft_token_num": 4}
    llm = LLM(config(folder, attention="append", **drafts, **operators))
    draft_always(llm)
    for _ in range(2):
        check_answers(folder, tokens(llm))
    assert llm.stats().num_prefix_hit_tokens > 0
    assert llm.stats().num_used_blocks == 0


@pytest.mark.parametrize("cache", CODES)
def test_quantized_caches_have_scales_by_layer(
    cache: str, operators: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_network(tmp_path / "model", "MAEAM")
    scales = {
        f"llama.layers.{layer}.self_attn.cache{which}_matmul.activation_quanter": [5.0 + layer] * 2
        for layer in (1, 3)
        for which in "kv"
    }
    (folder / SCALES_FILE).write_text(json.dumps(scales))
    changes = {"cachekv_int8_type": cache, **operators}
    llm = LLM(config(folder, **changes))
    answers = tokens(llm)
    check_logits(folder, llm, CODES[cache])
    if cache == "static":
        found = [cache[2].numpy().tolist() for cache in llm.parts.caches if cache]
        assert found == [pytest.approx([(5.0 + layer) / 127] * 2) for layer in (1, 3)]
    export_model(config(folder, **changes), tmp_path / "static")
    assert tokens(LLM(config(tmp_path / "static", mode="static", **changes))) == answers


@pytest.mark.parametrize("network", ["AMAMAM", "MMAMM", "AMAMM each"])
def test_adapters_reach_every_layer(
    network: str, operators: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_network(tmp_path / "model", network)
    shape = tiny.CONFIG | {"num_hidden_layers": len(network.partition(" ")[0])}
    adapters = [
        write_adapter(tmp_path / f"adapter {seed}", shape, 8, seed, MLPS) for seed in range(2)
    ]
    modules = tuple(f"{index}={path}" for index, path in enumerate(adapters))
    names = ["0", None, "1", "0"]
    params = [replace(GREEDY, adapter=name) for name in names]
    export_model(config(folder, **operators), tmp_path / "static", enable_lora=True)
    serving = {"lora_modules": modules, "attention": "append", "batch_size": 4, **operators}
    paths = {None: None, "0": adapters[0], "1": adapters[1]}
    merged = {
        name: LLM(config(folder, lora_path=path, **operators)) for name, path in paths.items()
    }
    wanted = [
        merged[name].generate([prompt], GREEDY)[0].token_ids
        for prompt, name in zip(PROMPTS, names, strict=True)
    ]
    for llm in (
        LLM(config(folder, **serving)),
        LLM(config(tmp_path / "static", mode="static", **serving)),
    ):
        assert [output.token_ids for output in llm.generate(PROMPTS, params)] == wanted


def test_a_prefix_is_of_the_layers_that_keep_something(
    operators: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_network(tmp_path / "model", "MAEAM")
    path = write_prefix(tmp_path / "prefix", (2, 2, 32), 21)
    changes = {"attention": "append", "prefix_path": path, **operators}
    llm = LLM(config(folder, **changes))
    answers = tokens(llm)
    assert answers != tokens(LLM(config(folder, **operators)))
    kept = [cache[0].numpy() for cache in llm.parts.caches if cache]
    blocks = llm.addons.prefixes[""].all_block_ids
    values = np.load(path / "pre_caches.npy")
    for layer, keys in enumerate(kept):
        np.testing.assert_array_equal(keys[blocks[0]], values[layer, 0, :, :16])


def test_calibration_writes_scales_of_the_layers_that_keep_something(
    compiled: library.Library, tmp_path: Path
) -> None:
    folder = write_network(tmp_path / "model", "MAEAM", vocab_size=342)
    for path in tiny.TOKENIZER.glob("tokenizer*.json"):
        shutil.copy(path, folder)
    text = tmp_path / "text.txt"
    text.write_text("one two three and so on. " * 60)
    quantize(folder, text, tmp_path / "out", "--quant_type", "a8w8c8")
    scales = json.loads((tmp_path / "out" / SCALES_FILE).read_text())
    assert sorted(name.split(".")[2] for name in scales) == ["1", "1", "3", "3"]
    llm = LLM(config(tmp_path / "out", cachekv_int8_type="static"))
    assert all(len(answer) == GREEDY.max_new_tokens for answer in tokens(llm))


def test_a_layer_that_no_composition_runs_is_refused() -> None:
    attention = AttentionBlock(4, 2, 32, 1.0)
    shape = {"vocab_size": 8, "hidden_size": 64, "max_position": 64}
    for layer, message in (
        ((MlpBlock(96), attention), "only its first block may keep rows"),
        ((attention, attention), "only its first block may keep rows"),
        ((MlpBlock(96, parallel=True),), "its first block is parallel to none"),
    ):
        with pytest.raises(ValueError, match=f"layer 1: {message}"):
            replace(llama_spec(2, 4, 2, 32, 96, **shape), layers=((attention,), layer))
