"""Every operator once on small odd shapes, results not looked at: for compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/gpu/op_tour.py bfloat16

A program of its own, started by tests/gpu/test_sanitizer.py. Each tensor is a piece of memory of
its own there, so that a read behind its end is seen.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "csrc")]

import numpy as np  # noqa: E402

from predict.device import devices  # noqa: E402

if TYPE_CHECKING:
    from predict.nn.kinds.experts import ExpertBlock
    from tests.support.gpu_operands import Operands

ROWS = (1, 3, 9, 17, 33, 65, 130)
# head_dim, query heads, key/value heads, block size, window
ATTENTIONS = (
    (64, 6, 2, 16, -1),
    (80, 4, 4, 32, 20),
    (96, 8, 1, 64, -1),
    (128, 14, 2, 128, -1),
    (256, 4, 2, 16, 50),
    (40, 3, 1, 32, -1),
)
EXPERT_ROWS = (1, 8, 70)
# Scheme and input features per scale; hidden size, inner size.
EXPERTS = (
    ("dense", -1, 72, 48),
    ("a8w8_fp8", -1, 80, 48),
    ("a8w8", -1, 80, 48),
    ("weight_only_int8", -1, 80, 48),
    ("weight_only_int4", -1, 80, 48),
    ("weight_only_int4", 64, 192, 128),
    ("w4a8", -1, 80, 48),
    ("weight_only_mxfp4", 32, 96, 64),
)
# Capabilities whose kernels of experts are toured, by force where they are not the GPU's own.
OLDER = ((8, 9), (8, 0), (7, 5))
# Heads; kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim. Long spans are expanded with
# the sizes that DeepSeek published, on GPUs with a kernel for them.
LATENTS = ((3, 24, 16, 8, 20), (16, 64, 32, 32, 48), (16, 512, 128, 64, 128))


def tour(gpu: devices.Device, dtype: str) -> None:
    """Runs every operator."""
    from predict.loading.build import fold_norms
    from predict.nn.blocks import Activation, BlockStep
    from predict.ops import compiled as ops
    from tests.support import step_operands
    from tests.support.gpu_adapters import PAGES, pages_table, with_ranks
    from tests.support.gpu_operands import Heads, Operands, Span, Step
    from tests.support.records import head_of

    operands = Operands(gpu, dtype)
    weights = operands.on_gpu(operands.linear(72, 136, bias=True))
    odd = operands.on_gpu(operands.linear(131, 67))
    plain = with_ranks(operands, operands.linear(72, 136, bias=True), (67, 61, 8))
    adapted, pages = operands.on_gpu(plain), operands.placed(pages_table())
    head, norm = operands.on_gpu(operands.linear(72, 1003)), operands.tensor(72).device
    for source in (weights, odd):
        ops.pack_dense(source.tensors[0], "float32")
        ops.transposed(source.tensors[0])
        for rule in ("int8", "int4", "e4m3"):
            ops.round_weight(source.tensors[0], rule, -1)
        ops.round_weight(source.tensors[0], "e4m3", 128)
    for rows in ROWS:
        x, wide = operands.tensor(rows, 72).device, operands.tensor(rows, 131).device
        ops.linear(x, weights)
        ops.linear(wide, odd)
        adapters = np.arange(rows, dtype=np.int32) % (len(PAGES) + 1) - 1
        adapter_ids = operands.placed(adapters[::-1].copy())
        adapter_ids = ops.take_ids(adapter_ids, operands.placed(np.arange(rows, dtype=np.int32)))
        for row in range(pages.shape[1]):
            ops.adapted_linear(x, adapted, adapter_ids, pages, row)
        ops.rms_norm(x, norm, x, 1e-5)
        ops.activate(operands.tensor(rows, 2 * 67).device, Activation())
        ids = operands.placed(operands.generator.integers(0, 1003, rows).astype(np.int32))
        ops.embedding(ids, None, head)
        ops.logits(x, head_of(head, norm), operands.placed(np.arange(rows, dtype=np.int32)))
    for case in (
        *(step_operands.follow_drafts_case(rows) for rows in ROWS),
        *(step_operands.mask_logits_case(rows, 1003) for rows in ROWS),
        *(step_operands.sample_step_case(1003, rows)[0] for rows in ROWS[2:]),
        step_operands.resolve_tokens_case(),
        step_operands.adjust_logits_case(1003)[0],
        step_operands.likeliest_case(1003, 9),
        step_operands.log_softmax_case(1003),
        step_operands.logprobs_case(1003, 20),
        step_operands.random_spans(operands.generator, 1003, 12).case(2, 10),
    ):
        case.outcome(ops, gpu.place())
    for head_dim, num_heads, num_kv_heads, block, window in ATTENTIONS:
        heads = Heads(num_heads, num_kv_heads, head_dim, window)
        layer = operands.on_gpu(operands.layer(72, 88, heads, bias=True, qk_norm=True))
        folded = fold_norms(operands.on_gpu(operands.layer(72, 88, heads, True, False)), ops)
        rope = operands.ropes(heads, 2048).device
        decode = [Span(n - 1, 1) for n in (1, block - 1, block, block + 1, 700)]
        mixed = [Span(0, block + 1), Span(300, 70), Span(0, 0), Span(33, 1), Span(40, 5)]
        for spans in (decode, mixed):
            step = Step(operands, spans, heads, block, num_padding=2)
            hidden = operands.tensor(step.num_tokens, 72).device
            out, _ = ops.block(hidden, layer[0], BlockStep(step.caches()[1], rope, step.device))
            ops.block(out, layer[1])
            for each in (layer, folded):
                ops.layers(hidden, [each], [step.caches()[1]], rope, step.device)
            q, caches = ops.rope_and_cache_write(
                operands.tensor(step.num_tokens, heads.qkv_size).device,
                layer[0],
                step.caches()[1],
                rope,
                step.device,
            )
            ops.paged_attention(q, layer[0], tuple(caches), step.device).cpu()
            ops.copy_blocks(caches, [(0, 2), (1, 3)])
    tour_experts(operands)
    tour_latents(operands)


def tour_experts(operands: Operands) -> None:
    """Runs blocks of experts, with a shared MLP and without, by the kernels of every GPU."""
    from predict.nn.kinds.experts import ExpertBlock, Router

    own = devices.driver_info().gpus[operands.gpu.index].capability
    for capability in (own, *(older for older in OLDER if older < own)):
        forced = "" if capability == own else "experts=sm{}{}".format(*capability)
        os.environ["REGATTA_KERNEL"] = forced
        for scheme, group_size, hidden_size, inner in EXPERTS:
            if not has_kernels(scheme, group_size, operands.dtype, capability):
                continue
            plain = ExpertBlock(Router(12, 3, renormalize=True), inner)
            shared = ExpertBlock(Router(5, 2), inner, shared_size=80, shared_gate=True)
            for block in (plain, shared):
                tour_expert_block(operands, block, scheme, group_size, hidden_size)
    del os.environ["REGATTA_KERNEL"]


def has_kernels(scheme: str, group_size: int, dtype: str, capability: tuple[int, int]) -> bool:
    """Whether kernels of the capability run such experts."""
    from predict.config.schemes import DENSE, FIRST_BFLOAT16, HOPPER, scheme_info

    support = (DENSE if scheme == "dense" else scheme_info(scheme)).support
    groups = support.hopper_groups if capability == HOPPER else support.mma_groups
    return (
        support.gpu <= capability <= (support.gpu_last or capability)
        and group_size in groups
        and dtype in support.gpu_dtypes
        and (dtype != "bfloat16" or capability >= FIRST_BFLOAT16)
    )


def tour_expert_block(
    operands: Operands, block: ExpertBlock, scheme: str, group_size: int, hidden_size: int
) -> None:
    """Runs the block for few rows and for many, its matrices in the scheme."""
    from predict.ops import compiled as ops
    from tests.support.gpu_experts import coded, on_gpu, weights_of

    with operands.on_cpu():
        dense = weights_of(operands, block, hidden_size)
    placed = (
        on_gpu(operands, dense)
        if scheme == "dense"
        else coded(operands, dense, scheme, group_size)[1]
    )
    for rows in EXPERT_ROWS:
        ops.block(operands.tensor(rows, hidden_size).device, placed)


def tour_latents(operands: Operands) -> None:
    """Runs latent attention: decoded tokens, a prompt, and one that is long enough to expand."""
    from predict.nn.inputs import LONG_SPAN
    from predict.nn.kinds.latent_attention import LatentAttentionBlock
    from predict.nn.rope import rope_table
    from predict.nn.spec import RopeSpec
    from predict.ops import compiled as ops
    from tests.support.gpu_latents import on_gpu, weights_of
    from tests.support.gpu_operands import Heads, Span, Step

    decode = [Span(n - 1, 1) for n in (1, 15, 16, 17, 200)]
    mixed = [Span(0, 21), Span(40, 3), Span(0, 0), Span(33, 1)]
    long = [Span(70, 1), Span(9, LONG_SPAN + 3), Span(0, 5)]
    for sizes in LATENTS:
        block = LatentAttentionBlock(*sizes, 0.1)
        with operands.on_cpu():
            placed = on_gpu(operands, weights_of(operands, block, 72))
        size = block.qk_rope_head_dim
        ropes = (operands.placed(rope_table(RopeSpec(), size, 2048, 2048)),)
        heads = Heads(block.num_heads, 1, block.latent_size)
        for spans in (decode, mixed, long):
            step = Step(operands, spans, heads, 16, num_padding=2)
            hidden = operands.tensor(step.num_tokens, 72).device
            cache = (operands.both(step.pools[0]).device,)
            ops.layers(hidden, [(placed,)], [cache], ropes, step.device)


def read_beyond(gpu: devices.Device) -> None:
    """Reads 64 KiB behind a tensor of 1 KiB: what the sanitizer has to report."""
    import paddle
    from predict.device import cuda, library

    tensor, sink = paddle.zeros([256]), paddle.zeros([1])
    launch = library.require().handle.regatta_launch_read
    launch.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    launch(tensor.data_ptr(), 65 << 10, sink.data_ptr(), cuda.current_stream(gpu))


def main() -> int:
    """Runs the tour in the dtype of the first argument, or "beyond"; returns the exit code."""
    gpu = devices.choose("gpu")
    devices.activate(gpu)
    import paddle

    if sys.argv[1] == "beyond":
        read_beyond(gpu)
    else:
        tour(gpu, sys.argv[1])

    paddle.device.synchronize()
    print("the tour is done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
