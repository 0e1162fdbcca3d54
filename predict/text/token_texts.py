"""The text and the bytes of single tokens, as logprobs show them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from predict.errors import TokenizerError
from predict.text.backends.fast import byte_letters
from predict.text.detokenizer import Detokenizer, TextStream
from predict.text.tokenizer import REPLACEMENT, Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ANCHOR_TEXTS = ("a", "0", ".")


class TokenText(NamedTuple):
    """A token by itself. bytes: None where the tokenizer does not say; part of a character too."""

    text: str
    bytes: tuple[int, ...] | None


class TokenTexts:
    """The texts of a tokenizer's tokens, each looked up once. Not thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, TokenText] = {}
        self._pieces: dict[int, str] | None = None  # as the vocabulary writes them
        self._bytes = {letter: byte for byte, letter in byte_letters().items()}
        self._of_answers, self._of_prompts = Detokenizer(tokenizer), Detokenizer(tokenizer, False)
        # A token in front, as the first token of a text may lose its space.
        self._anchor = next(
            (ids[-1:] for text in _ANCHOR_TEXTS if (ids := tokenizer.encode(text, False))), []
        )

    def __getitem__(self, token_id: int) -> TokenText:
        """The token's text, special tokens written out; "" for an id without a text."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._look_up(token_id)
        return found

    def stream(self, prompt_token_ids: Sequence[int] = ()) -> TextStream:
        """The text of an answer behind a prompt, token by token."""
        return self._of_answers.stream(prompt_token_ids)

    def of_prompt(self, token_ids: Sequence[int], text: str) -> list[str]:
        """What each token of a prompt adds to `text`, which was made of it, or it of that.

        Joined they are `text`: tokens that it leaves out, as one that begins every prompt, add "",
        and a token that is part of a character nothing or all of it.
        """
        stream = self._of_prompts.stream()
        texts = [stream.append((token_id,)) for token_id in token_ids]
        texts[-1] += stream.finish()
        first = max("".join(texts).find(text), 0)
        end, place = first + len(text), 0
        for index, piece in enumerate(texts):
            begin, place = place, place + len(piece)
            texts[index] = piece[max(first - begin, 0) : max(end - begin, 0)]
        return texts

    def label(self, token_id: int) -> str:
        """The text of a token by itself; of one that is no whole character its bytes, as OpenAI's.

        So no two tokens that are parts of characters have the same.
        """
        text, parts = self[token_id]
        if parts is None or REPLACEMENT not in text or bytes(parts) == text.encode():
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in parts)

    def _look_up(self, token_id: int) -> TokenText:
        try:
            text = self._tokenizer.decode_continuation(self._anchor, [token_id], False)
        except TokenizerError:
            return TokenText("", None)
        if REPLACEMENT not in text:
            return TokenText(text, tuple(text.encode("utf-8", "replace")))
        return TokenText(text, self._bytes_of_piece(token_id))

    def _bytes_of_piece(self, token_id: int) -> tuple[int, ...] | None:
        """The bytes of a token that is no whole character; None where they are not known."""
        if self._pieces is None:
            self._pieces = {i: piece for piece, i in self._tokenizer.vocabulary().items()}
        piece = self._pieces.get(token_id, "")
        single = _BYTE_TOKEN.fullmatch(piece)
        if single:
            return (int(single[1], 16),)
        found = [self._bytes.get(letter) for letter in piece]
        known = tuple(byte for byte in found if byte is not None)
        return known if known and len(known) == len(found) else None
