"""Several processes of Paddle's launcher are one run of as many ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from predict import LLM
from predict.cli.launched import with_launched
from predict.device import library
from predict.errors import UserError
from predict.system.launcher import check_alone
from tests.support.demo import demo_config
from tests.support.paths import DEMO, ROOT

TWO = {"PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ID": "0", "PADDLE_NNODES": "1"}


@pytest.mark.parametrize("environ", [{}, {**TWO, "PADDLE_TRAINERS_NUM": "1"}])
def test_without_several_processes_flags_stay(environ: dict[str, str]) -> None:
    assert with_launched({"dtype": "x"}, environ) == {"dtype": "x"}


@pytest.mark.parametrize("given", [{}, {"tensor_parallel_degree": 2}])
def test_the_first_process_runs_as_many_ranks(given: dict[str, int]) -> None:
    environ = dict(TWO)
    assert with_launched(given, environ) == {"tensor_parallel_degree": 2}
    check_alone(environ)


@pytest.mark.parametrize("degree", [1, 2])
def test_a_script_that_the_launcher_starts_several_times_is_refused_before_any_work(
    degree: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in TWO.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("predict.build.Builder", Mock(side_effect=AssertionError("built")))
    with pytest.raises(UserError, match=r"the launcher started 2 processes .*a whole model"):
        LLM(demo_config(tensor_parallel_degree=degree))


@pytest.mark.parametrize(
    ("given", "changed", "said"),
    [
        ({"tensor_parallel_degree": 4}, {}, "is 4, and the launcher started 2 processes"),
        ({}, {"PADDLE_NNODES": "2"}, "the launcher has 2 hosts, and one model runs on one host"),
    ],
)
@pytest.mark.parametrize("number", ["0", "1"])
def test_what_the_launcher_does_not_fit_is_refused(
    given: dict[str, int], changed: dict[str, str], said: str, number: str
) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        with_launched(given, {**TWO, **changed, "PADDLE_TRAINER_ID": number})


@pytest.mark.slow
@pytest.mark.skipif(library.find() is None, reason="needs the compiled library")
def test_the_launcher_s_run_has_one_answer_for_each_line(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"src": "def main("}\n{"src": "import"}\n')
    done = subprocess.run(
        [
            *(sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", "2"),
            *("--log_dir", str(tmp_path / "log"), str(ROOT / "predict" / "predictor.py")),
            *("--model_name_or_path", str(DEMO), "--device", "cpu", "--max_length", "32"),
            *("--data_file", str(tmp_path / "in.jsonl"), "--rank_timeout", "60"),
            *("--output_file", str(tmp_path / "out.jsonl")),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    logs = "".join(each.read_text() for each in (tmp_path / "log").glob("workerlog.*"))
    assert done.returncode == 0, done.stderr + logs
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["src"] for line in lines] == ["def main(", "import"]
    assert logs.count("rank 1: ") == 1


@pytest.mark.slow
@pytest.mark.skipif(library.find() is None, reason="needs the compiled library")
def test_the_launcher_s_export_has_a_program_for_each_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", "2"),
            *("--log_dir", str(tmp_path / "log"), str(ROOT / "export" / "export_model.py")),
            *("--model_name_or_path", str(DEMO), "--device", "cpu", "--inference_model"),
            *("--output_path", str(tmp_path / "out")),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    logs = "".join(each.read_text() for each in (tmp_path / "log").glob("workerlog.*"))
    assert done.returncode == 0, done.stderr + logs
    assert {path.name for path in (tmp_path / "out").glob("rank_*")} == {"rank_0", "rank_1"}
