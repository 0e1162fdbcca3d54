"""PyTorch's kernels on the cases of predict.bench.gpu_kernels: specs in, seconds out, as JSON.

Imports no Paddle. Reads a JSON list of specs from stdin and writes a list of [seconds per call,
kernel] to stdout, null where PyTorch has nothing to run. Operands rotate, calls are replayed from a
CUDA graph, as ours are.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

COLD_BYTES = 192 << 20  # operands rotate through at least this much memory
MAX_COPIES = 64
CALLS_PER_GRAPH = 32
MIN_REPLAYS = 5

Spec = dict[str, Any]
Answer = tuple[float, str]


def num_copies(num_bytes: float) -> int:
    """Copies of an operand that together do not fit any cache."""
    return max(2, min(MAX_COPIES, int(COLD_BYTES // num_bytes) + 1))


def seconds_per_call(call: Callable[[int], Any], copies: int, seconds: float) -> float:
    """Median seconds per call of replays that take about `seconds` together."""
    import torch

    count = -(-CALLS_PER_GRAPH // copies) * copies
    for i in range(min(copies, 3)):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            call(i % copies)
    taken: list[float] = []
    graph.replay()
    deadline = time.perf_counter() + seconds
    while len(taken) < MIN_REPLAYS or time.perf_counter() < deadline:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1e3 / count)
    return statistics.median(taken)


def _random(*shape: int, dtype: str) -> Any:
    import torch

    return torch.randn(shape, device="cuda", dtype=getattr(torch, dtype)) / 50


def matmul(spec: Spec) -> Answer:
    """The product that is the arithmetic limit."""
    size = spec["size"]
    x, weight = (_random(size, size, dtype=spec["dtype"]) for _ in range(2))
    return seconds_per_call(lambda _: x @ weight.T, 4, spec["seconds"]), "cuBLAS"


def linear(spec: Spec) -> Answer:
    """The product of a linear."""
    from torch.nn import functional

    rows, num_in, num_out = spec["num_tokens"], spec["num_inputs"], spec["num_outputs"]
    x = _random(rows, num_in, dtype=spec["dtype"])
    copies = num_copies(num_in * num_out * x.element_size())
    weights = [_random(num_out, num_in, dtype=spec["dtype"]) for _ in range(copies)]
    taken = seconds_per_call(lambda i: functional.linear(x, weights[i]), copies, spec["seconds"])
    return taken, "cuBLAS"


def rms_norm(spec: Spec) -> Answer:
    """Addition, then the norm."""
    from torch.nn import functional

    x = _random(spec["num_tokens"], spec["width"], dtype=spec["dtype"])
    weight = _random(spec["width"], dtype=spec["dtype"])

    def call(_: int) -> Any:
        return functional.rms_norm(x + x, (spec["width"],), weight, 1e-6)

    return seconds_per_call(call, 1, spec["seconds"]), "add, rms_norm"


def silu_mul(spec: Spec) -> Answer:
    """Two kernels."""
    from torch.nn import functional

    x = _random(spec["num_tokens"], 2 * spec["width"], dtype=spec["dtype"])

    def call(_: int) -> Any:
        gate, up = x.chunk(2, -1)
        return functional.silu(gate) * up

    return seconds_per_call(call, 1, spec["seconds"]), "silu, mul"


def attention(spec: Spec) -> Answer | None:
    """The fastest backend of scaled_dot_product_attention, on a cache that is not paged."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    seqs, context, dtype = spec["num_seqs"], spec["context_len"], spec["dtype"]
    heads, kv_heads, dim = spec["num_heads"], spec["num_kv_heads"], spec["head_dim"]
    decode = seqs == spec["num_tokens"]
    q = _random(seqs, heads, 1 if decode else context, dim, dtype=dtype)
    copies = min(num_copies(2 * seqs * kv_heads * context * dim * q.element_size()), 24)
    caches = [
        tuple(_random(seqs, kv_heads, context, dim, dtype=dtype) for _ in range(2))
        for _ in range(copies)
    ]
    best: Answer | None = None
    for backend in (
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
    ):

        def call(i: int) -> Any:
            key, value = caches[i]
            return scaled_dot_product_attention(
                q, key, value, is_causal=not decode, enable_gqa=heads != kv_heads
            )

        try:
            with sdpa_kernel(backend):
                taken = seconds_per_call(call, copies, spec["seconds"] / 2)
        except RuntimeError:  # a backend that does not take this shape, dtype or GPU
            torch.cuda.synchronize()
            continue
        if best is None or taken < best[0]:
            best = taken, f"SDPA {backend.name.split('_')[0].lower()}"
    return best


KINDS: dict[str, Callable[[Spec], Answer | None]] = {
    "matmul": matmul,
    "linear": linear,
    "rms_norm": rms_norm,
    "silu_mul": silu_mul,
    "attention": attention,
}


def main() -> int:
    """Answers the specs of stdin; returns the exit code."""
    import torch

    answers = []
    for spec in json.load(sys.stdin):
        answers.append(KINDS[spec["kind"]](spec))
        torch.cuda.empty_cache()
    json.dump(answers, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
