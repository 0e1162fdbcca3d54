"""Tuned prefixes on the GPU: attention over prefix and prompt as NumPy has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from predict import LLM
from predict.device import devices
from tests.support import prefixes, quantized_caches
from tests.support.golden import config
from tests.support.gpu_engines import FORMS, SETTINGS


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", prefixes.NAMED)
def test_answers_equal_attention_over_prefix_and_prompt(
    gpu: devices.Device, name: str, form: str, tmp_path: Path
) -> None:
    entry = prefixes.NAMED[name]
    path = prefixes.npy(tmp_path / "prefix", entry)
    settings = {**SETTINGS, "max_length": 192, "block_size": 16}
    llm = FORMS[form](LLM(config(entry["model"], **settings, prefix_path=path)))
    for _ in range(2):
        prefixes.check(llm, entry)
        llm.engine.scheduler.check()


@pytest.mark.parametrize("cache_type", quantized_caches.CACHE_TYPES)
def test_quantized_caches_give_one_text_behind_a_prefix(
    gpu: devices.Device, tmp_path: Path, cache_type: str
) -> None:
    model = quantized_caches.model(tmp_path / "model", {})
    path = prefixes.write_prefix(tmp_path / "prefix", prefixes.TINY, 21)
    changes: dict[str, Any] = {
        "cachekv_int8_type": cache_type,
        "prefix_path": path,
        "device": "gpu",
    }
    texts = [
        quantized_caches.greedy(LLM(quantized_caches.config(model, **changes, **composition)))
        for composition in (
            {"batch_size": 1},
            {"batch_size": 5, "attention": "append", "max_num_batched_tokens": 7},
            {"batch_size": 5, "attention": "append", "num_cache_blocks": 11},
        )
    ]
    assert all(text == texts[0] for text in texts)
