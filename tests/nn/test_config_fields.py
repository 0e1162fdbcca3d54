"""Fields of config.json that a family cannot do, or that mean something else where they are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from predict.errors import UserError
from predict.models import family_of
from predict.models import spec_of as checked_spec_of
from predict.nn.hf_config import BESIDE_MODELS, ConfigReader
from predict.nn.kinds.attention import AttentionBlock
from predict.nn.kinds.mlp import MlpBlock
from predict.nn.spec import DecoderSpec, RopeSpec
from tests.support.golden import GOLDEN

LINEAR = {"type": "linear", "factor": 2.0}
ORIGINAL = "original_max_position_embeddings"
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 32}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
OF_16, OF_8 = ({"short_factor": [1.0] * n, "long_factor": [2.0] * n} for n in (16, 8))
LONGROPE = {"rope_type": "longrope", "factor": 2.0, **OF_16}
GLOBAL = {"rope_type": "default", "rope_theta": 500000.0}


def reader_of(case: str, **fields: Any) -> ConfigReader:
    """A golden's config.json with other fields; Ellipsis takes one away."""
    reader = ConfigReader.from_dir(GOLDEN / case)
    values = {key: value for key, value in {**reader.values, **fields}.items() if value is not ...}
    return ConfigReader(values, reader.path)


def spec_of(case: str, **fields: Any) -> DecoderSpec:
    """The network of `reader_of`."""
    changed = reader_of(case, **fields)
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
        ("qwen2", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
        ("ernie4_5_0_3b", {"compression_ratio": 2.0}),
        ("ernie4_5_0_3b", {"use_rmsnorm": False}),
        ("chatglm_6b", {"no_block_position": True}),
        ("chatglm_2_6b", {"interleaved_qkv": True}),
        ("phi3_mini", {"lm_head_bias": True}),
        ("starcoder2_window", {"mlp_type": "gated"}),
        ("starcoder2_window", {"norm_type": "rms_norm"}),
    ],
)
def test_a_field_that_the_family_does_not_do_is_named(case: str, fields: dict[str, Any]) -> None:
    *_, name = fields
    with pytest.raises(UserError, match=name):
        spec_of(case, **fields)


@pytest.mark.parametrize(
    ("case", "fields", "said"),
    [
        ("bloom_7b", {"n_embed": 66}, "hidden_size 66 over num_attention_heads 4 is 16.5"),
        ("falcon_7b", {"hidden_size": 1}, "hidden_size 1 over"),
        ("gpt_neox_pythia", {"hidden_size": 1}, "hidden_size 1 over"),
        ("gpt2_small", {"n_embd": 31}, "hidden_size 31 over"),
        ("opt_125m", {"hidden_size": 31}, "hidden_size 31 over"),
        ("falcon_11b", {"num_kv_heads": 3}, "num_attention_heads 4 is not a multiple of .* 3"),
        ("chatglm_2_6b", {"multi_query_group_num": 3}, "4 is not a multiple of .* 3"),
    ],
)
def test_heads_that_do_not_fit_are_refused(case: str, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
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


@pytest.mark.parametrize(
    ("case", "epsilon"),
    [("ernie4_5_0_3b", 1e-5), ("ernie4_5_moe_21b", 1e-5), ("phi3_mini", 1e-5), ("llama_gqa", 1e-6)],
)
def test_an_epsilon_that_is_not_there_is_the_familys(case: str, epsilon: float) -> None:
    spec = spec_of(case, rms_norm_eps=...)
    assert spec.head.norm is not None
    assert spec.head.norm.epsilon == epsilon
    assert {block.norm for block in spec.blocks()} == {spec.head.norm}


@pytest.mark.parametrize("case", ["glm_9b", "glm4_9b"])
def test_a_glm_has_biases_where_nothing_is_said(case: str) -> None:
    spec = spec_of(case, attention_bias=...)
    assert {b.qkv_bias for b in spec.blocks() if isinstance(b, AttentionBlock)} == {True}


@pytest.mark.parametrize(
    ("fields", "normalized"),
    [
        ({"vocab_size": 64000}, False),
        ({"vocab_size": 125696}, True),
        ({"vocab_size": 64000, "z_loss_weight": 0}, True),
    ],
)
def test_a_baichuan_2_is_known_by_its_vocabulary_too(
    fields: dict[str, Any], normalized: bool
) -> None:
    for case in ("baichuan_7b", "baichuan_13b"):
        assert spec_of(case, **fields).head.normalized is normalized


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        ("THUDM/chatglm2-6b-32k", RopeSpec(method="linear", factor=16.0, rotary_dim=4)),
        ("THUDM/chatglm3-6b-32k", RopeSpec(theta=160000.0, rotary_dim=4)),
        (..., RopeSpec(theta=160000.0, rotary_dim=4)),
    ],
)
def test_a_rope_ratio_divides_the_positions_of_chatglm2_alone(name: Any, rope: RopeSpec) -> None:
    spec = spec_of("chatglm_2_6b", _name_or_path=name, rope_ratio=16, seq_length=32768)
    assert spec.ropes == (rope,)
    assert spec.max_context == 32768
    assert spec_of("chatglm_2_6b", _name_or_path=name, rope_ratio=1) == spec_of("chatglm_2_6b")


def test_the_first_qwen_stretches_positions_where_nothing_is_said() -> None:
    assert spec_of("qwen_7b", use_dynamic_ntk=..., use_logn_attn=...) == spec_of("qwen_7b")
    plain = spec_of("qwen_7b", use_dynamic_ntk=False, use_logn_attn=False)
    assert [rope.method for rope in plain.ropes] == ["default"]


@pytest.mark.parametrize("method", ["linear", "dynamic", "yarn"])
def test_a_stretched_context_needs_a_factor(method: str) -> None:
    with pytest.raises(UserError, match="rope_scaling lacks 'factor'"):
        spec_of("llama_gqa", rope_parameters=..., rope_scaling={"rope_type": method})


@pytest.mark.parametrize(
    ("scaling", "factor"),
    [
        ({"rope_type": "llama3"}, 8.0),
        ({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64}, 4.0),
    ],
)
def test_factors_that_follow_from_what_is_there(scaling: dict[str, Any], factor: float) -> None:
    changes = {"rope_parameters": ..., "max_position_embeddings": 256}
    assert spec_of("llama_gqa", rope_scaling=scaling, **changes).ropes[0].factor == factor


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"sliding_window": 16, "max_window_layers": 1}, (-1, 16)),
        ({"sliding_window": 16}, (-1, -1)),  # those from the 28th layer on
        ({"sliding_window": None, "max_window_layers": 0}, (-1, -1)),
    ],
)
def test_windows_of_qwen_2(fields: dict[str, Any], windows: tuple[int, ...]) -> None:
    changes = {"use_sliding_window": True, "layer_types": ..., "max_window_layers": ..., **fields}
    blocks = spec_of("qwen2", **changes).blocks()
    assert tuple(b.window for b in blocks if isinstance(b, AttentionBlock)) == windows


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


@pytest.mark.parametrize(
    ("case", "twice", "once"),
    [
        # rope_scaling in place of rope_parameters, whose base goes with them.
        ("llama_gqa", {"rope_parameters": GLOBAL, "rope_scaling": YARN}, {"rope_scaling": YARN}),
        (
            "smollm3_3b",
            {"rope_parameters": GLOBAL, "rope_scaling": LINEAR},
            {"rope_scaling": {**LINEAR, "rope_theta": 2e6}},
        ),
        (
            "llama_gqa",
            {"rope_parameters": GLOBAL, "rope_scaling": YARN, "rope_theta": 77777.0},
            {"rope_scaling": {**YARN, "rope_theta": 77777.0}},
        ),
        # The original context of the top level, whatever the kind.
        (
            "llama_gqa",
            {"rope_scaling": {**YARN, ORIGINAL: 64}, ORIGINAL: 32},
            {"rope_scaling": YARN},
        ),
        (
            "llama_gqa",
            {"rope_scaling": {**YARN, ORIGINAL: None}, ORIGINAL: 32},
            {"rope_scaling": YARN},
        ),
        (
            "llama_gqa",
            {"rope_scaling": {**LLAMA3, ORIGINAL: 16}, ORIGINAL: 32},
            {"rope_scaling": {**LLAMA3, ORIGINAL: 32}},
        ),
        (
            "llama_gqa",
            {"rope_scaling": {**LONGROPE, ORIGINAL: 16}, ORIGINAL: 32},
            {"rope_scaling": {**LONGROPE, ORIGINAL: 32}},
        ),
        (
            "phi3_longrope",
            {"rope_scaling": {**LONGROPE, **OF_8, ORIGINAL: 16}, ORIGINAL: ...},
            {"rope_scaling": {**LONGROPE, **OF_8}, ORIGINAL: 4096},  # Phi-3's where nothing is said
        ),
        # "dynamic" grows from max_position_embeddings on.
        ("llama_gqa", {"rope_scaling": {**DYNAMIC, ORIGINAL: 16}}, {"rope_scaling": DYNAMIC}),
        ("llama_gqa", {"rope_scaling": {**YARN, "type": "linear"}}, {"rope_scaling": YARN}),
        (
            "phi_2",
            {
                "rope_scaling": {**LINEAR, "partial_rotary_factor": 0.5},
                "partial_rotary_factor": 0.25,
            },
            {"rope_scaling": LINEAR, "partial_rotary_factor": 0.5},
        ),
        (
            "gemma3_text_1b",
            {"rope_parameters": {"full_attention": GLOBAL}, "rope_scaling": {"factor": 8.0}},
            {"rope_parameters": {"full_attention": {**GLOBAL, "factor": 8.0}}},
        ),
        (
            "gemma3_text_1b",
            {"rope_parameters": {"full_attention": GLOBAL}, "rope_local_base_freq": 7000.0},
            {
                "rope_parameters": {
                    "full_attention": GLOBAL,
                    "sliding_attention": {"rope_type": "default", "rope_theta": 7000.0},
                },
            },
        ),
        ("gpt_oss_20b", {"rope_parameters": GLOBAL}, {"rope_scaling": GLOBAL}),
    ],
)
def test_what_two_places_say_of_positions_is_taken_as_in_transformers(
    case: str, twice: dict[str, Any], once: dict[str, Any]
) -> None:
    bare = dict.fromkeys(("rope_parameters", "rope_scaling", "rope_theta"), ...)
    assert spec_of(case, **{**bare, **twice}).ropes == spec_of(case, **{**bare, **once}).ropes


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rope_scaling": YARN}, "does not say rope_theta 500000.0; write into rope_scaling"),
        (
            {"rope_parameters": YARN, ORIGINAL: 64},
            f"{ORIGINAL} is 64, and 32 in rope_parameters; the first counts",
        ),
        ({"rope_parameters": {**YARN, "type": "linear"}}, "rope_type is 'yarn', and type 'linear'"),
        ({"trained_by": "us"}, "keys that are not known here, and stay unread: 'trained_by'"),
    ],
)
def test_what_is_left_out_of_a_config_is_noted(fields: dict[str, Any], said: str) -> None:
    reader = reader_of("llama_gqa", **fields)
    checked_spec_of(reader)
    (note,) = reader.notes
    assert said in note
    assert str(reader.path) in note


@pytest.mark.parametrize(
    ("case", "fields"),
    [
        ("llama_gqa", {"attn_temperature": 0.5}),
        ("llama_gqa", {"logit_scale": 0.25}),
        ("llama_gqa", {"per_layer_config": {"0": {"head_dim": 8}}}),
        ("qwen2", {"is_causal": False}),
        ("qwen2", {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 2}),
        ("mistral_full", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("llama_gqa", {"rope_parameters": {**YARN, "attn_factor": 2.0}}),
        ("gemma3_4b", {"text_config": {"router_scale": 3.0}}),
    ],
)
def test_a_key_that_nobody_reads_and_may_change_results_is_refused(
    case: str, fields: dict[str, Any]
) -> None:
    if "text_config" in fields:
        text = reader_of(case).values["text_config"]
        fields = {"text_config": {**text, **fields["text_config"]}}
    *_, key = fields
    inner = (
        [*fields[key]][-1] if isinstance(fields[key], dict) and key != "per_layer_config" else key
    )
    with pytest.raises(
        UserError, match=rf"config\.json: .*{inner}' is .*take it out if it does not"
    ):
        checked_spec_of(reader_of(case, **fields))


@pytest.mark.parametrize(
    ("case", "fields"),
    [
        ("llama_gqa", {"logit_scale": 1.0, "residual_multiplier": 1, "use_qk_norm": False}),
        ("llama_gqa", {"attention_dropout": 0.1, "recompute": True, "use_flash_attention": True}),
        ("llama_gqa", {"is_causal": True, "layer_types": ["full_attention"], "sliding_window": 9}),
        ("llama_gqa", {"temperature": 0.5, "router_aux_loss_coef": 0.01, "pretraining_tp": 4}),
        ("starcoder2_window", {"activation_function": "gelu", "scale_attn_weights": True}),
        ("gpt_oss_20b", {"initial_context_length": 4096, "experts_per_token": 3}),
        ("ernie4_5_moe_21b", {"moe_capacity": [64, 64, 64], "moe_gate": "topk"}),
    ],
)
def test_keys_that_change_nothing_say_nothing(case: str, fields: dict[str, Any]) -> None:
    reader = reader_of(case, **fields)
    assert checked_spec_of(reader) == spec_of(case)
    assert reader.notes == []


@pytest.mark.parametrize("case", [path.parent.name for path in GOLDEN.glob("*/config.json")])
def test_every_key_of_the_goldens_is_known(case: str) -> None:
    reader = reader_of(case)
    checked_spec_of(reader)
    assert reader.notes == []


def test_whole_numbers_may_be_written_as_floats() -> None:
    fields = {"num_hidden_layers": 2.0, "eos_token_id": [2.0], "rope_parameters": YARN}
    as_floats = {**fields, "rope_parameters": {**YARN, ORIGINAL: 32.0}}
    assert spec_of("llama_gqa", **as_floats) == spec_of("llama_gqa", **fields)
    with pytest.raises(UserError, match=r"'num_hidden_layers' is 2\.5"):
        spec_of("llama_gqa", num_hidden_layers=2.5)


@pytest.mark.parametrize(
    ("case", "fields"),
    [
        ("gpt_neox_pythia", {"partial_rotary_factor": 0.25, "rotary_pct": 0.5}),
        ("gpt2_small", {"hidden_size": 32, "n_embd": 64}),
    ],
)
def test_two_names_of_one_number_must_agree(case: str, fields: dict[str, Any]) -> None:
    *_, name = fields
    with pytest.raises(UserError, match=f"'{name}' is .* as '.*' is"):
        spec_of(case, **fields)


def test_a_width_that_gpt_2_does_not_read_is_left_out() -> None:
    assert spec_of("gpt2_small", intermediate_size=96) == spec_of("gpt2_small")
