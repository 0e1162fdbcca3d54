"""Beam search equals HF transformers' (tests/golden/beams.json), alone and beside others."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.export_model import export_model
from predict import LLM, AsyncLLM, SamplingParams
from predict.device import library
from predict.engine.beams import Candidates, likeliest, log_softmax, num_candidates
from predict.engine.request_state import BeamGroup, Request
from predict.errors import UserError
from predict.nn.cache_formats import key_value_rows, kv_format_of
from predict.predictor import main
from predict.request import RequestOutput
from tests.support.beams import (
    check,
    check_all,
    check_neighbours,
    params_of,
    searches,
)
from tests.support.golden import config, golden, greedy
from tests.support.paths import DEMO
from tests.support.prefixes import ENTRIES, npy
from tests.support.quantized_caches import CACHE_TYPES, PROMPTS, model
from tests.support.quantized_caches import config as kv_config

SOME = 5  # searches: all penalties and ways to stop, of which neighbours in the list differ in one
# How the searches may be cut into steps and blocks, and what stands beside them in the batch.
COMPOSITIONS: dict[str, dict[str, Any]] = {
    "one by one, reserved": {"batch_size": 8},
    "three at once, reserved": {"batch_size": 24, "block_size": 16},
    "block": {"batch_size": 12, "block_size": 16, "attention": "block"},
    "tiny chunks": {"batch_size": 16, "attention": "append", "max_num_batched_tokens": 17},
    "whole prompts": {"batch_size": 16, "attention": "append", "chunked_prefill": False},
    "too few blocks": {
        "batch_size": 20,
        "block_size": 16,
        "attention": "append",
        "num_cache_blocks": 26,
    },
}


@pytest.mark.parametrize("case", ["llama_gqa", "qwen2", "mistral_window"])
def test_searches_find_what_transformers_finds(case: str, operators: dict[str, Any]) -> None:
    llm = LLM(config(case, batch_size=16, attention="append", **operators))
    check_all(llm, case, 1 if operators["inference_model"] else SOME)


@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_searches_of_the_demo_model(mode: str, compiled: library.Library, tmp_path: Path) -> None:
    settings = {"attention": "append", "inference_model": True, "batch_size": 16}
    if mode == "static":
        export_model(config(DEMO, **settings), tmp_path)
    source = tmp_path if mode == "static" else DEMO
    check_all(LLM(config(source, mode=mode, **settings)), "demo_model", SOME)


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("case", ["llama_gqa", "mistral_window"])
def test_batch_composition_changes_nothing(
    case: str, composition: str, compiled: library.Library
) -> None:
    llm = LLM(config(case, inference_model=True, **COMPOSITIONS[composition]))
    check_all(llm, case)
    assert (llm.stats().num_preemptions > 0) == (composition == "too few blocks")


def test_exported_program_finds_the_same(operators: dict[str, Any], tmp_path: Path) -> None:
    settings = {"attention": "append", "batch_size": 16, **operators}
    export_model(config("qwen2", **settings), tmp_path)
    check_all(
        LLM(config(tmp_path, mode="static", **settings)),
        "qwen2",
        1 if operators["inference_model"] else SOME,
    )


def test_neighbours_in_the_batch_change_nothing(operators: dict[str, Any]) -> None:
    settings = {"batch_size": 12, "attention": "append", "block_size": 16, **operators}
    check_neighbours(LLM(config("llama_gqa", **settings)))


def test_searches_of_an_async_engine(operators: dict[str, Any]) -> None:
    wanted = searches("llama_gqa")[::9]
    llm = AsyncLLM(config("llama_gqa", batch_size=10, attention="append", **operators))

    async def ask(search: dict[str, Any]) -> RequestOutput:
        return await llm.generate(search["prompt"], params_of(search))

    async def ask_all() -> list[RequestOutput]:
        async with llm:
            return await asyncio.gather(*map(ask, wanted))

    for output, search in zip(asyncio.run(ask_all()), wanted, strict=True):
        check(output, search)


def test_a_cached_prompt_is_shared_by_a_search(compiled: library.Library) -> None:
    settings = {"batch_size": 8, "attention": "append", "block_size": 16, "inference_model": True}
    llm = LLM(config("llama_gqa", **settings))
    search = max(searches("llama_gqa"), key=lambda each: len(each["prompt"]))
    for _ in range(2):
        check(llm.generate([search["prompt"]], params_of(search))[0], search)
    hits = llm.stats().num_prefix_hit_tokens
    assert hits == (len(search["prompt"]) - 1) // 16 * 16


def test_searches_and_prefixes_run_in_float16(operators: dict[str, Any], tmp_path: Path) -> None:
    entry = next(each for each in ENTRIES if each["model"] == "llama_gqa")
    path = npy(tmp_path / "prefix", entry)
    params = SamplingParams(num_beams=3, max_new_tokens=5)
    found = []
    for dtype in ("float16", "float32"):
        settings = {"dtype": dtype, "batch_size": 3, "block_size": 16, "prefix_path": path}
        outputs = LLM(config("llama_gqa", **settings, **operators)).generate(
            entry["prompts"], params
        )
        found.append([output.token_ids for output in outputs])
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_any_cache_and_block_size_gives_the_same_search(
    compiled: library.Library, tmp_path: Path, cache_type: str, dtype: str
) -> None:
    directory = model(tmp_path / "model", {"head_dim": 20})
    params = SamplingParams(max_new_tokens=24, num_beams=4, n=4)
    found = []
    for changes in (
        {"block_size": 16, "attention": "append", "batch_size": 8},
        {"block_size": 64, "attention": "append", "batch_size": 4},
        {"block_size": 128, "batch_size": 20},
        {"block_size": 16, "batch_size": 20, "attention": "append", "num_cache_blocks": 30},
    ):
        llm = LLM(kv_config(directory, cachekv_int8_type=cache_type, dtype=dtype, **changes))
        outputs = llm.generate(PROMPTS, params)
        found.append([[answer.token_ids for answer in output.outputs] for output in outputs])
        assert llm.stats().num_used_blocks == 0
    assert len({tuple(map(tuple, answers)) for answers in found[0]}) == len(PROMPTS)
    assert all(answers == found[0] for answers in found[1:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("row", ["dense", "int8_dynamic", "int4", "fp8"])
@pytest.mark.parametrize("backend", ["reference", "ops"])
def test_copied_blocks_are_equal_and_others_untouched(
    compiled: library.Library, row: str, backend: str, dtype: str
) -> None:
    import paddle
    from predict.ops import compiled as ops
    from predict.ops import plain as reference

    kv_format = kv_format_of(row)
    generator = np.random.default_rng(0)
    layer = []
    for tensor in kv_format.tensors(key_value_rows(2, 20), 7, 16, dtype):
        values = paddle.to_tensor(generator.integers(0, 255, tensor.shape).astype("float32"))
        layer.append(values.astype(tensor.dtype))
    before = [tensor.astype("float32").numpy() for tensor in layer]
    copies = [(1, 5), (1, 0), (3, 6)]
    {"reference": reference, "ops": ops}[backend].copy_blocks(kv_format.paged(layer), copies)
    paged = len(kv_format.paged(layer))
    assert paged == (4 if kv_format.scales == "token" else 2)
    for index, (tensor, expected) in enumerate(zip(layer, before, strict=True)):
        if index < paged:
            for source, target in copies:
                expected[target] = expected[source]
        np.testing.assert_array_equal(tensor.astype("float32").numpy(), expected)


def test_blocks_that_are_not_there_are_refused(compiled: library.Library) -> None:
    import paddle
    from predict.ops import compiled as ops

    cache = paddle.zeros([4, 1, 16, 8])
    with pytest.raises(ValueError, match=r"copies names block 4 \(allowed: 0 to 3\)"):
        ops.copy_blocks([cache], [(0, 4)])


@pytest.mark.parametrize("size", [1, 5, 64, 200, 3001])
def test_likeliest_is_a_stable_sort_without_minus_infinity(size: int) -> None:
    generator = np.random.default_rng(size)
    for count in (1, 4, 40):
        values = generator.integers(-9, 0, size).astype(np.float32)
        values[generator.random(size) < 0.2] = -np.inf
        expected = [int(i) for i in np.argsort(-values, kind="stable") if values[i] > -np.inf]
        found = likeliest(values, count)
        assert found.token_ids == expected[:count]
        assert found.log_probs == [float(values[i]) for i in expected[:count]]


def test_log_softmax_sums_to_one_and_nan_finds_nothing() -> None:
    values = np.random.default_rng(1).normal(0, 30, (3, 500)).astype(np.float32)
    values[1, 3] = np.nan
    values[2, 5:] = -np.inf
    log_softmax(values)
    np.testing.assert_allclose(np.exp(values[[0, 2]]).sum(axis=1), 1, rtol=1e-5)
    assert likeliest(values[1], 4) == Candidates([], [])
    assert len(likeliest(values[2], 8).token_ids) == 5


def test_enough_candidates_for_every_ending_token() -> None:
    params = SamplingParams(num_beams=3, stop_token_ids=(4, 5))
    assert num_candidates(params, ()) == 9
    assert num_candidates(params, (2, 4)) == 12
    assert num_candidates(SamplingParams(num_beams=3, ignore_eos=True), (2,)) == 6


def test_equal_scores_go_to_the_lower_beam_and_token() -> None:
    request = Request(0, [1], SamplingParams(num_beams=2))
    request.max_num_tokens = 9
    group = BeamGroup(request)
    assert group.choose([Candidates([3, 5, 7], [-1.0, -1.0, -1.0])], ()) == [(0, 3), (0, 5)]
    group.beams = [request, request]
    group.scores = [np.float32(-1), np.float32(-1)]
    equal = Candidates([2, 6], [-1.0, -1.0])
    assert group.choose([equal, equal], ()) == [(0, 2), (0, 6)]


def test_an_aborted_search_frees_its_blocks_at_any_step() -> None:
    llm = LLM(config("llama_gqa", batch_size=8, attention="append", block_size=16))
    scheduler = llm.engine.scheduler
    for num_steps in range(8):
        request = Request(num_steps, list(range(5, 40)), SamplingParams(num_beams=4, max_length=60))
        llm.engine.add(request)
        for _ in range(num_steps):
            llm.engine.step()
        assert llm.engine.abort(num_steps) is request
        assert (request.finish_reason, request.output_token_ids) == ("abort", [])
        assert scheduler.block_manager.num_used_blocks == 0
        assert not scheduler.has_unfinished()


def test_data_file_and_flags_ask_for_searches(compiled: library.Library, tmp_path: Path) -> None:
    llm = LLM(config(DEMO, batch_size=8, attention="append", inference_model=True))
    params = SamplingParams(num_beams=4, max_new_tokens=9, n=2)
    text = "def gcd(a, b):"
    expected = [answer.text for answer in llm.generate([text], params)[0].outputs]
    lines = [
        {"src": text},
        {"src": text, "num_return_sequences": 1},
        {"src": text, "num_beams": 1, "n": 1},
    ]
    data, out = tmp_path / "data.jsonl", tmp_path / "out.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)))
    words = ["--model_name_or_path", str(DEMO), "--dtype", "float32", "--device", "cpu"]
    words += ["--append_attn", "--batch_size", "8", "--max_new_tokens", "9"]
    words += ["--decode_strategy", "beam_search", "--num_return_sequences", "2"]
    words += ["--data_file", str(data), "--output_file", str(out), "--chat_template", "none"]
    assert main(words) == 0
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert (results[0]["output"], results[0]["outputs"]) == (expected[0], expected)
    assert results[1] == {"src": text, "tgt": "", "output": expected[0]}
    greedy_text = llm.generate([text], SamplingParams(max_new_tokens=9, temperature=0.0))[0].text
    assert results[2]["output"] == greedy_text


def test_a_line_with_too_many_beams_is_refused_before_loading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"src": "a"}\n{"src": "b", "num_beams": 3}')
    words = ["--model_name_or_path", str(DEMO), "--dtype", "float32", "--batch_size", "2"]

    def make_llm(*_: Any) -> Any:
        pytest.fail("the model was loaded")

    assert main([*words, "--data_file", str(data)], make_llm) == 2
    assert "line 2 of data.jsonl: num_beams 3 is more than the batch" in capsys.readouterr().err


def test_prompt_logprobs_beside_a_search(compiled: library.Library) -> None:
    llm = LLM(config("llama_gqa", batch_size=4, attention="append", inference_model=True))
    prompt = golden("llama_gqa")["prompts"][2]
    plain = SamplingParams(prompt_logprobs=1, max_new_tokens=1)
    params = SamplingParams(num_beams=4, prompt_logprobs=1, max_new_tokens=6)
    expected = llm.generate([prompt], plain)[0].prompt_logprobs
    output = llm.generate([prompt], params)[0]
    assert output.prompt_logprobs == expected
    unmeasured = SamplingParams(num_beams=4, max_new_tokens=6)
    assert output.token_ids == llm.generate([prompt], unmeasured)[0].token_ids


def test_processors_change_the_log_probabilities_of_a_search(compiled: library.Library) -> None:
    llm = LLM(config("llama_gqa", batch_size=4, attention="append", inference_model=True))
    prompt = golden("llama_gqa")["prompts"][2]
    plain = llm.generate([prompt], SamplingParams(num_beams=4, max_new_tokens=8))[0]
    first = plain.token_ids[0]
    banned = SamplingParams(num_beams=4, max_new_tokens=8, bad_words=((first,),))
    assert first not in llm.generate([prompt], banned)[0].token_ids
    wanted = SamplingParams(num_beams=4, max_new_tokens=8, logit_bias={7: 50.0})
    assert llm.generate([prompt], wanted)[0].token_ids == (7,) * 8
    params = SamplingParams(num_beams=4, max_new_tokens=8, no_repeat_ngram_size=1)
    tokens = llm.generate([prompt], params)[0].token_ids
    assert len({*prompt, *tokens}) == len(set(prompt)) + 8


def test_a_row_without_numbers_fails_its_search_alone() -> None:
    llm = LLM(config("llama_gqa", batch_size=6, attention="append"))
    expected = golden("llama_gqa")
    chooser: Any = llm.engine.runner.chooser  # type: ignore[attr-defined]
    tokens = chooser.tokens
    steps = iter(range(100))

    def broken(*given: Any) -> Any:
        found = tokens(*given)
        if next(steps) == 3:
            index = next(i for i, entry in enumerate(found) if isinstance(entry, Candidates))
            found[index] = Candidates([], [])
        return found

    chooser.tokens = broken
    num_new = len(expected["greedy"][0])
    plain = SamplingParams(max_new_tokens=num_new, temperature=0.0, ignore_eos=True)
    prompts = expected["prompts"][:2]
    search, neighbour = llm.generate(prompts, [SamplingParams(num_beams=4), plain])
    assert (search.finish_reason, search.token_ids) == ("error", ())
    assert "no finite largest logit" in (search.outputs[0].error or "")
    assert list(neighbour.token_ids) == expected["greedy"][1]
    assert llm.stats().num_used_blocks == 0


def test_a_streamed_search_yields_its_text_at_the_end() -> None:
    search = searches("demo_model")[0]
    llm = LLM(config(DEMO, batch_size=2))
    pieces = list(llm.stream(search["prompt"], params_of(search)))
    output = llm.generate([search["prompt"]], params_of(search))[0]
    assert len(pieces) == search["num_return_sequences"] == 1
    assert pieces[0].text == output.text == output.outputs[0].text
    assert list(pieces[0].token_ids) == search["sequences"][0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_beams": 0}, r"num_beams 0 is not supported \(allowed: an integer of at least 1"),
        ({"num_beams": True}, "num_beams True is not supported"),
        ({"num_beams": 2, "n": 3}, r"n 3 is more than num_beams 2.*\(allowed: 1 to num_beams\)"),
        ({"num_beams": 2, "early_stopping": "always"}, "allowed: False, True, 'never'"),
        ({"num_beams": 2, "length_penalty": float("nan")}, "length_penalty nan"),
        ({"num_beams": 2, "temperature": 0.7}, r"temperature 0.7 .* \(allowed: 1.0, 0.0\)"),
        ({"num_beams": 2, "top_k": 5}, "top_k 5 is not supported with num_beams 2"),
        ({"num_beams": 2, "top_p": 0.9}, "top_p 0.9 is not supported with num_beams 2"),
        ({"num_beams": 2, "min_p": 0.1}, "min_p 0.1 is not supported with num_beams 2"),
        ({"num_beams": 2, "seed": 3}, r"seed 3 .* \(allowed: None\): a beam search draws no"),
        ({"num_beams": 2, "typical_p": 0.5}, "typical_p 0.5 is not supported with num_beams 2"),
        ({"num_beams": 2, "best_of": 2}, "best_of 2 is not supported with num_beams 2"),
        ({"num_beams": 2, "logprobs": 0}, "logprobs 0 is not supported with num_beams 2"),
        ({"num_beams": 2, "stop": "x"}, r"stop \('x',\) is not supported with num_beams 2"),
    ],
)
def test_parameters_that_no_search_has_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SamplingParams(**values)


def test_more_beams_than_the_batch_and_drafts_are_refused_before_work() -> None:
    llm = LLM(config("llama_gqa", batch_size=3, speculate_method="inference_with_reference"))
    with pytest.raises(UserError, match=r"num_beams 4 .*\(allowed: 1 to 3, which is batch_size"):
        llm.generate([[1, 2]], SamplingParams(num_beams=4))
    with pytest.raises(UserError, match="does not go with beam search; leave out one of the two"):
        llm.generate([[1, 2]], SamplingParams(num_beams=2))
    assert llm.stats().num_steps == 0
    assert greedy(llm, [[1, 2]], 3)  # goes on working


def test_a_search_larger_than_the_cache_is_refused_with_numbers() -> None:
    llm = LLM(
        config("llama_gqa", batch_size=4, attention="append", num_cache_blocks=7, max_length=96)
    )
    with pytest.raises(UserError, match=r"output tokens of 4 beams need 9 cache blocks of 32 to"):
        llm.generate([[1] * 40], SamplingParams(num_beams=4, max_new_tokens=50))
    assert llm.generate([[1] * 40], SamplingParams(num_beams=3, max_new_tokens=50))
