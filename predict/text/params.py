"""Sampling parameters that name texts, as token ids of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from predict.errors import UserError
from predict.request import SamplingParams
from predict.text.answer_parts import Forms
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
    # Marks of an answer's parts are no content.
    hidden = () if params.answer_form is None else Forms.of(params.answer_form).marks
    texts = [text for text in params.stop_strings if text not in hidden]
    stops = () if tokenizer is None else _special_tokens(texts, tokenizer)
    if tuple(words) == params.bad_words and set(stops) <= set(params.stop_token_ids):
        return params
    return replace(
        params,
        bad_words=tuple(dict.fromkeys(words)),
        stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *stops))),
    )


def hidden_in(texts: Sequence[str], tokenizer: Tokenizer) -> dict[int, str]:
    """The tokens without a text of their own that stand in these texts among others."""
    found: dict[int, str] = {}
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) > 1:
            hidden = ((i, tokenizer.decode([i], False)) for i in ids if tokenizer.leaves_out(i))
            found.update((i, mark) for i, mark in hidden if mark and mark in text)
    return found


def _special_tokens(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids of those texts that are tokens without a text of their own."""
    ids = [tokenizer.token_to_id(text) for text in texts]
    return tuple(i for i in ids if i is not None and tokenizer.leaves_out(i))
