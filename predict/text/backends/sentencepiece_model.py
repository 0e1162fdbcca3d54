"""Sentencepiece models, run by their own library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from predict.errors import UserError
from predict.system.files import json_type, read_json_object
from predict.text.backends.added import (
    AddedToken,
    Splitter,
    added_token,
    checked_content,
    checked_token_id,
)
from predict.text.backends.base import Ends, explicit_ends, loaded

CONFIG_FILE = "tokenizer_config.json"
SENTENCEPIECE_SPACE = "\u2581"
# Appended to a serialised sentencepiece model, it sets normalizer_spec.add_dummy_prefix (field 3 of
# field 3) to false: protobuf merges a repeated message, the later value wins.
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


class SentencePieceBackend:
    """A sentencepiece model, with the tokens that the config files add to it."""

    def __init__(
        self, path: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]
    ) -> None:
        import sentencepiece

        def load() -> None:
            proto = path.read_bytes()
            # Two processors: text after a special token gets no dummy prefix unless `legacy`, and
            # decoding must keep the space that the prefixed processor would strip.
            self._prefixed = sentencepiece.SentencePieceProcessor(model_proto=proto)
            self._bare = sentencepiece.SentencePieceProcessor(model_proto=proto + NO_DUMMY_PREFIX)
            self._adds_prefix = self._prefixed.encode("a") != self._bare.encode("a")

        loaded(
            path,
            load,
            "the file may be cut short, or a git pointer instead of the file itself: copy it again",
        )
        self._legacy = config.get("legacy") is not False
        self.special_tokens = {**self._own_special_tokens(), **special_tokens}
        self._added = self._added_tokens(path.parent, config)
        self._by_id = {token.token_id: token for token in self._added.values()}
        self._splitter = Splitter(self._added)
        self._num_pieces: int = self._prefixed.vocab_size()
        self.vocab_size = max([self._num_pieces, *(i + 1 for i in self._by_id)])
        ends = {**config, "add_bos_token": config.get("add_bos_token", True)}
        found = explicit_ends(ends, self.special_tokens, self.token_to_id)
        self._ends = found or Ends((), ())  # add_bos_token and add_eos_token may both be null

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """See Backend."""
        ids: list[int] = []
        first = True
        for piece, token in self._splitter.split(text):
            ids += self._encode_plain(piece, first)
            first = False
            if token is not None:
                ids.append(token.token_id)
        return [*self._ends.first, *ids, *self._ends.last] if add_special_tokens else ids

    def encode_inside(self, text: str) -> list[int]:
        """See Backend."""
        ids: list[int] = self._bare.encode(text)
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """See Backend."""
        parts: list[str] = []
        run: list[int] = []  # sentencepiece ids since the last added token
        for token_id in token_ids:
            added = self._by_id.get(token_id)
            if added is None:
                # A padded vocabulary has ids that no tokenizer knows; they have no text.
                run += [token_id] if 0 <= token_id < self._num_pieces else []
            elif not (added.special and skip_special_tokens):
                parts += [self._bare.decode(run), added.content]
                run = []
        text = "".join([*parts, self._bare.decode(run)])
        return text[1:] if self._adds_prefix and text.startswith(" ") else text

    def token_to_id(self, token: str) -> int | None:
        """See Backend."""
        if token in self._added:
            return self._added[token].token_id
        token_id: int = self._prefixed.piece_to_id(token)
        return token_id if self._prefixed.id_to_piece(token_id) == token else None

    def vocabulary(self) -> dict[str, int]:
        """See Backend."""
        pieces = {self._prefixed.id_to_piece(i): i for i in range(self._num_pieces)}
        return {**pieces, **{text: token.token_id for text, token in self._added.items()}}

    def for_guides(self, eos_token_id: int) -> Any:
        """See Backend."""
        from llguidance import TokenizerWrapper

        tokens = [self._bytes_of(token_id) for token_id in range(self.vocab_size)]
        special = [i for i, token in self._by_id.items() if token.special]
        special += [
            i
            for i in range(self._num_pieces)
            if self._prefixed.is_control(i) or self._prefixed.is_unknown(i)
        ]
        return TokenizerWrapper(
            _Pieces(tokens, sorted(set(special)), eos_token_id, self.encode_inside)
        )

    def _bytes_of(self, token_id: int) -> bytes:
        added = self._by_id.get(token_id)
        if added is not None:
            return added.content.encode()
        if token_id >= self._num_pieces:
            return b""
        piece: str = self._prefixed.id_to_piece(token_id)
        if self._prefixed.is_byte(token_id):
            return bytes([int(piece[1:-1], 16)])  # <0x0A>
        return piece.replace(SENTENCEPIECE_SPACE, " ").encode()

    def _encode_plain(self, text: str, first: bool) -> list[int]:
        if not text:
            return []
        processor = self._prefixed if first or self._legacy else self._bare
        ids: list[int] = processor.encode(text)
        return ids

    def _own_special_tokens(self) -> dict[str, str]:
        """The model's control pieces by role, for folders without a tokenizer_config.json."""
        model = self._prefixed
        roles = {"bos_token": model.bos_id(), "eos_token": model.eos_id()}
        roles["unk_token"] = model.unk_id()
        return {role: model.id_to_piece(i) for role, i in roles.items() if i >= 0}

    def _added_tokens(self, folder: Path, config: Mapping[str, Any]) -> dict[str, AddedToken]:
        """Text -> token: what the config files add, and the roles found in the model itself."""
        added: dict[str, AddedToken] = {}
        path = folder / "added_tokens.json"
        for content, token_id in read_json_object(path, missing_ok=True).items():
            special = content in self.special_tokens.values()
            where = f"{path}: {content!r}"
            added[checked_content(content, where)] = AddedToken(
                content, checked_token_id(token_id, where), special
            )
        where = f"{folder / CONFIG_FILE}: added_tokens_decoder"
        decoder = config.get("added_tokens_decoder") or {}
        if not isinstance(decoder, dict):
            raise UserError(f"{where} is {json_type(decoder)} (allowed: an object, null)")
        for key, entry in decoder.items():
            made = added_token(key, entry, where)
            added[made.content] = made
        for content in self.special_tokens.values():
            token_id = self._prefixed.piece_to_id(content)
            known = self._prefixed.id_to_piece(token_id) == content
            if content not in added and known:
                added[content] = AddedToken(content, token_id, True)
        added.pop("", None)
        return added


@dataclass(frozen=True)
class _Pieces:
    """A sentencepiece model's tokens, as llguidance asks for them."""

    tokens: Sequence[bytes]
    special_token_ids: Sequence[int]
    eos_token_id: int
    encode: Callable[[str], list[int]]
    bos_token_id: int | None = None

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("a text is needed")  # llguidance then gives texts
        return self.encode(text)
