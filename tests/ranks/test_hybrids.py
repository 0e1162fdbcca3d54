"""Models with a state per request over CPU ranks: goldens of transformers, and codes of one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.export_model import export_model
from predict import LLM
from predict.config.quantization import QuantSettings
from predict.device import library
from predict.errors import UserError
from predict.loading.checkpoint import Checkpoint
from predict.loading.layouts.online import Online
from predict.loading.sources import CheckpointSource
from predict.nn.cuts import local_plan, local_spec
from predict.nn.kinds.delta_net import DeltaNetBlock
from predict.nn.plans import LinearPlan
from predict.nn.shares import Ranks
from tests.support.checkpoints import write_random
from tests.support.drafts import draft_always
from tests.support.gguf_models import convert
from tests.support.hybrid_drafts import with_mtp
from tests.support.hybrids import (
    FOLDER,
    GREEDY,
    PROMPTS,
    config,
    greedy,
    last_logits,
)
from tests.support.layouts import open_layout
from tests.support.rank_cuts import SCHEMES, check_cut
from tests.support.rank_models import RankProcesses

needs_library = pytest.mark.skipif(library.find() is None, reason="needs the compiled library")
PLAIN, WHOLE = {"inference_model": False}, {"cut": {"whole_experts": True}}
CASES: list[tuple[int, str, dict[str, Any]]] = [
    *((2, case, {}) for case in ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe_text")),
    *((2, case, {}) for case in ("lfm2_biases", "lfm2_moe")),
    (2, "qwen3_5_moe_text", WHOLE),
    *((2, case, PLAIN) for case in ("qwen3_5", "lfm2_biases")),
    (4, "lfm2", {}),
]


def random_folder(folder: Path, case: str, **changes: Any) -> Path:
    """A golden's config.json with other sizes, and random weights."""
    values = json.loads((FOLDER / case / "config.json").read_text()) | changes
    generator = np.random.default_rng(0)

    def made(name: str, shape: tuple[int, ...]) -> Any:
        size = 0.3 if len(shape) == 1 else shape[-1] ** -0.5
        return (size * generator.standard_normal(shape)).astype(np.float32)

    return write_random(folder, values, made)


@needs_library
@pytest.mark.parametrize(("size", "case", "settings"), CASES)
def test_logits_and_text_equal_transformers(
    ranks: Callable[[int], RankProcesses], size: int, case: str, settings: dict[str, Any]
) -> None:
    ranks(size).run("tests.support.rank_jobs:check_hybrid", case=case, **settings)


@needs_library
def test_four_ranks_and_tiled_heads(ranks: Callable[[int], RankProcesses], tmp_path: Path) -> None:
    """A key head for each rank; a GGUF file's value heads, which lie tiled."""
    sizes = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "layer_types": None}
    folder = random_folder(tmp_path / "model", "qwen3_5_moe_text", **sizes)
    for size, model in ((4, folder), (2, convert(folder, tmp_path / "x.gguf"))):
        np.save(tmp_path / "wanted.npy", last_logits(LLM(config(model)), PROMPTS))
        job, wanted = "tests.support.rank_jobs:check_hybrid", str(tmp_path / "wanted.npy")
        ranks(size).run(job, case=str(model), wanted=wanted)


DELTA: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **DELTA,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
    "qwen3_5_text": {**DELTA, "intermediate_size": 256, "linear_num_value_heads": 4},
    "lfm2": {
        "hidden_size": 256,
        "intermediate_size": 384,
        "block_auto_adjust_ff_dim": False,
        "num_attention_heads": 8,
        "num_hidden_layers": 2,
        "layer_types": ["conv", "full_attention"],
    },
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("case", SIZES)
def test_codes_are_those_of_one_rank(case: str, scheme: str, tmp_path: Path) -> None:
    folder = random_folder(tmp_path / "model", case, **SIZES[case])
    _, plan = open_layout(folder)
    layout = Online(CheckpointSource(Checkpoint(folder)), QuantSettings(**SCHEMES[scheme]), plan)
    check_cut(layout, plan, 2)


def test_channels_in_act_order_keep_their_taps(tmp_path: Path) -> None:
    folder = random_folder(tmp_path / "model", "lfm2", conv_bias=True, **SIZES["lfm2"])
    _, plan = open_layout(folder)
    order = np.random.default_rng(1).permutation(256)

    def of(linear: LinearPlan) -> Any:
        return order if linear.prefixes[0].endswith("conv.out_proj") else None

    for rank in range(2):
        made = local_plan(plan, local_spec(plan.spec, rank, 2), of)
        slots: Any = made.layers[0][0].slots
        own = [place for begin, end in slots["taps"].rows for place in range(begin, end)]
        assert own == order[128 * rank : 128 * (rank + 1)].tolist()
        rows = [place for begin, end in slots["bcx"].rows for place in range(begin, end)]
        assert rows == [256 * part + place for part in range(3) for place in own]
        assert slots["taps"].rows == slots["taps_bias"].rows


def test_norms_over_groups_are_cut_with_their_heads() -> None:
    block = DeltaNetBlock(4, 8, 16, 16, norm_groups=4)
    own, _ = block.shared(Ranks(1, 2))
    assert (own.norm_groups, own.value_size) == (2, 64)
    with pytest.raises(UserError, match="4 groups of a norm of states do not divide among 3"):
        DeltaNetBlock(3, 12, 16, 16, norm_groups=4).shared(Ranks(0, 3))
    with pytest.raises(UserError, match="3 key heads of states do not divide among 2 ranks"):
        DeltaNetBlock(3, 3, 16, 16).shared(Ranks(0, 2))


@needs_library
@pytest.mark.parametrize("case", ["qwen3_next", pytest.param("lfm2", marks=pytest.mark.slow)])
def test_prefixes_preemptions_and_drafts_over_ranks(case: str, tmp_path: Path) -> None:
    """Chunks, few blocks, hits; a layer that drafts, or a program."""
    few = {"num_cache_blocks": 24, "block_size": 16, "max_num_batched_tokens": 37, "batch_size": 4}
    more: dict[str, Any] = {"tensor_parallel_degree": 2, "rank_timeout": 60.0}
    prompts = [*PROMPTS, [*PROMPTS[4][:130], 7, 8], [*PROMPTS[4][:100], 9]]
    params = replace(GREEDY, max_new_tokens=40)
    wanted = greedy(LLM(config(case)), prompts, params)
    model: Any = case
    if case == "qwen3_next":
        model = with_mtp(case, tmp_path / "model")
        more |= {"speculate_method": "mtp", "speculate_max_draft_token_num": 3}
    else:
        made = config(case, inference_model=True, **few, **more)
        export_model(made, model := tmp_path / "out")
        more["mode"] = "static"
    llm = LLM(config(model, **few, **more))
    draft_always(llm)
    for _ in range(2):
        assert greedy(llm, prompts, params) == wanted
    stats = llm.stats()
    assert stats.num_prefix_hit_tokens > 0
    assert stats.num_preemptions > 0
    assert (stats.num_draft_tokens > 0) == (case == "qwen3_next")
    assert llm.engine.scheduler.config.num_state_slots == 2 * 4 + 64
