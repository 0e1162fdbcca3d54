"""Which device is chosen, and what is said when none can be."""

from __future__ import annotations

from pathlib import Path

import pytest

from predict.device import built as built_files
from predict.device import devices, library
from predict.device.devices import DriverInfo, Gpu, InstalledPaddle
from predict.errors import UserError
from tests.support.built_libraries import write_library
from tests.support.processes import run_python

GIB = 1 << 30
H200 = Gpu("NVIDIA H200", (9, 0), 141 * GIB, 132)
V100 = Gpu("Tesla V100", (7, 0), 16 * GIB, 80)
A10 = Gpu("NVIDIA A10", (8, 6), 24 * GIB, 72)
ALL = ("75", "80", "86", "89", "90a")


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library folder with a CUDA library for `ALL` and a plugin, and the CPU Paddle."""
    monkeypatch.setattr(library, "LIBRARY_DIR", tmp_path)
    monkeypatch.setattr(devices, "PLUGIN_FOLDER", tmp_path / "plugin")
    (tmp_path / "plugin").mkdir()
    (tmp_path / "plugin" / devices.PLUGIN_NAME).write_bytes(b"a plugin")
    plugin = built_files.describe(tmp_path / "plugin" / devices.PLUGIN_NAME)
    parts = {f"plugin/{devices.PLUGIN_NAME}": plugin}
    write_library(tmp_path, devices.CUDA_LIBRARY_NAME, architectures=ALL, parts=parts)
    monkeypatch.setattr(devices, "installed_paddle", lambda: InstalledPaddle("3.3.1", False))
    monkeypatch.setattr(devices, "driver_info", lambda: DriverInfo(13000, 13000, "", (H200,) * 2))
    return tmp_path


def test_cpu_needs_nothing() -> None:
    device = devices.choose("cpu")
    assert (device.name, device.is_gpu, device.is_plugin) == ("cpu", False, False)


def test_cpu_wheel_takes_the_plugin_and_says_why_not_the_other(built: Path) -> None:
    device = devices.choose("gpu:1")
    assert (device.name, device.index, device.is_plugin) == ("nvgpu:1", 1, True)
    assert "3.3.1 is the CPU build" in device.reason
    assert "paddlepaddle-gpu" in device.reason


def test_gpu_wheel_is_taken_when_installed(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "installed_paddle", lambda: InstalledPaddle("3.3.1", True))
    device = devices.choose("gpu")
    assert (device.name, device.is_plugin) == ("gpu:0", False)
    assert "plugin is not needed" in device.reason


def test_missing_plugin_names_the_build_command(built: Path) -> None:
    (built / "plugin" / devices.PLUGIN_NAME).unlink()
    with pytest.raises(UserError, match=r"CPU build.*not there.*setup_cuda\.py install.*nvcc"):
        devices.choose("gpu")
    (built / devices.CUDA_ERROR_NAME).write_text("the compiler failed: x.cu:1\n")
    with pytest.raises(UserError, match=r"the compiler failed: x\.cu:1"):
        devices.choose("gpu")


def test_missing_cuda_library_names_the_build_command(built: Path) -> None:
    (built / "libregatta_cuda.json").unlink()
    with pytest.raises(
        UserError, match=r"cannot read .*libregatta_cuda\.json.*setup_cuda\.py install"
    ):
        devices.choose("gpu")


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (DriverInfo(13000, 0, "insufficient", ()), "no NVIDIA driver was found; install it"),
        (
            DriverInfo(13000, 12040, "insufficient", ()),
            "driver serves CUDA 12.4 and the library was built with CUDA 13.0; update the driver",
        ),
        (DriverInfo(13000, 13000, "no device", ()), r"shows no GPU \(no device\); see CUDA_"),
        (DriverInfo(13000, 13000, "", (V100,)), r"\(Tesla V100\) is sm_70 .* need sm_75 or newer"),
    ],
)
def test_unusable_machines_are_explained(info: DriverInfo, message: str) -> None:
    with pytest.raises(UserError, match=f"{message}.*--device cpu"):
        devices.check_gpu(info, 0, ALL)


def test_index_beyond_the_gpus_names_the_allowed_ones(built: Path) -> None:
    with pytest.raises(UserError, match=r"gpu:2 does not exist \(allowed: gpu:0 to gpu:1\)"):
        devices.choose("gpu:2")


def test_library_without_this_architecture_names_the_flag() -> None:
    info = DriverInfo(13000, 13000, "", (A10,))
    with pytest.raises(UserError, match=r"A10\) is sm_86 .* built for sm_90a; .* --arch 86"):
        devices.check_gpu(info, 0, ("90a",))
    with pytest.raises(UserError, match="--arch 90a"):
        devices.check_gpu(DriverInfo(13000, 13000, "", (H200,)), 0, ("80",))


@pytest.mark.parametrize(
    ("architectures", "capability", "expected"),
    [
        (("90a",), (9, 0), True),
        (("90a",), (10, 0), False),
        (("80",), (8, 6), True),
        (("86",), (8, 0), False),
        (("80",), (9, 0), False),
        (("75", "100a"), (10, 3), False),
        ((), (9, 0), False),
    ],
)
def test_machine_code_runs_on_later_minor_versions_of_its_major_one(
    architectures: tuple[str, ...], capability: tuple[int, int], expected: bool
) -> None:
    assert devices.runs_on(architectures, capability) is expected


def capacity(num_tokens: int, available: int = 130 * GIB, utilization: float = 0.9) -> int:
    return devices.cache_capacity(
        140 * GIB,
        available,
        weight_bytes=15 * GIB,
        workspace_bytes=GIB,
        bytes_per_token=128 * 1024,
        num_tokens=num_tokens,
        utilization=utilization,
    )


def test_cache_fills_what_weights_and_workspace_leave() -> None:
    assert capacity(1000) == (126 * GIB - 16 * GIB) // (128 * 1024)
    assert capacity(1000, available=20 * GIB) == 4 * GIB // (128 * 1024)


def test_too_little_memory_shows_the_arithmetic_and_the_flag() -> None:
    with pytest.raises(UserError) as caught:
        capacity(2_000_000)
    text = str(caught.value)
    for part in (
        "weights 15.00 GiB + workspace 1.00 GiB",
        "2000000 tokens at 131072 bytes each 244.14 GiB = 260.14 GiB",
        "126.00 GiB may be used (140.00 GiB at gpu_memory_utilization 0.9, 130.00 GiB available",
        "901120 tokens of cache would fit: lower --max_length or --batch_size",
        "raise --gpu_memory_utilization",
    ):
        assert part in text, text
    with pytest.raises(UserError, match=r"not even the weights fit: .*--dtype, or end other proc"):
        capacity(1, available=10 * GIB)


def test_choosing_imports_no_paddle() -> None:
    program = (
        "import sys\nfrom predict.device import devices as device\n"
        "try:\n    device.choose('gpu')\nexcept ValueError:\n    pass\n"
        "device.choose('cpu')\nassert 'paddle' not in sys.modules\n"
    )
    process = run_python("-c", program)
    assert process.returncode == 0, process.stderr
