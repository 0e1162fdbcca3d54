"""What an answer's text turns out to be, piece by piece: content, reasoning, calls of tools."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More text for the one who asked."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More text of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool is called; what it is given comes as CallArguments of the same index."""

    index: int  # of the call in the answer, from 0
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, which together are JSON, where the model wrote JSON."""

    index: int
    text: str


Delta = ContentDelta | ReasoningDelta | CallBegin | CallArguments


class Parser(Protocol):
    """Tells an answer's parts from its markup while the text comes."""

    def feed(self, text: str) -> list[Delta]:
        """What became certain with this text; what may yet become markup is held back."""
        ...

    def finish(self) -> list[Delta]:
        """What was held back, as no text follows. Call it once."""
        ...


@dataclass
class Call:
    """A whole call of a tool."""

    id: str
    name: str
    arguments: str = ""  # JSON, where the model wrote JSON


@dataclass
class Answer:
    """An answer in parts; a text that never came is None."""

    content: str | None = None
    reasoning: str | None = None
    calls: list[Call] = field(default_factory=list)


def joined(deltas: Iterable[Delta]) -> Answer:
    """The answer that all its deltas make."""
    content: list[str] = []
    reasoning: list[str] = []
    arguments: list[list[str]] = []
    answer = Answer()
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            content.append(delta.text)
        elif isinstance(delta, ReasoningDelta):
            reasoning.append(delta.text)
        elif isinstance(delta, CallBegin):
            answer.calls.append(Call(delta.id, delta.name))
            arguments.append([])
        else:
            arguments[delta.index].append(delta.text)
    for call, pieces in zip(answer.calls, arguments, strict=True):
        call.arguments = "".join(pieces)
    answer.content = "".join(content) if content else None
    answer.reasoning = "".join(reasoning) if reasoning else None
    return answer


def call_id() -> str:
    """A fresh id of a call, as OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """A fresh id of nine letters and digits: Mistral's templates take no other."""
    characters = string.ascii_letters + string.digits
    return "".join(secrets.choice(characters) for _ in range(9))
