"""Exceptions, and the words of their messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from predict.names import hint

EXIT_FAILURE = 1
EXIT_USAGE = 2


class UserError(ValueError):
    """A wrong flag, file or model: what was got, what is allowed, what to do, in one paragraph.

    The command line prints it without a traceback and exits with `exit_code`. A ValueError, so that
    users of the Python API can catch it without an import.
    """

    def __init__(self, message: str, exit_code: int = EXIT_USAGE) -> None:
        super().__init__(" ".join(message.split()))
        self.exit_code = exit_code


class TokenizerError(UserError):
    """The tokenizer could not encode or decode: the end of one request, not of the run."""


class EngineError(RuntimeError):
    """The device or the engine's state is broken: no request can go on."""


def quoted(value: object, most: int = 60) -> str:
    """repr(value) for a message, cut where strangers made it long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, a list in itself
        text = f"<{type(value).__name__}>"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def unknown_key(where: str, key: object, known: Sequence[str]) -> UserError:
    """The error for a key that a mapping cannot have; names the nearest known one."""
    said = f"{where} has the key {quoted(key)} (allowed: {', '.join(known)})"
    return UserError(said + hint(str(key), known))


def one_of(name: str, got: object, allowed: Iterable[str]) -> UserError:
    """The error for a value outside a fixed set; names the nearest allowed value."""
    allowed = list(allowed)
    said = f"{name} {got!r} is not known (allowed: {', '.join(allowed)})"
    return UserError(said + hint(str(got), allowed))


def flag_word(flag: str) -> str:
    """A flag's name with --; names in capitals (FROM, TO) and flags are returned unchanged."""
    return flag if flag.isupper() or flag.startswith("--") else f"--{flag}"
