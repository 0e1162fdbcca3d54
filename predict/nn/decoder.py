"""The decoder: its weights as a tree of frozen records, and one forward pass over them.

T tokens, H hidden size, L logit rows. `backend` is the module `predict.ops.compiled` or
`predict.ops.plain`: both offer the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from predict.nn.inputs import ForwardInputs, LayerCache

if TYPE_CHECKING:
    from paddle import Tensor

Tree = TypeVar("Tree")


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + bias; `tensors` is what the scheme made of W [out_features, in_features]."""

    scheme: str
    tensors: tuple[Tensor, ...]
    bias: Tensor | None  # [out_features]
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class Attention:
    """Weights and shape of one attention block."""

    norm: Tensor  # [H]
    qkv: Linear  # queries, keys, values: (num_heads + 2 num_kv_heads) * head_dim outputs
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    out: Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    softmax_scale: float
    window: int  # visible tokens, -1 all
    kv_format: str = "dense"  # of its cache, see predict.nn.cache_formats


@dataclass(frozen=True, slots=True)
class Mlp:
    """Weights of one gated MLP block: down(silu(gate(x)) * up(x))."""

    norm: Tensor  # [H]
    gate_up: Linear  # gate's outputs, then up's
    down: Linear
    intermediate_size: int
    norm_eps: float


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer."""

    attention: Attention
    mlp: Mlp


@dataclass(frozen=True, slots=True)
class Decoder:
    """All weights of a network. `embedding` is None where the LM head's matrix serves for both."""

    embedding: Tensor | None  # [vocab_size, H]
    layers: tuple[Layer, ...]
    final_norm: Tensor  # [H]
    head: Linear
    norm_eps: float
    rope: Tensor  # [positions, rotary_dim] float32: cosines, then sines


def forward(
    backend: ModuleType,
    decoder: Decoder,
    inputs: ForwardInputs,
    caches: Sequence[LayerCache],
    tree_mask: Tensor | None = None,
    bound: Callable[..., Tensor] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Returns float32 logits [L, vocab_size] and the caches, which are updated in place.

    caches: the tensors of each layer, see predict.nn.cache_formats. They are also outputs because
    an exported program drops an input that no output depends on. tree_mask: see the operator
    paged_attention.
    At least one logit row is wanted. As many as tokens are all of them, as many as spans are the
    last ones of each. bound: the backend's BoundLayers of decoder.layers and caches, who are then
    not returned.
    """
    import paddle

    hidden = backend.embedding(inputs.token_ids, decoder.embedding, decoder.head)
    layers, rope = decoder.layers, decoder.rope
    written: list[Tensor] = []
    # A traced program serves both kinds of steps; it takes the way that is right for both.
    is_decode = paddle.in_dynamic_mode() and len(inputs.token_ids) == len(inputs.logit_indices)
    if is_decode and bound is not None:
        hidden = bound(hidden, rope, inputs, tree_mask)
    elif is_decode:
        hidden, written = backend.layers(hidden, layers, caches, rope, inputs, tree_mask)
    else:
        on_gpu = paddle.get_device() != "cpu"
        last = len(layers) - 1
        # A GPU is at work on the first layers while the host gathers the tensors of the others.
        borders = [0, 1, 4, last] if last > 4 and on_gpu else [0, last]
        for first, end in pairwise(borders if last else ()):
            hidden, its_written = backend.layers(
                hidden, layers[first:end], caches[first:end], rope, inputs, tree_mask
            )
            written += its_written
        # Behind the last cache write only the rows that logits are wanted of are of use.
        rows, attended = inputs.logit_indices, (layers[-1].attention, caches[-1], rope, inputs)
        if on_gpu:
            hidden, last_written = backend.attention_block(hidden, *attended, tree_mask, rows)
        else:
            hidden, last_written = backend.attention_block(hidden, *attended, tree_mask)
            hidden = backend.embedding(rows, hidden, decoder.head)
        written += last_written
        hidden = backend.mlp_block(hidden, layers[-1].mlp)
    logits = backend.logits(hidden, decoder.final_norm, decoder.head, None, decoder.norm_eps)
    return logits, written


def layer_schemes(decoder: Decoder) -> str:
    """The schemes of the layers' linears, joined by commas; "dense" beside others is left out."""
    names = set()
    for layer in decoder.layers:
        linears = (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
        # A folded norm is the GPU's way of storing a dense one.
        names |= {linear.scheme.removesuffix("_folded") for linear in linears}
    return ",".join(sorted(names - {"dense"})) or "dense"


def map_tensors(tree: Tree, change: Callable[[str, Tensor], Any], path: str = "") -> Tree:
    """A copy of a weight tree with each tensor replaced by `change(path, tensor)`.

    Paths are field names and indices joined by "_", unique within the tree.
    """
    from paddle import Tensor

    def visit(value: Any, at: str) -> Any:
        if isinstance(value, Tensor):
            return change(at, value)
        if isinstance(value, tuple):
            return tuple(visit(item, f"{at}_{i}") for i, item in enumerate(value))
        if is_dataclass(value):
            return map_tensors(value, change, at)
        return value

    names = [f.name for f in fields(tree)]  # type: ignore[arg-type]
    changed = {n: visit(getattr(tree, n), f"{path}_{n}" if path else n) for n in names}
    return replace(tree, **changed)  # type: ignore[type-var]
