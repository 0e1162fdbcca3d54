"""Whole models of the C++ runtime on 64-bit Arm's kernel sets, by qemu, against x86's logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import build
from export.export_runtime import export_runtime
from predict import LLM
from predict.nn.inputs import RowKind
from tests.support import aarch64
from tests.support.golden import config, golden, runs
from tests.support.runtime_steps import runtime_logits, steps_of

CPUS = ("cortex-a72", "neoverse-n1", "max")  # of qemu: the sets neon, neon_dot, neon_bf16
# Grouped heads, ALiBi, a window and a cap, biases and positions of a table, latents with experts,
# sinks, experts, norms of heads.
CASES = (
    *("llama_gqa", "bloom_7b", "gemma2_9b", "opt_350m"),
    *("deepseek_v2_lite", "gpt_oss_20b", "mixtral_8x7b", "qwen3_moe_30b"),
)
NUM_BLOCKS, NUM_TOKENS = 60, 5
SETTINGS = {
    "inference_model": True,
    "attention": "append",
    "batch_size": 3,
    "max_num_batched_tokens": 40,
    "num_cache_blocks": NUM_BLOCKS,
}
missing = aarch64.missing() or ("" if aarch64.JSON.is_dir() else "no nlohmann-json3-dev")


@pytest.mark.slow
@pytest.mark.skipif(bool(missing), reason=missing or "installed")
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_ids_are_those_of_x86(case: str, tmp_path: Path) -> None:
    native = aarch64.NATIVE / "runtime_steps.cc"
    program = aarch64.program("runtime_steps", native, *sorted((build.CSRC / "model").glob("*.cc")))
    max_length, which = runs(case)[0]
    own = config(case, max_length=max_length, **SETTINGS)
    export_runtime(own, tmp_path / "folder", target="aarch64")
    steps = steps_of(LLM(own), golden(case)["prompts"][which], NUM_TOKENS)
    for cpu in CPUS:
        command = aarch64.command(cpu, program)
        found = runtime_logits(command, tmp_path / "folder", steps, NUM_BLOCKS)
        for step, logits in zip(steps, found, strict=True):
            if step.inputs.row_kind == RowKind.NONE:
                continue
            assert np.abs(logits - step.logits).max() <= 1e-4 * np.abs(step.logits).max(), cpu
            assert (logits.argmax(-1) == step.logits.argmax(-1)).all(), cpu
