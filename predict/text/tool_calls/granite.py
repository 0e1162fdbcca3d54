"""Granite 3: <|tool_call|>[{"name": ..., "arguments": {...}}, ...]; 3.1 also without the bars."""

from predict.text.tool_calls._lists import list_format

BEGINS = ("<|tool_call|>", "<tool_call>")
FORMAT = list_format("granite", "Granite 3", ("<|start_of_role|>", BEGINS[0]), BEGINS)
