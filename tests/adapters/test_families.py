"""Adapters beside the linears of every family, however its checkpoint stores them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from predict.errors import UserError
from predict.llm import LLM
from predict.request import RequestOutput, SamplingParams
from tests.support.family_adapters import write_family_adapter
from tests.support.golden import CASES, config, golden, runs

# PaddleNLP's own checkpoints, whose adapters are of its form: tests/loading has them. And one whose
# weights are codes: there is no merging to compare with.
OTHERS = frozenset(
    (
        *("ernie_3_5_se", "ernie_3_5_se_parallel", "gpt_paddlenlp", "gpt_paddlenlp_fused"),
        "gpt_oss_mxfp4",
    )
)
# Each stores its linears in another way: fused, in groups, in rows of heads, turned, of experts.
QUICK = frozenset(
    {
        *("baichuan_7b", "bloom_7b", "cohere_35b", "falcon_40b", "gpt2_small", "gpt_neox_pythia"),
        *("internlm2_7b", "mixtral_8x7b", "opt_350m", "phi3_mini", "phi_2", "qwen3_moe_30b"),
        *("chatglm_2_6b", "qwen2_moe_sparse", "gemma3_text_1b", "mistral3_24b"),
        *("deepseek_v2_lite", "deepseek_v3", "chatglm_6b", "cohere_qk_norm", "stablelm_12b"),
    }
)
PARAMS = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True, logprobs=2)


def served(case: str, **settings: Any) -> LLM:
    length, _ = runs(case)[0]
    made = config(case, dtype="float32", max_length=length, attention="append", batch_size=4)
    return LLM(made.changed(**{"inference_model": True, **settings}))


def likelihoods(output: RequestOutput) -> list[float]:
    (answer,) = output.outputs
    assert answer.logprobs is not None
    return [next(iter(step.values())).logprob for step in answer.logprobs]


@pytest.mark.parametrize(
    ("case", "inference_model"),
    [
        pytest.param(case, compiled, marks=() if case in QUICK else pytest.mark.slow)
        for case in CASES
        if case not in OTHERS
        for compiled in ((True, False) if case in QUICK else (True,))
    ],
)
def test_a_family_answers_as_with_the_adapter_merged(
    tmp_path: Path, case: str, inference_model: bool
) -> None:
    ranks = {1: 5, 2: 12}  # by seed: one page, and two
    folders = [write_family_adapter(tmp_path / str(s), case, s, rank) for s, rank in ranks.items()]
    modules = tuple(f"{folder.name}={folder}" for folder in folders)
    llm = served(case, lora_modules=modules, inference_model=inference_model)
    prompts = golden(case)["prompts"][:2]
    names = ("1", "2", None)
    each = [replace(PARAMS, adapter=name) for name in names for _ in prompts]
    together = llm.generate(prompts * len(names), each)
    found: list[list[RequestOutput]] = [together[:2], together[2:4], together[4:]]
    assert [list(out.token_ids) for out in found[2]] == [
        answer[:6] for answer in golden(case)["greedy"][:2]
    ]
    for folder, ours in zip(folders, found[:2], strict=True):
        merged = served(case, lora_path=str(folder), inference_model=inference_model)
        for one, other in zip(ours, merged.generate(prompts, PARAMS), strict=True):
            assert one.token_ids == other.token_ids
            assert likelihoods(one) == pytest.approx(likelihoods(other), abs=2e-4)
        assert [out.token_ids for out in ours] != [out.token_ids for out in found[2]]


@pytest.mark.parametrize("case", ["deepseek_v2_lite", "deepseek_v3"])
def test_what_makes_keys_and_values_of_latents_is_merged_alone(tmp_path: Path, case: str) -> None:
    folder = write_family_adapter(tmp_path / "a", case, 1, with_heads=True)
    said = r"changes model\.layers\.0\.self_attn\.kv_b_proj, .* alone, not what makes keys and "
    with pytest.raises(UserError, match=said + "values of latents; merge it with --lora_path"):
        served(case, lora_modules=(f"a={folder}",))
    prompts = golden(case)["prompts"][:1]
    (merged,) = served(case, lora_path=str(folder)).generate(prompts, PARAMS)
    (plain,) = served(case, lora_path=str(folder), inference_model=False).generate(prompts, PARAMS)
    assert merged.token_ids == plain.token_ids
