"""Whole runs over quantized caches: one text, however its steps, blocks and mode are chosen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from export.export_model import export_model
from predict import LLM, EngineConfig
from predict.device import library
from predict.errors import UserError
from predict.loading.manifest import load_manifest
from predict.loading.memory import bytes_per_token, check_cpu_memory, num_cache_blocks
from predict.loading.model import read_spec
from tests.support import tiny
from tests.support.golden import GOLDEN
from tests.support.quantized_caches import (
    CACHE_TYPES,
    COMPOSITIONS,
    PROMPTS,
    SHAPES,
    config,
    greedy,
    model,
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_text_does_not_depend_on_how_steps_are_cut(
    compiled: library.Library, tmp_path: Path, cache_type: str, shape: str, dtype: str
) -> None:
    directory = model(tmp_path / "model", SHAPES[shape])
    changes = {"cachekv_int8_type": cache_type, "dtype": dtype}
    texts, preemptions = [], 0
    for composition in COMPOSITIONS:
        llm = LLM(config(directory, **changes, **composition))
        texts.append(greedy(llm))
        preemptions += llm.stats().num_preemptions
    assert preemptions > 0
    assert all(text == texts[0] for text in texts)


@pytest.fixture
def directory(latents: bool, tmp_path: Path) -> Path:
    """A tiny model with keys and values, or one with latents."""
    return GOLDEN / "deepseek_v2" if latents else model(tmp_path / "model", {})


# Each format of keys and values, and the one of latents.
FORMATS = [*((cache_type, False) for cache_type in CACHE_TYPES), ("fp8", True)]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("cache_type", "latents"), FORMATS)
def test_exported_program_gives_the_same_text(
    compiled: library.Library, tmp_path: Path, cache_type: str, directory: Path, fused: bool
) -> None:
    changes = {"cachekv_int8_type": cache_type, "inference_model": fused, "batch_size": 3}
    dynamic = greedy(LLM(config(directory, **changes)))
    export_model(config(directory, **changes), tmp_path / "static")
    assert load_manifest(tmp_path / "static").kv_format == config(directory, **changes).kv_format
    static = LLM(config(tmp_path / "static", mode="static", **changes))
    assert greedy(static) == dynamic
    with pytest.raises(UserError, match=r"its KV cache is .*--cachekv_int8_type asks for dense"):
        LLM(config(tmp_path / "static", mode="static", inference_model=fused))


@pytest.mark.parametrize(("cache_type", "latents"), FORMATS)
def test_cached_prefix_gives_the_same_text_as_a_computed_one(
    compiled: library.Library, cache_type: str, directory: Path
) -> None:
    llm = LLM(config(directory, cachekv_int8_type=cache_type, attention="append"))
    computed = greedy(llm, PROMPTS[-1:])
    assert llm.stats().num_prefix_hit_tokens == 0
    assert greedy(llm, PROMPTS[-1:]) == computed
    assert llm.stats().num_prefix_hit_tokens == 32


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_plain_and_compiled_operators_agree(
    compiled: library.Library, tmp_path: Path, cache_type: str
) -> None:
    directory = model(tmp_path / "model", {})
    texts = [
        greedy(LLM(config(directory, cachekv_int8_type=cache_type, inference_model=fused)))
        for fused in (False, True)
    ]
    # float32 sums in another order: a code beside the middle of two may fall to the other.
    tokens = [[token for text in side for token in text] for side in texts]
    agree = sum(a == b for a, b in zip(*tokens, strict=True))
    assert agree >= 0.9 * len(tokens[0])


def test_smaller_formats_get_more_blocks(tmp_path: Path) -> None:
    directory = model(tmp_path / "model", {})
    spec = LLM(config(directory, inference_model=False)).spec
    sizes, blocks = [], []
    for cache_type in (None, "static", "int4"):
        wanted = config(
            directory, cachekv_int8_type=cache_type, attention="append", batch_size=10_000
        )
        sizes.append(bytes_per_token(wanted, spec))
        blocks.append(num_cache_blocks(wanted, spec, free_bytes=1 << 24))
    assert sizes == [4 * 2 * 2 * 2 * 32, 2 * 2 * 2 * 32, 2 * 2 * 2 * (16 + 8)]
    assert blocks == [int(0.9 * (1 << 24)) // (16 * size) for size in sizes]


def test_static_scales_have_to_be_there(tmp_path: Path) -> None:
    directory = tiny.write(tmp_path / "model")
    with pytest.raises(UserError, match=r"holds no cachekv_scales\.json"):
        LLM(config(directory, cachekv_int8_type="static", inference_model=False))


@pytest.mark.parametrize(
    ("changes", "weights", "message"),
    [
        ({}, 1 << 40, "weights do not fit: they take 1048576 MiB, and 64 MiB of memory are free"),
        ({}, (64 << 20) - 1, "the rotary table of 64 positions does not fit"),
        ({"max_length": 1 << 24}, 0, "the rotary table of 16777216 positions does not fit"),
        ({"max_length": 60_000}, 1 << 20, "the KV cache does not fit: 3750 blocks of 16 tokens"),
        (
            {"num_cache_blocks": 10**9},
            0,
            "the KV cache does not fit: --num_cache_blocks 1000000000",
        ),
        ({"batch_size": 2000}, 0, "the KV cache does not fit: 8000 blocks"),
    ],
)
def test_what_cannot_fit_into_memory_is_refused_before_weights_are_read(
    tmp_path: Path, changes: dict[str, Any], weights: int, message: str
) -> None:
    directory = tiny.write(tmp_path / "model")
    spec = read_spec(directory)[0]
    values = {"dtype": "float32", "max_length": 64, "block_size": 16, **changes}
    wanted = EngineConfig(model_name_or_path=str(directory), **values)
    with pytest.raises(UserError, match=message):
        check_cpu_memory(wanted, spec, 64 << 20, weights)


def test_an_export_needs_no_memory_for_a_cache(tmp_path: Path) -> None:
    directory = tiny.write(tmp_path / "model")
    spec = read_spec(directory)[0]
    wanted = EngineConfig(model_name_or_path=directory, dtype="float32", max_length=60_000)
    check_cpu_memory(wanted, spec, 64 << 20, 1 << 20, with_cache=False)


def test_a_made_up_model_beyond_the_memory_is_refused_at_once(tmp_path: Path) -> None:
    directory = tiny.write(tmp_path / "model")
    sizes = {"hidden_size": 1 << 17, "intermediate_size": 1 << 20, "num_hidden_layers": 1024}
    (directory / "config.json").write_text(json.dumps({**tiny.CONFIG, **sizes}))
    with pytest.raises(UserError, match=r"the weights do not fit: they take \d+ MiB"):
        LLM(EngineConfig(model_name_or_path=str(directory), max_length=64, load_format="dummy"))
