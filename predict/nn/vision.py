"""A vision tower as data: the blocks of its layers, and what stands around them.

A tower takes a picture's patches, packed, to rows of the text model's width, one for each merged
cell. Attention goes both ways within a picture, or within a window of it: a prefix mask over whole
spans. P patches, C merged cells, W the tower's width. Imports no Paddle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from predict.errors import UserError
from predict.images.areas import AreaPixels
from predict.nn.blocks import Activation, Block, HeadSlot, LinearSlot, Norm
from predict.nn.inputs import RowKind, StepInputs, max_lens_of
from predict.nn.weights import WeightNames

CHANNELS = 3
BLOCK_SIZE = 32  # tokens of a block of the scratch cache
MAX_SPANS = 4096  # of a step, for attention with a prefix mask


@dataclass(frozen=True)
class Merger:
    """From a merged cell's patches to a row: norm of each patch, two products with biases."""

    norm: Norm
    inner: int  # features between the products
    activation: Activation = Activation("gelu", gated=False)
    names: tuple[str, str, str] = ("merger.ln_q.weight", "merger.mlp.0", "merger.mlp.2")


@dataclass(frozen=True)
class VisionSpec:
    """Shapes and switches of one tower, and of its pictures in the text model's prompts."""

    model_type: str
    hidden_size: int
    layers: tuple[tuple[Block, ...], ...]
    out_size: int  # the text model's hidden size
    merger: Merger
    names: WeightNames  # of its blocks
    pixels: AreaPixels  # how pictures become patches, where a model's folder says nothing
    placeholder: int  # the token that stands for a merged cell
    axes: tuple[int, ...]  # of each frequency of the text's rotary table: time, row or column
    theta: float = 10000.0  # of its rotary positions
    patch_name: str = "patch_embed.proj"
    bases: tuple[str, ...] = ("model.visual.", "visual.")  # as transformers 5 saves, as published
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

    def cells(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of merged cells of a grid of patches."""
        return grid[0] // self.merge, grid[1] // self.merge

    def check_size(self, cells: tuple[int, int], where: str) -> None:
        """Raises UserError for a picture of more windows than a pass may have spans."""
        side = self.window
        count = (-(-cells[0] // side)) * (-(-cells[1] // side)) if side else 1
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
        merger = self.merger.inner * (self.cell_values + self.out_size)
        return int(linears + merger + self.hidden_size * self.patch_values)


class TowerInputs(NamedTuple):
    """What a pass over one picture reads besides its patches."""

    order: npt.NDArray[np.int64]  # [C] the cell at each place of the pass, window after window
    rope: npt.NDArray[np.float32]  # [P, head_dim] a row of the rotary table for each patch
    whole: StepInputs  # of layers that see the whole picture
    windows: StepInputs | None  # of the others
    num_blocks: int  # of the scratch cache


def tower_inputs(spec: VisionSpec, grid: tuple[int, int], head_dim: int) -> TowerInputs:
    """Of a picture of rows x columns of patches (NumPy)."""
    rows, columns = spec.cells(grid)
    order, counts = windows_of(rows, columns, spec.window)
    per_cell = spec.merge**2
    whole = span_inputs_of(np.array([grid[0] * grid[1]]))
    windows = None if not spec.window else span_inputs_of(counts * per_cell)
    rope = rope_rows(places_of(spec, grid, order), head_dim, spec.theta)
    num_blocks = max(
        int(each.block_tables.max()) + 1 for each in (whole, windows) if each is not None
    )
    return TowerInputs(order, rope, whole, windows, num_blocks)


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
    merge = spec.merge
    rows, columns = spec.cells(grid)
    places = np.indices(grid).transpose(1, 2, 0).reshape(rows, merge, columns, merge, 2)
    of_cells = places.transpose(0, 2, 1, 3, 4).reshape(rows * columns, merge * merge, 2)
    return of_cells[order].reshape(-1, 2)


def rope_rows(
    places: npt.NDArray[np.int64], head_dim: int, theta: float
) -> npt.NDArray[np.float32]:
    """[P, head_dim] cosines, then sines: of a quarter of the head by rows, one by columns."""
    steps = np.arange(0, head_dim // 2, 2, dtype=np.float32) / np.float32(head_dim // 2)
    inv_freq = (1.0 / np.float32(theta) ** steps).astype(np.float32)
    angles = (places.astype(np.float32)[:, :, None] * inv_freq).reshape(len(places), -1)
    wide = angles.astype(np.float64)
    return np.concatenate([np.cos(wide), np.sin(wide)], axis=1).astype(np.float32)


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
