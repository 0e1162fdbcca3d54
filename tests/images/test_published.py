"""config.json as models were published with it says the same as what transformers 5 saves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from predict.loading.model import read_spec
from tests.support.pictures import GOLDEN_IMAGES

Config = dict[str, Any]


def old_rope(text: Config) -> None:
    """Writes positions as transformers 4 does."""
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}


def qwen3_vl(config: Config) -> Config:
    old_rope(config["text_config"])
    del config["vision_config"]["rope_parameters"]
    config["vision_config"]["model_type"] = "qwen3_vl"
    return config


def paddleocr_vl(config: Config) -> Config:
    text = config.pop("text_config")
    old_rope(text)
    text["rope_scaling"]["type"] = "default"
    vision = config["vision_config"]
    del vision["rope_parameters"]
    vision |= {"model_type": "paddleocr_vl", "temporal_patch_size": 2, "tokens_per_second": 2}
    more = {"compression_ratio": 1.0, "weight_share_add_bias": True, "sliding_window": None}
    more |= {"rope_is_neox_style": True, "use_3d_rope": True}
    return text | more | config


def gemma3(config: Config) -> Config:
    """With the keys that the 4B's file has."""
    text, vision = config["text_config"], config["vision_config"]
    rope = text.pop("rope_parameters")
    text["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    text["rope_theta"] = rope["full_attention"]["rope_theta"]
    del vision["num_channels"], vision["layer_norm_eps"]
    return config


def mistral3(config: Config) -> Config:
    rope = config["vision_config"].pop("rope_parameters")
    config["vision_config"] |= {"rope_theta": rope["rope_theta"], "head_dim": 16}
    text = config["text_config"]
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    return config


def llava(config: Config) -> Config:
    """As LLaVA 1.5's file, which says of its text model what differs from Llama's."""
    rope = config["text_config"].pop("rope_parameters")
    assert rope["rope_theta"] == 10000.0
    del config["vision_config"]["hidden_act"], config["vision_config"]["num_channels"]
    more = {"ignore_index": -100, "pad_token_id": 0, "vocab_size": 264}
    config["vision_config"]["vocab_size"] = 32000
    return config | more


PUBLISHED: dict[str, Callable[[Config], Config]] = {
    "qwen3_vl": qwen3_vl,
    "paddleocr_vl": paddleocr_vl,
    "gemma3": gemma3,
    "mistral3": mistral3,
    "llava": llava,
}


@pytest.mark.parametrize("case", PUBLISHED)
def test_published_configs_say_the_same(case: str, tmp_path: Path) -> None:
    saved = read_spec(GOLDEN_IMAGES / case)[0]
    config = json.loads((GOLDEN_IMAGES / case / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[case](config)))
    assert read_spec(tmp_path)[0] == saved
