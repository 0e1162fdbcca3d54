"""Texts to token ids, before anything runs: chat template, tokenizer, length limits, bad words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from predict.cli.data import DataItem, located, short_list
from predict.cli.prompt_keys import key_warnings
from predict.errors import TokenizerError, UserError
from predict.request import SamplingParams, check_samples
from predict.text.conversation import (
    PicturePart,
    content_text,
    conversation_messages,
    with_marked,
)
from predict.text.params import with_token_ids
from predict.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from predict.images.placed import Pictures
    from predict.sight import PictureReader


@dataclass(frozen=True)
class Prompts:
    """Token ids by item, and what the user should know about how they came about."""

    token_ids: list[list[int] | TokenizerError]  # what the tokenizer failed on runs as an error
    warnings: tuple[str, ...]  # one line each
    pictures: list[Pictures | None]  # by item, whose tokens the ids have


def prepare_prompts(
    items: Sequence[DataItem],
    tokenizer: Tokenizer,
    src_length: int,
    max_length: int,
    reader: Callable[[], PictureReader | None] = lambda: None,
) -> Prompts:
    """The prompts that the items ask.

    A prompt of more than `src_length` tokens keeps its first ones, as PaddleNLP's block path does,
    and the family's own tokens at its end; one with pictures is not cut. reader: of the model,
    asked for when an item has pictures.
    Raises UserError naming the line for a prompt that the chat template refuses, that has no
    tokens, or that leaves no room for output in `max_length` tokens.
    """
    token_ids: list[list[int] | TokenizerError] = []
    pictures: list[Pictures | None] = [None] * len(items)
    cut: list[str] = []
    shortened: list[str] = []
    too_long: list[str] = []
    longest = 0
    for index, item in enumerate(items):
        parts: list[PicturePart] = []
        try:
            text, templated, dropped = _text(item, tokenizer, parts)
        except UserError as error:
            raise UserError(f"{item.where}: {error}") from None
        if dropped:
            shortened.append(item.where)
        try:
            ids = tokenizer.encode(text, add_special_tokens=not templated)
        except TokenizerError as error:
            token_ids.append(error)
            continue
        if not ids:
            raise UserError(f"{item.where}: the prompt has no tokens; give src some text")
        if parts:
            try:
                ids, pictures[index] = _seen(ids, parts, item, reader(), tokenizer)
            except UserError as error:
                raise UserError(f"{item.where}: {error}") from None
        elif len(ids) > src_length:
            cut.append(f"{item.where}: {len(ids) - src_length} of {len(ids)} tokens")
            ids = _cut(ids, src_length, tokenizer.closing_token_ids)
        if len(ids) + 1 > max_length:
            too_long.append(f"{item.where} has {len(ids)} tokens")
            longest = max(longest, len(ids))
        token_ids.append(ids)
    if too_long:
        raise UserError(
            f"{short_list(too_long, 3, '; ')}, and --max_length {max_length} counts prompt and "
            f"output together; raise --max_length above {longest} or lower --src_length. Nothing "
            "was run"
        )
    warnings = []
    if cut:
        warnings.append(
            f"prompts were cut at --src_length {src_length}: {short_list(cut, 3, '; ')}"
        )
    if shortened:
        warnings.append(
            "there is no chat template, so only the first text of each conversation is used: "
            f"{short_list(shortened, 3, '; ')}"
        )
    warnings += key_warnings([(item.where, item.other_keys) for item in items])
    return Prompts(token_ids, tuple(warnings), pictures)


def _seen(
    ids: list[int],
    parts: Sequence[PicturePart],
    item: DataItem,
    reader: PictureReader | None,
    tokenizer: Tokenizer,
) -> tuple[list[int], Pictures | None]:
    if reader is None:
        raise UserError(
            f"the prompt has {len(parts)} pictures, and this model reads text alone; leave them out"
        )
    found = [part._replace(source=located(part.source, item.folder)) for part in parts]
    return reader.read(ids, found, tokenizer)


def prepare_params(
    items: Sequence[DataItem],
    defaults: SamplingParams,
    tokenizer: Tokenizer,
    vocab_size: Callable[[], int],
    check: Callable[[SamplingParams], None],
) -> list[SamplingParams]:
    """How each item's answer is sampled: its own keys, and `defaults` for the others.

    vocab_size: the model's, asked for when an item names tokens. check: raises UserError for what
    the engine cannot do. Raises UserError naming the line.
    """
    resolved: list[SamplingParams] = []
    for item in items:
        try:
            params = replace(defaults, **item.sampling)
            check_samples(params)
            check(params)
            if params.logit_bias or params.bad_words or params.stop_token_ids:
                params = with_token_ids(params, tokenizer, vocab_size())
        except UserError as error:
            where = f"{item.where}: " if item.sampling else ""
            raise UserError(f"{where}{error}") from None
        resolved.append(params)
    return resolved


def _cut(ids: list[int], length: int, closing: tuple[int, ...]) -> list[int]:
    """`length` of the ids: the first, and `closing` where they end so and there is room."""
    ends_so = tuple(ids[-len(closing) :]) == closing and len(closing) < length
    return [*ids[: length - len(closing)], *closing] if ends_so else ids[:length]


def _text(
    item: DataItem, tokenizer: Tokenizer, pictures: list[PicturePart]
) -> tuple[str, bool, bool]:
    """(text, whether a template made it, whether turns were left out) of one item.

    pictures: to which the item's are added.
    """
    own: list[PicturePart] = []
    messages = conversation_messages(item.src, item.tgt, own)
    messages, found = with_marked(messages, own, item.images)
    pictures += found
    if tokenizer.chat_template is not None:
        return tokenizer.chat_template.render(messages), True, False
    if found:
        raise UserError(
            "pictures need a chat template, and the tokenizer has none; give one with "
            "--chat_template"
        )
    if isinstance(item.src, str):
        return item.src, False, False
    has_roles = isinstance(item.src[0], dict)
    if has_roles and [message["role"] for message in messages] != ["user"]:
        raise UserError(
            "role messages need a chat template, and the tokenizer has none; give one with "
            "--chat_template"
        )
    return content_text(messages[0]["content"]), False, len(messages) > 1
