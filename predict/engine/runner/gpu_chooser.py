"""The choice of tokens on a GPU: what is queued behind the network, in graphs or by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from predict.device import cuda
from predict.device.devices import Device
from predict.engine.choices import GREEDY, Choice
from predict.engine.masks import masks_from, num_words
from predict.engine.runner.buffers import FieldLayout, GraphShape, StepBuffer
from predict.engine.step import Choices
from predict.engine.token_history import NO_SLOT, TokenHistory
from predict.engine.window import WindowDrafts
from predict.nn.spec import Share
from predict.ops import compiled as ops

if TYPE_CHECKING:
    from paddle import Tensor


Columns = Mapping[str, npt.NDArray[Any]]  # of a table, by name


def write_choices(
    columns: Columns, choices: Sequence[Choice], num_drafts: Sequence[int] = ()
) -> None:
    """Fills `choices` of ops.sample_step; columns behind them are greedy.

    num_drafts: of ops.verify_window, which leaves greedy rows alone.
    """
    for column in columns.values():
        column[:] = 0  # temperature 0 is greedy
    if all(choice is GREEDY for choice in choices):
        return
    columns["num_drafts"][: len(num_drafts)] = num_drafts
    for name, values in zip(Choice._fields, zip(*choices, strict=True), strict=True):
        columns[name][: len(choices)] = np.array(values, columns[name].dtype)


class GpuChooser:
    """Draws tokens of logits on the device into `last_tokens`, where the next step finds them."""

    def __init__(
        self,
        device: Device,
        layout: FieldLayout,
        last_tokens: Tensor,
        vocab_size: int,
        max_rows: int,
        max_length: int,
        token_ids: npt.NDArray[np.int32] | None = None,
        share: Share | None = None,
    ):
        """max_rows: of logits that tokens are drawn from. max_length: tokens of a sequence.

        token_ids: [D] of logits of fewer tokens; token 0 stands in for one that cannot be drawn.
        share: of this rank, where steps may have their logits apart (GraphShape).
        """
        import paddle

        place = device.place()
        self.token_ids = None if token_ids is None else paddle.to_tensor(token_ids, place=place)
        self._device = device
        self._layout = layout
        self._last_tokens = last_tokens
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self._max_length = max_length
        self._stream = cuda.current_stream(device)
        self._history: TokenHistory | None = None  # from the first adjustment on
        self._share = share
        self._masks: dict[bool, MaskBuffer] = {}  # from the first guide on; apart, or of all tokens
        self._beams = BeamBuffer(self._stream)

    def admit(self, choices: Choices) -> bool:
        """Keeps the tokens of what is adjusted; whether graphs that adjust are outdated now."""
        if choices.adjusted is None:
            return False
        if self._history is None:
            self._history = TokenHistory(self._device, self._max_rows, self._max_length)
        rules = self._history.rules
        try:
            self._history.admit(choices.adjusted)
        finally:
            outdated = self._history.rules is not rules
        return outdated

    def write(self, buffer: StepBuffer, choices: Choices) -> None:
        """Fills a buffer's tables."""
        columns, penalties = buffer.columns
        window = choices.window
        write_choices(columns, choices.rows, () if window is None else [*map(len, window.drafts)])
        if choices.adjusted is not None:
            assert self._history is not None
            self._history.write_columns(penalties, choices.adjusted)

    def clear(self, buffer: StepBuffer) -> None:
        """Fills a buffer's tables with what changes nothing."""
        buffer.columns[1]["slot"][:] = NO_SLOT

    def draw(
        self, buffer: StepBuffer, logits: Tensor, shape: GraphShape, window: WindowDrafts | None
    ) -> None:
        """Queues the choice; changes logits [L, V] in place."""
        inputs = self._layout.inputs(buffer, None)
        choices, penalties = buffer.tensors[self._layout.tables]
        token_ids, logit_indices = inputs.token_ids, inputs.logit_indices
        if len(logit_indices) > len(logits):
            logit_indices = logit_indices[: len(logits)]
        if shape.adjusted:
            assert self._history is not None
            history, rules = self._history.tokens, self._history.rules
            first = self._first_token(shape.apart)
            ops.adjust_logits(logits, penalties, token_ids, logit_indices, history, rules, first)
        if shape.guided:
            ops.mask_logits(logits, self._mask_buffer(shape.apart).device)
        if shape.apart:
            assert self._share is not None
            ops.largest_step(logits, self._last_tokens, self._share)
        else:
            ops.sample_step(logits, choices, self._last_tokens)
        if self.token_ids is not None:
            rows = self._last_tokens[: len(logits)]
            tokens = ops.take_ids(self.token_ids, rows)
            cuda.copy(rows, tokens, cuda.current_stream(self._device))
        if window is not None:
            tokens, most = self._last_tokens, window.max_candidate_len
            ops.verify_window(
                logits, choices, token_ids, logit_indices, tokens, window.window, most
            )

    def send_masks(self, choices: Choices, apart: bool) -> None:
        """Computes a step's masks, and queues their copy. apart: see GraphShape."""
        self._mask_buffer(apart).send(choices)

    def _first_token(self, apart: bool) -> int:
        """Of those whose logits a step has."""
        return self._share.tokens()[0] if apart and self._share else 0

    def find(
        self, buffer: StepBuffer, logits: Tensor, shape: GraphShape, choices: Choices
    ) -> npt.NDArray[np.int32]:
        """As `draw` for a step with beams, whose candidates it queues to the array returned.

        [2, B, K] of ops.likeliest, of log-probabilities. No step runs ahead of beams, so guides
        know all tokens.
        """
        rows = self._beams.rows(list(choices.candidates), self._device)
        ops.log_softmax(logits, rows)
        if shape.guided:
            self.send_masks(choices, shape.apart)
        self.draw(buffer, logits, shape, choices.window)
        count = min(max(choices.candidates.values()), self._vocab_size)
        return self._beams.found(ops.likeliest(logits, rows, count))

    def measure(self, logits: Tensor, choices: Choices) -> list[Tensor | None]:
        """ops.logprobs of the rows that tokens were drawn from, and of the prompts' behind them."""
        import paddle

        measured: list[Tensor | None] = [None, None]
        num_rows, prompt = len(choices.rows), choices.prompt
        if choices.num_top is not None and num_rows > 0:
            num_top = min(choices.num_top, self._vocab_size)
            measured[0] = ops.logprobs(logits[:num_rows], self._last_tokens, num_top)
        if prompt.token_ids:
            targets = np.array(prompt.token_ids, np.int32)
            of_prompt = logits[num_rows : num_rows + len(targets)]
            on_device = paddle.to_tensor(targets, place=self._device.place())
            measured[1] = ops.logprobs(of_prompt, on_device, min(prompt.num_top, self._vocab_size))
        return measured

    def _mask_buffer(self, apart: bool) -> MaskBuffer:
        if apart not in self._masks:
            width = self._share.num_rows if apart and self._share else self._vocab_size
            self._masks[apart] = MaskBuffer(
                *(self._max_rows, self._vocab_size, self._device, self._stream),
                *(self._first_token(apart), width),
            )
        return self._masks[apart]


class MaskBuffer:
    """Masks of one step on their way to the device: pinned memory, and a tensor that stays.

    host, device: [num_rows, W] (see ops.mask_logits).
    """

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        device: Device,
        stream: int,
        begin: int = 0,
        width: int | None = None,
    ):
        """begin, width: the first token of rows of logits, and their columns; None: vocab_size."""
        import paddle

        width = vocab_size if width is None else width
        self._begin = begin
        # What `fill_masks` writes, where the device needs a part of it.
        is_part = begin > 0 or width < vocab_size
        whole = [num_rows, num_words(vocab_size)]
        self._whole = np.empty(whole, np.int32) if is_part else None
        shape = [num_rows, num_words(width)]
        self.host: npt.NDArray[np.int32] = cuda.pinned(shape, np.int32)
        self.device: Tensor = paddle.full(shape, -1, "int32", device=device.place())
        self._stream = stream
        self._copied = cuda.Event()  # the last masks are copied from the pinned memory
        self._copied.record(stream)

    def send(self, choices: Choices) -> None:
        """Computes the masks of a step's rows, and queues their copy."""
        assert choices.fill_masks is not None
        self._copied.synchronize()
        num_rows = len(choices.rows)
        if self._whole is None:
            choices.fill_masks(self.host)
        else:
            choices.fill_masks(self._whole)
            self.host[:num_rows] = masks_from(
                self._whole[:num_rows], self._begin, self.host.shape[1]
            )
        num_bytes = num_rows * self.host.strides[0]
        cuda.copy_bytes(self.device.data_ptr(), self.host.ctypes.data, num_bytes, self._stream)
        self._copied.record(self._stream)


class BeamBuffer:
    """Pinned memory for one step with beams at a time, since no step runs ahead of it."""

    def __init__(self, stream: int):
        self._stream = stream
        self._rows: npt.NDArray[Any] = np.empty(0, np.int32)  # pinned from the first step on
        self._found: npt.NDArray[Any] = np.empty(0, np.int32)

    def rows(self, rows: Sequence[int], device: Device) -> Tensor:
        """The rows [B] of beams, on their way to the device."""
        import paddle

        if len(self._rows) < len(rows):
            self._rows = cuda.pinned([2 * len(rows)], np.int32)
        host = self._rows[: len(rows)]
        host[:] = rows
        tensor = paddle.empty([len(rows)], "int32", device=device.place())
        cuda.copy_to_device(tensor, host, self._stream)
        return tensor

    def found(self, found: Tensor) -> npt.NDArray[np.int32]:
        """Queues the copy of candidates [2, B, K] to the array returned."""
        if len(self._found) < found.size:
            self._found = cuda.pinned([2 * found.size], np.int32)
        array = self._found[: found.size]
        cuda.copy_front_to_host(array, found, self._stream)
        return array.reshape(found.shape)
