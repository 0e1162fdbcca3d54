// How the attention of a batch is cut into pieces for threads. Independent of the ISA.
//
// Results never depend on the cut. Each (token, query head) row folds its context in one order:
// chunks of kChunk positions from position 0 into one partial per split of kSplit positions, and
// the partials in order of position. A tile only decides which rows share a loaded chunk, a unit
// which splits one thread does; so a row is bitwise the same alone or in a batch, in one prefill or
// in several, on one thread or many.
#pragma once

#include <cstdint>

#include "regatta/attention.h"
#include "thread_pool.h"

namespace regatta::cpu {

constexpr int64_t kChunk = 64;   // positions multiplied at once: K and V of one fit in L1
constexpr int64_t kSplit = 512;  // positions per partial result; a multiple of kChunk

// Adjacent tokens of one span: their rows (tokens * query heads of one KV head) share each chunk.
struct AttentionTile {
  int32_t span;
  int32_t begin, end;              // tokens of the span
  int32_t first_split, end_split;  // splits of the context that any of its tokens sees
  int64_t partial;                 // first row of its partials [splits][rows], -1: it has none
};

// What a thread claims: adjacent KV heads, because their parts of a cache block are one run of
// memory, and one split or all.
struct AttentionUnit {
  int32_t tile;
  int32_t split;  // -1: all of the tile's, in order
  int32_t first_head, num_heads;
};

struct AttentionPlan {
  const AttentionTile* tiles = nullptr;
  const AttentionUnit* units = nullptr;
  const int32_t* divided = nullptr;  // tiles whose partials are merged after the units
  int64_t num_tiles = 0, num_units = 0, num_divided = 0;
  int64_t num_partial_rows = 0;  // per KV head
  int64_t max_tile_rows = 0;     // of one KV head
  int64_t max_unit_rows = 0;     // of all KV heads of a unit
};

// Names the first entry of the batch that is out of range.
Status check_attention_batch(const char* op, const AttentionBatch& batch, const PagedCache& cache,
                             int64_t window);

// `group` is the number of query heads per KV head. The plan lives in `scratch`.
AttentionPlan make_attention_plan(const AttentionBatch& batch, int64_t num_kv_heads, int64_t group,
                                  int64_t window, int num_threads, Scratch& scratch);

// Tokens [begin, end) of the batch as a batch of their own: spans are cut, and the first part of a
// cut span sees a shorter context. Borders and lengths live in `scratch`.
AttentionBatch cut_batch(const AttentionBatch& batch, int64_t begin, int64_t end, Scratch& scratch);

}  // namespace regatta::cpu
