"""Rows of hidden states on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from predict.nn.pooling import Vectors

if TYPE_CHECKING:
    from paddle import Tensor

Take = Callable[["Tensor", "Tensor"], "Tensor"]  # of rows, see predict.ops.compiled.take


class HostRows:
    """Rows of hidden states, as float32 on the host: no more than are read cross over."""

    def __init__(self, take: Take):
        self._take = take

    def __call__(self, hidden: Tensor | None, places: Sequence[int]) -> Vectors:
        """[n, H]; places: of the rows, in order."""
        import paddle

        if hidden is None or not places:
            return np.zeros((0, 0), np.float32)
        if len(places) < len(hidden):
            rows = np.array(places, np.int32)
            hidden = self._take(hidden, paddle.to_tensor(rows, place=hidden.place))
        found: Vectors = hidden.cpu().astype("float32").numpy()
        return found
