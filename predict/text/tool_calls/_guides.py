"""The record of a format of tool calls, and the rules that guides of all formats share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from predict.errors import UserError
from predict.guide import MAX_DEPTH, MAX_GRAMMAR_BYTES, Guide
from predict.system.files import parse_json
from predict.text.deltas import call_id
from predict.text.lark import LIMITS, MAX_MESSAGE, GuideContext, Rules, literal
from predict.text.markup import Output, Reader, Steps
from predict.text.tool_calls._records import Tool, ToolUse

# Keys that cannot be enforced; they may be most of a schema.
_ANNOTATIONS = frozenset(
    ("$comment", "default", "deprecated", "description", "examples", "title", "x-guidance")
)
_MAPS = ("$defs", "definitions", "patternProperties", "properties")  # of names to schemas
_VALUES = ("const", "enum", "required", "type")  # hold no schemas
# One space or none: with any number a model may write spaces to the end of its tokens.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """How models of one kind write tool calls.

    reads: the generator of its parser (see predict.text.markup). start: the body of the start rule
    of a grammar whose calls are valid.
    """

    name: str
    models: str  # that write so, for the documentation
    # Texts that a chat template of such models has, all of them, with quotes unescaped and no space
    # ahead of colons.
    marks: tuple[str, ...]
    begins: tuple[str, ...]  # marks that a call begins with, after which an open thought may end
    kept_tokens: tuple[str, ...]  # special tokens that the parser needs in an answer's text
    reads: Callable[[Reader, Output, ToolUse], Steps[None]]
    start: Callable[[ToolRules], str]
    new_id: Callable[[], str] = call_id
    # Whether all answers have markup, thoughts included, with tools and without.
    is_whole: bool = False
    # Puts thoughts and marks around a rule for the content; None: thoughts in front of it.
    around_content: Callable[[Rules, str], str] | None = None
    # Calls, each a name and arguments, as the text of an answer: for templates that write none.
    writes: Callable[[Sequence[tuple[str, Any]]], str] | None = None

    def guide(self, use: ToolUse, context: GuideContext) -> Guide | None:
        """The guide that makes calls valid; None where no tool may be called.

        Where the schemas together are too large, those of tools that are not strict are left out.
        """
        if not use.allowed:
            return None
        for is_loose in (False, True):
            rules = ToolRules(context, use, is_loose)
            grammar = rules.grammar(self.start(rules))
            if len(grammar.encode()) <= MAX_GRAMMAR_BYTES:
                return Guide(grammar=grammar)
        raise UserError(
            f"the tools have {len(grammar.encode())} bytes as a grammar (allowed: at most "
            f"{MAX_GRAMMAR_BYTES}); give fewer tools, or fewer that are strict"
        )


class ToolRules(Rules):
    """Rules about the tools of a request.

    is_loose: whether the arguments of tools that are not strict may be any objects.
    """

    def __init__(self, context: GuideContext, use: ToolUse, is_loose: bool) -> None:
        super().__init__(context)
        self.use = use
        self._is_loose = is_loose

    def arguments(self, tool: Tool) -> str:
        """JSON of a tool's arguments."""
        return self.json(self._schema(tool) or {"type": "object"}, tool.strict, "object")

    def properties(self, tool: Tool) -> dict[str, dict[str, Any]]:
        """The schemas of a tool's arguments in their order; {} where its schema names none."""
        schema = self._schema(tool)
        found = schema.get("properties")
        if not isinstance(found, dict) or not all(isinstance(v, dict) for v in found.values()):
            return {}
        definitions: dict[str, Any] = {
            key: schema[key] for key in ("$defs", "definitions") if key in schema
        }
        return {name: {**definitions, **inner} for name, inner in found.items()}

    def _schema(self, tool: Tool) -> dict[str, Any]:
        return {} if self._is_loose and not tool.strict else _plain_schema(tool)

    def json(self, schema: Mapping[str, Any], is_strict: bool, kind: str = "") -> str:
        """JSON of a schema; of the type `kind` alone where the schema cannot be enforced."""
        return f"%json {_enforced(schema, is_strict, {'type': kind} if kind else {})}"

    def any_tool(self, body: Callable[[Tool], str]) -> str:
        """One of the tools that may be called. body: the rule of one tool."""
        return self.rule(" | ".join(self.rule(body(tool)) for tool in self.use.allowed))

    def call_object(self, arguments: str = "arguments") -> str:
        """{"name": ..., arguments: ...} that calls one of the tools. arguments: the second key.

        Its lexemes are those of JSON: the content may be JSON too, and no lexeme is cut short.
        """

        def quoted(text: str) -> str:
            return literal(json.dumps(text))

        def named(tool: Tool) -> str:
            return f'{quoted(tool.name)} ", " {quoted(arguments)} ": " {self.arguments(tool)}'

        return self.rule(f'"{{" {quoted("name")} ": " {self.any_tool(named)} "}}"')

    def calls(self, call: str, separator: str = "") -> str:
        """One call, or several where the request allows them."""
        return call if self.use.is_single else f"{call} ({separator} {call})*"

    def amid_text(self, mark: str, rest: str, separator: str = "") -> str:
        """Calls in any text, each a mark and `rest`; thoughts and calls alone where one is forced.

        separator: between two forced calls. No text follows a lone call.
        """
        if self.use.is_forced:
            call = self.rule(f"{self.mark(mark)} {rest}")
            return f"{self.thought()} {self.calls(call, separator)}"
        call = self.rule(f"{self.text_until(mark)} {rest}")
        free = self.free_text()
        return f"{free} | {call}" if self.use.is_single else f"({call})* {free}"

    def behind_text(self, mark: str, calls: str) -> str:
        """Any text, or thoughts where a call is forced; then the mark and calls, which end it."""
        if self.use.is_forced:
            return f"{self.thought()} {self.mark(mark)} {calls}"
        return f"{self.free_text()} | {self.text_until(mark)} {calls}"


def _plain_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments, without annotations."""
    where = f"parameters of the tool {tool.name}"
    try:
        given = json.dumps(tool.parameters, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{where} are no JSON value: {error}; give a JSON schema") from None
    # Read back: a copy of plain types, which is not deeper than can be walked.
    schema = parse_json(given, where, max_depth=MAX_DEPTH)
    plain = {"type": "object", **_without_annotations(schema)}
    problem = tool.strict and _problem(json.dumps(plain, separators=(",", ":")))
    if problem:
        raise UserError(
            f"the tool {tool.name} is strict, and its parameters cannot be enforced: {problem}; "
            "leave that out of its schema, or strict"
        )
    return plain


def _enforced(schema: Mapping[str, Any], is_strict: bool, otherwise: Mapping[str, Any]) -> str:
    """A schema with options for llguidance; `otherwise` where it cannot be enforced."""
    options = _STYLE if is_strict else {**_STYLE, "lenient": True}
    text = json.dumps({"x-guidance": options, **schema}, separators=(",", ":"))
    if is_strict or len(text) > MAX_GRAMMAR_BYTES or not _problem(text):
        return text
    return json.dumps({"x-guidance": options, **otherwise}, separators=(",", ":"))


def _without_annotations(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema without the keys that say nothing to a grammar."""
    plain: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _ANNOTATIONS:
            continue
        if key in _MAPS and isinstance(value, dict):
            plain[key] = {name: _plain(inner) for name, inner in value.items()}
        else:
            plain[key] = value if key in _VALUES else _plain(value)
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return _without_annotations(value)
    return [_plain(each) for each in value] if isinstance(value, list) else value


@lru_cache(maxsize=256)
def _problem(schema: str) -> str:
    """What keeps llguidance from taking a schema, as look-around in patterns; "" where it does."""
    from llguidance import LLMatcher, LLParserLimits

    grammar = LLMatcher.grammar_from_json_schema(schema)
    limits = LLParserLimits(**LIMITS)
    is_error, said = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits)
    return " ".join(" ".join(said).split())[:MAX_MESSAGE] if is_error else ""
