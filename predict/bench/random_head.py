"""A head of EAGLE-3 of random weights, of the shape that published ones have for a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from predict.errors import UserError
from predict.loading.safetensors_writer import as_stored, write, write_json
from predict.system.files import read_json

DRAFT_VOCAB_SIZE = 32_000  # of published heads, where the model has more
COPIED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rope_theta", "hidden_act"),
)


def write_head(model: str, folder: Path, seed: int) -> str:
    """Writes a head for the model of this folder, a Llama's kind, in bfloat16; its folder."""
    given: dict[str, Any] = read_json(Path(model) / "config.json")
    if not {*COPIED[:4]} <= given.keys():
        raise UserError(
            f"{model}: config.json lacks one of {', '.join(COPIED[:4])}, which a made-up head of "
            "EAGLE-3 needs; give a head by --draft_model_name_or_path"
        )
    hidden, inner, heads = (given[n] for n in COPIED[1:4])
    head_dim = given.get("head_dim") or hidden // heads
    rows = min(DRAFT_VOCAB_SIZE, given["vocab_size"])
    keys = head_dim * (given.get("num_key_value_heads") or heads)
    at = "midlayer."
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    shapes: dict[str, tuple[int, ...]] = {f"{at}{name}.weight": (hidden,) for name in norms}
    shapes |= {
        "norm.weight": (hidden,),
        "fc.weight": (hidden, 3 * hidden),
        f"{at}self_attn.q_proj.weight": (head_dim * heads, 2 * hidden),
        f"{at}self_attn.k_proj.weight": (keys, 2 * hidden),
        f"{at}self_attn.v_proj.weight": (keys, 2 * hidden),
        f"{at}self_attn.o_proj.weight": (hidden, head_dim * heads),
        f"{at}mlp.gate_proj.weight": (inner, hidden),
        f"{at}mlp.up_proj.weight": (inner, hidden),
        f"{at}mlp.down_proj.weight": (hidden, inner),
        "lm_head.weight": (rows, hidden),
    }
    values = 0.02 * np.random.default_rng(seed).standard_normal(1 << 20, np.float32)
    made: dict[str, Any] = {
        name: ("BF16", np.resize(as_stored(values if len(size) > 1 else np.ones(1), "BF16"), size))
        for name, size in shapes.items()
    }
    # Tokens from all over the vocabulary, in its order.
    ids = np.linspace(0, given["vocab_size"] - 1, rows).astype(np.int64)
    made["d2t"] = ("I64", ids - np.arange(rows))
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "model.safetensors", made)
    config = {name: given[name] for name in COPIED if name in given}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    write_json(folder / "config.json", {**config, "num_hidden_layers": 1, "draft_vocab_size": rows})
    return str(folder)
