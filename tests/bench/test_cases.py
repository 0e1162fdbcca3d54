"""Sizes, the table of cases, and what a run of predict.bench.throughput writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from export.export_model import export_model
from predict import LLM, EngineConfig
from predict.bench import throughput
from predict.bench.cases import UNITS, Case, cases_table, parse_cases
from predict.bench.cost import Cost, linear_bytes, program_bytes
from predict.bench.record import RecordRow
from predict.device import library
from predict.errors import UserError
from predict.loading.model import read_spec

EXAMPLES = Path(__file__).parents[2] / "examples"
DEMO = ["--model_name_or_path", str(EXAMPLES / "demo_model"), "--dtype", "float32"]
ON_CPU = [*DEMO, "--device", "cpu", "--append_attn"]
COST = Cost(
    weight_bytes=1000,
    layer_flops_per_token=100,
    head_flops_per_row=10,
    attention_flops_per_pair=1,
    decode_flops_per_pair=1,
    cache_bytes_per_token=2,
)


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["suites"]["throughput"]["rows"]
    return rows


@pytest.mark.parametrize("text", ["1x2", "1x2x0", "ax2x3", "1x2x3x4", "1 x2x-3"])
def test_what_is_no_case_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="REQUESTSxINPUTxOUTPUT"):
        parse_cases([text])


def test_a_case_that_stands_twice_is_refused() -> None:
    with pytest.raises(UserError, match="1x2x3 twice"):
        parse_cases(["1x2x3", "1x2x4", "01x2x3"])


def test_cases_have_their_own_sizes() -> None:
    with pytest.raises(UserError, match="leave --input_len or --cases out"):
        throughput.parse([*DEMO, "--cases", "1x2x3", "--input_len", "5"])
    with pytest.raises(UserError, match="leave --speculate_method or --cases out"):
        throughput.parse([*DEMO, "--cases", "1x2x3", "--speculate_method", "lookahead"])
    config, plan, _, _ = throughput.parse([*DEMO, "--cases", "4x20x3,2x8x40", "--device", "cpu"])
    assert plan.cases == (Case(4, 20, 3), Case(2, 8, 40))
    assert (config.scheduling.batch_size, config.max_length) == (4, 48)
    config, plan, *_ = throughput.parse([*DEMO, "--cases", "4x20x3", "--batch_size", "2"])
    assert (config.scheduling.batch_size, plan.batch_size) == (2, 2)
    sizes = ["--num_requests", "7", "--batch_size", "2", "--input_len", "5", "--output_len", "3"]
    config, plan, *_ = throughput.parse([*DEMO, "--device", "cpu", *sizes])
    assert (plan.cases, plan.batch_size) == ((Case(7, 5, 3),), 2)
    assert config.max_length == 8


def test_a_run_must_read_the_weights_once_a_step_and_the_cache_once_a_token() -> None:
    case = Case(num_requests=4, input_len=10, output_len=3)
    assert COST.run_bytes(case, 2) == 6 * 1000 + 4 * 2 * (10 + 1.5) * 2
    assert COST.run_bytes(Case(4, 10, 1), 4) == 1000
    assert COST.run_flops(case) == COST.prefill_flops(4, 10) + 4 * 2 * (100 + 10 + 11.5)


def row_with(requests_per_s: float, **values: float) -> RecordRow:
    return {"name": "case", "values": {"requests_per_s": requests_per_s, **values}}


def test_the_share_is_of_the_limit_that_bounds_the_run() -> None:
    ceilings = {"read_bytes_per_s": 100e3, "flops_per_s": 1e6}
    decode, prompt = row_with(5.0), row_with(50.0)
    throughput.add_rates(decode, Case(1, 10, 10), 1, COST)
    throughput.add_rates(prompt, Case(1, 100, 1), 1, COST)
    throughput.add_shares(decode, ceilings, None)
    throughput.add_shares(prompt, ceilings, None)
    assert decode["limit"] == "bandwidth"
    read = COST.run_bytes(Case(1, 10, 10), 1) * 5.0
    assert decode["values"]["share_of_limit"] == pytest.approx(read / 100e3)
    assert prompt["limit"] == "products"
    products = COST.prefill_flops(1, 100) * 50.0
    assert prompt["values"]["share_of_limit"] == pytest.approx(products / 1e6)
    codes = row_with(50.0)  # products of 8 bits have no share of the dtype's limit
    throughput.add_rates(codes, Case(1, 100, 1), 1, COST)
    throughput.add_shares(codes, ceilings, "a8w8")
    assert "share_of_limit" not in codes["values"]


def test_the_table_has_a_line_for_each_case_and_a_dash_for_what_it_lacks() -> None:
    decode: RecordRow = {
        "name": "1x1x9",
        "values": dict(zip(UNITS, (9.0, 4.0, 25.0, 250.0), strict=True)) | {"share_of_limit": 0.9},
        "limit": "bandwidth",
    }
    prompt: RecordRow = {"name": "1x9x1", "values": {**decode["values"], "tpot_ms": None}}
    prompt["values"].pop("share_of_limit")
    head, first, second = cases_table([decode, prompt]).splitlines()
    assert len(head) == len(first) == len(second)
    assert " ".join(first.split()) == "1x1x9 9.00 4.000 25.0 250.0 90% of bandwidth"
    assert second.split() == ["1x9x1", "9.00", "-", "25.0", "250.0", "-"]
    assert "experts" not in head


@pytest.mark.parametrize(
    ("words", "has_tpot"),
    [
        (["--cases", "1x8x4"], True),
        (["--cases", "3x8x1"], False),
        (["--cases", "3x8x4", "--batch_size", "2"], True),
        (["--cases", "3x8x4", "--batch_size", "2", "--repetitions", "0"], True),
        (["--input_len", "8", "--output_len", "4"], True),
    ],
    ids=["decode", "prompt", "waiting", "rate", "one size"],
)
def test_every_kind_of_case_has_all_columns(
    words: Sequence[str], has_tpot: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "cases.json"
    words = ["--repetitions", "1", *words, "--output_file", str(output)]
    assert throughput.main([*ON_CPU, *words]) == 0
    (row,) = rows_of(output)
    for metric in UNITS:
        if metric == "tpot_ms":
            # Of a few tokens, the difference of two runs is less than a busy machine's noise.
            assert (row["values"][metric] is not None) is has_tpot
        else:
            assert row["values"][metric] > 0
    assert row["values"]["share_of_limit"] > 0
    head, line = capsys.readouterr().out.splitlines()[:2]
    assert head.split()[:5] == ["case", "TTFT,", "ms", "TPOT,", "ms"]
    cells = line.split()
    assert cells[0] == row["name"]
    assert len(cells) == 8
    assert (cells[2] == "-") is not has_tpot


def test_texts_are_measured_as_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "texts.json"
    words = ["--task", "embed", "--repetitions", "2", "--output_file", str(output)]
    assert throughput.main([*ON_CPU, *words, "--cases", "3x8x1", "--batch_size", "2"]) == 0
    (row,) = rows_of(output)
    values = row["values"]
    assert values["input_tokens_per_s"] == pytest.approx(8 * values["requests_per_s"])
    assert row["spread"]["input_tokens_per_s"]["n"] == 2
    assert values["share_of_limit"] > 0
    assert json.loads(output.read_text())["settings"]["task"] == "embed"
    cells = capsys.readouterr().out.splitlines()[1].split()
    assert cells[1:3] == cells[4:5] * 2 == ["-", "-"]
    for words, says in (
        (["--cases", "3x8x2"], "makes no tokens"),
        (["--cases", "3x8x1", "--guide", '{"regex": "a"}'], "leave --guide out"),
        (["--cases", "3x8x1", "--random_adapters", "2x4"], "leave --random_adapters out"),
        (["--output_len", "1", "--speculate_method", "lookahead"], "leave --speculate_method out"),
    ):
        with pytest.raises(UserError, match=says):
            throughput.parse([*ON_CPU, "--task", "embed", *words], tmp_path)


def test_the_file_has_what_the_numbers_belong_to(tmp_path: Path) -> None:
    output = tmp_path / "cases.json"
    words = [*ON_CPU, "--cases", "2x8x4,1x8x1", "--repetitions", "2", "--output_file", str(output)]
    assert throughput.main(words) == 0
    made = json.loads(output.read_text())
    assert set(made) == {"device", "date", "versions", "settings", "suites"}
    assert made["device"]["name"]
    assert {"regatta", "paddle", "python"} <= set(made["versions"])
    assert made["settings"]["dtype"] == "float32"
    suite = made["suites"]["throughput"]
    assert suite["command"].startswith("python -m predict.bench.throughput --model_name_or_path")
    assert suite["units"] == UNITS
    assert [row["name"] for row in suite["rows"]] == ["2x8x4", "1x8x1"]
    first, second = (row["spread"] for row in suite["rows"])
    assert {name: each["n"] for name, each in first.items()} == dict.fromkeys(UNITS, 2)
    assert all(each["min"] <= each["q1"] <= each["q3"] <= each["max"] for each in first.values())
    assert "tpot_ms" not in second
    (process,) = made["suites"]["process"]["rows"]
    assert process["values"]["peak_memory_bytes"] > 0


def test_a_picture_without_matplotlib_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    monkeypatch.setattr(throughput, "run", lambda *words: pytest.fail("was measured"))
    words = ["--cases", "1x8x1", "--plot", str(tmp_path / "cases.png")]
    assert throughput.main([*ON_CPU, *words]) == 2
    assert "[bench]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "says"), [("cases.jpg", "end the name in .png"), ("cases.json", "--output_file")]
)
def test_a_picture_that_would_be_none_is_refused(name: str, says: str, tmp_path: Path) -> None:
    words = ["--plot", str(tmp_path / name), "--output_file", str(tmp_path / "cases.json")]
    with pytest.raises(UserError, match=says):
        throughput.parse([*ON_CPU, *words])


def test_an_exported_programs_bytes_are_its_matrices(
    compiled: library.Library, tmp_path: Path
) -> None:
    config = EngineConfig(
        model_name_or_path=str(EXAMPLES / "demo_model"),
        dtype="bfloat16",
        inference_model=True,
        attention="append",
        quant_type="weight_only_int4",
        weightonly_group_size=64,
    )
    export_model(config, tmp_path)
    decoder = LLM(config).decoder
    assert decoder is not None
    exported = config.changed(model_name_or_path=str(tmp_path), mode="static")
    stored = program_bytes(exported, read_spec(tmp_path)[0])
    assert 1 <= stored / linear_bytes(decoder) < 1.3  # a small model's rotary table
