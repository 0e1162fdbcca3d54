"""A GPU's work after the network in a step with beams, outside of the step's graph.

Log-probabilities of the beams' rows, then the requests' adjustments, then the likeliest tokens of
each beam: the host copies only these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from predict.device import cuda
from predict.engine.beams import Candidates
from predict.engine.runner import Logprobs, Tokens
from predict.ops import compiled as ops

if TYPE_CHECKING:
    from paddle import Tensor


class BeamTokensOnTheirWay(Tokens):
    """Tokens of a step in which the rows `beams` have Candidates.

    found: [2, B, K] of ops.likeliest, pinned; its copy is queued before that of the tokens.
    """

    def __init__(self, tokens: Tokens, found: npt.NDArray[np.int32], beams: Sequence[int]):
        self._tokens = tokens
        self._found = found
        self._beams = beams

    def take(self) -> list[int | Candidates]:
        tokens = self._tokens.take()
        token_ids, values = self._found[0], self._found[1].view(np.float32)
        for row, ids, log_probs in zip(self._beams, token_ids, values, strict=True):
            num_found = int((ids >= 0).sum())
            tokens[row] = Candidates(ids[:num_found].tolist(), log_probs[:num_found].tolist())
        return tokens

    def known(self, drafts: Sequence[int]) -> list[int]:
        return self._tokens.known(drafts)

    def logprobs(self) -> Logprobs:
        return self._tokens.logprobs()


class Finder:
    """Pinned memory for one step with beams at a time, since no step runs ahead of it."""

    def __init__(self, stream: int):
        self._stream = stream
        self._inputs: npt.NDArray[Any] = np.empty(0, np.int32)  # pinned from the first step on
        self._found: npt.NDArray[Any] = np.empty(0, np.int32)

    def host(self, size: int) -> npt.NDArray[Any]:
        """Pinned memory of `size` int32s for the step's inputs."""
        if len(self._inputs) < size:
            self._inputs = cuda.pinned([2 * size], np.int32)
        return self._inputs[:size]

    def find(self, logits: Tensor, rows: Tensor, count: int) -> npt.NDArray[np.int32]:
        """Queues ops.likeliest and the copy of its result [2, B, K] to the array returned."""
        found = ops.likeliest(logits, rows, count)
        if len(self._found) < found.size:
            self._found = cuda.pinned([2 * found.size], np.int32)
        array = self._found[: found.size]
        cuda.copy_front_to_host(array, found, self._stream)
        return array.reshape(found.shape)
