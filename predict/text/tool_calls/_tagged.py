"""Forms whose parameters stand between tags, one by one: <call name><key>value</value></call>.

Values are bare text; what of them is JSON is known by the tool's schema alone. A parameter that the
schema calls a text goes out as it comes, any other one when it is whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from predict.text.lark import literal
from predict.text.markup import Output, Reader, Steps
from predict.text.tool_calls._guides import CallFormat, ToolRules
from predict.text.tool_calls._records import NAME_CHARACTERS, Tool, ToolUse
from predict.text.tool_calls._values import Kinds, json_of, kinds_of


@dataclass(frozen=True, kw_only=True)
class Tags:
    """The texts around calls, names and parameters."""

    begin: str  # of calls
    end: str
    call: str  # ahead of a name; "": the name follows `begin`
    named: str  # behind a name
    call_end: str  # "": `end` is the call's too
    key: str  # ahead of a parameter's name
    keyed: str  # behind it
    value: str = ""  # ahead of a value, behind `keyed`
    value_end: str
    line: str = ""  # around a value, as part of the tags
    has_several: bool = False  # whether calls share one `begin` and `end`

    @property
    def last(self) -> str:
        """The tag that ends a call's parameters."""
        return self.call_end or self.end

    @property
    def begins(self) -> tuple[str, ...]:
        """The tags that a call begins with; some models leave out the first."""
        return tuple(filter(None, (self.begin, self.call)))

    @property
    def value_ends(self) -> dict[str, str]:
        """The texts that end a value, and the tag that each of them is; models forget its own."""
        forgotten = {f"\n{tag}": tag for tag in (self.key, self.last)}
        return {self.value_end: self.value_end, **forgotten}


def tagged_format(
    name: str, models: str, marks: tuple[str, ...], kept: tuple[str, ...], tags: Tags
) -> CallFormat:
    """The format of calls with these tags. kept: see CallFormat.kept_tokens."""
    return CallFormat(
        name=name,
        models=models,
        marks=marks,
        begins=tags.begins,
        kept_tokens=kept,
        reads=lambda reader, output, use: _reads(tags, reader, output, use),
        start=lambda rules: _start(tags, rules),
    )


def _reads(tags: Tags, reader: Reader, output: Output, use: ToolUse) -> Steps[None]:
    marks = tags.begins
    while mark := (yield from reader.until(marks, output.content)):
        marks = tags.begins
        if mark == tags.end:
            continue
        reader.record()
        if mark == tags.begin:
            yield from reader.spaces()
            if tags.call:
                yield from reader.literal(tags.call)
        name = yield from reader.run(NAME_CHARACTERS)
        is_call = bool(name and (not tags.named or (yield from reader.literal(tags.named))))
        tag: str | None = None
        if is_call:
            yield from reader.spaces()
            tag = yield from reader.literal(tags.key, tags.last)
            is_call = bool(tag or tags.named)  # without a tag behind names, the next one tells
        text = reader.rejected(mark)
        if not is_call:
            output.content(text)
            continue
        output.begin_call(name)
        tag = yield from _parameters(tags, reader, output, _schema(use, name), tag)
        marks = tags.begins if tag == tags.end else (*tags.begins, tags.end)


def _parameters(
    tags: Tags, reader: Reader, output: Output, schema: Mapping[str, Any], tag: str | None
) -> Steps[str | None]:
    """Emits a call's parameters as JSON, which is cut off where they are; the tag behind them."""
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    separator = "{"
    while tag == tags.key:
        pieces: list[str] = []
        if not (yield from reader.until((tags.keyed,), pieces.append)):
            return None
        if tags.value:
            yield from reader.spaces()
            yield from reader.literal(tags.value)
        key = "".join(pieces).strip()
        output.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        tag = yield from _value(tags, reader, output, kinds_of(known.get(key), schema))
        if tag is None:
            return None
        if tag == tags.value_end:
            yield from reader.spaces()
            tag = yield from reader.literal(tags.key, tags.last)
    if tag or (yield from reader.peek()):
        output.arguments("{}" if separator == "{" else "}")
    return tag


def _value(tags: Tags, reader: Reader, output: Output, kinds: Kinds) -> Steps[str | None]:
    """Reads a value up to the tag that ends it; None where none does."""
    held: list[str] = []  # a text's last line break, or all of another value

    def text(piece: str) -> None:
        piece = "".join([*held, piece])
        ends = bool(tags.line) and piece.endswith(tags.line)
        held[:] = [tags.line] if ends else []
        piece = piece.removesuffix(tags.line) if ends else piece
        output.arguments(json.dumps(piece, ensure_ascii=False)[1:-1])

    if tags.line:
        yield from reader.literal(tags.line)
    if kinds.is_text:
        output.arguments('"')
    end = yield from reader.until(tuple(tags.value_ends), text if kinds.is_text else held.append)
    if kinds.is_text:
        output.arguments('"' if end else "")
    else:
        output.arguments(json_of("".join(held).removesuffix(tags.line), kinds))
    return tags.value_ends[end] if end else None


def _schema(use: ToolUse, name: str) -> Mapping[str, Any]:
    return next((tool.parameters for tool in use.tools if tool.name == name), {})


def _start(tags: Tags, rules: ToolRules) -> str:
    def called(tool: Tool) -> str:
        head = f"{literal(tool.name + tags.named)} /\\n?/"
        return f"{head} {' '.join(_parameter_rules(tags, rules, tool))}"

    body = f"{rules.any_tool(called)} {rules.mark(tags.last)}"
    if tags.call:
        one = rules.rule(f"{literal(tags.call)} {body} /\\n?/")
        calls = rules.calls(one) if tags.has_several else one
        body = f"/\\n?/ {calls} {rules.mark(tags.end)}"
    return rules.amid_text(tags.begin, rules.rule(body), "/[ \\n]{0,2}/")


def _parameter_rules(tags: Tags, rules: ToolRules, tool: Tool) -> list[str]:
    """The parameters of a tool in the order of its schema; any, where it names none."""
    line = literal(tags.line) if tags.line else ""
    key, keyed = rules.mark(tags.key), rules.mark(tags.keyed)
    begin = f"{keyed} /\\n?/ {rules.mark(tags.value)}" if tags.value else f"{keyed} {line}"
    end = rules.rule(f"{line} {rules.mark(tags.value_end)} /\\n?/")
    # A text with a tag that ends values would be read as two.
    forbidden = [text for text, tag in tags.value_ends.items() if tag != tags.value_end]
    text = rules.plain_text_until(tags.line + tags.value_end, forbidden)
    text = rules.rule(f"{text} /\\n?/")
    properties = rules.properties(tool)
    if not properties:
        return [f"({key} /[^<>\\n]{{1,64}}/ {begin} {text})*"]
    required = tool.parameters.get("required")
    needed = required if isinstance(required, list) else []
    parts = []
    for name, schema in properties.items():
        kinds = kinds_of(schema, tool.parameters)
        if kinds.may_be_text:
            rest = text
        elif kinds.values is not None:
            texts = [each if isinstance(each, str) else json.dumps(each) for each in kinds.values]
            rest = f"({' | '.join(map(literal, texts))}) {end}"
        else:
            rest = f"{rules.json(schema, tool.strict)} {end}"
        one = rules.rule(f"{key} {literal(name)} {begin} {rest}")
        parts.append(one if name in needed else f"{one}?")
    return parts
