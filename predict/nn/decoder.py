"""The decoder: its weights as a tree of frozen records, and one forward pass over them.

T tokens, H hidden size, L logit rows. `backend` is the module `predict.ops.compiled` or
`predict.ops.plain`: both offer the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from predict.config.schemes import unfolded
from predict.nn.blocks import AttentionBlock, ExpertBlock, LatentAttentionBlock, MlpBlock
from predict.nn.inputs import LayerCache, RowKind, StepInputs
from predict.nn.spec import EmbeddingSpec, HeadSpec

if TYPE_CHECKING:
    from paddle import Tensor

Tree = TypeVar("Tree")


@dataclass(frozen=True, slots=True)
class LowRankPages:
    """Adapters' additions to a linear: x A^T B over the pages of a row's adapter.

    In the model's dtype; b includes the scales. Each part of the outputs has its own A. For the
    CPU's compiled operators both are packed (predict.adapters.weights.packed).
    """

    a: Tensor  # [pages, parts, PAGE_RANKS, in_features]
    b: Tensor  # [pages, PAGE_RANKS, out_features]
    part_sizes: tuple[int, ...]  # output features


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + bias; `tensors` is what the scheme made of W [out_features, in_features].

    num_experts: not 0: of so many W; each tensor, and the bias, has them as one more dimension, the
    first.
    """

    scheme: str
    tensors: tuple[Tensor, ...]
    bias: Tensor | None  # [out_features]
    in_features: int
    out_features: int
    num_experts: int = 0
    low_rank: LowRankPages | None = None


@dataclass(frozen=True, slots=True)
class NormWeights:
    """A norm's weights: out = normalised * weight + bias.

    [heads, size] where each head has its own factor: see the operator `norm`.
    """

    weight: Tensor  # [size]
    bias: Tensor | None = None  # [size]


@dataclass(frozen=True, slots=True)
class Attention:
    """Weights of an attention block; a slot that the block has not is None."""

    block: AttentionBlock
    qkv: Linear  # queries, keys, values
    out: Linear
    norm: NormWeights | None = None
    q_norm: NormWeights | None = None
    k_norm: NormWeights | None = None
    qk_norm: NormWeights | None = None  # [num_heads + num_kv_heads, head_dim]
    post_norm: NormWeights | None = None
    sinks: Tensor | None = None  # [num_heads] float32
    slopes: Tensor | None = None  # [num_heads] float32, of ALiBi
    kv_format: str = "dense"  # of its cache, see predict.nn.cache_formats


@dataclass(frozen=True, slots=True)
class HeadMatrices:
    """Each head's matrices from latents to keys and values, in the model's dtype.

    Packed by pack_dense, with heads as the first dimension. Compiled operators read key_up in two
    layouts, and have it twice: a hundredth of DeepSeek-V2-Lite's memory, less of larger models'.
    """

    key_up: Tensor  # [heads, qk_nope_head_dim, kv_lora_rank]
    value_up: Tensor  # [heads, v_head_dim, kv_lora_rank]
    key_absorb: Tensor | None = None  # [heads, kv_lora_rank, qk_nope_head_dim], of these


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Weights of a latent attention block; a slot that the block has not is None."""

    block: LatentAttentionBlock
    qkv_a: Linear  # q_a's outputs, or the queries themselves, then kv_a's
    kv_a_norm: NormWeights
    kv_b: HeadMatrices
    out: Linear
    norm: NormWeights | None = None
    q_a_norm: NormWeights | None = None
    q_b: Linear | None = None
    post_norm: NormWeights | None = None
    kv_format: str = "dense"


@dataclass(frozen=True, slots=True)
class Mlp:
    """Weights of an MLP block; a slot that the block has not is None."""

    block: MlpBlock
    gate_up: Linear  # gate's outputs, then up's; without a gate, up's
    down: Linear
    norm: NormWeights | None = None
    post_norm: NormWeights | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """Weights of an expert block of E experts; a slot that the block has not is None."""

    block: ExpertBlock
    router: Tensor  # [E, H]
    gate_up: Linear  # of E experts
    down: Linear
    norm: NormWeights | None = None
    router_bias: Tensor | None = None  # [E] float32
    correction: Tensor | None = None  # [E] float32
    shared_gate_up: Linear | None = None
    shared_down: Linear | None = None
    shared_gate: Tensor | None = None  # [1, H]
    post_norm: NormWeights | None = None


BlockWeights: TypeAlias = Attention | LatentAttention | Mlp | Experts
Layer: TypeAlias = tuple[BlockWeights, ...]


@dataclass(frozen=True, slots=True)
class Embedding:
    """From token ids to the first layer's input."""

    spec: EmbeddingSpec
    table: Tensor | None  # [V, width]; None where the LM head's matrix serves for both
    projection: Linear | None = None
    positions: Tensor | None = None  # [positions, H]
    norm: NormWeights | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """From the last layer's output to logits."""

    spec: HeadSpec
    norm: NormWeights | None
    linear: Linear
    projection: Linear | None = None


@dataclass(frozen=True, slots=True)
class Decoder:
    """All weights of a network."""

    embedding: Embedding
    layers: tuple[Layer, ...]
    head: Head
    ropes: tuple[Tensor, ...]  # [positions, rotary_dim] float32 each: cosines, then sines

    def blocks(self) -> Iterator[BlockWeights]:
        for layer in self.layers:
            yield from layer


def linears(block: BlockWeights) -> Iterator[Linear]:
    """A block's linears, in order."""
    for field in fields(block):
        value = getattr(block, field.name)
        if isinstance(value, Linear):
            yield value


FINAL = "norm"  # the tap behind all layers and the last norm: the input of the head's matrix


class StepOutputs(NamedTuple):
    """What a step gives.

    step: where it lies on a GPU, for the chooser.
    """

    logits: Tensor | None  # float32 [L, V] of the rows that the inputs name; None: none are wanted
    hidden: Mapping[str, Tensor] = MappingProxyType({})  # by tap: [T, H] of all tokens
    step: Any = None


def check_taps(taps: Sequence[str], num_layers: int) -> None:
    """Raises ValueError unless each is FINAL, or "layers.N" of one of the layers."""
    for tap in taps:
        kind, _, number = tap.partition(".")
        is_layer = kind == "layers" and number.isdecimal() and int(number) < num_layers
        if tap != FINAL and not is_layer:
            raise ValueError(
                f"hidden states of {tap!r} are not known (allowed: {FINAL}, layers.0 to "
                f"layers.{num_layers - 1})"
            )


def forward(
    backend: ModuleType,
    decoder: Decoder,
    inputs: StepInputs,
    caches: Sequence[LayerCache],
    tree_mask: Tensor | None = None,
    bound: Callable[..., Tensor] | None = None,
    rows: int = RowKind.LISTED,
    taps: Sequence[str] = (),
) -> tuple[StepOutputs, list[Tensor]]:
    """Returns float32 logits [L, vocab_size] with hidden states, and the updated caches.

    caches: the tensors of each layer, see predict.nn.cache_formats; () of one that keeps nothing.
    They are also outputs because an exported program drops an input that no output depends on.
    tree_mask: see the operator paged_attention. bound: the backend's BoundLayers of decoder.layers,
    caches and ropes; the caches are then not returned. rows: the inputs' RowKind; a traced program
    serves all kinds, as LISTED does. taps: see check_taps.
    """
    import paddle

    hidden = backend.embed(inputs, decoder.embedding, decoder.head.linear)
    layers, ropes = decoder.layers, decoder.ropes
    written: list[Tensor] = []
    tapped: dict[str, Tensor] = {}
    keeping = [index for index, cache in enumerate(caches) if cache]
    # Behind the last cache write only the logit rows are needed.
    narrows = rows != RowKind.ALL and not taps
    if not narrows:
        ends = {int(tap.removeprefix("layers.")) + 1 for tap in taps if tap != FINAL}
        borders = sorted({0, *ends, len(layers)})
    elif len(keeping) > 2 and paddle.get_device() != "cpu":
        # A GPU runs the first layers while the host prepares the others.
        borders = [0, keeping[1], keeping[-1], len(layers)]
    else:
        borders = [*dict.fromkeys((0, keeping[-1])), len(layers)]
    for first, end in pairwise(borders):
        of_rows = inputs.logit_indices if narrows and end == len(layers) else None
        if bound is not None:
            hidden = bound(hidden, inputs, tree_mask, (first, end), of_rows)
        else:
            hidden, part_written = backend.layers(
                hidden, layers[first:end], caches[first:end], ropes, inputs, tree_mask, of_rows
            )
            written += part_written
        tapped[f"layers.{end - 1}"] = hidden
    if FINAL in taps:
        tapped[FINAL] = backend.before_head(hidden, decoder.head)
    found = {tap: tapped[tap] for tap in taps}
    if rows == RowKind.NONE:
        return StepOutputs(None, found), written
    listed = inputs.logit_indices if rows != RowKind.ALL and taps else None
    return StepOutputs(backend.logits(hidden, decoder.head, listed), found), written


def layer_schemes(decoder: Decoder) -> str:
    """The schemes of the layers' linears, joined by commas; "dense" beside others is left out."""
    names = {unfolded(linear.scheme) for block in decoder.blocks() for linear in linears(block)}
    return ",".join(sorted(names - {"dense"})) or "dense"


def map_tensors(tree: Tree, change: Callable[[str, Tensor], Any], path: str = "") -> Tree:
    """A copy of a weight tree with each tensor replaced by `change(path, tensor)`.

    Paths are field names and indices joined by "_", unique within the tree.
    """
    from paddle import Tensor

    def visit(value: Any, at: str) -> Any:
        start = f"{at}_" if at else ""
        if isinstance(value, Tensor):
            return change(at, value)
        if isinstance(value, tuple):
            return tuple(visit(item, f"{start}{i}") for i, item in enumerate(value))
        if is_dataclass(value) and not isinstance(value, type):
            parts = ((f.name, getattr(value, f.name)) for f in fields(value))
            return replace(value, **{name: visit(part, start + name) for name, part in parts})
        return value

    changed: Tree = visit(tree, path)
    return changed
