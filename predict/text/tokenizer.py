"""Text to token ids and back, from `tokenizer.json` or a sentencepiece model. Imports no Paddle."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from predict.errors import TokenizerError, UserError
from predict.system.files import json_type, read_json_object

if TYPE_CHECKING:
    from predict.text.chat_template import ChatTemplate

FAST_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SENTENCEPIECE_FILES = ("tokenizer.model", "sentencepiece.bpe.model", "spiece.model")
REPLACEMENT = "\ufffd"
SENTENCEPIECE_SPACE = "\u2581"
# Prompt tokens decoded before a continuation: enough for the longest UTF-8 sequence in byte tokens.
CONTEXT_TOKENS = 6
# Appended to a serialised sentencepiece model, it sets normalizer_spec.add_dummy_prefix (field 3 of
# field 3) to false: protobuf merges a repeated message, the later value wins.
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"
MAX_FILE_BYTES = 1 << 29  # a tokenizer.json of a large vocabulary has 35 MB
MAX_TOKEN_ID = 1 << 22  # config.json's vocab_size ends there too
MAX_ADDED_CHARACTERS = 512  # of one added token
MAX_EOS_IDS = 1024
SPECIAL_ROLES = tuple(f"{r}_token" for r in ("bos", "eos", "unk", "pad", "sep", "cls", "mask"))
# What a tokenizer is tried on when it is loaded: words, other scripts, digits, whitespace, nothing.
TRIAL_TEXTS = ("a", "Hello, wörld! 你好 🙂", "0123456789", " " * 100 + "\n\t", "a" * 64, "")
LIBRARY_PANIC = "PanicException"  # of pyo3; its module cannot be imported

Result = TypeVar("Result")


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

    def for_guides(self, eos_token_id: int) -> Any:
        """What llguidance.LLTokenizer takes."""
        ...


class _Guarded:
    """A backend whose libraries' failures, panics included, are TokenizerErrors."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.vocab_size = backend.vocab_size

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            return self._backend.encode(text, add_special_tokens)
        except BaseException as error:
            raise _as_ours(error, text) from None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        try:
            return self._backend.decode(token_ids, skip_special_tokens)
        except BaseException as error:
            raise _as_ours(error, token_ids) from None

    def token_to_id(self, token: str) -> int | None:
        try:
            return self._backend.token_to_id(token)
        except BaseException as error:
            raise _as_ours(error, token) from None

    def vocabulary(self) -> dict[str, int]:
        try:
            return self._backend.vocabulary()
        except BaseException as error:
            raise _as_ours(error, "its vocabulary") from None

    def encode_inside(self, text: str) -> list[int]:
        try:
            return self._backend.encode_inside(text)
        except BaseException as error:
            raise _as_ours(error, text) from None

    def for_guides(self, eos_token_id: int) -> Any:
        try:
            return self._backend.for_guides(eos_token_id)
        except BaseException as error:
            raise _as_ours(error, "its vocabulary") from None


def is_panic(error: BaseException) -> bool:
    """Whether a Rust library panicked: no Exception, so that nothing catches it by mistake."""
    return type(error).__name__ == LIBRARY_PANIC


def _as_ours(error: BaseException, met: str | Sequence[int]) -> BaseException:
    """The error to raise for a library's, which `met` (a text, or token ids) brought about."""
    passes = isinstance(error, (UserError, MemoryError))
    if passes or not (isinstance(error, Exception) or is_panic(error)):
        return error
    half = re.search("[\ud800-\udfff]", met) if isinstance(met, str) else None
    if half:
        return TokenizerError(
            f"a text has \\u{ord(half[0]):04x} alone at character {half.start() + 1}, half of a "
            "surrogate pair, which is no character; write the whole pair, or leave it out"
        )
    what = f"a text of {len(met)} characters" if isinstance(met, str) else f"{len(met)} token ids"
    return TokenizerError(
        f"the tokenizer failed on {what}: {_said(error)}; change the text, or repair the model's "
        "tokenizer files"
    )


def _said(error: BaseException) -> str:
    """What a library's error says, a panic named as one."""
    said = " ".join(str(error).split())[:300] or type(error).__name__
    return f"its library panicked: {said}" if is_panic(error) else said


def _loaded(path: Path, load: Callable[[], Result], hint: str) -> Result:
    """What `load` makes of a tokenizer's file; any failure of it is a UserError with the hint."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise UserError(f"{path} has {size} bytes; a tokenizer may have {MAX_FILE_BYTES}")
        with _quiet_panics():
            return load()
    except (UserError, MemoryError):
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise UserError(f"cannot read the tokenizer {path}: {_said(error)}; {hint}") from None


@contextmanager
def _quiet_panics() -> Iterator[None]:
    """Keeps what a panicking library prints on stderr from the user; all else is passed on."""
    try:
        kept = os.dup(2)
    except OSError:  # there is no stderr
        yield
        return
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        panicked = False
        try:
            yield
        except BaseException as error:
            panicked = is_panic(error)
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            said.seek(0)
            # A panic's message is in the error already.
            if not panicked and (text := said.read()):
                os.write(2, text)


def _try(path: Path, backend: Backend) -> None:
    """Raises UserError naming the file when the tokenizer panics on plain texts or on its ids.

    Its library's ordinary errors pass: a small vocabulary may well lack a character.
    """

    def attempt() -> None:
        ids: list[int] = [0, 1, backend.vocab_size - 1]
        for text in TRIAL_TEXTS:
            try:
                found = backend.encode(text, True)
                backend.decode(found, False)
                ids += found
            except Exception:
                continue
        try:
            backend.decode([i for i in ids if i >= 0], True)
        except Exception:  # as above
            return

    _loaded(
        path,
        attempt,
        "it cannot encode or decode plain texts: a setting in the file is damaged; copy it again, "
        "or use the tokenizer files of the original checkpoint",
    )


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
        self._backend: Backend = _Guarded(backend)
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
        from predict.text.chat_template import load_chat_template

        folder = Path(path)
        config = read_json_object(folder / CONFIG_FILE, missing_ok=True)
        special_tokens = _special_tokens(folder, config)
        _check_switches(folder, config)
        backend: Backend
        path = folder / FAST_FILE
        if path.is_file():
            backend = _FastBackend(path, config, special_tokens)
        else:
            path = _sentencepiece_file(folder)
            backend = _SentencePieceBackend(path, config, special_tokens)
            special_tokens = backend.special_tokens
        if not 0 < backend.vocab_size <= MAX_TOKEN_ID:
            raise UserError(
                f"the tokenizer {path} has {backend.vocab_size} token ids (allowed: 1 to "
                f"{MAX_TOKEN_ID}); the id of an added token may be damaged"
            )
        _try(path, backend)
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

    def for_guides(self, eos_token_id: int) -> Any:
        """What llguidance.LLTokenizer takes: the bytes of each token, and how text is cut."""
        return self._backend.for_guides(eos_token_id)

    def _special_id(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self._backend.token_to_id(token)


class _FastBackend:
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
            self._ends = _explicit_ends(config, special_tokens, self.token_to_id)
            added = self._tokenizer.get_added_tokens_decoder()
            self.vocab_size = max([self._tokenizer.get_vocab_size(), *(i + 1 for i in added)])

        _loaded(
            path,
            load,
            "the file may be cut short or written by a newer tokenizers library: copy it again, or "
            "pip install -U tokenizers",
        )

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


@dataclass(frozen=True)
class _AddedToken:
    content: str
    token_id: int
    special: bool
    lstrip: bool = False  # swallows whitespace on its left in the text
    rstrip: bool = False


class _Splitter:
    """Finds added tokens in a text, the longest of those that begin first.

    Dictionary look-ups where a token may begin: a pattern of thousands of alternatives, with the
    whitespace that tokens swallow, took quadratic time on a long run of spaces.
    """

    def __init__(self, added: Mapping[str, _AddedToken]) -> None:
        self._added = added
        lengths: dict[str, set[int]] = {}
        for content in added:
            lengths.setdefault(content[0], set()).add(len(content))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        firsts = "".join(map(re.escape, sorted(lengths)))
        self._first = re.compile(f"[{firsts}]") if firsts else None
        self._space = re.compile(r"\s*")

    def split(self, text: str) -> Iterator[tuple[str, _AddedToken | None]]:
        """The text's pieces, each with the added token behind it; the last has none."""
        begin = 0  # of the piece
        at = 0
        while self._first and (match := self._first.search(text, at)):
            token = self._token_at(text, match.start())
            if token is None:
                at = match.end()
                continue
            piece = text[begin : match.start()]
            yield piece.rstrip() if token.lstrip else piece, token
            begin = match.start() + len(token.content)
            if token.rstrip and (space := self._space.match(text, begin)):
                begin = space.end()
            at = begin
        yield text[begin:], None

    def _token_at(self, text: str, start: int) -> _AddedToken | None:
        for length in self._lengths[text[start]]:
            token = self._added.get(text[start : start + length])
            if token is not None:
                return token
        return None


class _SentencePieceBackend:
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

        _loaded(
            path,
            load,
            "the file may be cut short, or a git pointer instead of the file itself: copy it again",
        )
        self._legacy = config.get("legacy") is not False
        self.special_tokens = {**self._own_special_tokens(), **special_tokens}
        self._added = self._added_tokens(path.parent, config)
        self._by_id = {token.token_id: token for token in self._added.values()}
        self._splitter = _Splitter(self._added)
        self._num_pieces: int = self._prefixed.vocab_size()
        self.vocab_size = max([self._num_pieces, *(i + 1 for i in self._by_id)])
        ends = {**config, "add_bos_token": config.get("add_bos_token", True)}
        found = _explicit_ends(ends, self.special_tokens, self.token_to_id)
        self._ends = found or _Ends((), ())  # add_bos_token and add_eos_token may both be null

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        first = True
        for piece, token in self._splitter.split(text):
            ids += self._encode_plain(piece, first)
            first = False
            if token is not None:
                ids.append(token.token_id)
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

    def for_guides(self, eos_token_id: int) -> Any:
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

    def _added_tokens(self, folder: Path, config: Mapping[str, Any]) -> dict[str, _AddedToken]:
        """Text -> token: what the config files add, and the roles found in the model itself."""
        added: dict[str, _AddedToken] = {}
        path = folder / "added_tokens.json"
        for content, token_id in read_json_object(path, missing_ok=True).items():
            special = content in self.special_tokens.values()
            where = f"{path}: {content!r}"
            added[_content(content, where)] = _AddedToken(
                content, _token_id(token_id, where), special
            )
        where = f"{folder / CONFIG_FILE}: added_tokens_decoder"
        decoder = config.get("added_tokens_decoder") or {}
        if not isinstance(decoder, dict):
            raise UserError(f"{where} is {json_type(decoder)} (allowed: an object, null)")
        for key, entry in decoder.items():
            made = _added_token(key, entry, where)
            added[made.content] = made
        for content in self.special_tokens.values():
            token_id = self._prefixed.piece_to_id(content)
            known = self._prefixed.id_to_piece(token_id) == content
            if content not in added and known:
                added[content] = _AddedToken(content, token_id, True)
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


def _added_token(key: str, entry: Any, where: str) -> _AddedToken:
    """One entry of added_tokens_decoder, its key the id. Raises UserError naming what is wrong."""
    where = f"{where}: {key[:40]!r}"
    if not isinstance(entry, dict):
        raise UserError(f"{where} is {json_type(entry)} (allowed: an object with content)")
    switches = {name: entry.get(name) or False for name in ("special", "lstrip", "rstrip")}
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise UserError(f"{where}: {name} is {json_type(value)} (allowed: true, false)")
    return _AddedToken(_content(entry.get("content"), where), _token_id(key, where), **switches)


def _content(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_ADDED_CHARACTERS:
        got = f"{len(value)} characters" if isinstance(value, str) else json_type(value)
        raise UserError(
            f"{where}: content is {got} (allowed: a text of at most {MAX_ADDED_CHARACTERS} "
            "characters)"
        )
    return value


def _token_id(value: Any, where: str) -> int:
    """A token id, as a number or as JSON's keys write one."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_TOKEN_ID:
        raise UserError(
            f"{where}: the token id is {str(value)[:40]!r} (allowed: a whole number from 0 to "
            f"{MAX_TOKEN_ID - 1})"
        )
    return value


def _check_switches(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises UserError where tokenizer_config.json has another type in a key that is read."""
    for name in ("add_bos_token", "add_eos_token", "legacy"):
        value = config.get(name)
        if not isinstance(value, (bool, type(None))):
            raise UserError(
                f"{folder / CONFIG_FILE}: {name} is {json_type(value)} (allowed: true, false, null)"
            )


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Role -> text from tokenizer_config.json, else special_tokens_map.json."""
    found: dict[str, str] = {}
    path = folder / "special_tokens_map.json"
    files = ((path, read_json_object(path, missing_ok=True)), (folder / CONFIG_FILE, config))
    for path, values in files:
        for role, value in values.items():
            if not role.endswith("_token") or value is None:
                continue
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[role] = text
            elif role in SPECIAL_ROLES:
                raise UserError(
                    f"{path}: {role} is {json_type(value)} (allowed: a text, an object whose "
                    "content is a text, null)"
                )
    return found


def _config_eos_token_ids(folder: Path) -> list[int]:
    """The ids that generation_config.json and config.json end a text with."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        value = read_json_object(path, missing_ok=True, constants=True).get("eos_token_id")
        values = [] if value is None else value if isinstance(value, list) else [value]
        whole = all(isinstance(i, int) and not isinstance(i, bool) for i in values)
        if not whole or len(values) > MAX_EOS_IDS:
            raise UserError(
                f"{path}: eos_token_id is {str(value)[:40]} (allowed: a token id, a list of at "
                f"most {MAX_EOS_IDS}, null)"
            )
        # Some say -1 for none.
        ids += [i for i in values if 0 <= i < MAX_TOKEN_ID]
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
