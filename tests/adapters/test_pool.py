"""Pages of adapters: each has one place, and what a table says lies there."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from predict.adapters.pool import AdapterPool, ServedAdapter
from predict.nn.inputs import ADAPTED

CHANGED = st.tuples(*(st.booleans() for _ in ADAPTED))


def adapter(num_pages: int, name: str = "a") -> ServedAdapter:
    return ServedAdapter(name, num_pages, (True,) * len(ADAPTED))


class PoolMachine(RuleBasedStateMachine):
    """Any calls; `lying` is what was written last into each page."""

    adapters = Bundle("adapters")

    @initialize(num_pages=st.integers(1, 8), max_pages=st.integers(1, 4))
    def make(self, num_pages: int, max_pages: int) -> None:
        self.lying: dict[int, tuple[ServedAdapter, int]] = {}
        self.held: Counter[ServedAdapter] = Counter()
        self.last_held: list[ServedAdapter] = []  # whose last holder went, longest ago first
        self.fails = False
        self.pool = AdapterPool(num_pages, max_pages, self.write)

    def write(self, adapter: ServedAdapter, pages: list[int]) -> None:
        assert len(set(pages)) == len(pages) == adapter.num_pages
        for held in self.held:
            assert set(self.pool.table(held).ravel()).isdisjoint(pages), "it is in use"
        if self.fails:
            self.lying.update(dict.fromkeys(pages, (adapter, -1)))  # half written
            raise RuntimeError("no room on the host")
        self.lying.update({page: (adapter, index) for index, page in enumerate(pages)})

    @rule(target=adapters, num_pages=st.integers(1, 4), changed=CHANGED)
    def load(self, num_pages: int, changed: tuple[bool, ...]) -> object:
        if num_pages > min(self.pool.num_pages, self.pool.max_pages):
            return multiple()
        return ServedAdapter("a", num_pages, changed)

    @rule(adapter=adapters, fails=st.booleans())
    def hold(self, adapter: ServedAdapter, fails: bool) -> None:
        used = sum(each.num_pages for each in self.held)
        has_room = adapter in self.held or used + adapter.num_pages <= self.pool.num_pages
        num_written = self.pool.num_written
        before = set(self.resident())
        self.fails = fails
        try:
            took = self.pool.hold(adapter)
        except RuntimeError:
            assert fails
            assert adapter not in before
            assert adapter not in self.resident()
            assert self.pool.num_written == num_written
            return
        finally:
            self.fails = False
        assert took == has_room
        if not took:
            assert set(self.resident()) == before
            return
        gone = before - set(self.resident())
        idle = [each for each in self.last_held if each in before]
        assert gone == set(idle[: len(gone)]), "not those that were held longest ago"
        assert self.pool.num_written == num_written + (adapter not in before)
        self.held[adapter] += 1
        self.last_held = [each for each in self.last_held if each is not adapter]

    @rule(adapter=adapters)
    def release(self, adapter: ServedAdapter) -> None:
        if not self.held[adapter]:
            del self.held[adapter]
            with pytest.raises(RuntimeError, match="nobody holds it"):
                self.pool.release(adapter)
            return
        self.pool.release(adapter)
        self.held -= Counter([adapter])
        if adapter not in self.held:
            self.last_held.append(adapter)

    @rule(adapter=adapters)
    def forget(self, adapter: ServedAdapter) -> None:
        self.pool.forget(adapter)
        assert (adapter in self.resident()) == (adapter in self.held)

    def resident(self) -> set[ServedAdapter]:
        return set(self.pool._pages)

    @invariant()
    def pages_have_one_place(self) -> None:
        self.pool.check(self.held)
        pool = self.pool
        used = sum(each.num_pages for each in self.held)
        assert pool.num_free_pages == pool.num_pages - used
        assert pool.num_used_pages == sum(each.num_pages for each in self.resident())

    @invariant()
    def tables_say_where_it_lies(self) -> None:
        for each in self.held:
            table = self.pool.table(each)
            assert table.shape == (len(ADAPTED), self.pool.max_pages)
            for changes, row in zip(each.targets, table, strict=True):
                pages = row[: each.num_pages] if changes else row[:0]
                wanted = [(each, index) for index in range(len(pages))]
                assert [self.lying[page] for page in pages] == wanted
                assert (row[len(pages) :] == -1).all()


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyCalls = pytest.mark.no_cover(PoolMachine.TestCase)


def test_an_idle_adapter_is_there_again_without_being_written() -> None:
    written: list[str] = []
    pool = AdapterPool(4, 2, lambda adapter, pages: written.append(adapter.name))
    first, second, third = adapter(2, "first"), adapter(2, "second"), adapter(1, "third")
    for each in (first, second):
        assert pool.hold(each)
        pool.release(each)
    assert pool.hold(first)
    assert pool.hold(third)  # in the place of the second
    assert not pool.hold(second)
    pool.release(third)
    assert pool.hold(second)
    assert written == ["first", "second", "third", "second"]
    np.testing.assert_array_equal(np.unique(pool.table(first)), [0, 1])


def test_lost_pages_and_wrong_holders_are_found() -> None:
    pool = AdapterPool(4, 2, lambda adapter, pages: None)
    one = adapter(2)
    pool.hold(one)
    pool.check({one: 1})
    with pytest.raises(RuntimeError, match="not held by those who run"):
        pool.check({one: 2})
    pool._pages[one].pop()
    with pytest.raises(RuntimeError, match="lost or held twice"):
        pool.check({one: 1})
