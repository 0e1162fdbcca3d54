"""Requests' tokens on a GPU, for the penalties there: see ops.adjust_logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from predict import cuda
from predict.device import Device
from predict.engine.sampler import Adjustment, Row
from predict.request import Request

if TYPE_CHECKING:
    from paddle import Tensor

NO_SLOT = -1


class TokenHistory:
    """A row of tokens for each request whose logits depend on them.

    A row is written with the tokens that are known when a request first comes; the operator adds
    each later one itself. tokens: [num_slots, max_length] int32. counts: [num_rows, vocab_size].
    """

    def __init__(self, device: Device, num_slots: int, max_length: int, vocab_size: int):
        import paddle

        self.tokens: Tensor = paddle.zeros([num_slots, max_length], "int32", device=device.place())
        self.counts: Tensor = paddle.zeros([num_slots, vocab_size], "int32", device=device.place())
        self._device = device
        self._slots: dict[int, tuple[int, Request]] = {}  # by request id
        self._free = list(range(num_slots))

    def slot(self, request: Request) -> int:
        """The row of a running request."""
        entry = self._slots.get(request.request_id)
        if entry is None:
            entry = self._slots[request.request_id] = (self._take_slot(), request)
            self._write(entry[0], request.token_ids[: request.num_known_tokens])
        return entry[0]

    def _take_slot(self) -> int:
        if not self._free:
            # No more requests run than there are slots; one that waits comes back with its tokens.
            # Whoever is in the batch has blocks.
            gone = [
                request_id
                for request_id, (_, request) in self._slots.items()
                if not request.block_ids
            ]
            self._free = [self._slots.pop(request_id)[0] for request_id in gone]
        return self._free.pop()

    def _write(self, slot: int, token_ids: Sequence[int]) -> None:
        import paddle

        known = paddle.to_tensor(np.array(token_ids, np.int32), place=self._device.place())
        row = self.tokens.data_ptr() + 4 * slot * self.tokens.shape[1]
        cuda.copy_between_addresses(
            row, known.data_ptr(), 4 * len(token_ids), cuda.current_stream(self._device)
        )


def write_penalties(
    columns: npt.NDArray[np.int32],
    bias: npt.NDArray[np.int32],
    adjustments: Sequence[Adjustment],
    rows: Sequence[Row],
    history: TokenHistory,
) -> None:
    """Fills `penalties` [8, P] and `bias` [2, K] of ops.adjust_logits; rows behind have no work."""
    columns[:] = 0
    columns[3] = NO_SLOT
    num_pairs = 0
    for index, (adjustment, row) in enumerate(zip(adjustments, rows, strict=True)):
        if adjustment.reads_history:
            request = row.request
            columns[:3, index] = np.array(adjustment[:3], np.float32).view(np.int32)
            slot = history.slot(request)
            columns[3:6, index] = slot, request.num_tokens, request.num_prompt_tokens
        end = num_pairs + len(adjustment.banned)
        bias[0, num_pairs:end] = adjustment.banned
        columns[6:, index] = num_pairs, end
        num_pairs = end
    bias[1] = np.array(-np.inf, np.float32).view(np.int32)
