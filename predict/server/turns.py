"""Conversations as the model reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from predict.server.asked import conversation
from predict.server.context import Context
from predict.server.errors import invalid
from predict.server.model_text import size_of, tools_for_template
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
    if tools and size_of(tools) > most:
        raise invalid("tools", f"tools have {size_of(tools)} bytes as JSON (allowed: {most})")
    # A model that is to call nothing does not hear of tools.
    shown = tools_for_template(tools) if tools and use.allowed else None
    template = context.front.template
    said = conversation(messages)
    if template is not None:
        said = template_messages(said, template.source)
    prompt = await context.front.render(said, shown, values)
    return Turn(prompt, await context.front.encode(prompt, "messages", False), use)
