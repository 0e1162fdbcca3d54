"""Seed-OSS: Qwen3-Coder's form in <seed:tool_call>, values without line breaks around them."""

from predict.text.tool_calls.qwen3_coder import function_format

FORMAT = function_format("seed_oss", "Seed-OSS", "seed:tool_call", line="")
