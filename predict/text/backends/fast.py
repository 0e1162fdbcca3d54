"""Tokenizers that the tokenizers library runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from predict.text.backends.base import Ends, explicit_ends, loaded

JSON_HINT = (
    "the file may be cut short or written by a newer tokenizers library: copy it again, or pip "
    "install -U tokenizers"
)


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
        loaded(path, load, hint)

    @classmethod
    def from_json(
        cls, path: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]
    ) -> FastBackend:
        """The tokenizer of a tokenizer.json, with the ends that tokenizer_config.json asks for."""
        import tokenizers

        made = cls(path, lambda: tokenizers.Tokenizer.from_file(str(path)), JSON_HINT)
        made.put_around(explicit_ends(config, special_tokens, made.token_to_id))
        return made

    def put_around(self, ends: Ends | None) -> None:
        """Sets the ids around a text; None leaves them to the tokenizer itself."""
        self._ends = ends

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if add_special_tokens and self._ends is not None:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
            return [*self._ends.first, *ids, *self._ends.last]
        plain: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return plain

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

    def for_guides(self, eos_token_id: int) -> Any:
        return self._tokenizer.to_str()
