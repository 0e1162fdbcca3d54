"""config.json of a GGUF file: its metadata under Hugging Face's names."""

from __future__ import annotations

from array import array
from typing import Any

from predict.errors import UserError
from predict.gguf.architectures import architecture_of
from predict.gguf.metadata import GgufMetadata
from predict.gguf.reader import GgufFile
from predict.gguf.rope import scaling_of

# Of tokens that end a text: an answer's end, a turn's, a message's.
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def config_of(file: GgufFile) -> dict[str, Any]:
    """What config.json says of the model. Raises UserError naming the key that is wrong."""
    data = GgufMetadata(file)
    row = architecture_of(data)
    heads = data.whole("{arch}.attention.head_count")
    head_dim = None if row.latent else data.optional("{arch}.attention.key_length")
    if not row.latent and head_dim != data.optional("{arch}.attention.value_length"):
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
        "intermediate_size": _inner_size(data),
        "num_attention_heads": heads,
        "num_key_value_heads": _key_heads(data, heads),
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
        **({} if row.latent else _rotated(data, head_dim, heads)),
        "rope_scaling": scaling_of(data),
        **row.config(data),
    }
    data.must_be("{arch}.attention.causal", (True,))
    data.check_unread()
    return {name: value for name, value in values.items() if value is not None}


def _inner_size(data: GgufMetadata) -> int | None:
    """Of MLPs; files whose layers all have experts may lack it."""
    key = "{arch}.feed_forward_length"
    return data.optional(key) if "{arch}.expert_feed_forward_length" in data else data.whole(key)


def _key_heads(data: GgufMetadata, heads: int) -> int:
    """Of layers that have some: those with a state have 0."""
    key = "{arch}.attention.head_count_kv"
    value = data.file.metadata.get(data.key(key))
    if isinstance(value, array):
        found = {*value} - {0}
        if len(found) == 1:
            return int(found.pop())
    return data.whole(key, heads)


def end_ids(data: GgufMetadata) -> list[int]:
    """The ids of tokens that end a text, each once."""
    found = (data.optional(f"tokenizer.ggml.{name}") for name in ENDS)
    return list(dict.fromkeys(i for i in found if i is not None))


def _rotated(data: GgufMetadata, head_dim: int | None, heads: int) -> dict[str, Any]:
    """The share of a head that rotates, where it is less than all."""
    rotated = data.optional("{arch}.rope.dimension_count")
    whole = head_dim or data.whole("{arch}.embedding_length") // max(heads, 1)
    if rotated is None or rotated == whole or not whole:
        return {}
    return {"partial_rotary_factor": rotated / whole}
