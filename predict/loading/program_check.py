"""An exported program, which may come from a stranger, checked before Paddle sees it.

`<prefix>.json` is Paddle's PIR as JSON. Paddle runs whatever operators it names, with any path in
their attributes: save_combine writes a file, print reads the weights out. So each operator must be
one that exports call, take and give what that one does, and have no text but those of TEXTS.
Nothing here imports Paddle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from predict.errors import UserError, quoted
from predict.system.files import read_json

MAX_PROGRAM_BYTES = 1 << 26  # plain-Paddle operators take 100 KB a layer
EXPORT = "export the model again with export/export_model.py"
_DIALECTS = {"0": "builtin", "1": "pd_op", "2": "cf", "3": "custom_op"}
_BASE = {"magic": "pir", "version": 4, "trainable": True}

# Tags of element types: the name elsewhere, the number in .pdiparams, bytes.
ELEMENTS: dict[str, tuple[str, int, int]] = {
    "0.t_bool": ("bool", 0, 1),
    "0.t_i32": ("int32", 2, 4),
    "0.t_i64": ("int64", 3, 8),
    "0.t_f16": ("float16", 4, 2),
    "0.t_f32": ("float32", 5, 4),
    "0.t_f64": ("float64", 6, 8),
    "0.t_ui8": ("uint8", 20, 1),
    "0.t_i8": ("int8", 21, 1),
    "0.t_bf16": ("bfloat16", 22, 2),
    "0.t_f8e4m3fn": ("float8_e4m3fn", 32, 1),
}
# Tags of attributes. Of texts, those that operators of the lists have: none names a file.
_TEXT, _LIST = "0.a_str", "0.a_array"
_TAGS = (
    *(f"0.a_{kind}" for kind in ("bool", "i32", "i64", "f32", "f64")),
    *(f"1.a_{kind}" for kind in ("dtype", "place", "intarray")),
)
TEXTS = ("name", "blocks", "scheme", "kv_format")
# Lists of dims, and an operator that has one: Paddle uses negative and large ones without a check.
_OF_DIMS, _TAKES_A_DIM, _MAX_DIMS = ("axes", "decrease_axis", "perm"), "1.take_along_axis", 9


def _table(dialect: int, names: Mapping[str, str]) -> dict[str, str]:
    """By an operator's name in programs, what it takes and gives."""
    return {f"{dialect}.{name}": kinds for kinds, each in names.items() for name in each.split()}


# What operators take and give: T a tensor, L a list of tensors, t and l the same where it may be
# left out; * any number of tensors. Of every export: parameters, inputs, outputs, lists of values.
PARAMETER, DATA, FETCH, COMBINE, SPLIT = "p", "1.data", "1.fetch", "0.combine", "0.split"
COMMON = {COMBINE: "*>L", SPLIT: "L>*", DATA: ">T", FETCH: "T>T"}
# The operators of the library that predict.ops.compiled calls for a decoder.
COMPILED = _table(
    3,
    {
        "T>T": "regatta_activate",
        "TT>T": "regatta_take_ids",
        "Tt>T": "regatta_add",
        "TTtt>T": "regatta_embedding",
        "TTtt>TT": "regatta_norm",
        "TLt>T": "regatta_linear",
        "TLtTTTT>T": "regatta_adapted_linear",
        "TtLtt>T": "regatta_logits",
        "TLLLtt>TL": "regatta_blocks_",
        "TTTttttLt>TL": "regatta_rope_and_cache_write_",
        "TLTTTTtttt>T": "regatta_paged_attention",
    },
)
# Paddle's own, of exports with --inference_model false: what predict.ops.plain calls.
PLAIN = _table(
    1,
    {
        ">T": "full full_int_array",
        "T>T": "abs assign_value_ cast erf exp flatten floor full_batch_size_like isnan nonzero "
        "repeat_interleave round rsqrt shape64 sigmoid silu softmax tanh transpose",
        "T>TT": "argsort",
        "TT>T": "add divide elementwise_pow embedding equal expand expand_as floor_divide "
        "full_like greater_equal greater_than less_equal less_than logical_and matmul max maximum "
        "mean min minimum multiply not_equal pad remainder reshape scale subtract sum "
        "take_along_axis unsqueeze",
        "TT>TT": "topk",
        "TT>L": "split_with_num",
        "TTT>T": "arange clip gather slice where",
        "TTTT>T": "strided_slice",
        "L>T": "stack",
        "LT>T": "concat",
        "TLT>T": "index_put_",
    },
)


@dataclass(frozen=True)
class TensorType:
    """A tensor's element type, as ELEMENTS names it, and its shape; -1 where it varies."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, self.shape))}]"


Value = TensorType | tuple[TensorType, ...]  # a tensor, or a list of them


@dataclass(frozen=True)
class ProgramFile:
    """What a program that passed `read_program` takes, holds, returns and calls."""

    inputs: dict[str, TensorType] = field(default_factory=dict)  # in order
    parameters: dict[str, TensorType] = field(default_factory=dict)
    outputs: list[TensorType] = field(default_factory=list)
    # Operators of the library, and their attributes.
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


def read_program(path: Path, compiled: bool) -> ProgramFile:
    """The program in `path`, whose operators are all of those that exports call.

    compiled: whether it is to call the library's operators (else Paddle's own). Raises UserError
    that names the first operator, attribute or value that is something else.
    """
    if not path.is_file():
        raise UserError(f"{path} is not a file; {EXPORT}")
    if path.stat().st_size > MAX_PROGRAM_BYTES:
        raise UserError(
            f"{path} has {path.stat().st_size} bytes; an exported program has {MAX_PROGRAM_BYTES} "
            f"at most; {EXPORT}"
        )
    return _Reader(path, COMMON | (COMPILED if compiled else PLAIN)).read(read_json(path))


class _Reader:
    """Walks a program once. `_wrong` is the error for what is not as exports have it."""

    def __init__(self, path: Path, allowed: Mapping[str, str]) -> None:
        self._path = path
        self._allowed = allowed
        self._values: dict[int, Value] = {}
        self._where = "the program"
        self._read = ProgramFile()

    def read(self, program: Any) -> ProgramFile:
        match program:
            case {
                "base_code": base,
                "program": {"regions": [{"blocks": [{"args": [], "ops": list(operators)}]}]},
            } if base == _BASE:
                pass
            case _:
                raise self._wrong("is of another version of Paddle, or has other regions than one")
        names = [self._name(number, operator) for number, operator in enumerate(operators)]
        for number, (name, operator) in enumerate(zip(names, operators, strict=True)):
            self._where = f"operator {number} ({_shown(name)})"
            if name == PARAMETER:
                self._parameter(operator)
            else:
                self._operator(name, operator)
        if not self._read.outputs:
            self._where = "the program"
            raise self._wrong("returns nothing")
        return self._read

    def _name(self, number: int, operator: Any) -> str:
        """An operator's name, which is on the list."""
        self._where = f"operator {number}"
        name = operator.get("#") if isinstance(operator, dict) else None
        if not isinstance(name, str):
            raise self._wrong("has no name")
        if name != PARAMETER and name not in self._allowed:
            raise UserError(
                f"{self._path} calls the operator {_shown(name)!r}, which is not on the list of "
                "those that exports of this version and kind call; it was not loaded. Run what you "
                f"exported yourself: {EXPORT}"
            )
        if "regions" in operator:
            raise self._wrong(f"({_shown(name)}) holds operators of its own, and no export's does")
        return name

    def _parameter(self, operator: Any) -> None:
        match operator:
            case {"A": [0, 1, 1, name], "DA": [], "O": made, "OA": [1, 1, 0], "QA": []}:
                kind = self._output(made)
            case _:
                raise self._wrong("is not as exports write it")
        if isinstance(kind, TensorType) and -1 in kind.shape:
            raise self._wrong("has no shape")
        self._add(self._read.parameters, name, kind)

    def _operator(self, name: str, operator: Any) -> None:
        match operator:
            case {"A": list(given), "I": list(inputs), "O": list(outputs), "OA": list(marks)}:
                attributes = {**self._attributes(name, given)}
                self._attributes(name, marks)
            case _:
                raise self._wrong("is not as exports write it")
        takes, _, gives = self._allowed[name].partition(">")
        taken = self._all(inputs, takes, "takes", self._input)
        made = self._all(outputs, gives, "gives", lambda value, kind: self._output(value))
        if (name == COMBINE and made != [tuple(taken)]) or (
            name == SPLIT and [tuple(made)] != taken
        ):
            raise self._wrong("does not give what it takes")
        if name == DATA:
            self._add(self._read.inputs, attributes.get("name"), made[0])
        elif name == FETCH:
            if attributes.get("col") != len(self._read.outputs):
                raise self._wrong(f"is not output {len(self._read.outputs)}")
            self._read.outputs.append(made[0])
        elif name in COMPILED:
            self._read.calls.append((name[2:], attributes))

    def _all(
        self, values: list[Any], kinds: str, what: str, read: Callable[[Any, str], Value | None]
    ) -> list[Any]:
        """The kinds of the values that an operator takes or gives, less those left out."""
        if kinds == "*":
            kinds = "T" * len(values)
        if len(values) != len(kinds):
            raise self._wrong(f"{what} {len(values)} values, not {len(kinds)}")
        found = [read(value, kind) for value, kind in zip(values, kinds, strict=True)]
        for place, (made, kind) in enumerate(zip(found, kinds, strict=True)):
            if made is not None and isinstance(made, tuple) != (kind in "Ll"):
                raise self._wrong(
                    f"{what} a list where exports have a tensor, or the other way, at {place}"
                )
        return [made for made in found if made is not None]

    def _input(self, value: Any, kind: str) -> Value | None:
        """What a value is that an operator takes; None: left out."""
        match value:
            case {"%": 0} if kind.islower():
                return None
            case {"%": int(number)} if number in self._values:
                return self._values[number]
            case _:
                raise self._wrong(f"takes the value {quoted(value)}, which none before it gives")

    def _attributes(self, operator: str, entries: list[Any]) -> dict[str, Any]:
        """Names and values; UserError for a text that may name a file, and for a dim of none."""
        found: dict[str, Any] = {}
        for entry in entries:
            match entry:
                case {"N": str(name), "AT": {"#": str(tag), "D": value}}:
                    pass
                case _:
                    raise self._wrong(f"has the attribute {quoted(entry)}")
            values = [value]
            if tag == _LIST:
                match value:
                    case [*items] if all(isinstance(item, dict) for item in items):
                        tags = {str(item.get("#")) for item in items}
                        values = [item.get("D") for item in items]
                    case _:
                        raise self._wrong(f"has the attribute {quoted(name)} of {quoted(value)}")
            else:
                tags = {tag}
            is_text = tags == {_TEXT} and name in TEXTS and isinstance(value, str)
            if name in found or not (is_text or tags <= {*_TAGS}):
                raise self._wrong(
                    f"has the attribute {quoted(name)} of kind {quoted(sorted(tags))}"
                )
            is_dim = name in _OF_DIMS or (name == "axis" and operator == _TAKES_A_DIM)
            if is_dim and not all(type(dim) is int and 0 <= dim < _MAX_DIMS for dim in values):
                raise self._wrong(f"has the attribute {name} of no dim: {quoted(values)}")
            found[name] = value
        return found

    def _output(self, value: Any) -> Value:
        """Notes the value that an operator gives."""
        match value:
            case {"%": int(number), "TT": kind} if number > 0 and number not in self._values:
                pass
            case _:
                raise self._wrong(f"gives the value {quoted(value)}, which is taken or no number")
        match kind:
            case {"#": "0.t_vec", "D": list(items)}:
                made: Value = tuple(self._tensor(item) for item in items)
            case _:
                made = self._tensor(kind)
        self._values[number] = made
        return made

    def _tensor(self, kind: Any) -> TensorType:
        match kind:
            case {"#": "0.t_dtensor", "D": [{"#": str(element)}, list(shape), "NCHW", [], 0]}:
                sizes = tuple(shape)
                if element in ELEMENTS and len(sizes) <= _MAX_DIMS and all(map(_is_size, sizes)):
                    return TensorType(ELEMENTS[element][0], sizes)
        raise self._wrong(f"gives a tensor of another kind than exports have: {quoted(kind, 100)}")

    def _add(self, table: dict[str, TensorType], name: Any, kind: Value) -> None:
        if not isinstance(name, str) or name in table or isinstance(kind, tuple):
            raise self._wrong(f"names {quoted(name)} a second time, or no tensor")
        table[name] = kind

    def _wrong(self, what: str) -> UserError:
        return UserError(f"{self._path}: {self._where} {what}; {EXPORT}")


def _shown(name: str) -> str:
    dialect, dot, rest = name.partition(".")
    if name == PARAMETER:
        return "builtin.parameter"
    return f"{_DIALECTS[dialect]}.{rest}"[:80] if dot and dialect in _DIALECTS else name[:80]


def _is_size(value: Any) -> bool:
    return type(value) is int and -1 <= value < 1 << 40
