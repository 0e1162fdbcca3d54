"""GLM-4.5: <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>.

4.5 and 4.6 put each tag on a line of its own, 4.7 writes none.
"""

from __future__ import annotations

from predict.text.tool_calls._tagged import Tags, tagged_format

TAGS = Tags(
    begin="<tool_call>",
    end="</tool_call>",
    call="",
    named="",
    call_end="",
    key="<arg_key>",
    keyed="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
)
FORMAT = tagged_format(
    "glm45",
    "GLM-4.5, 4.6, 4.7",
    (TAGS.begin, TAGS.end, TAGS.key, TAGS.value),
    (TAGS.begin, TAGS.end, TAGS.key, TAGS.keyed, TAGS.value, TAGS.value_end),
    TAGS,
)
