"""LLM: what it refuses, what it promises about text, seeds and failures."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import re
import shutil
import weakref
from collections.abc import Container
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predict import LLM, AsyncLLM, EngineConfig, SamplingParams
from predict.device.library import Library
from predict.errors import UserError
from predict.loading.model import load_decoder, read_spec
from predict.loading.platform import is_compiled, platform_of
from predict.request import RequestOutput
from tests.support import tiny
from tests.support.demo import demo_config
from tests.support.texts import PROMPTS

TOKENIZER = Path(__file__).parent / "data" / "tokenizers" / "byte_level"


@pytest.fixture(scope="module")
def demo() -> LLM:
    return LLM(demo_config(batch_size=3, max_length=128, block_size=64))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.write(tmp_path / "model")


def config(model: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(model_name_or_path=str(model), **{"max_length": 64, **changes})


def test_streamed_pieces_join_to_the_generated_text(demo: LLM) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=4, max_new_tokens=40)
    for prompt in PROMPTS:
        whole = demo.generate([prompt], params)[0]
        pieces = list(demo.stream(prompt, params))
        assert "".join(piece.text for piece in pieces) == whole.text
        assert sum((piece.token_ids for piece in pieces), ()) == whole.token_ids
        assert pieces[-1].finish_reason == whole.finish_reason


def test_leaving_a_stream_early_frees_its_blocks(demo: LLM) -> None:
    stream = demo.stream(PROMPTS[0], SamplingParams(max_new_tokens=50, ignore_eos=True))
    next(stream)
    assert demo.stats().num_used_blocks > 0
    stream.close()
    assert demo.stats().num_used_blocks == 0


def test_bad_words_as_text_do_not_come(demo: LLM) -> None:
    plain = SamplingParams(temperature=0.0, max_new_tokens=24)
    text = demo.generate([PROMPTS[0]], plain)[0].text
    word = max(text.split(), key=len)
    params = SamplingParams(temperature=0.0, max_new_tokens=24, bad_words=[word])
    assert word not in demo.generate([PROMPTS[0]], params)[0].text.split()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"logit_bias": {9_999_999: 1.0}}, r"logit_bias has token id 9999999, .*allowed: 0 to \d+"),
        ({"bad_words": [[1], [2, 9_999_999]]}, r"bad_words has token id 9999999"),
    ],
)
def test_tokens_outside_of_the_vocabulary_are_refused_before_any_work(
    demo: LLM, values: dict[str, Any], said: str
) -> None:
    steps = demo.stats().num_steps
    with pytest.raises(UserError, match=said):
        demo.generate(PROMPTS, [SamplingParams(), SamplingParams(), SamplingParams(**values)])
    assert demo.stats().num_steps == steps
    assert not demo.engine.scheduler.has_unfinished()


def test_words_need_a_tokenizer(model: Path) -> None:
    llm = LLM(config(model))
    with pytest.raises(UserError, match="give its token ids"):
        llm.generate([[1, 2]], SamplingParams(bad_words=["word"]))
    output = llm.generate([[1, 2]], SamplingParams(bad_words=[[3]], max_new_tokens=4))
    assert 3 not in output[0].token_ids


def test_seeded_text_is_the_same_alone_and_in_a_batch(demo: LLM) -> None:
    params = [SamplingParams(temperature=1.0, seed=seed, max_new_tokens=24) for seed in (1, 2, 3)]
    together = demo.generate(PROMPTS, params)
    for prompt, param, output in zip(PROMPTS, params, together, strict=True):
        assert demo.generate([prompt], param)[0].text == output.text


def test_outputs_come_in_prompt_order_and_each_is_announced_once(demo: LLM) -> None:
    lengths = [30, 3, 11]
    params = [SamplingParams(temperature=0.0, max_new_tokens=n, ignore_eos=True) for n in lengths]
    announced: list[int] = []
    outputs = demo.generate(PROMPTS, params, on_output=lambda index, _: announced.append(index))
    assert [len(output.token_ids) for output in outputs] == lengths
    assert announced == [1, 2, 0]


def test_failing_callback_leaves_nothing_behind(demo: LLM) -> None:
    def fail(index: int, output: RequestOutput) -> None:
        raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="disk on fire"):
        demo.generate(PROMPTS, SamplingParams(max_new_tokens=4), on_output=fail)
    assert not demo.engine.scheduler.has_unfinished()
    assert demo.stats().num_used_blocks == 0


def test_one_prompt_that_cannot_run_stops_all_before_anything_runs(demo: LLM) -> None:
    prompts: list[str | list[int]] = ["x = 1", [5] * 200]
    with pytest.raises(ValueError, match="200 tokens"):
        demo.generate(prompts, SamplingParams(max_new_tokens=4))
    assert not demo.engine.scheduler.has_unfinished()


def test_token_ids_outside_the_vocabulary_are_refused(model: Path) -> None:
    llm = LLM(config(model))
    with pytest.raises(UserError, match=r"token id 199 .* 0 to 198"):
        llm.generate([[1, 199]], SamplingParams(max_new_tokens=1))


def test_text_needs_a_tokenizer(model: Path) -> None:
    with pytest.raises(UserError, match="without a tokenizer"):
        LLM(config(model)).generate(["text"], SamplingParams(max_new_tokens=1))


def test_cache_that_does_not_fit_is_refused_with_the_arithmetic(model: Path) -> None:
    with pytest.raises(UserError, match=r"does not fit: .* blocks of 64 tokens x .*--batch_size"):
        LLM(config(model, batch_size=1_000_000, max_length=1_000_000))


def test_repeated_runs_hit_the_prefix_cache(demo: LLM) -> None:
    prompt = list(range(100, 200))
    greedy = SamplingParams(temperature=0.0, max_new_tokens=2)
    first = demo.generate([prompt], greedy)[0]
    before = demo.stats().num_prefix_hit_tokens
    assert demo.generate([prompt], greedy)[0].token_ids == first.token_ids
    assert demo.stats().num_prefix_hit_tokens == before + 64


def test_dummy_weights_need_no_checkpoint_and_are_seeded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny.write(tmp_path / "m") / "config.json").read_text())
    settings: dict[str, Any] = {"load_format": "dummy", "max_length": 64}
    answers = [
        LLM(EngineConfig(model_name_or_path=str(tmp_path), seed=seed, **settings))
        .generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_new_tokens=8))[0]
        .token_ids
        for seed in (0, 0, 1)
    ]
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


def test_a_sequence_longer_than_the_model_knows_is_announced(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    LLM(config(model, max_length=1024))
    assert "512 positions" in caplog.text


def test_decoder_shares_the_embedding_with_a_tied_head(tmp_path: Path) -> None:
    settings = config(tiny.write(tmp_path / "m", {"tie_word_embeddings": True}), dtype="float32")
    spec, reader = read_spec(settings.model.model_name_or_path)
    decoder, _ = load_decoder(settings, spec, reader, platform_of("cpu", inference_model=False))
    assert decoder.embedding.table is None


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def test_chats_are_completions_of_the_rendered_template(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    llm = LLM(demo_config(chat_template=str(template), batch_size=2, max_length=128))
    greedy = SamplingParams(temperature=0.0, max_new_tokens=8)
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x = 1"}]
    second = [{"role": "user", "content": "def f("}]
    assert llm.tokenizer is not None
    texts = ["system: Be brief.\nuser: x = 1\nassistant:", "user: def f(\nassistant:"]
    prompts = [llm.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    expected = [output.text for output in llm.generate(prompts, greedy)]
    assert [output.text for output in llm.chat([first, second], greedy)] == expected
    assert [output.text for output in llm.chat(second, greedy)] == expected[1:]
    with pytest.raises(UserError, match="has no content"):
        llm.chat([{"role": "user"}], greedy)


def test_a_chat_without_a_template_is_refused_with_the_way_out(demo: LLM) -> None:
    with pytest.raises(UserError, match="give one with chat_template"):
        demo.chat([{"role": "user", "content": "hello"}], SamplingParams())


def test_streams_take_token_ids_and_several_prompts(demo: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_new_tokens=6)
    prompts: list[str | list[int]] = [[300, 301], PROMPTS[0]]
    expected = [output.text for output in demo.generate(prompts, greedy)]
    assert "".join(piece.text for piece in demo.stream([300, 301], greedy)) == expected[0]
    texts = ["", ""]
    for piece in demo.stream(prompts, greedy):
        texts[piece.prompt_index] += piece.text
    assert texts == expected


def test_skipped_prompts_leave_the_others_samples_as_they_were(demo: LLM) -> None:
    params = SamplingParams(max_new_tokens=6, top_k=0, temperature=1.5, n=2)
    prompts = ["one", "two", "three", "four"]

    def texts(skip: Container[int]) -> dict[int, list[str]]:
        demo._ids = itertools.count(1000)
        found: dict[int, list[str]] = {}

        def keep(index: int, output: RequestOutput) -> None:
            found[index] = [answer.text for answer in output.outputs]

        demo.generate(prompts, params, keep, skip=skip)
        return found

    whole = texts(())
    assert texts({0, 2}) == {index: whole[index] for index in (1, 3)}
    assert texts(range(4)) == {}


def test_a_callback_that_stops_a_run_after_a_step_has_seen_its_outputs(demo: LLM) -> None:
    seen: list[int] = []

    def stop(prompt_tokens: int, output_tokens: int) -> None:
        if seen:
            raise KeyboardInterrupt

    params = SamplingParams(max_new_tokens=1, temperature=0.0)
    with pytest.raises(KeyboardInterrupt):
        demo.generate(["one", "two"], params, lambda index, output: seen.append(index), stop)
    assert seen == [0, 1]


def test_one_prompt_may_be_given_without_a_list(demo: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_new_tokens=6)
    (expected,) = demo.generate([PROMPTS[0]], greedy)
    (output,) = demo.generate(PROMPTS[0], greedy)
    assert output.token_ids == expected.token_ids
    ids = expected.prompt_token_ids
    forms: list[Any] = [ids, list(ids), np.array(ids), [list(ids)], [np.array(ids)]]
    for prompt in [*forms, np.array([ids])]:
        (output,) = demo.generate(prompt, greedy)
        assert output.token_ids == expected.token_ids
    assert demo.generate([], greedy) == []


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (b"text", "prompts is b'text'"),
        ({"text": "x"}, "a prompt is {'text': 'x'}"),
        (7, "prompts is 7"),
        (None, "prompts is None"),
        ([b"text"], "a prompt is b'text'"),
        ([{"role": "user", "content": "x"}], "a prompt is {'role'"),
        ([None], "a prompt is None"),
        ([[1, 1.5]], "token 1 of a prompt is 1.5"),
        ([[1, True]], "token 1 of a prompt is True"),
        ([[1, "5"]], "token 1 of a prompt is '5'"),
        ([[1, -5]], "token id -5 in a prompt"),
        ([[10**5000]], "token id <int> in a prompt"),
        ([[]], "the prompt has no tokens"),
    ],
)
def test_prompts_of_another_kind_are_refused_before_any_work(
    demo: LLM, prompts: Any, said: str
) -> None:
    greedy = SamplingParams(temperature=0.0, max_new_tokens=2)
    with pytest.raises(UserError, match=re.escape(said)):
        demo.generate(prompts, greedy)
    if isinstance(prompts, list):
        with pytest.raises(UserError, match=re.escape(said)):
            demo.generate([PROMPTS[0], *prompts], greedy)
    with pytest.raises(UserError, match=re.escape(said)):
        list(demo.stream(prompts, greedy))
    assert not demo.engine.scheduler.has_unfinished()


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ([SamplingParams()], "1 sampling_params for 2 prompts"),
        ([SamplingParams()] * 3, "3 sampling_params for 2 prompts"),
        ([SamplingParams(), None], "sampling_params has None"),
        ({"temperature": 1.0}, "sampling_params has {'temperature': 1.0}"),
    ],
)
def test_parameters_of_another_kind_are_refused(demo: LLM, params: Any, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        demo.generate(PROMPTS[:2], params)
    with pytest.raises(UserError, match=re.escape(said)):
        list(demo.stream(PROMPTS[:2], params))


def test_default_params_are_what_the_model_recommends(model: Path) -> None:
    llm = LLM(EngineConfig(model_name_or_path=str(model)))
    assert llm.default_params() == SamplingParams()
    (model / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 3}')
    assert llm.default_params() == SamplingParams(temperature=0.5, top_k=3)


def test_default_params_are_taken_where_none_are_given(model: Path) -> None:
    llm = LLM(model, max_length=16)
    (model / "generation_config.json").write_text('{"top_k": 1, "max_new_tokens": 3}')
    prompt = [5, 6, 7]
    wanted = llm.generate(prompt, SamplingParams(top_k=1, max_new_tokens=3))[0].token_ids
    assert llm.generate(prompt)[0].token_ids == wanted
    assert sum((piece.token_ids for piece in llm.stream(prompt)), ()) == wanted

    async def check() -> None:
        async with AsyncLLM(llm.config) as other:
            pieces = [piece.token_ids async for piece in other.stream(prompt)]
            assert sum(pieces, ()) == (await other.generate(prompt)).token_ids == wanted

    asyncio.run(check())


def test_compiled_operators_run_where_they_are_there(model: Path, compiled: Library) -> None:
    assert is_compiled(LLM(model, max_length=16).platform.backend)
    assert not is_compiled(LLM(model, max_length=16, inference_model=False).platform.backend)


def test_a_hub_name_is_found_where_commands_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.write(tmp_path / "models" / "org" / "name")
    monkeypatch.setenv("REGATTA_MODEL_DIR", str(tmp_path / "models"))
    llm = LLM(
        "org/name",
        max_length=16,
        speculate_method="draft_model",
        draft_model_name_or_path="org/name",
    )
    assert llm.config.model.model_name_or_path == str(folder)
    assert llm.config.speculation.draft_model_name_or_path == str(folder)
    with pytest.raises(UserError, match=r"'org/other' was not found .*REGATTA_MODEL_DIR"):
        LLM("org/other")


def test_ids_beyond_the_vocabulary_neither_end_a_text_nor_enter_a_prompt(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "model", {"vocab_size": 512})
    for path in TOKENIZER.glob("*.json"):
        if path.name != "config.json":
            shutil.copy(path, folder / path.name)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 512, 100000]}')
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = values["model"]["vocab"]
    vocabulary["!"] = 10**9
    path.write_text(json.dumps(values), encoding="utf-8")
    llm = LLM(EngineConfig(model_name_or_path=str(folder), max_length=32))
    assert llm.engine.eos_token_ids == {1, 2}
    params = SamplingParams(max_new_tokens=2, min_length=1)
    assert len(llm.generate(["hello"], params)) == 1
    with pytest.raises(UserError, match=r"token.* 1000000000"):
        llm.generate(["hello!"], params)


def test_an_engine_ends_with_its_model_and_waits_for_no_collection(tiny_model: Path) -> None:
    llm = LLM(EngineConfig(model_name_or_path=str(tiny_model), dtype="float32", max_length=32))
    llm.generate([[5, 6, 7]], SamplingParams(max_new_tokens=2))
    ends = weakref.ref(llm.engine), weakref.ref(llm.engine.scheduler)
    gc.disable()
    try:
        del llm
        assert [end() for end in ends] == [None, None]
    finally:
        gc.enable()
