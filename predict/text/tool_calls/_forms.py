"""Guides of answers that call tools or have a form of their own."""

from __future__ import annotations

import json
from dataclasses import replace

from predict.errors import UserError
from predict.guide import MAX_GRAMMAR_BYTES, Guide
from predict.system.files import parse_json
from predict.text.lark import JSON_STYLE, GuideContext, Rules, literal
from predict.text.tool_calls._guides import CallFormat, ToolRules
from predict.text.tool_calls._records import ToolUse


def calls_or_content(
    row: CallFormat, use: ToolUse, guide: Guide, context: GuideContext
) -> Guide | None:
    """The guide of an answer that calls tools, or whose content fits `guide`; thoughts ahead.

    Where a call is forced, of calls alone. Raises UserError for guides that are grammars.
    """
    if use.is_forced:
        return row.guide(use, context)
    grammar = ""
    for is_loose in (False, True):
        rules = ToolRules(context, replace(use, choice="required"), is_loose)
        content = _content(rules, guide)
        if row.around_content is not None:
            content = row.around_content(rules, content)
        else:
            content = f"{rules.thought()} {content}"
        grammar = rules.grammar(f"{rules.rule(row.start(rules))} | {content}")
        if len(grammar.encode()) <= MAX_GRAMMAR_BYTES:
            return Guide(grammar=grammar)
    raise UserError(
        f"the tools and the form of the answer have {len(grammar.encode())} bytes as a grammar "
        f"(allowed: at most {MAX_GRAMMAR_BYTES}); give fewer tools, or a smaller schema"
    )


def _content(rules: Rules, guide: Guide) -> str:
    """The rule of a content that fits the guide."""
    if guide.kind in ("json_schema", "json_object"):
        schema = {"type": "object"}
        if guide.kind == "json_schema":
            schema = parse_json(guide.text, "the schema")
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        return f"%json {json.dumps({'x-guidance': JSON_STYLE, **schema}, ensure_ascii=False)}"
    if guide.choice is not None:
        return rules.rule(" | ".join(map(literal, guide.choice)))
    raise UserError(
        f"a guide of the kind {guide.kind} does not go with tools (allowed: json_schema, "
        "json_object, choice); leave one of them out, or set tool_choice to none"
    )
