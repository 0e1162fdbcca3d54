"""Bounded JSON schemas of every kind, and hard ones that must hold or be refused by name."""

from __future__ import annotations

from typing import Any

POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "number", "minimum": -10, "maximum": 10, "multipleOf": 0.5},
        "y": {"enum": [0, 1]},
    },
    "required": ["x", "y"],
    "additionalProperties": False,
}
TEXT = {"type": "string", "maxLength": 10}


def record(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 9}
    for level in range(depth):
        schema = record(**{f"level_{level}": schema})
    return schema


BOUNDED: dict[str, Any] = {
    "integer": {"type": "integer", "minimum": -7, "maximum": 1200},
    "number": {"type": "number", "minimum": 0, "maximum": 10, "multipleOf": 0.25},
    "boolean": {"type": "boolean"},
    "null or text": {"type": ["null", "string"], "maxLength": 8},
    "text": {"type": "string", "minLength": 3, "maxLength": 12},
    "enum": {"enum": ["red", 1, None, {"a": [1]}, "blau", 2.5]},
    "const": {"const": {"name": "é🙂", "list": [1, True]}},
    "unicode enum": {"enum": ["naïve", "日本語", "🙂🙃", "Ωmega", "שלום"]},
    "unicode keys": record(größe={"enum": ["klein", "groß"]}, 色={"enum": ["赤", "青"]}),
    "escapes": {"enum": ['say "hi"', "back\\slash", "line\nfeed", "tab\t", "/slash/"]},
    "person": record(first=TEXT, age={"type": "integer", "minimum": 0, "maximum": 150}),
    "point": POINT,
    "optional": {
        "type": "object",
        "properties": {"a": TEXT, "b": {"type": "boolean"}, "c": {"enum": [1, 2]}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "list": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99},
             "minItems": 2, "maxItems": 5},
    "list of enums": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 6},
    "list of records": {"type": "array", "items": POINT, "minItems": 1, "maxItems": 3},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, TEXT, {"const": 3}],
              "items": False, "minItems": 3, "maxItems": 3},
    "nested": nested(6),
    "anyOf": {"anyOf": [record(kind={"const": "circle"}, radius={"type": "integer", "minimum": 1,
                                                                "maximum": 9}),
                        record(kind={"const": "square"}, side={"type": "integer", "minimum": 1,
                                                              "maximum": 9}),
                        {"type": "null"}]},
    "anyOf of texts": {"anyOf": [{"type": "string", "pattern": "^[a-f]{4}$"}, {"enum": [1, 2]}]},
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 30}]},
    "ref": {"$defs": {"point": POINT}, **record(start={"$ref": "#/$defs/point"},
                                                end={"$ref": "#/$defs/point"})},
    "recursive": {"$defs": {"tree": record(
        value={"type": "integer", "minimum": 0, "maximum": 9},
        children={"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2}),
        "leaf": record(value={"enum": ["leaf"]})}, "$ref": "#/$defs/tree"},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    "pattern of words": {"type": "string", "pattern": "^(foo|bar)( (foo|bar)){1,3}$"},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "multiple": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 500},
    "dictionary": {"type": "object", "properties": {"k": {"enum": [1]}}, "required": ["k"],
                   "additionalProperties": False, "maxProperties": 1},
    "wide": record(**{f"field_{i}": {"type": "boolean"} for i in range(12)}),
    "person with address": record(
        name=TEXT,
        address=record(street=TEXT, zip={"type": "string", "pattern": "^[0-9]{5}$"}),
        phones={"type": "array", "items": {"type": "string", "pattern": "^\\+[0-9]{6,9}$"},
                "maxItems": 2},
    ),
}  # fmt: skip

# After JSONSchemaBench's hard kinds: keywords that few engines have. They hold, or are refused.
HARD: dict[str, Any] = {
    "not": {"not": {"type": "string"}},
    "if then": {"if": {"type": "integer"}, "then": {"minimum": 3}, "else": {"maxLength": 2}},
    "oneOf that overlaps": {"oneOf": [{"type": "integer", "minimum": 2}, {"type": "number"}]},
    "oneOf": {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "boolean"}]},
    "uniqueItems": {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True},
    "contains": {"type": "array", "contains": {"const": 1}, "maxItems": 3},
    "patternProperties": {"type": "object", "patternProperties": {"^x_": {"type": "boolean"}},
                          "additionalProperties": False, "maxProperties": 2},
    "propertyNames": {"type": "object", "propertyNames": {"maxLength": 2}, "maxProperties": 2},
    "dependentRequired": {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}},
                          "dependentRequired": {"a": ["b"]}, "additionalProperties": False},
    "look-ahead": {"type": "string", "pattern": "^(?=a)[ab]{3}$"},
    "back reference": {"type": "string", "pattern": "^(a|b)\\1$"},
    "email": {"type": "string", "format": "email", "maxLength": 20},
    "unknown format": {"type": "string", "format": "idn-email"},
    "remote ref": {"$ref": "https://example.com/schema.json"},
    "missing ref": {"$ref": "#/$defs/nowhere"},
    "unevaluatedProperties": {"allOf": [{"properties": {"a": {"const": 1}}}],
                              "type": "object", "unevaluatedProperties": False},
    "minProperties": {"type": "object", "minProperties": 1, "maxProperties": 2,
                      "additionalProperties": {"type": "boolean"}},
    "empty enum": {"enum": []},
    "contradiction": {"type": "integer", "minimum": 3, "maximum": 2},
    "length and pattern": {"type": "string", "pattern": "^a+$", "minLength": 2, "maxLength": 4},
    "decimal multiple": {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 1},
    "wrong type": {"type": "objectt"},
}  # fmt: skip
