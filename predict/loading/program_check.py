"""An exported program as a file from a stranger: held against what exports write, before Paddle.

`<prefix>.json` is Paddle's PIR as JSON. Paddle runs whatever operators it names, with any path in
their attributes: save_combine writes a file, print reads the weights out. So each operator, its
attributes and the kinds of its values must be those that this version's exports have.
Nothing here imports Paddle.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from predict.errors import UserError
from predict.system.files import read_json

MAX_PROGRAM_BYTES = 1 << 26  # plain-Paddle operators take 100 KB a layer
MAX_TEXT = 1 << 14  # the records of a decoder's blocks are the longest, some 600 characters a kind
EXPORT = "export the model again with export/export_model.py"
_DIALECTS = {"0": "builtin", "1": "pd_op", "2": "cf", "3": "custom_op", "p": "builtin"}
_BASE = {"magic": "pir", "version": 4, "trainable": True}

# Tags of attributes.
BOOL, INT, LONG, FLOAT, DOUBLE, TEXT, LIST = (
    f"0.a_{kind}" for kind in ("bool", "i32", "i64", "f32", "f64", "str", "array")
)
DTYPE, PLACE, SHAPE = "1.a_dtype", "1.a_place", "1.a_intarray"
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
# In attributes; the last one where an operator takes its input's.
_DTYPE_NAMES = (*(name for name, _, _ in ELEMENTS.values()), "Undefined(ALL_DTYPE)")


@dataclass(frozen=True)
class Operator:
    """What exports write of an operator; None inputs or outputs: any number from one on."""

    inputs: int | None
    attributes: Mapping[str, str] = field(default_factory=dict)  # name -> tag
    outputs: int | None = 1
    lists: frozenset[int] = frozenset()  # inputs that are lists of tensors
    gives_lists: frozenset[int] = frozenset()  # outputs
    optional: frozenset[int] = frozenset()  # inputs that may be left out
    dims: frozenset[str] = frozenset()  # attributes that Paddle takes for a dim without a check


def _alike(operator: Operator, names: str) -> dict[str, Operator]:
    return dict.fromkeys((f"1.{name}" for name in names.split()), operator)


# Of every export: parameters, inputs, outputs, and lists of values.
PARAMETER, DATA, FETCH = "p", "1.data", "1.fetch"
COMMON: dict[str, Operator] = {
    "0.combine": Operator(None, gives_lists=frozenset({0})),
    "0.split": Operator(1, outputs=None, lists=frozenset({0})),
    DATA: Operator(0, {"name": TEXT, "shape": SHAPE, "dtype": DTYPE, "place": PLACE}),
    FETCH: Operator(1, {"name": TEXT, "col": INT}),
}
# The operators of the library that a decoder calls.
COMPILED: dict[str, Operator] = {
    "3.regatta_embedding": Operator(
        4,
        {"hidden_size": LONG, "packed": BOOL, "scale": FLOAT},
        optional=frozenset({2, 3}),  # a table of positions, and positions
    ),
    "3.regatta_blocks_": Operator(
        6,
        {"blocks": TEXT, "order": LIST},
        outputs=2,
        lists=frozenset({1, 2, 3}),  # weights, caches, the step
        gives_lists=frozenset({1}),
        optional=frozenset({4, 5}),  # the tree mask, rows
    ),
    "3.regatta_logits": Operator(
        5,
        {"scheme": TEXT, "vocab_size": LONG}
        | dict.fromkeys(("epsilon", "scale", "softcap"), FLOAT),
        lists=frozenset({2}),
        optional=frozenset({1, 3, 4}),  # norm, bias, rows
    ),
    "3.regatta_norm": Operator(
        4,
        {"kind": LONG, "epsilon": FLOAT, "plus_one": BOOL},
        outputs=2,
        optional=frozenset({2, 3}),  # bias, residual
    ),
    "3.regatta_linear": Operator(
        3,
        {"scheme": TEXT, "out_features": LONG},
        lists=frozenset({1}),
        optional=frozenset({2}),  # bias
    ),
    "3.regatta_adapted_linear": Operator(
        7,
        {"scheme": TEXT, "part_sizes": LIST, "which": LONG},
        lists=frozenset({1}),
        optional=frozenset({2}),  # bias
    ),
    "3.regatta_take_ids": Operator(2),
    "3.regatta_activate": Operator(
        1,
        {"function": LONG, "gated": BOOL} | dict.fromkeys(("clamp", "slope", "up_offset"), FLOAT),
    ),
    "3.regatta_add": Operator(2, {"a_scale": FLOAT, "b_scale": FLOAT}, optional=frozenset({1})),
    "3.regatta_rope_and_cache_write_": Operator(
        9,
        dict.fromkeys(("num_heads", "num_kv_heads", "head_dim"), LONG)
        | dict.fromkeys(("plus_one", "whole", "interleaved"), BOOL)
        | {"epsilon": FLOAT, "kv_format": TEXT},
        outputs=2,
        lists=frozenset({7}),
        gives_lists=frozenset({1}),
        optional=frozenset({3, 4, 5, 6, 8}),  # tables, norms of heads, second positions
    ),
    "3.regatta_paged_attention": Operator(
        10,
        dict.fromkeys(("num_heads", "window"), LONG)
        | dict.fromkeys(("softmax_scale", "softcap"), FLOAT)
        | {"kv_format": TEXT},
        lists=frozenset({1}),
        optional=frozenset({6, 7, 8, 9}),  # tree mask, slopes, prefixes, sinks
    ),
}
# Paddle's own, of exports with --inference_model false: what predict.ops.plain calls.
PLAIN: dict[str, Operator] = {
    **_alike(Operator(1), "abs erf exp floor isnan nonzero rsqrt shape64 sigmoid silu tanh"),
    **_alike(
        Operator(2),
        "add divide elementwise_pow equal expand floor_divide greater_equal greater_than "
        "less_equal less_than logical_and maximum minimum multiply not_equal remainder reshape "
        "subtract unsqueeze",
    ),
    **_alike(Operator(3), "clip gather where"),
    **_alike(Operator(2, {"keepdim": BOOL}), "max mean min"),
    "1.argsort": Operator(1, {"axis": INT, "descending": BOOL, "stable": BOOL}, outputs=2),
    "1.softmax": Operator(1, {"axis": INT}),
    "1.stack": Operator(1, {"axis": INT}, lists=frozenset({0})),
    "1.concat": Operator(2, lists=frozenset({0})),
    "1.arange": Operator(3, {"dtype": DTYPE, "place": PLACE}),
    "1.assign_value_": Operator(1, {"shape": LIST, "values": LIST, "dtype": DTYPE, "place": PLACE}),
    "1.cast": Operator(1, {"dtype": DTYPE}),
    "1.embedding": Operator(2, {"padding_idx": LONG, "sparse": BOOL}),
    "1.expand_as": Operator(2, {"target_shape": LIST}),
    "1.flatten": Operator(1, {"start_axis": INT, "stop_axis": INT}),
    "1.full": Operator(0, {"shape": SHAPE, "value": DOUBLE, "dtype": DTYPE, "place": PLACE}),
    "1.full_batch_size_like": Operator(
        1,
        {"shape": LIST, "value": DOUBLE, "dtype": DTYPE, "place": PLACE}
        | dict.fromkeys(("input_dim_idx", "output_dim_idx"), INT),
    ),
    "1.full_int_array": Operator(0, {"value": LIST, "dtype": DTYPE, "place": PLACE}),
    "1.full_like": Operator(2, {"dtype": DTYPE, "place": PLACE}),
    "1.index_put_": Operator(3, {"accumulate": BOOL}, lists=frozenset({1})),
    "1.matmul": Operator(2, {"transpose_x": BOOL, "transpose_y": BOOL}),
    "1.pad": Operator(2, {"paddings": LIST}),
    "1.repeat_interleave": Operator(1, {"repeats": INT, "axis": INT, "output_size": LONG}),
    "1.round": Operator(1, {"decimals": INT}),
    "1.scale": Operator(2, {"bias": FLOAT, "bias_after_scale": BOOL}),
    "1.slice": Operator(3, dict.fromkeys(("axes", "infer_flags", "decrease_axis"), LIST)),
    "1.split_with_num": Operator(2, {"num": INT}, gives_lists=frozenset({0})),
    "1.strided_slice": Operator(4, {"axes": LIST}),
    "1.sum": Operator(2, {"dtype": DTYPE, "keepdim": BOOL}),
    "1.take_along_axis": Operator(2, {"axis": INT}, dims=frozenset({"axis"})),
    "1.topk": Operator(2, {"axis": INT, "largest": BOOL, "sorted": BOOL}, outputs=2),
    "1.transpose": Operator(1, {"perm": LIST}),
}


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

    path: Path
    inputs: dict[str, TensorType]  # in order
    parameters: dict[str, TensorType]
    outputs: tuple[TensorType, ...]
    calls: tuple[tuple[str, dict[str, Any]], ...]  # operators of the library, their attributes


def read_program(path: Path, compiled: bool) -> ProgramFile:
    """The program in `path`, all of it of the kinds that exports write.

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
    allowed = COMMON | (COMPILED if compiled else PLAIN)
    reader = _Reader(path, allowed)
    return reader.read(read_json(path))


class _Reader:
    """Walks a program once. `_fail` is the one way out for what is not as exports have it."""

    def __init__(self, path: Path, allowed: Mapping[str, Operator]) -> None:
        self._path = path
        self._allowed = allowed
        self._values: dict[int, Value] = {}
        self._where = "the program"

    def read(self, value: Any) -> ProgramFile:
        operators = self._operators(value)
        for number, operator in enumerate(operators):
            # Names first: what a program may not do at all is said before what is malformed.
            self._where = f"operator {number}"
            self._check_name(operator)
        inputs: dict[str, TensorType] = {}
        parameters: dict[str, TensorType] = {}
        outputs: list[TensorType] = []
        calls: list[tuple[str, dict[str, Any]]] = []
        for number, operator in enumerate(operators):
            name = operator["#"]
            self._where = f"operator {number} ({_shown(name)})"
            if name == PARAMETER:
                self._add(parameters, *self._parameter(operator))
                continue
            attributes, types = self._operator(operator, self._allowed[name])
            if name == DATA:
                declared = TensorType(attributes["dtype"], tuple(attributes["shape"]))
                if types != [declared]:
                    self._fail(f"declares {declared} and gives {types[0]}")
                self._add(inputs, attributes["name"], declared)
            elif name == FETCH:
                returned = types[0]
                if attributes["col"] != len(outputs) or isinstance(returned, tuple):
                    self._fail(f"returns output {attributes['col']}, not {len(outputs)}")
                outputs.append(returned)
            elif name in COMPILED:
                calls.append((name[2:], attributes))
        if not outputs:
            self._where = "the program"
            self._fail("returns nothing")
        return ProgramFile(self._path, inputs, parameters, tuple(outputs), tuple(calls))

    def _operators(self, value: Any) -> Sequence[Any]:
        self._keys(value, "base_code", "program")
        self._equal(value["base_code"], _BASE, "base_code")
        self._keys(value["program"], "regions")
        region = self._only(value["program"]["regions"], "regions")
        self._keys(region, "#", "blocks")
        block = self._only(region["blocks"], "blocks")
        self._keys(block, "#", "args", "ops")
        self._equal(block["args"], [], "args")
        return self._list(block["ops"], "ops")

    def _check_name(self, operator: Any) -> None:
        name = operator.get("#") if isinstance(operator, dict) else None
        if not isinstance(name, str):
            self._fail("has no name")
        if name != PARAMETER and name not in self._allowed:
            raise UserError(
                f"{self._path} calls the operator {_shown(name)!r}, which is not on the list of "
                "those that exports of this version and kind call; it was not loaded. Run what you "
                f"exported yourself: {EXPORT}"
            )
        if "regions" in operator:
            self._fail(f"({_shown(name)}) holds operators of its own, and no export's does")

    def _parameter(self, operator: dict[str, Any]) -> tuple[str, TensorType]:
        self._keys(operator, "#", "A", "DA", "O", "OA", "QA")
        self._equal([operator[key] for key in ("DA", "OA", "QA")], [[], [1, 1, 0], []], "OA")
        flags = self._list(operator["A"], "A", 4)
        self._equal(flags[:3], [0, 1, 1], "A")
        made = self._output(operator["O"])
        name = flags[3]
        if not isinstance(name, str) or isinstance(made, tuple):
            self._fail("names no tensor")
        return name, made

    def _operator(
        self, operator: dict[str, Any], expected: Operator
    ) -> tuple[dict[str, Any], list[Value]]:
        """Its attributes and what it gives."""
        self._keys(operator, "#", "A", "I", "O", "OA")
        attributes = self._attributes(operator["A"])
        for name in sorted({*attributes, *expected.attributes}):
            tag = attributes[name][0] if name in attributes else None
            if tag != expected.attributes.get(name):
                self._fail(f"has another attribute {name[:40]!r} than exports write, or lacks it")
        for name in expected.dims:
            if attributes[name][1] not in range(9):
                self._fail(f"has the attribute {name} of no dim: {str(attributes[name][1])[:40]}")
        taken = self._inputs(operator, expected)
        outputs = self._list(operator["O"], "O", expected.outputs)
        made = [self._output(value) for value in outputs]
        for place, value in enumerate(made):
            if isinstance(value, tuple) != (place in expected.gives_lists):
                self._fail(
                    f"gives a list where exports have a tensor, or the other way, at {place}"
                )
        if (operator["#"] == "0.combine" and made != [tuple(taken)]) or (
            operator["#"] == "0.split" and [tuple(made)] != taken
        ):
            self._fail("does not give what it takes")
        for name, (tag, values) in self._attributes(operator["OA"]).items():
            if name not in ("stop_gradient", "persistable") or tag != LIST:
                self._fail(f"has the output attribute {name!r}")
            if len(values) != len(outputs) or not all(type(value) is bool for value in values):
                self._fail(f"has {name} for other outputs than its own")
        return {name: value for name, (_, value) in attributes.items()}, made

    def _inputs(self, operator: dict[str, Any], expected: Operator) -> list[Value]:
        """The kinds of the values that it takes, less those that are left out."""
        taken: list[Value] = []
        for place, value in enumerate(self._list(operator["I"], "I", expected.inputs)):
            self._keys(value, "%")
            number = value["%"]
            if number == 0 and type(number) is int and place in expected.optional:
                continue  # left out
            if type(number) is not int or number not in self._values:
                self._fail(f"takes the value {number!r}, which none before it gives")
            kind = self._values[number]
            if isinstance(kind, tuple) != (place in expected.lists):
                self._fail(
                    f"takes a list where exports have a tensor, or the other way, at {place}"
                )
            taken.append(kind)
        return taken

    def _attributes(self, value: Any) -> dict[str, tuple[str, Any]]:
        """Tag and value of each."""
        found: dict[str, tuple[str, Any]] = {}
        for entry in self._list(value, "A"):
            self._keys(entry, "AT", "N")
            tagged, name = entry["AT"], entry["N"]
            self._keys(tagged, "#", "D")
            if not isinstance(name, str) or name in found:
                self._fail(f"has the attribute {name!r} twice, or it is no name")
            found[name] = tagged["#"], self._attribute(tagged, name)
        return found

    def _attribute(self, tagged: dict[str, Any], name: str) -> Any:
        tag, value = tagged["#"], tagged["D"]
        if tag == LIST:
            items = self._list(value, name)
            for item in items:
                self._keys(item, "#", "D")
                if item["#"] == LIST:
                    self._fail(f"has lists inside the attribute {name}")
            values = [self._attribute(item, name) for item in items]
            if name in _OF_DIMS and not all(value in range(9) for value in values):
                self._fail(f"has the attribute {name} of no dims: {str(values)[:40]}")
            return values
        if not isinstance(tag, str) or tag not in _VALUES or not _VALUES[tag](value):
            self._fail(f"has the attribute {name} of kind {str(tag)[:40]!r}: {str(value)[:40]!r}")
        return value

    def _output(self, value: Any) -> Value:
        """Notes the value that an operator gives."""
        self._keys(value, "%", "TT")
        number = value["%"]
        if type(number) is not int or not 0 < number < 1 << 31 or number in self._values:
            self._fail(f"gives the value {number!r}, which is taken or no number")
        kind = value["TT"]
        self._keys(kind, "#", "D")
        made: Value
        if kind["#"] == "0.t_vec":
            made = tuple(self._tensor(item) for item in self._list(kind["D"], "D"))
        else:
            made = self._tensor(kind)
        self._values[number] = made
        return made

    def _tensor(self, kind: Any) -> TensorType:
        self._keys(kind, "#", "D")
        element, shape, *rest = self._list(kind["D"], "D", 5)
        self._keys(element, "#")
        self._equal([kind["#"], rest], ["0.t_dtensor", ["NCHW", [], 0]], "type")
        if not isinstance(element["#"], str) or element["#"] not in ELEMENTS:
            self._fail(f"gives elements of kind {str(element['#'])[:40]!r}")
        if not _is_shape(shape):
            self._fail(f"gives a tensor of shape {str(shape)[:60]}")
        return TensorType(ELEMENTS[element["#"]][0], tuple(shape))

    def _add(self, table: dict[str, TensorType], name: str, kind: TensorType) -> None:
        if name in table:
            self._fail(f"names {name!r} a second time")
        table[name] = kind

    def _list(self, value: Any, key: str, length: int | None = None) -> list[Any]:
        if not isinstance(value, list) or len(value) != (len(value) if length is None else length):
            self._fail(f"has {key} that is not a list of {'any' if length is None else length}")
        return value

    def _only(self, value: Any, key: str) -> Any:
        return self._list(value, key, 1)[0]

    def _keys(self, value: Any, *keys: str) -> None:
        if not isinstance(value, dict) or value.keys() != set(keys):
            got = ", ".join(map(str, value))[:80] if isinstance(value, dict) else str(value)[:40]
            self._fail(f"has {got!r} where exports have {', '.join(keys)}")

    def _equal(self, value: Any, wanted: Any, key: str) -> None:
        # As JSON: 1 equals True to Python, and not to what reads the program.
        if json.dumps(value, sort_keys=True) != json.dumps(wanted, sort_keys=True):
            self._fail(f"has {key} {str(value)[:60]}, not {wanted}")

    def _fail(self, what: str) -> NoReturn:
        raise UserError(f"{self._path}: {self._where} {what}; {EXPORT}")


def _shown(name: str) -> str:
    dialect, dot, rest = name.partition(".")
    if name == PARAMETER:
        return "builtin.parameter"
    return f"{_DIALECTS[dialect]}.{rest}"[:80] if dot and dialect in _DIALECTS else name[:80]


def _is_int(value: Any, bits: int) -> bool:
    return type(value) is int and -(1 << bits - 1) <= value < 1 << bits - 1


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_shape(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= 9
        and all(type(size) is int and -1 <= size < 1 << 40 for size in value)
    )


# Lists of dims. Paddle looks at negative ones without a check.
_OF_DIMS = ("axes", "decrease_axis", "perm")
_VALUES = {
    BOOL: lambda value: type(value) is bool,
    INT: lambda value: _is_int(value, 32),
    LONG: lambda value: _is_int(value, 64),
    FLOAT: _is_number,
    DOUBLE: _is_number,
    TEXT: lambda value: isinstance(value, str) and len(value) < MAX_TEXT,
    DTYPE: lambda value: isinstance(value, str) and value in _DTYPE_NAMES,
    PLACE: lambda value: (
        isinstance(value, list)
        and len(value) == 3
        and all(_is_int(number, 8) for number in value[:2])
        and isinstance(value[2], str)
    ),
    SHAPE: _is_shape,
}
