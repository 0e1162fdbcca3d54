"""Sampling parameters that name texts, as token ids of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from predict.errors import UserError
from predict.request import SamplingParams
from predict.text.tokenizer import Tokenizer


def with_token_ids(
    params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int
) -> SamplingParams:
    """`params` with token ids in place of the texts in bad_words, and for special tokens in stop.

    The text of an answer leaves special tokens out, so that no text in it could stop there.

    Raises UserError for a text without a tokenizer, for a stop with a special token and more, and
    for a token of logit_bias, bad_words or stop_token_ids outside of the vocabulary.
    """
    words: list[tuple[int, ...]] = []
    for word in params.bad_words:
        if not isinstance(word, str):
            words.append(tuple(word))
        elif tokenizer is None:
            raise UserError(
                f"bad_words has the text {word!r}, and this model was loaded without a tokenizer; "
                "give its token ids"
            )
        else:
            words += tokenizer.encode_word(word)
    named = [("logit_bias", token) for token in params.logit_bias]
    named += [("bad_words", token) for word in words for token in word]
    named += [("stop_token_ids", token) for token in params.stop_token_ids]
    for name, token in named:
        if token >= vocab_size:
            raise UserError(
                f"{name} has token id {token}, which is outside the vocabulary (allowed: 0 to "
                f"{vocab_size - 1})"
            )
    stops = () if tokenizer is None else _stop_tokens(params.stop_strings, tokenizer)
    if tuple(words) == params.bad_words and set(stops) <= set(params.stop_token_ids):
        return params
    return replace(
        params,
        bad_words=tuple(dict.fromkeys(words)),
        stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *stops))),
    )


def _stop_tokens(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids of those texts that are tokens which an answer's text leaves out.

    Raises UserError for a text with such a token and more.
    """
    found: list[int] = []
    for text in texts:
        token_id = tokenizer.token_to_id(text)
        if token_id is not None:
            found += [token_id] if tokenizer.leaves_out(token_id) else []
            continue
        hidden = next((i for i in tokenizer.encode(text, False) if tokenizer.leaves_out(i)), None)
        if hidden is not None:
            token = tokenizer.decode([hidden], False)
            raise UserError(
                f"stop has {text!r}, which would never stop: {token!r} in it is a special token, "
                "and an answer's text has none; give the token alone, or the text without it"
            )
    return tuple(found)
