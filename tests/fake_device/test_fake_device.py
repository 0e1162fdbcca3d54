"""A device that Paddle has registered and nobody here knows by name runs on the plain operators.

Its memory cannot be touched but by the plugin's copies (plugin.cc).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import build
from predict import EngineConfig
from predict.errors import UserError
from predict.scale_out.cluster import share_of
from quant.config import QuantConfig
from tests.fake_device import answers
from tests.support.paths import DEMO, ROOT
from tests.support.processes import run_python

SOURCE = Path(__file__).with_name("plugin.cc")


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugin")
    try:
        include = build.find_paddle().root / "include"
        compiler = [build.find_compiler(), *build.CXX_FLAGS, "-O1", "-isystem", str(include)]
    except build.BuildError as error:
        pytest.skip(str(error))
    target = folder / "libpretend.so"
    subprocess.run([*compiler, SOURCE, "-shared", "-o", target], check=True)
    return folder


@pytest.fixture(scope="module")
def found(plugin: Path) -> dict[str, Any]:
    process = run(plugin, "-m", "tests.fake_device.answers")
    assert process.returncode == 0, process.stderr[-4000:]
    assert "no compiled operators for pretend:0" in process.stderr
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def run(plugin: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Python, whose Paddle is to find the plugin."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    paths = os.pathsep.join([str(ROOT), str(build.CSRC)])
    environment = {**kept, "PYTHONPATH": paths, "CUSTOM_DEVICE_ROOT": str(plugin)}
    return run_python("-W", "ignore", *words, env=environment)


@pytest.mark.parametrize("name", [*answers.SETTINGS, "guide and beams"])
def test_answers_are_those_of_the_cpu(found: dict[str, Any], name: str) -> None:
    on_device, on_cpu = found[name]
    assert on_device == on_cpu


def test_tensors_lie_there_and_its_memory_is_counted(found: dict[str, Any]) -> None:
    assert found["place"] == "Place(pretend:0)"
    assert found["peak"] > 10_000


def test_compiled_operators_are_the_plain_ones_there(found: dict[str, Any]) -> None:
    assert found["with --inference_model"] == ["pretend:0", "predict.ops.plain"]


def test_what_is_not_registered_is_refused_by_name(found: dict[str, Any]) -> None:
    refused = found["refused"]
    assert "device npu: the installed Paddle has no devices of that type" in refused["another type"]
    assert "(it has: cpu, pretend)" in refused["another type"]
    assert "did you mean" not in refused["another type"]
    assert "did you mean pretend?" in refused["a spelling"]
    assert "(there: pretend:0 to pretend:1)" in refused["an index"]


def test_too_little_memory_is_said_with_numbers(found: dict[str, Any]) -> None:
    assert found["refused"]["memory"] == (
        "Cannot allocate 5.000000GB memory on pretend:1, available memory is only 4.000000GB; "
        "lower --batch_size"
    )


def test_doctor_names_the_devices(found: dict[str, Any]) -> None:
    names, text = found["doctor"]
    assert names == ["pretend:0", "pretend:1"]
    assert "pretend:0, pretend:1: plain operators, with --device pretend:0" in text


def test_demo_model_answers_alike_from_the_command_line(plugin: Path, tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"src": "def gcd(a, b):"}\n{"src": "import os"}\n')
    outputs: list[Path] = []
    for device in ("pretend:1", "cpu"):
        outputs.append(tmp_path / f"{len(outputs)}.json")
        command = [
            *("predict/predictor.py", "--model_name_or_path", str(DEMO), "--dtype", "float32"),
            *("--device", device, "--append_attn", "--data_file", str(data), "--batch_size", "2"),
            *("--max_new_tokens", "4", "--src_length", "16", "--block_size", "16"),
            *("--output_file", str(outputs[-1])),
        ]
        process = run(plugin, *command)
        assert process.returncode == 0, process.stderr
    on_device, on_cpu = (path.read_text() for path in outputs)
    assert on_device == on_cpu
    assert "while" in on_device


@pytest.mark.parametrize(
    "name", ["cpu:0", "nvgpu", "npu:", "npu:x", "a b", "", "../npu", "1pu", "gpus"]
)
def test_what_is_no_name_of_a_device_is_refused_at_once(name: str) -> None:
    with pytest.raises(UserError, match=r"is not known .*cpu, gpu, gpu:N"):
        EngineConfig(model_name_or_path="somewhere", device=name)


def test_what_runs_on_cpus_and_gpus_alone_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"npu:1 runs checkpoints.*use --mode dynamic"):
        EngineConfig(model_name_or_path="somewhere", device="npu:1", mode="static")
    with pytest.raises(UserError, match=r"npu does not calibrate.*use --device cpu"):
        QuantConfig(
            model_name_or_path="somewhere",
            output_path=tmp_path,
            quant_type="weight_only_int8",
            device="npu",
        )
    with pytest.raises(UserError, match="--device npu: replicas share CPUs and NVIDIA GPUs"):
        share_of("npu", 2, None)
