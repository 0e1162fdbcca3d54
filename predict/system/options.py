"""Options: fields of frozen dataclasses that say once what flag, check and page are made of.

    @dataclass(frozen=True, kw_only=True)
    class CacheConfig(Checked):
        block_size: int = option(64, "Tokens per block of the KV cache.", allowed=(16, 32, 64))

is the flag --block_size, its row of docs/flags.md and docs/python-api.md, and a field that refuses
other values. Imports no Paddle.
"""

from __future__ import annotations

import numbers
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, Field, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from predict.errors import UserError, one_of
from predict.names import hint
from predict.system.files import check_name
from predict.system.flag import Flag, FlagKind
from predict.system.ranges import Range, refusal

Allowed = Range | Collection[Any] | Callable[[Any], Any]
_KEY = "option"  # of a field's metadata
_KINDS: Mapping[str, FlagKind] = {"tuple[str, ...]": "strs", "tuple[int, ...]": "ints"}


class Option(NamedTuple):
    """What a field says of itself besides its type and default."""

    help: str
    group: str  # of its flag and of those that follow; "": as the field before
    allowed: Allowed | None
    is_file: bool
    cells: Mapping[str, Any] | None  # of its Flag, where they differ from the field's; None: none


def option(
    default: Any = MISSING,
    help: str = "",  # noqa: A002
    *,
    group: str = "",
    allowed: Allowed | None = None,
    is_file: bool = False,
    is_flag: bool = True,
    hidden: bool = False,
    **cells: Any,
) -> Any:
    """A dataclass field with a default, and what it means.

    allowed: a Range; the values that it may have, of which texts are the flag's choices; or a
    function that returns the value taken in, or raises UserError. is_file: it names a file or a
    folder. is_flag: a flag has its name, or that of `cells`. hidden: repr() leaves it out. cells:
    those of Flag that are other than the field's, flag_default for its default. A flag's None
    stands for the field's default.
    """
    if "flag_default" in cells:
        cells["default"] = cells.pop("flag_default")
    metadata = {_KEY: Option(help, group, allowed, is_file, cells if is_flag else None)}
    if default is dict:
        return field(default_factory=dict, hash=False, metadata=metadata)
    return field(default=default, repr=not hidden, metadata=metadata)


def options_of(config: Any) -> Iterator[tuple[Field[Any], Option]]:
    """The fields of a dataclass that are options."""
    return ((each, each.metadata[_KEY]) for each in fields(config) if _KEY in each.metadata)


def flags_by_field(*configs: type) -> dict[str, Flag]:
    """The flags of dataclasses' options, by the names of the fields."""
    found: dict[str, Flag] = {}
    group = ""
    for config in configs:
        for each, said in options_of(config):
            group = said.group or group
            if said.cells is not None:
                found[each.name] = _flag(each, said, group)
    return found


def flags_of(*configs: type) -> tuple[Flag, ...]:
    """The flags of dataclasses' options, in order."""
    return tuple(flags_by_field(*configs).values())


def _flag(each: Field[Any], said: Option, group: str) -> Flag:
    kind = str(each.type).partition(" | ")[0]
    cells: dict[str, Any] = {
        "group": group,
        "name": each.name,
        "kind": _KINDS.get(kind, kind),
        "default": None if each.default in (MISSING, ()) else each.default,
        "help": said.help,
    }
    if isinstance(said.allowed, Range):
        cells["allowed"] = said.allowed
    elif kind == "str" and isinstance(said.allowed, Collection):
        cells["choices"] = tuple(filter(None, said.allowed))
    return Flag(**{**cells, **cast("Mapping[str, Any]", said.cells)})


def values_of(values: Mapping[str, Any], *configs: type) -> dict[str, Any]:
    """Fields of dataclasses by name, from the values of flags; without those that are None.

    Raises UserError where a field without a default has none.
    """
    found: dict[str, Any] = {}
    for config in configs:
        flags = flags_by_field(config)
        for each, _ in options_of(config):
            flag = flags.get(each.name)
            if flag is None:
                continue
            if values[flag.name] is not None:
                found[each.name] = values[flag.name]
            elif each.default is MISSING and each.default_factory is MISSING:
                first = flag.help.partition(". ")[0]
                raise UserError(f"--{flag.name} is needed: {first[0].lower()}{first[1:]}")
    return found


class Checked:
    """A base of frozen dataclasses: takes in options as their types say. Raises UserError."""

    if not TYPE_CHECKING:  # which knows the fields

        def __new__(cls, *values: Any, **named: Any) -> Any:
            for name in named.keys() - cls.__dataclass_fields__.keys():
                known = [each.name for each in fields(cls)]
                said = hint(name, known) or f" (known: {', '.join(known)})"
                raise UserError(f"{cls.__name__} has no field {name!r}{said}")
            return super().__new__(cls)

    def __post_init__(self) -> None:
        for each, said in options_of(self):
            value = getattr(self, each.name)
            kind, _, optional = str(each.type).partition(" | ")
            if value is not None or optional != "None":
                suffix = ", or None" if optional == "None" else ""
                object.__setattr__(self, each.name, _taken(each.name, value, kind, said, suffix))


def _taken(name: str, value: Any, kind: str, said: Option, suffix: str) -> Any:
    """The value that a field of type `kind` has; `suffix`: what it may be besides."""
    allowed = said.allowed
    if isinstance(allowed, Range):
        return allowed.taken(name, value, suffix)
    if callable(allowed):
        return allowed(value)
    taken = _TYPES[kind].taken(value)
    if taken is None:
        raise refusal(name, value, f"{_TYPES[kind].allowed}{suffix}")
    if said.is_file:
        check_name(name, taken)
    if allowed is not None and taken not in allowed:
        if kind == "str":
            raise one_of(name, taken, filter(None, allowed))
        raise refusal(name, taken, ", ".join(map(str, allowed)))
    return taken


class _Type(NamedTuple):
    """Fields declared alike: what is allowed, and the value taken in, None where it is another."""

    allowed: str
    taken: Callable[[Any], Any]


def _whole(value: Any) -> int | None:
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return int(value) if is_whole else None


def _texts(value: Any) -> tuple[str, ...] | None:
    fits = isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value)
    return tuple(value) if fits else None


_TYPES: Mapping[str, _Type] = {
    "str": _Type(
        "a text",
        lambda value: os.fsdecode(value) if isinstance(value, (str, os.PathLike)) else None,
    ),
    "bool": _Type("True, False", lambda value: value if isinstance(value, bool) else None),
    "int": _Type("a whole number", _whole),
    "tuple[str, ...]": _Type("a tuple of texts", _texts),
    "tuple[int, ...]": _Type(
        "a tuple of whole numbers",
        lambda value: tuple(value) if isinstance(value, (list, tuple)) else None,
    ),
}
