"""What ranks read of a checkpoint: together it is what one rank reads, codes and scales as well."""

from __future__ import annotations

from pathlib import Path

import pytest

from predict.config.quantization import QuantSettings
from predict.errors import UserError
from predict.loading import sources
from predict.loading.checkpoint import Checkpoint
from predict.loading.layouts.online import Online
from predict.loading.sources import CheckpointSource
from predict.nn.cuts import local_plan, local_spec
from predict.nn.kinds.attention import AttentionBlock
from predict.nn.plans import WeightPlan
from predict.nn.shares import Ranks
from predict.nn.spec import DecoderSpec
from tests.support.golden import GOLDEN
from tests.support.layouts import CASES, open_layout
from tests.support.layouts import GOLDEN as QUANTIZED
from tests.support.rank_cuts import SCHEMES, check_cut
from tests.support.tiny import write

SIZES = {"num_attention_heads": 8, "head_dim": 64, "hidden_size": 256, "intermediate_size": 384}


@pytest.mark.parametrize("case", CASES)
def test_codes_of_each_layout_are_those_of_one_rank(case: str) -> None:
    check_cut(*open_layout(QUANTIZED / case), size=2)


def opened(folder: Path, scheme: str) -> tuple[Online, WeightPlan]:
    """A tiny model's layout, rounded so, and its plan."""
    _, plan = open_layout(folder)
    source = CheckpointSource(Checkpoint(folder))
    return Online(source, QuantSettings(**SCHEMES[scheme]), plan), plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model") / "model", SIZES)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", [2, 4])
def test_codes_that_are_rounded_here_are_those_of_one_rank(
    folder: Path, scheme: str, size: int
) -> None:
    """Inner sizes are 3 blocks of 128 and 12 groups of 32: ranks have unlike parts of them."""
    layout, plan = opened(folder, scheme)
    if scheme == "blocks" and size == 4:
        with pytest.raises(UserError, match=r"there are 3 groups of 128 inner features for 4 rank"):
            check_cut(layout, plan, size)
    else:
        check_cut(layout, plan, size)


def spec_of(num_heads: int, num_kv_heads: int) -> DecoderSpec:
    return DecoderSpec("tiny", 211, 64, ((AttentionBlock(num_heads, num_kv_heads, 8, 1.0),),), 64)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size", "kept"),
    [
        (8, 4, 2, [[0, 1], [2, 3]]),
        (8, 2, 4, [[0], [0], [1], [1]]),
        (12, 3, 2, [[0, 0, 1], [1, 2, 2]]),
        (12, 4, 3, [[0, 0, 0, 1], [1, 1, 2, 2], [2, 3, 3, 3]]),
        (12, 3, 4, [[0], [0, 1, 1], [1, 1, 2], [2]]),
    ],
)
def test_each_rank_keeps_the_key_heads_that_its_query_heads_read(
    num_heads: int, num_kv_heads: int, size: int, kept: list[list[int]]
) -> None:
    group = num_heads // num_kv_heads
    for rank, wanted in enumerate(kept):
        axis = Ranks(rank, size).key_heads(num_heads, num_kv_heads)
        found = [head for begin, end in axis.ranges for head in range(begin, end)]
        each = num_heads // size // len(found)
        reads = [head // group for head in range(num_heads)]
        own = reads[rank * num_heads // size : (rank + 1) * num_heads // size]
        assert [found[head // each] for head in range(len(own))] == own
        assert local_spec(spec_of(num_heads, num_kv_heads), rank, size).num_kv_heads == len(found)
        assert set(found) == set(wanted)


def test_inner_features_are_shared_in_whole_units() -> None:
    shares = [Ranks(rank, 4, unit=32).features(2880) for rank in range(4)]
    assert [share.count // 32 for share in shares] == [23, 23, 22, 22]  # gpt-oss: 90 groups
    assert [share.ranges[0][0] for share in shares] == [0, 736, 1472, 2176]


def test_heads_that_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match="8 query heads do not divide among 3 ranks"):
        local_spec(spec_of(8, 4), 0, 3)


def test_one_rank_has_the_network_itself() -> None:
    spec = spec_of(8, 4)
    assert local_spec(spec, 0, 1) is spec
    assert local_plan(open_layout(GOLDEN / "llama_gqa")[1], spec).whole is None


@pytest.mark.parametrize("case", ["qwen2_tied", "phi3_mini", "llama_sharded", "llama_biases"])
@pytest.mark.parametrize("part_bytes", [1 << 24, 300])
def test_floats_are_read_in_part(
    case: str, part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is stored as it is used is not read whole; all others become the same parts."""
    monkeypatch.setattr(sources, "PART_BYTES", part_bytes)
    check_cut(*open_layout(GOLDEN / case), size=2)
