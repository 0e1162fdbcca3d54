"""Files of torch.save: hostile ones are refused by name, and nothing in them is run."""

from __future__ import annotations

import pickle
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from predict.errors import UserError
from predict.loading.checkpoint import Checkpoint
from predict.loading.torch_file import read_torch
from tests.support import tiny
from tests.support.pickles import PAYLOADS, Calls, marks, text
from tests.support.stored_formats import state_pickle, tensor_pickle, torch_file, torch_zip

VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)
GOOD = torch_file({"a": VALUES})
SAYS = {"persistent id": "asks for an object by a text, not for a storage"}
# PyTorch's files have no arrays of NumPy; these payloads begin with one.
SAYS |= dict.fromkeys(
    ["array of objects", *(f"reduce, protocol {n}" for n in range(2, 6))], "numpy"
)


def write(folder: Path, data: bytes, name: str = "pytorch_model.bin") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def refused(folder: Path, data: bytes) -> str:
    """What is said of a file; that it is refused takes little memory, whatever it claims."""
    path = write(folder, data)
    tracemalloc.start()
    with pytest.raises(UserError) as caught:
        read_torch(path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1 << 22  # modules that are imported to say it take some
    message = str(caught.value)
    assert message.startswith(f"{path} is not a file of tensors that PyTorch saved: ")
    return message


def with_tensor(pickled: bytes, **storages: bytes) -> bytes:
    """An archive of one tensor; storages: `s0` is the entry data/0."""
    entries = {f"data/{key[1:]}": data for key, data in storages.items()}
    return torch_zip({"data.pkl": state_pickle({"a": pickled}), **entries})


@pytest.mark.parametrize("ending", ["pytorch_model.bin", "pytorch_model.pt"])
@pytest.mark.parametrize("name", PAYLOADS)
def test_nothing_that_a_pickle_says_is_run(tmp_path: Path, name: str, ending: str) -> None:
    marker = tmp_path / "marker"
    data = torch_zip({"data.pkl": PAYLOADS[name].made(marker)})
    assert SAYS.get(name, PAYLOADS[name].says) in refused(tmp_path, data)
    tiny.write(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    write(tmp_path / "model", data, ending)
    with pytest.raises(UserError):
        Checkpoint(tmp_path / "model")
    assert not marker.exists()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_nothing_beside_good_tensors_is_run(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "marker"
    call = pickle.dumps(Calls(*marks(marker)), protocol)
    pickle.loads(call)
    marker.unlink()  # the payload is real
    body = call[2:-1] if protocol < 4 else call[11:-1]  # less its head and its end
    good = tensor_pickle("0", "FloatStorage", 6, (2, 3), (3, 1))
    data = state_pickle({"a": good, "b": body})
    entries = {"data.pkl": data, "data/0": VALUES.tobytes()}
    assert "posix.system" in refused(tmp_path, torch_zip(entries))
    assert not marker.exists()


def test_nothing_in_a_persistent_id_is_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    call = pickle.dumps(Calls(*marks(marker)), 2)[2:-1]  # less its head and its end
    data = state_pickle({"a": b"(" + text("storage") + call + b"tQ"})
    assert "posix.system" in refused(tmp_path, torch_zip({"data.pkl": data}))
    outside = b"(" + text("module") + b"ctorch\nFloatStorage\n" + text("0") + text("x") + b"NtQ"
    data = state_pickle({"a": outside})
    assert "not for a storage" in refused(tmp_path, torch_zip({"data.pkl": data}))
    assert not marker.exists()


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "count", "said"),
    [
        ((1 << 15, 1 << 15), (1 << 15, 1), 0, 1 << 30, "should have 4294967296 bytes, and its"),
        ((1 << 15, 1 << 15), (1 << 15, 1), 0, 6, "takes 4294967296 bytes, and its storage has 24"),
        ((1 << 15, 1 << 15), (0, 0), 0, 6, "takes 4294967296 bytes, and its storage has 24"),
        ((2, 3), (1, 0), 0, 2, "takes 24 bytes, and its storage has 8"),
        ((2, 3), (3, 1), 1, 6, "takes 28 bytes"),
        ((2, 3), (4, 1), 0, 6, "takes 28 bytes"),
        ((2, 3), (-3, 1), 0, 6, "no whole numbers, 0 or more"),
        ((2, 3), (3, 1), -1, 6, "no whole numbers, 0 or more"),
        ((2, -3), (3, 1), 0, 6, "has the size -3"),
        ((2, 3), (3,), 0, 6, "no whole numbers, 0 or more"),
        ((1,) * 40, (1,) * 40, 0, 6, "has 40 dimensions"),
        ((2, 3), (3, 1), 0, -6, "the size of a storage is no whole number"),
    ],
)
def test_tensors_beyond_their_storage_are_refused(
    tmp_path: Path,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    count: int,
    said: str,
) -> None:
    pickled = tensor_pickle("0", "FloatStorage", count, shape, strides, offset)
    assert said in refused(tmp_path, with_tensor(pickled, s0=VALUES.tobytes()))


def changed(old: bytes, new: bytes, data: bytes = GOOD) -> bytes:
    assert old in data
    return data.replace(old, new)


def central(field: int, value: int, width: str = "<H") -> bytes:
    """The good archive with a field of its directory's first entry changed."""
    made = bytearray(GOOD)
    struct.pack_into(width, made, GOOD.index(b"PK\x01\x02") + field, value)
    return bytes(made)


def renamed(name: str) -> bytes:
    """The good archive with another name of its last entry, as long as the old one."""
    old = b"archive/data/0"
    return changed(old, name.encode().ljust(len(old), b"x"))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "it is no zip archive"),
        (b"PK", "it has 2 bytes"),
        (GOOD[:-1], "its directory is not at its end"),
        (GOOD + b"x", "its directory is not at its end"),
        (GOOD[:200] + GOOD[-22:], "its directory is damaged"),
        (renamed("../../../../x"), "an entry of the name b'../../../../xx'"),
        (renamed("/etc/cron.d/x"), "an entry of the name b'/etc/cron.d/xx'"),
        (renamed("C:\\x"), "an entry of the name b'C:"),
        (renamed("archive/../x"), "an entry of the name b'archive/../xxx'"),
        (renamed("archive\0"), "an entry of the name b'archive\\x00"),
        (changed(b"archive/data/0", b"archive/versio"), "the entry archive/data/0"),
        (central(8, 1), "is encrypted"),
        (central(10, 8), "is compressed (method 8)"),
        (central(24, 1 << 31, "<I"), "is compressed"),
        (central(34, 1), "one of several volumes"),
        (central(42, 1 << 30, "<I"), "begins at byte 1073741824, out of place"),
        (central(42, 7, "<I"), "is another one than the directory says"),
        (torch_zip({"data.pkl": b"\x80\x02}."}, zipfile.ZIP_DEFLATED), "is compressed"),
        (torch_zip({"x.pkl": b""}), "it has 0 entries <folder>/data.pkl, not one"),
        (torch_zip({"data.pkl": b"", "code/m.py": b"import os"}), "a TorchScript program"),
        (torch_zip({"data.pkl": b"", "constants.pkl": b""}), "a TorchScript program"),
        (torch_zip({"data.pkl": b"", "byteorder": b"big"}), "its byte order is b'big'"),
        (torch_zip({"data.pkl": b"\x80\x02]."}), "it holds a list, not names and tensors"),
        (torch_zip({"data.pkl": b"\x80\x02}"}), "cut short at byte"),
        (torch_zip({"data.pkl": b"\x80\x02}.x"}), "1 bytes follow its end"),
        (with_tensor(b"}"), "a is an object of names, not a tensor; save the state_dict alone"),
        (with_tensor(tensor_pickle("0", "FloatStorage", 6, (6,), (1,))), "lacks the entry"),
        (
            with_tensor(tensor_pickle("0", "ComplexFloatStorage", 6, (6,), (1,)), s0=bytes(48)),
            "asks for torch.ComplexFloatStorage",
        ),
        (
            with_tensor(tensor_pickle("../0", "FloatStorage", 6, (6,), (1,)), s0=bytes(48)),
            "lacks the entry archive/data/../0",
        ),
        (with_tensor(b"ctorch._utils\n_rebuild_sparse_tensor\n)R"), "_rebuild_sparse_tensor"),
        (with_tensor(b"ctorch.storage\n_load_from_bytes\nC\x02ab\x85R"), "_load_from_bytes"),
        (
            with_tensor(b"ctorch._utils\n_rebuild_tensor_v2\n(N)tR"),
            "_rebuild_tensor_v2 with nothing, a tuple, and PyTorch",
        ),
        (with_tensor(b"ctorch\nFloatStorage\n)R"), "which PyTorch's files only name"),
        (with_tensor(b"}]b"), "it sets the state of an object of names to a list"),
    ],
)
def test_what_no_file_of_pytorch_holds_is_refused_by_name(
    tmp_path: Path, data: bytes, said: str
) -> None:
    assert said in refused(tmp_path, data)


def test_entries_that_overlap_are_refused(tmp_path: Path) -> None:
    """Two entries of the directory for one place: bytes would count twice."""
    made = bytearray(torch_zip({"data.pkl": b"\x80\x02}.", "a": b"", "b": b""}))
    first = bytes(made).rindex(b"archive/a")  # in the directory
    second = bytes(made).rindex(b"archive/b")
    assert first < second
    made[second : second + 9] = b"archive/a"
    assert "twice" in refused(tmp_path, bytes(made))
    # A local header that reaches into the next entry: both would have its bytes.
    made = bytearray(torch_zip({"data.pkl": b"\x80\x02}.", "a": b"12345678", "b": b"12345678"}))
    entry = bytes(made).rindex(b"archive/a") - 46
    struct.pack_into("<II", made, entry + 20, 30, 30)
    assert "overlap" in refused(tmp_path, bytes(made))


def test_an_entry_of_4_gb_in_a_small_archive_is_refused(tmp_path: Path) -> None:
    made = bytearray(GOOD)
    struct.pack_into("<II", made, GOOD.rindex(b"PK\x01\x02") + 20, 0xFFFFFFF0, 0xFFFFFFF0)
    said = refused(tmp_path, bytes(made))
    assert "entry 'archive/data/0' should have 4294967280 bytes" in said


def test_sizes_of_64_bits_are_read_and_believed_no_more_than_others(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "big.zip", "w") as archive:
        pickled = state_pickle({"a": tensor_pickle("0", "FloatStorage", 6, (6,), (1,))})
        entries = {"archive/data.pkl": pickled, "archive/data/0": VALUES.tobytes()}
        for name, data in entries.items():
            with archive.open(name, "w", force_zip64=True) as entry:
                entry.write(data)
    data = (tmp_path / "big.zip").read_bytes()
    assert read_torch(write(tmp_path, data))["a"].read().tolist() == [0, 1, 2, 3, 4, 5]
    made = bytearray(data)
    at = data.rindex(b"PK\x01\x02")
    struct.pack_into("<II", made, at + 20, 0xFFFFFFFF, 0xFFFFFFFF)
    assert "should have 4294967295 bytes" in refused(tmp_path, bytes(made))


def test_tensors_of_one_storage_share_its_bytes(tmp_path: Path) -> None:
    pickles = {
        "a": tensor_pickle("0", "FloatStorage", 6, (2, 3), (3, 1)),
        "b": tensor_pickle("0", "FloatStorage", 6, (2, 3), (3, 1)),
        "turned": tensor_pickle("0", "FloatStorage", 6, (3, 2), (1, 3)),
        "cut": tensor_pickle("0", "FloatStorage", 6, (2,), (3,), 1),
    }
    data = torch_zip({"data.pkl": state_pickle(pickles), "data/0": VALUES.tobytes()})
    found = read_torch(write(tmp_path, data))
    assert found["a"].places == found["b"].places
    np.testing.assert_array_equal(found["turned"].read(), VALUES.T)
    np.testing.assert_array_equal(found["cut"].read(), VALUES[:, 1])


def test_a_file_that_shrinks_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    found = read_torch(path)
    path.write_bytes(GOOD[:40])
    with pytest.raises(UserError, match="shorter than when it was opened"):
        found["a"].read()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.pt", "model.pt"])
def test_a_file_is_found_by_any_of_its_names(tmp_path: Path, name: str) -> None:
    write(tmp_path, GOOD, name)
    np.testing.assert_array_equal(Checkpoint(tmp_path).read("a"), VALUES)
