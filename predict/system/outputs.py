"""Where results may go: never over a model, an input or another run's file, whole or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import BinaryIO

from predict.errors import EXIT_FAILURE, UserError, flag_word

# A folder with one of these, beside weights, holds a model, an adapter or an exported program.
MODEL_FILES = ("config.json", "manifest.json", "adapter_config.json", "lora_config.json")
WEIGHTS = (
    *("*.safetensors", "*.pdparams", "*.pdiparams", "*.bin", "*.pt", "*.gguf"),
    "*.safetensors.index.json",
)


def check_output(
    flag: str,
    path: str | Path,
    *,
    files: Mapping[str, str | Path | None] | None = None,
    folders: Mapping[str, str | Path | None] | None = None,
) -> None:
    """Raises UserError when a file cannot be written to `path`, or would destroy something there.

    flag: the output's own, without dashes. files: inputs and other outputs by flag. folders: of
    models and adapters, by flag. Links are followed. Nothing is created or emptied.
    """
    flag = flag_word(flag)
    path = Path(path)
    real = Path(os.path.realpath(path))
    try:
        os.lstat(real.with_name(f".{real.name}.12345678.part"))  # as whole_file will call it
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UserError(f"{flag} {path} cannot be written: {error.strerror}") from None
    for other, name in (files or {}).items():
        if name is not None and _same(real, Path(name)):
            raise UserError(
                f"{flag} {path} is the file of {flag_word(other)}, too; choose another {flag}"
            )
    for other, name in (folders or {}).items():
        if name is not None and _is_in(real, Path(os.path.realpath(name))):
            raise UserError(
                f"{flag} {path} lies in the folder of {flag_word(other)} {name}, whose "
                f"files must stay as they are; choose another {flag}"
            )
    if path.is_dir():
        raise UserError(f"{flag} {path} is a directory; give the name of a file")
    if path.exists() and not os.access(path, os.W_OK):
        raise UserError(f"{flag} {path} cannot be written: permission denied")
    if is_special(path):
        return
    if not path.parent.is_dir():
        raise UserError(
            f"{flag} {path}: the directory {path.parent} does not exist; create it first"
        )
    _refuse_model_folder(flag, path, real.parent)
    if not os.access(real.parent, os.W_OK):
        raise UserError(
            f"{flag} {path} cannot be written: no permission to create files in {real.parent}"
        )


def check_folder(
    flag: str,
    path: str | Path,
    *,
    folders: Mapping[str, str | Path | None],
    overwrite: Callable[[Path], None] | None = None,
) -> None:
    """Raises UserError when a new folder cannot come to be at `path`, or would take something away.

    Nothing may be there but an empty folder. flag: the output's own, without dashes. folders: of
    models and adapters, by flag. overwrite: where --overwrite was given, says whether what is there
    may be replaced: raises UserError where not. Links are followed. Nothing is created or removed.
    """
    flag = flag_word(flag)
    path = Path(path)
    real = Path(os.path.realpath(path))
    check_place(flag, path, folders)
    if real.is_dir() and os.path.ismount(real):
        raise UserError(
            f"{flag} {path} is where a file system is mounted, and the folder is put in its "
            f"place whole; give the name of a folder below it"
        )
    if real.is_dir() and any(real.iterdir()):
        if overwrite is None:
            raise UserError(
                f"{flag} {path} is not empty; add --overwrite to replace an earlier export "
                f"there, or choose another {flag}"
            )
        overwrite(real)


def check_place(flag: str, path: Path, folders: Mapping[str, str | Path | None]) -> None:
    """Raises UserError when no folder can be at `path`, or it would be among a model's files.

    folders: of models and adapters, by flag. Nothing is created.
    """
    flag = flag_word(flag)
    real = Path(os.path.realpath(path))
    for other, name in folders.items():
        if name is None:
            continue
        model = Path(os.path.realpath(name))
        if real == model:
            raise UserError(
                f"{flag} {path} is the folder of {flag_word(other)}, which must stay as "
                f"it is; choose another {flag}"
            )
        if real.is_relative_to(model) or model.is_relative_to(real):
            where = "lies in" if real.is_relative_to(model) else "holds"
            raise UserError(
                f"{flag} {path} {where} the folder of {flag_word(other)} {name}, whose "
                f"files must stay as they are; choose another {flag}"
            )
    _refuse_model_folder(flag, path, real.parent)
    if not real.exists() and os.path.lexists(real):
        raise UserError(f"{flag} {path} is a link that leads nowhere; remove it")
    if real.exists() and not real.is_dir():
        raise UserError(f"{flag} {path} is a file; give the name of a folder")
    ancestor = next(folder for folder in real.parents if os.path.lexists(folder))
    if not ancestor.is_dir():
        raise UserError(f"{flag} {path}: {ancestor} is a file, not a folder")
    if not os.access(ancestor, os.W_OK | os.X_OK):
        raise UserError(
            f"{flag} {path} cannot be written: no permission to create files in {ancestor}"
        )


@contextlib.contextmanager
def whole_folder(
    path: str | Path, unbroken: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Iterator[Path]:
    """An empty folder beside `path`, which at the end of the block takes its place, or not at all.

    Its files are on disk by then. What was at `path` stays until that moment, and is then removed.
    unbroken: makes a context for that moment. For one who holds the lock of `path`: what killed
    processes left beside it is removed first.
    """
    real = Path(os.path.realpath(path))
    _restore(real)
    part = Path(tempfile.mkdtemp(prefix=f".{real.name}.", suffix=".part", dir=real.parent))
    try:
        os.chmod(part, 0o777 & ~_umask())
        yield part
        for file in part.rglob("*"):
            _sync(file)
        sync_folder(part)
        with unbroken():
            _exchange(part, real)
            sync_folder(real.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)  # half-made, or what stood there before


def _restore(real: Path) -> None:
    """Ends what a killed `whole_folder` began: an old folder returns if no new one came."""
    for old in real.parent.glob(f".{glob.escape(real.name)}.*.old"):
        if real.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(real)
    for part in real.parent.glob(f".{glob.escape(real.name)}.*.part"):
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)


def _sync(path: Path) -> None:
    if path.is_dir():
        sync_folder(path)
        return
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _exchange(part: Path, real: Path) -> None:
    """Puts `part` at `real`, in one step where the system can swap two names."""
    try:
        part.rename(real)  # nothing there, or an empty folder
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    if _swapped(part, real):
        return
    old = part.with_suffix(".old")
    real.rename(old)
    part.rename(real)
    shutil.rmtree(old, ignore_errors=True)


def _swapped(one: Path, other: Path) -> bool:
    """Whether Linux swapped two names (renameat2 with RENAME_EXCHANGE)."""
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    return bool(call(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0)


def is_special(path: str | Path) -> bool:
    """Whether `path` is a device, a pipe or a stream of this process, and written as it is."""
    path = Path(path)
    return stream_number(path) is not None or (path.exists() and not path.is_file())


def stream_number(path: Path) -> int | None:
    """The number of this process's stream that a path means; None for any other path.

    /dev/stdout leads to the file behind it, which must not be replaced while it is printed to.
    """
    own = (f"/proc/{os.getpid()}/fd", f"/proc/{os.getpid()}/task/{os.getpid()}/fd")
    for _ in range(8):  # links to links
        if os.path.realpath(path.parent) in own and path.name.isdecimal():
            return int(path.name)
        if not path.is_symlink():
            return None
        path = path.parent / os.readlink(path)
    return None


def open_special(path: Path) -> int:
    """A descriptor to write to a device, a pipe or a stream. Raises OSError."""
    number = stream_number(path)
    return os.open(path, os.O_WRONLY) if number is None else os.dup(number)


@contextlib.contextmanager
def locked(flag: str, path: str | Path) -> Iterator[None]:
    """Holds an output, a file or a folder, for this process until the end of the block.

    By a lock on a file ".NAME.lock" beside it, which ends with the process however that ends.
    Raises UserError naming the process that has it.
    """
    real = Path(os.path.realpath(path))
    if is_special(path) and not real.is_dir():
        yield
        return
    lock = real.with_name(f".{real.name}.lock")
    descriptor = _lock(flag, Path(path), lock)
    try:
        for part in real.parent.glob(f".{glob.escape(real.name)}.*.part"):
            if part.is_file():  # of a run that was killed while it wrote
                part.unlink(missing_ok=True)
        yield
    finally:
        # Unlinked while it is held: whoever opened it before finds that it is no longer there.
        lock.unlink(missing_ok=True)
        os.close(descriptor)


@contextlib.contextmanager
def resumable(flag: str, folder: Path, after: str) -> Iterator[None]:
    """Holds a folder that is written file by file, and makes those that it lies in.

    after: where the same command goes on, for the UserError of a disk that takes no more.
    """
    try:
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        with locked(flag, folder):
            yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        raise UserError(
            f"{flag_word(flag)} {folder} cannot be written: {error.strerror}; when it can, the "
            f"same command goes on after {after}",
            EXIT_FAILURE,
        ) from None


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which at the end of the block is at `path`, on disk, or is not there at all.

    Raises OSError.
    """
    real = Path(os.path.realpath(path))
    descriptor, part = tempfile.mkstemp(prefix=f".{real.name}.", suffix=".part", dir=real.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(part, mode_of(real))
        os.replace(part, real)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
    sync_folder(real.parent)


def write_whole(path: str | Path, data: bytes | Iterator[bytes]) -> None:
    """Makes `data` the content of `path`, on disk, or leaves `path` as it was. Raises OSError.

    data: also in pieces, which are never in memory together. A device or a pipe is written as it
    is.
    """
    pieces = iter((data,)) if isinstance(data, bytes) else data
    path = Path(path)
    if is_special(path):
        with os.fdopen(open_special(path), "wb") as file:
            file.writelines(pieces)
        return
    with whole_file(path) as file:
        file.writelines(pieces)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder last; nothing where the file system has no such thing."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _is_in(real: Path, folder: Path) -> bool:
    """Whether a file lies below a folder, or is another name (a hard link) of one that does."""
    if real.is_relative_to(folder):
        return True
    if not real.is_file() or real.stat().st_nlink == 1:
        return False
    return any(_same(real, path) for path in folder.rglob("*") if path.is_file())


def _refuse_model_folder(flag: str, path: Path, folder: Path) -> None:
    markers = [name for name in MODEL_FILES if (folder / name).is_file()]
    if markers and any(True for pattern in WEIGHTS for _ in folder.glob(pattern)):
        raise UserError(
            f"{flag} {path} lies in {folder}, which holds a model ({markers[0]}); choose "
            f"another {flag}"
        )


def _same(real: Path, other: Path) -> bool:
    if real == Path(os.path.realpath(other)):
        return True
    try:
        return real.samefile(other)  # another name of one file
    except OSError:
        return False


def _lock(flag: str, path: Path, lock: Path) -> int:
    flag = flag_word(flag)
    while True:
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise UserError(
                f"{flag} {path} cannot be locked ({lock}: {error.strerror or error}); "
                f"choose another {flag}"
            ) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise UserError(
                f"{flag} {path} is being written by process {holder}; wait for it, or "
                f"choose another {flag}"
            ) from None
        except OSError:  # a file system without locks: nothing to hold
            return descriptor
        if _is_there(descriptor, lock):
            os.truncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
            return descriptor
        os.close(descriptor)


def _is_there(descriptor: int, lock: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(lock))
    except FileNotFoundError:
        return False


def mode_of(path: Path) -> int:
    """The permissions of the file that is replaced, or those that a new one gets."""
    try:
        return path.stat().st_mode & 0o7777
    except OSError:
        return 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
