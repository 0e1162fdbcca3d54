#include "attention_plan.h"

#include <algorithm>
#include <functional>
#include <string>

namespace regatta::cpu {
namespace {

// Rows of a tile, and of a unit. More rows share the arrangement of a chunk (about as much work as
// 12 rows), fewer make more pieces; the rows' accumulators must stay in L2.
constexpr int64_t kMaxRows = 128;
constexpr int64_t kMinTileRows = 32;
constexpr int64_t kArrangeRows = 12;
// Tiles per thread that a long span is cut into.
constexpr int64_t kTilesPerThread = 4;
// Share of the threads' time that a plan should use.
constexpr double kBalanced = 0.9;

std::string at(const char* name, int64_t i) {
  return std::string(name) + "[" + std::to_string(i) + "]";
}

Status bad(const char* op, const std::string& what, int64_t got, const std::string& allowed) {
  return Status::error(std::string(op) + ": " + what + " is " + std::to_string(got) +
                       " (allowed: " + allowed + ")");
}

int64_t tile_tokens(const AttentionBatch& batch, int64_t num_kv_heads, int64_t group,
                    int num_threads) {
  int64_t tokens = std::max<int64_t>(1, kMaxRows / group);
  const auto num_tiles = [&] {
    int64_t tiles = 0;
    for (int64_t b = 0; b < batch.num_seqs; ++b) {
      tiles += (batch.cu_seqlens_q[b + 1] - batch.cu_seqlens_q[b] + tokens - 1) / tokens;
    }
    return tiles * num_kv_heads;
  };
  while (tokens > 1 && (tokens / 2) * group >= kMinTileRows &&
         num_tiles() < kTilesPerThread * num_threads) {
    tokens /= 2;
  }
  return tokens;
}

// How tiles become units: 2^shift fewer KV heads together than would fit, splits apart or not.
struct Division {
  int shift;
  bool splits;
};

struct Tiles {
  AttentionTile* tiles;
  int64_t* positions;  // that the tile sees
  int64_t count;
  int64_t num_kv_heads, group;

  int64_t rows(int64_t i) const { return (tiles[i].end - tiles[i].begin) * group; }
  int64_t heads_together(int64_t i, int shift) const {
    const int64_t heads = std::min(num_kv_heads, std::max<int64_t>(1, kMaxRows / rows(i)));
    return std::max<int64_t>(1, heads >> shift);
  }

  // each(tile, split or -1, first head, number of heads, cost) for every unit.
  template <class Each>
  void for_units(Division division, Each&& each) const {
    for (int64_t i = 0; i < count; ++i) {
      const AttentionTile& tile = tiles[i];
      const int64_t together = heads_together(i, division.shift);
      const bool divides = division.splits && tile.end_split - tile.first_split > 1;
      for (int64_t split = tile.first_split; split < tile.end_split; ++split) {
        const int64_t seen =
            divides ? std::min(kSplit, positions[i] - (split - tile.first_split) * kSplit)
                    : positions[i];
        for (int64_t head = 0; head < num_kv_heads; head += together) {
          const int64_t heads = std::min(together, num_kv_heads - head);
          each(i, divides ? split : -1, head, heads,
               (rows(i) + kArrangeRows) * std::max<int64_t>(seen, 1) * heads);
        }
        if (!divides) break;
      }
    }
  }

  // Share of the threads' time that is used when units are claimed in order; a lower bound for many
  // units. 1 means that all threads end together.
  double balance(Division division, int num_threads) const {
    constexpr int kMaxThreads = 64;
    constexpr int64_t kMaxUnits = 256;
    int64_t busy[kMaxThreads] = {};
    int64_t num_units = 0, total = 0, largest = 0;
    for_units(division, [&](int64_t, int64_t, int64_t, int64_t, int64_t cost) {
      if (++num_units <= kMaxUnits && num_threads <= kMaxThreads) {
        std::pop_heap(busy, busy + num_threads, std::greater<>());  // the first to be free is last
        busy[num_threads - 1] += cost;
        std::push_heap(busy, busy + num_threads, std::greater<>());
      }
      total += cost;
      largest = std::max(largest, cost);
    });
    const double bound = static_cast<double>(total) /
                         (static_cast<double>(total) + static_cast<double>(largest) * num_threads);
    if (num_units > kMaxUnits || num_threads > kMaxThreads) return bound;
    const int64_t end = *std::max_element(busy, busy + num_threads);
    return end ? static_cast<double>(total) / (static_cast<double>(end) * num_threads) : 1.0;
  }

  // The first balanced division of: all heads, half of them, ..., then with the splits apart.
  Division choose(int num_threads) const {
    if (num_threads == 1) return {0, false};
    Division best = {0, false};
    double best_balance = 0.0;
    for (const bool splits : {false, true}) {
      for (int shift = 0; num_kv_heads >> shift; ++shift) {
        const double share = balance({shift, splits}, num_threads);
        if (share > best_balance) {
          best = {shift, splits};
          best_balance = share;
        }
        if (share >= kBalanced) return best;
      }
    }
    return best;
  }
};

// Tokens see themselves and none behind them: a tree's parents come before their children.
Status check_tree(const char* op, const AttentionBatch& batch, int64_t begin, int64_t end) {
  if (!batch.tree_mask || end - begin > 32 * batch.tree_words) return {};
  for (int64_t t = begin; t < end; ++t) {
    const auto* row = reinterpret_cast<const uint32_t*>(batch.tree_mask) + t * batch.tree_words;
    int64_t last = -1;
    for (int64_t i = 0; i < 32 * batch.tree_words; ++i) {
      if (row[i / 32] >> i % 32 & 1u) last = i;
    }
    if (last == t - begin) continue;
    return bad(op, "the last bit of " + at("tree_mask", t), last,
               std::to_string(t - begin) + ", the token itself");
  }
  return {};
}

}  // namespace

Status check_attention_batch(const char* op, const AttentionBatch& batch, const PagedCache& cache,
                             int64_t window) {
  if (window != -1 && window < 1) return bad(op, "window", window, "-1 for none, or 1 and more");
  if (batch.cu_seqlens_q[0] != 0) return bad(op, "cu_seqlens_q[0]", batch.cu_seqlens_q[0], "0");
  for (int64_t b = 0; b < batch.num_seqs; ++b) {
    const int64_t begin = batch.cu_seqlens_q[b], end = batch.cu_seqlens_q[b + 1];
    if (end < begin || end > batch.num_tokens) {
      return bad(
          op, at("cu_seqlens_q", b + 1), end,
          std::to_string(begin) + " to the number of tokens, " + std::to_string(batch.num_tokens));
    }
    if (end == begin) continue;
    const int64_t context = batch.context_lens[b];
    const int64_t capacity = batch.max_blocks * cache.block_size;
    if (context < end - begin || context > capacity) {
      return bad(op, at("context_lens", b), context,
                 "the span's " + std::to_string(end - begin) + " tokens to the block table's " +
                     std::to_string(capacity));
    }
    const int64_t oldest =
        window < 0 ? 0 : std::max<int64_t>(0, context - (end - begin) - window + 1);
    const Status tree = check_tree(op, batch, begin, end);
    if (!tree.ok()) return tree;
    if (batch.prefix_lens) {
      const int64_t prefix = batch.prefix_lens[b];
      if (prefix < 0 || prefix > context) {
        return bad(op, at("prefix_lens", b), prefix,
                   "0 to the context's " + std::to_string(context));
      }
    }
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

AttentionBatch cut_batch(const AttentionBatch& batch, int64_t begin, int64_t end,
                         Scratch& scratch) {
  AttentionBatch piece = batch;
  piece.num_tokens = end - begin;
  if (piece.num_tokens == batch.num_tokens) return piece;
  auto* borders = scratch.take<int32_t>(batch.num_seqs + 1);
  auto* lengths = scratch.take<int32_t>(batch.num_seqs);
  borders[0] = 0;
  for (int64_t b = 0; b < batch.num_seqs; ++b) {
    const int64_t span_begin = std::min<int64_t>(batch.cu_seqlens_q[b], end);
    const int64_t span_end = std::min<int64_t>(batch.cu_seqlens_q[b + 1], end);
    borders[b + 1] = static_cast<int32_t>(std::max(span_end, begin) - begin);
    lengths[b] =
        static_cast<int32_t>(batch.context_lens[b] - (batch.cu_seqlens_q[b + 1] - span_end));
    if (span_begin >= end) lengths[b] = 0;
  }
  if (batch.tree_mask) piece.tree_mask += begin * batch.tree_words;
  piece.cu_seqlens_q = borders;
  piece.context_lens = lengths;
  return piece;
}

AttentionPlan make_attention_plan(const AttentionBatch& batch, int64_t num_kv_heads, int64_t group,
                                  int64_t window, int num_threads, Scratch& scratch) {
  const int64_t max_tokens = tile_tokens(batch, num_kv_heads, group, num_threads);
  int64_t max_tiles = 0;
  for (int64_t b = 0; b < batch.num_seqs; ++b) {
    max_tiles += (batch.cu_seqlens_q[b + 1] - batch.cu_seqlens_q[b] + max_tokens - 1) / max_tokens;
  }
  Tiles all = {scratch.take<AttentionTile>(max_tiles), scratch.take<int64_t>(max_tiles), 0,
               num_kv_heads, group};
  AttentionPlan plan;
  // A token of a tree lies up to this much behind its depth, which its window counts from.
  const int64_t shallower = batch.tree_mask ? 32 * batch.tree_words : 0;
  for (int64_t b = 0; b < batch.num_seqs; ++b) {
    const int64_t tokens = batch.cu_seqlens_q[b + 1] - batch.cu_seqlens_q[b];
    const int64_t first = batch.context_lens[b] - tokens;  // position of the span's token 0
    const int64_t unread = batch.unread ? batch.unread[b] : 0;
    const int64_t read = tokens - unread;
    const int64_t count = (read + max_tokens - 1) / max_tokens;
    const int64_t prefix = batch.prefix_lens ? batch.prefix_lens[b] : 0;
    // Last tokens first: they see most, and the last pieces claimed should be small.
    for (int64_t i = count; i-- > 0;) {
      AttentionTile& tile = all.tiles[all.count];
      tile.span = static_cast<int32_t>(b);
      tile.begin = static_cast<int32_t>(unread + read * i / count);
      tile.end = static_cast<int32_t>(unread + read * (i + 1) / count);
      const int64_t oldest =
          window < 0 ? 0 : std::max<int64_t>(0, first + tile.begin - window + 1 - shallower);
      tile.first_split = static_cast<int32_t>(oldest / kSplit);
      const int64_t end = seen_end(first + tile.end, prefix, window);
      tile.end_split = static_cast<int32_t>((end - 1) / kSplit + 1);
      tile.partial = -1;
      all.positions[all.count++] = end - oldest;
    }
  }

  const Division division = all.choose(std::max(num_threads, 1));
  int64_t max_units = 0;
  all.for_units(division, [&](int64_t, int64_t, int64_t, int64_t, int64_t) { ++max_units; });
  auto* units = scratch.take<AttentionUnit>(max_units);
  auto* divided = scratch.take<int32_t>(all.count);
  all.for_units(division, [&](int64_t i, int64_t split, int64_t head, int64_t heads, int64_t) {
    AttentionTile& tile = all.tiles[i];
    const int64_t rows = all.rows(i);
    plan.max_tile_rows = std::max(plan.max_tile_rows, rows);
    plan.max_unit_rows = std::max(plan.max_unit_rows, rows * heads);
    if (split >= 0 && tile.partial < 0) {
      divided[plan.num_divided++] = static_cast<int32_t>(i);
      tile.partial = plan.num_partial_rows;
      plan.num_partial_rows += (tile.end_split - tile.first_split) * rows;
    }
    units[plan.num_units++] = {static_cast<int32_t>(i), static_cast<int32_t>(split),
                               static_cast<int32_t>(head), static_cast<int32_t>(heads)};
  });
  plan.tiles = all.tiles;
  plan.num_tiles = all.count;
  plan.units = units;
  plan.divided = divided;
  return plan;
}

}  // namespace regatta::cpu
