"""Messages between a front and its ranks: what goes into a ring comes out of it."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Mapping

import numpy as np
import pytest

from predict.engine.beams import Candidates
from predict.engine.choices import GREEDY, Choice
from predict.engine.logits_processors import Adjustment, Rule
from predict.engine.logprobs import LogprobTable
from predict.engine.step import Adjusted, Choices, Logprobs, PromptTargets
from predict.engine.window import WindowDrafts
from predict.nn.inputs import empty_example
from predict.ranks.messages import (
    NUM_CHOICES,
    arrays_choices,
    arrays_step,
    arrays_tokens,
    choices_arrays,
    sent_behind,
    step_arrays,
    tokens_arrays,
)
from predict.ranks.shared import PAGE, Arrays, Channels, Ring, message, opened


def through(arrays: Arrays) -> Arrays:
    """Arrays as the other end has them."""
    kind, found = opened(memoryview(b"".join(message(3, arrays))))
    assert kind == 3
    return found


def test_a_step_comes_out_as_it_was() -> None:
    inputs = empty_example()
    which, found = arrays_step(through(step_arrays(1, inputs)))
    assert which == 1
    for ours, theirs in zip(inputs, found, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_choices_come_out_as_they_were() -> None:
    changed = Adjustment(1.3, 0.1, 0.25, 3, (Rule(7, -np.inf, (1, 2)), Rule(4, 2.5, until=9)))
    rows = [GREEDY, Choice(0.7, 5, 0.9, 2**63 - 1, 12, 0.05, 0.8)]
    given = Choices(
        rows,
        [None, Adjusted(changed, 77, [1, 2, 3, 9], 4, 3, (8,))],
        {0: 6},
        3,
        PromptTargets([5, 6], 2),
        WindowDrafts(2, 5, [(4, 3), ()]),
        lambda masks: masks.fill(-5),
    )
    arrays = choices_arrays(given, 70, {})
    assert len(arrays) == NUM_CHOICES
    found = arrays_choices(through(arrays), {})
    assert found.rows == rows
    assert found.rows[0] is GREEDY
    assert found.adjusted is not None
    assert found.adjusted[0] is None
    assert found.adjusted[1] == Adjusted(changed, 77, [1, 2, 3, 9], 4, 3, [8])
    assert found.candidates == {0: 6}
    assert found.num_top == 3
    assert found.prompt == PromptTargets([5, 6], 2)
    assert found.window == WindowDrafts(2, 5, [[4, 3], []])
    masks = np.zeros((2, 3), np.int32)
    assert found.fill_masks is not None
    found.fill_masks(masks)
    assert (masks == -5).all()


def test_tokens_that_ranks_have_are_not_sent_again() -> None:
    """Steps of one sequence, with drafts, of another one, of none, and of the first one again."""
    first, second, sizes = list(range(5000)), list(range(300)), list[int]()
    sent: Mapping[int, int] = {}
    known: dict[int, list[int]] = {}
    steps: list[list[tuple[int, list[int], tuple[int, ...]]]] = [
        [(1, first, ())],
        [(1, first, ()), (1, first, (7,)), (1, first, (7, 8))],
    ]
    steps += [[(2, second, ())], [], [(2, second, ())], [(1, first, ()), (2, second, ())]]
    for step in steps:
        rows = [
            Adjusted(Adjustment(1.2), number, tokens, len(tokens) - 1, 3, drafts)
            for number, tokens, drafts in step
        ]
        given = Choices([GREEDY] * len(rows), rows or None)
        arrays = choices_arrays(given, 70, sent)
        sent = sent_behind(given, sent)
        sizes.append(sum(each.nbytes for each in arrays if each is not None))
        found = arrays_choices(through(arrays), known).adjusted
        assert [[*a.token_ids, *a.drafts] for a in found or () if a is not None] == [
            [*tokens, *drafts] for _, tokens, drafts in step
        ]
        for _, tokens, _ in step[:1]:
            tokens.append(len(tokens))
    assert set(known) == {1, 2}
    assert [size > 8 * 300 for size in sizes] == [True, False, True, False, False, True]
    assert sizes[-1] < 8 * 5300


def test_choices_without_anything_stay_so() -> None:
    found = arrays_choices(through(choices_arrays(Choices([GREEDY]), 70, {})), {})
    assert found == Choices([GREEDY], candidates={}, prompt=PromptTargets([], 0))


def test_tokens_and_logprobs_come_out_as_they_were() -> None:
    table = LogprobTable(
        np.array([-0.5], np.float32),
        np.array([2], np.int32),
        np.array([[4, 5]], np.int32),
        np.array([[-0.25, -0.5]], np.float32),
    )
    tokens: list[int | Candidates] = [3, Candidates([5, 6], [-0.5, -1.5]), -1, Candidates([], [])]
    found = arrays_tokens(through(tokens_arrays(tokens, Logprobs(table, None))))
    assert found.take() == tokens
    assert found.logprobs().prompt is None
    for ours, theirs in zip(table, found.logprobs().tokens or (), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("sizes", [[0, 1, 5000, 3], [70_000, 1, 70_000]])
def test_every_reader_gets_all_messages_also_those_longer_than_the_ring(sizes: list[int]) -> None:
    capacity = 1 << 14
    fd = os.memfd_create("test")
    os.truncate(fd, Ring.num_bytes(capacity))
    wanted = [bytes([index % 251]) * size for index, size in enumerate(sizes * 20)]
    found: list[list[bytes]] = [[], []]

    def look() -> None:
        pass

    def ring() -> Ring:
        return Ring(mmap.mmap(fd, Ring.num_bytes(capacity)), 0, capacity, 2)

    def read(reader: int) -> None:
        own = ring()
        found[reader] = [bytes(own.read(reader, look)) for _ in wanted]

    threads = [threading.Thread(target=read, args=(reader,)) for reader in range(2)]
    for thread in threads:
        thread.start()
    writer = ring()
    for each in wanted:
        writer.write([each[:7], each[7:]], look)
    for thread in threads:
        thread.join(60)
    assert found == [wanted, wanted]
    os.close(fd)


def test_a_writer_that_nobody_reads_from_looks_whether_it_may_end() -> None:
    fd = os.memfd_create("test")
    os.truncate(fd, Ring.num_bytes(PAGE))
    ring = Ring(mmap.mmap(fd, Ring.num_bytes(PAGE)), 0, PAGE, 1)

    def look() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        ring.write([bytes(2 * PAGE)], look)
    with pytest.raises(InterruptedError):
        Ring(mmap.mmap(fd, Ring.num_bytes(PAGE)), 0, PAGE, 1).read(0, look)
    os.close(fd)


def test_channels_have_a_ring_down_and_one_up_for_each_rank() -> None:
    fd = Channels.create(2)
    front, rank = Channels.open(fd, 2), Channels.open(fd, 2)
    rank.up[1].write([b"two"], lambda: None)
    rank.up[0].write([b"one"], lambda: None)
    assert [bytes(ring.read(0, lambda: None)) for ring in front.up] == [b"one", b"two"]
    front.down.write([b"all"], lambda: None)
    assert bytes(rank.down.read(1, lambda: None)) == b"all"
    rank.progress.store(1, 5)
    assert [front.progress.load(each) for each in range(2)] == [0, 5]
    os.close(fd)
