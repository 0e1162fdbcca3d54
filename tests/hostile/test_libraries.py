"""Libraries and metadata that are damaged, foreign or no files: refused before they are mapped.

Every row prepares the file that REGATTA_LIBRARY names and says what the refusal must hold. A file
that the dynamic linker gets is mapped; one that was cut short then ends the process.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predict.device import built, devices, library
from predict.errors import UserError
from tests.support.built_libraries import BUILT, this_paddle, write_library

ROOT = Path(__file__).resolve().parent.parent.parent
CONTENT = bytes(range(256)) * 64  # four pages
REBUILD = "setup_cpu.py install"


@dataclass(frozen=True)
class LibraryCase:
    """One row: what becomes of a good library and its metadata, and the words of the refusal."""

    name: str
    prepare: Callable[[Path], None]
    says: tuple[str, ...]


def cut(size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size if size >= 0 else path.stat().st_size + size)


def flip(position: int) -> Callable[[Path], None]:
    def prepare(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[position] ^= 1
        path.write_bytes(content)

    return prepare


def holds(content: bytes) -> Callable[[Path], None]:
    return lambda path: (path.write_bytes(content), None)[1]


def instead(make: Callable[[Path], object], metadata: bool = False) -> Callable[[Path], None]:
    """The library, or its metadata, is what `make` puts there."""

    def prepare(path: Path) -> None:
        path = path.with_suffix(".json") if metadata else path
        path.unlink()
        make(path)

    return prepare


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))  # a socket's path has 107 bytes at most


def described(text: bytes) -> Callable[[Path], None]:
    return lambda path: (path.with_suffix(".json").write_bytes(text), None)[1]


def edited(**changes: Any) -> Callable[[Path], None]:
    """Keys of the metadata changed by hand; `...` takes a key out."""

    def prepare(path: Path) -> None:
        values = json.loads(path.with_suffix(".json").read_text()) | changes
        kept = {name: value for name, value in values.items() if value is not ...}
        path.with_suffix(".json").write_text(json.dumps(kept))

    return prepare


def rebuilt(**values: Any) -> Callable[[Path], None]:
    """Whole metadata of another build, whose key is right."""
    return lambda path: (write_library(path.parent, path.name, CONTENT, **values), None)[1]


FILE = {"size": len(CONTENT), "sha256": "0" * 64}
OLD = {
    "abi": BUILT.abi,
    "paddle_version": BUILT.paddle_version,
    "paddle_commit": BUILT.paddle_commit,
    "compiler": BUILT.compiler,
    "sources_digest": BUILT.sources_digest,
}
SIZE = f"the build made {len(CONTENT)}"
CASES = (
    LibraryCase("empty", cut(0), ("cut short", "has 0 bytes", SIZE, REBUILD)),
    LibraryCase("one byte", cut(1), ("cut short", "has 1 bytes", SIZE)),
    LibraryCase("the header alone", cut(64), ("cut short", "has 64 bytes", SIZE)),
    LibraryCase("one page", cut(4096), ("cut short", "has 4096 bytes", SIZE)),
    LibraryCase("within a page", cut(9000), ("cut short", "has 9000 bytes", SIZE)),
    LibraryCase("less its last page", cut(-4096), ("cut short", SIZE)),
    LibraryCase("less its last byte", cut(-1), ("cut short", SIZE)),
    LibraryCase("a byte more", holds(CONTENT + b"x"), ("not the one that was built", SIZE)),
    LibraryCase("two copies", holds(CONTENT * 2), ("not the one that was built", SIZE)),
    LibraryCase("first bit flipped", flip(0), ("damaged", "sha256", REBUILD)),
    LibraryCase("a bit in the middle flipped", flip(8000), ("damaged", "sha256")),
    LibraryCase("last bit flipped", flip(-1), ("damaged", "sha256")),
    LibraryCase("zeros of its size", holds(bytes(len(CONTENT))), ("damaged", "sha256")),
    LibraryCase("text of its size", holds(b"text" * (len(CONTENT) // 4)), ("damaged", "sha256")),
    LibraryCase("its bytes in another order", holds(CONTENT[::-1]), ("damaged", "sha256")),
    LibraryCase("gone", lambda path: path.unlink(), ("REGATTA_LIBRARY=", "is not a file")),
    LibraryCase("a folder", instead(Path.mkdir), ("REGATTA_LIBRARY=", "is not a file")),
    LibraryCase("a FIFO", instead(os.mkfifo), ("is not a file", "unset it")),
    LibraryCase("a socket", instead(bind), ("is not a file", "unset it")),
    LibraryCase("an endless device", instead(lambda path: path.symlink_to("/dev/zero")),
                ("is not a file", "unset it")),
    LibraryCase("a link to nothing", instead(lambda path: path.symlink_to("nowhere")),
                ("is not a file", "unset it")),
    LibraryCase("a link to itself", instead(lambda path: path.symlink_to(path)),
                ("is not a file", "unset it")),
    LibraryCase("a link to another library", instead(lambda path: path.symlink_to(sys.executable)),
                ("not the one that was built", REBUILD)),
    LibraryCase("no metadata", lambda path: path.with_suffix(".json").unlink(),
                ("cannot read", ".json", "rebuild both", REBUILD)),
    LibraryCase("empty metadata", described(b""), ("not valid JSON", "rebuild both")),
    LibraryCase("metadata cut short", described(BUILT.to_json()[:200].encode()),
                ("not valid JSON", "rebuild both")),
    LibraryCase("metadata is a list", described(b"[1, 2]"), ("holds a list", "rebuild both")),
    LibraryCase("metadata is null", described(b"null"), ("holds null", "rebuild both")),
    LibraryCase("metadata of no text", described(b"\x7fELF\xff"), ("not UTF-8", "rebuild both")),
    LibraryCase("metadata nested without end", described(b'{"abi": ' + b"[" * 10_000),
                ("rebuild both",)),
    LibraryCase("metadata says a key twice", described(b'{"abi": 3, "abi": 4}'), ("twice",)),
    LibraryCase("metadata is a FIFO", instead(os.mkfifo, metadata=True), ("is not a file",)),
    LibraryCase("metadata is a folder", instead(Path.mkdir, metadata=True), ("is not a file",)),
    LibraryCase("metadata of before there were digests", described(json.dumps(OLD).encode()),
                ("lacks 'file'", "rebuild both", REBUILD)),
    LibraryCase("the digest alone is missing", edited(file=...), ("lacks 'file'", REBUILD)),
    LibraryCase("abi is a text", edited(abi="3"), ("'abi' is a text", "a number is needed")),
    LibraryCase("abi is true", edited(abi=True), ("'abi' is a boolean", "a number is needed")),
    LibraryCase("abi is null", edited(abi=None), ("'abi' is null",)),
    LibraryCase("abi is missing", edited(abi=...), ("lacks 'abi'",)),
    LibraryCase("a version is a list", edited(paddle_version=["3.3.1"]),
                ("'paddle_version' is a list", "a text is needed")),
    LibraryCase("a digest is a number", edited(sources_digest=7), ("'sources_digest'",)),
    LibraryCase("the file is a text", edited(file="libregatta_cpu.so"), ("'file' is a text",)),
    LibraryCase("the size is negative", edited(file={**FILE, "size": -1}), ("size -1",)),
    LibraryCase("the size is 10^200", edited(file={**FILE, "size": 10**200}), ("cut short",)),
    LibraryCase("the size is a real", edited(file={**FILE, "size": 1.5}), ("'size' is a number",)),
    LibraryCase("the sha256 is short", edited(file={**FILE, "sha256": "ab"}), ("64 digits",)),
    LibraryCase("the sha256 is in capitals", edited(file={**FILE, "sha256": "A" * 64}),
                ("64 digits",)),
    LibraryCase("the sha256 is another's", edited(file=FILE), ("damaged", "0" * 64)),
    LibraryCase("parts are a list", edited(parts=[]), ("'parts' is a list",)),
    LibraryCase("a part is a number", edited(parts={"x.so": 1}), ("part x.so is a number",)),
    LibraryCase("architectures are a text", edited(architectures="90a"), ("list of texts",)),
    LibraryCase("an architecture is a number", edited(architectures=[90]), ("list of texts",)),
    LibraryCase("no key", edited(key=...), ("lacks 'key'", "rebuild both")),
    LibraryCase("Paddle's version was edited", edited(paddle_version="9.9"),
                ("was changed since the build wrote it", "rebuild both")),
    LibraryCase("flags were edited", edited(flags="-O0"), ("was changed since the build",)),
    LibraryCase("interface of another version", rebuilt(abi=99), ("has interface 99", REBUILD)),
    LibraryCase("built for another Paddle", rebuilt(paddle_version="2.6.2"),
                ("built for Paddle 2.6.2", REBUILD)),
    LibraryCase("no library, though as built", lambda path: None, ("does not load", REBUILD)),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_library_is_refused_in_one_sentence(
    case: LibraryCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_library(tmp_path, content=CONTENT, **this_paddle())
    monkeypatch.chdir(tmp_path)
    case.prepare(path)
    monkeypatch.setenv("REGATTA_LIBRARY", str(path))
    monkeypatch.chdir(ROOT)
    with pytest.raises(library.LibraryError) as refused:
        library.load_checked(library.find() or path)
    message = str(refused.value)
    for words in (str(tmp_path), *case.says):
        assert words in message, message
    assert len(message) < 1000 + 2 * len(str(path))
    assert str(path) not in Path("/proc/self/maps").read_text()


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.sampled_from([*json.loads(BUILT.to_json()), "unknown"]), JSON_VALUES)
def test_no_edited_value_of_the_metadata_passes_or_does_more_than_refuse(
    name: str, value: object
) -> None:
    good = json.loads(BUILT.to_json())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.json")
        path.write_text(json.dumps({**good, name: value}))
        try:
            read = built.read(path)
        except UserError:
            return
    # Whatever else is read is what was written, or digests that no file will have.
    assert replace(read, file=BUILT.file, parts={}) == BUILT
    assert name in ("file", "parts", "unknown") or good[name] == value


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_library_that_may_not_be_read_is_refused(tmp_path: Path) -> None:
    path = write_library(tmp_path)
    path.chmod(0)
    with pytest.raises(library.LibraryError, match=r"cannot read .*Permission denied"):
        library.load_checked(path)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, bind, lambda path: path.symlink_to("x")])
def test_what_is_no_file_in_the_librarys_place_is_not_taken_for_absence(
    make: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REGATTA_LIBRARY", raising=False)
    monkeypatch.setattr(library, "LIBRARY_DIR", tmp_path)
    monkeypatch.chdir(tmp_path)
    make(tmp_path / library.LIBRARY_NAME)
    with pytest.raises(library.LibraryError, match=r"is not a file, or links to none.*setup_cpu"):
        library.find()


def test_link_to_the_built_library_is_as_good_as_it(tmp_path: Path) -> None:
    path = write_library(tmp_path, content=CONTENT)
    link = tmp_path / "elsewhere.so"
    link.symlink_to(path)
    link.with_suffix(".json").symlink_to(path.with_suffix(".json"))
    library.verify(library.read_metadata(link), link)


PROGRAM = """
import sys
from predict.device import library
try:
    library.require()
except library.LibraryError as error:
    assert "paddle" not in sys.modules
    sys.exit(str(error))
"""


@pytest.mark.parametrize("share", [0.001, 0.03, 0.3, 0.6, 0.9, 0.999])
def test_cut_library_does_not_end_the_process(
    share: float, compiled: library.Library, tmp_path: Path
) -> None:
    content = compiled.path.read_bytes()
    path = tmp_path / library.LIBRARY_NAME
    path.write_bytes(content[: int(len(content) * share)])
    path.with_suffix(".json").write_text(compiled.metadata.to_json())
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={**os.environ, "REGATTA_LIBRARY": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 1, process.stderr
    assert f"{path} is cut short" in process.stderr
    assert f"the build made {len(content)}" in process.stderr


@dataclass(frozen=True)
class PartCase:
    """One row: what becomes of a good CUDA build's plugin or kernels, and the refusal's words."""

    name: str
    prepare: Callable[[Path], None]  # of the folder
    says: tuple[str, ...]


PLUGIN = f"plugin/{devices.PLUGIN_NAME}"
PART_CASES = (
    PartCase("plugin cut", lambda folder: cut(100)(folder / PLUGIN), (PLUGIN, "cut short")),
    PartCase("plugin changed", lambda folder: flip(7)(folder / PLUGIN), (PLUGIN, "damaged")),
    PartCase(
        "kernels cut",
        lambda folder: cut(0)(folder / devices.KERNELS_NAME),
        (devices.KERNELS_NAME, "cut short"),
    ),
    PartCase(
        "kernels gone",
        lambda folder: (folder / devices.KERNELS_NAME).unlink(),
        ("cannot read", devices.KERNELS_NAME),
    ),
    PartCase(
        "kernels a FIFO",
        lambda folder: instead(os.mkfifo)(folder / devices.KERNELS_NAME),
        (devices.KERNELS_NAME, "is not a file"),
    ),
    PartCase(
        "plugin of another build",
        lambda folder: edited(parts={})(folder / devices.CUDA_LIBRARY_NAME),
        (PLUGIN, "is not of the build that made libregatta_cuda.so"),
    ),
    PartCase(
        "metadata gone",
        lambda folder: (folder / "libregatta_cuda.json").unlink(),
        ("cannot read", "libregatta_cuda.json"),
    ),
)


@pytest.mark.parametrize("case", PART_CASES, ids=[case.name for case in PART_CASES])
def test_part_of_the_gpu_build_is_refused_before_it_is_loaded(
    case: PartCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plugin").mkdir()
    for name in (PLUGIN, devices.KERNELS_NAME):
        (tmp_path / name).write_bytes(CONTENT)
    parts = {name: built.describe(tmp_path / name) for name in (PLUGIN, devices.KERNELS_NAME)}
    write_library(tmp_path, devices.CUDA_LIBRARY_NAME, CONTENT, parts=parts)
    monkeypatch.setattr(devices, "PLUGIN_FOLDER", tmp_path / "plugin")
    devices.verify_parts(tmp_path / devices.CUDA_LIBRARY_NAME)
    case.prepare(tmp_path)
    devices.device_library.cache_clear()
    with pytest.raises(UserError) as refused:
        devices.device_library()
    for words in (*case.says, "setup_cuda.py install"):
        assert words in str(refused.value), refused.value
