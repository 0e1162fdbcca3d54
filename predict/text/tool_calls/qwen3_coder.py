"""Qwen3-Coder: <function=name><parameter=key>value</parameter></function> in <tool_call>."""

from __future__ import annotations

from predict.text.tool_calls._guides import CallFormat
from predict.text.tool_calls._tagged import Tags, tagged_format


def function_format(name: str, models: str, tag: str, line: str) -> CallFormat:
    """The format of such calls within <tag>. line: see Tags."""
    tags = Tags(
        begin=f"<{tag}>",
        end=f"</{tag}>",
        call="<function=",
        named=">",
        call_end="</function>",
        key="<parameter=",
        keyed=">",
        value_end="</parameter>",
        line=line,
    )
    around = (tags.begin, tags.end)
    return tagged_format(name, models, (*around, tags.call, tags.key), around, tags)


FORMAT = function_format("qwen3_coder", "Qwen3-Coder, Qwen3.5", "tool_call", line="\n")
