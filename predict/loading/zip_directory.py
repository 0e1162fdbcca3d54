"""Where the entries of a zip archive lie, for archives that hold bytes as they are.

`zipfile` reads the directory, and nothing is unpacked: an entry is a place in the archive. What it
forgives is refused: packed or encrypted entries, names that lead out of a folder or stand twice,
entries that overlap or reach out of the file, a directory that is not the file's end.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, BinaryIO, cast

if TYPE_CHECKING:
    from zipfile import ZipInfo

MAX_DIRECTORY_BYTES = 1 << 26  # some 500,000 entries
MAX_NAME_BYTES = 1024
_LOCAL = struct.Struct("<4s5H3I2H")  # what stands ahead of an entry's bytes, beside its name
_END_BYTES = 22
_ENCRYPTED, _OTHER_NAMES = 1, 0x800


class ZipError(Exception):
    """What is wrong with an archive, for its reader to say with its name."""


@dataclass(frozen=True)
class ZipEntry:
    """Where an entry's bytes lie in the archive."""

    offset: int
    num_bytes: int


class _Bounded:
    """A file that gives no more at once than a directory may have."""

    def __init__(self, file: BinaryIO):
        self.seek, self.tell, self._file = file.seek, file.tell, file

    def read(self, count: int = -1) -> bytes:
        return self._file.read(min(count, MAX_DIRECTORY_BYTES) if count >= 0 else 1 << 17)


def read_zip_directory(file: BinaryIO, size: int) -> dict[str, ZipEntry]:
    """The entries of an archive of `size` bytes by name. Raises ZipError."""
    import zipfile

    if size < _END_BYTES:
        raise ZipError(f"it has {size} bytes")
    file.seek(size - _END_BYTES)
    end = file.read(_END_BYTES)
    if end[:4] != b"PK\x05\x06" or end[-2:] != b"\0\0":
        raise ZipError("its directory is not at its end")
    try:
        archive = zipfile.ZipFile(cast("IO[bytes]", _Bounded(file)))
    except (
        zipfile.BadZipFile, NotImplementedError, ValueError, OSError, OverflowError, struct.error
    ) as error:  # fmt: skip
        raise ZipError(f"its directory is damaged: {error}") from None
    entries: dict[str, ZipEntry] = {}
    spans: list[tuple[int, int, str]] = []  # first byte of the header, end, name
    for info in archive.infolist():
        name = _checked(info)
        if name in entries:
            raise ZipError(f"it has the entry {name!r} twice")
        offset = _first_byte(file, info, archive.start_dir)
        end_byte = offset + info.file_size
        if end_byte > archive.start_dir:
            raise ZipError(
                f"entry {name!r} should have {info.file_size} bytes from byte {offset} on, and "
                f"the archive's directory begins at byte {archive.start_dir}"
            )
        entries[name] = ZipEntry(offset, info.file_size)
        spans.append((info.header_offset, end_byte, name))
    last_end, last = 0, ""
    for begin, next_end, name in sorted(spans):
        if begin < last_end:
            raise ZipError(f"entries {last!r} and {name!r} overlap")
        last_end, last = next_end, name
    return entries


def _checked(info: ZipInfo) -> str:
    """The name of an entry that is stored as it is."""
    name = info.orig_filename
    shown = repr(name[:80])
    if (
        not name.isprintable()
        or len(name) > MAX_NAME_BYTES
        or any(part in ("", ".", "..") for part in name.split("/"))
        or {"\\", ":"} & {*name}
    ):
        raise ZipError(
            f"it has an entry of the name {name[:80].encode()!r}; names are those of files in "
            "folders below the archive's own"
        )
    if info.flag_bits & _ENCRYPTED:
        raise ZipError(f"entry {shown} is encrypted")
    if info.compress_type or info.compress_size != info.file_size:
        raise ZipError(
            f"entry {shown} is compressed (method {info.compress_type}); PyTorch stores entries "
            "as they are"
        )
    if info.volume:
        raise ZipError("it is one of several volumes")
    return name


def _first_byte(file: BinaryIO, info: ZipInfo, start: int) -> int:
    """Where an entry's bytes begin: behind its local header, name and padding."""
    shown = repr(info.orig_filename[:80])
    if not 0 <= info.header_offset <= start - _LOCAL.size:
        raise ZipError(f"entry {shown} begins at byte {info.header_offset}, out of place")
    file.seek(info.header_offset)
    mark, _, flags, method, *_, name_size, extra_size = _LOCAL.unpack(file.read(_LOCAL.size))
    name = file.read(min(name_size, 4 * MAX_NAME_BYTES))
    encoding = "utf-8" if flags & _OTHER_NAMES else "cp437"
    is_plain = mark == b"PK\x03\x04" and not flags & _ENCRYPTED and not method
    if not is_plain or name.decode(encoding, "replace") != info.orig_filename:
        raise ZipError(f"entry {shown} is another one than the directory says")
    return info.header_offset + _LOCAL.size + name_size + extra_size
