"""Seed-OSS: <function=name><parameter=key>value</parameter></function> in <seed:tool_call>."""

from __future__ import annotations

from predict.text.tool_calls._tagged import Tags, tagged_format

TAGS = Tags(
    begin="<seed:tool_call>",
    end="</seed:tool_call>",
    call="<function=",
    named=">",
    call_end="</function>",
    key="<parameter=",
    keyed=">",
    value_end="</parameter>",
)
FORMAT = tagged_format(
    "seed_oss",
    "Seed-OSS",
    (TAGS.begin, TAGS.end, TAGS.call, TAGS.key),
    (TAGS.begin, TAGS.end),
    TAGS,
)
