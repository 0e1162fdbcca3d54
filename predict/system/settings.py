"""Values of JSON files that describe checkpoints, and regular expressions in them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from predict.errors import UserError
from predict.system.files import json_type

KINDS = {
    bool: "true, false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
}
MAX_SHOWN = 100  # characters of a value in a message
MAX_PATTERN, MAX_REPEATS = 500, 5


def setting(config: Mapping[str, Any], key: str, default: Any, where: str, *kinds: type) -> Any:
    """A value of a JSON object, which must be of one of the kinds; null is the default.

    Raises UserError.
    """
    value = config.get(key)
    if value is None:
        return default
    if type(value) is float and int in kinds and float not in kinds and value.is_integer():
        return int(value)
    if type(value) not in kinds:
        allowed = ", ".join(KINDS[kind] for kind in kinds)
        raise UserError(f"{where}: {key} is {repr(value)[:MAX_SHOWN]} (allowed: {allowed})")
    return value


def refuse_unread(
    config: Mapping[str, Any], read: str, unread: str, where: str, do: str = "quantize it again"
) -> None:
    """Raises UserError for a key that says something, and is in neither of two lists of names.

    read: keys whose values are used; unread: those that change nothing. do: what helps.
    """
    known = {*read.split(), *unread.split()}
    unknown = [key for key, value in config.items() if value and key not in known]
    if unknown:
        key = unknown[0]
        raise UserError(
            f"{where}: {key[:MAX_SHOWN]} is {repr(config[key])[:MAX_SHOWN]}, which is not known "
            f"here and may change results (read are: {', '.join(read.split())}); {do} without it, "
            "or take it out of the file if it changes nothing"
        )


def texts(config: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    """A list of texts of a JSON object; empty where there is none. Raises UserError."""
    values = setting(config, key, [], where, list)
    for value in values:
        if not isinstance(value, str):
            raise UserError(f"{where}: {key} holds {json_type(value)}; it must hold texts alone")
    return tuple(values)


def pattern(text: str, where: str) -> re.Pattern[str]:
    """A file's regular expression for names of linears. Raises UserError.

    Python's have no time limit, and some that repeat what repeats take ages for a short name.
    """
    parts = re.findall(r"\\.|\[(?:\\.|[^\]])*\]|\)?(?:[*+]|\{\d*,?\d*\})|.", text, re.DOTALL)
    repeats = [part for part in parts if part[-1] in "*+}" and part[0] in ")*+{"]
    if len(text) > MAX_PATTERN or len(repeats) > MAX_REPEATS or any(p[0] == ")" for p in repeats):
        raise UserError(
            f"{where}: the pattern {text[:MAX_SHOWN]!r} may take too long (allowed: "
            f"{MAX_PATTERN} characters, {MAX_REPEATS} repetitions, none of them of a group)"
        )
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(
            f"{where}: {text[:MAX_SHOWN]!r} is no regular expression: {error}"
        ) from None
