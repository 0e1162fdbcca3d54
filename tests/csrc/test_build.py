"""csrc/build.py and the programs around it, on a copy of the tree with two tiny sources."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

import build
from predict.device import library
from tests.support import checkout
from tests.support.checkout import KERNEL, run

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or os.environ.get("CXX") is not None, reason="no g++"
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with one kernel and one registration."""
    return checkout.make(tmp_path)


@needs_compiler
def test_library_builds_loads_and_rebuilds_only_what_changed(tree: Path, tmp_path: Path) -> None:
    # As pip has it: a Paddle of the build's own, in a folder that is gone afterwards.
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    (overlay / "paddle").symlink_to(build.find_paddle().root)
    first = run(tree, "csrc/setup_cpu.py", "install", PYTHONPATH=str(overlay))
    assert first.returncode == 0, first.stdout
    assert "2 of 2 sources compiled" in first.stdout
    assert build.find_paddle().root != overlay / "paddle"
    shutil.rmtree(overlay)

    metadata = json.loads((tree / "predict/lib" / library.METADATA_NAME).read_text())
    assert metadata["abi"] == library.ABI
    assert metadata["paddle_version"] == build.find_paddle().version
    assert metadata["sources_digest"] == library.source_digest(tree / "csrc")

    loads = run(
        tree,
        "-c",
        "from predict.device import library\n"
        "paddle = library.import_paddle()\n"
        "loaded = library.require()\n"
        "assert loaded.operators == ('build_test_same',), loaded\n"
        "(y,) = loaded.op('build_test_same')(paddle.ones([2]))\n"
        "assert y.tolist() == [1, 1]\n",
    )
    assert loads.returncode == 0, loads.stdout
    assert "ccache" not in loads.stdout

    assert "0 of 2 sources compiled" in run(tree, "csrc/setup_cpu.py", "install").stdout
    (tree / "csrc/include/regatta/answer.h").write_text("#define ANSWER 43\n")
    assert "1 of 2 sources compiled" in run(tree, "csrc/setup_cpu.py", "install").stdout


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("refused", [False, True], ids=["precompiled", "refused"])
def test_headers_of_paddle_are_precompiled_where_the_compiler_can(
    tree: Path, refused: bool
) -> None:
    for name in ("first", "second"):
        text = checkout.REGISTRATION.replace("build_test_same", f"build_test_{name}")
        (tree / f"csrc/paddle/{name}.cc").write_text(text.replace("Same", name))
    compiler = tree / "g++"
    when = "*c++-header*" if refused else "none"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in {when}) exit 1;; esac\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    process = run(tree, "csrc/setup_cpu.py", "install", CXX=str(compiler))
    assert "4 of 4 sources compiled" in process.stdout, process.stdout
    precompiled = tree / "build/regatta/cpu" / f"{build.PADDLE_HEADER}.gch"
    assert (precompiled.stat().st_size == 0) == refused
    again = run(tree, "csrc/setup_cpu.py", "install", CXX=str(compiler))
    assert "0 of 4 sources compiled" in again.stdout, again.stdout


@needs_compiler
@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        ('int x = "text";\n', "setup_cpu.py: the compiler failed: .*answer.cc:1"),
        (
            "int nowhere();\n" + KERNEL.replace("return ANSWER", "return nowhere()"),
            r"undefined reference to `nowhere\(\)'",
        ),
        ("int answer() { return 42; }\n", "built but does not load"),  # no C functions
        ('#include "paddle/phi/api/ext/op_meta_info.h"\n' + KERNEL, "op_meta_info.h"),
    ],
    ids=["an error", "a missing symbol", "no functions of a library", "a kernel with Paddle"],
)
def test_failed_build_says_why_and_keeps_the_library_by_hand(
    tree: Path, kernel: str, said: str
) -> None:
    built = tree / "predict/lib" / library.LIBRARY_NAME
    built.parent.mkdir()
    built.write_text("the last good one")
    (tree / "csrc/paddle/same.cc").unlink()
    (tree / "csrc/cpu/answer.cc").write_text(kernel)
    process = run(tree, "csrc/setup_cpu.py", "install")
    assert process.returncode == 1
    assert re.search(said, process.stdout, re.DOTALL), process.stdout
    assert built.read_text() == "the last good one"


def test_missing_compiler_is_named(tree: Path) -> None:
    process = run(tree, "csrc/setup_cpu.py", "install", PATH="/nowhere", CXX="")
    assert process.returncode == 1
    assert "no C++ compiler found (looked for g++, c++, clang++)" in process.stdout


def test_interpreter_without_paddle_or_ninja_is_named(tree: Path) -> None:
    # -S: the same Python without its site-packages.
    process = run(tree, "-S", "csrc/setup_cpu.py", "install")
    assert process.returncode == 1
    assert f"Paddle is not installed for this Python ({sys.executable})" in process.stdout
    assert f"{sys.executable} -m pip install paddlepaddle==" in process.stdout
    (tree / "bin").mkdir()
    (tree / "bin" / "g++").symlink_to(build.find_compiler())
    where = str(build.find_paddle().root.parent)
    program = (
        "import importlib.util, sys\n"
        "sys.path[:0] = ['csrc', sys.argv[1]]\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name == 'ninja' else find(name)\n"
        "sys.argv = ['setup_cpu.py', 'install']\n"
        "import setup_cpu\n"
        "sys.exit(setup_cpu.main())\n"
    )
    process = run(tree, "-S", "-c", program, where, PATH=str(tree / "bin"))
    assert process.returncode == 1
    assert f"ninja is not installed for this Python ({sys.executable})" in process.stdout
    assert f"{sys.executable} -m pip install ninja" in process.stdout


def test_python_too_old_is_said_before_anything_fails(tree: Path) -> None:
    program = "import sys; sys.path.insert(0, 'csrc'); sys.version_info = (3, 9, 2); import build"
    process = run(tree, "-c", program)
    assert process.returncode == 1
    assert process.stdout.startswith("Python 3.10 or newer is needed; this is ")


def test_no_sources_is_an_incomplete_checkout(tree: Path) -> None:
    shutil.rmtree(tree / "csrc/cpu")
    shutil.rmtree(tree / "csrc/paddle")
    process = run(tree, "csrc/setup_cpu.py", "install")
    assert process.returncode == 1
    assert "incomplete checkout" in process.stdout


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"PATH": "/nowhere", "CXX": ""}, "no C++ compiler found"),
        ({"REGATTA_SKIP_BUILD": "1"}, "REGATTA_SKIP_BUILD=1"),
    ],
)
def test_install_without_a_build_leaves_the_reason_and_no_old_library(
    tree: Path, environment: dict[str, str], reason: str
) -> None:
    pytest.importorskip("setuptools", minversion="77")
    folder = tree / "predict/lib"
    folder.mkdir()
    (folder / library.LIBRARY_NAME).write_text("from another version")
    (tree / "README.md").write_text("# x\n")
    (tree / "LICENSE").write_text("x\n")
    program = (
        "import sys; sys.path.insert(0, 'csrc'); import backend\n"
        "assert not any('paddle' in need for need in backend.get_requires_for_build_editable())\n"
        "backend.build_editable(sys.argv[1])\n"
    )
    process = run(tree, "-c", program, str(tree), **environment)
    assert process.returncode == 0, process.stdout
    assert [path.name for path in folder.iterdir()] == [library.BUILD_ERROR_NAME]
    assert reason in (folder / library.BUILD_ERROR_NAME).read_text()
    assert "installing without compiled operators" in process.stdout


def test_cuda_build_without_nvcc_says_what_to_do(tree: Path) -> None:
    if Path("/usr/local/cuda/bin/nvcc").is_file():
        pytest.skip("nvcc is where it is always looked for")
    process = run(
        tree, "csrc/setup_cuda.py", "install", PATH="/nowhere", CUDA_HOME="", CUDA_PATH=""
    )
    assert process.returncode == 1
    assert "nvcc was not found" in process.stdout
    assert "python csrc/setup_cpu.py install" in process.stdout


def test_jobs_variable_must_be_a_positive_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "3")
    assert build.num_jobs() == 3
    monkeypatch.setenv("MAX_JOBS", "many")
    with pytest.raises(build.BuildError, match="MAX_JOBS=many"):
        build.num_jobs()
    monkeypatch.delenv("MAX_JOBS")
    assert build.num_jobs() == len(os.sched_getaffinity(0))


def test_cuda_architectures_are_those_the_compiler_knows() -> None:
    cuda_13 = ["compute_75", "compute_80", "compute_90", "compute_120"]
    assert build.cuda_architectures(cuda_13) == ("75", "80", "90a", "120a")
    assert build.cuda_architectures(["compute_70", "compute_90"]) == ("90a",)
    assert build.cuda_architectures(cuda_13, ["90a", "80", "90a"]) == ("90a", "80")
    with pytest.raises(build.BuildError, match=r"--arch 70 .*75, 80, 90, 120"):
        build.cuda_architectures(cuda_13, ["70"])


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("70", "the kernels run on 75 and newer; leave it out"),
        ("90", "leaves out the instructions .*; set --arch 90a"),
    ],
)
def test_architecture_that_kernels_refuse_is_not_compiled_for(
    architecture: str, message: str
) -> None:
    known = ["compute_70", "compute_80", "compute_90"]
    with pytest.raises(build.BuildError, match=f"--arch {architecture}:? {message}"):
        build.cuda_architectures(known, ["80", architecture])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("norm.cu", ("75", "80", "90a", "120a")),
        ("gemm_sm80.cu", ("80", "90a", "120a")),
        ("gemm_bf16_sm90.cu", ("90a",)),
        ("gemm_sm89.cu", ("90a", "120a")),
        ("gemm_sm100.cu", ()),
    ],
)
def test_cuda_source_is_compiled_for_what_its_name_says(
    name: str, expected: tuple[str, ...]
) -> None:
    assert build.source_architectures(Path(name), ("75", "80", "90a", "120a")) == expected


def test_required_paddle_version_comes_from_the_dependencies() -> None:
    assert build.required_paddle_version().count(".") == 2
