"""Guided answers: what they must be, the same however computed, alone when they fail."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from export.export_model import export_model
from predict import LLM, AsyncLLM, SamplingParams, UserError
from predict.device import library
from predict.engine.speculation import Speculation
from predict.guide import Guide
from predict.text.guides import Guides, GuideState
from tests.support.drafts import METHODS, Generous
from tests.support.guides import GUIDES, PERSON, accepts, answers, requests, settings, tokens


@pytest.fixture(scope="module")
def llm(compiled: library.Library) -> LLM:
    return LLM(**settings())


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[tuple[int, ...]]]:
    """The tokens of each request alone, one a step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Speculation, "_forced_drafts", lambda engine, proposed, limits: {})
        outputs = [llm.generate([prompt], params)[0] for prompt, params, _ in requests()]
    return tokens(outputs)


def test_answers_are_what_guides_say(llm: LLM, expected: list[list[tuple[int, ...]]]) -> None:
    outputs = answers(llm)
    assert sum(output.finish_reason == "stop" for output in outputs) >= 8
    assert tokens(outputs) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": 16},
        {"batch_size": 3, "attention": "block", "block_size": 64},
        {"max_num_batched_tokens": 7},
        {"batch_size": 8, "num_cache_blocks": 14},  # preempts
    ],
    ids=str,
)
def test_the_batch_changes_no_token(
    compiled: library.Library, expected: list[list[tuple[int, ...]]], changes: dict[str, Any]
) -> None:
    assert tokens(answers(LLM(**settings(**changes)))) == expected


def test_plain_operators_make_the_same_answers(
    compiled: library.Library, expected: list[list[tuple[int, ...]]]
) -> None:
    plain = LLM(**settings(inference_model=False, attention="reserved"))
    prompts, params, _ = zip(*requests()[:6], strict=True)
    assert tokens(plain.generate(list(prompts), list(params))) == expected[:6]


def test_exported_programs_make_the_same_answers(
    llm: LLM, expected: list[list[tuple[int, ...]]], tmp_path: Path
) -> None:
    export_model(llm.config, tmp_path)
    static = LLM(llm.config.changed(model_name_or_path=str(tmp_path), mode="static"))
    assert tokens(answers(static)) == expected


@pytest.mark.parametrize("method", METHODS)
def test_drafts_change_no_token(
    compiled: library.Library,
    monkeypatch: pytest.MonkeyPatch,
    expected: list[list[tuple[int, ...]]],
    method: str,
) -> None:
    monkeypatch.setattr("predict.drafting.DraftPolicy", Generous)
    chosen = {k: v for k, v in METHODS[method].items() if k != "draft_model_quant_type"}
    drafting = LLM(**settings(speculate_method=method, **chosen))
    assert tokens(answers(drafting)) == expected
    assert drafting.stats().num_accepted_draft_tokens > 0


def test_what_a_guide_forces_takes_no_step(llm: LLM) -> None:
    before = llm.stats()
    params = SamplingParams(max_new_tokens=64, temperature=0.0, guide=Guide(json_schema=PERSON))
    output = llm.generate(["x"], params)[0]
    after = llm.stats()
    num_forced = after.num_forced_tokens - before.num_forced_tokens
    assert num_forced >= 8
    # Behind the drafts that end the answer there is one row more.
    assert after.num_steps - before.num_steps <= len(output.token_ids) - num_forced + 1


def test_a_cut_answer_is_a_beginning_that_the_grammar_allows(llm: LLM) -> None:
    for length in (1, 5, 9, 14):
        params = SamplingParams(
            max_new_tokens=length, temperature=1.0, seed=length, guide=Guide(json_schema=PERSON)
        )
        output = llm.generate(["x"], params)[0]
        assert output.finish_reason == "length"
        assert accepts(llm, json.dumps(PERSON), output.token_ids)


def test_an_answer_ends_when_nothing_may_follow(llm: LLM) -> None:
    for changes in ({}, {"ignore_eos": True}, {"min_length": 60}):
        params = SamplingParams(
            max_new_tokens=64, temperature=0.0, guide=Guide(choice=["ab", "ac"]), **changes
        )
        output = llm.generate(["x"], params)[0]
        assert output.text in ("ab", "ac")
        assert output.finish_reason == "stop"


def test_an_end_token_ends_an_answer_that_might_go_on(llm: LLM) -> None:
    params = SamplingParams(
        max_new_tokens=64, temperature=0.0, guide=Guide(regex="a+"), logit_bias={1: 100.0}
    )
    output = llm.generate(["x"], params)[0]
    assert (output.finish_reason, output.token_ids[-1]) == ("stop", 1)
    assert set(output.text) == {"a"}


def test_stop_strings_end_guided_answers(llm: LLM) -> None:
    params = SamplingParams(
        max_new_tokens=64, temperature=0.0, guide=Guide(json_schema=PERSON), stop='"age'
    )
    output = llm.generate(["x"], params)[0]
    assert output.finish_reason == "stop"
    assert output.text.startswith('{"first_name": "')
    assert output.text.endswith('", ')


def test_streams_have_the_same_text_and_logprobs(llm: LLM) -> None:
    params = SamplingParams(
        max_new_tokens=64, temperature=0.7, seed=1, guide=Guide(json_schema=PERSON), logprobs=1
    )
    whole = llm.generate(["x"], params)[0]
    pieces = list(llm.stream("x", params))
    assert "".join(piece.text for piece in pieces) == whole.text
    joined = [each for piece in pieces for each in piece.logprobs or ()]
    assert tuple(joined) == whole.outputs[0].logprobs
    assert [next(iter(each)) for each in joined] == list(whole.token_ids)


WRONG = {
    "json_schema": ({"type": "objectt"}, "Invalid type: objectt"),
    "regex": ("(a", "unclosed group"),
    "grammar": ("start: foo", 'unknown name: "foo"'),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_guide_fails_its_request_alone(llm: LLM, kind: str) -> None:
    value, message = WRONG[kind]
    plain = SamplingParams(max_new_tokens=5, temperature=0.0)
    wrong = SamplingParams(max_new_tokens=5, guide=Guide.of({kind: value}))
    first, second = llm.generate(["def", "def"], [wrong, plain])
    assert first.finish_reason == "error"
    assert message in str(first.outputs[0].error)
    assert f"stage guide: guide.{kind}" in str(first.outputs[0].error)
    assert second.token_ids == llm.generate("def", plain)[0].token_ids


CONTRADICTIONS: list[tuple[Guide, dict[str, Any]]] = [
    (Guide(choice=["ab"]), {"bad_words": ["a", "ab"]}),
    (Guide(regex="a a a"), {"no_repeat_ngram_size": 1}),
]


@pytest.mark.parametrize(("guide", "bans"), CONTRADICTIONS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_guide_that_other_parameters_contradict_ends_its_request_alone(
    llm: LLM, guide: Guide, bans: dict[str, Any], temperature: float
) -> None:
    params = SamplingParams(max_new_tokens=9, temperature=temperature, guide=guide, **bans)
    plain = SamplingParams(max_new_tokens=5, temperature=0.0)
    first, second = llm.generate(["def", "def"], [params, plain])
    said = f"stage guide: guide.{guide.kind} and {next(iter(bans))} together forbid"
    assert said in str(first.outputs[0].error)
    assert second.finish_reason == "length"
    assert llm.stats().num_used_blocks == 0


def test_beams_are_refused() -> None:
    with pytest.raises(UserError, match=r"guide .* is not supported with num_beams"):
        SamplingParams(num_beams=2, guide=Guide(regex="a"))


class Slow(Guides):
    """Compiles when it is told to."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.waiting: list[tuple[Guide, Future[list[GuideState]]]] = []

    def states(self, guide: Guide, count: int) -> Future[list[GuideState]]:
        if guide.kind != "regex":
            return super().states(guide, count)
        self.waiting.append((guide, Future()))
        return self.waiting[-1][1]

    def finish(self) -> None:
        for guide, future in self.waiting:
            future.set_result(super().states(guide, 1).result())
        self.waiting = []


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[Slow]:
    made: list[Slow] = []

    def make(*arguments: Any) -> Slow:
        made.append(Slow(*arguments))
        return made[-1]

    monkeypatch.setattr("predict.llm.Guides", make)
    return made


def test_others_are_answered_while_a_guide_is_compiled(
    compiled: library.Library, slow: list[Slow]
) -> None:
    guided = SamplingParams(max_new_tokens=20, temperature=0.0, guide=Guide(regex="[ab]{4}"))
    plain = SamplingParams(max_new_tokens=20, temperature=0.0)

    async def run() -> None:
        async with await AsyncLLM.load(**settings()) as llm:
            waiting = llm.add("x", guided)
            aborted = llm.add("x", guided)
            assert len((await llm.generate("x", plain)).token_ids) == 20
            aborted.abort()
            assert (await aborted.output()).finish_reason == "abort"
            await asyncio.to_thread(slow[0].finish)
            assert len((await waiting.output()).text) == 4
            with pytest.raises(UserError, match="unknown name"):
                await llm.generate("x", SamplingParams(guide=Guide(grammar="start: foo")))
            assert (await llm.stats()).num_used_blocks == 0
            never = llm.add("x", guided)
        with pytest.raises(RuntimeError, match="has ended"):
            await never.output()

    asyncio.run(run())


@pytest.mark.parametrize("kind", GUIDES)
def test_every_kind_ends_by_itself(llm: LLM, kind: str) -> None:
    guide, check = GUIDES[kind]
    for seed in range(3):
        params = SamplingParams(
            max_new_tokens=150, temperature=0.8, seed=seed, guide=Guide(**guide)
        )
        output = llm.generate("def f(x):", params)[0]
        if output.finish_reason == "stop":
            check(output.text)
        else:
            assert kind == "structural_tag"  # text before the tag has no end
