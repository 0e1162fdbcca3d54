"""Pickles that would write a file if anything ran them; each with the words of its refusal."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


class Calls:
    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self.made = function, arguments

    def __reduce__(self) -> Any:
        return self.made


def _touch(marker: Path) -> str:
    return f"touch {marker}"


def marks(marker: Path) -> tuple[Callable[[str], int], str]:
    """A function that writes a file, and its argument."""
    import os

    return os.system, _touch(marker)


def text(value: str) -> bytes:
    """A text as pickles of protocol 2 have it."""
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def by_reduce(marker: Path, protocol: int = 2) -> bytes:
    """os.system(...) as a value beside a good array."""
    values = {"a": np.zeros(2, np.float32), "b": Calls(*marks(marker))}
    return pickle.dumps(values, protocol=protocol)


def by_eval(marker: Path) -> bytes:
    """What Paddle writes for a DenseTensor, with another expression."""
    return pickle.dumps({"a": Calls(eval, f"open({str(marker)!r}, 'w')")}, protocol=2)


def by_inst(marker: Path) -> bytes:
    """INST calls a class with what lies above a mark."""
    return b"\x80\x02(" + text(_touch(marker)) + b"ios\nsystem\n."


def by_obj(marker: Path) -> bytes:
    """OBJ does the same, with the class on the stack."""
    return b"\x80\x02(cos\nsystem\n" + text(_touch(marker)) + b"o."


def by_newobj_ex(marker: Path) -> bytes:
    """NEWOBJ_EX makes subprocess.Popen with keyword arguments."""
    words = text("args") + text(_touch(marker)) + text("shell") + b"\x88"
    return b"\x80\x04csubprocess\nPopen\n)}(" + words + b"u\x92."


def by_build(marker: Path) -> bytes:
    """BUILD calls __setstate__ of an object that may be any."""
    return b"\x80\x02cfunctools\npartial\n)\x81(cos\nsystem\n" + text(_touch(marker)) + b"tb."


def by_stack_global(marker: Path) -> bytes:
    """STACK_GLOBAL takes the names from the stack; here out of the memo."""
    names = text("posix") + b"\x94" + text("system") + b"\x94\x87h\x00h\x01"
    return b"\x80\x04N" + names + b"\x93" + text(_touch(marker)) + b"\x85R\x86."


def by_dotted_name(marker: Path) -> bytes:
    """A name with dots reaches through an allowed module: numpy's own os."""
    return (
        b"\x80\x04" + text("numpy") + text("f2py.os.system") + b"\x93" + text(_touch(marker))
    ) + b"\x85R."


def by_allowed_module(marker: Path) -> bytes:
    """A function beside those that are allowed: it maps any file."""
    words = text(str(marker)) + text("u1") + text("w+") + b"K\x00K\x08"
    return b"\x80\x02cnumpy\nmemmap\n(" + words + b"tR."


def by_persistent_id(marker: Path) -> bytes:
    """BINPERSID asks the reader for an object by name."""
    return b"\x80\x02" + text(_touch(marker)) + b"Q."


def by_extension(marker: Path) -> bytes:
    """EXT1 names a function by a number of the copyreg registry."""
    return b"\x80\x02\x82\x01" + text(_touch(marker)) + b"\x85R."


def nested(marker: Path) -> bytes:
    return pickle.dumps({"a": Calls(pickle.loads, by_reduce(marker))}, protocol=4)


def in_an_array(marker: Path) -> bytes:
    """An array of objects, whose pickle holds the call."""
    values = np.array([Calls(*marks(marker))], dtype=object)
    return pickle.dumps({"a": values}, protocol=2)


@dataclass(frozen=True)
class Payload:
    """One pickle: what makes it, and what its refusal must name."""

    made: Callable[[Path], bytes]
    says: str


PAYLOADS = {
    "reduce, protocol 0": Payload(lambda m: by_reduce(m, 0), "protocol 2 or later"),
    "reduce, protocol 1": Payload(lambda m: by_reduce(m, 1), "protocol 2 or later"),
    "reduce, protocol 2": Payload(lambda m: by_reduce(m, 2), "posix.system"),
    "reduce, protocol 3": Payload(lambda m: by_reduce(m, 3), "posix.system"),
    "reduce, protocol 4": Payload(lambda m: by_reduce(m, 4), "posix.system"),
    "reduce, protocol 5": Payload(lambda m: by_reduce(m, 5), "posix.system"),
    "eval": Payload(by_eval, "builtin__.eval"),
    "inst": Payload(by_inst, "operation INST at byte"),
    "inst names its function": Payload(by_inst, "os.system"),
    "obj": Payload(by_obj, "os.system"),
    "newobj_ex": Payload(by_newobj_ex, "subprocess.Popen"),
    "build": Payload(by_build, "functools.partial"),
    "stack_global": Payload(by_stack_global, "posix.system"),
    "dotted name": Payload(by_dotted_name, "numpy.f2py.os.system"),
    "allowed module": Payload(by_allowed_module, "numpy.memmap"),
    "persistent id": Payload(by_persistent_id, "BINPERSID"),
    "extension": Payload(by_extension, "EXT1"),
    "nested": Payload(nested, "_pickle.loads"),
    "array of objects": Payload(in_an_array, "O8, Python's objects"),
}
