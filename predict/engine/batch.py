"""From a scheduled batch to the network's inputs: pure NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from predict.adapters.pool import AdapterPool
from predict.engine.scheduled import ScheduledSpan
from predict.nn.inputs import ADAPTED, RowKind, StepInputs, max_lens_of
from predict.nn.places import Placing

FEW_TOKENS = 32  # for which lists are made faster than arrays


class Span(Protocol):
    """Consecutive tokens of a sequence in one step, at least one; see ScheduledSpan.

    start: place of the first token in the sequence. num_prefix_tokens: of a tuned prefix, in the
    cache before the sequence's own. block_ids: up to the span's end. num_logits: trailing tokens
    with logit rows. num_prompt_logits: leading tokens with logit rows.
    """

    @property
    def num_tokens(self) -> int: ...

    @property
    def start(self) -> int: ...

    @property
    def num_prefix_tokens(self) -> int: ...

    @property
    def block_ids(self) -> Sequence[int]: ...

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def num_logits(self) -> int: ...

    @property
    def num_prompt_logits(self) -> int: ...


def placed(inputs: StepInputs, spans: Sequence[ScheduledSpan], placing: Placing) -> StepInputs:
    """The inputs with the fields that depend on the places of the requests' tokens."""
    places = [span.request.places or placing.of(span.request.prompt_token_ids) for span in spans]
    return placing.placed(inputs, places)


def adapted(inputs: StepInputs, spans: Sequence[ScheduledSpan], pool: AdapterPool) -> StepInputs:
    """The inputs with their requests' adapters and the pages of these.

    Requests with the same adapter have the same row of `adapter_pages`: the GPU multiplies rows of
    one adapter together.
    """
    adapters = [span.request.adapter for span in spans]
    numbers = {adapter: row for row, adapter in enumerate(dict.fromkeys(filter(None, adapters)))}
    pages = np.full((len(spans), len(ADAPTED), pool.max_pages), -1, np.int32)
    for adapter, row in numbers.items():
        pages[row] = pool.table(adapter)
    rows = [-1 if adapter is None else numbers[adapter] for adapter in adapters]
    ids = np.repeat(np.array(rows, np.int32), np.diff(inputs.cu_seqlens_q))
    return inputs._replace(adapter_ids=ids, adapter_pages=pages)


def stated(inputs: StepInputs, spans: Sequence[ScheduledSpan]) -> StepInputs:
    """The inputs with the slots of their requests' states."""
    src, dst = (np.array(slots, np.int32) for slots in zip(*(s.state for s in spans), strict=True))
    return inputs._replace(state_src=src, state_dst=dst)


def span_inputs(spans: Sequence[Span], block_size: int) -> StepInputs:
    """A step's inputs as NumPy int32 arrays (see `predict.nn.inputs.FIELDS`).

    Logit rows in span order: the last num_logits tokens of each span. Behind them, in span order
    too, the rows for logprobs of prompts.
    """
    if len(spans) <= FEW_TOKENS and sum(span.num_tokens for span in spans) <= FEW_TOKENS:
        return _inputs_of_few(spans, block_size)
    if len(spans) == 1 and not spans[0].num_prompt_logits:
        return _inputs_of_one(spans[0], block_size)
    lengths = np.fromiter((s.num_tokens for s in spans), np.int32, len(spans))
    starts = np.fromiter((s.start for s in spans), np.int32, len(spans))
    before = np.fromiter((s.num_prefix_tokens for s in spans), np.int32, len(spans))
    context_lens = before + starts + lengths
    cu_seqlens = np.zeros(len(spans) + 1, np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])

    tables = np.full((len(spans), int(-(-context_lens.max() // block_size))), -1, np.int32)
    token_ids: list[int] = []
    for row, span in enumerate(spans):
        needed = -(-int(context_lens[row]) // block_size)
        tables[row, :needed] = span.block_ids[:needed]
        token_ids += span.token_ids

    num_tokens = int(cu_seqlens[-1])
    row_of = np.repeat(np.arange(len(spans)), lengths)
    positions = np.arange(num_tokens, dtype=np.int32) + (starts - cu_seqlens[:-1])[row_of]
    blocks, offsets = np.divmod(positions + before[row_of], block_size)
    num_logits = np.fromiter((s.num_logits for s in spans), np.int32, len(spans))
    # Token t of a span has a logit row when fewer than num_logits tokens follow it.
    following = cu_seqlens[1:][row_of] - 1 - np.arange(num_tokens, dtype=np.int32)
    logit_indices = np.flatnonzero(following < num_logits[row_of])
    wants_prompts = any(span.num_prompt_logits for span in spans)
    if wants_prompts:
        rows = [
            np.arange(start, start + span.num_prompt_logits)
            for start, span in zip(cu_seqlens, spans, strict=False)
        ]
        logit_indices = np.concatenate([logit_indices, *rows])
    one_each = bool((num_logits == 1).all())
    kind = _row_kind(len(logit_indices), num_tokens, one_each, wants_prompts)
    if kind == RowKind.NONE:
        logit_indices = cu_seqlens[1:] - np.intp(1)
    return StepInputs(
        token_ids=np.array(token_ids, np.int32),
        positions=positions,
        slot_mapping=tables[row_of, blocks] * block_size + offsets,
        cu_seqlens_q=cu_seqlens,
        context_lens=context_lens,
        block_tables=tables,
        logit_indices=logit_indices,
        max_lens=max_lens_of(lengths.tolist(), context_lens.tolist(), kind),
    )


def _row_kind(num_rows: int, num_tokens: int, one_each: bool, of_prompts: bool) -> RowKind:
    """one_each: every span has one row, its last token's. of_prompts: there are rows behind."""
    if of_prompts:
        return RowKind.LISTED
    if num_rows in (0, num_tokens):
        return RowKind.ALL if num_rows else RowKind.NONE
    return RowKind.LAST if one_each else RowKind.LISTED


def _inputs_of_one(span: Span, block_size: int) -> StepInputs:
    """`span_inputs` of one long span (a prompt that runs alone), faster, since a GPU waits."""
    length = span.num_tokens
    start = span.num_prefix_tokens + span.start  # in the cache
    end = start + length
    blocks = np.array(span.block_ids[: -(-end // block_size)], np.int32)
    slots = blocks[start // block_size :, None] * block_size + np.arange(block_size, dtype=np.int32)
    skipped = start % block_size
    kind = _row_kind(span.num_logits, length, span.num_logits == 1, of_prompts=False)
    return StepInputs(
        token_ids=np.array(span.token_ids, np.int32),
        positions=np.arange(span.start, span.start + length, dtype=np.int32),
        slot_mapping=slots.reshape(-1)[skipped : skipped + length],
        cu_seqlens_q=np.array((0, length), np.int32),
        context_lens=np.array((end,), np.int32),
        block_tables=blocks[None],
        logit_indices=np.arange(length - max(1, span.num_logits), length),
        max_lens=max_lens_of((length,), (end,), kind),
    )


def _inputs_of_few(spans: Sequence[Span], block_size: int) -> StepInputs:
    """`span_inputs` of few tokens, in a tenth of the time, since a GPU waits for it."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    borders, context_lens, one_each = [0], [], True
    logit_rows: list[int] = []
    prompt_rows: list[int] = []
    tables: list[Sequence[int]] = []
    lengths: list[int] = []
    for span in spans:
        first, length, start, blocks = borders[-1], span.num_tokens, span.start, span.block_ids
        begin = span.num_prefix_tokens + start  # in the cache
        end = begin + length
        token_ids += span.token_ids
        positions += range(start, start + length)
        for place in range(begin, end):
            slots.append(blocks[place // block_size] * block_size + place % block_size)
        borders.append(first + length)
        context_lens.append(end)
        num_logits = span.num_logits
        one_each &= num_logits == 1
        logit_rows += range(first + length - num_logits, first + length)
        prompt_rows += range(first, first + span.num_prompt_logits)
        tables.append(blocks[: -(-end // block_size)])
        lengths.append(length)
    width = max(map(len, tables))
    if len(tables) > 1:
        tables = [[*table, *[-1] * (width - len(table))] for table in tables]
    kind = _row_kind(len(logit_rows), len(token_ids), one_each, bool(prompt_rows))
    logit_rows = (
        [end - 1 for end in borders[1:]] if kind == RowKind.NONE else logit_rows + prompt_rows
    )
    return StepInputs(
        *(np.array(token_ids, np.int32), np.array(positions, np.int32), np.array(slots, np.int32)),
        *(np.array(borders, np.int32), np.array(context_lens, np.int32)),
        np.array(tables, np.int32),
        np.array(logit_rows, np.int32),
        max_lens_of(lengths, context_lens, kind),
    )
