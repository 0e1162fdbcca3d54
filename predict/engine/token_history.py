"""Sequences' tokens and rules on a GPU, which ops.adjust_logits reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from predict.device import cuda
from predict.device.devices import Device
from predict.engine.logits_processors import Adjustment
from predict.engine.step import Adjusted

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
    """A row of tokens and one of rules for each sequence whose logits are changed.

    A row is written with the known tokens when the sequence is first seen; the operator adds later
    tokens. tokens: [num_slots, max_length] int32. rules: [num_slots, W] int32, W as the largest
    request needed.
    """

    def __init__(self, device: Device, num_slots: int, max_length: int):
        import paddle

        self._device = device
        self._slots: dict[int, tuple[int, Adjustment]] = {}  # by sequence
        self._free = list(range(num_slots))
        place = device.place()
        self.tokens: Tensor = paddle.zeros([num_slots, max_length], "int32", device=place)
        self.rules: Tensor = paddle.zeros([num_slots, FIRST_RULES_WIDTH], "int32", device=place)

    def admit(self, adjusted: Sequence[Adjusted | None]) -> None:
        """Gives slots to a step's sequences without one; `rules` may become another tensor."""
        for row in adjusted:
            if row is None or row.sequence_id in self._slots:
                continue
            known = np.array(row.token_ids[: row.num_known], np.int32)
            words = encoded(row.adjustment)
            if len(words) > self.rules.shape[1]:
                self._widen(len(words))
            slot = self._take_slot(adjusted)
            try:
                self._write(self.tokens, slot, known)
                self._write(self.rules, slot, words)
            except BaseException:
                self._free.append(slot)
                raise
            self._slots[row.sequence_id] = (slot, row.adjustment)

    def write_columns(
        self, columns: Mapping[str, npt.NDArray[Any]], adjusted: Sequence[Adjusted | None]
    ) -> None:
        """Fills `penalties` of ops.adjust_logits; rows without a slot have no work."""
        columns["slot"][:] = NO_SLOT
        for index, row in enumerate(adjusted):
            if row is None:
                continue
            adjustment, num_drafts = row.adjustment, len(row.drafts)
            values = {
                "repetition": adjustment.repetition,
                "presence": adjustment.presence,
                "frequency": adjustment.frequency,
                "slot": self._slots[row.sequence_id][0],
                "length": len(row.token_ids) + num_drafts,
                "num_prompt": row.num_prompt_tokens,
                "num_new": 1 + num_drafts,
                "no_repeat_ngram_size": adjustment.no_repeat_ngram_size,
            }
            for name, value in values.items():
                columns[name][index] = value

    def _take_slot(self, adjusted: Sequence[Adjusted | None]) -> int:
        if not self._free:
            # A step has at most num_slots sequences. One that comes again gets a slot again, with
            # the tokens that are known then.
            present = {row.sequence_id for row in adjusted if row is not None}
            gone = [sequence for sequence in self._slots if sequence not in present]
            self._free = [self._slots.pop(sequence)[0] for sequence in gone]
        return self._free.pop()

    def _widen(self, needed: int) -> None:
        import paddle

        shape = [self.rules.shape[0], 1 << (needed - 1).bit_length()]
        rules = paddle.zeros(shape, "int32", device=self._device.place())
        for slot, adjustment in self._slots.values():
            self._write(rules, slot, encoded(adjustment))
        self.rules = rules

    def _write(self, table: Tensor, slot: int, words: npt.NDArray[np.int32]) -> None:
        """Queues the copy of `words` to the front of a table's row."""
        import paddle

        known = paddle.to_tensor(words, place=self._device.place())
        row = table.data_ptr() + 4 * slot * table.shape[1]
        cuda.copy_bytes(row, known.data_ptr(), words.nbytes, cuda.current_stream(self._device))
