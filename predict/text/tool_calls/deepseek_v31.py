"""DeepSeek V3.1: the name, a separator, and arguments, which are bare JSON."""

from __future__ import annotations

from predict.text.lark import literal
from predict.text.tool_calls._deepseek import MARKS, deepseek_format
from predict.text.tool_calls._guides import ToolRules
from predict.text.tool_calls._records import Tool


def _call(rules: ToolRules, tool: Tool) -> str:
    return f"{literal(tool.name)} {rules.mark(MARKS.arguments)} {rules.arguments(tool)}"


FORMAT = deepseek_format("deepseek_v31", "DeepSeek V3.1", (), _call)
