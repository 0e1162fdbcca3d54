"""Sleep, wake-up and weights that change: the same tokens, memory given back, one set for each."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from predict import LLM, AsyncLLM, SamplingParams
from predict.config.rest import Rest
from predict.engine.runner.residence import Residence
from predict.errors import UserError
from predict.system.host import resident_bytes
from tests.support import tiny
from tests.support.adapter_folders import factors, peft_tensors, write_peft
from tests.support.paths import DEMO
from tests.support.prefixes import TINY, write_prefix

PROMPTS = [[5, 6, 7 + index] for index in range(4)]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
WEIGHTS = "model.safetensors"


def tokens(llm: LLM) -> list[tuple[int, ...]]:
    return [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]


def digests(directory: Path) -> dict[str, str]:
    return {WEIGHTS: hashlib.sha256((directory / WEIGHTS).read_bytes()).hexdigest()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("resting") / "model"
    tiny.write(directory, {"vocab_size": 96})
    return directory


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("resting") / "other", {"vocab_size": 96}, seed=1)


SETTINGS: dict[str, Any] = {"attention": "append", "max_length": 64, "batch_size": 4}


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("form", ["compiled", "plain", "int8_cache", "int8"])
def test_the_same_tokens_before_and_after(model: Path, level: int, form: str) -> None:
    changes: dict[str, dict[str, Any]] = {
        "plain": {"inference_model": False},
        "int8_cache": {"cachekv_int8_type": "dynamic"},
        "int8": {"quant_type": "weight_only_int8"},
    }
    llm = LLM(model, **{**SETTINGS, **changes.get(form, {})})
    before = tokens(llm)
    llm.sleep(level)
    assert llm.is_sleeping
    for ask in (lambda: llm.generate(PROMPTS, GREEDY), lambda: llm.embed([[5, 6]]), llm.sleep):
        with pytest.raises(UserError, match="sleeps"):
            ask()
    llm.wake_up()
    assert tokens(llm) == before
    with pytest.raises(UserError, match="awake"):
        llm.wake_up()


def test_memory_comes_back_to_the_system() -> None:
    """On a CPU level 1 gives the cache back, level 2 the weights too."""
    llm = LLM(DEMO, attention="append", max_length=2048, num_cache_blocks=512, batch_size=8)
    weights = llm.parts.resting.num_bytes
    long = [[5 + i] * 1500 for i in range(8)]  # touches the cache's pages
    llm.generate(long, SamplingParams(max_new_tokens=1))
    cache = sum(each.size * each.element_size() for c in llm.parts.caches for each in c)
    used = cache * 8 * 1500 // (512 * 64)
    for level, expected in ((1, used), (2, used + weights)):
        before = resident_bytes()
        llm.sleep(level)
        assert before - resident_bytes() >= 0.95 * expected
        llm.wake_up()
        llm.generate(long, SamplingParams(max_new_tokens=1))


def test_an_update_runs_with_the_weights_of_the_folder(model: Path, changed: Path) -> None:
    llm, wanted = LLM(model, **SETTINGS), tokens(LLM(changed, **SETTINGS))
    before = tokens(llm)
    assert before != wanted
    llm.update_weights(changed, digests(changed))
    assert tokens(llm) == wanted, "nothing of the prefix cache is left"
    llm.sleep(2)
    llm.wake_up()
    assert tokens(llm) == wanted, "the latest folder is read"
    llm.sleep(2)
    llm.update_weights(model)
    assert not llm.is_sleeping
    assert tokens(llm) == before


def test_an_update_that_does_not_fit_changes_nothing(
    model: Path, changed: Path, tmp_path: Path
) -> None:
    llm = LLM(model, **SETTINGS)
    before = tokens(llm)
    wrong = tiny.write(tmp_path / "wrong", {"vocab_size": 96}, seed=2)
    tiny.write(tmp_path / "wide", {"vocab_size": 96, "intermediate_size": 160})
    cut = tiny.write(tmp_path / "cut", {"vocab_size": 96}, seed=3)
    with (cut / WEIGHTS).open("r+b") as file:
        file.truncate(2000)
    for folder, given, said in (
        (wrong, digests(changed), "has the SHA-256"),
        (wrong, {"config.json": "0" * 64}, f"not {WEIGHTS}, which have weights"),
        (tmp_path / "wide", None, "describes another network"),
        (cut, None, "model.safetensors"),
        (tmp_path / "nowhere", None, "does not exist"),
    ):
        with pytest.raises(UserError, match=said):
            llm.update_weights(folder, given)
        assert tokens(llm) == before
    for rest, said in (
        ({"act": "sleep", "level": 3}, "level is 3"),
        ({"act": "sleep", "mode": "keep"}, "mode"),
        ({"act": "update_weights"}, "needs one"),
        ({"act": "update_weights", "path": "x", "digests": {"a/b": "0" * 64}}, "files of the"),
        ({"act": "update_weights", "path": "x", "digests": {"a": "0"}}, "64 hexadecimal"),
    ):
        with pytest.raises(UserError, match=said):
            Rest(**rest)


def test_a_folder_that_changed_since_its_update_is_not_read_again(
    model: Path, tmp_path: Path
) -> None:
    llm, step = LLM(model, **SETTINGS), tiny.write(tmp_path / "step", {"vocab_size": 96}, seed=4)
    llm.update_weights(step, digests(step))
    before, whole = tokens(llm), (step / WEIGHTS).read_bytes()
    llm.sleep(2)
    tiny.write(step, {"vocab_size": 96}, seed=5)
    with pytest.raises(UserError, match="has the SHA-256"):
        llm.wake_up()
    assert llm.is_sleeping
    (step / WEIGHTS).write_bytes(whole)
    llm.wake_up()
    assert tokens(llm) == before


def test_new_weights_without_room_leave_the_old_ones(
    model: Path, changed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(model, **SETTINGS)
    before, come_back = tokens(llm), Residence.come_back

    def full(self: Residence, fresh: Any = None) -> None:
        if fresh is not None:
            raise MemoryError
        come_back(self, fresh)

    with monkeypatch.context() as patch:
        patch.setattr(Residence, "come_back", full)
        with pytest.raises(MemoryError):
            llm.update_weights(changed)
    assert tokens(llm) == before
    llm.sleep(2)
    llm.wake_up()
    assert tokens(llm) == before, "the old folder is the model's"


def test_what_waits_for_a_rest_is_told_of_the_end(model: Path) -> None:
    async def run() -> None:
        llm = await AsyncLLM.load(model, **SETTINGS)
        answer = llm.add(PROMPTS[0], replace(GREEDY, max_new_tokens=60))
        waits = [asyncio.create_task(each) for each in (llm.sleep(), llm.embed([[5, 6]]))]
        await asyncio.sleep(0)
        llm.close()
        for each in waits:
            with pytest.raises(RuntimeError, match="it was closed"):
                await each
        with pytest.raises(RuntimeError, match="it was closed"):
            await answer.output()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_64_streams_each_end_whole_by_one_set_of_weights(model: Path, changed: Path) -> None:
    """Those asked before the update have the old weights, those asked while it waits the new."""
    sets = [LLM(each, **{**SETTINGS, "batch_size": 16}) for each in (model, changed)]
    prompts = [[3, 4 + index % 90, 9] for index in range(64)]
    old, new = ([output.token_ids for output in llm.generate(prompts, GREEDY)] for llm in sets)

    async def run() -> None:
        llm = await AsyncLLM.load(model, **{**SETTINGS, "batch_size": 16})
        async with llm:
            first = [llm.add(prompt, GREEDY) for prompt in prompts]
            update = asyncio.create_task(llm.update_weights(changed, digests(changed)))
            while not (await llm.stats()).num_running:
                pass
            second = [llm.add(prompt, GREEDY) for prompt in prompts]
            found = [(await answer.output()).token_ids for answer in [*first, *second]]
            await update
            assert found[:64] == old
            assert found[64:] == new
            # Those who are told: what runs ends at once, and says so.
            third = [llm.add(prompt, GREEDY) for prompt in prompts]
            await llm.update_weights(model, mode="abort")
            ended = [(await answer.output()).finish_reason for answer in third]
            assert set(ended) <= {"abort", "length"}
            assert ended.count("abort") >= 32
            assert (await llm.generate(prompts[5], GREEDY)).token_ids == old[5]
            await llm.sleep(2)
            with pytest.raises(UserError, match="sleeps"):
                await llm.generate(prompts[0], GREEDY)
            await llm.wake_up()
            assert (await llm.generate(prompts[6], GREEDY)).token_ids == old[6]

    assert old != new
    asyncio.run(run())


def test_prefixes_and_adapters_come_back(model: Path, tmp_path: Path) -> None:
    settings = {
        **SETTINGS,
        "lora_modules": (f"lora={write_peft(tmp_path / 'lora', peft_tensors(factors()))}",),
        "prefix_path": (f"tuned={write_prefix(tmp_path / 'prefix', TINY, 5)}",),
    }
    llm = LLM(model, **settings)

    def found() -> list[list[tuple[int, ...]]]:
        asked = [replace(GREEDY, adapter=name) for name in (None, "lora", "tuned")]
        return [[each.token_ids for each in llm.generate(PROMPTS, params)] for params in asked]

    before = found()
    assert len({str(each) for each in before}) == 3
    for level in (1, 2):
        llm.sleep(level)
        with pytest.raises(UserError, match="sleeps"):
            llm.unload_prefix("tuned")
        llm.wake_up()
        assert found() == before
