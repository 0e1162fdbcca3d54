"""Adapters of requests in exported programs: the same answers as in dynamic mode."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from export.export_model import export_model, main
from predict import LLM, EngineConfig, SamplingParams
from predict.errors import UserError
from predict.loading.manifest import load_manifest
from predict.loading.model import Weights
from predict.loading.program_check import read_program
from tests.adapters.serving import NAMES, PROMPTS, ask, settings, steps
from tests.support import tiny
from tests.support.adapters import SEVEN, write_adapter
from tests.support.family_adapters import write_family_adapter
from tests.support.golden import GOLDEN, golden, runs
from tests.support.schemes import on_this_cpu

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True, logprobs=2)
ASKED = [(prompt, replace(GREEDY, adapter=name)) for prompt in PROMPTS for name in NAMES]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="module")
def program(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export that takes adapters; not to be changed."""
    folder = tmp_path_factory.mktemp("program") / "static"
    export_model(config(base), folder, enable_lora=True)
    return folder


@pytest.fixture(scope="module")
def bare(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export that takes none."""
    folder = tmp_path_factory.mktemp("bare") / "static"
    export_model(config(base), folder)
    return folder


def config(model: Path, folders: dict[str, Path] | None = None, **changes: Any) -> EngineConfig:
    made = {"block_size": 16, "max_length": 128, **changes}
    return EngineConfig(model_name_or_path=str(model), **settings(folders or {}, **made))


def exported(llm: LLM, folder: Path) -> LLM:
    """The same settings over a program that was exported for them."""
    export_model(llm.config.changed(lora_modules=()), folder, enable_lora=True)
    return LLM(llm.config.changed(model_name_or_path=str(folder), mode="static"))


FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "plain operators": {"inference_model": False},
    "int8": {"quant_type": "weight_only_int8"},
    "int4, bfloat16": {"quant_type": "weight_only_int4", "dtype": "bfloat16"},
    "int4, plain operators": {"quant_type": "weight_only_int4", "inference_model": False},
    "a8w8": {"quant_type": "a8w8"},
    "cache of int8": {"cachekv_int8_type": "dynamic"},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_program_answers_as_the_dynamic_model(
    base: Path, seven: dict[str, Path], tmp_path: Path, form: str
) -> None:
    changes = FORMS[form]
    if changes.get("quant_type") == "a8w8" and not on_this_cpu("a8w8"):
        pytest.skip("no a8w8 on this CPU")
    dynamic = LLM(config(base, seven, max_loras=8, **changes))
    static = exported(dynamic, tmp_path / "static")
    wanted = ask(dynamic, ASKED)
    assert len({tokens for tokens, _ in wanted[: len(NAMES)]}) == len(NAMES), "they do not differ"
    assert ask(static, ASKED) == wanted


# Matrices turned, rows in groups, parallel blocks, fused linears, experts, a text model within one,
# latents, attention of smaller operators.
FAMILIES = (
    *("gpt2_small", "bloom_7b", "falcon_40b", "phi3_mini", "qwen3_moe_30b", "mistral3_24b"),
    *("gemma3_text_1b", "internlm2_7b", "opt_350m", "deepseek_v2_lite", "deepseek_v3"),
    *("chatglm_6b", "cohere_qk_norm", "stablelm_12b"),
)
# Whose MLPs are one operator, and in a program a sequence of smaller ones.
IN_OTHER_ROUNDINGS = ("chatglm_6b",)
TRACED = ("gpt2_small", "qwen3_moe_30b", "deepseek_v3", "chatglm_6b")  # of plain operators, too


@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.parametrize("inference_model", [True, False])
def test_a_family_answers_as_in_dynamic_mode(
    tmp_path: Path, case: str, inference_model: bool
) -> None:
    if not inference_model and case not in TRACED:
        pytest.skip("plain operators take the same way for each")
    folders = {
        str(rank): write_family_adapter(tmp_path / str(rank), case, rank, rank) for rank in (5, 19)
    }
    length, _ = runs(case)[0]
    changes = {"max_length": length, "block_size": 32, "batch_size": 4}
    dynamic = LLM(config(GOLDEN / case, folders, inference_model=inference_model, **changes))
    prompts = golden(case)["prompts"][:2]
    asked = [
        (prompt, replace(GREEDY, adapter=name)) for prompt in prompts for name in (None, *folders)
    ]
    wanted = ask(dynamic, asked)
    assert len({tokens for tokens, _ in wanted}) > len(prompts)
    found = ask(exported(dynamic, tmp_path / "static"), asked)
    if case not in IN_OTHER_ROUNDINGS:
        assert found == wanted
    for (tokens, mine), (others, theirs) in zip(found, wanted, strict=True):
        assert tokens == others
        for one, other in zip(mine, theirs, strict=True):
            assert one == pytest.approx(other, abs=1e-4)


@pytest.fixture(scope="module")
def expected(base: Path, seven: dict[str, Path]) -> list[Any]:
    return ask(LLM(config(base, seven)), ASKED)


# One program serves them all.
COMPOSITIONS: dict[str, dict[str, Any]] = {
    "room for one": {"max_loras": 1, "max_cpu_loras": 1},
    "room for two": {"max_loras": 2, "batch_size": 5},
    "a large rank": {"max_loras": 1, "max_lora_rank": 256},
    "small chunks": {"max_num_batched_tokens": 16, "max_loras": 3},
    "few blocks": {"num_cache_blocks": 8, "max_loras": 2},
    "turns": {"attention": "block", "max_loras": 2},
}


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_a_program_takes_any_number_of_adapters_and_ranks(
    program: Path, seven: dict[str, Path], expected: list[Any], composition: str
) -> None:
    llm = LLM(config(program, seven, mode="static", **COMPOSITIONS[composition]))
    assert [tokens for tokens, _ in ask(llm, ASKED)] == [tokens for tokens, _ in expected]
    if composition == "room for one":
        assert llm.stats().num_adapters_written > len(SEVEN), "none was moved out and in again"


def test_adapters_come_and_go(program: Path, seven: dict[str, Path], expected: list[Any]) -> None:
    llm = LLM(config(program, mode="static", allow_adapter_updates=True, max_loras=1))
    wanted = dict(zip(NAMES, expected, strict=False))
    for name in ("wide", "odd"):
        llm.load_adapter("a", seven[name])
        assert ask(llm, [(PROMPTS[0], replace(GREEDY, adapter="a"))]) == [wanted[name]]
        llm.unload_adapter("a")
    assert ask(llm, [(PROMPTS[0], GREEDY)]) == [wanted[None]]


def test_a_program_that_takes_adapters_runs_without(base: Path, program: Path) -> None:
    """With the bits of one that takes none; what it reads of pages is one of them."""
    asked = [(prompt, GREEDY) for prompt in PROMPTS]
    llm = LLM(config(program, mode="static"))
    wanted = list(map(steps, LLM(config(base)).generate(PROMPTS, GREEDY)))
    assert ask(llm, asked) == wanted
    assert (llm.stats().num_adapters, llm.stats().num_adapter_pages) == (0, 1)
    with pytest.raises(UserError, match="this model serves none; start it with lora_modules"):
        llm.generate([PROMPTS[0]], replace(GREEDY, adapter="four"))
    with pytest.raises(UserError, match="adapters are fixed"):
        llm.load_adapter("four", base)


@pytest.mark.parametrize("inference_model", [True, False])
def test_pages_are_inputs_where_the_export_says_so_alone(
    base: Path, tmp_path: Path, inference_model: bool
) -> None:
    inputs = {}
    for enable_lora in (False, True):
        folder = tmp_path / str(enable_lora)
        made = config(base, inference_model=inference_model)
        export_model(made, folder, enable_lora=enable_lora)
        read = read_program(folder / "model.json", compiled=inference_model)
        inputs[enable_lora] = {name: str(kind) for name, kind in read.inputs.items()}
        said = json.loads((folder / "manifest.json").read_text())
        assert ("adapters" in said) == enable_lora
    assert "adapter_ids" not in inputs[False]
    added = {name: kind for name, kind in inputs[True].items() if name not in inputs[False]}
    assert len(added) == 2 + 2 * 4 * tiny.CONFIG["num_hidden_layers"]
    assert added["adapter_pages"] == "int32 [-1, 4, -1]"
    shape = "[-1, 3, 4, 8, 16]" if inference_model else "[-1, 3, 8, 64]"
    assert added["layers_0_0_qkv_low_rank_a"] == f"float32 {shape}"
    assert load_manifest(tmp_path / "True").adapters == {
        "slots": ["qkv", "out", "gate_up", "down"],
        "page_ranks": 8,
    }


@pytest.fixture
def nothing_is_read(bare: Path, program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test that reads weights, once the exports are made."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(Weights, "read", fail)
    monkeypatch.setattr("predict.build.load_program", fail)


@pytest.mark.usefixtures("nothing_is_read")
def test_a_program_without_adapters_refuses_them_by_name(
    bare: Path, seven: dict[str, Path]
) -> None:
    with pytest.raises(
        UserError,
        match=r"takes no adapters .* --lora_modules asks .*--enable_lora .*--lora_path.*"
        r"export it again",
    ):
        LLM(config(bare, seven, mode="static"))


def test_a_program_without_adapters_starts_where_prefixes_may_be_loaded(
    bare: Path, seven: dict[str, Path]
) -> None:
    llm = LLM(config(bare, mode="static", allow_adapter_updates=True))
    with pytest.raises(UserError, match=r"exported program takes no adapters .*--enable_lora"):
        llm.load_adapter("four", seven["four"])


@pytest.mark.parametrize("mode", ["dynamic", "static"])
@pytest.mark.usefixtures("nothing_is_read")
def test_an_adapter_that_does_not_fit_is_refused_before_weights_are_read(
    base: Path, program: Path, seven: dict[str, Path], tmp_path: Path, mode: str
) -> None:
    model = base if mode == "dynamic" else program
    other = {**tiny.CONFIG, "intermediate_size": 128}
    deeper = {**tiny.CONFIG, "num_hidden_layers": 3}
    unknown = shutil.copytree(seven["four"], tmp_path / "unknown")
    path = unknown / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"gate_proj", b"gaze_proj"))
    for folder, said in {
        write_adapter(tmp_path / "other", other, 4, seed=1): r"has the shape \[4, 128\].*\[4, 96\]",
        write_adapter(tmp_path / "deeper", deeper, 4, seed=1): r"model\.layers\.2\..* has not",
        seven["wide"]: r"has rank 64 \(allowed: up to 16\); raise --max_lora_rank",
        unknown: "gaze_proj",
    }.items():
        with pytest.raises(UserError, match=said):
            LLM(config(model, {"a": folder}, mode=mode, max_lora_rank=16))
    with pytest.raises(UserError, match="pages of adapters do not fit: --max_loras 4096 of"):
        LLM(config(model, seven, mode=mode, max_loras=4096, max_lora_rank=4096))


def test_a_manifest_that_says_otherwise_is_refused(program: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(program, tmp_path / "program")
    path = folder / "manifest.json"
    said = json.loads(path.read_text())
    for adapters, words in (
        ({**said["adapters"], "page_ranks": 16}, r"adapters is an object \(allowed: null, or \{"),
        ({**said["adapters"], "page_ranks": 8.0}, "adapters is an object"),
        ([], "adapters is a list"),
        (None, r"it takes 30 inputs, and .* without adapters, make 12"),
    ):
        path.write_text(json.dumps({**said, "adapters": adapters}))
        with pytest.raises(UserError, match=words):
            LLM(config(folder, mode="static"))


def test_an_export_says_whether_it_takes_adapters(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exported with --enable_lora; add it"):
        export_model(config(GOLDEN / "qwen2", allow_adapter_updates=True), tmp_path / "static")
    assert not (tmp_path / "static").exists()


def test_the_commands_take_the_flags(
    base: Path, seven: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "static"
    words = ["--model_name_or_path", str(base), "--dtype", "float32", "--device", "cpu"]
    words += ["--inference_model", "--output_path", str(out), "--max_length", "64"]
    asked = ["--lora_modules", f"four={seven['four']}"]
    assert main([*words, *asked]) == 2
    assert "exported with --enable_lora; add it" in capsys.readouterr().err
    assert main([*words, *asked, "--enable_lora"]) == 0
    assert "--lora_modules has no effect here: give it to the run" in capsys.readouterr().err
    assert load_manifest(out).adapters is not None


def test_an_adapter_merged_is_the_base_of_others(
    base: Path, seven: dict[str, Path], tmp_path: Path
) -> None:
    """--lora_path at the export, --lora_modules at the run."""
    asked = [
        (prompt, replace(GREEDY, adapter=name))
        for prompt, name in itertools.product(PROMPTS[:2], (None, "odd"))
    ]
    dynamic = LLM(config(base, {"odd": seven["odd"]}, lora_path=str(seven["four"])))
    export_model(config(base, lora_path=str(seven["four"])), tmp_path / "static", enable_lora=True)
    static = LLM(config(tmp_path / "static", {"odd": seven["odd"]}, mode="static"))
    assert ask(static, asked) == ask(dynamic, asked)
