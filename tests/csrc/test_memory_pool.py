"""csrc/device/memory_pool.cc: no memory has two owners, counts are exact, all is given back."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

DEVICE = Path(__file__).resolve().parents[2] / "csrc" / "device"
MIB = 1 << 20
LIMIT = 256 * MIB

# A source of addresses without memory behind them; synchronize fails while `busy` is set.
SHIM = """
#include "memory_pool.h"
using namespace regatta::device;
struct Source : MemorySource {
  std::map<char*, size_t> live;
  size_t used = 0, limit = 0;
  bool busy = false;
  int num_synchronized = 0;
  char* next = reinterpret_cast<char*>(1 << 20);
  void* allocate(size_t bytes) override {
    if (bytes > limit - used) return nullptr;
    char* pointer = next;
    next += (bytes + (1 << 21)) / (1 << 21) * (1 << 21);
    live[pointer] = bytes;
    used += bytes;
    return pointer;
  }
  void release(void* pointer) override {
    used -= live.at(static_cast<char*>(pointer));
    live.erase(static_cast<char*>(pointer));
  }
  bool synchronize() override { num_synchronized += !busy; return !busy; }
};
struct Both { Source source; MemoryPool pool{&source}; };
extern "C" {
Both* make(size_t limit) { auto* both = new Both; both->source.limit = limit; return both; }
void destroy(Both* both) { delete both; }
void* allocate(Both* both, size_t bytes) { return both->pool.allocate(bytes); }
int give(Both* both, void* pointer) { return both->pool.free(pointer); }
size_t release(Both* both) { return both->pool.release_cached(); }
void keep(Both* both, int on) { both->pool.keep(on); }
void add_owner(Both* both) { both->pool.add_owner(); }
void drop_owner(Both* both) { both->pool.drop_owner(); }
void set_busy(Both* both, int busy) { both->source.busy = busy; }
int num_synchronized(Both* both) { return both->source.num_synchronized; }
void counts(Both* both, size_t* out) {
  const PoolStats s = both->pool.stats();
  const size_t values[] = {s.held, s.in_use, s.peak_in_use, s.num_segments, s.num_blocks_in_use,
                           both->source.used};
  for (int i = 0; i < 6; ++i) out[i] = values[i];
}
}
"""


class Pool:
    def __init__(self, library: ctypes.CDLL, limit: int = LIMIT) -> None:
        self.library = library
        self.handle = ctypes.c_void_p(library.make(ctypes.c_size_t(limit)))

    def allocate(self, size: int) -> int | None:
        pointer: int | None = self.library.allocate(self.handle, ctypes.c_size_t(size))
        return pointer

    def free(self, pointer: int) -> bool:
        return bool(self.library.give(self.handle, ctypes.c_void_p(pointer)))

    def release(self) -> int:
        released: int = self.library.release(self.handle)
        return released

    def set_busy(self, busy: bool) -> None:
        self.library.set_busy(self.handle, busy)

    def counts(self) -> Sequence[int]:
        """held, in_use, peak_in_use, segments, blocks in use, bytes taken from the source."""
        out = (ctypes.c_size_t * 6)()
        self.library.counts(self.handle, out)
        return list(out)

    def close(self) -> None:
        self.library.destroy(self.handle)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("pool")
    (folder / "shim.cc").write_text(SHIM)
    target = folder / "libpool.so"
    command = [compiler, "-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Werror"]
    command += [f"-I{DEVICE}", str(folder / "shim.cc"), str(DEVICE / "memory_pool.cc")]
    subprocess.run([*command, "-o", str(target)], check=True)
    library = ctypes.CDLL(str(target))
    library.make.restype = library.allocate.restype = ctypes.c_void_p
    library.release.restype = ctypes.c_size_t
    return library


SIZES = st.one_of(
    st.integers(0, 4096), st.integers(1, 2 * MIB), st.integers(MIB, 12 * MIB), st.just(40 * MIB)
)
STEPS = st.lists(
    st.one_of(
        SIZES.map(lambda size: ("allocate", size)),
        st.integers(0, 1000).map(lambda which: ("free", which)),
        st.just(("release", 0)),
        st.booleans().map(lambda busy: ("busy", int(busy))),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(steps=STEPS)
def test_blocks_never_overlap_and_counts_are_exact(
    library: ctypes.CDLL, steps: list[tuple[str, int]]
) -> None:
    pool = Pool(library)
    live: list[tuple[int, int]] = []
    for action, value in steps:
        if action == "allocate":
            pointer = pool.allocate(value)
            if pointer is None:
                assert sum(size for _, size in live) + value > LIMIT // 8
                continue
            assert pointer % 512 == 0
            for start, size in live:
                assert pointer + max(value, 1) <= start or start + max(size, 1) <= pointer
            live.append((pointer, value))
        elif action == "free" and live:
            assert pool.free(live.pop(value % len(live))[0])
        elif action == "release":
            pool.release()
        elif action == "busy":
            pool.set_busy(bool(value))
        held, in_use, peak, _, num_blocks, taken = pool.counts()
        assert held == taken <= LIMIT
        assert sum(size for _, size in live) <= in_use <= held
        assert in_use <= peak
        assert num_blocks == len(live)
    pool.set_busy(False)
    for pointer, _ in live:
        assert pool.free(pointer)
    pool.release()
    held, in_use, _, num_segments, num_blocks, taken = pool.counts()
    assert (held, in_use, num_segments, num_blocks, taken) == (0, 0, 0, 0, 0)
    pool.close()


def test_freed_memory_is_reused_only_after_a_synchronization(library: ctypes.CDLL) -> None:
    pool = Pool(library)
    first = pool.allocate(20 * MIB)
    assert first is not None
    pool.free(first)
    pool.set_busy(True)  # a capture: work that uses `first` may be pending and cannot be waited for
    assert pool.allocate(20 * MIB) != first
    pool.set_busy(False)
    assert pool.allocate(20 * MIB) == first
    pool.close()


def test_cached_segments_make_room_for_a_larger_one(library: ctypes.CDLL) -> None:
    pool = Pool(library)
    pointers = [pool.allocate(16 * MIB) for _ in range(16)]
    assert None not in pointers
    assert pool.allocate(1) is None
    for pointer in pointers:
        assert pointer is not None
        pool.free(pointer)
    assert pool.allocate(200 * MIB) is not None
    pool.close()


def test_small_tensors_share_a_segment(library: ctypes.CDLL) -> None:
    pool = Pool(library)
    for _ in range(100):
        assert pool.allocate(1000) is not None
    held, in_use, _, num_segments, _, _ = pool.counts()
    assert (held, in_use, num_segments) == (2 * MIB, 100 * 1024, 1)
    pool.close()


def test_absurd_size_is_out_of_memory_and_a_foreign_pointer_is_refused(
    library: ctypes.CDLL,
) -> None:
    pool = Pool(library)
    assert pool.allocate(2**64 - 1) is None
    pointer = pool.allocate(1)
    assert pointer is not None
    assert pool.free(pointer)
    assert not pool.free(pointer)
    assert not pool.free(4096)
    pool.close()


def test_what_a_graph_was_recorded_in_comes_back_with_its_last_owner(library: ctypes.CDLL) -> None:
    pool = Pool(library, 64 * MIB)
    for _ in range(2):
        library.add_owner(pool.handle)
    library.keep(pool.handle, 1)
    kept = pool.allocate(20 * MIB)
    library.keep(pool.handle, 0)
    other = pool.allocate(20 * MIB)
    assert kept is not None
    assert other is not None
    assert pool.free(kept)
    assert pool.free(other)
    assert not pool.free(kept)
    assert pool.counts()[1] == 20 * MIB
    assert pool.allocate(40 * MIB) is not None  # the other's segment made room, the kept one not
    assert pool.allocate(20 * MIB) is None
    library.drop_owner(pool.handle)
    assert pool.allocate(20 * MIB) is None
    library.drop_owner(pool.handle)
    assert pool.allocate(20 * MIB) == kept
    pool.close()
