"""Finding, checking and loading the compiled library."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from predict import doctor
from predict.device import built as built_files
from predict.device import devices, library
from predict.device.devices import DriverInfo, InstalledPaddle
from tests.support import tiny
from tests.support.built_libraries import BUILT, this_paddle, write_library
from tests.support.paths import ROOT
from tests.support.processes import run_python

PATH = Path("predict/lib/libregatta_cpu.so")
NAME = r"^PD_BUILD_OP\((\w+)\)"


def test_python_and_cpp_hold_the_same_abi_number() -> None:
    assert library.read_abi(ROOT / "csrc" / "include" / "regatta" / "abi.h") == library.ABI


def test_header_without_abi_number_is_an_error(tmp_path: Path) -> None:
    header = tmp_path / "abi.h"
    header.write_text("#pragma once\n")
    with pytest.raises(library.LibraryError, match="does not define REGATTA_ABI"):
        library.read_abi(header)


def test_matching_library_passes_the_check() -> None:
    library.check(BUILT, PATH, "3.3.1", "76884955")


def test_other_paddle_version_names_both_fixes() -> None:
    with pytest.raises(library.LibraryError) as caught:
        library.check(BUILT, PATH, "3.4.0", "abcdef")
    message = str(caught.value)
    assert "built for Paddle 3.3.1, but Paddle 3.4.0 is installed" in message
    assert "setup_cpu.py install" in message
    assert "pip install paddlepaddle==3.3.1" in message


def test_other_paddle_commit_of_the_same_version_is_refused() -> None:
    with pytest.raises(library.LibraryError, match=r"3\.3\.1 \(commit abcdef\) is installed"):
        library.check(BUILT, PATH, "3.3.1", "abcdef")


def test_other_abi_names_the_rebuild_command() -> None:
    needed = rf"interface 99 .* needs {library.ABI}; .*setup_cpu.py install"
    with pytest.raises(library.LibraryError, match=needed):
        library.check(replace(BUILT, abi=99), PATH, "3.3.1", "76884955")
    cuda = PATH.with_name("libregatta_cuda.so")
    with pytest.raises(library.LibraryError, match=r"interface 99 .*setup_cuda.py install"):
        library.check(replace(BUILT, abi=99), cuda, "3.3.1", "76884955")


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"abi": 1}'])
def test_unreadable_metadata_names_the_rebuild_command(tmp_path: Path, content: str | None) -> None:
    path = write_library(tmp_path)
    if content is None:
        path.with_suffix(".json").unlink()
    else:
        path.with_suffix(".json").write_text(content)
    with pytest.raises(library.LibraryError, match=r"rebuild both: .*setup_cpu.py install"):
        library.read_metadata(path)


def test_metadata_survives_a_round_trip(tmp_path: Path) -> None:
    path = write_library(tmp_path, flags="-O3", sanitizer="address")
    described = built_files.describe(path)
    expected = replace(BUILT, flags="-O3", sanitizer="address", file=described)
    assert library.read_metadata(path) == expected


def test_key_changes_with_every_input_of_a_build_and_with_nothing_else() -> None:
    inputs = (
        {"abi": 99},
        {"paddle_version": "3.4.0"},
        {"paddle_commit": "1"},
        {"compiler": "g++ 13"},
        {"flags": "-O2"},
        {"sanitizer": "address"},
        {"sources_digest": "01"},
        {"cuda_sources_digest": "01"},
        {"cuda_version": "13.0"},
        {"architectures": ("90a",)},
    )
    keys = {replace(BUILT, **change).key for change in inputs}
    assert len(keys | {BUILT.key}) == len(inputs) + 1
    other = built_files.BuiltFile(2, "1" * 64)
    assert replace(BUILT, file=other, parts={"x": other}).key == BUILT.key


def test_environment_variable_overrides_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_library(tmp_path)
    monkeypatch.setenv("REGATTA_LIBRARY", str(path))
    assert library.find() == path


def test_override_that_is_no_file_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGATTA_LIBRARY", str(tmp_path / "nothing.so"))
    with pytest.raises(library.LibraryError, match=r"nothing\.so is not a file; unset it"):
        library.find()


def test_wrong_paddle_is_refused_before_the_linker_sees_the_library(tmp_path: Path) -> None:
    path = write_library(tmp_path, paddle_version="2.6.2")
    with pytest.raises(library.LibraryError, match=r"built for Paddle 2\.6\.2"):
        library.load_checked(path)


def test_broken_library_is_one_sentence_and_not_a_trace(tmp_path: Path) -> None:
    path = write_library(tmp_path, **this_paddle())
    with pytest.raises(library.LibraryError) as caught:
        library.load_checked(path)
    assert "does not load" in str(caught.value)
    assert "C++ Traceback" not in str(caught.value)


def test_absence_is_said_once_per_process_with_the_reason_and_the_fix(tmp_path: Path) -> None:
    (tmp_path / library.BUILD_ERROR_NAME).write_text("no C++ compiler found\n")
    program = (
        "import sys, pathlib\n"
        "from predict.device import library\n"
        "from predict.system.notes import printed\n"
        "library.LIBRARY_DIR = pathlib.Path(sys.argv[1])\n"
        "with printed():\n"
        "    assert library.load() is None and library.load() is None\n"
        "assert 'paddle' not in sys.modules\n"
    )
    process = run_python("-c", program, tmp_path, env={"PATH": "/usr/bin"})
    assert process.returncode == 0, process.stderr
    assert process.stderr.count("plain-Paddle operators are in use") == 1
    assert "no C++ compiler found" in process.stderr
    assert "python csrc/setup_cpu.py install" in process.stderr


def test_require_raises_where_no_library_was_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REGATTA_LIBRARY", raising=False)
    monkeypatch.setattr(library, "LIBRARY_DIR", tmp_path)
    with pytest.raises(library.LibraryError, match=r"there is no .*setup_cpu\.py install"):
        library.require()


def test_digest_changes_with_contents_and_names(tmp_path: Path) -> None:
    source = tmp_path / "cpu" / "a.cc"
    source.parent.mkdir()
    source.write_text("int x;")
    first = library.source_digest(tmp_path)
    assert first == library.source_digest(tmp_path)
    source.write_text("int y;")
    second = library.source_digest(tmp_path)
    source.rename(source.with_name("b.cc"))
    assert len({first, second, library.source_digest(tmp_path)}) == 3


def test_every_operator_in_the_sources_is_registered(compiled: library.Library) -> None:
    if library.is_outdated(compiled.metadata):
        pytest.skip(f"the library is older than csrc/: {library.build_command()}")
    sources = (ROOT / "csrc" / "paddle").glob("*.cc")
    names = [name for path in sources for name in re.findall(NAME, path.read_text(), re.MULTILINE)]
    assert "regatta_linear" in names
    assert sorted(compiled.operators) == sorted(names)


def test_library_reports_an_accepting_kernel_for_every_operator(compiled: library.Library) -> None:
    info = compiled.info()
    assert info["abi"] == library.ABI
    assert info["threads"] >= 1
    for name, candidates in info["kernels"].items():
        assert any(candidate["accepts"] for candidate in candidates), name


def test_operator_returns_the_list_of_its_outputs(compiled: library.Library) -> None:
    paddle = library.import_paddle()
    outputs = compiled.op("regatta_activate")(paddle.zeros([3, 8]), 0, True, 0.0, 1.0, 0.0)
    assert [output.shape for output in outputs] == [[3, 4]]


def test_unknown_operator_lists_the_known_ones(compiled: library.Library) -> None:
    with pytest.raises(library.LibraryError, match=r"has no operator gemm .*regatta_linear"):
        compiled.op("gemm")


def test_thread_count_below_one_is_refused(compiled: library.Library) -> None:
    with pytest.raises(library.LibraryError, match="num_threads 0"):
        compiled.set_num_threads(0)


def test_doctor_reports_every_section_and_a_library_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("REGATTA_LIBRARY", raising=False)
    monkeypatch.setattr(library, "LIBRARY_DIR", tmp_path)
    assert doctor.main(["--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["library"]["state"] == "absent"
    assert report["cpu"]["num_allowed_cores"] >= 1
    assert "setup_cpu.py install" in " ".join(report["problems"])
    assert "PROBLEM: no compiled operators" in doctor.render(report)


def test_doctor_names_the_build_and_what_is_damaged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = write_library(tmp_path, sanitizer="address")
    path.write_bytes(b"cut")
    monkeypatch.setenv("REGATTA_LIBRARY", str(path))
    monkeypatch.setattr(library, "LIBRARY_DIR", tmp_path)
    cuda = write_library(tmp_path, devices.CUDA_LIBRARY_NAME)
    cuda.write_bytes(b"cut")
    report = doctor.collect()
    assert report["library"]["state"] == "refused"
    key = replace(BUILT, sanitizer="address").key
    assert f"build {key[:12]}, sanitizer address" in doctor.render(report)
    for damaged in (path, cuda):
        assert any(f"{damaged} is cut short" in problem for problem in report["problems"])


def test_doctor_finds_nothing_wrong_here(
    compiled: library.Library, capsys: pytest.CaptureFixture[str]
) -> None:
    if library.is_outdated(compiled.metadata):
        pytest.skip(f"the library is older than csrc/: {library.build_command()}")
    assert doctor.main([]) == 0
    assert str(compiled.path) in capsys.readouterr().out


def test_doctor_shows_the_first_accepting_candidate_and_the_refusals() -> None:
    candidates = [
        {"name": "avx512", "accepts": False, "reason": "no AVX-512"},
        {"name": "scalar", "accepts": True, "reason": ""},
    ]
    assert doctor.chosen_kernel(candidates) == "scalar  (not avx512: no AVX-512)"
    assert doctor.chosen_kernel(candidates[:1]) == "none (avx512: no AVX-512)"


def test_doctor_says_what_device_gpu_would_take(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "LIBRARY_DIR", tmp_path)
    monkeypatch.setattr(devices, "PLUGIN_FOLDER", tmp_path / "plugin")
    monkeypatch.setattr(devices, "installed_paddle", lambda: InstalledPaddle("3.3.1", False))
    report = doctor.collect()
    assert report["cuda_library"] is None
    assert report["device_gpu"]["name"] is None
    lines = doctor.render(report)
    assert re.search(r"CUDA library +absent", lines)
    assert re.search(r"--device gpu +not usable: .*CPU build.*setup_cuda\.py install", lines)
    assert re.search(r"on a GPU +no quant_type", lines)

    monkeypatch.setattr(devices, "installed_paddle", lambda: InstalledPaddle("3.3.1", True))
    assert doctor.collect()["device_gpu"]["name"] == "gpu:0"
    h200 = devices.Gpu("NVIDIA H200", (9, 0), 141 << 30, 132)
    monkeypatch.setattr(devices, "driver_info", lambda: DriverInfo(13000, 13000, "", (h200,)))
    assert re.search(r"on a GPU +weight_only_int8 \(sm90\), .*", doctor.render(doctor.collect()))
    write_library(
        tmp_path, devices.CUDA_LIBRARY_NAME, architectures=("80", "90a"), compiler="nvcc 13.0"
    )
    report = doctor.collect()
    assert "(for sm_80, sm_90a, by nvcc 13.0)" in doctor.render(report)
    assert any("rebuild: " in text and "setup_cuda" in text for text in report["problems"])


STATIC_RUN = """
import ctypes, sys
from paddle.base import core
from export import export_model
from predict import predictor
from predict.device import library
model, data, out = sys.argv[1:]
flags = ["--dtype", "float32", "--device", "cpu", "--inference_model", "--append_attn"]
exported = out + ".exported"
assert export_model.main(
    ["--model_name_or_path", model, "--output_path", exported, "--max_length", "64", *flags]) == 0
level = ctypes.c_int32.in_dll(ctypes.CDLL(core.libpaddle.__file__), library.GLOG_LEVEL)
assert level.value == 0, level
assert predictor.main(
    ["--model_name_or_path", exported, "--mode", "static", "--device", "cpu", "--data_file", data,
     "--output_file", out, "--chat_template", "none", "--src_length", "32",
     "--max_new_tokens", "4"]) == 0
assert level.value == library.GLOG_WARNING, level  # later warnings are seen
"""


def test_static_run_has_no_idle_warnings_and_leaves_warnings_on(
    compiled: library.Library, tmp_path: Path
) -> None:
    model = tiny.write_with_tokenizer(tmp_path / "model")
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"src": "hello", "tgt": ""}\n')
    process = run_python("-c", STATIC_RUN, model, data, tmp_path / "out.json")
    assert process.returncode == 0, process.stderr
    assert "1 of 1 results" in process.stderr
    assert "registered" not in process.stderr
