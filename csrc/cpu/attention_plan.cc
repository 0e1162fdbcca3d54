#include "attention_plan.h"

#include <algorithm>
#include <string>

namespace regatta::cpu {
namespace {

// Rows of a tile. More rows share the arrangement of a chunk (about as much work as 12 rows), fewer
// make more pieces; the rows' accumulators must stay in L2.
constexpr int64_t kMaxTileRows = 128;
constexpr int64_t kMinTileRows = 32;
constexpr int64_t kArrangeRows = 12;
// Pieces per thread that dynamic claiming needs to end together.
constexpr int64_t kPiecesPerThread = 4;

std::string at(const char* name, int64_t i) {
  return std::string(name) + "[" + std::to_string(i) + "]";
}

Status bad(const char* op, const std::string& what, int64_t got, const std::string& allowed) {
  return Status::error(std::string(op) + ": " + what + " is " + std::to_string(got) +
                       " (allowed: " + allowed + ")");
}

int64_t tile_tokens(const AttentionBatch& batch, int64_t num_kv_heads, int64_t group,
                    int num_threads) {
  int64_t tokens = std::max<int64_t>(1, kMaxTileRows / group);
  const auto num_tiles = [&] {
    int64_t tiles = 0;
    for (int64_t b = 0; b < batch.num_seqs; ++b) {
      tiles += (batch.cu_seqlens_q[b + 1] - batch.cu_seqlens_q[b] + tokens - 1) / tokens;
    }
    return tiles * num_kv_heads;
  };
  while (tokens > 1 && (tokens / 2) * group >= kMinTileRows &&
         num_tiles() < kPiecesPerThread * num_threads) {
    tokens /= 2;
  }
  return tokens;
}

}  // namespace

Status check_attention_batch(const char* op, const AttentionBatch& batch, const PagedCache& cache,
                             int64_t window) {
  if (window != -1 && window < 1) return bad(op, "window", window, "-1 for none, or 1 and more");
  if (batch.cu_seqlens_q[0] != 0) return bad(op, "cu_seqlens_q[0]", batch.cu_seqlens_q[0], "0");
  for (int64_t b = 0; b < batch.num_seqs; ++b) {
    const int64_t begin = batch.cu_seqlens_q[b], end = batch.cu_seqlens_q[b + 1];
    if (end < begin || end > batch.num_tokens) {
      return bad(op, at("cu_seqlens_q", b + 1), end,
                 std::to_string(begin) + " to the number of tokens, " +
                     std::to_string(batch.num_tokens));
    }
    if (end == begin) continue;
    const int64_t context = batch.context_lens[b];
    const int64_t capacity = batch.max_blocks * cache.block_size;
    if (context < end - begin || context > capacity) {
      return bad(op, at("context_lens", b), context,
                 "the span's " + std::to_string(end - begin) + " tokens to the block table's " +
                     std::to_string(capacity));
    }
    const int64_t oldest = window < 0 ? 0 : std::max<int64_t>(0, context - (end - begin) - window + 1);
    const int32_t* table = batch.block_tables + b * batch.max_blocks;
    for (int64_t i = oldest / cache.block_size; i * cache.block_size < context; ++i) {
      if (table[i] < 0 || table[i] >= cache.num_blocks) {
        return bad(op, at("block_tables", b) + at("", i), table[i],
                   "0 to " + std::to_string(cache.num_blocks - 1));
      }
    }
  }
  return {};
}

AttentionPlan make_attention_plan(const AttentionBatch& batch, int64_t num_kv_heads, int64_t group,
                                  int64_t window, int num_threads, Scratch& scratch) {
  const int64_t max_tokens = tile_tokens(batch, num_kv_heads, group, num_threads);
  int64_t max_tiles = 0;
  for (int64_t b = 0; b < batch.num_seqs; ++b) {
    max_tiles += (batch.cu_seqlens_q[b + 1] - batch.cu_seqlens_q[b] + max_tokens - 1) / max_tokens;
  }
  auto* tiles = scratch.take<AttentionTile>(max_tiles);
  auto* costs = scratch.take<int64_t>(max_tiles);
  AttentionPlan plan;
  plan.tiles = tiles;
  int64_t num_splits = 0, total = 0, largest = 0;
  for (int64_t b = 0; b < batch.num_seqs; ++b) {
    const int64_t tokens = batch.cu_seqlens_q[b + 1] - batch.cu_seqlens_q[b];
    const int64_t first = batch.context_lens[b] - tokens;  // position of the span's token 0
    const int64_t count = (tokens + max_tokens - 1) / max_tokens;
    // Last tokens first: they see most, and the last pieces claimed should be small.
    for (int64_t i = count; i-- > 0;) {
      AttentionTile tile;
      tile.span = static_cast<int32_t>(b);
      tile.begin = static_cast<int32_t>(tokens * i / count);
      tile.end = static_cast<int32_t>(tokens * (i + 1) / count);
      const int64_t oldest = window < 0 ? 0 : std::max<int64_t>(0, first + tile.begin - window + 1);
      tile.first_split = static_cast<int32_t>(oldest / kSplit);
      tile.end_split = static_cast<int32_t>((first + tile.end - 1) / kSplit + 1);
      tile.partial = -1;
      const int64_t rows = (tile.end - tile.begin) * group;
      const int64_t cost = (rows + kArrangeRows) * (first + tile.end - oldest);
      plan.max_rows = std::max(plan.max_rows, rows);
      num_splits += tile.end_split - tile.first_split;
      total += cost;
      largest = std::max(largest, cost);
      costs[plan.num_tiles] = cost;
      tiles[plan.num_tiles++] = tile;
    }
  }

  // A tile is divided among threads, split by split, when it would keep one busy for too long.
  const bool even = largest * plan.num_tiles == total &&
                    plan.num_tiles * num_kv_heads % std::max(num_threads, 1) == 0;
  const int64_t limit = total * num_kv_heads / (kPiecesPerThread * std::max(num_threads, 1));
  auto* units = scratch.take<AttentionUnit>(num_splits);
  auto* divided = scratch.take<int32_t>(plan.num_tiles);
  plan.units = units;
  plan.divided = divided;
  for (int64_t i = 0; i < plan.num_tiles; ++i) {
    AttentionTile& tile = tiles[i];
    const int64_t splits = tile.end_split - tile.first_split;
    const bool divide = num_threads > 1 && !even && splits > 1 && costs[i] > limit;
    if (!divide) {
      units[plan.num_units++] = {static_cast<int32_t>(i), -1};
      continue;
    }
    divided[plan.num_divided++] = static_cast<int32_t>(i);
    tile.partial = plan.num_partial_rows;
    plan.num_partial_rows += splits * (tile.end - tile.begin) * group;
    for (int32_t split = tile.first_split; split < tile.end_split; ++split) {
      units[plan.num_units++] = {static_cast<int32_t>(i), split};
    }
  }
  return plan;
}

}  // namespace regatta::cpu
