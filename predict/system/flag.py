"""A flag: how it is written, read and refused. Imports nothing slow."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from predict.errors import UserError, quoted
from predict.names import hint
from predict.system.files import MAX_JSON_DIGITS, check_name, parse_json
from predict.system.ranges import RANGES, Range

FlagKind = Literal["str", "int", "float", "bool", "ints", "strs", "json", "texts", "pairs"]


class Availability(NamedTuple):
    """Whether a flag does something in this release, and what to do where it does not.

    `values`: patterns of the values concerned; empty: any value that differs from the default. One
    that is "not here" is another command's: any value is refused.
    """

    level: Literal["works", "not yet", "no effect", "not here"]
    sentence: str = ""
    values: tuple[str, ...] = ()

    def concerns(self, value: Any, default: Any) -> bool:
        """Whether an explicitly given value meets this refusal or note."""
        if self.level == "works":
            return False
        if self.values:
            return any(fnmatchcase(str(value), pattern) for pattern in self.values)
        return bool(value != default) or self.level == "not here"


WORKS = Availability("works")


def not_yet(today: str, *values: str) -> Availability:
    """Refused by name; `today` says what works in this release."""
    return Availability("not yet", today, values)


def no_effect(why: str) -> Availability:
    """Accepted from PaddleNLP scripts, with a note that says why nothing changes."""
    return Availability("no effect", why)


def not_here(instead: str, *values: str) -> Availability:
    """Refused by name, as another command's; `instead` says what there is for it here."""
    return Availability("not here", instead, values)


@dataclass(frozen=True)
class Flag:
    """One row: how a flag is written, what it means, and whether it works in this release."""

    group: str
    name: str
    kind: FlagKind
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    availability: Availability = WORKS
    aliases: tuple[str, ...] = ()
    null_words: tuple[str, ...] = ("none", "")  # texts that mean "not given"
    allowed: Range | None = None  # of its numbers; None: RANGES may have one by its name

    @property
    def range(self) -> Range | None:
        """The numbers that it may have; None: whatever reads it checks them."""
        return self.allowed or RANGES.get(self.name)

    def parse(self, text: str) -> Any:
        """The value that a command line's `text` stands for.

        Raises argparse.ArgumentTypeError saying what is allowed.
        """
        if self.default is None and text.lower() in self.null_words:
            return None
        try:
            if self.kind != "str":
                _check_text(text, self.kind)
            value = KINDS[self.kind].parse(text)
            for part in value if self.kind in ("strs", "ints") else (value,):
                if self.choices and part not in self.choices:
                    said = f"{quoted(part)} is not known (allowed: {', '.join(self.choices)})"
                    raise UserError(said + hint(part, self.choices))
                if self.kind in ("str", "strs", "pairs"):  # some name files and folders
                    check_name("", part)
                if self.range is not None:
                    self.range.taken("", part)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{quoted(text)} is not {KINDS[self.kind].words}"
            ) from None
        return value


def _check_text(text: str, kind: str) -> None:
    """Raises UserError for bytes that are not UTF-8, which no tokenizer takes, and for NUL."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{quoted(text)} is not UTF-8 text (character {error.start + 1}); write it in UTF-8"
        ) from None
    if "\0" in text and kind != "texts":
        raise UserError(f"{quoted(text)} has a NUL character; leave it out")


def _parse_bool(text: str) -> bool:
    value = _BOOLS.get(text.lower())
    if value is None:
        raise ValueError(text)
    return value


_BOOLS = dict.fromkeys(("true", "1", "yes", "y", "t", "on"), True)
_BOOLS |= dict.fromkeys(("false", "0", "no", "n", "f", "off"), False)


def _parse_json(text: str) -> Any:
    return parse_json(text, quoted(text, 80))


def _parse_int(text: str) -> int:
    if len(text) > MAX_JSON_DIGITS:
        raise UserError(f"{quoted(text)} has {len(text)} digits (allowed: {MAX_JSON_DIGITS})")
    return int(text)


def _parts(text: str) -> list[str]:
    return text.strip("[] ").replace(",", " ").split()


def _parse_ints(text: str) -> list[int]:
    values = [_parse_int(part) for part in _parts(text)]
    if not values:
        raise ValueError(text)
    return values


def _parse_pair(text: str) -> str:
    name, _, path = text.partition("=")
    if not (name and path):
        raise ValueError(text)
    return text


class _Kind(NamedTuple):
    """How a flag's value is read, what it is called, and how many words stand behind the flag."""

    parse: Callable[[str], Any]
    words: str
    metavar: str
    num_words: Mapping[str, Any] = {}


KINDS: Mapping[str, _Kind] = {
    "str": _Kind(str, "a text", "TEXT"),
    "int": _Kind(_parse_int, "an integer", "N"),
    "float": _Kind(float, "a number", "X"),
    "bool": _Kind(_parse_bool, "true or false", "true|false", {"nargs": "?", "const": True}),
    "ints": _Kind(_parse_ints, "integers separated by commas", "N,N"),
    "strs": _Kind(_parts, "names separated by commas", "NAME,NAME"),
    "json": _Kind(_parse_json, "JSON", "JSON"),
    # A text may begin with a bracket; a list of texts begins with two characters.
    "texts": _Kind(
        lambda text: _parse_json(text) if text.startswith('["') else [text],
        'a text or a JSON list of texts, ["...", ...]',
        "TEXT",
    ),
    # One word each, of which there may be several; the flag may come again.
    "pairs": _Kind(
        _parse_pair,
        "a name and a folder, as name=path",
        "NAME=PATH",
        {"nargs": "+", "action": "extend"},
    ),
}
