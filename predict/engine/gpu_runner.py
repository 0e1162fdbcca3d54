"""Executes steps on a GPU: decode steps replay CUDA graphs, all others run operator by operator.

A graph serves batches up to its size (1, 2, 4, 8, 16, 32, ...). It is recorded at the first step of
its size, or after some more steps where a graph of up to twice the size exists. Steps with drafts
have graphs by their number of tokens too, and run operator by operator the first few times. A
graph's inputs are one piece of device memory that each step fills with one copy. Rows behind the
batch are padding: they write nothing (slot -1), and in plain decode steps read a token of block 0.

New tokens stay on the device for the next step (see Scheduler.advance), and are copied to pinned
memory, which the host reads later. So are logprobs, measured behind the step on unchanged logits.
A draft model's tokens stay on the device alone (see Shelf), and reach the host with the tokens of
the step that verifies them.

Guides need the previous step's tokens on the host. A step with guides has two graphs: one of the
network, queued ahead as usual, and one of masks and choice, queued when the host has computed the
masks, while the network runs.
"""

from __future__ import annotations

import ctypes
import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from predict.device import cuda
from predict.device.devices import Device
from predict.engine.beams import Candidates
from predict.engine.choices import GREEDY, Choice, Row
from predict.engine.drafts import MAX_DRAFT_TOKENS, Verified
from predict.engine.gpu_beams import BeamTokensOnTheirWay, Finder
from predict.engine.logits_processors import Adjustment
from predict.engine.logprobs import LogprobTable
from predict.engine.masks import is_guided, num_words
from predict.engine.request_state import num_wanted
from predict.engine.runner import (
    NO_TARGETS,
    CopyBlocks,
    Forward,
    KnownTokens,
    Logprobs,
    PromptTargets,
    Tokens,
)
from predict.engine.sampler import Sampler
from predict.engine.token_history import NO_SLOT, TokenHistory
from predict.engine.window import WindowVerifier, loose_drafts
from predict.nn.inputs import (
    FIELDS,
    Field,
    ForwardInputs,
    bucket_size,
    fields_with,
    max_lens_of,
)
from predict.ops import compiled as ops

if TYPE_CHECKING:
    from paddle import Tensor

ALIGNMENT = 4  # int32s: 16 bytes
MAX_SPAN = MAX_DRAFT_TOKENS + 1  # tokens of a request in a graph
PLAN_WIDTH = 3 + MAX_DRAFT_TOKENS  # of ops.follow_drafts
FEW = 4
# Steps of one shape before its graph is recorded: recording takes as long as some ten steps lose in
# a larger graph, or operator by operator.
OFTEN_MET = 6
# The same for steps with drafts and more than FEW_TOKENS tokens: there the device takes longer than
# the host even operator by operator, and only the wait for the first kernel is lost.
FEW_TOKENS, OFTEN_MET_OF_MANY = 64, 64


class GraphShape(NamedTuple):
    """The room and the kind of a graph."""

    num_seqs: int
    num_tokens: int
    max_span: int  # tokens of a request
    all_rows: bool  # logits of every token; else of one per request
    adjusted: bool = False  # logits are changed by penalties or bans
    raw: bool = False  # the unchanged logits are kept
    verified: bool = False  # TopP + window verification accepts drafts
    guided: bool = False  # masks and the choice have their own graph
    follows: bool = False  # continues a verification (see Follower)
    adapted: bool = False  # requests have adapters


def graph_shape(inputs: ForwardInputs) -> GraphShape | None:
    """The graph for a step with few tokens per request, all of them or the last ones sampled."""
    num_seqs, num_tokens = len(inputs.context_lens), len(inputs.token_ids)
    num_rows, max_span = len(inputs.logit_indices), int(inputs.max_lens[0])
    if max_span > MAX_SPAN or num_rows not in (num_tokens, num_seqs):
        return None
    size = bucket_size(num_seqs)
    if num_tokens == num_seqs:
        return GraphShape(size, size, 1, True) if num_rows == num_seqs else None
    # One request: the graph of its span. Else two kinds, so that few graphs are recorded.
    span = bucket_size(max_span) if num_seqs == 1 or max_span > FEW else FEW
    # More tokens than requests, padding included: equal numbers of tokens and rows mean logits of
    # every token.
    num_tokens_with_room = max(bucket_size(num_tokens), bucket_size(size + 1))
    return GraphShape(size, num_tokens_with_room, span, num_rows == num_tokens)


def graph_for(
    shape: GraphShape, recorded: Collection[GraphShape], num_met: Counter[GraphShape]
) -> GraphShape | None:
    """The graph to run or record for a step of `shape`; None: operator by operator.

    num_met: counts steps of shapes without a graph; modified.
    """
    if shape in recorded:
        return shape
    num_met[shape] += 1
    of_many = shape.max_span > 1 and shape.num_tokens > FEW_TOKENS
    if num_met[shape] >= (OFTEN_MET_OF_MANY if of_many else OFTEN_MET):
        return shape
    if shape.max_span > 1:
        return None
    # The usual case when a batch ends, one request after the other.
    roomier = [
        each
        for each in recorded
        if shape.num_seqs < each.num_seqs <= 2 * shape.num_seqs
        and each == shape._replace(num_seqs=each.num_seqs, num_tokens=each.num_tokens)
    ]
    return min(roomier, default=shape)


class InputBuffer:
    """Inputs of one step: arrays in pinned memory, and tensors in one piece of device memory.

    arrays, tensors: the network's fields that are on the device (see Layout), then the choice's.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], host: npt.NDArray[Any], device: Tensor):
        """shapes: of the arrays. host, device: flat int32, large enough."""
        self.arrays: list[npt.NDArray[Any]] = []
        self.tensors: list[Tensor] = []
        start = 0
        for shape in shapes:
            size = math.prod(shape)
            self.arrays.append(host[start : start + size].reshape(shape))
            tensor = device[start : start + size]
            if len(shape) > 1:
                tensor = tensor.reshape(list(shape))
            # An empty tensor (of a prompt's chunk that samples nothing) has no address.
            if size > 0 and tensor.data_ptr() != device.data_ptr() + 4 * start:
                raise RuntimeError("Paddle copied a slice that has to share its tensor's memory")
            self.tensors.append(tensor)
            start += padded(size)


def padded(size: int) -> int:
    """`size` int32s, rounded up so that the next field is aligned."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def num_elements(shapes: Sequence[tuple[int, ...]]) -> int:
    """Elements of an InputBuffer's memory."""
    return sum(padded(math.prod(shape)) for shape in shapes)


class FieldLayout:
    """The order of a network's fields in an InputBuffer, before the choice's inputs.

    device: the fields on the device, in order, with their indices in ForwardInputs. places: indices
    in the buffer, by name. of_tokens, of_seqs, of_blocks: place, index and padding of fields with a
    value per token, per request, and per block of a request.
    """

    def __init__(self, fields: Sequence[Field]):
        rows = [(index, field) for index, field in enumerate(FIELDS) if field in fields]
        self.device = [(index, field) for index, field in rows if not field.on_host]
        self.num_fields = len(self.device)
        self.places = {field.name: place for place, (_, field) in enumerate(self.device)}
        self.of_tokens = self._begin_with("T")
        self.of_seqs = self._begin_with("B")
        self.of_blocks = self._begin_with("B", by_block=True)
        # Of the tensors of the buffer and, behind them, max_lens and None.
        sources = {**self.places, "max_lens": self.num_fields}
        none = self.num_fields + 1
        self._in_order = operator.itemgetter(*(sources.get(each.name, none) for each in FIELDS))

    def _begin_with(self, dim: str, by_block: bool = False) -> list[tuple[int, int, int]]:
        return [
            (place, index, field.padding)
            for place, (index, field) in enumerate(self.device)
            if field.shape[0] == dim and ("M" in field.shape) == by_block
        ]

    def inputs(self, buffer: InputBuffer, max_lens: Tensor) -> ForwardInputs:
        """A buffer's tensors as ForwardInputs."""
        return ForwardInputs(*self._in_order([*buffer.tensors[: self.num_fields], max_lens, None]))

    def write(
        self, arrays: Sequence[npt.NDArray[Any]], inputs: ForwardInputs, shape: GraphShape
    ) -> None:
        """Fills a graph's arrays with a step's inputs and padding."""
        num_seqs, num_tokens = len(inputs.context_lens), len(inputs.token_ids)
        for count, room, fields in (
            (num_tokens, shape.num_tokens, self.of_tokens),
            (num_seqs, shape.num_seqs, self.of_seqs),
        ):
            for place, index, padding in fields:
                array = arrays[place]
                array[:count] = inputs[index]
                if count < room:
                    array[count:] = padding
        for place, index, padding in self.of_blocks:
            array, values = arrays[place], inputs[index]
            array[:num_seqs, : values.shape[1]] = values
            if num_seqs < shape.num_seqs:
                array[num_seqs:, 0] = padding  # padding requests have one token
        if shape.max_span > 1:  # padding requests have no tokens
            borders = arrays[self.places["cu_seqlens_q"]]
            borders[: num_seqs + 1] = inputs.cu_seqlens_q
            borders[num_seqs + 1 :] = num_tokens
            if not shape.all_rows:
                rows = arrays[self.places["logit_indices"]]
                rows[:num_seqs] = inputs.logit_indices
                rows[num_seqs:] = 0


def write_choices(
    columns: npt.NDArray[np.int32], choices: Sequence[Choice], num_drafts: Sequence[int] = ()
) -> None:
    """Fills `choices` of ops.sample_step; columns behind them are greedy.

    num_drafts: of ops.verify_window.
    """
    num_rows, stride = len(choices), columns.shape[1]
    columns[:4] = columns[8:] = 0  # temperature 0 is greedy
    columns[9, : len(num_drafts)] = num_drafts
    if all(choice is GREEDY for choice in choices):
        return
    values = list(zip(*choices, strict=True))
    columns[0, :num_rows] = np.array(values[0], np.float32).view(np.int32)
    columns[1, :num_rows] = values[1]
    columns[2, :num_rows] = np.array(values[2], np.float32).view(np.int32)
    columns[3, :num_rows] = np.array(values[5], np.float32).view(np.int32)
    columns[8, :num_rows] = np.array(values[6], np.float32).view(np.int32)
    flat = columns.reshape(-1)
    flat[4 * stride : 4 * stride + 2 * num_rows] = np.array(values[3], np.int64).view(np.int32)
    flat[6 * stride : 6 * stride + 2 * num_rows] = np.array(values[4], np.int64).view(np.int32)


class TokenRing:
    """Copies of tokens from the device to the host, in slots that are used in turn."""

    def __init__(self, size: int, stream: int, num_slots: int):
        """size: tokens of a step, at most. num_slots: steps whose tokens may be on their way."""
        self._stream = stream
        self._arrays = [cuda.pinned([size], np.int32) for _ in range(num_slots)]
        self._events = [cuda.Event() for _ in range(num_slots)]
        # Pinned from the first logprobs on.
        self._measured = [np.empty(0, np.int32) for _ in range(num_slots)]
        self._next = 0

    def send(
        self,
        tokens: Tensor,
        num_rows: int,
        measured: Sequence[Tensor | None] = (),
        num_named: int = 0,
    ) -> TokensOnTheirWay:
        """Queues the copies of the first `num_rows` tokens, and of results of ops.logprobs.

        measured: of the new tokens and of prompts' tokens, None where not wanted. num_named: tokens
        up to the last that a placeholder of the step refers to.
        """
        slot = self._next
        array, event = self._arrays[slot][: max(num_rows, num_named)], self._events[slot]
        self._next = (slot + 1) % len(self._events)
        cuda.copy_front_to_host(array, tokens, self._stream)
        num_measured = sum(tensor.size for tensor in measured if tensor is not None)
        if len(self._measured[slot]) < num_measured:
            self._measured[slot] = cuda.pinned([2 * num_measured], np.int32)
        tables: list[npt.NDArray[np.int32] | None] = []
        start = 0
        for tensor in measured:
            if tensor is None:
                tables.append(None)
                continue
            table = self._measured[slot][start : start + tensor.size]
            cuda.copy_front_to_host(table, tensor, self._stream)
            tables.append(table.reshape(tensor.shape))
            start += tensor.size
        event.record(self._stream)
        return TokensOnTheirWay(array, num_rows, event, tables)


class TokensOnTheirWay(Tokens):
    """Tokens of a step whose copy to the host may not have arrived."""

    def __init__(
        self,
        array: npt.NDArray[np.int32],
        num_rows: int,
        event: cuda.Event,
        tables: Sequence[npt.NDArray[np.int32] | None] = (),
    ):
        self._array = array
        self._num_rows = num_rows
        self._event = event
        self._tables = tables
        self._tokens: list[int] = []

    def take(self) -> list[int | Candidates]:
        self._event.synchronize()
        self._tokens = self._array.tolist()
        return [*self._tokens[: self._num_rows]]

    def known(self, drafts: Sequence[int]) -> list[int]:
        return [draft if draft >= 0 else self._tokens[-1 - draft] for draft in drafts]

    def logprobs(self) -> Logprobs:
        return Logprobs(*(None if table is None else read_table(table) for table in self._tables))


class Shelf:
    """Tokens that a draft model's steps leave on the device for the target's next step.

    They lie behind the tokens of the target's last step, where placeholders refer to them, in two
    halves: while the target verifies one half, the next drafts go to the other.
    """

    def __init__(self, tokens: Tensor, first: int, stream: int):
        """tokens: the target's, int32; free from index `first` on."""
        self.tokens = tokens
        self._address, self._size = tokens.data_ptr(), (len(tokens) - first) // 2
        self._first = self._next = first
        self._other = first + self._size
        self._stream = stream

    def turn(self) -> None:
        """Switches halves: queued work reads this one, and is done with the other."""
        self._first, self._other = self._other, self._first
        self._next = self._first

    def send(self, tokens: Tensor, num_rows: int) -> KnownTokens:
        """Queues the copy of the first `num_rows` tokens; their placeholders in the target."""
        if self._next + num_rows > self._first + self._size:
            self._next = self._first  # overwrites a proposal that no step used
        start = self._next
        self._next += num_rows
        target = self._address + 4 * start
        cuda.copy_bytes(target, tokens.data_ptr(), 4 * num_rows, self._stream)
        return KnownTokens(range(-1 - start, -1 - start - num_rows, -1), Logprobs())


def read_table(measured: npt.NDArray[np.int32]) -> LogprobTable:
    """The table that ops.logprobs returned: [L, 2 + 2K]."""
    num_top = measured.shape[1] // 2 - 1
    floats = measured.view(np.float32)
    return LogprobTable(
        floats[:, 0], measured[:, 1], measured[:, 2 : 2 + num_top], floats[:, 2 + num_top :]
    )


class WaitingTokens(Tokens):
    """Tokens of a step whose choice waits for `choose`."""

    def __init__(self, choose: Callable[[], TokensOnTheirWay]):
        """choose: queues the choice."""
        self._choose: Callable[[], TokensOnTheirWay] | None = choose
        self._tokens: TokensOnTheirWay | None = None

    def choose(self) -> None:
        if self._choose is not None:
            self._tokens, self._choose = self._choose(), None

    @property
    def _chosen(self) -> TokensOnTheirWay:
        if self._tokens is None:
            raise RuntimeError("tokens are taken before they are chosen")
        return self._tokens

    def take(self) -> list[int | Candidates]:
        return self._chosen.take()

    def known(self, drafts: Sequence[int]) -> list[int]:
        return self._chosen.known(drafts)

    def logprobs(self) -> Logprobs:
        return self._chosen.logprobs()


class LogitUses(NamedTuple):
    """How a step's logits become tokens."""

    rows: Sequence[Row]
    choices: Sequence[Choice]
    adjustments: Sequence[Adjustment] | None
    raw: bool = False  # the logits that come back are those before adjustments
    verifier: WindowVerifier | None = None  # of the step's drafts
    plan: npt.NDArray[np.int32] | None = None  # of ops.follow_drafts
    guided: bool = False  # the choice waits for masks


@dataclass(frozen=True)
class DecodeGraph:
    """One recorded decode step; its outputs are the logits, or None with drafts.

    choice: the graph of masks and choice of a step with guides, which always has logits.
    """

    buffer: InputBuffer
    host: npt.NDArray[Any]
    device: Tensor
    address: int  # of `device`
    graph: cuda.Graph[Any]
    choice: cuda.Graph[None] | None = None

    def reset(self) -> None:
        self.graph.reset()
        if self.choice is not None:
            self.choice.reset()


class MaskBuffer:
    """Masks of one step on their way to the device: pinned memory, and a tensor that stays.

    host, device: [num_rows, W] (see ops.mask_logits).
    """

    def __init__(self, num_rows: int, vocab_size: int, device: Device, stream: int):
        import paddle

        shape = [num_rows, num_words(vocab_size)]
        self.host: npt.NDArray[np.int32] = cuda.pinned(shape, np.int32)
        self.device: Tensor = paddle.full(shape, -1, "int32", device=device.place())
        self._stream = stream
        self._copied = cuda.Event()  # the last masks are copied from the pinned memory
        self._copied.record(stream)

    def send(self, rows: Sequence[Row], sampler: Sampler) -> None:
        """Computes the masks of rows, and queues their copy."""
        self._copied.synchronize()
        sampler.masks.fill(rows, self.host)
        num_bytes = len(rows) * self.host.strides[0]
        cuda.copy_bytes(self.device.data_ptr(), self.host.ctypes.data, num_bytes, self._stream)
        self._copied.record(self._stream)


class GpuRunner:
    """Runs steps over its own caches. See predict.engine.runner.Runner.

    Logits of a decode step lie in the graph's memory: use them before the next step.
    """

    num_ahead = 1

    def __init__(
        self,
        forward: Forward,
        copy_blocks: CopyBlocks,
        device: Device,
        max_length: int,
        max_num_seqs: int,
        block_size: int,
        vocab_size: int,
        use_graphs: bool = True,
        max_rows: int = 0,
        max_drafts: int = 0,
        shelf: Shelf | None = None,
        fields: Sequence[Field] = fields_with(),
        adapter_pages: int = 0,
        always_adapted: bool = False,
    ):
        """max_length: tokens of the longest sequence, which bounds every replay of a graph.

        max_rows: logit rows of a step, where drafts make more of them than max_num_seqs.
        max_drafts: of a draft model for one step. shelf: the target's, for a draft model's runner.
        fields: of the network. adapter_pages: of the largest adapter. always_adapted: steps without
        adapters run like those with adapters, which gives the same bits.
        """
        import paddle

        self.forward = forward
        self.copy_blocks = copy_blocks
        self.device = device
        self.max_length = max_length
        self.layout = FieldLayout(fields)
        self._adapter_pages = adapter_pages
        self._always_adapted = always_adapted
        self.max_blocks = -(-max_length // block_size)
        self._block_size = block_size
        self.vocab_size = vocab_size
        self.pool = cuda.GraphPool(device) if use_graphs else None
        self.graphs: dict[GraphShape, DecodeGraph] = {}
        self._num_met: Counter[GraphShape] = Counter()  # of those without a graph
        self.num_recorded = 0
        self._stream = cuda.current_stream(device)
        self._copied = cuda.Event()  # the last step's inputs are copied from the pinned memory
        self._copied.record(self._stream)
        self._host: npt.NDArray[Any] = np.empty(0, np.int32)  # pinned from the first step on
        self._max_rows = bucket_size(max(max_rows, max_num_seqs))
        size = self._max_rows + 2 * max_drafts
        self._last_tokens = paddle.zeros([size], "int32", device=device.place())
        # Operators read them when they are called, so that one tensor serves all steps.
        self._max_lens = paddle.to_tensor(max_lens_of([1], [1]), place=paddle.CPUPlace())
        lens = (ctypes.c_int32 * len(self._max_lens)).from_address(self._max_lens.data_ptr())
        self._max_lens_array = np.ctypeslib.as_array(lens)
        self.shelf = Shelf(self._last_tokens, self._max_rows, self._stream)
        self._outlet: TokenRing | Shelf
        # One step runs and one is ahead.
        self._outlet = TokenRing(size, self._stream, 3) if shelf is None else shelf
        self._history: TokenHistory | None = None  # from the first adjustment on
        self._masks: MaskBuffer | None = None  # from the first guide on
        self._finder = Finder(self._stream)

    def execute(self, inputs: ForwardInputs) -> Tensor:
        num_rows = len(inputs.logit_indices)
        # No tokens are drawn where there is no room for them.
        choices = [GREEDY] * (num_rows if num_rows <= self._max_rows else 0)
        wanted = LogitUses((), choices, None)
        logits = self._run(inputs, wanted, keeps_logits=True)
        assert logits is not None
        return logits

    def launch(
        self,
        inputs: ForwardInputs,
        rows: Sequence[Row],
        sampler: Sampler,
        prompt: PromptTargets = NO_TARGETS,
    ) -> Tokens:
        if isinstance(self._outlet, Shelf):
            self._run(inputs, LogitUses(rows, sampler.choices(rows), None))
            return self._outlet.send(self._last_tokens, len(rows))
        beams = [index for index, row in enumerate(rows) if row.request.beam_group is not None]
        num_top = num_wanted([row.request for row in rows])
        adjustments = sampler.adjustments(rows)
        guided = is_guided(rows)
        changed = adjustments is not None or guided or bool(beams)
        wanted = LogitUses(
            rows,
            sampler.choices(rows),
            adjustments,
            raw=num_top is not None and changed,
            verifier=sampler.verifier if any(row.drafts for row in rows) else None,
            guided=guided,
        )
        measures = num_top is not None or bool(prompt.token_ids)
        num_named = -int(inputs.token_ids.min())
        outlet = self._outlet

        def send(logits: Tensor | None) -> TokensOnTheirWay:
            measured: Sequence[Tensor | None] = ()
            if measures:
                assert logits is not None
                measured = self._measure(logits, len(rows), num_top, prompt)
            return outlet.send(self._last_tokens, len(rows), measured, num_named)

        if beams:
            count = min(
                max(sampler.num_candidates(rows[index]) for index in beams), self.vocab_size
            )
            logits, found = self._run_beams(inputs, wanted, sampler, beams, count)
            tokens = BeamTokensOnTheirWay(send(logits), found, beams)
            self.shelf.turn()
            return tokens
        if guided:
            waiting = self._launch_guided(inputs, wanted, sampler, send)
            self.shelf.turn()
            return waiting
        sent = send(self._run(inputs, wanted, keeps_logits=measures))
        self.shelf.turn()
        return sent

    def _launch_guided(
        self,
        inputs: ForwardInputs,
        wanted: LogitUses,
        sampler: Sampler,
        send: Callable[[Tensor | None], TokensOnTheirWay],
    ) -> WaitingTokens:
        """Queues the network of a step, and the choice too where all tokens before it are known."""
        rows = wanted.rows
        masks = self._mask_buffer()
        logits, choose = self._run_network(inputs, wanted)

        def finish() -> TokensOnTheirWay:
            masks.send(rows, sampler)
            choose()
            return send(logits)

        waiting = WaitingTokens(finish)
        # Placeholders of the step itself come later: see Scheduler.advance.
        if not any(row.request.guide and row.request.num_placeholders for row in rows):
            waiting.choose()
        return waiting

    def _mask_buffer(self) -> MaskBuffer:
        if self._masks is None:
            self._masks = MaskBuffer(self._max_rows, self.vocab_size, self.device, self._stream)
        return self._masks

    def launch_behind(
        self,
        inputs: ForwardInputs,
        rows: Sequence[Row],
        sampler: Sampler,
        verified: Sequence[Verified],
        num_chosen: int,
    ) -> KnownTokens:
        plan = np.zeros((len(verified), PLAN_WIDTH), np.int32)
        for columns, (_, row, drafts) in zip(plan, verified, strict=True):
            columns[:3] = len(drafts), row, num_chosen
            columns[3 : 3 + len(drafts)] = [-1 - draft for draft in drafts]
        assert isinstance(self._outlet, Shelf)
        self._run(inputs, LogitUses(rows, sampler.choices(rows), None, plan=plan))
        return self._outlet.send(self._last_tokens, len(rows))

    def _measure(
        self, logits: Tensor, num_rows: int, num_top: int | None, prompt: PromptTargets
    ) -> list[Tensor | None]:
        """ops.logprobs of the first `num_rows` rows and of the prompts' rows behind them."""
        import paddle

        measured: list[Tensor | None] = [None, None]
        if num_top is not None and num_rows > 0:
            num_top = min(num_top, self.vocab_size)
            measured[0] = ops.logprobs(logits[:num_rows], self._last_tokens, num_top)
        if prompt.token_ids:
            targets = np.array(prompt.token_ids, np.int32)
            of_prompt = logits[num_rows : num_rows + len(targets)]
            on_device = paddle.to_tensor(targets, place=self.device.place())
            measured[1] = ops.logprobs(of_prompt, on_device, min(prompt.num_top, self.vocab_size))
        return measured

    def _run_beams(
        self,
        inputs: ForwardInputs,
        wanted: LogitUses,
        sampler: Sampler,
        beams: Sequence[int],
        count: int,
    ) -> tuple[Tensor, npt.NDArray[np.int32]]:
        """As `_run`, and `count` candidates for each of the rows `beams` (see Finder.find).

        No step runs ahead of beams, so guides know all tokens.
        """
        import paddle

        num_rows, adjusted = len(wanted.rows), wanted.adjustments is not None
        tokens_before = self._last_tokens.clone()
        if wanted.adjustments is not None:
            self._admit(wanted.adjustments, wanted.rows)
        # Runs the graph of a plain step, first, to keep the device busy; its tokens are drawn again
        # below.
        greedy = LogitUses(wanted.rows, [GREEDY] * num_rows, None)
        logits = self._run(inputs, greedy, keeps_logits=True)
        assert logits is not None
        shapes = [(len(beams),), (num_rows,), (num_rows,), *sampling_shapes(num_rows)]
        host = self._finder.host(num_elements(shapes))
        device = paddle.empty(host.shape, "int32", device=self.device.place())
        buffer = InputBuffer(shapes, host, device)
        buffer.arrays[0][:] = beams
        buffer.arrays[1][:] = [row.request.token_ids[-1] for row in wanted.rows]
        buffer.arrays[2][:] = np.arange(num_rows)
        self._write_wanted(buffer, wanted)
        cuda.copy_to_device(device, host, self._stream)
        rows, newest, row_indices, choices, penalties = buffer.tensors
        ops.resolve_tokens(newest, tokens_before)
        changed = logits.clone() if wanted.raw else logits
        changed = changed if len(changed) == num_rows else changed[:num_rows]
        ops.log_softmax(changed, rows)
        if adjusted:
            assert self._history is not None
            history, rules = self._history.tokens, self._history.rules
            ops.adjust_logits(changed, penalties, newest, row_indices, history, rules)
        if wanted.guided:
            masks = self._mask_buffer()
            masks.send(wanted.rows, sampler)
            ops.mask_logits(changed, masks.device)
        ops.sample_step(changed, choices, self._last_tokens)
        return logits, self._finder.find(changed, rows, count)

    def _run(
        self, inputs: ForwardInputs, wanted: LogitUses, keeps_logits: bool = False
    ) -> Tensor | None:
        """Puts tokens into `_last_tokens`; returns logits [L, V], never None with keeps_logits.

        Rows behind the choices stay as the network returns them.
        """
        recorded = self._graph_of(inputs, wanted, keeps_logits)
        if recorded is None:
            logits, choose = self._run_eagerly(inputs, wanted)
            choose()
            return logits
        return self._replay(inputs, wanted, recorded)[0]

    def _run_network(
        self, inputs: ForwardInputs, wanted: LogitUses
    ) -> tuple[Tensor, Callable[[], None]]:
        """Runs a step with guides up to its unchanged logits [L, V].

        Also returns the choice, to be called once the masks are there.
        """
        recorded = self._graph_of(inputs, wanted, keeps_logits=False)
        if recorded is None:
            return self._run_eagerly(inputs, wanted)
        logits, graph = self._replay(inputs, wanted, recorded)
        assert logits is not None
        assert graph.choice is not None
        return logits, graph.choice.replay

    def _graph_of(
        self, inputs: ForwardInputs, wanted: LogitUses, keeps_logits: bool
    ) -> GraphShape | None:
        """The graph that runs a step, recorded or to be; None: operator by operator."""
        if wanted.adjustments is not None:
            self._admit(wanted.adjustments, wanted.rows)
        shape = None if self.pool is None else graph_shape(inputs)
        if shape is None or (keeps_logits and shape.max_span > 1):
            return None
        if len(wanted.choices) != len(inputs.logit_indices):
            return None
        shape = shape._replace(
            adjusted=wanted.adjustments is not None,
            raw=wanted.raw,
            verified=wanted.verifier is not None,
            guided=wanted.guided,
            follows=wanted.plan is not None,
            adapted=self._is_adapted(inputs),
        )
        return graph_for(shape, self.graphs, self._num_met)

    def _is_adapted(self, inputs: ForwardInputs) -> bool:
        """Whether the network reads adapters in this step."""
        ids = inputs.adapter_ids
        return ids is not None and (self._always_adapted or bool((ids >= 0).any()))

    def _admit(self, adjustments: Sequence[Adjustment], rows: Sequence[Row]) -> None:
        if self._history is None:
            self._history = TokenHistory(self.device, self._max_rows, self.max_length)
        rules = self._history.rules
        try:
            self._history.admit(adjustments, rows)
        finally:
            if self._history.rules is not rules:
                # These graphs were recorded with the old tensor of rules.
                for key in [key for key in self.graphs if key.adjusted]:
                    self.graphs.pop(key).reset()

    def _run_eagerly(
        self, inputs: ForwardInputs, wanted: LogitUses
    ) -> tuple[Tensor, Callable[[], None]]:
        """The logits of a step, and its choice as a function to call."""
        import paddle

        fields = [inputs[index] for index, _ in self.layout.device]
        shapes = [np.shape(array) for array in fields]
        shapes += sampling_shapes(len(wanted.choices))
        if wanted.plan is not None:
            shapes.append(wanted.plan.shape)
        count = num_elements(shapes)
        self._copied.synchronize()
        if len(self._host) < count:
            self._host = cuda.pinned([2 * count], np.int32)
        host = self._host[:count]
        device = paddle.empty([count], "int32", device=self.device.place())
        buffer = InputBuffer(shapes, host, device)
        for array, values in zip(buffer.arrays, fields, strict=False):
            array[...] = values
        self._write_wanted(buffer, wanted)
        cuda.copy_to_device(device, host, self._stream)
        self._copied.record(self._stream)
        num_rows, adjusted = len(wanted.choices), wanted.adjustments is not None
        with paddle.no_grad():
            rows, logits = self._network(
                buffer, inputs.max_lens, num_rows, wanted.raw, self._is_adapted(inputs)
            )

        def choose() -> None:
            with paddle.no_grad():
                self._choose(buffer, rows, adjusted, wanted.guided, wanted.verifier)

        return logits, choose

    def _write_wanted(self, buffer: InputBuffer, wanted: LogitUses) -> None:
        arrays = buffer.arrays
        if wanted.plan is not None:
            *arrays, plan = arrays
            plan[: len(wanted.plan)] = wanted.plan
            plan[len(wanted.plan) :, 0] = -1
        choices, penalties = arrays[-2:]
        num_drafts: Sequence[int] = ()
        if wanted.verifier is not None:
            num_drafts = loose_drafts(wanted.rows, wanted.choices)
        write_choices(choices, wanted.choices, num_drafts)
        if wanted.adjustments is not None:
            assert self._history is not None
            self._history.write_columns(penalties, wanted.adjustments, wanted.rows)

    def _network(
        self,
        buffer: InputBuffer,
        max_lens: npt.NDArray[np.int32],
        num_rows: int,
        raw: bool,
        adapted: bool,
    ) -> tuple[Tensor | None, Tensor]:
        """Logits [num_rows, V] to draw tokens from (None without rows), and those of all rows."""
        choices, _, *plan = buffer.tensors[self.layout.num_fields :]
        self._max_lens_array[:] = max_lens
        inputs = self.layout.inputs(buffer, self._max_lens)
        if not adapted:
            inputs = inputs._replace(adapter_ids=None, adapter_pages=None)
        if plan:
            assert isinstance(self._outlet, Shelf)
            ops.follow_drafts(inputs, choices, plan[0], self._outlet.tokens, self._block_size)
        ops.resolve_tokens(inputs.token_ids, self._last_tokens)
        logits = self.forward(inputs)
        if num_rows == 0:
            return None, logits
        rows = logits[:num_rows] if len(logits) > num_rows else logits
        return rows, logits.clone() if raw else logits

    def _choose(
        self,
        buffer: InputBuffer,
        logits: Tensor | None,
        adjusted: bool,
        guided: bool,
        verifier: WindowVerifier | None,
    ) -> None:
        """Draws tokens into `_last_tokens`; changes logits [L, V] in place."""
        if logits is None:
            return
        inputs = self.layout.inputs(buffer, self._max_lens)
        choices, penalties = buffer.tensors[self.layout.num_fields :][:2]
        token_ids, logit_indices = inputs.token_ids, inputs.logit_indices
        if len(logit_indices) > len(logits):
            logit_indices = logit_indices[: len(logits)]
        if adjusted:
            assert self._history is not None
            history, rules = self._history.tokens, self._history.rules
            ops.adjust_logits(logits, penalties, token_ids, logit_indices, history, rules)
        if guided:
            ops.mask_logits(logits, self._mask_buffer().device)
        ops.sample_step(logits, choices, self._last_tokens)
        if verifier is not None:
            window, most = verifier.window, verifier.max_candidate_len
            tokens = self._last_tokens
            ops.verify_window(logits, choices, token_ids, logit_indices, tokens, window, most)

    def _replay(
        self, inputs: ForwardInputs, wanted: LogitUses, shape: GraphShape
    ) -> tuple[Tensor | None, DecodeGraph]:
        """The logits, if kept, and the graph, whose choice the caller replays."""
        num_seqs = len(inputs.context_lens)
        graph = self.graphs.get(shape)
        if graph is None:
            graph = self.graphs[shape] = self._capture(shape, wanted.verifier)
            self.num_recorded += 1
        self._copied.synchronize()
        self.layout.write(graph.buffer.arrays, inputs, shape)
        self._write_wanted(graph.buffer, wanted)
        host = graph.host
        cuda.copy_bytes(graph.address, host.ctypes.data, host.nbytes, self._stream)
        self._copied.record(self._stream)
        graph.graph.replay()
        logits: Tensor | None = graph.graph.outputs
        if logits is not None and shape.max_span == 1 and num_seqs < shape.num_seqs:
            logits = logits[:num_seqs]
        return logits, graph

    def _capture(self, shape: GraphShape, verifier: WindowVerifier | None) -> DecodeGraph:
        """Records a graph on a step of padding."""
        import paddle

        assert self.pool is not None
        size, num_tokens = shape.num_seqs, shape.num_tokens
        num_rows = num_tokens if shape.all_rows else size
        dims = {"T": num_tokens, "B": size, "B+1": size + 1, "M": self.max_blocks, "L": num_rows}
        dims["R"] = self._adapter_pages
        shapes = [field.sized(dims) for _, field in self.layout.device]
        shapes += sampling_shapes(num_rows)
        if shape.follows:
            shapes.append((size, PLAN_WIDTH))
        count = num_elements(shapes)
        host = cuda.pinned([count], np.int32)
        device = paddle.empty([count], "int32", device=self.device.place())
        buffer = InputBuffer(shapes, host, device)
        host[:] = 0
        for array, (_, field) in zip(buffer.arrays, self.layout.device, strict=False):
            array[:] = field.padding
        places = self.layout.places
        if shape.max_span == 1:
            buffer.arrays[places["cu_seqlens_q"]][:] = np.arange(size + 1)
        buffer.arrays[places["logit_indices"]][:] = np.arange(num_rows)
        buffer.arrays[self.layout.num_fields + 1][3] = NO_SLOT
        if shape.follows:
            buffer.arrays[-1][:, 0] = -1
        cuda.copy_to_device(device, host, self._stream)
        # The run before the recording overwrites the previous step's tokens.
        last_tokens = self._last_tokens.clone()

        max_lens = np.array((shape.max_span, self.max_length, shape.max_span, 0), np.int32)
        rows: list[Tensor | None] = []  # of a step with guides

        def choose(logits: Tensor | None) -> None:
            self._choose(buffer, logits, shape.adjusted, shape.guided, verifier)

        def step() -> Tensor | None:
            drawn, logits = self._network(buffer, max_lens, num_rows, shape.raw, shape.adapted)
            if shape.guided:
                rows[:] = [drawn]
                return logits
            choose(drawn)
            # Rows of drafts are many: their memory serves the next graph too.
            return logits if shape.max_span == 1 else None

        choice: cuda.Graph[None] | None = None
        with paddle.no_grad():
            graph = self.pool.capture(step)
            if shape.guided:
                # On the logits of the first recording, which the graph owns.
                choice = self.pool.capture(lambda: choose(rows[0]))
        cuda.copy(self._last_tokens, last_tokens, self._stream)
        return DecodeGraph(buffer, host, device, device.data_ptr(), graph, choice)


def sampling_shapes(num_rows: int) -> list[tuple[int, ...]]:
    """Shapes of the choice's inputs: choices, penalties."""
    columns = padded(max(num_rows, 1))
    return [(10, columns), (8, columns)]
