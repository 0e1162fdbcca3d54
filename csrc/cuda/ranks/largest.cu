// The token of the largest logit of each row, of which ranks on GPUs have a part each.
//
// Architectures: all. One block per row finds its rank's largest logit, the lowest token of equals;
// then one thread of it sends value and token to all ranks, 16 bytes, and takes theirs in the order
// of ranks, whose tokens ascend. Without memory that ranks share, NCCL carries them between two
// launches. Bound: one read of the row by one multiprocessor, and a hop.
#include <string>

#include "cuda/ranks/nccl.h"
#include "cuda/ranks/ranks.h"
#include "cuda/sampling/row.cuh"

namespace regatta::cuda {
namespace {

// A rank's largest logit of a row, and its token, as they are sent.
__device__ __forceinline__ uint4 own_largest(const LargestParams& p, uint64_t* scratch) {
  const float* const row = p.logits + static_cast<int64_t>(blockIdx.x) * p.width;
  const int count = static_cast<int>(p.count);
  uint64_t largest = 0;
#pragma unroll 8
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const uint64_t word = static_cast<uint64_t>(ordered(row[i])) << 32 | ~static_cast<uint32_t>(i);
    largest = max(largest, word);
  }
  largest = block_max(largest, scratch);
  const uint32_t token = static_cast<uint32_t>(p.begin) + ~static_cast<uint32_t>(largest);
  return sendable(make_uint4(__float_as_uint(value_of(largest)), token, 0, 0));
}

// The largest of all ranks', which come in their order.
struct Largest {
  float value = 0.f;
  int token = 0;

  __device__ __forceinline__ void add(int rank, uint4 piece) {
    const float other = __uint_as_float(piece.x);
    // What is not a number is taken, and stays: nothing is larger.
    if (rank > 0 && other <= value) return;
    if (rank > 0 && value != value) return;
    value = other, token = static_cast<int>(piece.y);
  }
  __device__ __forceinline__ int found() const { return value != value ? -1 : token; }
};

__global__ void __launch_bounds__(kThreads)
    largest_kernel(const __grid_constant__ Exchange exchange, const LargestParams p) {
  __shared__ uint64_t scratch[kWarps];
  pdl_trigger();
  pdl_wait();
  const Exchanging ranks(exchange);
  const uint4 own = own_largest(p, scratch);
  if (threadIdx.x == 0) ranks.push(blockIdx.x, own);
  ranks.count(gridDim.x);
  ranks.clear(blockIdx.x * kThreads + threadIdx.x, gridDim.x * kThreads);
  if (threadIdx.x != 0) return;
  Largest largest;
  ranks.wait_for_all(blockIdx.x, own, [&](int rank, uint4 piece) { largest.add(rank, piece); });
  p.token_ids[blockIdx.x] = largest.found();
}

// The two halves of it, where NCCL takes the parts [rows] from one rank to the other.
__global__ void __launch_bounds__(kThreads) own_largest_kernel(const LargestParams p, uint4* part) {
  __shared__ uint64_t scratch[kWarps];
  pdl_trigger();
  pdl_wait();
  const uint4 own = own_largest(p, scratch);
  if (threadIdx.x == 0) part[blockIdx.x] = own;
}

__global__ void __launch_bounds__(kThreads)
    join_kernel(const uint4* parts, int32_t* token_ids, int num_rows, int size) {
  pdl_trigger();
  pdl_wait();
  for (int row = threadIdx.x; row < num_rows; row += kThreads) {
    Largest largest;
    for (int rank = 0; rank < size; ++rank) largest.add(rank, parts[rank * num_rows + row]);
    token_ids[row] = largest.found();
  }
}

Status largest_by_nccl(const LargestParams& p, const NcclRoom& room, const Launch& launch_on) {
  const int64_t words = p.num_rows * 4;
  if (words * (room.size + 1) > room.num_words) {
    return Status::error("largest_over_ranks: " + std::to_string(p.num_rows) +
                         " rows are too many (allowed: " +
                         std::to_string(room.num_words / 4 / (room.size + 1)) + ")");
  }
  float* const part = room.words + words * room.size;
  REGATTA_RETURN_IF_ERROR(launch(own_largest_kernel, {launch_on, p.num_rows, kThreads},
                                 "largest_over_ranks", p, reinterpret_cast<uint4*>(part)));
  REGATTA_RETURN_IF_ERROR(nccl_gather(part, room.words, words, launch_on.stream));
  return launch(join_kernel, {launch_on, 1, kThreads}, "largest_over_ranks",
                reinterpret_cast<const uint4*>(room.words), p.token_ids,
                static_cast<int>(p.num_rows), room.size);
}

}  // namespace

Status largest_over_ranks(const LargestParams& p, const Launch& launch_on) {
  const Exchange* const exchange = current_exchange();
  const NcclRoom room = nccl_room();
  if (exchange == nullptr && room.words == nullptr) {
    return Status::error("largest_over_ranks: this process has no other ranks");
  }
  REGATTA_RETURN_IF_ERROR(check_vocab_size("largest_over_ranks", p.begin + p.count));
  if (p.num_rows == 0) return {};
  if (exchange == nullptr) return largest_by_nccl(p, room, launch_on);
  if (p.num_rows > int64_t{exchange->slot_pieces}) {
    return Status::error("largest_over_ranks: " + std::to_string(p.num_rows) +
                         " rows are too many (allowed: " + std::to_string(exchange->slot_pieces) +
                         ")");
  }
  return launch(largest_kernel, {launch_on, p.num_rows, kThreads}, "largest_over_ranks", *exchange,
                p);
}

}  // namespace regatta::cuda
