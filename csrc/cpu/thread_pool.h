// The library's own threads: one parallel region per op call, with phases inside.
//
//   parallel([&](Team& team) {            // runs on every thread of the team, caller included
//     team.for_each(n, [&](int64_t i) { ... });          // i claimed one by one, in order
//     team.barrier();                                    // the work of the loops above is done
//     team.for_guided(n, [&](int64_t begin, int64_t end) { ... });
//   });
//
// Why not OpenMP: Paddle and MKL bring OpenMP runtimes of their own, whose waiting threads would
// fight with ours for the cores; and a block op needs barriers that cost less than a microsecond.
//
// Nobody waits for a thread, only for work: a barrier is passed when every piece that was claimed
// is finished. A worker that the system has not scheduled (another process has its core) delays
// nobody; when it comes it finds the loops exhausted and goes home.
//
// Rules
//  * ALL work on shared memory is inside a loop of the team (once(): a loop of one). A thread may
//    come late or never, so nothing may depend on team.thread() taking part.
//  * All threads run the same sequence of loops and barriers, with the same counts; at most
//    kMaxLoops loops per region. A loop does not end in a barrier.
//  * Which thread does a piece changes from run to run: a result must not depend on it.
//  * Memory shared by the team comes from the caller's scratch, taken before the region
//    (Scratch::mine()); memory of one thread from team.scratch() inside it.
//  * No Paddle calls inside a region, and no exceptions but that of Scratch where memory ends: it
//    ends the region, and parallel() throws it. A nested parallel() runs on one thread.
//  * Memory order is argued at each atomic, by what C++ promises: x86 keeps stores and loads in
//    order by itself, Arm does not. ThreadSanitizer checks it (tests/csrc/test_thread_pool.py).
//  * Workers spin for kSpinMicroseconds after a region, then sleep: back-to-back ops start in well
//    under a microsecond, an idle process uses no CPU.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace regatta::cpu {

// Bump allocator for temporaries; 64-byte aligned, never zeroed, kept for the next call.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch();

  static Scratch& mine();  // the calling thread's arena

  // Pointers stay valid until the enclosing Scope ends, also when the arena has to grow. Throws
  // std::bad_alloc.
  void* take_bytes(size_t bytes);
  template <class T>
  T* take(int64_t count) {
    return static_cast<T*>(take_bytes(static_cast<size_t>(count) * sizeof(T)));
  }

  // Gives back everything taken since its construction.
  class Scope {
   public:
    explicit Scope(Scratch& scratch)
        : scratch_(scratch), block_(scratch.block_), used_(scratch.used_) {}
    ~Scope() { scratch_.rewind(block_, used_); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Scratch& scratch_;
    int block_;
    size_t used_;
  };

 private:
  static constexpr int kMaxBlocks = 32;
  bool add_block(size_t bytes);  // false: there is no memory
  void rewind(int block, size_t used);

  struct Block {
    char* data;
    size_t size;
  };
  Block blocks_[kMaxBlocks] = {};
  int num_blocks_ = 0;
  int block_ = 0;    // the block in use
  size_t used_ = 0;  // bytes used of it
};

namespace internal {

constexpr int kMaxLoops = 256;

// Shared state of one running region: for each loop what was claimed and what is finished.
struct Region {
  struct alignas(64) Loop {
    // What is claimed. Relaxed: it gives each piece to one thread, and orders nothing; what a piece
    // reads was ordered by the barrier ahead of it, or by entering the region.
    std::atomic<int64_t> next{0};
    // What is finished. Each addition releases what the piece wrote. Additions follow each other in
    // one release sequence, so that an acquiring load of the whole count sees all threads' pieces.
    std::atomic<int64_t> done{0};
  };
  Loop loops[kMaxLoops];
  int num_threads = 1;
  std::atomic<bool> failed{false};  // a thread has thrown: its work will never be done

  // Relaxed: only when no thread is inside; the next region's opening releases the zeros.
  void reset_loops(int count) {
    for (int i = 0; i < count; ++i) {
      loops[i].next.store(0, std::memory_order_relaxed);
      loops[i].done.store(0, std::memory_order_relaxed);
    }
  }
};

// Returns the number of loops that the body ran.
using RegionFn = int (*)(void* context, Region& region, int thread);
void run_region(int max_threads, RegionFn fn, void* context);
[[noreturn]] void too_many_loops();

}  // namespace internal

// One thread's view of the running region.
class Team {
 public:
  Team(internal::Region& region, int thread) : region_(region), thread_(thread) {}

  int thread() const { return thread_; }  // 0 .. num_threads() - 1; 0 is the caller
  int num_threads() const { return region_.num_threads; }  // that may take part
  Scratch& scratch() { return Scratch::mine(); }
  int num_loops() const { return num_loops_; }

  // fn(begin, end) for consecutive pieces of [0, count) with at most `chunk` elements.
  template <class Fn>
  void for_chunks(int64_t count, int64_t chunk, Fn&& fn) {
    internal::Region::Loop& loop = begin_loop(count);
    int64_t done = 0;
    for (;;) {
      const int64_t begin = loop.next.fetch_add(chunk, std::memory_order_relaxed);
      if (begin >= count) break;
      const int64_t end = begin + chunk < count ? begin + chunk : count;
      fn(begin, end);
      done += end - begin;
    }
    if (done) loop.done.fetch_add(done, std::memory_order_release);
  }

  template <class Fn>
  void for_each(int64_t count, Fn&& fn) {
    for_chunks(count, 1, [&](int64_t begin, int64_t) { fn(begin); });
  }

  template <class Fn>
  void once(Fn&& fn) {
    for_chunks(1, 1, [&](int64_t, int64_t) { fn(); });
  }

  // As for_chunks, in pieces that shrink: each round of num_threads() pieces takes half of what is
  // left, down to single elements. Long runs of neighbours (for streams from memory) and yet an
  // even end. fn(begin, end).
  template <class Fn>
  void for_guided(int64_t count, Fn&& fn) {
    internal::Region::Loop& loop = begin_loop(count);
    const int64_t threads = num_threads();
    int64_t round_begin = 0, round_index = 0;  // first element and piece of the current round
    int64_t done = 0;
    while (round_begin < count) {
      const int64_t index = loop.next.fetch_add(1, std::memory_order_relaxed);
      int64_t size = guided_size(count - round_begin, threads);
      while (index >= round_index + threads && round_begin < count) {
        round_begin += threads * size;
        round_index += threads;
        size = guided_size(count - round_begin, threads);
      }
      const int64_t begin = round_begin + (index - round_index) * size;
      if (begin >= count) break;
      const int64_t end = begin + size < count ? begin + size : count;
      fn(begin, end);
      done += end - begin;
    }
    if (done) loop.done.fetch_add(done, std::memory_order_release);
  }

  // Waits until all loops begun so far are finished; what they wrote is visible after.
  void barrier() {
    for (; num_finished_ < num_loops_; ++num_finished_) {
      const std::atomic<int64_t>& done = region_.loops[num_finished_].done;
      // Acquire: pairs with the additions in for_chunks() and for_guided().
      if (done.load(std::memory_order_acquire) != counts_[num_finished_]) {
        wait_for(done, counts_[num_finished_], region_);
      }
    }
  }

 private:
  internal::Region::Loop& begin_loop(int64_t count) {
    if (num_loops_ == internal::kMaxLoops) internal::too_many_loops();
    counts_[num_loops_] = count > 0 ? count : 0;
    return region_.loops[num_loops_++];
  }
  static int64_t guided_size(int64_t left, int64_t threads) {
    return left / (2 * threads) > 0 ? left / (2 * threads) : 1;
  }
  static void wait_for(const std::atomic<int64_t>& done, int64_t count,
                       const internal::Region& region);

  internal::Region& region_;
  int thread_;
  int num_loops_ = 0;     // begun
  int num_finished_ = 0;  // known to be finished
  int64_t counts_[internal::kMaxLoops];
};

// Runs body(team) on min(max_threads, num_threads()) threads and returns when all are done. Throws
// std::bad_alloc where one of them has no memory for its scratch; what they write is unfinished
// then.
template <class Body>
void parallel(int max_threads, Body&& body) {
  using Fn = std::remove_reference_t<Body>;
  internal::run_region(
      max_threads,
      [](void* context, internal::Region& region, int thread) {
        Team team(region, thread);
        (*static_cast<Fn*>(context))(team);
        return team.num_loops();
      },
      const_cast<void*>(static_cast<const void*>(&body)));
}

template <class Body>
void parallel(Body&& body) {
  parallel(1 << 16, body);
}

// Threads a region gets by default: the physical cores of the affinity mask, less when a cgroup
// quota gives less CPU time than that.
int num_threads();
void set_num_threads(int count);  // count < 1: back to the default

}  // namespace regatta::cpu
