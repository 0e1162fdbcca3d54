// See expanded.h: contexts out of the paged cache, and the call of the attention kernel.
//
// Architectures: all, for bf16 and fp16; the attention kernel is sm_90's. A warp per row. Bound:
// bytes.
#include <type_traits>

#include "cuda/attention/attention.cuh"
#include "cuda/attention/latent/codes.cuh"
#include "cuda/attention/latent/expanded.h"
#include "cuda/common.cuh"

namespace regatta::cuda {
namespace {

constexpr int kWarps = 8;
// What its blocks leave for each other, and from which contexts on they do (attention.cu).
constexpr int64_t kTicketBytes = 256;
constexpr int64_t kCounterBytes = kTicketBytes + int64_t{2} * kMaxMultiprocessors * 4;
constexpr int64_t kShortContext = 4096;

struct GatherArgs {
  const void* cache;
  const void* tail;
  const float* scales;
  const int32_t* cu_seqlens_q;
  const int32_t* context_lens;
  const int32_t* block_tables;
  void* latents;
  void* rope;
  int32_t* first_rows;
  int64_t max_blocks;
  int num_rows, num_seqs, max_short_len, block_size, latent_rank, rope_size;
};

// Rows of a span's context; 0 where it is not long.
__device__ __forceinline__ int num_rows_of(const GatherArgs& a, int seq) {
  if (seq >= a.num_seqs) return 0;
  const int length = a.cu_seqlens_q[seq + 1] - a.cu_seqlens_q[seq];
  return length > a.max_short_len ? a.context_lens[seq] : 0;
}

template <class T, bool kCodes>
__global__ void __launch_bounds__(kWarps* kWarp) gather_latents_kernel(const GatherArgs a) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  pdl_trigger();
  pdl_wait();
  const int row = blockIdx.x * kWarps + warp;
  const bool counts = blockIdx.x == 0 && warp == 0;  // it writes first_rows, of all spans
  int seq = -1, position = 0, before = 0;
  for (int s0 = 0; s0 < a.num_seqs; s0 += kWarp) {
    const int rows = num_rows_of(a, s0 + lane);
    const int end = before + warp_inclusive_scan(rows), begin = end - rows;
    if (counts && s0 + lane < a.num_seqs) a.first_rows[s0 + lane] = begin;
    const unsigned has = __ballot_sync(~0u, begin <= row && row < end);
    if (has != 0) {
      const int holder = __ffs(has) - 1;
      seq = s0 + holder;
      position = row - __shfl_sync(~0u, begin, holder);
      if (!counts) break;
    }
    before = __shfl_sync(~0u, end, kWarp - 1);
  }
  if (seq < 0 || row >= a.num_rows) return;
  const int block = a.block_tables[seq * a.max_blocks + position / a.block_size];
  const int64_t slot = static_cast<int64_t>(block) * a.block_size + position % a.block_size;
  T* const latent = static_cast<T*>(a.latents) + static_cast<int64_t>(row) * a.latent_rank;
  T* const rope = static_cast<T*>(a.rope) + static_cast<int64_t>(row) * a.rope_size;
  const T* turned;  // the cache's R values
  if constexpr (kCodes) {
    const uint8_t* const codes = static_cast<const uint8_t*>(a.cache) + slot * a.latent_rank;
    const float scale = a.scales[slot];
    for (int at = lane * 8; at < a.latent_rank; at += kWarp * 8) {
      const uint2 eight = *reinterpret_cast<const uint2*>(codes + at);
      store16(latent + at, values_of_codes<T>(eight, scale));
    }
    turned = static_cast<const T*>(a.tail) + slot * a.rope_size;
  } else {
    const T* const from = static_cast<const T*>(a.cache) + slot * (a.latent_rank + a.rope_size);
    for (int at = lane * 8; at < a.latent_rank; at += kWarp * 8) {
      store16(latent + at, load16(from + at));
    }
    turned = from + a.latent_rank;
  }
  for (int at = lane * 8; at < a.rope_size; at += kWarp * 8)
    store16(rope + at, load16(turned + at));
}

// Whether blocks of the attention kernel may share an item.
bool shares_items(const AttentionLimits& limits) { return limits.max_context_len > kShortContext; }

}  // namespace

Status gather_latents(const GatherLatentsParams& p, const Launch& launch_on) {
  GatherArgs a = {};
  a.cache = p.cache;
  a.tail = p.tail;
  a.scales = p.scales;
  a.cu_seqlens_q = p.batch.cu_seqlens_q;
  a.context_lens = p.batch.context_lens;
  a.block_tables = p.batch.block_tables;
  a.latents = p.latents;
  a.rope = p.rope;
  a.first_rows = p.first_rows;
  a.max_blocks = p.batch.max_blocks;
  a.num_rows = static_cast<int>(p.num_long_tokens);
  a.num_seqs = static_cast<int>(p.batch.num_seqs);
  a.max_short_len = static_cast<int>(p.max_short_len);
  a.block_size = static_cast<int>(p.block_size);
  a.latent_rank = static_cast<int>(p.latent_rank);
  a.rope_size = static_cast<int>(p.rope_size);
  const bool bf16 = p.dtype == DType::kBFloat16, codes = p.scales != nullptr;
  auto* const kernel =
      bf16 ? (codes ? gather_latents_kernel<__nv_bfloat16, true>
                    : gather_latents_kernel<__nv_bfloat16, false>)
           : (codes ? gather_latents_kernel<__half, true> : gather_latents_kernel<__half, false>);
  return launch(kernel, {launch_on, ceil_div(p.num_long_tokens, kWarps), kWarps * kWarp},
                "gather_latents", a);
}

int64_t expanded_attention_zeroed_bytes() { return round_up(kCounterBytes, 256); }

int64_t expanded_attention_workspace_bytes(const LatentSizes& sizes,
                                           const AttentionLimits& limits) {
  const int64_t pieces = shares_items(limits) ? 2 * kMaxMultiprocessors : 0;
  return expanded_attention_zeroed_bytes() + pieces * 2 * 128 * (sizes.value_size / 2 + 4) * 4;
}

Status expanded_attention(const ExpandedAttentionParams& p, const AttentionLimits& limits,
                          void* workspace, const Launch& launch_on) {
  const int64_t rows = p.first_head * p.batch.num_tokens, element = dtype_size(p.dtype);
  const auto behind = [&](const void* base, int64_t values) {
    return static_cast<const void*>(static_cast<const char*>(base) + values * element);
  };
  AttentionArgs args = {};
  args.q = behind(p.q_nope, rows * p.sizes.nope_size);
  args.shared_q = behind(p.q_rope, rows * p.sizes.rope_size);
  args.key = p.keys;
  args.value = p.values;
  args.out = static_cast<char*>(p.out) + p.first_head * p.sizes.value_size * element;
  args.cu_seqlens_q = p.batch.cu_seqlens_q;
  args.context_lens = p.batch.context_lens;
  args.block_tables = p.first_rows;
  args.num_tokens = static_cast<int>(p.batch.num_tokens);
  args.num_seqs = static_cast<int>(p.batch.num_seqs);
  args.max_blocks = 1;
  args.num_heads = static_cast<int>(p.num_heads);
  args.num_kv_heads = static_cast<int>(p.num_expanded_heads);
  args.group = 1;
  args.window = kNoWindow;
  args.max_decode_rows = static_cast<int>(limits.max_short_len);
  args.scale_log2 = p.softmax_scale * kLog2E;
  args.bf16 = p.dtype == DType::kBFloat16;
  args.shares_prefill = shares_items(limits);
  auto* const bytes = static_cast<char*>(workspace);
  args.tickets = reinterpret_cast<int*>(bytes);
  args.counters = reinterpret_cast<int*>(bytes + kTicketBytes);
  args.partial_out = reinterpret_cast<float*>(bytes + expanded_attention_zeroed_bytes());
  return launch_attention_prefill_expanded_sm90(args, p.dtype, p.rope, limits.num_long_tokens,
                                                num_multiprocessors(), launch_on);
}

}  // namespace regatta::cuda
