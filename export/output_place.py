"""Where an export comes to be: a folder that appears whole, at the end, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from predict.cli.identity import input_paths
from predict.config.engine import EngineConfig
from predict.errors import EXIT_FAILURE, EXIT_USAGE, UserError
from predict.system.notes import LOG
from predict.system.outputs import check_folder, locked, whole_folder
from predict.system.signals import Signals


@contextlib.contextmanager
def place_for(
    config: EngineConfig,
    path: Path,
    overwrite: bool,
    check_replaced: Callable[[Path], None],
    holds_export: Callable[[Path], bool],
) -> Iterator[None]:
    """Room for an export at `path`, a new or an empty folder, or an earlier export.

    check_replaced: raises UserError where a folder may not be replaced. holds_export: whether one
    holds an export that is whole, and nothing else. Raises UserError where none can be there.
    """

    def check() -> None:
        check_folder(
            "output_path",
            path,
            folders=input_paths(config),
            overwrite=check_replaced if overwrite or holds_export(path) else None,
        )

    check()
    with _parents(path), locked("output_path", path):
        check()  # again: another process may have written it in between
        if not overwrite and holds_export(path):
            LOG.info(f"{path} holds an earlier export, which this one replaces")
        yield


@contextlib.contextmanager
def written(path: Path, signals: Signals | None, what: str) -> Iterator[Path]:
    """An empty folder, which takes the place of `path` at the end. what: the export, in words."""
    try:
        final = partial(unbroken, signals, f"{what} is just being put in its place")
        with whole_folder(path, final) as folder:
            yield folder
    except OSError as error:
        raise _not_written(path, error, what) from None


@contextlib.contextmanager
def _parents(path: Path) -> Iterator[None]:
    """Makes the folders above `path`; removes them where nothing came to be in them."""
    parents = Path(os.path.realpath(path)).parents
    made = [folder for folder in parents if not folder.exists()]
    try:
        parents[0].mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_written(path, error) from None
    try:
        yield
    finally:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _not_written(path: Path, error: OSError, what: str = "the static model") -> UserError:
    return UserError(
        f"{what} cannot be written to {path}: {error.strerror or error}; choose another "
        "--output_path, or make room there",
        EXIT_FAILURE if error.errno == errno.ENOSPC else EXIT_USAGE,
    )


@contextlib.contextmanager
def unbroken(signals: Signals | None, what: str) -> Iterator[None]:
    """Ends the export if a signal came; one that comes now waits, and is told `what`."""
    if signals is None:
        yield
        return
    signals.check()
    with signals.held(what):
        yield
