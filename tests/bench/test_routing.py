"""Which experts a benchmark's run chooses: routers of random weights, and what is counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predict import LLM, EngineConfig
from predict.bench import throughput
from predict.bench.cases import Case
from predict.bench.cost import Cost
from predict.bench.routing import (
    ChosenExperts,
    choose,
    counted,
    counts_experts,
    skew,
    spreads,
    wanted_shares,
)
from predict.device.place import to_float32
from predict.errors import UserError
from predict.nn.kinds.experts import Experts, Router
from predict.ops import plain
from predict.request import SamplingParams
from tests.support.golden import GOLDEN

EXAMPLES = Path(__file__).parents[2] / "examples"
CHANGES = {"num_local_experts": 32, "hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 600}
GROUPED = Router(
    64, 6, "sigmoid", correction=True, num_groups=8, top_groups=4, group_score="top_two"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A config.json of Qwen 3's family with 32 experts, 4 of which are chosen."""
    values = json.loads((GOLDEN / "qwen3_moe_30b" / "config.json").read_text())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(values | CHANGES))
    return tmp_path / "model"


def llm_of(folder: Path, **changes: Any) -> LLM:
    settings = {"load_format": "dummy", "batch_size": 8, "max_length": 64, "src_length": 32}
    settings["inference_model"] = False
    return LLM(EngineConfig(model_name_or_path=str(folder), **{**settings, **changes}))


def generate(llm: LLM, num_tokens: int) -> None:
    prompts = np.random.default_rng(1).integers(0, 600, (8, 16)).tolist()
    llm.generate(prompts, SamplingParams(max_new_tokens=num_tokens, ignore_eos=True))


@pytest.mark.parametrize("num_experts", [8, 60, 128, 256])
@pytest.mark.parametrize("top_k", [1, 4, 8])
def test_wanted_shares_fall_and_sum_to_what_a_token_takes(num_experts: int, top_k: int) -> None:
    shares = wanted_shares(num_experts, top_k)
    assert shares.sum() == pytest.approx(top_k)
    assert (np.diff(shares) <= 1e-12).all()
    assert shares[0] <= max(0.45, top_k / num_experts) + 1e-9


@pytest.mark.parametrize(
    "router", [Router(60, 4), Router(128, 8, bias=True), GROUPED], ids=["60", "128", "grouped"]
)
def test_experts_are_chosen_as_often_as_wanted(router: Router) -> None:
    """Of other tokens than those that the spreads were found with."""
    rows = np.random.default_rng(9).standard_normal((8000, router.num_experts)).astype(np.float32)
    plain_router = replace(router, bias=False, correction=False)
    ids = choose(rows, plain_router, np.diag(spreads(router)).astype(np.float32))
    shares = np.sort(np.bincount(ids.reshape(-1), minlength=router.num_experts) / len(rows))[::-1]
    np.testing.assert_allclose(shares, wanted_shares(router.num_experts, router.top_k), rtol=0.4)


@pytest.mark.parametrize("inference_model", [False, True])
def test_a_skewed_router_chooses_fewer_experts(
    inference_model: bool, folder: Path, request: pytest.FixtureRequest
) -> None:
    if inference_model:
        request.getfixturevalue("compiled")
    more: dict[str, Any] = {"inference_model": inference_model}
    more |= {"attention": "append"} if inference_model else {}
    found = []
    for skewed in (False, True):
        llm = llm_of(folder, **more)
        assert counts_experts(llm)
        if skewed:
            skew(llm, 0)
        with counted(llm) as chosen:
            generate(llm, 9)
        assert [len(chosen.counts[step]) for step in ("prompt", "decode")] == [3, 24]
        found.append(chosen.means())
    for step in ("prompt_experts", "decode_experts"):
        assert 4 <= found[1][step] < found[0][step] <= 32


def test_routers_are_written_where_they_lie(folder: Path) -> None:
    llm = llm_of(folder)
    assert llm.decoder is not None
    routers = [block.router for block in llm.decoder.blocks() if isinstance(block, Experts)]
    before = [router.data_ptr() for router in routers]
    skew(llm, 0)
    assert [router.data_ptr() for router in routers] == before
    lengths = [np.linalg.norm(to_float32(router.numpy()), axis=1) for router in routers]
    ordered = np.sort(spreads(Router(32, 4)))
    for each in lengths:
        np.testing.assert_allclose(np.sort(each) / each.mean(), ordered / ordered.mean(), 1e-2)
    assert not np.array_equal(lengths[0].argsort(), lengths[1].argsort())


@pytest.mark.parametrize("rows_of_a_thread", [512, 3])
def test_what_is_counted_is_what_the_run_chooses(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rows_of_a_thread: int
) -> None:
    """Plain Paddle's own run shows its choice: the count of the same requests says the same."""
    monkeypatch.setattr("predict.bench.routing.ROWS_OF_A_THREAD", rows_of_a_thread)
    llm = llm_of(folder)
    with counted(llm) as chosen:
        generate(llm, 5)
    own, route = ChosenExperts(), plain.route

    def watched(x: Any, weights: Experts) -> Any:
        ids, shares = route(x, weights)
        own.counts["decode"].append(len(np.unique(ids.numpy())))
        return ids, shares

    monkeypatch.setattr(plain, "route", watched)
    again = llm_of(folder)
    generate(again, 5)
    assert own.counts["decode"] == chosen.counts["prompt"] + chosen.counts["decode"]


def test_a_run_prints_and_writes_what_it_counted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = folder.parent / "out.json"
    words = ["--model_name_or_path", str(folder), "--load_format", "dummy", "--device", "cpu"]
    words += ["--inference_model=false", "--dtype=float32", "--cases", "4x8x3,1x8x1"]
    words += ["--repetitions", "1", "--routing", "skewed", "--output_file", str(output)]
    assert throughput.main(words) == 0
    head, first, second, *_ = capsys.readouterr().out.splitlines()
    assert head.endswith("experts, prompts/decode")
    made = json.loads(output.read_text())
    rows = made["suites"]["throughput"]["rows"]
    values = rows[0]["values"]
    assert 4 < values["decode_experts"] <= 16
    assert first.endswith(f"{values['prompt_experts']:.1f} / {values['decode_experts']:.1f}")
    assert second.endswith(" / -")
    assert "decode_experts" not in rows[1]["values"]
    assert made["settings"]["routing"] == "skewed"


def test_of_many_long_prompts_a_few_are_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = llm_of(folder)
    monkeypatch.setattr(throughput, "COUNTED_TOKENS", 16)
    lengths = []

    def timed(llm: Any, prompts: list[list[int]], params: list[SamplingParams]) -> None:
        lengths.append(([len(prompt) for prompt in prompts], params[0].max_new_tokens))
        whole(llm, prompts, params)

    whole = throughput.timed
    monkeypatch.setattr(throughput, "timed", timed)
    plan = throughput.Plan(cases=(), batch_size=4, repetitions=1, seed=0)
    few = throughput.count_experts(llm, plan, Case(2, 8, 3))
    assert lengths == [([8, 8], 1), ([8, 8], 3)]
    many = throughput.count_experts(llm, plan, Case(9, 8, 3))
    assert lengths[2:] == [([8, 8], 1), ([4] * 4, 3)]
    assert few["prompt_experts"] == many["prompt_experts"]
    assert few.keys() == many.keys() == {"prompt_experts", "decode_experts"}
    assert throughput.count_experts(llm, plan, Case(2, 8, 1)).keys() == {"prompt_experts"}
    assert lengths[4:] == [([8, 8], 1)]


def test_steps_of_one_kind_can_be_counted_alone(folder: Path) -> None:
    llm = llm_of(folder)
    with counted(llm) as chosen:
        chosen.counting = "decode"
        generate(llm, 3)
    assert [len(chosen.counts[step]) for step in ("prompt", "decode")] == [0, 6]


def test_a_decoding_step_reads_the_experts_that_were_counted(folder: Path) -> None:
    llm = llm_of(folder)
    cost = Cost.of(llm.spec, "float32")
    inner, hidden, layers = 12, 64, 3
    expert = 3 * inner * hidden * layers * 4
    few, many = (cost.choosing(llm.spec, number).read_bytes(1) for number in (5.0, 9.0))
    assert many - few == pytest.approx(4 * expert, rel=1e-6)
    assert cost.choosing(llm.spec, 32.0).read_bytes(1) == pytest.approx(cost.weight_bytes)
    assert cost.choosing(llm.spec, None) is cost


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["--load_format", "auto"], "add --load_format dummy"),
        (["--load_format", "dummy"], "has none; leave it out"),
    ],
)
def test_a_routing_without_random_routers_is_refused(changes: list[str], said: str) -> None:
    words = ["--model_name_or_path", str(EXAMPLES / "demo_model"), "--device", "cpu"]
    words += ["--dtype", "float32", "--routing", "skewed", "--inference_model", "--append_attn"]
    config, plan, *_ = throughput.parse([*words, *changes])
    with pytest.raises(UserError, match=said):
        throughput.run(config, plan)
