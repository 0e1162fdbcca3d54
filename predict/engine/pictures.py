"""What a step reads of pictures: their rows, made ahead of it, and positions. Imports no Paddle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from predict.engine.picture_rows import HeldRows, PictureRows
from predict.engine.picture_spans import apart
from predict.engine.scheduled import ScheduledSpan
from predict.images.placed import Picture
from predict.nn.inputs import StepInputs


class Encode(Protocol):
    """Makes the rows of pictures."""

    def __call__(
        self,
        pictures: Sequence[Picture],
        rows: Sequence[npt.NDArray[np.int32]],
        max_layers: int | None = None,
    ) -> Iterator[None]:
        """A pass over pictures, whose end writes their rows of the table.

        It stops behind each run of the tower's layers, of at most so many.
        """


@dataclass(frozen=True)
class PassLimits:
    """What one pass of a tower may take."""

    patches: int  # of all of its pictures, unless it has one alone
    spans: int  # of attention
    num_spans: Callable[[tuple[int, int]], int]  # of a picture's merged cells
    num_layers: int  # of the tower
    budget: int  # patches that may go through all layers in a step, while requests decode


class Pass(NamedTuple):
    """A pass that has begun."""

    held: Sequence[HeldRows]
    steps: Iterator[None]


@dataclass(eq=False)
class Eyes:
    """What makes pictures' rows, and a step's inputs of them.

    While requests decode, a pass goes on by `budget` in each step, and prompts wait for their
    pictures; else the step that reads a picture encodes it, with others that wait.
    """

    rows: PictureRows
    encode: Encode
    # Row of the rotary table of a step's first token, where it is a picture's; -1: pictures have
    # the positions of text.
    first_place: int
    limits: PassLimits
    num_levels: int = 1  # rows of the table that a row of pictures has: what is added behind layers
    # Steps without pictures are given the fields of pictures, too: a program takes all of its own.
    always: bool = False
    _pass: Pass | None = None

    def look(self, others_decode: bool) -> None:
        """Does a step's part of what pictures are to be encoded. Ahead of the step's schedule."""
        self.rows.waits = others_decode
        if not others_decode:
            while self._pass is not None:  # it keeps rows that others may need
                self._go_on(self._pass)
            return
        if self._pass is None:
            held = self._packed(self.rows.missing())
            if not held:
                return
            self._pass = self._begun(held, self._layers_of(held))
        self._go_on(self._pass)

    def finish(self) -> bool:
        """Nothing decodes: prompts wait no more. Whether some did."""
        waited, self.rows.waits = self.rows.waits, False
        return waited

    def _layers_of(self, held: Sequence[HeldRows]) -> int:
        """Layers that a pass may run in one step."""
        patches = sum(num_patches(each.picture) for each in held)
        return max(self.limits.budget * self.limits.num_layers // patches, 1)

    def _packed(self, missing: Sequence[HeldRows]) -> list[HeldRows]:
        """The first of the pictures that go into one pass."""
        held, patches, spans = list[HeldRows](), 0, 0
        for each in missing:
            patches += num_patches(each.picture)
            spans += each.picture.num_tiles * self.limits.num_spans(each.picture.cells)
            if held and (patches > self.limits.patches or spans > self.limits.spans):
                break
            held.append(each)
        return held

    def _begun(self, held: Sequence[HeldRows], max_layers: int | None = None) -> Pass:
        self.rows.begin(held)
        pictures = [each.picture for each in held]
        return Pass(held, self.encode(pictures, [each.rows for each in held], max_layers))

    def _go_on(self, begun: Pass) -> None:
        """One run of layers. Where that fails, the steps that read the pictures will tell."""
        self._pass = begun
        try:
            next(begun.steps)
        except StopIteration:
            self._end(begun, True)
        except Exception:
            self._end(begun, False)

    def _end(self, begun: Pass, is_encoded: bool) -> None:
        self._pass = None
        self.rows.end(begun.held, is_encoded)

    def _encode_now(self, wanted: Sequence[Picture]) -> None:
        """Encodes pictures that a step reads, with others that will be read."""
        digests = {each.digest for each in wanted}
        begun = self._pass
        if begun is not None and any(each.picture.digest in digests for each in begun.held):
            while self._pass is not None:
                self._go_on(begun)
        while any(not self.rows.held(each).is_encoded for each in wanted):
            missing = self.rows.missing(wanted)
            failed = [each for each in missing if each.has_failed]
            held = failed[:1] or self._packed(missing)  # one that failed runs alone
            begun = self._begun(held)
            try:
                for _ in begun.steps:
                    pass
            except BaseException:
                self.rows.end(held, False)
                raise
            self.rows.end(held, True)

    def seen(self, inputs: StepInputs, spans: Sequence[ScheduledSpan]) -> StepInputs:
        """The inputs with the positions of requests with pictures, whose rows are made."""
        if all(span.request.pictures is None for span in spans):
            return self._without(inputs)
        self._encode_now(list(self._read(spans)))
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
                held = self.rows.held(each.picture).rows[own] * self.num_levels
                rows[here] = np.where(own < 0, -1, held)
                if self.first_place >= 0:
                    positions[here] = self.first_place + np.arange(here.start, here.stop)
                    places[here] = each.places(low, high)
            if begin >= pictures.end:
                self.rows.release(span.request.owner)
        if rows.max() < 0 and not self.always:
            return inputs._replace(positions=positions)
        inputs = inputs._replace(positions=positions, image_rows=rows)
        if self.first_place >= 0:
            return inputs._replace(image_places=places)
        return apart(inputs, spans) if self.rows.whole else inputs

    def _without(self, inputs: StepInputs) -> StepInputs:
        """The inputs of a step in which no request has pictures."""
        if not self.always:
            return inputs
        count = len(inputs.positions)
        if self.first_place >= 0:
            inputs = inputs._replace(image_places=np.zeros((count, 3), np.int32))
        if self.rows.whole:  # nothing has a prefix mask
            inputs = inputs._replace(prefix_lens=np.zeros(len(inputs.context_lens), np.int32))
        return inputs._replace(image_rows=np.full(count, -1, np.int32))

    def _read(self, spans: Sequence[ScheduledSpan]) -> Iterator[Picture]:
        """The pictures that spans read, that are not encoded."""
        for span in spans:
            if span.request.pictures is not None:
                found = span.request.pictures.within(span.start, span.start + span.num_tokens)
                for each in found:
                    if not self.rows.held(each.picture).is_encoded:
                        yield each.picture


def num_patches(picture: Picture) -> int:
    """Patches of all of a picture's tiles."""
    return picture.num_tiles * picture.grid[0] * picture.grid[1]
