"""The networks that are measured: sizes from predict.bench.operators, or a folder's config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from predict.bench.operators import SHAPES
from predict.errors import UserError, one_of
from predict.nn.blocks import LinearSlot
from predict.nn.spec import DecoderSpec

# Layers of the shapes; all have a separate LM head, no biases, and no scaled positions.
NUM_LAYERS = {"qwen2.5-0.5b": 24, "llama-1b": 16, "llama-8b": 32}
MAX_POSITION = 131072
# Fields of a spec by which a file says whose numbers it has.
SIZES = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_layers"),
    *("num_heads", "num_kv_heads", "head_dim", "tie_word_embeddings"),
)


def config_of(shape: str) -> dict[str, Any]:
    """The config.json of a shape of the table."""
    sizes = SHAPES[shape]
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": NUM_LAYERS[shape],
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": MAX_POSITION,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }


def name_of(shape: str) -> str:
    """What a file of numbers calls a shape: its name in the table, or that of its folder."""
    return shape if shape in NUM_LAYERS else Path(shape).resolve().name


def folder_of(shape: str, scratch: Path) -> Path:
    """A folder with the shape's config.json: the one that it names, or a new one in `scratch`.

    Raises UserError for what is neither in the table nor a folder.
    """
    if shape in NUM_LAYERS:
        folder = scratch / shape
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config_of(shape)), encoding="utf-8")
        return folder
    if not (Path(shape) / "config.json").is_file():
        raise one_of("shapes", shape, (*NUM_LAYERS, "a folder with a config.json"))
    return Path(shape)


def sizes_of(spec: DecoderSpec) -> dict[str, Any]:
    """What a file of numbers says of the network."""
    return {name: getattr(spec, name) for name in SIZES}


def num_parameters(spec: DecoderSpec) -> int:
    """All elements of a network's weights, by which both sides must agree on its sizes."""
    head = spec.vocab_size * spec.hidden_size
    embedding = 0 if spec.tie_word_embeddings else head
    attention = spec.attention[0]
    biases = attention.qkv_size if attention.qkv_bias else 0
    norms = 2 * spec.hidden_size + (2 * spec.head_dim if attention.qk_norm else 0)
    per_layer = biases + norms
    return spec.num_matmul_weights + embedding + spec.num_layers * per_layer + spec.hidden_size


def check_peer_has(spec: DecoderSpec, shape: str) -> None:
    """Raises UserError for a network that gguf_file has no layout for."""
    (rope,), known = spec.ropes, ("llama", "mistral", "qwen2", "qwen3")
    lacking = {
        f"layers of {spec.model_type}": spec.model_type not in known,
        "biases of the output projection or the MLP": any(
            slot.has_bias and slot.name != "qkv"
            for block in spec.blocks()
            for slot in block.slots(spec.hidden_size)
            if isinstance(slot, LinearSlot)
        ),
        "sliding windows": any(block.window > 0 for block in spec.attention),
        f"{rope.method} positions": rope.method not in ("default", "llama3"),
        "rows that are not of whole blocks of 32": spec.hidden_size % 32
        or spec.intermediate_size % 32,
    }
    for what, has in lacking.items():
        if has:
            raise UserError(
                f"--shapes {shape} has {what}, which is not measured beside llama.cpp "
                f"(allowed: {', '.join(NUM_LAYERS)}, and folders of a Llama, Qwen2 or Qwen3)"
            )
