"""Bodies of requests for vectors and scores, and their texts at the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import anyio
import numpy as np
import numpy.typing as npt
from pydantic import Field, WithJsonSchema
from starlette.requests import Request

from predict.engine.embedding import Text
from predict.engine.retrieval import Pairs, Rules, Writer
from predict.errors import EngineError, UserError
from predict.server.context import Context, record_of
from predict.server.engine_client import EngineDied
from predict.server.errors import ApiError, invalid
from predict.server.protocol import Body, Integer, ModelName, Name, PromptsField
from predict.system.bounds import is_integer, prompt_token_ids
from predict.system.files import json_type
from predict.text.tokenizer import Tokenizer

T = TypeVar("T")
_DOCUMENT = {"anyOf": [{"type": "string"}, {"type": "object"}]}
Document = Annotated[Any, WithJsonSchema(_DOCUMENT)]
Documents = Annotated[Any, WithJsonSchema({"type": "array", "items": _DOCUMENT})]
TextOrTexts = Annotated[
    Any, WithJsonSchema({"anyOf": [_DOCUMENT, {"type": "array", "items": _DOCUMENT}]})
]
_NEVER: dict[str, tuple[tuple[Any, ...], str]] = {
    "priority": ((0,), "requests run in the order they come in"),
    "add_special_tokens": ((True,), "give token ids to leave special tokens out"),
    "task": ((), "write prompt_name, the name of one of the model's prompts"),
    "input_type": ((), "write prompt_name, the name of one of the model's prompts"),
    "late_chunking": ((False,), "each text has a vector of its own"),
    "embedding_type": (("float",), "write encoding_format: float or base64"),
    "embedding_types": ((["float"],), "write encoding_format: float or base64"),
    "max_chunks_per_doc": ((), "a document that is too long is cut: write truncate_prompt_tokens"),
    "overlap_tokens": ((), "a document is read in one piece"),
    "rank_fields": ((), "write the text of a document itself"),
}


class VectorsBody(Body):
    """Fields of all requests for vectors and scores."""

    model: ModelName | None = None
    truncate_prompt_tokens: Integer = None  # a longer text keeps that many; -1: the model's most

    ignored: ClassVar[frozenset[str]] = frozenset({"user"})
    refused = _NEVER


class EmbeddingsBody(VectorsBody):
    """A request for the vectors of texts."""

    input: PromptsField  # a text, token ids, or a list of these
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Integer = None  # the vector's first values, of length 1 again
    prompt_name: Name | None = None  # of the model's prompts, in front of texts

    refused: ClassVar[Any] = {
        **_NEVER,
        "messages": ((), "write the text into input"),
        "normalized": ((), "the model's files say whether vectors have length 1"),
        "normalize": ((), "the model's files say whether vectors have length 1"),
    }


class RerankBody(VectorsBody):
    """A request for the order of documents by how well they answer a query."""

    query: Document  # a text, or {"text": a text}
    documents: Documents
    top_n: Integer = None
    return_documents: bool | None = None  # true unless it says false
    max_tokens_per_doc: Integer = None  # as truncate_prompt_tokens
    instruction: Annotated[str, Field(max_length=4096)] | None = None  # of yes/no rerankers


class ScoreBody(VectorsBody):
    """A request for the scores of pairs: one text against one or several, or list against list."""

    text_1: TextOrTexts
    text_2: TextOrTexts
    instruction: Annotated[str, Field(max_length=4096)] | None = None


def rules_of(context: Context) -> Rules:
    """How the model's texts are written. Raises ApiError 400 where it makes no vectors at all."""
    rules = context.info().rules
    if rules is None:
        raise invalid("model", "this server's engine makes no vectors")
    return rules


def as_text(value: Any, where: str) -> str:
    """A document's text. Raises ApiError 400."""
    text = value.get("text") if isinstance(value, dict) and value.keys() == {"text"} else value
    if not isinstance(text, str):
        raise invalid(where, f'{where} is {json_type(value)} (allowed: a text, {{"text": a text}})')
    return text


def as_texts(context: Context, value: Any, where: str) -> list[str]:
    """A list of documents. Raises ApiError 400."""
    most = context.config.max_prompts
    if not isinstance(value, list):
        raise invalid(where, f"{where} is {json_type(value)} (allowed: a list of texts)")
    if not 0 < len(value) <= most:
        raise invalid(where, f"{where} has {len(value)} texts (allowed: 1 to {most})")
    return [as_text(each, f"{where}[{index}]") for index, each in enumerate(value)]


def cut_of(rules: Rules, value: Any, where: str = "truncate_prompt_tokens") -> int | None:
    """Tokens to cut texts at. Raises ApiError 400."""
    if value is None:
        return None
    if not (is_integer(value) and (value == -1 or 0 < value <= rules.max_length)):
        raise invalid(where, f"{where} is {value!r:.40} (allowed: -1, or 1 to {rules.max_length})")
    return int(value)


async def input_texts(context: Context, rules: Rules, body: EmbeddingsBody) -> list[Text]:
    """The texts of a request for vectors. Raises ApiError 400."""
    listed: Any = body.input
    if isinstance(listed, str) or (isinstance(listed, list) and listed and is_integer(listed[0])):
        listed = [listed]
    most, cut = context.config.max_prompts, cut_of(rules, body.truncate_prompt_tokens)
    if not isinstance(listed, list):
        raise invalid(
            "input",
            f"input is {json_type(listed)} (allowed: a text, token ids, or a list of these)",
        )
    if not 0 < len(listed) <= most:
        raise invalid("input", f"input has {len(listed)} texts (allowed: 1 to {most})")
    try:
        prompt = rules.prompt_named(body.prompt_name)
    except UserError as error:
        raise invalid("prompt_name", str(error)) from None
    vocab_size, found = context.info().vocab_size, list[Text]()
    for index, each in enumerate(listed):
        where = "input" if len(listed) == 1 else f"input[{index}]"
        if isinstance(each, str):
            made_of = partial(Writer.text, text=each, prompt=prompt, most=cut)
            found.append(await written(context, where, [each], made_of))
        elif isinstance(each, list):
            try:
                ids = prompt_token_ids(each, vocab_size - 1)
            except UserError as error:
                raise invalid(where, f"{where}: {error}") from None
            found.append(Text(ids if cut is None else ids[: rules.max_length if cut < 0 else cut]))
        else:
            raise invalid(where, f"{where} is {json_type(each)} (allowed: a text, token ids)")
    for index, text in enumerate(found):
        check_length(rules, text, "input" if len(found) == 1 else f"input[{index}]")
    return found


def check_length(rules: Rules, text: Text, where: str) -> None:
    """Raises ApiError 400 for a text that is too long, or has no token."""
    if not text.token_ids:
        raise invalid(where, f"{where} has no tokens; write something")
    if len(text.token_ids) > rules.max_length:
        raise invalid(
            where,
            f"{where} has {len(text.token_ids)} tokens (allowed: 1 to {rules.max_length}); shorten "
            "it, or write truncate_prompt_tokens -1",
            "context_length_exceeded",
        )


async def written(
    context: Context, where: str, texts: Sequence[str], make: Callable[[Writer], T]
) -> T:
    """What `make` makes of the texts, on a thread. Raises ApiError 400."""
    rules = rules_of(context)

    def work(tokenizer: Tokenizer) -> T:
        return make(Writer(rules, tokenizer))

    return await context.front.work(work, where, texts)


async def pairs_of(
    context: Context,
    pairs: Sequence[tuple[str, str]],
    cut: int | None,
    instruction: str | None,
    where: Callable[[int], str],
) -> tuple[Pairs, list[Text]]:
    """The parts of pairs, and their texts, which run for the scores. Raises ApiError 400."""
    rules = rules_of(context)
    try:
        split = rules.pairs(pairs)
    except UserError as error:
        raise invalid("model", str(error)) from None
    try:
        rules.check_instruction(instruction)
    except UserError as error:
        raise invalid("instruction", str(error)) from None
    first: dict[int, int] = {}  # of each part: the pair that it is named by
    for index, own in enumerate(split.places.tolist()):
        first.update({place: index for place in own if place not in first})
    texts: list[Text] = []
    for number, part in enumerate(split.parts):
        at = where(first[number])
        made_of = partial(Writer.part, part=part, most=cut, instruction=instruction)
        said = [each for each in part if each is not None]
        texts.append(await written(context, at, said, made_of))
        check_length(rules, texts[-1], at)
    return split, texts


async def made(
    context: Context, request: Request, texts: Sequence[Text], scores: bool, adapter: str | None
) -> npt.NDArray[np.float32]:
    """The engine's results for texts; they are dropped when the client disconnects.

    Raises ApiError: 400 where they are refused, 429, 503, 504.
    """
    record, count = record_of(request), len(texts)
    if count > (most := context.config.max_in_flight):
        raise invalid(
            "input", f"the request makes {count} texts (allowed: {most}); send several requests"
        )
    context.admission.enter(count, record.key)
    if record.body is not None:
        record.body.release()
    record.log["prompt_tokens"] = sum(len(text.token_ids) for text in texts)
    try:
        return await in_time(context, request, context.engine.vectors(texts, scores, adapter))
    except UserError as error:
        raise invalid("input", str(error)) from None
    except EngineError as error:
        raise ApiError(500, f"the texts failed: {error}") from None
    except EngineDied:
        raise context.unavailable() from None
    finally:
        context.admission.leave(count, record.key)


async def in_time(context: Context, request: Request, work: Awaitable[T]) -> T:
    """What work gives; it is dropped when the client disconnects. Raises ApiError 504."""
    with anyio.CancelScope(deadline=record_of(request).deadline) as scope:
        async with _until_gone(request, scope):
            return await work
    seconds = context.config.request_timeout
    raise ApiError(
        504, f"the vectors were not ready within {seconds:g} s; send fewer texts in a request"
    )


class _until_gone:  # noqa: N801  # a block
    """Cancels a scope when the client disconnects."""

    def __init__(self, request: Request, scope: anyio.CancelScope):
        self._request, self._scope = request, scope

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._watch())

    async def __aexit__(self, *raised: object) -> None:
        self._task.cancel()

    async def _watch(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        record_of(self._request).log["aborted"] = True
        self._scope.cancel()
