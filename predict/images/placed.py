"""Pictures in a prompt: where their tokens stand, and which positions these have."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from predict.errors import UserError
from predict.images.decoding import Decode, decoded
from predict.images.fetching import NO_MEDIA, Media
from predict.images.limits import MAX_PIXELS
from predict.images.opening import as_rgb, header
from predict.images.pixels import Pixels, Placeholder


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture as a tower reads it."""

    digest: bytes  # 32 bytes, of the file (or the image in memory) and of all options
    values: npt.NDArray[np.uint8]  # [height, width, 3], resized, or [tiles, height, width, 3]
    grid: tuple[int, int]  # rows and columns of patches, of a tile
    cells: tuple[int, int]  # rows and columns of merged cells, of a tile
    pixels: Pixels  # which made it

    @property
    def num_tiles(self) -> int:
        return len(self.values) if self.values.ndim == 4 else 1

    @property
    def num_rows(self) -> int:
        """Rows that a tower makes of it: one for each merged cell."""
        return self.num_tiles * self.cells[0] * self.cells[1]

    @property
    def num_tokens(self) -> int:
        """Tokens in a prompt."""
        return self.pixels.num_tokens(self.cells, self.num_tiles)

    @property
    def num_positions(self) -> int:
        """Positions that its tokens take: the longer side where they have places of their own."""
        return max(self.cells) if self.pixels.layout == "axes" else self.num_tokens

    @property
    def patches(self) -> npt.NDArray[np.float32]:
        """What the tower reads."""
        return self.pixels.patches(self.values)


def picture_of(
    source: Any,
    pixels: Pixels,
    where: str = "the picture",
    max_pixels: int = MAX_PIXELS,
    check: Callable[[int, int], None] = lambda height, width: None,
    decode: Decode = decoded,
    media: Media = NO_MEDIA,
) -> Picture:
    """The picture of a source; see predict.images.opening. Raises UserError.

    decode: what decodes the bytes of files. media: where addresses may lead.
    """
    found = header(source, where, max_pixels, check, media)
    whole = hashlib.blake2b(found.digest + pixels.digest, digest_size=32).digest()
    try:
        if found.data is not None:
            return resized_picture(whole, decode(found.data, pixels, where), pixels)
        return resized_picture(whole, pixels.resized(as_rgb(found.image, where)), pixels)
    except MemoryError:
        raise UserError(f"{where} takes more memory than there is; shrink it") from None


def pictures_in(picture: Picture) -> list[Picture]:
    """What stands in a prompt for a picture: itself, or each of its tiles."""
    if not picture.pixels.tiles_apart:
        return [picture]
    return [
        replace(
            picture,
            digest=hashlib.blake2b(picture.digest + bytes([index]), digest_size=32).digest(),
            values=values,
        )
        for index, values in enumerate(picture.values)
    ]


def resized_picture(digest: bytes, values: npt.NDArray[np.uint8], pixels: Pixels) -> Picture:
    """The picture of resized pixels [height, width, 3], or [tiles, height, width, 3]."""
    grid = pixels.grid(values.shape[-3:-1])
    cells = grid[0] // pixels.merge_size, grid[1] // pixels.merge_size
    return Picture(digest, values, grid, cells, pixels)


class Placed(NamedTuple):
    """A picture in a prompt."""

    start: int  # of its tokens
    picture: Picture
    first: int  # position of its first token, in each dimension

    @property
    def end(self) -> int:
        return self.start + self.picture.num_tokens

    def places(self, begin: int, end: int) -> npt.NDArray[np.int32]:
        """[end - begin, 3] time, row and column of tokens from `begin` to before `end`."""
        row, column = np.divmod(np.arange(begin - self.start, end - self.start), self._columns)
        return (np.stack([np.zeros_like(row), row, column], axis=1) + self.first).astype(np.int32)

    def rows(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """[end - begin] which of the picture's rows tokens from `begin` to before `end` are.

        -1: none; the token behind a row of cells.
        """
        places = np.arange(begin - self.start, end - self.start)
        if self.picture.pixels.layout != "rows":
            return places
        row, column = np.divmod(places, self._columns + 1)
        return np.where(column < self._columns, row * self._columns + column, -1)

    @property
    def _columns(self) -> int:
        return self.picture.cells[1]


@dataclass(frozen=True, eq=False)
class Pictures:
    """The pictures of a prompt, in order."""

    placed: tuple[Placed, ...]

    @cached_property
    def shifts(self) -> tuple[int, ...]:
        """What is added to the place of a text token behind so many pictures: its position."""
        return (
            0,
            *(each.first + each.picture.num_positions - each.end for each in self.placed),
        )

    @property
    def end(self) -> int:
        """Behind the last picture's tokens."""
        return self.placed[-1].end

    @property
    def num_rows(self) -> int:
        """Rows that a tower makes of them."""
        return sum(each.picture.num_rows for each in self.placed)

    def within(self, begin: int, end: int) -> Iterator[Placed]:
        """Pictures of which some tokens stand from `begin` to before `end`."""
        return (each for each in self.placed if each.start < end and each.end > begin)

    def positions(self, begin: int, end: int) -> npt.NDArray[np.int32]:
        """Of text tokens from `begin` to before `end`; of pictures' tokens any."""
        places = np.arange(begin, end, dtype=np.int32)
        ends = [each.end for each in self.placed]
        behind = np.searchsorted(ends, places, side="right")
        return (places + np.array(self.shifts, np.int32)[behind]).astype(np.int32)

    def content(self, token_ids: Sequence[int]) -> Contents:
        """What blocks of the tokens are hashed by."""
        return Contents(token_ids, self)


class Contents(Sequence[int]):
    """Token ids, with what pictures stand in a slice behind those of the slice.

    Of each picture the whole digest, and where its tokens begin, counted from the slice's first.
    """

    def __init__(self, token_ids: Sequence[int], pictures: Pictures) -> None:
        self._token_ids, self._pictures = token_ids, pictures

    def __len__(self) -> int:
        return len(self._token_ids)

    def __getitem__(self, key: Any) -> Any:
        found = self._token_ids[key]
        if not isinstance(key, slice):
            return found
        begin, end, _ = key.indices(len(self))
        ids = list(found)
        for each in self._pictures.within(begin, end):
            ids += np.frombuffer(each.picture.digest, np.int32).tolist()
            ids.append(each.start - begin)
        return ids


def with_pictures(
    token_ids: Sequence[int], pictures: Sequence[Picture], holder: Placeholder | int
) -> tuple[list[int], Pictures | None]:
    """A prompt with all tokens of its pictures, and where these stand.

    token_ids: with one placeholder for each picture. Raises UserError where they are not as many,
    and where two pictures have no token between them.
    """
    holder = Placeholder(holder) if isinstance(holder, int) else holder
    count = sum(token == holder.token for token in token_ids)
    if count != len(pictures):
        raise UserError(
            f"the prompt has {count} placeholders of pictures (token {holder.token}), and "
            f"{len(pictures)} pictures are given; write one for each picture, and none in a text"
        )
    if not pictures:
        return list(token_ids), None
    ids, starts, left = list[int](), list[int](), iter(pictures)
    for token in token_ids:
        if token != holder.token:
            ids.append(token)
            continue
        if starts and ids[-1] == holder.token:
            raise UserError(
                f"pictures {len(starts)} and {len(starts) + 1} of the prompt have no token between "
                "them; write what the model's template has around a picture"
            )
        ids += holder.before
        starts.append(len(ids))
        ids += [*_own_tokens(holder, next(left)), *holder.behind]
    return ids, placed_at(starts, pictures)


def _own_tokens(holder: Placeholder, picture: Picture) -> list[int]:
    if picture.pixels.layout != "rows":
        return [holder.token] * picture.num_tokens
    rows, columns = picture.cells
    ids = [*[holder.token] * columns, holder.row_end] * rows
    return [*ids[:-1], holder.last]


def placed_at(starts: Sequence[int], pictures: Sequence[Picture]) -> Pictures:
    """Pictures whose tokens begin there."""
    placed, shift = list[Placed](), 0
    for start, picture in zip(starts, pictures, strict=True):
        placed.append(Placed(start, picture, start + shift))
        shift += picture.num_positions - picture.num_tokens
    return Pictures(tuple(placed))
