"""Requests that come, go and are preempted at random; the two attention styles; several GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from predict import LLM, SamplingParams
from predict.device import devices
from predict.engine.batch import span_inputs
from predict.engine.request_state import Request
from predict.engine.scheduled import ScheduledSpan
from tests.support.golden import GOLDEN, check_greedy, config, greedy, step_logits
from tests.support.gpu_engines import SETTINGS, met_traffic
from tests.support.paths import DEMO

CASE = "llama_gqa"
NUM_REQUESTS = 1000
LONGEST = 110  # output tokens


def random_prompts(count: int) -> list[list[int]]:
    """Random prompts of 1 to 36 tokens, some of which begin alike."""
    generator = np.random.default_rng(0)
    shared = generator.integers(3, 190, 20).tolist()
    prompts = []
    for index in range(count):
        own = generator.integers(3, 190, int(generator.integers(1, 17))).tolist()
        prompts.append(shared + own if index % 3 == 0 else own)
    return prompts


@pytest.mark.parametrize("attention", ["append", "block"])
def test_a_thousand_arrivals_aborts_and_preemptions(gpu: devices.Device, attention: str) -> None:
    prompts = random_prompts(24)
    reference = LLM(config(CASE, batch_size=8, device="cpu", inference_model=True))
    wanted = greedy(reference, prompts, LONGEST)
    small = {"batch_size": 12, "block_size": 16, "num_cache_blocks": 26, "max_length": 160}
    llm = LLM(config(CASE, **{**SETTINGS, **small, "attention": attention}))
    requests = met_traffic(llm, prompts, wanted, NUM_REQUESTS, most_at_once=4, seed=1)
    assert llm.engine.scheduler.block_manager.num_free_blocks == 26
    # The run is worth something only if it met all of these.
    assert sum(request.finish_reason == "abort" for request in requests) > 30
    assert llm.stats().num_preemptions > 30
    assert llm.stats().num_prefix_hit_tokens > 100


def test_block_attn_and_append_attn_give_the_same_text(gpu: devices.Device) -> None:
    prompts = random_prompts(24)
    texts, num_steps = {}, {}
    for attention in ("append", "block"):
        settings = {**SETTINGS, "batch_size": 8, "attention": attention}
        llm = LLM(config(CASE, max_num_batched_tokens=16, **settings))
        texts[attention] = greedy(llm, prompts, LONGEST)
        num_steps[attention] = llm.stats().num_steps
    assert texts["block"] == texts["append"]
    assert num_steps["block"] > num_steps["append"]  # prompts do not ride along


def log_probabilities(llm: LLM, token_ids: list[int]) -> npt.NDArray[np.float64]:
    """Of each token after the first, given those before it."""
    blocks = list(range(-(-len(token_ids) // 32)))
    request = Request(0, token_ids, SamplingParams())
    span = ScheduledSpan(request, len(token_ids), 0, blocks, True)
    rows = np.arange(len(token_ids) - 1, dtype=np.int32)
    logits = step_logits(llm, span_inputs([span], 32), rows).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    chosen = logits[np.arange(len(logits)), token_ids[1:]]
    result: npt.NDArray[np.float64] = chosen - np.log(np.exp(logits).sum(axis=1))
    return result


@pytest.mark.parametrize(
    ("dtype", "limit"), [("float32", 1e-3), ("float16", 0.02), ("bfloat16", 0.1)]
)
def test_log_probabilities_are_the_cpus(gpu: devices.Device, dtype: str, limit: float) -> None:
    text = (DEMO / "heldout.txt").read_text(encoding="utf-8")[4000:8000]
    settings = {**SETTINGS, "max_length": 1024, "batch_size": 1024, "num_cache_blocks": 32}
    cpu = LLM(config(DEMO, **{**settings, "device": "cpu"}))
    assert cpu.tokenizer is not None
    token_ids = cpu.tokenizer.encode(text)[:800]
    wanted = log_probabilities(cpu, token_ids)
    got = log_probabilities(LLM(config(DEMO, dtype=dtype, **settings)), token_ids)
    difference = np.abs(got - wanted)
    assert difference.mean() < limit
    assert abs(got.mean() - wanted.mean()) < limit / 4  # the perplexity


def second_gpu() -> str:
    """The second GPU's name; skips without one."""
    count = len(devices.driver_info().gpus)
    if count < 2:
        pytest.skip(f"{count} GPU here; this needs two")
    return "gpu:1"


def test_second_gpu_answers_as_the_first(gpu: devices.Device) -> None:
    name = second_gpu()
    try:
        for case in (CASE, "qwen2"):
            llm = LLM(config(case, batch_size=3, **{**SETTINGS, "device": name}))
            assert llm.device is not None
            assert llm.device.index == 1
            assert devices.memory_info(llm.device).in_use > 0
            check_greedy(llm, case)
    finally:
        devices.activate(gpu)


def test_engines_on_two_gpus_take_turns(gpu: devices.Device) -> None:
    name = second_gpu()
    expected = json.loads((GOLDEN / CASE / "golden.json").read_text())
    try:
        llms = [
            LLM(config(CASE, batch_size=3, **{**SETTINGS, "device": each}))
            for each in ("gpu:0", name)
        ]
        for llm in (*llms, *llms):
            assert llm.device is not None
            devices.activate(llm.device)
            assert greedy(llm, expected["prompts"], 8) == [t[:8] for t in expected["greedy"]]
    finally:
        devices.activate(gpu)


def test_operators_follow_their_tensors_to_the_second_gpu(gpu: devices.Device) -> None:
    second_gpu()
    import paddle
    from predict.nn.blocks import Activation
    from predict.ops import compiled as ops

    x = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    cpu = paddle.to_tensor(x, place=paddle.CPUPlace())
    results = []
    for index in (0, 1, 0, 1):
        place = paddle.CustomPlace(devices.PLUGIN_TYPE, index)
        out = ops.activate(cpu._copy_to(place, True), Activation())
        assert out.place == place
        results.append(out.cpu().numpy())
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_copies_between_gpus_go_both_ways_and_in_order(gpu: devices.Device) -> None:
    second_gpu()
    import paddle

    places = [paddle.CustomPlace(devices.PLUGIN_TYPE, index) for index in range(2)]
    values = np.arange(3 << 20, dtype=np.float32)
    tensor = paddle.to_tensor(values, place=paddle.CPUPlace())._copy_to(places[0], True)
    for turn in range(8):
        tensor = tensor._copy_to(places[(turn + 1) % 2], turn % 3 == 0)
    np.testing.assert_array_equal(tensor.cpu().numpy(), values)


def test_gpu_that_is_not_there_is_named(gpu: devices.Device, tmp_path: Path) -> None:
    count = len(devices.driver_info().gpus)
    with pytest.raises(ValueError, match=rf"gpu:{count} does not exist \(allowed: gpu:0 to"):
        LLM(config(CASE, **{**SETTINGS, "device": f"gpu:{count}"}))
