"""A data file on two replicas: each line once, whatever dies; the same lines as one engine's."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from predict.batch_ray import main
from predict.cli.data import DataItem
from predict.cli.results import result_bytes
from predict.cli.work import Work, answer_of, result_line
from predict.engine.choices import request_seed
from predict.engine.samples import Samples
from predict.errors import EXIT_USAGE, TokenizerError
from predict.request import RequestMetrics, RequestOutput, SamplingParams
from tests.ray.poisoned import POISON
from tests.ray.processes import (
    children,
    is_loopback,
    listening,
    named,
    started,
    until,
    until_gone,
    with_word,
)
from tests.support.paths import DEMO, ROOT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray: pip install -e '.[ray]'"
)
REPLICA = "ray::MapWorker"
NUM_PROMPTS = 40
FLAGS = (
    *("--model_name_or_path", str(DEMO), "--dtype", "float32", "--device", "cpu"),
    *("--append_attn", "--batch_size", "2"),
)
SAMPLED = ("--top_k", "0", "--temperature", "0.7", "--seed", "3")


def write_prompts(path: Path, count: int, poisoned: Sequence[int] = ()) -> None:
    """Prompts with long answers, greedy and sampled ones, of a seed of their own and of the run's.

    poisoned: which of them end the process of a tests.ray.poisoned model.
    """
    lines = []
    for index in range(count):
        line: dict[str, Any] = {"src": f"# {index}{POISON * (index in poisoned)}\ndef gcd(a, b):\n"}
        line |= {"max_new_tokens": 80, "ignore_eos": True}
        line |= ({}, {"seed": index}, {"temperature": 0.0}, {"n": 2})[index % 4]
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines) + "\n")


def predicted(prompts: Path, output: Path) -> bytes:
    """What predictor.py writes."""
    command = [sys.executable, "-m", "predict.predictor", *FLAGS, *SAMPLED]
    command += ["--data_file", str(prompts), "--output_file", str(output)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return output.read_bytes()


def batch(prompts: Path, output: Path, *more: str) -> list[str]:
    """Arguments for Python that run the batch."""
    files = ["--data_file", str(prompts), "--output_file", str(output)]
    return ["-m", "predict.batch_ray", *FLAGS, *SAMPLED, *files, *more]


def num_kept(output: Path) -> int:
    journal = output.with_name(output.name + ".journal")
    return journal.read_bytes().count(b"\n") - 1 if journal.exists() else 0


@dataclass(frozen=True)
class Run:
    """A batch whose first replica was killed in the middle."""

    wanted: bytes  # predictor.py's output
    written: bytes
    code: int
    said: str
    kept_before: int  # results when the replica was killed
    addresses: set[str]  # that anything listened on


@pytest.fixture(scope="module")
def killed_replica(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("batch")
    prompts, output, log = folder / "prompts.jsonl", folder / "output.json", folder / "log"
    write_prompts(prompts, NUM_PROMPTS)
    wanted = predicted(prompts, folder / "wanted.json")
    with started(batch(prompts, output), log) as process:
        kept_before = until(lambda: num_kept(output), process)
        addresses = listening(process.pid)
        os.kill(named(process.pid, REPLICA)[0], signal.SIGKILL)
        code = process.wait()
    return Run(wanted, output.read_bytes(), code, log.read_text(), kept_before, addresses)


@pytest.mark.slow
def test_a_killed_replica_costs_no_line_and_doubles_none(killed_replica: Run) -> None:
    assert 0 < killed_replica.kept_before < NUM_PROMPTS
    assert killed_replica.code == 0, killed_replica.said
    assert "a replica has ended" in killed_replica.said
    assert killed_replica.written == killed_replica.wanted


@pytest.mark.slow
def test_ray_listens_for_this_machine_alone(killed_replica: Run) -> None:
    assert killed_replica.addresses
    assert [each for each in killed_replica.addresses if not is_loopback(each)] == []


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    prompts, output, log = tmp_path / "prompts.jsonl", tmp_path / "output.json", tmp_path / "log"
    write_prompts(prompts, NUM_PROMPTS)
    with started(batch(prompts, output), log) as process:
        until(lambda: num_kept(output), process)
        family = children(process.pid)
        process.kill()
        process.wait()
    kept = num_kept(output)
    assert until_gone(family) == []
    assert 0 < kept < NUM_PROMPTS
    with started(batch(prompts, output, "--resume"), log) as process:
        assert process.wait() == 0, log.read_text()
    assert f"{kept} of {NUM_PROMPTS} results are kept" in log.read_text()
    assert output.read_bytes() == predicted(prompts, tmp_path / "wanted.json")


@pytest.mark.slow
def test_a_prompt_that_ends_replicas_is_an_error_line_alone(tmp_path: Path) -> None:
    prompts, output, log = tmp_path / "prompts.jsonl", tmp_path / "output.json", tmp_path / "log"
    write_prompts(prompts, 8, poisoned=[3])
    code = (
        "import sys; from predict.batch_ray import main; from tests.ray.poisoned import "
        "poisoned_llm; sys.exit(main(sys.argv[1:], poisoned_llm))"
    )
    with started(["-c", code, *batch(prompts, output)[2:]], log) as process:
        assert process.wait() == 1, log.read_text()
    wanted = predicted(prompts, tmp_path / "wanted.json").splitlines()
    written = output.read_bytes().splitlines()
    assert written[:3] + written[4:] == wanted[:3] + wanted[4:]
    failed = json.loads(written[3])
    assert failed["output"] == ""
    assert "each of 2 replicas ended" in failed["error"]
    assert f"line 4 of {prompts.name}" in log.read_text()


@pytest.mark.slow
def test_a_replica_may_be_of_several_ranks(tmp_path: Path) -> None:
    prompts, output, log = tmp_path / "prompts.jsonl", tmp_path / "output.json", tmp_path / "log"
    write_prompts(prompts, 6)
    ranks = ("--tensor_parallel_degree", "2", "--rank_timeout", "60")
    with started(batch(prompts, output, *ranks), log) as process:
        until(lambda: len(with_word(process.pid, "predict.rank_process")) > 1, process)
        assert process.wait() == 0, log.read_text()
    assert output.read_bytes() == predicted(prompts, tmp_path / "wanted.json")


@pytest.mark.slow
def test_a_damaged_model_is_one_line(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in DEMO.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: 1 << 20])
    prompts, log = tmp_path / "prompts.jsonl", tmp_path / "log"
    write_prompts(prompts, 2)
    arguments = batch(prompts, tmp_path / "output.json", "--model_name_or_path", str(model))
    with started(arguments, log) as process:
        assert process.wait() == EXIT_USAGE
    said = log.read_text().strip()
    assert said.startswith("error: ")
    assert "is not a whole safetensors file" in said
    assert "\n" not in said


REFUSED = {
    "--data_file is needed": (),
    "argument --num_replicas: 0 is not supported": ("--data_file", "x", "--num_replicas", "0"),
    "unknown flag --benchmark": ("--data_file", "x", "--benchmark"),
    "each replica is given one of its own": ("--data_file", "x", "--device", "gpu:1"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_wrong_flags_are_refused_before_ray_starts(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ("--model_name_or_path", str(DEMO), "--dtype", "float32", "--append_attn")
    assert main([*model, *REFUSED[words]]) == EXIT_USAGE
    assert words in capsys.readouterr().err


def output_of(text: str) -> RequestOutput:
    metrics = RequestMetrics(0.0, None, (), None)
    return RequestOutput(0, (1,), (2,), text, "stop", metrics)


@pytest.mark.parametrize("text", ["", 'a "quoted" text\n', "漢字", "half \ud800 a pair"])
def test_a_line_is_made_of_what_a_replica_sends_and_the_data_file(text: str) -> None:
    from predict.scale_out.batch import whole_line

    item = DataItem("line 1", [{"role": "user", "content": "ü"}], ["a", "b"])
    line = whole_line(item, result_bytes(answer_of(output_of(text))))
    assert line == result_bytes(result_line(item, output_of(text)))


def test_prompts_sample_as_if_one_engine_ran_them() -> None:
    from predict.scale_out.batch import seeds_of

    params = [
        SamplingParams(),
        SamplingParams(n=3),
        SamplingParams(seed=5),
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(num_beams=2, temperature=0.0),
        SamplingParams(),
    ]
    failed = TokenizerError("no")
    ids: list[list[int] | TokenizerError] = [[1], [1], [1], [1], failed, [1], [1]]
    found = seeds_of(Work([], ids, params, None), engine_seed=7)  # type: ignore[arg-type]

    numbers = iter(range(100))
    wanted: list[int | None] = []
    for tokens, each in zip(ids, params, strict=True):
        if isinstance(tokens, TokenizerError):
            next(numbers)
            wanted.append(found[4])
            continue
        samples = Samples(tokens, each, lambda: next(numbers), None, None)
        draws = not each.greedy and each.seed is None
        wanted.append(request_seed(7, samples.requests[0]) if draws else None)
    assert found == wanted


def test_equal_parameters_are_sent_once() -> None:
    from predict.scale_out.batch import distinct

    one, other = SamplingParams(), SamplingParams(bad_words=["x"], logit_bias={1: 2.0})
    found, which = distinct([one, other, SamplingParams(), other])
    assert [found[number] for number in which] == [one, other, one, other]
    assert len(found) == 2
