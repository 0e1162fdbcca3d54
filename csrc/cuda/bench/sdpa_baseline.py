"""Times PyTorch's scaled_dot_product_attention on the shapes of attention_check (bench)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def microseconds(call: Callable[[], Any], launches: int = 4) -> float:
    """Median time of one call in a CUDA graph of `launches` calls."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            call()
    times = []
    for _ in range(13):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / launches)
    return sorted(times[3:])[5]


PREFILL = (  # heads, head_dim, batch, tokens
    (32, 128, 1, 1024),
    (32, 128, 1, 4096),
    (32, 128, 1, 8192),
    (32, 128, 16, 512),
    (32, 64, 1, 8192),
    (16, 256, 1, 8192),
)
DECODE = ((1, 128), (1, 4096), (8, 1024), (64, 4096), (128, 1024))  # batch, context


def prefill(name: str, backend: SDPBackend, heads: int, dim: int, batch: int, length: int) -> None:
    """Prints the time of one causal call."""
    shape = (batch, heads, length, dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    with sdpa_kernel(backend):
        us = microseconds(lambda: scaled_dot_product_attention(q, k, v, is_causal=True))
    rate = 2 * batch * heads * dim * length * length / us / 1e6
    print(
        f"prefill {name:6} {heads}/{heads} D {dim:3} {batch:2} x {length}: {us:9.1f} us"
        f" {rate:6.1f} TFLOP/s"
    )


def decode(name: str, backend: SDPBackend, batch: int, length: int) -> None:
    """Prints the time of one query token per sequence, caches rotated to come from memory."""
    q = torch.randn(batch, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
    layers = max(1, min(32, int(400e6 / (4096 * batch * length))))
    shape = (layers, 2, batch, 8, length, 128)
    caches = itertools.cycle(torch.randn(shape, device="cuda", dtype=torch.bfloat16))

    def call() -> torch.Tensor:
        k, v = next(caches)
        return scaled_dot_product_attention(q, k, v, enable_gqa=True)

    with sdpa_kernel(backend):
        us = microseconds(call, max(layers, 4))
    print(
        f"decode {name:6} 32/8 D 128 batch {batch:3} x {length}: {us:8.2f} us"
        f" {4096 * batch * length / us / 1e6:5.2f} TB/s"
    )


def main() -> None:
    """Prints one line per shape and backend, or why the backend refuses it."""
    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash2": SDPBackend.FLASH_ATTENTION}
    for name, backend in backends.items():
        for case in PREFILL:
            try:
                prefill(name, backend, *case)
            except RuntimeError as error:
                print(f"prefill {name} {case}: {str(error)[:60]}")
        for shape in DECODE:
            try:
                decode(name, backend, *shape)
            except RuntimeError as error:
                print(f"decode {name} {shape}: {str(error)[:60]}")


if __name__ == "__main__":
    main()
