"""Text to token ids and back, from `tokenizer.json` or a sentencepiece model. Imports no Paddle."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from predict.errors import UserError
from predict.files import read_json_object

if TYPE_CHECKING:
    from predict.chat_template import ChatTemplate

FAST_FILE = "tokenizer.json"
SENTENCEPIECE_FILES = ("tokenizer.model", "sentencepiece.bpe.model", "spiece.model")
REPLACEMENT = "\ufffd"
# Prompt tokens decoded before a continuation: enough for the longest UTF-8 sequence in byte tokens.
CONTEXT_TOKENS = 6
# Appended to a serialised sentencepiece model, it sets normalizer_spec.add_dummy_prefix (field 3 of
# field 3) to false: protobuf merges a repeated message, the later value wins.
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


class Backend(Protocol):
    """What differs between tokenizer libraries."""

    vocab_size: int  # ids, added tokens included

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids; special tokens written in the text become their ids."""
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text; ids outside the vocabulary have none."""
        ...

    def token_to_id(self, token: str) -> int | None:
        """The id of one token's text, or None."""
        ...

    def vocabulary(self) -> dict[str, int]:
        """The id of each token."""
        ...

    def encode_inside(self, text: str) -> list[int]:
        """Token ids of a piece of a text: no special tokens, no space put in front."""
        ...


class Tokenizer:
    """A checkpoint's tokenizer, its special tokens and its chat template."""

    def __init__(
        self,
        backend: Backend,
        special_tokens: Mapping[str, str],
        extra_eos_token_ids: Sequence[int] = (),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        """`special_tokens` maps "bos_token", "eos_token", "pad_token" and so on to their text."""
        self._backend = backend
        self.special_tokens = dict(special_tokens)
        self.vocab_size = backend.vocab_size
        self.bos_token_id = self._special_id("bos_token")
        self.pad_token_id = self._special_id("pad_token")
        eos_token_id = self._special_id("eos_token")
        ids = [] if eos_token_id is None else [eos_token_id]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*ids, *extra_eos_token_ids]))
        self.chat_template = chat_template

    @staticmethod
    def exists(path: str | Path) -> bool:
        """Whether the folder holds a tokenizer that `from_dir` reads."""
        return any((Path(path) / name).is_file() for name in (FAST_FILE, *SENTENCEPIECE_FILES))

    @classmethod
    def from_dir(cls, path: str | Path, chat_template: str | None = None) -> Tokenizer:
        """The tokenizer of a checkpoint folder.

        `chat_template` is the flag's value: None keeps the tokenizer's own, "none" turns it off, a
        file or a folder replaces it. Raises UserError when a file is missing or damaged.
        """
        from predict.chat_template import load_chat_template

        folder = Path(path)
        config = read_json_object(folder / "tokenizer_config.json", missing_ok=True)
        special_tokens = _special_tokens(folder, config)
        backend: Backend
        if (folder / FAST_FILE).is_file():
            backend = _FastBackend(folder / FAST_FILE, config, special_tokens)
        else:
            backend = _SentencePieceBackend(_sentencepiece_file(folder), config, special_tokens)
            special_tokens = backend.special_tokens
        return cls(
            backend,
            special_tokens,
            _config_eos_token_ids(folder),
            load_chat_template(folder, chat_template, special_tokens),
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in the text become their ids."""
        return self._backend.encode(text, add_special_tokens)

    def encode_prompt(self, text: str, templated: bool) -> list[int]:
        """Token ids of a prompt; a rendered chat template already holds its special tokens."""
        return self._backend.encode(text, not templated)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids` standing alone: a sentencepiece model drops one leading space."""
        return self._backend.decode(token_ids, skip_special_tokens)

    def vocabulary(self) -> dict[str, int]:
        """The id of each token, special and added ones included."""
        return self._backend.vocabulary()

    def decode_continuation(
        self,
        prompt_token_ids: Sequence[int],
        token_ids: Sequence[int],
        skip_special_tokens: bool = True,
    ) -> str:
        """Text that `token_ids` add after the prompt, the leading space included.

        Decodes the prompt's last tokens with them, since neither sentencepiece's leading space nor
        a character whose bytes began in the prompt is seen from the output alone.
        """
        context = list(prompt_token_ids[-CONTEXT_TOKENS:])
        before = self.decode(context, skip_special_tokens).rstrip(REPLACEMENT)
        after = self.decode([*context, *token_ids], skip_special_tokens)
        if before and after.startswith(before):
            return after[len(before) :]
        return self.decode(token_ids, skip_special_tokens)

    def encode_word(self, word: str) -> list[tuple[int, ...]]:
        """The token ids of a word at the start of a text, within one, and behind a space.

        Without repeats. The variant behind a space counts only where the space changes the first
        token and adds none, as in vLLM: a space of its own could not be told from any other.
        """
        word = word.strip()
        first, inside = self._backend.encode(word, False), self._backend.encode_inside(word)
        variants = [tuple(first), tuple(inside)]
        spaced = self._backend.encode_inside(" " + word)
        if len(spaced) == len(inside) and spaced[:1] != inside[:1]:
            variants.append(tuple(spaced))
        return [ids for ids in dict.fromkeys(variants) if ids]

    def token_to_id(self, token: str) -> int | None:
        """The id of one token's text, or None when the vocabulary lacks it."""
        return self._backend.token_to_id(token)

    def _special_id(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self._backend.token_to_id(token)


class _FastBackend:
    """`tokenizer.json`, run by the tokenizers library."""

    def __init__(
        self, path: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]
    ) -> None:
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise UserError(
                f"cannot read the tokenizer {path}: {error}; the file may be cut short or written "
                "by a newer tokenizers library: copy it again, or pip install -U tokenizers"
            ) from None
        # A file saved during training may carry settings that would silently cut or pad prompts.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._ends = _explicit_ends(config, special_tokens, self.token_to_id)
        added = self._tokenizer.get_added_tokens_decoder()
        self.vocab_size = max([self._tokenizer.get_vocab_size(), *(i + 1 for i in added)])

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


@dataclass(frozen=True)
class _AddedToken:
    content: str
    token_id: int
    special: bool
    lstrip: bool  # swallows whitespace on its left in the text
    rstrip: bool

    @property
    def pattern(self) -> str:
        left, right = (r"\s*" if strip else "" for strip in (self.lstrip, self.rstrip))
        return f"{left}({re.escape(self.content)}){right}"


class _SentencePieceBackend:
    """A sentencepiece model, with the tokens that the config files add to it."""

    def __init__(
        self, path: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]
    ) -> None:
        import sentencepiece

        try:
            proto = path.read_bytes()
            # Two processors: text after a special token gets no dummy prefix unless `legacy`, and
            # decoding must keep the space that the prefixed processor would strip.
            self._prefixed = sentencepiece.SentencePieceProcessor(model_proto=proto)
            self._bare = sentencepiece.SentencePieceProcessor(model_proto=proto + NO_DUMMY_PREFIX)
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"cannot read the tokenizer {path}: {error}; the file may be cut short, or a git "
                "pointer instead of the file itself: copy it again"
            ) from None
        self._adds_prefix = self._prefixed.encode("a") != self._bare.encode("a")
        self._legacy = config.get("legacy") is not False
        self.special_tokens = {**self._own_special_tokens(), **special_tokens}
        self._added = self._added_tokens(path.parent, config)
        self._by_id = {token.token_id: token for token in self._added.values()}
        self._splitter = _splitter(self._added.values())
        self._num_pieces: int = self._prefixed.vocab_size()
        self.vocab_size = max([self._num_pieces, *(i + 1 for i in self._by_id)])
        ends = {"add_bos_token": True, **config}
        found = _explicit_ends(ends, self.special_tokens, self.token_to_id)
        assert found is not None  # add_bos_token is always there
        self._ends = found

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        end = 0
        for match in self._splitter.finditer(text) if self._splitter else ():
            ids += self._encode_plain(text[end : match.start()], first=end == 0)
            ids.append(self._added[match[match.lastindex or 0]].token_id)
            end = match.end()
        ids += self._encode_plain(text[end:], first=end == 0)
        return [*self._ends.first, *ids, *self._ends.last] if add_special_tokens else ids

    def encode_inside(self, text: str) -> list[int]:
        ids: list[int] = self._bare.encode(text)
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
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
        if token in self._added:
            return self._added[token].token_id
        token_id: int = self._prefixed.piece_to_id(token)
        return token_id if self._prefixed.id_to_piece(token_id) == token else None

    def vocabulary(self) -> dict[str, int]:
        pieces = {self._prefixed.id_to_piece(i): i for i in range(self._num_pieces)}
        return {**pieces, **{text: token.token_id for text, token in self._added.items()}}

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

    def _added_tokens(self, folder: Path, config: Mapping[str, Any]) -> dict[str, _AddedToken]:
        """Text -> token: what the config files add, and the roles found in the model itself."""
        added: dict[str, _AddedToken] = {}
        for content, token_id in read_json_object(
            folder / "added_tokens.json", missing_ok=True
        ).items():
            special = content in self.special_tokens.values()
            added[content] = _AddedToken(content, int(token_id), special, False, False)
        for token_id, entry in (config.get("added_tokens_decoder") or {}).items():
            added[entry["content"]] = _AddedToken(
                entry["content"],
                int(token_id),
                bool(entry.get("special")),
                bool(entry.get("lstrip")),
                bool(entry.get("rstrip")),
            )
        for content in self.special_tokens.values():
            token_id = self._prefixed.piece_to_id(content)
            known = self._prefixed.id_to_piece(token_id) == content
            if content not in added and known:
                added[content] = _AddedToken(content, token_id, True, False, False)
        return added


@dataclass(frozen=True)
class _Ends:
    first: tuple[int, ...]
    last: tuple[int, ...]


def _explicit_ends(
    config: Mapping[str, Any], special_tokens: Mapping[str, str], token_to_id: Any
) -> _Ends | None:
    """The ids put around a text when the config says so; None when it leaves that to the file."""
    wanted = [config.get(f"add_{end}_token") for end in ("bos", "eos")]
    if all(value is None for value in wanted):
        return None
    ids: list[tuple[int, ...]] = []
    for end, value in zip(("bos", "eos"), wanted, strict=True):
        token = special_tokens.get(f"{end}_token")
        token_id = None if token is None else token_to_id(token)
        ids.append((token_id,) if value and token_id is not None else ())
    return _Ends(*ids)


def _splitter(added: Any) -> re.Pattern[str] | None:
    """A pattern that finds added tokens in a text, the longest first."""
    longest_first = sorted(added, key=lambda token: -len(token.content))
    patterns = [token.pattern for token in longest_first if token.content]
    return re.compile("|".join(patterns)) if patterns else None


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Role -> text from tokenizer_config.json, else special_tokens_map.json."""
    merged = {
        **read_json_object(folder / "special_tokens_map.json", missing_ok=True),
        **{key: value for key, value in config.items() if value is not None},
    }
    found: dict[str, str] = {}
    for role, value in merged.items():
        if role.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[role] = text
    return found


def _config_eos_token_ids(folder: Path) -> list[int]:
    """The ids that generation_config.json and config.json end a text with."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = read_json_object(folder / name, missing_ok=True).get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        ids += [i for i in values if isinstance(i, int) and not isinstance(i, bool)]
    return ids


def _sentencepiece_file(folder: Path) -> Path:
    """The folder's sentencepiece model; UserError naming what was looked for when it has none."""
    for name in SENTENCEPIECE_FILES:
        if (folder / name).is_file():
            return folder / name
    raise UserError(
        f"{folder} has no tokenizer (looked for {FAST_FILE}, {', '.join(SENTENCEPIECE_FILES)}); "
        "copy the tokenizer files of the checkpoint beside its weights"
    )
