// What the ops of blocks call inside their regions, in each ISA's namespace: packing of rows, how a
// block begins and ends (regatta/blocks.h), and what adapters add to its products. It is compiled
// once for each ISA, in phases.cc. The products themselves are in gemm.h.
#include "rows.inl"

namespace regatta::cpu::REGATTA_ISA {

// Writes values[0 .. count) to columns [column, column + count) of a row. `column` is a multiple of
// 32; count is too unless the row ends there.
template <class T>
void pack_columns(const PackedRows& rows, int64_t row, int64_t column, const T* values,
                  int64_t count);

// A whole row.
template <class T>
void pack_row(const PackedRows& rows, int64_t row, const T* values);

// x: [num_rows, width], rows `stride` elements apart. No barrier at the end.
template <class T>
void pack_rows(Team& team, const PackedRows& rows, const T* x, int64_t stride);

// Rounds a row of floats that waited for being whole (PackedRows::staged).
void round_staged_row(const PackedRows& rows, int64_t row);

// The barrier after rows were filled: when it is passed, they can be multiplied.
void complete_rows(Team& team, const PackedRows& rows);

// out[row + i, column + j] = tile[i][j] (+ bias[column + j]) (+ residual[row + i, column + j]).
// out and residual have rows `stride` elements apart and may be the same memory.
template <class T, class Out>
void store_tile(const Tile& tile, const T* bias, const Out* residual, Out* out, int64_t stride);

template <class T, class Out>
void store_tile(const Tile& tile, const T* bias, Out* out, int64_t stride) {
  store_tile(tile, bias, static_cast<const Out*>(nullptr), out, stride);
}

// function(gate) * up of a tile in halves, or function(up) of one tile, into columns of the rows
// that `down` multiplies; and into `kept` [rows, width], unless null. bias: the gate's, and
// `up_offset` behind it up's; or null.
template <class T>
void activate_tile(const Activation& of, const PackedRows& rows, const Tile& tile, const T* bias,
                   int64_t up_offset, float* kept = nullptr);

// The same of a whole row of products, into row `row`; changes them.
void activate_products(const Activation& of, const PackedRows& rows, int64_t row, float* products);

template <class T>
RowNorm<T> row_norm(const Norm& norm, const NormWeights& weights) {
  return {static_cast<const T*>(weights.weight), static_cast<const T*>(weights.bias), norm.epsilon,
          norm.kind == NormKind::kLayer, norm.plus_one};
}

// Rows of x, as the block's norm leaves them, into `rows`; and into `kept`, unless null, rounded.
// No barrier at the end.
template <class T>
void take_rows(Team& team, const PackedRows& rows, const T* x, const Norm& norm,
               const NormWeights& weights, T* kept);

// What becomes of a row that a block made: norms and sum.
template <class T>
struct RowEnding {
  const T* source;  // [rows, width] or null
  T* out;           // [rows, width]
  int64_t width;
  Residual residual;
  RowNorm<T> post_norm;
  bool has_post_norm;
  Placement post_norm_of;
  bool partial;  // rows are to be summed over all ranks ahead of all this

  template <class Block>
  RowEnding(const Block& block, const NormWeights& post, const T* summed, T* out_rows,
            int64_t hidden_size)
      : source(block.residual.source == Source::kNone ? nullptr : summed),
        out(out_rows),
        width(hidden_size),
        residual(block.residual),
        post_norm(row_norm<T>(block.post_norm, post)),
        has_post_norm(block.post_norm.is_there),
        post_norm_of(block.post_norm_of),
        partial(block.partial) {}

  // Whether tiles of the product make it.
  bool is_of_product() const { return !has_post_norm && !partial && residual.is_of_product(); }

  // The sum over ranks of rows [num_rows, width], where they are partial: behind a barrier, and
  // with one at its end.
  void sum_ranks(Team& team, int64_t num_rows, float* values) const {
    if (!partial) return;
    team.once([&] { sum_of_ranks(values, num_rows * width); });
    team.barrier();
  }

  // values: [width], changed.
  void complete(int64_t row, float* values) const;
};

// A tile's products plus rows [.., stride] that are beside it.
template <class T>
void add_to_tile(const Tile& tile, const T* rows, int64_t stride);

// A block's output of its last product's tiles: bias, norms and sum. Of what a block only sums, it
// is made of the tiles; else once the rows are whole.
template <class T>
struct Ending {
  const T* bias;
  int64_t num_rows;
  RowEnding<T> rows;
  float* made = nullptr;  // [rows, width], where rows must be whole
  T* kept = nullptr;      // where the normed input is kept for the sum, or null

  // hidden, out: of these rows. Takes scratch that lives as long as the caller's scope.
  template <class Block>
  Ending(const Block& block, const NormWeights& post, const void* product_bias, const T* hidden,
         T* out, int64_t num_rows, int64_t hidden_size, Scratch& scratch)
      : bias(static_cast<const T*>(product_bias)),
        num_rows(num_rows),
        rows(block, post, hidden, out, hidden_size) {
    if (rows.is_of_product()) return;
    made = scratch.take<float>(num_rows * hidden_size);
    if (block.residual.source == Source::kNormed) {
      rows.source = kept = scratch.take<T>(num_rows * hidden_size);
    }
  }

  void operator()(const Tile& tile) const {
    if (made) return store_tile(tile, bias, made, rows.width);
    store_tile(tile, bias, rows.source, rows.out, rows.width);
  }

  // Behind all tiles, by the whole team.
  void complete(Team& team) const;
};

// What adapters add to a linear's products (regatta/adapters.h), for some rows. Two steps: `shrink`
// makes each row's few sums x A^T, a page for a thread at a time; `add` puts their products with B
// into a tile while it is in L1. A row's values depend on no other row.
template <class T>
class Addend {
 public:
  // rows: of the tokens from `begin` on. part_sizes: output features of each part. Takes scratch
  // that lives as long as the caller's scope.
  Addend(const AdapterRows& rows, Adapted which, const LowRankWeights& weights, int64_t begin,
         int64_t num_rows, int64_t in_features, std::initializer_list<int64_t> part_sizes,
         Scratch& scratch);

  bool any() const { return num_jobs_ > 0; }

  // x: rows `stride` apart. Without a barrier before or behind it.
  template <class X>
  void shrink(Team& team, const X* x, int64_t stride) const;

  // A tile becomes what it is with the adapters' part; its second half too.
  void add(const Tile& tile) const {
    if (!any()) return;
    add_to(tile, tile.column, tile.products);
    if (tile.second) add_to(tile, tile.column + out_features_ / 2, tile.second);
  }

 private:
  struct Job {
    int32_t row, page;  // the row's first, second, ...
  };

  int64_t row_sums() const { return max_pages_ * num_parts_ * kPageRanks; }
  template <class X>
  void page_sums(const X* x, const T* a, float* sums) const;
  void add_to(const Tile& tile, int64_t column, float* products) const;
  void add_page(const float* sums, const T* b, int64_t count, float* values) const;

  static constexpr int kMaxParts = 3;
  int64_t width_, packed_width_;  // of inputs
  int64_t num_groups_ = 0;        // of kPackedOut outputs
  int64_t out_features_ = 0, num_parts_ = 0, max_pages_ = 0;
  int64_t part_begin_[kMaxParts + 1] = {};
  const T *a_ = nullptr, *b_ = nullptr;
  const int32_t** pages_ = nullptr;  // [rows] of each row's adapter; null: it has none
  Job* jobs_ = nullptr;
  int64_t num_jobs_ = 0;
  float* sums_ = nullptr;  // [rows, pages, parts, kPageRanks]
};

// Addend::shrink and the barrier that the product behind it needs; nothing where no row has one.
template <class T, class X>
inline void shrink(Team& team, const Addend<T>& addend, const X* x, int64_t stride) {
  if (!addend.any()) return;
  addend.shrink(team, x, stride);
  team.barrier();
}

// A block's input as its norm leaves it, rounded, where the sum or adapters read it.
template <class T>
struct Kept {
  T* kept = nullptr;        // where take_rows() puts it, or null
  const T* rows = nullptr;  // it; null where nobody asked

  // x: [num_rows, width] the block's input. for_addend: whether adapters read it.
  Kept(const Ending<T>& ending, const Norm& norm, const T* x, bool for_addend, int64_t num_rows,
       Scratch& scratch)
      : kept(ending.kept) {
    if (for_addend && norm.is_there && kept == nullptr) {
      kept = scratch.take<T>(num_rows * ending.rows.width);
    }
    rows = norm.is_there ? kept : x;
  }
};

}  // namespace regatta::cpu::REGATTA_ISA
