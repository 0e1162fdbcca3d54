"""Embeddings: hidden states behind the last norm, of steps without a choice."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from predict.engine.block_manager import num_blocks_for
from predict.engine.engine import Engine
from predict.engine.request_state import Request
from predict.engine.scheduled import ScheduledSpan
from predict.errors import EngineError, UserError, quoted
from predict.nn.decoder import FINAL
from predict.request import SamplingParams

Pooling = Literal["last", "mean"]
Vectors = npt.NDArray[np.float32]


def check_pooling(pooling: str) -> None:
    """Raises UserError for an unknown pooling."""
    if pooling not in get_args(Pooling):
        raise UserError(
            f"pooling is {quoted(pooling)} (allowed: last, the last token's hidden state, or mean, "
            "that of all tokens)"
        )


def embed(
    engine: Engine, prompts: Sequence[Sequence[int]], pooling: Pooling, normalize: bool
) -> Vectors:
    """float32 vectors [prompts, H], in blocks of the cache that are free again afterwards.

    normalize: to length 1. Raises UserError, before anything runs, where a prompt cannot run.
    """
    if not prompts:
        raise UserError("prompts is empty (allowed: one prompt and more)")
    requests = [Request(number, list(ids), SamplingParams()) for number, ids in enumerate(prompts)]
    for request in requests:
        _check(engine, request)
    manager, waiting = engine.scheduler.block_manager, deque(requests)
    vectors: dict[int, Vectors] = {}
    running: list[Request] = []
    try:
        while waiting or running:
            while waiting and len(running) < engine.scheduler.config.max_num_seqs:
                num_blocks = num_blocks_for(waiting[0].num_tokens, manager.block_size)
                if num_blocks > manager.num_free_blocks:
                    break
                waiting[0].block_ids = manager.allocate(num_blocks)
                running.append(waiting.popleft())
            if not running:
                raise UserError(
                    f"a prompt of {waiting[0].num_tokens} tokens needs {num_blocks} blocks of the "
                    f"cache, and {manager.num_free_blocks} are free; wait until requests have "
                    "ended, or raise num_cache_blocks"
                )
            for request in _step(engine, running, pooling, vectors):
                manager.free(request.block_ids)
                running.remove(request)
    finally:
        for request in running:
            manager.free(request.block_ids)
    found = np.stack([vectors[request.request_id] for request in requests])
    wrong = np.flatnonzero(~np.isfinite(found).all(axis=1))
    if len(wrong):
        raise EngineError(
            f"prompt {wrong[0]} has hidden states that are no finite numbers; the weights or the "
            "dtype do not suit the model"
        )
    if normalize:
        found /= np.maximum(np.linalg.norm(found, axis=1, keepdims=True), np.float32(1e-12))
    return found


def _check(engine: Engine, request: Request) -> None:
    config, placing = engine.scheduler.config, engine.scheduler.config.placing
    most, why = min(config.max_length, config.num_blocks * config.block_size), "the cache's length"
    if placing is not None:
        request.places = placing.of(request.prompt_token_ids)
        if request.places.runs_whole and config.max_num_batched_tokens < most:
            most, why = config.max_num_batched_tokens, "max_num_batched_tokens: it runs in one step"
    if request.num_tokens > most:
        raise UserError(
            f"prompt {request.request_id} has {request.num_tokens} tokens (allowed: up to {most}, "
            f"{why}); shorten it"
        )


def _step(
    engine: Engine, running: Sequence[Request], pooling: Pooling, vectors: dict[int, Vectors]
) -> list[Request]:
    """Runs tokens of the requests, adds to `vectors`, and returns requests that are done."""
    left, spans = engine.scheduler.config.max_num_batched_tokens, list[ScheduledSpan]()
    for request in running:
        missing = request.num_tokens - request.num_computed_tokens
        length = min(left, missing)
        if length and not (request.places and request.places.runs_whole and length < missing):
            start = request.num_computed_tokens
            spans.append(ScheduledSpan(request, length, start, request.block_ids, False))
            left -= length
    outputs = engine.runner.run(engine.inputs(spans), taps=(FINAL,))
    hidden = outputs.hidden[FINAL].astype("float32").cpu().numpy()
    done, begin = [], 0
    for request, length, *_ in spans:
        rows = hidden[begin : begin + length]
        begin += length
        request.num_computed_tokens += length
        if pooling == "last":
            vectors[request.request_id] = rows[-1].copy()
        else:
            part = rows.sum(axis=0) / np.float32(request.num_tokens)
            vectors[request.request_id] = vectors.get(request.request_id, 0) + part
        if request.num_computed_tokens == request.num_tokens:
            done.append(request)
    return done
