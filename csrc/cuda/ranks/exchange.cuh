// What ranks do within a kernel: push pieces of 16 bytes into each other's memory, and wait for
// those of all.
//
// Each rank has slots for the others' parts, in three turns, on its own GPU; they write there over
// NVLink, and its own part stays where it is. Words travel alone: there is no flag. A word that has
// not come is the sentinel, -0.0 as float32 and no NaN; what is sent has +0.0 in its place (also a
// pair of 16-bit values whose bits are those, (+0.0, -0.0)). So a NaN in the data is data, and ends
// the wait for it.
//
// Memory order
//  * A word is the flag of itself: 32-bit accesses are single-copy atomic, also as parts of a
//    16-byte one, and all are .relaxed.sys, which no cache between keeps. A reader that sees no
//    sentinel in a word has the word. Nothing else is read on the strength of it, so that no
//    acquire or release is wanted within an exchange.
//  * Slots of a turn are used again three exchanges later, and must hold sentinels by then. At
//    exchange k a rank clears what exchange k - 1 filled: it has read all of that, since its kernel
//    k - 1 ended, and the next writer of that turn is a peer's exchange k + 2. That kernel begins
//    when the peer's exchange k + 1 is over, for which it has seen this rank's push of k + 1, which
//    was issued behind the end of this rank's kernel k: kernels of a stream are ordered (pdl_wait()
//    waits for the whole grid ahead, and its writes are performed by then). Clears and pushes of
//    one address meet in one place, the L2 of the GPU that owns it, in that order.
//  * The turn, and how much the last exchange filled, are words of the GPU, so that graphs replay.
//    Every block reads them, then counts itself; the block that counts last writes the next ones.
//    __syncthreads() and the fence ahead of the count order the reads before that.
//
// No block waits for another of its own GPU in one shot. In two, each pushes all that it has before
// it waits, and a grid has at most one block a multiprocessor: all blocks of all ranks come to run.
//
// A wait looks at a word of the host's memory now and then, and gives up where that says that all
// ranks end; what it returns is then nothing.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#ifdef __CUDACC__
#include "cuda/common.cuh"
#endif

namespace regatta::cuda {

// In the memory of a rank's GPU.
struct ExchangeState {
  uint32_t turn;         // of the next exchange
  uint32_t num_used;     // pieces of each slot that the last exchange filled
  uint32_t num_arrived;  // blocks of the running kernel that have read the two
};

struct Exchange {
  static constexpr int kMaxRanks = 16, kTurns = 3;
  uint4* slots[kMaxRanks] = {};  // of each rank: [kTurns, size, slot_pieces]
  ExchangeState* state = nullptr;
  const uint32_t* ends = nullptr;  // of the host: not 0 where all waiting ends
  int rank = 0, size = 1;
  uint32_t slot_pieces = 0;
};

#ifdef __CUDACC__

constexpr uint32_t kNotYet = 0x80000000u;
constexpr uint32_t kPollsBetweenLooks = 1024;

__device__ __forceinline__ uint4 load_shared(const uint4* p) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_shared(uint4* p, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ uint32_t sendable(uint32_t word) { return word == kNotYet ? 0 : word; }

__device__ __forceinline__ uint4 sendable(uint4 v) {
  return make_uint4(sendable(v.x), sendable(v.y), sendable(v.z), sendable(v.w));
}

__device__ __forceinline__ bool has_come(uint4 v) {
  return v.x != kNotYet && v.y != kNotYet && v.z != kNotYet && v.w != kNotYet;
}

// One exchange, as a thread sees it. The block's threads call enter(), then count() together.
struct Exchanging {
  const Exchange& e;
  uint32_t turn, num_used;

  __device__ __forceinline__ explicit Exchanging(const Exchange& exchange)
      : e(exchange), turn(__ldcg(&e.state->turn)), num_used(__ldcg(&e.state->num_used)) {}

  // A rank's part in the memory of `owner`.
  __device__ __forceinline__ uint4* slot(int owner, uint32_t turn_of, int of) const {
    return e.slots[owner] + (static_cast<size_t>(turn_of) * e.size + of) * e.slot_pieces;
  }

  __device__ __forceinline__ void push_to(int owner, uint32_t at, uint4 v) const {
    store_shared(slot(owner, turn, e.rank) + at, v);
  }

  // To all others: a sendable piece.
  __device__ __forceinline__ void push(uint32_t at, uint4 v) const {
    for (int i = 1; i < e.size; ++i) {
      const int to = e.rank + i;
      push_to(to < e.size ? to : to - e.size, at, v);
    }
  }

  // Once in a kernel, by all threads of a block, behind their first pushes. used: pieces of each
  // slot that this exchange fills.
  __device__ __forceinline__ void count(uint32_t used) const {
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence();
    if (atomicAdd(&e.state->num_arrived, 1u) + 1 != gridDim.x) return;
    e.state->num_arrived = 0;
    e.state->num_used = used;
    e.state->turn = turn == Exchange::kTurns - 1 ? 0 : turn + 1;
  }

  // What the exchange ahead has filled becomes sentinels, by all threads of the grid.
  __device__ __forceinline__ void clear(uint32_t first, uint32_t step) const {
    const uint32_t ahead = turn == 0 ? Exchange::kTurns - 1 : turn - 1;
    for (int rank = 0; rank < e.size; ++rank) {
      if (rank == e.rank) continue;
      uint4* const of = slot(e.rank, ahead, rank);
      for (uint32_t i = first; i < num_used; i += step) {
        store_shared(of + i, make_uint4(kNotYet, kNotYet, kNotYet, kNotYet));
      }
    }
  }

  __device__ __forceinline__ bool ends(uint32_t* num_polls) const {
    if (++*num_polls % kPollsBetweenLooks != 0) return false;
    uint32_t word;
    asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(word) : "l"(e.ends) : "memory");
    return word != 0;
  }

  __device__ __forceinline__ uint4 wait_for(int rank, uint32_t at) const {
    const uint4* const from = slot(e.rank, turn, rank) + at;
    uint32_t num_polls = 0;
    uint4 v = load_shared(from);
    while (!has_come(v) && !ends(&num_polls)) v = load_shared(from);
    return v;
  }

  // Calls take(rank, piece) for the pieces of all ranks in their order; several are asked for at
  // once. own: this rank's, sendable.
  template <class Take>
  __device__ __forceinline__ void wait_for_all(uint32_t at, uint4 own, Take&& take) const {
    constexpr int kAtOnce = 4;
    const uint4* const from = slot(e.rank, turn, 0) + at;
    for (int first = 0; first < e.size; first += kAtOnce) {
      uint4 v[kAtOnce];
      uint32_t num_polls = 0;
      bool all;
      do {
        all = true;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          if (first + j < e.size) {
            const bool is_own = first + j == e.rank;
            v[j] =
                is_own ? own : load_shared(from + static_cast<size_t>(first + j) * e.slot_pieces);
            all = all && has_come(v[j]);
          }
        }
      } while (!all && !ends(&num_polls));
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (first + j < e.size) take(first + j, v[j]);
      }
    }
  }
};

// The sum of pieces in the order in which they are added, in float32.
template <class T>
struct PieceSum {
  static constexpr int kSize = Vec16<T>::kSize;
  float values[kSize];

  __device__ __forceinline__ void add(int rank, uint4 piece) {
    const auto v = bit_cast<Vec16<T>>(piece);
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] = rank == 0 ? v.get(i) : values[i] + v.get(i);
  }
  // Rounded once.
  __device__ __forceinline__ uint4 piece() const {
    Vec16<T> v;
#pragma unroll
    for (int i = 0; i < kSize; ++i) v.set(i, values[i]);
    return sendable(bit_cast<uint4>(v));
  }
};

// The sum over ranks of pieces that all of them have pushed. own: this rank's, sendable.
template <class T>
__device__ __forceinline__ uint4 sum_of(const Exchanging& ranks, uint32_t at, uint4 own) {
  PieceSum<T> sum = {};
  ranks.wait_for_all(at, own, [&](int rank, uint4 piece) { sum.add(rank, piece); });
  return sum.piece();
}

#endif

}  // namespace regatta::cuda
