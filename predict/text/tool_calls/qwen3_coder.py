"""Qwen3-Coder: <function=name><parameter=key>value</parameter></function> in <tool_call>."""

from __future__ import annotations

from predict.text.tool_calls._tagged import Tags, tagged_format

TAGS = Tags(
    begin="<tool_call>",
    end="</tool_call>",
    call="<function=",
    named=">",
    call_end="</function>",
    key="<parameter=",
    keyed=">",
    value_end="</parameter>",
    line="\n",
)
FORMAT = tagged_format(
    "qwen3_coder",
    "Qwen3-Coder, Qwen3.5",
    (TAGS.begin, TAGS.end, TAGS.call, TAGS.key),
    (TAGS.begin, TAGS.end),
    TAGS,
)
