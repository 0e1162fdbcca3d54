"""Adapters beside attention over latents, and beside attention of smaller operators."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from predict.llm import LLM
from predict.request import SamplingParams
from tests.adapters.serving import ask, settings
from tests.support.family_adapters import write_family_adapter
from tests.support.golden import config, golden

LATENT = ("deepseek_v2_lite", "deepseek_v3")  # queries at once, and of a rank
CASES = (*LATENT, "chatglm_6b", "cohere_qk_norm", "stablelm_12b")
RANKS = (5, 12, 30)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True, logprobs=2)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def folders(case: str, tmp_path: Path) -> dict[str, Path]:
    return {str(r): write_family_adapter(tmp_path / str(r), case, r, r) for r in RANKS}


def serving(case: str, folders: dict[str, Path], **changes: Any) -> LLM:
    return LLM(config(case, **settings(folders, **{"max_lora_rank": 32, **changes})))


def asked(case: str) -> list[tuple[list[int], SamplingParams]]:
    """Prompts, each with every adapter and without."""
    names = (None, *map(str, RANKS))
    return [(p, replace(GREEDY, adapter=n)) for p in golden(case)["prompts"][:3] for n in names]


COMPOSITIONS: dict[str, dict[str, Any]] = {
    "room for one": {"max_loras": 1},
    "small steps": {"max_num_batched_tokens": 32, "max_loras": 2},
    "turns": {"attention": "block"},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_gets_the_bits_that_it_has_alone(
    case: str, folders: dict[str, Path], dtype: str
) -> None:
    changes: dict[str, Any] = {"dtype": dtype, "prefix_caching": False}
    llm, bare = serving(case, folders, **changes), serving(case, {}, **changes)
    together = ask(llm, asked(case))
    for (prompt, params), found in zip(asked(case), together, strict=True):
        assert ask(llm, [(prompt, params)]) == [found]
        if params.adapter is None:
            assert ask(bare, [(prompt, params)]) == [found]
    assert len({tokens for tokens, _ in together[: len(RANKS) + 1]}) == len(RANKS) + 1


def test_steps_of_any_composition_answer_alike(case: str, folders: dict[str, Path]) -> None:
    wanted = [tokens for tokens, _ in ask(serving(case, folders), asked(case))]
    for changes in COMPOSITIONS.values():
        llm = serving(case, folders, **changes)
        for _ in range(2):  # the second time of blocks that are cached
            assert [tokens for tokens, _ in ask(llm, asked(case))] == wanted


@pytest.mark.parametrize("absorbed", [True, False])
@pytest.mark.parametrize("kv", [None, "fp8"])
@pytest.mark.parametrize("case", LATENT)
def test_each_form_of_latent_attention_answers_as_with_the_adapter_merged(
    case: str, folders: dict[str, Path], absorbed: bool, kv: str | None
) -> None:
    changes = {"mla_use_matrix_absorption": absorbed, "cachekv_int8_type": kv}
    llm = serving(case, folders, **changes)
    prompts = golden(case)["prompts"][:2]
    for name, folder in folders.items():
        merged = serving(case, {}, lora_path=str(folder), **changes)
        theirs = ask(merged, [(prompt, GREEDY) for prompt in prompts])
        ours = ask(llm, [(prompt, replace(GREEDY, adapter=name)) for prompt in prompts])
        for (tokens, one), (wanted, other) in zip(ours, theirs, strict=True):
            assert tokens == wanted
            for mine, merged_ones in zip(one, other, strict=True):
                assert mine == pytest.approx(merged_ones, abs=5e-3 if kv else 2e-4)
