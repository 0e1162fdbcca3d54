"""POST /v1/embeddings, /v1/rerank, /rerank and /v1/score: vectors of texts, scores of pairs."""

from __future__ import annotations

import base64
import secrets
import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from predict.engine.retrieval import check_dimensions, check_top, ranked, shortened
from predict.errors import UserError
from predict.server.context import Context
from predict.server.errors import invalid
from predict.server.openapi import errors, takes
from predict.server.protocol import parsed
from predict.server.routes._common import body_of, json_response
from predict.server.vectors import (
    EmbeddingsBody,
    RerankBody,
    ScoreBody,
    as_text,
    as_texts,
    cut_of,
    in_time,
    input_texts,
    made,
    pairs_of,
    rules_of,
)


def router(context: Context) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.post("/v1/embeddings", openapi_extra=takes(EmbeddingsBody), responses=errors())
    async def embeddings(request: Request) -> Response:
        """The vectors of texts."""
        async with body_of(context, request) as value:
            return await _embedded(context, request, parsed(EmbeddingsBody, value))

    @routes.post("/rerank", openapi_extra=takes(RerankBody), responses=errors())
    @routes.post("/v1/rerank", openapi_extra=takes(RerankBody), responses=errors())
    async def rerank(request: Request) -> Response:
        """Documents in the order of how well they answer a query."""
        async with body_of(context, request) as value:
            return await _reranked(context, request, parsed(RerankBody, value))

    @routes.post("/v1/score", openapi_extra=takes(ScoreBody), responses=errors())
    async def score(request: Request) -> Response:
        """The scores of pairs of texts."""
        async with body_of(context, request) as value:
            return await _scored(context, request, parsed(ScoreBody, value))

    return routes


def _usage(texts: Any) -> dict[str, int]:
    count = sum(len(text.token_ids) for text in texts)
    return {"prompt_tokens": count, "total_tokens": count}


def _identity(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(16)}"


async def _embedded(context: Context, request: Request, body: EmbeddingsBody) -> Response:
    model, rules = context.models.find(body.model), rules_of(context)
    try:
        rules.check_vectors()
    except UserError as error:
        raise invalid("model", str(error)) from None
    try:
        check_dimensions(body.dimensions, rules.size)
    except UserError as error:
        raise invalid("dimensions", str(error)) from None
    texts = await in_time(context, request, input_texts(context, rules, body))
    vectors = await made(context, request, texts, False, model.adapter)
    vectors = shortened(vectors, body.dimensions, rules.normalize)
    if body.encoding_format == "base64":
        rows: Any = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]
    else:
        rows = [row.tolist() for row in vectors]
    data = [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)]
    answer = {"object": "list", "data": data, "model": model.name, "usage": _usage(texts)}
    return json_response(answer)


async def _reranked(context: Context, request: Request, body: RerankBody) -> Response:
    model, rules = context.models.find(body.model), rules_of(context)
    try:
        check_top(body.top_n)
    except UserError as error:
        raise invalid("top_n", str(error)) from None
    query, documents = as_text(body.query, "query"), as_texts(context, body.documents, "documents")
    cut, other = (
        cut_of(rules, getattr(body, name), name)
        for name in ("truncate_prompt_tokens", "max_tokens_per_doc")
    )
    if cut is not None and other is not None:
        raise invalid(
            "max_tokens_per_doc",
            "max_tokens_per_doc says what truncate_prompt_tokens says; leave one of the two out",
        )
    cut = other if cut is None else cut
    pairs = pairs_of(
        context,
        [(query, document) for document in documents],
        cut,
        body.instruction,
        lambda index: f"documents[{index}]",
    )
    split, texts = await in_time(context, request, pairs)
    found = await made(context, request, texts, True, model.adapter)
    results = []
    for each in ranked(split.scores(found), body.top_n):
        entry: dict[str, Any] = {"index": each.index, "relevance_score": each.score}
        if body.return_documents is not False:
            entry["document"] = {"text": documents[each.index]}
        results.append(entry)
    usage = _usage(texts)
    answer = {"id": _identity("rerank"), "model": model.name, "results": results, "usage": usage}
    return json_response(answer)


async def _scored(context: Context, request: Request, body: ScoreBody) -> Response:
    model, rules = context.models.find(body.model), rules_of(context)
    first, second = (
        as_texts(context, value if isinstance(value, list) else [value], name)
        for name, value in (("text_1", body.text_1), ("text_2", body.text_2))
    )
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise invalid(
            "text_2",
            f"text_1 has {len(first)} texts, and text_2 {len(second)} (allowed: one text_1 for "
            "all, or as many)",
        )
    pairs = pairs_of(
        context,
        list(zip(first, second, strict=True)),
        cut_of(rules, body.truncate_prompt_tokens),
        body.instruction,
        lambda index: f"text_2[{index}]",
    )
    split, texts = await in_time(context, request, pairs)
    scores = split.scores(await made(context, request, texts, True, model.adapter))
    data = [{"index": i, "object": "score", "score": s} for i, s in enumerate(scores.tolist())]
    answer = {
        "id": _identity("score"),
        "object": "list",
        "created": int(time.time()),
        "model": model.name,
        "data": data,
        "usage": _usage(texts),
    }
    return json_response(answer)
