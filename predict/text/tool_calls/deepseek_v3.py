"""DeepSeek V3 and R1: function, a separator, the name, and arguments in a fenced block of JSON."""

from __future__ import annotations

from predict.guide import Guide
from predict.text.lark import GuideContext, literal
from predict.text.tool_calls import _deepseek
from predict.text.tool_calls._guides import ToolRules
from predict.text.tool_calls._records import Format, Tool, ToolUse


def _call(rules: ToolRules, tool: Tool) -> str:
    head = f'"function" {rules.mark(_deepseek.SEPARATOR)} {literal(f"{tool.name}")} "\\n```json\\n"'
    return f'{head} {rules.arguments(tool)} "\\n```"'


def _guide(use: ToolUse, context: GuideContext) -> Guide | None:
    return _deepseek.guide(use, context, _call)


FORMAT = Format(
    name="deepseek_v3",
    models="DeepSeek V3, R1, and R1's distilled models",
    marks=(_deepseek.CALLS_BEGIN, "```json"),
    kept_tokens=_deepseek.MARKS,
    reads=_deepseek.reads,
    guide=_guide,
)
