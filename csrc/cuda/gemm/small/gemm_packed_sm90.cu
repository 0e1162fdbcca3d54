// y = epilogue(x w^T) with weights of 8 or 4 bits, activations of 16, or of 4 bits, activations of
// 8: made into operands on the way to the tensor cores.
//
// Input: x [M, K] bf16 or fp16, or int8; weights as pack_weight() leaves them (packed_weight.cuh).
// Architectures: sm_90a. Rows in groups: gemm_packed_groups_sm90.cuh.
// Algorithm: as gemm_sm90.cu (weights on the M side of wgmma, a ring filled ahead of pdl_wait()),
// except that
//   1. a warpgroup turns codes into the left operand in registers, half a unit at a time, while the
//      tensor cores work on the half ahead; scales of groups multiply the operands, or, of up to 32
//      tokens, sums of a group, which are fewer. Of int8 x a group's integer sums become floats;
//   2. a gated product pairs slabs of gates with their ups: the packing knows nothing of gates;
//   3. k is split so that each multiprocessor has one block: clusters would leave 12 of 132 idle.
//      The blocks of a tile exchange their sums through L2, and each finishes a share.
// Source: own; biasing codes into a mantissa is what FasterTransformer and Marlin do. QServe and
// QQQ multiply 4-bit codes as int8, but scale groups in integers or multiply codes by 16.
//
// Bound: memory. Beside it: converting 64 x 64 codes takes about 90 cycles (shifts and masks fill
// the integer pipe), multiplying them with 32 tokens 64.
#include "gemm_packed_sm90.cuh"

namespace regatta::cuda {
namespace {

constexpr int kOrder = 8;  // tiles of tokens that are worked on together

struct KernelParams {
  Epilogue epilogue;
  int num_rows, num_units;  // units along k
  int row_blocks, token_blocks;
  int num_wide, narrow;  // row blocks from num_wide on have but so many slabs (gated: pairs)
  int num_blocks;        // that work
  int stages, split, trigger;
};

template <class F, int kTokens>
struct Shape : Stage<F, kTokens> {
  using Base = Stage<F, kTokens>;
  static constexpr int kSumStride = kSlabs * kUnitRows + 4;  // floats per token; no conflicts
  static constexpr int kSumBytes = kTokens * kSumStride * 4;
  static constexpr int kPartBytes = kTokens * kSlabs * kUnitRows * 4;
  static constexpr int kBlocks =  // per multiprocessor
      Base::kAccumulators > (F::kTokenSize == 1 ? 64 : 32) ? 1 : 2;
  // One warp more copies, another makes row scales.
  static constexpr int kThreads = kConsumers + (Base::kGives ? kGroup : 2 * kWarp);
  static int shared_bytes(int stages) {
    return 1024 + kHeadBytes + std::max(stages * Base::kStageBytes, kSumBytes);
  }
};

constexpr int kFillNanoseconds = 1500;  // until the next launch has been placed

// Partial sums on their way from the block that made them to the one that finishes them. Zero but
// while they are: who takes a part puts zeros back, and a sum of zero travels as -0. Products are
// queued one after the other, so that one piece serves all.
constexpr int kPartsBytes = 13 << 20;
__device__ float4 parts[kPartsBytes / 16];

__device__ __forceinline__ void send_part(float4* to, const float4& v) {
  const auto sent = [](float x) { return x == 0.f ? -0.f : x; };
  __stcg(to, make_float4(sent(v.x), sent(v.y), sent(v.z), sent(v.w)));
}

__device__ __forceinline__ float4 load_part(const float4* from) {
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

__device__ __forceinline__ bool has_come(const float4& v) {
  return __float_as_uint(v.x) != 0 && __float_as_uint(v.y) != 0 && __float_as_uint(v.z) != 0 &&
         __float_as_uint(v.w) != 0;
}

// *own, in shared memory, becomes the sum over the blocks of a tile, in the order of ranks. from:
// where block 0 puts its part, the next one's `stride` on.
__device__ __forceinline__ void take_parts(float4* own, float4* from, int64_t stride, int rank,
                                           int split) {
  constexpr int kAtOnce = 4;
  float sum[4] = {};
#pragma unroll 1
  for (int r0 = 0; r0 < split; r0 += kAtOnce, from += kAtOnce * stride) {
    float4 v[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      v[i] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (r0 + i == rank) v[i] = *own;
    }
    bool all;
    int tries = 0;
    do {
      all = true;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (r0 + i < split && r0 + i != rank && !has_come(v[i]))
          v[i] = load_part(from + i * stride);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (r0 + i < split && r0 + i != rank) all = all && has_come(v[i]);
      }
      if (++tries == 1 << 22) asm volatile("trap;");  // seconds: an error, not a hang
    } while (!all);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (r0 + i < split && r0 + i != rank) {
        __stcg(from + i * stride, make_float4(0.f, 0.f, 0.f, 0.f));
      }
      sum[0] += v[i].x, sum[1] += v[i].y, sum[2] += v[i].z, sum[3] += v[i].w;
    }
  }
  *own = make_float4(sum[0], sum[1], sum[2], sum[3]);
}

// What four adjacent outputs of a token take beside their sums: asked for ahead of them.
template <class T, bool kGated>
struct FourOutputs {
  static constexpr int kCount = kGated ? 8 : 4;  // gates, then ups
  float scale[kCount];
  uint2 residual, norm;  // of T
  int inside;            // of them

  // Nothing is inside of a token that is not there.
  __device__ __forceinline__ void request(const Epilogue& p, int64_t t, int n, int width,
                                          bool there) {
    inside = there ? min(4, width - n) : 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      scale[i] = 1.f;
      if (p.weight_scale != nullptr && i % 4 < inside) {
        scale[i] = __ldg(p.weight_scale + (i < 4 ? n : width + n - 4) + i);
      }
    }
    if (kGated) return;
    residual = norm = make_uint2(0, 0);
    if (p.residual != nullptr) {
      residual = load_four(static_cast<const T*>(p.residual) + t * width + n, inside, p.vector_out);
    }
    if (p.scaled_out != nullptr) {
      norm = load_four(static_cast<const T*>(p.next_norm_weight) + n, inside, p.vector_out);
    }
  }

  // Returns the sum of squares of what it wrote from element `at` on. sum, up: scaled.
  __device__ __forceinline__ float write(const Epilogue& p, float (&y)[4], const float (&up)[4],
                                         int n, int width, int64_t at) const {
    const T* bias = static_cast<const T*>(p.bias);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool has_bias = bias != nullptr && i < inside;
      y[i] = fmaf(y[i], scale[i], has_bias ? Traits<T>::to_float(bias[n + i]) : 0.f);
      if constexpr (kGated) {
        const float factor =
            fmaf(up[i], scale[4 + i], has_bias ? Traits<T>::to_float(bias[width + n + i]) : 0.f);
        y[i] = __fdividef(y[i], 1.f + __expf(-y[i])) * factor;
      } else {
        y[i] += value_of<T>(residual, i);
      }
    }
    float squares = 0.f;
    if (p.float_out) {
      float* out = static_cast<float*>(p.out) + at;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < inside) out[i] = y[i], squares = fmaf(y[i], y[i], squares);
      }
      return squares;
    }
    write_four(static_cast<T*>(p.out) + at, y, inside, p.vector_out);
    if constexpr (!kGated) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        y[i] = Traits<T>::to_float(Traits<T>::from_float(y[i]));
        if (i < inside) squares = fmaf(y[i], y[i], squares);
        y[i] *= value_of<T>(norm, i);
      }
      if (p.scaled_out != nullptr) {
        write_four(static_cast<T*>(p.scaled_out) + at, y, inside, p.vector_out);
      }
    }
    return squares;
  }
};

template <class T, class F, int kTokens, bool kGated>
__global__ void __launch_bounds__(Shape<F, kTokens>::kThreads, Shape<F, kTokens>::kBlocks)
    gemm_packed_kernel(const __grid_constant__ CUtensorMap token_map,
                       const __grid_constant__ CUtensorMap wide_map,
                       const __grid_constant__ CUtensorMap narrow_map, const KernelParams p) {
#ifdef REGATTA_SM90A
  using S = Shape<F, kTokens>;
  extern __shared__ char shared[];
  // Not through an integer: the compiler must see that this is shared memory.
  char* base = shared + (-shared_address(shared) & 1023);
  uint64_t* full = reinterpret_cast<uint64_t*>(base);
  uint64_t* empty = full + kMaxStages;
  float* row_scale = reinterpret_cast<float*>(empty + kMaxStages);  // [kTokens]
  char* stages = base + kHeadBytes;
  float* sums = reinterpret_cast<float*>(stages);  // [kTokens, kSumStride], after the loop

  // The shuffle tells the compiler that a warp's threads agree.
  const int warp = __shfl_sync(~0u, threadIdx.x / kWarp, 0);
  const int lane = threadIdx.x % kWarp;
  const int rank = blockIdx.x % p.split;
  // Blocks of neighbouring rows and tokens run at the same time and share what they read in L2.
  const int index = blockIdx.x / p.split;
  const int first = index / (kOrder * p.row_blocks) * kOrder;
  const int order = min(kOrder, p.token_blocks - first);
  const int within = index - first * p.row_blocks;
  const int token0 = (first + within % order) * kTokens, row_block = within / order;
  constexpr int kOutSlabs = kGated ? kSlabs / 2 : kSlabs;
  const int num_narrow = max(row_block - p.num_wide, 0);  // in front of this one
  const int slab0 = (row_block - num_narrow) * kOutSlabs + num_narrow * p.narrow;
  const int items = row_block < p.num_wide ? kOutSlabs : p.narrow;  // slabs, or pairs of them
  const int step0 = static_cast<int>(static_cast<int64_t>(p.num_units) * rank / p.split);
  const int num_steps =
      static_cast<int>(static_cast<int64_t>(p.num_units) * (rank + 1) / p.split) - step0;

  if (p.trigger < 0) pdl_trigger();
  if (static_cast<int>(blockIdx.x) >= p.num_blocks) {
    // A multiprocessor without a block of this launch would get two of the next.
    pdl_wait();
    __nanosleep(kFillNanoseconds);
    return;
  }
  const int trigger_step = num_steps - 1 - p.trigger;
  if (threadIdx.x == kConsumers) {
    tensor_map_prefetch(&token_map);
    tensor_map_prefetch(row_block < p.num_wide ? &wide_map : &narrow_map);
    for (int s = 0; s < p.stages; ++s) {
      barrier_init(&full[s], 1);
      barrier_init(&empty[s], kSlabs);
    }
    barrier_init_fence();
  }
  __syncthreads();

  if (warp >= kSlabs) {
    if constexpr (S::kGives) registers_give<40>();
    if (warp == kSlabs) {
      const uint64_t once = p.token_blocks > 1 ? policy_evict_last() : policy_evict_first();
      const uint64_t keep = policy_evict_last();
      const CUtensorMap* weight_map = row_block < p.num_wide ? &wide_map : &narrow_map;
      const uint32_t stage_load = S::kWeights + items * (kGated ? 2 : 1) * F::kUnitBytes;
      const auto load_weight = [&](int step, int s) {
        if (lane > 0) return;
        barrier_arrive_expect(&full[s], stage_load);
        tensor_load_4d(stages + s * S::kStageBytes + S::kWeights, weight_map, 0, (step0 + step) * 2,
                       slab0, 0, &full[s], once);
      };
      const auto load_tokens = [&](int step, int s) {
        if (lane > 0) return;
#pragma unroll
        for (int box = 0; box < S::kBoxes; ++box) {
          tensor_load_2d(stages + s * S::kStageBytes + box * S::kTokenBytes, &token_map,
                         (step0 + step) * kUnitColumns + box * S::kBoxColumns, token0, &full[s],
                         keep);
        }
      };
      const int ahead = min(p.stages, num_steps);
#pragma unroll 1
      for (int i = 0; i < ahead; ++i) load_weight(i, i);
      if (p.trigger >= 0 && trigger_step < ahead) pdl_trigger();
      pdl_wait();
#pragma unroll 1
      for (int i = 0; i < ahead; ++i) load_tokens(i, i);
      int s = 0;
      uint32_t phase = 0;
#pragma unroll 1
      for (int i = p.stages; i < num_steps; ++i) {
        barrier_wait(&empty[s], phase);
        load_weight(i, s);
        load_tokens(i, s);
        if (p.trigger >= 0 && i == trigger_step) pdl_trigger();
        if (++s == p.stages) s = 0, phase ^= 1;
      }
    } else if (warp == kSlabs + 1) {
      pdl_wait();
      if constexpr (kTokens <= 32) {
        warp_row_scales(p.epilogue, token0, min(kTokens, p.num_rows - token0), row_scale);
      } else {
        for (int t = lane; t < kTokens && token0 + t < p.num_rows; t += kWarp) {
          row_scale[t] = row_scale_of(p.epilogue, token0 + t);
        }
      }
      __syncwarp();
      named_barrier_arrive(2, kConsumers + kWarp);
    }
    return;
  }

  if constexpr (S::kGives) registers_take<232>();
  const int slab = warp % 4 * 2 + warp / 4;  // of the block's
  int has_slab = slab % kOutSlabs < items;   // else its sums are nobody's
  asm volatile("" : "+r"(has_slab));         // or the compiler finds it out at each step
  // Not at the barrier: warps that try it take from the block of the launch ahead.
  pdl_wait();
  barrier_wait(&full[0], 0);
  Ring ring = {full, empty, p.stages};
  float acc[kTokens / 2];
  multiply_slab<T, F, kTokens>(
      acc, wgmma_descriptor(stages),
      stages + S::kWeights + (slab % kOutSlabs + slab / kOutSlabs * items) * F::kUnitBytes,
      has_slab, num_steps, ring);

  // A block finishes every split-th token, a warp at a time, four outputs by a lane; gated, two
  // tokens.
  const Epilogue& epilogue = p.epilogue;
  const int out_width = kGated ? epilogue.out_features / 2 : epilogue.out_features;
  const int rows = min(kTokens, p.num_rows - token0);
  const int count = (rows - rank + p.split - 1) / p.split;  // that this block finishes
  constexpr int kAtOnce = kGated ? 2 : 1;
  const int quad = kGated ? lane % 16 : lane, n = slab0 * kUnitRows + quad * 4;
  const auto token_of = [&](int i) { return rank + i * p.split; };
  FourOutputs<T, kGated> outputs;
  const auto request = [&](int i) {
    if (kGated) i += lane / 16;
    const bool there = i < count && quad < 4 * items;
    outputs.request(epilogue, token0 + token_of(i), n, out_width, there);
  };
  // Every warp has read the stages; they now hold the sums, token by token.
  named_barrier_sync(1, kConsumers);
  float* own = sums + lane % 4 * 2 * S::kSumStride + slab * kUnitRows + lane / 4;
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
    store_sums<S::kSumStride>(own + j * 8 * S::kSumStride, acc + 4 * j);
  }
  request(warp * kAtOnce);
  named_barrier_sync(2, kConsumers + kWarp);

  const auto sum_of = [&](int t) {
    return reinterpret_cast<float4*>(sums + t * S::kSumStride) + lane;
  };
  constexpr int64_t kPart = int64_t{kTokens} * kWarp;  // from block to block
  float4* first_part = parts + index * p.split * kPart + lane;
  for (int t = warp; p.split > 1 && t < rows; t += kSlabs) {
    if (t % p.split == rank) continue;
    const float4 sum = *sum_of(t);
    send_part(first_part + rank * kPart + t * kWarp, sum);
  }
#pragma unroll 1
  for (int i = warp * kAtOnce; i < count; i += kSlabs * kAtOnce) {
#pragma unroll
    for (int e = 0; e < kAtOnce; ++e) {
      const int t = token_of(i + e);
      if (p.split > 1 && i + e < count) {
        take_parts(sum_of(t), first_part + t * kWarp, kPart, rank, p.split);
      }
    }
    __syncwarp();
    const int t = token_of(i + (kGated ? lane / 16 : 0));
    const float* from = sums + min(t, kTokens - 1) * S::kSumStride + quad * 4;
    float sum[4], up[4];
    load_four(sum, from);
    load_four(up, from + (kGated ? kOutSlabs * kUnitRows : 0));
    const float scale = row_scale[min(t, kTokens - 1)];
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[e] *= scale, up[e] *= scale;
    if (i >= kSlabs * kAtOnce) request(i);
    float squares = outputs.write(epilogue, sum, up, n, out_width,
                                  static_cast<int64_t>(token0 + t) * out_width + n);
    if (kGated || epilogue.sumsq_out == nullptr) continue;
    const int columns = epilogue.sumsq_columns;  // 16 or 64
    squares += __shfl_xor_sync(~0u, squares, 1);
    squares += __shfl_xor_sync(~0u, squares, 2);
    if (columns == 64) {
      squares += __shfl_xor_sync(~0u, squares, 4);
      squares += __shfl_xor_sync(~0u, squares, 8);
    }
    if (outputs.inside > 0 && n % columns == 0) {
      const int num_parts = (out_width + columns - 1) / columns;
      epilogue.sumsq_out[static_cast<int64_t>(token0 + t) * num_parts + n / columns] = squares;
    }
  }
#else
  wrong_architecture();
#endif
}

// A block of rows has block_items slabs, or pairs of them; but where that leaves multiprocessors
// without a block or some with two and others with one, they are spread evenly.
void spread(const GemmParams& p, int block_items, KernelParams* kp) {
  const int items = static_cast<int>(packed_tiles(p.out_features)) / (p.gated ? 2 : 1);
  kp->num_wide = kp->row_blocks;
  kp->narrow = block_items;
  // Sums of squares are of more columns than a slab.
  if (kp->token_blocks > 1 || p.sumsq_out != nullptr) return;
  const int count = num_multiprocessors();
  if (kp->split * kp->token_blocks > count) return;
  const int most = static_cast<int>(ceil_div(items, count / (kp->split * kp->token_blocks)));
  if (kp->split == 1 && kp->row_blocks > count && most < 2 * block_items) {  // two blocks for each
    kp->num_wide = count;
    kp->narrow = most - block_items;
  } else if (most < block_items) {
    kp->num_wide = 0;
    kp->narrow = most;
  }
  const int left = items - kp->num_wide * block_items;
  kp->row_blocks = kp->num_wide + static_cast<int>(ceil_div(std::max(left, 0), kp->narrow));
}

template <class T, class F, int kTokens, bool kGated>
Status run(const GemmParams& p, const GemmTile& tile, cudaStream_t stream) {
  using S = Shape<F, kTokens>;
  CUtensorMap token_map;
  const DType type = F::kTokenSize == 1 ? DType::kUInt8 : p.dtype;
  REGATTA_RETURN_IF_ERROR(
      encode_rows_map(&token_map, type, p.x, p.num_rows, p.in_features, kTokens));
  KernelParams kp = {};
  kp.epilogue = make_epilogue(p);
  kp.num_rows = static_cast<int>(p.num_rows);
  kp.num_units = static_cast<int>(packed_units(p.in_features));
  kp.row_blocks = static_cast<int>(ceil_div(packed_tiles(p.out_features), kSlabs));
  kp.token_blocks = static_cast<int>(ceil_div(p.num_rows, kTokens));
  kp.split = std::min(tile.split, kMaxSplit);
  const int tiles = kp.row_blocks * kp.token_blocks;
  // A block has a step at least, and a place for its sums; blocks that wait for each other all run.
  while (kp.split > 1 && (kp.split > kp.num_units || tiles * kp.split > num_multiprocessors() ||
                          int64_t{tiles} * kp.split * S::kPartBytes > kPartsBytes)) {
    --kp.split;
  }
  constexpr int kItems = kGated ? kSlabs / 2 : kSlabs;
  spread(p, kItems, &kp);
  CUtensorMap wide_map, narrow_map;
  REGATTA_RETURN_IF_ERROR(encode_packed_map(&wide_map, p, F::kUnitBytes, kItems));
  REGATTA_RETURN_IF_ERROR(encode_packed_map(&narrow_map, p, F::kUnitBytes, kp.narrow));
  kp.trigger = tile.trigger;
  kp.stages = std::max(
      2, std::min({tile.stages, kMaxStages, (226 * 1024 - kHeadBytes - 1024) / S::kStageBytes}));
  kp.num_blocks = kp.row_blocks * kp.token_blocks * kp.split;
  return launch(gemm_packed_kernel<T, F, kTokens, kGated>,
                {{stream, p.dependent_launch},
                 std::max(kp.num_blocks, num_multiprocessors()),
                 S::kThreads,
                 packed_shared_bytes(p, S::shared_bytes(kp.stages))},
                "gemm_packed", token_map, wide_map, narrow_map, kp);
}

template <class T, class F, bool kGated>
Status run_tokens(const GemmParams& p, const GemmTile& tile, cudaStream_t stream) {
  return tile.tokens <= 16   ? run<T, F, 16, kGated>(p, tile, stream)
         : tile.tokens == 32 ? run<T, F, 32, kGated>(p, tile, stream)
         : tile.tokens == 64 ? run<T, F, 64, kGated>(p, tile, stream)
                             : run<T, F, 128, kGated>(p, tile, stream);
}

template <class T>
Status run_format(const GemmParams& p, const GemmTile& tile, cudaStream_t stream) {
  return dispatch_packed(p, [&](auto format) {
    using F = decltype(format);
    return p.gated ? run_tokens<T, F, true>(p, tile, stream)
                   : run_tokens<T, F, false>(p, tile, stream);
  });
}

GemmTile choose_tile(const GemmParams& p) {
  GemmTile tile;
  const bool codes = p.operands == GemmOperands::kW4A8;
  const int multiprocessors = num_multiprocessors();
  const PackedSplit chosen = choose_packed_split(p, multiprocessors);
  tile.tokens = chosen.tokens;
  tile.split = chosen.split;
  tile.features = kSmallPackedRows;
  tile.trigger = -1;
  const int64_t unit = unit_bytes(p.operands, static_cast<int>(p.group_size));
  const int64_t stage = round_up(tile.tokens * (codes ? 1 : 2) * kRowBytes + kSlabs * unit, 1024);
  int64_t stages = (packed_shared_budget(p) - kHeadBytes - 1024) / stage;
  // Of large stages a block of its own multiprocessor has more, though the next launch's block then
  // waits; two of many blocks share a multiprocessor.
  const bool alone = tile.tokens > 64 || chosen.blocks * tile.split <= multiprocessors;
  if (stages < 4 && alone) stages = 220 * 1024 / stage;
  tile.stages = static_cast<int>(std::min<int64_t>(kMaxStages, stages));
  return tile;
}

}  // namespace

Status gemm_packed_sm90(const GemmParams& p, const GemmTile& tile, CUstream_st* stream) {
  REGATTA_RETURN_IF_ERROR(refusal("gemm_packed_sm90", gemm_packed_sm90_refuses(p)));
  if (p.num_groups > 0) {
    return Status::error("gemm_packed_sm90: groups of rows have tiles of gemm_packed_groups_sm90");
  }
  if (p.num_rows == 0) return {};
  return p.dtype == DType::kBFloat16 ? run_format<__nv_bfloat16>(p, tile, stream)
                                     : run_format<__half>(p, tile, stream);
}

Status gemm_packed_sm90(const GemmParams& p, CUstream_st* stream) {
  return p.num_groups > 0 ? gemm_packed_groups_sm90(p, choose_packed_groups_tile(p), stream)
                          : gemm_packed_sm90(p, choose_tile(p), stream);
}

}  // namespace regatta::cuda
