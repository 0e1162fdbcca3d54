import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predict.engine import block_manager
from predict.engine.block_manager import BlockManager, num_blocks_for

BLOCK_SIZE = 4


def cached(manager: BlockManager, token_ids: list[int], salt: bytes = b"") -> list[int]:
    """Blocks of a sequence that computed `token_ids` and published its full blocks."""
    block_ids = manager.allocate(num_blocks_for(len(token_ids), manager.block_size))
    num_full = len(token_ids) // manager.block_size
    manager.publish(block_ids, token_ids, [], 0, num_full, salt)
    return block_ids


def test_blocks_for_tokens_round_up() -> None:
    assert [num_blocks_for(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0)])
def test_an_empty_pool_is_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1 each"):
        BlockManager(*sizes)


def test_allocation_hands_out_every_block_once() -> None:
    manager = BlockManager(5, BLOCK_SIZE)
    block_ids = manager.allocate(2) + manager.allocate(3)
    assert sorted(block_ids) == [0, 1, 2, 3, 4]
    assert (manager.num_free_blocks, manager.num_used_blocks) == (0, 5)


def test_an_allocation_that_does_not_fit_takes_nothing() -> None:
    manager = BlockManager(3, BLOCK_SIZE)
    with pytest.raises(RuntimeError, match="4 blocks wanted, 3 of 3 free"):
        manager.allocate(4)
    assert manager.num_free_blocks == 3


def test_a_second_free_is_an_error() -> None:
    manager = BlockManager(3, BLOCK_SIZE)
    block_ids = manager.allocate(1)
    manager.free(block_ids)
    with pytest.raises(RuntimeError, match="freed twice"):
        manager.free(block_ids)


def test_a_shared_block_is_free_after_its_last_owner() -> None:
    manager = BlockManager(3, BLOCK_SIZE)
    block_ids = manager.allocate(2)
    manager.acquire(block_ids)
    manager.free(block_ids)
    assert manager.num_used_blocks == 2
    assert manager.ref_count(block_ids[0]) == 1
    manager.free(block_ids)
    assert manager.num_used_blocks == 0


def test_a_free_block_without_content_cannot_be_acquired() -> None:
    manager = BlockManager(3, BLOCK_SIZE)
    with pytest.raises(RuntimeError, match="holds no cached prefix"):
        manager.acquire([0])


@pytest.mark.parametrize(
    ("num_tokens", "num_matched"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 2)]
)
def test_a_match_is_whole_blocks_and_leaves_a_token(num_tokens: int, num_matched: int) -> None:
    manager = BlockManager(8, BLOCK_SIZE)
    block_ids = cached(manager, list(range(11)))
    matched = manager.match_prefix(list(range(num_tokens)))
    assert matched == (block_ids[:num_matched], num_matched * BLOCK_SIZE)


def test_a_match_stops_at_the_first_different_token() -> None:
    manager = BlockManager(8, BLOCK_SIZE)
    block_ids = cached(manager, list(range(12)))
    other = [*range(7), 99, *range(8, 13)]
    assert manager.match_prefix(other) == (block_ids[:1], 4)
    assert manager.match_prefix([99, *range(1, 13)]) == ([], 0)


def test_equal_blocks_behind_different_prefixes_do_not_match() -> None:
    manager = BlockManager(8, BLOCK_SIZE)
    cached(manager, [1, 1, 1, 1, 5, 5, 5, 5])
    own = cached(manager, [2, 2, 2, 2, 5, 5, 5, 5])
    assert manager.match_prefix([2, 2, 2, 2, 5, 5, 5, 5, 0]) == (own, 8)


def test_running_sequences_are_matched_before_they_free() -> None:
    manager = BlockManager(8, BLOCK_SIZE)
    block_ids = cached(manager, list(range(8)))
    matched, _ = manager.match_prefix(list(range(9)))
    manager.acquire(matched)
    assert manager.num_used_blocks == 2
    assert [manager.ref_count(b) for b in block_ids] == [2, 2]


def test_published_content_survives_free() -> None:
    manager = BlockManager(8, BLOCK_SIZE)
    block_ids = cached(manager, list(range(8)))
    manager.free(block_ids)
    assert manager.num_free_blocks == 8
    matched, _ = manager.match_prefix(list(range(9)))
    assert matched == block_ids
    manager.acquire(matched)
    assert manager.num_used_blocks == 2


def test_partial_blocks_are_never_matched() -> None:
    manager = BlockManager(8, BLOCK_SIZE)
    manager.free(cached(manager, list(range(7))))
    assert manager.match_prefix(list(range(20))) == ([0], 4)


def test_uncached_blocks_are_taken_before_cached_ones() -> None:
    manager = BlockManager(4, BLOCK_SIZE)
    block_ids = cached(manager, list(range(8)))
    manager.free(block_ids)
    assert not set(manager.allocate(2)) & set(block_ids)
    assert manager.match_prefix(list(range(9))) == (block_ids, 8)


def test_the_least_recently_used_prefix_is_evicted_tail_first() -> None:
    manager = BlockManager(4, BLOCK_SIZE)
    old, new = cached(manager, [1] * 8), cached(manager, [2] * 8)
    manager.free(old)
    manager.free(new)
    assert manager.allocate(1) == [old[1]]
    assert manager.match_prefix([1] * 9) == ([old[0]], 4)
    assert manager.match_prefix([2] * 9) == (new, 8)


def test_use_makes_a_prefix_recent_again() -> None:
    manager = BlockManager(2, BLOCK_SIZE)
    first, second = cached(manager, [1] * 4), cached(manager, [2] * 4)
    manager.free(first)
    manager.free(second)
    manager.acquire(first)
    manager.free(first)
    assert manager.allocate(1) == second


def test_a_prefix_computed_twice_is_cached_once() -> None:
    manager = BlockManager(4, BLOCK_SIZE)
    first, second = cached(manager, [1] * 8), cached(manager, [1] * 8)
    assert manager.match_prefix([1] * 9) == (first, 8)
    manager.free(second)
    manager.free(first)
    assert set(manager.allocate(2)) == set(second)  # the copies hold nothing worth keeping


def test_shared_blocks_count_as_taken_only_when_free() -> None:
    manager = BlockManager(4, BLOCK_SIZE)
    block_ids = cached(manager, [1] * 8)
    assert manager.can_allocate(2, shared=block_ids)
    assert not manager.can_allocate(3, shared=block_ids)
    manager.free(block_ids)
    assert manager.can_allocate(2, shared=block_ids)
    assert not manager.can_allocate(3, shared=block_ids)


def test_without_prefix_caching_nothing_matches() -> None:
    manager = BlockManager(4, BLOCK_SIZE, prefix_caching=False)
    manager.free(cached(manager, [1] * 8))
    assert manager.match_prefix([1] * 9) == ([], 0)


def test_sequence_salts_separate_prefixes() -> None:
    manager = BlockManager(8, BLOCK_SIZE)
    block_ids = cached(manager, [1] * 8, salt=b"adapter")
    assert manager.match_prefix([1] * 9) == ([], 0)
    assert manager.match_prefix([1] * 9, salt=b"other") == ([], 0)
    assert manager.match_prefix([1] * 9, salt=b"adapter") == (block_ids, 8)


def test_manager_salts_change_every_digest() -> None:
    all_digests = []
    for salt in ("", "x", b"y"):
        digests: list[bytes] = []
        manager = BlockManager(4, BLOCK_SIZE, salt=salt)
        manager.publish(manager.allocate(2), [1] * 8, digests, 0, 2)
        all_digests += digests
    assert len(set(all_digests)) == 6


def test_salts_that_join_to_the_same_bytes_differ() -> None:
    first = BlockManager(4, BLOCK_SIZE, salt="ab")
    second = BlockManager(4, BLOCK_SIZE, salt="a")
    digests: tuple[list[bytes], list[bytes]] = ([], [])
    first.match_prefix([1] * 9, digests[0], salt=b"c")
    second.match_prefix([1] * 9, digests[1], salt=b"bc")
    assert digests[0] != digests[1]


def test_colliding_digests_never_match_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_manager, "_digest", lambda data: b"same")
    manager = BlockManager(8, BLOCK_SIZE)
    block_ids = cached(manager, [1, 2, 3, 4])
    assert manager.match_prefix([1, 2, 3, 5, 0]) == ([], 0)
    assert manager.match_prefix([1, 2, 3, 4, 0]) == (block_ids, 4)


def test_tokens_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Counter[str]()
    digest = block_manager._digest

    def counting(data: bytes) -> bytes:
        calls["blocks" if len(data) > 32 else "roots"] += 1
        return digest(data)

    monkeypatch.setattr(block_manager, "_digest", counting)
    manager = BlockManager(8, BLOCK_SIZE)
    tokens, digests = list(range(17)), list[bytes]()
    for _ in range(3):
        manager.match_prefix(tokens, digests)
    assert calls["blocks"] == 1  # nothing behind a miss
    manager.publish(manager.allocate(4), tokens, digests, 0, 4)
    for _ in range(3):
        assert manager.match_prefix(tokens, digests)[1] == 16
    assert calls["blocks"] == 4


@settings(max_examples=150, deadline=None)
@given(
    num_blocks=st.integers(1, 12),
    block_size=st.integers(1, 4),
    prefix_caching=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_use_keeps_counts_owners_and_contents(
    num_blocks: int, block_size: int, prefix_caching: bool, seed: int
) -> None:
    """Against a model: the list of live sequences, and what was last written to each block."""
    rng = random.Random(seed)
    manager = BlockManager(num_blocks, block_size, prefix_caching)
    live: list[list[int]] = []
    written: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end
    for _ in range(60):
        if live and rng.random() < 0.4:
            manager.free(live.pop(rng.randrange(len(live))))
        else:
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 4 * block_size))]
            digests: list[bytes] = []
            matched, num_cached = manager.match_prefix(tokens, digests)
            assert num_cached == len(matched) * block_size < len(tokens)
            for index, block_id in enumerate(matched):
                assert written[block_id] == tuple(tokens[: (index + 1) * block_size])
            num_new = num_blocks_for(len(tokens), block_size) - len(matched)
            if not manager.can_allocate(num_new, matched):
                continue
            manager.acquire(matched)
            fresh = manager.allocate(num_new)
            owned = {block_id for block_ids in live for block_id in block_ids}
            assert not owned & set(fresh)
            assert not set(matched) & set(fresh)
            block_ids = matched + fresh
            for index in range(len(matched), len(block_ids)):
                written[block_ids[index]] = tuple(tokens[: (index + 1) * block_size])
            num_full = len(tokens) // block_size
            manager.publish(block_ids, tokens, digests, len(matched), num_full)
            live.append(block_ids)
        counts = Counter(block_id for block_ids in live for block_id in block_ids)
        assert all(manager.ref_count(b) == counts[b] for b in range(num_blocks))
        assert manager.num_used_blocks == len(counts)
        assert manager.num_free_blocks + manager.num_used_blocks == num_blocks
    for block_ids in live:
        manager.free(block_ids)
    assert sorted(manager.allocate(num_blocks)) == list(range(num_blocks))


def test_with_lookahead_blocks_match_where_the_tokens_behind_them_are_the_same() -> None:
    manager = BlockManager(8, BLOCK_SIZE, lookahead=1)
    cached(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert manager.match_prefix([1, 2, 3, 4, 5, 6, 7, 8, 9])[1] == 8
    assert manager.match_prefix([1, 2, 3, 4, 5, 6, 7, 8, 10])[1] == 4
    assert manager.match_prefix([1, 2, 3, 4, 6])[1] == 0
    assert manager.match_prefix([1, 2, 3, 4])[1] == 0  # what is behind is not known
