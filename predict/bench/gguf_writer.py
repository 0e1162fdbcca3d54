"""A GGUF file of random weights, from a network's shape: one checkpoint for two engines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.errors import UserError, one_of
from predict.loading.model import read_spec
from predict.nn.kinds.attention import AttentionBlock
from predict.nn.kinds.delta_net import DeltaNetBlock
from predict.nn.kinds.experts import ExpertBlock
from predict.nn.spec import DecoderSpec

# Rows that differ; a longer matrix has them again and again, which takes no time to make. More than
# most hidden sizes, and a prime: experts differ, and hidden states do not become alike.
DISTINCT_ROWS = 4099
# Ours -> llama.cpp's name for a network like this.
ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "qwen3_5_text": "qwen35",
}
# Type of a layer's matrices -> the LM head's, and that of an embedding of its own.
TYPES = {
    "F32": ("F32", "F32"),
    "F16": ("F16", "F16"),
    "BF16": ("BF16", "BF16"),
    "Q8_0": ("Q8_0", "BF16"),
    "Q4_0": ("Q8_0", "BF16"),
}
DECAYS = ".ssm_a"  # a tensor's ending: numbers below 0
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32}


def write_gguf(path: Path, spec: DecoderSpec, layer_type: str) -> None:
    """Writes the file; no vocabulary is in it, for tokens go in and out as ids.

    Raises UserError for a network that the file would not describe: ours reads it again.
    """
    import gguf

    if spec.model_type not in ARCHITECTURES:
        raise one_of("shapes", spec.model_type, tuple(ARCHITECTURES))
    experts = _experts_of(spec)
    writer = gguf.GGUFWriter(path, ARCHITECTURES[spec.model_type])
    writer.add_context_length(spec.max_context)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_dimension_count(spec.rotary_dims[0])
    writer.add_rope_freq_base(spec.ropes[0].theta)
    attention = _attention_of(spec)
    if windows := [block for block in attention if block.window > 0]:
        writer.add_sliding_window(windows[0].window)
        writer.add_sliding_window_pattern([block.window > 0 for block in attention])
        writer.add_rope_freq_base_swa(spec.ropes[windows[0].positions.table].theta)
    if delta := next(spec.blocks_of(DeltaNetBlock), None):
        writer.add_ssm_conv_kernel(delta.conv_width)
        writer.add_ssm_state_size(delta.key_dim)
        writer.add_ssm_group_count(delta.num_key_heads)
        writer.add_ssm_time_step_rank(delta.num_value_heads)
        writer.add_ssm_inner_size(delta.value_size)
        has_state = [bool(states) for states in spec.states]
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", has_state)
        writer.add_rope_dimension_sections([spec.rotary_dims[0] // 2, 0, 0, 0])  # of a text
    if experts is not None:
        writer.add_expert_count(experts.router.num_experts)
        writer.add_expert_used_count(experts.router.top_k)
        writer.add_expert_feed_forward_length(experts.intermediate_size)
    assert spec.head.norm is not None
    writer.add_layer_norm_rms_eps(spec.head.norm.epsilon)
    writer.add_vocab_size(spec.vocab_size)
    writer.add_file_type(FILE_TYPES[layer_type])
    writer.add_tokenizer_model("no_vocab")
    patterns: dict[tuple[int, str], npt.NDArray[Any]] = {}
    stored = []
    for name, shape, kind in tensors(spec, layer_type):
        pattern = _pattern(shape, kind, patterns) * (-1 if name.endswith(DECAYS) else 1)
        sizes = (*shape[:-1], pattern.shape[1])
        raw = None if kind in ("F32", "F16") else gguf.GGMLQuantizationType[kind]
        num_bytes = math.prod(sizes) * pattern.itemsize
        writer.add_tensor_info(name, sizes, pattern.dtype, num_bytes, raw)
        stored.append((pattern, sizes))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for pattern, sizes in stored:
        writer.write_tensor_data(np.resize(pattern, sizes))
    writer.close()
    if read_spec(path)[0].layers != spec.layers:
        raise UserError(
            f"--shapes: the layers of this {spec.model_type} are not those that a GGUF file of "
            f"{ARCHITECTURES[spec.model_type]} stands for; name a shape whose config.json has the "
            "family's own settings"
        )


def tensors(spec: DecoderSpec, layer_type: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name, shape with the inner dimension last, type) of every tensor."""
    hidden, experts, attention = spec.hidden_size, _experts_of(spec), _attention_of(spec)[0]
    head_type, dense_type = TYPES[layer_type]
    table = (spec.vocab_size, hidden)
    if spec.tie_word_embeddings:
        yield "token_embd.weight", table, head_type
    else:
        yield "token_embd.weight", table, dense_type
        yield "output.weight", table, head_type
    yield "output_norm.weight", (hidden,), "F32"
    if spec.ropes[0].method == "llama3":
        yield "rope_freqs.weight", (spec.rotary_dims[0] // 2,), "F32"
    behind = "post_attention_norm" if any(spec.states) else "ffn_norm"
    deltas = spec.blocks_of(DeltaNetBlock)
    for layer, states in enumerate(spec.states):
        start = f"blk.{layer}"
        yield f"{start}.attn_norm.weight", (hidden,), "F32"
        yield f"{start}.{behind}.weight", (hidden,), "F32"
        if states:
            yield from _delta_net(next(deltas), start, hidden, layer_type)
        else:
            yield from _attention(attention, start, hidden, layer_type)
        count: tuple[int, ...] = ()
        inner, ending = spec.intermediate_size, ""
        if experts is not None:
            count, inner, ending = (experts.router.num_experts,), experts.intermediate_size, "_exps"
            yield f"{start}.ffn_gate_inp.weight", (*count, hidden), "F32"
        yield f"{start}.ffn_gate{ending}.weight", (*count, inner, hidden), layer_type
        yield f"{start}.ffn_up{ending}.weight", (*count, inner, hidden), layer_type
        yield f"{start}.ffn_down{ending}.weight", (*count, hidden, inner), layer_type


def _attention(
    block: AttentionBlock, start: str, hidden: int, layer_type: str
) -> Iterator[tuple[str, tuple[int, ...], str]]:
    queries, keys, _ = block.slot_sizes
    for name, size in (("attn_q", queries), ("attn_k", keys), ("attn_v", keys)):
        yield f"{start}.{name}.weight", (size, hidden), layer_type
        if block.qkv_bias:
            yield f"{start}.{name}.bias", (size,), "F32"
    if block.qk_norm:
        yield f"{start}.attn_q_norm.weight", (block.head_dim,), "F32"
        yield f"{start}.attn_k_norm.weight", (block.head_dim,), "F32"
    yield f"{start}.attn_output.weight", (hidden, block.q_size), layer_type
    if block.post_norm:
        yield f"{start}.post_attention_norm.weight", (hidden,), "F32"
        yield f"{start}.post_ffw_norm.weight", (hidden,), "F32"


def _delta_net(
    block: DeltaNetBlock, start: str, hidden: int, layer_type: str
) -> Iterator[tuple[str, tuple[int, ...], str]]:
    heads = block.num_value_heads
    yield f"{start}.attn_qkv.weight", (block.conv_size, hidden), layer_type
    yield f"{start}.attn_gate.weight", (block.value_size, hidden), layer_type
    for name in ("ssm_alpha", "ssm_beta"):
        yield f"{start}.{name}.weight", (heads, hidden), TYPES[layer_type][0]
    yield f"{start}.ssm_conv1d.weight", (block.conv_size, block.conv_width), "F32"
    yield f"{start}{DECAYS}", (heads,), "F32"
    yield f"{start}.ssm_dt.bias", (heads,), "F32"
    yield f"{start}.ssm_norm.weight", (block.value_dim,), "F32"
    yield f"{start}.ssm_out.weight", (hidden, block.value_size), layer_type


def _attention_of(spec: DecoderSpec) -> list[AttentionBlock]:
    return list(spec.blocks_of(AttentionBlock))


def _experts_of(spec: DecoderSpec) -> ExpertBlock | None:
    return next(spec.blocks_of(ExpertBlock), None)


def _pattern(
    shape: tuple[int, ...], kind: str, patterns: dict[tuple[int, str], npt.NDArray[Any]]
) -> npt.NDArray[Any]:
    """Rows [N, bytes or values] to repeat: ones for norms and biases, else random blocks."""
    import gguf

    if len(shape) == 1:
        return np.ones((1, *shape), np.float32)
    key = (shape[-1], kind)
    if key not in patterns:
        generator = np.random.default_rng(len(patterns))
        rows = generator.standard_normal((DISTINCT_ROWS, shape[-1]), np.float32)
        patterns[key] = gguf.quants.quantize(rows * 0.02, gguf.GGMLQuantizationType[kind])
    return patterns[key]
