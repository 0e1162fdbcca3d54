"""Requests and answers of PaddleNLP's two servers.

`predict/flask_server.py` takes context and history, later messages, with src_length; `llm/server`
takes text, input_ids or messages, with max_dec_len, topp and so on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from predict.engine.samples import StreamOutput
from predict.errors import UserError
from predict.server.answers import DONE, Identity, chat_completion, gathered, to_json, usage_fields
from predict.server.asked import Asked, known_fields
from predict.server.context import Context, record_of
from predict.server.errors import ApiError, invalid, refused
from predict.server.protocol import (
    MAX_MESSAGES,
    Body,
    Boolean,
    ChatMessage,
    FirstOnly,
    Integer,
    ModelName,
    Name,
    NumberField,
    TextOrTexts,
    TokenIds,
    parsed,
)
from predict.server.runs import Encoder, Job, Run, Stream, Usage
from predict.server.turns import turn_of
from predict.system.bounds import is_integer
from predict.system.files import json_type, parse_json

# Fields that no request of OpenAI's has: such a body is one of PaddleNLP's.
FLASK_FIELDS = frozenset(("context", "history", "src_length"))
NATIVE_FIELDS = frozenset(
    (
        *("text", "input_ids", "req_id", "max_dec_len", "min_dec_len", "seq_len", "topp"),
        *("penalty_score", "frequency_score", "presence_score", "eos_token_ids"),
        *("stop_sequences", "return_all_tokens", "return_usage", "system"),
    )
)
PaddleMessages = Annotated[list[ChatMessage], FirstOnly(), Field(max_length=MAX_MESSAGES)]


class FlaskBody(Body):
    """A request of flask_server.py's clients. max_length counts new tokens alone."""

    model: ModelName | None = None
    context: str | None = None  # the question
    history: Annotated[Any, Field(description="Texts or objects with utterance, by turns.")] = None
    messages: PaddleMessages | None = None
    stream: bool | None = None
    src_length: Integer = None  # of the prompt, which is cut there
    max_length: Integer = None
    max_tokens: Integer = None
    min_length: Integer = None
    top_k: Integer = None
    top_p: NumberField = None  # 0 is greedy
    temperature: NumberField = None
    repetition_penalty: NumberField = None
    seed: Integer = None
    stop: TextOrTexts = None

    ignored: ClassVar[frozenset[str]] = frozenset({"extra_info", "user"})


class NativeBody(Body):
    """A request of llm/server's clients."""

    model: ModelName | None = None
    req_id: Name | None = None
    text: str | None = None
    input_ids: TokenIds = None
    messages: PaddleMessages | None = None
    system: str | None = None
    stream: bool | None = None
    max_dec_len: Integer = None
    min_dec_len: Integer = None
    seq_len: Integer = None  # tokens of the prompt, at most
    temperature: NumberField = None
    topp: NumberField = None  # 0 is greedy
    penalty_score: NumberField = None
    frequency_score: NumberField = None
    presence_score: NumberField = None
    eos_token_ids: TokenIds = None
    stop_sequences: TextOrTexts = None
    return_usage: Boolean = None
    timeout: NumberField = None  # seconds

    ignored: ClassVar[frozenset[str]] = frozenset({"benchmark", "return_all_tokens", "user"})


# Field of SamplingParams -> field of a body.
_FLASK = {
    "max_new_tokens": "max_length",
    **{name: name for name in ("min_length", "top_k", "top_p", "temperature", "seed", "stop")},
    "repetition_penalty": "repetition_penalty",
}
_NATIVE = {
    "max_new_tokens": "max_dec_len",
    "min_length": "min_dec_len",
    "temperature": "temperature",
    "top_p": "topp",
    "repetition_penalty": "penalty_score",
    "frequency_penalty": "frequency_score",
    "presence_penalty": "presence_score",
    "stop_token_ids": "eos_token_ids",
    "stop": "stop_sequences",
}


def is_flask(value: Mapping[str, Any]) -> bool:
    """Whether a body is of flask_server.py's form."""
    return not FLASK_FIELDS.isdisjoint(value)


def is_native(value: Mapping[str, Any]) -> bool:
    """Whether a body is of llm/server's form."""
    return not NATIVE_FIELDS.isdisjoint(value)


def _asked(context: Context, body: FlaskBody | NativeBody, names: Mapping[str, str]) -> Asked:
    """The parameters of a body, whose fields have these names. Raises ApiError 400, 404."""
    model = context.models.find(body.model)
    values = {field: getattr(body, name) for field, name in names.items()}
    given = {field: value for field, value in values.items() if value is not None}
    if given.get("top_p") == 0 and not isinstance(given["top_p"], bool):
        del given["top_p"]  # PaddleNLP's way to say greedy
        given["temperature"] = 0.0
    given["adapter"] = model.adapter
    known = {**known_fields(), **names}
    try:
        return Asked(context.config.params(given), known)
    except UserError as error:
        raise refused(error, known) from None


def _length(body: Body, name: str) -> int | None:
    """A number of tokens. Raises ApiError 400."""
    value: int | None = getattr(body, name)
    if value is not None and (not is_integer(value) or value < 1):
        raise invalid(name, f"{name} is {str(value)[:40]!r} (allowed: a whole number from 1 on)")
    return value


async def flask_job(context: Context, body: FlaskBody) -> Job:
    """The job of a request of flask_server.py's form. Raises ApiError 400."""
    if body.max_tokens is not None and body.max_length is None:
        body = body.model_copy(update={"max_length": body.max_tokens})
    asked = _asked(context, body, _FLASK)
    src_length = _length(body, "src_length")
    total = context.config.engine.max_length
    wanted = asked.params.max_new_tokens
    if src_length is not None and wanted is not None and src_length + wanted > total:
        raise invalid(
            "src_length",
            f"src_length {src_length} and max_length {wanted} are {src_length + wanted} together "
            f"(allowed: {total}); lower one of them",
        )
    messages = body.messages
    if messages is None:
        if body.context is None:
            raise invalid("context", "context is missing; write the question", "missing_field")
        messages = [*_history(body.history), ChatMessage(role="user", content=body.context)]
    elif not messages:
        raise invalid("messages", "messages has no entries; write at least one")
    pictures = None
    if context.front.template is None and len(messages) == 1:
        ids = await context.front.encode(str(messages[0].content), "context")
    else:
        _, ids, _, pictures = await turn_of(context, messages, {})
    ids = ids if pictures else ids[:src_length]
    return Job([ids], asked.params, asked.refused, pictures=pictures)


def _history(history: Any) -> list[ChatMessage]:
    """Earlier turns: texts, or objects with `utterance`, user and bot by turns."""
    if isinstance(history, str) and history:
        try:
            history = parse_json(history, "history")
        except UserError as error:
            raise invalid("history", str(error)) from None
    if history in (None, ""):
        return []
    if not isinstance(history, list) or len(history) > MAX_MESSAGES or len(history) % 2:
        got = f"a list of {len(history)}" if isinstance(history, list) else json_type(history)
        raise invalid(
            "history",
            f"history is {got} (allowed: a list of turns, user and bot in pairs, at most "
            f"{MAX_MESSAGES})",
        )
    messages: list[ChatMessage] = []
    for index, turn in enumerate(history):
        text = turn.get("utterance", turn.get("content")) if isinstance(turn, dict) else turn
        if not isinstance(text, str):
            where = f"history[{index}]"
            raise invalid(
                where, f'{where} is {json_type(turn)} (allowed: a text, {{"utterance": "..."}})'
            )
        messages.append(ChatMessage(role="assistant" if index % 2 else "user", content=text))
    return messages


async def native_job(context: Context, body: NativeBody) -> Job:
    """The job of a request of llm/server's form. Raises ApiError 400."""
    given = [name for name in ("text", "input_ids", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise invalid(
            "text",
            f"the body has {', '.join(given) or 'no prompt'} (allowed: one of text, input_ids, "
            "messages)",
        )
    asked, pictures = _asked(context, body, _NATIVE), None
    if body.input_ids is not None:
        if not isinstance(body.input_ids, list):
            raise invalid(
                "input_ids", f"input_ids is {json_type(body.input_ids)} (allowed: token ids)"
            )
        vocab_size = context.info().vocab_size
        ids = context.front.token_ids(body.input_ids, "input_ids", vocab_size)
    elif body.text is not None:
        ids = await context.front.encode(body.text, "text")
    else:
        messages = list(body.messages or ())
        if body.system is not None:
            messages.insert(0, ChatMessage(role="system", content=body.system))
        if not messages:
            raise invalid("messages", "messages has no entries; write at least one")
        _, ids, _, pictures = await turn_of(context, messages, {})
    most = _length(body, "seq_len")
    if most is not None and len(ids) > most:
        raise invalid("seq_len", f"the prompt has {len(ids)} tokens, and seq_len is {most}")
    return Job([ids], asked.params, asked.refused, pictures=pictures)


class _Lines(Encoder):
    """Lines of JSON with an error_code in each."""

    def dress(self, error: ApiError) -> None:
        error.extra = flask_error(error)


class OldFlaskLines(_Lines):
    """Answers of /api/chat: a line of JSON for each piece."""

    media_type = "text/plain; charset=utf-8"

    def encode(self, prompt_index: int, pieces: list[StreamOutput]) -> bytes:
        out: list[bytes] = []
        for piece in gathered(pieces):
            if piece.text:
                result = {"response": {"role": "bot", "utterance": piece.text}}
                line = {"error_code": 0, "error_msg": "Success", "result": result}
                out += (to_json(line), b"\n")
        return b"".join(out)

    def finish(self, usage: Usage) -> bytes:
        return b""

    def fail(self, error: ApiError) -> bytes:
        return to_json(flask_error(error)) + b"\n"


def flask_error(error: ApiError) -> dict[str, Any]:
    """The fields of an error that clients of both servers read."""
    code = 1 if error.status == 400 else error.status
    return {"error_code": code, "error_msg": error.message, "result": ""}


@contextlib.contextmanager
def paddle_errors() -> Iterator[None]:
    """Adds to errors the fields that PaddleNLP's clients read."""
    try:
        yield
    except ApiError as error:
        error.extra = flask_error(error)
        raise


class FlaskEvents(Encoder):
    """Answers of flask_server.py's /v1/chat/completions: events with `message`, and `delta`."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def encode(self, prompt_index: int, pieces: list[StreamOutput]) -> bytes:
        out: list[bytes] = []
        for piece in gathered(pieces):
            if not piece.text and piece.finish_reason is None:
                continue
            message = {"role": "assistant", "content": piece.text}
            choice = {
                "index": piece.index,
                "message": message,
                "delta": message,
                "finish_reason": piece.finish_reason,
            }
            out.append(b"data: %s\n\n" % to_json({**self._identity.fields, "choices": [choice]}))
        return b"".join(out)

    def finish(self, usage: Usage) -> bytes:
        return DONE


class NativeLines(_Lines):
    """Answers of llm/server: a line of JSON for each piece, the last with is_end 1."""

    def __init__(self, req_id: str, with_usage: bool) -> None:
        self._req_id = req_id
        self._with_usage = with_usage
        self._num_sent = 0

    def encode(self, prompt_index: int, pieces: list[StreamOutput]) -> bytes:
        text = "".join(piece.text for piece in pieces)
        return self._line(text, 0) if text else b""

    def finish(self, usage: Usage) -> bytes:
        more = {"usage": usage_fields(usage)} if self._with_usage else {}
        return self._line("", 1, **more)

    def fail(self, error: ApiError) -> bytes:
        return to_json({"req_id": self._req_id, **flask_error(error), "is_end": 1}) + b"\n"

    def _line(self, text: str, is_end: int, **more: Any) -> bytes:
        line = {
            "req_id": self._req_id,
            "token": text,
            "send_idx": self._num_sent,
            "is_end": is_end,
            "error_code": 0,
            "error_msg": "",
            **more,
        }
        self._num_sent += 1
        return to_json(line) + b"\n"


async def flask_answered(context: Context, request: Request, value: dict[str, Any]) -> Response:
    """The answer to a body of flask_server.py's form at /v1/chat/completions. Raises ApiError."""
    body = parsed(FlaskBody, value)
    # PaddleNLP's clients send its folder's name, or nothing.
    model = context.models.find(body.model).name
    job = await flask_job(context, body)
    if body.stream is False:
        async with Run(context, request, job, streamed=False) as run:
            (output,) = await run.outputs()
        identity = Identity("chatcmpl", "chat.completion", model)
        whole = chat_completion(identity, output, job.usage, lambda: None, None)
        return Response(to_json(whole), media_type="application/json")
    run = Run(context, request, job, streamed=True)
    return Stream(run, job, FlaskEvents(Identity("chatcmpl", "chat.completion", model)))


async def old_flask_answered(context: Context, request: Request, value: dict[str, Any]) -> Response:
    """The answer to a body of /api/chat. Raises ApiError."""
    with paddle_errors():
        body = parsed(FlaskBody, value)
        job = await flask_job(context, body)
    return Stream(Run(context, request, job, streamed=True), job, OldFlaskLines())


async def native_answered(context: Context, request: Request, value: dict[str, Any]) -> Response:
    """The answer to a body of llm/server's form. Raises ApiError."""
    with paddle_errors():
        body = parsed(NativeBody, value)
        job = await native_job(context, body)
        record = record_of(request)
        if isinstance(body.timeout, (int, float)) and body.timeout > 0:
            record.deadline -= max(context.config.request_timeout - body.timeout, 0.0)
        with_usage = body.return_usage is True
        if body.stream:
            lines = NativeLines(body.req_id or record.request_id, with_usage)
            return Stream(Run(context, request, job, streamed=True), job, lines)
        async with Run(context, request, job, streamed=False) as run:
            (output,) = await run.outputs()
    answer: dict[str, Any] = {"result": output.text, "error_msg": "", "error_code": 0}
    if with_usage:
        answer["usage"] = usage_fields(job.usage)
    return Response(to_json(answer), media_type="application/json")
