"""Requests with adapters beside everything else that an engine does."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from predict import LLM, AsyncLLM, Guide, SamplingParams
from predict.errors import UserError
from predict.request import RequestOutput
from tests.adapters.serving import NAMES, PROMPTS, generate, settings
from tests.support import tiny
from tests.support.adapter_folders import ADAPTERS, golden
from tests.support.adapters import SEVEN, write_adapter
from tests.support.drafts import draft_always
from tests.support.golden import config

LONG = list(range(100, 150))  # three blocks, and some
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_with_tokenizer(tmp_path_factory.mktemp("base") / "tiny")


def llm_of(base: Path, folders: dict[str, Path], **changes: Any) -> LLM:
    return LLM(base, **settings(folders, **{"block_size": 16, "max_length": 128, **changes}))


def token_ids(outputs: list[RequestOutput]) -> list[tuple[tuple[int, ...], ...]]:
    """Of every answer to each prompt."""
    return [tuple(answer.token_ids for answer in output.outputs) for output in outputs]


def ask(llm: LLM, asked: list[tuple[Any, SamplingParams]]) -> list[tuple[tuple[int, ...], ...]]:
    """The tokens of all answers; nothing is left behind."""
    return token_ids(generate(llm, asked))


def alone(
    base: Path, folders: dict[str, Path], asked: list[tuple[Any, SamplingParams]]
) -> list[tuple[tuple[int, ...], ...]]:
    """The same, one request after another, of an engine that does nothing else."""
    llm = llm_of(base, folders, prefix_caching=False)
    return [tokens for each in asked for tokens in ask(llm, [each])]


def each_with_each(params: SamplingParams = GREEDY) -> list[tuple[Any, SamplingParams]]:
    """Every prompt with every adapter, and without; neighbours have others."""
    pairs = itertools.product(PROMPTS, NAMES)
    return [(prompt, replace(params, adapter=name)) for prompt, name in pairs]


@pytest.fixture(scope="module")
def expected(base: Path, seven: dict[str, Path]) -> list[tuple[tuple[int, ...], ...]]:
    found = alone(base, seven, each_with_each())
    for first in range(0, len(found), len(NAMES)):
        assert len(set(found[first : first + len(NAMES)])) == len(NAMES), "they do not differ"
    return found


COMPOSITIONS: dict[str, dict[str, Any]] = {
    "room for one": {"max_loras": 1, "max_cpu_loras": 1},
    "room for two": {"max_loras": 2, "max_cpu_loras": 1, "batch_size": 5},
    "small chunks": {"max_num_batched_tokens": 16, "max_loras": 3},
    "few blocks": {"num_cache_blocks": 8, "max_loras": 2},
    "turns": {"attention": "block", "max_loras": 2},
    "reserved": {"attention": "reserved", "max_loras": 2, "batch_size": 3},
    "plain operators": {"inference_model": False, "max_loras": 1},
}


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_answers_are_those_of_each_alone(
    base: Path,
    seven: dict[str, Path],
    expected: list[tuple[tuple[int, ...], ...]],
    composition: str,
) -> None:
    changes = COMPOSITIONS[composition]
    llm = llm_of(base, seven, **changes)
    assert ask(llm, each_with_each()) == expected
    stats = llm.stats()
    assert stats.num_adapters == len(SEVEN)
    assert stats.num_adapter_pages == changes["max_loras"] * 8
    if changes["max_loras"] < 3:
        assert stats.num_adapters_written > len(SEVEN), "none was moved out and in again"


DRAFTS: dict[str, dict[str, Any]] = {
    "inference_with_reference": {"speculate_max_ngram_size": 2},
    "lookahead": {"speculate_max_ngram_size": 2},
    "draft_model": {},
}


@pytest.mark.parametrize("method", DRAFTS)
def test_drafts_change_no_answer(
    base: Path, seven: dict[str, Path], expected: list[tuple[tuple[int, ...], ...]], method: str
) -> None:
    changes = {**DRAFTS[method], "max_loras": 2}
    if method == "draft_model":  # which has no adapters, and guesses as the base does
        changes["draft_model_name_or_path"] = str(base)
    llm = llm_of(base, seven, speculate_method=method, speculate_max_draft_token_num=4, **changes)
    draft_always(llm)
    asked = each_with_each()
    assert ask(llm, asked) == expected
    if method == "draft_model":
        stats = llm.stats()
        assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    # What repeats itself is guessed, with an adapter as without.
    repeating = [([7, 8, 9] * 8, replace(each, logit_bias={7: 9.0})) for _, each in asked[:8]]
    assert ask(llm, repeating) == alone(base, seven, repeating)
    assert llm.stats().num_accepted_draft_tokens > 0


def test_beams_samples_and_guides_have_their_adapters(base: Path, seven: dict[str, Path]) -> None:
    beams = SamplingParams(num_beams=2, n=2, max_new_tokens=8)
    samples = SamplingParams(n=2, temperature=0.9, seed=3, max_new_tokens=8, ignore_eos=True)
    guided = replace(GREEDY, guide=Guide(choice=("yes, it is", "no, it is not")), ignore_eos=False)
    asked = [
        (prompt, replace(params, adapter=name))
        for params in (beams, samples, guided)
        for prompt in PROMPTS[:2]
        for name in (None, "four", "wide", "gates")
    ]
    wanted = alone(base, seven, asked)
    assert len(set(wanted[:4])) == len(set(wanted[8:12])) == 4
    for changes in ({"max_loras": 1}, {"num_cache_blocks": 8, "max_num_batched_tokens": 16}):
        llm = llm_of(base, seven, **changes)
        assert ask(llm, asked) == wanted
    assert llm.tokenizer is not None
    texts = {llm.tokenizer.decode(tokens[0]) for tokens in wanted[16:]}
    assert texts <= {"yes, it is", "no, it is not"}


def test_blocks_are_shared_within_an_adapter_alone(base: Path, seven: dict[str, Path]) -> None:
    llm = llm_of(base, seven)

    def hits(name: str | None) -> int:
        (output,) = llm.generate([LONG], replace(GREEDY, adapter=name))
        return output.metrics.num_cached_tokens

    for name in (None, "four", "wide"):
        assert hits(name) == 0
    for name in ("wide", None, "four"):
        assert hits(name) == len(LONG) // 16 * 16
    # One of the same name that is loaded later is another one.
    llm = llm_of(base, seven, allow_adapter_updates=True)
    assert hits("four") == 0
    llm.unload_adapter("four")
    llm.load_adapter("four", seven["eight"])
    assert hits("four") == 0


def test_adapters_come_and_go_beside_what_runs(base: Path, seven: dict[str, Path]) -> None:
    asked = [(LONG, replace(GREEDY, adapter=name, max_new_tokens=30)) for name in ("four", "wide")]
    wanted = alone(base, seven, asked)
    llm = llm_of(
        base, {"a": seven["four"]}, allow_adapter_updates=True, max_loras=1, max_cpu_loras=1
    )
    first = llm.samples(LONG, replace(asked[0][1], adapter="a"))
    second = llm.samples(LONG, replace(asked[0][1], adapter="a"))
    llm.answers.add([first], lambda _: None)
    llm.step()
    llm.answers.add([second], lambda _: None)
    llm.unload_adapter("a")  # which one runs with, and one waits for
    with pytest.raises(UserError, match=r"adapter is 'a' \(loaded: none\)"):
        llm.samples(LONG, replace(GREEDY, adapter="a"))
    llm.load_adapter("a", seven["wide"])
    third = llm.samples(LONG, replace(asked[1][1], adapter="a"))
    llm.answers.add([third], lambda _: None)
    while not all(each.is_finished for each in (first, second, third)):
        llm.step()
        llm.engine.scheduler.check()
    found = token_ids([each.output() for each in (first, second, third)])
    assert found == [wanted[0], wanted[0], wanted[1]]


def test_unloaded_adapters_are_forgotten(base: Path, seven: dict[str, Path]) -> None:
    llm = llm_of(base, {}, allow_adapter_updates=True, max_loras=1, max_cpu_loras=1)
    assert llm.addons.adapters is not None
    for name in itertools.islice(itertools.cycle(seven), 20):
        llm.load_adapter("a", seven[name])
        llm.generate([PROMPTS[0]], replace(GREEDY, adapter="a", max_new_tokens=2))
        llm.unload_adapter("a")
    assert len(llm.addons.adapters._adapters) <= 1  # the one whose values are kept
    assert llm.stats().num_used_adapter_pages == 0


@pytest.mark.parametrize("change", ["gone", "other"])
def test_files_that_changed_end_the_requests_that_need_them_alone(
    base: Path, seven: dict[str, Path], tmp_path: Path, change: str
) -> None:
    folders = {"mine": shutil.copytree(seven["wide"], tmp_path / "mine"), "other": seven["wide"]}
    llm = llm_of(base, folders, max_loras=1, max_cpu_loras=1)
    asked = [(PROMPTS[0], replace(GREEDY, adapter=name)) for name in ("mine", "other", None)]
    (wanted,) = set(ask(llm, asked)[:2])
    if change == "gone":
        shutil.rmtree(folders["mine"])
    else:
        write_adapter(folders["mine"], tiny.CONFIG, 64, seed=99)
    outputs = llm.generate([prompt for prompt, _ in asked], [each for _, each in asked])
    assert outputs[0].finish_reason == "error"
    assert "files of adapter 'mine' have changed" in (outputs[0].outputs[0].error or "")
    assert token_ids(outputs)[1] == wanted
    assert outputs[2].finish_reason == "length"
    llm.engine.scheduler.check()


def test_a_link_to_nothing_beside_an_adapter_is_no_file_of_it(
    base: Path, seven: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(seven["four"], tmp_path / "mine")
    (folder / "README.md").symlink_to(tmp_path / "nothing")
    llm = llm_of(base, {"mine": folder, "four": seven["four"]}, max_loras=1, max_cpu_loras=1)
    asked = [(PROMPTS[0], replace(GREEDY, adapter=name)) for name in ("mine", "four", "mine")]
    assert len(set(ask(llm, asked))) == 1


@pytest.fixture
def changed(tmp_path: Path) -> Any:
    """Writes an adapter with other settings, or with other tensors."""
    count = itertools.count()

    def write(settings: dict[str, Any] | None = None, **tensors: Any) -> Path:
        folder = write_adapter(tmp_path / str(next(count)), tiny.CONFIG, 4, seed=1)
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **(settings or {})}))
        if tensors:
            held = load_file(folder / "adapter_model.safetensors")
            made = {f"base_model.model.{name}": value for name, value in tensors.items()}
            save_file({**held, **made}, folder / "adapter_model.safetensors")
        return folder

    return write


def test_adapters_that_cannot_be_served_are_refused(
    base: Path, seven: dict[str, Path], changed: Any, tmp_path: Path
) -> None:
    llm = llm_of(base, {}, allow_adapter_updates=True, max_lora_rank=16)
    query = "model.layers.0.self_attn.q_proj"
    rows, width = 128, 64
    head = {
        "lm_head.lora_A.weight": np.ones((4, width), np.float32),
        "lm_head.lora_B.weight": np.ones((512, 4), np.float32),
    }
    table = {
        "model.embed_tokens.lora_embedding_A": np.ones((4, 512), np.float32),
        "model.embed_tokens.lora_embedding_B": np.ones((width, 4), np.float32),
    }
    magnitude = {f"{query}.lora_magnitude_vector.weight": np.ones(rows, np.float32)}
    saved = {"model.norm.weight": np.ones(width, np.float32)}
    odd = {f"{query}.lora_B.weight": np.full((rows, 4), np.nan, np.float32)}
    for folder, said in {
        seven["wide"]: r"has rank 64 \(allowed: up to 16\); raise --max_lora_rank",
        changed({"use_dora": True}, **magnitude): r"magnitude \(DoRA\).*merge it with --lora_path",
        changed(**head): "changes lm_head.*merge it with --lora_path",
        changed(**table): "changes model.embed_tokens.*merge it with --lora_path",
        changed({"modules_to_save": ["norm"]}, **saved): "changes model.norm.*merge it",
        changed(**odd): "not finite",
        tmp_path / "missing": "is no folder",
    }.items():
        with pytest.raises(UserError, match=said):
            llm.load_adapter("a", folder)
    assert llm.stats().num_adapters == 0
    for name in ("", "a\nb", "x" * 201):
        with pytest.raises(UserError, match="an adapter's name is"):
            llm.load_adapter(name, seven["four"])
    llm.load_adapter("a", seven["four"])
    with pytest.raises(UserError, match="'a' is loaded already"):
        llm.load_adapter("a", seven["eight"])
    with pytest.raises(UserError, match=r"adapter is 'aa' \(loaded: a\); did you mean a\?"):
        llm.unload_adapter("aa")


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("llama_biases", r"changes .*\.bias, and .*merge it with --lora_path"),
        ("llama_lora_bias", "a bias of its own, which no low-rank product adds; merge it"),
    ],
)
def test_adapters_with_biases_are_sent_to_be_merged(case: str, said: str) -> None:
    wanted = golden(case)
    with pytest.raises(UserError, match=said):
        LLM(config(wanted["base"], max_length=64, lora_modules=(f"a={ADAPTERS / case}",)))


def test_names_that_no_adapter_has_are_refused(base: Path, seven: dict[str, Path]) -> None:
    fixed = llm_of(base, {"sql": seven["four"]})
    with pytest.raises(UserError, match=r"adapter is 'sqk' \(loaded: sql\); did you mean sql\?"):
        fixed.generate([PROMPTS[0]], replace(GREEDY, adapter="sqk"))
    with pytest.raises(UserError, match="adapters are fixed; start with allow_adapter_updates"):
        fixed.load_adapter("b", seven["four"])
    without = llm_of(base, {})
    with pytest.raises(UserError, match="this model serves none"):
        without.generate([PROMPTS[0]], replace(GREEDY, adapter="sql"))


def test_an_async_engine_changes_adapters_between_steps(base: Path, seven: dict[str, Path]) -> None:
    asked = [(PROMPTS[0], replace(GREEDY, adapter=name)) for name in ("four", "wide")]
    wanted = alone(base, seven, asked)

    async def main() -> None:
        async with AsyncLLM(
            base, dtype="float32", max_lora_rank=64, allow_adapter_updates=True, max_length=128
        ) as llm:
            for name, tokens in zip(("four", "wide"), wanted, strict=True):
                await llm.load_adapter("a", seven[name])
                output = await llm.generate(PROMPTS[0], replace(GREEDY, adapter="a"))
                assert token_ids([output]) == [tokens]
                with pytest.raises(UserError, match="is loaded already"):
                    await llm.load_adapter("a", seven["four"])
                await llm.unload_adapter("a")
            with pytest.raises(UserError, match="loaded: none"):
                await llm.generate(PROMPTS[0], replace(GREEDY, adapter="a"))

    asyncio.run(main())


def test_values_that_the_dtype_has_not_are_refused(
    base: Path, seven: dict[str, Path], tmp_path: Path
) -> None:
    name, source = next(iter(seven.items()))
    folder = Path(shutil.copytree(source, tmp_path / name))
    file = folder / "adapter_model.safetensors"
    save_file({key: values * np.float32(1e7) for key, values in load_file(file).items()}, file)
    with pytest.raises(UserError, match="float16 ends at 65504"):
        llm_of(base, {name: folder}, dtype="float16")
