"""evaluate.py: rows, measures, and a whole run on a tiny checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from predict.cli.flags import parse_flags
from predict.device import devices
from predict.errors import UserError
from quant import evaluate
from quant.evaluate import EvaluateConfig, main
from quant.metrics import Comparison, log_softmax
from quant.rows import QuantRow, parse_row
from tests.support.processes import run_python
from tests.support.quantization import GROUPS, quantize, write_model


def test_measures_equal_the_definitions() -> None:
    generator = np.random.default_rng(0)
    logits, reference = generator.normal(0, 3, (2, 50, 11)).astype(np.float32)
    targets = generator.integers(0, 11, 50)
    comparison = Comparison()
    for part in (slice(0, 20), slice(20, 50)):
        comparison.update(logits[part], reference[part], targets[part])
    p = np.exp(reference.astype(np.float64))
    p /= p.sum(axis=1, keepdims=True)
    q = np.exp(logits.astype(np.float64))
    q /= q.sum(axis=1, keepdims=True)
    rows = np.arange(50)
    perplexity = np.exp(-np.mean(np.log(q[rows, targets])))
    assert comparison.perplexity == pytest.approx(perplexity, rel=1e-5)
    expected = perplexity / np.exp(-np.mean(np.log(p[rows, targets])))
    assert comparison.perplexity_ratio == pytest.approx(expected, rel=1e-5)
    assert comparison.kl == pytest.approx(np.mean(np.sum(p * np.log(p / q), axis=1)), rel=1e-5)
    assert comparison.top1_agreement == np.mean(p.argmax(axis=1) == q.argmax(axis=1))


def test_logits_of_nan_are_refused() -> None:
    logits = np.zeros((2, 3), np.float32)
    logits[1, 1] = np.nan
    with pytest.raises(UserError, match="logits of the model hold NaN"):
        Comparison().update(logits, np.zeros((2, 3), np.float32), np.zeros(2, np.int64))


def test_large_logits_do_not_overflow() -> None:
    assert np.allclose(log_softmax(np.array([[1e4, 0.0]], np.float32)), [[0.0, -1e4]])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", QuantRow("none", None)),
        ("none@int4", QuantRow("none@int4", None, cache="int4")),
        ("wint8", QuantRow("wint8", "weight_only_int8")),
        ("wint4_g64", QuantRow("wint4_g64", "weight_only_int4", group_size=64)),
        ("a8w8c8", QuantRow("a8w8c8", "a8w8", cache="static")),
        (
            "wint4_g128+awq+asym@fp8",
            QuantRow(
                "wint4_g128+awq+asym@fp8", "weight_only_int4", None, 128, ("awq", "asym"), "fp8"
            ),
        ),
    ],
)
def test_rows_are_read(text: str, expected: QuantRow) -> None:
    assert parse_row(text) == expected


def test_flags_hold_for_rows_that_say_nothing_themselves() -> None:
    assert parse_row("wint4", "dynamic", 64).group_size == 64
    assert parse_row("wint4", "dynamic", 64).cache == "dynamic"
    assert parse_row("wint4_g32@fp8", "dynamic", 64).group_size == 32
    assert parse_row("wint4_g32@fp8", "dynamic", 64).cache == "fp8"
    assert parse_row("a8w8", None, 64).group_size == -1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("wint5", "wint5"),
        ("wint4+gptp", "did you mean gptq?"),
        ("wint4@int5", "did you mean int4?"),
        ("none+gptq", "no weights to calibrate"),
        ("none@static", "static cache scales"),
        ("a8w8_g64", "has no groups"),
        ("a8w8c8@fp8", "a static cache of its own"),
    ],
)
def test_wrong_rows_are_refused(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said.replace("?", r"\?")):
        parse_row(text)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the texts that evaluate.py looks for beside a model."""
    directory = write_model(tmp_path_factory.mktemp("tiny") / "model")
    for seed, name in enumerate(("heldout.txt", "calibration.txt")):
        words = np.random.default_rng(seed).choice(["one", "two", "three", "and", "so.", "\n"], 300)
        (directory / name).write_text(" ".join(words))
    return directory


def arguments(model: Path, *rows: str) -> list[str]:
    words = ["--model_name_or_path", str(model), "--quant_type", ",".join(rows)]
    words += ["--dtype", "float32", "--src_length", "40", "--max_tokens", "120"]
    return [*words, "--inference_model=false", "--ptq_step", "2"]


def test_the_table_and_its_json_agree(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = str(quantize(model, None, tmp_path / "made", "--quant_type", "wint4", *GROUPS))
    rows = ("weight_only_int8", "weight_only_int4_g32", "weight_only_int4_g32+gptq", made)
    path = tmp_path / "table.json"
    assert main([*arguments(model, *rows), "--output_file", str(path)]) == 0
    results = json.loads(path.read_text())
    assert list(results) == ["none", *rows]
    assert results["none"]["perplexity_ratio"] == results["none"]["top1_agreement"] == 1
    assert results["none"]["kl"] == 0
    keys = ("perplexity", "perplexity_ratio", "kl", "top1_agreement", "weight_bytes")
    assert all(set(row) == {*keys, "decode_tokens_per_s"} for row in results.values())
    int8, int4, gptq = (results[name] for name in rows[:3])
    assert 0 < int8["kl"] < gptq["kl"] < int4["kl"]
    assert int8["top1_agreement"] > int4["top1_agreement"]
    assert int4["weight_bytes"] < int8["weight_bytes"] < results["none"]["weight_bytes"]
    # The same rounding, from a file and while loading.
    for key in keys[:4]:
        assert results[made][key] == pytest.approx(int4[key], rel=1e-6)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 + len(results)
    assert f"| {int8['perplexity']:.3f} |" in printed[3]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--quant_type", ""], "--quant_type is needed"),
        (["--quant_type", "wint8,wint8"], "wint8 more than once"),
        (["--quant_type", "wint8,wint9"], "wint9"),
        (["--data_file", "no/file.txt"], "--data_file no/file.txt does not exist"),
        (["--quant_type", "wint8,a8w8+gptq"], "--do_gptq rounds weight-only types"),
        (["--quant_type", "wint8,wint4_g128"], "group size 128 does not divide"),
        (
            ["--quant_type", "wint4+gptq", "--calibration_file", "no/file.txt"],
            "--calibration_file no/file.txt does not exist",
        ),
        (["--src_length", "1"], "--src_length is 1"),
        (["--cachekv_int8_type", "int5"], "allowed: dynamic"),
        (["--output_file", "no/folder/x.json"], "does not exist"),
        (["--device", "cpuu"], "device 'cpuu' is not known (allowed: cpu, gpu, gpu:N"),
        (["--device", "gpu"], "--inference_model=false runs on the CPU, and --device is gpu"),
        (
            ["--device", "gpu", "--inference_model=true", "--quant_type", "a8w8"],
            "a8w8 takes activations in bfloat16 or float16 on a GPU",
        ),
        (
            [
                *("--device", "gpu", "--inference_model=true"),
                *("--dtype", "bfloat16", "--quant_type", "wint8_g32"),
            ],
            "a scale for every 32 input features does not run on GPUs",
        ),
    ],
)
def test_wrong_input_is_one_line_before_any_measuring(
    words: list[str],
    said: str,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("a row was measured")

    monkeypatch.setattr(evaluate, "Model", never)
    assert main([*arguments(model, "weight_only_int8"), *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "usable", "device"),
    [
        ([], False, "cpu"),
        ([], True, "gpu"),
        (["--device", "cpu"], True, "cpu"),
        (["--inference_model=false"], True, "cpu"),
        (["--device", "gpu:1"], False, "gpu:1"),
    ],
)
def test_device_is_a_usable_gpu_unless_told(
    words: list[str],
    usable: bool,
    device: str,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def choose(name: str) -> devices.Device:
        if not usable:
            raise UserError(f"device {name}: the driver is too old")
        return devices.Device("regatta_gpu:0", 0, "")

    monkeypatch.setattr(devices, "choose", choose)
    monkeypatch.setattr(devices, "is_gpu_present", lambda: True)
    asked = ["--model_name_or_path", str(model), "--quant_type", "wint8", *words]
    flags = parse_flags(asked, evaluate.FLAGS, "evaluate.py", "", "")
    config = EvaluateConfig.from_flags(flags)
    assert config.device == device
    assert ("the driver is too old" in "".join(config.notes)) == (words == [] and not usable)
    assert len(config.notes) == (config.device == "cpu" and "--device" not in words)


ENGINES_SEE_NO_PADDLE = """
import sys
from predict import llm
from predict.errors import UserError
from quant import evaluate

def engine(config):
    raise UserError(f"paddle is imported: {'paddle' in sys.modules}")

llm.LLM = engine
sys.exit(evaluate.main(sys.argv[1:]))
"""


def test_paddle_is_imported_by_the_engine_which_chooses_its_device_before(model: Path) -> None:
    process = run_python("-c", ENGINES_SEE_NO_PADDLE, *arguments(model, "wint4_g32+gptq"))
    assert process.stderr.splitlines()[-1] == "error: paddle is imported: False"


def test_the_measured_text_is_not_calibrated_on(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = ["--calibration_file", str(model / "heldout.txt")]
    assert main([*arguments(model, "wint4+gptq"), *same]) == 2
    assert "hides the loss" in capsys.readouterr().err
