"""What numbers of requests may be: what float32 and int32 hold, and what operators can work with.

Each function returns a plain Python value, or raises UserError with what was got and what is
allowed. NumPy's scalars are numbers; True, "5", Fraction and Decimal are not.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from predict.errors import UserError, quoted
from predict.system.ranges import MAX_INT32, Range, refusal

# Numbers for the logits: a float32 stays finite when a logit is added, divided by the least
# repetition penalty, and penalized for each of 10**8 tokens.
MAX_AMOUNT = 1e30
MIN_REPETITION, MAX_REPETITION = 1e-6, 1e6
# As divisors: above the numbers that a GPU takes for 0, and their inverse is finite.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e30
MIN_MASS = 1e-30  # of top_p and typical_p
BELOW_ONE = 1 - 2**-24  # the largest float32 below 1
MAX_LENGTH_PENALTY = 10.0  # lengths ** penalty, a float32 up to 7000 tokens

MAX_BIASES = 16384  # token ids in logit_bias
MAX_WORDS = 16384  # in bad_words; a text counts twice: with and without a space in front
MAX_WORD_SIZE = 65536  # characters or token ids of all of them
MAX_STOP_TOKENS = 1024
MAX_STOPS = 256
MAX_SCHEMA_BYTES = 1 << 18  # of a schema, or of all schemas of a structural tag, as JSON
MAX_STOPS_SIZE = 16384  # characters of all of them

_LIST = (str, bytes, bytearray, Mapping)  # iterable, and yet no list of anything


def is_integer(value: Any) -> bool:
    """Whether it is a whole number; True and 1.0 are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def items(name: str, value: Any, most: int, allowed: str) -> list[Any]:
    """The entries of a list, tuple, array or the like; at most so many."""
    if isinstance(value, _LIST) or not isinstance(value, Iterable):
        raise refusal(name, value, allowed)
    found = list(islice(value, most + 1))
    if len(found) > most:
        raise UserError(f"{name} has more than {most} entries (allowed: at most {most})")
    return found


def token_ids(name: str, value: Any, most: int, allowed: str) -> tuple[int, ...]:
    """Token ids of a list, tuple or array; at most so many."""
    found = items(name, value, most, allowed)
    ids = Range(0, MAX_INT32, words=allowed)
    return tuple(ids.taken(f"{name}: the token id", token) for token in found)


def stop_token_ids(value: Any) -> tuple[int, ...]:
    """Token ids that end an answer."""
    allowed = f"a sequence of token ids >= 0 and at most {MAX_INT32}"
    return token_ids("stop_token_ids", value, MAX_STOP_TOKENS, allowed)


def prompt_token_ids(value: Any, most: int = MAX_INT32) -> list[int]:
    """Token ids of a prompt, none above `most`: a list, tuple or array of whole numbers.

    `most` is the vocabulary's last one, or what an operator takes.
    """
    if isinstance(value, _LIST) or not isinstance(value, Iterable):
        raise UserError(
            f"a prompt is {quoted(value)} (allowed: a text, or a sequence of token ids)"
        )
    found: list[Any] = list(value)
    if not set(map(type, found)) <= {int}:
        for index, token in enumerate(found):
            if not is_integer(token):
                raise UserError(
                    f"token {index} of a prompt is {quoted(token)} (allowed: whole numbers from "
                    f"0 to {most})"
                )
        found = [int(token) for token in found]
    for token in (min(found, default=0), max(found, default=0)):
        if not 0 <= token <= most:
            where = "in a prompt is outside the vocabulary" if most < MAX_INT32 else "in the prompt"
            raise UserError(f"token id {quoted(token)} {where} (allowed: 0 to {most})")
    return found


def logit_bias(value: Any) -> dict[int, float]:
    """Token id -> amount. JSON has texts for keys: "15" is 15."""
    allowed = (
        f"a mapping from token ids >= 0 to numbers from -{MAX_AMOUNT:g} to {MAX_AMOUNT:g}, at "
        f"most {MAX_BIASES}"
    )
    if not isinstance(value, Mapping) or len(value) > MAX_BIASES:
        raise refusal("logit_bias", value, allowed)
    ids = Range(0, MAX_INT32, words=allowed)
    amounts = Range(-MAX_AMOUNT, MAX_AMOUNT, whole=False, words=allowed)
    biases: dict[int, float] = {}
    for key, amount in value.items():
        plain = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10
        token = ids.taken("logit_bias of token", int(key) if plain else key)
        if token in biases:
            raise UserError(f"logit_bias names token {token} twice; leave one of the two out")
        try:
            biases[token] = amounts.taken(f"logit_bias of token {token}:", amount)
        except UserError as error:
            raise UserError(f"{error}; a token that must never come goes into bad_words") from None
    return biases


def bad_words(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """Words as texts or tuples of token ids."""
    allowed = "a sequence of words, each a text or a sequence of token ids >= 0, none empty"
    words: list[str | tuple[int, ...]] = []
    for word in items("bad_words", value, MAX_WORDS, allowed):
        if isinstance(word, str) and word.strip():
            words.append(word)
        elif isinstance(word, _LIST) or not isinstance(word, Iterable):
            raise UserError(f"bad_words has {quoted(word)} (allowed: {allowed})")
        else:
            ids = token_ids("bad_words", word, MAX_WORD_SIZE, allowed)
            if not ids:
                raise UserError(f"bad_words has {quoted(word)} (allowed: {allowed})")
            words.append(ids)
    count = sum(1 + isinstance(word, str) for word in words)
    size = sum(map(len, words))
    if count > MAX_WORDS or size > MAX_WORD_SIZE:
        raise UserError(
            f"bad_words has {len(words)} words of {size} characters and token ids (allowed: at "
            f"most {MAX_WORDS} words, where a text counts twice, of {MAX_WORD_SIZE} in all)"
        )
    return tuple(words)


def stop_strings(value: Any) -> tuple[str, ...]:
    """Texts at which an answer ends; a lone text is one."""
    allowed = "a text or a sequence of texts, none of them empty"
    found: Sequence[Any] = [value]
    if not isinstance(value, str):
        found = items("stop", value, MAX_STOPS, allowed)
    for text in found:
        if not isinstance(text, str) or not text:
            raise refusal("stop", text, allowed)
    size = sum(map(len, found))
    if size > MAX_STOPS_SIZE:
        raise UserError(
            f"stop has {size} characters (allowed: at most {MAX_STOPS_SIZE}, all texts together)"
        )
    return tuple(dict.fromkeys(found))
