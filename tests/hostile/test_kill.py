"""Commands that are interrupted or killed at any moment: nothing half-done counts, all goes on.

One moment stands in the default run; the others are slow.
"""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hostile.kill import SIGNALS, Ended, contents, locks, moments, run_command
from tests.support.paths import ROOT
from tests.support.quantization import write_model

NUM_MOMENTS = 6
OLD = b"the last run's results\n"


@dataclass(frozen=True)
class Whole:
    """A run that nobody disturbed."""

    argv: tuple[str, ...]  # without its output
    seconds: float
    files: dict[str, bytes]


def cases(*quick: tuple[int, float]) -> list[object]:
    """(signal, share of the run): a few quick ones, and NUM_MOMENTS of each signal."""
    slow = [
        pytest.param(number, at, marks=pytest.mark.slow, id=f"{number.name}-{at:.3f}")
        for number in SIGNALS
        for at in moments(1.0, NUM_MOMENTS, seed=number)
    ]
    return [
        *(
            pytest.param(number, at, id=f"{signal.Signals(number).name}-{at}")
            for number, at in quick
        ),
        *slow,
    ]


def check_ended(ended: Ended, number: int) -> None:
    """That the signal ended the process, and in good order once it could."""
    assert ended.was_ended_by(number), (ended.code, ended.said)
    assert "Traceback" not in ended.said or ended.code == -number, ended.said


def leftovers(folder: Path) -> list[str]:
    """Hidden files, all of which are somebody's unfinished work."""
    return sorted(path.name for path in folder.rglob(".*"))


PROMPTS = 32


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The demo model, dynamic: greedy prompts, sampled ones, and some with two answers."""
    folder = tmp_path_factory.mktemp("answered")
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_k": 0, "n": 2},
        {"temperature": 1.2, "top_k": 20},
    ]
    lines = [
        {"src": f"def number_{index}(", **kinds[index % 3], "max_new_tokens": 4 + 17 * index % 61}
        for index in range(PROMPTS)
    ]
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = (
        *("--model_name_or_path", str(ROOT / "examples" / "demo_model"), "--dtype", "float32"),
        *("--device", "cpu", "--append_attn", "--batch_size", "4", "--data_file", str(data)),
    )
    out = folder / "out.json"
    ended = run_command("predict.predictor", [*argv, "--output_file", str(out)])
    assert ended.code == 0, ended.said
    return Whole(argv, ended.seconds, {"out.json": out.read_bytes()})


@pytest.mark.parametrize(("number", "at"), cases((signal.SIGKILL, 0.6)))
def test_answers_are_kept_and_a_resumed_run_ends_with_the_same_bytes(
    answered: Whole, tmp_path: Path, number: int, at: float
) -> None:
    out = tmp_path / "out.json"
    out.write_bytes(OLD)
    argv = [*answered.argv, "--output_file", str(out)]
    ended = run_command("predict.predictor", argv, at * answered.seconds, number)
    whole = answered.files["out.json"]
    assert out.read_bytes() in (OLD, whole)
    assert not locks(tmp_path)
    if ended.code == 0:
        assert contents(tmp_path) == {"out.json": whole}
        return
    check_ended(ended, number)
    if ended.code == 128 + number:
        assert "interrupted" in ended.said
    journal = tmp_path / "out.json.journal"
    kept = journal.read_bytes().splitlines(keepends=True)[1:] if journal.exists() else []
    if kept and number != signal.SIGKILL:
        assert f"{len(kept)} of {PROMPTS} results are kept in {journal}" in ended.said
    resumed = run_command("predict.predictor", [*argv, "--resume"])
    assert resumed.code == 0, resumed.said
    if kept and kept[-1].endswith(b"\n"):
        assert f"{len(kept)} of {PROMPTS} results are kept" in resumed.said
    assert contents(tmp_path) == {"out.json": whole}
    assert leftovers(tmp_path) == []


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A tiny model in 4 bits with GPTQ, over five layers."""
    folder = tmp_path_factory.mktemp("quantized")
    model = write_model(folder / "model", {"num_hidden_layers": 5})
    text = folder / "text.txt"
    text.write_text(" ".join(f"{index * 7919 % 1000} and so on." for index in range(400)))
    argv = (
        *("--model_name_or_path", str(model), "--data_file", str(text), "--batch_size", "2"),
        *("--quant_type", "wint4", "--weightonly_group_size", "32", "--do_gptq"),
        *("--gptq_step", "8", "--src_length", "64"),
    )
    out = folder / "out"
    ended = run_command("quant.run_quantization", [*argv, "--output_path", str(out)])
    assert ended.code == 0, ended.said
    return Whole(argv, ended.seconds, contents(out))


@pytest.mark.parametrize(("number", "at"), cases())
def test_quantization_goes_on_and_ends_with_the_same_bytes(
    quantized: Whole, tmp_path: Path, number: int, at: float
) -> None:
    out = tmp_path / "out"
    argv = [*quantized.argv, "--output_path", str(out)]
    ended = run_command("quant.run_quantization", argv, at * quantized.seconds, number)
    assert not locks(tmp_path)
    found = contents(out) if out.exists() else {}
    if "config.json" in found:  # then everything else is there, and final
        state = {name for name in found if name.startswith("calibration/")}
        assert {name: found[name] for name in found.keys() - state} == quantized.files
    if ended.code != 0:
        check_ended(ended, number)
    else:
        assert "config.json" in found
    again = run_command("quant.run_quantization", argv)
    if again.code == 2:
        assert "holds a finished checkpoint" in again.said
        assert "config.json" in found
    else:
        assert again.code == 0, again.said
    assert contents(out) == quantized.files
    assert leftovers(tmp_path) in ([], [".calibration.removed"])
