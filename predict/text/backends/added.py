"""Tokens that config files add to a vocabulary: their checks, and their search in a text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from predict.errors import UserError
from predict.system.files import json_type

CONFIG_FILE = "tokenizer_config.json"
MAX_TOKEN_ID = 1 << 22  # config.json's vocab_size ends there too
MAX_ADDED_CHARACTERS = 512  # of one added token
SWITCHES = ("special", "lstrip", "rstrip", "normalized", "single_word")


@dataclass(frozen=True)
class AddedToken:
    """A token that is found in a text before the library sees the rest."""

    content: str
    token_id: int
    special: bool
    lstrip: bool = False  # swallows whitespace on its left in the text
    rstrip: bool = False
    normalized: bool = False  # it is looked for in the text as the normalizer leaves it
    single_word: bool = False


class Splitter:
    """Finds added tokens in a text, the longest of those that begin first.

    Dictionary look-ups where a token may begin: a pattern of thousands of alternatives, with the
    whitespace that tokens swallow, took quadratic time on a long run of spaces.
    """

    def __init__(
        self, added: Mapping[str, AddedToken], followers: Mapping[str, AddedToken] | None = None
    ) -> None:
        """`followers` are tokens that count only right behind another one, by its text."""
        self._added = added
        self._followers = followers or {}
        lengths: dict[str, set[int]] = {}
        for content in added:
            lengths.setdefault(content[0], set()).add(len(content))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        firsts = "".join(map(re.escape, sorted(lengths)))
        self._first = re.compile(f"[{firsts}]") if firsts else None
        self._space = re.compile(r"\s*")

    def split(self, text: str) -> Iterator[tuple[str, AddedToken | None]]:
        """The text's pieces, each with the added token behind it; None behind the last."""
        begin = 0  # of the piece
        at = 0
        while self._first and (match := self._first.search(text, at)):
            token = self._token_at(text, match.start())
            if token is None:
                at = match.end()
                continue
            piece = text[begin : match.start()]
            yield piece.rstrip() if token.lstrip else piece, token
            begin = match.start() + len(token.content)
            if token.rstrip and (space := self._space.match(text, begin)):
                begin = space.end()
            follower = self._followers.get(token.content)
            if follower is not None and text.startswith(follower.content, begin):
                yield "", follower
                begin += len(follower.content)
            at = begin
        yield text[begin:], None

    def _token_at(self, text: str, start: int) -> AddedToken | None:
        for length in self._lengths[text[start]]:
            token = self._added.get(text[start : start + length])
            if token is not None:
                return token
        return None


def added_by_config(folder: Path, config: Mapping[str, Any]) -> dict[str, AddedToken]:
    """Text -> token of tokenizer_config.json's added_tokens_decoder; UserError where it is bad."""
    where = f"{folder / CONFIG_FILE}: added_tokens_decoder"
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise UserError(f"{where} is {json_type(decoder)} (allowed: an object, null)")
    added: dict[str, AddedToken] = {}
    for key, entry in decoder.items():
        place = f"{where}: {key[:40]!r}"
        if not isinstance(entry, dict):
            raise UserError(f"{place} is {json_type(entry)} (allowed: an object with content)")
        token_id, special = checked_token_id(key, place), bool(entry.get("special"))
        token = described_token(entry, token_id, special, place)
        added[token.content] = token
    return added


def switch(folder: Path, config: Mapping[str, Any], name: str) -> bool:
    """A switch of tokenizer_config.json, false where it is missing. UserError for other types."""
    value = config.get(name)
    if not isinstance(value, (bool, type(None))):
        raise UserError(
            f"{folder / CONFIG_FILE}: {name} is {json_type(value)} (allowed: true, false, null)"
        )
    return bool(value)


def described_token(
    entry: Mapping[str, Any], token_id: int, special: bool, where: str
) -> AddedToken:
    """A token as config files describe one. Raises UserError naming what is wrong."""
    switches = {name: entry.get(name) for name in SWITCHES}
    for name, value in switches.items():
        if not isinstance(value, (bool, type(None))):
            raise UserError(f"{where}: {name} is {json_type(value)} (allowed: true, false)")
    return AddedToken(
        checked_content(entry.get("content"), where),
        token_id,
        special,
        bool(switches["lstrip"]),
        bool(switches["rstrip"]),
        not special if switches["normalized"] is None else bool(switches["normalized"]),
        bool(switches["single_word"]),
    )


def checked_content(value: Any, where: str) -> str:
    """An added token's text; UserError for anything else, and for one that is too long."""
    if not isinstance(value, str) or len(value) > MAX_ADDED_CHARACTERS:
        got = f"{len(value)} characters" if isinstance(value, str) else json_type(value)
        raise UserError(
            f"{where}: content is {got} (allowed: a text of at most {MAX_ADDED_CHARACTERS} "
            "characters)"
        )
    return value


def checked_token_id(value: Any, where: str) -> int:
    """A token id, as a number or as JSON's keys write one; UserError when it is none."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_TOKEN_ID:
        raise UserError(
            f"{where}: the token id is {str(value)[:40]!r} (allowed: a whole number from 0 to "
            f"{MAX_TOKEN_ID - 1})"
        )
    return value
