"""The parts of an answer's text as they come: content, reasoning, calls of tools."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More text of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More text of the thoughts in front of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The begin of a call; its arguments follow as CallArguments of the same index."""

    index: int  # of the call in the answer, from 0
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, which together are JSON, where the model wrote JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ThoughtEnd:
    """The end of a thought whose beginning was not marked: the content so far is that thought."""

    text: str  # the mark and the white space behind it; content where that is out already


Delta = ContentDelta | ReasoningDelta | CallBegin | CallArguments | ThoughtEnd


class Parser(Protocol):
    """Separates the parts of an answer while its text comes."""

    def feed(self, text: str) -> list[Delta]:
        """The deltas that this text makes certain; text that may become markup is held back."""
        ...

    def finish(self) -> list[Delta]:
        """The deltas of the text that was held back. Call it once, at the end."""
        ...


class Reader(Protocol):
    """Reads the parts of one answer (see predict.text.answer_parts)."""

    @property
    def stopped_by(self) -> str:
        """The stop string that has ended the content; "" where none has."""

    def read(self, text: str, token_ids: Sequence[int], is_last: bool) -> list[Delta]:
        """The deltas that more text, of these tokens, makes certain."""
        ...


@dataclass
class Call:
    """A whole call of a tool."""

    id: str
    name: str
    arguments: str = ""  # JSON, where the model wrote JSON


@dataclass
class AnswerParts:
    """An answer in parts; a text that never came is None."""

    content: str | None = None
    reasoning: str | None = None
    calls: list[Call] = field(default_factory=list)


def joined(deltas: Iterable[Delta]) -> AnswerParts:
    """The answer that all its deltas make."""
    content: list[str] = []
    reasoning: list[str] = []
    arguments: list[list[str]] = []
    answer = AnswerParts()
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            content.append(delta.text)
        elif isinstance(delta, ReasoningDelta):
            reasoning.append(delta.text)
        elif isinstance(delta, CallBegin):
            answer.calls.append(Call(delta.id, delta.name))
            arguments.append([])
        elif isinstance(delta, ThoughtEnd):
            reasoning += filter(None, ["".join(content).strip()])
            content = []
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
