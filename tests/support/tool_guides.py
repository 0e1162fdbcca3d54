"""Whether a guide takes a text, over a tokenizer with special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import llguidance

from predict.guide import Guide
from predict.text.guides import grammar_of, pieces
from predict.text.lark import LIMITS

EOS = 256


class Bytes:
    """A tokenizer of a token per byte, and of those texts that are tokens of their own."""

    eos_token_id = EOS
    bos_token_id = None

    def __init__(self, tokens: tuple[str, ...], special: bool) -> None:
        self.ids = {text: EOS + 1 + index for index, text in enumerate(tokens)}
        texts = [bytes([byte]) for byte in range(256)]
        self.tokens = [*texts, b"</s>", *(text.encode() for text in tokens)]
        self.special_token_ids = [EOS, *(self.ids.values() if special else ())]

    def __call__(self, text: str) -> list[int]:
        parts = pieces(text, self.ids)
        own = ([self.ids[part]] if part in self.ids else list(part.encode()) for part in parts)
        return list(chain(*own))


@lru_cache
def tokenizer_of(tokens: tuple[str, ...], special: bool) -> tuple[Bytes, Any]:
    made = Bytes(tokens, special)
    return made, llguidance.LLTokenizer(llguidance.TokenizerWrapper(made))


def takes(guide: Guide | None, text: str, tokens: Sequence[str] = (), special: bool = True) -> bool:
    """Whether a guide takes a text to its end, and the end there."""
    assert guide is not None
    tokenizer, made = tokenizer_of(tuple(tokens), special)
    limits = llguidance.LLParserLimits(**LIMITS)
    grammar = grammar_of(guide, tokenizer.ids if special else {})
    matcher = llguidance.LLMatcher(made, grammar, log_level=0, limits=limits)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())
