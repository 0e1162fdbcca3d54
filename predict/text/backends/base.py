"""The interface of tokenizer libraries, and their failures as errors of ours."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from predict.errors import TokenizerError, UserError

MAX_FILE_BYTES = 1 << 29  # a tokenizer.json of a large vocabulary has 35 MB
# Texts to try a tokenizer on when it is loaded: words, other scripts, digits, whitespace, nothing.
TRIAL_TEXTS = ("a", "Hello, wörld! 你好 🙂", "0123456789", " " * 100 + "\n\t", "a" * 64, "")
LIBRARY_PANIC = "PanicException"  # of pyo3; its module cannot be imported

BackendResult = TypeVar("BackendResult")


class Backend(Protocol):
    """A tokenizer of one library."""

    vocab_size: int  # ids, added tokens included

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids; special tokens written in the text become their ids."""
        ...

    def encode_pair(
        self, text: str, second: str | None, most: int | None
    ) -> tuple[list[int], int | None]:
        """Ids of a text, or of a pair, with what the files put around; see Tokenizer."""
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

    def encode_literal(self, text: str) -> list[int]:
        """Token ids of a piece of a text in which special tokens are not read."""
        ...

    def for_guides(self, eos_token_id: int) -> Any:
        """The argument of llguidance.LLTokenizer."""
        ...


@dataclass(frozen=True)
class Pieces:
    """A tokenizer as llguidance's TokenizerWrapper asks for it."""

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
class Ends:
    """The ids put in front of a text and behind it."""

    first: tuple[int, ...]
    last: tuple[int, ...]


def explicit_ends(
    config: Mapping[str, Any], special_tokens: Mapping[str, str], token_to_id: Any
) -> Ends | None:
    """The ids that the config puts around a text; None where it does not say."""
    wanted = [config.get(f"add_{end}_token") for end in ("bos", "eos")]
    if all(value is None for value in wanted):
        return None
    ids: list[tuple[int, ...]] = []
    for end, value in zip(("bos", "eos"), wanted, strict=True):
        token = special_tokens.get(f"{end}_token")
        token_id = None if token is None else token_to_id(token)
        ids.append((token_id,) if value and token_id is not None else ())
    return Ends(*ids)


def single(
    ids: list[int], bare: list[int], second: str | None, most: int | None
) -> tuple[list[int], None]:
    """`Backend.encode_pair` of a text, `bare` without what stands around it."""
    if second is not None:
        raise UserError(
            "this tokenizer's files do not say how a pair of texts is written (a tokenizer.json "
            "does); copy the model's tokenizer.json beside its weights"
        )
    if most is not None and len(ids) > most:
        kept = bare[: max(most - (len(ids) - len(bare)), 0)]
        at = next((i for i in range(len(ids)) if ids[i : i + len(bare)] == bare), 0)
        ids = [*ids[:at], *kept, *ids[at + len(bare) :]][:most]
    return ids, None


def check_room(room: int, most: int) -> None:
    """Raises UserError where the first text of a pair leaves no token for the second."""
    if room < 1:
        raise UserError(
            f"of {most} tokens the first text of a pair, or the query, leaves none for the second; "
            "shorten it, or allow more tokens"
        )


def guarded(method: Callable[..., BackendResult], *arguments: Any) -> BackendResult:
    """The result of a backend's method. Failures and panics of its library are TokenizerErrors."""
    try:
        return method(*arguments)
    except BaseException as error:
        raise _as_ours(error, *arguments[:1]) from None


def is_panic(error: BaseException) -> bool:
    """Whether a Rust library panicked, which raises no subclass of Exception."""
    return type(error).__name__ == LIBRARY_PANIC


def _as_ours(error: BaseException, given: str | Sequence[int] | int = 0) -> BaseException:
    """The error to raise for a library's. given: the text or token ids that it failed on."""
    passes = isinstance(error, (UserError, MemoryError))
    if passes or not (isinstance(error, Exception) or is_panic(error)):
        return error
    half = re.search("[\ud800-\udfff]", given) if isinstance(given, str) else None
    if half:
        return TokenizerError(
            f"a text has \\u{ord(half[0]):04x} alone at character {half.start() + 1}, half of a "
            "surrogate pair, which is no character; write the whole pair, or leave it out"
        )
    what = "its vocabulary"
    if not isinstance(given, int):
        size = len(given)
        what = f"a text of {size} characters" if isinstance(given, str) else f"{size} token ids"
    return TokenizerError(
        f"the tokenizer failed on {what}: {said(error)}; change the text, or repair the model's "
        "tokenizer files"
    )


def said(error: BaseException) -> str:
    """The text of a library's error; a panic is named as one."""
    text = " ".join(str(error).split())[:300] or type(error).__name__
    return f"its library panicked: {text}" if is_panic(error) else text


def loaded(path: Path, load: Callable[[], BackendResult], hint: str) -> BackendResult:
    """The result of loading a tokenizer's file; any failure is a UserError with the hint."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise UserError(f"{path} has {size} bytes; a tokenizer may have {MAX_FILE_BYTES}")
        with quiet_panics():
            return load()
    except (UserError, MemoryError):
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise UserError(f"cannot read the tokenizer {path}: {said(error)}; {hint}") from None


@contextmanager
def quiet_panics() -> Iterator[None]:
    """Drops what a library prints on stderr when it panics; passes on all other output."""
    try:
        kept = os.dup(2)
    except OSError:  # there is no stderr
        yield
        return
    with tempfile.TemporaryFile() as printed:
        os.dup2(printed.fileno(), 2)
        panicked = False
        try:
            yield
        except BaseException as error:
            panicked = is_panic(error)
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            printed.seek(0)
            # A panic's message is in the error already.
            if not panicked and (text := printed.read()):
                os.write(2, text)


def try_backend(path: Path, backend: Backend) -> None:
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

    loaded(
        path,
        attempt,
        "it cannot encode or decode plain texts: a setting in the file is damaged; copy it again, "
        "or use the tokenizer files of the original checkpoint",
    )
