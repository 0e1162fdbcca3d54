"""Chooses where the model runs, and says why: the CPU, a GPU, or what else Paddle has registered.

PyPI has Paddle for GPUs only in versions too old for today's chips, so `--device gpu` has two ways:
the native one where `paddlepaddle-gpu` is installed, and else the CPU wheel with csrc/device, which
makes NVIDIA GPUs a custom device ("nvgpu") of it. Any other name is that of a device type which
Paddle must know when it is imported: its own (xpu), or a plugin's (npu). `choose` decides from
files and the driver, without importing Paddle; `activate` then makes the choice the process's.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from predict.device import built, library
from predict.errors import UserError, quoted
from predict.system import host

CUDA_LIBRARY_NAME = "libregatta_cuda.so"
PLUGIN_NAME = "libpaddle_custom_nvgpu.so"
KERNELS_NAME = "libregatta_kernels.so"  # what Paddle itself lacks there; the plugin loads it
NCCL_NAME = "libnccl.so.2"
LINKS = ("nothing", "PCIe", "NVLink")  # between two GPUs: Links in csrc/cuda/ranks/select.h
PLUGIN_FOLDER = library.LIBRARY_DIR / "plugin"  # Paddle loads every library in this folder
PLUGIN_TYPE = "nvgpu"  # as csrc/device/plugin.cc registers it
NAME = re.compile(r"([A-Za-z]\w{0,31})(?::([0-9]{1,4}))?", re.ASCII)
SEVERAL = re.compile(r"gpu:[0-9]{1,4}(,[0-9]{1,4})+", re.ASCII)  # of ranks
VIEWS_FLAG = "FLAGS_use_stride_kernel"
# Device types that Paddle may be built for, besides those of plugins: the function that says so.
BUILT_IN = {"xpu": "is_compiled_with_xpu", "dcu": "is_compiled_with_rocm"}
CUDA_ERROR_NAME = "cuda_build_error.txt"  # why the last `pip install` built no CUDA library
OLDEST_CAPABILITY = (7, 5)
# The folders of csrc/ that only the CUDA library and the plugin are made from.
CUDA_SOURCE_FOLDERS = ("include", "cuda", "blocks", "device")
GIB = 1 << 30


@dataclass(frozen=True)
class Device:
    """The device of tensors and operators, and why it was chosen."""

    name: str  # as Paddle spells it: cpu, gpu:0, nvgpu:0, npu:0
    index: int
    reason: str  # one sentence for the doctor

    @property
    def type(self) -> str:
        """The name without the index."""
        return self.name.partition(":")[0]

    @property
    def is_cpu(self) -> bool:
        return self.type == "cpu"

    @property
    def is_gpu(self) -> bool:
        """Whether this is a GPU, which has compiled operators."""
        return self.type == "gpu" or self.is_plugin

    @property
    def is_plugin(self) -> bool:
        """Whether this is a GPU through our plugin."""
        return self.type == PLUGIN_TYPE

    @property
    def flag(self) -> str:
        """The value of --device for it: cpu, gpu:0, npu:0."""
        return f"gpu:{self.index}" if self.is_gpu else self.name

    def place(self) -> Any:
        """Paddle's object for this device; Paddle must have been imported by `activate`."""
        import paddle

        if self.is_cpu:
            return paddle.CPUPlace()
        if self.type == "gpu":
            return paddle.CUDAPlace(self.index)
        if self.type in BUILT_IN:
            return paddle.device.device_to_place(self.name)
        return paddle.CustomPlace(self.type, self.index)


@dataclass(frozen=True)
class Gpu:
    """One GPU, as the driver describes it."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    num_multiprocessors: int

    @property
    def architecture(self) -> str:
        """Its architecture as compilers write it: sm_90."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


@dataclass(frozen=True)
class DriverInfo:
    """The CUDA runtime's report of the machine."""

    cuda: int  # the CUDA version compiled for: 13000 is 13.0
    driver: int  # the newest one that the driver serves, 0 without a driver
    error: str  # why there are no GPUs, or ""
    gpus: tuple[Gpu, ...]
    links: tuple[tuple[int, ...], ...] = ()  # numbers of LINKS: how each GPU reaches each

    def slowest_link(self, gpus: Sequence[int]) -> int:
        """The number in LINKS of the slowest between two of these GPUs."""
        return min((self.links[a][b] for a in gpus for b in gpus if a != b), default=2)


@dataclass(frozen=True)
class MemoryInfo:
    """A GPU's memory in bytes. held, in_use, peak_in_use: of this process's pool."""

    total: int
    free: int  # as the driver sees it: what the pool holds is not free
    held: int
    in_use: int
    peak_in_use: int


@dataclass(frozen=True)
class InstalledPaddle:
    """The Paddle that `import paddle` would find."""

    version: str
    has_cuda: bool


def cuda_source_digest(csrc: Path) -> str:
    """A digest of the names and contents of every CUDA and plugin source."""
    return library.source_digest(csrc, CUDA_SOURCE_FOLDERS)


def build_command(architecture: str = "") -> str:
    """The command that builds the CUDA library and the plugin."""
    command = library.build_command(library.LIBRARY_DIR / CUDA_LIBRARY_NAME)
    return f"{command} --arch {architecture}" if architecture else command


def installed_paddle() -> InstalledPaddle | None:
    """The installed Paddle's version and kind, read from its files; None without one."""
    spec = importlib.util.find_spec("paddle")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        try:
            text = (Path(root) / "version" / "__init__.py").read_text(encoding="utf-8")
        except OSError:
            continue
        values = dict(re.findall(r"^(\w+)\s*=\s*'([^']*)'", text, re.MULTILINE))
        has_cuda = values.get("cuda_version", "False") != "False"
        return InstalledPaddle(values.get("full_version", "unknown"), has_cuda)
    return None


@functools.cache
def device_library() -> ctypes.CDLL:
    """The plugin's library with its C functions declared; UserError when it is not built."""
    path = PLUGIN_FOLDER / PLUGIN_NAME
    if not path.is_file():
        raise UserError(f"{absence_reason()}; build it: {build_command()}")
    verify_parts(PLUGIN_FOLDER.parent / CUDA_LIBRARY_NAME)
    try:
        handle = ctypes.CDLL(str(path))
        pointer, size, number = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
        for name, result, arguments in (
            ("info", ctypes.c_char_p, ()),
            ("error", ctypes.c_char_p, ()),
            ("out_of_memory", ctypes.c_char_p, ()),
            ("memory", number, (number, ctypes.POINTER(size))),
            ("release_cached", size, (number,)),
            ("keep", None, (number, number)),
            ("pin", pointer, (size,)),
            ("unpin", None, (pointer,)),
            ("leave_queued", number, (number,)),
            ("copy", number, (pointer, pointer, size, pointer)),
            ("create_event", pointer, (number,)),
            ("destroy_event", None, (pointer,)),
            ("record", number, (pointer, pointer)),
            ("synchronize_event", number, (pointer,)),
            ("elapsed", ctypes.c_float, (pointer, pointer)),
            ("begin_capture", number, (number, pointer)),
            ("end_capture", pointer, (number, pointer, ctypes.POINTER(size))),
            ("launch_graph", number, (pointer, pointer)),
            ("destroy_graph", None, (pointer,)),
        ):
            function = getattr(handle, f"regatta_device_{name}")
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise UserError(f"{path} does not load: {error}; rebuild it: {build_command()}") from None
    return handle


def verify_parts(path: Path) -> None:
    """Raises LibraryError unless what lies beside CUDA library `path` is what was built with it.

    That is the plugin and Paddle's missing kernels, which Paddle and the plugin load themselves.
    The CUDA library is verified as the CPU's is, when it is loaded.
    """
    parts = library.read_metadata(path).parts
    for name in (f"{PLUGIN_FOLDER.name}/{PLUGIN_NAME}", KERNELS_NAME):
        part = path.parent / name
        try:
            if name in parts:
                built.verify(part, parts[name])
            elif part.exists():
                raise UserError(f"{part} is not of the build that made {path.name}")
        except UserError as error:
            raise library.LibraryError(f"{error}; rebuild it: {build_command()}") from None


def absence_reason() -> str:
    """Why there is no GPU plugin: what the last `pip install` said, or that none was built."""
    return library.absence_reason(PLUGIN_FOLDER / PLUGIN_NAME, CUDA_ERROR_NAME)


def driver_info() -> DriverInfo:
    """The CUDA runtime's report; UserError when the plugin is not built."""
    report = json.loads(device_library().regatta_device_info())
    gpus = tuple(
        Gpu(gpu["name"], tuple(gpu["capability"]), gpu["total_bytes"], gpu["num_multiprocessors"])
        for gpu in report["devices"]
    )
    links = tuple(tuple(gpu["links"]) for gpu in report["devices"])
    return DriverInfo(report["cuda"], report["driver"], report["error"], gpus, links)


def runs_on(architectures: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether machine code for any of `architectures` ("80", "90a") runs on a GPU.

    Code runs on later minor versions of its major one, that of an "a" architecture on no other.
    """
    major, minor = capability
    for name in architectures:
        oldest = divmod(int(name.rstrip("a")), 10)
        if oldest == capability:
            return True
        if not name.endswith("a") and oldest[0] == major and oldest[1] <= minor:
            return True
    return False


def check_gpu(info: DriverInfo, index: int, architectures: Sequence[str]) -> None:
    """Raises UserError unless GPU `index` is there and code for `architectures` runs on it."""
    if not info.gpus:
        if info.driver == 0:
            cause = "no NVIDIA driver was found; install it"
        elif info.driver < info.cuda:
            cause = (
                f"the NVIDIA driver serves CUDA {_version(info.driver)} and the library was built "
                f"with CUDA {_version(info.cuda)}; update the driver, or rebuild with an older "
                f"toolkit: {build_command()}"
            )
        else:
            cause = f"the NVIDIA driver shows no GPU ({info.error}); see CUDA_VISIBLE_DEVICES"
        raise UserError(f"device gpu: {cause}, or run with --device cpu")
    if index >= len(info.gpus):
        raise UserError(
            f"device gpu:{index} does not exist (allowed: gpu:0 to gpu:{len(info.gpus) - 1})"
        )
    gpu = info.gpus[index]
    if gpu.capability < OLDEST_CAPABILITY:
        raise UserError(
            f"GPU {index} ({gpu.name}) is {gpu.architecture} and the operators need sm_75 or "
            "newer; run with --device cpu"
        )
    if not runs_on(architectures, gpu.capability):
        built = ", ".join(f"sm_{name}" for name in architectures)
        own = gpu.architecture.removeprefix("sm_")
        raise UserError(
            f"GPU {index} ({gpu.name}) is {gpu.architecture} and {CUDA_LIBRARY_NAME} was built for "
            f"{built or 'none'}; rebuild it: {build_command('90a' if own == '90' else own)}"
        )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def built_architectures() -> tuple[str, ...]:
    """The architectures of the CUDA library's machine code; UserError when it is not built."""
    return library.read_metadata(library.LIBRARY_DIR / CUDA_LIBRARY_NAME).architectures


def kind_of(name: str) -> str:
    """The device type in a name that `choose` takes: cpu, gpu, or another.

    Raises UserError for what is no such name, or cpu or gpu misspelt. Whether Paddle has another
    type is seen by `activate`.
    """
    if SEVERAL.fullmatch(name):
        return "gpu"
    match = NAME.fullmatch(name)
    meant = _misspelt(match[1], ("cpu", "gpu")) if match else ""
    if match is None or meant or (match[1] in ("cpu", PLUGIN_TYPE) and name != "cpu"):
        raise UserError(
            f"device {quoted(name)} is not known (allowed: cpu, gpu, gpu:N, and other types that "
            f"Paddle has registered, such as npu or npu:N){meant}"
        )
    return match[1]


def indices_of(name: str) -> list[int]:
    """The GPUs that a name of kind gpu names; none of `gpu` itself."""
    return [int(index) for index in name.partition(":")[2].split(",") if index]


def _misspelt(name: str, known: Sequence[str]) -> str:
    """The end of a sentence that asks for the name that was meant; empty where it is none.

    Types are short and alike: npu is no gpu misspelt.
    """
    guesses = get_close_matches(name, known, n=1, cutoff=0.75)
    return f"; did you mean {guesses[0]}?" if guesses and guesses[0] != name else ""


def check_static(name: str) -> None:
    """Raises UserError for a device on which exported programs do not run.

    There a program's kernels that the device lacks are the CPU's, and Paddle 3.3.1 gives them the
    device's memory as it is: the process dies.
    """
    if kind_of(name) not in ("cpu", "gpu"):
        raise UserError(
            f"device {name} runs checkpoints, and no exported programs (those: cpu, gpu); use "
            "--mode dynamic with the checkpoint itself"
        )


def choose(name: str) -> Device:
    """The device that `name` (cpu, gpu, gpu:N, another type) stands for on this machine.

    Imports no Paddle. Raises UserError that says what is missing and what to do.
    """
    kind = kind_of(name)
    if kind == "cpu":
        return Device("cpu", 0, "--device cpu")
    if SEVERAL.fullmatch(name):
        raise UserError(
            f"device {name} names several GPUs, and one process takes one; give "
            f"--tensor_parallel_degree {len(indices_of(name))} too, or --device gpu:N"
        )
    index = int(name.partition(":")[2] or 0)
    if kind != "gpu":
        return Device(f"{kind}:{index}", index, f"--device {name}: Paddle's own, or a plugin's")
    paddle = installed_paddle()
    if paddle is None:
        raise UserError("Paddle is not installed; run: pip install -e .")
    if (PLUGIN_FOLDER / PLUGIN_NAME).is_file():
        check_gpu(driver_info(), index, built_architectures())
    elif not paddle.has_cuda:
        raise UserError(
            f"device gpu: the installed Paddle {paddle.version} is the CPU build, and the plugin "
            f"that gives it GPUs is not there ({absence_reason()}); build it: {build_command()} "
            "(it needs nvcc), install paddlepaddle-gpu instead, or run with --device cpu"
        )
    if paddle.has_cuda:
        return Device(
            f"gpu:{index}",
            index,
            f"Paddle's own GPU support: the installed Paddle {paddle.version} is a GPU build, so "
            "the plugin is not needed",
        )
    return Device(
        f"{PLUGIN_TYPE}:{index}",
        index,
        f"the GPU plugin: the installed Paddle {paddle.version} is the CPU build, which has no GPU "
        "support of its own (paddlepaddle-gpu would have)",
    )


def default_name() -> tuple[str, str]:
    """The device where none was asked for: gpu where one can be used, else cpu.

    Imports no Paddle. Returns its name, and for cpu a line for the user that says why.
    """
    try:
        choose("gpu")
    except UserError as error:
        return "cpu", on_cpu(str(error) if is_gpu_present() else "there is no NVIDIA GPU here")
    return "gpu", ""


def on_cpu(why: str) -> str:
    """The line for a user who gave no --device and gets the CPU."""
    said = "" if "--device cpu" in why else "; --device cpu says so without this line"
    return f"--device was not given; running on cpu: {why}{said}"


def is_gpu_present() -> bool:
    """Whether the system has an NVIDIA GPU with a driver, usable or not."""
    return Path("/proc/driver/nvidia/version").is_file() or any(Path("/dev").glob("nvidia[0-9]*"))


def set_environment(device: Device) -> None:
    """Sets what Paddle and the library read when they are first used; nothing for the CPU.

    CUSTOM_DEVICE_ROOT is the folder in which Paddle looks for plugins when it is imported, and
    REGATTA_LIBRARY the library with the CUDA operators. Raises UserError when the former is taken.
    """
    if device.is_cpu:
        return
    if not device.is_gpu:
        os.environ.setdefault("GLOG_minloglevel", "2")  # as below
        return
    os.environ.setdefault("REGATTA_LIBRARY", str(library.LIBRARY_DIR / CUDA_LIBRARY_NAME))
    folder = blas_folder()
    if folder is not None:
        os.environ.setdefault("REGATTA_CUBLASLT", str(folder))
    if not device.is_plugin or "paddle" in sys.modules:
        return
    other = os.environ.get("CUSTOM_DEVICE_ROOT", "")
    if other and Path(other).resolve() != PLUGIN_FOLDER:
        raise UserError(
            f"CUSTOM_DEVICE_ROOT={other} is set, and Paddle looks for plugins in one folder only; "
            f"unset it, or link the plugins there into {PLUGIN_FOLDER} and name that"
        )
    os.environ["CUSTOM_DEVICE_ROOT"] = str(PLUGIN_FOLDER)
    # Paddle tells of each plugin in six lines on stderr, and warns of each custom operator when it
    # loads a program; errors still come.
    os.environ.setdefault("GLOG_minloglevel", "2")


def blas_folder() -> Path | None:
    """The folder of cuBLASLt, which the operators load for long prompts; None: the linker's own.

    The PyPI package nvidia-cublas, or a toolkit.
    """
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    folders = [path for root in roots for path in sorted(root.glob("*/lib"), reverse=True)]
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders += [Path(home, "lib64") for home in (*homes, "/usr/local/cuda")]
    return next((path for path in folders if any(path.glob("libcublasLt.so.*"))), None)


def nccl_path() -> str:
    """NCCL, for sums over ranks on GPUs: of the PyPI package nvidia-nccl-cu13, or the linker's."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    found = (root / "nccl" / "lib" / NCCL_NAME for root in roots)
    return str(next((path for path in found if path.is_file()), NCCL_NAME))


def activate(device: Device) -> None:
    """Imports Paddle with `device` and makes it the default for new tensors.

    For the plugin, Paddle must not have been imported before. Raises UserError when it was, or
    when it did not take the plugin, or has no such device.
    """
    set_environment(device)
    paddle = library.import_paddle()
    if device.is_plugin and PLUGIN_TYPE not in paddle.device.get_all_custom_device_type():
        raise UserError(
            "Paddle was imported without the GPU plugin; choose the device before importing "
            f"paddle, or start with CUSTOM_DEVICE_ROOT={PLUGIN_FOLDER}"
        )
    if not (device.is_cpu or device.is_gpu):
        _check_registered(device)
        # Views need kernels of their own, which many of these devices lack or have slow ones of.
        if VIEWS_FLAG not in os.environ:
            paddle.set_flags({VIEWS_FLAG: False})
    paddle.set_device(device.name)


def registered() -> dict[str, int]:
    """Devices that the imported Paddle has by type, besides CPUs and GPUs."""
    import paddle

    types = paddle.device.get_all_custom_device_type() or ()
    counts = {name: paddle.base.core.get_custom_device_count(name) for name in types}
    counts.pop(PLUGIN_TYPE, None)
    for name, is_built_for in BUILT_IN.items():
        if getattr(paddle, is_built_for)():
            counts[name] = paddle.device.device_count()
    return counts


def _check_registered(device: Device) -> None:
    """Raises UserError unless Paddle has this device, which is neither CPU nor GPU."""
    counts = registered()
    names = [name for name, count in counts.items() if count]
    if device.type not in counts:
        raise UserError(
            f"device {device.type}: the installed Paddle has no devices of that type (it has: "
            f"{', '.join(['cpu', *names])}){_misspelt(device.type, names)}; install the plugin "
            "that registers it (see CUSTOM_DEVICE_ROOT), or run with --device cpu"
        )
    count = counts[device.type]
    if device.index >= count:
        there = f"{device.type}:0 to {device.type}:{count - 1}" if count else "none"
        raise UserError(
            f"device {device.name} does not exist (there: {there}); use one that does, or "
            "--device cpu"
        )


def memory_info(device: Device) -> MemoryInfo:
    """The GPU's memory now."""
    numbers = (ctypes.c_uint64 * 6)()
    handle = device_library()
    if handle.regatta_device_memory(device.index, numbers):
        raise UserError(f"device {device.name}: {handle.regatta_device_error().decode()}")
    return MemoryInfo(*numbers[:5])


def release_cached(device: Device) -> int:
    """Gives memory that no tensor uses back to the driver; returns its bytes."""
    import paddle

    paddle.device.empty_cache()  # Paddle's idle chunks go to the plugin's pool first
    released: int = device_library().regatta_device_release_cached(device.index)
    return released


def cache_capacity(
    total_bytes: int,
    available_bytes: int,
    *,
    weight_bytes: int,
    workspace_bytes: int,
    bytes_per_token: int,
    num_tokens: int,
    utilization: float,
) -> int:
    """Tokens of KV cache that fit beside weights and workspace.

    total_bytes: the GPU's. available_bytes: what this process could have now. num_tokens: the least
    that the flags need. Raises UserError with the arithmetic when that many do not fit.
    """
    limit = min(int(total_bytes * utilization), available_bytes)
    capacity = (limit - weight_bytes - workspace_bytes) // bytes_per_token
    if capacity >= num_tokens:
        return capacity
    needed = weight_bytes + workspace_bytes + num_tokens * bytes_per_token
    text = (
        f"the GPU's memory is too small: weights {_gib(weight_bytes)} + workspace "
        f"{_gib(workspace_bytes)} + cache of {num_tokens} tokens at {bytes_per_token} bytes each "
        f"{_gib(num_tokens * bytes_per_token)} = {_gib(needed)}, and {_gib(limit)} may be used "
        f"({_gib(total_bytes)} at gpu_memory_utilization {utilization}, "
        f"{_gib(available_bytes)} available now)"
    )
    if capacity > 0:
        text += f"; {capacity} tokens of cache would fit: lower --max_length or --batch_size"
    elif weight_bytes < limit:
        text += (
            "; the workspace of a step leaves no cache: lower --max_num_batched_tokens, "
            "--max_length or --batch_size"
        )
    else:
        text += "; not even the weights fit: use a smaller --dtype"
    if limit < available_bytes:
        text += ", or raise --gpu_memory_utilization"
    elif available_bytes < int(total_bytes * utilization):
        text += ", or end other processes on this GPU"
    raise UserError(text)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def peak_bytes(device: Device) -> int:
    """The most bytes that this process had in tensors there at once; of the CPU, in memory."""
    if device.is_cpu:
        return host.peak_memory_bytes()
    if device.is_gpu:
        return memory_info(device).peak_in_use
    import paddle

    most: int = paddle.device.max_memory_allocated(device.place())
    return most


@contextmanager
def explained_out_of_memory(device: Device, advice: str) -> Iterator[None]:
    """Turns Paddle's out-of-memory error of the block into a UserError with the device's numbers.

    advice: what the user may do, as the end of a sentence.
    """
    try:
        yield
    except MemoryError as error:
        said = str(error)
        if device.is_gpu:
            said = device_library().regatta_device_out_of_memory().decode() or said
        elif match := re.search(r"Cannot allocate .*", said):  # behind a trace of Paddle's
            said = match[0].rstrip(". ")
        raise UserError(f"{said}; {advice}", exit_code=1) from None
