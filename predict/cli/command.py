"""What every command line does around its work: streams, signals, errors as one line."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence

from predict.errors import EXIT_FAILURE, EXIT_USAGE, EngineError, UserError
from predict.system import console, notes
from predict.system.signals import Interrupted, Signals, exit_code


def command(interrupted: str = "interrupted") -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Makes main(argv=None), see run_command, of a function of the words of a command line."""

    def main_of(action: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(action)
        def main(argv: Sequence[str] | None = None, *more: object, **named: object) -> int:
            words = sys.argv[1:] if argv is None else argv
            return run_command(lambda signals: action(words, signals, *more, **named), interrupted)

        return main

    return main_of


def run_command(action: Callable[[Signals], int], interrupted: str = "interrupted") -> int:
    """Runs `action`, which returns the exit status, and turns what it raises into a line on stderr.

    interrupted: what is said when a signal ended it. With REGATTA_TRACEBACK set, errors that are no
    UserError are raised.
    """
    with console.guarded_streams(), notes.printed(), Signals() as signals:
        try:
            return action(signals)
        except KeyboardInterrupt as error:
            said = error.said if isinstance(error, Interrupted) else None
            console.say(said or interrupted)
            return exit_code(error)
        except Exception as error:
            if signals.number is not None:  # what a library made of the interruption
                console.say(interrupted)
                return exit_code(Interrupted(signals.number))
            message, status = explanation(error)
            console.say(f"error: {message}")
            return status


def explanation(error: Exception) -> tuple[str, int]:
    """What went wrong, in one line, and the exit status. Called while `error` is handled.

    With REGATTA_TRACEBACK set, errors that are no UserError are raised.
    """
    if isinstance(error, UserError):
        return str(error), error.exit_code
    if isinstance(error, ModuleNotFoundError):
        from predict.system.interpreter import explained_absence

        if absence := explained_absence(error.name):
            return absence, EXIT_USAGE
    if os.environ.get("REGATTA_TRACEBACK"):
        raise error
    if isinstance(error, EngineError):
        return str(error), EXIT_FAILURE
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    detail = " ".join(str(error).split()) or "no further detail"
    return f"{kind}{detail} (set REGATTA_TRACEBACK=1 to see where it comes from)", EXIT_FAILURE
