"""What other engines reach, from files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from predict.bench.peers import Peer, Work, read_peers
from predict.errors import UserError
from predict.loading.model import read_spec

SHAPES = Path(__file__).parents[2] / "examples" / "shapes"


@pytest.fixture
def work() -> Work:
    spec, _ = read_spec(SHAPES / "llama-3-8b")
    return Work({"name": "NVIDIA H200"}, spec, "bfloat16", "none", "dense")


def test_peers_are_of_the_same_work_on_the_same_device(work: Work) -> None:
    found = read_peers(None, work)
    assert found["1x128x257"] == Peer("vLLM 0.26", "tpot_ms", 4.795)
    assert found["1x1024x1"].metric == "ttft_ms"
    assert found["512x512x256"].metric == "output_tokens_per_s"
    assert "1536x1000x1000" not in found  # fp8 weights and cache
    fp8 = read_peers(None, replace(work, quant_type="a8w8_fp8"))
    assert fp8["1x128x257"].value < found["1x128x257"].value
    assert fp8["512x512x256"].value > found["512x512x256"].value
    assert list(read_peers(None, replace(work, quant_type="a8w8_fp8", kv_format="fp8"))) == [
        "1536x1000x1000"
    ]
    small, _ = read_spec(SHAPES / "llama-3.2-1b")
    for other in (
        replace(work, spec=small),
        replace(work, device={"name": "NVIDIA A100"}),
        replace(work, dtype="float16"),
        replace(work, quant_type="weight_only_int8"),
        replace(work, lm_head_quant_type="weight_only_int8"),
    ):
        assert read_peers(None, other) == {}


def test_a_rate_is_better_when_more_and_a_time_when_less() -> None:
    assert Peer("other", "tpot_ms", 5.0).times_as_good(4.0) == pytest.approx(1.25)
    assert Peer("other", "output_tokens_per_s", 5.0).times_as_good(4.0) == pytest.approx(0.8)


def test_a_file_of_ones_own_is_read(work: Work, tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    row = {"name": "x", "case": "1x2x3", "unit": "ms per token", "values": {"value": 2}}
    content = {
        "engine": "mine",
        "device": {"name": "NVIDIA H200"},
        "shape": {"num_layers": 32},
        "suites": {
            "any": {
                "work": {"dtype": "bfloat16", "quant_type": "none", "kv_format": "dense"},
                "rows": [row],
            }
        },
    }
    path.write_text(json.dumps(content))
    assert read_peers(path, work) == {"1x2x3": Peer("mine", "tpot_ms", 2.0)}
    assert read_peers(tmp_path, work) == read_peers(path, work)
    row.pop("values")
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"own.json is no file of peers \(KeyError: 'values'\)"):
        read_peers(path, work)
    with pytest.raises(UserError, match="does not exist"):
        read_peers(tmp_path / "missing", work)


def test_processors_of_one_name_are_told_apart_where_the_file_does(
    work: Work, tmp_path: Path
) -> None:
    types = {"dtype": "bfloat16", "quant_type": "none", "kv_format": "dense"}
    row = {"name": "x", "work": types, "cases": {"ttft_ms": "1x2x1"}, "values": {"ttft_ms": 2.5}}
    row["shape"] = {"num_layers": 32}
    content = {
        "device": {"name": "AMD EPYC", "family": 25, "num_threads": 2, "features": []},
        "suites": {"regatta": {"rows": [row]}, "peer": {"engine": "mine", "rows": [row]}},
    }
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "turns.json").write_text(json.dumps(content))
    here = {"name": "AMD EPYC", "family": 25, "model": 17, "num_threads": 2}
    mine = replace(work, device=here)
    assert read_peers(tmp_path, mine) == {"1x2x1": Peer("mine", "ttft_ms", 2.5)}
    assert read_peers(tmp_path, replace(work, device={**here, "family": 26})) == {}
    assert read_peers(tmp_path, replace(work, device={**here, "num_threads": 4})) == {}
