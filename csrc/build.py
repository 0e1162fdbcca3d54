"""Compiles csrc/ into the operator libraries that predict/device/library.py loads.

libregatta_cpu.so is csrc/cpu, csrc/runtime, csrc/blocks and csrc/paddle. Where CUDA is asked for,
libregatta_cuda.so is the same and csrc/cuda, and csrc/device becomes Paddle's plugin for NVIDIA
GPUs.
Used by setup_cpu.py and setup_cuda.py (by hand) and by backend.py (pip). The headers and the link
names come from the Paddle installed beside the running Python; neither Paddle nor anything else
outside the standard library is imported. Objects go to build/, the library and its metadata to
predict/lib/. A second run compiles only what changed (ninja with the compiler's dependency files).
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036 - whatever Python this was started with
    sys.exit(f"Python 3.10 or newer is needed; this is {sys.version.split()[0]} ({sys.executable})")

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the library's names and its digest are defined once, over there

from predict.device.built import Metadata, describe  # noqa: E402
from predict.device.library import (  # noqa: E402
    LIBRARY_NAME,
    METADATA_NAME,
    SANITIZED_PREFIX,
    read_abi,
    source_digest,
)

CSRC = ROOT / "csrc"
BUILD_DIR = ROOT / "build" / "regatta"
LIBRARY_DIR = ROOT / "predict" / "lib"
MACHINES = ("x86_64", "aarch64")  # csrc/cpu/isas.h

# No -march: one library serves every machine of its architecture; each kernel names its instruction
# set in a target pragma and is chosen at run time. PADDLE_NO_PYTHON keeps paddle/extension.h
# from wanting Python.h, so that a compiler is all a machine needs.
# CMakeLists.txt reads the same flags.
CXX_FLAGS = (
    *(CSRC / "flags.txt").read_text(encoding="utf-8").split(),
    "-DPADDLE_NO_PYTHON",
    "-D_GLIBCXX_USE_CXX11_ABI=1",
)
# Linked by name and without a run path: the Paddle that is already in the process provides them,
# whatever folder or Python version it came with. --no-undefined finds a missing symbol now and not
# at the user's first prompt.
LINK_FLAGS = ("-shared", "-pthread", "-Wl,--as-needed", "-Wl,--no-undefined", "-Wl,-O1")
# The C++ library too, by the name that Paddle loads it under: where a folder on the way has an
# archive of it, that would be linked, and with two copies in the process the first message that is
# put together ends it.
PADDLE_LIBRARIES = (
    "libpaddle.so",
    "libphi_core.so",
    "libphi.so",
    "libcommon.so",
    "libstdc++.so.6",
)


OWN_HEADERS = (f"-I'{CSRC / 'include'}'", f"-I'{CSRC}'")
# In a build's folder: what each registration includes first.
PADDLE_HEADER = "paddle.h"
WORTH_PRECOMPILING = 3  # registrations
PADDLE_INCLUDES = """#include "paddle/phi/api/all.h"
#include "paddle/phi/core/dense_tensor.h"
"""

# What kernels are compiled for, oldest first, where the compiler still knows it. The suffix "a"
# opens the instructions of that one generation (Hopper's wgmma and setmaxnreg need it).
CUDA_ARCHITECTURES = ("75", "80", "86", "89", "90a", "100a", "120a")
# What stands in for sources that are left out: see source_architectures.
ABSENT_NAME = "absent.cu"
# 2810: nvcc takes an assignment to a [[nodiscard]] Status for a value that is ignored.
CUDA_FLAGS = (
    "-diag-suppress=2810",
    "-std=c++17",
    "-O3",
    "-DNDEBUG",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    "--expt-relaxed-constexpr",  # include/regatta/ has constexpr functions for host and device
)
# The runtime is linked in: it needs no installation beside the driver, and without a driver it
# reports an error where the shared one would keep the library from loading.
CUDA_LIBRARIES = ("-lcudart_static", "-ldl", "-lrt")


# --sanitize: what the compiler is given beside SANITIZER_FLAGS, and the runtime that must be in the
# process before Python is.
SANITIZERS = {
    # Accesses are checked by calls, not in place: a build takes a fifth less.
    "address": (
        ("-fsanitize=address", "--param=asan-instrumentation-with-call-threshold=0"),
        "libasan.so",
    ),
    # Not vptr: it wants the type information of Paddle's classes, which Paddle does not export. Not
    # null, object-size and pointer-overflow: AddressSanitizer reports the access that follows, and
    # a fifth of the build is these checks.
    "undefined": (
        (
            "-fsanitize=undefined",
            "-fno-sanitize=vptr,null,object-size,pointer-overflow",
            "-fno-sanitize-recover=undefined",
        ),
        "libubsan.so",
    ),
    "thread": (("-fsanitize=thread",), "libtsan.so"),
}
# -O1 takes the place of -O3: frames stay whole, and the many variants compile in minutes.
SANITIZER_FLAGS = ("-O1", "-g1", "-fno-omit-frame-pointer")


# The tests that call the operators and little else.
SANITIZED_TESTS = "tests/ops tests/engine/test_logits_processors.py tests/nn/test_cache_formats.py"
# Hears how many of how many steps of a build are done.
Progress = Callable[[int, int], None]


class BuildError(RuntimeError):
    """The library could not be built; the message says why and what to do."""


@dataclass(frozen=True)
class PaddlePackage:
    """An installed Paddle: its folder, version and the commit that it was built from."""

    root: Path
    version: str
    commit: str
    has_cuda: bool = False


@dataclass(frozen=True)
class CudaToolkit:
    """An installed CUDA toolkit: its compiler, and the folders of its headers and libraries."""

    nvcc: str
    include: Path
    libraries: Path
    version: str


@dataclass(frozen=True)
class BuildResult:
    """What one build made: library file, sources compiled now, sources in all, seconds."""

    library: Path
    num_compiled: int
    num_sources: int
    seconds: float
    compiler: str
    paddle_version: str
    architectures: tuple[str, ...] = ()  # of GPUs

    def summary(self) -> str:
        """One line for the terminal."""
        size = self.library.stat().st_size / 1e6
        return (
            f"{self.library.relative_to(ROOT)}: {size:.1f} MB, {self.num_compiled} of "
            f"{self.num_sources} sources compiled in {self.seconds:.0f} s with {self.compiler} "
            f"for Paddle {self.paddle_version}"
        )


def find_paddle(extra_paths: Sequence[str] = ()) -> PaddlePackage:
    """Returns the Paddle installed for this Python, or else the one in `extra_paths`.

    Raises BuildError when there is none, or when it came without headers.
    """
    candidates = [Path(path) / "paddle" for path in extra_paths]
    # find_spec of a top-level package locates it without running it.
    spec = importlib.util.find_spec("paddle")
    if spec is not None and spec.submodule_search_locations:
        candidates.insert(0, Path(next(iter(spec.submodule_search_locations))))
    for root in candidates:
        version_file = root / "version" / "__init__.py"
        if version_file.is_file() and (root / "include" / "paddle" / "phi").is_dir():
            text = version_file.read_text(encoding="utf-8")
            has_cuda = _assigned(text, "cuda_version") not in ("False", "unknown")
            version, commit = _assigned(text, "full_version"), _assigned(text, "commit")
            return PaddlePackage(root, version, commit, has_cuda)
    raise BuildError(
        f"Paddle is not installed for this Python ({sys.executable}); run the Python that has it, "
        f"or: {sys.executable} -m pip install paddlepaddle=={required_paddle_version()}"
    )


def _assigned(text: str, name: str) -> str:
    match = re.search(rf"^{name}\s*=\s*['\"](.*?)['\"]", text, re.MULTILINE)
    return match.group(1) if match else "unknown"


def required_paddle_version() -> str:
    """Returns the Paddle version that pyproject.toml pins."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    match = re.search(r"\"paddlepaddle==([^\"]+)\"", text)
    if match is None:
        raise BuildError("pyproject.toml names no paddlepaddle==VERSION")
    return match.group(1)


def find_compiler() -> str:
    """Returns the C++ compiler's path: $CXX, else g++, c++ or clang++ on PATH."""
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    for name in wanted:
        path = shutil.which(name)
        if path is not None:
            return path
    raise BuildError(
        f"no C++ compiler found (looked for {', '.join(wanted)}); install one "
        "(Debian and Ubuntu: apt-get install g++) or name it in the environment variable CXX"
    )


def find_ninja() -> str:
    """Returns the path of ninja: the PyPI package's for this Python, else the one on PATH."""
    if importlib.util.find_spec("ninja") is not None:
        import ninja

        path = shutil.which("ninja", path=str(ninja.BIN_DIR))
        if path is not None:
            return path
    path = shutil.which("ninja")
    if path is None:
        raise BuildError(
            f"ninja is not installed for this Python ({sys.executable}) and not on PATH; run the "
            f"Python that has it, or: {sys.executable} -m pip install ninja"
        )
    return path


def find_nvcc() -> str:
    """Returns nvcc's path: under $CUDA_HOME or $CUDA_PATH, on PATH, or in /usr/local/cuda."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    search = [f"{home}/bin" for home in homes]
    search += [os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"]
    path = shutil.which("nvcc", path=os.pathsep.join(search))
    if path is None:
        raise BuildError(
            "nvcc was not found ($CUDA_HOME/bin, PATH, /usr/local/cuda/bin): install the CUDA "
            "toolkit or set CUDA_HOME. The CPU library needs no nvcc: python csrc/setup_cpu.py "
            "install"
        )
    return path


def find_cuda_toolkit() -> CudaToolkit:
    """Returns the CUDA toolkit that find_nvcc's compiler belongs to, or BuildError."""
    nvcc = find_nvcc()
    process = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    version = re.search(r"release ([\d.]+)", process.stdout)
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    homes += [str(Path(nvcc).resolve().parent.parent), "/usr/local/cuda"]
    for home in homes:
        for libraries in ("lib64", "lib"):
            include, folder = Path(home, "include"), Path(home, libraries)
            has_headers = (include / "cuda_runtime_api.h").is_file()
            if has_headers and (folder / "libcudart_static.a").is_file():
                return CudaToolkit(
                    nvcc, include, folder, version.group(1) if version else "unknown"
                )
    raise BuildError(
        f"{nvcc} was found, but not the runtime's headers and libcudart_static.a beside it (looked "
        f"in {', '.join(homes)}); set CUDA_HOME to the toolkit's folder"
    )


def find_blas_headers() -> Path | None:
    """Returns the folder of the PyPI package nvidia-cublas's headers; None: the toolkit's serve.

    The operators load the library itself when they need it (csrc/cuda/gemm/large/gemm_blas.cu).
    """
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for header in sorted(Path(root).glob("*/include/cublasLt.h"), reverse=True):
            return header.parent
    return None


def num_jobs() -> int:
    """Returns how many compilers to run at once: $MAX_JOBS, else the cores this process may use."""
    text = os.environ.get("MAX_JOBS", "")
    if not text:
        return len(os.sched_getaffinity(0))
    if not text.isdigit() or int(text) < 1:
        raise BuildError(f"MAX_JOBS={text} is not a positive number")
    return int(text)


def kernel_sources() -> list[Path]:
    """Returns every source of the CPU's kernels and of what knows no Paddle above them, sorted."""
    folders = ("cpu", "runtime", "blocks")
    return sorted(path for name in folders for path in (CSRC / name).rglob("*.cc"))


def cpu_sources() -> list[Path]:
    """Returns every source of the CPU library."""
    return [*kernel_sources(), *registration_sources()]


def cuda_sources() -> list[Path]:
    """Returns every CUDA source but ABSENT_NAME, sorted; empty in a release without them."""
    found = [path for name in ("cuda", "blocks") for path in (CSRC / name).rglob("*.cu")]
    return sorted(path for path in found if path.name != ABSENT_NAME)


def registration_sources() -> list[Path]:
    """Returns every registration, sorted."""
    return sorted((CSRC / "paddle").glob("*.cc"))


def device_sources() -> list[Path]:
    """Returns every source of Paddle's plugin, sorted."""
    return sorted((CSRC / "device").glob("*.cc"))


def paddle_kernel_sources(paddle: PaddlePackage) -> list[Path]:
    """Returns the sources of what this Paddle lacks on the plugin's device, sorted.

    A GPU build of Paddle has its own kernels.
    """
    folder = CSRC / "device" / "kernels"
    return [] if paddle.has_cuda else sorted([*folder.glob("*.cc"), *folder.glob("*.cu")])


def escaped(value: str | Path) -> str:
    """Returns a path or flag as ninja wants it spelled."""
    return str(value).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def object_path(source: Path) -> str:
    """Returns where a build's folder has the object of a source."""
    return f"obj/{source.relative_to(CSRC).with_suffix('.o')}"


def sanitizer_flags(sanitizers: Sequence[str]) -> tuple[str, ...]:
    """Returns the compiler's flags for rows of SANITIZERS; () for none.

    Raises BuildError for an unknown one, and for thread beside another.
    """
    for name in sanitizers:
        if name not in SANITIZERS:
            raise BuildError(f"--sanitize {name} is not known (allowed: {', '.join(SANITIZERS)})")
    if "thread" in sanitizers and len(set(sanitizers)) > 1:
        raise BuildError("--sanitize thread goes with no other sanitizer; give it alone")
    own = [flag for name in sanitizers for flag in SANITIZERS[name][0]]
    return (*SANITIZER_FLAGS, *own) if own else ()


def sanitizer_environment(
    compiler: str, paddle: PaddlePackage, sanitizers: Sequence[str]
) -> dict[str, str]:
    """Returns what a process needs in its environment to load a library of that build.

    The runtimes come first in the process: they stand in for malloc, memcpy and dlopen. Through
    theirs Paddle's run path is lost, so its folder is named. Raises BuildError where the compiler
    lacks a runtime. What is not ours is left out: neither Python nor Paddle frees all at exit, and
    Paddle's AttributeManager deletes there what it made with new[]; ThreadSanitizer takes the
    threads of Paddle and OpenBLAS, which it cannot see into, for races, so that its reports do not
    make the process fail: those count whose two accesses are of libregatta_cpu.so.
    """
    if not sanitizers:
        return {}
    runtimes = []
    for name in sanitizers:
        query = [compiler, f"-print-file-name={SANITIZERS[name][1]}"]
        found = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        if not Path(found).is_absolute() or not Path(found).is_file():
            raise BuildError(
                f"{compiler} has no {SANITIZERS[name][1]}, which --sanitize {name} needs; install "
                "it (Debian and Ubuntu: it comes with g++)"
            )
        runtimes.append(found)
    return {
        "LD_PRELOAD": ":".join(runtimes),
        "LD_LIBRARY_PATH": str(paddle.root / "libs"),
        "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "exitcode=0",
        "OPENBLAS_NUM_THREADS": "1",
    }


def sanitized_pytest(sanitizers: Sequence[str]) -> list[str]:
    """Returns the command, less the tests, that runs pytest with a library of that build.

    It runs a part of the tests' combinations: tests/support/sanitized.py. ThreadSanitizer needs
    memory where address randomisation may have put something else, and its runtime must stay out of
    the shell commands that Paddle runs when it is imported: they fail.
    """
    plugin = ["-p", "tests.support.sanitized"]
    if "thread" not in sanitizers:
        return [sys.executable, "-m", "pytest", *plugin]
    program = "import os, sys, pytest; del os.environ['LD_PRELOAD']; "
    program += "sys.exit(pytest.main(sys.argv[1:]))"
    return ["setarch", "-R", sys.executable, "-c", program, *plugin]


def sanitized_usage(library: Path, sanitizers: Sequence[str]) -> str:
    """Returns how to run the operators' tests with a library of that build, for the terminal."""
    environment = sanitizer_environment(find_compiler(), find_paddle(), sanitizers)
    values = {**environment, "REGATTA_LIBRARY": str(library.relative_to(ROOT))}
    words = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    command = f"{shlex.join(sanitized_pytest(sanitizers))} {SANITIZED_TESTS}"
    return " \\\n    ".join(["to run the tests of the operators with it: env", *words, command])


def _stable_paddle(paddle: PaddlePackage) -> PaddlePackage:
    """Returns `paddle` under a path that is the same wherever it is installed: a link in BUILD_DIR.

    pip may build with a Paddle in a folder of its own that is gone afterwards. The path is part of
    the compiler's command, and ninja compiles anew what a new command would make.
    """
    kind = "-cuda" if paddle.has_cuda else ""
    link = BUILD_DIR / f"paddle-{paddle.version}-{paddle.commit[:10]}{kind}"
    BUILD_DIR.mkdir(parents=True, exist_ok=True)
    staged = link.with_name(f"{link.name}.{os.getpid()}")
    staged.unlink(missing_ok=True)
    staged.symlink_to(paddle.root.resolve())
    os.replace(staged, link)
    return replace(paddle, root=link)


def compile_rule(name: str, command: str) -> list[str]:
    """Returns the lines of a build.ninja for a rule that compiles; its statements set `flags`."""
    return [
        f"rule {name}",
        f"  command = {command} $flags -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $name",
    ]


def link_rule(name: str, command: str) -> list[str]:
    """Returns the lines of a build.ninja for a rule that links."""
    return [f"rule {name}", f"  command = {command} -o $out", "  description = link $out"]


def object_lines(source: Path, flags: str, needs: str = "") -> list[str]:
    """Returns the lines of a build.ninja for a source's object; needs: what is made before it."""
    rule = "cuda" if source.suffix == ".cu" else "compile"
    return [
        f"build {object_path(source)}: {rule} {escaped(source)}{needs}",
        f"  flags = {flags}",
        f"  name = {source.relative_to(CSRC)}",
    ]


def _paddle_headers(paddle: PaddlePackage) -> str:
    """Returns the compiler's flags for Paddle's headers; warnings there are not ours to fix."""
    headers = paddle.root / "include"
    return f"-isystem '{headers}' -isystem '{headers / 'third_party'}'"


def _paddle_link(paddle: PaddlePackage) -> str:
    """Returns the linker's flags for Paddle's libraries."""
    base, libs = paddle.root / "base", paddle.root / "libs"
    names = " ".join(f"-l:{name}" for name in PADDLE_LIBRARIES)
    return f"-L'{base}' -L'{libs}' -Wl,-rpath-link,'{libs}' {names}"


def _is_gcc(compiler: str) -> bool:
    """Whether the compiler is GCC by the macros that it defines; Clang defines GCC's too."""
    query = [compiler, "-dM", "-E", "-x", "c++", os.devnull]
    process = subprocess.run(query, capture_output=True, text=True, check=False)
    return "__GNUC__" in process.stdout and "__clang__" not in process.stdout


def registration_lines(compiler: str, flags: str) -> list[str]:
    """Returns the lines of a build.ninja for the registrations' objects.

    GCC precompiles Paddle's headers, half of each registration's time, once for all. A precompiled
    file that was not made, or cannot be read again, is left empty, and the compiler takes the text.
    """
    once = f"{flags} -x c++-header $in"
    again = f"{flags} -include $in -Winvalid-pch -Werror -fsyntax-only -x c++ {os.devnull}"
    made = f"{PADDLE_HEADER}.gch"
    lines, needs = [], ""
    sources = registration_sources()
    if len(sources) >= WORTH_PRECOMPILING and _is_gcc(compiler):
        needs = f" | {made}"
        lines = [
            "rule precompile",
            f"  command = ('{compiler}' {once} -o $out && '{compiler}' {again}) 2>$out.log || : "
            ">$out",
            "  description = precompile Paddle's headers",
            f"build {made}: precompile {PADDLE_HEADER}",
        ]
    for source in sources:
        lines += object_lines(source, f"{flags} -include {PADDLE_HEADER}", needs)
    return lines


def cpu_ninja_file(paddle: PaddlePackage, compiler: str, extra_flags: str = "") -> str:
    """Returns the text of the build.ninja that makes the CPU library.

    Only csrc/paddle/ sees Paddle's headers: a kernel that includes them does not compile.
    """
    flags = [*CXX_FLAGS, extra_flags, *OWN_HEADERS]
    registration_flags = [*CXX_FLAGS, "-O2", extra_flags, *OWN_HEADERS, _paddle_headers(paddle)]
    link = [f"'{compiler}'", *LINK_FLAGS, extra_flags, f"-Wl,-soname,{LIBRARY_NAME}", "$in"]
    lines = [
        "ninja_required_version = 1.5",
        *compile_rule("compile", f"'{compiler}'"),
        *link_rule("link", " ".join([*link, _paddle_link(paddle)])),
    ]
    for source in kernel_sources():
        lines += object_lines(source, " ".join(flags))
    lines += registration_lines(compiler, " ".join(registration_flags))  # short: a better end
    objects = " ".join(object_path(source) for source in cpu_sources())
    lines += [f"build {LIBRARY_NAME}: link {objects}", f"default {LIBRARY_NAME}", ""]
    return "\n".join(lines)


def cuda_architectures(listed: Sequence[str], requested: Sequence[str] = ()) -> tuple[str, ...]:
    """Returns the architectures to compile for.

    `listed`: what `nvcc --list-gpu-arch` prints ("compute_90", ...). `requested`: the user's choice
    ("90a", "80"); empty for every row of CUDA_ARCHITECTURES that is listed. Raises BuildError for
    one that this compiler does not know or that the kernels do not run on.
    """
    known = {name.removeprefix("compute_") for name in listed}
    if not requested:
        return tuple(arch for arch in CUDA_ARCHITECTURES if arch.rstrip("a") in known)
    for arch in requested:
        if arch.rstrip("a") not in known:
            raise BuildError(
                f"--arch {arch} is not known to this nvcc (it knows: "
                f"{', '.join(sorted(known, key=int))})"
            )
        if int(arch.rstrip("a")) < int(CUDA_ARCHITECTURES[0]):
            raise BuildError(
                f"--arch {arch}: the kernels run on {CUDA_ARCHITECTURES[0]} and newer; leave it out"
            )
        if f"{arch}a" in CUDA_ARCHITECTURES:
            raise BuildError(
                f"--arch {arch} leaves out the instructions of that one generation, which kernels "
                f"for it use; set --arch {arch}a"
            )
    return tuple(dict.fromkeys(requested))


def oldest_architecture(source: Path) -> str:
    """Returns NN of op_smNN.cu; "" of op.cu."""
    match = re.search(r"_sm(\d+)$", source.stem)
    return match.group(1) if match else ""


def source_architectures(source: Path, architectures: Sequence[str]) -> tuple[str, ...]:
    """Returns those of `architectures` that `source` is for, by its name.

    op.cu: all. op_sm80.cu: 80 and newer. op_sm90.cu: 90a alone, since the instructions of an "a"
    architecture are no other's. A source that is for none of them is left out: the tables of
    candidates name its functions, and ABSENT_NAME defines them as refusals.
    """
    oldest = oldest_architecture(source)
    if not oldest:
        return tuple(architectures)
    if f"{oldest}a" in CUDA_ARCHITECTURES:
        return tuple(arch for arch in architectures if arch.rstrip("a") == oldest)
    return tuple(arch for arch in architectures if int(arch.rstrip("a")) >= int(oldest))


def cuda_targets(architectures: Sequence[str]) -> dict[Path, str]:
    """Returns the CUDA sources that a build for `architectures` compiles, each with nvcc's flags.

    Where some are left out, ABSENT_NAME is one of them.
    """
    targets, absent = {}, set()
    for source in cuda_sources():
        own = source_architectures(source, architectures)
        if own:
            targets[source] = target_flags(own)
        else:
            absent.add(oldest_architecture(source))
    if absent:
        macros = [f"-DREGATTA_WITHOUT_SM{oldest}" for oldest in sorted(absent, key=int)]
        flags = [target_flags(architectures[:1]), *macros]
        targets[CSRC / "cuda" / ABSENT_NAME] = " ".join(flags)
    return targets


def target_flags(architectures: Sequence[str]) -> str:
    """Returns nvcc's flags for machine code of `architectures`."""
    return " ".join(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in architectures)


def present_architectures() -> tuple[str, ...]:
    """Returns the architectures of this machine's GPUs ("90a"), by nvidia-smi; () without any."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        process = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    if process.returncode != 0:
        return ()
    found = {line.strip().replace(".", "") for line in process.stdout.splitlines() if line.strip()}
    names = [f"{name}a" if f"{name}a" in CUDA_ARCHITECTURES else name for name in found]
    return tuple(sorted(names, key=lambda name: int(name.rstrip("a"))))


def cuda_wanted() -> bool:
    """Whether `pip install` builds for CUDA: REGATTA_CUDA=1 or 0; else where nvcc and a GPU are."""
    setting = os.environ.get("REGATTA_CUDA", "")
    if setting not in ("", "0", "1"):
        raise BuildError(f"REGATTA_CUDA={setting} is not known (allowed: 0, 1)")
    if setting:
        return setting == "1"
    try:
        find_nvcc()
    except BuildError:
        return False
    return bool(present_architectures())


def _listed_architectures(nvcc: str) -> list[str]:
    process = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=False)
    if process.returncode != 0:
        raise BuildError(f"{nvcc} --list-gpu-arch failed: {process.stderr.strip()}")
    return process.stdout.split()


def chosen_architectures(nvcc: str, requested: Sequence[str] = ()) -> tuple[str, ...]:
    """Returns the architectures to compile for.

    `requested`: as --arch names them; ("all",) for all that nvcc knows; () for this machine's GPUs,
    or where there are none for all.
    """
    listed = _listed_architectures(nvcc)
    if tuple(requested) == ("all",):
        return cuda_architectures(listed)
    return cuda_architectures(listed, requested or present_architectures())


def cuda_rule(toolkit: CudaToolkit) -> list[str]:
    """Returns the first lines of a build.ninja: how a CUDA source is compiled."""
    blas = find_blas_headers()
    headers = [*OWN_HEADERS, f"-isystem '{blas}'"] if blas is not None else OWN_HEADERS
    command = " ".join([f"'{toolkit.nvcc}'", *CUDA_FLAGS, *headers])
    return ["ninja_required_version = 1.5", *compile_rule("cuda", command)]


def cuda_ninja_file(
    toolkit: CudaToolkit,
    architectures: Sequence[str],
    paddle: PaddlePackage,
    compiler: str,
    extra_flags: str = "",
) -> str:
    """Returns the text of the build.ninja that makes the CUDA library and the plugin.

    The CPU kernels are taken from the CPU library's build.
    """
    from predict.device.devices import CUDA_LIBRARY_NAME, KERNELS_NAME, PLUGIN_NAME

    own = [*OWN_HEADERS, _paddle_headers(paddle), f"-isystem '{toolkit.include}'"]
    if (toolkit.include / "cccl").is_dir():  # CUDA 13 keeps thrust here, which Paddle includes
        own.append(f"-isystem '{toolkit.include / 'cccl'}'")
    own.append("-DPADDLE_WITH_CUDA" if paddle.has_cuda else "-DPADDLE_WITH_CUSTOM_DEVICE")
    cxx_flags = " ".join([*CXX_FLAGS, "-O2", extra_flags, *own, "-DREGATTA_WITH_CUDA"])
    # Hidden: Paddle's own CUDA runtime, where it has one, must not be mistaken for this one.
    runtime = f"-L'{toolkit.libraries}' -Wl,--exclude-libs,ALL {' '.join(CUDA_LIBRARIES)}"
    link = f"'{compiler}' {' '.join(LINK_FLAGS)}"
    paddle_link = _paddle_link(paddle)
    lines = [
        *cuda_rule(toolkit),
        *compile_rule("compile", f"'{compiler}'"),
        *link_rule("link_operators", f"{link} -Wl,-soname,$out $in {paddle_link} {runtime}"),
        # nodelete: Paddle unloads the plugin at exit, when tensors and threads may still need it.
        *link_rule(
            "link_plugin", f"{link} -Wl,-z,nodelete -Wl,-soname,{PLUGIN_NAME} $in {runtime}"
        ),
        *registration_lines(compiler, cxx_flags),
    ]
    kernels = cuda_targets(architectures)
    own_kernels = paddle_kernel_sources(paddle)
    flags = {**kernels, **dict.fromkeys([*device_sources(), *own_kernels], cxx_flags)}
    flags |= {path: target_flags(architectures) for path in own_kernels if path.suffix == ".cu"}
    for source, own_flags in flags.items():
        lines += object_lines(source, own_flags)

    def objects(sources: Iterable[Path], folder: str = "") -> str:
        return " ".join(f"{folder}{object_path(source)}" for source in sources)

    operators = objects([*registration_sources(), *kernels])
    operators += f" {objects(kernel_sources(), escaped(BUILD_DIR / 'cpu') + '/')}"
    lines += [
        f"build {CUDA_LIBRARY_NAME}: link_operators {operators}",
        f"build {PLUGIN_NAME}: link_plugin {objects(device_sources())}",
        f"default {CUDA_LIBRARY_NAME} {PLUGIN_NAME}",
    ]
    if own_kernels:
        lines += [
            f"build {KERNELS_NAME}: link_operators {objects(own_kernels)}",
            f"default {KERNELS_NAME}",
        ]
    return "\n".join([*lines, ""])


def build_cuda_library(
    requested: Sequence[str] = (),
    jobs: int | None = None,
    extra_paths: Sequence[str] = (),
    progress: Progress | None = None,
) -> BuildResult:
    """Builds predict/lib/libregatta_cuda.so, its metadata, and the plugin in predict/lib/plugin/.

    build_cpu_library must have run: its kernels are part of this library. `requested` as in
    chosen_architectures; the rest as in build_cpu_library.
    Raises BuildError and leaves predict/lib/ as it was.
    """
    from predict.device.devices import (
        CUDA_LIBRARY_NAME,
        KERNELS_NAME,
        PLUGIN_FOLDER,
        PLUGIN_NAME,
        cuda_source_digest,
    )

    started = time.monotonic()
    toolkit = find_cuda_toolkit()
    architectures = chosen_architectures(toolkit.nvcc, requested)
    compiler, paddle = find_compiler(), find_paddle(extra_paths)
    flags = os.environ.get("CXXFLAGS", "")
    text = cuda_ninja_file(toolkit, architectures, _stable_paddle(paddle), compiler, flags)
    num_sources = len([*registration_sources(), *cuda_targets(architectures), *device_sources()])
    num_sources += len(paddle_kernel_sources(paddle))
    folder = BUILD_DIR / "cuda"
    with locked(folder):
        digest, cuda_digest = source_digest(CSRC), cuda_source_digest(CSRC)
        num_compiled = run_ninja(folder, text, jobs or num_jobs(), progress)
        _check_loads(folder / CUDA_LIBRARY_NAME, paddle)
        parts = {f"{PLUGIN_FOLDER.name}/{PLUGIN_NAME}": folder / PLUGIN_NAME}
        if not paddle.has_cuda:
            parts[KERNELS_NAME] = folder / KERNELS_NAME
        metadata = Metadata(
            abi=read_abi(CSRC / "include" / "regatta" / "abi.h"),
            paddle_version=paddle.version,
            paddle_commit=paddle.commit,
            compiler=f"nvcc {toolkit.version}, {_compiler_version(compiler)}",
            sources_digest=digest,
            file=describe(folder / CUDA_LIBRARY_NAME),
            flags=" ".join([*CXX_FLAGS, flags, *CUDA_FLAGS]),
            cuda_sources_digest=cuda_digest,
            cuda_version=toolkit.version,
            architectures=tuple(architectures),
            parts={name: describe(path) for name, path in parts.items()},
        )
        for name, path in parts.items():
            (LIBRARY_DIR / name).parent.mkdir(parents=True, exist_ok=True)
            _replace(path, LIBRARY_DIR / name)
        target = _publish(folder / CUDA_LIBRARY_NAME, metadata, LIBRARY_DIR)
    return BuildResult(
        target,
        num_compiled,
        num_sources,
        time.monotonic() - started,
        f"nvcc {toolkit.version} (sm_{', sm_'.join(architectures)})",
        paddle.version,
        architectures,
    )


def run_ninja(
    folder: Path,
    text: str,
    jobs: int,
    progress: Progress | None = None,
    name: str = "build.ninja",
) -> int:
    """Runs ninja over `text` in `folder`; returns the number of objects compiled by this run.

    name: of the file that holds `text`. Where several of a folder have the same command for an
    object, it is compiled once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path, wanted in ((folder / name, text), (folder / PADDLE_HEADER, PADDLE_INCLUDES)):
        if not path.is_file() or path.read_text(encoding="utf-8") != wanted:
            path.write_text(wanted, encoding="utf-8")
    started = time.time_ns()
    command = [find_ninja(), "-C", str(folder), "-f", name, "-j", str(jobs)]
    first_error = ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            step = re.match(r"\[(\d+)/(\d+)\]", line)
            if step and progress is not None:
                progress(int(step[1]), int(step[2]))
            if not first_error and re.search(
                r"error:|undefined reference|multiple definition", line
            ):
                first_error = line.strip()
    if process.returncode != 0:
        raise BuildError(f"the compiler failed: {first_error or 'its messages are above'}")
    return sum(path.stat().st_mtime_ns >= started for path in folder.glob("obj/**/*.o"))


def _compiler_version(compiler: str) -> str:
    process = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    first = process.stdout.splitlines()[0] if process.stdout else Path(compiler).name
    # "g++ (Debian 12.2.0-14) 12.2.0" -> "g++ 12.2.0"
    return re.sub(r"\s*\(.*\)", "", first).strip()


def _check_loads(
    library: Path, paddle: PaddlePackage, environment: Mapping[str, str] | None = None
) -> None:
    """Raises BuildError unless a fresh process can load `library` and ask for its ABI number.

    environment: variables for that process beside this one's.
    The process has Paddle's libraries but does not import Paddle: half a second, no dependencies.
    """
    program = (
        "import ctypes, json, os, sys\n"
        "library = ctypes.CDLL(sys.argv[1], mode=os.RTLD_NOW | os.RTLD_LOCAL)\n"
        "library.regatta_cpu_info.restype = ctypes.c_char_p\n"
        "assert json.loads(library.regatta_cpu_info())['abi'] == int(sys.argv[2])\n"
    )
    folders = [str(paddle.root / "base"), str(paddle.root / "libs")]
    own = {**(environment or {}), "LD_LIBRARY_PATH": os.pathsep.join(folders)}
    abi = read_abi(CSRC / "include" / "regatta" / "abi.h")
    process = subprocess.run(
        [sys.executable, "-c", program, str(library), str(abi)],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode != 0:
        last = (process.stderr.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
        raise BuildError(f"the library was built but does not load: {last}")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds `folder` for one build at a time; a second process waits."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _replace(built: Path, target: Path) -> None:
    """Copies `built` over `target` by a rename: a process that has the old one mapped keeps it."""
    staged = target.with_name(target.name + ".new")
    shutil.copyfile(built, staged)
    os.replace(staged, target)


def _publish(library: Path, metadata: Metadata, folder: Path) -> Path:
    """Puts `library` and its metadata into `folder`; returns the library's new path."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / library.name
    described = target.with_suffix(".json.new")
    described.write_text(metadata.to_json(), encoding="utf-8")
    _replace(library, target)
    os.replace(described, target.with_suffix(".json"))
    return target


def remove_library() -> None:
    """Removes the library and its metadata from predict/lib/, if they are there."""
    for name in (LIBRARY_NAME, METADATA_NAME):
        (LIBRARY_DIR / name).unlink(missing_ok=True)


def remove_cuda_library() -> None:
    """Removes the CUDA library, its metadata and the plugin from predict/lib/, if there."""
    from predict.device.devices import CUDA_LIBRARY_NAME, KERNELS_NAME, PLUGIN_FOLDER

    library = LIBRARY_DIR / CUDA_LIBRARY_NAME
    for path in (library, library.with_suffix(".json"), LIBRARY_DIR / KERNELS_NAME):
        path.unlink(missing_ok=True)
    shutil.rmtree(PLUGIN_FOLDER, ignore_errors=True)


def clean() -> None:
    """Removes the libraries and every object file."""
    remove_library()
    remove_cuda_library()
    for folder in (BUILD_DIR, *LIBRARY_DIR.glob(f"{SANITIZED_PREFIX}*")):
        shutil.rmtree(folder, ignore_errors=True)


def build_cpu_library(
    jobs: int | None = None,
    extra_paths: Sequence[str] = (),
    sanitizers: Sequence[str] = (),
    progress: Progress | None = None,
) -> BuildResult:
    """Builds predict/lib/libregatta_cpu.so and its metadata file.

    `jobs` compilers at once (default: num_jobs()); `extra_paths` are more folders to look for
    Paddle in. `sanitizers`: rows of SANITIZERS; such a library goes into a folder of its own below
    predict/lib/. `progress` hears of every step. The environment variables CXX and CXXFLAGS are
    honoured. Raises BuildError and leaves predict/lib/ as it was.
    """
    if sys.platform != "linux":
        raise BuildError(f"the operator library is built on Linux only, and this is {sys.platform}")
    if platform.machine() not in MACHINES:
        raise BuildError(
            f"the kernels are written for {' and '.join(MACHINES)}, and this machine is "
            f"{platform.machine()}; install with REGATTA_SKIP_BUILD=1 to run the plain operators"
        )
    sources = cpu_sources()
    if not sources:
        raise BuildError(f"no sources in {CSRC / 'cpu'} and {CSRC / 'paddle'}: incomplete checkout")
    started = time.monotonic()
    compiler = find_compiler()
    paddle = find_paddle(extra_paths)
    flags = " ".join([os.environ.get("CXXFLAGS", ""), *sanitizer_flags(sanitizers)]).strip()
    environment = sanitizer_environment(compiler, paddle, sanitizers)
    text = cpu_ninja_file(_stable_paddle(paddle), compiler, flags)
    folder = BUILD_DIR / "-".join(["cpu", *sanitizers])
    own = f"{SANITIZED_PREFIX}{'-'.join(sanitizers)}" if sanitizers else ""
    with locked(folder):
        # Taken first: a source that is edited during the build makes the library look old, not new.
        digest = source_digest(CSRC)
        num_compiled = run_ninja(folder, text, jobs or num_jobs(), progress)
        _check_loads(folder / LIBRARY_NAME, paddle, environment)
        version = _compiler_version(compiler)
        metadata = Metadata(
            abi=read_abi(CSRC / "include" / "regatta" / "abi.h"),
            paddle_version=paddle.version,
            paddle_commit=paddle.commit,
            compiler=version,
            sources_digest=digest,
            file=describe(folder / LIBRARY_NAME),
            flags=" ".join([*CXX_FLAGS, flags]).strip(),
            sanitizer=",".join(sanitizers),
        )
        target = _publish(folder / LIBRARY_NAME, metadata, LIBRARY_DIR / own)
    return BuildResult(
        target,
        num_compiled,
        len(sources),
        time.monotonic() - started,
        version,
        paddle.version,
    )
