"""Files of paddle.save: read as Paddle reads them, and nothing in them is run."""

from __future__ import annotations

import pickle
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paddle
from predict.errors import UserError
from predict.loading import pickle_machine
from predict.loading.checkpoint import Checkpoint
from predict.loading.pdparams import read_params
from tests.support.pickles import PAYLOADS, Calls, text

DTYPES = ("float32", "bfloat16", "float16", "int8", "uint8", "int32", "int64", "bool", "float64")
PROTOCOLS = (2, 3, 4, 5)


def write(folder: Path, data: bytes) -> Path:
    path = folder / "model_state.pdparams"
    path.write_bytes(data)
    return path


def refused(folder: Path, data: bytes) -> str:
    with pytest.raises(UserError) as caught:
        read_params(write(folder, data))
    return str(caught.value)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_what_paddle_saves_is_read_as_paddle_reads_it(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "model_state.pdparams"
    values: dict[str, Any] = {
        name: (paddle.arange(6).reshape([2, 3]) - 2).astype(name) for name in DTYPES
    }
    values |= {
        "number": paddle.to_tensor(3.0),
        "empty": paddle.zeros([0, 3]),
        "array": np.arange(4, dtype=np.float32).reshape(2, 2).T,
        "scalar": np.float32(2.5),
        "step": 3,
        "name": "llama",
        "list": [1, 2.5, None, True],
        "nested": {"a": np.ones(2)},
    }
    paddle.save(values, str(path), protocol=protocol)
    wanted = {
        name: value
        for name, value in paddle.load(str(path), return_numpy=True).items()
        if isinstance(value, np.ndarray)
    }
    found = {name: array.read() for name, array in read_params(path).items()}
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value, strict=True)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_layers_and_numpy_pickles_are_read(tmp_path: Path, protocol: int) -> None:
    layer = paddle.nn.Linear(2, 3)
    path = tmp_path / "layer.pdparams"
    paddle.save(layer.state_dict(), str(path), protocol=min(protocol, 4))
    assert read_params(path).keys() == {"weight", "bias"}
    values = {"a": np.arange(6.0).reshape(2, 3).T, "b": np.arange(8, dtype=np.int8)[::2]}
    found = read_params(write(tmp_path, pickle.dumps(values, protocol=protocol)))
    for name, value in values.items():
        np.testing.assert_array_equal(found[name].read(), value)


def test_modules_of_numpy_1_are_known(tmp_path: Path) -> None:
    data = pickle.dumps({"a": np.ones(3)}, protocol=2)
    old = data.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    assert read_params(write(tmp_path, old))["a"].read().tolist() == [1, 1, 1]


@pytest.mark.parametrize("protocol", [2, 3])
def test_slices_of_large_arrays_are_joined(tmp_path: Path, protocol: int) -> None:
    values = np.arange(12, dtype=np.float32)
    saved = {
        "w@@.0": values[:8],
        "w@@.1": values[8:],
        "UnpackBigParamInfor@@": {"w": {"OriginShape": (3, 4), "slices": ["w@@.0", "w@@.1"]}},
    }
    path = write(tmp_path, pickle.dumps(saved, protocol=protocol))
    found = read_params(path)
    assert found.keys() == {"w"}
    np.testing.assert_array_equal(found["w"].read(), values.reshape(3, 4))
    saved.pop("w@@.1")
    assert "slices of w are not all there" in refused(tmp_path, pickle.dumps(saved, protocol=2))


def test_tied_tensors_share_their_bytes(tmp_path: Path) -> None:
    value = np.ones((4, 4), np.float32)
    found = read_params(write(tmp_path, pickle.dumps({"a": value, "b": value}, protocol=4)))
    assert found["a"].pieces == found["b"].pieces


@pytest.mark.parametrize("name", PAYLOADS)
def test_nothing_that_a_pickle_says_is_run(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    payload = PAYLOADS[name]
    assert payload.says in refused(tmp_path, payload.made(marker))
    with pytest.raises(UserError):
        Checkpoint(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize("name", PAYLOADS)
def test_the_payloads_are_real(tmp_path: Path, name: str) -> None:
    """Else the test above would show nothing: an unpickler runs them, or knows no such object."""
    marker = tmp_path / "marker"
    with suppress(pickle.UnpicklingError, ValueError, TypeError, AttributeError):
        pickle.loads(PAYLOADS[name].made(marker))
    # These four need more than a file: a registry, a reader of ids, a class that does as told.
    assert marker.exists() != (name in ("persistent id", "extension", "build", "newobj_ex"))


HEAD = b"\x80\x02"
ARRAY = pickle.dumps({"a": np.zeros((2, 3), np.float32)}, protocol=3)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "does not begin as a pickle"),
        (b"PK\x03\x04" + bytes(40), "a zip archive, as PyTorch writes"),
        (b"\x80\x06.", r"protocol 6 (allowed: 2, 3, 4, 5)"),
        (b"\x80\x01.", "protocol 1 (allowed"),
        (HEAD, "cut short at byte 2"),
        (HEAD + b".", "its stack is empty"),
        (HEAD + b"N.", "holds nothing, not names"),
        (HEAD + b"}.more", "4 bytes follow its end"),
        (HEAD + b"}}.", "more than one value"),
        (HEAD + b"(}.", "more than one value"),
        (HEAD + b"t.", "there is no mark"),
        (HEAD + b"h\x05.", "recalls value 5, which it never stored"),
        (HEAD + b"Na.", "its stack is empty"),
        (HEAD + b"}Na.", "needs a list, not an object of names"),
        (HEAD + b"](NNu.", "needs an object of names, not a list"),
        (HEAD + b"}(Nu.", "a key without a value"),
        (HEAD + b"}NNs.", "a key is nothing, not a text"),
        (HEAD + b"}" + text("a") + b"Ns" + text("a") + b"Ns.", "the name a twice"),
        (HEAD + b"\x8a\xff" + b"\x7f" * 255 + b".", "an integer of 2039 bits"),
        (HEAD + b"X\xff\xff\xff\xff.", "should have 4294967295 bytes"),
        (b"\x80\x04\x8e" + b"\xff" * 8, "and the file ends after 0"),
        (HEAD + b"cos", "no newline found"),
        (HEAD + b"cnum\\py\nx\n.", "has a backslash"),
        (HEAD + b"\x00.", "byte 2 is 0x00, which is no operation"),
        (HEAD + b"cnumpy\nndarray\n)R.", "calls numpy.ndarray, which Paddle's files only name"),
        (HEAD + b"NN\x93.", "a module's name is nothing"),
        (HEAD + b"]" + text("x") + b"b.", "sets the state of a list"),
        (HEAD + b"K\x01)R.", "calls a number with a tuple"),
        (HEAD + b"0.", "operation POP at byte 2"),
        (HEAD + b"I5\n.", "operation INT at byte 2"),
        (HEAD + b"(lp0\n.", "operation LIST at byte 3"),
        (b"\x80\x05\x97.", "operation NEXT_BUFFER"),
        (HEAD + b"}X\x02\x00\x00\x00\xff\xfeNs.", "is not UTF-8"),
        (HEAD + b"}" + text("a" * 5000) + b"Ns.", "has 5000 bytes (at most 4096"),
        (HEAD + b"}" + text("a") + b"cnumpy\nndarray\ns.", "a is a function, not a tensor"),
        (HEAD + b"c_codecs\nencode\n" + text("a") + text("rot13") + b"\x86R.", "as rot13 (allow"),
        (b"\x80\x04}" + text("a") + b"C\x04\x80\x02N.s.", "a is bytes, not a tensor"),
        (ARRAY.replace(b"K\x02K\x03\x86", b"K\x02K\x04\x86"), "[2, 4] and dtype f4 needs 32 byt"),
        (ARRAY.replace(b"K\x02K\x03\x86", b"\x88K\x06\x86"), "has the size True"),
        (ARRAY.replace(b"X\x01\0\0\0<", b"X\x01\0\0\0>"), "byte order '>' (allowed: '<', '|')"),
        (ARRAY.replace(b"X\x02\0\0\0f4", b"X\x02\0\0\0c8"), "dtype c8 (readable: f8, f4"),
        (ARRAY.replace(b"X\x02\0\0\0f4", b"X\x02\0\0\0f8"), "needs 48 bytes, and has 24"),
        (ARRAY.replace(b"X\x02\0\0\0f4", b"X\x02\0\0\0O8"), "dtype O8, Python's objects"),
        (ARRAY[:-3], "cut short at"),
        (pickle.dumps({"a": Calls(bytearray, 1 << 40)}, protocol=4), "builtins.bytearray"),
        (pickle.dumps([np.zeros(2)], protocol=2), "holds a list, not names and arrays"),
        (pickle.dumps({"a": {1, 2}}, protocol=4), "operation EMPTY_SET"),
        (pickle.dumps({"a": -(2**70)}, protocol=2), "an integer of 71 bits"),
    ],
)
def test_what_no_file_of_paddle_holds_is_refused_by_name(
    tmp_path: Path, data: bytes, said: str
) -> None:
    message = refused(tmp_path, data)
    assert said in message
    assert str(tmp_path / "model_state.pdparams") in message


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((-2, -3), "has the size -2"),
        ((2**31, 2**31, 0), "has more elements than 64 bits count"),
        ((2.0, 3), "has the size 2.0"),
        ((1,) * 40, "has 40 dimensions (at most 32"),
        (None, "is null, not a list of sizes"),
    ],
)
def test_shapes_that_no_array_has_are_refused(tmp_path: Path, shape: Any, said: str) -> None:
    reduced: Any = np.zeros((2, 3), np.float32).__reduce__()
    function, arguments, (version, _, *state) = reduced
    array = Calls(function, *arguments)
    array.made = (*array.made, (version, shape, *state))  # type: ignore[assignment]
    assert said in refused(tmp_path, pickle.dumps({"a": array}, protocol=4))


def test_a_memo_does_not_multiply_what_a_file_holds(tmp_path: Path) -> None:
    """Each value is worth 2 bytes of the file, and would be 1 MB, or a text of 4 kB, if copied."""
    bomb = HEAD + b"](" + text("k" * 4000) + b"q\x00" + b"}h\x00h\x00s" * 90_000
    path = write(tmp_path, bomb + b"e.")
    tracemalloc.start()
    with pytest.raises(UserError):
        read_params(path)
    assert tracemalloc.get_traced_memory()[1] < 100 * path.stat().st_size
    tracemalloc.stop()


def test_the_number_of_operations_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickle_machine, "MAX_OPERATIONS", 1000)
    assert "more than 1000 operations" in refused(tmp_path, HEAD + b"N" * 2000)


def test_values_that_are_nested_without_end_are_refused(tmp_path: Path) -> None:
    assert "holds a list" in refused(tmp_path, HEAD + b"]" * 50_000 + b"a" * 49_999 + b".")
    loop = HEAD + b"}q\x00" + text("a") + b"h\x00s."  # an object that holds itself
    assert read_params(write(tmp_path, loop)) == {}
