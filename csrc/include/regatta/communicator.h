// Sums and joins of what the ranks of one model have computed.
//
// All ranks make the same calls in the same order, with the same sizes.
#pragma once

#include <atomic>
#include <cstdint>

#include "regatta/types.h"

namespace regatta {

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // data [count] of a float type becomes the sum of all ranks' data: added in the order of ranks in
  // float32 and rounded once, so that every rank has the same bits.
  virtual Status sum(void* data, int64_t count, DType dtype) = 0;
  // all [size, bytes]: the parts [bytes] of all ranks, in their order.
  virtual Status gather(const void* part, void* all, int64_t bytes) = 0;
  // Not 0: all waiting ends. The first word of a page of memory that the ranks share.
  virtual const std::atomic<uint32_t>& ends() const = 0;
};

// This process's; null where a model has one rank. Used by the thread that runs steps, alone.
Communicator* current_communicator();

struct SumPartsParams {
  static constexpr int kMaxParts = 64;
  const void* parts[kMaxParts] = {};  // [count] each
  int num_parts = 0;
  void* out = nullptr;  // [count]; no part
  int64_t count = 0;
  DType dtype = DType::kFloat32;
};

namespace cpu {
// out = parts[0] + parts[1] + ..., from the left in float32, rounded once.
Status sum_parts(const SumPartsParams& params);

// One memory file of all ranks: this, and behind it kNumTurns * size slots. A process that has no
// rank reads and writes it too (predict/ranks/control.py).
struct SharedWords {
  static constexpr int kMaxRanks = SumPartsParams::kMaxParts;
  static constexpr int64_t kNumTurns = 2, kSlotBytes = 1 << 18;
  struct alignas(64) OfRank {
    std::atomic<uint32_t> num_arrived{0};  // exchanges that the rank has brought its part to
    std::atomic<uint32_t> num_waiting{0};  // ranks that sleep until that changes
  };
  struct alignas(64) OfAll {
    std::atomic<uint32_t> ends{0};  // not 0: all waiting ends with an error
  } all;
  OfRank ranks[kMaxRanks];
};
}  // namespace cpu

}  // namespace regatta
