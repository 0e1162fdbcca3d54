"""Checks that every frozen config makes of its fields: types, ranges, names of files.

Imports no Paddle.
"""

from __future__ import annotations

import numbers
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from predict.errors import UserError, one_of, quoted
from predict.system.files import check_name
from predict.system.ranges import RANGES, check_range


class _Type(NamedTuple):
    """Fields declared alike: what is allowed, and the value taken in, None where it is another."""

    allowed: str
    taken: Callable[[Any], Any]


def _text(value: Any) -> str | None:
    return os.fsdecode(value) if isinstance(value, (str, os.PathLike)) else None


def _texts(value: Any) -> tuple[str, ...] | None:
    fits = isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value)
    return tuple(value) if fits else None


def _number(kind: type, to: type) -> Callable[[Any], Any]:
    """NumPy's numbers are taken as Python's; a boolean is none."""
    return lambda value: (
        to(value) if isinstance(value, kind) and not isinstance(value, bool) else None
    )


_TYPES: Mapping[str, _Type] = {
    "str": _Type("a text", _text),
    "bool": _Type("True or False", lambda value: value if isinstance(value, bool) else None),
    "int": _Type("a whole number", _number(numbers.Integral, int)),
    "float": _Type("a number", _number(numbers.Real, float)),
    "tuple[str, ...]": _Type("a tuple of texts", _texts),
    "tuple[int, ...]": _Type(
        "a tuple of whole numbers",
        lambda value: tuple(value) if isinstance(value, (list, tuple)) else None,
    ),
}


def check_fields(
    config: Any,
    *,
    choices: Mapping[str, tuple[str, ...]],
    files: tuple[str, ...] = (),
    others: tuple[str, ...] = (),
) -> None:
    """Takes in the fields of a frozen dataclass as the types they are declared with.

    A number comes to lie in its range, see predict.system.ranges. choices: what texts may be.
    files: fields that name files or folders. others: fields that are left to the caller. Raises
    UserError for any other value.
    """
    for each in fields(config):
        if each.name in others:
            continue
        name, value = each.name, getattr(config, each.name)
        kind, _, optional = str(each.type).partition(" | ")
        if value is None and optional:
            continue
        taken = _TYPES[kind].taken(value)
        if taken is None:
            raise UserError(
                f"{name} {quoted(value)} is not supported (allowed: {_TYPES[kind].allowed}"
                f"{', or None' * bool(optional)})"
            )
        object.__setattr__(config, name, taken)
        if name in RANGES:
            check_range(name, taken, name)
        if name in files:
            check_name(name, taken)
        if name in choices and taken not in choices[name]:
            raise one_of(name, taken, choices[name])
