"""A vision tower as data: the blocks of its layers, and what stands around them.

A tower takes the patches of pictures, packed, to rows of the text model's width, one for each
merged cell. Attention goes both ways within a picture, or within a window of it: a prefix mask over
whole spans. P patches, C merged cells, W the tower's width. Imports no Paddle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from predict.errors import UserError
from predict.images.pixels import Pixels, Placeholder
from predict.nn.blocks import Activation, Block, HeadSlot, LinearSlot, Norm
from predict.nn.inputs import RowKind, StepInputs, max_lens_of
from predict.nn.weights import WeightNames

CHANNELS = 3
BLOCK_SIZE = 32  # tokens of a block of the scratch cache
MAX_SPANS = 4096  # of a step, for attention with a prefix mask
GELU = Activation("gelu", gated=False)  # of all mergers: the exact one
Resampling = Literal["corners", "pixels"]


@dataclass(frozen=True)
class Product:
    """A product of a merger, and the function behind it.

    is_parameter: `name` is the tensor's whole name, and it is stored [in, out]. channels_first: its
    columns are stored [channel, row, column] of a cell, and read [row, column, channel].
    """

    name: str
    out_features: int
    has_bias: bool = True
    activation: Activation | None = None
    is_parameter: bool = False
    channels_first: bool = False


@dataclass(frozen=True)
class Merger:
    """From a merged cell's patches to a row: a norm of each patch, or of the cell; products."""

    norm: Norm | None
    products: tuple[Product, ...]
    norm_name: str = "merger.ln_q.weight"
    norms_cells: bool = False  # the norm is over all values of a cell
    pools: bool = False  # a cell is the mean of its patches, not one behind the other


@dataclass(frozen=True)
class Tap:
    """A merger behind a layer of the tower, whose rows are added behind a layer of the text's.

    DeepStack (Meng et al. 2024): those of the first tap behind the first layer, and so on.
    """

    layer: int
    merger: Merger


@dataclass(frozen=True)
class Learned:
    """Learned positions: a square table, resampled to a picture's patches, bilinear.

    corners: the first and last rows stay where they are; pixels: rows are as wide as they are, half
    of the first lies ahead of its place (PyTorch's align_corners true and false).
    """

    name: str
    side: int  # rows, and columns
    method: Resampling = "pixels"
    leading: tuple[int, ...] = ()  # dims ahead of [rows, W] in a checkpoint


@dataclass(frozen=True)
class ClassToken:
    """A token ahead of a picture's patches, which no merger reads; with row 0 of the positions."""

    name: str
    shape: tuple[int, ...]  # in a checkpoint


class Base(NamedTuple):
    """What names of a checkpoint begin with."""

    tower: str
    merger: str


@dataclass(frozen=True)
class VisionSpec:
    """Shapes and switches of one tower, and of its pictures in the text model's prompts."""

    model_type: str
    hidden_size: int
    layers: tuple[tuple[Block, ...], ...]
    out_size: int  # the text model's hidden size
    merger: Merger
    names: WeightNames  # of its blocks
    pixels: Pixels  # how pictures become patches, where a model's folder says nothing
    placeholder: Placeholder  # what stands for a picture in prompts
    # Of each frequency of the text's rotary table: time, row or column. Empty: tokens of pictures
    # have the positions of text.
    axes: tuple[int, ...] = ()
    # Text alone runs where pictures do not go with a setting, and a note says so. Else that is
    # refused.
    can_be_left_out: bool = False
    sees_itself: bool = False  # tokens of one picture see each other, in the text model too
    theta: float = 10000.0  # of its rotary positions
    # Rows and columns turn by every second frequency of a whole head's each, not by all of half a
    # head's.
    turns_by_halves: bool = False
    patch_name: str = "patch_embed.proj"
    patch_bias: bool = False  # goes with learned positions
    frames: int = 0  # of patches' weights [W, 3, frames, p, p]; 0: [W, 3, p, p]
    learned: Learned | None = None
    class_token: ClassToken | None = None  # goes with learned positions
    # Names of factors [W] within a layer: of what attention makes, and of what the MLP makes. They
    # are folded into the products at load.
    layer_scales: tuple[str, str] | None = None
    taps: tuple[Tap, ...] = ()
    first_norm: Norm | None = None  # ahead of all layers
    first_norm_name: str = "ln_pre.weight"
    last_norm: Norm | None = None  # behind all layers
    last_norm_name: str = "post_layernorm.weight"
    ignored: tuple[str, ...] = ()  # parts of names of tensors that are not read
    bases: tuple[Base, ...] = (
        Base("model.visual.", "model.visual."),  # as transformers 5 saves
        Base("visual.", "visual."),  # as published
    )
    slope: float = 1.0  # of the layers' ungated silu: x * sigmoid(slope * x)
    window: int = 0  # merged cells on a side of a window; 0: there is none
    whole_layers: frozenset[int] = frozenset()  # layers that see the whole picture

    @property
    def merge(self) -> int:
        return self.pixels.merge_size

    @property
    def patch_values(self) -> int:
        """Values of a patch, one frame of it."""
        return CHANNELS * self.pixels.patch_size**2

    @property
    def cell_values(self) -> int:
        """Values of the patches of a merged cell, behind the layers."""
        return self.hidden_size * self.merge**2

    def values_of(self, merger: Merger) -> int:
        """Values of a cell that a merger's first product reads."""
        return self.hidden_size if merger.pools else self.cell_values

    @property
    def mergers(self) -> tuple[Merger, ...]:
        """The last one, then those of the taps."""
        return (self.merger, *(tap.merger for tap in self.taps))

    @property
    def row_size(self) -> int:
        """Values of a merged cell: its row, and those that taps add."""
        return self.out_size * len(self.mergers)

    def cells(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of merged cells of a grid of patches."""
        return grid[0] // self.merge, grid[1] // self.merge

    def num_spans(self, cells: tuple[int, int]) -> int:
        """Spans of attention that a picture has in a pass, at most."""
        side = self.window
        return (-(-cells[0] // side)) * (-(-cells[1] // side)) if side else 1

    def check_size(self, cells: tuple[int, int], where: str) -> None:
        """Raises UserError for a picture of more windows than a pass may have spans."""
        count = self.num_spans(cells)
        if count > MAX_SPANS:
            raise UserError(
                f"{where} is cut into {count} windows (allowed: up to {MAX_SPANS}); lower "
                "max_pixels"
            )

    def blocks(self) -> Iterator[Block]:
        for layer in self.layers:
            yield from layer

    @property
    def num_weights(self) -> int:
        """Elements of all matrices."""
        linears = sum(
            slot.out_features * slot.in_features
            for block in self.blocks()
            for slot in block.slots(self.hidden_size)
            if isinstance(slot, (LinearSlot, HeadSlot))
        )
        for merger in self.mergers:
            inner = self.values_of(merger)
            for product in merger.products:
                linears += inner * product.out_features
                inner = product.out_features
        learned = self.learned.side**2 * self.hidden_size if self.learned else 0
        return int(linears + learned + self.hidden_size * self.patch_values)


class TowerInputs(NamedTuple):
    """What a pass over pictures reads besides their patches."""

    patches: npt.NDArray[np.int32] | None  # [T] the patch of each token, -1: a class token
    order: npt.NDArray[np.int64]  # [C] the cell at each place of the pass, window after window
    rope: npt.NDArray[np.float32]  # [P, head_dim] a row of the rotary table for each patch
    whole: StepInputs  # of layers that see a whole picture
    windows: StepInputs | None  # of the others
    num_blocks: int  # of the scratch cache


def tower_inputs(spec: VisionSpec, grids: Sequence[tuple[int, int]], head_dim: int) -> TowerInputs:
    """Of pictures of rows x columns of patches, one behind the other (NumPy)."""
    orders, counts, places, first = [], [], [], 0
    for grid in grids:
        rows, columns = spec.cells(grid)
        order, sizes = windows_of(rows, columns, spec.window)
        places.append(places_of(spec, grid, order))
        orders.append(order + first)
        counts.append(sizes)
        first += rows * columns
    lengths, tokens = np.array([rows * columns for rows, columns in grids]), None
    if spec.class_token is not None:
        starts = np.cumsum(lengths) - lengths
        tokens = np.insert(np.arange(lengths.sum()), starts, -1).astype(np.int32)
        lengths = lengths + 1
    whole = span_inputs_of(lengths)
    windows = span_inputs_of(np.concatenate(counts) * spec.merge**2) if spec.window else None
    rope = rope_rows(np.concatenate(places), head_dim, spec.theta, spec.turns_by_halves)
    num_blocks = max(
        int(each.block_tables.max()) + 1 for each in (whole, windows) if each is not None
    )
    return TowerInputs(tokens, np.concatenate(orders), rope, whole, windows, num_blocks)


def resampled(
    table: npt.NDArray[np.float32], grid: tuple[int, int], method: Resampling
) -> npt.NDArray[np.float32]:
    """[rows, columns, W] of a square table [side, side, W] of positions."""
    made = table
    for axis, count in enumerate(grid):
        if count == len(table):  # each row is itself
            continue
        total = None
        for row, share in _taps(len(table), count, method):
            part = made.take(row, axis)
            part *= share.reshape(-1, 1, 1) if axis == 0 else share.reshape(-1, 1)
            total = part if total is None else np.add(total, part, out=total)
        assert total is not None
        made = total
    return made


def _taps(
    side: int, count: int, method: Resampling
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]:
    """Of each of `count` places the rows of `side` that it takes, and how much of them."""
    places = np.arange(count, dtype=np.float64)
    if method == "corners":
        at = places * (side - 1) / max(count - 1, 1)
    else:
        at = np.clip((places + 0.5) * side / count - 0.5, 0, side - 1)
    for step in range(2):
        row = np.floor(at).astype(np.int64) + step
        yield np.minimum(row, side - 1), (1 - np.abs(row - at)).astype(np.float32)


def windows_of(
    rows: int, columns: int, side: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The order of cells, window after window, and the cells of each window.

    Windows of side x side cells, row by row; those at the lower and right edges are cut.
    """
    cells = np.arange(rows * columns).reshape(rows, columns)
    if not side:
        return cells.reshape(-1), np.array([rows * columns])
    parts = [
        cells[y : y + side, x : x + side].reshape(-1)
        for y in range(0, rows, side)
        for x in range(0, columns, side)
    ]
    return np.concatenate(parts), np.array([len(part) for part in parts])


def places_of(
    spec: VisionSpec, grid: tuple[int, int], order: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """[P, 2] the row and column of each patch, cells in `order`."""
    of_cells = in_cells(np.indices(grid).transpose(1, 2, 0), spec.merge)
    return of_cells.reshape(len(order), -1, 2)[order].reshape(-1, 2)


def in_cells(values: npt.NDArray[Any], merge: int) -> npt.NDArray[Any]:
    """[rows * columns, N] of [rows, columns, N], merged cell after merged cell."""
    rows, columns, size = values.shape
    cut = values.reshape(rows // merge, merge, columns // merge, merge, size)
    return cut.transpose(0, 2, 1, 3, 4).reshape(rows * columns, size)


def rope_rows(
    places: npt.NDArray[np.int64], head_dim: int, theta: float, by_halves: bool = False
) -> npt.NDArray[np.float32]:
    """[P, head_dim] cosines, then sines: of a quarter of the head by rows, one by columns.

    by_halves: see VisionSpec.turns_by_halves.
    """
    size = head_dim if by_halves else head_dim // 2
    steps = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    inv_freq = (1.0 / np.float32(theta) ** steps).astype(np.float32)
    of_axes = np.stack([inv_freq[::2], inv_freq[1::2]] if by_halves else [inv_freq, inv_freq])
    # Of each row and column once: the functions take longer than all else of a pass's inputs.
    sides = np.arange(places.max() + 1, dtype=np.float32)
    wide = (sides[:, None, None] * of_axes).astype(np.float64)
    made = np.stack([np.cos(wide), np.sin(wide)], axis=1).astype(np.float32)
    rows = np.empty((len(places), *made.shape[1:]), np.float32)
    for axis in range(2):
        rows[:, :, axis] = made[:, :, axis].take(places[:, axis], axis=0)
    return rows.reshape(len(places), -1)


def span_inputs_of(lengths: npt.NDArray[np.int64]) -> StepInputs:
    """Inputs of spans of so many tokens that see themselves whole; each has blocks of its own.

    Positions are rows of a table that has one for each token.
    """
    lengths = lengths.astype(np.int32)
    borders = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=borders[1:])
    counts = -(-lengths // BLOCK_SIZE)
    first = np.cumsum(counts) - counts
    columns = np.arange(counts.max())
    tables = np.where(columns < counts[:, None], first[:, None] + columns, -1).astype(np.int32)
    tokens = np.arange(borders[-1], dtype=np.int32)
    of_span = np.repeat(np.arange(len(lengths)), lengths)
    slots = first[of_span] * BLOCK_SIZE + tokens - borders[of_span]
    listed = lengths.tolist()
    return StepInputs(
        token_ids=np.zeros_like(tokens),
        positions=tokens,
        slot_mapping=slots.astype(np.int32),
        cu_seqlens_q=borders,
        context_lens=lengths,
        block_tables=tables,
        logit_indices=tokens,
        max_lens=max_lens_of(listed, listed, RowKind.ALL),
        prefix_lens=lengths,
    )
