"""Writes the tables of fields in docs/python-api.md from the comments in the sources.

A table stands between `<!-- fields: MODULE.CLASS -->` and `<!-- /fields -->`. With --check it
changes nothing, and leaves with 1 where the page is not what it would write.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "python-api.md"
MARKED = re.compile(r"<!-- fields: (?P<name>[\w.]+) -->\n.*?<!-- /fields -->", re.DOTALL)
COMMENT = re.compile(r"#\s?(.*)$")


def fields_table(name: str) -> str:
    """The fields of a dataclass: name, default, and what the comments beside it say."""
    module, _, wanted = name.rpartition(".")
    source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
    lines = source.splitlines()
    found = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == wanted
    ]
    rows = ["| field | default | meaning |", "| --- | --- | --- |"]
    for node in found[0].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above = " ".join(_above(lines, node.lineno)).removesuffix(".")
            said = "; ".join(text for text in (above, *_beside(lines, node)) if text)
            meaning = re.sub(r"([|*])", r"\\\1", said)
            rows.append(f"| `{node.target.id}` | {_default(node)} | {meaning} |")
    return "\n".join(rows)


def _above(lines: Sequence[str], first: int) -> list[str]:
    """Comments on the lines right above line `first` (from 1)."""
    found: list[str] = []
    for line in reversed(lines[: first - 1]):
        if not line.lstrip().startswith("#"):
            break
        found.insert(0, line.lstrip().lstrip("# "))
    return found


def _beside(lines: Sequence[str], node: ast.AnnAssign) -> list[str]:
    """Comments at the ends of a field's own lines."""
    end = node.end_col_offset or 0
    rest = lines[(node.end_lineno or node.lineno) - 1].encode()[end:].decode()
    match = COMMENT.search(rest)
    return [match[1]] if match else []


def _default(node: ast.AnnAssign) -> str:
    if node.value is None:
        return "needed"
    text = ast.unparse(node.value)
    return "`{}`" if text.startswith("field(default_factory=dict") else f"`{text}`"


def page() -> str:
    """The page with its tables made anew."""

    def made(match: re.Match[str]) -> str:
        return (
            f"<!-- fields: {match['name']} -->\n\n{fields_table(match['name'])}\n\n<!-- /fields -->"
        )

    return MARKED.sub(made, PAGE.read_text(encoding="utf-8"))


def main(words: Sequence[str]) -> int:
    """Writes the page, or checks it."""
    text = page()
    if "--check" in words:
        if PAGE.read_text(encoding="utf-8") == text:
            return 0
        print(f"{PAGE} is not current; run: python docs/make_fields.py", file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
