"""Adapters of the requests of a step on the GPU: random pages, and who has which."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.nn.adapter_pages import PAGE_RANKS, part_sizes
from predict.nn.blocks import Block, Linear, LowRankPages
from predict.nn.inputs import ADAPTED, to_tensors
from tests.support.gpu_operands import Operands, Step

NUM_PAGES = 7
# Pages of each adapter, by linear: some have none for some.
PAGES = (
    {"qkv": [3], "out": [3], "gate_up": [3], "down": [3]},
    {"qkv": [0, 5, 1], "down": [0, 5, 1]},
    {"out": [6, 2], "gate_up": [6, 2]},
)


def with_ranks(operands: Operands, linear: Linear, sizes: tuple[int, ...]) -> Linear:
    """The plain linear with random pages. sizes: output features of its parts."""
    width = linear.in_features
    scale = width**-0.5 / PAGE_RANKS
    a = operands.tensor(NUM_PAGES, len(sizes), PAGE_RANKS, width, scale=scale).plain
    b = operands.tensor(NUM_PAGES, PAGE_RANKS, linear.out_features).plain
    return replace(linear, low_rank=LowRankPages(a, b, sizes))


def pooled(operands: Operands, linear: Linear, block: Block, name: str, hidden: int) -> Linear:
    """A block's plain linear with random pages. hidden: the network's hidden size."""
    return with_ranks(operands, linear, part_sizes(block, name, hidden))


def spoiled(path: str, tensor: Any) -> Any:
    """For `map_tensors`: page 4, which is nobody's, holds NaN."""
    if path.endswith(("low_rank_a", "low_rank_b")):
        tensor[4] = float("nan")
    return tensor


def pages_table(with_none: bool = False) -> npt.NDArray[np.int32]:
    """[adapters, linears, pages] of PAGES; with_none: and one behind them without any."""
    table = np.full((len(PAGES) + with_none, len(ADAPTED), 3), -1, np.int32)
    for row, pages in enumerate(PAGES):
        for name, own in pages.items():
            table[row, ADAPTED.index(name), : len(own)] = own
    return table


def adapted(step: Step) -> None:
    """Gives every request but each fourth one an adapter."""
    import paddle

    # Requests with the same pages are different adapters here.
    num_seqs = len(step.arrays.context_lens)
    pages = np.resize(pages_table(with_none=True), (num_seqs, len(ADAPTED), 3))
    rows = np.arange(num_seqs, dtype=np.int32)
    rows[3::4] = -1
    ids = np.full(step.num_tokens, -1, np.int32)
    lengths = np.diff(step.arrays.cu_seqlens_q)
    ids[: lengths.sum()] = np.repeat(rows, lengths)
    step.arrays = step.arrays._replace(adapter_ids=ids, adapter_pages=pages)
    step.plain = to_tensors(step.arrays, paddle.CPUPlace())
    step.device = to_tensors(step.arrays, step.operands.gpu.place())
