"""Requests' tokens and rules on a GPU, which ops.adjust_logits reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from predict.device import cuda
from predict.device.devices import Device
from predict.engine.choices import Row
from predict.engine.logits_processors import UNCHANGED, Adjustment
from predict.engine.request_state import Request

if TYPE_CHECKING:
    from paddle import Tensor

NO_SLOT = -1
RULE_WORDS = 4
FIRST_RULES_WIDTH = 64  # int32s: ten rules of one token


def encoded(adjustment: Adjustment) -> npt.NDArray[np.int32]:
    """An adjustment as a row of `rules` (see csrc/include/regatta/adjust_logits.h)."""
    heads: list[tuple[int, int, int, int]] = []
    tokens: list[int] = []
    start = 1 + RULE_WORDS * len(adjustment.rules)
    for rule in adjustment.rules:
        bits = int(np.float32(rule.amount).view(np.int32))
        heads.append((start + len(tokens), len(rule.prefix) + 1, bits, rule.until))
        tokens += [*rule.prefix, rule.token]
    words = [len(heads), *(word for head in heads for word in head), *tokens]
    return np.array(words, np.int32)


class TokenHistory:
    """A row of tokens and one of rules for each request that changes its logits.

    A row is written with the known tokens when the request is first seen; the operator adds later
    tokens. tokens: [num_slots, max_length] int32. rules: [num_slots, W] int32, W as the largest
    request needed.
    """

    def __init__(self, device: Device, num_slots: int, max_length: int):
        import paddle

        self._device = device
        self._slots: dict[int, tuple[int, Request, Adjustment]] = {}  # by request id
        self._free = list(range(num_slots))
        place = device.place()
        self.tokens: Tensor = paddle.zeros([num_slots, max_length], "int32", device=place)
        self.rules: Tensor = paddle.zeros([num_slots, FIRST_RULES_WIDTH], "int32", device=place)

    def admit(self, adjustments: Sequence[Adjustment], rows: Sequence[Row]) -> None:
        """Gives slots to running requests without one; `rules` may become another tensor."""
        for adjustment, row in zip(adjustments, rows, strict=True):
            request = row.request
            if adjustment is UNCHANGED or request.request_id in self._slots:
                continue
            known = np.array(request.token_ids[: request.num_known_tokens], np.int32)
            words = encoded(adjustment)
            if len(words) > self.rules.shape[1]:
                self._widen(len(words))
            slot = self._take_slot()
            try:
                self._write(self.tokens, slot, known)
                self._write(self.rules, slot, words)
            except BaseException:
                self._free.append(slot)
                raise
            self._slots[request.request_id] = (slot, request, adjustment)

    def write_columns(
        self,
        columns: npt.NDArray[np.int32],
        adjustments: Sequence[Adjustment],
        rows: Sequence[Row],
    ) -> None:
        """Fills `penalties` [8, P] of ops.adjust_logits; rows behind have no work."""
        columns[:] = 0
        columns[3] = NO_SLOT
        for index, (adjustment, row) in enumerate(zip(adjustments, rows, strict=True)):
            if adjustment is UNCHANGED:
                continue
            request, num_drafts = row.request, len(row.drafts)
            penalties = adjustment.repetition, adjustment.presence, adjustment.frequency
            columns[:3, index] = np.array(penalties, np.float32).view(np.int32)
            columns[3:, index] = (
                self._slots[request.request_id][0],
                request.num_tokens + num_drafts,
                request.num_prompt_tokens,
                1 + num_drafts,
                adjustment.no_repeat_ngram_size,
            )

    def _take_slot(self) -> int:
        if not self._free:
            # At most num_slots requests run, and running requests have blocks. A waiting request
            # gets a slot again, with its tokens.
            gone = [
                request_id
                for request_id, (_, request, _) in self._slots.items()
                if not request.block_ids
            ]
            self._free = [self._slots.pop(request_id)[0] for request_id in gone]
        return self._free.pop()

    def _widen(self, needed: int) -> None:
        import paddle

        shape = [self.rules.shape[0], 1 << (needed - 1).bit_length()]
        rules = paddle.zeros(shape, "int32", device=self._device.place())
        for slot, _, adjustment in self._slots.values():
            self._write(rules, slot, encoded(adjustment))
        self.rules = rules

    def _write(self, table: Tensor, slot: int, words: npt.NDArray[np.int32]) -> None:
        """Queues the copy of `words` to the front of a table's row."""
        import paddle

        known = paddle.to_tensor(words, place=self._device.place())
        row = table.data_ptr() + 4 * slot * table.shape[1]
        cuda.copy_bytes(row, known.data_ptr(), words.nbytes, cuda.current_stream(self._device))
