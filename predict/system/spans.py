"""Parts of a file that must fill it, one behind the other: nothing overlaps, nothing is hidden."""

from __future__ import annotations

from collections.abc import Iterable

from predict.errors import quoted


def misplaced(
    parts: Iterable[tuple[int, int, str]], start: int, size: int, alignment: int = 1
) -> str | None:
    """What is wrong with parts: first byte, bytes, name; None where they fill the file.

    start: the first byte behind the header. size: of the file, in bytes. alignment: each part but
    the first begins at the next multiple of it, and the last one's need not be filled up.
    """
    end, last = start, "the header"
    for offset, num_bytes, name in sorted(parts):
        shown = quoted(name, 100)
        if offset != end:
            kind = "they overlap" if offset < end else "the bytes between belong to none"
            return f"{shown} begins at byte {offset}, and {last} ends at {end}: {kind}"
        if offset + num_bytes > size:
            return f"{shown} ends at byte {offset + num_bytes}, the file at {size}"
        end, last = offset + num_bytes, shown
        end += -end % alignment
    return f"{last} ends at byte {end}, and the file has {size}" if size > end else None
