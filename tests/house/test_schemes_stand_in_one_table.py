"""A scheme is a row in one table on each side of the language border, and code asks the row.

Counted are names that code can act on: string literals without a space, and in C++ enumerators too.
Not counted, by rule:

- a literal with a space in it, a docstring, a comment: sentences for people;
- "dense", which is no scheme but the lack of one, and a cache format's name as well;
- a scheme's own file, which has its name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from predict.config.schemes import SCHEMES
from tests.support.paths import ROOT

TABLE = ROOT / "csrc/include/regatta/scheme.h"
MOST = 2  # files of a language, besides a scheme's own
PYTHON = ("predict", "export", "quant", "csrc")
CPP_ENDINGS = (".cc", ".cu", ".h", ".cuh", ".inl", ".cpp")
# A comment, or a literal: what begins first hides the other.
CPP_TOKENS = re.compile(r'//[^\n]*|/\*.*?\*/|"((?:\\.|[^"\\\n])*)"', re.DOTALL)
SEARCH = re.compile(
    r'(?:\b(?:find|rfind|strstr|compare|strcmp|strncmp|starts_with|ends_with)\s*\([^;{]*?|[=!]=\s*)"'
    r'(\w{2,})"|"(\w{2,})"\s*[=!]='
)


def words(literals: Iterable[str]) -> set[str]:
    """Names in literals that are no sentences."""
    data = (text for text in literals if not re.search(r"\s", text))
    return {word for text in data for word in re.findall(r"\w+", text)}


def python_names(source: str) -> set[str]:
    """Names in a Python source's string literals, docstrings apart."""
    tree = ast.parse(source)
    skipped = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return words(
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in skipped
    )


def cpp_names(source: str) -> set[str]:
    """Names in a C++ source's string literals, and of enumerators of SchemeId."""
    literals = [match[1] for match in CPP_TOKENS.finditer(source) if match[1] is not None]
    return words(literals) | set(re.findall(r"\bSchemeId::(k\w+)", without_comments(source)))


def without_comments(source: str) -> str:
    return CPP_TOKENS.sub(lambda match: "" if match[1] is None else match[0], source)


def searches(source: str, names: Iterable[str]) -> list[str]:
    """Parts of schemes' names that a C++ source compares or searches with."""
    found = [first or second for first, second in SEARCH.findall(without_comments(source))]
    return [text for text in found if any(text in name for name in names)]


def python_files() -> Iterator[Path]:
    yield from ROOT.glob("*.py")
    for folder in PYTHON:
        yield from (ROOT / folder).rglob("*.py")


def cpp_files() -> Iterator[Path]:
    yield from (path for path in (ROOT / "csrc").rglob("*") if path.suffix in CPP_ENDINGS)


def files_with(
    spellings: set[str], files: Iterable[Path], names_of: Callable[[str], set[str]]
) -> list[str]:
    """Files that have one of the spellings, those of that very name apart."""
    return sorted(
        str(path.relative_to(ROOT))
        for path in files
        if not spellings & {path.stem, path.stem.removeprefix("gemm_")}
        and spellings & names_of(path.read_text(encoding="utf-8"))
    )


def table() -> dict[str, str]:
    """The enumerator of each name, from scheme.h."""
    text = without_comments(TABLE.read_text(encoding="utf-8"))
    kinds = re.search(r"enum class SchemeId[^{]*\{([^}]*)\}", text)
    rows = re.search(r"kSchemes\[\] = \{(.*?)\};", text, re.DOTALL)
    assert kinds is not None
    assert rows is not None
    names = re.findall(r'\{"(\w+)"', rows[1])
    return dict(zip(names, re.findall(r"\bk\w+", kinds[1]), strict=True))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_scheme_s_name_stands_in_two_python_files_at_most(scheme: str) -> None:
    found = files_with({scheme}, python_files(), python_names)
    assert "predict/config/schemes.py" in found
    assert len(found) <= MOST, f"ask scheme_info(name), or find(codes, activations): {found}"


@pytest.mark.parametrize("scheme", sorted(set(table()) - {"dense"}))
def test_a_scheme_s_name_stands_in_two_files_of_csrc_at_most(scheme: str) -> None:
    found = files_with({scheme, table()[scheme]}, cpp_files(), cpp_names)
    assert "csrc/include/regatta/scheme.h" in found
    assert len(found) <= MOST, f"ask scheme_info(scheme): {found}"


def test_no_file_of_csrc_searches_names_of_schemes() -> None:
    names = set(table()) - {"dense"}
    found = {
        str(path.relative_to(ROOT)): texts
        for path in cpp_files()
        if path != TABLE and (texts := searches(path.read_text(encoding="utf-8"), names))
    }
    assert not found, f"ask scheme_info(scheme): {found}"


def test_names_that_code_acts_on_are_found_and_sentences_are_not() -> None:
    source = (
        '"""Of fast8."""\nx = "fast8"\ny = f"{x}:slow4,tiny2"\nz = "use big16 here"  # wide32\n'
    )
    assert python_names(source) == {"fast8", "slow4", "tiny2"}
    cpp = '// "wide32"\nif (s == "fast8") run(SchemeId::kSlow4); /* kBig */ fail("use big16 \\"x");'
    assert cpp_names(cpp) == {"fast8", "kSlow4"}


@pytest.mark.parametrize(
    "line",
    [
        'if (name == "fast8_fp8") return;',
        'if ("fast8" != name) return;',
        'const bool is_float = scheme.find("fp8") != std::string::npos;',
        'return std::strcmp(info.name, "fast8_fp8") == 0;',
        'const bool last = name.substr(6) == "fp8";',
        'if (std::string(scheme_info(s).name).rfind("fast8", 0) == 0) return;',
    ],
)
def test_a_search_in_a_scheme_s_name_is_found(line: str) -> None:
    assert searches(f"// {line}\n{line}", ["fast8_fp8"])
    assert not searches(f"// {line}", ["fast8_fp8"])


def test_other_comparisons_are_none() -> None:
    line = 'if (dtype == "float16" || kind.find("fp9") == 0) fail("fast8_fp8 == 8");'
    assert not searches(line, ["fast8_fp8"])
