"""Where an export comes to be: a folder that appears whole, at the end, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from predict.cli.identity import input_paths
from predict.config.engine import EngineConfig
from predict.errors import EXIT_FAILURE, EXIT_USAGE, UserError
from predict.system.notes import LOG
from predict.system.outputs import check_folder, locked, whole_folder
from predict.system.signals import Signals


@dataclass(frozen=True)
class Kind:
    """What an export writes."""

    what: str  # in words
    list_name: str  # of the file that lists all others
    patterns: tuple[str, ...]  # names of files that an export may have
    sizes: Callable[[Path], Mapping[str, int]]  # of the files that a folder's list has, in bytes
    subfolders: re.Pattern[str] | None = None  # their names, where it may have some

    def check_replaced(self, folder: Path) -> None:
        """Raises UserError where a folder may not be replaced: no export wrote all of it."""
        if not (folder / self.list_name).is_file():
            raise UserError(
                f"--overwrite replaces earlier exports, and {folder} holds none (no "
                f"{self.list_name}); choose another --output_path, or empty it yourself"
            )
        for path in sorted(folder.rglob("*")):
            if self._is_subfolder(path, folder):
                continue
            if path.is_dir() or not any(path.match(pattern) for pattern in self.patterns):
                raise UserError(
                    f"--overwrite would remove {path}, which no export wrote; move it away, or "
                    "choose another --output_path"
                )

    def _is_subfolder(self, path: Path, folder: Path) -> bool:
        if self.subfolders is None or path.parent != folder or path.is_symlink():
            return False
        return path.is_dir() and self.subfolders.fullmatch(path.name) is not None

    def is_whole(self, folder: Path) -> bool:
        """Whether a folder holds an export and nothing else: the files that it lists, whole."""
        try:
            self.check_replaced(folder)
            found = {name: path.stat().st_size for name, path in files_of(folder)}
            found.pop(self.list_name, None)
            return found == self.sizes(folder)
        except (UserError, OSError, KeyError, TypeError, AttributeError):
            return False


def files_of(folder: Path) -> list[tuple[str, Path]]:
    """The files of an export by name, those in subfolders too."""
    paths = sorted(path for path in folder.rglob("*") if not path.is_dir())
    return [(path.relative_to(folder).as_posix(), path) for path in paths]


@contextlib.contextmanager
def place_for(config: EngineConfig, path: Path, overwrite: bool, kind: Kind) -> Iterator[None]:
    """Room for an export at `path`, a new or an empty folder, or an earlier export.

    Raises UserError where none can be there.
    """

    def check() -> None:
        check_folder(
            "output_path",
            path,
            folders=input_paths(config),
            overwrite=kind.check_replaced if overwrite or kind.is_whole(path) else None,
        )

    check()
    with _parents(path, kind.what), locked("output_path", path):
        check()  # again: another process may have written it in between
        if not overwrite and kind.is_whole(path):
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
def _parents(path: Path, what: str) -> Iterator[None]:
    """Makes the folders above `path`; removes them where nothing came to be in them."""
    parents = Path(os.path.realpath(path)).parents
    made = [folder for folder in parents if not folder.exists()]
    try:
        parents[0].mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_written(path, error, what) from None
    try:
        yield
    finally:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _not_written(path: Path, error: OSError, what: str) -> UserError:
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
