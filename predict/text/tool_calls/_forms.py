"""Guides of whole answers: thoughts and marks, calls of tools, content of a form."""

from __future__ import annotations

from dataclasses import replace

from predict.errors import UserError
from predict.guide import CONTENT, MAX_GRAMMAR_BYTES, Guide
from predict.text.lark import GuideContext, Rules
from predict.text.tool_calls._guides import CallFormat, ToolRules
from predict.text.tool_calls._records import ToolUse


def content_guide(
    row: CallFormat | None, guide: Guide, context: GuideContext, use: ToolUse
) -> Guide | None:
    """A guide for a whole answer: thoughts, and then calls of tools or content that fits `guide`.

    Where a call is forced, of calls alone. A guide that says itself what stands around it is
    returned unchanged; beside tools it raises UserError.
    """
    if row is not None and use.allowed:
        return _calls_or_content(row, guide, context, use)
    has_marks = context.thoughts is not None or (row is not None and row.around_content)
    if guide.around is not None or not has_marks:
        return guide
    rules = Rules(context)
    return replace(guide, around=rules.grammar(_around(row, rules)))


def _around(row: CallFormat | None, rules: Rules) -> str:
    if row is None or row.around_content is None:
        return f"{rules.thought()} {CONTENT}"
    return row.around_content(rules, CONTENT)


def _calls_or_content(
    row: CallFormat, guide: Guide, context: GuideContext, use: ToolUse
) -> Guide | None:
    if guide.around is not None:
        raise UserError(
            "guide.around says what a whole answer is, and so do tools; leave one of them out"
        )
    if use.is_forced:
        return row.guide(use, context)
    size = 0
    for is_loose in (False, True):
        rules = ToolRules(context, replace(use, choice="required"), is_loose)
        grammar = rules.grammar(f"{rules.rule(row.start(rules))} | {_around(row, rules)}")
        size = len(grammar.encode())
        if size <= MAX_GRAMMAR_BYTES:
            return replace(guide, around=grammar)
    raise UserError(
        f"the tools have {size} bytes as a grammar (allowed: at most {MAX_GRAMMAR_BYTES}); give "
        "fewer tools, or fewer that are strict"
    )
