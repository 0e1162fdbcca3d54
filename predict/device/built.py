"""Metadata of a compiled library: what it was built from, and its files' digests.

csrc/build.py writes it as libregatta_cpu.json or libregatta_cuda.json; predict.device.library and
predict.device.devices compare it with the files before the dynamic linker sees them: the linker
maps a file that was cut short, and the process dies of SIGBUS or SIGSEGV when it touches what is
missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from predict.errors import UserError
from predict.system.files import json_type, read_json_object

CHUNK_BYTES = 1 << 20
MAX_ARCHITECTURES = 64
# What a metadata file holds beside its digests, and of which type; the last three are a CUDA
# library's.
TEXTS = ("paddle_version", "paddle_commit", "compiler", "flags", "sanitizer", "sources_digest")
CUDA_TEXTS = ("cuda_sources_digest", "cuda_version")


@dataclass(frozen=True)
class BuiltFile:
    """A file as the build left it."""

    size: int  # bytes
    sha256: str  # as sha256sum prints it


@dataclass(frozen=True)
class Metadata:
    """What a library was built for and from, and the files that the build made."""

    abi: int
    paddle_version: str
    paddle_commit: str
    compiler: str
    sources_digest: str
    file: BuiltFile  # the library itself
    flags: str = ""  # the compilers', without paths
    sanitizer: str = ""  # as --sanitize named it
    cuda_sources_digest: str = ""
    cuda_version: str = ""
    architectures: tuple[str, ...] = ()
    parts: Mapping[str, BuiltFile] = field(default_factory=dict)  # by path beside the library

    @property
    def key(self) -> str:
        """A digest of all that the build was given: equal for builds of equal inputs."""
        values = asdict(self)
        for name in ("file", "parts"):
            del values[name]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "key": self.key}, indent=2) + "\n"


def describe(path: Path) -> BuiltFile:
    """The size and digest of a file that was just built."""
    with path.open("rb") as handle:
        return BuiltFile(path.stat().st_size, _sha256(handle.fileno()))


def read(path: Path) -> Metadata:
    """The metadata in file `path`. Raises UserError that names the file and the value."""
    if path.exists() and not path.is_file():  # a FIFO would keep its reader waiting
        raise UserError(f"{path} is not a file")
    values = read_json_object(path)
    where = str(path)
    metadata = Metadata(
        abi=_value(values, "abi", int, where),
        file=_built_file(_value(values, "file", dict, where), f"{where}: file"),
        architectures=_architectures(values.get("architectures", []), where),
        parts={
            name: _built_file(part, f"{where}: part {name}")
            for name, part in _value(values, "parts", dict, where).items()
        },
        **{name: _value(values, name, str, where) for name in (*TEXTS, *CUDA_TEXTS)},
    )
    key = _value(values, "key", str, where)
    if key != metadata.key:
        raise UserError(
            f"{where} was changed since the build wrote it: its key is {key[:40]!r}, and what it "
            f"says makes {metadata.key}"
        )
    return metadata


def verify(path: Path, built: BuiltFile) -> None:
    """Raises UserError unless file `path` is, byte for byte, what the build made.

    3.5 ms for the CPU library's 5 MB (of which SHA-256 takes 2.8) and 35 ms for a CUDA library of
    54 MB, on a CPU with SHA instructions.
    """
    try:
        # Not waiting: the open of a FIFO without a writer would never return.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise UserError(f"{path} is not a file")
        if found.st_size != built.size:
            what = "cut short" if found.st_size < built.size else "not the one that was built"
            raise UserError(
                f"{path} is {what}: it has {found.st_size} bytes, and the build made {built.size}"
            )
        digest = _sha256(handle)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    finally:
        os.close(handle)
    if digest != built.sha256:
        raise UserError(
            f"{path} is damaged, or not the one that was built: its sha256 is {digest}, and the "
            f"build's was {built.sha256}"
        )


def _sha256(handle: int) -> str:
    digest = hashlib.sha256()
    buffer = bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    while count := os.readv(handle, [buffer]):
        digest.update(view[:count])
    return digest.hexdigest()


def _value(values: Mapping[str, Any], name: str, kind: type, where: str) -> Any:
    """values[name], which must be of this very type (a boolean is no number)."""
    if name not in values:
        raise UserError(f"{where} lacks {name!r}; another version wrote it, or it was cut short")
    if type(values[name]) is not kind:
        wanted = json_type(kind())
        raise UserError(f"{where}: {name!r} is {json_type(values[name])}; {wanted} is needed")
    return values[name]


def _built_file(value: object, where: str) -> BuiltFile:
    if not isinstance(value, dict):
        raise UserError(f"{where} is {json_type(value)}; an object is needed")
    size, sha256 = _value(value, "size", int, where), _value(value, "sha256", str, where)
    if size < 1 or len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef"):
        raise UserError(
            f"{where}: size {size} and sha256 {sha256[:70]!r} are not a file's (a size is 1 or "
            "more, a sha256 has 64 digits of 0-9a-f)"
        )
    return BuiltFile(size, sha256)


def _architectures(value: object, where: str) -> tuple[str, ...]:
    if isinstance(value, list) and len(value) <= MAX_ARCHITECTURES:
        names = tuple(x for x in value if isinstance(x, str) and x.rstrip("a").isdecimal())
        if len(names) == len(value):
            return names
    raise UserError(f'{where}: architectures are a list of texts such as "80" or "90a"')
