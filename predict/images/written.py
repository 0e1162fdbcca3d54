"""Placeholders that are texts, encoded with what stands around them: Gemma 3's.

A mark in a prompt becomes two line ends, the mark, a picture's token, an end token and two line
ends; a picture with crops becomes a sentence with as many of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

from predict.errors import UserError
from predict.images.pixels import Placeholder


class Encoder(Protocol):
    """What a tokenizer does; see predict.text.tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_to_id(self, token: str) -> int | None: ...


def with_ids(holder: Placeholder, tokenizer: Encoder | None) -> Placeholder:
    """The placeholder with the ids that a tokenizer has of its names.

    Raises UserError where it has none of those that stand around a picture.
    """
    if holder.around_names is not None:
        first, last = (
            None if tokenizer is None else tokenizer.token_to_id(name)
            for name in holder.around_names
        )
        if first is None or last is None:
            raise UserError(
                f"a picture stands between {' and '.join(holder.around_names)}, and the model's "
                "tokenizer has no such tokens; complete the download"
            )
        return replace(holder, before=(first,), behind=(last,))
    if tokenizer is None or not holder.row_end_name:
        return holder
    row_end, last = (tokenizer.token_to_id(n) for n in (holder.row_end_name, holder.last_name))
    return replace(
        holder,
        row_end=holder.row_end if row_end is None else row_end,
        last=holder.last if last is None else last,
    )


def written(
    token_ids: Sequence[int], counts: Sequence[int], holder: Placeholder, tokenizer: Encoder | None
) -> list[int]:
    """A prompt with a placeholder for each picture in place of its marks; as it is without marks.

    counts: pictures that each mark stands for: itself, and its crops. Raises UserError where marks
    are not as many.
    """
    marks = sum(token == holder.mark for token in token_ids)
    if holder.mark < 0 or not (marks or counts):
        return list(token_ids)
    if holder.token in token_ids:  # written before: behind each mark
        if any(a == holder.mark and b != holder.token for a, b in pairwise([*token_ids, -1])):
            raise UserError(
                f"the prompt has a mark of a picture (token {holder.mark}), and elsewhere a "
                f"picture's own token ({holder.token}); leave that out of texts"
            )
        return list(token_ids)
    if marks != len(counts):
        raise UserError(
            f"the prompt has {marks} placeholders of pictures (token {holder.mark}), and "
            f"{len(counts)} pictures are given; write one for each picture, and none in a text"
        )
    if tokenizer is None:
        raise UserError(
            "a picture's placeholder is encoded with the text around it, and this model was loaded "
            f"without a tokenizer; give token ids that have {holder.token} for each picture"
        )
    mark, token, end = (
        tokenizer.decode([each], False) for each in (holder.mark, holder.token, holder.end)
    )
    whole = f"\n\n{mark}{token}{end}\n\n"
    first, *others = tokenizer.decode(token_ids, False).split(mark)
    text = first
    for count, other in zip(counts, others, strict=True):
        text += whole if count == 1 else _with_crops(whole, count - 1)
        text += other
    return tokenizer.encode(text, add_special_tokens=False)


def _with_crops(whole: str, count: int) -> str:
    """As transformers writes it."""
    crops = " ".join([whole] * count)
    return (
        f"Here is the original image {whole} and here are some crops to help you see better {crops}"
    )
