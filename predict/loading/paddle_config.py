"""config.json where a checkpoint goes from Hugging Face's layout to PaddleNLP's, or back.

A field that the other library calls otherwise is added beside its first name: each library finds
its own. Only a family that the other one calls otherwise changes its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from predict.loading.baichuan import baichuan_values, llama_values

# By Hugging Face's model_type: its fields, and what PaddleNLP calls them.
FIELDS: dict[str, tuple[tuple[str, str], ...]] = {
    "opt": (
        ("do_layer_norm_before", "normalize_before"),
        ("activation_function", "hidden_act"),
        ("ffn_dim", "intermediate_size"),
    ),
    "bloom": (("num_attention_heads", "n_head"), ("n_embed", "hidden_size")),
    "chatglm": (
        ("num_layers", "num_hidden_layers"),
        ("padded_vocab_size", "vocab_size"),
        ("seq_length", "max_sequence_length"),
    ),
}
CHATGLM2, CHATGLM2_CLASS = "chatglm_v2", "ChatGLMv2ForCausalLM"
HUGGING_FACE_CHATGLM = "ChatGLMModel"
MULTI_QUERY = "multi_query_attention"  # by which ChatGLM2 is told from the first one


def is_alibi_llama(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of PaddleNLP's Llama in Baichuan 13B's shape."""
    return values.get("model_type") == "llama" and values.get("alibi") is True


def as_paddle_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Hugging Face's config.json, for PaddleNLP."""
    model_type = values.get("model_type")
    if model_type == "baichuan":
        return llama_values(values)
    made = _filled(values, FIELDS.get(str(model_type), ()))
    if model_type == "chatglm" and values.get(MULTI_QUERY) is True:
        made |= {"model_type": CHATGLM2, "architectures": [CHATGLM2_CLASS]}
    return made


def as_hugging_face_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """PaddleNLP's config.json, for Hugging Face's library."""
    if is_alibi_llama(values):
        return baichuan_values(values)
    made = dict(values)
    if values.get("model_type") == CHATGLM2:
        made |= {
            "model_type": "chatglm",
            "architectures": [HUGGING_FACE_CHATGLM],
            MULTI_QUERY: True,
        }
    fields = FIELDS.get(str(made.get("model_type")), ())
    return _filled(made, tuple((theirs, ours) for ours, theirs in fields))


def _filled(values: Mapping[str, Any], pairs: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """The fields, and the second one of each pair where only the first one is there."""
    added = {
        new: values[known] for known, new in pairs if known in values and values.get(new) is None
    }
    return {**values, **added}
