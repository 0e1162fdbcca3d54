"""A stack machine for pickles of tensors, which runs nothing that they say.

A pickle is a program: it may name any function of any module and call it. The machine here is our
own, and `pickletools` says what its codes and their arguments are. It knows the operations that the
files of a `Dialect` need and, of the functions that a pickle may name, those of its `calls`. None
of them is ever called: what they stand for is rebuilt from their arguments. Everything else is
refused by its name.

Bytes and texts stay in the file, as `Unread`s: neither a claim of a size nor a value that a memo
repeats a thousand times takes memory. Protocol 2 spells bytes as latin-1 text in UTF-8.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any, BinaryIO, cast

import numpy as np

from predict.errors import UserError
from predict.loading.arrays import NUMPY_CODES, checked_shape

DTYPES = {code[1:]: name for code, name in NUMPY_CODES.items()}  # a byte order comes apart
OPCODES = {each.code.encode("latin-1"): each for each in pickletools.opcodes}
# Bytes of the size ahead of an argument, by pickletools' mark of those that have one.
SIZES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
PROTOCOLS = (2, 3, 4, 5)
MAX_OPERATIONS = 2_000_000  # some 40 for a tensor, and each may take 100 bytes of memory
MAX_TEXT_BYTES = 4096  # of a name
MAX_CHUNK_BYTES = 1 << 24
MAX_SHOWN = 8  # arguments of a call
INSTEAD = (
    "no code of a checkpoint is run here. If you know who wrote it, convert it to safetensors "
    "where it was made"
)


@dataclass(frozen=True, slots=True)
class Unread:
    """Bytes or a text in the file, not read yet."""

    offset: int
    num_bytes: int  # in the file
    is_text: bool = False
    is_latin1: bool = False  # bytes written as text: each a character, in UTF-8


class RefusedError(Exception):
    """What is wrong with a file, for its reader to say with its name."""


# A function of the machine and of an operation's argument, None where it has none.
Operation = Callable[["Machine", Any], None]


@dataclass(frozen=True)
class PickleCall:
    """What stands for a function of a pickle: of a machine and of arguments of these kinds.

    optional: how many of the last arguments may be left out.
    """

    made: Callable[..., Any]
    kinds: tuple[type, ...] = ()
    optional: int = 0

    def fits(self, arguments: tuple[Any, ...]) -> bool:
        """Whether they are as many, and of the kinds, that the function takes."""
        return len(self.kinds) - self.optional <= len(arguments) <= len(self.kinds) and all(
            isinstance(value, kind) for value, kind in zip(arguments, self.kinds, strict=False)
        )


@dataclass(frozen=True)
class Dialect:
    """What the pickles of one program hold beside plain values.

    calls: by a function's name, what makes of its arguments what it stands for. types: names that
    are never called. operations: those that others' pickles do not have, or mean otherwise.
    """

    writer: str
    calls: Mapping[str, PickleCall]
    types: frozenset[str] = frozenset()
    operations: Mapping[str, Operation] = field(default_factory=dict)


@dataclass(frozen=True)
class Named:
    """A function or class of a dialect."""

    name: str


@dataclass
class Dtype:
    """A NumPy dtype of DTYPES."""

    code: str
    is_built: bool = False


@dataclass
class Array:
    """A NumPy array."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    is_fortran: bool = False
    piece: Unread | None = None  # None: not built


class Machine:
    """Runs one pickle. `stack` is the part above the last mark; `below` are the parts under it."""

    def __init__(self, file: BinaryIO, size: int, dialect: Dialect):
        """size: where the pickle, which begins where `file` stands, ends at the latest."""
        self.file, self.size, self.dialect = file, size, dialect
        self.operations = {**OPERATIONS, **dialect.operations}
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        # By piece: a memo may ask for one a million times.
        self.texts: dict[Unread, str] = {}
        self.counts: dict[Unread, int] = {}

    def run(self) -> Any:
        """The value that the pickle leaves."""
        self._start()
        for _ in range(MAX_OPERATIONS):
            code = self.read(1)
            known = OPCODES.get(code)
            if known is None:
                raise RefusedError(
                    f"byte {self._at} is 0x{code.hex()}, which is no operation of a pickle"
                )
            if known.name == "STOP":
                return self._end()
            if known.name not in self.operations:
                where = f"{known.name} at byte {self._at}"
                if known.name == "INST":  # the only one of these that names what it calls
                    where += f" calls {self._argument(known).replace(' ', '.')}: it"
                raise RefusedError(
                    f"its operation {where} is not one that {self.dialect.writer}'s files have; "
                    f"{INSTEAD}"
                )
            self.operations[known.name](self, self._argument(known))
        raise RefusedError(f"it has more than {MAX_OPERATIONS} operations")

    @property
    def _at(self) -> int:
        """Where the operation is whose code was just read."""
        return self.file.tell() - 1

    def _start(self) -> None:
        head = self.file.read(min(2, self.size - self.file.tell()))
        if len(head) < 2 or head[:1] != b"\x80":
            raise RefusedError("it does not begin as a pickle of protocol 2 or later")
        if head[1] not in PROTOCOLS:
            allowed = ", ".join(map(str, PROTOCOLS))
            raise RefusedError(f"it is a pickle of protocol {head[1]} (allowed: {allowed})")

    def _end(self) -> Any:
        value = self.pop()
        if self.stack or self.below:
            raise RefusedError("it ends with more than one value")
        extra = self.size - self.file.tell()
        if extra:
            raise RefusedError(f"{extra} bytes follow its end")
        return value

    def _argument(self, known: pickletools.OpcodeInfo) -> Any:
        """What stands behind an operation's code; bytes and texts are skipped."""
        if known.arg is None:
            return None
        if known.arg.n in SIZES and known.name != "LONG1":
            num_bytes = int.from_bytes(self.read(SIZES[known.arg.n]), "little")
            offset, left = self.file.tell(), self.size - self.file.tell()
            if num_bytes > left:
                raise RefusedError(
                    f"{known.name} at byte {offset} should have {num_bytes} bytes, and the file "
                    f"ends after {left}; copy it again"
                )
            self.file.seek(num_bytes, 1)
            return Unread(offset, num_bytes, is_text="UNICODE" in known.name)
        try:
            value = known.arg.reader(cast("IO[bytes]", self))
        except ValueError as error:
            raise RefusedError(f"{known.name} before byte {self.file.tell()}: {error}") from None
        if type(value) is int and value.bit_length() > 64:
            raise RefusedError(f"it has an integer of {value.bit_length()} bits (at most 64)")
        return value

    def read(self, count: int) -> bytes:
        """The next bytes, of which there must be so many."""
        data = self.file.read(min(count, self.size - self.file.tell()))
        if len(data) < count:
            raise RefusedError(f"it is cut short at byte {self.size}; copy it again")
        return data

    def readline(self) -> bytes:
        """The bytes up to the next line end, as far as there is one within MAX_TEXT_BYTES."""
        line = self.file.readline(min(MAX_TEXT_BYTES, self.size - self.file.tell()))
        if b"\\" in line:  # pickletools would undo escapes
            raise RefusedError(f"a name before byte {self.file.tell()} has a backslash")
        return line

    def text(self, value: Any, what: str) -> str:
        """A piece's text; `what` is for errors."""
        if not isinstance(value, Unread) or not value.is_text:
            raise RefusedError(f"{what} is {kind_of(value)}, not a text")
        if value.num_bytes > MAX_TEXT_BYTES:
            raise RefusedError(
                f"{what} has {value.num_bytes} bytes (at most {MAX_TEXT_BYTES} are allowed)"
            )
        if value not in self.texts:
            here = self.file.tell()
            data = piece_bytes(self.file, value)
            self.file.seek(here)
            try:
                self.texts[value] = data.decode("utf-8")
            except UnicodeDecodeError:
                raise RefusedError(f"{what} at byte {value.offset} is not UTF-8") from None
        return self.texts[value]

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        if not self.stack:
            raise RefusedError(f"its stack is empty at byte {self._at}")
        return self.stack.pop()

    def top(self, kind: type) -> Any:
        """The topmost value, which must be of a kind."""
        value = self.pop()
        if not isinstance(value, kind):
            raise RefusedError(
                f"an operation at byte {self._at} needs {KINDS[kind]}, not {kind_of(value)}"
            )
        self.push(value)
        return value

    def above_mark(self) -> list[Any]:
        """Takes all values above the last mark, and the mark."""
        if not self.below:
            raise RefusedError(f"there is no mark at byte {self._at}")
        values, self.stack = self.stack, self.below.pop()
        return values

    def last(self, count: int) -> tuple[Any, ...]:
        """Takes the topmost `count` values, in the order in which they were put."""
        return tuple(reversed([self.pop() for _ in range(count)]))

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def remember(self, index: int) -> None:
        self.memo[index] = self.top(object)

    def recall(self, index: int) -> None:
        if index not in self.memo:
            raise RefusedError(f"it recalls value {index}, which it never stored")
        self.push(self.memo[index])

    def extend(self, values: list[Any]) -> None:
        self.top(list).extend(values)

    def set_items(self, values: list[Any]) -> None:
        """SETITEM and SETITEMS: keys and values in turns."""
        target = self.top(dict)
        if len(values) % 2:
            raise RefusedError("it has a key without a value")
        for key, value in zip(values[::2], values[1::2], strict=True):
            name = key if type(key) is int else self.text(key, "a key")
            if name in target:
                raise RefusedError(f"it has the name {visible_name(str(name))} twice")
            target[name] = value

    def find(self, full: str) -> None:
        if full not in self.dialect.calls and full not in self.dialect.types:
            raise RefusedError(f"it asks for {visible_name(full)}; {INSTEAD}")
        self.push(Named(full))

    def find_on_stack(self) -> None:
        module, name = self.last(2)
        full = self.text(module, "a module's name"), self.text(name, "a function's name")
        self.find(".".join(full))

    def call(self) -> None:
        arguments, named = self.pop(), self.pop()
        if not isinstance(named, Named) or not isinstance(arguments, tuple):
            raise RefusedError(f"it calls {kind_of(named)} with {kind_of(arguments)}")
        call, writer = self.dialect.calls.get(named.name), self.dialect.writer
        if call is None:
            raise RefusedError(f"it calls {named.name}, which {writer}'s files only name")
        if not call.fits(arguments):
            got = ", ".join(map(kind_of, arguments[:MAX_SHOWN])) or "nothing"
            raise RefusedError(f"it calls {named.name} with {got}, and {writer}'s files do not")
        self.push(call.made(self, *arguments))

    def build(self) -> None:
        state, target = self.pop(), self.pop()
        if isinstance(target, Array) and isinstance(state, tuple):
            self.push(self._set_array(target, state))
        elif isinstance(target, Dtype) and isinstance(state, tuple):
            self.push(self._set_dtype(target, state))
        else:
            raise RefusedError(f"it sets the state of {kind_of(target)} to {kind_of(state)}")

    def _set_dtype(self, target: Dtype, state: tuple[Any, ...]) -> Dtype:
        if len(state) != 8 or state[0] not in (3, 4) or state[2:] != (None, None, None, -1, -1, 0):
            raise RefusedError(f"the dtype {target.code} has a state that no array of numbers has")
        order = self.text(state[1], "a byte order")
        if order not in ("<", "|"):
            raise RefusedError(
                f"the dtype {target.code} has byte order {order!r} (allowed: '<', '|')"
            )
        target.is_built = True
        return target

    def _set_array(self, target: Array, state: tuple[Any, ...]) -> Array:
        if len(state) != 5 or state[0] != 1 or type(state[3]) is not bool:
            raise RefusedError("an array has a state that NumPy's pickles do not have")
        _, shape, dtype, is_fortran, data = state
        return self.fill(target, dtype, shape, is_fortran, data)

    def fill(self, target: Array, dtype: Any, shape: Any, is_fortran: bool, data: Any) -> Array:
        """Gives an array its values, when they are as many bytes as its shape needs."""
        if target.piece is not None:
            raise RefusedError("it gives one array values twice")
        if not isinstance(dtype, Dtype) or not dtype.is_built:
            raise RefusedError(f"an array has {kind_of(dtype)} for its dtype")
        if not isinstance(data, Unread) or data.is_text:
            raise RefusedError(f"an array's values are {kind_of(data)}, not bytes")
        name = DTYPES[dtype.code]
        try:
            dims, needed = checked_shape(shape, name)
        except ValueError as error:
            raise RefusedError(f"an array's shape {error}") from None
        found = self._num_values(data)
        if needed != found:
            raise RefusedError(
                f"an array of shape {list(dims)} and dtype {dtype.code} needs {needed} bytes, and "
                f"has {found}"
            )
        target.dtype, target.shape, target.is_fortran, target.piece = name, dims, is_fortran, data
        return target

    def _num_values(self, piece: Unread) -> int:
        """Bytes that a piece stands for: of latin-1 text in UTF-8, one for each character."""
        if not piece.is_latin1:
            return piece.num_bytes
        if piece not in self.counts:
            here, count = self.file.tell(), 0
            self.file.seek(piece.offset)
            for start in range(0, piece.num_bytes, MAX_CHUNK_BYTES):
                chunk = self.read(min(MAX_CHUNK_BYTES, piece.num_bytes - start))
                count += int(np.count_nonzero(np.frombuffer(chunk, np.uint8) & 0xC0 != 0x80))
            self.file.seek(here)
            self.counts[piece] = count
        return self.counts[piece]


def visible_name(name: str) -> str:
    """A name from a file, for a message: short, and without control characters."""
    shown = name if len(name) <= 100 else name[:100] + "..."
    return shown if shown.isprintable() else repr(shown)


def _array_of_buffer(machine: Machine, data: Unread, dtype: Dtype, shape: Any, order: Any) -> Array:
    """NumPy's way in protocol 5."""
    letter = machine.text(order, "an array's order")
    if letter not in ("C", "F"):
        raise RefusedError(f"an array's order is {letter!r} (allowed: C, F)")
    return machine.fill(Array(), dtype, shape, letter == "F", data)


def _dtype(machine: Machine, text: Unread, *_: Any) -> Dtype:
    code = machine.text(text, "a dtype")
    if code not in DTYPES:
        objects = ", Python's objects" if code[:1] == "O" else ""
        raise RefusedError(
            f"an array has dtype {visible_name(code)}{objects} (readable: {', '.join(DTYPES)})"
        )
    return Dtype(code)


def _latin1(machine: Machine, text: Unread, name: Unread) -> Unread:
    """Protocol 2's bytes: _codecs.encode(text, "latin1")."""
    encoding = machine.text(name, "an encoding")
    if encoding not in ("latin1", "latin-1") or not text.is_text:
        raise RefusedError(f"it encodes bytes as {visible_name(encoding)} (allowed: latin1)")
    return Unread(text.offset, text.num_bytes, is_latin1=True)


_BUILTINS = ("builtins", "__builtin__")  # of Python 3 and, in protocol 2, of Python 2
_NUMPY = ("numpy.core", "numpy._core")  # NumPy 1 and 2
COMMON_CALLS = {"collections.OrderedDict": PickleCall(lambda machine: {})}
_NEW_ARRAY = PickleCall(lambda machine, *_: Array(), (Named, tuple, Unread))  # BUILD fills it
_NUMBER = PickleCall(lambda machine, *_: 0.0, (Dtype, Unread))  # no tensor: nobody wants its value
NUMPY_CALLS = {
    "numpy.dtype": PickleCall(_dtype, (Unread, int, int)),
    **{f"{core}.multiarray._reconstruct": _NEW_ARRAY for core in _NUMPY},
    **{f"{core}.multiarray.scalar": _NUMBER for core in _NUMPY},
    **{
        f"{core}.numeric._frombuffer": PickleCall(_array_of_buffer, (Unread, Dtype, tuple, Unread))
        for core in _NUMPY
    },
    "_codecs.encode": PickleCall(_latin1, (Unread, Unread)),
    # Paddle's tensors: tuple((name, array)).
    **{
        f"{module}.tuple": PickleCall(lambda machine, values: values, (tuple,))
        for module in _BUILTINS
    },
    **{f"{module}.bytes": PickleCall(lambda machine: Unread(0, 0)) for module in _BUILTINS},
}
PADDLE = Dialect("Paddle", {**COMMON_CALLS, **NUMPY_CALLS}, frozenset({"numpy.ndarray"}))

# By the names that pickletools has. Pickles of protocols 0 and 1 have others, as have those with
# objects.
OPERATIONS: Mapping[str, Operation] = {
    "FRAME": lambda m, num_bytes: None,  # how many bytes belong together matters to no one
    "MARK": lambda m, _: m.mark(),
    "NONE": lambda m, _: m.push(None),
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), Machine.push),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), Machine.push),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"), Machine.push),
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "EMPTY_LIST": lambda m, _: m.push([]),
    "EMPTY_DICT": lambda m, _: m.push({}),
    "TUPLE1": lambda m, _: m.push(m.last(1)),
    "TUPLE2": lambda m, _: m.push(m.last(2)),
    "TUPLE3": lambda m, _: m.push(m.last(3)),
    "TUPLE": lambda m, _: m.push(tuple(m.above_mark())),
    "APPEND": lambda m, _: m.extend([m.pop()]),
    "APPENDS": lambda m, _: m.extend(m.above_mark()),
    "SETITEM": lambda m, _: m.set_items(list(m.last(2))),
    "SETITEMS": lambda m, _: m.set_items(m.above_mark()),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), Machine.remember),
    "MEMOIZE": lambda m, _: m.remember(len(m.memo)),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), Machine.recall),
    "GLOBAL": lambda m, names: m.find(names.replace(" ", ".", 1)),
    "STACK_GLOBAL": lambda m, _: m.find_on_stack(),
    "REDUCE": lambda m, _: m.call(),
    "BUILD": lambda m, _: m.build(),
}

KINDS: Mapping[type, str] = {
    dict: "an object of names",
    list: "a list",
    tuple: "a tuple",
    Unread: "bytes",
    Named: "a function",
    Array: "an array",
    Dtype: "a dtype",
    bool: "a boolean",
    type(None): "nothing",
}


def kind_of(value: Any) -> str:
    """What a value of the machine is, for messages."""
    if isinstance(value, Unread) and value.is_text:
        return "a text"
    known = KINDS.get(type(value)) or getattr(value, "kind", "a number")
    return str(known)


def piece_bytes(file: BinaryIO, piece: Unread) -> bytes:
    """What a piece stands for; UserError where it is not there any more, or no latin-1 text."""
    file.seek(piece.offset)
    data = file.read(piece.num_bytes)
    if len(data) < piece.num_bytes:
        raise UserError(f"{file.name} is shorter than when it was opened; copy it again")
    if not piece.is_latin1:
        return data
    try:
        return data.decode("utf-8").encode("latin-1")
    except UnicodeError:
        raise UserError(
            f"{file.name}: bytes {piece.offset} to {piece.offset + piece.num_bytes} are not "
            "latin-1 text in UTF-8; copy it again"
        ) from None
