"""Too little memory is an error with the arithmetic, before any work and without a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from predict import LLM, EngineConfig, SamplingParams
from predict.device import devices
from predict.errors import UserError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def settings(folder: Path, model: dict[str, Any], **changes: Any) -> EngineConfig:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **model}))
    values = {"dtype": "bfloat16", "load_format": "dummy", "attention": "append", **changes}
    return EngineConfig(
        model_name_or_path=str(folder), device="gpu", inference_model=True, **values
    )


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        (
            {
                "hidden_size": 16384,
                "intermediate_size": 53248,
                "num_hidden_layers": 126,
                "num_attention_heads": 128,
            },
            {},
            r"weights \d+\.\d+ GiB \+ workspace .*not even the weights fit: .*--quant_type",
        ),
        (
            {"num_hidden_layers": 64},
            {"batch_size": 512, "max_length": 8192, "attention": "reserved"},
            r"weights .* cache of 4194304 tokens at 262144 bytes each 1024\.00 GiB"
            r".*tokens of cache would fit",
        ),
        (
            {"num_hidden_layers": 64},
            {"num_cache_blocks": 1 << 17},
            r"weights .* cache of 8388608 tokens.*lower --max_length or --batch_size",
        ),
        ({}, {"gpu_memory_utilization": 0.003}, r"weights .* raise --gpu_memory_utilization"),
    ],
)
def test_what_cannot_fit_is_refused_before_it_is_made(
    gpu: devices.Device, tmp_path: Path, model: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    devices.release_cached(gpu)
    before = devices.memory_info(gpu)
    with pytest.raises(UserError, match=f"the GPU's memory is too small: {words}"):
        LLM(settings(tmp_path, model, **changes))
    after = devices.memory_info(gpu)
    assert after.in_use == before.in_use
    assert after.peak_in_use == before.peak_in_use


def test_cache_takes_the_share_that_is_asked_for(gpu: devices.Device, tmp_path: Path) -> None:
    devices.release_cached(gpu)
    idle = devices.memory_info(gpu)
    # The sequences' need is 128 GiB and more: memory decides.
    changes = {"batch_size": 2000, "max_length": 8192, "gpu_memory_utilization": 0.2}
    llm = LLM(settings(tmp_path, {}, **changes))
    share = 0.2 * idle.total
    used = devices.memory_info(gpu).in_use - idle.in_use
    blocks = llm.stats().num_cache_blocks
    assert blocks * 64 * 8192 <= used < share
    outputs = llm.generate([[1, 2, 3]] * 64, SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert all(len(output.token_ids) == 4 for output in outputs)
    assert devices.memory_info(gpu).peak_in_use - idle.in_use <= share
