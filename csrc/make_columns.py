"""Writes csrc/runtime/columns.h from predict/ops/columns.py.

python csrc/make_columns.py          # writes the header
python csrc/make_columns.py --check  # leaves with 1 where it is not what it would write
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from predict.ops.columns import TABLES, ColumnTable  # noqa: E402

HEADER = ROOT / "csrc" / "runtime" / "columns.h"
TYPES = {"float32": "float", "int32": "int32_t", "int64": "int64_t"}


def struct_of(table: ColumnTable) -> str:
    """A struct of pointers to a table's rows, and the function that takes it from a tensor."""
    name, rows, members, pointers = table.name.capitalize(), 0, [], []
    for column in table.columns:
        kind = TYPES[column.dtype]
        members.append(f"  {kind}* {column.name};")
        pointers.append(f"          reinterpret_cast<{kind}*>(base + {rows} * stride)")
        rows += column.num_rows
    lines = [f"// {table.meaning} Rows of a table [{rows}, P] int32.", f"struct {name} {{"]
    lines += ["  int64_t num_columns;  // P", *members, "};", ""]
    lines += [f"inline {name} {table.name}_of(Reader& read, const TensorView& table) {{"]
    lines += [f'  auto* const base = read.values<int32_t>(table, "{table.name}", {{{rows}, -1}});']
    lines += ["  const int64_t stride = table.shape[1];", "  return {stride,"]
    return "\n".join([*lines, ",\n".join(pointers) + "};", "}"])


def text() -> str:
    """The header."""
    parts = [
        "// Tables of predict/ops/columns.py. Made by csrc/make_columns.py: do not edit.",
        '#pragma once\n\n#include "runtime/checks.h"\n\nnamespace regatta::runtime {\n',
        *(struct_of(table) + "\n" for table in TABLES),
        "}  // namespace regatta::runtime\n",
    ]
    return "\n".join(parts)


def main(arguments: list[str]) -> int:
    """Writes or checks the header."""
    if arguments == ["--check"]:
        return int(not HEADER.is_file() or HEADER.read_text(encoding="utf-8") != text())
    HEADER.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
