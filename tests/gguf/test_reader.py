"""Headers of GGUF files: what they say, and what is refused before anything is made of it."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from predict.errors import UserError
from predict.gguf.files import gguf_of
from predict.gguf.opened import open_gguf
from predict.gguf.reader import GgufFile, read_gguf

MAX_BYTES = 2_000_000  # that reading a header of less than a kilobyte may take
HUGE = 2**64 - 1


# Files by their bytes, good ones and those that lie.

UINT32, INT32, FLOAT32, BOOL, TEXT, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10
F32, Q8_0 = 0, 8  # types of tensors


def text(value: str | bytes, size: int | None = None) -> bytes:
    """A text behind its length; size: what that says instead."""
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data) if size is None else size) + data


def number(kind: int, value: Any) -> bytes:
    """A number of a type."""
    return struct.pack("<" + {4: "I", 5: "i", 6: "f", 7: "B", 10: "Q"}[kind], value)


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    """A key with its value, packed already."""
    return text(key) + struct.pack("<I", kind) + value


def packed(key: str, value: Any) -> bytes:
    """A key with a value of the type that Python's suggests."""
    if isinstance(value, bool):
        return entry(key, BOOL, number(BOOL, value))
    if isinstance(value, int):
        return entry(key, UINT32, number(UINT32, value))
    if isinstance(value, float):
        return entry(key, FLOAT32, number(FLOAT32, value))
    if isinstance(value, str):
        return entry(key, TEXT, text(value))
    return entry(key, ARRAY, array(value))


def array(values: Sequence[Any]) -> bytes:
    """A list of texts, or of numbers of one kind."""
    first = values[0]
    kind = TEXT if isinstance(first, str) else FLOAT32 if isinstance(first, float) else INT32
    kind = BOOL if isinstance(first, bool) else kind
    each = (text(v) if isinstance(v, str) else number(kind, v) for v in values)
    return struct.pack("<IQ", kind, len(values)) + b"".join(each)


def tensor(name: str, shape: Sequence[int], kind: int = F32, offset: int = 0) -> bytes:
    """A tensor's entry; shape as the file has it, the innermost dimension first."""
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


@dataclass(frozen=True)
class File:
    """The parts of a file, each of which may be replaced."""

    metadata: Mapping[str, Any] = field(default_factory=lambda: {"general.architecture": "llama"})
    keys: bytes = b""  # more of them
    num_keys: int | None = None
    tensors: Sequence[bytes] = (
        tensor("a", (4, 2)),
        tensor("b", (32,), Q8_0, 32),
    )
    num_tensors: int | None = None
    magic: bytes = b"GGUF"
    version: int = 3
    alignment: int = 32
    data: bytes = bytes(32 + 34 + 30)

    def packed(self) -> bytes:
        """The file."""
        more = 1 if self.keys else 0
        num_keys = len(self.metadata) + more if self.num_keys is None else self.num_keys
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        head = self.magic + struct.pack("<IQQ", self.version, num_tensors, num_keys)
        body = b"".join(packed(key, value) for key, value in self.metadata.items())
        made = head + body + self.keys + b"".join(self.tensors)
        return made + bytes(-len(made) % self.alignment) + self.data


def read(tmp_path: Path, content: bytes) -> GgufFile:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    return read_gguf(path)


def test_metadata_and_places_are_what_was_written(tmp_path: Path) -> None:
    values = {"general.architecture": "llama", "n": 7, "x": 0.5, "yes": True, "t": ["a", "é"]}
    file = read(tmp_path, File(metadata={**values, "k": [1, 2]}).packed())
    assert {key: file.metadata[key] for key in values} == values
    assert list(file.metadata["k"]) == [1, 2]  # type: ignore[arg-type]
    a, b = file.tensors["a"], file.tensors["b"]
    assert (a.kind, a.shape, a.num_bytes) == ("F32", (2, 4), 32)
    assert (b.kind, b.shape, b.num_bytes, b.offset - a.offset) == ("Q8_0", (32,), 34, 32)


HOSTILE: dict[str, tuple[File | bytes, str]] = {
    "an empty file": (b"", "would take 4 bytes, and 0 are left"),
    "another format": (File(magic=b"GGML"), "begins with b'GGML'"),
    "a version of the past": (File(version=1), "version 1 .readable: 2, 3"),
    "a version of the future": (File(version=4), "version 4"),
    "bytes in another order": (File(version=3 << 24), "big-endian"),
    "a count of tensors beyond the file": (File(num_tensors=HUGE), "18446744073709551615 tensors"),
    "a count of tensors that wraps": (File(num_tensors=2**61), "tensors would take"),
    "a count of keys beyond the file": (File(num_keys=HUGE), "keys would take"),
    "one tensor too many": (File(num_tensors=3, data=b""), "are left of the file|empty"),
    "a key's length beyond the file": (File(keys=text(b"k", HUGE)), "a key claims"),
    "a key without a name": (File(keys=entry("", UINT32, number(UINT32, 1))), "a key is empty"),
    "a key twice": (
        File(keys=entry("general.architecture", TEXT, text("x"))),
        "'general.architecture' twice",
    ),
    "a key that is no text": (File(keys=entry(b"\xff\xfe", UINT32, bytes(4))), "not UTF-8"),
    "a value of no type": (File(keys=entry("k", 77, bytes(8))), "of type 77"),
    "a text's length beyond the file": (
        File(keys=entry("k", TEXT, text(b"x", 2**40))),
        "claims 1099511627776 bytes",
    ),
    "a list of numbers beyond the file": (
        File(keys=entry("k", ARRAY, struct.pack("<IQ", UINT64, 2**61))),
        "would take 18446744073709551616 bytes",
    ),
    "a list of texts beyond the file": (
        File(keys=entry("k", ARRAY, struct.pack("<IQ", TEXT, HUGE))),
        "18446744073709551615 texts would take",
    ),
    "a list of lists": (File(keys=entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1))), "of lists"),
    "neither true nor false": (File(keys=entry("k", BOOL, b"\x07")), "neither true"),
    "an alignment of none": (
        File(metadata={"general.architecture": "llama", "general.alignment": 0}),
        "general.alignment is 0",
    ),
    "an alignment that is no power of two": (
        File(metadata={"general.architecture": "llama", "general.alignment": 24}),
        "powers of two",
    ),
    "an alignment that is a text": (
        File(metadata={"general.architecture": "llama", "general.alignment": "32"}),
        "general.alignment is '32'",
    ),
    "a tensor twice": (File(tensors=[tensor("a", (8,)), tensor("a", (8,))]), "'a' twice"),
    "no dimensions": (File(tensors=[tensor("a", ())]), "has 0 dimensions"),
    "too many dimensions": (File(tensors=[tensor("a", (1,) * 5)]), "has 5 dimensions"),
    "a dimension of nothing": (File(tensors=[tensor("a", (0, 4))]), "no values"),
    "dimensions whose product wraps": (
        File(tensors=[tensor("a", (2**32, 2**32))]),
        "more than 2..63 bytes",
    ),
    "a tensor beyond the file": (File(tensors=[tensor("a", (2**40,))]), "ends at byte"),
    "an offset beyond the file": (
        File(tensors=[tensor("a", (8,), F32, HUGE - 31)]),
        "the bytes between belong to none",
    ),
    "tensors that overlap": (
        File(tensors=[tensor("a", (16,)), tensor("b", (8,), F32, 32)], data=bytes(64)),
        "they overlap",
    ),
    "bytes between tensors": (
        File(tensors=[tensor("a", (8,)), tensor("b", (8,), F32, 64)], data=bytes(96)),
        "belong to none",
    ),
    "bytes behind the tensors": (File(data=bytes(4096)), "the file has"),
    "a type that has no number": (File(tensors=[tensor("a", (8,), 4242)]), "type 4242"),
    "a type that was removed": (File(tensors=[tensor("a", (32,), 4)]), "of type 4, .*readable"),
    "a type without values": (File(tensors=[tensor("a", (32,), 9)]), "of type Q8_1"),
    "half a block": (File(tensors=[tensor("a", (40,), Q8_0)]), "rows of 40 values"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused_and_nothing_is_made(name: str, tmp_path: Path) -> None:
    made, said = HOSTILE[name]
    path = tmp_path / "x.gguf"
    path.write_bytes(made if isinstance(made, bytes) else made.packed())
    good = tmp_path / "good.gguf"
    good.write_bytes(File().packed())
    read_gguf(good)  # imports the table of types
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=said):
            read_gguf(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MAX_BYTES


def test_every_cut_is_noticed(tmp_path: Path) -> None:
    content = File(metadata={"general.architecture": "llama", "t": ["a", "b"]}).packed()
    for size in range(len(content) - 30):  # the last 30 fill up to the alignment
        with pytest.raises(UserError, match="not a whole GGUF file"):
            read(tmp_path, content[:size])


def test_a_file_without_padding_at_its_end_is_whole(tmp_path: Path) -> None:
    assert read(tmp_path, File(data=bytes(32 + 34)).packed()).tensors


def _only_ours(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        file = read_gguf(path)
    except UserError:
        return
    size = path.stat().st_size
    assert all(t.offset + t.num_bytes <= size for t in file.tensors.values())


FUZZED = settings(
    max_examples=400, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
NUMBERS = st.sampled_from([0, 1, 2, 31, 32, 33, 2**31, 2**32 - 1, 2**61, 2**63, HUGE])
KINDS = st.integers(0, 14)
ENTRIES = st.one_of(
    st.tuples(st.text(max_size=8), KINDS, st.binary(max_size=24)).map(lambda e: entry(*e)),
    st.tuples(st.text(max_size=8), KINDS, NUMBERS, st.binary(max_size=24)).map(
        lambda e: entry(e[0], ARRAY, struct.pack("<IQ", e[1], e[2]) + e[3])
    ),
)
TENSORS = st.tuples(
    st.text(max_size=8), st.lists(NUMBERS, max_size=5), st.integers(0, 45), NUMBERS
).map(lambda t: tensor(*t))


@FUZZED
@given(
    keys=st.lists(ENTRIES, max_size=3),
    tensors=st.lists(TENSORS, max_size=3),
    counts=st.tuples(st.none() | NUMBERS, st.none() | NUMBERS),
    data=st.binary(max_size=80),
)
def test_headers_of_any_values_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory,
    keys: list[bytes],
    tensors: list[bytes],
    counts: tuple[int | None, int | None],
    data: bytes,
) -> None:
    num_keys, num_tensors = counts
    made = File(
        keys=b"".join(keys),
        num_keys=1 + len(keys) if num_keys is None else num_keys,
        tensors=tensors,
        num_tensors=num_tensors,
        data=data,
    )
    _only_ours(tmp_path_factory.getbasetemp() / "values.gguf", made.packed())


def split(number_of: int, count: int, names: str, total: int) -> bytes:
    values = {
        "general.architecture": "llama",
        "split.no": number_of,
        "split.count": count,
        "split.tensors.count": total,
    }
    tensors = [tensor(name, (8,), F32, 32 * i) for i, name in enumerate(names)]
    return File(metadata=values, tensors=tensors, data=bytes(32 * len(names))).packed()


def write_parts(folder: Path, *contents: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    for i, content in enumerate(contents, 1):
        (folder / f"m-{i:05}-of-{len(contents):05}.gguf").write_bytes(content)
    return folder / f"m-00001-of-{len(contents):05}.gguf"


def test_parts_of_a_split_file_are_one_model(tmp_path: Path) -> None:
    first = write_parts(tmp_path, split(0, 2, "ab", 3), split(1, 2, "c", 3))
    file = open_gguf(first)
    assert {name: t.file.name for name, t in file.tensors.items()} == {
        "a": "m-00001-of-00002.gguf",
        "b": "m-00001-of-00002.gguf",
        "c": "m-00002-of-00002.gguf",
    }
    assert gguf_of(tmp_path) == first


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        ((split(0, 2, "ab", 3), split(1, 2, "a", 3)), "both hold 'a'"),
        ((split(0, 2, "ab", 9), split(1, 2, "c", 9)), "all parts hold 9 tensors"),
        ((split(0, 2, "ab", 3), split(0, 2, "c", 3)), "says that it is part 0"),
        ((split(0, 3, "ab", 3), split(1, 3, "c", 3)), "of 3, and it was read as part 0 of 2"),
    ],
    ids=["a tensor twice", "tensors missing", "a part twice", "a part missing"],
)
def test_parts_that_do_not_belong_together_are_refused(
    contents: tuple[bytes, bytes], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said):
        open_gguf(write_parts(tmp_path, *contents))


def test_a_missing_part_and_a_later_one_are_named(tmp_path: Path) -> None:
    first = write_parts(tmp_path, split(0, 2, "ab", 3), split(1, 2, "c", 3))
    second = first.with_name("m-00002-of-00002.gguf")
    with pytest.raises(UserError, match="part 2 of 2; pass the first one, m-00001-of-00002"):
        open_gguf(second)
    second.unlink()
    with pytest.raises(UserError, match="lacks m-00002-of-00002"):
        open_gguf(first)


def test_a_folder_is_the_model_of_its_only_file(tmp_path: Path) -> None:
    def touched(name: str) -> Path:
        (tmp_path / name).touch()
        return tmp_path / name

    assert gguf_of(tmp_path) is None
    model = touched("model.Q4_K_M.gguf")
    touched("mmproj-F16.gguf")
    touched("config.json")
    assert gguf_of(tmp_path) == gguf_of(model) == model
    other = touched("model.Q8_0.gguf")
    with pytest.raises(UserError, match="holds 2 GGUF models"):
        gguf_of(tmp_path)
    assert gguf_of(other) == other
    touched("model.safetensors")
    assert gguf_of(tmp_path) is None


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(File().packed())
    assert "n" not in open_gguf(path).metadata
    path.write_bytes(File(metadata={"general.architecture": "llama", "n": 1}).packed())
    assert open_gguf(path).metadata["n"] == 1
