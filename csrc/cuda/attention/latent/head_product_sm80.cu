// Products of few tokens by a matrix of each head, and what is written beside them: see
// HeadProductParams and latent_write_and_queries().
//
// Architectures: sm_80 and later; bf16 and fp16.
// Algorithm: blocks are heads by slices of the outputs by tiles of 64 tokens. A warp asks for 16
// outputs by 128 inputs of the matrix ahead of pdl_wait(), and multiplies tokens' rows of shared
// memory, m16n8k16: a lane takes 16 bytes in place of four pairs, of both operands alike. Inputs
// beyond 128 are other warps', whose sums are added in order. Blocks for each token's latent and
// rotated queries come ahead of those of products, which do not read them.
// Source: own. Bound: the weights' bytes; for few tokens, one trip to L2 behind pdl_wait().
#include <algorithm>
#include <type_traits>

#include "cuda/attention/attention.cuh"
#include "cuda/attention/latent/latent.h"
#include "cuda/attention/latent/latent_write.cuh"
#include "cuda/common.cuh"

namespace regatta::cuda {
namespace {

constexpr int kTile = 64;            // tokens of a block
constexpr int kRows = 16;            // of them at a time
constexpr int kChunk = 128;          // inputs of a warp
constexpr int kSteps = kChunk / 32;  // in which a lane has 8 of 32 inputs
constexpr int kOuts = 16;            // of a warp
constexpr int kMaxChunks = 4;
// A row of tokens begins 64 bytes beside the one ahead of it in the banks: two rows of four lanes'
// 16 bytes are read at once.
constexpr int kPad = 64;
constexpr int kSumPad = 8;  // floats: rows of two outputs of four lanes, alike
// Warps of a block. Many give blocks more outputs, so that tokens are copied less often: where
// heads alone have work for all multiprocessors.
constexpr int kFewWarps = 4, kManyWarps = 16;

constexpr int row_bytes(int chunks) { return chunks * kChunk * 2 + kPad; }
constexpr int outs_of_block(int chunks, int warps) { return warps / chunks * kOuts; }
constexpr int sum_bytes(int chunks, int warps) {  // of a turn
  return chunks == 1 ? 0 : chunks * kRows * (outs_of_block(chunks, warps) + kSumPad) * 4;
}

template <class T>
struct ProductArgs {
  const T* x;
  const T* weight;
  T* out;
  int64_t x_token_stride, x_head_stride, out_token_stride, out_head_stride;
  int num_tokens, in, outs;
  int slices, tiles;  // of a head's outputs; of tokens
};

// A block's part of a product.
template <class T, int kChunks, int kWarps>
class HeadProduct {
 public:
  __device__ __forceinline__ HeadProduct(const ProductArgs<T>& args, int block, uint8_t* memory)
      : a(args),
        sums_of_chunks(reinterpret_cast<float*>(memory)),
        shared(memory + 2 * sum_bytes(kChunks, kWarps)),
        lane(threadIdx.x % kWarp),
        chunk(threadIdx.x / kWarp % kChunks),
        block_out(threadIdx.x / kWarp / kChunks * kOuts),
        first_token(block % a.tiles * kTile),
        first_out(block / a.tiles % a.slices * kBlockOuts),
        head(block / a.tiles / a.slices) {}

  // Of the matrix; ahead of pdl_wait().
  __device__ __forceinline__ void ask_for_weights() {
    const uint64_t policy = policy_evict_first();
    const int input = chunk * kChunk + lane % 4 * 8;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int row = first_out + block_out + n * 8 + lane / 4;
      const T* const from = a.weight + (static_cast<int64_t>(head) * a.outs + row) * a.in + input;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        weights[n][s] = make_uint4(0, 0, 0, 0);
        if (row < a.outs && input + s * 32 < a.in) {
          weights[n][s] = bit_cast<uint4>(load16_once(from + s * 32, policy));
        }
      }
    }
  }

  __device__ __forceinline__ void multiply() {
    const int tokens = min(a.num_tokens - first_token, kTile);
    const int turns = (tokens + kRows - 1) / kRows;
    copy_tokens(tokens, turns * kRows);
    cp_async_wait<0>();
    __syncthreads();
    for (int turn = 0; turn < turns; ++turn) {
      float sums[2][4] = {};
      multiply_rows(turn, sums);
      if constexpr (kChunks == 1) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int out = block_out + n * 8 + lane % 4 * 2, row = turn * kRows + lane / 4;
          store(row, out, sums[n][0], sums[n][1]);
          store(row + 8, out, sums[n][2], sums[n][3]);
        }
      } else {
        add_chunks(turn, sums);
      }
    }
  }

 private:
  static constexpr int kBlockOuts = outs_of_block(kChunks, kWarps);
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kRowBytes = row_bytes(kChunks);

  // Zeros stand past the last token and the last input.
  __device__ __forceinline__ void copy_tokens(int tokens, int rows) {
    constexpr int kUnits = kChunks * kChunk / 8;
    const T* const from = a.x + first_token * a.x_token_stride + head * a.x_head_stride;
    for (int i = threadIdx.x; i < rows * kUnits; i += kThreads) {
      const int row = i / kUnits, unit = i % kUnits;
      const bool inside = row < tokens && unit * 8 < a.in;
      cp_async16(shared + row * kRowBytes + unit * 16,
                 inside ? from + row * a.x_token_stride + unit * 8 : from, inside ? 16 : 0);
    }
    cp_async_commit();
  }

  __device__ __forceinline__ void multiply_rows(int turn, float (&sums)[2][4]) {
    const uint8_t* const from =
        shared + (turn * kRows + lane / 4) * kRowBytes + chunk * kChunk * 2 + lane % 4 * 16;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const uint4 low = *reinterpret_cast<const uint4*>(from + s * 64);
      const uint4 high = *reinterpret_cast<const uint4*>(from + 8 * kRowBytes + s * 64);
      const uint32_t first[4] = {low.x, high.x, low.y, high.y};
      const uint32_t second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
      for (int n = 0; n < 2; ++n) mma_m16n8k16<T>(sums[n], first, weights[n][s].x, weights[n][s].y);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        mma_m16n8k16<T>(sums[n], second, weights[n][s].z, weights[n][s].w);
      }
    }
  }

  // Turns take two places by turns, so that one is read while the other is written.
  __device__ __forceinline__ void add_chunks(int turn, const float (&sums)[2][4]) {
    constexpr int kSumRow = kBlockOuts + kSumPad, kSumChunk = kRows * kSumRow;
    float* const place = sums_of_chunks + turn % 2 * (kChunks * kSumChunk);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float* const to =
          place + chunk * kSumChunk + lane / 4 * kSumRow + block_out + n * 8 + lane % 4 * 2;
      *reinterpret_cast<float2*>(to) = make_float2(sums[n][0], sums[n][1]);
      *reinterpret_cast<float2*>(to + 8 * kSumRow) = make_float2(sums[n][2], sums[n][3]);
    }
    __syncthreads();
    constexpr int kPairs = kBlockOuts / 2;
    static_assert(kPairs * kRows == kThreads);
    const int row = threadIdx.x / kPairs, out = threadIdx.x % kPairs * 2;
    float2 y = make_float2(0.f, 0.f);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const float2 x =
          *reinterpret_cast<const float2*>(place + c * kSumChunk + row * kSumRow + out);
      y.x += x.x, y.y += x.y;
    }
    store(turn * kRows + row, out, y.x, y.y);
  }

  // Outputs `out` of the block's and the next one, of a token of its tile.
  __device__ __forceinline__ void store(int row, int out, float x, float y) {
    const int token = first_token + row;
    if (token >= a.num_tokens || first_out + out >= a.outs) return;
    T* const to = a.out + token * a.out_token_stride + head * a.out_head_stride + first_out + out;
    *reinterpret_cast<uint32_t*>(to) = pack2<T>(x, y);
  }

  const ProductArgs<T>& a;
  float* const sums_of_chunks;  // of two turns
  uint8_t* const shared;        // tokens' rows
  const int lane, chunk, block_out, first_token, first_out, head;
  uint4 weights[2][kSteps];
};

template <class T, int kWarps>
__global__ void __launch_bounds__(kWarps* kWarp, kWarps == kManyWarps ? 2 : 4)
    head_product_kernel(const ProductArgs<T> a) {
  extern __shared__ uint4 memory[];
  HeadProduct<T, kMaxChunks, kWarps> product(a, blockIdx.x, reinterpret_cast<uint8_t*>(memory));
  product.ask_for_weights();
  pdl_trigger();  // the launch behind asks for weights, too
  pdl_wait();
  product.multiply();
}

// Blocks of tokens first: theirs are the longest chains of loads.
template <class T, int kWarps>
__global__ void __launch_bounds__(kWarps* kWarp, kWarps == kManyWarps ? 2 : 4)
    latent_write_and_queries_kernel(const LatentWriteArgs<T> write, const ProductArgs<T> a) {
  constexpr int kUnit = 16 / static_cast<int>(sizeof(T));
  extern __shared__ uint4 memory[];
  pdl_trigger();
  const int token = blockIdx.x, thread = static_cast<int>(threadIdx.x) - kWarp;
  if (token >= write.num_tokens) {
    HeadProduct<T, 1, kWarps> product(a, token - write.num_tokens,
                                      reinterpret_cast<uint8_t*>(memory));
    product.ask_for_weights();
    pdl_wait();
    product.multiply();
  } else if (thread < 0) {
    fetch_norm_weight(write);
    pdl_wait();
    write_latent<T, kUnit>(write, token);
  } else {
    pdl_wait();
    rotate_queries<T, kUnit>(write, token, thread, kWarps * kWarp - kWarp);
  }
}

int64_t shared_bytes(const HeadProductParams& p, int chunks, int warps) {
  const int64_t rows = std::min<int64_t>(round_up(p.num_tokens, kRows), kTile);
  return rows * row_bytes(chunks) + 2 * sum_bytes(chunks, warps);
}

// Few where a block for each few outputs keeps all multiprocessors busy, but not more than twice;
// and where many have more shared memory than there is (sm_86, sm_89).
int warps_of(const HeadProductParams& p, int chunks) {
  const int64_t blocks = p.num_heads * ceil_div(p.out_features, outs_of_block(chunks, kFewWarps));
  if (blocks <= 2 * num_multiprocessors()) return kFewWarps;
  return shared_bytes(p, chunks, kManyWarps) <= max_shared_bytes() ? kManyWarps : kFewWarps;
}

template <class T>
ProductArgs<T> args_of(const HeadProductParams& p, int chunks, int warps) {
  ProductArgs<T> a = {};
  a.x = static_cast<const T*>(p.x);
  a.weight = static_cast<const T*>(p.weight);
  a.out = static_cast<T*>(p.out);
  a.x_token_stride = p.x_token_stride;
  a.x_head_stride = p.x_head_stride;
  a.out_token_stride = p.out_token_stride;
  a.out_head_stride = p.out_head_stride;
  a.num_tokens = static_cast<int>(p.num_tokens);
  a.in = static_cast<int>(p.in_features);
  a.outs = static_cast<int>(p.out_features);
  a.slices = static_cast<int>(ceil_div(p.out_features, outs_of_block(chunks, warps)));
  a.tiles = static_cast<int>(ceil_div(p.num_tokens, kTile));
  return a;
}

LaunchConfig config_of(const HeadProductParams& p, int chunks, int warps, const Launch& launch_on) {
  const int64_t slices = ceil_div(p.out_features, outs_of_block(chunks, warps));
  return {launch_on, p.num_heads * slices * ceil_div(p.num_tokens, kTile), warps * kWarp,
          shared_bytes(p, chunks, warps)};
}

}  // namespace

bool takes_head_product(const HeadProductParams& p) {
  const auto are_units = [](int64_t a, int64_t b, int64_t c) {
    return a % 8 == 0 && b % 8 == 0 && c % 8 == 0;
  };
  const auto is_aligned = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
  return compute_capability() >= 80 && p.dtype != DType::kFloat32 &&
         p.in_features <= kMaxChunks * kChunk &&
         are_units(p.in_features, p.x_token_stride, p.x_head_stride) && is_aligned(p.x) &&
         is_aligned(p.weight) && p.out_features % 2 == 0 && p.out_token_stride % 2 == 0 &&
         p.out_head_stride % 2 == 0 && is_aligned(p.out);
}

bool takes_queries(const LatentWriteParams& write, const HeadProductParams& product) {
  return takes_head_product(product) && product.in_features <= kChunk && lies_in_units(write);
}

Status head_product(const HeadProductParams& p, const Launch& launch_on) {
  if (p.num_tokens == 0) return {};
  return dispatch_half(p.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const int warps = warps_of(p, kMaxChunks);
    auto* const kernel = warps == kManyWarps ? head_product_kernel<T, kManyWarps>
                                             : head_product_kernel<T, kFewWarps>;
    return launch(kernel, config_of(p, kMaxChunks, warps, launch_on), "head_product",
                  args_of<T>(p, kMaxChunks, warps));
  });
}

Status latent_write_and_queries(const LatentWriteParams& write, const HeadProductParams& p,
                                const Launch& launch_on) {
  if (p.num_tokens == 0) return {};
  return dispatch_half(p.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const int warps = warps_of(p, 1);
    LaunchConfig config = config_of(p, 1, warps, launch_on);
    config.grid.x += static_cast<unsigned>(p.num_tokens);
    auto* const kernel = warps == kManyWarps ? latent_write_and_queries_kernel<T, kManyWarps>
                                             : latent_write_and_queries_kernel<T, kFewWarps>;
    return launch(kernel, config, "latent_write_and_queries", LatentWriteArgs<T>(write),
                  args_of<T>(p, 1, warps));
  });
}

}  // namespace regatta::cuda
