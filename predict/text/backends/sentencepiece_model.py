"""Sentencepiece models, run by their own library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from predict.errors import UserError
from predict.system.files import read_json_object
from predict.text.backends.added import (
    AddedToken,
    Splitter,
    added_by_config,
    checked_content,
    checked_token_id,
)
from predict.text.backends.base import Ends, Pieces, explicit_ends, loaded, single

SENTENCEPIECE_SPACE = "\u2581"
# Appended to a serialised sentencepiece model, they set add_dummy_prefix (field 3 of field 3, the
# normalizer_spec), and remove_extra_whitespaces (its field 4), to false: protobuf merges a repeated
# message, the later value wins.
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"
KEEP_SPACES = b"\x1a\x04\x18\x00\x20\x00"


@dataclass(frozen=True)
class FamilyDialect:
    """A family's own additions to its sentencepiece model; by default, none."""

    num_other_ids: int = 0  # in front of the model's: of another kind of tokens, without text
    appended: tuple[str, ...] = ()  # special tokens with the ids behind the model's
    # Of these, plain words, which are not found in a text ("sop" begins "sophistry", too), and
    # which of them are found after all right behind another token.
    unseen: tuple[str, ...] = ()
    followers: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)  # where the config files name none
    # By role, ids of pieces that are special tokens, too, though the model does not say so.
    special_pieces: Mapping[str, int] = field(default_factory=dict)
    spelled: Mapping[str, str] = field(default_factory=dict)  # piece -> the text that it means
    prepare: Callable[[str], str] = str  # what the model gets for a text
    ends: tuple[tuple[str, ...], tuple[str, ...]] | None = None  # around a text; None: bos and eos


class Described(NamedTuple):
    """What a backend consists of."""

    proto: bytes  # the model, serialized
    added: tuple[AddedToken, ...]
    ends: Ends
    legacy: bool  # every piece of a text gets the dummy prefix, not its start alone
    dialect: FamilyDialect


class SentencePieceBackend:
    """A sentencepiece model, with the tokens that the config files and the dialect add to it."""

    def __init__(
        self,
        path: Path,
        config: Mapping[str, Any],
        special_tokens: Mapping[str, str],
        dialect: FamilyDialect,
        read: Callable[[], bytes] | None = None,
    ) -> None:
        """`read` gives the model; without it `path` is its file, with config files beside it."""
        import sentencepiece

        def load() -> None:
            proto = read() if read else path.read_bytes()
            # Text after a special token gets no dummy prefix unless `legacy`; text that is decoded
            # behind other text keeps the spaces that the beginning of a text loses.
            self._prefixed = sentencepiece.SentencePieceProcessor(model_proto=proto)
            self._bare = sentencepiece.SentencePieceProcessor(model_proto=proto + NO_DUMMY_PREFIX)
            self._inside = sentencepiece.SentencePieceProcessor(model_proto=proto + KEEP_SPACES)

        loaded(
            path,
            load,
            "the file may be cut short, or a git pointer instead of the file itself: copy it again",
        )
        self._dialect = dialect
        self._first_id = dialect.num_other_ids
        self._end_id: int = self._first_id + self._prefixed.vocab_size()  # of the model's pieces
        self._legacy = config.get("legacy") is not False
        marks = {
            role: self._piece(i)
            for role, i in dialect.special_pieces.items()
            if self._first_id <= i < self._end_id
        }
        own = self._own_special_tokens()
        self.special_tokens = {**own, **dialect.roles, **marks, **special_tokens}
        self._added = self._added_tokens(None if read else path.parent, config)
        self._by_id = {token.token_id: token for token in self._added.values()}
        self._by_id |= {token.token_id: token for token in self._spelled()}
        self._splitter = Splitter(
            {text: token for text, token in self._added.items() if text not in dialect.unseen},
            {before: self._added[word] for before, word in dialect.followers.items()},
        )
        self.vocab_size = max([self._end_id, *(i + 1 for i in self._by_id)])
        self._ends = self._ends_of(config)

    def described(self) -> Described:
        """What a tokenizer like this one is made of."""
        proto = self._prefixed.serialized_model_proto()
        added = tuple(self._added.values())
        return Described(proto, added, self._ends, self._legacy, self._dialect)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        first = True
        for piece, token in self._splitter.split(text):
            if piece:
                ids += self._ids(self._prefixed if first or self._legacy else self._bare, piece)
            first = False
            if token is not None:
                ids.append(token.token_id)
        return [*self._ends.first, *ids, *self._ends.last] if add_special_tokens else ids

    def encode_inside(self, text: str) -> list[int]:
        return self._ids(self._bare, text)

    encode_literal = encode_inside

    def encode_pair(
        self, text: str, second: str | None, most: int | None
    ) -> tuple[list[int], int | None]:
        return single(self.encode(text, True), self.encode(text, False), second, most)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        parts: list[str] = []
        run: list[int] = []  # sentencepiece ids since the last added token

        def text_of_run() -> str:
            return (self._inside if parts else self._prefixed).decode(run)

        for token_id in token_ids:
            added = self._by_id.get(token_id)
            if added is None:
                # A padded vocabulary has ids that no tokenizer knows; they have no text.
                known = self._first_id <= token_id < self._end_id
                run += [token_id - self._first_id] if known else []
            elif not (added.special and skip_special_tokens):
                parts += [text_of_run(), added.content]
                run = []
        return "".join([*parts, text_of_run()])

    def token_to_id(self, token: str) -> int | None:
        return self._added[token].token_id if token in self._added else self._piece_id(token)

    def vocabulary(self) -> dict[str, int]:
        ids = range(self._first_id, self._end_id)
        renamed = {token.token_id for token in self._added.values()}
        pieces = {self._piece(i): i for i in ids if i not in renamed}
        return {**pieces, **{text: token.token_id for text, token in self._added.items()}}

    def for_guides(self, eos_token_id: int) -> Any:
        from llguidance import TokenizerWrapper

        tokens = [self._bytes_of(token_id) for token_id in range(self.vocab_size)]
        special = [i for i, token in self._by_id.items() if token.special]
        special += [
            self._first_id + i
            for i in range(self._prefixed.vocab_size())
            if self._prefixed.is_control(i) or self._prefixed.is_unknown(i)
        ]
        return TokenizerWrapper(
            Pieces(tokens, sorted(set(special)), eos_token_id, self.encode_literal)
        )

    def _ids(self, processor: Any, text: str) -> list[int]:
        ids: list[int] = processor.encode(self._dialect.prepare(text))
        return [self._first_id + i for i in ids] if self._first_id else ids

    def _piece_id(self, piece: str) -> int | None:
        found: int = self._prefixed.piece_to_id(piece)  # of <unk> where there is none
        return self._first_id + found if self._prefixed.id_to_piece(found) == piece else None

    def _piece(self, token_id: int) -> str:
        piece: str = self._prefixed.id_to_piece(token_id - self._first_id)
        return piece

    def _bytes_of(self, token_id: int) -> bytes:
        added = self._by_id.get(token_id)
        if added is not None:
            return added.content.encode()
        if not self._first_id <= token_id < self._end_id:
            return b""
        piece = self._piece(token_id)
        if self._prefixed.is_byte(token_id - self._first_id):
            return bytes([int(piece[1:-1], 16)])  # <0x0A>
        return piece.replace(SENTENCEPIECE_SPACE, " ").encode()

    def _ends_of(self, config: Mapping[str, Any]) -> Ends:
        if self._dialect.ends is not None:
            found = [tuple(self._id_of(token) for token in end) for end in self._dialect.ends]
            return Ends(*found)
        ends = {**config, "add_bos_token": config.get("add_bos_token", True)}
        # add_bos_token and add_eos_token may both be null.
        return explicit_ends(ends, self.special_tokens, self.token_to_id) or Ends((), ())

    def _id_of(self, token: str) -> int:
        token_id = self.token_to_id(token)
        if token_id is None:
            raise UserError(
                f"the sentencepiece model has no token {token}, which this family puts around a "
                "text; copy the tokenizer files of the original checkpoint again"
            )
        return token_id

    def _spelled(self) -> list[AddedToken]:
        """The pieces that mean another text than they are written as."""
        ids = {text: self._piece_id(piece) for piece, text in self._dialect.spelled.items()}
        return [AddedToken(text, i, special=False) for text, i in ids.items() if i is not None]

    def _own_special_tokens(self) -> dict[str, str]:
        """The model's control pieces by role, for folders without a tokenizer_config.json."""
        model = self._prefixed
        roles = {"bos_token": model.bos_id(), "eos_token": model.eos_id()}
        roles["unk_token"] = model.unk_id()
        return {role: model.id_to_piece(i) for role, i in roles.items() if i >= 0}

    def _added_tokens(
        self, folder: Path | None, config: Mapping[str, Any]
    ) -> dict[str, AddedToken]:
        """Text -> token: what the config files add, and the roles found in the model itself."""
        added: dict[str, AddedToken] = {}
        path = (folder or Path()) / "added_tokens.json"
        found = {} if folder is None else read_json_object(path, missing_ok=True)
        for content, token_id in found.items():
            special = content in self.special_tokens.values()
            where = f"{path}: {content!r}"
            added[checked_content(content, where)] = AddedToken(
                content, checked_token_id(token_id, where), special
            )
        added |= added_by_config(path.parent, config)
        for token_id, content in enumerate(self._dialect.appended, self._end_id):
            added[content] = AddedToken(content, token_id, True)
        for content in self.special_tokens.values():
            piece_id = self._piece_id(content)
            if content not in added and piece_id is not None:
                added[content] = AddedToken(content, piece_id, True)
        added.pop("", None)
        return added
