"""Hunyuan: <tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>."""

from predict.text.tool_calls._lists import list_format

BEGIN, END = "<tool_calls>", "</tool_calls>"
FORMAT = list_format("hunyuan", "Hunyuan", (f"{BEGIN}[", END), (BEGIN,), END)
