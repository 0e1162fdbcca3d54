// See block.inl.
// clang-format off: functions.inl uses what block.inl includes
#include "block.inl"
#include "functions.inl"
// clang-format on

namespace regatta::cpu::REGATTA_ISA {

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
void pack_int8(const PackedRows& rows, int64_t row, int64_t column, const T* values, int64_t count,
               float scale) {
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

// pack_columns() of a format of bf16 or fp16.
template <class Half, class T>
void pack_halves(const PackedRows& rows, int64_t row, int64_t column, const T* values,
                 int64_t count) {
  char* line = rows.line(row, column);
  for (int64_t i = 0; i < count; i += 32, line += rows.tile_rows * kLineBytes) {
    auto* out = reinterpret_cast<Half*>(line);
    if (count - i >= 32) {
      for (int j = 0; j < 32; j += Vec::kLanes) store(out + j, load(values + i + j));
    } else {
      for (int64_t j = 0; j < count - i; ++j) from_float(to_float(values[i + j]), out + j);
      for (int64_t j = count - i; j < 32; ++j) out[j].bits = 0;
    }
    if (rows.format == RowFormat::kBFloat16Sums) {
      Vec sum = zero();
      for (int j = 0; j < kBlock; j += Vec::kLanes) sum = sum + load(out + j);
      const int64_t tile = row / rows.tile_rows, block = (column + i) / kBlock;
      rows.block_scales(tile)[block * rows.tile_rows + row - tile * rows.tile_rows].value_sum =
          reduce_add(sum);
    }
  }
}

template <class T>
void pack_columns(const PackedRows& rows, int64_t row, int64_t column, const T* values,
                  int64_t count) {
  constexpr int kLanes = Vec::kLanes;
  if (rows.staged) return copy_row(values, rows.staged + row * rows.width + column, count);
  if (rows.is_int8()) {
    return pack_int8(rows, row, column, values, count, rows.transform.static_scale);
  }
  if (rows.format == RowFormat::kFloat16) {
    return pack_halves<fp16>(rows, row, column, values, count);
  }
  if (rows.is_16_bit()) return pack_halves<bf16>(rows, row, column, values, count);
  const int64_t step = rows.tile_rows * kLineBytes;
  char* line = rows.line(row, column);
#if REGATTA_HAS_SWAPPED_PAIRS
  if (rows.format == RowFormat::kSwappedPairs) {
    for (int64_t i = 0; i < count; i += 16, line += step) {
      store(reinterpret_cast<float*>(line),
            swapped_pairs(load_n(values + i, lanes_left(count - i))));
    }
    return;
  }
#endif
  for (int64_t i = 0; i < count; i += 16, line += step) {
    float* out = reinterpret_cast<float*>(line);
    if (count - i >= 16) {
      for (int j = 0; j < 16; j += kLanes) store(out + j, load(values + i + j));
    } else {
      for (int64_t j = 0; j < count - i; ++j) out[j] = to_float(values[i + j]);
      out[count - i] = 0.0f;  // weights stored in pairs pad an odd row with a zero
    }
  }
}

// A whole row as the kernels read it: transformed, then rounded.
template <class T>
void round_row(const PackedRows& rows, int64_t row, const T* values) {
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
  for_lanes(rows.width, [&](int64_t i, auto n) REGATTA_LAMBDA_INLINE {
    largest = max_magnitude(largest, load_n(values + i, n));
  });
  const float absmax = reduce_magnitude(largest);
  // A row of zeros: any scale will do.
  pack_int8(direct, row, 0, values, rows.width, absmax < 1e-30f ? 1.0f : absmax / 127.0f);
}

template <class T>
void pack_row(const PackedRows& rows, int64_t row, const T* values) {
  if (rows.staged) {
    pack_columns(rows, row, 0, values, rows.width);
  } else {
    round_row(rows, row, values);
  }
}

template <class T>
void pack_rows(Team& team, const PackedRows& rows, const T* x, int64_t stride) {
  for_rows(team, rows.num_rows, [&](int64_t i) { pack_row(rows, i, x + i * stride); });
}

void round_staged_row(const PackedRows& rows, int64_t row) {
  round_row(rows, row, rows.staged + row * rows.width);
}

void complete_rows(Team& team, const PackedRows& rows) {
  team.barrier();
  if (!rows.staged) return;
  for_rows(team, rows.num_rows, [&](int64_t i) { round_staged_row(rows, i); });
  team.barrier();
}

template <class T>
void take_rows(Team& team, const PackedRows& rows, const T* x, const Norm& norm,
               const NormWeights& weights, T* kept) {
  if (!norm.is_there) return pack_rows(team, rows, x, rows.width);
  const RowNorm<T> made = row_norm<T>(norm, weights);
  Scratch::Scope scope(team.scratch());
  float* row = team.scratch().take<float>(rows.width);
  for_rows(team, rows.num_rows, [&](int64_t i) {
    norm_row(x + i * rows.width, made, row, rows.width);
    pack_row(rows, i, row);
    if (kept) copy_row(row, kept + i * rows.width, rows.width);
  });
}

template <class T, class Out>
void store_tile(const Tile& tile, const T* bias, const Out* residual, Out* out, int64_t stride) {
  const int64_t column = tile.column;
  for (int64_t i = 0; i < tile.num_rows; ++i) {
    const float* in = tile.products + i * kPanel;
    Out* to = out + (tile.row + i) * stride + column;
    const Out* add = residual ? residual + (tile.row + i) * stride + column : nullptr;
    for_lanes(tile.num_columns, [&](int64_t j, auto n) REGATTA_LAMBDA_INLINE {
      Vec value = load_n(in + j, n);
      if (bias) value = value + load_n(bias + column + j, n);
      if (add) value = value + load_n(add + j, n);
      store_n(to + j, value, n);
    });
  }
}

template <class T>
void add_to_tile(const Tile& tile, const T* rows, int64_t stride) {
  for (int64_t i = 0; i < tile.num_rows; ++i) {
    const T* from = rows + (tile.row + i) * stride + tile.column;
    float* to = tile.products + i * kPanel;
    for_lanes(tile.num_columns, [&](int64_t j, auto n) REGATTA_LAMBDA_INLINE {
      store_n(to + j, load_n(to + j, n) + load_n(from + j, n), n);
    });
  }
}

template <Function kFunction, class T>
void activate_tile_by(const Activation& of, const PackedRows& rows, const Tile& tile, const T* bias,
                      int64_t up_offset, float* kept) {
  constexpr int kLanes = Vec::kLanes;
  const bool plain = of.is_plain();
  const int64_t column = tile.column;
  const float* up = tile.second;
  float values[kPanel];
  for (int64_t i = 0; i < tile.num_rows; ++i) {
    for (int j = 0; j < kPanel; j += kLanes) {
      Vec x = load(tile.products + i * kPanel + j);
      if (bias) x = x + load(bias + column + j);
      if (!up) {
        store(values + j, apply<kFunction>(x));
        continue;
      }
      Vec u = load(up + i * kPanel + j);
      if (bias) u = u + load(bias + up_offset + column + j);
      store(values + j, plain ? apply<kFunction>(x) * u : gated<kFunction>(of, x, u));
    }
    pack_columns(rows, tile.row + i, column, values, kPanel);
    if (kept) copy_row(values, kept + (tile.row + i) * rows.width + column, kPanel);
  }
}

template <class T>
void activate_tile(const Activation& of, const PackedRows& rows, const Tile& tile, const T* bias,
                   int64_t up_offset, float* kept) {
  with_function(of.function, [&](auto function) {
    activate_tile_by<decltype(function)::value>(of, rows, tile, bias, up_offset, kept);
  });
}

void activate_products(const Activation& of, const PackedRows& rows, int64_t row, float* products) {
  const float* up = of.gated ? products + rows.width : nullptr;
  with_function(of.function, [&](auto function) {
    activate_row<decltype(function)::value>(of, static_cast<const float*>(products), up, products,
                                            rows.width);
  });
  pack_row(rows, row, static_cast<const float*>(products));
}

template <class T>
void RowEnding<T>::complete(int64_t row, float* values) const {
  if (has_post_norm && post_norm_of == Placement::kOutput) {
    norm_row(values, post_norm, values, width);
  }
  const T* from = source + row * width;
  const Vec in_scale = set1(residual.input_scale), out_scale = set1(residual.output_scale);
  for (int64_t i = 0; source && i < width; i += Vec::kLanes) {
    const int n = lanes_left(width - i);
    store_n(values + i, fma(load_n(values + i, n), out_scale, load_n(from + i, n) * in_scale), n);
  }
  if (has_post_norm && post_norm_of == Placement::kSum) {
    norm_row(values, post_norm, values, width);
  }
  copy_row(values, out + row * width, width);
}

template <class T>
void Ending<T>::complete(Team& team) const {
  if (!made) return;
  team.barrier();
  rows.sum_ranks(team, num_rows, made);
  for_rows(team, num_rows, [&](int64_t row) { rows.complete(row, made + row * rows.width); });
}

template <class T>
Addend<T>::Addend(const AdapterRows& rows, Adapted which, const LowRankWeights& weights,
                  int64_t begin, int64_t num_rows, int64_t in_features,
                  std::initializer_list<int64_t> part_sizes, Scratch& scratch)
    : width_(in_features), packed_width_((in_features + kPackedIn - 1) / kPackedIn * kPackedIn) {
  if (rows.ids == nullptr || weights.a == nullptr) return;
  for (const int64_t size : part_sizes) {
    if (size == 0) continue;
    part_begin_[num_parts_++] = out_features_;
    out_features_ += size;
  }
  part_begin_[num_parts_] = out_features_;
  num_groups_ = (out_features_ + kPackedOut - 1) / kPackedOut;
  a_ = static_cast<const T*>(weights.a);
  b_ = static_cast<const T*>(weights.b);
  pages_ = scratch.take<const int32_t*>(num_rows);
  jobs_ = scratch.take<Job>(num_rows * rows.max_pages);
  max_pages_ = rows.max_pages;
  for (int64_t i = 0; i < num_rows; ++i) {
    const int32_t id = rows.ids[begin + i];
    const auto row = id * kNumAdapted + static_cast<int64_t>(which);
    pages_[i] = id < 0 ? nullptr : rows.pages + row * max_pages_;
    for (int64_t j = 0; j < max_pages_ && id >= 0 && pages_[i][j] >= 0; ++j) {
      jobs_[num_jobs_++] = {static_cast<int32_t>(i), static_cast<int32_t>(j)};
    }
  }
  if (num_jobs_ > 0) sums_ = scratch.take<float>(num_rows * row_sums());
}

template <class T>
template <class X>
void Addend<T>::shrink(Team& team, const X* x, int64_t stride) const {
  for_rows(team, num_jobs_, [&](int64_t i) {
    const Job& job = jobs_[i];
    for (int64_t part = 0; part < num_parts_; ++part) {
      const int64_t at = pages_[job.row][job.page] * num_parts_ + part;
      page_sums(x + job.row * stride, a_ + at * kPageRanks * packed_width_,
                sums_ + job.row * row_sums() + (job.page * num_parts_ + part) * kPageRanks);
    }
  });
}

template <class T>
void Addend<T>::add_to(const Tile& tile, int64_t column, float* products) const {
  for (int64_t i = 0; i < tile.num_rows; ++i) {
    const int32_t* pages = pages_[tile.row + i];
    if (pages == nullptr) continue;
    const float* sums = sums_ + (tile.row + i) * row_sums();
    for (int64_t page = 0; page < max_pages_ && pages[page] >= 0; ++page) {
      for (int64_t part = 0; part < num_parts_; ++part) {
        const int64_t first = std::max(column, part_begin_[part]) - column;
        const int64_t last = std::min(column + tile.num_columns, part_begin_[part + 1]) - column;
        const int64_t at = pages[page] * num_groups_ + column / kPackedOut;
        add_page(sums + (page * num_parts_ + part) * kPageRanks,
                 b_ + at * kPageRanks * kPackedOut + first, last - first,
                 products + i * kPanel + first);
      }
    }
  }
}

// The first rank's values from column k on.
template <class T>
const T* packed(const T* a, int64_t k) {
  return a + k / kPackedIn * kPageRanks * kPackedIn + k % kPackedIn;
}

template <class T>
template <class X>
void Addend<T>::page_sums(const X* x, const T* a, float* sums) const {
  static_assert(kPackedIn % Vec::kLanes == 0);
  Vec made[kPageRanks];
  for (Vec& each : made) each = zero();
  // Lanes of x behind the row's end are 0, as what is packed there.
  for_lanes(width_, [&](int64_t k, auto n) REGATTA_LAMBDA_INLINE {
    const Vec value = load_n(x + k, n);
    const T* from = packed(a, k);
    for (int r = 0; r < kPageRanks; ++r) {
      made[r] = fma(value, load(from + r * kPackedIn), made[r]);
    }
  });
  for (int r = 0; r < kPageRanks; ++r) sums[r] = reduce_add(made[r]);
}

// values[0 .. count) += sums B, of columns in one group. Asks for the group behind it: each row's
// adapter is a stream of its own, and few of them at a time are found by the hardware.
template <class T>
void Addend<T>::add_page(const float* sums, const T* b, int64_t count, float* values) const {
  static_assert(kPackedOut == kPanel);
  constexpr int64_t kLine = kLineBytes / sizeof(T);
  for (int64_t i = 0; i < kPageRanks * kPackedOut; i += kLine) {
    __builtin_prefetch(b + kPageRanks * kPackedOut + i);
  }
  for_lanes(count, [&](int64_t j, auto n) REGATTA_LAMBDA_INLINE {
    Vec value = load_n(values + j, n);
    for (int r = 0; r < kPageRanks; ++r) {
      value = fma(set1(sums[r]), load_n(b + r * kPackedOut + j, n), value);
    }
    store_n(values + j, value, n);
  });
}

#define REGATTA_PHASES_OF(T)                                                                   \
  template void pack_columns(const PackedRows&, int64_t, int64_t, const T*, int64_t);          \
  template void pack_row(const PackedRows&, int64_t, const T*);                                \
  template void pack_rows(Team&, const PackedRows&, const T*, int64_t);                        \
  template void store_tile(const Tile&, const T*, const T*, T*, int64_t);                      \
  template void add_to_tile(const Tile&, const T*, int64_t);                                   \
  template void activate_tile(const Activation&, const PackedRows&, const Tile&, const T*,     \
                              int64_t, float*);                                                \
  template void take_rows(Team&, const PackedRows&, const T*, const Norm&, const NormWeights&, \
                          T*);                                                                 \
  template struct RowEnding<T>;                                                                \
  template struct Ending<T>;                                                                   \
  template class Addend<T>;                                                                    \
  template void Addend<T>::shrink(Team&, const T*, int64_t) const;
REGATTA_PHASES_OF(float)
REGATTA_PHASES_OF(bf16)
REGATTA_PHASES_OF(fp16)
#undef REGATTA_PHASES_OF
template void store_tile(const Tile&, const bf16*, const float*, float*, int64_t);
template void store_tile(const Tile&, const fp16*, const float*, float*, int64_t);
template void Addend<bf16>::shrink(Team&, const float*, int64_t) const;
template void Addend<fp16>::shrink(Team&, const float*, int64_t) const;

}  // namespace regatta::cpu::REGATTA_ISA
