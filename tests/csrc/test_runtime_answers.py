"""Answers of the engine without Python equal those of Python's, of the same requests.

Greedy and sampled ones, with penalties, logprobs and stop strings, in batches of 16, with too few
blocks for all and with prefixes that are shared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from export.export_model import export_model
from export.export_runtime import export_runtime
from export.runtime_folder import TEXT_FILE
from predict import LLM, SamplingParams
from predict.request import RequestOutput
from tests.support import runtime_library as library
from tests.support import text_library
from tests.support.cmake_packages import run
from tests.support.golden import config, golden, runs
from tests.support.paths import DEMO

pytestmark = [
    pytest.mark.usefixtures("compiled"),
    pytest.mark.skipif(bool(library.missing()), reason=library.missing() or "built"),
]

FINISH = (None, "stop", "length", "abort", "error")  # regatta_finish
NUM_REQUESTS, MAX_LENGTH = 32, 96
# Names of regatta.h, where they differ.
NAMES = {
    "min_length": "min_new_tokens",
    "stop_token_ids": "stop_ids",
    "logprobs": "num_logprobs",
    "include_stop_str_in_output": "include_stop",
}
# Texts, a special token, and one among others, which the text leaves out.
STOPS = (["e", "th\u00e9", "  "], ["<|end_of_text|>", "zz"], ["zz", "t<|end_of_text|>", "n<|end"])
SLOW = ("llama_gqa", "qwen3_moe_30b", "gemma2_9b", "deepseek_v2_lite", "qwen_long", "chatglm_6b")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, folder = library.NATIVE / "runtime_answers.cc", tmp_path_factory.mktemp("program")
    if text_library.missing():
        return library.compiled(source, folder)
    return library.compiled(source, folder, "-DWITH_TEXT", "-Wl,--no-as-needed", "-lregatta_text")


def random_params(dice: random.Random, vocab: int, stops: bool) -> dict[str, Any]:
    """Any of the rules, each with other numbers."""
    values: dict[str, Any] = {"max_new_tokens": dice.choice([4, 40, 60])}
    rules: list[tuple[float, dict[str, Any]]] = [
        (0.4, {"temperature": 0.0}),
        (0.3, {"temperature": dice.choice([0.5, 1.7])}),
        (0.6, {"seed": dice.choice([5, -3, 2**40])}),
        (0.3, {"top_k": dice.choice([1, 5, 50])}),
        (0.3, {"top_p": dice.choice([0.5, 0.9])}),
        (0.2, {"min_p": 0.1}),
        (0.2, {"typical_p": 0.8}),
        (0.3, {"repetition_penalty": 1.3}),
        (0.2, {"presence_penalty": 0.4}),
        (0.2, {"frequency_penalty": -0.2}),
        (0.2, {"no_repeat_ngram_size": 2}),
        (0.2, {"logit_bias": {dice.randrange(vocab): 2.5, 1: dice.choice([-1.0, 6.0])}}),
        (0.2, {"bad_words": [[dice.randrange(vocab)], [3, dice.randrange(vocab)]]}),
        (0.3, {"min_length": 3}),
        (0.3, {"stop_token_ids": [dice.randrange(vocab) for _ in range(3)]}),
        (0.5, {"ignore_eos": True}),
        (0.3, {"logprobs": dice.choice([0, 3])}),
    ]
    if stops:
        rules += [
            (0.5, {"stop": dice.choice(STOPS)}),
            (0.4, {"include_stop_str_in_output": True}),
        ]
    for share, rule in rules:
        if dice.random() < share:
            values |= rule
    return values


def line_of(prompt: list[int], params: Mapping[str, Any]) -> str:
    """The request as the program reads it."""
    forms: dict[str, Callable[[Any], object]] = {
        "stop_token_ids": lambda ids: ",".join(map(str, ids)),
        "stop": lambda texts: ",".join(text.encode().hex() for text in texts),
        "bad_words": lambda words: ";".join(",".join(map(str, word)) for word in words),
        "logit_bias": lambda biases: ",".join(f"{i}:{amount}" for i, amount in biases.items()),
        "ignore_eos": int,
        "include_stop_str_in_output": int,
    }
    said = [f"{NAMES.get(k, k)}={forms.get(k, str)(value)}" for k, value in params.items()]
    return " ".join([f"prompt_ids={','.join(map(str, prompt))}", *said])


def check_answer(line: str, wanted: RequestOutput, stops: bool) -> None:
    head, ids, text, logprobs, error = line.split("|")
    finish, num_cached = map(int, head.split())
    assert error == ""
    assert [*map(int, ids.split())] == list(wanted.token_ids)
    assert FINISH[finish] == wanted.finish_reason
    assert num_cached == wanted.metrics.num_cached_tokens
    if stops:
        assert bytes.fromhex(text).decode() == wanted.text
    numbers = [*map(float, logprobs.split())]
    named = [(int(i), value, rank) for i, value, rank in zip(*[iter(numbers)] * 3, strict=True)]
    measured = wanted.outputs[0].logprobs or ()
    assert len(measured) in (0, len(wanted.token_ids))
    assert bool(named) == bool(measured)
    for index, entry in enumerate(measured):
        count = len(named) // len(measured)
        own = named[index * count : (index + 1) * count]
        assert own[0][0] == wanted.token_ids[index]
        for token, logprob, rank in own:
            assert rank == entry[token].rank
            assert logprob == pytest.approx(entry[token].logprob, abs=2e-6)


def check_answers(
    program: Path, llm: LLM, folder: Path, prompts: list[list[int]], stops: bool
) -> None:
    """Raises AssertionError unless both engines say the same. llm: that has answered nothing."""
    scheduling, cache = llm.config.scheduling, llm.config.cache
    options = {
        "num_blocks": cache.num_cache_blocks,
        "batch_size": scheduling.batch_size,
        "max_num_batched_tokens": llm.config.token_budget,
        "seed": llm.config.model.seed,
    }
    dice, vocab = random.Random(len(prompts[0])), max(map(max, prompts))
    given = [
        (prompts[dice.randrange(len(prompts))], random_params(dice, vocab, stops))
        for _ in range(NUM_REQUESTS)
    ]
    lines = [" ".join(f"{name}={value}" for name, value in options.items())]
    lines += [line_of(prompt, params) for prompt, params in given]
    where = folder.parent / "requests.txt"
    where.write_text("".join(f"{line}\n" for line in lines))
    command = [program, folder, *([folder / TEXT_FILE] if stops else [])]
    *answers, counts = run("sh", "-c", '"$@" < "$0"', where, *command).splitlines()
    wanted = llm.generate([p for p, _ in given], [SamplingParams(**v) for _, v in given])
    for line, request, output in zip(answers, given, wanted, strict=True):
        try:
            check_answer(line, output, stops)
        except AssertionError as error:
            raise AssertionError(f"{request}: {error}") from error
    stats = llm.stats()
    numbers = stats.num_preemptions, stats.num_prefix_hit_tokens, stats.num_steps
    assert counts == "{} preemptions {} hits {} steps".format(*numbers)
    assert stats.num_preemptions > 0
    assert stats.num_prefix_hit_tokens > 0 or llm.spec.prefix


def test_answers_of_the_demo_model_are_pythons(program: Path, tmp_path: Path) -> None:
    own = config(
        DEMO,
        dtype="bfloat16",
        max_length=MAX_LENGTH,
        batch_size=16,
        block_size=16,
        num_cache_blocks=16,
        max_num_batched_tokens=40,
        attention="append",
        inference_model=True,
    )
    export_runtime(own, tmp_path / "folder")
    llm = LLM(own)
    texts = ("def gcd(a, b):", "The quick brown fox", "The quick brown dog jumps over it. Then")
    assert llm.tokenizer is not None
    prompts = [llm.tokenizer.encode(text * n) for text in texts for n in (1, 3)]
    check_answers(program, llm, tmp_path / "folder", prompts, not text_library.missing())


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_answers_of_families_are_static_modes(case: str, program: Path, tmp_path: Path) -> None:
    for max_length, which in runs(case):
        own = config(
            case,
            max_length=max_length,
            batch_size=16,
            num_cache_blocks=-(-max_length // 16) + 6,
            max_num_batched_tokens=max_length,
            attention="append",
            inference_model=True,
            block_size=16,
        )
        folder, static = tmp_path / f"{max_length}" / "folder", tmp_path / f"static_{max_length}"
        export_runtime(own, folder)
        export_model(own, static)
        llm = LLM(own.changed(model_name_or_path=str(static), mode="static"))
        prompts = [prompt[: max_length - 60] for prompt in golden(case)["prompts"][which]]
        prompts += [[*prompt, *prompt[:5]] for prompt in prompts]
        check_answers(program, llm, folder, prompts, stops=False)
