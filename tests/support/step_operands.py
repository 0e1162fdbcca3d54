"""Operands of the operators from logits to tokens and from step to step, as arrays.

Each case is for the compiled operator and for its plain twin alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from predict.engine.choices import GREEDY, Choice, Row
from predict.engine.logits_processors import Adjustment, Rule
from predict.engine.request_state import Request
from predict.engine.runner.gpu_chooser import write_choices
from predict.engine.token_history import NO_SLOT, encoded
from predict.engine.window import loose_drafts
from predict.nn.inputs import StepInputs
from predict.ops.columns import CHOICES, PENALTIES
from predict.request import SamplingParams

Array = npt.NDArray[Any]


class Case(NamedTuple):
    """An operator's operands, and how it is called with tensors of them.

    floats: the index of those values of an int32 result that are floats by their bits.
    """

    arrays: tuple[Array, ...]
    call: Callable[[ModuleType, Sequence[Any]], Any]
    floats: Any = np.s_[:0]

    def outcome(self, ops: ModuleType, place: Any) -> tuple[list[Array], Array, Array]:
        """What the operators of `ops` make of it at a place.

        Returns the operands after the call, the result ([0] where there is none) with zeros for
        floats, and its floats.
        """
        import paddle

        tensors = [paddle.to_tensor(array, place=place) for array in self.arrays]
        result = self.call(ops, tensors)
        found = np.zeros(0, np.int32) if result is None else np.array(result.numpy())
        floats = found[self.floats].copy().view(np.float32)
        found[self.floats] = 0
        return [np.array(tensor.numpy()) for tensor in tensors], found, floats


def random_logits(generator: np.random.Generator, vocab: int) -> npt.NDArray[np.float32]:
    """Rows [9, V] of several kinds: ties, bans, nothing but bans, a NaN."""
    logits = generator.standard_normal((9, vocab)).astype(np.float32) * 3
    logits[1] = np.round(logits[1]) + 0.0  # no -0.0, which a GPU puts behind 0.0
    logits[3, ::2] = -np.inf
    logits[4] = -np.inf
    logits[5, vocab // 2] = np.nan
    return logits


def log_softmax_case(vocab: int) -> Case:
    logits = random_logits(np.random.default_rng(vocab), vocab)
    rows = np.array([8, 1, 3, 5, 99, -1], np.int32)
    return Case((logits, rows), lambda ops, t: ops.log_softmax(*t))


def likeliest_case(vocab: int, count: int) -> Case:
    logits = random_logits(np.random.default_rng(vocab), vocab)
    rows = np.array([8, 1, 3, 4, 5, 99, -1], np.int32)
    return Case((logits, rows), lambda ops, t: ops.likeliest(*t, count), np.s_[1])


def mask_logits_case(num_rows: int, vocab: int) -> Case:
    random = np.random.default_rng(num_rows)
    logits = random.standard_normal((num_rows, vocab), dtype=np.float32)
    bits = random.integers(0, 2, (num_rows, 32 * -(-vocab // 32)), dtype=np.uint8)
    masks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)

    def call(ops: ModuleType, t: Sequence[Any]) -> None:
        ops.mask_logits(*t)  # in place

    return Case((logits, masks), call)


def resolve_tokens_case() -> Case:
    ids = np.array([5, -1, 0, -3, -9, -2, -(2**31)], np.int32)
    return Case((ids, np.array([70, 71, 72], np.int32)), lambda ops, t: ops.resolve_tokens(*t))


BLOCK_SIZE = 16


def follow_drafts_case(num_seqs: int) -> Case:
    """Operands: token_ids, positions, slots, borders, context_lens, tables, choices, plan, tokens.

    Of requests with 1 or 2 tokens; one in two has many drafts that are right.
    """
    random = np.random.default_rng(num_seqs)
    width = 12
    tokens = random.integers(0, 3, 4096).astype(np.int32)
    tokens[random.random(4096) < 0.1] = -1  # could not be drawn
    lengths = random.integers(1, 3, num_seqs)
    borders = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tables = random.permutation(num_seqs * width).reshape(num_seqs, width).astype(np.int32)
    ends = random.integers(20, BLOCK_SIZE * width, num_seqs).astype(np.int32)
    positions = np.concatenate(
        [np.arange(end - n, end) for end, n in zip(ends, lengths, strict=True)]
    ).astype(np.int32)
    choices = random.integers(0, 100, CHOICES.shape(num_seqs)).astype(np.int32)
    CHOICES.views(choices)["offset"][:num_seqs] = random.integers(1 << 33, 1 << 34, num_seqs)
    plan = np.zeros((num_seqs, 18), np.int32)
    plan[:, 0] = random.integers(-1, 16, num_seqs)
    plan[:, 1] = random.integers(0, 2000, num_seqs)
    plan[:, 2] = np.where(lengths == 2, random.choice([0, 2], num_seqs), 0)
    plan[:, 3:] = random.integers(2048, 4096, (num_seqs, 15))
    for row in plan[::2]:
        count = int(random.integers(0, 16))
        tokens[row[3 : 3 + count]] = tokens[row[1] : row[1] + count]
    ids = np.full(borders[-1], 9, np.int32)
    slots = np.full(borders[-1], -5, np.int32)
    arrays = (ids, positions, slots, borders, ends, tables, choices, plan, tokens)

    def call(ops: ModuleType, t: Sequence[Any]) -> None:
        inputs = StepInputs(*[*t[:6], t[0], t[0]])
        ops.follow_drafts(inputs, *t[6:], BLOCK_SIZE)

    return Case(arrays, call)


class Adjusted(NamedTuple):
    """A row of logits and what changes it; None for a row without a slot."""

    adjustment: Adjustment | None
    tokens: list[int]  # of the request, up to the row
    num_prompt: int


def adjust_logits_case(vocab: int, first: int = 0) -> tuple[Case, list[Adjusted]]:
    """Rows of requests with penalties, rules and n-grams; some have drafts, so several rows.

    first: the token of the first column.
    """
    random = np.random.default_rng(vocab)
    num_slots, max_length, width = 9, 90, 64
    adjustments = [
        Adjustment(repetition=1.3),
        Adjustment(presence=0.7, frequency=0.2),
        Adjustment(no_repeat_ngram_size=2),
        Adjustment(no_repeat_ngram_size=1),
        Adjustment(rules=(Rule(3, 1.5), Rule(4, -np.inf), Rule(vocab + 5, 2.0))),
        Adjustment(rules=(Rule(2, -np.inf, (1,)), Rule(0, -np.inf, (2, 1)), Rule(1, 0.5, (3,)))),
        Adjustment(rules=(Rule(2, -np.inf, until=9), Rule(1, -2.0, until=5))),
        Adjustment(0.8, -0.4, 0.3, 3, (Rule(0, 2.0),)),
    ]
    history = np.full((num_slots, max_length), 77, np.int32)
    rules = np.zeros((num_slots, width), np.int32)
    ids: list[int] = []
    indices: list[int] = []
    columns: list[tuple[float, ...]] = []
    rows: list[Adjusted] = []
    slots = random.permutation(num_slots)
    for number, adjustment in enumerate([*adjustments, None]):
        num_known, num_drafts = int(random.integers(8, 70)), int(random.choice([0, 0, 3]))
        # Few different tokens: they repeat. Some are not in the vocabulary.
        tokens = random.integers(0, 5, num_known + num_drafts).tolist()
        num_prompt = int(random.integers(1, num_known))
        slot = int(slots[number])
        if adjustment is not None:
            words = encoded(adjustment)
            rules[slot, : len(words)] = words
            history[slot, : num_known - 1] = tokens[: num_known - 1]
        ids += [6] * int(random.integers(0, 3))  # of a prompt's chunk, say
        for draft in range(num_drafts + 1):
            ids.append(tokens[num_known - 1 + draft])
            indices.append(len(ids) - 1)
            known = tokens[: num_known + draft]
            rows.append(Adjusted(adjustment, known, num_prompt))
            of_row = adjustment or Adjustment()
            amounts = of_row.repetition, of_row.presence, of_row.frequency
            own_slot = NO_SLOT if adjustment is None else slot
            counts = len(known), num_prompt, 1 + draft, of_row.no_repeat_ngram_size
            columns.append((*amounts, own_slot, *counts))
    logits = random.standard_normal((len(rows), vocab)).astype(np.float32)
    penalties = np.zeros(PENALTIES.shape(len(rows) + 3), np.int32)
    views = PENALTIES.views(penalties).values()
    for view, values in zip(views, zip(*columns, strict=True), strict=True):
        view[: len(rows)] = values
    arrays = (
        logits,
        penalties,
        np.array(ids, np.int32),
        np.array(indices, np.int32),
        history,
        rules,
    )
    return Case(arrays, lambda ops, t: ops.adjust_logits(*t, first)), rows


def logprobs_case(vocab: int, num_top: int) -> Case:
    """Rows without a NaN, whose values are anything; more tokens than rows."""
    random = np.random.default_rng(vocab)
    logits = np.delete(random_logits(random, vocab), [4, 5], axis=0)
    logits[6] = 1.5
    # More than a GPU's block collects: quads of a few of its threads have all large logits.
    logits[5, np.arange(vocab) // 4 % 1024 < 9] += 40
    tokens = random.integers(0, vocab, 9).astype(np.int32)
    tokens[3] = 1 % vocab  # one that row 3 does not ban

    floats = np.s_[:, [0, *range(2 + num_top, 2 + 2 * num_top)]]

    def call(ops: ModuleType, t: Sequence[Any]) -> Any:
        return ops.logprobs(*t, num_top)

    return Case((logits, tokens), call, floats)


def sample_step_case(vocab: int, num_rows: int = 40) -> tuple[Case, list[Choice]]:
    """Rows of all kinds of requests; two cannot be drawn from."""
    random = np.random.default_rng(vocab)
    logits = random.standard_normal((num_rows, vocab)).astype(np.float32) * 4
    logits[5], logits[6, vocab // 2] = -np.inf, np.nan
    choices = [
        GREEDY
        if row % 4 == 0
        else Choice(
            float(random.choice([0.5, 1.0, 1.5])),
            int(random.choice([0, 3, 40])),
            float(random.choice([0.8, 1.0])),
            int(random.integers(1 << 40)),
            int(random.integers(1 << 34)),
            float(random.choice([0.0, 0.1])),
            float(random.choice([1.0, 0.7])),
        )
        for row in range(num_rows)
    ]
    columns = np.full(CHOICES.shape(num_rows), 3, np.int32)
    write_choices(CHOICES.views(columns), choices)
    last = np.full(num_rows + 3, 77, np.int32)
    return Case((logits, columns, last), lambda ops, t: ops.sample_step(*t)), choices


class Spans(NamedTuple):
    """Rows of logits of some requests, with the network's input and what the sampler drew."""

    logits: npt.NDArray[np.float32]
    rows: list[Row]
    choices: list[Choice]
    token_ids: npt.NDArray[np.int32]
    logit_indices: npt.NDArray[np.int32]
    drawn: npt.NDArray[np.int32]

    def case(self, window: int, max_candidate_len: int) -> Case:
        """For `verify_window`; two tokens behind the rows' are nobody's."""
        columns = np.zeros(CHOICES.shape(len(self.rows)), np.int32)
        num_drafts = [*map(len, loose_drafts(self.rows, self.choices))]
        write_choices(CHOICES.views(columns), self.choices, num_drafts)
        last_tokens = np.concatenate([self.drawn, [77, 78]]).astype(np.int32)
        arrays = (self.logits, columns, self.token_ids, self.logit_indices, last_tokens)

        def call(ops: ModuleType, t: Sequence[Any]) -> None:
            ops.verify_window(*t, window, max_candidate_len)

        return Case(arrays, call)


def random_spans(generator: np.random.Generator, vocab: int, num_spans: int) -> Spans:
    """Likely drafts and unlikely ones, of requests of all kinds; some have only a last row."""
    rows: list[Row] = []
    choices: list[Choice] = []
    tokens: list[int] = []
    logits, indices, drawn = [], [], []
    for number in range(num_spans):
        num_drafts = int(generator.choice([0, 1, 3, 8, 15], p=[0.1, 0.2, 0.3, 0.3, 0.1]))
        own = generator.normal(0, 2, (num_drafts + 1, vocab)).astype(np.float32)
        if number % 3 == 0:
            own = np.round(own)  # ties
        if number % 4 == 1:
            own[:, :: generator.integers(2, 5)] = -np.inf
        ordered = np.argsort(-own, axis=1, kind="stable")
        ranks = np.minimum(generator.choice([0, 0, 1, 1, 2, 4, 9, 30], num_drafts), vocab - 1)
        drafts = ordered[np.arange(num_drafts), ranks].astype(np.int32)
        if number % 7 == 2 and num_drafts:
            drafts[-1] = -1  # a draft model could not draw one
        chosen = ordered[np.arange(num_drafts + 1), generator.choice([0, 1, 2], num_drafts + 1)]
        chosen = np.where(generator.random(num_drafts + 1) < 0.02, -1, chosen)
        choice = Choice(
            float(generator.choice([0.25, 0.5, 1.0, 2.0])),
            int(generator.choice([0, 0, 2, 3, 5, 50, 3 * vocab])),
            float(generator.choice([0.3, 0.7, 0.95, 1.0])),
            *(0, 0, float(generator.choice([0.0, 0.0, 0.05, 0.4]))),
        )
        if number % 10 == 4:
            choice = GREEDY
        elif number % 10 == 7:
            choice = choice._replace(typical_p=0.5)
        tokens += [0] * int(generator.integers(0, 3))  # of a prompt's chunk, say
        start = len(tokens)
        tokens += [9, *drafts.tolist()]
        request = Request(number, [1], SamplingParams(temperature=0.5))
        rows += [Row(request, drafts[:i].tolist()) for i in range(num_drafts + 1)]
        choices += [choice] * (num_drafts + 1)
        logits.append(own)
        indices.append(np.arange(start, start + num_drafts + 1))
        drawn.append(chosen)
    return Spans(
        np.concatenate(logits),
        rows,
        choices,
        np.array(tokens, np.int32),
        np.concatenate(indices).astype(np.int32),
        np.concatenate(drawn).astype(np.int32),
    )
