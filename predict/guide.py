"""What an answer's text must be: the record `Guide` of a request, checked for shape and size.

Whether a schema or a grammar holds is found where it is compiled (predict.text.guides).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from predict.errors import UserError, quoted, unknown_key
from predict.system import bounds
from predict.system.bounds import MAX_SCHEMA_BYTES
from predict.system.files import json_type, parse_json
from predict.system.ranges import refusal

MAX_PROPERTIES = 1024  # of one object: compiling takes the square of their number
MAX_WHOLE = 2**53
MAX_DEPTH = 64  # lists and objects of a schema within each other
MAX_GRAMMAR_BYTES = 1 << 16
MAX_REGEX_BYTES = 1 << 14
MAX_CHOICES = 4096
MAX_CHOICES_BYTES = 1 << 16  # of all of them
MAX_TAGS = 256  # structures of a structural tag, and its triggers
MAX_TAG_BYTES = 1024  # of a trigger, a beginning or an end
CONTENT = "@content"  # in Guide.around

_STRUCTURE_KEYS = ("begin", "schema", "end")
_PROPERTY_KEYS = ("properties", "patternProperties")
_ANNOTATIONS = ("default", "examples")  # which say nothing about what is valid
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Where a schema has schemas: by name, in a list, alone.
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS_OF_SCHEMAS = ("anyOf", "allOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains")
_FORMATS = (
    *("date", "time", "date-time", "duration", "email", "hostname"),
    *("ipv4", "ipv6", "uri", "uuid"),
)
# Look-around, borders of words, back references; escaped backslashes and parentheses are none.
_ESCAPED = re.compile(r"\\[\\(]")
_UNKNOWN_PATTERN = re.compile(r"\(\?<?[=!]|\\[bBk1-9]")
_TAG_KEYS = ("structures", "triggers", "at_least_one", "stop_after_first")


@dataclass(frozen=True, kw_only=True)
class Guide:
    """What an answer must be: exactly one of these. Raises UserError that names the field.

    Schemas and structural tags may be given as dicts or as JSON texts, and are kept as JSON texts.
    `around` may stand beside it.
    """

    json_schema: str | bool | Mapping[str, Any] | None = None  # JSON that fits this JSON schema
    json_object: bool = False  # any JSON object
    regex: str | None = None  # a text that this regular expression matches whole
    choice: Sequence[str] | None = None  # one of these texts
    grammar: str | None = None  # a text of this grammar, in llguidance's variant of Lark
    # Text in which tags hold JSON: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}.
    structural_tag: str | Mapping[str, Any] | None = None
    # Whether parts of schemas are refused that cannot be enforced, but are often written as a note:
    # unknown formats, uniqueItems, propertyNames, oneOf that overlaps, look-around and back
    # references in patterns, bounds beyond 2**53. Else these are left out.
    strict: bool = False
    # A grammar of the whole answer, in which @content stands for the guide: of a model's thoughts
    # ahead of it, for one.
    around: str | None = None

    def __post_init__(self) -> None:
        names = _kinds()
        if not isinstance(self.strict, bool):
            raise refusal("guide.strict", self.strict, "true, false")
        if not isinstance(self.json_object, bool):
            raise refusal("guide.json_object", self.json_object, "true, false")
        given = [name for name in names if _is_given(self, name)]
        if len(given) != 1:
            raise UserError(
                f"guide has {', '.join(given) or 'nothing'} (allowed: exactly one of "
                f"{', '.join(names)})"
            )
        name = given[0]
        if name in _CHECKED:
            object.__setattr__(self, name, _CHECKED[name](getattr(self, name), self.strict))
        if self.around is not None:
            grammar = _text("guide.around", self.around, MAX_GRAMMAR_BYTES)
            if CONTENT not in grammar:
                raise UserError(
                    f"guide.around has no {CONTENT}, which stands for the guide; add it"
                )

    @classmethod
    def of(cls, value: object) -> Guide:
        """A Guide, or the one that a mapping describes. Raises UserError for anything else."""
        if isinstance(value, Guide):
            return value
        names = [field.name for field in fields(cls)]
        if not isinstance(value, Mapping):
            raise refusal("guide", value, f"a Guide, an object with one of {names}, None")
        for key in value:
            if key not in names:
                raise unknown_key("guide", key, names)
        return cls(**value)

    @property
    def kind(self) -> str:
        """The field that is given."""
        return next(name for name in _kinds() if _is_given(self, name))

    @property
    def text(self) -> str:
        """The value of that field, as a text that says all of it."""
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else json.dumps(value)


def _kinds() -> list[str]:
    return [field.name for field in fields(Guide) if field.name not in ("strict", "around")]


def _is_given(guide: Guide, name: str) -> bool:
    value = getattr(guide, name)
    return value is True if name == "json_object" else value is not None


def _text(name: str, value: object, most: int, *, empty: bool = False) -> str:
    """A text of at most so many bytes. Raises UserError."""
    if not isinstance(value, str) or not (value or empty):
        raise refusal(name, value, "a text" if empty else "a text that is not empty")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise UserError(
            f"{name} has half a surrogate pair at character {error.start}; leave it out"
        ) from None
    if size > most:
        raise UserError(f"{name} has {size} bytes (allowed: at most {most}); make it shorter")
    return value


def _json_value(name: str, value: object) -> tuple[str, Any]:
    """A JSON value as compact text, its keys in the order they came in, and as Python has it.

    Raises UserError.
    """
    if isinstance(value, str):
        if len(value) > 4 * MAX_SCHEMA_BYTES:  # its spaces do not count, and yet take time
            raise UserError(
                f"{name} has {len(value)} characters (allowed: {MAX_SCHEMA_BYTES} bytes without "
                "spaces); split it up"
            )
        value = parse_json(value, name, max_depth=MAX_DEPTH)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        size = len(text.encode())
    except UnicodeEncodeError:
        raise UserError(f"{name} has half a surrogate pair in a text; leave it out") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{name} is no JSON value: {error}; give a JSON text or a dict") from None
    if size > MAX_SCHEMA_BYTES:
        raise UserError(
            f"{name} has {size} bytes as JSON (allowed: at most {MAX_SCHEMA_BYTES}); split it up"
        )
    # Depth, and keys that were no texts and come twice for that.
    return text, parse_json(text, name, max_depth=MAX_DEPTH)


def _json_schema(value: object, is_strict: bool) -> str:
    text, schema = _json_value("guide.json_schema", value)
    if not isinstance(schema, (dict, bool)):
        kind = json_type(schema)
        raise UserError(f"guide.json_schema is {kind} (allowed: an object, true, false)")
    if not is_strict:
        schema = _relaxed(schema)
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    _check_schema("guide.json_schema", schema)
    return text


def _relaxed(schema: Any) -> Any:
    """A schema without the parts that `Guide.strict` refuses."""
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("uniqueItems", "propertyNames") or _is_note(key, value):
            continue
        if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            names = (n for n in value if key != "patternProperties" or not _is_note("pattern", n))
            kept[key] = {name: _relaxed(value[name]) for name in names}
        elif key in _LISTS_OF_SCHEMAS and isinstance(value, list):
            kept[key] = [_relaxed(each) for each in value]
        else:
            kept[key] = _relaxed(value) if key in _SCHEMAS else value
    if "oneOf" in kept:
        choice = {"anyOf": kept.pop("oneOf")}
        if "anyOf" in kept:
            kept["allOf"] = [*kept.get("allOf", []), choice]
        else:
            kept |= choice
    return kept


def _is_note(key: str, value: Any) -> bool:
    """Whether a key of a schema has a value that cannot be enforced."""
    if key == "format":
        return isinstance(value, str) and value not in _FORMATS
    if key == "pattern" and isinstance(value, str):
        return _UNKNOWN_PATTERN.search(_ESCAPED.sub("", value)) is not None
    return key in _BOUNDS and isinstance(value, (int, float)) and abs(value) > MAX_WHOLE


def _check_schema(name: str, value: object) -> None:
    """Raises UserError for what llguidance takes long for, or would round; depth was checked."""
    if isinstance(value, int) and abs(value) > MAX_WHOLE:
        raise UserError(
            f"{name} has the number {value} (allowed: whole numbers up to {MAX_WHOLE}, which a "
            "double holds exactly); write it as a text with a pattern"
        )
    if isinstance(value, list):
        for each in value:
            _check_schema(name, each)
    elif isinstance(value, dict):
        for key, each in value.items():
            if key in _ANNOTATIONS:
                continue
            if key in _PROPERTY_KEYS and isinstance(each, dict) and len(each) > MAX_PROPERTIES:
                raise UserError(
                    f"{name} has {len(each)} {key} in one object (allowed: at most "
                    f"{MAX_PROPERTIES}); split it up"
                )
            _check_schema(name, each)


def _choice(value: object, _: bool) -> tuple[str, ...]:
    allowed = "a sequence of texts, none of them empty, at least one"
    found = bounds.items("guide.choice", value, MAX_CHOICES, allowed)
    if not found:
        raise refusal("guide.choice", value, allowed)
    texts = [_text(f"guide.choice[{i}]", each, MAX_CHOICES_BYTES) for i, each in enumerate(found)]
    size = sum(len(text.encode()) for text in texts)
    if size > MAX_CHOICES_BYTES:
        raise UserError(
            f"guide.choice has {size} bytes (allowed: at most {MAX_CHOICES_BYTES}, all texts "
            "together)"
        )
    return tuple(dict.fromkeys(texts))


def _structural_tag(value: object, is_strict: bool) -> str:
    """As JSON, with all keys. See structures_of."""
    name = "guide.structural_tag"
    _, found = _json_value(name, value)
    if not isinstance(found, dict):
        raise UserError(f"{name} is {json_type(found)} (allowed: an object)")
    found.pop("type", None)  # as in OpenAI's and other servers' response_format
    for key in found:
        if key not in _TAG_KEYS:
            raise unknown_key(name, key, _TAG_KEYS)
    for key in ("structures", "triggers"):
        if not isinstance(found.get(key), list) or not 0 < len(found[key]) <= MAX_TAGS:
            raise UserError(f"{name}.{key} is needed (allowed: a list of 1 to {MAX_TAGS} entries)")
    for key in ("at_least_one", "stop_after_first"):
        if not isinstance(found.setdefault(key, False), bool):
            raise refusal(f"{name}.{key}", found[key], "true, false")
    triggers = [
        _text(f"{name}.triggers[{index}]", trigger, MAX_TAG_BYTES)
        for index, trigger in enumerate(found["triggers"])
    ]
    for index, structure in enumerate(found["structures"]):
        if not is_strict and isinstance(structure, dict) and "schema" in structure:
            structure["schema"] = _relaxed(structure["schema"])
        _check_structure(f"{name}.structures[{index}]", structure, triggers)
    return json.dumps(found, ensure_ascii=False, separators=(",", ":"))


def _check_structure(where: str, structure: object, triggers: Sequence[str]) -> None:
    if not isinstance(structure, dict):
        raise UserError(f"{where} is {json_type(structure)} (allowed: an object)")
    for key in structure:
        if key not in _STRUCTURE_KEYS:
            raise unknown_key(where, key, _STRUCTURE_KEYS)
    begin = _text(f"{where}.begin", structure.get("begin"), MAX_TAG_BYTES)
    _text(f"{where}.end", structure.get("end", ""), MAX_TAG_BYTES, empty=True)
    if not isinstance(structure.get("schema"), (dict, bool)):
        raise UserError(f"{where}.schema is needed (allowed: a JSON schema, as an object)")
    _check_schema(f"{where}.schema", structure["schema"])
    if not any(begin.startswith(trigger) for trigger in triggers):
        raise UserError(
            f"{where}.begin is {quoted(begin)}, which begins with none of the triggers "
            f"{quoted(list(triggers))}; add its trigger"
        )


_CHECKED = {
    "json_schema": _json_schema,
    "regex": lambda value, _: _text("guide.regex", value, MAX_REGEX_BYTES),
    "choice": _choice,
    "grammar": lambda value, _: _text("guide.grammar", value, MAX_GRAMMAR_BYTES),
    "structural_tag": _structural_tag,
}
