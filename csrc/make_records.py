"""Writes the C++ records of blocks from the dataclasses of predict/nn.

python csrc/make_records.py          # writes the headers
python csrc/make_records.py --check  # leaves with 1 where one is not what it would write

csrc/include/regatta/record_parts.h has what kinds share, csrc/blocks/<kind>/record.h a kind's own.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from predict.nn import blocks, kinds  # noqa: E402

PARTS = ROOT / "csrc" / "include" / "regatta" / "record_parts.h"
SHARED = ("Norm", "Activation", "Residual", "Positions")
TYPES = {"int": "int64_t", "float": "float", "bool": "bool"}
# Members of shared parts that no dataclass has.
MEMBERS = {
    "Norm": """  bool is_there = false;

  // x / sqrt(mean(x^2) + epsilon) * weight.
  bool is_plain_rms() const { return is_there && kind == NormKind::kRms && !bias && !plus_one; }
""",
    "Activation": """
  bool is_plain() const { return clamp == 0.0f && slope == 1.0f && up_offset == 0.0f; }
""",
    "Residual": """
  bool is_plain_sum() const {
    return source == Source::kInput && input_scale == 1.0f && output_scale == 1.0f;
  }
  // Whether a product that adds rows, or none, makes it.
  bool is_of_product() const { return source == Source::kNone || is_plain_sum(); }
""",
}


def member(value: str) -> str:
    """A value of a Literal as an enumerator."""
    return "k" + value.title().replace("_", "")


def enum_of(name: str, values: tuple[str, ...]) -> str:
    """A Literal as an enum, and the names of its values."""
    begin = f"inline constexpr const char* k{name}Names[] = {{"
    names = ", ".join(f'"{value}"' for value in values) + "};"
    return f"""enum class {name} : uint8_t {{ {", ".join(map(member, values))} }};
{textwrap.fill(begin + names, 100, subsequent_indent=" " * len(begin))}
constexpr const auto& names_of({name}) {{ return k{name}Names; }}
constexpr int kNum{name}s = {len(values)};
"""


def initial(kind: str, value: Any) -> str:
    """A value of a C++ type, with the sign before it; "" for what the type is without."""
    if kind in TYPES.values():
        return f" = {str(value).lower()}{'f' if kind == 'float' else ''}"
    if isinstance(value, str):
        return f" = {kind}::{member(value)}"
    if value is None or value == type(value)():
        return ""
    changed = (f for f in fields(value) if getattr(value, f.name) != f.default)
    sets = "".join(f"    of.{f.name}{initial(*typed(f, value))};\n" for f in changed)
    return f" = [] {{\n    {kind} of;\n{sets}    return of;\n  }}()"


def typed(field: Field[Any], record: Any) -> tuple[str, Any]:
    """The C++ type of a dataclass's field, and its value in a record, or its default in a class."""
    kind = field.type.removesuffix(" | None").removeprefix("blocks.")
    value = field.default if isinstance(record, type) else getattr(record, field.name)
    if value is MISSING:
        value = {"int": 0, "float": 0.0, "bool": False}.get(kind)
    return TYPES.get(kind, kind), value


def struct_of(record: type, name: str, stored: Iterable[tuple[str, str, str]] = ()) -> str:
    """A dataclass as a struct, and what takes a setting of it.

    stored: types, names and values of members that say how weights are stored.
    """
    own = [(*typed(field, record), field.name) for field in fields(record)]
    members = [(kind, name, initial(kind, value)) for kind, value, name in own]
    members += [(kind, name, f" = {value}") for kind, name, value in stored]
    lines: list[str] = []
    for kind, member_name, value in members:
        more = f"{lines[-1][:-2]}, {member_name}{value};\n" if lines else ""
        if more.startswith(f"  {kind} ") and len(more) <= 100:
            lines[-1] = more
        else:
            lines.append(f"  {kind} {member_name}{value};\n")
    taken = ", ".join(f"TAKE({name})" for _, name, _ in members)
    return f"""struct {name} {{
{"".join(lines)}{MEMBERS.get(name, "")}}};

template <class Setting>
void take({name}* to, Setting& setting) {{
{textwrap.fill(taken + ";", 100, initial_indent="  ", subsequent_indent="      ")}
}}
"""


def enums_of(module: ModuleType) -> list[str]:
    """The Literals that a module declares."""
    shared = {} if module is blocks else vars(blocks)
    named = {name: value for name, value in vars(module).items() if name not in shared}
    literals = {n: get_args(v) for n, v in named.items() if get_origin(v) is Literal}
    return [enum_of(name, values) for name, values in literals.items()]


def header(source: str, includes: Iterable[str], parts: Iterable[str]) -> str:
    """A header of these parts. source: the module that they are made of."""
    begin = (
        f"// The records of {source}. Made by csrc/make_records.py: do not edit.\n#pragma once\n"
    )
    lines = "".join(f"#include {name}\n" for name in includes)
    body = "\n".join(parts)
    space = f"namespace regatta {{\n\n{body}\n}}  // namespace regatta\n"
    macro = "#define TAKE(name) setting.field(#name, &to->name)"
    return f"{begin}\n{lines}\n{macro}\n\n{space}\n#undef TAKE\n"


def record_of(kind: type[blocks.Block]) -> str:
    """The header of a kind: the parts that it alone has, and its block."""
    module = sys.modules[kind.__module__]
    own = {n: v for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__}
    parts = [
        struct_of(value, name)
        for name, value in own.items()
        if isinstance(value, type)
        and is_dataclass(value)
        and not issubclass(value, (blocks.Block, blocks.BlockWeights))
    ]
    stored = [("SchemeId", name, "SchemeId::kDense") for name in kind.linears]
    if issubclass(kind, blocks.CachingBlock):
        stored.append(("KvFormat", "kv_format", "KvFormat::kDense"))
    if kind.adapted:  # whether its linears have room for adapters
        stored.append(("bool", "adapters", "false"))
    if kind.composes:  # whether it runs as smaller operators, on a CPU
        stored.append(("bool", "composed", "false"))
    name = kind.__name__.removesuffix("Block") + "Fields"
    includes = ('"regatta/kv_format.h"', '"regatta/record_parts.h"', '"regatta/scheme.h"')
    block = struct_of(kind, name, stored)
    return header(module.__name__, includes, [*enums_of(module), *parts, block])


def headers() -> dict[Path, str]:
    """All headers by path."""
    shared = [struct_of(getattr(blocks, name), name) for name in SHARED]
    made = {PARTS: header(blocks.__name__, ("<cstdint>",), [*enums_of(blocks), *shared])}
    for name, kind in kinds.known_kinds().items():
        made[ROOT / "csrc" / "blocks" / name / "record.h"] = record_of(kind)
    return made


def main(arguments: list[str]) -> int:
    """Writes or checks the headers."""
    for path, text in headers().items():
        if arguments == ["--check"]:
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                return 1
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
