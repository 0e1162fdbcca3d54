"""Conversations to prompt text, by Hugging Face's jinja templates or PaddleNLP's JSON ones."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from predict.conversation import Message
from predict.errors import UserError
from predict.files import read_json_object, read_text

PADDLE_FILE = "chat_template.json"
JINJA_FILE = "chat_template.jinja"
PADDLE_KEYS = ("system", "conversation", "query")


class ChatTemplate(Protocol):
    """Turns role messages, the last of which asks, into the text that the model completes."""

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt text, special tokens included; UserError when the template refuses them."""
        ...


class JinjaTemplate:
    """A Hugging Face template: jinja over `messages`, with `add_generation_prompt` set."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str) -> None:
        """`special_tokens`: "bos_token" and so on, seen by the template; `origin`: for errors."""
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._origin = origin

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt text; UserError when the template raises or is not valid jinja."""
        import jinja2

        try:
            text: str = self._template.render(
                messages=json.loads(json.dumps(list(messages))),  # a copy: templates may pop
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except jinja2.exceptions.TemplateError as error:
            raise UserError(
                f"the chat template of {self._origin} refused the conversation: "
                f"{error.message or type(error).__name__}; change the roles or their order, or "
                "turn the template off with --chat_template none"
            ) from None
        except Exception as error:  # whatever a template's own expressions raise
            raise UserError(
                f"the chat template of {self._origin} failed: {type(error).__name__}: {error}; "
                "turn it off with --chat_template none, or give another file"
            ) from None
        return text

    @cached_property
    def _template(self) -> Any:
        """Compiled on first use; UserError for a syntax error."""
        import jinja2

        try:
            return _environment().from_string(self._source)
        except jinja2.exceptions.TemplateSyntaxError as error:
            raise UserError(
                f"the chat template of {self._origin} is not valid jinja: {error.message} at its "
                f"line {error.lineno}; turn it off with --chat_template none"
            ) from None


class PaddleTemplate:
    """PaddleNLP's chat_template.json: a system text, one user and bot round, and the query.

    `conversation` is [user part, bot part]; the placeholders are {{system}}, {{user}}, {{bot}} and
    {{query}}, each part a small jinja text of its own.
    """

    def __init__(self, parts: Mapping[str, Any], origin: str) -> None:
        self._origin = origin
        unknown = sorted(set(parts) - set(PADDLE_KEYS))
        if unknown or "query" not in parts:
            raise UserError(
                f"{origin} is not a PaddleNLP chat template: it has the keys "
                f"{sorted(parts)} (allowed: {', '.join(PADDLE_KEYS)}; query is needed)"
            )
        conversation = parts.get("conversation") or []
        if len(conversation) not in (0, 2) or not all(isinstance(p, str) for p in conversation):
            raise UserError(
                f"{origin}: conversation must be two texts, the user's part and the bot's part"
            )
        self._system: str | None = parts.get("system")
        self._conversation: list[str] = list(conversation)
        self._query: str = parts["query"]
        placeholders = re.compile(r"{[{%][^}]*\bsystem\b")
        written = [self._system or "", *self._conversation, self._query]
        self._takes_system = any(placeholders.search(part) for part in written)

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt text; UserError unless user and assistant speak by turns, the user last."""
        system, rounds, query = self._split(messages)
        shared = {"length": len(rounds) + 1} | ({} if system is None else {"system": system})
        # A template without a place for the conversation's own system text gets it in front.
        head = self._system if system is None or self._takes_system else "{{system}}"
        texts = [self._fill(head or "", shared)]
        for index, (user, bot) in enumerate(rounds):
            if not self._conversation:
                raise UserError(
                    f"the chat template of {self._origin} has no conversation part, so it cannot "
                    "hold earlier rounds; pass the last question alone"
                )
            values = {"user": user, "bot": bot, "index": index, "is_first": index == 0, **shared}
            texts += [self._fill(part, values) for part in self._conversation]
        texts.append(self._fill(self._query, {"query": query, "index": len(rounds), **shared}))
        return "".join(texts)

    def _split(self, messages: Sequence[Message]) -> tuple[str | None, list[tuple[str, str]], str]:
        """(system text, earlier rounds, query); UserError unless user and assistant alternate."""
        turns = list(messages)
        system = str(turns.pop(0)["content"]) if turns and turns[0]["role"] == "system" else None
        wanted = ["user" if i % 2 == 0 else "assistant" for i in range(len(turns))]
        if len(turns) % 2 == 0 or [turn["role"] for turn in turns] != wanted:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise UserError(
                f"the chat template of {self._origin} needs user and assistant by turns, the last "
                f"one user (got: {roles})"
            )
        texts = [str(turn["content"]) for turn in turns]
        return system, list(zip(texts[0:-1:2], texts[1:-1:2], strict=True)), texts[-1]

    def _fill(self, part: str, values: Mapping[str, Any]) -> str:
        import jinja2

        try:
            text: str = _environment(keep_trailing_newline=True).from_string(part).render(**values)
        except jinja2.exceptions.TemplateError as error:
            raise UserError(
                f"the chat template of {self._origin} failed on {part!r}: {error.message}"
            ) from None
        return text


def load_chat_template(
    folder: Path, flag: str | None, special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """The template to apply, or None for none.

    `flag` is --chat_template: None takes what the model folder has, "none" turns templates off,
    otherwise a template file or a folder that holds one. Raises UserError when it has none.
    """
    if flag is None:
        return _from_folder(folder, special_tokens)
    if flag.lower() == "none":
        return None
    path = Path(flag)
    if path.is_file():
        return _from_file(path, special_tokens)
    found = _from_folder(path, special_tokens) if path.is_dir() else None
    if found is None:
        what = "has no chat template in it" if path.is_dir() else "is neither a file nor a folder"
        raise UserError(
            f"--chat_template {flag} {what} (allowed: none, a .jinja or .json file, or a folder "
            f"with {PADDLE_FILE}, {JINJA_FILE} or tokenizer_config.json)"
        )
    return found


def _from_folder(folder: Path, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
    """The folder's template; PaddleNLP's own file first, as PaddleNLP does."""
    if (folder / PADDLE_FILE).is_file():
        return _from_file(folder / PADDLE_FILE, special_tokens)
    if (folder / JINJA_FILE).is_file():
        return _from_file(folder / JINJA_FILE, special_tokens)
    path = folder / "tokenizer_config.json"
    source = read_json_object(path, missing_ok=True).get("chat_template")
    return None if not source else _jinja(source, special_tokens, path)


def _from_file(path: Path, special_tokens: Mapping[str, str]) -> ChatTemplate:
    """The template in one file: jinja, PaddleNLP's JSON, or JSON with a `chat_template` key."""
    if path.suffix != ".json":
        return JinjaTemplate(read_text(path), special_tokens, str(path))
    parts = read_json_object(path)
    if "chat_template" in parts:
        return _jinja(parts["chat_template"], special_tokens, path)
    return PaddleTemplate(parts, str(path))


def _jinja(source: Any, special_tokens: Mapping[str, str], path: Path) -> JinjaTemplate:
    """A template text, or the one named "default" of a list of named ones."""
    if isinstance(source, list):
        source = {entry.get("name"): entry.get("template") for entry in source}
    if isinstance(source, dict):
        if "default" not in source:
            raise UserError(
                f"{path} names the chat templates {sorted(map(str, source))} and none of them is "
                "'default'; save the one to use as a .jinja file and pass it to --chat_template"
            )
        source = source["default"]
    if not isinstance(source, str):
        raise UserError(f"{path}: chat_template must be a text or a list of named texts")
    return JinjaTemplate(source, special_tokens, str(path))


def _environment(keep_trailing_newline: bool = False) -> Any:
    """A jinja environment that keeps templates, which come with downloads, from the process.

    The settings and the few extra names are those that Hugging Face's templates are written for.
    """
    import jinja2.ext
    import jinja2.sandbox

    def raise_exception(message: str) -> str:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # jinja's own filter escapes HTML, which a prompt must not have
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    class Generation(jinja2.ext.Extension):
        """{% generation %} marks the assistant's text for training; here it only passes it on."""

        tags = {"generation"}  # noqa: RUF012 (jinja declares it so)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=keep_trailing_newline,
        extensions=[jinja2.ext.loopcontrols, Generation],
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment
