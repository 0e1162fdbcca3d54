"""MiniMax M2: <invoke name="f"><parameter name="a">value</parameter></invoke>, one or more calls.

<minimax:tool_call> stands ahead of them, and its end behind the last one.
"""

from __future__ import annotations

from predict.text.tool_calls._tagged import Tags, tagged_format

TAGS = Tags(
    begin="<minimax:tool_call>",
    end="</minimax:tool_call>",
    call='<invoke name="',
    named='">',
    call_end="</invoke>",
    key='<parameter name="',
    keyed='">',
    value_end="</parameter>",
    has_several=True,
)
FORMAT = tagged_format(
    "minimax_m2",
    "MiniMax M2",
    (TAGS.begin, "<invoke name=", "<parameter name="),
    (TAGS.begin, TAGS.end),
    TAGS,
)
