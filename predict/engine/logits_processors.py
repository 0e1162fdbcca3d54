"""Changes of a row of logits before its token is chosen: biases, penalties, banned tokens.

The order is that of Hugging Face transformers' logits processors: logit_bias, repetition penalty,
presence and frequency penalty, no_repeat_ngram_size, bad words, minimum length. Then come masks of
guides (predict.engine.masks). Temperature, top_k, top_p, min_p and typical_p belong to the choice
itself (see regatta/sample.h).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from predict.engine.stopping import suppressed_token_ids
from predict.ops.plain_sampling import ban_repeats, penalize
from predict.request import SamplingParams

FOR_EVER = 2**31 - 1  # output tokens


class Rule(NamedTuple):
    """`amount` is added to the logit of `token` wherever `prefix` ends the request's tokens."""

    token: int
    amount: float
    prefix: tuple[int, ...] = ()
    until: int = FOR_EVER  # while fewer output tokens than this are there


def _biases(params: SamplingParams, eos_token_ids: Collection[int]) -> Iterator[Rule]:
    yield from (Rule(token, amount) for token, amount in params.logit_bias.items())


def _bad_words(params: SamplingParams, eos_token_ids: Collection[int]) -> Iterator[Rule]:
    for word in params.bad_words:
        assert not isinstance(word, str), "LLM turns words into token ids"
        *prefix, token = word
        # As in transformers: an end-of-text token of its own is no bad word.
        if prefix or token not in eos_token_ids:
            yield Rule(token, -np.inf, tuple(prefix))


def _min_length(params: SamplingParams, eos_token_ids: Collection[int]) -> Iterator[Rule]:
    for token in suppressed_token_ids(0, params, eos_token_ids):
        yield Rule(token, -np.inf, until=params.min_length)


# Rules of a request with these parameters, where these tokens end a text.
RULES: tuple[Callable[[SamplingParams, Collection[int]], Iterator[Rule]], ...] = (
    _biases,
    _bad_words,
    _min_length,
)


@dataclass(frozen=True)
class Adjustment:
    """How one request changes its logits."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    no_repeat_ngram_size: int = 0
    rules: tuple[Rule, ...] = ()

    @classmethod
    def of(cls, params: SamplingParams, eos_token_ids: Collection[int]) -> Adjustment:
        """The adjustment of a request with these parameters."""
        return cls(
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            params.no_repeat_ngram_size,
            tuple(rule for rules in RULES for rule in rules(params, eos_token_ids)),
        )

    @cached_property
    def penalizes(self) -> bool:
        """Whether logits depend on how often their tokens occurred."""
        return (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)

    @cached_property
    def ends_at(self) -> int:
        """Output tokens from which on it changes nothing."""
        if self.penalizes or self.no_repeat_ngram_size:
            return FOR_EVER
        return max((rule.until for rule in self.rules), default=0)

    @cached_property
    def _plain_rules(self) -> list[tuple[int, npt.NDArray[np.intp], npt.NDArray[np.float32]]]:
        """(until, tokens, amounts) of the rules without a prefix."""
        groups: dict[int, list[Rule]] = {}
        for rule in self.rules:
            if not rule.prefix:
                groups.setdefault(rule.until, []).append(rule)
        return [
            (until, np.array([r.token for r in rules]), np.array([r.amount for r in rules], "f4"))
            for until, rules in groups.items()
        ]

    @cached_property
    def _rules_by_newest(self) -> dict[int, list[Rule]]:
        """The rules with a prefix, by its last token."""
        groups: dict[int, list[Rule]] = {}
        for rule in self.rules:
            if rule.prefix:
                groups.setdefault(rule.prefix[-1], []).append(rule)
        return groups

    def apply(
        self, logits: npt.NDArray[np.float32], token_ids: Sequence[int], num_prompt_tokens: int
    ) -> None:
        """Changes logits [vocab_size] in place; token_ids: prompt and output so far.

        Tokens outside of the vocabulary are skipped.
        """
        num_output = len(token_ids) - num_prompt_tokens
        for until, tokens, amounts in self._plain_rules:
            if num_output < until:
                known = tokens < len(logits)
                np.add.at(logits, tokens[known], amounts[known])
        for rule in self._rules_by_newest.get(token_ids[-1], ()):
            length = len(rule.prefix)
            if tuple(token_ids[-length:]) == rule.prefix and rule.token < len(logits):
                logits[rule.token] += rule.amount
        if self.penalizes or self.no_repeat_ngram_size:
            known_tokens = np.array(token_ids, np.int32)
        if self.penalizes:
            penalties = self.repetition, self.presence, self.frequency
            penalize(logits, known_tokens, num_prompt_tokens, *map(np.float32, penalties))
        if self.no_repeat_ngram_size:
            ban_repeats(logits, known_tokens, self.no_repeat_ngram_size)


UNCHANGED = Adjustment()
