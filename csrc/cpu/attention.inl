// Attention of ragged spans over a paged cache. Behind attend.inl, which says what ops call.
//
// What:    out = softmax(q . k * scale, causal, window) . v for each (token, query head) row.
// Layout:  K and V of one block and KV head are block_size rows, values or codes (kv_rows.inl); q
//          rows are D values, out rows as many or fewer: the first ones of a row of V count. Of
//          latents in fp8 a row of K ends in a tail that lies elsewhere, as values.
// How:     a tile of rows (tokens * query heads of one KV head) walks its context in chunks of 64
//          positions: arrange K transposed and V (for vdpbf16ps both in pairs), multiply, online
//          softmax (Milakov and Gimelshein 2018), multiply, as in FlashAttention. A partial result
//          per 512 positions, folded in order (flash-decoding); see attention_plan.h for why.
// Source:  own; FlashAttention-2 (Dao 2023) for the loop, flash-decoding for the splits.
// Bound:   decode: reading K and V from memory once per KV head; prefill: FMA or vdpbf16ps peak
//          (a chunk's arrangement is about 1/10 of a full tile's work, its softmax about 1/4).
namespace regatta::cpu::REGATTA_ISA {

// Register blocking of both products: kRegisterRows rows times kRegisterVecs vectors.
constexpr int kRegisterRows = Vec::kLanes == 16 || Vec::kLanes == 4 ? 6 : Vec::kLanes == 8 ? 4 : 2;
constexpr int kRegisterVecs = Vec::kLanes == 16 ? 4 : Vec::kLanes == 8 ? 2 : 4;
// Rows whose softmax is done together, one per lane where that helps.
constexpr int kSoftmaxRows = Vec::kLanes;
constexpr float kNothingSeen = -1e30f;  // largest score before the first; finite: x - x is 0
constexpr float kLog2e = 1.44269504f;

// Cache lines of the next chunk, asked for while this one is arranged and multiplied: a few in each
// step, because a burst would fill the miss queue and stall the loads behind it.
struct FetchAhead {
  const char* const* lines = nullptr;
  ptrdiff_t offset = 0;  // bytes from lines[i] to what is wanted
  int64_t count = 0;

  // The part-th of num_parts equal parts.
  REGATTA_INLINE FetchAhead part(int64_t part, int64_t num_parts) const {
    const int64_t begin = count * part / num_parts;
    return {lines + begin, offset, count * (part + 1) / num_parts - begin};
  }
  REGATTA_INLINE int64_t per_step(int64_t steps) const { return (count + steps - 1) / steps; }
  // What step `step` of those asks for.
  REGATTA_INLINE void fetch(int64_t step, int64_t per_step) const {
    const int64_t begin = step * per_step;
    const int64_t end = begin + per_step < count ? begin + per_step : count;
    for (int64_t i = begin; i < end; ++i) prefetch(lines[i] + offset);
  }
};

// c[r][j] = scales[r] * c[r][j] + sum over k of a[r][k] * b[k][j], k in order; without scales c is
// not read. b steps are `b_step` values apart, a and c rows lda and ldc. kRows * kVecs registers.
template <bool kDot>
struct Product {
  using F = typename Factor<kDot>::Type;
  using Fn = void (*)(const F* a, int64_t lda, const F* b, int64_t b_step, int64_t steps, float* c,
                      int64_t ldc, const float* scales, FetchAhead ahead);

  template <int kRows, int kVecs>
  static void run(const F* a, int64_t lda, const F* b, int64_t b_step, int64_t steps, float* c,
                  int64_t ldc, const float* scales, FetchAhead ahead) {
    constexpr int kLanes = Vec::kLanes;
    const int64_t fetches = ahead.per_step(steps);
    Vec sums[kRows][kVecs];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) sums[r][v] = zero();
    }
    if (scales) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Vec scale = set1(scales[r]);
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) sums[r][v] = load(c + r * ldc + v * kLanes) * scale;
      }
    }
    for (int64_t k = 0; k < steps; ++k, b += b_step) {
      ahead.fetch(k, fetches);
#if REGATTA_HAS_BF16_DOT
      if constexpr (kDot) {
        VecBf16 column[kVecs];
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) column[v] = load_pairs(b + v * 2 * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const VecBf16 factor = set1_pair(a + r * lda + 2 * k);
#pragma GCC unroll 8
          for (int v = 0; v < kVecs; ++v) sums[r][v] = dot_pairs(sums[r][v], factor, column[v]);
        }
      }
#endif
      if constexpr (!kDot) {
        Vec column[kVecs];
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) column[v] = load(b + v * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const Vec factor = set1(a[r * lda + k]);
#pragma GCC unroll 8
          for (int v = 0; v < kVecs; ++v) sums[r][v] = fma(factor, column[v], sums[r][v]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) store(c + r * ldc + v * kLanes, sums[r][v]);
    }
  }

  template <int... kIndex>
  static Fn kernel_at(int index, std::integer_sequence<int, kIndex...>) {
    static constexpr Fn kTable[] = {run<kIndex / kRegisterVecs + 1, kIndex % kRegisterVecs + 1>...};
    return kTable[index];
  }

  // rows in [1, kRegisterRows], vecs in [1, kRegisterVecs].
  static Fn kernel(int rows, int vecs) {
    return kernel_at((rows - 1) * kRegisterVecs + vecs - 1,
                     std::make_integer_sequence<int, kRegisterRows * kRegisterVecs>());
  }

  // Any number of columns: num_vecs vectors in equal parts of at most kRegisterVecs.
  static void columns(int rows, int num_vecs, const F* a, int64_t lda, const F* b, int64_t b_step,
                      int64_t steps, float* c, int64_t ldc, const float* scales,
                      const FetchAhead& ahead) {
    const int parts = (num_vecs + kRegisterVecs - 1) / kRegisterVecs;
    for (int part = 0; part < parts; ++part) {
      const int begin = num_vecs * part / parts, end = num_vecs * (part + 1) / parts;
      const int64_t column = begin * Vec::kLanes;
      kernel(rows, end - begin)(a, lda, b + column * Factor<kDot>::kPerStep, b_step, steps,
                                c + column, ldc, scales, ahead.part(part, parts));
    }
  }
};

#if REGATTA_HAS_TILES
constexpr bool kHasTiles = true;

// A product by tiles: c[r][j] (+)= sum over k of a[r][k] * b[k][j], of up to 16 rows and of any
// number of vectors of columns. As Product<true>::run, steps are pairs; sums as tiles.inl says.
struct TileProduct {
  tiles::Shapes& shapes;
  const bf16* a;
  int64_t lda;
  const bf16* b;
  int64_t b_step, steps;
  float* c;
  int64_t ldc;
  bool accumulate;
  FetchAhead ahead;

  // Of vectors `first` to `first` + sizeof...(kVec).
  template <int... kVec>
  void columns(int64_t first, FetchAhead part, std::integer_sequence<int, kVec...>) const {
    const int64_t fetches = part.per_step((steps + 15) / 16), stride = b_step * 2;
    const bf16* from = b + first * 32;
    float* sums = c + first * 16;
    if (accumulate) {
      (tiles::load<kVec>(sums + kVec * 16, ldc * 4), ...);
    } else {
      (tiles::zero<kVec>(), ...);
    }
    int64_t k = 0;
    for (; k + 16 <= steps; k += 16, from += 16 * b_step) {
      part.fetch(k / 16, fetches);
      tiles::load<4>(a + 2 * k, lda * 2);
      ((tiles::load<5>(from + kVec * 32, stride), tiles::dot<tiles::Factors::kPairs, kVec, 4, 5>()),
       ...);
    }
    if (k < steps) {
      part.fetch(k / 16, fetches);
      tiles::load<6>(a + 2 * k, lda * 2);
      ((tiles::load<7>(from + kVec * 32, stride), tiles::dot<tiles::Factors::kPairs, kVec, 6, 7>()),
       ...);
    }
    (tiles::store<kVec>(sums + kVec * 16, ldc * 4), ...);
  }

  // The same sums of a few rows by vectors: tiles would wait for b, which was stored just before.
  template <int kRows, int kVecs>
  void few_rows(int64_t first, FetchAhead part) const {
    const FlushDenormals flush;
    constexpr int kLanes = Vec::kLanes;
    const int64_t fetches = part.per_step(steps);
    const bf16* from = b + first * 32;
    float* const to = c + first * kLanes;
    Vec sums[kRows][kVecs];
    for (int i = 0; i < kRows * kVecs; ++i) {
      const int r = i / kVecs, v = i % kVecs;
      sums[r][v] = accumulate ? load(to + r * ldc + v * kLanes) : zero();
    }
    for (int64_t k = 0; k < steps;) {
      Vec even[kRows][kVecs], odd[kRows][kVecs];
      for (int i = 0; i < kRows * kVecs; ++i) {
        even[i / kVecs][i % kVecs] = odd[i / kVecs][i % kVecs] = zero();
      }
      for (const int64_t end = std::min(k + 16, steps); k < end; ++k, from += b_step) {
        part.fetch(k, fetches);
        Vec evens[kVecs], odds[kVecs];
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) load_2k(from + v * 32, evens[v], odds[v]);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          float pair;
          __builtin_memcpy(&pair, a + r * lda + 2 * k, 4);
          Vec x, y;
          split_pairs(set1(pair), x, y);
#pragma GCC unroll 8
          for (int v = 0; v < kVecs; ++v) {
            even[r][v] = fma(x, evens[v], even[r][v]);
            odd[r][v] = fma(y, odds[v], odd[r][v]);
          }
        }
      }
      for (int i = 0; i < kRows * kVecs; ++i) {
        const int r = i / kVecs, v = i % kVecs;
        sums[r][v] = sums[r][v] + (even[r][v] + odd[r][v]);
      }
    }
    for (int i = 0; i < kRows * kVecs; ++i) {
      const int r = i / kVecs, v = i % kVecs;
      store(to + r * ldc + v * kLanes, sums[r][v]);
    }
  }
  static constexpr int kFewRows = 4;
  template <int... kRow>
  void few_rows(int64_t rows, int64_t num_vecs, std::integer_sequence<int, kRow...>) const {
    using Fn = void (TileProduct::*)(int64_t, FetchAhead) const;
    static constexpr Fn kOne[] = {&TileProduct::few_rows<kRow + 1, 1>...};
    static constexpr Fn kTwo[] = {&TileProduct::few_rows<kRow + 1, 2>...};
    const int64_t parts = (num_vecs + 1) / 2;
    for (int64_t i = 0; i < parts; ++i) {
      const Fn* fns = num_vecs - 2 * i > 1 ? kTwo : kOne;
      (this->*fns[rows - 1])(2 * i, ahead.part(i, parts));
    }
  }

  void run(int64_t rows, int64_t num_vecs) const {
    if (rows <= kFewRows) {
      return few_rows(rows, num_vecs, std::make_integer_sequence<int, kFewRows>());
    }
    const int64_t rest = steps % 16;
    const tiles::Shape whole = {rows, tiles::kRowBytes};
    shapes.set({whole,
                whole,
                whole,
                whole,
                whole,
                {16, tiles::kRowBytes},
                {rest ? rows : 0, 4 * rest},
                {rest, rest ? tiles::kRowBytes : 0}});
    const int64_t parts = (num_vecs + 3) / 4;
    for (int64_t i = 0; i < parts; ++i) {
      const FetchAhead part = ahead.part(i, parts);
      const int64_t count = num_vecs - 4 * i;
      if (count >= 4) columns(4 * i, part, std::make_integer_sequence<int, 4>());
      if (count == 3) columns(4 * i, part, std::make_integer_sequence<int, 3>());
      if (count == 2) columns(4 * i, part, std::make_integer_sequence<int, 2>());
      if (count == 1) columns(4 * i, part, std::make_integer_sequence<int, 1>());
    }
  }
};
#else
constexpr bool kHasTiles = false;
#endif

#if REGATTA_HAS_CODE_TABLES
// arrange_keys of codes: they are transposed as such, four bytes of a row together, and become
// pairs then. `out` has room for the pairs of a whole unit at its end.
template <class Rows>
void arrange_code_keys(const char* const* rows, ptrdiff_t offset, int64_t count, int64_t head_dim,
                       FetchAhead ahead, bf16* out) {
  constexpr int kLanes = Vec::kLanes;
  const auto reader = Rows::Reader::make();
  const int64_t bytes = Rows::row_bytes(head_dim), units = (bytes + 3) / 4;
  const int64_t steps = (count + kLanes - 1) / kLanes * ((units + kLanes - 1) / kLanes);
  const int64_t fetches = ahead.per_step(steps);
  constexpr int kPairs = Rows::Reader::kPairsPerUnit;
  const auto store_unit = [&](Vec unit, int64_t u, int64_t j) REGATTA_LAMBDA_INLINE {
    reader.store_pairs(_mm512_castps_si512(unit.v), out + 2 * (u * kPairs * kChunk + j),
                       2 * kChunk);
  };
  int64_t step = 0;
  Vec block[kLanes];
  if (units <= kLanes / 2) {  // twice the rows fill a block
    for (int64_t j = 0; j < count; j += 2 * kLanes) {
      ahead.fetch(step++, 2 * fetches);
      for (int i = 0; i < kLanes; ++i) {
        const char* const* at = rows + j + i;
        block[i].v =
            _mm512_castsi512_ps(load_half_rows(at[0] + offset, at[kLanes] + offset, bytes));
      }
      transpose(block);
      for (int i = 0; i < units; ++i) {
        store_unit(block[i], i, j);
        store_unit(block[kLanes / 2 + i], i, j + kLanes);
      }
    }
    return;
  }
  for (int64_t j = 0; j < count; j += kLanes) {
    for (int64_t u = 0; u < units; u += kLanes) {
      ahead.fetch(step++, fetches);
      for (int i = 0; i < kLanes; ++i) {
        const char* from = rows[j + i] + offset + 4 * u;
        block[i].v = _mm512_castsi512_ps(load_row_bytes(from, bytes - 4 * u));
      }
      transpose(block);
      const int width = static_cast<int>(units - u < kLanes ? units - u : kLanes);
      for (int i = 0; i < width; ++i) store_unit(block[i], u + i, j);
    }
  }
}
#endif

// Rows of K transposed: out[u][j], u the units (see kv_rows.inl) of row j < count, which begins at
// rows[j] + offset bytes. kSwaps: those of a pair swapped.
template <class Rows, bool kSwaps = Rows::kSwaps>
void arrange_keys(const char* const* rows, ptrdiff_t offset, int64_t count, int64_t head_dim,
                  FetchAhead ahead, typename Factor<Rows::kDot>::Type* out) {
#if REGATTA_HAS_CODE_TABLES
  if constexpr (Rows::kCodePairs) {
    return arrange_code_keys<Rows>(rows, offset, count, head_dim, ahead, out);
  }
#endif
  constexpr int kLanes = Vec::kLanes;
  const int64_t units = head_dim / Factor<Rows::kDot>::kPerStep;
  const int64_t steps = (count + kLanes - 1) / kLanes * ((units + kLanes - 1) / kLanes);
  const int64_t fetches = ahead.per_step(steps);
  int64_t step = 0;
  for (int64_t j = 0; j < count; j += kLanes) {
    for (int64_t u = 0; u < units; u += kLanes) {
      ahead.fetch(step++, fetches);
      const int width = static_cast<int>(units - u < kLanes ? units - u : kLanes);
      Vec block[kLanes];
      for (int i = 0; i < kLanes; ++i) block[i] = Rows::units(rows[j + i] + offset, u, width);
      transpose(block);
      auto* to = reinterpret_cast<float*>(out) + u * kChunk + j;
      for (int i = 0; i < width; ++i) store(to + (i ^ kSwaps) * kChunk, block[i]);
    }
  }
}

// What interleaves rows: the rows' kind itself, or the reader of its codes, which holds tables.
template <class Rows>
REGATTA_INLINE auto value_reader() {
#if REGATTA_HAS_CODE_TABLES
  if constexpr (Rows::kCodePairs) return Rows::Reader::make();
#endif
  if constexpr (!Rows::kCodePairs) return Rows();
}

// Rows of V as the second product reads them: [j][D padded] floats, or [j / 2][D padded][2] bf16.
// Row j begins at rows[j] + offset bytes.
template <class Rows>
void arrange_values(const char* const* rows, ptrdiff_t offset, int64_t count, int64_t head_dim,
                    int64_t stride, FetchAhead ahead, typename Factor<Rows::kDot>::Type* out) {
  constexpr int kLanes = Vec::kLanes;
  constexpr int kPerStep = Factor<Rows::kDot>::kPerStep;
  const int64_t fetches = ahead.per_step((count + kPerStep - 1) / kPerStep);
  [[maybe_unused]] const auto reader = value_reader<Rows>();
  for (int64_t j = 0; j < count; j += kPerStep) {
    ahead.fetch(j / kPerStep, fetches);
    const char* row = rows[j] + offset;
#if REGATTA_HAS_BF16_DOT
    if constexpr (Rows::kDot) {
      reader.interleave_rows(out + j * stride, row, rows[j + 1] + offset, head_dim);
    }
#endif
    if constexpr (!Rows::kDot) {
      for (int64_t d = 0; d < head_dim; d += kLanes) {
        const int width = static_cast<int>(head_dim - d < kLanes ? head_dim - d : kLanes);
        store(out + (j ^ Rows::kSwaps) * stride + d, Rows::units(row, d, width));
      }
    }
  }
}

// state, out := both contexts together. One function, not inlined: the same instructions whether
// partials come from this thread or from others.
__attribute__((noinline)) inline void fold_row(RowState* state, float* out, RowState next,
                                               const float* next_out, int64_t width) {
  const float largest = state->largest > next.largest ? state->largest : next.largest;
  const Vec keep = exp2_below0(set1(state->largest - largest));
  const Vec add = exp2_below0(set1(next.largest - largest));
  float keep_one[Vec::kLanes], add_one[Vec::kLanes];
  store(keep_one, keep);
  store(add_one, add);
  state->largest = largest;
  state->sum = state->sum * keep_one[0] + next.sum * add_one[0];
  for (int64_t d = 0; d < width; d += Vec::kLanes) {
    store(out + d, fma(load(out + d), keep, load(next_out + d) * add));
  }
}

// The sum with that of a sink, which no V goes with. One far above all scores makes it infinite,
// and what is divided by it 0.
inline float with_sink(RowState state, float sink) {
  return state.sum + __builtin_exp2f(sink * kLog2e - state.largest);
}

__attribute__((noinline)) inline void divide_row(float* out, float sum, int64_t width) {
  const Vec scale = set1(1.0f / sum);
  for (int64_t d = 0; d < width; d += Vec::kLanes) store(out + d, load(out + d) * scale);
}

// What load() gives of a stored value.
template <class F>
REGATTA_INLINE Vec as_stored(Vec a) {
#if REGATTA_HAS_BF16_DOT
  if constexpr (std::is_same<F, bf16>::value) return round_bf16(a);
#endif
  return a;
}

template <class F>
float sum_row(const F* x, int64_t width) {
  Vec sum = zero();
  for (int64_t i = 0; i < width; i += Vec::kLanes) {
    sum = sum + load_n(x + i, static_cast<int>(width - i < Vec::kLanes ? width - i : Vec::kLanes));
  }
  return reduce_add(sum);
}

// Adjacent positions of a chunk that are adjacent rows of the cache too.
struct ChunkRun {
  int64_t begin, count;  // positions of the chunk
  int64_t row;           // of the cache, counted over blocks, KV heads and slots
};

// Where a chunk's K rows lie, and the cache lines that they cover. V's are at a fixed distance.
struct ChunkRows {
  const char* keys[kChunk];
  const char* tails[kChunk];  // with Rows::kTail
  ChunkRun runs[kChunk];
  const char** lines;  // at most kChunk * (lines of a row + 1)
  int64_t num_runs, num_lines;
};

// What makes values of a chunk's codes, see kv_rows.inl; one per position, finite where no row
// looks.
struct ChunkScales {
  float key[kChunk], value[kChunk];
  float key_offset[kChunk];    // of a score
  float value_offset[kChunk];  // of a code: it multiplies the rounded weights that the codes do
};

// One thread's memory for units of up to plan.max_unit_rows rows, KV head after KV head.
template <class Rows>
struct UnitBuffers {
  using F = typename Factor<Rows::kDot>::Type;
  static constexpr int64_t kUnitDims =
      8;  // of the last four bytes of a row, which D may end within

  UnitBuffers(const AttentionJob& job, Scratch& scratch)
      : q(scratch.take<F>(job.plan.max_unit_rows * job.head_dim)),
        keys(scratch.take<F>(kChunk * (job.head_dim + kUnitDims))),
        values(scratch.take<F>(kChunk * job.padded_dim())),
        scores(scratch.take<float>(kSoftmaxRows * kChunk)),
        weights(scratch.take<F>(kSoftmaxRows * kChunk)),
        largest(scratch.take<float>(job.plan.max_unit_rows + kSoftmaxRows)),
        sums(scratch.take<float>(job.plan.max_unit_rows * Vec::kLanes)),
        offsets(scratch.take<float>(Rows::kOffset ? job.plan.max_unit_rows * Vec::kLanes : 0)),
        query_sums(scratch.take<float>(Rows::kOffset ? job.plan.max_unit_rows : 0)),
        out(scratch.take<float>(job.plan.max_unit_rows * job.padded_dim())),
        folded(scratch.take<float>(job.plan.max_unit_rows * job.padded_dim())),
        states(scratch.take<RowState>(job.plan.max_unit_rows)),
        folded_states(scratch.take<RowState>(job.plan.max_unit_rows)),
        positions(scratch.take<int32_t>(job.plan.max_tile_rows)),
        depths(scratch.take<int32_t>(job.plan.max_tile_rows)) {
    int64_t row_lines = Rows::row_bytes(job.head_dim - job.tail_dim) / kLineBytes + 1;
    if constexpr (Rows::kTail) row_lines += Rows::Tail::row_bytes(job.tail_dim) / kLineBytes + 1;
    for (ChunkRows& rows : chunk_rows) {
      rows.lines = scratch.take<const char*>(kChunk * row_lines);
    }
  }

  F* q;                     // [rows][D]
  F* keys;                  // a chunk's K, see arrange_keys
  F* values;                // a chunk's V, see arrange_values; columns past value_dim are unused
  float* scores;            // [kSoftmaxRows][kChunk]
  F* weights;               // [kSoftmaxRows][kChunk] 2^(score - largest)
  float* largest;           // [rows] of the split being done
  float* sums;              // [rows][lanes] of weights, of the split being done
  float* offsets;           // [rows][lanes] of scaled weights times value_offset, alike
  float* query_sums;        // [rows] of q's values
  float* out;               // [rows][padded D] of the split being done
  float* folded;            // [rows][padded D] of the splits before it
  RowState* states;         // [rows] of the split when it is done
  RowState* folded_states;  // [rows]
  int32_t* positions;       // [rows of one KV head] last context position that the row may see
  int32_t* depths;          // its token's own, by its depth in a tree: what a window counts from
  ChunkRows chunk_rows[2];  // of the chunk being done and of the next
  ChunkScales scales;       // of the chunk and KV head being done
};

struct KeepDenormals {};

// Does the units of one thread. Rows reads the cache.
template <class Rows>
class UnitWorker {
 public:
  static constexpr bool kDot = Rows::kDot;
  static constexpr int kLanes = Vec::kLanes;
  using F = typename Factor<kDot>::Type;
#if REGATTA_HAS_SWAPPED_PAIRS
  using Stored = std::conditional_t<Rows::kSwaps, bf16, F>;  // what factors are rounded to
  using Denormals = std::conditional_t<Rows::kSwaps, FlushDenormals, KeepDenormals>;
#else
  using Stored = F;
  using Denormals = KeepDenormals;
#endif

  UnitWorker(const AttentionJob& job, Scratch& scratch)
      : job_(job),
        group_(job.group()),
        padded_(job.padded_dim()),
        key_dim_(job.head_dim - job.tail_dim),
        row_bytes_(Rows::row_bytes(key_dim_)),
        value_offset_(static_cast<const char*>(job.cache.value) -
                      static_cast<const char*>(job.cache.key)),
        buffers_(job, scratch) {}

  template <class Query>
  void run(AttentionUnit unit, const Query* q, AttendedFn sink) {
    const AttentionTile& tile = job_.plan.tiles[unit.tile];
    open(tile, unit.first_head, unit.num_heads, q);
    if (unit.split >= 0) {
      run_split(unit.split, (unit.split + 1) * kSplit);
      for (int64_t i = 0; i < num_heads_ * rows_; ++i) {
        const int64_t row = partial_row(tile, unit.split, first_head_ + i / rows_) + i % rows_;
        job_.partial_states[row] = buffers_.states[i];
        copy_row(buffers_.out + i * padded_, job_.partials + row * padded_, padded_);
      }
      return;
    }
    const bool folds = tile.end_split - tile.first_split > 1;
    if (folds) clear(buffers_.folded_states, buffers_.folded);
    for (int32_t split = tile.first_split; split < tile.end_split; ++split) {
      run_split(split, end_);
      if (!folds) break;
      for (int64_t i = 0; i < num_heads_ * rows_; ++i) {
        fold_row(buffers_.folded_states + i, buffers_.folded + i * padded_, buffers_.states[i],
                 buffers_.out + i * padded_, padded_);
      }
    }
    finish(tile, folds ? buffers_.folded_states : buffers_.states,
           folds ? buffers_.folded : buffers_.out, sink);
  }

  // Folds the partials of one KV head of a divided tile.
  void merge(const AttentionTile& tile, int64_t kv_head, AttendedFn sink) {
    rows_ = (tile.end - tile.begin) * group_;
    first_head_ = kv_head;
    num_heads_ = 1;
    clear(buffers_.folded_states, buffers_.folded);
    for (int32_t split = tile.first_split; split < tile.end_split; ++split) {
      const int64_t row = partial_row(tile, split, kv_head);
      for (int64_t r = 0; r < rows_; ++r) {
        fold_row(buffers_.folded_states + r, buffers_.folded + r * padded_,
                 job_.partial_states[row + r], job_.partials + (row + r) * padded_, padded_);
      }
    }
    finish(tile, buffers_.folded_states, buffers_.folded, sink);
  }

 private:
  // The first of a split's partial rows.
  int64_t partial_row(const AttentionTile& tile, int64_t split, int64_t kv_head) const {
    return kv_head * job_.plan.num_partial_rows + tile.partial + (split - tile.first_split) * rows_;
  }

  template <class Query>
  void open(const AttentionTile& tile, int64_t first_head, int64_t num_heads, const Query* q) {
    const AttentionBatch& batch = job_.batch;
    const int64_t first_token = batch.cu_seqlens_q[tile.span];
    const int64_t num_tokens = batch.cu_seqlens_q[tile.span + 1] - first_token;
    const int64_t first_position = batch.context_lens[tile.span] - num_tokens;
    rows_ = (tile.end - tile.begin) * group_;
    first_head_ = first_head;
    num_heads_ = num_heads;
    table_ = batch.block_tables + tile.span * batch.max_blocks;
    const AttentionBatch& whole = job_.whole;
    const int64_t span = whole.cu_seqlens_q[tile.span + 1] - whole.cu_seqlens_q[tile.span];
    tree_ = whole.tree_mask && span <= 32 * whole.tree_words;
    tree_first_ = whole.context_lens[tile.span] - span;
    tree_rows_ = reinterpret_cast<const uint32_t*>(batch.tree_mask) +
                 (first_token + tile.begin) * batch.tree_words;
    const int64_t least_depth = tree_ ? tree_first_ : first_position + tile.begin;
    begin_ = job_.window < 0 ? 0 : least_depth - job_.window + 1;
    if (begin_ < 0) begin_ = 0;
    const int64_t prefix = batch.prefix_lens ? batch.prefix_lens[tile.span] : 0;
    end_ = seen_end(first_position + tile.end, prefix, job_.window);
    F* to = buffers_.q;
    for (int64_t h = first_head; h < first_head + num_heads; ++h) {
      for (int64_t r = 0; r < rows_; ++r, to += job_.head_dim) {
        const int64_t token = first_token + tile.begin + r / group_;
        const int64_t head = h * group_ + r % group_;
        const Query* row = q + (token * job_.num_heads + head) * job_.head_dim;
        for_lanes(job_.head_dim, [&](int64_t i, auto n) REGATTA_LAMBDA_INLINE {
          store_factors(to + i, load_n(row + i, n), n);
        });
      }
    }
    if constexpr (Rows::kOffset) {
      for (int64_t i = 0; i < num_heads * rows_; ++i) {
        buffers_.query_sums[i] = sum_row(buffers_.q + i * job_.head_dim, job_.head_dim);
      }
    }
    for (int64_t r = 0; r < rows_; ++r) {
      const int64_t position = first_position + tile.begin + r / group_;
      buffers_.positions[r] = static_cast<int32_t>(seen_end(position + 1, prefix, job_.window) - 1);
      buffers_.depths[r] = static_cast<int32_t>(position);
      if (!tree_) continue;
      int64_t seen = 0;
      for (int64_t i = 0; i < batch.tree_words; ++i) seen += __builtin_popcount(tree_row(r)[i]);
      buffers_.depths[r] = static_cast<int32_t>(tree_first_ + seen - 1);
    }
  }

  void clear(RowState* states, float* out) {
    const int64_t rows = num_heads_ * rows_;
    for (int64_t i = 0; i < rows; ++i) states[i] = {kNothingSeen, 0.0f};
    for (int64_t i = 0; i < rows * padded_; i += kLanes) store(out + i, zero());
  }

  // Where the K rows of positions [chunk, chunk + kChunk) lie, for the unit's first KV head. Slots
  // that the tile does not see may be unwritten or gone: a visible neighbour stands in for them,
  // whose score is masked and whose weight is 0.
  void find_rows(int64_t chunk, ChunkRows* rows) const {
    const int64_t block_size = job_.cache.block_size;
    const int64_t first = begin_ > chunk ? begin_ - chunk : 0;
    const int64_t end = end_ - chunk < kChunk ? end_ - chunk : kChunk;
    rows->num_lines = rows->num_runs = 0;
    for (int64_t j = first; j < end;) {
      const int64_t position = chunk + j;
      const int64_t block = position / block_size, offset = position - block * block_size;
      const int64_t run = block_size - offset < end - j ? block_size - offset : end - j;
      const int64_t row = (table_[block] * job_.num_kv_heads + first_head_) * block_size + offset;
      const char* key = static_cast<const char*>(job_.cache.key) + row * row_bytes_;
      add_rows(key, row_bytes_, run, rows->keys + j, rows);
      if constexpr (Rows::kTail) {
        const int64_t bytes = Rows::Tail::row_bytes(job_.tail_dim);
        add_rows(static_cast<const char*>(job_.cache.tail) + row * bytes, bytes, run,
                 rows->tails + j, rows);
      }
      rows->runs[rows->num_runs++] = {j, run, row};
      j += run;
    }
    spread_ends(first, end, rows->keys);
    if constexpr (Rows::kTail) spread_ends(first, end, rows->tails);
  }

  // Adjacent rows from `from` on, and the cache lines that they cover.
  static void add_rows(const char* from, int64_t bytes, int64_t count, const char** to,
                       ChunkRows* rows) {
    for (int64_t i = 0; i < count; ++i) to[i] = from + i * bytes;
    const int64_t lines = (count * bytes + kLineBytes - 1) / kLineBytes;
    for (int64_t i = 0; i < lines; ++i) rows->lines[rows->num_lines + i] = from + i * kLineBytes;
    rows->num_lines += lines;
  }

  static void spread_ends(int64_t first, int64_t end, const char** rows) {
    for (int64_t j = 0; j < first; ++j) rows[j] = rows[first];
    for (int64_t j = end; j < kChunk; ++j) rows[j] = rows[end - 1];
  }

  // The unit's rows against one split. Chunks from `wanted_end` on are not worth fetching ahead.
  void run_split(int64_t split, int64_t wanted_end) {
    if (wanted_end > end_) wanted_end = end_;
    const int64_t num_rows = num_heads_ * rows_;
    for (int64_t i = 0; i < num_rows * padded_; i += kLanes) store(buffers_.out + i, zero());
    for (int64_t i = 0; i < num_rows; ++i) store(buffers_.sums + i * kLanes, zero());
    if constexpr (Rows::kOffset) {
      for (int64_t i = 0; i < num_rows; ++i) store(buffers_.offsets + i * kLanes, zero());
    }
    for (int64_t i = 0; i < num_rows + kSoftmaxRows; ++i) buffers_.largest[i] = kNothingSeen;
    const int64_t first = split * kSplit > begin_ ? split * kSplit : begin_;
    const int64_t last = (split + 1) * kSplit < end_ ? (split + 1) * kSplit : end_;
    const int64_t first_chunk = first / kChunk * kChunk;
    ChunkRows* now = buffers_.chunk_rows;
    ChunkRows* next = now + 1;
    find_rows(first_chunk, now);
    for (int64_t chunk = first_chunk; chunk < last; chunk += kChunk, std::swap(now, next)) {
      const int64_t seen = last - chunk < kChunk ? last - chunk : kChunk;
      next->num_lines = 0;
      if (chunk + kChunk < wanted_end) find_rows(chunk + kChunk, next);
      for (int64_t h = 0; h < num_heads_; ++h) {
        const bool is_last = h + 1 == num_heads_;
        const ChunkRows* ahead = is_last ? next : now;
        if constexpr (Rows::kScaled) {
          load_scales(*now, h);
          fetch_scales(*ahead, is_last ? 0 : h + 1);
        }
        run_chunk(chunk, seen, h, *now,
                  {ahead->lines, is_last ? 0 : head_offset(h + 1), ahead->num_lines});
      }
    }
    for (int64_t i = 0; i < num_rows; ++i) {
      buffers_.states[i] = {buffers_.largest[i], reduce_add(load(buffers_.sums + i * kLanes))};
    }
    if constexpr (Rows::kOffset) {
      for (int64_t i = 0; i < num_rows; ++i) {
        const Vec offset = set1(reduce_add(load(buffers_.offsets + i * kLanes)));
        float* out = buffers_.out + i * padded_;
        for (int64_t d = 0; d < padded_; d += kLanes) store(out + d, load(out + d) + offset);
      }
    }
  }

  // What the unit's h-th KV head's codes are scaled by.
  void load_scales(const ChunkRows& rows, int64_t h) {
    const PagedCache& cache = job_.cache;
    ChunkScales& scales = buffers_.scales;
    if (!has_token_scales()) {
      const float unit = cache.format == KvFormat::kFp8 ? kE4m3Unit : 1.0f;
      const Vec key = set1(cache.key_scale[first_head_ + h] * unit);
      const Vec value = set1(cache.value_scale[first_head_ + h] * unit);
      for (int64_t j = 0; j < kChunk; j += kLanes) {
        store(scales.key + j, key);
        store(scales.value + j, value);
      }
      return;
    }
    for (int64_t j = 0; j < kChunk; j += kLanes) {
      store(scales.key + j, set1(1.0f));
      store(scales.value + j, set1(1.0f));
      store(scales.key_offset + j, zero());
      store(scales.value_offset + j, zero());
    }
    for (int64_t i = 0; i < rows.num_runs; ++i) {
      const ChunkRun& run = rows.runs[i];
      const int64_t row = run.row + h * cache.block_size;
      copy_scales(cache.key_scale, row, run, scales.key, scales.key_offset);
      copy_scales(cache.value_scale, row, run, scales.value, scales.value_offset);
    }
    if constexpr (Rows::kTail) {
      for (int64_t j = 0; j < kChunk; j += kLanes) {
        store(scales.key + j, load(scales.key + j) * set1(kE4m3Unit));
        store(scales.value + j, load(scales.value + j) * set1(kE4m3Unit));
      }
    }
    if constexpr (Rows::kOffset) {
      const Vec middle = set1(kCode4Middle);
      for (int64_t j = 0; j < kChunk; j += kLanes) {
        const Vec key = load(scales.key + j), value = load(scales.value + j);
        store(scales.key_offset + j, fma(middle, key, load(scales.key_offset + j)));
        store(scales.value_offset + j, load(scales.value_offset + j) / value + middle);
      }
    }
  }

  bool has_token_scales() const {
    return Rows::kTail || kv_format_info(job_.cache.format).token_scales;
  }

  // offsets: the minima.
  static void copy_scales(const float* from, int64_t row, const ChunkRun& run, float* scales,
                          float* offsets) {
    if constexpr (!Rows::kOffset) return copy_row(from + row, scales + run.begin, run.count);
    const float* pairs = from + 2 * row;
    int64_t j = 0;
    for (; j + kLanes <= run.count; j += kLanes) {
      Vec scale, minimum;
      load_even_odd(pairs + 2 * j, scale, minimum);
      store(scales + run.begin + j, scale);
      store(offsets + run.begin + j, minimum);
    }
    for (; j < run.count; ++j) {
      scales[run.begin + j] = pairs[2 * j];
      offsets[run.begin + j] = pairs[2 * j + 1];
    }
  }

  // Asks for the scales of the next chunk, or of this one's next head.
  void fetch_scales(const ChunkRows& rows, int64_t h) const {
    const KvFormatInfo& info = kv_format_info(job_.cache.format);
    if (!has_token_scales() || rows.num_lines == 0) return;
    for (int64_t i = 0; i < rows.num_runs; ++i) {
      const ChunkRun& run = rows.runs[i];
      const int64_t at = (run.row + h * job_.cache.block_size) * info.scale_floats;
      constexpr int64_t kLineFloats = kLineBytes / sizeof(float);
      for (int64_t j = 0; j < run.count * info.scale_floats; j += kLineFloats) {
        prefetch(job_.cache.key_scale + at + j);
        prefetch(job_.cache.value_scale + at + j);
      }
    }
  }

  // Bytes from the first KV head's rows of a block to the h-th's.
  ptrdiff_t head_offset(int64_t h) const { return h * job_.cache.block_size * row_bytes_; }

  // The rows of the unit's h-th KV head against one chunk, of which `seen` positions count.
  void run_chunk(int64_t chunk, int64_t seen, int64_t h, const ChunkRows& rows,
                 const FetchAhead& ahead_keys) {
    const char* const* keys = rows.keys;
    // Where one block of rows takes the chunk, it does so in pieces that stay in L1 with what is
    // made of them and fetched ahead. The same sums in the same order: the same bits.
    const int64_t piece = rows_ <= kSoftmaxRows ? piece_positions() : kChunk;
    const int64_t pieces = (seen + piece - 1) / piece;
    FetchAhead ahead_values = ahead_keys;
    ahead_values.offset += value_offset_;
    if (value_offset_ == 0) ahead_values.count = 0;       // V is K
    bool keys_arranged = false, values_arranged = false;  // the whole chunk's
    for (int64_t begin = 0; begin < rows_; begin += kSoftmaxRows) {
      const int64_t end = begin + kSoftmaxRows < rows_ ? begin + kSoftmaxRows : rows_;
      const int64_t columns = visible_columns(chunk, begin, end);
      if (columns == 0) continue;
      for (int64_t i = 0; i < pieces; ++i) {
        if (!keys_arranged) {
          arrange_keys<Rows>(keys + i * piece, head_offset(h), piece_end(seen, i, piece), key_dim_,
                             ahead_keys.part(i, 2 * pieces), buffers_.keys);
          arrange_tails(rows.tails + i * piece, piece_end(seen, i, piece));
        }
        score_piece(h * rows_ + begin, end - begin, i * piece, piece_end(columns, i, piece),
                    ahead_values.part(i, 2 * pieces));
      }
      keys_arranged = true;
      if (job_.softcap != 0.0f || job_.slopes) bend_rows(chunk, h, begin, end, columns);
      mask_rows(chunk, begin, end, columns);
      float scales[kSoftmaxRows];
      weigh_rows(h * rows_ + begin, static_cast<int>(end - begin), columns, scales);
      for (int64_t i = 0; i < pieces; ++i) {
        if (!values_arranged) {
          arrange_values<Rows>(keys + i * piece, head_offset(h) + value_offset_,
                               whole_steps(piece_end(seen, i, piece)), job_.value_dim, padded_,
                               ahead_keys.part(pieces + i, 2 * pieces), buffers_.values);
        }
        add_values(h * rows_ + begin, end - begin, i * piece, piece_end(columns, i, piece), scales,
                   ahead_values.part(pieces + i, 2 * pieces));
        for (float& scale : scales) scale = 1.0f;
      }
      values_arranged = true;
      ahead_values.count = 0;
    }
  }

  // Whether products are by tiles. They take 32 positions or values of k together.
  bool by_tiles() const { return kHasTiles && kDot && job_.by_tiles; }
  int64_t whole_steps(int64_t positions) const {
    const int64_t step = by_tiles() ? 32 : Rows::kSwaps ? 2 : 1;
    return (positions + step - 1) / step * step;
  }

  // Positions whose K and V stay in L1 raw, arranged and fetched ahead: six times its K for a dense
  // cache, 48 KiB at 128 bytes per row. Measured: 8 to 10 KiB of K at a time, 28 GB/s; 16 KiB, 20.
  int64_t piece_positions() const {
    const int64_t bytes = 2 * row_bytes_ + job_.head_dim * static_cast<int64_t>(sizeof(F));
    return bytes <= 480 ? kChunk : bytes <= 1152 || by_tiles() ? kChunk / 2 : kChunk / 4;
  }

  // Columns of the i-th piece, of `count` in all.
  static int64_t piece_end(int64_t count, int64_t i, int64_t piece) {
    const int64_t left = count - i * piece;
    return left < 0 ? 0 : left < piece ? left : piece;
  }

  // Words of the mask of row r's token.
  const uint32_t* tree_row(int64_t r) const {
    return tree_rows_ + r / group_ * job_.batch.tree_words;
  }

  // The last position that all rows from `begin` on see, windows apart.
  int64_t common_position(int64_t begin) const {
    return tree_ ? tree_first_ - 1 : buffers_.positions[begin];
  }

  // What a row's window counts from; of a tree's rows, whose depths are in no order, `other`.
  int64_t depth(int64_t r, int64_t other) const { return tree_ ? other : buffers_.depths[r]; }

  // Positions of the chunk up to the last that any of the rows sees, 0 if they see none.
  int64_t visible_columns(int64_t chunk, int64_t begin, int64_t end) const {
    const int64_t oldest = common_position(begin), newest = buffers_.positions[end - 1];
    if (newest < chunk) return 0;
    if (job_.window >= 0 && depth(begin, oldest) - job_.window + 1 >= chunk + kChunk) return 0;
    return newest + 1 - chunk < kChunk ? newest + 1 - chunk : kChunk;
  }

  // Tails behind the keys that arrange_keys made of codes.
  void arrange_tails([[maybe_unused]] const char* const* tails, [[maybe_unused]] int64_t count) {
    if constexpr (Rows::kTail) {
      arrange_keys<typename Rows::Tail, Rows::kSwaps>(tails, 0, count, job_.tail_dim, FetchAhead(),
                                                      buffers_.keys + key_dim_ * kChunk);
    }
  }

  // scores[rows][column ..] of the arranged keys: of the values that codes stand for, and of tails.
  void score_piece(int64_t row, int64_t rows, int64_t column, int64_t columns, FetchAhead ahead) {
    score_rows(row, rows, column, columns, 0, key_dim_, nullptr, ahead);
    if constexpr (Rows::kScaled) scale_rows(row, rows, column, columns);
    if constexpr (Rows::kTail) {
      float ones[kSoftmaxRows];
      for (float& one : ones) one = 1.0f;
      score_rows(row, rows, column, columns, key_dim_, job_.tail_dim, ones, FetchAhead());
    }
  }

  // scores[rows][column ..] = q . k over `dims` dims from `dim` on; with scales, of each row, they
  // are added to what is there times that.
  void score_rows(int64_t row, int64_t rows, int64_t column, int64_t columns, int64_t dim,
                  int64_t dims, const float* scales, FetchAhead ahead) {
#if REGATTA_HAS_TILES
    if constexpr (kDot) {
      if (job_.by_tiles) {  // scales are of tails, and 1
        return TileProduct{shapes_,
                           buffers_.q + row * job_.head_dim + dim,
                           job_.head_dim,
                           buffers_.keys + dim * kChunk,
                           2 * kChunk,
                           dims / 2,
                           buffers_.scores + column,
                           kChunk,
                           scales != nullptr,
                           ahead}
            .run(rows, (columns + kLanes - 1) / kLanes);
      }
    }
#endif
    [[maybe_unused]] const Denormals denormals;
    const int num_vecs = static_cast<int>((columns + kLanes - 1) / kLanes);
    constexpr int64_t kPerStep = Factor<kDot>::kPerStep;
    const int64_t groups = (rows + kRegisterRows - 1) / kRegisterRows;
    for (int64_t i = 0; i < groups; ++i) {
      const int64_t first = rows * i / groups;
      Product<kDot>::columns(static_cast<int>(rows * (i + 1) / groups - first), num_vecs,
                             buffers_.q + (row + first) * job_.head_dim + dim, job_.head_dim,
                             buffers_.keys + dim * kChunk, kChunk * kPerStep, dims / kPerStep,
                             buffers_.scores + first * kChunk + column, kChunk,
                             scales ? scales + first : nullptr, ahead.part(i, groups));
    }
  }

  // out = scales * out + weights[rows][column ..] . v for the arranged values.
  void add_values(int64_t row, int64_t rows, int64_t column, int64_t columns, const float* scales,
                  FetchAhead ahead) {
    if (columns == 0) return;
#if REGATTA_HAS_TILES
    if constexpr (kDot) {
      if (job_.by_tiles) {
        float* out = buffers_.out + row * padded_;
        for (int64_t r = 0; r < rows; ++r) {
          if (scales[r] == 1.0f) continue;
          for (int64_t d = r * padded_; d < (r + 1) * padded_; d += kLanes) {
            store(out + d, load(out + d) * set1(scales[r]));
          }
        }
        return TileProduct{shapes_,     buffers_.weights + column,
                           kChunk,      buffers_.values,
                           2 * padded_, whole_steps(columns) / 2,
                           out,         padded_,
                           true,        ahead}
            .run(rows, padded_ / kLanes);
      }
    }
#endif
    [[maybe_unused]] const Denormals denormals;
    constexpr int64_t kPerStep = Factor<kDot>::kPerStep;
    const int64_t groups = (rows + kRegisterRows - 1) / kRegisterRows;
    for (int64_t i = 0; i < groups; ++i) {
      const int64_t first = rows * i / groups;
      Product<kDot>::columns(
          static_cast<int>(rows * (i + 1) / groups - first), static_cast<int>(padded_ / kLanes),
          buffers_.weights + first * kChunk + column, kChunk, buffers_.values, padded_ * kPerStep,
          (whole_steps(columns) + kPerStep - 1) / kPerStep, buffers_.out + (row + first) * padded_,
          padded_, scales + first, ahead.part(i, groups));
    }
  }

  // scores := those of the values that the codes stand for.
  void scale_rows(int64_t row, int64_t rows, int64_t column, int64_t columns) {
    const int num_vecs = static_cast<int>((columns + kLanes - 1) / kLanes);
    for (int64_t r = 0; r < rows; ++r) {
      float* scores = buffers_.scores + r * kChunk + column;
      for (int v = 0; v < num_vecs; ++v) {
        const float* scales = buffers_.scales.key + column + v * kLanes;
        Vec score = load(scores + v * kLanes) * load(scales);
        if constexpr (Rows::kOffset) {
          const Vec offset = load(buffers_.scales.key_offset + column + v * kLanes);
          score = fma(offset, set1(buffers_.query_sums[row + r]), score);
        }
        store(scores + v * kLanes, score);
      }
    }
  }

  // Scores of rows [begin, end) of the h-th KV head, still without softmax_scale, := capped and
  // with what their distance adds.
  void bend_rows(int64_t chunk, int64_t h, int64_t begin, int64_t end, int64_t columns) {
    float numbers[kLanes];
    for (int i = 0; i < kLanes; ++i) numbers[i] = static_cast<float>(i);
    const int num_vecs = static_cast<int>((columns + kLanes - 1) / kLanes);
    const Vec scale = set1(job_.softmax_scale), back = set1(1.0f / job_.softmax_scale);
    for (int64_t r = begin; r < end; ++r) {
      float* scores = buffers_.scores + (r - begin) * kChunk;
      const int64_t head = (first_head_ + h) * group_ + r % group_;
      const float slope = job_.slopes ? job_.slopes[head] : 0.0f;
      const float distance = static_cast<float>(chunk - buffers_.depths[r]);
      for (int v = 0; v < num_vecs; ++v) {
        Vec score = load(scores + v * kLanes) * scale;
        if (job_.softcap != 0.0f) score = capped(score, job_.softcap);
        const Vec from = load(numbers) + set1(distance + static_cast<float>(v * kLanes));
        store(scores + v * kLanes, fma(from, set1(slope), score) * back);
      }
    }
  }

  // Scores of rows [begin, end) outside of what they see become -infinity.
  void mask_rows(int64_t chunk, int64_t begin, int64_t end, int64_t columns) {
    const int64_t oldest = common_position(begin), newest = buffers_.positions[end - 1];
    const int num_vecs = static_cast<int>((columns + kLanes - 1) / kLanes);
    if (chunk + num_vecs * kLanes - 1 <= oldest &&
        (job_.window < 0 || chunk >= depth(end - 1, newest) - job_.window + 1)) {
      return;
    }
    const Vec hidden = set1(-__builtin_inff());
    for (int64_t r = begin; r < end; ++r) {
      const int64_t position = buffers_.positions[r];
      const int64_t last = position + 1 - chunk;
      const int64_t first = job_.window < 0 ? 0 : buffers_.depths[r] + 1 - chunk - job_.window;
      float* scores = buffers_.scores + (r - begin) * kChunk;
      for (int v = 0; v < num_vecs; ++v) {
        const int low = lane(first - v * kLanes), high = lane(last - v * kLanes);
        store(scores + v * kLanes, keep_lanes(load(scores + v * kLanes), low, high, hidden));
      }
      if (!tree_) continue;
      for (int64_t j = tree_first_ > chunk ? tree_first_ - chunk : 0; j < last && j < columns;
           ++j) {
        const int64_t i = chunk + j - tree_first_;
        if (!(tree_row(r)[i / 32] >> i % 32 & 1u)) scores[j] = -__builtin_inff();
      }
    }
  }

  // What keys and values are multiplied by: with kSwaps rounded, those of a pair swapped.
  template <class Lanes>
  static REGATTA_INLINE void store_factors(F* to, Vec factors, Lanes n) {
#if REGATTA_HAS_SWAPPED_PAIRS
    if constexpr (Rows::kSwaps) factors = swapped_pairs(factors);
#endif
    store_n(to, factors, n);
  }

  static int lane(int64_t i) { return i < 0 ? 0 : i > kLanes ? kLanes : static_cast<int>(i); }

  // weights := 2^(score - new largest) of rows [begin, begin + rows); sums go on. scales[r]: what
  // that makes of earlier weights.
  void weigh_rows(int64_t begin, int rows, int64_t columns, float* scales) {
    const int num_vecs = static_cast<int>((columns + kLanes - 1) / kLanes);
    // Of each row; transposed, lane r is row r, and lanes reduce all rows at once.
    Vec most[kLanes];
    for (int r = 0; r < rows; ++r) {
      const float* scores = buffers_.scores + r * kChunk;
      most[r] = load(scores);
      for (int v = 1; v < num_vecs; ++v) most[r] = max(most[r], load(scores + v * kLanes));
    }
    for (int r = rows; r < kLanes; ++r) most[r] = zero();
    transpose(most);
    for (int width = kLanes / 2; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) most[i] = max(most[i], most[i + width]);
    }
    const Vec unit = set1(job_.softmax_scale * kLog2e);
    const Vec before = load(buffers_.largest + begin);
    const Vec after = max(before, most[0] * unit);
    float largest[kLanes];
    store(largest, after);
    store(scales, exp2_below0(before - after));
    store_n(buffers_.largest + begin, after, rows);
    for (int r = 0; r < rows; ++r) {
      const Vec shift = set1(largest[r]);
      Vec sum = zero(), offset = zero();
      for (int v = 0; v < num_vecs; ++v) {
        const int64_t i = r * kChunk + v * kLanes;
        const Vec weight = exp2_below0(fma(load(buffers_.scores + i), unit, zero() - shift));
        if constexpr (Rows::kScaled) {
          const Vec scaled = weight * load(buffers_.scales.value + v * kLanes);
          store_factors(buffers_.weights + i, scaled, AllLanes());
          if constexpr (Rows::kOffset) {
            const Vec step = load(buffers_.scales.value_offset + v * kLanes);
            offset = fma(as_stored<Stored>(scaled), step, offset);
          }
        } else {
          store_factors(buffers_.weights + i, weight, AllLanes());
        }
        sum = sum + weight;
      }
      if constexpr (Rows::kOffset) {
        float* total = buffers_.offsets + (begin + r) * kLanes;
        store(total, fma(load(total), set1(scales[r]), offset));
      }
      if (by_tiles() && num_vecs % 2)
        store(buffers_.weights + r * kChunk + num_vecs * kLanes, zero());
      float* total = buffers_.sums + (begin + r) * kLanes;
      store(total, fma(load(total), set1(scales[r]), sum));
    }
  }

  void finish(const AttentionTile& tile, const RowState* states, float* out, AttendedFn sink) {
    const int64_t first_token = job_.batch.cu_seqlens_q[tile.span] + tile.begin;
    for (int64_t i = 0; i < num_heads_ * rows_; ++i) {
      const int64_t r = i % rows_, head = (first_head_ + i / rows_) * group_ + r % group_;
      const float sum = job_.sinks ? with_sink(states[i], job_.sinks[head]) : states[i].sum;
      divide_row(out + i * padded_, sum, padded_);
      sink(first_token + r / group_, head, static_cast<const float*>(out + i * padded_));
    }
  }

  const AttentionJob& job_;
  const int64_t group_, padded_;
  const int64_t key_dim_;  // values of a row of K, its tail apart
  const int64_t row_bytes_;
  const ptrdiff_t value_offset_;  // bytes from a K row to its V row
  UnitBuffers<Rows> buffers_;
#if REGATTA_HAS_TILES
  tiles::Shapes shapes_;
#endif
  // Of the open unit:
  int64_t rows_ = 0;                        // of one KV head
  int64_t first_head_ = 0, num_heads_ = 0;  // KV heads
  int64_t begin_ = 0, end_ = 0;             // positions that any row sees
  const int32_t* table_ = nullptr;
  bool tree_ = false;                    // the span is a tree of drafts
  int64_t tree_first_ = 0;               // position of the span's token 0
  const uint32_t* tree_rows_ = nullptr;  // masks of the tile's tokens
};

// More of one KV head are multiplied as floats where pairs are slow: fewer wait for memory.
constexpr int64_t kRowsOfPairs = 8;

// All units, then the merges.
template <class Rows, class Query>
void attend_rows(Team& team, const AttentionJob& job, const Query* q, AttendedFn sink) {
  Scratch::Scope scope(team.scratch());
  UnitWorker<Rows> worker(job, team.scratch());
  const auto run_all = [&](auto& worker_of_many) {
    team.for_each(job.plan.num_units, [&](int64_t i) {
      const AttentionUnit& unit = job.plan.units[i];
      const AttentionTile& tile = job.plan.tiles[unit.tile];
      (tile.end - tile.begin) * job.group() > kRowsOfPairs ? worker_of_many.run(unit, q, sink)
                                                           : worker.run(unit, q, sink);
    });
  };
  bool as_floats = false;
#if REGATTA_HAS_SWAPPED_PAIRS
  if constexpr (Rows::kDot) {
    as_floats = pairs_are_slow() && !job.by_tiles;
    if (as_floats) {
      UnitWorker<typename Rows::Floats> floats(job, team.scratch());
      run_all(floats);
    }
  }
#endif
  if (!as_floats) run_all(worker);
  if (job.plan.num_divided == 0) return;
  team.barrier();
  team.for_each(job.plan.num_divided * job.num_kv_heads, [&](int64_t i) {
    worker.merge(job.plan.tiles[job.plan.divided[i / job.num_kv_heads]], i % job.num_kv_heads,
                 sink);
  });
}

template <class T, class Query>
void attend(Team& team, const AttentionJob& job, const Query* q, AttendedFn sink) {
  with_rows<T>(job.cache.format,
               [&](auto rows) { attend_rows<decltype(rows)>(team, job, q, sink); });
}

template <class T>
void attend_latents(Team& team, const AttentionJob& job, const QueryOf<T>* q, AttendedFn sink) {
  job.cache.format == KvFormat::kDense ? attend_rows<DenseRows<T>>(team, job, q, sink)
                                       : attend_rows<LatentCodeRows<T>>(team, job, q, sink);
}

#define REGATTA_ATTEND_OF(T)                                                 \
  template void attend<T>(Team&, const AttentionJob&, const T*, AttendedFn); \
  template void attend_latents<T>(Team&, const AttentionJob&, const QueryOf<T>*, AttendedFn);
REGATTA_ATTEND_OF(float)
REGATTA_ATTEND_OF(bf16)
REGATTA_ATTEND_OF(fp16)
#undef REGATTA_ATTEND_OF
#if !REGATTA_HAS_BF16_DOT
template void attend<bf16>(Team&, const AttentionJob&, const float*, AttendedFn);
#endif
template void attend<fp16>(Team&, const AttentionJob&, const float*, AttendedFn);

}  // namespace regatta::cpu::REGATTA_ISA
