"""Where the entries of a zip archive lie, for archives that hold bytes as they are.

Only the directory is read, and nothing is unpacked: an entry is a place in the archive. What other
readers forgive is refused: packed or encrypted entries, names that lead out of a folder or stand
twice, entries that overlap or reach out of the file, a directory that is not the file's end.

At the end of the file: an entry of the directory for each of the archive's, each 46 bytes and its
name; from 2 or 4 GiB on (of PyTorch's always) a record of 56 bytes and one of 20 that says where
that is; a record of 22 bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import BinaryIO

MAX_DIRECTORY_BYTES = 1 << 26  # some 500,000 entries
MAX_NAME_BYTES = 1024
_END = struct.Struct("<4sHHHHIIH")
_LOCATOR = struct.Struct("<4sIQI")
_END_64 = struct.Struct("<4sQHHIIQQQQ")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_FULL_32, _FULL_16 = 0xFFFFFFFF, 0xFFFF
_ENCRYPTED = 1


class ZipError(Exception):
    """What is wrong with an archive, for its reader to say with its name."""


@dataclass(frozen=True)
class ZipEntry:
    """Where an entry's bytes lie in the archive."""

    offset: int
    num_bytes: int


@dataclass(frozen=True)
class _Central:
    name: bytes
    header: int  # first byte of its local header
    num_bytes: int


def read_zip_directory(file: BinaryIO, size: int) -> dict[str, ZipEntry]:
    """The entries of an archive of `size` bytes by name. Raises ZipError."""
    start, num_bytes, count = _find_directory(file, size)
    if num_bytes > MAX_DIRECTORY_BYTES:
        raise ZipError(f"its directory has {num_bytes} bytes (at most {MAX_DIRECTORY_BYTES})")
    data = _read(file, start, num_bytes)
    entries: dict[str, ZipEntry] = {}
    spans: list[tuple[int, int, str]] = []  # first byte of the header, end, name
    at = 0
    for _ in range(count):
        central, at = _central_entry(data, at)
        name = _checked_name(central.name)
        if name in entries:
            raise ZipError(f"it has the entry {name!r} twice")
        offset = _first_byte(file, central, start)
        if offset + central.num_bytes > start:
            raise ZipError(
                f"entry {name!r} should have {central.num_bytes} bytes from byte {offset} on, and "
                f"the archive's directory begins at byte {start}"
            )
        entries[name] = ZipEntry(offset, central.num_bytes)
        spans.append((central.header, offset + central.num_bytes, name))
    if at != len(data):
        raise ZipError(f"{len(data) - at} bytes follow the last entry of its directory")
    end, last = 0, ""
    for begin, next_end, name in sorted(spans):
        if begin < end:
            raise ZipError(f"entries {last!r} and {name!r} overlap")
        end, last = next_end, name
    return entries


def _read(file: BinaryIO, offset: int, count: int) -> bytes:
    file.seek(offset)
    data = file.read(count)
    if len(data) < count:
        raise ZipError(f"it ends before byte {offset + count}")
    return data


def _find_directory(file: BinaryIO, size: int) -> tuple[int, int, int]:
    """First byte, bytes and entries of the directory."""
    end = size - _END.size
    if end < 0:
        raise ZipError(f"it has {size} bytes")
    mark, disk, of_disk, on_disk, count, num_bytes, start, comment = _END.unpack(
        _read(file, end, _END.size)
    )
    if mark != b"PK\x05\x06" or comment:
        raise ZipError("its directory is not at its end")
    if (on_disk, count) == (_FULL_16, _FULL_16) or _FULL_32 in (num_bytes, start):
        end = _find_end_64(file, end)
        (mark, length, _, _, disk, of_disk, on_disk, count, num_bytes, start) = _END_64.unpack(
            _read(file, end, _END_64.size)
        )
        if mark != b"PK\x06\x06" or length != _END_64.size - 12:
            raise ZipError("its 64-bit directory is not where it says")
    elif end >= _LOCATOR.size + _END_64.size:
        # PyTorch writes the 64-bit records always; what they say must then be the same.
        mark = _read(file, end - _LOCATOR.size, 4)
        if mark == b"PK\x06\x07":
            end = _find_end_64(file, end)
            found = _END_64.unpack(_read(file, end, _END_64.size))
            if found[0] != b"PK\x06\x06" or found[6:] != (on_disk, count, num_bytes, start):
                raise ZipError("its two directories contradict each other")
    if disk or of_disk or on_disk != count:
        raise ZipError("it is one of several volumes")
    if start + num_bytes != end:
        raise ZipError(
            f"its directory should have {num_bytes} bytes from byte {start} on, and it ends at "
            f"byte {end}"
        )
    return start, num_bytes, count


def _find_end_64(file: BinaryIO, end: int) -> int:
    """Where the 64-bit record is, of which the one ahead of byte `end` knows."""
    at = end - _LOCATOR.size
    if at < 0:
        raise ZipError("it lacks its 64-bit directory")
    mark, disk, record, disks = _LOCATOR.unpack(_read(file, at, _LOCATOR.size))
    if mark != b"PK\x06\x07" or disk or disks > 1 or record + _END_64.size != at:
        raise ZipError("its 64-bit directory is not where it says")
    return int(record)


def _central_entry(data: bytes, at: int) -> tuple[_Central, int]:
    """The directory's entry at `at`, and where the next one begins."""
    if at + _CENTRAL.size > len(data):
        raise ZipError("its directory is cut short")
    (mark, _, _, flags, method, _, _, _, packed, size, name_size, extra_size, comment_size) = (
        _CENTRAL.unpack_from(data, at)[:13]
    )
    disk, _, _, header = _CENTRAL.unpack_from(data, at)[13:]
    begin = at + _CENTRAL.size
    end = begin + name_size + extra_size + comment_size
    if mark != b"PK\x01\x02" or end > len(data):
        raise ZipError("its directory is cut short")
    name = data[begin : begin + name_size]
    if flags & _ENCRYPTED:
        raise ZipError(f"entry {name[:MAX_NAME_BYTES]!r} is encrypted")
    extra = data[begin + name_size : begin + name_size + extra_size]
    size, packed, header = _sizes_64(extra, (size, packed, header))
    if method or packed != size:
        raise ZipError(
            f"entry {name[:MAX_NAME_BYTES]!r} is compressed (method {method}); PyTorch stores "
            "entries as they are"
        )
    if disk:
        raise ZipError("it is one of several volumes")
    return _Central(name, header, size), end


def _sizes_64(extra: bytes, values: tuple[int, int, int]) -> tuple[int, int, int]:
    """Size, packed size and place, those that do not fit 32 bits from the 64-bit field."""
    wanted = [value == _FULL_32 for value in values]
    if not any(wanted):
        return values
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1 and length >= 8 * sum(wanted) and at + 4 + length <= len(extra):
            found = iter(struct.unpack_from(f"<{sum(wanted)}Q", extra, at + 4))
            size, packed, header = (
                next(found) if full else value for full, value in zip(wanted, values, strict=True)
            )
            return size, packed, header
        at += 4 + length
    raise ZipError("an entry lacks its 64-bit sizes")


def _checked_name(data: bytes) -> str:
    try:
        name = data.decode("utf-8")
    except UnicodeDecodeError:
        name = ""
    parts = name.split("/")
    if (
        not name
        or len(data) > MAX_NAME_BYTES
        or not name.isprintable()
        or any(part in ("", ".", "..") for part in parts)
        or "\\" in name
        or ":" in name
    ):
        raise ZipError(
            f"it has an entry of the name {data[:80]!r}; names are those of files in folders "
            "below the archive's own"
        )
    return name


def _first_byte(file: BinaryIO, central: _Central, start: int) -> int:
    """Where an entry's bytes begin: behind its local header, name and padding."""
    if central.header + _LOCAL.size > start:
        raise ZipError(f"entry {central.name[:80]!r} begins at byte {central.header}, too late")
    fields = _LOCAL.unpack(_read(file, central.header, _LOCAL.size))
    name_size, extra_size = fields[-2:]
    is_plain = fields[0] == b"PK\x03\x04" and not fields[2] & _ENCRYPTED and not fields[3]
    name = file.read(name_size) if name_size == len(central.name) else b""
    if not is_plain or name != central.name:
        raise ZipError(f"entry {central.name[:80]!r} is another one than the directory says")
    return int(central.header + _LOCAL.size + name_size + extra_size)
