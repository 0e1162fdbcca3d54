"""A GGUF file of random weights for llama.cpp, from a network's shape."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from predict.bench.cpu_peer.shapes import experts_of, plain_attention
from predict.nn.spec import DecoderSpec

if TYPE_CHECKING:
    import gguf
    import numpy.typing as npt

# Rows that differ; a longer matrix has them again and again, which takes no time to make. More than
# most hidden sizes, and a prime: experts differ, and hidden states do not become alike.
DISTINCT_ROWS = 4099
FILE_TYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q8_0": 7,
    "BF16": 32,
}  # for the file's own description


def architecture(spec: DecoderSpec) -> str:
    """llama.cpp's name for a network like this."""
    first = plain_attention(spec)[0]
    if first.post_norm:
        return "gemma3"
    if first.qk_norm:
        return "qwen3" if experts_of(spec) is None else "qwen3moe"
    return "qwen2" if first.qkv_bias else "llama"


def tensors(
    spec: DecoderSpec, layer_type: str, head_type: str, dense_type: str
) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name, shape with the inner dimension last, type) of every tensor.

    dense_type: of an embedding that is not the head's too.
    """
    hidden, experts = spec.hidden_size, experts_of(spec)
    queries, keys = (heads * spec.head_dim for heads in (spec.num_heads, spec.num_kv_heads))
    table = (spec.vocab_size, hidden)
    if spec.tie_word_embeddings:
        yield "token_embd.weight", table, head_type
    else:
        yield "token_embd.weight", table, dense_type
        yield "output.weight", table, head_type
    yield "output_norm.weight", (hidden,), "F32"
    if spec.ropes[0].method == "llama3":
        yield "rope_freqs.weight", ((spec.ropes[0].rotary_dim or spec.head_dim) // 2,), "F32"
    for layer in range(spec.num_layers):
        start = f"blk.{layer}"
        yield f"{start}.attn_norm.weight", (hidden,), "F32"
        yield f"{start}.ffn_norm.weight", (hidden,), "F32"
        for name, size in (("attn_q", queries), ("attn_k", keys), ("attn_v", keys)):
            yield f"{start}.{name}.weight", (size, hidden), layer_type
            if plain_attention(spec)[0].qkv_bias:
                yield f"{start}.{name}.bias", (size,), "F32"
        if plain_attention(spec)[0].qk_norm:
            yield f"{start}.attn_q_norm.weight", (spec.head_dim,), "F32"
            yield f"{start}.attn_k_norm.weight", (spec.head_dim,), "F32"
        yield f"{start}.attn_output.weight", (hidden, queries), layer_type
        if plain_attention(spec)[0].post_norm:
            yield f"{start}.post_attention_norm.weight", (hidden,), "F32"
            yield f"{start}.post_ffw_norm.weight", (hidden,), "F32"
        if experts is None:
            count, inner, ending = [], spec.intermediate_size, ""
        else:
            count, inner, ending = [experts.router.num_experts], experts.intermediate_size, "_exps"
            yield f"{start}.ffn_gate_inp.weight", (*count, hidden), "F32"
        yield f"{start}.ffn_gate{ending}.weight", (*count, inner, hidden), layer_type
        yield f"{start}.ffn_up{ending}.weight", (*count, inner, hidden), layer_type
        yield f"{start}.ffn_down{ending}.weight", (*count, hidden, inner), layer_type


def write_gguf(
    path: Path, spec: DecoderSpec, layer_type: str, head_type: str, dense_type: str
) -> None:
    """Writes the file; no vocabulary is in it, for tokens go in and out as ids."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture(spec))
    writer.add_context_length(spec.max_context)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_dimension_count(spec.ropes[0].rotary_dim or spec.head_dim)
    writer.add_rope_freq_base(spec.ropes[0].theta)
    _add_windows(writer, spec)
    if (experts := experts_of(spec)) is not None:
        writer.add_expert_count(experts.router.num_experts)
        writer.add_expert_used_count(experts.router.top_k)
        writer.add_expert_feed_forward_length(experts.intermediate_size)
    norm = spec.head.norm
    assert norm is not None
    writer.add_layer_norm_rms_eps(norm.epsilon)
    writer.add_vocab_size(spec.vocab_size)
    writer.add_file_type(FILE_TYPES[layer_type])
    writer.add_tokenizer_model("no_vocab")
    listed = list(tensors(spec, layer_type, head_type, dense_type))
    for name, shape, kind in listed:
        stored = _stored_shape(shape, kind)
        numpy_type = _numpy_type(kind)
        num_bytes = int(np.prod(stored)) * np.dtype(numpy_type).itemsize
        raw = None if kind in ("F32", "F16") else gguf.GGMLQuantizationType[kind]
        writer.add_tensor_info(name, stored, np.dtype(numpy_type), num_bytes, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    patterns: dict[tuple[int, str], Any] = {}
    for _, shape, kind in listed:
        writer.write_tensor_data(_values(shape, kind, patterns))
    writer.close()


def _add_windows(writer: gguf.GGUFWriter, spec: DecoderSpec) -> None:
    """Which layers see a window, how wide it is, and the base of their rotary table."""
    windows = [block for block in plain_attention(spec) if block.window > 0]
    if windows:
        writer.add_sliding_window(windows[0].window)
        writer.add_sliding_window_pattern([block.window > 0 for block in plain_attention(spec)])
        writer.add_rope_freq_base_swa(spec.ropes[windows[0].positions.table].theta)


def _numpy_type(kind: str) -> type:
    return {"F32": np.float32, "F16": np.float16}.get(kind, np.uint8)


def _stored_shape(shape: tuple[int, ...], kind: str) -> tuple[int, ...]:
    """As the bytes lie: rows of blocks for what NumPy has no type for."""
    if kind in ("F32", "F16"):
        return shape
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return (*shape[:-1], shape[-1] // block * size)


def _values(
    shape: tuple[int, ...], kind: str, patterns: dict[tuple[int, str], Any]
) -> npt.NDArray[Any]:
    """Ones for norms, zeros for biases would do as well; random rows for matrices."""
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    import gguf

    inner = shape[-1]
    key = (inner, kind)
    if key not in patterns:
        generator = np.random.default_rng(len(patterns))
        rows = generator.standard_normal((DISTINCT_ROWS, inner), np.float32)
        quantized = gguf.quants.quantize(rows * 0.02, gguf.GGMLQuantizationType[kind])
        patterns[key] = quantized
    pattern = patterns[key]
    return np.resize(pattern, (*shape[:-1], pattern.shape[1]))
