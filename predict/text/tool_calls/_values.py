"""Values that models write as bare text: JSON by the schema of their parameter."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from predict.errors import UserError
from predict.system.files import parse_json

MAX_REFERENCES = 16  # followed one behind another
PYTHON = {"True": "true", "False": "false", "None": "null"}
_TYPES = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"))


@dataclass(frozen=True)
class Kinds:
    """What a schema allows: types, or these values where it lists them all."""

    types: frozenset[str] | None = None  # None: any
    values: tuple[Any, ...] | None = None

    @property
    def is_text(self) -> bool:
        """Whether all values are texts, whatever they look like."""
        return self.types == frozenset(("string",))

    @property
    def may_be_text(self) -> bool:
        """Whether any text is a value."""
        return self.values is None and (self.types is None or "string" in self.types)

    def takes(self, value: Any) -> bool:
        """Whether a JSON value is of these kinds."""
        if self.values is not None:
            return any(type(each) is type(value) and each == value for each in self.values)
        name = _type_of(value)
        is_whole = name == "integer" and "number" in (self.types or ())
        return self.types is None or name in self.types or is_whole


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "object")


def kinds_of(schema: Any, root: Mapping[str, Any], left: int = MAX_REFERENCES) -> Kinds:
    """The kinds of a parameter's schema; `root` has what it refers to."""
    if not isinstance(schema, Mapping) or not left:
        return Kinds()
    if "$ref" in schema:
        return kinds_of(_referred(schema["$ref"], root), root, left - 1)
    values = (schema["const"],) if "const" in schema else schema.get("enum")
    if isinstance(values, Sequence) and not isinstance(values, str) and values:
        return Kinds(frozenset(map(_type_of, values)), tuple(values))
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            found = [kinds_of(each, root, left - 1) for each in schema[key]]
            return _common(found) if key == "allOf" else _either(found)
    types = schema.get("type")
    if types == "null":
        return Kinds(frozenset(("null",)), (None,))
    names = [types] if isinstance(types, str) else types
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        return Kinds()
    return Kinds(frozenset(names))


def _referred(reference: Any, root: Mapping[str, Any]) -> Any:
    """What a reference within the same schema stands for; None for any other one."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for name in filter(None, reference[1:].split("/")):
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _either(found: Sequence[Kinds]) -> Kinds:
    types: frozenset[str] = frozenset()
    values: list[Any] = []
    for each in found:
        if each.types is None:
            return Kinds()
        types |= each.types
        values += each.values or ()
    return Kinds(types, tuple(values) if all(each.values is not None for each in found) else None)


def _common(found: Sequence[Kinds]) -> Kinds:
    """Of schemas that hold together: the first that lists values, else the types in all."""
    listed = next((each for each in found if each.values is not None), None)
    typed = [each.types for each in found if each.types is not None]
    return listed or Kinds(frozenset.intersection(*typed) or None if typed else None)


def json_of(text: str, kinds: Kinds) -> str:
    """A value as JSON: what its kinds allow, else a text."""
    bare = text.strip()
    bare = PYTHON.get(bare, bare)
    as_text = json.dumps(text, ensure_ascii=False)
    try:
        value = parse_json(bare, "a parameter")
    except UserError:
        return as_text
    if kinds.types is None:
        return bare
    # A text of these kinds has no quotes around it.
    is_text = kinds.takes(text) if kinds.values is not None else "string" in kinds.types
    if is_text and (isinstance(value, str) or not kinds.takes(value)):
        return as_text
    return bare
