// What a block op calls inside its region: packing of rows, the norm in front of a GEMM, the GEMM,
// and the usual ways to store its tiles. An op's .inl includes this once; rules are in gemm.h.
#include "rows.inl"

namespace regatta::cpu::REGATTA_ISA {

enum class Fill : uint8_t { kByRow, kByColumns };  // pack_row() alone, or pack_columns() too

// Rows to be filled, in memory of `scratch` (the caller's, taken before the region), with at most
// `max_tile_rows` in a tile.
inline PackedRows make_rows(const Gemm& gemm, Scratch& scratch, int64_t num_rows, Fill fill,
                            int64_t max_tile_rows) {
  PackedRows rows;
  rows.format = gemm.kernels->row_format;
  rows.num_rows = num_rows;
  rows.width = gemm.weight.in_features;
  rows.transform = gemm.transform;
  const bool whole_rows = rows.transform.any() || (rows.format == RowFormat::kInt8Rows &&
                                                   rows.transform.static_scale == 0.0f);
  if (whole_rows && fill == Fill::kByColumns) {
    rows.staged = scratch.take<float>(num_rows * rows.width);
  }
  // Balanced tiles: 13 rows are 7 + 6, not 12 + 1.
  const int64_t num_tiles = (num_rows + max_tile_rows - 1) / max_tile_rows;
  rows.tile_rows = num_tiles > 0 ? (num_rows + num_tiles - 1) / num_tiles : 1;
  rows.data = scratch.take<char>(rows.num_tiles() * rows.tile_bytes());
  return rows;
}
inline PackedRows make_rows(const Gemm& gemm, Scratch& scratch, int64_t num_rows, Fill fill) {
  return make_rows(gemm, scratch, num_rows, fill, gemm.kernels->max_tile_rows);
}

namespace internal {

// 32 values as int8, q = x / scale to the nearest (even on ties), and what goes with them.
// scale: 0 makes it absmax / 127. A NaN or infinity makes the scale a NaN or infinity.
REGATTA_INLINE void round_block(const Vec* x, float scale, int32_t offset, int8_t* out,
                                BlockScale* meta) {
  constexpr int kVectors = static_cast<int>(kBlock) / Vec::kLanes;
  Vec scaled[kVectors];
  if (scale == 0.0f) {
    Vec largest = zero();
    for (int v = 0; v < kVectors; ++v) largest = max_magnitude(largest, x[v]);
    const float absmax = reduce_magnitude(largest);
    scale = absmax / 127.0f;
    const Vec inverse = set1(absmax < 1e-30f ? 0.0f : 127.0f / absmax);
    for (int v = 0; v < kVectors; ++v) scaled[v] = x[v] * inverse;
  } else {
    for (int v = 0; v < kVectors; ++v) scaled[v] = x[v] / set1(scale);
  }
  const int32_t sum = store_int8(scaled, out);
  meta->scale = scale;
  if (offset) {
    meta->start = -offset * sum;
  } else {
    meta->value_sum = scale * static_cast<float>(sum);
  }
}

// pack_columns() of an int8 format, all blocks with `scale` (0: each its own).
template <class T>
inline void pack_int8(const PackedRows& rows, int64_t row, int64_t column, const T* values,
                      int64_t count, float scale) {
  constexpr int kLanes = Vec::kLanes;
  constexpr int kVectors = static_cast<int>(kBlock) / kLanes;
  const int64_t tile = row / rows.tile_rows;
  BlockScale* metas = rows.block_scales(tile) + row - tile * rows.tile_rows;
  for (int64_t i = 0; i < count; i += kBlock) {
    Vec x[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const int64_t left = count - i - v * kLanes;
      x[v] = left >= kLanes ? load(values + i + v * kLanes)
             : left > 0     ? load_n(values + i + v * kLanes, static_cast<int>(left))
                            : zero();
    }
    const int64_t at = column + i;
    auto* out = reinterpret_cast<int8_t*>(rows.line(row, at)) + at % 64;
    round_block(x, scale, rows.transform.offset, out, metas + at / kBlock * rows.tile_rows);
  }
}

}  // namespace internal

// Writes values[0 .. count) to columns [column, column + count) of a row. `column` is a multiple of
// 32; count is too unless the row ends there.
template <class T>
inline void pack_columns(const PackedRows& rows, int64_t row, int64_t column, const T* values,
                         int64_t count) {
  constexpr int kLanes = Vec::kLanes;
  if (rows.staged) return copy_row(values, rows.staged + row * rows.width + column, count);
  if (rows.is_int8()) {
    return internal::pack_int8(rows, row, column, values, count, rows.transform.static_scale);
  }
  const int64_t step = rows.tile_rows * kLineBytes;
  char* line = rows.line(row, column);
  if (rows.format == RowFormat::kFloat32) {
    for (int64_t i = 0; i < count; i += 16, line += step) {
      float* out = reinterpret_cast<float*>(line);
      if (count - i >= 16) {
        for (int j = 0; j < 16; j += kLanes) store(out + j, load(values + i + j));
      } else {
        for (int64_t j = 0; j < count - i; ++j) out[j] = to_float(values[i + j]);
        out[count - i] = 0.0f;  // weights stored in pairs pad an odd row with a zero
      }
    }
  } else {
    for (int64_t i = 0; i < count; i += 32, line += step) {
      bf16* out = reinterpret_cast<bf16*>(line);
      if (count - i >= 32) {
        for (int j = 0; j < 32; j += kLanes) store(out + j, load(values + i + j));
      } else {
        for (int64_t j = 0; j < count - i; ++j) from_float(to_float(values[i + j]), out + j);
        out[count - i].bits = 0;
      }
    }
  }
}

namespace internal {

// A whole row as the kernels read it: transformed, then rounded.
template <class T>
inline void round_row(const PackedRows& rows, int64_t row, const T* values) {
  const RowTransform& transform = rows.transform;
  if (transform.any()) {
    Scratch::Scope scope(Scratch::mine());
    float* changed = Scratch::mine().take<float>(rows.width);
    for (int64_t k = 0; k < rows.width; ++k) {
      float value = to_float(values[transform.perm ? transform.perm[k] : k]);
      if (transform.shift) value += transform.shift[k];
      if (transform.smooth) value *= transform.smooth[k];
      changed[k] = value;
    }
    PackedRows plain = rows;
    plain.transform.perm = nullptr;
    plain.transform.shift = plain.transform.smooth = nullptr;
    return round_row(plain, row, changed);
  }
  PackedRows direct = rows;
  direct.staged = nullptr;
  if (rows.format != RowFormat::kInt8Rows || transform.static_scale != 0.0f) {
    return pack_columns(direct, row, 0, values, rows.width);
  }
  Vec largest = zero();
  for_lanes(
      rows.width,
      [&](int64_t i) REGATTA_LAMBDA_INLINE { largest = max_magnitude(largest, load(values + i)); },
      [&](int64_t i, int n)
          REGATTA_LAMBDA_INLINE { largest = max_magnitude(largest, load_n(values + i, n)); });
  const float absmax = reduce_magnitude(largest);
  // A row of zeros: any scale will do.
  pack_int8(direct, row, 0, values, rows.width, absmax < 1e-30f ? 1.0f : absmax / 127.0f);
}

}  // namespace internal

template <class T>
inline void pack_row(const PackedRows& rows, int64_t row, const T* values) {
  if (rows.staged) {
    pack_columns(rows, row, 0, values, rows.width);
  } else {
    internal::round_row(rows, row, values);
  }
}

// Row `from` of `rows` as row `to` of others of the same format, width and transform.
inline void copy_packed_row(const PackedRows& rows, int64_t from, const PackedRows& others,
                            int64_t to) {
  const int64_t step = rows.tile_rows * kLineBytes, other_step = others.tile_rows * kLineBytes;
  const char* line = rows.line(from, 0);
  char* other = others.line(to, 0);
  for (int64_t i = 0; i < rows.num_lines(); ++i, line += step, other += other_step) {
    __builtin_memcpy(other, line, kLineBytes);
  }
  if (!rows.is_int8()) return;
  const int64_t tile = from / rows.tile_rows, other_tile = to / others.tile_rows;
  const BlockScale* scale = rows.block_scales(tile) + from - tile * rows.tile_rows;
  BlockScale* other_scale = others.block_scales(other_tile) + to - other_tile * others.tile_rows;
  for (int64_t i = 0; i < rows.num_blocks(); ++i) {
    other_scale[i * others.tile_rows] = scale[i * rows.tile_rows];
  }
}

// The barrier after rows were filled: when it is passed, they can be multiplied.
inline void complete_rows(Team& team, const PackedRows& rows) {
  team.barrier();
  if (!rows.staged) return;
  team.for_chunks(rows.num_rows, rows_per_claim(team, rows.num_rows),
                  [&](int64_t begin, int64_t end) {
                    for (int64_t i = begin; i < end; ++i) {
                      internal::round_row(rows, i, rows.staged + i * rows.width);
                    }
                  });
  team.barrier();
}

// x: [num_rows, width], rows `stride` elements apart. No barrier at the end.
template <class T>
inline void pack_rows(Team& team, const PackedRows& rows, const T* x, int64_t stride) {
  team.for_chunks(rows.num_rows, rows_per_claim(team, rows.num_rows),
                  [&](int64_t begin, int64_t end) {
                    for (int64_t i = begin; i < end; ++i) pack_row(rows, i, x + i * stride);
                  });
}

namespace internal {

// Products of some rows with some panels of a weight, job after job on one thread. Each panel
// brings the one `halves` further on, unless that is 0.
class PanelJobs {
 public:
  // Takes scratch that lives as long as the caller's scope.
  PanelJobs(const PackedRows& rows, const Weight& weight, int64_t halves, Scratch& scratch)
      : blocks_(rows), halves_(halves) {
    job_.rows = &rows;
    job_.weight = &weight;
    job_.scratch = &scratch;
    job_.out = scratch.take<float>(2 * blocks_.tiles * rows.tile_rows * kPanel);
  }

  // Few rows, panels [begin, end): walked from the start and from the middle at once, two streams
  // that both go on into the next panel, so that what is prefetched beyond the end of one is not
  // lost.
  //
  //   | p0 p1 p2 p3 | p4 p5 p6 p7 |     jobs (p0, p4) (p1, p5) (p2, p6) (p3, p7)
  template <class Each>
  void two_streams(int64_t begin, int64_t end, Each&& each) {
    const int64_t distance = (end - begin + 1) / 2;
    for (int64_t panel = begin; panel < begin + distance; ++panel) {
      run(0, panel, panel + distance < end ? panel + distance : -1, each);
    }
  }

  // Units [begin, end), of which each panel has `num_blocks`: its products with the blocks of rows
  // from `first_block` on, one after the other.
  template <class Each>
  void blocks(int64_t begin, int64_t end, int64_t first_block, int64_t num_blocks, Each&& each) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t panel = unit / num_blocks;
      run(first_block + unit % num_blocks, panel, halves_ ? panel + halves_ : -1, each);
    }
  }

 private:
  template <class Each>
  void run(int64_t block, int64_t panel, int64_t other, Each&& each) {
    job_.tile_begin = block * blocks_.tiles;
    job_.tile_end = std::min(job_.tile_begin + blocks_.tiles, job_.rows->num_tiles());
    job_.panels[0] = panel;
    job_.panels[1] = other;
    job_.num_panels = other < 0 ? 1 : 2;
    each(job_);
  }

  PanelJob job_;
  RowBlocks blocks_;
  int64_t halves_;
};

// Runs each(job) for pieces of rows x [0, num_panels) panels, shared out over the team.
//
// Few rows: two streams in a thread's run of panels. Runs are of pairs: a panel by itself takes
// longer (3 % of a 0.5B model's weights). Many rows: one block of rows after the other passes over
// a panel, then over the next; first for as many rows as surely stay in L3, then for the others.
//
// With `halves`, each panel brings the one `halves` further on.
template <class Each>
inline void for_panels(Team& team, const GemmKernels& kernels, const PackedRows& rows,
                       const Weight& weight, int64_t num_panels, int64_t halves, Each&& each) {
  const bool few_rows = rows.num_rows <= kernels.max_rows_of_two;
  const RowBlocks blocks(rows);
  Scratch::Scope scope(team.scratch());
  PanelJobs jobs(rows, weight, halves, team.scratch());
  if (blocks.count > 1 && num_panels < 8 * team.num_threads()) {  // too few panels to balance
    team.for_guided(num_panels * blocks.count, [&](int64_t begin, int64_t end) {
      jobs.blocks(begin, end, 0, blocks.count, each);
    });
    return;
  }
  if (few_rows && !halves) {
    team.for_guided((num_panels + 1) / 2, [&](int64_t first, int64_t last) {
      jobs.two_streams(2 * first, std::min(2 * last, num_panels), each);
    });
    return;
  }
  team.for_guided(num_panels, [&](int64_t begin, int64_t end) {
    for (int64_t first = 0; first < blocks.count; first += blocks.cached) {
      const int64_t count = std::min(blocks.cached, blocks.count - first);
      jobs.blocks(begin * count, end * count, first, count, each);
    }
  });
}

}  // namespace internal

// store(row, num_rows, column, num_columns, tile): tile is [num_rows][kPanel], complete products of
// rows [row, row + num_rows) and output columns [column, column + num_columns). Each (row, column)
// comes exactly once, on some thread; the tile may be changed. No barrier inside.
template <class Store>
inline void gemm(Team& team, const Gemm& gemm, const PackedRows& rows, Store&& store) {
  const GemmKernels& kernels = *gemm.kernels;
  const Weight& weight = gemm.weight;
  internal::for_panels(
      team, kernels, rows, weight, weight.num_panels(), 0, [&](const PanelJob& job) {
        kernels.run(job);
        const int64_t num_rows = job.num_rows();
        for (int i = 0; i < job.num_panels; ++i) {
          const int64_t column = job.panels[i] * kPanel;
          store(job.first_row(), num_rows, column, std::min(kPanel, weight.out_features - column),
                job.out + i * num_rows * kPanel);
        }
      });
}

// The halves of a weight together: column c and c + N / 2, where N / 2 is a multiple of 32.
// store(row, num_rows, column, num_columns, tile, tile_of_second_half), column in the first half.
template <class Store>
inline void gemm_halves(Team& team, const Gemm& gemm, const PackedRows& rows, Store&& store) {
  const GemmKernels& kernels = *gemm.kernels;
  const Weight& weight = gemm.weight;
  const int64_t halves = weight.num_panels() / 2;
  internal::for_panels(team, kernels, rows, weight, halves, halves, [&](const PanelJob& job) {
    kernels.run(job);
    const int64_t tile_floats = job.num_rows() * kPanel;
    store(job.first_row(), job.num_rows(), job.panels[0] * kPanel, kPanel, job.out,
          job.out + tile_floats);
  });
}

// out[row + i, column + j] = tile[i][j] (+ bias[column + j]) (+ residual[row + i, column + j]).
// out and residual have rows `stride` elements apart and may be the same memory.
template <class Out, class T>
inline void store_tile(const float* tile, int64_t row, int64_t num_rows, int64_t column,
                       int64_t num_columns, const T* bias, const Out* residual, Out* out,
                       int64_t stride) {
  constexpr int kLanes = Vec::kLanes;
  for (int64_t i = 0; i < num_rows; ++i) {
    const float* in = tile + i * kPanel;
    Out* to = out + (row + i) * stride + column;
    const Out* add = residual ? residual + (row + i) * stride + column : nullptr;
    int64_t j = 0;
    for (; j + kLanes <= num_columns; j += kLanes) {
      Vec value = load(in + j);
      if (bias) value = value + load(bias + column + j);
      if (add) value = value + load(add + j);
      store(to + j, value);
    }
    if (const int rest = static_cast<int>(num_columns - j)) {
      Vec value = load_n(in + j, rest);
      if (bias) value = value + load_n(bias + column + j, rest);
      if (add) value = value + load_n(add + j, rest);
      store_n(to + j, value, rest);
    }
  }
}

}  // namespace regatta::cpu::REGATTA_ISA
