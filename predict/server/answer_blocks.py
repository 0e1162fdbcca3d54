"""An answer as a row of blocks - thoughts, texts, calls - that begin, grow and end in their order.

Responses calls them items, Messages content blocks. A whole answer is made as its stream is.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from predict.engine.samples import StreamOutput
from predict.errors import UserError
from predict.request import FinishReason, RequestOutput
from predict.server.answers import gathered
from predict.server.context import Context
from predict.server.runs import Encoder, Usage
from predict.system.files import parse_json
from predict.text.deltas import (
    CallArguments,
    CallBegin,
    ContentDelta,
    Delta,
    Reader,
    ReasoningDelta,
    ThoughtEnd,
)

Kind = Literal["thought", "text", "call"]
_SEAL = "regatta1."  # in front of thoughts that clients send back unread


@dataclass
class Block:
    """A thought, a text, or the arguments of a call."""

    kind: Kind
    index: int  # in the answer
    id: str = ""  # of a call
    name: str = ""  # of the function that it calls
    pieces: list[str] = field(default_factory=list)
    head: bytes = b""  # of the events that its pieces make

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(self.pieces)


class BlockEvents(Encoder):
    """A streamed answer in blocks. Subclasses say what each change of a block is on the wire."""

    def __init__(self, context: Context, reader: Reader | None, usage: Usage) -> None:
        """reader: None where all text is content. usage: of the request, as it grows."""
        self._front = context.front
        self._reader = reader
        self.usage = usage
        self.blocks: list[Block] = []
        self.finish_reason: FinishReason | None = None
        self._open_block: Block | None = None
        self._events: list[bytes] = []
        self._has_begun = False

    def begin(self) -> None:
        """Begins the answer."""
        raise NotImplementedError

    def block_begins(self, block: Block) -> None:
        """Begins a block, and sets its head."""
        raise NotImplementedError

    def block_grows(self, block: Block, text: str) -> None:
        """Adds a text to a block."""
        raise NotImplementedError

    def block_ends(self, block: Block) -> None:
        """Ends a block; finish_reason is known where the answer ends with it."""
        raise NotImplementedError

    def end(self) -> None:
        """Ends the answer."""
        raise NotImplementedError

    def put(self, kind: str, event: bytes) -> None:
        """Adds an event to those that are sent next. event: its JSON."""
        self._events.append(b"event: %s\ndata: %s\n\n" % (kind.encode(), event))

    def encode(self, prompt_index: int, pieces: list[StreamOutput]) -> bytes:
        for piece in gathered(pieces):
            self._read(piece)
        return self.taken()

    async def settle(self, usage: Usage) -> None:
        thoughts = "".join(block.text for block in self.blocks if block.kind == "thought")
        usage.num_thought_tokens = await self._front.num_tokens(thoughts)

    def finish(self, usage: Usage) -> bytes:
        self.end()
        return self.taken()

    def taken(self) -> bytes:
        """The events since the last time."""
        self.opened()
        events, self._events = b"".join(self._events), []
        return events

    def opened(self) -> None:
        """Begins the answer where it has not begun."""
        if not self._has_begun:
            self._has_begun = True
            self.begin()

    @property
    def stopped_by(self) -> str | None:
        """The stop string that has ended the answer, where the reader tells them."""
        return (self._reader.stopped_by if self._reader is not None else "") or None

    def _read(self, piece: StreamOutput) -> None:
        self.opened()
        is_last = piece.finish_reason is not None
        deltas: Sequence[Delta]
        if self._reader is None:
            deltas = (ContentDelta(piece.text),)
        else:
            deltas = self._reader.read(piece.text, piece.token_ids, is_last)
        for delta in deltas if self.blocks else _settled(deltas):
            self._take(delta)
        if is_last:
            if not self.blocks and piece.finish_reason != "error":
                self._begun(Block("text", 0))
            self.finish_reason = piece.finish_reason
            self._end_block()

    def _take(self, delta: Delta) -> None:
        if isinstance(delta, CallBegin):
            self._begun(Block("call", len(self.blocks), delta.id, delta.name))
        elif delta.text:
            kind: Kind = "thought" if isinstance(delta, ReasoningDelta) else "text"
            if isinstance(delta, CallArguments):
                kind = "call"
            block = self._open_block
            if block is None or block.kind != kind:
                block = self._begun(Block(kind, len(self.blocks)))
            block.pieces.append(delta.text)
            self.block_grows(block, delta.text)

    def _begun(self, block: Block) -> Block:
        self._end_block()
        self._open_block = block
        self.blocks.append(block)
        self.block_begins(block)
        return block

    def _end_block(self) -> None:
        block, self._open_block = self._open_block, None
        if block is not None:
            self.block_ends(block)


def _settled(deltas: Sequence[Delta]) -> Sequence[Delta]:
    """The first deltas of an answer, a thought whose beginning was not marked among them.

    Where its text is out already, it stays content, and so does its mark.
    """
    ends = [index for index, delta in enumerate(deltas) if isinstance(delta, ThoughtEnd)]
    if not ends:
        return deltas
    before = deltas[: ends[-1]]
    texts = [delta.text for delta in before if not isinstance(delta, CallBegin)]
    return [ReasoningDelta("".join(texts).strip()), *deltas[ends[-1] + 1 :]]


async def whole(events: BlockEvents, output: RequestOutput) -> None:
    """Reads an answer that is there, to its end."""
    (each,) = output.outputs
    events.encode(0, [StreamOutput(each.text, each.token_ids, each.finish_reason)])
    await events.settle(events.usage)
    events.finish(events.usage)


def arguments_of(block: Block) -> dict[str, Any]:
    """The arguments of a call as an object; what is none stands under "arguments"."""
    text = block.text
    try:
        found = parse_json(text, "arguments") if text.strip() else {}
    except UserError:
        found = text
    return found if isinstance(found, dict) else {"arguments": found}


def sealed(thought: str) -> str:
    """A thought for clients to send back unread. It is no secret: they may see it."""
    return _SEAL + base64.urlsafe_b64encode(thought.encode()).decode()


def unsealed(text: str) -> str | None:
    """The thought that `sealed` was given; None of another text."""
    if not text.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(text[len(_SEAL) :], b"-_", validate=True).decode()
    except ValueError:
        return None


def signature(thought: str) -> str:
    """A short text that goes with a thought."""
    return base64.b64encode(hashlib.sha256(thought.encode()).digest()).decode()
