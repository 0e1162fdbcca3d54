"""Executes steps on a GPU: decode steps replay CUDA graphs, all others run operator by operator.

A graph's inputs are one piece of device memory for each dtype, most often one in all, that each
step fills with one copy. Rows behind the batch are padding: they write nothing (slot -1), and in
plain decode steps read a token of block 0.

Guides need the previous step's tokens on the host. A step with guides has two graphs: one of the
network, queued ahead as usual, and one of masks and choice, queued when the host has computed the
masks, while the network runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from predict.device import cuda
from predict.device.devices import Device
from predict.engine.drafts import MAX_DRAFT_TOKENS
from predict.engine.runner.buffers import (
    FieldLayout,
    GraphShape,
    Piece,
    PinnedMemory,
    Slab,
    StepBuffer,
    slab_sizes,
    table_pieces,
)
from predict.engine.runner.gpu_chooser import GpuChooser
from predict.engine.runner.gpu_network import GpuNetwork
from predict.engine.runner.graphs import GraphCache, StepGraph, graph_shape
from predict.engine.runner.networks import Forward
from predict.engine.runner.transport import (
    BeamTokensOnTheirWay,
    Shelf,
    TokenRing,
    TokensOnTheirWay,
    WaitingTokens,
)
from predict.engine.step import (
    Choices,
    CopyBlocks,
    Followed,
    KnownTokens,
    StepTokens,
    are_largest,
)
from predict.engine.window import WindowDrafts
from predict.nn.decoder import StepOutputs
from predict.nn.inputs import Field, RowKind, StepInputs, bucket_size, fields_with
from predict.nn.spec import Share

if TYPE_CHECKING:
    from paddle import Tensor

PLAN_WIDTH = 3 + MAX_DRAFT_TOKENS  # of ops.follow_drafts
NO_CHOICES = Choices(())
NONE = {"T": 0}  # sizes of the fields of pictures in a step without any
Draw = Callable[[], None]  # queues a step's choice


class GpuRunner:
    """Runs steps over its own caches. See predict.engine.step.Runner.

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
        graph_bytes: int,
        max_rows: int = 0,
        max_drafts: int = 0,
        shelf: Shelf | None = None,
        fields: Sequence[Field] = fields_with(),
        adapter_pages: int = 0,
        always_adapted: bool = False,
        takes_all: bool = False,
        token_ids: npt.NDArray[np.int32] | None = None,
        share: Share | None = None,
    ):
        """max_length: tokens of the longest sequence, which bounds every replay of a graph.

        graph_bytes: bound of the memory that graphs keep, logits above all. max_rows: logit rows of
        a step, where drafts make more of them than max_num_seqs. max_drafts: of a draft model for
        one step. shelf: the target's, for a draft model's runner. fields: of the network.
        adapter_pages: of the largest adapter. always_adapted, takes_all: see GpuNetwork.
        token_ids: see GpuChooser. share: of a rank whose `forward` gives its own tokens' logits.
        """
        import paddle

        self.copy_blocks = copy_blocks
        self.device = device
        self._max_length = max_length
        self._adapter_pages = adapter_pages
        self._max_blocks = -(-max_length // block_size)
        self._vocab_size, self._share = vocab_size, share
        self._max_rows = bucket_size(max(max_rows, max_num_seqs))
        size = self._max_rows + 2 * max_drafts
        self._last_tokens = paddle.zeros([size], "int32", device=device.place())
        self._stream = cuda.current_stream(device)
        self.shelf = Shelf(self._last_tokens, self._max_rows, self._stream)
        # One step runs and one is ahead.
        self._outlet: TokenRing | Shelf = shelf or TokenRing(size, self._stream, 3)
        layout = FieldLayout(fields)
        followed = (shelf or self.shelf).tokens
        self.network = GpuNetwork(
            *(forward, layout, self._last_tokens, followed, block_size),
            *(always_adapted, takes_all),
        )
        self.chooser = GpuChooser(
            *(device, layout, self._last_tokens, vocab_size, self._max_rows, max_length),
            *(token_ids, share),
        )
        self.graphs = GraphCache(cuda.GraphPool(device), graph_bytes)
        self._pinned = PinnedMemory(device)
        self._copied = cuda.Event()  # the last step's inputs are copied from the pinned memory
        self._copied.record(self._stream)

    @property
    def num_recorded(self) -> int:
        return self.graphs.num_recorded

    def run(self, inputs: StepInputs, taps: Sequence[str] = ()) -> StepOutputs:
        shape = self._shape(inputs, NO_CHOICES)._replace(taps=tuple(taps))
        return self._start(inputs, NO_CHOICES, shape)[0]

    def launch(self, inputs: StepInputs, choices: Choices) -> StepTokens:
        shape = self._shape(inputs, choices)._replace(taps=tuple(choices.taps))
        if isinstance(self._outlet, Shelf):
            outputs, draw = self._start(inputs, choices, shape)
            draw()
            known = self._outlet.send(self._last_tokens, len(choices.rows))
            known.hidden = outputs.hidden
            return known
        outlet, num_named = self._outlet, -int(inputs.token_ids.min())

        def send(outputs: StepOutputs) -> TokensOnTheirWay:
            measured: Sequence[Tensor | None] = ()
            if choices.num_top is not None or choices.prompt.token_ids:
                assert outputs.logits is not None
                measured = self.chooser.measure(outputs.logits, choices)
            return outlet.send(self._last_tokens, len(choices.rows), measured, num_named)

        tokens: StepTokens
        if choices.candidates:
            outputs, tokens = self._launch_beams(inputs, choices, shape, send)
        else:
            outputs, draw = self._start(inputs, choices, shape)
            if choices.fill_masks is None:
                draw()
                tokens = send(outputs)
            else:
                tokens = self._under_masks(outputs, draw, choices, send)
        tokens.hidden = outputs.hidden
        self.shelf.turn()
        return tokens

    def launch_behind(
        self, inputs: StepInputs, choices: Choices, followed: Sequence[Followed], num_chosen: int
    ) -> KnownTokens:
        plan = np.zeros((len(followed), PLAN_WIDTH), np.int32)
        for columns, (row, drafts) in zip(plan, followed, strict=True):
            columns[:3] = len(drafts), row, num_chosen
            columns[3 : 3 + len(drafts)] = [-1 - draft for draft in drafts]
        assert isinstance(self._outlet, Shelf)
        shape = self._shape(inputs, choices)._replace(follows=True)
        self._start(inputs, choices, shape, plan)[1]()
        return self._outlet.send(self._last_tokens, len(choices.rows))

    def _launch_beams(
        self,
        inputs: StepInputs,
        choices: Choices,
        shape: GraphShape,
        send: Callable[[StepOutputs], TokensOnTheirWay],
    ) -> tuple[StepOutputs, StepTokens]:
        """The network may replay a graph; the choice is queued by itself."""
        import paddle

        plain = self._shape(inputs, NO_CHOICES)._replace(taps=shape.taps)
        outputs, _ = self._start(inputs, choices, plain)
        assert outputs.logits is not None
        rows = outputs.logits[: len(choices.rows)]
        with paddle.no_grad():
            rows = rows.clone() if shape.raw else rows
            found = self.chooser.find(outputs.step, rows, shape, choices)
        return outputs, BeamTokensOnTheirWay(send(outputs), found, list(choices.candidates))

    def _under_masks(
        self,
        outputs: StepOutputs,
        draw: Draw,
        choices: Choices,
        send: Callable[[StepOutputs], TokensOnTheirWay],
    ) -> WaitingTokens:
        """Tokens whose choice is queued too where all tokens before it are known."""

        def finish() -> StepTokens:
            self.chooser.send_masks(choices, outputs.share is not None)
            draw()
            return send(outputs)

        waiting = WaitingTokens(finish)
        if not choices.waits:  # placeholders of the step itself come later: see Scheduler.advance
            waiting.choose()
        return waiting

    def _shape(self, inputs: StepInputs, choices: Choices) -> GraphShape:
        """A step's own shape, which has no room to spare."""
        return GraphShape(
            *(len(inputs.context_lens), len(inputs.token_ids), int(inputs.max_lens[0])),
            inputs.row_kind == RowKind.ALL,
            adjusted=choices.adjusted is not None,
            raw=choices.num_top is not None and choices.changes_logits,
            verified=choices.window is not None,
            guided=choices.fill_masks is not None,
            adapted=self.network.reads_adapters(inputs),
            chooses=bool(choices.rows),
            pictured=inputs.image_rows is not None and bool((inputs.image_rows >= 0).any()),
            apart=self._share is not None and bool(choices.rows) and are_largest(choices),
        )

    def _start(
        self,
        inputs: StepInputs,
        choices: Choices,
        shape: GraphShape,
        plan: npt.NDArray[np.int32] | None = None,
    ) -> tuple[StepOutputs, Draw]:
        """Queues a step up to its choice, which the caller queues; and the outputs.

        Their logits are the unchanged ones, except where nobody asks for these.
        """
        if self.chooser.admit(choices):
            self.graphs.drop(lambda shape: shape.adjusted)
        recorded = self._graph_of(inputs, choices, shape)
        if recorded is None:
            return self._start_eagerly(inputs, choices, shape, plan)
        num_rows = recorded.num_tokens if recorded.all_rows else recorded.num_seqs
        expected = 4 * num_rows * self._vocab_size if recorded.returns else 0
        record = partial(self._record, recorded, num_rows, choices.window)
        graph = self.graphs.graph(recorded, expected, record)
        self._copied.synchronize()
        self.network.layout.write(graph.buffer.arrays, inputs, recorded)
        self._upload(graph.buffer, choices, plan)
        graph.network.replay()
        outputs = graph.network.outputs
        if recorded.num_seqs > shape.num_seqs and recorded.max_span == 1:
            assert outputs.logits is not None  # see GraphShape.returns
            logits = outputs.logits[: shape.num_seqs]
            hidden = {tap: each[: shape.num_seqs] for tap, each in outputs.hidden.items()}
            outputs = outputs._replace(logits=logits, hidden=hidden)
        return outputs, _nothing if graph.choice is None else graph.choice.replay

    def _graph_of(
        self, inputs: StepInputs, choices: Choices, shape: GraphShape
    ) -> GraphShape | None:
        """The graph that runs a step, recorded or to be; None: operator by operator."""
        runs_eagerly = self.graphs.pool is None or shape.pictured
        room = None if runs_eagerly else graph_shape(inputs)
        measures = choices.num_top is not None and not shape.guided
        if room is None or (room.max_span > 1 and (measures or not shape.chooses)):
            return None
        return self.graphs.shape_for(
            shape._replace(
                num_seqs=room.num_seqs,
                num_tokens=room.num_tokens,
                max_span=room.max_span,
                all_rows=room.all_rows,
            )
        )

    def _upload(
        self, buffer: StepBuffer, choices: Choices, plan: npt.NDArray[np.int32] | None
    ) -> None:
        """Writes a buffer's tables and plan, and queues its copy to the device."""
        self.chooser.write(buffer, choices)
        if plan is not None:
            buffer.arrays[-1][: len(plan)] = plan
            buffer.arrays[-1][len(plan) :, 0] = -1
        buffer.upload(self._stream)
        self._copied.record(self._stream)

    def _start_eagerly(
        self,
        inputs: StepInputs,
        choices: Choices,
        shape: GraphShape,
        plan: npt.NDArray[np.int32] | None,
    ) -> tuple[StepOutputs, Draw]:
        import paddle

        layout = self.network.layout
        fields = [(inputs[index], field) for index, field in layout.device]
        pieces = [
            Piece(field.dtype, np.shape(values) if values is not None else field.sized(NONE))
            for values, field in fields
        ]
        pieces += table_pieces(len(choices.rows))
        if plan is not None:
            pieces.append(Piece("int32", plan.shape))
        self._copied.synchronize()
        buffer = StepBuffer(pieces, self._pinned.slabs(pieces), layout.tables)
        for array, (values, _) in zip(buffer.arrays, fields, strict=False):
            if values is not None:
                array[...] = values
        self._upload(buffer, choices, plan)
        with paddle.no_grad():
            return self._queue(buffer, inputs.max_lens, len(choices.rows), shape, choices.window)

    def _queue(
        self,
        buffer: StepBuffer,
        max_lens: npt.NDArray[np.int32],
        num_rows: int,
        shape: GraphShape,
        window: WindowDrafts | None,
    ) -> tuple[StepOutputs, Draw]:
        """Queues the network over a buffer's tensors. num_rows: of its choice."""
        import paddle

        outputs = self.network.queue(buffer, max_lens, shape)._replace(step=buffer)
        logits = outputs.logits
        if logits is None or not shape.chooses:
            return outputs, _nothing
        rows = logits[:num_rows] if len(logits) > num_rows else logits
        if shape.raw:
            outputs = outputs._replace(logits=logits.clone())

        def draw() -> None:
            with paddle.no_grad():
                self.chooser.draw(buffer, rows, shape, window)

        return outputs, draw

    def _record(self, shape: GraphShape, num_rows: int, window: WindowDrafts | None) -> StepGraph:
        """Records a graph on a step of padding."""
        import paddle

        pool = self.graphs.pool
        assert pool is not None
        buffer = self._graph_buffer(shape, num_rows)
        # The run before the recording overwrites the previous step's tokens.
        last_tokens = self._last_tokens.clone()
        kind = RowKind.ALL if shape.all_rows else RowKind.LAST
        max_lens = np.array((shape.max_span, self._max_length, shape.max_span, 0, kind), np.int32)
        draws: list[Draw] = []  # of a step with guides

        def step() -> StepOutputs:
            outputs, draw = self._queue(buffer, max_lens, num_rows, shape, window)
            if shape.guided:
                draws[:] = [draw]
            else:
                draw()
            return outputs if shape.returns else outputs._replace(logits=None)

        choice: cuda.Graph[None] | None = None
        with paddle.no_grad():
            network = pool.capture(step)
            if shape.guided and shape.chooses:
                # On the logits of the first recording, which the graph owns.
                choice = pool.capture(lambda: draws[0]())
        cuda.copy(self._last_tokens, last_tokens, self._stream)
        kept = [network.outputs.logits, *network.outputs.hidden.values()]
        num_bytes = sum(each.size * each.element_size() for each in kept if each is not None)
        return StepGraph(buffer, network, choice, num_bytes + buffer.num_bytes)

    def _graph_buffer(self, shape: GraphShape, num_rows: int) -> StepBuffer:
        """A buffer of its own for a graph, filled with padding."""
        import paddle

        layout, size = self.network.layout, shape.num_seqs
        dims = {"T": shape.num_tokens, "B": size, "B+1": size + 1, "M": self._max_blocks}
        dims |= {"L": num_rows, "R": self._adapter_pages}
        pieces = [*layout.pieces(dims), *table_pieces(num_rows)]
        if shape.follows:
            pieces.append(Piece("int32", (size, PLAN_WIDTH)))
        place = self.device.place()
        slabs = {
            dtype: Slab(cuda.pinned([count], dtype), paddle.empty([count], dtype, device=place))
            for dtype, count in slab_sizes(pieces).items()
        }
        buffer = StepBuffer(pieces, slabs, layout.tables)
        buffer.clear()
        for array, (_, field) in zip(buffer.arrays, layout.device, strict=False):
            array[:] = field.padding
        places = layout.places
        if shape.max_span == 1:
            buffer.arrays[places["cu_seqlens_q"]][:] = np.arange(size + 1)
        buffer.arrays[places["logit_indices"]][:] = np.arange(num_rows)
        self.chooser.clear(buffer)
        if shape.follows:
            buffer.arrays[-1][:, 0] = -1
        buffer.upload(self._stream)
        return buffer


def _nothing() -> None:
    """The choice of a step that has none, or whose graph has made it."""
