"""Options, markers and shared fixtures of the whole test suite."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import build
from predict.device import library
from predict.system import host
from tests.fake_gpu import libraries
from tests.fake_gpu.chosen import ENVIRONMENT
from tests.support import packed, tiny
from tests.support.cpu_kernels import CANDIDATES, force, refusal
from tests.support.golden import OPERATORS
from tests.support.paths import DEMO, ROOT
from tests.support.quantized_caches import write_scales
from tests.support.quick import QUICK
from tests.support.sanitized import covering, values_of

# Each has threads of its own: more of them share the cores no better.
NUM_PROCESSES = 2
# Whose tests run with all combinations of their parameters when --slow is given, and otherwise with
# few in which every two values meet.
ROOMS = tuple(
    f"tests/{room}/" for room in ("adapters", "engine", "nn", "ops", "schemes", "speculative")
)

# Hundreds of processes import the same modules: their bytecode is kept, whatever the shell says.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests that take minutes")
    parser.addoption(
        "--quick", action="store_true", help="run some of every room: 90 s on two cores"
    )


@pytest.hookimpl(tryfirst=True)  # ahead of pytest-xdist's, which reads what is set here
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Shares a run of all tests between two processes; -n, -s, --pdb and named tests are heeded."""
    option = config.option
    if option.quick and config.args_source != pytest.Config.ArgsSource.ARGS:
        config.args = [str(ROOT / test) for test in QUICK]
    if (
        config.pluginmanager.has_plugin("xdist")
        and not hasattr(config, "workerinput")
        and config.args_source != pytest.Config.ArgsSource.ARGS
        and option.numprocesses is None
        and option.dist == "no"
        and option.capture != "no"
        and not (option.usepdb or option.trace or option.collectonly)
        and len(os.sched_getaffinity(0)) >= NUM_PROCESSES
    ):
        option.numprocesses, option.dist = NUM_PROCESSES, "loadscope"
        option.loadscopereorder = False


def pytest_configure() -> None:
    """Unpacks goldens, ahead of xdist's workers and of what reads them at collection."""
    packed.unpack()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Does not look for garbage among modules and tests: they stay, and are a million objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.pluginmanager.has_plugin("tests.support.sanitized"):  # which chooses by itself
        left_out = combinations_left_out(items)
        for item in left_out:
            item.add_marker("slow")
        if left_out and not config.getoption("--slow"):
            config.hook.pytest_deselected(items=left_out)
            kept = set(items) - set(left_out)
            items[:] = [item for item in items if item in kept]
    skipped = {}
    if not config.getoption("--slow"):
        skipped["slow"] = pytest.mark.skip(reason="takes minutes; run with --slow")
    if not Path("/proc/driver/nvidia/version").is_file() and ENVIRONMENT not in os.environ:
        skipped["gpu"] = pytest.mark.skip(reason="no NVIDIA driver")
    for item in items:
        for name, mark in skipped.items():
            if item.get_closest_marker(name) is not None:
                item.add_marker(mark)


def combinations_left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Those of ROOMS without which every two values of a test's parameters still meet."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.nodeid.startswith(ROOMS) and item.get_closest_marker("slow") is None:
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = []
    for group in groups.values():
        kept = set(covering([values_of(item) for item in group]))
        left_out += [item for number, item in enumerate(group) if number not in kept]
    return left_out


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.option.dist != "loadscope":
        return None
    from tests.support.sharing import Scheduling

    return Scheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def no_collection_before_a_run() -> Iterator[None]:
    """Commands collect garbage and freeze what is there: the tests are there, and stay frozen."""
    with pytest.MonkeyPatch.context() as patch:
        without = {name: lambda: None for name in ("collect", "freeze", "unfreeze")}
        patch.setattr(host, "gc", SimpleNamespace(**without))
        yield


@pytest.fixture(scope="session")
def compiled() -> library.Library:
    """The loaded operator library; tests that ask for it are skipped where none was built."""
    if library.find() is None:
        pytest.skip(f"no compiled operators; build them: {library.build_command()}")
    return library.require()


@pytest.fixture(params=CANDIDATES)
def candidate(request: pytest.FixtureRequest, compiled: library.Library) -> Iterator[str]:
    """Each candidate of the module's OPERATOR in turn, forced for all operators."""
    reason = refusal(compiled, request.module.OPERATOR, request.param)
    if reason:
        pytest.skip(reason)
    assert force(compiled, request.param) is None
    yield request.param
    force(compiled, "")


@pytest.fixture(params=list(OPERATORS))
def operators(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Settings of plain Paddle's operators, then of the compiled ones."""
    if request.param == "fused":
        request.getfixturevalue("compiled")
    return OPERATORS[request.param]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama without a tokenizer."""
    return tiny.write(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def sparse_caches() -> Iterator[None]:
    from tests.support.sparse_caches import known

    with known():
        yield


@pytest.fixture(scope="session")
def demo_with_scales(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo") / "model"
    directory.mkdir()
    for path in DEMO.iterdir():
        os.symlink(path, directory / path.name)
    config = json.loads((DEMO / "config.json").read_text())
    heads = config["num_key_value_heads"]
    return write_scales(directory, config["num_hidden_layers"], k=[12.0] * heads, v=[6.0] * heads)


@pytest.fixture(scope="session")
def fake_gpu() -> Path:
    """The folder of the libraries for a GPU of ordinary memory, compiled."""
    try:
        return libraries.compile_libraries()
    except build.BuildError as error:
        pytest.skip(str(error))
