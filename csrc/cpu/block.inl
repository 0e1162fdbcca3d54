// How every block begins and ends (regatta/blocks.h): the norm ahead of its first product, and what
// becomes of its last one. Behind gemm.inl.
namespace regatta::cpu::REGATTA_ISA {

template <class T>
RowNorm<T> row_norm(const Norm& norm, const NormWeights& weights) {
  return {static_cast<const T*>(weights.weight), static_cast<const T*>(weights.bias), norm.epsilon,
          norm.kind == NormKind::kLayer, norm.plus_one};
}

// Rows of x, as the block's norm leaves them, into `rows`; and into `kept`, unless null, rounded.
// No barrier at the end.
template <class T>
inline void take_rows(Team& team, const PackedRows& rows, const T* x, const Norm& norm,
                      const NormWeights& weights, T* kept) {
  if (!norm.is_there) return pack_rows(team, rows, x, rows.width);
  const RowNorm<T> made = row_norm<T>(norm, weights);
  Scratch::Scope scope(team.scratch());
  float* row = team.scratch().take<float>(rows.width);
  team.for_chunks(rows.num_rows, rows_per_claim(team, rows.num_rows),
                  [&](int64_t begin, int64_t end) {
                    for (int64_t i = begin; i < end; ++i) {
                      norm_row(x + i * rows.width, made, row, rows.width);
                      pack_row(rows, i, row);
                      if (kept) copy_row(row, kept + i * rows.width, rows.width);
                    }
                  });
}

// What becomes of a row that a block made: norms and sum.
template <class T>
struct RowEnding {
  const T* source;  // [rows, width]
  T* out;           // [rows, width]
  int64_t width;
  Residual residual;
  RowNorm<T> post_norm;
  bool has_post_norm;
  Placement post_norm_of;

  template <class Block>
  RowEnding(const Block& block, const NormWeights& post, const T* summed, T* out_rows,
            int64_t hidden_size)
      : source(summed),
        out(out_rows),
        width(hidden_size),
        residual(block.residual),
        post_norm(row_norm<T>(block.post_norm, post)),
        has_post_norm(block.post_norm.is_there),
        post_norm_of(block.post_norm_of) {}

  bool is_plain_sum() const { return !has_post_norm && residual.is_plain_sum(); }

  // values: [width], changed.
  void complete(int64_t row, float* values) const {
    if (has_post_norm && post_norm_of == Placement::kOutput) {
      norm_row(values, post_norm, values, width);
    }
    const T* from = source + row * width;
    const Vec in_scale = set1(residual.input_scale), out_scale = set1(residual.output_scale);
    for (int64_t i = 0; i < width; i += Vec::kLanes) {
      const int n = lanes_left(width - i);
      store_n(values + i, fma(load_n(values + i, n), out_scale, load_n(from + i, n) * in_scale), n);
    }
    if (has_post_norm && post_norm_of == Placement::kSum) {
      norm_row(values, post_norm, values, width);
    }
    copy_row(values, out + row * width, width);
  }
};

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
    if (rows.is_plain_sum()) return;
    made = scratch.take<float>(num_rows * hidden_size);
    if (block.residual.source == Source::kNormed) {
      rows.source = kept = scratch.take<T>(num_rows * hidden_size);
    }
  }

  void operator()(int64_t row, int64_t num, int64_t column, int64_t num_columns,
                  const float* tile) const {
    if (made) {
      store_tile(tile, row, num, column, num_columns, bias, static_cast<const float*>(nullptr),
                 made, rows.width);
    } else {
      store_tile(tile, row, num, column, num_columns, bias, rows.source, rows.out, rows.width);
    }
  }

  // Behind all tiles, by the whole team.
  void complete(Team& team) const {
    if (!made) return;
    team.barrier();
    team.for_chunks(num_rows, rows_per_claim(team, num_rows), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) rows.complete(row, made + row * rows.width);
    });
  }
};

}  // namespace regatta::cpu::REGATTA_ISA
