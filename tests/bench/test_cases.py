"""predict.bench.throughput --cases: sizes, peers and the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from export.export_model import export_model
from predict import LLM, EngineConfig
from predict.bench import throughput
from predict.bench.cases import Case, Peer, add_peer, cases_table, parse_cases, peer_of
from predict.device import library
from predict.errors import UserError
from predict.loading.model import read_spec

EXAMPLES = Path(__file__).parents[2] / "examples"
DEMO = ["--model_name_or_path", str(EXAMPLES / "demo_model"), "--dtype", "float32"]


@pytest.mark.parametrize("text", ["1x2", "1x2x0", "ax2x3", "1x2x3x4", "1 x2x-3"])
def test_what_is_no_case_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="REQUESTSxINPUTxOUTPUT"):
        parse_cases([text])


def test_cases_have_their_own_sizes() -> None:
    with pytest.raises(UserError, match="leave --input_len or --cases out"):
        throughput.parse([*DEMO, "--cases", "1x2x3", "--input_len", "5"])
    with pytest.raises(UserError, match="leave --speculate_method or --cases out"):
        throughput.parse([*DEMO, "--cases", "1x2x3", "--speculate_method", "lookahead"])
    config, plan, _, _ = throughput.parse([*DEMO, "--cases", "4x20x3,2x8x40", "--device", "cpu"])
    assert plan.cases == (Case(4, 20, 3), Case(2, 8, 40))
    assert (config.scheduling.batch_size, config.scheduling.max_length) == (4, 48)
    config, *_ = throughput.parse([*DEMO, "--cases", "4x20x3", "--batch_size", "2"])
    assert config.scheduling.batch_size == 2


def test_peers_are_of_the_same_work_on_the_same_gpu() -> None:
    spec, _ = read_spec(EXAMPLES / "shapes" / "llama-3-8b")
    case = Case(1, 128, 257)
    found = peer_of(case, spec, "NVIDIA H200", "bfloat16", "dense", "dense")
    assert found is not None
    assert found.metric == "tpot_ms"
    fp8 = peer_of(case, spec, "NVIDIA H200", "bfloat16", "a8w8_fp8", "dense")
    assert fp8 is not None
    assert fp8.value < found.value
    small, _ = read_spec(EXAMPLES / "shapes" / "llama-3.2-1b")
    assert peer_of(case, small, "NVIDIA H200", "bfloat16", "dense", "dense") is None
    assert peer_of(case, spec, "NVIDIA A100", "bfloat16", "dense", "dense") is None
    assert peer_of(case, spec, None, "bfloat16", "dense", "dense") is None
    assert peer_of(case, spec, "NVIDIA H200", "bfloat16", "weight_only_int8", "dense") is None
    assert peer_of(Case(2, 128, 257), spec, "NVIDIA H200", "bfloat16", "dense", "dense") is None


def test_the_table_says_how_many_times_as_good() -> None:
    latency: dict[str, Any] = {"tpot_ms": 4.0, "ttft_ms": 9.0, "output_tokens_per_s": 250.0}
    rate: dict[str, Any] = {"tpot_ms": None, "ttft_ms": None, "output_tokens_per_s": 12000.0}
    add_peer(latency, Peer("other", "tpot_ms", 5.0))
    add_peer(rate, Peer("other", "output_tokens_per_s", 10000.0))
    assert latency["times_as_good"] == pytest.approx(1.25)
    assert rate["times_as_good"] == pytest.approx(1.2)
    alone: dict[str, Any] = {"tpot_ms": None, "ttft_ms": 9.0, "output_tokens_per_s": 1.0}
    add_peer(alone, Peer("other", "tpot_ms", 5.0))  # was not measured
    assert "peer" not in alone
    assert alone["metric"] == "ttft_ms"
    lines = cases_table(
        [
            {"case": "1x1x9", **latency, "decode_bandwidth_share": 0.861},
            {"case": "9x1x9", **rate},
            {"case": "1x9x1", **alone},
        ]
    ).splitlines()
    assert lines[1].split() == [
        "1x1x9",
        "ms",
        "per",
        "token",
        "4.000",
        "5.000",
        "1.25",
        "86%",
        "other",
    ]
    assert " ".join(lines[2].split()) == "9x1x9 output tokens/s 12,000 10,000 1.20 other"
    assert " ".join(lines[3].split()) == "1x9x1 ms to first token 9.00"


def test_cases_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "cases.json"
    sizes = ["--cases", "1x8x4,3x8x1", "--repetitions", "1", "--output_file", str(output)]
    assert throughput.main([*DEMO, "--device", "cpu", "--append_attn", *sizes]) == 0
    first, second = json.loads(output.read_text())["cases"]
    assert (first["case"], first["metric"], second["metric"]) == ("1x8x4", "tpot_ms", "ttft_ms")
    assert first["decode_bandwidth_share"] > 0
    assert second["prefill_flops_share"] > 0
    assert second["output_tokens_per_s"] > 0
    assert "3x8x1" in capsys.readouterr().out
    rate = ["--cases", "3x8x4", "--batch_size", "2", "--repetitions", "0"]
    assert throughput.main([*DEMO, "--device", "cpu", "--append_attn", *rate]) == 0
    assert "output tokens/s" in capsys.readouterr().out


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
    stored = throughput.program_bytes(exported, read_spec(tmp_path)[0])
    assert 1 <= stored / throughput.linear_bytes(decoder) < 1.3  # a small model's rotary table
