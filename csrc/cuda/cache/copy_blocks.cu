// Copies of cache blocks, over the tensors of all layers in one launch where their addresses fit.
//
// Architectures: all. Addresses, sizes and block numbers travel as the kernel's parameters (4 KB at
// most), so nothing is uploaded. grid: (pieces of a block, copies, tensors), 16 bytes per access.
// Bound: memory.
#include <algorithm>

#include "cuda/common.cuh"
#include "regatta/cuda_ops.h"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPieceBytes = kThreads * 16 * 4;
constexpr int kMaxTensors = 128, kMaxCopies = 192;

struct Piece {
  char* caches[kMaxTensors];
  int64_t block_bytes[kMaxTensors];
  int32_t copies[kMaxCopies][2];
};
static_assert(sizeof(Piece) <= 4096, "kernel parameters");

__global__ void __launch_bounds__(kThreads) copy_blocks_kernel(const __grid_constant__ Piece p) {
  pdl_trigger();
  pdl_wait();
  const int64_t bytes = p.block_bytes[blockIdx.z];
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kPieceBytes;
  const int64_t end = min(begin + kPieceBytes, bytes);
  const char* from = p.caches[blockIdx.z] + p.copies[blockIdx.y][0] * bytes;
  char* to = p.caches[blockIdx.z] + p.copies[blockIdx.y][1] * bytes;
  for (int64_t at = begin + threadIdx.x * 16; at < end; at += kThreads * 16) {
    *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(from + at);
  }
}

}  // namespace

Status copy_blocks(const CopyBlocksParams& params, const Launch& launch_on) {
  for (int64_t t = 0; t < params.num_caches; t += kMaxTensors) {
    Piece piece;
    const int64_t num_tensors = std::min<int64_t>(kMaxTensors, params.num_caches - t);
    int64_t most = 0;
    for (int64_t i = 0; i < num_tensors; ++i) {
      piece.caches[i] = static_cast<char*>(params.caches[t + i]);
      piece.block_bytes[i] = params.block_bytes[t + i];
      most = std::max(most, piece.block_bytes[i]);
    }
    for (int64_t c = 0; c < params.num_copies; c += kMaxCopies) {
      const int64_t num_copies = std::min<int64_t>(kMaxCopies, params.num_copies - c);
      for (int64_t i = 0; i < num_copies; ++i) {
        piece.copies[i][0] = params.copies[2 * (c + i)];
        piece.copies[i][1] = params.copies[2 * (c + i) + 1];
      }
      REGATTA_RETURN_IF_ERROR(launch(
          copy_blocks_kernel,
          {launch_on, grid_of(ceil_div(most, kPieceBytes), num_copies, num_tensors), kThreads},
          "copy_blocks", piece));
    }
  }
  return {};
}

}  // namespace regatta::cuda
