"""What a step reads of pictures: their rows, made ahead of it, and positions. Imports no Paddle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from predict.engine.picture_rows import PictureRows
from predict.engine.picture_spans import apart
from predict.engine.scheduled import ScheduledSpan
from predict.images.placed import Picture
from predict.nn.inputs import StepInputs

Encode = Callable[[Picture, npt.NDArray[np.int32]], None]  # writes a picture to rows of the table


@dataclass(frozen=True, eq=False)
class Eyes:
    """What makes pictures' rows, and a step's inputs of them."""

    rows: PictureRows
    encode: Encode
    # Row of the rotary table of a step's first token, where it is a picture's; -1: pictures have
    # the positions of text.
    first_place: int
    num_levels: int = 1  # rows of the table that a row of pictures has: what is added behind layers

    def seen(self, inputs: StepInputs, spans: Sequence[ScheduledSpan]) -> StepInputs:
        """The inputs with the positions of requests with pictures, whose rows are made."""
        if all(span.request.pictures is None for span in spans):
            return inputs
        positions = inputs.positions.copy()
        rows = np.full(len(positions), -1, np.int32)
        places = np.zeros((len(positions), 3), np.int32)
        for span, first in zip(spans, inputs.cu_seqlens_q.tolist(), strict=False):
            pictures, begin, end = span.request.pictures, span.start, span.start + span.num_tokens
            if pictures is None:
                continue
            positions[first : first + span.num_tokens] = pictures.positions(begin, end)
            for each in pictures.within(begin, end):
                low, high = max(begin, each.start), min(end, each.end)
                here = slice(first + low - begin, first + high - begin)
                own = each.rows(low, high)
                held = self._encoded(each.picture)[own] * self.num_levels
                rows[here] = np.where(own < 0, -1, held)
                if self.first_place >= 0:
                    positions[here] = self.first_place + np.arange(here.start, here.stop)
                    places[here] = each.places(low, high)
            if begin >= pictures.end:
                self.rows.release(span.request.owner)
        if rows.max() < 0:
            return inputs._replace(positions=positions)
        inputs = inputs._replace(positions=positions, image_rows=rows)
        if self.first_place >= 0:
            return inputs._replace(image_places=places)
        return apart(inputs, spans) if self.rows.whole else inputs

    def _encoded(self, picture: Picture) -> npt.NDArray[np.int32]:
        held = self.rows.held(picture)
        if not held.is_encoded:
            self.encode(picture, held.rows)
            held.is_encoded = True
        return held.rows
