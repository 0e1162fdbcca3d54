"""config.json and tensor names as the published checkpoints of a family have them.

transformers 5 writes one spelling of its own; what people have is older: other words, fewer keys,
no prefix, buffers that no inference reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Published:
    """What the published checkpoints of a family have that transformers 5 writes otherwise."""

    renamed: Mapping[str, str] = field(default_factory=dict)  # keys of config.json
    dropped: tuple[str, ...] = ()  # keys that it lacks
    added: Mapping[str, Any] = field(default_factory=dict)  # keys that it has besides
    no_rope: bool = False  # none of the keys of rotary positions
    rope_kind: str = "rope_type"  # the key of rope_scaling that says which
    prefix: str = ""  # of tensors, that the published ones lack
    causal_mask: str = ""  # path of a layer's attention that has one among the tensors
    head: str = ""  # the tied matrix that is stored a second time, by the name of the head
    drafting: tuple[str, ...] = ()  # tensors of a layer behind the last one, which makes drafts


FAMILIES: dict[str, Published] = {
    "opt": Published(
        added={"prefix": "</s>"},
        dropped=("tie_word_embeddings",),
    ),
    "gpt2": Published(
        added={"n_ctx": 144, "task_specific_params": None},
        dropped=("n_inner", "tie_word_embeddings", "add_cross_attention"),
        prefix="transformer.",
        causal_mask="h.{}.attn",
    ),
    "bloom": Published(
        renamed={"hidden_size": "n_embed", "n_head": "num_attention_heads"},
        added={
            "attention_softmax_in_fp32": True,
            "bias_dropout_fusion": True,
            "masked_softmax_fusion": True,
            "n_inner": None,
            "offset_alibi": 100,
            "seq_length": 256,
            "skip_bias_add": True,
            "skip_bias_add_qkv": False,
        },
        dropped=("tie_word_embeddings",),
        prefix="transformer.",
    ),
    "gpt_neox": Published(
        renamed={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
        dropped=("rope_scaling", "attention_bias", "is_decoder"),
        causal_mask="gpt_neox.layers.{}.attention",
    ),
    "falcon": Published(
        added={"apply_residual_connection_post_layernorm": False},
        dropped=(
            "activation",
            "ffn_hidden_size",
            "max_position_embeddings",
            "num_ln_in_parallel_attn",
            "tie_word_embeddings",
        ),
        no_rope=True,
        head="transformer.word_embeddings.weight",
    ),
    "gemma": Published(  # "gelu" stands for the tanh approximation there
        added={"hidden_act": "gelu", "hidden_activation": None},
        dropped=("use_bidirectional_attention",),
    ),
    "gemma2": Published(
        added={"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"},
        dropped=("layer_types", "use_bidirectional_attention"),
    ),
    "gemma3_text": Published(
        added={"cache_implementation": "hybrid", "sliding_window_pattern": 3},
        dropped=("_sliding_window_pattern", "layer_types", "use_bidirectional_attention"),
    ),
    "phi3": Published(rope_kind="type"),
    "hunyuan_v1_dense": Published(
        added={
            "attention_head_dim": 16,
            "cla_share_factor": 2,
            "mlp_bias": False,
            "norm_type": "rms",
            "num_experts": 1,
            "pool_type": "last",
            "use_cla": False,
            "use_qk_norm": True,
            "use_rotary_pos_emb": True,
        },
        rope_kind="type",
    ),
    "phimoe": Published(added={"input_jitter_noise": 0.01}, rope_kind="type"),
    "olmo3": Published(dropped=("rope_local_base_freq",)),
    "minimax_m2": Published(
        added={
            "attn_type_list": [1, 1],
            "layernorm_full_attention_beta": 1.0,
            "layernorm_linear_attention_beta": 1.0,
            "layernorm_mlp_beta": 1.0,
            "mlp_intermediate_size": 64,
            "mtp_transformer_layers": 1,
            "num_mtp_modules": 3,
            "qk_norm_type": "per_layer",
            "rotary_dim": 16,
            "scoring_func": "sigmoid",
            "shared_intermediate_size": 0,
            "shared_moe_mode": "sigmoid",
            "use_qk_norm": True,
            "use_routing_bias": True,
        },
        dropped=("partial_rotary_factor",),
    ),
    "glm4_moe_lite": Published(
        added={
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 1,
            "topk_method": "noaux_tc",
        },
        dropped=("head_dim", "mlp_layer_types", "output_router_logits", "rope_interleave"),
        drafting=("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight"),
    ),
    "deepseek_v2": Published(
        added={"moe_layer_freq": 1, "scoring_func": "softmax", "seq_aux": True, "ep_size": 1},
        dropped=("head_dim", "mlp_bias", "output_router_logits", "qk_head_dim"),
        rope_kind="type",
    ),
    "deepseek_v3": Published(
        added={
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
        dropped=(
            *("head_dim", "num_mtp_layers", "output_router_logits", "qk_head_dim"),
            "rope_interleave",
        ),
        rope_kind="type",
        drafting=("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight"),
    ),
}


def publish_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json as the family's published ones are: keys sorted, rope_theta and torch_dtype."""
    family = FAMILIES.get(config["model_type"], Published())
    values = dict(config)
    rope = values.pop("rope_parameters", None)
    if rope is not None and not family.no_rope:
        values |= _old_rope(rope, family.rope_kind)
    values["torch_dtype"] = values.pop("dtype")
    del values["transformers_version"]
    values = {family.renamed.get(key, key): value for key, value in values.items()}
    values = {key: value for key, value in values.items() if key not in family.dropped}
    if values.get("num_kv_heads") == values.get("num_attention_heads"):
        values.pop("num_kv_heads", None)
    return dict(sorted((values | dict(family.added)).items()))


def _old_rope(rope: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The keys that transformers 4 wrote for rope_parameters."""
    if "full_attention" in rope:
        local = rope["sliding_attention"]["rope_theta"]
        return _old_rope(rope["full_attention"], kind) | {"rope_local_base_freq": local}
    scaling = dict(rope)
    values = {"rope_theta": scaling.pop("rope_theta")}
    for key in ("partial_rotary_factor", "original_max_position_embeddings"):
        if key in scaling and (
            key == "partial_rotary_factor" or scaling["rope_type"] == "longrope"
        ):
            values[key] = scaling.pop(key)
    scaling = dict(sorted({kind: scaling.pop("rope_type"), **scaling}.items()))
    values["rope_scaling"] = None if scaling[kind] == "default" else scaling
    return values


def publish_tensors(config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    """The tensors by their published names, with those that only old code read."""
    family = FAMILIES.get(config["model_type"], Published())
    tensors = {name.removeprefix(family.prefix): tensor for name, tensor in tensors.items()}
    if family.head:
        tensors.setdefault("lm_head.weight", tensors[family.head].clone())
    for name in family.drafting:
        behind = f"model.layers.{config['num_hidden_layers']}"
        tensors[f"{behind}.{name}"] = torch.ones(config["hidden_size"])
    if family.causal_mask:
        positions = config.get("n_positions", 144)
        mask = torch.ones(1, 1, positions, positions, dtype=torch.bool).tril()
        layers = config.get("n_layer", config.get("num_hidden_layers", 0))
        for layer in range(layers):
            attention = family.causal_mask.format(layer)
            tensors[f"{attention}.bias"] = mask.clone()
            tensors[f"{attention}.masked_bias"] = torch.tensor(-1e4)
    return tensors


def in_mxfp4(tensors: Tensors) -> Tensors:
    """The tensors, experts' matrices [E, in, out] as gpt-oss's are published.

    name_blocks [E, out, in / 32, 16], two e2m1 codes a byte, the lower bits first; name_scales
    [E, out, in / 32], exponents of 2 plus 127. Source: OCP Microscaling Formats, 2023.
    """
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    made = {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            made[name] = tensor
            continue
        groups = tensor.float().transpose(1, 2).unflatten(2, (-1, 32))
        exponents = groups.abs().amax(dim=-1).log2().floor() - 2  # 6 is 1.5 * 2^2
        scaled = groups / torch.exp2(exponents).unsqueeze(-1)
        codes = (scaled.abs().unsqueeze(-1) - magnitudes).abs().argmin(dim=-1) + 8 * (scaled < 0)
        made[f"{name}_blocks"] = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        made[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
    return made


FP8_BLOCK = 128
FP8_CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
}


def in_fp8_blocks(tensors: Tensors) -> Tensors:
    """The tensors, layers' matrices as DeepSeek publishes them: e4m3, and name_scale_inv.

    The scale [ceil(out / 128), ceil(in / 128)] is what codes are multiplied by. Blocks are made of
    sizes that differ by factors of 2 and 4, so that another block's scale shows.
    """
    made = {}
    for name, tensor in tensors.items():
        if not name.startswith("model.layers.") or "_proj" not in name or "eh_proj" in name:
            made[name] = tensor
            continue
        rows, columns = (torch.arange(-(-size // FP8_BLOCK)) for size in tensor.shape)
        size = torch.exp2(((rows[:, None] + 2 * columns) % 3 - 1).float())
        values = tensor.float() * _of_blocks(size, tensor.shape)
        scale = torch.zeros_like(size)
        for row in rows.tolist():
            for column in columns.tolist():
                block = values[_block(row), _block(column)]
                scale[row, column] = block.abs().max() / torch.finfo(torch.float8_e4m3fn).max
        made[name] = (values / _of_blocks(scale, tensor.shape)).to(torch.float8_e4m3fn)
        made[f"{name}_scale_inv"] = scale
    return made


def from_fp8_blocks(tensors: Tensors) -> Tensors:
    """What the codes stand for, float32, as `weight_dequant` of DeepSeek-V3's inference has it.

    transformers 5.24 divides rows evenly among scales, which is another matrix where 128 does not
    divide them, or refuses.
    """
    scales = {name for name in tensors if name.endswith("_scale_inv")}
    made = {name: tensor for name, tensor in tensors.items() if name not in scales}
    for scale in scales:
        name = scale.removesuffix("_scale_inv")
        made[name] = made[name].float() * _of_blocks(tensors[scale], made[name].shape)
    return made


def _block(index: int) -> slice:
    return slice(index * FP8_BLOCK, (index + 1) * FP8_BLOCK)


def _of_blocks(values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """One value a block, as one for each element of a matrix of this shape."""
    rows, columns = (torch.arange(size) // FP8_BLOCK for size in shape)
    return values[rows][:, columns]
