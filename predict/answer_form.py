"""How an answer of a chat is read: the record `AnswerForm` of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from predict.errors import unknown_key
from predict.system import bounds
from predict.system.ranges import refusal

MAX_TOOLS = 512


@dataclass(frozen=True, kw_only=True)
class AnswerForm:
    """The forms of an answer's parts. Raises UserError that names the field.

    Names are those of --tool_call_parser and --reasoning_parser.
    """

    calls: str | None = None  # of tool calls
    thoughts: str | None = None
    # Whether the prompt has opened a thought; None: it has closed one.
    is_thinking: bool | None = False
    tools: tuple[str, ...] = ()  # names of those that may be called

    def __post_init__(self) -> None:
        for name in ("calls", "thoughts"):
            value = getattr(self, name)
            if not isinstance(value, (str, type(None))):
                raise refusal(f"answer_form.{name}", value, "a name, None")
        if not isinstance(self.is_thinking, (bool, type(None))):
            raise refusal("answer_form.is_thinking", self.is_thinking, "true, false, None")
        tools = bounds.items("answer_form.tools", self.tools, MAX_TOOLS, "a sequence of names")
        for tool in tools:
            if not isinstance(tool, str):
                raise refusal("answer_form.tools", tool, "names")
        object.__setattr__(self, "tools", tuple(tools))

    @classmethod
    def of(cls, value: Any) -> AnswerForm:
        """An AnswerForm, or the one that a mapping describes. Raises UserError."""
        if isinstance(value, AnswerForm):
            return value
        names = [field.name for field in fields(cls)]
        if not isinstance(value, Mapping):
            raise refusal("answer_form", value, f"an AnswerForm, an object of {names}, None")
        for key in value:
            if key not in names:
                raise unknown_key("answer_form", key, names)
        return cls(**value)
