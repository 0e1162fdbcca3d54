"""Tokenizers that the tokenizers library runs, and byte-level BPE made of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from predict.text.backends.base import Ends, check_room, explicit_ends, loaded, single

JSON_HINT = (
    "the file may be cut short or written by a newer tokenizers library: copy it again, or pip "
    "install -U tokenizers"
)


@cache
def byte_letters() -> dict[int, str]:
    """The letter that byte-level vocabularies write each byte with (GPT-2, 2019).

    Bytes that print in Latin-1 stand for themselves, the others for U+0100 and on, in their order.
    """
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return {byte: chr(byte if byte in printing else next(others)) for byte in range(256)}


def byte_level(
    vocabulary: dict[str, int],
    merges: Iterable[tuple[str, str]],
    cuts: Sequence[str],
    *,
    composes: bool = False,
    whole_words: bool = False,
    single_digits: bool = False,
    prefix: bool = False,
) -> Any:
    """A tokenizers.Tokenizer of byte-level BPE.

    cuts: regular expressions that cut text into words, each the pieces that the one before it left;
    empty: GPT-2's. composes: text is brought to Unicode's composed form (NFC) first. whole_words: a
    word that is a token stays one, whether merges lead to it or not. single_digits: each digit is
    a word, ahead of all cuts. prefix: a space is put before a text.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocabulary, list(merges), ignore_merges=whole_words))
    if composes:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if single_digits else []
    steps += [pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in cuts]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not cuts))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


class FastBackend:
    """A tokenizers.Tokenizer: that of a `tokenizer.json`, or one that was made of other files."""

    def __init__(self, path: Path, build: Callable[[], Any], hint: str) -> None:
        """`build` makes the library's tokenizer; `hint` is what to do where it cannot."""

        def load() -> None:
            self._tokenizer = build()
            # A file saved during training may carry settings that silently cut or pad prompts.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            added = self._tokenizer.get_added_tokens_decoder()
            self.vocab_size = max([self._tokenizer.get_vocab_size(), *(i + 1 for i in added)])

        self._ends: Ends | None = None  # None: as the tokenizer itself has it
        self._literal: Any = None  # a second tokenizer, for encode_literal
        loaded(path, load, hint)

    @classmethod
    def from_json(
        cls, path: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]
    ) -> FastBackend:
        """The tokenizer of a tokenizer.json, with the ends that tokenizer_config.json asks for."""
        import tokenizers

        backend = cls(path, lambda: tokenizers.Tokenizer.from_file(str(path)), JSON_HINT)
        backend.put_around(explicit_ends(config, special_tokens, backend.token_to_id))
        return backend

    def put_around(self, ends: Ends | None) -> None:
        """Sets the ids around a text; None leaves them to the tokenizer itself."""
        self._ends = ends

    def described(self) -> tuple[str, Ends | None]:
        """The content of a tokenizer.json, and the ids around a text where that does not say."""
        return self._tokenizer.to_str(), self._ends

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if add_special_tokens and self._ends is not None:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
            return [*self._ends.first, *ids, *self._ends.last]
        plain: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return plain

    def encode_pair(
        self, text: str, second: str | None, most: int | None
    ) -> tuple[list[int], int | None]:
        tokenizer, ends = self._tokenizer, self._ends
        # A file may say of both ends that they are bare, and have its own way to write a text.
        if second is None and ends is not None and (ends.first or ends.last):
            return single(self.encode(text, True), self.encode(text, False), None, most)
        parts = [text] if second is None else [text, second]
        found = [tokenizer.encode(part, add_special_tokens=False) for part in parts]
        num_around = tokenizer.num_special_tokens_to_add(second is not None)
        if second is not None and not num_around:
            return single([], [], second, most)
        if most is not None:
            room = most - num_around - sum(len(each.ids) for each in found[:-1])
            if room < len(found[-1].ids):
                if second is not None:
                    check_room(room, most)
                found[-1].truncate(max(room, 0))
        made = tokenizer.post_process(*found)
        ids: list[int] = made.ids
        if second is None or not found[-1].ids:
            return ids[:most], None
        return ids, made.sequence_ids.index(1)

    def encode_inside(self, text: str) -> list[int]:
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_to_id(self, token: str) -> int | None:
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def vocabulary(self) -> dict[str, int]:
        tokens: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return tokens

    def encode_literal(self, text: str) -> list[int]:
        if self._literal is None:
            made = type(self._tokenizer).from_str(self._tokenizer.to_str())
            made.encode_special_tokens = True  # as the text that they are
            self._literal = made
        ids: list[int] = self._literal.encode(text, add_special_tokens=False).ids
        return ids

    def for_guides(self, eos_token_id: int) -> Any:
        return self._tokenizer.to_str()
