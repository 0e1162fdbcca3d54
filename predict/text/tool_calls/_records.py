"""Tools, and the way in which a request lets the model call them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from predict.errors import UserError, one_of, quoted
from predict.system.files import json_type

CHOICES = ("auto", "none", "required")
MAX_TOOLS = 512
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
NAME_CHARACTERS = re.compile(r"[A-Za-z0-9_.-]*")


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model may call. UserError names the field at fault."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)  # JSON schema of its arguments
    # Whether a schema with a part that cannot be enforced is refused; else that part is left out.
    strict: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise UserError(
                f"the tool name {quoted(self.name)} is not supported (allowed: 1 to 128 letters, "
                "digits, _, - and .)"
            )
        if not isinstance(self.parameters, Mapping):
            raise UserError(
                f"parameters of the tool {self.name} are {json_type(self.parameters)} (allowed: a "
                "JSON schema, as an object)"
            )


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """The tools of a request and how they may be called. UserError names the field at fault."""

    tools: Sequence[Tool] = ()
    choice: Literal["auto", "none", "required"] = "auto"
    named: str | None = None  # the one tool that must be called; `choice` is "required" then
    parallel: bool = True  # whether one answer may call several times

    def __post_init__(self) -> None:
        if self.choice not in CHOICES:
            raise one_of("tool_choice", self.choice, CHOICES)
        names = [tool.name for tool in self.tools]
        if len(names) > MAX_TOOLS:
            raise UserError(f"{len(names)} tools are too many (allowed: at most {MAX_TOOLS})")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UserError(f"two tools have the name {quoted(twice)}; give each its own")
        if self.named is not None:
            if self.named not in names:
                raise one_of("the tool of tool_choice", self.named, names)
            object.__setattr__(self, "choice", "required")
        if self.choice == "required" and not names:
            raise UserError("tool_choice asks for a call, and there are no tools; give tools")

    @property
    def allowed(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        if self.choice == "none":
            return ()
        return tuple(tool for tool in self.tools if self.named in (None, tool.name))

    @property
    def is_forced(self) -> bool:
        """Whether there must be a call."""
        return self.choice == "required"

    @property
    def is_single(self) -> bool:
        """Whether there may be no second call."""
        return not self.parallel or self.named is not None
