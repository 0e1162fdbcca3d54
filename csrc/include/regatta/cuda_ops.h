// The CUDA twins of the operators: same params structs as the CPU's, plus a stream, the limits that
// fix a launch's grid, and a workspace where one is needed. No framework.
//
// All pointers of the params are device pointers. No function synchronises, allocates or reads
// device memory from the host; every launch can be captured into a CUDA graph, and replayed while
// lengths, block tables and seeds change underneath as long as they stay within the limits given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "regatta/activate.h"
#include "regatta/add.h"
#include "regatta/adjust_logits.h"
#include "regatta/attention.h"
#include "regatta/blocks.h"
#include "regatta/copy_blocks.h"
#include "regatta/cut_patches.h"
#include "regatta/embedding.h"
#include "regatta/follow_drafts.h"
#include "regatta/likeliest.h"
#include "regatta/linear.h"
#include "regatta/logits.h"
#include "regatta/logprobs.h"
#include "regatta/mask_logits.h"
#include "regatta/norm.h"
#include "regatta/pack_dense.h"
#include "regatta/picture_rows.h"
#include "regatta/sample.h"
#include "regatta/types.h"
#include "regatta/verify_window.h"

struct CUstream_st;

namespace regatta {

// out[i] = source[row_ids[i]]; a row id outside of [0, num_source_rows) gives a row of zeros.
struct GatherRowsParams {
  const int32_t* row_ids = nullptr;  // [num_rows]
  const void* source = nullptr;      // [num_source_rows, row_size]
  void* out = nullptr;               // [num_rows, row_size]
  int64_t num_rows = 0;
  int64_t num_source_rows = 0;
  int64_t row_size = 0;  // elements
  DType dtype = DType::kFloat32;
};

// rows[i] = token_ids[i] - begin, of tokens in [begin, end); of others `other`.
struct OwnRowsParams {
  const int32_t* token_ids = nullptr;  // [count]
  int32_t* rows = nullptr;             // [count]
  int64_t count = 0, begin = 0, end = 0, other = 0;
};

namespace cuda {

// The sum of all ranks' `in`, in their order in float32, rounded once (and -0.0 is +0.0 in it).
enum class AllReduce : uint8_t;
struct SumRanksParams {
  const void* in = nullptr;  // [count], at a multiple of 16 bytes
  void* out = nullptr;       // [count]; may be in
  int64_t count = 0;
  DType dtype = DType::kFloat32;
  const AllReduce* by = nullptr;  // null: as cuda/ranks/select.h says
};

// The token of the largest logit of each row, of which every rank has a part: the lowest of equals;
// -1 where one is not a number.
struct LargestParams {
  const float* logits = nullptr;  // [num_rows, width]
  int32_t* token_ids = nullptr;   // [num_rows]
  int64_t num_rows = 0, width = 0;
  int64_t begin = 0, count = 0;  // the first `count` columns are those of tokens from `begin` on
};

// Row t of `all`: the first counts[r] columns of row t of rank r's part, of all ranks in order.
struct GatherColumnsParams {
  const float* part = nullptr;  // [num_rows, width], at a multiple of 16 bytes
  float* all = nullptr;         // [num_rows, the sum of counts]
  const int* counts = nullptr;  // of each rank
  int64_t num_rows = 0, width = 0;
};

// Where and how to launch.
struct Launch {
  CUstream_st* stream = nullptr;
  bool pdl = false;  // programmatic dependent launch, see csrc/cuda/common.cuh
  // The launches ahead and behind have one block, of half of shared memory, on each multiprocessor.
  bool between_halves = false;
};

// Which tokens the rows of a step are: predict.nn.inputs.RowKind.
enum class StepRows : int32_t { kListed, kLast, kAll };

// Upper bounds that hold for every run (and every replay) of one attention call.
struct AttentionLimits {
  int64_t max_query_len = 1;    // tokens of the longest span; 1 launches the decode kernel alone
  int64_t max_context_len = 1;  // tokens of the longest context
  // Long spans, which latent attention may expand: those of more tokens than the first says, and
  // the tokens of all their contexts; 0: there is none.
  int64_t max_short_len = 1;
  int64_t num_long_tokens = 0;
  StepRows rows = StepRows::kListed;  // of blocks with rows
};

Status embedding(const EmbeddingParams& params, const Launch& launch);
Status gather_rows(const GatherRowsParams& params, const Launch& launch);
// out [count] = 0, 1, 2, ...; count is at least 1.
Status count_up(int32_t* out, int64_t count, const Launch& launch);
Status norm(const NormParams& params, const Launch& launch);
// Of rows row_ids[params.num_tokens] of params.x [num_source_rows, hidden_size]; a row id outside
// of it gives a row of zeros. params.residual is null.
Status norm_rows(const NormParams& params, const int32_t* row_ids, int64_t num_source_rows,
                 const Launch& launch);
Status activate(const ActivateParams& params, const Launch& launch);
Status add(const AddParams& params, const Launch& launch);
Status rope_and_cache_write(const RopeAndCacheWriteParams& params, const Launch& launch);
// squares [T, 2]: of a rank's queries, and of its keys, each as often as queries here read it. Of
// all ranks together a key head counts once for each of its group, however many of them have it.
Status whole_squares(const RopeAndCacheWriteParams& params, float* squares, const Launch& launch);
// `packed` is [out_features, in_features]: a GPU multiplies matrices as checkpoints store them.
Status pack_dense(const PackDenseParams& params, const Launch& launch);

// Bytes of device memory that paged_attention() needs. The caller zeroes them once, before the
// first use; every call leaves zeros where it needs zeros. Calls of one stream may share a
// workspace when their shapes and limits are alike: what must be zero lies at its front, in a
// length that depends on them. paged_attention_zeroed_bytes() of the front suffice.
int64_t paged_attention_workspace_bytes(const PagedAttentionParams& params,
                                        const AttentionLimits& limits);
int64_t paged_attention_zeroed_bytes(const PagedAttentionParams& params,
                                     const AttentionLimits& limits);
Status paged_attention(const PagedAttentionParams& params, const AttentionLimits& limits,
                       void* workspace, int64_t workspace_bytes, const Launch& launch);

// rope_and_cache_write(), then paged_attention() of its q_out: one launch where every span is one
// token. Under programmatic dependent launch that one reads positions, slots, the batch and earlier
// tokens of the caches before it waits: they must be complete when the launch ahead begins.
// attention.cache is rope.cache. rope.q_out is scratch.
Status rope_and_paged_attention(const RopeAndCacheWriteParams& rope,
                                const PagedAttentionParams& attention,
                                const AttentionLimits& limits, void* workspace,
                                int64_t workspace_bytes, const Launch& launch);

// token_ids[i] = last_tokens[-1 - token_ids[i]] where token_ids[i] is negative: what the step
// before sampled, which the host may not know yet. Rows outside of [0, num_last) stay.
Status resolve_tokens(int32_t* token_ids, const int32_t* last_tokens, int64_t num_tokens,
                      int64_t num_last, const Launch& launch);

Status follow_drafts(const FollowDraftsParams& params, const Launch& launch);

Status cut_patches(const CutPatchesParams& params, const Launch& launch);
Status put_rows(const PutRowsParams& params, const Launch& launch);
Status write_places(const WritePlacesParams& params, const Launch& launch);

Status adjust_logits(const AdjustLogitsParams& params, const Launch& launch);

Status mask_logits(const MaskLogitsParams& params, const Launch& launch);

Status sample(const SampleParams& params, const Launch& launch);

Status verify_window(const VerifyWindowParams& params, const Launch& launch);

Status logprobs(const LogprobsParams& params, const Launch& launch);

// Over ranks, each with a GPU of its own (cuda/ranks/exchange.cuh): all make the same calls in the
// same order.
Status sum_ranks(const SumRanksParams& params, const Launch& launch);
Status gather_over_ranks(const GatherColumnsParams& params, const Launch& launch);
Status largest_over_ranks(const LargestParams& params, const Launch& launch);
Status own_rows(const OwnRowsParams& params, const Launch& launch);

// params.copies is host memory; what it names is read before the call returns.
Status copy_blocks(const CopyBlocksParams& params, const Launch& launch);

// The rows of params.logits become log-probabilities, in place; nothing is found.
Status log_softmax(const LikeliestParams& params, const Launch& launch);
Status likeliest(const LikeliestParams& params, const Launch& launch);

// The composed operators. Dense weights are single tensors [out_features, in_features], row-major,
// as checkpoints store them; quantized ones are what regatta_pack_quantized leaves and the scheme's
// other tensors (predict/schemes). Scheme "dense": norms are kernels of their own. "dense_folded":
// the norm weights are multiplied into the matrices behind them (fold_norm_weight in gemm.h), and a
// product's epilogue leaves the sums of squares that the next one scales its rows by.
struct ComposedResources {
  void* scratch = nullptr;  // the bytes that the same call needs
  int64_t scratch_bytes = 0;
  void* blas = nullptr;  // see GemmResources
};

// Blocks in their order, each reading what the one before it wrote. What one leaves in scratch for
// the norm of the next is chosen from their records (csrc/cuda/walk.h).
//
// The resources are asked for once, with the bytes of scratch: counting them is a walk over all
// blocks, at each call.
using ResourcesFor = std::function<ComposedResources(int64_t scratch_bytes)>;
Status blocks(const std::vector<BlockParams*>& params, const AttentionLimits& limits,
              const ResourcesFor& resources, const Launch& launch);

// paged_attention() with its workspace in the scratch, which is prepared here.
int64_t attention_scratch_bytes(const PagedAttentionParams& params, const AttentionLimits& limits);
Status attention(const PagedAttentionParams& params, const AttentionLimits& limits,
                 const ComposedResources& resources, const Launch& launch);

int64_t linear_scratch_bytes(const LinearParams& params);
Status linear(const LinearParams& params, const ComposedResources& resources, const Launch& launch);

int64_t logits_scratch_bytes(const LogitsParams& params);
Status logits(const LogitsParams& params, const ComposedResources& resources, const Launch& launch);

}  // namespace cuda
}  // namespace regatta
