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
from predict.nn.blocks import BlockWeights, Linear, NormWeights
from predict.nn.inputs import LayerCache, RowKind, StepInputs
from predict.nn.spec import EmbeddingSpec, HeadSpec, Share

if TYPE_CHECKING:
    from paddle import Tensor

Tree = TypeVar("Tree")
Kind = TypeVar("Kind", bound=BlockWeights)

Layer: TypeAlias = tuple[BlockWeights, ...]


@dataclass(frozen=True, slots=True)
class Embedding:
    """From token ids to the first layer's input."""

    spec: EmbeddingSpec
    table: Tensor | None  # [V, width]; None where the LM head's matrix serves for both
    projection: Linear | None = None
    positions: Tensor | None = None  # [positions, H]
    norm: NormWeights | None = None
    share: Share | None = None  # of several ranks, whose tables have some tokens each
    images: Tensor | None = None  # [rows, H], of pictures: see StepInputs.image_rows


@dataclass(frozen=True, slots=True)
class Head:
    """From the last layer's output to logits."""

    spec: HeadSpec
    norm: NormWeights | None
    linear: Linear
    projection: Linear | None = None
    share: Share | None = None  # of several ranks, whose matrices have some tokens each


@dataclass(frozen=True, slots=True)
class Axes:
    """How places in several dimensions become rows of the first rotary table.

    axes: of each angle. first: the row of the table that the first token of a step gets.
    """

    axes: tuple[int, ...]
    first: int


@dataclass(frozen=True, slots=True)
class Decoder:
    """All weights of a network."""

    embedding: Embedding
    layers: tuple[Layer, ...]
    head: Head
    ropes: tuple[Tensor, ...]  # [positions, rotary_dim] float32 each: cosines, then sines
    axes: Axes | None = None  # where tokens of pictures have places in several dimensions
    # [rows, H] each, of pictures: rows that are added behind the first layers.
    added_images: tuple[Tensor, ...] = ()
    pictures_see: bool = False  # attention has a prefix mask in steps that have prefix_lens

    def blocks(self) -> Iterator[BlockWeights]:
        for layer in self.layers:
            yield from layer

    def blocks_of(self, kind: type[Kind]) -> Iterator[Kind]:
        """The blocks of a kind, in order."""
        return (block for block in self.blocks() if isinstance(block, kind))


FINAL = "norm"  # the tap behind all layers and the last norm: the input of the head's matrix


class StepOutputs(NamedTuple):
    """What a step gives.

    step: where it lies on a GPU, for the chooser. share: not None where logits are [L, rows] of one
    rank's tokens, which that is of.
    """

    logits: Tensor | None  # float32 [L, V] of the rows that the inputs name; None: none are wanted
    hidden: Mapping[str, Tensor] = MappingProxyType({})  # by tap: [T, H] of all tokens
    step: Any = None
    share: Share | None = None


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

    layers, ropes = decoder.layers, decoder.ropes
    if inputs.image_places is not None and decoder.axes is not None:
        of = decoder.axes
        rope = backend.write_places(ropes[0], inputs.image_places, of.axes, of.first)
        ropes = (rope, *ropes[1:])
    hidden = backend.embed(inputs, decoder.embedding, decoder.head.linear)
    if decoder.pictures_see and inputs.prefix_lens is not None:
        layers, bound = tuple(map(_with_prefix_mask, layers)), None
    written: list[Tensor] = []
    tapped: dict[str, Tensor] = {}
    keeping = [index for index, cache in enumerate(caches) if cache]
    # Behind the last cache write only the logit rows are needed.
    narrows = rows != RowKind.ALL and not taps
    if not narrows:
        ends = {int(tap.removeprefix("layers.")) + 1 for tap in taps if tap != FINAL}
        borders = {0, *ends, len(layers)}
    elif len(keeping) > 2 and paddle.get_device() != "cpu":
        # A GPU runs the first layers while the host prepares the others.
        borders = {0, keeping[1], keeping[-1], len(layers)}
    else:
        borders = {0, keeping[-1], len(layers)}
    added = () if inputs.image_rows is None else decoder.added_images
    borders.update(range(1, len(added) + 1))
    for first, end in pairwise(sorted(borders)):
        of_rows = inputs.logit_indices if narrows and end == len(layers) else None
        if bound is not None:
            hidden = bound(hidden, inputs, tree_mask, (first, end), of_rows)
        else:
            hidden, part_written = backend.layers(
                hidden, layers[first:end], caches[first:end], ropes, inputs, tree_mask, of_rows
            )
            written += part_written
        if end <= len(added):
            hidden = backend.add_images(hidden, added[end - 1], inputs.image_rows)
        tapped[f"layers.{end - 1}"] = hidden
    if FINAL in taps:
        tapped[FINAL] = backend.before_head(hidden, decoder.head)
    found = {tap: tapped[tap] for tap in taps}
    if rows == RowKind.NONE:
        return StepOutputs(None, found), written
    listed = inputs.logit_indices if rows != RowKind.ALL and taps else None
    return StepOutputs(backend.logits(hidden, decoder.head, listed), found), written


def _with_prefix_mask(layer: Layer) -> Layer:
    """The layer whose attention has a prefix mask."""
    return tuple(
        replace(each, block=replace(each.block, prefix_mask=True))  # type: ignore[type-var]
        if hasattr(each.block, "prefix_mask")
        else each
        for each in layer
    )


def layer_schemes(decoder: Decoder) -> str:
    """The schemes of the layers' linears, joined by commas; "dense" beside others is left out."""
    names = {
        unfolded(linear.scheme) for block in decoder.blocks() for linear in block.linears().values()
    }
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
