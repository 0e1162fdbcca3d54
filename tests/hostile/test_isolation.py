"""One request that fails, in whatever stage, beside 31 good ones: they do not notice."""

from __future__ import annotations

import asyncio
import functools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import predict.engine.engine
import predict.engine.samples
from export.export_model import export_model
from predict import LLM, AsyncLLM, EngineConfig, SamplingParams, predictor
from predict.device import library
from predict.engine.block_manager import BlockManager
from predict.engine.logits_processors import Adjustment
from predict.engine.logprobs import LogprobRecord
from predict.engine.request_state import BeamGroup, Request
from predict.engine.sampler import Sampler
from predict.errors import EngineError, TokenizerError
from predict.request import RequestOutput
from predict.speculative.inference_with_reference import NgramIndex
from predict.text.answer_text import AnswerText
from predict.text.detokenizer import TextStream
from predict.text.tokenizer import Tokenizer
from tests.support.drafts import Generous

MARK = 7  # the first token of the prompt that fails
NUM_MARKED = 43  # its tokens: no other prompt has so many
PLACE = 13  # of the bad prompt among the good ones
DRAFTS = {
    "none": {},
    "n-grams": {"speculate_method": "inference_with_reference"},
    "lookahead": {"speculate_method": "lookahead"},
    "draft model": {"speculate_method": "draft_model"},
}
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "n": 2},
    {"temperature": 1.0, "repetition_penalty": 1.2, "logprobs": 0},
    {"temperature": 0.7, "min_p": 0.05, "stop": ("\x00\x00",)},
    {"temperature": 0.0, "logit_bias": {9: 100.0}},  # repeats itself: drafts are right
    {"temperature": 0.0, "num_beams": 2},
]
Inject = Callable[[pytest.MonkeyPatch, LLM], None]


def good_requests(beams: bool) -> list[tuple[list[int], SamplingParams]]:
    random = np.random.default_rng(0)
    requests = []
    for index in range(31):
        period = random.integers(8, 500, 5).tolist()
        prompt = (period * 6)[: 3 + index % 23]
        values = PARAMS[index % (6 if beams else 5)]
        seed = None if "num_beams" in values else index
        params = SamplingParams(max_new_tokens=7, ignore_eos=True, seed=seed, **values)
        requests.append((prompt, params))
    return requests


def bad_request(**values: Any) -> tuple[list[int], SamplingParams]:
    prompt = [MARK, *([9, 10, 11, 12, 13, 14] * 7)]
    assert len(prompt) == NUM_MARKED
    values = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True, **values}
    return prompt, SamplingParams(**values)


def unchecked(params: SamplingParams, **values: Any) -> SamplingParams:
    """Parameters that no check would let through."""
    for name, value in values.items():
        object.__setattr__(params, name, value)
    return params


def is_marked(request: Request) -> bool:
    return request.prompt_token_ids[0] == MARK


def is_long(inputs: Any, *_: Any) -> bool:
    """Whether the prompt that fails is in a step: no other request gets as long."""
    return bool(inputs.context_lens.numpy().max() >= NUM_MARKED)


def plain(output: RequestOutput) -> Any:
    """What must be equal, bit by bit."""
    answers = [
        (each.text, each.token_ids, each.finish_reason, each.logprobs, each.score, each.error)
        for each in output.outputs
    ]
    return output.prompt_token_ids, answers, output.prompt_logprobs


def failing(
    target: Any, name: str, is_bad: Callable[..., bool], error: type[Exception] = ValueError
) -> Inject:
    """Makes a method raise where `is_bad` says so of its arguments."""

    def inject(patch: pytest.MonkeyPatch, llm: LLM) -> None:
        owner = target(llm) if callable(target) and not isinstance(target, type) else target
        method = getattr(owner, name)

        def wrapped(*args: Any, **named: Any) -> Any:
            if is_bad(*args):
                raise error("injected")
            return method(*args, **named)

        patch.setattr(owner, name, wrapped)

    return inject


def nan_logits(patch: pytest.MonkeyPatch, llm: LLM) -> None:
    import paddle

    network: Any = llm.engine.runner.network  # type: ignore[attr-defined]
    given = network.run

    def run(inputs: Any, taps: Any = ()) -> Any:
        outputs = given(inputs, taps)
        if outputs.logits is None:
            return outputs
        logits = outputs.logits.numpy().copy()
        logits[inputs.positions[inputs.logit_indices] == NUM_MARKED + 2] = math.nan
        return outputs._replace(logits=paddle.to_tensor(logits))

    patch.setattr(network, "run", run)


def nothing(patch: pytest.MonkeyPatch, llm: LLM) -> None:
    """The parameters alone are bad."""


# Stage as the error names it -> ways to fail in it: parameters, and what is made to fail.
FAULTS: dict[str, tuple[str, dict[str, Any], dict[str, Any], Inject]] = {
    "schedule: prefix": (
        *("schedule", {}, {}),
        failing(BlockManager, "match_prefix", lambda self, tokens, *_: tokens[0] == MARK),
    ),
    "schedule: inputs": (
        *("step", {}, {}),
        failing(
            predict.engine.engine,
            "span_inputs",
            lambda spans, _: any(is_marked(span.request) for span in spans),
        ),
    ),
    "forward: operator": (
        *("forward", {}, {}),
        failing(
            lambda llm: llm.engine.runner.network,
            "forward",
            is_long,
        ),
    ),
    "forward: memory": (
        *("forward", {}, {}),
        failing(
            lambda llm: llm.engine.runner.network,
            "forward",
            is_long,
            MemoryError,
        ),
    ),
    "sample: top_k": ("sample", {"temperature": 1.0}, {"top_k": 2**31}, nothing),
    "sample: min_p": ("sample", {"temperature": 1.0}, {"min_p": "much"}, nothing),
    "sample: choices": (
        *("sample", {}, {}),
        failing(
            Sampler,
            "_rows",
            lambda _, rows: any(
                is_marked(row.request) and row.num_output_tokens == 3 for row in rows
            ),
        ),
    ),
    "adjust: penalty": ("adjust", {}, {"repetition_penalty": "much"}, nothing),
    "adjust: rules": (
        *("adjust", {"no_repeat_ngram_size": 3}, {}),
        failing(Adjustment, "apply", lambda _, logits, tokens, *__: tokens[0] == MARK),
    ),
    "logprobs: number": ("logprobs", {"logprobs": 1}, {"logprobs": "many"}, nothing),
    "logprobs: record": (
        *("logprobs", {"logprobs": 1}, {}),
        failing(LogprobRecord, "add", lambda self, *_: self._num_prompt_tokens == NUM_MARKED),
    ),
    "detokenize: stop strings": (
        *("detokenize", {"stop": ("\x00",)}, {}),
        failing(
            TextStream,
            "append",
            lambda self, *_: self._prompt_token_ids[0] == MARK and len(self._token_ids) == 4,
            TokenizerError,
        ),
    ),
    "detokenize: text": (
        *("detokenize", {}, {}),
        failing(
            Tokenizer,
            "decode_continuation",
            lambda _, prompt, *__: prompt[0] == MARK,
            TokenizerError,
        ),
    ),
    "detokenize: the last text": (
        *("detokenize", {"stop": ("\x00",)}, {}),
        failing(AnswerText, "finish", lambda self: self._stream._prompt_token_ids[0] == MARK),
    ),
}
DRAFT_FAULTS: dict[tuple[str, str], tuple[str, Inject]] = {
    ("n-grams", "index"): (
        "draft",
        failing(NgramIndex, "extend", lambda self, tokens, _: tokens[0] == MARK),
    ),
    ("n-grams", "late index"): (
        "draft",
        failing(
            NgramIndex,
            "extend",
            lambda self, tokens, end: tokens[0] == MARK and end > NUM_MARKED + 3,
        ),
    ),
    ("lookahead", "pool"): (
        "draft",
        failing(
            lambda llm: llm.engine.speculation.proposer._pool,
            "add",
            lambda tokens, *_: tokens[0] == MARK,
        ),
    ),
    ("draft model", "forward"): (
        "draft",
        failing(
            lambda llm: llm.engine.speculation.proposer.network.runner.network,
            "forward",
            is_long,
        ),
    ),
    **{
        (method, "verify"): (
            "verify",
            failing(
                lambda llm: llm.engine.speculation.proposer,
                "observe",
                lambda request, *_: is_marked(request),
            ),
        )
        for method in DRAFTS
        if method != "none"
    },
}


@pytest.fixture(scope="module")
def llms(model_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LLM]:
    """One LLM per kind of drafts: each serves all tests, which so shows that it goes on.

    "static": of an exported program, without drafts.
    """
    made: dict[str, LLM] = {}

    def make(drafts: str) -> LLM:
        if drafts not in made:
            changes: dict[str, Any] = dict(DRAFTS.get(drafts, {}))
            if drafts == "draft model":
                changes["draft_model_name_or_path"] = str(model_template)
            config = EngineConfig(
                model_name_or_path=str(model_template),
                max_length=96,
                block_size=16,
                batch_size=12,
                attention="append",
                inference_model=library.find() is not None,
                **changes,
            )
            if drafts == "static":
                folder = tmp_path_factory.mktemp("exported") / "program"
                export_model(config, folder)
                config = config.changed(model_name_or_path=str(folder), mode="static")
            made[drafts] = llm = LLM(config)
            if llm.engine.speculation.proposer is not None:
                llm.engine.speculation.policy = Generous(
                    3, 64, llm.engine.speculation.proposer.looks_up
                )
        return made[drafts]

    return make


@pytest.fixture(scope="module")
def expected(llms: Callable[[str], LLM]) -> Callable[[str], list[Any]]:
    """The 31 answers of a run without the bad request."""
    made: dict[bool, list[Any]] = {}

    def make(drafts: str) -> list[Any]:
        beams = drafts == "none"
        if beams not in made:
            requests = good_requests(beams)
            outputs = llms("none").generate(
                [prompt for prompt, _ in requests], [params for _, params in requests]
            )
            made[beams] = [plain(output) for output in outputs]
        return made[beams]

    return make


def check_idle(llm: LLM) -> None:
    scheduler = llm.engine.scheduler
    blocks = scheduler.block_manager
    scheduler.check()
    assert blocks.num_used_blocks == 0
    assert blocks.num_free_blocks == blocks.num_blocks
    assert not scheduler.has_unfinished()
    assert not llm.engine._steps


def check_generate(
    llm: LLM, drafts: str, bad: tuple[list[int], SamplingParams], stage: str, expected: list[Any]
) -> None:
    requests = good_requests(drafts == "none")
    requests.insert(PLACE, bad)
    outputs = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    output = outputs.pop(PLACE)
    assert output.finish_reason == "error"
    error = output.outputs[0].error or ""
    assert f"stage {stage}" in error or stage in error
    assert [plain(output) for output in outputs] == expected
    check_idle(llm)


@pytest.mark.parametrize("name", FAULTS)
def test_a_request_that_fails_ends_alone(
    name: str,
    llms: Callable[[str], LLM],
    expected: Callable[[str], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage, values, wrong, inject = FAULTS[name]
    llm, answers = llms("none"), expected("none")
    prompt, params = bad_request(**values)
    bad = prompt, unchecked(params, **wrong)
    with monkeypatch.context() as patch:
        inject(patch, llm)
        check_generate(llm, "none", bad, stage, answers)
    (output,) = llm.generate([prompt], bad_request()[1])
    assert output.finish_reason == "length"


# (drafts, a row of FAULTS or DRAFT_FAULTS) for AsyncLLM: all of them plain, some with drafts.
ASYNC_FAULTS = [
    *(("none", name) for name in FAULTS),
    *(
        (drafts, name)
        for drafts in DRAFTS
        if drafts != "none"
        for name in ("sample: top_k", "forward: operator", "detokenize: stop strings", "verify")
    ),
]


@pytest.mark.parametrize(("drafts", "name"), ASYNC_FAULTS)
def test_it_does_so_in_async_llm(
    drafts: str,
    name: str,
    llms: Callable[[str], LLM],
    expected: Callable[[str], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values: dict[str, Any] = {"logit_bias": {9: 100.0}}  # its drafts are right, and so verified
    wrong: dict[str, Any] = {}
    if name in FAULTS:
        stage, values, wrong, inject = FAULTS[name]
    else:
        stage, inject = DRAFT_FAULTS[drafts, name]
    llm, answers = llms(drafts), expected(drafts)
    prompt, params = bad_request(**values)
    unchecked(params, **wrong)

    async def run() -> None:
        async with AsyncLLM(llm.config, lambda _: llm) as engine:
            requests = good_requests(drafts == "none")
            tasks = [asyncio.create_task(engine.generate(*each)) for each in requests]
            streamed = asyncio.create_task(consumed(engine, prompt, params))
            whole = asyncio.create_task(engine.generate(prompt, params))
            outputs = await asyncio.gather(*tasks)
            assert [plain(output) for output in outputs] == answers
            for task in (streamed, whole):
                with pytest.raises(ValueError, match=f"stage {stage}"):
                    await task
            good = await engine.generate([8, 9], bad_request()[1])
            assert good.finish_reason == "length"

    with monkeypatch.context() as patch:
        inject(patch, llm)
        asyncio.run(asyncio.wait_for(run(), 60))
    check_idle(llm)


async def consumed(engine: AsyncLLM, prompt: list[int], params: SamplingParams) -> None:
    async for _ in engine.stream(prompt, params):
        pass


@pytest.mark.parametrize(("drafts", "name"), DRAFT_FAULTS)
def test_a_request_whose_drafts_fail_ends_alone(
    drafts: str,
    name: str,
    llms: Callable[[str], LLM],
    expected: Callable[[str], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage, inject = DRAFT_FAULTS[drafts, name]
    llm, answers = llms(drafts), expected(drafts)
    drafted = llm.stats().num_draft_tokens
    with monkeypatch.context() as patch:
        inject(patch, llm)
        bad = bad_request(logit_bias={9: 100.0})
        check_generate(llm, drafts, bad, stage, answers)
    assert llm.stats().num_draft_tokens > drafted


@pytest.mark.parametrize("drafts", [name for name in DRAFTS if name != "none"])
@pytest.mark.parametrize("name", ["sample: top_k", "forward: operator", "detokenize: stop strings"])
def test_others_keep_their_drafts(
    drafts: str,
    name: str,
    llms: Callable[[str], LLM],
    expected: Callable[[str], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage, values, wrong, inject = FAULTS[name]
    llm, answers = llms(drafts), expected(drafts)
    prompt, params = bad_request(**values)
    drafted = llm.stats().num_draft_tokens
    with monkeypatch.context() as patch:
        inject(patch, llm)
        check_generate(llm, drafts, (prompt, unchecked(params, **wrong)), stage, answers)
    assert llm.stats().num_draft_tokens > drafted


@pytest.mark.parametrize("name", ["sample: top_k", "schedule: inputs", "logprobs: record"])
def test_an_exported_program_goes_on_too(
    name: str,
    llms: Callable[[str], LLM],
    expected: Callable[[str], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage, values, wrong, inject = FAULTS[name]
    llm, dynamic = llms("static"), expected("none")
    prompt, params = bad_request(**values)
    requests = good_requests(True)
    outputs = llm.generate([each for each, _ in requests], [each for _, each in requests])
    answers = [plain(output) for output in outputs]
    assert [each[1][0][1] for each in answers] == [each[1][0][1] for each in dynamic]
    with monkeypatch.context() as patch:
        inject(patch, llm)
        check_generate(llm, "none", (prompt, unchecked(params, **wrong)), stage, answers)


def test_logits_that_are_no_numbers_end_their_request_alone(
    llms: Callable[[str], LLM],
    expected: Callable[[str], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm, answers = llms("none"), expected("none")
    with monkeypatch.context() as patch:
        nan_logits(patch, llm)
        check_generate(llm, "none", bad_request(), "no finite largest logit", answers)


@pytest.mark.parametrize(
    "inject",
    [
        failing(BeamGroup, "choose", lambda self, *_: is_marked(self.request)),
        failing(
            Sampler,
            "_rows",
            lambda _, rows: any(is_marked(r.request) and r.num_output_tokens == 2 for r in rows),
        ),
    ],
    ids=["choose", "find"],
)
def test_a_beam_search_that_fails_ends_alone(
    inject: Inject,
    llms: Callable[[str], LLM],
    expected: Callable[[str], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm, answers = llms("none"), expected("none")
    with monkeypatch.context() as patch:
        inject(patch, llm)
        check_generate(llm, "none", bad_request(num_beams=3, n=2), "injected", answers)


def test_samples_of_a_prompt_fail_together_and_alone(
    llms: Callable[[str], LLM], expected: Callable[[str], list[Any]]
) -> None:
    llm, answers = llms("none"), expected("none")
    prompt, params = bad_request(temperature=1.0, n=3, seed=1)
    unchecked(params, min_p="much")
    requests = good_requests(True)
    requests.insert(PLACE, (prompt, params))
    with pytest.raises(ValueError, match="min_p"):  # made again for each sample, and checked
        llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    check_idle(llm)
    assert answers


def test_streams_of_others_go_on_when_one_fails(
    llms: Callable[[str], LLM],
    expected: Callable[[str], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm, answers = llms("none"), expected("none")
    requests = good_requests(True)
    requests.insert(PLACE, bad_request())
    texts = ["" for _ in requests]

    def consume() -> None:
        for piece in llm.stream([p for p, _ in requests], [params for _, params in requests]):
            if piece.index == 0:
                texts[piece.prompt_index] += piece.text
            if piece.finish_reason == "error":
                assert piece.prompt_index == PLACE
                assert "stage sample" in (piece.error or "")

    inject = FAULTS["sample: choices"][3]
    with monkeypatch.context() as patch:
        inject(patch, llm)
        with pytest.raises(ValueError, match="stage sample"):
            consume()
    texts.pop(PLACE)
    assert texts == [each[1][0][0] for each in answers]
    check_idle(llm)


def test_a_prompt_that_its_tokenizer_fails_on_is_an_error_answer(
    llms: Callable[[str], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = llms("none")
    greedy = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True)
    prompts = ["hello", "a bad one", "you"]
    before = [plain(output) for output in llm.generate([prompts[0], prompts[2]], greedy)]
    inject = failing(Tokenizer, "encode", lambda _, text, *__: "bad" in text, TokenizerError)
    with monkeypatch.context() as patch:
        inject(patch, llm)
        outputs = llm.generate(prompts, greedy)
        error = outputs.pop(1).outputs[0].error or ""
        assert "stage tokenize: injected" in error
        assert [plain(output) for output in outputs] == before
        with pytest.raises(ValueError, match="stage tokenize"):
            list(llm.stream(prompts, greedy))
        (alone,) = llm.generate("a bad one", greedy)
        assert alone.finish_reason == "error"

        async def add() -> None:
            async with AsyncLLM(llm.config, lambda _: llm) as engine:
                with pytest.raises(TokenizerError, match="injected"):
                    engine.add("a bad one", greedy)
                assert plain(await engine.generate("hello", greedy)) == before[0]

        asyncio.run(asyncio.wait_for(add(), 60))
    check_idle(llm)


LINES: list[dict[str, Any]] = [
    {"src": f"line {index} of a file", "seed": index} for index in range(31)
]
BEAM_LINES = [
    {"src": line["src"], "num_beams": 2} if index % 4 == 0 else line
    for index, line in enumerate(LINES)
]


def answered(folder: Path, model: Path, llm: LLM, lines: list[dict[str, Any]]) -> tuple[int, Any]:
    """Exit status and results of a run of the command line."""
    data, out = folder / "data.jsonl", folder / "out.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out.unlink(missing_ok=True)
    argv = ["--model_name_or_path", str(model), "--dtype", "float32", "--device", "cpu"]
    argv += ["--data_file", str(data), "--output_file", str(out), "--chat_template", "none"]
    argv += ["--max_length", "96", "--src_length", "64", "--max_new_tokens", "6"]
    argv += ["--decode_strategy", "sampling", "--batch_size", "12"]
    code = predictor.main(argv, lambda *_: llm)
    return code, [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


@pytest.fixture(scope="module")
def good_results(
    llms: Callable[[str], LLM], model_template: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Any]:
    """The command line's results without the bad line."""

    @functools.cache
    def make(beside: str) -> Any:
        llm = llms(beside if beside in DRAFTS else "none")
        lines = BEAM_LINES if beside == "beams" else LINES
        code, results = answered(tmp_path_factory.mktemp("good"), model_template, llm, lines)
        assert code == 0
        return results

    return make


def is_bad_line(request: Request) -> bool:
    """Whether it is that of the line that fails: no other prompt gets as long."""
    return request.num_prompt_tokens > NUM_MARKED


CLI_FAULTS: dict[str, tuple[str, Inject]] = {
    "tokenize": (
        "tokenize",
        failing(Tokenizer, "encode", lambda _, text, *__: "~~~" in text, TokenizerError),
    ),
    "schedule": (
        "schedule",
        failing(BlockManager, "match_prefix", lambda self, tokens, *_: len(tokens) > NUM_MARKED),
    ),
    "sample": (
        "sample",
        failing(
            Sampler,
            "_rows",
            lambda _, rows: any(is_bad_line(row.request) for row in rows),
        ),
    ),
    "adjust": (
        "adjust",
        failing(Adjustment, "apply", lambda _, logits, tokens, length: length > NUM_MARKED),
    ),
    "logprobs": (
        "logprobs",
        failing(LogprobRecord, "add", lambda self, *_: self._num_prompt_tokens > NUM_MARKED),
    ),
    "verify": (
        "verify",
        failing(
            lambda llm: llm.engine.speculation.proposer,
            "observe",
            lambda each, *_: is_bad_line(each),
        ),
    ),
    "detokenize": (
        "detokenize",
        failing(
            Tokenizer,
            "decode_continuation",
            lambda _, prompt, *__: len(prompt) > NUM_MARKED,
            TokenizerError,
        ),
    ),
}


@pytest.mark.parametrize(
    ("beside", "name"),
    [
        (beside, name)
        for beside in ("nothing", "beams", "n-grams", "draft model")
        for name in CLI_FAULTS
        if name != "verify" or beside in DRAFTS
    ],
)
def test_the_command_line_gives_all_other_answers(
    name: str,
    beside: str,
    llms: Callable[[str], LLM],
    good_results: Callable[[str], Any],
    model_template: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    llm = llms(beside if beside in DRAFTS else "none")
    good = BEAM_LINES if beside == "beams" else LINES
    assert llm.tokenizer is not None
    # It repeats itself, so that its drafts are right and verified.
    bad = {"src": "~~~", "temperature": 0, "logit_bias": {"9": 100}, "logprobs": 1}
    bad |= {"max_new_tokens": 12, "ignore_eos": True}
    while len(llm.tokenizer.encode(str(bad["src"]))) <= NUM_MARKED:
        bad["src"] = f"{bad['src']} x"
    before = good_results(beside)
    capfd.readouterr()
    stage, inject = CLI_FAULTS[name]
    with monkeypatch.context() as patch:
        inject(patch, llm)
        lines = [*good[:PLACE], bad, *good[PLACE:]]
        code, results = answered(tmp_path, model_template, llm, lines)
    said = capfd.readouterr().err
    assert code == 1, said
    assert f"stage {stage}" in results.pop(PLACE)["error"]
    assert results == before
    assert f"line {PLACE + 1} of data.jsonl" in said
    check_idle(llm)


def broken(patch: pytest.MonkeyPatch, llm: LLM, steps: int) -> None:
    """After so many steps the device is gone."""
    network: Any = llm.engine.runner.network  # type: ignore[attr-defined]
    forward, left = network.forward, [steps]

    def run(*given: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise OSError("the device is gone")
        return forward(*given)

    patch.setattr(network, "forward", run)


def test_a_broken_device_ends_all_clearly(
    llms: Callable[[str], LLM],
    expected: Callable[[str], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    model_template: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    llm, answers = llms("none"), expected("none")
    requests = good_requests(True)
    with monkeypatch.context() as patch:
        broken(patch, llm, 4)
        with pytest.raises(EngineError, match=r"cannot go on: .*the device is gone.*without any"):
            llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
        check_idle(llm)

    async def run() -> None:
        engine = AsyncLLM(llm.config, lambda _: llm)
        broken(monkeypatch, llm, 4)
        tasks = [engine.generate(*each) for each in requests]
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, RuntimeError)
            assert "the device is gone" in str(result)
        with pytest.raises(RuntimeError, match="the device is gone"):
            engine.add([1], SamplingParams())
        with pytest.raises(RuntimeError, match="the device is gone"):
            await engine.stats()
        engine.abort(0)
        engine.close()

    asyncio.run(asyncio.wait_for(run(), 60))
    check_idle(llm)
    code, _ = answered(tmp_path, model_template, llm, LINES)
    said = capfd.readouterr().err
    assert code == 1
    assert "the device is gone" in said
    assert "REGATTA_TRACEBACK" not in said
    monkeypatch.undo()
    outputs = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    assert [plain(output) for output in outputs] == answers


def test_blocks_in_disorder_end_all_clearly(
    llms: Callable[[str], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = llms("none")
    manager = llm.engine.scheduler.block_manager
    prompt, params = bad_request(temperature=1.0)

    def lose(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(manager, "free", lambda blocks: None)

    with monkeypatch.context() as patch:
        lose(patch)
        with pytest.raises(EngineError, match="blocks are in disorder"):
            llm.generate([[8, 9, 10], prompt], [params, unchecked(replace(params), top_k="x")])
    manager._ref_counts = [0] * manager.num_blocks
    manager._free = list(range(manager.num_blocks))
    manager._cached_free.clear()
    manager._block_of.clear()
    manager._content = [None] * manager.num_blocks
    check_idle(llm)


def test_one_failing_step_that_nobody_causes_costs_nothing(
    llms: Callable[[str], LLM],
    expected: Callable[[str], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm, answers = llms("none"), expected("none")
    requests = good_requests(True)
    network: Any = llm.engine.runner.network  # type: ignore[attr-defined]
    forward, count = network.forward, [0]

    def run(*given: Any) -> Any:
        count[0] += 1
        if count[0] % 5 == 0:
            raise MemoryError
        return forward(*given)

    with monkeypatch.context() as patch:
        patch.setattr(network, "forward", run)
        outputs = llm.generate([p for p, _ in requests], [params for _, params in requests])
    assert [plain(output) for output in outputs] == answers
    check_idle(llm)
