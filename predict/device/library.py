"""Finds, checks and loads the compiled operator library: the one place that does.

`csrc/build.py` writes predict/lib/libregatta_cpu.so and, beside it, libregatta_cpu.json, which says
what the library was built for and its digest. A library that does not fit, or is not the file that
was built, is refused here, by name and with the command that puts it right, before the dynamic
linker sees it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from predict.device import built
from predict.device.built import Metadata
from predict.errors import UserError
from predict.system import signals
from predict.system.notes import LOG

ABI = 12  # the number in csrc/include/regatta/abi.h that this Python code was written for
LIBRARY_NAME = "libregatta_cpu.so"
METADATA_NAME = "libregatta_cpu.json"
BUILD_ERROR_NAME = "build_error.txt"  # why the last `pip install` built no library
SANITIZED_PREFIX = "sanitize-"  # of the folders in LIBRARY_DIR with builds for testing alone
LIBRARY_DIR = Path(__file__).resolve().parents[1] / "lib"
SOURCE_DIR = Path(__file__).resolve().parents[2] / "csrc"
GLOG_LEVEL = "_ZN3fLI17FLAGS_minloglevelE"  # in libpaddle.so: the least level that is written
GLOG_WARNING, GLOG_ERROR = 1, 2
# Of csrc/: what the CPU library is made from.
SOURCE_FOLDERS = ("include", "cpu", "runtime", "blocks", "paddle")


class LibraryError(UserError):
    """The compiled library does not fit or does not load; the message names the fix."""


@dataclass(frozen=True)
class Library:
    """The loaded library: its operators are registered with Paddle, its C functions callable."""

    path: Path
    metadata: Metadata
    operators: tuple[str, ...]
    handle: ctypes.CDLL

    def op(self, name: str) -> Callable[..., list[Any]]:
        """Returns operator `name` as a function of its inputs, then its attributes, by position.

        An optional input may be None. The result is always the list of outputs. The function
        works eagerly and inside paddle.jit.to_static. It is Paddle's entry point with the name
        bound (2.5 us for one input, 3.5 us for five arguments), 0.2 us less per call than the
        wrapper that Paddle's own extension tools generate.
        """
        if name not in self.operators:
            known = ", ".join(self.operators)
            raise LibraryError(f"{self.path.name} has no operator {name} (it has: {known})")
        from paddle import _C_ops

        return functools.partial(_C_ops._run_custom_op, name)

    def info(self) -> dict[str, Any]:
        """Returns the library's own report.

        abi, threads, instruction_set (of products), features, and candidates per operator.
        """
        result: dict[str, Any] = json.loads(self.handle.regatta_cpu_info())
        return result

    def set_num_threads(self, num_threads: int) -> None:
        """Makes the operators use `num_threads` threads from the next call on."""
        if num_threads < 1:
            raise LibraryError(f"num_threads {num_threads} is not allowed (1 or more)")
        self.handle.regatta_set_num_threads(num_threads)

    @contextmanager
    def batch_invariant(self) -> Iterator[None]:
        """In this context a GPU's operators give a row the same bits in any batch.

        For this thread's calls.
        """
        before = self.handle.regatta_set_batch_invariant(True)
        try:
            yield
        finally:
            self.handle.regatta_set_batch_invariant(before)

    def keep_freed_memory(self) -> None:
        """Makes malloc keep freed blocks of up to 32 MiB for the next operator's result."""
        self.handle.regatta_keep_freed_memory()


def read_abi(header: Path) -> int:
    """Returns the number that `header` (csrc/include/regatta/abi.h) defines as REGATTA_ABI."""
    match = re.search(r"^#define REGATTA_ABI (\d+)$", header.read_text(), re.MULTILINE)
    if match is None:
        raise LibraryError(f"{header} does not define REGATTA_ABI")
    return int(match.group(1))


def source_digest(csrc: Path, folders: Sequence[str] = SOURCE_FOLDERS) -> str:
    """Returns a digest of the names and contents of every source; by default the CPU library's."""
    digest = hashlib.blake2b(digest_size=16)
    for folder in folders:
        for path in sorted((csrc / folder).rglob("*")):
            if path.is_file():
                content = path.read_bytes()
                digest.update(f"{path.relative_to(csrc)}\0{len(content)}\0".encode())
                digest.update(content)
    return digest.hexdigest()


def build_command(library: Path | None = None) -> str:
    """Returns the command that builds a library (None: the CPU's) for the installed Paddle."""
    is_cuda = library is not None and "cuda" in library.name
    script = SOURCE_DIR / ("setup_cuda.py" if is_cuda else "setup_cpu.py")
    folder = library.parent.name if library is not None else ""
    flags = ""
    if folder.startswith(SANITIZED_PREFIX):
        flags = " --sanitize " + folder.removeprefix(SANITIZED_PREFIX).replace("-", ",")
    if not script.is_file():  # installed from a wheel: the sources are not here
        return "pip install --force-reinstall --no-deps --no-cache-dir <the regatta checkout>"
    if Path.cwd() == SOURCE_DIR.parent:
        script = script.relative_to(Path.cwd())
    return f"python {script} install{flags}"


def find() -> Path | None:
    """Returns the library's path, or None when none was built.

    The environment variable REGATTA_LIBRARY names another file; LibraryError when it is not there.
    """
    override = os.environ.get("REGATTA_LIBRARY")
    if override:
        path = Path(override).absolute()
        if not path.is_file():
            raise LibraryError(
                f"REGATTA_LIBRARY={override} is not a file; unset it to use {LIBRARY_DIR}"
            )
        return path
    path = LIBRARY_DIR / LIBRARY_NAME
    if path.is_file():
        return path
    if os.path.lexists(path):  # else slow operators would be taken for a reason that is not true
        raise LibraryError(
            f"{path} is not a file, or links to none; remove it and build the library: "
            f"{build_command()}"
        )
    return None


def read_metadata(path: Path) -> Metadata:
    """Returns what library `path` was built for, from the .json beside it; or LibraryError."""
    try:
        return built.read(path.with_suffix(".json"))
    except UserError as error:
        raise LibraryError(
            f"{error}; it says what {path.name} was built for: rebuild both: {build_command(path)}"
        ) from None


def verify(metadata: Metadata, path: Path) -> None:
    """Raises LibraryError unless `path` is, byte for byte, the library that was built."""
    try:
        built.verify(path, metadata.file)
    except UserError as error:
        raise LibraryError(f"{error}; rebuild it: {build_command(path)}") from None


def check(metadata: Metadata, path: Path, paddle_version: str, paddle_commit: str) -> None:
    """Raises LibraryError unless `metadata` fits this Python code and the given Paddle."""
    if metadata.abi != ABI:
        raise LibraryError(
            f"{path} has interface {metadata.abi} and this version of regatta needs {ABI}; "
            f"rebuild it: {build_command(path)}"
        )
    built_for, installed = metadata.paddle_version, paddle_version
    if built_for == installed and metadata.paddle_commit == paddle_commit:
        return
    other_fix = f"or install the Paddle it was built for: pip install paddlepaddle=={built_for}"
    if built_for == installed:  # two builds under one version number
        built_for += f" (commit {metadata.paddle_commit[:10]})"
        installed += f" (commit {paddle_commit[:10]})"
        other_fix = ""
    raise LibraryError(
        f"{path} was built for Paddle {built_for}, but Paddle {installed} is installed; "
        f"rebuild it: {build_command(path)} {other_fix}"
    )


def is_outdated(metadata: Metadata) -> bool:
    """Whether the sources beside this package differ from those the library was built from."""
    return SOURCE_DIR.is_dir() and source_digest(SOURCE_DIR) != metadata.sources_digest


@functools.cache
def import_paddle() -> Any:
    """Returns the `paddle` module, imported without its warning that ccache is not installed.

    The first import keeps this process's signal handlers, since Paddle would take SIGTERM, and what
    its root logger has, to which Paddle would add a handler that prints all programs' messages.
    """
    if "paddle" not in sys.modules:
        root = logging.getLogger()
        handlers, level = root.handlers[:], root.level
        with signals.kept(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="No ccache found")
            importlib.import_module("paddle")
        root.handlers[:] = handlers
        root.setLevel(level)
    return importlib.import_module("paddle")


@contextmanager
def quiet_registration() -> Iterator[None]:
    """In this context a process's first paddle.inference predictor gives no 24 idle warnings.

    It registers every custom operator once more, since Paddle 3.3 looks for them under names
    without their prefix, and each is said to be registered already. Warnings are off in here, as
    Config.disable_glog_info switches them off itself one statement after the registration, and
    then for the rest of the process; behind this they are on again, and notes alone stay off.
    """
    from paddle.base import core

    try:
        level = ctypes.c_int32.in_dll(ctypes.CDLL(core.libpaddle.__file__), GLOG_LEVEL)
    except (OSError, ValueError):  # a Paddle that keeps its log level elsewhere: it may warn
        yield
        return
    before = level.value
    level.value = max(before, GLOG_ERROR)
    try:
        yield
    finally:
        level.value = max(before, GLOG_WARNING)


def absence_reason(path: Path | None = None, note: str = BUILD_ERROR_NAME) -> str:
    """Returns why library `path` (None: the CPU's) is not there.

    That is the note of the last `pip install`, or that none was built.
    """
    path = path or LIBRARY_DIR / LIBRARY_NAME
    try:
        reason = (LIBRARY_DIR / note).read_text(encoding="utf-8").strip()
    except OSError:
        reason = ""
    return reason or f"there is no {path.name} in {path.parent}"


@functools.cache
def load() -> Library | None:
    """Returns the library, loaded and registered; None, logged once, when none was built.

    Loads once per process: Paddle aborts when a second library registers the same operators.
    Raises LibraryError when a library is there and does not fit or is damaged.
    """
    path = find()
    if path is None:
        LOG.warning(
            "the plain-Paddle operators are in use, several times slower than the compiled ones: "
            f"{absence_reason()}. To get the fast ones: {build_command()}"
        )
        return None
    return load_checked(path)


def require() -> Library:
    """Returns the library; raises LibraryError naming the build command when none was built."""
    path = find()
    library = None if path is None else load()
    if library is None:
        raise LibraryError(
            f"the compiled operators are not there: {absence_reason()}; build them: "
            f"{build_command()}"
        )
    return library


def load_checked(path: Path) -> Library:
    """Returns library `path`, loaded and registered; LibraryError when it does not fit or load."""
    metadata = read_metadata(path)
    verify(metadata, path)
    paddle = import_paddle()
    check(metadata, path, paddle.version.full_version, paddle.version.commit)
    if is_outdated(metadata):
        LOG.warning(
            f"csrc/ has changed since {path.name} was built; rebuild it: {build_command(path)}"
        )
    from paddle.base import core

    try:
        # Before Paddle's own call, which reports a failure in a page of C++ traces.
        handle = ctypes.CDLL(str(path))
        handle.regatta_cpu_info.restype = ctypes.c_char_p
        handle.regatta_set_num_threads.argtypes = [ctypes.c_int]
        handle.regatta_set_num_threads.restype = None
    except (OSError, AttributeError) as error:
        raise LibraryError(
            f"{path} does not load: {error}; rebuild it: {build_command(path)}"
        ) from None
    # The core call and not paddle.utils.cpp_extension's: that one also fills the table of the
    # legacy static graph (5 ms), which neither eager mode nor PIR programs read.
    operators = tuple(core.load_op_meta_info_and_register_op(str(path)))
    return Library(path, metadata, operators, handle)
