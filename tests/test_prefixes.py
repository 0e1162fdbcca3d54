"""Tuned prefixes: attention over [prefix; prompt] as NumPy has it, however it is computed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import predict.engine.addons
from export.export_model import export_model
from predict import LLM, AsyncLLM, SamplingParams
from predict.device import library
from predict.errors import UserError
from predict.nn.cache_formats import kv_format_of
from tests.golden.prefixes import random_prefix
from tests.support import quantized_caches, tiny
from tests.support.drafts import draft_always
from tests.support.golden import GOLDEN, config, golden
from tests.support.prefixes import ENTRIES, NAMED, TINY, check, npy, write_prefix

MODELS = sorted({entry["model"] for entry in ENTRIES})
SETTINGS: dict[str, Any] = {
    "attention": "append",
    "max_length": 192,
    "batch_size": 3,
    "block_size": 16,
}


DRAFTS: list[dict[str, Any]] = [
    {"speculate_method": method, "speculate_max_draft_token_num": 4, **settings}
    for method, settings in (
        ("inference_with_reference", {}),
        ("lookahead", {"speculate_max_ngram_size": 3}),
        ("draft_model", {"draft_model_name_or_path": str(GOLDEN / "qwen2")}),
        ("draft_model", {"draft_model_name_or_path": str(GOLDEN / "llama_gqa")}),
    )
]


def num_pinned(llm: LLM) -> int:
    return sum(len(prefix.all_block_ids) for prefix in llm.addons.prefixes.values())


@pytest.mark.parametrize("name", NAMED)
def test_answers_equal_attention_over_prefix_and_prompt(
    name: str, operators: dict[str, Any], tmp_path: Path
) -> None:
    entry = NAMED[name]
    path = npy(tmp_path / "prefix", entry)
    llm = LLM(config(entry["model"], **SETTINGS, **operators, prefix_path=path))
    for _ in range(2):
        check(llm, entry)
        llm.engine.scheduler.check()
        assert llm.stats().num_used_blocks == num_pinned(llm) == -(-entry["num_tokens"] // 16)
    # A prompt that sees itself both ways shares nothing.
    assert (llm.stats().num_prefix_hit_tokens > 0) == (entry["model"] != "chatglm_6b")


@pytest.mark.parametrize("model", MODELS)
def test_an_exported_program_takes_any_prefix(
    model: str, operators: dict[str, Any], tmp_path: Path
) -> None:
    changes = {**SETTINGS, **operators}
    export_model(config(model, **changes), tmp_path / "static")
    entries = [entry for entry in ENTRIES if entry["model"] == model]
    named = [f"p{e['num_tokens']}={npy(tmp_path / str(e['num_tokens']), e)}" for e in entries]
    llm = LLM(config(tmp_path / "static", mode="static", **changes, prefix_path=tuple(named)))
    for _ in range(2):
        for entry in entries:
            check(llm, entry, f"p{entry['num_tokens']}")


@pytest.mark.parametrize(
    "composition",
    [
        {"batch_size": 1, "attention": "reserved"},
        {"batch_size": 3, "attention": "reserved", "block_size": 32},
        {"batch_size": 3, "attention": "block", "block_size": 64},
        {"batch_size": 16},
        {"batch_size": 5, "max_num_batched_tokens": 7},
        {"batch_size": 4, "chunked_prefill": False},
        {"batch_size": 4, "prefix_caching": False},
        *DRAFTS,
        {**DRAFTS[-1], "num_cache_blocks": 5 + 14, "batch_size": 6},
        {**DRAFTS[-1], "prefix_caching": False, "max_num_batched_tokens": 24},
        {**DRAFTS[-1], "batch_size": 3, "attention": "reserved"},
        {**DRAFTS[-1], "attention": "block", "block_size": 64},
    ],
)
def test_prefixes_and_none_share_batches(
    composition: dict[str, Any], compiled: library.Library, tmp_path: Path
) -> None:
    entries = [entry for entry in ENTRIES if entry["model"] == "llama_gqa"]
    named = tuple(f"{e['num_tokens']}={npy(tmp_path / str(e['num_tokens']), e)}" for e in entries)
    settings = {**SETTINGS, "inference_model": True, **composition}
    llm = LLM(config("llama_gqa", **settings, prefix_path=named))
    draft_always(llm)
    plain = golden("llama_gqa")
    params = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)
    prompts, wanted, each = [], [], []
    for index in range(4):
        for entry in entries:
            prompts.append(entry["prompts"][index])
            wanted.append(entry["greedy"][index])
            each.append(replace(params, adapter=str(entry["num_tokens"])))
        prompts.append(plain["prompts"][index + 1])
        wanted.append(plain["greedy"][index + 1][:24])
        each.append(params)
    for _ in range(2):
        outputs = llm.generate(prompts, each)
        assert [list(output.token_ids) for output in outputs] == wanted
        llm.engine.scheduler.check()
    assert (llm.stats().num_draft_tokens > 0) == ("speculate_method" in composition)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("num_tokens", [5, 21, 64])
def test_drafts_are_what_the_draft_model_says_without_the_prefix(
    compiled: library.Library, tmp_path: Path, num_tokens: int, block_size: int
) -> None:
    path = write_prefix(tmp_path / "prefix", TINY, num_tokens)
    model = tiny.write(tmp_path / "model")
    settings: dict[str, Any] = {**SETTINGS, "dtype": "float32", "block_size": block_size}
    drafts = {**DRAFTS[-1], "draft_model_name_or_path": str(model)}
    llm = LLM(model, inference_model=True, prefix_path=(f"p={path}",), **settings, **drafts)
    draft_always(llm)
    seen: list[tuple[list[int], list[int]]] = []
    assert llm.engine.speculation.proposer is not None
    propose = llm.engine.speculation.proposer.propose

    def recorded(requests: Any, limits: Any) -> Any:
        found = propose(requests, limits)
        seen.extend((list(r.token_ids), list(f)) for r, f in zip(requests, found, strict=True))
        return found

    llm.engine.speculation.proposer.propose = recorded  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True, adapter="p")
    sampled = replace(params, n=2, temperature=0.8, seed=3)
    prompts = [[5, 9, 11, 30], list(range(40, 77)), [5, 9, 11, 30], list(range(40, 73))]
    asked = [params, params, replace(params, adapter=None), sampled]
    outputs = [llm.generate(prompts, asked) for _ in range(2)]
    alone = LLM(model, inference_model=True, prefix_path=(f"p={path}",), **settings)
    wanted = alone.generate(prompts, asked)
    for found in outputs:
        for output, each in zip(found, wanted, strict=True):
            assert [a.token_ids for a in output.outputs] == [a.token_ids for a in each.outputs]
    greedy = [(tokens, each) for tokens, each in seen if tokens[:4] != prompts[3][:4]]
    assert len(greedy) > 40
    says = alone.generate(
        [tokens for tokens, _ in greedy],
        [replace(params, adapter=None, max_new_tokens=len(each)) for _, each in greedy],
    )
    assert [list(output.token_ids) for output in says] == [each for _, each in greedy]
    # Where nothing is before the prompt both say the same.
    assert llm.stats().num_accepted_draft_tokens > 0
    assert llm.stats().num_used_blocks == num_pinned(llm)


def test_requests_that_are_preempted_get_their_prefix_again(
    compiled: library.Library, tmp_path: Path
) -> None:
    entry = NAMED["llama_gqa, 21 tokens"]
    settings = {**SETTINGS, "inference_model": True, "num_cache_blocks": 2 + 11, "batch_size": 4}
    llm = LLM(config("llama_gqa", **settings, prefix_path=npy(tmp_path, entry)))
    check(llm, entry)
    assert llm.stats().num_preemptions > 0


def test_beams_and_samples_begin_with_the_prefix(compiled: library.Library, tmp_path: Path) -> None:
    path = write_prefix(tmp_path / "prefix", TINY, 21)
    model = tiny.write(tmp_path / "model")
    beams = SamplingParams(num_beams=3, n=3, max_new_tokens=12, ignore_eos=True)
    samples = SamplingParams(n=3, seed=5, max_new_tokens=12, ignore_eos=True)
    prompt = [5, 9, 11, 30, 7, 8]
    found = []
    # Blocks that hold the whole prefix, and blocks that beams part in.
    for settings in ({"block_size": 128}, {"block_size": 16}, {"block_size": 16, "batch_size": 4}):
        changes: dict[str, Any] = {**SETTINGS, "dtype": "float32", "batch_size": 8, **settings}
        llm = LLM(model, inference_model=True, prefix_path=str(path), **changes)
        outputs = llm.generate([prompt] * 3, [beams, samples, beams])
        found.append([[answer.token_ids for answer in output.outputs] for output in outputs])
        llm.engine.scheduler.check()
    assert found[0] == found[1] == found[2]
    assert found[0][0] == found[0][2]
    assert len({*found[0][0]}) == len({*found[0][1]}) == 3
    without = LLM(model, inference_model=True, **{**changes, "batch_size": 8})
    assert [a.token_ids for a in without.generate([prompt], beams)[0].outputs] != found[0][0]


@pytest.mark.parametrize("cache_type", [None, *quantized_caches.CACHE_TYPES])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cache_holds_a_prefix_as_its_format_rounds_it(
    compiled: library.Library, tmp_path: Path, cache_type: str | None, fused: bool, dtype: str
) -> None:
    model = quantized_caches.model(tmp_path / "model", {})
    path = write_prefix(tmp_path / "prefix", TINY, 21)
    changes = {"cachekv_int8_type": cache_type, "dtype": dtype, "inference_model": fused}
    llm = LLM(quantized_caches.config(model, prefix_path=path, **changes))
    import paddle

    row, blocks = kv_format_of(llm.config.kv_format), llm.addons.prefixes[""].all_block_ids
    for cache, layer in zip(llm.parts.caches, random_prefix(TINY, 21, 0), strict=True):
        for which in range(2):
            scale: Any = cache[2 + which] if row.scales != "none" else None
            rows = paddle.to_tensor(layer[which])  # [heads, P, D]
            given = None if row.scales != "head" else scale.unsqueeze(-1)
            codes, own = row.quantize(rows, given)
            wanted = row.unpack(codes, own, 32).numpy()
            stored = paddle.gather(cache[which], paddle.to_tensor(blocks)).astype(codes.dtype)
            stored = stored.transpose([1, 0, 2, 3]).flatten(1, 2)[:, :21]
            if row.scales == "token":
                tall = paddle.gather(scale, paddle.to_tensor(blocks))
                given = tall.swapaxes(0, 1).flatten(1, 2)[:, :21]
            found = row.unpack(stored, given, 32).numpy()
            np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cache_type", quantized_caches.CACHE_TYPES)
def test_quantized_caches_give_one_text_behind_a_prefix(
    compiled: library.Library, tmp_path: Path, cache_type: str
) -> None:
    model = quantized_caches.model(tmp_path / "model", {})
    path = write_prefix(tmp_path / "prefix", TINY, 21)
    changes = {"cachekv_int8_type": cache_type, "prefix_path": path}
    texts = [
        quantized_caches.greedy(LLM(quantized_caches.config(model, **changes, **composition)))
        for composition in (
            {"batch_size": 1},
            {"batch_size": 4, "attention": "append", "block_size": 64},
            {"batch_size": 5, "attention": "append", "max_num_batched_tokens": 7},
            {"batch_size": 5, "attention": "append", "num_cache_blocks": 11},
        )
    ]
    export_model(quantized_caches.config(model, cachekv_int8_type=cache_type), tmp_path / "static")
    static = quantized_caches.config(tmp_path / "static", mode="static", **changes)
    texts.append(quantized_caches.greedy(LLM(static)))
    assert all(text == texts[0] for text in texts)
    del changes["prefix_path"]
    assert quantized_caches.greedy(LLM(quantized_caches.config(model, **changes))) != texts[0]


def test_max_length_counts_the_prefix(tmp_path: Path) -> None:
    model, path = tiny.write(tmp_path / "model"), write_prefix(tmp_path / "prefix", TINY, 21)
    llm = LLM(model, dtype="float32", max_length=32, block_size=16, prefix_path=path)
    (output,) = llm.generate([5, 6, 7], SamplingParams(temperature=0.0, ignore_eos=True))
    assert len(output.token_ids) == 32 - 21 - 3
    with pytest.raises(UserError, match=r"prompt has 11 tokens.*is 11.*\(32 less 21 of its prefix"):
        llm.generate([list(range(11))], SamplingParams(temperature=0.0))


def test_a_request_gets_what_it_names_alone(tmp_path: Path) -> None:
    model = tiny.write(tmp_path / "model")
    one, two = (write_prefix(tmp_path / f"p{n}", TINY, 5, n) for n in (1, 2))
    settings: dict[str, Any] = {"dtype": "float32", "max_length": 48, "block_size": 16}
    greedy = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)

    def text(llm: LLM, name: str | None = None) -> Any:
        return llm.generate([5, 9, 11], replace(greedy, adapter=name))[0].token_ids

    both = LLM(model, **settings, prefix_path=(str(one), f"two={two / 'pre_caches.npy'}"))
    assert text(both) == text(LLM(model, **settings, prefix_path=one)) != text(both, "two")
    assert text(both, "two") == text(LLM(model, **settings, prefix_path=two))
    with pytest.raises(UserError, match=r"adapter is 'three' \(loaded: two\)"):
        text(both, "three")
    with pytest.raises(UserError, match=r"adapter is '' \(loaded: two\)"):
        text(both, "")


@pytest.mark.parametrize(
    ("paths", "settings", "said"),
    [
        (("a=x", "a=y"), {}, "two prefixes 'a'"),
        (("x", "y"), {}, "two prefixes without a name"),
        (("a=",), {}, r"has 'a=' \(allowed: path, or name=path\)"),
        (("=x",), {}, r"has '=x' \(allowed"),
        (("",), {}, "is empty"),
        (("a=x",), {"lora_modules": ("a=z",)}, "both name 'a'"),
        (("x",), {}, "neither a folder nor a .npy file"),
    ],
)
def test_what_names_no_prefix_is_refused(
    tmp_path: Path, paths: tuple[str, ...], settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        LLM(tiny.write(tmp_path), **settings, prefix_path=paths)


def test_too_few_blocks_for_a_prefix_are_refused(tmp_path: Path) -> None:
    model, path = tiny.write(tmp_path / "model"), write_prefix(tmp_path / "prefix", TINY, 21)
    settings: dict[str, Any] = {"block_size": 16, "max_length": 32, "prefix_path": path}
    with pytest.raises(UserError, match=r"take 2 blocks .* num_cache_blocks is 2 \(allowed: 3 and"):
        LLM(model, **settings, num_cache_blocks=2)


GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
UPDATED: dict[str, Any] = {**SETTINGS, "allow_adapter_updates": True}


def tokens(llm: LLM, name: str | None, prompt: Sequence[int] = (5, 9, 11)) -> tuple[int, ...]:
    return llm.generate([list(prompt)], replace(GREEDY, adapter=name))[0].token_ids


def test_prefixes_come_and_go_beside_what_runs(tmp_path: Path) -> None:
    model = tiny.write(tmp_path / "model")
    one, two = (write_prefix(tmp_path / f"p{n}", TINY, 21, n) for n in (1, 2))
    fixed = LLM(model, dtype="float32", **SETTINGS, prefix_path=(f"one={one}", f"two={two}"))
    wanted = {name: tokens(fixed, name) for name in (None, "one", "two")}
    assert len(set(wanted.values())) == 3
    llm = LLM(model, dtype="float32", **{**UPDATED, "batch_size": 1})
    assert llm.stats().num_prefixes == 0
    llm.load_prefix("a", one)
    samples = [llm.samples([5, 9, 11], replace(GREEDY, adapter="a")) for _ in range(3)]
    llm.answers.add(samples[:2], lambda _: None)
    llm.step()
    llm.unload_prefix("a")  # which one runs with, and one waits for
    assert (llm.stats().num_prefixes, llm.stats().num_prefix_blocks) == (0, 2)
    with pytest.raises(UserError, match=r"adapter is 'a' \(loaded: none\)"):
        llm.samples([5, 9, 11], replace(GREEDY, adapter="a"))
    with pytest.raises(UserError, match="its prefix a was unloaded before the request was queued"):
        llm.answers.add(samples[2:], lambda _: None)
    llm.load_prefix("a", two / "pre_caches.npy")
    last = llm.samples([5, 9, 11], replace(GREEDY, adapter="a"))
    llm.answers.add([last], lambda _: None)
    while not last.is_finished:
        llm.step()
        llm.engine.scheduler.check()
    found = [each.output().token_ids for each in (*samples[:2], last)]
    assert found == [wanted["one"], wanted["one"], wanted["two"]]
    assert llm.stats().num_used_blocks == llm.stats().num_prefix_blocks == 2
    assert tokens(llm, None) == wanted[None]
    llm.unload_prefix("a")
    assert llm.stats().num_used_blocks == 0


def test_the_prefix_of_all_others_stays(tmp_path: Path) -> None:
    model = tiny.write(tmp_path / "model")
    one, two = (write_prefix(tmp_path / f"p{n}", TINY, 21, n) for n in (1, 2))
    llm = LLM(model, dtype="float32", **UPDATED, prefix_path=one)
    before = tokens(llm, None)
    for name in ("", "b"):
        with pytest.raises(UserError, match=rf"prefix is '{name}' \(loaded: none\)"):
            llm.unload_prefix(name)
    with pytest.raises(UserError, match=r"adapter is '' \(loaded: none\)"):
        tokens(llm, "")
    llm.load_prefix("b", two)
    with pytest.raises(UserError, match="'b' is loaded already"):
        llm.load_prefix("b", one)
    with pytest.raises(UserError, match="a prefix 'b' is loaded already"):
        llm.load_adapter("b", one)
    with pytest.raises(UserError, match="an adapter's name is ''"):
        llm.load_prefix("", one)
    assert tokens(llm, None) == before != tokens(llm, "b")
    fixed = LLM(model, dtype="float32", **SETTINGS, prefix_path=f"b={two}")
    said = "adapters are fixed; start with allow_adapter_updates"
    with pytest.raises(UserError, match=said):
        fixed.load_prefix("c", one)
    with pytest.raises(UserError, match=said):
        fixed.unload_prefix("b")


@pytest.mark.parametrize("model", ["llama_gqa", "chatglm_6b"])
def test_prefixes_are_loaded_by_a_program_that_takes_no_adapters(
    model: str, compiled: library.Library, tmp_path: Path
) -> None:
    changes = {**UPDATED, "inference_model": True}
    export_model(config(model, **SETTINGS, inference_model=True), tmp_path / "static")
    llm = LLM(config(tmp_path / "static", mode="static", **changes))
    entries = [entry for entry in ENTRIES if entry["model"] == model]
    for entry in entries:
        name = f"p{entry['num_tokens']}"
        path = npy(tmp_path / name, entry)
        with pytest.raises(UserError, match="--enable_lora"):
            llm.load_adapter(name, path)
        llm.load_prefix(name, path)
        check(llm, entry, name)
        check(llm, entry, name)
        llm.unload_prefix(name)
        assert llm.stats().num_used_blocks == 0


def test_a_load_that_fails_loses_no_block(tmp_path: Path) -> None:
    model, path = tiny.write(tmp_path / "model"), write_prefix(tmp_path / "prefix", TINY, 21)
    other = write_prefix(tmp_path / "other", (3, 2, 32), 5)
    settings = {**UPDATED, "max_length": 64, "num_cache_blocks": 6}
    llm = LLM(model, dtype="float32", **settings)
    with pytest.raises(UserError, match="trained for another model"):
        llm.load_prefix("a", other)

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predict.engine.addons, "write_rows", fail)
        with pytest.raises(MemoryError, match="no room"):
            llm.load_prefix("a", path)
    assert llm.stats().num_prefix_blocks == llm.stats().num_used_blocks == 0
    llm.load_prefix("a", path)
    with pytest.raises(UserError, match=r"take 2 blocks .* leave 2, and a request may need 4"):
        llm.load_prefix("b", path)
    llm.unload_prefix("a")
    llm.load_prefix("b", path)
    llm.engine.scheduler.check()


def test_an_async_engine_changes_prefixes_between_steps(tmp_path: Path) -> None:
    model = tiny.write(tmp_path / "model")
    one, two = (write_prefix(tmp_path / f"p{n}", TINY, 21, n) for n in (1, 2))
    fixed = LLM(model, dtype="float32", **SETTINGS, prefix_path=(f"one={one}", f"two={two}"))

    async def main() -> None:
        async with AsyncLLM(model, dtype="float32", **UPDATED) as llm:
            for name, path in (("one", one), ("two", two)):
                await llm.load_prefix("a", path)
                output = await llm.generate([5, 9, 11], replace(GREEDY, adapter="a"))
                assert output.token_ids == tokens(fixed, name)
                with pytest.raises(UserError, match="is loaded already"):
                    await llm.load_prefix("a", path)
                await llm.unload_prefix("a")
            with pytest.raises(UserError, match="loaded: none"):
                await llm.generate([5, 9, 11], replace(GREEDY, adapter="a"))
            assert (await llm.stats()).num_used_blocks == 0

    asyncio.run(main())
