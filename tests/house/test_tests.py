"""Rules of the tests themselves: what they share has one place, and no clock decides."""

from __future__ import annotations

import ast

import pytest

from tests.support.paths import ROOT

CLOCKS = {"perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "time_ns"}


@pytest.fixture(scope="module")
def sources() -> dict[str, ast.Module]:
    """The tests' modules by path."""
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "tests").rglob("*.py"))
    }


def imported_tests(tree: ast.Module) -> list[str]:
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return [
        name
        for name in names
        if name.startswith("tests.")
        # The last part may be a name in a module.
        and any(part.startswith("test_") for part in name.split(".")[1:])
    ]


def reads_clock(node: ast.AST) -> bool:
    """Whether an expression asks what time it is."""
    return any(
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and (call.func.value.id, call.func.attr) in {("time", name) for name in CLOCKS}
        for call in ast.walk(node)
    )


def timed_assertions(tree: ast.Module) -> list[int]:
    """Lines of assertions about times that a clock measured in the same function."""
    lines = []
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        nodes = list(ast.walk(function))
        timed: set[str] = set()
        for node in nodes:
            if isinstance(node, ast.Assign) and (
                reads_clock(node.value) or timed & names_in(node.value)
            ):
                timed |= {name for target in node.targets for name in names_in(target)}
        lines += [
            node.lineno
            for node in nodes
            if isinstance(node, ast.Assert)
            and (reads_clock(node.test) or timed & names_in(node.test))
        ]
    return lines


def names_in(node: ast.AST) -> set[str]:
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}


def test_no_module_imports_a_test_module(sources: dict[str, ast.Module]) -> None:
    found = {path: names for path, tree in sources.items() if (names := imported_tests(tree))}
    assert not found, "move what is shared to tests/support or a conftest"


def test_no_assertion_depends_on_the_time_that_something_took(
    sources: dict[str, ast.Module],
) -> None:
    found = {path: lines for path, tree in sources.items() if (lines := timed_assertions(tree))}
    assert not found, "what must be fast is a benchmark"


def test_the_rules_find_what_they_forbid() -> None:
    tree = ast.parse(
        "from tests.engine import test_scheduler\n"
        "from tests.test_llm import DEMO\n"
        "import tests.ops.test_ops\n"
        "from tests.support.tiny import write\n"
        "def test_it():\n"
        "    started = time.perf_counter()\n"
        "    run()\n"
        "    took = time.perf_counter() - started\n"
        "    assert took < 5\n"
        "    assert time.monotonic() < 3\n"
        "    assert run()\n"
    )
    assert imported_tests(tree) == [
        "tests.engine.test_scheduler",
        "tests.test_llm.DEMO",
        "tests.ops.test_ops",
    ]
    assert timed_assertions(tree) == [9, 10]


def test_one_process_runs_what_shares_work() -> None:
    sharing = pytest.importorskip("tests.support.sharing", exc_type=ImportError)
    gpu = sharing.shared_by("tests/fake_gpu/test_fake_gpu.py")
    assert gpu == sharing.shared_by("tests/device/test_plugin.py")
    alone = "tests/csrc/test_memory_pool.py"  # a library for all of its tests
    assert sharing.shared_by(alone) == alone
    assert sharing.shared_by("tests/ops/test_cpu_kernels_gemm.py") is None
