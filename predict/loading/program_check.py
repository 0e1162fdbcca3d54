"""An exported program, which may come from a stranger, checked before Paddle sees it.

`<prefix>.json` is Paddle's PIR as JSON. Paddle runs whatever operators it names, with any path in
their attributes: save_combine writes a file, print reads the weights out. So each operator must be
one that exports call, take and give what that one does, and have its attributes: Paddle ends the
process where one is missing or of another kind. Nothing here imports Paddle.
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
_TAGS = {
    **{kind: f"0.a_{kind}" for kind in ("bool", "i32", "i64", "f32", "f64", "str", "array")},
    **{kind: f"1.a_{kind}" for kind in ("dtype", "place", "intarray")},
}
_LIST = _TAGS["array"]
_OF_TEXTS = (_TAGS["str"], _TAGS["dtype"])
_ITEMS = [tag for kind, tag in _TAGS.items() if kind not in ("array", "str")]
# Kinds of attributes by their names; no text among them names a file. Operators that have another
# kind under a name say so.
ATTRIBUTES = {
    name: kind
    for kind, names in {
        "bool": "accumulate bias_after_scale descending gated interleaved keepdim largest last "
        "packed plus_one sorted sparse stable transpose_x transpose_y whole",
        "i32": "axis col decimals input_dim_idx num output_dim_idx repeats start_axis stop_axis",
        "i64": "function head_dim hidden_size kind num_heads num_kv_heads out_features output_size "
        "padding_idx vocab_size which window",
        "f32": "a_scale b_scale bias clamp epsilon scale slope softcap softmax_scale up_offset",
        "f64": "value",
        "str": "blocks kv_format name scheme",
        "array": "axes decrease_axis infer_flags order paddings part_sizes perm shape target_shape "
        "values",
        "dtype": "dtype",
        "place": "place",
    }.items()
    for name in names.split()
}
# Lists of dims, and an operator that has one: Paddle uses negative and large ones without a check.
_OF_DIMS, _TAKES_A_DIM, _MAX_DIMS = ("axes", "decrease_axis", "perm"), "1.take_along_axis", 9


@dataclass(frozen=True)
class Operator:
    """What exports write of an operator. takes, gives: see COMMON; attributes: tags by name."""

    takes: str
    gives: str
    attributes: Mapping[str, str]


def _table(dialect: int, names: Mapping[str, str]) -> dict[str, Operator]:
    """Operators by their names in programs; names: of those alike, by what they are."""
    made: dict[str, Operator] = {}
    for text, alike in names.items():
        kinds, *attributes = text.split(" ")
        takes, _, gives = kinds.partition(">")
        given = (each.partition(":") for each in attributes)
        tags = {name: _TAGS[kind or ATTRIBUTES[name]] for name, _, kind in given}
        made |= {f"{dialect}.{name}": Operator(takes, gives, tags) for name in alike.split(" ")}
    return made


# What operators take and give, and their attributes: T a tensor, L a list of tensors, t and l the
# same where it may be left out; * any number of tensors.
# Of every export: parameters, inputs, outputs, lists of values.
PARAMETER, DATA, FETCH, COMBINE, SPLIT = "p", "1.data", "1.fetch", "0.combine", "0.split"
COMMON = {
    **_table(0, {"*>L": "combine", "L>*": "split"}),
    **_table(1, {">T name shape:intarray dtype place": "data", "T>T name col": "fetch"}),
}
# The operators of the library that predict.ops.compiled calls for a decoder.
COMPILED = _table(
    3,
    {
        "T>T function gated clamp slope up_offset": "regatta_activate",
        "TT>T": "regatta_take_ids",
        "Tt>T a_scale b_scale": "regatta_add",
        "TTtttt>T hidden_size packed scale": "regatta_embedding",
        "TTtt>TT kind epsilon plus_one": "regatta_norm",
        "TLt>T scheme out_features": "regatta_linear",
        "TLtTTTT>T scheme part_sizes which": "regatta_adapted_linear",
        "TtLtt>T scheme vocab_size epsilon scale softcap": "regatta_logits",
        "TLLLtt>TL blocks order": "regatta_blocks_",
        "TTTttttLt>TL num_heads num_kv_heads head_dim epsilon plus_one whole last interleaved "
        "kv_format": "regatta_rope_and_cache_write_",
        "TLTTTTtttt>T num_heads window softmax_scale softcap kv_format": "regatta_paged_attention",
    },
)
# Paddle's own, of exports with --inference_model false: what predict.ops.plain calls.
PLAIN = _table(
    1,
    {
        ">T shape:intarray value dtype place": "full",
        ">T value:array dtype place": "full_int_array",
        "T>T": "abs erf exp floor isnan nonzero rsqrt shape64 sigmoid silu tanh",
        "T>T shape values dtype place": "assign_value_",
        "T>T dtype": "cast",
        "T>T start_axis stop_axis": "flatten",
        "T>T shape value dtype place input_dim_idx output_dim_idx": "full_batch_size_like",
        "T>T repeats axis output_size": "repeat_interleave",
        "T>T decimals": "round",
        "T>T axis": "softmax",
        "T>T perm": "transpose",
        "T>TT axis descending stable": "argsort",
        "TT>T": "add divide elementwise_pow equal expand floor_divide greater_equal greater_than "
        "less_equal less_than logical_and maximum minimum multiply not_equal remainder reshape "
        "subtract unsqueeze",
        "TT>T padding_idx sparse": "embedding",
        "TT>T target_shape": "expand_as",
        "TT>T dtype place": "full_like",
        "TT>T transpose_x transpose_y": "matmul",
        "TT>T keepdim": "max mean min",
        "TT>T paddings": "pad",
        "TT>T bias bias_after_scale": "scale",
        "TT>T dtype keepdim": "sum",
        "TT>T axis": "take_along_axis",
        "TT>TT axis largest sorted": "topk",
        "TT>L num": "split_with_num",
        "TTT>T": "clip gather where",
        "TTT>T dtype place": "arange",
        "TTT>T axes infer_flags decrease_axis": "slice",
        "TTTT>T axes": "strided_slice",
        "L>T axis": "stack",
        "LT>T": "concat",
        "TLT>T accumulate": "index_put_",
    },
)
# What programs of models with eyes call besides: of towers, and of text with their rows.
OF_PICTURES = {
    **_table(3, {"TT>T axes:array first:i64": "regatta_write_places_"}),
    **{
        f"1.{name}": PLAIN[f"1.{name}"]
        for name in ("full", "full_int_array", "full_like", "reshape", "cast", "mean")
    },
}
# And where ranks sum rows of embeddings ahead of those.
OF_PICTURES_OVER_RANKS = {
    f"1.{name}": PLAIN[f"1.{name}"]
    for name in ("clip", "where", "greater_equal", "unsqueeze", "add")
}
# What ranks' programs call besides the library's other operators: sums, rows of tokens, logits.
OF_RANKS = _table(
    3,
    {
        "T>T": "regatta_sum_ranks",
        "T>T counts:array": "regatta_gather_ranks",
        "T>T begin:i32 end:i32 other:i32": "regatta_own_rows",
    },
)


@dataclass(frozen=True)
class TensorType:
    """A tensor's element type, as ELEMENTS names it, and its shape; -1 where it varies."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, self.shape))}]"


ValueType = TensorType | tuple[TensorType, ...]  # a tensor, or a list of them


@dataclass(frozen=True)
class ProgramFile:
    """What a program that passed `read_program` takes, holds, returns and calls."""

    inputs: dict[str, TensorType] = field(default_factory=dict)  # in order
    parameters: dict[str, TensorType] = field(default_factory=dict)
    outputs: list[TensorType] = field(default_factory=list)
    # Operators of the library, and their attributes.
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


def read_program(
    path: Path, compiled: bool, of_rank: bool = False, pictures: bool = False
) -> ProgramFile:
    """The program in `path`, whose operators are all of those that exports call.

    compiled: whether it is to call the library's operators (else Paddle's own). of_rank: whether it
    is one of several, which exchange sums. pictures: of a model with eyes. Raises UserError that
    names the first operator, attribute or value that is something else.
    """
    if not path.is_file():
        raise UserError(f"{path} is not a file; {EXPORT}")
    if path.stat().st_size > MAX_PROGRAM_BYTES:
        raise UserError(
            f"{path} has {path.stat().st_size} bytes; an exported program has {MAX_PROGRAM_BYTES} "
            f"at most; {EXPORT}"
        )
    allowed = COMMON | (COMPILED if compiled else PLAIN) | (OF_RANKS if of_rank else {})
    if pictures and compiled:
        allowed |= OF_PICTURES | (OF_PICTURES_OVER_RANKS if of_rank else {})
    return _Reader(path, allowed).read(read_json(path))


class _Reader:
    """Walks a program once. `_wrong` is the error for what is not as exports have it."""

    def __init__(self, path: Path, allowed: Mapping[str, Operator]) -> None:
        self._path = path
        self._allowed = allowed
        self._values: dict[int, ValueType] = {}
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
                attributes = self._attributes(given)
            case _:
                raise self._wrong("is not as exports write it")
        known = self._allowed[name]
        self._check_attributes(name, attributes, known.attributes)
        taken = self._all(inputs, known.takes, "takes", self._input)
        made = self._all(outputs, known.gives, "gives", lambda value, kind: self._output(value))
        for mark, (tag, values) in self._attributes(marks).items():
            is_known = mark in ("stop_gradient", "persistable") and tag == _LIST
            if not is_known or [type(each) for each in values] != [bool] * len(made):
                raise self._wrong(f"has the output attribute {quoted(mark)}")
        if (name == COMBINE and made != [tuple(taken)]) or (
            name == SPLIT and [tuple(made)] != taken
        ):
            raise self._wrong("does not give what it takes")
        if name == DATA:
            self._add(self._read.inputs, attributes["name"][1], made[0])
        elif name == FETCH:
            if attributes["col"][1] != len(self._read.outputs):
                raise self._wrong(f"is not output {len(self._read.outputs)}")
            self._read.outputs.append(made[0])
        elif name.startswith("3."):
            values = {name: value for name, (_, value) in attributes.items()}
            self._read.calls.append((name[2:], values))

    def _all(
        self, values: list[Any], kinds: str, what: str, read: Callable[[Any, str], ValueType | None]
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

    def _input(self, value: Any, kind: str) -> ValueType | None:
        """What a value is that an operator takes; None: left out."""
        match value:
            case {"%": 0} if kind.islower():
                return None
            case {"%": int(number)} if number in self._values:
                return self._values[number]
            case _:
                raise self._wrong(f"takes the value {quoted(value)}, which none before it gives")

    def _attributes(self, entries: list[Any]) -> dict[str, tuple[str, Any]]:
        """Tags and values by name, of a list those of its items."""
        found: dict[str, tuple[str, Any]] = {}
        for entry in entries:
            match entry:
                case {"N": str(name), "AT": {"#": str(tag), "D": value}} if name not in found:
                    pass
                case _:
                    raise self._wrong(f"has the attribute {quoted(entry)}")
            if tag == _LIST:
                items = value if isinstance(value, list) else [value]
                if not all(isinstance(item, dict) and item.get("#") in _ITEMS for item in items):
                    raise self._wrong(f"has the attribute {quoted(name)} of {quoted(value)}")
                value = [item.get("D") for item in items]
            found[name] = tag, value
        return found

    def _check_attributes(
        self, operator: str, given: Mapping[str, tuple[str, Any]], known: Mapping[str, str]
    ) -> None:
        for name in sorted({*given, *known}):
            tag, value = given.get(name, (None, None))
            if tag != known.get(name):
                raise self._wrong(f"has another attribute {quoted(name)} than exports, or lacks it")
            is_text = isinstance(value, str)
            if is_text != (tag in _OF_TEXTS):
                raise self._wrong(f"has the attribute {name} of value {quoted(value)}")
            is_dim = name in _OF_DIMS or (name == "axis" and operator == _TAKES_A_DIM)
            dims = value if isinstance(value, list) else [value]
            if is_dim and not all(type(dim) is int and 0 <= dim < _MAX_DIMS for dim in dims):
                raise self._wrong(f"has the attribute {name} of no dim: {quoted(dims)}")
            if name == "num" and not (type(value) is int and value > 0):  # Paddle divides by it
                raise self._wrong(f"has the attribute num of no number of parts: {quoted(value)}")

    def _output(self, value: Any) -> ValueType:
        """Notes the value that an operator gives."""
        match value:
            case {"%": int(number), "TT": kind} if number > 0 and number not in self._values:
                pass
            case _:
                raise self._wrong(f"gives the value {quoted(value)}, which is taken or no number")
        match kind:
            case {"#": "0.t_vec", "D": list(items)}:
                made: ValueType = tuple(self._tensor(item) for item in items)
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

    def _add(self, table: dict[str, TensorType], name: Any, kind: ValueType) -> None:
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
