"""What goes between a front and its ranks, as arrays: steps, choices, tokens, news.

Imports no Paddle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from predict.engine.beams import Candidates
from predict.engine.choices import GREEDY, Choice
from predict.engine.logits_processors import Adjustment, Rule
from predict.engine.logprobs import LogprobTable
from predict.engine.masks import num_words
from predict.engine.step import Adjusted, Choices, KnownTokens, Logprobs, PromptTargets
from predict.engine.window import WindowDrafts
from predict.nn.inputs import StepInputs
from predict.ranks.shared import Arrays

Ints = npt.NDArray[np.int64]


class Down(IntEnum):
    """Messages to the ranks.

    The first array of a step, and of copies, says which network's it is, 0 the model's.
    """

    LAUNCH = 1  # inputs, choices; tokens and logprobs answer, hidden states stay
    RUN = 2  # inputs, taps; logits and hidden states answer
    COPY = 3  # cache blocks
    PAGES = 4  # an adapter's values; an empty answer
    PREFIX = 5  # a prefix's values, and their slots; an empty answer
    FEED = 6  # taps, rows of states that a drafter's next step reads; an empty answer
    PICTURES = 8  # a stage of a pass over pictures; whether it was the last one answers
    START = 7  # threads of each rank, which may load; Up.READY answers


class Up(IntEnum):
    """Messages to the front."""

    NOTE = 1  # level, text: a record of the log
    READY = 2  # what predict.ranks.front.Ready has
    FAILED = 3  # text, whether it is a UserError: of what was asked, or of loading
    ANSWER = 4


def text_array(text: str) -> npt.NDArray[np.uint8]:
    """A text as bytes."""
    return np.frombuffer(text.encode(), np.uint8)


def array_text(array: Any) -> str:
    """The text of `text_array`."""
    return bytes(array).decode(errors="replace")


def array_names(array: Any) -> tuple[str, ...]:
    """The names in a text of one on each line."""
    return tuple(filter(None, array_text(array).split("\n")))


def _ragged(lists: Iterable[Sequence[int]]) -> tuple[Ints, Ints]:
    """Lengths of lists, and what is in them."""
    lists = list(lists)
    flat = [each for one in lists for each in one]
    return np.array([len(one) for one in lists], np.int64), np.array(flat, np.int64)


def _lists(lengths: Any, flat: Any) -> list[list[int]]:
    values = flat.tolist()
    return [values[i:j] for i, j in pairwise([0, *accumulate(lengths.tolist())])]


# Of Choice: what is a fraction, and what is a number.
_FRACTIONS = ("temperature", "top_p", "min_p", "typical_p")
_NUMBERS = ("top_k", "seed", "offset")


def _column(rows: Sequence[Choice], names: Sequence[str], dtype: str) -> npt.NDArray[Any]:
    values = [[getattr(row, name) for name in names] for row in rows]
    return np.array(values, dtype).reshape(len(rows), len(names))


def choices_arrays(choices: Choices, vocab_size: int, sent: Mapping[int, int]) -> Arrays:
    """Choices as arrays; what guides allow is asked here.

    vocab_size: of the logits. sent: by sequence, tokens that ranks have (see `sent_behind`).
    """
    prompt, window = choices.prompt, choices.window
    top = -1 if choices.num_top is None else choices.num_top
    masks = None
    if choices.fill_masks is not None:
        masks = np.empty((len(choices.rows), num_words(vocab_size)), np.int32)
        choices.fill_masks(masks)
    adjusted = list(enumerate(choices.adjusted or ()))
    return [
        np.array([top, prompt.num_top, choices.adjusted is not None], np.int64),
        _column(choices.rows, _FRACTIONS, "f8"),
        _column(choices.rows, _NUMBERS, "i8"),
        np.array(list(choices.candidates.items()), np.int64).reshape(-1, 2),
        np.array(prompt.token_ids, np.int64),
        masks,
        text_array("\n".join(choices.taps)),
        *(_window_arrays(window) if window is not None else [None] * 3),
        *_adjusted_arrays([(row, each) for row, each in adjusted if each is not None], sent),
    ]


NUM_CHOICES = 18  # arrays of `choices_arrays`


def sent_behind(choices: Choices, sent: Mapping[int, int]) -> Mapping[int, int]:
    """By sequence, the tokens that ranks have once they took these choices.

    Of the last step alone that changes logits: what is not in it is sent whole when it comes again.
    """
    if choices.adjusted is None:
        return sent
    return {each.sequence_id: each.num_known for each in choices.adjusted if each is not None}


def arrays_choices(arrays: Arrays, known: dict[int, list[int]]) -> Choices:
    """The Choices of `choices_arrays`. known: tokens of sequences, kept from step to step here."""
    of = cast("list[Any]", arrays)
    top, prompt_top, adjusts = of[0].tolist()
    rows = []
    for fractions, numbers in zip(of[1].tolist(), of[2].tolist(), strict=True):
        named = dict(zip((*_FRACTIONS, *_NUMBERS), (*fractions, *numbers), strict=True))
        choice = Choice(**named)
        rows.append(GREEDY if choice == GREEDY else choice)
    masks = of[5]

    def fill_masks(into: npt.NDArray[np.int32]) -> None:
        into[: len(masks)] = masks

    return Choices(
        rows,
        _arrays_adjusted(of[10:], len(rows), known) if adjusts else None,
        dict(of[3].tolist()),
        None if top < 0 else top,
        PromptTargets(of[4].tolist(), prompt_top),
        _arrays_window(*of[7:10]),
        None if masks is None else fill_masks,
        taps=array_names(of[6]),
    )


def _window_arrays(window: WindowDrafts) -> Arrays:
    of = np.array([window.window, window.max_candidate_len], np.int64)
    return [of, *_ragged(window.drafts)]


def _arrays_window(of: Any, lengths: Any, flat: Any) -> WindowDrafts | None:
    if of is None:
        return None
    window, max_candidate_len = of.tolist()
    return WindowDrafts(window, max_candidate_len, _lists(lengths, flat))


def _adjusted_arrays(rows: Sequence[tuple[int, Adjusted]], sent: Mapping[int, int]) -> Arrays:
    """Eight arrays: of each row its numbers, penalties, new tokens, drafts, and the rules of all.

    All tokens of each row in each step would be quadratic in an answer's length.
    """
    table, penalties, tokens, rules = [], [], list[list[int]](), list[Rule]()
    for row, each in rows:
        of = each.adjustment
        num_sent = min(sent.get(each.sequence_id, 0), each.num_known)
        numbers = (row, each.sequence_id, num_sent, each.num_known, each.num_prompt_tokens)
        table.append([*numbers, of.no_repeat_ngram_size, len(of.rules)])
        penalties.append([of.repetition, of.presence, of.frequency])
        tokens.append([*each.token_ids[num_sent:], *each.drafts])
        rules += of.rules
    prefixes = _ragged([rule.prefix for rule in rules])
    return [
        np.array(table, np.int64).reshape(-1, 7),
        np.array(penalties, np.float64).reshape(-1, 3),
        *_ragged(tokens),
        np.array([[rule.token, rule.until] for rule in rules], np.int64).reshape(-1, 2),
        np.array([rule.amount for rule in rules], np.float64),
        *prefixes,
    ]


def _arrays_adjusted(
    of: Sequence[Any], num_rows: int, known: dict[int, list[int]]
) -> list[Adjusted | None]:
    table, penalties, lengths, tokens, pairs, amounts, *prefixes = of
    rules = [
        Rule(token, amount, tuple(prefix), until)
        for (token, until), amount, prefix in zip(
            pairs.tolist(), amounts.tolist(), _lists(*prefixes), strict=True
        )
    ]
    found: list[Adjusted | None] = [None] * num_rows
    lists, begin, before = _lists(lengths, tokens), 0, dict(known)
    known.clear()
    for numbers, penalty, new in zip(table.tolist(), penalties.tolist(), lists, strict=True):
        row, sequence_id, num_sent, num_known, num_prompt, ngram, num_rules = numbers
        own = tuple(rules[begin : begin + num_rules])
        begin += num_rules
        if sequence_id not in known:  # else a row ahead has brought what is new
            of_sequence = known[sequence_id] = before[sequence_id] if num_sent else []
            of_sequence[num_sent:] = new[: num_known - num_sent]
        drafts = new[num_known - num_sent :]
        repetition, presence, frequency = penalty
        adjustment = Adjustment(repetition, presence, frequency, ngram, own)
        found[row] = Adjusted(
            *(adjustment, sequence_id, known[sequence_id], num_known, num_prompt, drafts)
        )
    return found


def step_arrays(which: int, inputs: StepInputs) -> Arrays:
    """Which network runs, and its inputs."""
    return [np.array([which], np.int64), *inputs]


NUM_INPUTS = 1 + len(StepInputs._fields)


def arrays_step(arrays: Arrays) -> tuple[int, StepInputs]:
    """Which network runs, and its inputs."""
    (which,) = cast("Ints", arrays[0]).tolist()
    return which, StepInputs(*arrays[1:NUM_INPUTS])


def tokens_arrays(tokens: Sequence[int | Candidates], logprobs: Logprobs) -> Arrays:
    """What a chooser found, as arrays; a row of candidates has -2 for a token."""
    beams = [token for token in tokens if isinstance(token, Candidates)]
    scores = [score for beam in beams for score in beam.log_probs]
    tables = [table if table is not None else [None] * 4 for table in logprobs]
    return [
        np.array([token if isinstance(token, int) else -2 for token in tokens], np.int64),
        *_ragged([beam.token_ids for beam in beams]),
        np.array(scores, np.float64),
        *(array for table in tables for array in table),
    ]


def arrays_tokens(arrays: Arrays) -> KnownTokens:
    """The tokens of `tokens_arrays`."""
    of = cast("list[Any]", arrays)
    scores, beams = of[3].tolist(), list[Candidates]()
    for ids in _lists(of[1], of[2]):
        beams.append(Candidates(ids, scores[: len(ids)]))
        scores = scores[len(ids) :]
    left = iter(beams)
    tokens: list[int | Candidates] = [next(left) if t == -2 else t for t in of[0].tolist()]
    tables = [None if of[i] is None else LogprobTable(*of[i : i + 4]) for i in (4, 8)]
    return KnownTokens(tokens, Logprobs(*tables))
