"""Fields of config.json that a family cannot do, or that mean something else where they are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from predict.errors import UserError
from predict.models import family_of
from predict.nn.blocks import AttentionBlock, MlpBlock
from predict.nn.hf_config import BESIDE_MODELS, ConfigReader
from predict.nn.spec import DecoderSpec
from tests.support.golden import GOLDEN

LINEAR = {"type": "linear", "factor": 2.0}


def spec_of(case: str, **fields: Any) -> DecoderSpec:
    """A golden's network with other fields; Ellipsis takes one away."""
    reader = ConfigReader.from_dir(GOLDEN / case)
    values = {key: value for key, value in {**reader.values, **fields}.items() if value is not ...}
    changed = ConfigReader(values, reader.path)
    return family_of(changed).spec(changed)


@pytest.mark.parametrize(
    ("case", "fields"),
    [
        ("qwen_7b", {"rope_scaling": LINEAR}),
        ("chatglm_6b", {"rope_scaling": LINEAR}),
        ("chatglm_6b", {"rope_scaling": "linear"}),
        ("chatglm_2_6b", {"rope_scaling": LINEAR}),
        ("chatglm_2_6b", {"rope_scaling_type": "ntk"}),
        ("bloom_7b", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}),
        ("gpt2_small", {"rope_scaling": LINEAR}),
        ("gemma_2b", {"use_bidirectional_attention": True}),
        ("gemma2_9b", {"use_bidirectional_attention": True}),
        ("gemma_2b", {"hidden_activation": ..., "hidden_act": "softmax"}),
        ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 262144}}),
    ],
)
def test_a_field_that_the_family_does_not_do_is_named(case: str, fields: dict[str, Any]) -> None:
    *_, name = fields
    with pytest.raises(UserError, match=name):
        spec_of(case, **fields)


@pytest.mark.parametrize("case", ["bloom_7b", "qwen_7b"])
def test_a_rotary_table_as_it_is_anyway_is_allowed(case: str) -> None:
    asked = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    assert spec_of(case, **asked) == spec_of(case)


@pytest.mark.parametrize(
    ("fields", "function"),
    [({}, "gelu_tanh"), ({"hidden_act": "gelu"}, "gelu_tanh"), ({"hidden_act": "relu"}, "relu")],
)
def test_a_gemma_without_hidden_activation_has_hidden_act(
    fields: dict[str, Any], function: str
) -> None:
    spec = spec_of("gemma_2b", **{"hidden_activation": ..., "hidden_act": ..., **fields})
    found = {b.activation.function for b in spec.blocks() if isinstance(b, MlpBlock)}
    assert found == {function}


@pytest.mark.parametrize(("value", "softcaps"), [(..., (50.0, 30.0)), (None, (0.0, 0.0))])
def test_gemma_2_has_soft_caps_unless_they_are_null(
    value: Any, softcaps: tuple[float, float]
) -> None:
    keys = ("attn_logit_softcapping", "final_logit_softcapping")
    spec = spec_of("gemma2_9b", **dict.fromkeys(keys, value))
    caps = {block.softcap for block in spec.blocks() if isinstance(block, AttentionBlock)}
    assert (caps, spec.head.softcap) == ({softcaps[0]}, softcaps[1])


def test_all_norms_of_a_glm_4_are_alike() -> None:
    norms = {
        norm.epsilon
        for block in spec_of("glm4_9b", rms_norm_eps=...).blocks()
        if isinstance(block, AttentionBlock | MlpBlock)
        for norm in (block.norm, block.post_norm)
        if norm is not None
    }
    assert norms == {1.5625e-7}


@pytest.mark.parametrize("name", sorted(BESIDE_MODELS))
def test_a_folder_that_is_no_model_is_told_by_its_files(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json does not exist; a model is a directory"):
        ConfigReader.from_dir(tmp_path)
    (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=f"given by {BESIDE_MODELS[name]}, beside its model"):
        ConfigReader.from_dir(tmp_path)
