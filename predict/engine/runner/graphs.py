"""CUDA graphs of steps: which one serves a step, when it is recorded, and which ones are kept.

A graph serves batches up to its size (1, 2, 4, 8, 16, 32, ...). It is recorded at the first step of
its size, or after some more steps where a graph of up to twice the size exists. Steps with drafts
have graphs by their number of tokens too, and run operator by operator the first few times. Graphs
are counted in the memory that they hold; where that is too much, those used longest ago go first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from predict.device import cuda
from predict.engine.drafts import MAX_DRAFT_TOKENS
from predict.engine.runner.buffers import GraphShape, StepBuffer
from predict.nn.inputs import RowKind, StepInputs, bucket_size

if TYPE_CHECKING:
    from predict.nn.decoder import StepOutputs

MAX_SPAN = MAX_DRAFT_TOKENS + 1  # tokens of a request in a graph
FEW = 4
# Steps of one shape before its graph is recorded: recording takes as long as some ten steps lose in
# a larger graph, or operator by operator.
OFTEN_MET = 6
# The same for steps with drafts and more than FEW_TOKENS tokens: there the device takes longer than
# the host even operator by operator, and only the wait for the first kernel is lost.
FEW_TOKENS, OFTEN_MET_OF_MANY = 64, 64


def graph_shape(inputs: StepInputs) -> GraphShape | None:
    """The graph for a step with few tokens per request, all of them or the last ones sampled."""
    num_seqs, num_tokens = len(inputs.context_lens), len(inputs.token_ids)
    kind, max_span = inputs.row_kind, int(inputs.max_lens[0])
    if max_span > MAX_SPAN or kind not in (RowKind.ALL, RowKind.LAST):
        return None
    size = bucket_size(num_seqs)
    if num_tokens == num_seqs:
        return GraphShape(size, size, 1, True)
    # One request: the graph of its span. Else two kinds, so that few graphs are recorded.
    span = bucket_size(max_span) if num_seqs == 1 or max_span > FEW else FEW
    num_tokens_with_room = max(bucket_size(num_tokens), bucket_size(size + 1))
    return GraphShape(size, num_tokens_with_room, span, kind == RowKind.ALL)


def graph_for(
    shape: GraphShape, recorded: Collection[GraphShape], num_met: Counter[GraphShape]
) -> GraphShape | None:
    """The graph to run or record for a step of `shape`; None: operator by operator.

    num_met: counts steps of shapes without a graph, from below 0 after one was freed; modified.
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
    return min(roomier, default=shape if num_met[shape] > 0 else None)


@dataclass(frozen=True)
class StepGraph:
    """One recorded step; its outputs are StepOutputs, without logits where they are not kept.

    choice: the graph of masks and choice of a step with guides. num_bytes: of device memory that
    no other graph may use.
    """

    buffer: StepBuffer
    network: cuda.Graph[StepOutputs]
    choice: cuda.Graph[None] | None
    num_bytes: int

    def reset(self) -> None:
        self.network.reset()
        if self.choice is not None:
            self.choice.reset()


class GraphCache:
    """The recorded graphs, within a bound of memory.

    pool: None: every step runs operator by operator.
    """

    def __init__(self, pool: cuda.GraphPool | None, max_bytes: int):
        self.pool = pool
        self.max_bytes = max_bytes
        self.num_recorded = 0
        self._graphs: dict[GraphShape, StepGraph] = {}  # used longest ago first
        self._num_met: Counter[GraphShape] = Counter()  # of those without a graph

    def __iter__(self) -> Iterator[GraphShape]:
        return iter(self._graphs)

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def num_bytes(self) -> int:
        """Device memory that the graphs hold."""
        return sum(graph.num_bytes for graph in self._graphs.values())

    def shape_for(self, shape: GraphShape) -> GraphShape | None:
        """The graph to run or record for a step of `shape`; None: operator by operator."""
        return graph_for(shape, self._graphs, self._num_met)

    def graph(
        self, shape: GraphShape, num_bytes: int, record: Callable[[], StepGraph]
    ) -> StepGraph:
        """The graph of `shape`, recorded where it is missing; then it needs some `num_bytes`."""
        found = self._graphs.pop(shape, None)
        if found is None:
            self._make_room(num_bytes)
            found = self._graphs[shape] = record()
            self.num_recorded += 1
            self._make_room(0)
        self._graphs[shape] = found
        return found

    def drop(self, is_outdated: Callable[[GraphShape], bool]) -> None:
        """Frees graphs, which are recorded again when they are met again."""
        for shape in [shape for shape in self._graphs if is_outdated(shape)]:
            self._graphs.pop(shape).reset()

    def _make_room(self, num_bytes: int) -> None:
        """Frees graphs until there are `num_bytes`; the newest one stays for its own step."""
        while len(self._graphs) > (num_bytes == 0) and self.num_bytes + num_bytes > self.max_bytes:
            shape = next(iter(self._graphs))
            self._graphs.pop(shape).reset()
            self._num_met[shape] = -OFTEN_MET  # what is met in turns is not recorded in turns
