"""config.json of a GGUF file: its metadata under Hugging Face's names."""

from __future__ import annotations

import math
from array import array
from typing import Any

from predict.errors import UserError
from predict.gguf.architectures import architecture_of
from predict.gguf.metadata import Metadata
from predict.gguf.reader import GgufFile, GgufTensor

# Of tokens that end a text: an answer's end, a turn's, a message's.
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
MAX_FACTORS = 1 << 10  # frequencies of a head; the network's own limit is below


def config_of(file: GgufFile) -> dict[str, Any]:
    """What config.json says of the model. Raises UserError naming the key that is wrong."""
    data = Metadata(file)
    row = architecture_of(data)
    heads = data.whole("{arch}.attention.head_count")
    head_dim = data.optional("{arch}.attention.key_length")
    if head_dim != data.optional("{arch}.attention.value_length"):
        raise UserError(
            f"{file.path}: keys of {head_dim} values and values of "
            f"{data.optional('{arch}.attention.value_length')} do not go together in {data.arch}; "
            "use the model's safetensors files"
        )
    epsilon = "layer_norm_epsilon" if row.layer_norm else "layer_norm_rms_epsilon"
    values: dict[str, Any] = {
        "model_type": row.family(data),
        "vocab_size": data.tensor("token_embd.weight").shape[0],
        "hidden_size": data.whole("{arch}.embedding_length"),
        "num_hidden_layers": data.whole("{arch}.block_count"),
        "intermediate_size": data.whole("{arch}.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": data.whole("{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": data.whole("{arch}.context_length"),
        "layer_norm_eps" if row.layer_norm else "rms_norm_eps": data.real(
            f"{{arch}}.attention.{epsilon}"
        ),
        "sliding_window": data.whole("{arch}.attention.sliding_window", 0) or None,
        "tie_word_embeddings": not data.has_tensor("output.weight"),
        "bos_token_id": data.optional("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_ids(data),
        "rope_theta": data.real("{arch}.rope.freq_base", 10000.0),
        **_rotated(data, head_dim, heads),
        "rope_scaling": _scaling(data),
        **row.config(data),
    }
    return {name: value for name, value in values.items() if value is not None}


def end_ids(data: Metadata) -> list[int]:
    """The ids of tokens that end a text, each once."""
    found = (data.optional(f"tokenizer.ggml.{name}") for name in ENDS)
    return list(dict.fromkeys(i for i in found if i is not None))


def _rotated(data: Metadata, head_dim: int | None, heads: int) -> dict[str, Any]:
    """The share of a head that rotates, where it is less than all."""
    rotated = data.optional("{arch}.rope.dimension_count")
    whole = head_dim or data.whole("{arch}.embedding_length") // max(heads, 1)
    if rotated is None or rotated == whole or not whole:
        return {}
    return {"partial_rotary_factor": rotated / whole}


def _scaling(data: Metadata) -> dict[str, Any] | None:
    """rope_scaling: by the method's name, or by factors that a tensor has for each frequency."""
    original = data.optional("{arch}.rope.scaling.original_context_length")
    context = data.whole("{arch}.context_length")
    if data.has_tensor("rope_freqs.weight"):  # what Llama 3's factors come to
        factors = _factors(data, "rope_freqs.weight")
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": original or context,
        }
    if data.has_tensor("rope_factors_long.weight"):
        return {
            "rope_type": "longrope",
            "short_factor": _factors(data, "rope_factors_short.weight"),
            "long_factor": _factors(data, "rope_factors_long.weight"),
            "attention_factor": data.real("{arch}.rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": original or context,
        }
    old = data.real("{arch}.rope.scale_linear", 0.0)  # of before there were methods
    data.must_be("{arch}.rope.scaling.type", ("none", "linear", "yarn"))
    method = data.text("{arch}.rope.scaling.type", "linear" if old else "none")
    factor = data.real("{arch}.rope.scaling.factor", old or 1.0)
    if method == "none" or not factor:
        return None
    values = {"rope_type": method, "factor": factor}
    if method == "linear":
        return values
    temperature = data.real(
        "{arch}.rope.scaling.attn_factor", data.real("{arch}.rope.scaling.yarn_attn_factor", 1.0)
    )
    return {
        **values,
        "original_max_position_embeddings": original or context,
        "beta_fast": data.real("{arch}.rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": data.real("{arch}.rope.scaling.yarn_beta_slow", 1.0),
        "attention_factor": temperature * (1 + 0.1 * math.log(max(factor, 1.0))),
    }


def _factors(data: Metadata, name: str) -> list[float]:
    """The values of a small tensor."""
    tensor: GgufTensor = data.tensor(name)
    count = math.prod(tensor.shape)
    if tensor.kind != "F32" or count > MAX_FACTORS:
        raise UserError(
            f"{data.file.path}: {name} has {count} values of type {tensor.kind} (allowed: F32, "
            f"{MAX_FACTORS} at most); convert the model again"
        )
    values = array("f")
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        values.frombytes(file.read(tensor.num_bytes))
    return values.tolist()
