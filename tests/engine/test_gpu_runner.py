"""What the GPU's part of the engine decides without a GPU: buckets, buffers, sizes, refusals."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import make_columns
from predict import LLM, SamplingParams
from predict.config.engine import EngineConfig
from predict.config.quantization import QuantSettings
from predict.device import devices
from predict.device.devices import GIB, MemoryInfo
from predict.engine.batch import _row_kind
from predict.engine.choices import GREEDY, Choice
from predict.engine.logits_processors import FOR_EVER, Adjustment
from predict.engine.runner.buffers import GraphShape, Piece, Slab, StepBuffer, slab_sizes
from predict.engine.runner.gpu_chooser import write_choices
from predict.engine.runner.graphs import (
    FEW_TOKENS,
    OFTEN_MET,
    OFTEN_MET_OF_MANY,
    GraphCache,
    StepGraph,
    graph_for,
    graph_shape,
)
from predict.engine.token_history import encoded
from predict.errors import UserError
from predict.loading.layouts.online import Online
from predict.loading.memory import (
    check_gpu_memory,
    graph_rows,
    loading_bytes,
    num_gpu_cache_blocks,
    weight_bytes,
)
from predict.loading.model import Weights, check_memory
from predict.loading.sources import RandomSource
from predict.nn.cache_formats import kv_format_of
from predict.nn.inputs import bucket_size, empty_example, max_lens_of
from predict.nn.plans import LinearPlan, plan_weights
from predict.nn.weights import WeightNames
from predict.ops.columns import CHOICES, TABLES
from tests.support.golden import GOLDEN
from tests.support.records import llama_spec

SPEC = llama_spec(
    vocab_size=1000,
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_position=4096,
    norm_eps=1e-5,
)


def memory(free: int, in_use: int = 0) -> MemoryInfo:
    return MemoryInfo(total=8 * GIB, free=free, held=in_use, in_use=in_use, peak_in_use=in_use)


def test_logits_are_counted_for_a_graph_of_each_size() -> None:
    assert [graph_rows(size) for size in (1, 8, 128)] == [3, 24, 3 * 128]
    assert graph_rows(256) == 1 + 2 + 4 + 8 + 16 + sum(range(32, 257, 32))


def test_buckets_hold_their_batches() -> None:
    counts = np.arange(1, 300)
    sizes = np.array([bucket_size(int(n)) for n in counts])
    assert (sizes >= counts).all()
    assert (sizes[:32] < 2 * counts[:32]).all()
    assert (sizes - counts < np.maximum(counts, 32)).all()
    assert set(sizes.tolist()) >= {1, 2, 4, 8, 16, 32, 64, 128}


def shape_of(lengths: list[int], num_logits: list[int]) -> GraphShape | None:
    borders = np.cumsum([0, *lengths])
    rows = [np.arange(end - count, end) for end, count in zip(borders[1:], num_logits, strict=True)]
    kind = _row_kind(sum(num_logits), borders[-1], set(num_logits) == {1}, of_prompts=False)
    return graph_shape(
        empty_example()._replace(
            token_ids=np.zeros(borders[-1], np.int32),
            cu_seqlens_q=borders,
            context_lens=np.array(lengths),
            logit_indices=np.concatenate(rows),
            max_lens=max_lens_of(lengths, [100] * len(lengths), kind),
        )
    )


def test_short_sampled_spans_have_graphs() -> None:
    assert shape_of([1], [1]) == GraphShape(1, 1, 1, True)
    assert shape_of([1, 1, 1], [1, 1, 1]) == GraphShape(4, 4, 1, True)
    assert shape_of([11], [11]) == GraphShape(1, 16, 16, True)
    assert shape_of([3, 1, 1], [3, 1, 1]) == GraphShape(4, 8, 4, True)
    assert shape_of([6, 1, 1], [6, 1, 1]) == GraphShape(4, 8, 8, True)
    assert shape_of([2, 1], [1, 1]) == GraphShape(2, 4, 4, False)
    # Not as many rows as tokens, padding included.
    assert shape_of([2, 1, 1], [1, 1, 1]) == GraphShape(4, 8, 4, False)


def test_prompts_have_none() -> None:
    assert shape_of([1], [0]) is None
    assert shape_of([17], [1]) is None
    assert shape_of([5, 1], [0, 1]) is None


def test_graphs_are_recorded_when_they_are_going_to_pay() -> None:
    def plain(size: int) -> GraphShape:
        return GraphShape(size, size, 1, True)

    met: Counter[GraphShape] = Counter()
    large = plain(64)
    assert graph_for(large, [], met) == large  # nothing else serves
    recorded = [large, plain(96), large._replace(adjusted=True)]
    served = [graph_for(plain(32), recorded, met) for _ in range(OFTEN_MET)]
    assert served == [large] * (OFTEN_MET - 1) + [plain(32)]
    assert graph_for(plain(16), recorded, met) == plain(16)  # four times as many rows
    adjusted = plain(32)._replace(adjusted=True)
    assert graph_for(adjusted, recorded, met) == large._replace(adjusted=True)
    drafts = GraphShape(8, 32, 4, True)
    served = [graph_for(drafts, [drafts._replace(num_tokens=64)], met) for _ in range(OFTEN_MET)]
    assert served == [None] * (OFTEN_MET - 1) + [drafts]
    assert graph_for(drafts, [drafts], met) == drafts
    many = GraphShape(16, 2 * FEW_TOKENS, 8, True)
    served = [graph_for(many, [drafts], met) for _ in range(OFTEN_MET_OF_MANY)]
    assert served == [None] * (OFTEN_MET_OF_MANY - 1) + [many]


def test_fields_of_a_buffer_share_its_memory() -> None:
    import paddle

    pieces = [Piece("int32", (3,)), Piece("float32", (2, 5)), Piece("float16", (3, 3))]
    pieces += [Piece("int32", (1,)), Piece("float32", (2,))]
    slabs = {
        dtype: Slab(np.arange(count).astype(dtype), paddle.arange(count).astype(dtype))
        for dtype, count in slab_sizes(pieces).items()
    }
    buffer = StepBuffer(pieces, slabs)
    for (dtype, shape), array, tensor in zip(pieces, buffer.arrays, buffer.tensors, strict=True):
        assert (array.shape, str(array.dtype)) == (shape, dtype)
        np.testing.assert_array_equal(array, tensor.numpy())
    buffer.arrays[1][1, 4] = -7
    assert -7 in slabs["float32"].host
    assert buffer.num_bytes == 4 * 8 + 4 * 16 + 2 * 16


def test_graphs_keep_within_their_memory_and_those_used_longest_ago_go() -> None:
    freed: list[int] = []

    def recorded(size: int) -> StepGraph:
        graph: Any = SimpleNamespace(num_bytes=10 * size, reset=lambda: freed.append(size))
        return graph

    def run(size: int) -> None:
        graphs.graph(GraphShape(size, size, 1, True), 10 * size, lambda: recorded(size))

    graphs = GraphCache(None, max_bytes=70)
    for size in (1, 2, 4, 1):
        run(size)
    assert (freed, graphs.num_bytes, graphs.num_recorded) == ([], 70, 3)
    run(3)
    assert (freed, [shape.num_seqs for shape in graphs]) == ([2, 4], [1, 3])
    freed_shape = GraphShape(2, 2, 1, True)
    served = [graphs.shape_for(freed_shape) for _ in range(2 * OFTEN_MET)]
    assert served == [freed_shape._replace(num_seqs=3, num_tokens=3)] * (2 * OFTEN_MET - 1) + [
        freed_shape
    ]
    run(100)  # alone too large: the others make room for it
    assert [shape.num_seqs for shape in graphs] == [100]
    graphs.drop(lambda shape: shape.num_seqs == 100)
    assert (len(graphs), freed[-1]) == (0, 100)


def config(**changes: object) -> EngineConfig:
    values: dict[str, Any] = {
        "model_name_or_path": str(GOLDEN / "llama_gqa"),
        "dtype": "float32",
        "device": "gpu",
        "inference_model": True,
        "attention": "append",
        "batch_size": 4,
        "max_length": 1024,
        **changes,
    }
    return EngineConfig(**values)


def test_cache_takes_what_the_batch_needs_when_memory_is_plenty() -> None:
    blocks = num_gpu_cache_blocks(config(prefix_caching=False), SPEC, memory(8 * GIB), 0)
    assert blocks == 4 * 1024 // 64


def test_cache_shrinks_to_the_memory_that_is_left() -> None:
    per_block = kv_format_of("dense").bytes_per_token(SPEC.kept, 4) * 64
    free = 20 * per_block
    blocks = num_gpu_cache_blocks(config(), SPEC, memory(free), 2 * per_block)
    assert blocks == 18


def test_too_little_memory_is_an_error_with_the_arithmetic() -> None:
    per_block = kv_format_of("dense").bytes_per_token(SPEC.kept, 4) * 64
    with pytest.raises(UserError, match="--max_length"):
        num_gpu_cache_blocks(config(), SPEC, memory(10 * per_block), 0)


LLAMA_8B = llama_spec(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=8192,
    norm_eps=1e-5,
)


def test_weights_are_counted_by_their_scheme() -> None:
    plan = plan_weights(LLAMA_8B, WeightNames())
    assert weight_bytes(plan, lambda linear: "dense", "bfloat16") == 2 * 8_030_261_248
    head = plan.head

    def scheme(linear: LinearPlan) -> str:
        return "dense" if linear is head else "weight_only_int4"

    halves = weight_bytes(plan, scheme, "bfloat16")
    dense = 2 * 2 * 128256 * 4096 + 2 * 65 * 4096  # embedding, head, norms
    assert halves == dense + (8_030_261_248 - dense // 2) // 2
    tied = dataclasses.replace(LLAMA_8B, tie_word_embeddings=True)
    saved = weight_bytes(plan, lambda linear: "dense", "bfloat16") - weight_bytes(
        plan_weights(tied, WeightNames()), lambda linear: "dense", "bfloat16"
    )
    assert saved == 2 * 128256 * 4096


def test_loading_takes_the_largest_rounded_linear_beside_the_weights() -> None:
    plan = plan_weights(LLAMA_8B, WeightNames())
    gate_up = 2 * 14336 * 4096

    def scheme(linear: LinearPlan) -> str:
        return "dense" if linear is plan.head else "weight_only_int4"

    assert loading_bytes(plan, scheme, lambda linear: 2) == 3 * gate_up
    assert loading_bytes(plan, scheme, lambda linear: 4) == 5 * gate_up
    assert loading_bytes(plan, lambda linear: "a8w8", lambda linear: 2) == 3 * 128256 * 4096
    assert loading_bytes(plan, lambda linear: "dense", lambda linear: 2) == 0
    plan = turned = plan_weights(LLAMA_8B, WeightNames(transposed=True))
    assert loading_bytes(turned, scheme, lambda linear: 2) == 5 * gate_up


def test_what_loading_takes_counts_where_it_is_more_than_workspace_and_cache() -> None:
    settings = config(dtype="bfloat16", gpu_memory_utilization=1.0)
    now = MemoryInfo(total=40 * GIB, free=18 * GIB, held=0, in_use=0, peak_in_use=0)
    check_gpu_memory(settings, LLAMA_8B, now, 8 * GIB, loading_bytes=10 * GIB)
    with pytest.raises(UserError, match=r"weights 8.00 GiB .* = 18.25 GiB"):
        check_gpu_memory(settings, LLAMA_8B, now, 8 * GIB, loading_bytes=10 * GIB + (1 << 28))


@pytest.mark.parametrize(
    ("free", "changes", "words"),
    [
        (8, {}, r"weights 14.96 GiB .*cache of 1024 tokens at 131072 bytes.*not even the weights"),
        (16, {}, "workspace of a step leaves no cache: lower --max_num_batched_tokens"),
        (18, {"max_length": 8192, "attention": "reserved"}, "of 32768 tokens.*--max_length or --b"),
        (18, {"num_cache_blocks": 1000}, "64000 tokens at 131072 bytes each 7.81 GiB"),
        (32, {"max_length": 8192, "attention": "reserved"}, ""),
    ],
)
def test_too_little_memory_is_said_before_weights_are_read(
    free: int, changes: dict[str, object], words: str
) -> None:
    settings = config(dtype="bfloat16", gpu_memory_utilization=1.0, **changes)
    plan = plan_weights(LLAMA_8B, WeightNames())
    needed = weight_bytes(plan, lambda linear: "dense", "bfloat16")
    now = MemoryInfo(total=40 * GIB, free=free * GIB, held=0, in_use=0, peak_in_use=0)
    with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
        check_gpu_memory(settings, LLAMA_8B, now, needed)


@pytest.mark.parametrize(
    ("free", "said"),
    [
        (9, r"; it fits with --quant_type weight_only_int4 .\d+ MiB of weights. or weight_only_mx"),
        (
            12,
            r"; it fits with --quant_type weight_only_int8 .* or weight_only_int4 .* or a8w8_fp8 ",
        ),
        (2, "; no --quant_type makes it fit"),
    ],
)
def test_types_that_there_is_room_for_are_named(
    free: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, source = plan_weights(LLAMA_8B, WeightNames()), RandomSource(0)
    platform: Any = SimpleNamespace(gpu=SimpleNamespace(index=0), compiled=object())
    weights = Weights(
        config(dtype="bfloat16", device="gpu", gpu_memory_utilization=1.0),
        plan,
        source,
        Online(source, QuantSettings(), plan),
        platform,
        WeightNames(),
        lambda asked: Online(source, asked, plan),
    )
    hopper = SimpleNamespace(gpus=[SimpleNamespace(capability=(9, 0))])
    now = MemoryInfo(total=40 * GIB, free=free * GIB, held=0, in_use=0, peak_in_use=0)
    monkeypatch.setattr(devices, "driver_info", lambda: hopper)
    monkeypatch.setattr(devices, "memory_info", lambda gpu: now)
    with pytest.raises(UserError, match=rf"weights 14.96 GiB .*not even the weights.*{said}"):
        check_memory([weights])


def test_plain_operators_are_refused_on_a_gpu() -> None:
    with pytest.raises(UserError, match="leave --inference_model false out"):
        LLM(config(inference_model=False))


def test_rules_are_encoded_as_the_operator_reads_them() -> None:
    params = SamplingParams(
        logit_bias={7: 1.5}, bad_words=[[4], [5, 6, 9], [2]], min_length=3, stop_token_ids=(8,)
    )
    words = encoded(Adjustment.of(params, eos_token_ids=(2,))).tolist()
    num_rules = words[0]
    heads = np.array(words[1 : 1 + 4 * num_rules]).reshape(num_rules, 4)
    rules = []
    for start, length, bits, until in heads.tolist():
        amount = float(np.int32(bits).view(np.float32))
        rules.append((words[start : start + length], amount, until))
    assert len(words) == heads[-1, 0] + heads[-1, 1]
    assert rules == [
        ([7], 1.5, FOR_EVER),
        ([4], -np.inf, FOR_EVER),
        ([5, 6, 9], -np.inf, FOR_EVER),  # [2] alone is the end of the text: no bad word
        ([2], -np.inf, 3),
        ([8], -np.inf, 3),
    ]


def test_choices_lie_where_the_operator_reads_them() -> None:
    choices = [Choice(0.5, 7, 0.9, 1 << 40, 3, 0.25, 0.5), GREEDY, Choice(1.0, 0, 1.0, 5, 1 << 33)]
    table = np.full(CHOICES.shape(3), -1, np.int32)
    views = CHOICES.views(table)
    write_choices(views, choices, [2, 1, 0])
    columns = {name: view.tolist() for name, view in views.items()}
    assert columns.pop("top_k")[:3] == [7, 1, 0]
    assert columns == {
        "temperature": [0.5, 0.0, 1.0, 0.0],
        "top_p": np.array([0.9, 1, 1, 0], "f4").tolist(),
        "min_p": [0.25, 0.0, 0.0, 0.0],
        "seed": [1 << 40, 0, 5, 0],
        "offset": [3, 0, 1 << 33, 0],
        "typical_p": [0.5, 1.0, 1.0, 0.0],
        "num_drafts": [2, 1, 0, 0],
    }
    write_choices(views, [GREEDY] * 3)
    assert not table.any()


def test_cpp_and_python_have_one_schema_of_columns() -> None:
    """csrc/make_columns.py wrote the header of today's tables; and they have no gaps."""
    assert make_columns.main(["--check"]) == 0
    for table in TABLES:
        memory = np.arange(table.num_rows * 8, dtype=np.int32).reshape(table.shape(5))
        joined = b"".join(view.tobytes() for view in table.views(memory).values())
        assert joined == memory.tobytes()
