"""Text of a growing token list, piece by piece.

A piece is returned as soon as no later token can change it. Each step decodes the tokens without
returned text behind one fixed token, the anchor, whose own text is cut off again: behind it they
are not decoded as the beginning of a text, where sentencepiece drops a space.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from predict.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_NUM_PROBED_IDS = 2048  # the first ordinary tokens have low ids in every known vocabulary
_BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))  # which may have any ids
MANY_PENDING = 48  # tokens
LONGEST_CHARACTER = 4  # tokens of a byte each


@dataclass(frozen=True)
class _Traits:
    """The behaviour of a tokenizer's decoder at the borders of a token list."""

    anchor: int | None  # a token with visible text of its own; None: none was found
    anchor_text: str
    # A token with one byte of an incomplete character, if a decoder turns *all* the bytes of a
    # run of byte tokens into U+FFFD when they are no UTF-8 together (tokenizers' ByteFallback).
    # Text that such a byte behind it would change is not certain yet.
    breaking_byte: int | None


def _find_traits(tokenizer: Tokenizer) -> _Traits:
    """Looks through the low token ids and bytes; a few milliseconds, once per tokenizer."""
    of_bytes = (tokenizer.token_to_id(token) for token in _BYTE_TOKENS)
    probed = dict.fromkeys(range(min(tokenizer.vocab_size, _NUM_PROBED_IDS)))
    probed |= dict.fromkeys(i for i in of_bytes if i is not None)
    texts = {i: tokenizer.decode([i]) for i in probed}
    partial = next((i for i, text in texts.items() if text == _REPLACEMENT), None)

    def survives(token_id: int) -> bool:
        """Whether the token's text stays as it is when an incomplete byte follows."""
        if partial is None:
            return True
        return tokenizer.decode([token_id, partial]).startswith(texts[token_id])

    whole = {i: text for i, text in texts.items() if text and _REPLACEMENT not in text}
    visible = (i for i, text in whole.items() if text.isprintable() and not text.isspace())
    anchor = next((i for i in visible if survives(i)), None)
    # Only tokens of one byte form runs; longer ones need no look.
    breaks = any(len(text) == 1 and not survives(i) for i, text in whole.items())
    return _Traits(
        anchor=anchor,
        anchor_text="" if anchor is None else texts[anchor],
        breaking_byte=partial if breaks else None,
    )


class Detokenizer:
    """Makes the `TextStream` of each request; one per tokenizer."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._traits: _Traits | None = None

    @cached_property
    def literal(self) -> Detokenizer:
        """One that writes special tokens out."""
        return Detokenizer(self._tokenizer, False) if self._skip_special_tokens else self

    def stream(self, prompt_token_ids: Sequence[int] = ()) -> TextStream:
        """A stream without tokens yet, whose text continues that of the prompt.

        Without a prompt it is the text of tokens that stand alone.
        """
        if self._traits is None:
            self._traits = _find_traits(self._tokenizer)
        return TextStream(
            self._tokenizer, self._traits, prompt_token_ids, self._skip_special_tokens
        )


class TextStream:
    """The text of one request's output; `Detokenizer.stream` makes it.

    `text` is all that `append` and `finish` returned, joined. After `finish` it equals
    `tokenizer.decode_continuation(prompt, token_ids)`. Each `append` decodes a bounded number of
    tokens on average, however long the output is.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        traits: _Traits,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._traits = traits
        self._prompt_token_ids = tuple(prompt_token_ids)
        self._skip_special_tokens = skip_special_tokens
        self._token_ids: list[int] = []
        # The text of the tokens before this index is out. It stays 0 until something visible is
        # out, since up to there the beginning of a text decodes differently from its middle.
        self._num_settled = 0
        self._retry_at = 0  # tokens below which it is not worth decoding again
        self._num_tries = 0  # in a row that ended amid a character
        self._pieces: list[str] = []
        # The text behind what is out, were there no more tokens; "" where it was not looked at.
        self.pending = ""

    @property
    def text(self) -> str:
        """The text that has been returned so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def append(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these tokens; "" while a character is incomplete."""
        self._token_ids += token_ids
        num_tokens = len(self._token_ids)
        self.pending = ""
        if num_tokens < self._retry_at:
            return ""
        piece = self._pending_text()
        self._retry_at = num_tokens + 1 + self._num_to_skip(num_tokens, piece)
        if piece is None or not self._is_certain(piece):
            self.pending = (piece or "").rstrip(_REPLACEMENT)
            return ""
        if piece:
            self._pieces.append(piece)
        if self._num_settled or (self._traits.anchor is not None and self.text.strip()):
            self._num_settled = num_tokens
            self._retry_at = 0
        return piece

    def _num_to_skip(self, num_tokens: int, piece: str | None) -> int:
        """Tokens that are not worth decoding again, behind one where the text was `piece`.

        Many tokens that stay pending are decoded at geometrically growing distances: a model that
        babbles broken bytes or spaces must not cost quadratic time. In the middle of a character
        the text before it may not be seen: then for as many tokens as one may have.
        """
        num_pending = num_tokens - self._num_settled
        if num_pending <= MANY_PENDING:
            return 0
        is_whole = piece is not None and not piece.endswith(_REPLACEMENT)
        self._num_tries += 1
        if not is_whole and self._num_tries < LONGEST_CHARACTER:
            return 0
        self._num_tries = 0
        return num_pending // (8 if is_whole else 4)

    def finish(self) -> str:
        """The rest of the text, an incomplete character at its end included. Call it once."""
        out = self.text
        whole = self._tokenizer.decode_continuation(
            self._prompt_token_ids, self._token_ids, self._skip_special_tokens
        )
        # An unknown decoder may look further around: then `text` is right, though the returned
        # pieces are not.
        rest = whole[len(out) :] if whole.startswith(out) else self._pending_text() or ""
        self._pieces = [whole]
        self._num_settled = len(self._token_ids)
        return rest

    def _pending_text(self, following: Sequence[int] = ()) -> str | None:
        """The text after what is out, if `following` came next; None if it contradicts that."""
        token_ids = [*self._token_ids[self._num_settled :], *following]
        if self._num_settled and self._traits.anchor is not None:
            out = self._traits.anchor_text
            text = self._tokenizer.decode(
                [self._traits.anchor, *token_ids], self._skip_special_tokens
            )
        else:
            out = self.text
            text = self._tokenizer.decode_continuation(
                self._prompt_token_ids, token_ids, self._skip_special_tokens
            )
        return text[len(out) :] if text.startswith(out) else None

    def _is_certain(self, piece: str) -> bool:
        """Whether no later token can change `piece`, the pending text."""
        if piece.endswith(_REPLACEMENT):
            return False
        if self._traits.breaking_byte is None:
            return True
        longer = self._pending_text((self._traits.breaking_byte,))
        return longer is not None and longer.startswith(piece)
