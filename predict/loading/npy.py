"""Reading .npy files of numbers; those of Python's objects are pickles, and are refused."""

from __future__ import annotations

import os
import re
from pathlib import Path

from predict.errors import UserError
from predict.loading.arrays import (
    MAX_SHOWN,
    NUMPY_CODES,
    StoredArray,
    TensorInfo,
    Turned,
    checked_shape,
)
from predict.system.files import open_regular

MAGIC = b"\x93NUMPY"
MAX_HEADER_BYTES = 1 << 16
# What NumPy writes, key by key; anything else is some other program's text.
HEADER = re.compile(
    r"\{'descr': '([^']*)', 'fortran_order': (True|False), "
    r"'shape': \(((?:\d{1,19}, ?)*(?:\d{1,19})?)\), \} *\n"
)


def read_npy(path: Path) -> StoredArray:
    """The array of a file, not read yet. Raises UserError for anything but an array of numbers."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(len(MAGIC) + 2)
        if start[:-2] != MAGIC or start[-2] not in (1, 2, 3):
            raise _refused(path, "it does not begin as one of version 1, 2 or 3")
        length = file.read(2 if start[-2] == 1 else 4)
        num_bytes = int.from_bytes(length, "little")
        if num_bytes > min(MAX_HEADER_BYTES, size - file.tell()):
            raise _refused(path, f"its header claims {num_bytes} bytes of {size}")
        text = file.read(num_bytes).decode("latin-1")
        offset = file.tell()
    match = HEADER.fullmatch(text)
    if match is None:
        raise _refused(path, f"its header is {text[:MAX_SHOWN]!r}")
    descr, is_fortran, sizes = match.groups()
    if descr not in NUMPY_CODES:
        objects = ", Python's objects" if "O" in descr else ""
        raise _refused(
            path,
            f"it has dtype {descr[:MAX_SHOWN]!r}{objects} (readable: {', '.join(NUMPY_CODES)})",
        )
    shape = tuple(int(each) for each in sizes.replace(" ", "").split(",") if each)
    try:
        shape, needed = checked_shape(shape, NUMPY_CODES[descr])
    except ValueError as error:
        raise _refused(path, f"its shape {error}") from None
    if offset + needed != size:
        raise _refused(
            path,
            f"{descr} {list(shape)} needs {needed} bytes, and {size - offset} follow the header",
        )
    is_turned = is_fortran == "True" and len(shape) > 1
    info = TensorInfo(path, NUMPY_CODES[descr], shape[::-1] if is_turned else shape, offset)
    return Turned(info) if is_turned else info


def _refused(path: Path, why: str) -> UserError:
    return UserError(f"{path} is not a .npy file of numbers: {why}; write it again with numpy.save")
