"""OpenAI's objects of whole answers and of streamed pieces.

Streaming is the hot path: the JSON around a piece's text is made once for each request.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from predict.engine.samples import StreamOutput
from predict.request import CompletionOutput, RequestOutput
from predict.server.logprobs import LogprobTexts, TextPosition
from predict.server.runs import Encoder, Usage
from predict.text.deltas import (
    CallBegin,
    ContentDelta,
    Delta,
    Reader,
    ReasoningDelta,
    ThoughtEnd,
    joined,
)

DONE = b"data: [DONE]\n\n"
to_json = msgspec.json.Encoder().encode


MakeReader = Callable[[], Reader | None]


class Echo(NamedTuple):
    """A prompt in front of its answers: its text, and what each token adds to that."""

    text: str
    texts: Sequence[str] = ()  # of its tokens, where they have logprobs


NO_ECHO = Echo("")


class Identity:
    """The fields that all objects of one answer begin with."""

    def __init__(self, prefix: str, kind: str, model: str) -> None:
        """prefix: of the id. kind: "chat.completion", ..."""
        self.fields: dict[str, Any] = {
            "id": f"{prefix}-{secrets.token_hex(16)}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    @property
    def opening(self) -> bytes:
        """The object as JSON, open for more fields."""
        return to_json(self.fields)[:-1]


def usage_fields(usage: Usage) -> dict[str, Any]:
    """OpenAI's counts of tokens; those of drafts where there were any."""
    prompt, output = usage.num_prompt_tokens, usage.num_output_tokens
    drafts, accepted = usage.num_draft_tokens, usage.num_accepted_draft_tokens
    fields: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }
    if drafts:
        fields["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafts - accepted,
        }
    return fields


def gathered(pieces: list[StreamOutput]) -> list[StreamOutput]:
    """The pieces with those of one answer joined: a client pays for each piece that it reads."""
    if len(pieces) == 1:
        return pieces
    found: dict[int, list[StreamOutput]] = {}
    for piece in pieces:
        found.setdefault(piece.index, []).append(piece)
    if len(found) == len(pieces):
        return pieces
    return [same[0] if len(same) == 1 else _joined(same) for same in found.values()]


def _joined(pieces: list[StreamOutput]) -> StreamOutput:
    last = pieces[-1]
    measured = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    return StreamOutput(
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.token_ids),
        last.finish_reason,
        last.index,
        last.prompt_index,
        last.error,
        tuple(token for each in measured for token in each) if measured else None,
    )


class _Events(Encoder):
    """Server-sent events, each of them an opening, a choice and an end."""

    def __init__(
        self, identity: Identity, with_usage: bool, usage_so_far: Usage | None = None
    ) -> None:
        """usage_so_far: the counts of the request, where each event shows them."""
        self._opening = b"data: " + identity.opening
        self._with_usage = with_usage
        self._usage_so_far = usage_so_far
        self._set_end(b'],"usage":null}\n\n' if with_usage else b"]}\n\n")

    def _set_end(self, end: bytes) -> None:
        self._end = end

    def _count(self) -> None:
        """Brings the counts that events show up to date."""
        if self._usage_so_far is not None:
            self._set_end(b'],"usage":%s}\n\n' % to_json(usage_fields(self._usage_so_far)))

    def finish(self, usage: Usage) -> bytes:
        if not self._with_usage:
            return DONE
        counts = to_json(usage_fields(usage))
        return b'%s,"choices":[],"usage":%s}\n\n%s' % (self._opening, counts, DONE)


class CompletionEvents(_Events):
    """A streamed text completion."""

    def __init__(
        self,
        identity: Identity,
        num_answers: int,
        with_usage: bool,
        logprobs: LogprobTexts | None = None,
        echoed: Sequence[str] | None = None,
        prompts: Sequence[Sequence[int]] = (),
        usage_so_far: Usage | None = None,
    ) -> None:
        """num_answers: of each prompt. echoed: the prompts, where texts begin with them.

        prompts: their token ids, where there are logprobs.
        """
        super().__init__(identity, with_usage, usage_so_far)
        self._num_answers = num_answers
        self._logprobs = logprobs
        self._echoed = echoed
        self._prompts = prompts
        self._positions: dict[int, TextPosition] = {}  # of each choice
        self._heads: dict[int, bytes] = {}

    def _set_end(self, end: bytes) -> None:
        self._end = end
        self._plain_tail = b',"logprobs":null,"finish_reason":null}' + end

    def encode(self, prompt_index: int, pieces: list[StreamOutput]) -> bytes:
        self._count()
        out: list[bytes] = []
        for piece in gathered(pieces):
            index = prompt_index * self._num_answers + piece.index
            head = self._heads.get(index)
            text = piece.text
            if head is None:
                head = b'%s,"choices":[{"index":%d,"text":' % (self._opening, index)
                self._heads[index] = head
                if self._echoed is not None:
                    text = self._echoed[prompt_index] + text
            if piece.finish_reason is None and self._logprobs is None:
                if text:
                    out += (head, to_json(text), self._plain_tail)
                continue
            out += (head, to_json(text), self._tail(index, prompt_index, piece))
        return b"".join(out)

    def _tail(self, index: int, prompt_index: int, piece: StreamOutput) -> bytes:
        measured: Any = None
        if self._logprobs is not None and piece.logprobs is not None:
            position = self._positions.get(index)
            if position is None:
                position = self._logprobs.position(self._prompts[prompt_index])
                position.offset = 0 if self._echoed is None else len(self._echoed[prompt_index])
                self._positions[index] = position
            is_last = piece.finish_reason is not None
            measured = self._logprobs.completion(piece.logprobs, position, is_last)
        return b',"logprobs":%s,%s%s' % (to_json(measured), ended(piece), self._end)


class _Choice:
    """An answer of a streamed chat, with its prepared JSON."""

    def __init__(self, opening: bytes, index: int, reader: Reader | None) -> None:
        self.head = b'%s,"choices":[{"index":%d,"delta":{' % (opening, index)
        self.content = self.head + b'"content":'
        self.reasoning = self.head + b'"reasoning_content":'
        self.reader = reader
        self.has_begun = False
        self.has_calls = False


class ChatEvents(_Events):
    """A streamed turn of a conversation."""

    def __init__(
        self,
        identity: Identity,
        with_usage: bool,
        make_reader: MakeReader = lambda: None,
        logprobs: LogprobTexts | None = None,
        usage_so_far: Usage | None = None,
    ) -> None:
        """make_reader: makes the reader of an answer; None where all text is content."""
        super().__init__(identity, with_usage, usage_so_far)
        self._make_reader = make_reader
        self._logprobs = logprobs
        self._choices: dict[int, _Choice] = {}

    def _set_end(self, end: bytes) -> None:
        self._end = end
        self._tail = b'},"logprobs":null,"finish_reason":null}' + end

    def encode(self, prompt_index: int, pieces: list[StreamOutput]) -> bytes:
        self._count()
        out: list[bytes] = []
        for piece in gathered(pieces):
            choice = self._choices.get(piece.index)
            if choice is None:
                choice = _Choice(self._opening, piece.index, self._make_reader())
                self._choices[piece.index] = choice
                out += (choice.head, b'"role":"assistant","content":""', self._tail)
            tail = self._tail
            if self._logprobs is not None:
                measured = to_json({"content": self._logprobs.chat(piece.logprobs or ())})
                tail = b'},"logprobs":%s,"finish_reason":null}%s' % (measured, self._end)
            if choice.reader is None:
                if piece.text or tail is not self._tail:
                    out += (choice.content, to_json(piece.text), tail)
            else:
                self._parsed(choice, piece, tail, out)
            if piece.finish_reason is not None:
                out += (
                    choice.head,
                    b'},"logprobs":null,',
                    ended(piece, choice.has_calls),
                    self._end,
                )
        return b"".join(out)

    def _parsed(self, choice: _Choice, piece: StreamOutput, tail: bytes, out: list[bytes]) -> None:
        """Appends the parts of a parsed piece to `out`; logprobs go with the first of them."""
        assert choice.reader is not None
        is_last = piece.finish_reason is not None
        deltas = choice.reader.read(piece.text, piece.token_ids, is_last)
        if not deltas and tail is not self._tail:
            out += (choice.head, tail)
        for delta in deltas:
            out += (*self._part(choice, delta), tail)
            tail = self._tail

    def _part(self, choice: _Choice, delta: Delta) -> tuple[bytes, bytes]:
        if isinstance(delta, (ContentDelta, ThoughtEnd)):
            return choice.content, to_json(delta.text)
        if isinstance(delta, ReasoningDelta):
            return choice.reasoning, to_json(delta.text)
        call: dict[str, Any]
        if isinstance(delta, CallBegin):
            choice.has_calls = True
            function = {"name": delta.name, "arguments": ""}
            call = {"index": delta.index, "id": delta.id, "type": "function", "function": function}
        else:
            call = {"index": delta.index, "function": {"arguments": delta.text}}
        return choice.head, b'"tool_calls":[%s]' % to_json(call)


def finish_reason(reason: str | None, has_calls: bool) -> str | None:
    """OpenAI's finish_reason of an answer."""
    return "tool_calls" if reason == "stop" and has_calls else reason


def ended(piece: StreamOutput, has_calls: bool = False) -> bytes:
    """The last fields of a streamed choice, as JSON with the closing brace."""
    fields: dict[str, Any] = {"finish_reason": finish_reason(piece.finish_reason, has_calls)}
    if piece.error is not None:
        fields["error"] = piece.error
    return to_json(fields)[1:]


def completion(
    identity: Identity,
    outputs: Sequence[RequestOutput],
    usage: Usage,
    logprobs: LogprobTexts | None,
    echoed: Sequence[Echo] | None = None,
    without_answer: bool = False,
) -> dict[str, Any]:
    """A whole text completion. echoed: the prompts, where texts begin with them.

    without_answer: of what came in their place nothing is shown or counted.
    """
    if without_answer:
        usage.num_output_tokens = 0
    choices: list[dict[str, Any]] = []
    for place, output in enumerate(outputs):
        echo = NO_ECHO if echoed is None else echoed[place]
        measured = output.prompt_logprobs or ()
        prompt = [*zip(echo.texts, output.prompt_token_ids, measured, strict=False)]
        for each in output.outputs:
            text = echo.text if without_answer else echo.text + each.text
            choice: dict[str, Any] = {"index": len(choices), "text": text, "logprobs": None}
            choice["finish_reason"] = "length" if without_answer else each.finish_reason
            if logprobs is not None:
                tokens = () if without_answer else each.logprobs or ()
                position = logprobs.position(output.prompt_token_ids)
                choice["logprobs"] = logprobs.completion(tokens, position, True, prompt)
            choices.append(_with_extras(choice, each, output, logprobs, echoed is None))
    return {**identity.fields, "choices": choices, "usage": usage_fields(usage)}


def as_events(whole: dict[str, Any], with_usage: bool) -> bytes:
    """A whole completion as the events of a stream, one for each choice."""
    fields = {name: value for name, value in whole.items() if name not in ("choices", "usage")}
    events = [{**fields, "choices": [choice]} for choice in whole["choices"]]
    if with_usage:
        events = [{**event, "usage": None} for event in events]
        events.append({**fields, "choices": [], "usage": whole["usage"]})
    return b"".join(b"data: %s\n\n" % to_json(event) for event in events) + DONE


def chat_completion(
    identity: Identity,
    output: RequestOutput,
    usage: Usage,
    make_reader: MakeReader,
    logprobs: LogprobTexts | None,
) -> dict[str, Any]:
    """A whole turn of a conversation. make_reader: see ChatEvents."""
    choices: list[dict[str, Any]] = []
    for each in output.outputs:
        reader = make_reader()
        message: dict[str, Any] = {"role": "assistant", "content": each.text, "refusal": None}
        has_calls = False
        if reader is not None:
            found = joined(reader.read(each.text, each.token_ids, True))
            has_calls = bool(found.calls)
            message["content"] = found.content if has_calls else found.content or ""
            if found.reasoning is not None:
                message["reasoning_content"] = found.reasoning
            if has_calls:
                functions = [{"name": c.name, "arguments": c.arguments} for c in found.calls]
                message["tool_calls"] = [
                    {"id": call.id, "type": "function", "function": function}
                    for call, function in zip(found.calls, functions, strict=True)
                ]
        choice: dict[str, Any] = {"index": each.index, "message": message, "logprobs": None}
        if logprobs is not None:
            choice["logprobs"] = {"content": logprobs.chat(each.logprobs or ())}
        choice["finish_reason"] = finish_reason(each.finish_reason, has_calls)
        choices.append(_with_extras(choice, each, output, logprobs, True))
    return {**identity.fields, "choices": choices, "usage": usage_fields(usage)}


def _with_extras(
    choice: dict[str, Any],
    each: CompletionOutput,
    output: RequestOutput,
    logprobs: LogprobTexts | None,
    with_prompt: bool,
) -> dict[str, Any]:
    """The choice with fields that OpenAI's objects do not have: error, score, prompt_logprobs."""
    if each.error is not None:
        choice["error"] = each.error
    if each.score is not None:
        choice["score"] = each.score
    if output.prompt_logprobs is not None and with_prompt and each.index == 0:
        texts = logprobs or LogprobTexts(None, 0)
        choice["prompt_logprobs"] = texts.by_id(output.prompt_logprobs)
    return choice
