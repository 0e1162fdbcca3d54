"""Which kernels attend, serve experts and sum over ranks: calls and GPUs in, names out, on a CPU.

The choices are host code without CUDA: select.cu in csrc/cuda/attention, its latent, experts and
ranks.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

import build

FLOAT32, FLOAT16 = "dtype=0", "dtype=2"
INT8, CODES, OTHER = "format=2", "weights=1", "weights=2"
LONG = "context=100000"

# Lines of a call, and its kernel and launches.
ATTENTION = {
    # A decode step: one launch, which rotates and writes the cache where it may.
    "seqs=8 tokens=8 rope rotary_dim=128": "sm90 rope decode<=64",
    "seqs=8 tokens=8 rope rotary_dim=24": "sm90 decode<=64",
    "seqs=8 tokens=8 rope rotary_dim=256": "sm90 decode<=64",
    "seqs=8 tokens=8 rope rotary_dim=128 batch_invariant": "sm90 prefill",
    "seqs=8 tokens=8 rope rotary_dim=128 arch=80": "sm80 decode<=64",
    "seqs=8 tokens=8 arch=120": "sm80 decode<=64",
    "seqs=8 tokens=8 arch=75": "generic",
    f"seqs=8 tokens=8 {FLOAT32}": "generic",
    f"seqs=8 tokens=8 {FLOAT16}": "sm90 decode<=64",
    "seqs=8 tokens=8 head_dim=40": "generic",
    "seqs=5000 tokens=5000": "generic",
    # Drafts: rows of a KV head up to 64.
    "seqs=2 tokens=32 query=16": "sm90 decode<=64",
    f"seqs=2 tokens=34 query=17 {LONG}": "sm90 decode<=0 prefill shared",
    "seqs=2 tokens=34 query=17 arch=80": "sm80 decode<=64 prefill",
    "seqs=2 tokens=20 query=10 trees tree_words=1": "sm90 decode<=128",
    "seqs=2 tokens=80 query=40 trees tree_words=1": "sm90 decode<=128 prefill",
    "seqs=2 tokens=20 query=10 trees tree_words=1 arch=80": "generic",
    # Prompts: alone where contexts are short, or there is one request.
    "seqs=4 tokens=400 query=100 context=4096 rope rotary_dim=128": "sm90 prefill",
    "seqs=4 tokens=400 query=100 context=4097": "sm90 decode<=0 prefill shared",
    f"seqs=4 tokens=400 query=100 context=4096 {INT8}": "sm90 decode<=0 prefill",
    f"seqs=4 tokens=400 query=100 context=4096 {INT8} arch=89": "generic",
    f"seqs=1 tokens=100 query=100 {LONG}": "sm90 prefill shared",
    f"seqs=1 tokens=100 query=100 {LONG} window=4096": "sm90 prefill",
    f"seqs=1 tokens=100 query=100 {LONG} batch_invariant": "sm90 prefill",
    f"seqs=4 tokens=400 query=100 {LONG} batch_invariant arch=80": "generic",
    # A prefix is seen by the prefill kernel alone.
    f"seqs=2 tokens=4 query=2 prefixes {LONG}": "sm90 decode<=0 prefill shared",
    "seqs=2 tokens=2 prefixes": "sm90 decode<=0",
    # What REGATTA_KERNEL forces.
    "seqs=8 tokens=8 force=sm80": "sm80 decode<=64",
    "seqs=8 tokens=8 force=generic": "generic",
}

# DeepSeek-V3's block in a step that decodes, and changes of it: what attends, and to long spans.
LATENTS = {
    "": "sm90",
    "batch_invariant": "sm90",
    "force=sm80": "mma64",
    "force=plain": "plain",
    f"{FLOAT32}": "plain",
    f"force=sm80 {FLOAT32}": "plain",
    "codes": "mma64",
    "codes heads=16": "mma16",
    "codes heads=16 query=2": "mma32",
    "codes heads=16 batch_invariant": "mma64",
    "block_size=16": "sm90",
    "block_size=48": "mma64",
    "block_size=6": "plain",
    "rank=256": "mma64",
    "rank=1024": "plain",
    "rank=520": "plain",
    "arch=120 shared_bytes=101376": "plain",
    "arch=80 shared_bytes=166912": "mma64",
    "arch=80 shared_bytes=166912 heads=16": "mma64",
    "arch=80 shared_bytes=166912 heads=16 rank=128": "mma16",
    "arch=75": "plain",
    # Prompts: keys and values of so many heads at a time.
    "query=100 long_tokens=1000": "sm90 expanded by 128",
    "query=100 long_tokens=100000": "sm90 expanded by 2",
    "query=100 long_tokens=300000": "sm90",
    "query=100 long_tokens=1000 codes": "mma64 expanded by 128",
    "query=100 short=100 long_tokens=1000": "sm90",
    "query=100 long_tokens=1000 absorbed": "sm90",
    "query=100 long_tokens=1000 trees": "sm90",
    "query=100 long_tokens=1000 nope=64": "sm90",
    "query=100 long_tokens=1000 batch_invariant": "sm90",
    "query=100 long_tokens=1000 arch=80 shared_bytes=166912": "mma64",
}

# Qwen3-30B-A3B's block, and changes of it: what routes, multiplies and sorts.
EXPERTS = {
    "tokens=1": "route one_token together",
    "tokens=2": "route sorted together",
    "tokens=3": "step sorted together",
    "tokens=64": "step sorted together",
    "tokens=65": "step sorted apart",
    "tokens=256": "step sorted apart",
    "tokens=257": "norm+product sorted apart",
    "tokens=3 batch_invariant": "route sorted together",
    "tokens=300 batch_invariant": "route sorted apart",
    "tokens=1 batch_invariant": "route sorted together",
    "tokens=8 arch=80": "route sorted together",
    "tokens=9 arch=80": "route sorted apart",
    "tokens=24 arch=80": "route sorted apart",
    "tokens=25 arch=80": "norm+product sorted apart",
    "tokens=25 arch=80 shared_gate": "route+product sorted apart",
    "tokens=25 norm=0 plain_norm=0": "route+product sorted together",
    "tokens=3 plain_norm=0": "route sorted together",
    f"tokens=3 {FLOAT32}": "route sorted together",
    "tokens=3 hidden=8200": "route sorted together",
    # Tiles of tokens that read 16 MiB of the router's weight, and more.
    "tokens=16 hidden=8192 experts=512": "step sorted together",
    "tokens=17 hidden=8192 experts=1024": "route sorted together",
    # A single token.
    "tokens=1 arch=75": "route one_token together",
    f"tokens=1 {FLOAT32}": "route sorted together",
    f"tokens=1 {CODES}": "route one_token together",
    f"tokens=1 {CODES} shared=768": "route sorted together",
    f"tokens=1 {CODES} hidden=2056": "route sorted together",
    f"tokens=1 {CODES} hidden=8208": "route sorted together",
    f"tokens=1 {OTHER}": "route sorted together",
    "tokens=1 shared=768 shared_gate": "route one_token together",
    "tokens=1 post_norm": "route sorted together",
    "tokens=1 gated=0": "route sorted together",
    "tokens=1 groups=33 experts=66": "route sorted together",
    "tokens=1 inner=1280": "route one_token together",
    "tokens=1 inner=1288": "route sorted together",
    "tokens=1 hidden=2052": "route sorted apart",
}

# Sums over ranks: of parts of so many bytes, in launches of their own or in that of the norm.
SUMS = {
    "bytes=8192": "one shot in norm",
    "rows=32 bytes=524288": "one shot in norm",
    "rows=128 bytes=1048576": "one shot in norm",
    "rows=128 bytes=1048577": "one shot",
    "rows=129 bytes=270336": "one shot",
    "rows=512 bytes=4194304": "one shot",
    "rows=512 bytes=4194305": "two shots",
    "rows=8000 bytes=65536000": "two shots",
    "rows=8000 bytes=65536000 arch=80": "one shot",
    "rows=48 bytes=393216 ranks=4": "one shot in norm",
    "rows=130 bytes=393217 ranks=3": "two shots",
    "rows=24 bytes=196609 ranks=4 arch=80": "two shots in norm",
    "rows=20 bytes=163840 ranks=8": "one shot in norm",
    "rows=40 bytes=163841 ranks=8": "two shots in norm",
    "rows=140 bytes=65537 ranks=9": "two shots",
    # With NVLink all is as it is without NCCL; links: 1 is PCIe, 0 is none.
    "rows=8000 bytes=65536000 nccl": "two shots",
    "rows=8000 bytes=65536000 ranks=4 nccl": "two shots",
    "rows=8000 bytes=65536000 links=1 nccl": "one shot",
    "rows=8 bytes=65536 ranks=4 links=1 nccl": "two shots in norm, wants NCCL",
    "rows=9 bytes=65537 ranks=4 links=1 nccl": "NCCL, wants NCCL",
    "rows=9 bytes=65537 ranks=4 links=1": "two shots in norm, wants NCCL",
    "bytes=8 links=0 nccl": "NCCL, wants NCCL",
}


def ask(program: Path, lines: Sequence[str]) -> list[str]:
    command = [str(program)]
    text = "\n".join(lines)
    result = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    return result.stdout.splitlines()


@pytest.mark.parametrize(
    ("kind", "cases"),
    [("attention", ATTENTION), ("latents", LATENTS), ("experts", EXPERTS), ("sums", SUMS)],
)
def test_kernels_are_the_tables_(kind: str, cases: dict[str, str], select_kernels: Path) -> None:
    answers = ask(select_kernels, [f"{kind} {line}" for line in cases])
    assert dict(zip(cases, answers, strict=True)) == cases


def test_a_refusal_says_why_each_candidate_is_out(select_kernels: Path) -> None:
    calls = ["head_dim=512", "arch=80 trees tree_words=1 force=sm80", "arch=75 force=sm80"]
    said = ask(select_kernels, [f"attention {call}" for call in calls])
    assert [re.findall(r"(\w+): ([^;]+)", line)[1:] for line in said] == [
        [
            ("sm90", "head_dim 512 (allowed: 64, 80, 96, 128, 256)"),
            ("sm80", "head_dim 512 (allowed: 64, 80, 96, 128, 256)"),
            ("generic", "head_dim 512 is larger than 256"),
        ],
        [("sm80", "has no draft trees")],
        [("sm80", "needs sm_80 or later")],
    ]


@pytest.mark.parametrize("call", ["tokens=1", "tokens=100 query=100 context=9000"])
@pytest.mark.parametrize("architecture", [75, 80, 86, 89, 90])
def test_batch_invariant_attention_has_one_launch_for_any_batch(
    architecture: int, call: str, select_kernels: Path
) -> None:
    lines = [
        f"attention arch={architecture} {call} seqs={seqs} batch_invariant" for seqs in (1, 2, 100)
    ]
    assert len(set(ask(select_kernels, lines))) == 1


def test_the_choices_include_no_cuda() -> None:
    names = ("attention/select", "attention/latent/select", "experts/select", "ranks/select")
    for name in (*(f"{each}{end}" for each in names for end in (".cu", ".h")), "candidates.h"):
        text = (build.CSRC / "cuda" / name).read_text(encoding="utf-8")
        headers = re.findall(r'#include ["<]([^">]+)', text)
        assert not [header for header in headers if header.endswith(".cuh") or "cuda_r" in header]
