"""DeepSeek V3.1: the name, a separator, and arguments, which are bare JSON."""

from __future__ import annotations

from predict.guide import Guide
from predict.text.lark import GuideContext, literal
from predict.text.tool_calls import _deepseek
from predict.text.tool_calls._guides import ToolRules
from predict.text.tool_calls._records import Format, Tool, ToolUse


def _call(rules: ToolRules, tool: Tool) -> str:
    return f"{literal(tool.name)} {rules.mark(_deepseek.SEPARATOR)} {rules.arguments(tool)}"


def _guide(use: ToolUse, context: GuideContext) -> Guide | None:
    return _deepseek.guide(use, context, _call)


FORMAT = Format(
    name="deepseek_v31",
    models="DeepSeek V3.1",
    marks=(_deepseek.CALLS_BEGIN,),
    kept_tokens=_deepseek.MARKS,
    reads=_deepseek.reads,
    guide=_guide,
)
