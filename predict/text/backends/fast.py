"""Tokenizers that the tokenizers library runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from predict.text.backends.base import explicit_ends, loaded


class FastBackend:
    """`tokenizer.json`, run by the tokenizers library."""

    def __init__(
        self, path: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]
    ) -> None:
        import tokenizers

        def load() -> None:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
            # A file saved during training may carry settings that silently cut or pad prompts.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self._ends = explicit_ends(config, special_tokens, self.token_to_id)
            added = self._tokenizer.get_added_tokens_decoder()
            self.vocab_size = max([self._tokenizer.get_vocab_size(), *(i + 1 for i in added)])

        loaded(
            path,
            load,
            "the file may be cut short or written by a newer tokenizers library: copy it again, or "
            "pip install -U tokenizers",
        )

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """See Backend."""
        if add_special_tokens and self._ends is not None:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
            return [*self._ends.first, *ids, *self._ends.last]
        plain: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return plain

    def encode_inside(self, text: str) -> list[int]:
        """See Backend."""
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """See Backend."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_to_id(self, token: str) -> int | None:
        """See Backend."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def vocabulary(self) -> dict[str, int]:
        """See Backend."""
        tokens: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return tokens

    def for_guides(self, eos_token_id: int) -> Any:
        """See Backend."""
        return self._tokenizer.to_str()
