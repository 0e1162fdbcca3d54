"""Files of weights held against digests that whoever wrote them gave. Imports no Paddle."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path

from predict.errors import UserError
from predict.loading.arrays import listed
from predict.system.files import open_regular

CHUNK_BYTES = 8 << 20
Stamps = dict[Path, tuple[int, int, int]]


def checked(directory: Path, files: Collection[Path], digests: Mapping[str, str] | None) -> Stamps:
    """What `check_same` wants later, once each file has the digest that it should have.

    files: with weights. digests: by name; None: nothing is checked now. Raises UserError.
    """
    stamps = stamps_of(files)
    if digests is None:
        return stamps
    named = {directory / name for name in digests}
    if missing := sorted(file.name for file in set(files) - named):
        raise UserError(
            f"digests names {len(digests)} files, and not {listed(missing)}, which have weights; "
            "name each with its SHA-256"
        )
    stamps = stamps_of({*files, *named})
    for name, wanted in digests.items():
        found = digest_of(directory / name)
        if found != wanted.lower():
            raise UserError(
                f"{directory / name} has the SHA-256 {found}, and digests says {wanted.lower()}; "
                "write the file whole, and then ask again"
            )
    check_same(stamps)
    return stamps


def check_same(stamps: Stamps) -> None:
    """Raises UserError where a file has changed since."""
    for file, stamp in stamps.items():
        if stamps_of([file])[file] != stamp:
            raise UserError(f"{file} changed while it was read; write it whole, and then ask again")


def stamps_of(files: Collection[Path]) -> Stamps:
    """Size, time of the last change and inode of each file. Raises UserError where one is gone."""
    found: Stamps = {}
    for file in files:
        try:
            stat = os.stat(file)
        except OSError as error:
            raise UserError(
                f"{file}: {error.strerror}; digests names files of the folder"
            ) from None
        found[file] = stat.st_size, stat.st_mtime_ns, stat.st_ino
    return found


def digest_of(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open_regular(file) as opened:
        while chunk := opened.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
