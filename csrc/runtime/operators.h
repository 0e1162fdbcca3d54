// The params of the operators around a decoder's blocks, of tensors that are checked here. No
// framework. Each function sets all but where the output goes, which is the caller's: `out`,
// `logits`, `token_ids`.
//
// T tokens, H hidden size, L rows of logits, V vocabulary. A tensor of rank 0 is not there, where a
// comment has `?`. Lists and what tensors point to must live as long as the params.
#pragma once

#include <string>
#include <vector>

#include "regatta/adjust_logits.h"
#include "regatta/embedding.h"
#include "regatta/follow_drafts.h"
#include "regatta/linear.h"
#include "regatta/logits.h"
#include "regatta/logprobs.h"
#include "regatta/mask_logits.h"
#include "regatta/sample.h"
#include "regatta/verify_window.h"
#include "runtime/tensors.h"

namespace regatta::runtime {

// weight [V, H], or with packed the dense LM head of a tied model. Params have hidden_size, packed
// and scale.
struct EmbeddingViews {
  TensorView token_ids;       // [T]
  TensorView weight;          //
  TensorView position_table;  // [P, H]?
  TensorView positions;       // [T]?
  TensorView image_table;     // [R, H]?
  TensorView image_rows;      // [T]?
};
Status embedding(const EmbeddingViews& views, EmbeddingParams* params);

// x [T, K], bias [out_features]?. Params have out_features and scheme.
Status linear(const TensorView& x, TensorList weight, const TensorView& bias, LinearParams* params);

// What adapters add to it, behind linear(). ids [T], pages [S, kNumAdapted, R]; a, b: of
// LowRankWeights; which: the row of pages.
struct AdaptedViews {
  TensorView a, b, ids, pages;
};
Status check_adapted(const std::vector<int>& part_sizes, int64_t which);
Status adapted_linear(const AdaptedViews& views, const std::vector<int>& part_sizes, int64_t which,
                      bool on_cpu, LinearParams* params);

// Params have scheme, vocab_size, epsilon, scale and softcap.
struct LogitsViews {
  TensorView hidden;         // [T, H]
  TensorView norm_weight;    // [H]?
  TensorList head;           // as the scheme has it
  TensorView bias;           // [V]?
  TensorView logit_indices;  // [L]?: else of all rows
};
Status logits(const LogitsViews& views, LogitsParams* params);

struct SampleViews {
  TensorView logits;                                     // [L, V]
  TensorView temperature, top_k, top_p, seeds, offsets;  // [L]
  TensorView min_p, typical_p;                           // [L]?
};
Status sample(const SampleViews& views, SampleParams* params);

// choices, penalties: tables of columns.h. last_tokens [R]: what is drawn goes to the first L.
Status sample_step(const TensorView& logits, const TensorView& choices,
                   const TensorView& last_tokens, SampleParams* params);

struct AdjustLogitsViews {
  TensorView logits;         // [L, V]
  TensorView penalties;      //
  TensorView token_ids;      // [T]
  TensorView logit_indices;  // [L]
  TensorView history;        // [S, M]
  TensorView rules;          // [S, W]
};
Status adjust_logits(const AdjustLogitsViews& views, AdjustLogitsParams* params);

// Params have block_size.
struct FollowDraftsViews {
  TensorView token_ids, positions, slot_mapping;  // [T]
  TensorView context_lens;                        // [B]
  TensorView choices;                             //
  TensorView cu_seqlens_q;                        // [B + 1]
  TensorView block_tables, plan;                  // [B, ...]
  TensorView tokens;                              // [R]
};
Status follow_drafts(const FollowDraftsViews& views, FollowDraftsParams* params);

// last_tokens as sample_step() left them.
struct VerifyWindowViews {
  TensorView logits;         // [L, V]
  TensorView choices;        //
  TensorView token_ids;      // [T]
  TensorView logit_indices;  // [L]
  TensorView last_tokens;    // [R]
};
Status verify_window(const VerifyWindowViews& views, int64_t window, int64_t max_candidate_len,
                     VerifyWindowParams* params);

// token_ids [R], R at least L. Params have num_top.
Status logprobs(const TensorView& logits, const TensorView& token_ids, LogprobsParams* params);

// masks [R, W], R at least L and 32 W at least V.
Status mask_logits(const TensorView& logits, const TensorView& masks, MaskLogitsParams* params);

}  // namespace regatta::runtime
