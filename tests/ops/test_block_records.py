"""What regatta_blocks says of texts, orders and lists that are not those of blocks."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from predict.device.library import Library
from predict.nn.blocks import Norm, Positions
from predict.nn.kinds.attention import AttentionBlock
from predict.nn.kinds.mlp import MlpBlock
from predict.ops.records import text_of
from tests.support.attention import Batch, Shape
from tests.support.cpu_kernels import int32, normal, packed, tensor

HIDDEN = 32
SHAPE = Shape(num_heads=2, num_kv_heads=1, head_dim=16, block_size=16, spans=((2, 2), (1, 4)))
ATTENTION = text_of(
    AttentionBlock(2, 1, 16, 0.25, norm=Norm(epsilon=1e-6), positions=Positions("none")),
    qkv="dense",
    out="dense",
    kv_format="dense",
)
MLP = text_of(MlpBlock(48, norm=Norm(epsilon=1e-6)), gate_up="dense", down="dense")
EXPERTS = "experts intermediate_size=48 router.num_experts=6 router.top_k=2"


def run(
    compiled: Library,
    text: str,
    order: list[int],
    rows: Any = None,
    step_size: int = 8,
    shape: Shape = SHAPE,
) -> Any:
    """Blocks of `order`, whose weights and caches are all there."""
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> Any:
        return packed(compiled, normal(rng, rows, columns), "float32")

    norm = tensor(np.ones(HIDDEN, np.float32), "float32")
    batch = Batch.of(shape)
    weights, caches = [], []
    for index in order:
        if index == 0 and ATTENTION in text:
            weights += [norm, matrix(64, HIDDEN), matrix(HIDDEN, 32)]
            caches += [tensor(np.zeros_like(batch.empty_cache()), "float32") for _ in range(2)]
        else:
            weights += [norm, matrix(96, HIDDEN), matrix(HIDDEN, 48)]
    hidden = tensor(normal(rng, shape.num_tokens, HIDDEN), "float32")
    step = batch.step()[:step_size]
    return compiled.op("regatta_blocks")(hidden, weights, caches, step, None, rows, text, order)[0]


def test_blocks_that_are_named_rightly_run(compiled: Library) -> None:
    text = f"{ATTENTION}|{MLP}"
    assert run(compiled, text, [0, 1, 0]).shape == [3, HIDDEN]
    assert run(compiled, text, [0, 1, 1], rows=int32([1, 2])).shape == [2, HIDDEN]
    assert run(compiled, MLP, [0, 0], step_size=0).shape == [3, HIDDEN]


@pytest.mark.parametrize(
    "rows",
    [[69, 70, 75], [0, 3, 68, 69, 71], [70], list(range(76)), [75, 70, 69], [70, 70, 75]],
)
@pytest.mark.parametrize("residual", ["", " residual.source=normed"])
def test_some_rows_are_those_of_all(compiled: Library, residual: str, rows: list[int]) -> None:
    shape = dataclasses.replace(SHAPE, spans=((70, 90), (1, 40), (5, 5)))
    for text, order in ((ATTENTION + residual, [0]), (f"{ATTENTION}{residual}|{MLP}", [0, 1])):
        whole = run(compiled, text, order, shape=shape).numpy()
        some = run(compiled, text, order, rows=int32(rows), shape=shape).numpy()
        np.testing.assert_array_equal(some, whole[rows])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("conv width=3", r"kind is 'conv' .allowed: attention, delta_net, experts, "),
        ("mlp wide=3", r"'wide' is no field .allowed: intermediate_size, activation\.\*, norm\.\*"),
        (
            "mlp norm.kindness=rms",
            r"'norm\.kindness' is no field .allowed: norm\.kind, norm\.epsilon, norm\.bias, norm",
        ),
        ("mlp intermediate_size", r"'intermediate_size' is no field .allowed: name=value"),
        ("mlp intermediate_size=4x", r"intermediate_size is '4x' .allowed: a number"),
        ("mlp intermediate_size=0", r"intermediate_size is 0 .allowed: 1 and more"),
        ("mlp norm.epsilon=", r"norm\.epsilon is '' .allowed: a number"),
        ("mlp up_bias=yes", r"up_bias is 'yes' .allowed: 0 or 1"),
        ("mlp norm.kind=batch", r"norm\.kind is 'batch' .allowed: rms, layer"),
        ("mlp activation.function=tanh", r"activation\.function is 'tanh' .allowed: silu, gelu, g"),
        ("mlp gate_up=int3", r"scheme 'int3' is not known .known: dense, dense_folded, weight_on"),
        ("attention kv_format=int3", r'kv_format is "int3" .allowed: dense, '),
        ("mlp intermediate_size=8 activation.clamp=7", r"an MLP's activation has a clamp, a slope"),
        ("experts num=2", r"'num' is no field .allowed: router\.\*, intermediate_size, activation"),
        ("experts router.scoring=tanh", r"router\.scoring is 'tanh' .allowed: softmax, sigmoid"),
        (
            "experts router.experts=2",
            r"'router\.experts' is no field .allowed: router\.num_experts",
        ),
        (f"{EXPERTS} intermediate_size=0", r"intermediate_size is 0 .allowed: 1 and more"),
        (f"{EXPERTS} router.num_experts=0", r"router\.num_experts is 0 .allowed: 1 to 512"),
        (f"{EXPERTS} router.num_experts=513", r"router\.num_experts is 513 .allowed: 1 to 512"),
        (f"{EXPERTS} router.top_k=0", r"router\.top_k is 0 .allowed: 1 to 6"),
        (f"{EXPERTS} router.top_k=7", r"router\.top_k is 7 .allowed: 1 to 6"),
        (f"{EXPERTS} router.num_experts=99 router.top_k=33", r"top_k is 33 .allowed: 1 to 32"),
        (f"{EXPERTS} router.num_groups=3 router.top_k=3", r"router\.top_k is 3 .allowed: 1 to 2"),
        (
            f"{EXPERTS} router.num_groups=4",
            r"router\.num_groups is 4 of 6 experts, top_groups 1 .allowed: divisors of num_experts",
        ),
        (
            f"{EXPERTS} router.num_groups=2 router.top_groups=3",
            r"num_groups is 2 of 6 experts, top_",
        ),
        (
            f"{EXPERTS} router.num_groups=6 router.top_groups=6 router.group_score=top_two",
            r"router\.group_score is top_two of groups of one expert .allowed: max",
        ),
        (f"{EXPERTS} shared_size=-1", r"shared_size is -1 .allowed: 0 and more"),
        ("attention num_heads=3 num_kv_heads=2 head_dim=8", r"num_heads 3, num_kv_heads 2, head_d"),
    ],
)
def test_what_a_record_cannot_be_is_named(compiled: Library, text: str, said: str) -> None:
    for whole in (text, f"{MLP}|{text}"):
        with pytest.raises(ValueError, match=said):
            run(compiled, whole, [0])


@pytest.mark.parametrize("index", [-1, 2])
def test_an_order_out_of_range_is_named(compiled: Library, index: int) -> None:
    with pytest.raises(ValueError, match=rf"order has {index}, and blocks has 2 records .allowed"):
        run(compiled, f"{ATTENTION}|{MLP}", [0, index])


def test_a_step_without_some_tensors_is_named(compiled: Library) -> None:
    with pytest.raises(ValueError, match=r"step holds 7 tensors .allowed: .*FIELDS, 8 and more"):
        run(compiled, ATTENTION, [0], step_size=7)
    with pytest.raises(ValueError, match=r"step holds 0 tensors .allowed: .*FIELDS, 8 and more"):
        run(compiled, ATTENTION, [0], step_size=0)


@pytest.mark.parametrize(("order", "count"), [([0, 1, 0], 2), ([1], 0), ([1, 0], 1)])
def test_rows_are_of_one_attention_block(compiled: Library, order: list[int], count: int) -> None:
    said = rf"with rows the blocks have {count} attention blocks among {len(order)} .allowed: one,"
    with pytest.raises(ValueError, match=said):
        run(compiled, f"{ATTENTION}|{MLP}", order, rows=int32([0]))
