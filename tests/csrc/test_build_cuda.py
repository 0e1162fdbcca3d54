"""The CUDA part of csrc/build.py: when it builds, for which architectures, and what it makes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import build
from predict.device import built, library
from tests.support import checkout

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {
    "csrc/cpu/info.cc": """
#include "regatta/abi.h"
REGATTA_EXPORT const char* regatta_cpu_info() { return "{\\"abi\\": ABI}"; }
REGATTA_EXPORT void regatta_set_num_threads(int) {}
""",
    "csrc/paddle/twice.cc": """
#include "paddle/phi/api/ext/op_meta_info.h"
#ifdef REGATTA_WITH_CUDA
void twice(float* x);
#else
void twice(float* x) { *x *= 2; }
#endif
std::vector<paddle::Tensor> Twice(const paddle::Tensor& x) {
  twice(nullptr);
  return {x};
}
PD_BUILD_OP(build_test_twice).Inputs({"x"}).Outputs({"y"}).SetKernelFn(PD_KERNEL(Twice));
""",
    "csrc/cuda/twice.cu": """
__global__ void kernel(float* x) { *x *= 2; }
void twice_newer();
void twice(float* x) {
  kernel<<<1, 1>>>(x);
  twice_newer();
}
""",
    "csrc/cuda/twice_sm100.cu": """
#error compiled for an architecture that was not asked for
""",
    "csrc/cuda/absent.cu": """
#ifdef REGATTA_WITHOUT_SM100
void twice_newer() {}
#endif
""",
    "csrc/device/plugin.cc": """
#include <cuda_runtime_api.h>
#include "paddle/phi/backends/device_ext.h"
extern "C" __attribute__((visibility("default"))) void InitPlugin(CustomRuntimeParams*) {
  cudaGetLastError();
}
""",
    "csrc/device/kernels/none.cc": "int none() { return 0; }\n",
}


def test_pip_builds_for_cuda_where_a_gpu_is_or_on_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "find_nvcc", lambda: "nvcc")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("REGATTA_CUDA", raising=False)
    assert not build.cuda_wanted()
    monkeypatch.setenv("REGATTA_CUDA", "1")
    assert build.cuda_wanted()

    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 9.0\necho 8.6\necho 9.0\n")
    smi.chmod(0o755)
    assert build.present_architectures() == ("86", "90a")
    monkeypatch.setenv("REGATTA_CUDA", "0")
    assert not build.cuda_wanted()
    monkeypatch.delenv("REGATTA_CUDA")
    assert build.cuda_wanted()
    monkeypatch.setenv("REGATTA_CUDA", "yes")
    with pytest.raises(build.BuildError, match=r"REGATTA_CUDA=yes is not known \(allowed: 0, 1\)"):
        build.cuda_wanted()


def test_driver_without_a_gpu_is_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.present_architectures() == ()


def test_architectures_are_the_gpus_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    known = ["compute_75", "compute_80", "compute_86", "compute_90"]
    monkeypatch.setattr(build, "_listed_architectures", lambda nvcc: known)
    monkeypatch.setattr(build, "present_architectures", lambda: ("90a",))
    assert build.chosen_architectures("nvcc") == ("90a",)
    assert build.chosen_architectures("nvcc", ["80", "86"]) == ("80", "86")
    assert build.chosen_architectures("nvcc", ["all"]) == ("75", "80", "86", "90a")
    monkeypatch.setattr(build, "present_architectures", lambda: ())
    assert build.chosen_architectures("nvcc") == ("75", "80", "86", "90a")


class Built(NamedTuple):
    """A checkout that was built for 90a, and what the build said."""

    root: Path
    output: str


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Built:
    try:
        build.find_cuda_toolkit(), build.find_compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    abi = library.read_abi(ROOT / "csrc" / "include" / "regatta" / "abi.h")
    sources = {name: text.replace("ABI}", f"{abi}}}") for name, text in SOURCES.items()}
    root = checkout.make(tmp_path_factory.mktemp("cuda"), sources)
    return Built(root, install(root))


def install(root: Path) -> str:
    process = checkout.run(root, "csrc/setup_cuda.py", "install", "--arch", "90a")
    assert process.returncode == 0, process.stdout
    return process.stdout


def test_cuda_build_makes_both_libraries_and_the_plugin(tree: Built) -> None:
    assert "5 of 5 sources compiled" in tree.output
    last = tree.output.splitlines()[-1]
    assert re.fullmatch(r"built for 90a in \d+ s, \d+ compilers at once", last)
    lib = tree.root / "predict" / "lib"
    assert sorted(str(path.relative_to(lib)) for path in lib.rglob("*.so")) == [
        "libregatta_cpu.so",
        "libregatta_cuda.so",
        "libregatta_kernels.so",
        "plugin/libpaddle_custom_nvgpu.so",
    ]
    metadata = library.read_metadata(lib / "libregatta_cuda.so")
    assert metadata.architectures == ("90a",)
    assert metadata.paddle_version == build.find_paddle().version
    assert metadata.file == built.describe(lib / "libregatta_cuda.so")
    assert metadata.parts == {
        name: built.describe(lib / name)
        for name in ("plugin/libpaddle_custom_nvgpu.so", "libregatta_kernels.so")
    }


def test_program_is_compiled_beside_the_kernels_of_the_build(tree: Built) -> None:
    source = tree.root / "one.cu"
    source.write_text(
        "#include <cstdio>\nvoid twice(float* x);\n"
        'int main(int count, char**) { if (count > 1) twice(nullptr); puts("one ran"); }\n'
    )
    process = checkout.run(tree.root, "csrc/programs.py", "one.cu")
    assert process.returncode == 0, process.stdout
    # The kernels' objects are there: the program's own, an archive and a link are left.
    assert "[3/3] link programs/one" in process.stdout
    program = tree.root / process.stdout.splitlines()[-1]
    output = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    assert output == "one ran\n"


def test_cuda_build_compiles_only_what_changed_and_clean_removes_all(tree: Built) -> None:
    root = tree.root
    (root / "csrc/device/plugin.cc").write_text(SOURCES["csrc/device/plugin.cc"] + "\n")
    assert "1 of 5 sources compiled" in install(root)
    subprocess.run([sys.executable, "csrc/setup_cuda.py", "clean"], cwd=root, check=True)
    assert not list((root / "predict" / "lib").rglob("*.so"))
