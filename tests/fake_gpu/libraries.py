"""Compiles what `--device gpu` needs where there is no GPU: the plugin and the operators.

All is the real thing but for the CUDA runtime (runtime.cc) and csrc/cuda: LAUNCHERS call the CPU's
operators, which are taken from the CPU library's build.
"""

from __future__ import annotations

import fcntl
import subprocess
from pathlib import Path

import build
from predict.device import devices, library
from predict.device.built import Metadata, describe

HERE = Path(__file__).resolve().parent
TEST_OPS = HERE.parent / "gpu" / "ops"
FOLDER = build.BUILD_DIR.parent / "fake_gpu"
RUNTIME_NAME = "libfake_cuda.so"
TEST_OPS_NAME = "libtest_ops.so"  # of tests/gpu/ops
LAUNCHERS = ("blocks", "kernels", "weights")  # here, in the place of csrc/cuda
REGISTRATIONS = "registrations.cc"  # includes all of csrc/paddle: Paddle's headers are read once


def compile_libraries() -> Path:
    """Compiles what is not up to date; returns FOLDER.

    Raises build.BuildError where a compiler or Paddle is missing, or the CPU library not up to
    date, and RuntimeError with the compiler's words when it fails.
    """
    paddle, compiler = build.find_paddle(), build.find_compiler()
    if paddle.has_cuda:
        raise build.BuildError("the installed Paddle is a GPU build, which takes no plugin")
    plugin = FOLDER / devices.PLUGIN_FOLDER.name
    plugin.mkdir(parents=True, exist_ok=True)
    with (FOLDER / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other tests of this checkout may do the same
        _compile(paddle, compiler)
    return FOLDER


def _compile(paddle: build.PaddlePackage, compiler: str) -> None:
    """Compiles into FOLDER and describes what is there."""
    plugin = FOLDER / devices.PLUGIN_FOLDER.name
    unit, text = FOLDER / REGISTRATIONS, registrations_text()
    if not unit.is_file() or unit.read_text(encoding="utf-8") != text:
        unit.write_text(text, encoding="utf-8")
    text = ninja_text(paddle, compiler, unit)
    (FOLDER / "build.ninja").write_text(text, encoding="utf-8")
    command = [build.find_ninja(), "-C", str(FOLDER), "-j", str(build.num_jobs())]
    process = subprocess.run(command, check=False, capture_output=True, text=True)
    if process.returncode != 0:
        raise RuntimeError(f"the fake GPU does not compile: {process.stdout[-4000:]}")
    parts = (f"{plugin.name}/{devices.PLUGIN_NAME}", devices.KERNELS_NAME)
    metadata = Metadata(
        abi=library.read_abi(build.CSRC / "include" / "regatta" / "abi.h"),
        paddle_version=paddle.version,
        paddle_commit=paddle.commit,
        compiler=compiler,
        sources_digest=library.source_digest(build.CSRC),
        file=describe(FOLDER / devices.CUDA_LIBRARY_NAME),
        cuda_sources_digest=devices.cuda_source_digest(build.CSRC),
        architectures=("90a",),
        parts={name: describe(FOLDER / name) for name in parts},
    )
    described = (FOLDER / devices.CUDA_LIBRARY_NAME).with_suffix(".json")
    described.write_text(metadata.to_json(), encoding="utf-8")


def registrations_text() -> str:
    """Returns a source that includes all of csrc/paddle, each in a namespace of its own.

    Those that others call, by a header, come first and stay where their header says.
    """
    headers = sorted((build.CSRC / "paddle").glob("*.h"))
    headers += sorted((build.CSRC / "include" / "regatta").glob("*.h"))
    called = [each for each in build.registration_sources() if each.with_suffix(".h").is_file()]
    lines = [f'#include "{path}"' for path in (*headers, *called)]
    for source in build.registration_sources():
        name = f"binding_{source.stem}"
        lines += [] if source in called else [
            f"namespace regatta::{name} {{ using namespace binding; }}",
            f"#define binding {name}",
            f'#include "{source}"',
            "#undef binding",
        ]  # fmt: skip
    return "\n".join([*lines, ""])


def ninja_text(paddle: build.PaddlePackage, compiler: str, registrations: Path) -> str:
    kernels_folder = build.CSRC / "device" / "kernels"
    folders = [HERE, HERE / "include", TEST_OPS, kernels_folder]
    folders += [build.CSRC, *(build.CSRC / name for name in ("include", "paddle"))]
    system = [paddle.root / "include", paddle.root / "include" / "third_party"]
    flags = [*build.CXX_FLAGS, "-DREGATTA_WITH_CUDA", "-DPADDLE_WITH_CUSTOM_DEVICE"]
    flags += [f"-I{path}" for path in folders]
    flags += [word for path in system for word in ("-isystem", str(path))]
    link = [*build.LINK_FLAGS, "-Wl,-z,nodelete", "-L.", f"-L{paddle.root / 'base'}"]
    libs = paddle.root / "libs"
    link += [f"-L{libs}", f"-Wl,-rpath-link,{libs}"]
    names = " ".join(f"-l:{name}" for name in build.PADDLE_LIBRARIES)
    lines = [
        "rule compile",
        f"  command = {compiler} {' '.join(flags)} $own -MMD -MF $out.d -c -x c++ $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = {compiler} {' '.join(link)} -Wl,-rpath,'$$ORIGIN/$up' $in $names -o $out",
    ]

    def objects(sources: list[Path], own: str) -> str:
        targets = []
        for source in sources:
            target = f"{source.parent.name}_{source.stem}.o"
            lines.extend([f"build {target}: compile {source}", f"  own = {own}"])
            targets.append(target)
        return " ".join(targets)

    def linked(name: str, inputs: str, names: str = "", up: str = "") -> None:
        lines.extend([f"build {name}: link {inputs} | {RUNTIME_NAME if names else ''}"])
        lines.extend([f"  names = {names}", f"  up = {up}"])

    cpu = [build.BUILD_DIR / "cpu" / build.object_path(path) for path in build.kernel_sources()]
    metadata = library.LIBRARY_DIR / library.METADATA_NAME
    fresh = metadata.is_file() and all(path.is_file() for path in cpu)
    if not fresh or library.is_outdated(library.read_metadata(metadata)):
        raise build.BuildError(
            "the CPU library, whose operators the fake GPU takes, was not compiled here from these "
            "sources; run: python csrc/setup_cpu.py install"
        )
    own = objects([HERE / f"{name}.cc" for name in LAUNCHERS], "-O3")
    own += " " + objects([registrations], "-O1")
    runtime = f"-l:{RUNTIME_NAME}"
    linked(RUNTIME_NAME, objects([HERE / "runtime.cc"], "-O1 -fvisibility=default"))
    linked(devices.CUDA_LIBRARY_NAME, f"{own} {' '.join(map(str, cpu))}", f"{runtime} {names}")
    linked(
        devices.KERNELS_NAME,
        objects([kernels_folder / "registration.cc", HERE / "strided_copy.cc"], "-O1"),
        f"{runtime} {names}",
    )
    linked(
        TEST_OPS_NAME,
        objects([TEST_OPS / "registration.cc", HERE / "axpb.cc"], "-O1"),
        f"{runtime} {names}",
    )
    plugin = f"{devices.PLUGIN_FOLDER.name}/{devices.PLUGIN_NAME}"
    linked(plugin, objects(build.device_sources(), "-O1 -Werror"), runtime, "..")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(compile_libraries())
