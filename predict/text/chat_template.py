"""Conversations to prompt text, by Hugging Face's jinja templates or PaddleNLP's JSON ones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from predict.errors import UserError
from predict.gguf.described import described_in, read_model_json
from predict.system.files import json_type, read_json_object, read_text
from predict.text.chat_formats import FORMATS, format_name
from predict.text.conversation import Message, content_text, text_part
from predict.text.template_process import MAX_SOURCE, RenderError, TemplateProcess

PADDLE_FILE = "chat_template.json"
JINJA_FILE = "chat_template.jinja"
TOOLS_FILE = "additional_chat_templates/tool_use.jinja"
PADDLE_KEYS = ("system", "conversation", "query")


# A content that a template is tried with, and what stands ahead of it in a part printed whole.
_PROBE = "Zq7x"
_PRINTED_PART = re.compile(r"""["']text["']\s*,\s*["']text["']\s*:\s*["']$""")
_NAMES_TEXT = re.compile(r"\btext\b")
_ASKS, _CALL = {"role": "user", "content": "a"}, {"name": "f", "arguments": {}}
_CALLS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "a12345678", "type": "function", "function": _CALL}],
}
# Conversations around a message of a role that is tried.
_AROUND: Mapping[str, tuple[list[Message], list[Message]]] = {
    "user": ([], []),
    "system": ([], [_ASKS]),
    "assistant": ([_ASKS], [_ASKS]),
    "tool": ([_ASKS, _CALLS], []),
}


class ChatTemplate:
    """Turns role messages, the last of which asks, into the text that the model completes.

    Rendered in a guarded process, with limits on time, memory and output; see TemplateProcess.
    """

    def __init__(self, source: str, origin: str) -> None:
        """`source`: all parts together; `origin`: for errors. UserError where it is too long."""
        if len(source) > MAX_SOURCE:
            raise UserError(
                f"the chat template of {origin} has {len(source)} characters (allowed: "
                f"{MAX_SOURCE})"
            )
        self.source = source
        self._origin = origin
        self._process = TemplateProcess()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text, special tokens included; UserError when the template refuses them.

        tools: as OpenAI has them. values: further values for the template, by name.
        """
        raise NotImplementedError


class JinjaTemplate(ChatTemplate):
    """A Hugging Face template: jinja over `messages`, with `add_generation_prompt` set.

    Contents reach it in the form that the caller gave, text or parts, where it reads that form, and
    else in the other one.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        origin: str,
        tool_source: str | None = None,
    ) -> None:
        """special_tokens: "bos_token" and so on, as the template names them.

        tool_source: the template of conversations with tools, where there is one of its own.
        """
        super().__init__(source + (tool_source or ""), origin)
        self._sources = source, tool_source or source
        self._special_tokens = dict(special_tokens)
        self._forms: dict[str, dict[str, tuple[bool, bool]]] = {}  # by source and role

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text; UserError when the template raises or is not valid jinja."""
        source = self._sources[bool(tools)]
        known: dict[str, Any] = {
            **(values or {}),
            "add_generation_prompt": True,
            "tools": list(tools) if tools else None,
            "documents": None,
            **self._special_tokens,
        }
        try:
            known["messages"] = self._shaped(source, known, messages)
            return self._process.render([(source, known)])
        except RenderError as error:
            what, hint = {
                "syntax": (f"is not valid jinja at its line {error.line}", "give another file"),
                "refused": ("refused the conversation", "change the roles or their order"),
                "limit": ("was stopped", "give another file"),
                "failed": ("failed", "give another file"),
            }[error.kind]
            raise UserError(
                f"the chat template of {self._origin} {what}: {error}; {hint}, or turn it off with "
                "--chat_template none"
            ) from None

    def _shaped(
        self, source: str, known: Mapping[str, Any], messages: Sequence[Message]
    ) -> list[Message]:
        """The messages with contents as the template reads them."""
        if not _NAMES_TEXT.search(source):  # it reads no part
            return [{**each, "content": content_text(each["content"])} for each in messages]
        forms = self._forms.setdefault(source, {})
        made = []
        for message in messages:
            role, content = message["role"], message["content"]
            if role not in forms:
                forms[role] = self._reads(source, known, role)
            reads_text, reads_parts = forms[role]
            if isinstance(content, str) and reads_parts and not reads_text:
                content = [text_part(content)]
            elif not isinstance(content, str) and not reads_parts:
                content = content_text(content)
            made.append({**message, "content": content})
        return made

    def _reads(self, source: str, known: Mapping[str, Any], role: str) -> tuple[bool, bool]:
        """Whether the template prints a text, and a text part, as the content of a role."""
        around = _AROUND.get(role, ([], []))
        before, behind = (self._shaped(source, known, each) for each in around)

        def printed(content: Any) -> bool:
            tried = [*before, {"role": role, "content": content}, *behind]
            try:
                text = self._process.render([(source, {**known, "messages": tried})])
            except RenderError as error:
                if error.kind == "limit":
                    raise
                return False
            return _PROBE in text and not _PRINTED_PART.search(text.partition(_PROBE)[0])

        return printed(_PROBE), printed([text_part(_PROBE)])


class PaddleTemplate(ChatTemplate):
    """PaddleNLP's chat_template.json: a system text, one user and bot round, and the query.

    `conversation` is [user part, bot part]; the placeholders are {{system}}, {{user}}, {{bot}} and
    {{query}}, each part a small jinja text of its own.
    """

    def __init__(
        self, parts: Mapping[str, Any], origin: str, frame: tuple[str, str] = ("", "")
    ) -> None:
        """`frame`: special tokens before and behind every text.

        PaddleNLP's own tokenizers put them there, so its templates do not name them.
        """
        self._frame = frame
        unknown = sorted(set(parts) - set(PADDLE_KEYS))
        if unknown or "query" not in parts:
            raise UserError(
                f"{origin} is not a PaddleNLP chat template: it has the keys "
                f"{sorted(parts)} (allowed: {', '.join(PADDLE_KEYS)}; query is needed)"
            )
        conversation = parts.get("conversation") or []
        pair = isinstance(conversation, list) and len(conversation) in (0, 2)
        if not pair or not all(isinstance(part, str) for part in conversation):
            raise UserError(
                f"{origin}: conversation must be two texts, the user's part and the bot's part"
            )
        if not isinstance(parts["query"], str):
            raise UserError(f"{origin}: query is {json_type(parts['query'])} (allowed: a text)")
        if not isinstance(parts.get("system"), (str, type(None))):
            raise UserError(
                f"{origin}: system is {json_type(parts['system'])} (allowed: a text, null)"
            )
        self._system: str | None = parts.get("system")
        self._conversation: list[str] = list(conversation)
        self._query: str = parts["query"]
        written = [self._system or "", *self._conversation, self._query]
        super().__init__("".join([self._system or "", *self._conversation, self._query]), origin)
        self._takes_system = any(map(_names_system, written))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text; UserError unless user and assistant speak by turns, the user last.

        It has a place neither for tools, which raise UserError, nor for other values.
        """
        if tools:
            raise UserError(
                f"the chat template of {self._origin} has no place for tools; give a jinja "
                "template that has one with --chat_template"
            )
        system, rounds, query = self._split(messages)
        shared = {"length": len(rounds) + 1} | ({} if system is None else {"system": system})
        # A template without a place for the conversation's own system text gets it in front.
        head = self._system if system is None or self._takes_system else "{{system}}"
        pieces: list[tuple[str, Mapping[str, Any]]] = [(head or "", shared)]
        for index, (user, bot) in enumerate(rounds):
            if not self._conversation:
                raise UserError(
                    f"the chat template of {self._origin} has no conversation part, so it cannot "
                    "hold earlier rounds; pass the last question alone"
                )
            values = {"user": user, "bot": bot, "index": index, "is_first": index == 0, **shared}
            pieces += [(part, values) for part in self._conversation]
        pieces.append((self._query, {"query": query, "index": len(rounds), **shared}))
        try:
            text = self._process.render(pieces, keep_trailing_newline=True)
        except RenderError as error:
            raise UserError(
                f"the chat template of {self._origin} failed on {pieces[error.part][0]!r}: {error}"
            ) from None
        before, behind = self._frame
        return f"{before}{text.removeprefix(before).removesuffix(behind)}{behind}"

    def _split(self, messages: Sequence[Message]) -> tuple[str | None, list[tuple[str, str]], str]:
        """(system text, earlier rounds, query); UserError unless user and assistant alternate."""
        turns = list(messages)
        has_system = bool(turns) and turns[0]["role"] == "system"
        system = content_text(turns.pop(0)["content"]) if has_system else None
        wanted = ["user" if i % 2 == 0 else "assistant" for i in range(len(turns))]
        if len(turns) % 2 == 0 or [turn["role"] for turn in turns] != wanted:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise UserError(
                f"the chat template of {self._origin} needs user and assistant by turns, the last "
                f"one user (got: {roles})"
            )
        texts = [content_text(turn["content"]) for turn in turns]
        return system, list(zip(texts[0:-1:2], texts[1:-1:2], strict=True)), texts[-1]


def _names_system(part: str) -> bool:
    """Whether a placeholder or a tag of a part names the system text."""
    tags = (text.partition("}")[0] for text in re.split(r"{[{%]", part)[1:])
    return any(re.search(r"\bsystem\b", tag) for tag in tags)


def load_chat_template(
    folder: Path,
    flag: str | None,
    special_tokens: Mapping[str, str],
    frame: tuple[str, str] = ("", ""),
) -> ChatTemplate | None:
    """The template to apply, or None for none.

    `flag` is --chat_template: None takes what the model folder has, else the format that its family
    published, "none" turns templates off, otherwise a template file, a folder that holds one, or
    the name of a published format. `frame` stands around the texts of PaddleNLP's templates.
    Raises UserError when there is no such template.
    """
    if flag is None:
        found = _from_folder(folder, special_tokens, frame)
        name = None if found else format_name(folder, special_tokens)
        return found if name is None else _published(name, special_tokens)
    if flag.lower() == "none":
        return None
    path = Path(flag)
    if path.is_file():
        return _from_file(path, special_tokens, frame)
    if flag in FORMATS and not path.is_dir():
        return _published(flag, special_tokens)
    found = _from_folder(path, special_tokens, frame) if path.is_dir() else None
    if found is None:
        what = "has no chat template in it" if path.is_dir() else "is neither a file nor a folder"
        raise UserError(
            f"--chat_template {flag} {what} (allowed: none, a .jinja or .json file, a folder with "
            f"{PADDLE_FILE}, {JINJA_FILE} or tokenizer_config.json, or a published format: "
            f"{', '.join(sorted(FORMATS))})"
        )
    return found


def stop_tokens(
    folder: Path, flag: str | None, special_tokens: Mapping[str, str]
) -> tuple[str, ...]:
    """Tokens that end an answer besides the model's own: of the flag's format, or its family's.

    They count with any template, as a model ends as it was trained to.
    """
    name = flag if flag in FORMATS else format_name(folder, special_tokens)
    return () if name is None else FORMATS[name].stop_tokens


def _published(name: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
    template = FORMATS[name].template
    return JinjaTemplate(template, special_tokens, f"the published format {name}")


def _from_folder(
    folder: Path, special_tokens: Mapping[str, str], frame: tuple[str, str]
) -> ChatTemplate | None:
    """The folder's template; PaddleNLP's own file first, as PaddleNLP does."""
    for name in (PADDLE_FILE, JINJA_FILE):
        if (folder / name).is_file():
            return _from_file(folder / name, special_tokens, frame)
    name = "tokenizer_config.json"
    source = read_model_json(folder, name, missing_ok=True).get("chat_template")
    return None if not source else _jinja(source, special_tokens, described_in(folder, name))


def _from_file(
    path: Path, special_tokens: Mapping[str, str], frame: tuple[str, str]
) -> ChatTemplate:
    """The template in one file: jinja, PaddleNLP's JSON, or JSON with a `chat_template` key."""
    if path.suffix != ".json":
        own = path.parent / TOOLS_FILE
        tools = read_text(own) if path.name == JINJA_FILE and own.is_file() else None
        return JinjaTemplate(read_text(path), special_tokens, str(path), tools)
    parts = read_json_object(path)
    if "chat_template" in parts:
        return _jinja(parts["chat_template"], special_tokens, path)
    return PaddleTemplate(parts, str(path), frame)


def _jinja(source: Any, special_tokens: Mapping[str, str], path: Path) -> JinjaTemplate:
    """A template text, or those named "default" and "tool_use" of a list of named ones."""
    tools = None
    if isinstance(source, list) and all(isinstance(entry, dict) for entry in source):
        source = {str(entry.get("name")): entry.get("template") for entry in source}
    if isinstance(source, dict):
        if "default" not in source:
            raise UserError(
                f"{path} names the chat templates {sorted(map(str, source))} and none of them is "
                "'default'; save the one to use as a .jinja file and pass it to --chat_template"
            )
        source, tools = source["default"], source.get("tool_use")
    if not isinstance(source, str) or not isinstance(tools, (str, type(None))):
        raise UserError(f"{path}: chat_template must be a text or a list of named texts")
    return JinjaTemplate(source, special_tokens, str(path), tools)
