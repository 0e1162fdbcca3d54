"""The model's format of thoughts and of tool calls: its parsers and its guides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from predict.answer_form import AnswerForm
from predict.errors import UserError
from predict.request import SamplingParams
from predict.server.asked import Form
from predict.server.config import ServerConfig
from predict.server.errors import invalid
from predict.server.front_model import FrontModel
from predict.server.protocol import ToolBody
from predict.system.files import json_type
from predict.text import reasoning, tool_calls
from predict.text.answer_parts import AnswerParts, Forms, TextParts
from predict.text.deltas import Reader
from predict.text.tool_calls import CHOICES, GuideContext, Tool, ToolUse

_NO_TOOLS = ToolUse()


class ModelText:
    """The formats of a model, found by its chat template or named by flags."""

    def __init__(self, front: FrontModel, config: ServerConfig) -> None:
        source = "" if front.template is None else front.template.source
        self._tokenizer = front.tokenizer
        self._detokenizer = front.literal
        self._knows_tools = "tools" in source
        name = config.tool_call_parser
        self.calls = tool_calls.detected(source) if name == "auto" else None
        if name not in ("auto", "none"):
            self.calls = tool_calls.format_of(name)
        name = config.reasoning_parser
        self.thoughts = reasoning.detected(source) if name == "auto" else None
        if name not in ("auto", "none"):
            self.thoughts = reasoning.reasoning_of(name)
        self._is_whole = self.calls is not None and self.calls.is_whole
        self._special = self._special_marks()

    def use_of(
        self, tools: Sequence[ToolBody] | None, choice: object, parallel: bool | None
    ) -> ToolUse:
        """The tools of a request and how they may be called. ApiError 400 names the field."""
        if not tools and choice in (None, "none", "auto"):
            return _NO_TOOLS
        if self.calls is None or not self._knows_tools:
            raise invalid(
                "tools",
                "this model cannot call tools: its chat template has no place for them, or shows "
                "no known form of calls (see --chat_template and --tool_call_parser); leave "
                "tools out",
                "tools_not_supported",
            )
        known = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]
        named: str | None = None
        choice, known = _allowed(choice, known)
        if isinstance(choice, dict):
            function = choice.get("function")
            if isinstance(function, dict) and choice.get("type", "function") == "function":
                named = function.get("name")
            choice = "required" if isinstance(named, str) else choice
        if choice is not None and choice not in CHOICES:
            raise invalid(
                "tool_choice",
                f"tool_choice is {json_type(choice)} of no known meaning (allowed: none, auto, "
                'required, {"type": "function", "function": {"name": "..."}}, {"type": '
                '"allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}})',
            )
        try:
            return ToolUse(
                tools=known,
                choice=choice or "auto",  # type: ignore[arg-type]
                named=named,
                parallel=parallel is not False,
            )
        except UserError as error:
            param = "tool_choice" if "tool_choice" in str(error) else "tools"
            raise invalid(param, str(error)) from None

    def is_thinking(self, prompt: str) -> bool | None:
        """Whether an answer to this prompt begins within a thought; None: behind one."""
        return False if self.thoughts is None else self.thoughts.is_opened_by(prompt)

    def form(self, given: Form | None, use: ToolUse, prompt: str) -> Form | None:
        """The form of an answer with valid calls, and thoughts ahead of its content.

        Where tools and a form are both given, the answer calls tools or has the form. Raises
        ApiError 400 for one that cannot be met.
        """
        context = GuideContext(self._token_id, self.thoughts, self.is_thinking(prompt))
        param = "tools" if given is None else given.param
        guide = None
        try:
            if given is not None:
                guide = tool_calls.content_guide(self.calls, given.guide, context, use)
            elif self.calls is not None:
                guide = self.calls.guide(use, context)
        except UserError as error:
            raise invalid(param, str(error)) from None
        return None if guide is None else Form(guide, param)

    def answer_form(self, use: ToolUse, prompt: str) -> AnswerForm | None:
        """How an answer is read; None where all of its text is content."""
        if self.thoughts is None and not use.allowed and not self._is_whole:
            return None
        return AnswerForm(
            calls=None if self.calls is None else self.calls.name,
            thoughts=None if self.thoughts is None else self.thoughts.name,
            is_thinking=self.is_thinking(prompt),
            tools=tuple(tool.name for tool in use.allowed),
        )

    def reader(
        self, use: ToolUse, prompt: str, token_ids: Sequence[int], params: SamplingParams
    ) -> Reader | None:
        """What reads one answer to a prompt; None where all of its text is content."""
        if params.answer_form is None:
            return None
        forms = Forms(self.calls, self.thoughts, use, self.is_thinking(prompt))
        is_marked = any(mark in self._special for mark in forms.marks)
        tokenizer, detokenizer = self._tokenizer, self._detokenizer
        if not tokenizer or not detokenizer or not (is_marked or params.stop_strings):
            return TextParts(forms)
        return AnswerParts(
            tokenizer,
            detokenizer,
            token_ids,
            forms,
            params.stop_strings,
            params.include_stop_str_in_output,
            params.min_length,
        )

    def _token_id(self, text: str) -> int | None:
        return None if self._tokenizer is None else self._tokenizer.token_to_id(text)

    def _special_marks(self) -> frozenset[str]:
        """Marks of this model's formats that are tokens which an answer's text leaves out."""
        marks = [mark for row in (self.calls, self.thoughts) if row for mark in row.kept_tokens]
        ids = {mark: self._token_id(mark) for mark in marks}
        known = {mark: i for mark, i in ids.items() if i is not None}
        tokenizer = self._tokenizer
        return frozenset(m for m, i in known.items() if tokenizer and tokenizer.leaves_out(i))


def _allowed(choice: object, known: list[Tool]) -> tuple[object, list[Tool]]:
    """OpenAI's choice among some of the tools: its mode, and the tools. Raises ApiError 400."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return choice, known
    given = choice.get("allowed_tools", choice)
    tools = given.get("tools") if isinstance(given, dict) else None
    tools = tools if isinstance(tools, list) else []
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, dict)]
    names = {str(each.get("name")) for each in functions if isinstance(each, dict)}
    kept = [tool for tool in known if tool.name in names]
    if not kept or len(kept) < len(names) or given.get("mode") not in ("auto", "required"):
        raise invalid(
            "tool_choice",
            "tool_choice.allowed_tools has no mode, or names no tool of the request (allowed: mode "
            f"auto or required; tools of {', '.join(tool.name for tool in known) or 'none'})",
        )
    return given["mode"], kept


def _tool(tool: ToolBody, where: str) -> Tool:
    parameters = {} if tool.function.parameters is None else tool.function.parameters
    if not isinstance(parameters, dict):
        raise invalid(
            f"{where}.function.parameters",
            f"{where}.function.parameters is {json_type(parameters)} (allowed: a JSON schema, as "
            "an object)",
        )
    try:
        return Tool(
            name=tool.function.name, parameters=parameters, strict=bool(tool.function.strict)
        )
    except UserError as error:
        raise invalid(f"{where}.function", str(error)) from None


def tools_for_template(tools: Sequence[ToolBody]) -> list[dict[str, Any]]:
    """Tools as chat templates read them."""
    objects: list[dict[str, Any]] = []
    for tool in tools:
        function: dict[str, Any] = {"name": tool.function.name}
        if tool.function.description is not None:
            function["description"] = tool.function.description
        function["parameters"] = tool.function.parameters or {"type": "object", "properties": {}}
        objects.append({"type": "function", "function": function})
    return objects
