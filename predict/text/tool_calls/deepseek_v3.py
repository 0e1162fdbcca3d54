"""DeepSeek V3 and R1: function, a separator, the name, and arguments in a fenced block of JSON."""

from __future__ import annotations

from predict.text.lark import literal
from predict.text.tool_calls._deepseek import MARKS, deepseek_format
from predict.text.tool_calls._guides import ToolRules
from predict.text.tool_calls._records import Tool


def _call(rules: ToolRules, tool: Tool) -> str:
    head = f'"function" {rules.mark(MARKS.arguments)} {literal(tool.name)} "\\n```json\\n"'
    return f'{head} {rules.arguments(tool)} "\\n```"'


FORMAT = deepseek_format(
    "deepseek_v3", "DeepSeek V3, R1, and R1's distilled models", ("```json",), _call
)
