"""Prompts of conversations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from predict.server.asked import conversation
from predict.server.context import Context
from predict.server.errors import invalid
from predict.server.model_text import tools_for_template
from predict.server.protocol import ChatMessage, ToolBody
from predict.text.tool_calls import ToolUse, template_messages

NO_TOOLS = ToolUse()


class Turn(NamedTuple):
    """A prompt, and what its answer may call."""

    prompt: str
    token_ids: list[int]
    use: ToolUse


async def turn_of(
    context: Context,
    messages: Sequence[ChatMessage],
    values: Mapping[str, Any],
    tools: Sequence[ToolBody] | None = None,
    use: ToolUse = NO_TOOLS,
) -> Turn:
    """The prompt of a conversation. values: what else the template takes. Raises ApiError 400."""
    most = context.config.max_schema_bytes
    shown = tools_for_template(tools or ())
    size = len(json.dumps(shown).encode())
    if tools and size > most:
        raise invalid("tools", f"tools have {size} bytes as JSON (allowed: {most})")
    turns = conversation(messages)
    if context.front.template is not None:
        turns = template_messages(turns, context.front.template.source)
    # A model that may call nothing is not told of tools.
    prompt = await context.front.render(turns, shown if use.allowed else None, values)
    return Turn(prompt, await context.front.encode(prompt, "messages", False), use)
