"""Drafters of hidden states: their logits, the ways that a prompt comes in, and exact text."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from export.export_model import export_model
from predict import LLM, SamplingParams, build
from predict.device import library
from predict.device.place import to_float32
from predict.engine import speculation
from predict.engine.embedding import Text
from predict.engine.request_state import Request
from predict.errors import UserError
from predict.guide import Guide
from predict.loading import drafters as drafters_loading
from predict.loading.build import DecoderBuilder
from predict.loading.checkpoint import Checkpoint
from predict.loading.drafters import find_drafter, open_drafter
from predict.loading.model import read_spec
from predict.loading.platform import Platform
from predict.loading.safetensors_writer import write
from tests.support import drafters, float8, tiny
from tests.support.adapter_folders import factors, peft_tensors, write_peft
from tests.support.checkpoints import changed, stored
from tests.support.draft_heads import (
    EAGLE3,
    HEADS,
    KNOWING,
    PROMPT,
    SOME,
    TARGET,
    WORDS,
    recorded,
    settings,
    with_layer,
    write_followed,
    write_knowing,
    written,
)
from tests.support.drafters import HEAD_CONFIG, HIDDEN, NUM_DRAFT_TOKENS, Target, Tensors
from tests.support.drafts import draft_always
from tests.support.golden import GOLDEN
from tests.support.hidden import step_of


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("target"), TARGET)


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("name", HEADS)
def test_logits_of_drafts_equal_numpy(
    name: str, compiled: bool, target: Path, tmp_path: Path
) -> None:
    if compiled and library.find() is None:
        pytest.skip("the compiled library is not built")
    head = HEADS[name]
    made, reference = head.tensors(), Target(TARGET)
    llm = LLM(settings(target, written(head, tmp_path / "head"), head.method,
                       inference_model=compiled))  # fmt: skip
    draft_always(llm)
    params = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
    with recorded(llm) as found:
        llm.generate([PROMPT], params)
    assert len(found) > 2
    for tokens, logits in found[:3]:
        wanted = head.logits(made, reference, tokens, len(logits), **head.options)
        for own, theirs in zip(logits, wanted, strict=True):
            known = theirs[np.isfinite(theirs)]
            np.testing.assert_allclose(own[0], known, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("case", drafters.MTP_CASES)
def test_logits_of_a_layer_behind_the_last_equal_transformers(
    case: str, form: str, tmp_path: Path
) -> None:
    last = drafters.MTP_CASES[case]
    folder = with_layer(case, tmp_path / "model", lambda there: drafters.mtp_tensors(there, last))
    llm = LLM(settings(folder, None, "mtp", inference_model=form == "absorbed"))
    draft_always(llm)
    wanted = np.load(GOLDEN / "mtp.npz")
    params = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)
    with recorded(llm) as found:
        llm.generate([drafters.MTP_PROMPT], params)
    tokens, logits = found[0]
    assert tokens[-1] == wanted[f"{case}/tokens"][0]
    for own, theirs in zip(logits, wanted[f"{case}/logits"], strict=True):
        np.testing.assert_allclose(own[0], theirs, atol=2e-4, rtol=1e-4)


def test_a_layer_in_float8_drafts_as_its_values_do(tmp_path: Path) -> None:
    """DeepSeek's own: the layer in blocks of 128 x 128, eh_proj and norms in floats."""
    made, last = stored(GOLDEN / float8.CASE), "model.layers.1."
    at = "model.layers.2."
    made = {name: value for name, value in made.items() if at not in name}
    own = drafters.mtp_tensors({name: value for name, (_, value) in made.items()}, last)
    made |= {name: ("F32", value) for name, value in own.items() if value.dtype == np.float32}
    made |= {name.replace(last, at): value for name, value in made.items() if name.startswith(last)}
    floats, found = float8.with_codes_of(made, re.compile("none")), []
    prompt, params = [5, 17, 3, 88, 20], SamplingParams(temperature=0.0, max_new_tokens=4)
    for name, tensors in {"codes": made, "floats": floats}.items():
        folder = float8.written(tmp_path / name, GOLDEN / float8.CASE, tensors)
        kind = "weight_only_int8"  # float8 itself runs on plain operators alone
        rounded = {"quant_type": kind, "draft_model_quant_type": kind}
        llm = LLM(settings(folder, None, "mtp", **rounded))
        draft_always(llm)
        with recorded(llm) as steps:
            llm.generate([prompt], params)
        found.append(steps[0][1])
    for codes, values in zip(*found, strict=True):
        np.testing.assert_array_equal(codes, values)
    llm = LLM(settings(tmp_path / "codes", None, "mtp", inference_model=False))
    draft_always(llm)
    with recorded(llm) as steps:
        llm.generate([prompt], params)
    weights = open_drafter(llm.config, *read_spec(tmp_path / "codes"), llm.parts.platform)
    assert weights is not None
    schemes = {each.prefixes[0]: weights.layout.scheme(each) for each in weights.plan.linears()}
    in_floats = [name for name, kind in schemes.items() if kind != "a8w8_fp8"]
    assert in_floats == [f"{at}self_attn.kv_b_proj", f"{at}eh_proj"]  # by head, and as stored
    # Activations are rounded too: near, and not the same.
    for codes, values in zip(steps[0][1], found[0], strict=True):
        assert 0 < np.abs(codes - values).max() < 0.5 * np.abs(values).max()
    with pytest.raises(UserError, match=r"does not run .* use --draft_model_quant_type a8w8"):
        LLM(settings(tmp_path / "codes", None, "mtp", quant_type="weight_only_int8"))


@pytest.mark.parametrize("whose", ["DeepSeek", "PaddleNLP", "PaddleNLP, with embedding"])
def test_the_layer_may_lie_in_a_folder_of_its_own(whose: str, tmp_path: Path) -> None:
    case, last = next(iter(drafters.MTP_CASES.items()))
    checkpoint = Checkpoint(GOLDEN / case)
    there = {name: to_float32(checkpoint.read(name)) for name in checkpoint.tensors}
    kept = {name: ("F32", value) for name, value in there.items() if "layers.3." not in name}
    folder = changed(case, tmp_path / "model", kept)
    at, made = "model.layers.3.", drafters.mtp_tensors(there, last)
    if whose != "DeepSeek":
        ours = {"shared_head.norm.weight": "norm.weight"}
        ours |= {f"{name}.weight": f"{name}.weight" for name in ("enorm", "hnorm", "eh_proj")}
        if whose.endswith("embedding"):
            ours["embed_tokens.weight"] = "embed_tokens.weight"
        made = {
            f"deepseek_v3_mtp.{ours.get(name, f'layers.0.{name}')}": (
                value.T if value.ndim == 2 and "embed" not in name else value
            )
            for name, value in ((key.removeprefix(at), value) for key, value in made.items())
            if "head.head" not in name and (name in ours or "embed" not in name)
        }
    drafters.write_head(tmp_path / "layer", {}, made)
    llm = LLM(settings(folder, tmp_path / "layer", "mtp"))
    draft_always(llm)
    wanted = np.load(GOLDEN / "mtp.npz")[f"{case}/logits"]
    with recorded(llm) as found:
        llm.generate([drafters.MTP_PROMPT], GREEDY)
    for own, theirs in zip(found[0][1], wanted, strict=True):
        np.testing.assert_allclose(own[0], theirs, atol=2e-4, rtol=1e-4)


def test_a_stray_file_of_an_export_is_no_layer(tmp_path: Path) -> None:
    case, last = next(iter(drafters.MTP_CASES.items()))
    folder = with_layer(case, tmp_path / "model", lambda there: drafters.mtp_tensors(there, last))
    save_file({"x": np.zeros(1, np.float32)}, folder / "shared.safetensors")
    spec, reader = read_spec(folder)
    assert find_drafter(settings(folder, None, "mtp"), spec, reader)
    program = settings(tmp_path, None, "mtp", mode="static")
    assert find_drafter(program.changed(draft_model_name_or_path=str(folder)), spec, reader)
    with pytest.raises(UserError, match=r"has no shared.safetensors, which a drafter of hidden"):
        find_drafter(program, spec, reader)


def test_logits_of_ernies_layer_equal_numpy(tmp_path: Path) -> None:
    case = "ernie4_5_moe_21b"
    values = json.loads((GOLDEN / case / "config.json").read_text())
    folder = with_layer(case, tmp_path / "model", lambda _: drafters.ernie_tensors(values))
    llm = LLM(settings(folder, None, "mtp", block_size=32))
    draft_always(llm)
    checkpoint = Checkpoint(folder)
    shared = {
        key: checkpoint.read(name)
        for key, name in (
            ("table", "model.embed_tokens.weight"),
            ("head", "lm_head.weight" if "lm_head.weight" in checkpoint.tensors
             else "model.embed_tokens.weight"),
            ("norm", "model.norm.weight"),
        )
    }  # fmt: skip
    prompt = [token % values["vocab_size"] for token in PROMPT]
    with recorded(llm) as found:
        llm.generate([prompt], SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True))
    for tokens, logits in found[:2]:
        states = llm.engine.runner.run(step_of([tokens[:-1]]), ("norm",)).hidden["norm"].numpy()
        made = drafters.ernie_tensors(values)
        wanted = drafters.ernie_logits(made, values, shared, states, tokens, len(logits))
        for own, theirs in zip(logits, wanted, strict=True):
            np.testing.assert_allclose(own[0], theirs, atol=2e-4, rtol=1e-4)


# Heads that are right by construction: a row of the embedding says what follows it.


@pytest.mark.parametrize(("method", "of"), KNOWING)
def test_a_head_that_knows_what_follows_is_always_right(
    method: str, of: str, tmp_path: Path
) -> None:
    target = write_followed(tmp_path / "model", 0.0)
    folder = write_knowing(tmp_path / "head", method, of)
    llm = LLM(settings(target, folder, method))
    draft_always(llm)
    llm.generate(SOME, SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True))
    stats = llm.stats()
    assert stats.num_draft_tokens > 60
    assert stats.num_accepted_draft_tokens == stats.num_draft_tokens
    assert stats.num_used_blocks == 0


def test_parts_of_a_failed_step_keep_their_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_followed(tmp_path / "model", 0.0)
    llm = LLM(settings(target, write_knowing(tmp_path / "head", "medusa", ""), "medusa"))
    draft_always(llm)
    runner, follow, pairs = llm.engine.runner, llm.engine.speculation.follow, 0
    launch, lent = runner.launch, dict[int, Any]()
    given, taken = list[Any](), list[Any]()

    def launched(inputs: Any, choices: Any) -> Any:
        nonlocal pairs
        is_pair = len(inputs.context_lens) == 2
        pairs += is_pair
        if is_pair and pairs in (3, 4):  # a step, and all of it again
            raise RuntimeError("made up")
        step = launch(inputs, choices)
        if (states := step.hidden.get("norm")) is not None:
            given.append(states.numpy())
            lent.setdefault(len(states), states.clone()).set_value(states)  # as a graph's
            step.hidden = {"norm": lent[len(states)]}
        return step

    def followed(spans: Any, step: Any) -> None:
        taken.append(step.hidden["norm"].numpy())
        follow(spans, step)

    monkeypatch.setattr(runner, "launch", launched)
    monkeypatch.setattr(llm.engine.speculation, "follow", followed)
    llm.generate(SOME[:2], SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True))
    assert pairs > 4
    for own, theirs in zip(given, taken, strict=True):
        np.testing.assert_array_equal(own, theirs)


GREEDY = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, max_new_tokens=40, ignore_eos=True, seed=3)
DRAFTERS = [*KNOWING, ("mtp", "layer")]
SCHEMES = (None, "weight_only_int8", "weight_only_int4", "a8w8")
CACHES = (None, "dynamic", "fp8", "int4")
# The fewest runs with each pair of a drafter, a scheme, a cache and a mode.
PAIRS = [
    (*drafter, SCHEMES[column], CACHES[(row + column) % 4], bool((row + column // 2) % 2))
    for row, drafter in enumerate(DRAFTERS)
    for column in range(4)
]


def model_and_drafter(method: str, of: str, folder: Path) -> tuple[Path, Path | None]:
    """Of drafts that are often right, and of a layer whose drafts may be wrong, each."""
    if method == "mtp":
        case, last = "glm4_moe_355b", drafters.MTP_CASES["glm4_moe_355b"]
        return with_layer(case, folder, lambda there: drafters.mtp_tensors(there, last)), None
    target = write_followed(folder / "model", 1.0)
    return target, write_knowing(folder / "head", method, of)


@pytest.mark.parametrize("num_prompts", [16, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("method", "of", "scheme", "cache", "is_program"), PAIRS)
def test_text_with_drafts_is_the_text_without(
    method: str,
    of: str,
    scheme: str | None,
    cache: str | None,
    is_program: bool,
    num_prompts: int,
    tmp_path: Path,
) -> None:
    target, head = model_and_drafter(method, of, tmp_path / "made")
    more: dict[str, Any] = {"quant_type": scheme, "cachekv_int8_type": cache}
    prompts = [
        [(7 * i + j * j) % WORDS for j in range(3 + 3 * (i % 16))] for i in range(num_prompts)
    ]
    params = [
        replace(SAMPLED if index % 2 else GREEDY, max_new_tokens=12)
        for index in range(len(prompts))
    ]
    plain = settings(target, None, method, speculate_method=None, **more)
    expected = LLM(plain).generate(prompts, params)
    config = settings(target, head, method, **more)
    if is_program:
        export_model(config, tmp_path / "program", gives_states=True)
        config = config.changed(model_name_or_path=str(tmp_path / "program"), mode="static")
    llm = LLM(config)
    draft_always(llm)
    assert tokens(llm.generate(prompts, params)) == tokens(expected)
    stats = llm.stats()
    assert (method != "mtp") <= stats.num_accepted_draft_tokens < stats.num_draft_tokens


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("method", "of"), KNOWING[1:])
def test_text_with_drafts_is_the_text_without_in_16_bits(
    method: str, of: str, dtype: str, tmp_path: Path
) -> None:
    target = write_followed(tmp_path / "model", 1.0)
    folder = write_knowing(tmp_path / "head", method, of)
    plain = settings(target, None, method, dtype=dtype, speculate_method=None)
    llm = LLM(settings(target, folder, method, dtype=dtype))
    draft_always(llm)
    params = [GREEDY, SAMPLED, GREEDY]
    assert tokens(llm.generate(SOME, params)) == tokens(LLM(plain).generate(SOME, params))
    assert llm.stats().num_accepted_draft_tokens > 0


def tokens(outputs: Sequence[Any]) -> list[Any]:
    return [output.outputs[0].token_ids for output in outputs]


def drafts_of(
    llm: LLM, prompts: list[list[int]], count: int = 24, asked: Any = None
) -> dict[Any, list[int]]:
    """Every proposal, by the seed of its request and the tokens that it is behind."""
    draft_always(llm)
    proposer: Any = llm.engine.speculation.proposer
    found: dict[Any, list[int]] = {}

    def proposed(requests: Sequence[Any], limits: Sequence[int]) -> Any:
        made = propose(requests, limits)
        for request, drafts in zip(requests, made, strict=True):
            known = request.sampling_params.seed, *request.token_ids
            found[known] = list(drafts)
        return made

    propose, proposer.propose = proposer.propose, proposed
    params = SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True)
    try:
        llm.generate(prompts, asked or params)
    finally:
        proposer.propose = propose
    return found


def check_alike(one: dict[Any, list[int]], other: dict[Any, list[int]], least: int) -> None:
    """Drafts behind the same tokens are the same, as far as both go."""
    both = one.keys() & other.keys()
    assert len(both) >= least
    for known in both:
        count = min(len(one[known]), len(other[known]))
        assert count > 0
        assert one[known][:count] == other[known][:count], len(known)


LONG = [(11 * i + i * i // 3) % 190 for i in range(70)]


@pytest.mark.parametrize("name", ["EAGLE-1", "EAGLE-3 of SafeAILab", "Medusa"])
@pytest.mark.parametrize("way", ["chunks", "prefix", "preempted"])
def test_drafts_do_not_depend_on_how_a_prompt_came_in(
    way: str, name: str, target: Path, tmp_path: Path
) -> None:
    head = HEADS[name]
    folder = written(head, tmp_path / "head")
    prompts = [LONG[:48] + LONG[60:66], LONG[:48], [*LONG[:32], 7, 8, 9], LONG[3:40]]
    alone = settings(target, folder, head.method, prefix_caching=False, batch_size=1)
    whole = drafts_of(LLM(alone), prompts)
    more: dict[str, Any] = {
        "chunks": {"max_num_batched_tokens": 16, "prefix_caching": False},
        "prefix": {},
        "preempted": {"num_cache_blocks": 9, "max_length": 120},
    }[way]
    llm = LLM(settings(target, folder, head.method, **more))
    if way == "prefix":  # the same blocks, with other tokens behind them
        drafts_of(llm, [[*LONG[:48], 100, 101], [*LONG[:32], 101, 102]], 4)
    found = drafts_of(llm, prompts)
    stats = llm.stats()
    assert stats.num_used_blocks == 0
    assert (stats.num_preemptions > 0) == (way == "preempted")
    assert (stats.num_prefix_hit_tokens > 0) == (way != "chunks")
    check_alike(whole, found, len(prompts) * 5)


@pytest.mark.parametrize("name", ["EAGLE-1", "EAGLE-3 of SafeAILab", "Medusa"])
def test_answers_to_one_prompt_have_the_drafts_of_requests_of_their_own(
    name: str, target: Path, tmp_path: Path
) -> None:
    """With n > 1 they begin with the same blocks, and part behind them."""
    head = HEADS[name]
    folder = written(head, tmp_path / "head")

    def asked(seed: int, n: int = 1) -> SamplingParams:
        return SamplingParams(n=n, temperature=1.0, seed=seed, max_new_tokens=24, ignore_eos=True)

    llm = LLM(settings(target, folder, head.method))
    found = drafts_of(llm, [LONG[:40], LONG[:32]], asked=asked(4, n=3))
    assert llm.stats().num_prefix_hit_tokens > 0
    assert llm.stats().num_used_blocks == 0
    assert len({known[:45] for known in found if len(known) > 45}) > 3
    alone = settings(target, folder, head.method, prefix_caching=False, batch_size=1)
    prompts, seeds = [LONG[:40]] * 3 + [LONG[:32]] * 3, [4, 5, 6] * 2
    check_alike(found, drafts_of(LLM(alone), prompts, asked=[*map(asked, seeds)]), 60)


@pytest.mark.parametrize("length", [1, 15])
def test_a_conversation_has_drafts_in_each_turn(length: int, target: Path, tmp_path: Path) -> None:
    """The step that ends an answer may fill a block, which the next turn finds."""
    head = HEADS["EAGLE-1"]
    llm = LLM(settings(target, written(head, tmp_path / "head"), head.method, max_length=320))
    draft_always(llm)
    known, params = LONG[:17], SamplingParams(max_new_tokens=length, ignore_eos=True)
    for _ in range(16 if length == 1 else 5):
        known = [*known, *tokens(llm.generate([known], params))[0], 3, 4]
        before = llm.stats()
        drafted, hits = before.num_draft_spans, before.num_prefix_hit_tokens
        llm.generate([known], SamplingParams(max_new_tokens=4, ignore_eos=True))
        after = llm.stats()
        assert after.num_draft_spans > drafted
        assert after.num_prefix_hit_tokens > hits


@pytest.mark.parametrize("is_static", [False, True])
def test_all_weights_are_in_place_before_the_cache_is_sized(
    is_static: bool, target: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """What is free then is what the drafter, and what it shares with a program, leave."""
    config = settings(target, written(HEADS["Medusa"], tmp_path / "head"), "medusa")
    if is_static:
        export_model(config, tmp_path / "out", gives_states=True)
        config = config.changed(model_name_or_path=str(tmp_path / "out"), mode="static")
    events: list[str] = []

    def noted(owner: Any, name: str) -> None:
        own = getattr(owner, name)

        def run(*args: Any, **more: Any) -> Any:
            events.append(name)
            return own(*args, **more)

        monkeypatch.setattr(owner, name, run)

    noted(DecoderBuilder, "build")
    noted(drafters_loading, "medusa_heads")
    noted(build, "num_cache_blocks")
    noted(library.Library, "keep_freed_memory")
    LLM(config)
    kept = ["keep_freed_memory"] * (library.find() is not None)
    assert events == ["build", "medusa_heads", "num_cache_blocks", *kept]


@pytest.mark.parametrize("is_static", [False, True])
def test_a_drafter_without_room_is_refused_before_its_weights_are_read(
    is_static: bool, target: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    config = settings(target, written(HEADS["Medusa"], tmp_path / "head"), "medusa")
    values = sum(value.size for value in drafters.medusa().values())  # biases included
    own = tiny.tensors({**tiny.CONFIG, **TARGET})
    if is_static:
        export_model(config, tmp_path / "out", gives_states=True)
        config = config.changed(model_name_or_path=str(tmp_path / "out"), mode="static")
        own = {name: value for name, value in own.items() if "layers." not in name}
    needed = 4 * (values + sum(value.size for value in own.values()))
    monkeypatch.setattr(drafters_loading, "medusa_heads", lambda *_: pytest.fail("it reads"))
    for free, said in ((needed - 1, "the weights do not fit"), (needed, "rotary table")):
        monkeypatch.setattr(Platform, "free_bytes", lambda _, free=free: free)
        with pytest.raises(UserError, match=said):
            LLM(config)


def test_few_right_first_drafts_are_said_once(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setattr(speculation, "MANY_DRAFTS", 20)
    head = HEADS["EAGLE-3 of SafeAILab"]
    llm = LLM(settings(target, written(head, tmp_path / "head"), head.method))
    draft_always(llm)
    llm.generate([PROMPT], SamplingParams(temperature=0.0, max_new_tokens=60, ignore_eos=True))
    (said,) = (line for line in caplog.messages if "first drafts" in line)
    assert "hidden states of layers.1, layers.2, layers.2: where" in said


@pytest.mark.parametrize("name", ["EAGLE-1", "EAGLE-3 of speculators", "Medusa", "MTP"])
def test_a_program_drafts_as_the_dynamic_model(name: str, target: Path, tmp_path: Path) -> None:
    if name == "MTP":
        case, last = next(iter(drafters.MTP_CASES.items()))
        target = with_layer(
            case, tmp_path / "model", lambda there: drafters.mtp_tensors(there, last)
        )
        folder, method = None, "mtp"
    else:
        folder, method = written(HEADS[name], tmp_path / "head"), HEADS[name].method
    config = settings(target, folder, method)
    export_model(config, tmp_path / "out", gives_states=True)
    static = config.changed(model_name_or_path=str(tmp_path / "out"), mode="static")
    prompts = [LONG[:40], LONG[30:35], PROMPT]
    check_alike(drafts_of(LLM(config), prompts), drafts_of(LLM(static), prompts), 20)


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        (None, {}, "add --speculate_method eagle, mtp, medusa, or leave it out"),
        ("lookahead", {}, "is for drafters of hidden states"),
        ("eagle", {"fc.weight": None}, "1 missing: fc.weight"),
    ],
)
def test_an_export_without_a_drafter_is_refused_before_weights_are_read(
    method: str, changes: Tensors, said: str, target: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("predict.loading.model.load_decoder", lambda *_: pytest.fail("it reads"))
    made = {n: v for n, v in (drafters.eagle3() | changes).items() if v is not None}
    folder = drafters.write_head(tmp_path / "head", EAGLE3, made) if changes else None
    with pytest.raises(UserError, match=said):
        export_model(settings(target, folder, method), tmp_path / "out", gives_states=True)
    assert not (tmp_path / "out").exists()


def test_a_program_without_states_is_refused(target: Path, tmp_path: Path) -> None:
    folder = written(HEADS["EAGLE-3 of SafeAILab"], tmp_path / "head")
    config = settings(target, folder, "eagle")
    export_model(config, tmp_path / "out")
    static = config.changed(model_name_or_path=str(tmp_path / "out"), mode="static")
    with pytest.raises(UserError, match="gives none; export it with this drafter"):
        LLM(static)
    other = written(HEADS["EAGLE-1"], tmp_path / "other")
    export_model(settings(target, other, "eagle"), tmp_path / "final", gives_states=True)
    with pytest.raises(UserError, match=r"layers.1, layers.2, layers.2, and .* gives norm;"):
        LLM(static.changed(model_name_or_path=str(tmp_path / "final")))


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another hidden size": ({"hidden_size": 32}, {}, "of hidden_size 32, and the model has 64"),
    "another vocabulary": ({"vocab_size": 50}, {}, "of vocab_size 50, and the model has 199"),
    "another vocabulary, of speculators": (
        {"transformer_layer_config": {**HEAD_CONFIG, "vocab_size": 50}},
        {},
        "of vocab_size 50, and the model has 199",
    ),
    "two layers": ({"num_hidden_layers": 2}, {}, "num_hidden_layers"),
    "layers that are not there": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 7]}},
        {},
        "allowed: up to 8 of 1 to 6, for the model's 6 layers",
    ),
    "a missing tensor": ({}, {"fc.weight": None}, "1 missing: fc.weight"),
    "an unknown tensor": ({}, {"gate.weight": np.zeros((2, 2), np.float32)}, "gate.weight"),
    "a doubled tensor": (
        {},
        {"layers.0.hidden_norm.weight": np.zeros(HIDDEN, np.float32)},
        "two names of one tensor",
    ),
    "tokens outside the vocabulary": (
        {},
        {"d2t": np.arange(NUM_DRAFT_TOKENS)},
        "d2t names tokens from 0 to 238",
    ),
    "tokens in floats": (
        {},
        {"d2t": np.arange(NUM_DRAFT_TOKENS, dtype=np.float32)},
        "d2t has dtype F32 .allowed: whole numbers",
    ),
    "architectures in a text": ({"architectures": "DFlash"}, {}, "allowed: a list of texts"),
    "a kind that is not known": ({"speculators_model_type": "x"}, {}, "allowed: eagle3, eagle, m"),
    "a list in place of an object": ({"eagle_config": [1]}, {}, "'eagle_config' .*an object"),
    "a layer in a list": (
        {"transformer_layer_config": [1]},
        {},
        "'transformer_layer_config' .*an object",
    ),
    "DFlash": ({"architectures": ["DFlashDraftModel"]}, {}, "DFlash .* is not supported yet"),
    "DSpark": ({"speculators_model_type": "dspark"}, {}, "DSpark .* is not supported yet"),
    "P-EAGLE": ({"speculators_model_type": "p-eagle"}, {}, "P-EAGLE .* is not supported yet"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_heads_that_do_not_fit_are_refused_by_name(name: str, target: Path, tmp_path: Path) -> None:
    changes, tensors, said = REFUSED[name]
    made = drafters.eagle3() | tensors
    made = {key: value for key, value in made.items() if value is not None}
    folder = drafters.write_head(tmp_path / "head", {**EAGLE3, **changes}, made)
    with pytest.raises(UserError, match=said):
        LLM(settings(target, folder, "eagle"))


def _square(name: str) -> Tensors:
    return {name: np.zeros((HIDDEN, HIDDEN), np.float32)}


OTHER_HEADS: dict[str, tuple[Tensors, str]] = {
    "a head far behind the others": (_square("99999999.0.linear.weight"), "names 100000000 Med"),
    "a layer far behind the others": (_square("0.99999999.linear.weight"), "of 100000000 layers"),
    "a number of many digits": (_square(f"{'9' * 5000}.0.linear.weight"), "1 unexpected: 9999"),
    "a table of no tokens": ({"token_map": np.zeros(0, np.int64)}, "token_map has 0 entries"),
}


@pytest.mark.parametrize("name", OTHER_HEADS)
def test_medusa_heads_that_are_wrong_are_refused(name: str, target: Path, tmp_path: Path) -> None:
    tensors, said = OTHER_HEADS[name]
    made = drafters.medusa() | tensors
    folder = drafters.write_head(tmp_path / "head", {}, made, "medusa_lm_head.safetensors")
    with pytest.raises(UserError, match=said):
        LLM(settings(target, folder, "medusa"))


def test_a_head_of_one_state_has_the_models_size(target: Path, tmp_path: Path) -> None:
    config = {**HEAD_CONFIG, "hidden_size": 32, "target_hidden_size": HIDDEN}
    folder = drafters.write_head(tmp_path / "head", config, drafters.eagle1(hidden=32))
    with pytest.raises(UserError, match="of hidden_size 32, and the model has 64"):
        LLM(settings(target, folder, "eagle"))


@pytest.mark.skipif(library.find() is None, reason="the compiled library is not built")
@pytest.mark.parametrize("name", ["EAGLE-1", "EAGLE-3 of SafeAILab", "Medusa"])
def test_schemes_that_do_not_run_are_refused(name: str, target: Path, tmp_path: Path) -> None:
    folder = written(HEADS[name], tmp_path / "head")
    with pytest.raises(UserError, match="a8w8_fp8 does not run on the compiled operators"):
        LLM(settings(target, folder, HEADS[name].method, draft_model_quant_type="a8w8_fp8"))


def test_rows_of_a_head_in_codes_are_not_those_of_the_embedding(
    target: Path, tmp_path: Path
) -> None:
    head = HEADS["Medusa, some of the model's rows"]
    folder = written(head, tmp_path / "head")
    there = {k: v for k, v in stored(target).items() if k != "lm_head.weight"}
    codes = {"lm_head.qweight": ("I32", np.zeros((8, 8), np.int32))}  # as GPTQ has them
    shutil.copytree(target, tmp_path / "model")
    write(tmp_path / "model" / "model.safetensors", there | codes)
    spec, reader = read_spec(target)
    with pytest.raises(UserError, match=r"lm_head.weight of the model, .* is not there or in code"):
        find_drafter(settings(tmp_path / "model", folder, head.method), spec, reader)


def test_models_without_a_layer_that_drafts_are_refused(target: Path, tmp_path: Path) -> None:
    (file := tmp_path / "model.gguf").write_bytes(b"")
    spec, reader = read_spec(GOLDEN / "deepseek_v3")
    with pytest.raises(UserError, match=r"its layer from a folder, and .*model.gguf is a file"):
        find_drafter(settings(file, None, "mtp"), spec, reader)
    with pytest.raises(UserError, match="qwen3_5_moe_text, and this model is llama"):
        LLM(settings(target, tmp_path, "mtp"))
    with pytest.raises(UserError, match=r"ernie4_5_moe, qwen3_next, .* and this model is llama"):
        LLM(settings(target, None, "mtp"))
    with pytest.raises(UserError, match=r"has no layer that drafts: model.mtp_linear_proj.0"):
        LLM(settings(GOLDEN / "ernie4_5_moe_21b", None, "mtp"))


FEATURES: dict[str, dict[str, Any]] = {
    "n": {"n": 3, "temperature": 1.0, "seed": 4},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
    "log-probabilities": {"temperature": 0.8, "seed": 5, "logprobs": 2},
    "of prompts": {"temperature": 0.0, "prompt_logprobs": 1},
    "least tokens": {"temperature": 0.7, "seed": 6, "min_length": 9},
    "other drawing": {"temperature": 1.2, "seed": 7, "min_p": 0.02, "top_k": 20},
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(("method", "of"), KNOWING[1:])
def test_what_requests_ask_for_is_the_same_with_drafts(
    feature: str, method: str, of: str, tmp_path: Path
) -> None:
    target = write_followed(tmp_path / "model", 1.0)
    folder = write_knowing(tmp_path / "head", method, of)
    asked: dict[str, Any] = {"max_new_tokens": 16, "ignore_eos": True, **FEATURES[feature]}
    params = SamplingParams(**asked)
    plain: dict[str, Any] = {"draft_model_name_or_path": None, "speculate_method": None}
    expected = LLM(settings(target, None, method, **plain)).generate(SOME, params)
    llm = LLM(settings(target, folder, method))
    draft_always(llm)
    found = llm.generate(SOME, params)
    for one, other in zip(found, expected, strict=True):
        assert [each.token_ids for each in one.outputs] == [
            each.token_ids for each in other.outputs
        ]
        for each, wanted in zip(one.outputs, other.outputs, strict=True):
            assert (each.logprobs is None) == (wanted.logprobs is None)
    stats = llm.stats()
    assert stats.num_draft_tokens > 0
    assert stats.num_used_blocks == 0


@pytest.mark.parametrize(("method", "of"), KNOWING[1:])
def test_requests_with_adapters_have_drafts_and_their_own_text(
    method: str, of: str, tmp_path: Path
) -> None:
    target = write_followed(tmp_path / "model", 1.0)
    folder = write_knowing(tmp_path / "head", method, of)
    adapter = write_peft(tmp_path / "adapter", peft_tensors(factors()))
    more: dict[str, Any] = {"lora_modules": (f"a={adapter}",), "max_lora_rank": 8}
    params = [replace(GREEDY, adapter=name) for name in ("a", None, "a")]
    plain: dict[str, Any] = {"draft_model_name_or_path": None, "speculate_method": None}
    expected = tokens(LLM(settings(target, None, method, **more, **plain)).generate(SOME, params))
    llm = LLM(settings(target, folder, method, **more))
    draft_always(llm)
    found = llm.generate(SOME, params)
    assert tokens(found) == expected
    assert all(each.metrics.num_draft_tokens > 0 for each in found)
    assert expected != tokens(llm.generate(SOME, GREEDY))


@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_guided_text_is_the_same_with_drafts(method: str, tmp_path: Path) -> None:
    demo = Path(__file__).parents[2] / "examples" / "demo_model"
    sizes = json.loads((demo / "config.json").read_text())
    hidden = sizes["hidden_size"]
    config = {**HEAD_CONFIG, "hidden_size": hidden, "vocab_size": sizes["vocab_size"]}
    made = drafters.eagle1(hidden=hidden, own_embedding=False)
    if method == "medusa":
        config, made = {}, {f"{k}.0.linear.weight": np.zeros((hidden, hidden), "f") for k in "01"}
    folder = drafters.write_head(tmp_path / "head", config, made)
    params = SamplingParams(temperature=0.8, seed=3, max_new_tokens=12, guide=Guide(regex="[a-c]+"))
    plain = settings(demo, None, method, speculate_method=None)
    llm = LLM(settings(demo, folder, method))
    draft_always(llm)
    prompts = ["def main(", "import os"]
    assert tokens(llm.generate(prompts, params)) == tokens(LLM(plain).generate(prompts, params))
    assert llm.stats().num_draft_tokens > 0


def test_drafts_pause_where_none_is_right(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "MOST_VAIN", 10)
    monkeypatch.setattr(speculation, "PAUSE", 30)
    head = HEADS["EAGLE-3 of SafeAILab"]
    llm = LLM(settings(target, written(head, tmp_path / "head"), head.method))
    draft_always(llm)
    params = SamplingParams(temperature=0.0, max_new_tokens=36, ignore_eos=True)
    llm.generate([PROMPT], params)
    spans = llm.stats().num_draft_spans
    assert 8 <= spans <= 11  # and none behind the pause: the request's rows are not all there
    llm.generate([PROMPT], params)  # whose blocks lack rows, where some were found
    llm.generate([PROMPT[5:]], params)
    assert llm.stats().num_draft_spans > spans
    assert llm.stats().num_used_blocks == 0


def test_texts_ride_beside_drafts_and_in_a_pause_of_them(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "MOST_VAIN", 10)
    monkeypatch.setattr(speculation, "PAUSE", 30)
    head = HEADS["EAGLE-3 of SafeAILab"]
    llm = LLM(settings(target, written(head, tmp_path / "head"), head.method))
    wanted, pooler = llm.embed([PROMPT], "mean"), llm.retrieval.pooler("mean")
    draft_always(llm)
    params = SamplingParams(temperature=0.0, max_new_tokens=36, ignore_eos=True)
    samples, taps = llm.samples(PROMPT, params), set[bool]()
    llm.answers.add([samples], lambda news: None)
    while llm.answers.is_busy:
        job = llm.add_texts([Text(PROMPT)], pooler, None)
        llm.step()
        taps.add(bool(llm.engine.speculation.taps))
        assert llm.embedder.step() == [job]
        np.testing.assert_array_equal(job.vectors, wanted)
    assert taps == {False, True}
    assert samples.output().outputs[0].finish_reason == "length"
    assert (
        samples.output().outputs[0].token_ids
        == tokens(
            LLM(settings(target, None, "none", speculate_method=None)).generate([PROMPT], params)
        )[0]
    )
    assert llm.stats().num_used_blocks == 0


def test_blocks_of_a_pause_are_computed_again_with_the_drafters_rows(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "MOST_VAIN", 10)
    monkeypatch.setattr(speculation, "PAUSE", 60)
    head = HEADS["EAGLE-3 of SafeAILab"]
    llm = LLM(settings(target, written(head, tmp_path / "head"), head.method))
    hits: list[int] = []

    def drafts_behind(*ends: int) -> dict[Any, list[int]]:
        before = llm.stats().num_prefix_hit_tokens
        found = drafts_of(llm, [[*LONG[:48], *ends]], 4)
        hits.append(llm.stats().num_prefix_hit_tokens - before)
        return found

    drafts_of(llm, [PROMPT], 16)
    assert llm.engine.speculation.taps == ()
    assert drafts_behind(1) == drafts_behind(LONG[48], 2) == {}
    drafts_of(llm, [PROMPT], 60)
    assert llm.engine.speculation.taps
    found = drafts_behind(LONG[48], 3) | drafts_behind(LONG[48], 4)
    # In the pause all blocks match; behind it those that have rows.
    assert hits == [0, 32, 0, 48]
    alone = settings(target, tmp_path / "head", head.method, prefix_caching=False)
    prompts = [[*LONG[:49], 3], [*LONG[:49], 4]]
    check_alike(found, drafts_of(LLM(alone), prompts, 4), len(found))
    assert llm.stats().num_used_blocks == 0


def test_devices_and_ways_to_verify_without_states_are_refused(target: Path) -> None:
    other: Any = SimpleNamespace(gpu=None, device=SimpleNamespace(is_cpu=False))
    spec, reader = read_spec(target)
    with pytest.raises(UserError, match="medusa drafts on CPUs and NVIDIA GPUs alone"):
        open_drafter(settings(target, target, "medusa"), spec, reader, other)
    with pytest.raises(UserError, match=r"TopP . window verification, and speculate_method mtp"):
        settings(target, None, "mtp", speculate_verify_window=2)
    with pytest.raises(UserError, match="eagle needs --draft_model_name_or_path: the folder of a"):
        settings(target, None, "eagle")


@pytest.mark.parametrize(
    ("method", "num_events"),
    [("eagle", 200), ("medusa", 200), pytest.param("eagle", 3000, marks=pytest.mark.slow)],
)
def test_random_requests_lose_no_block(
    method: str, num_events: int, tmp_path: Path, monkeypatch: Any
) -> None:
    """An event: a request comes, or one is aborted, or neither; then a step, in a pause or not."""
    monkeypatch.setattr(speculation, "MOST_VAIN", 5)
    monkeypatch.setattr(speculation, "PAUSE", 10)
    target = write_followed(tmp_path / "model", 1.0)
    folder = write_knowing(tmp_path / "head", method, "state")
    more = {"num_cache_blocks": 7, "max_length": 112, "max_num_batched_tokens": 24}
    llm = LLM(settings(target, folder, method, **more))
    draft_always(llm)
    engine, random = llm.engine, np.random.default_rng(1)
    manager, running, num_paused = engine.scheduler.block_manager, list[int](), 0
    for number in range(num_events):
        if random.random() < 0.2 and len(running) < 6:
            prompt = [token % WORDS for token in LONG[: random.integers(1, 50)]]
            prompt.append(int(random.integers(WORDS)))
            params = SamplingParams(
                temperature=float(number % 100 >= 60),  # where few drafts are right
                max_new_tokens=int(random.integers(20, 90)),
                ignore_eos=True,
            )
            engine.add(Request(number, prompt, params))
            running.append(number)
        if running and random.random() < 0.03:
            engine.abort(running.pop(int(random.integers(len(running)))))
        ended = {request.request_id for request in engine.step()[1]}
        running = [each for each in running if each not in ended]
        engine.scheduler.check()
        assert manager.num_free_blocks + manager.num_used_blocks == 7
        num_paused += not engine.speculation.taps
    stats = engine.stats
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    assert stats.num_prefix_hit_tokens > 0
    assert stats.num_preemptions > num_events // 100
    assert num_events // 100 < num_paused < num_events // 2
    for each in running:
        engine.abort(each)
    assert llm.stats().num_used_blocks == 0
