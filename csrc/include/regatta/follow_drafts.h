// Moves the inputs of a draft model's step to where a verification got.
#pragma once

#include <cstdint>

namespace regatta {

// Of request i, plan[i] = {number of drafts k, row of the choice behind its last token, number of
// its tokens to fill in (0 or 2), where the k drafts are}, places among `tokens`. With a right
// drafts before the first wrong one, all of positions, context_lens and offsets lose k - a, slots
// follow; two tokens become the (a - 1)th choice, where a > 0, and the a-th. k < 0: nothing to do.
struct FollowDraftsParams {
  int32_t* token_ids = nullptr;           // [T], in place
  int32_t* positions = nullptr;           // [T], in place
  int32_t* slot_mapping = nullptr;        // [T], in place
  int32_t* context_lens = nullptr;        // [num_seqs], in place
  int64_t* offsets = nullptr;             // [num_seqs], in place: of the random numbers
  const int32_t* cu_seqlens_q = nullptr;  // [num_seqs + 1]
  const int32_t* block_tables = nullptr;  // [num_seqs, blocks_per_seq]
  const int32_t* plan = nullptr;          // [num_seqs, plan_width]
  const int32_t* tokens = nullptr;        // the target's choices and the drafts
  int64_t num_seqs = 0;
  int64_t blocks_per_seq = 0;
  int64_t plan_width = 0;
  int32_t block_size = 0;
};

}  // namespace regatta
