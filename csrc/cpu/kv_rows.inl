// How attention reads rows of the cache in each format, and how they are written. See
// regatta/kv_format.h for the formats.
//
// Codes are multiplied as small whole numbers, exact in bf16 and float. What makes them values is
// applied to a token's scores and weights, which are fewer than its elements:
//   q . k = key_scale * (q . code) + key_offset * sum(q)
//   w * v = (w * value_scale) * (code + value_offset), the latter once for all dims
#include REGATTA_CODES_INL
#if REGATTA_HAS_CODE_TABLES
#include "codes_pairs.inl"
#endif

namespace regatta::cpu::REGATTA_ISA {

// What a kind of rows offers:
//   kDot, kScaled (scales apply), kOffset (and offsets), kCodePairs (codes become pairs, by Reader)
//   kSwaps             without kDot: values of bfloat16 as floats, those of a pair swapped
//   Floats             the same rows so
//   kTail              a key's last AttentionJob::tail_dim values are rows of kind Tail, elsewhere
//   row_bytes(D)
//   units(row, u, n)   without kCodePairs: n <= kLanes units from unit u on; a unit is a float, or
//                      with kDot the bits of a pair of bf16
//   interleave_rows(out, a, b, D)   with kDot, of a Reader where codes have one: a0 b0 a1 b1 ... of
//   two
//                      rows, up to the padded D
//   Reader::make().store_pairs(units, out, step)   kPairsPerUnit pairs of each 32-bit lane,
//                      `step` apart

// Multiply-adds of float make the sums of vdpbf16ps where they add each pair's odd product first,
// and take denormals for zeros.
template <class Rows>
struct SwappedRows : Rows {
  static constexpr bool kSwaps = true;
};

template <class T, bool kUsesDot = uses_dot<T>()>
struct DenseRows {
  static constexpr bool kDot = kUsesDot, kScaled = false, kOffset = false, kCodePairs = false;
  static constexpr bool kTail = false, kSwaps = false;
  using Floats = SwappedRows<DenseRows<T, false>>;
  static int64_t row_bytes(int64_t head_dim) { return head_dim * static_cast<int64_t>(sizeof(T)); }

  static REGATTA_INLINE Vec units(const char* row, int64_t u, int n) {
    // A pair of bf16 moves as the 32 bits of one float.
    using Unit = std::conditional_t<kDot, float, T>;
    const Unit* from = reinterpret_cast<const Unit*>(row) + u;
    return n == Vec::kLanes ? load(from) : load_n(from, n);
  }
#if REGATTA_HAS_BF16_DOT
  static REGATTA_INLINE void interleave_rows(bf16* out, const char* a, const char* b,
                                             int64_t head_dim) {
    interleave(out, reinterpret_cast<const bf16*>(a), reinterpret_cast<const bf16*>(b), head_dim);
  }
#endif
};

enum class Codes { k8, k4, kE4m3 };

template <Codes kCodes, bool kUsesDot>
struct CodeRows {
  static constexpr bool kDot = kUsesDot, kScaled = true, kOffset = kCodes == Codes::k4;
  static constexpr bool kCodePairs = kDot && REGATTA_HAS_CODE_TABLES;
  static constexpr bool kTail = false, kSwaps = false;
  using Floats = SwappedRows<CodeRows<kCodes, false>>;
#if REGATTA_HAS_CODE_TABLES
  using Reader =
      std::conditional_t<kCodes == Codes::k4, PairReader4, PairReader8<kCodes == Codes::kE4m3>>;
#endif
  static int64_t row_bytes(int64_t head_dim) {
    return kCodes == Codes::k4 ? (head_dim + 1) / 2 : head_dim;
  }

  static REGATTA_INLINE Vec units(const char* row, int64_t i, int n) {
#if REGATTA_HAS_BF16_DOT && !REGATTA_HAS_CODE_TABLES
    if constexpr (kDot) {
      const int first = 2 * n < Vec::kLanes ? 2 * n : Vec::kLanes;
      return join_pairs(values(row, 2 * i, first), values(row, 2 * i + Vec::kLanes, 2 * n - first));
    }
#endif
    return values(row, i, n);
  }
#if REGATTA_HAS_BF16_DOT && !REGATTA_HAS_CODE_TABLES
  static REGATTA_INLINE void interleave_rows(bf16* out, const char* a, const char* b,
                                             int64_t head_dim) {
    for (int64_t d = 0; d < head_dim; d += Vec::kLanes) {
      const int n = static_cast<int>(head_dim - d < Vec::kLanes ? head_dim - d : Vec::kLanes);
      store(reinterpret_cast<float*>(out + 2 * d), zip_pairs(values(a, d, n), values(b, d, n)));
    }
  }
#endif
  // n numbers from the i-th code on.
  static REGATTA_INLINE Vec values(const char* row, int64_t i, int n) {
    const auto* codes = reinterpret_cast<const uint8_t*>(row);
    if constexpr (kCodes == Codes::k8) return load_codes8(codes, i, n);
    if constexpr (kCodes == Codes::k4) return load_codes4(codes, i, n);
    if constexpr (kCodes == Codes::kE4m3) return load_e4m3(codes, i, n);
  }
};

// Latents in fp8, of a scale per token.
template <class T, bool kUsesDot = uses_dot<T>()>
struct LatentCodeRows : CodeRows<Codes::kE4m3, kUsesDot> {
  static constexpr bool kTail = true;
  using Tail = DenseRows<T, kUsesDot>;
  using Floats = SwappedRows<LatentCodeRows<T, false>>;
};

// fn(reader) with the reader of a cache's rows; T is the activations' dtype.
template <class T, class Fn>
void with_rows(KvFormat format, Fn&& fn) {
  constexpr bool kDot = uses_dot<T>();
  switch (format) {
    case KvFormat::kDense:
      return fn(DenseRows<T>());
    case KvFormat::kInt8Static:
    case KvFormat::kInt8Dynamic:
      return fn(CodeRows<Codes::k8, kDot>());
    case KvFormat::kFp8:
      return fn(CodeRows<Codes::kE4m3, kDot>());
    case KvFormat::kInt4:
      return fn(CodeRows<Codes::k4, kDot>());
  }
}

// What the readers' numbers are smaller by than the format's codes, and by how much int4's are
// moved.
constexpr float kE4m3Unit = 256.0f;
constexpr float kCode4Middle = 8.0f;

// The least and the largest of a row.
inline void row_range(const float* x, int64_t dim, float* least, float* largest) {
  constexpr int kLanes = Vec::kLanes;
  Vec low = set1(x[0]), high = low;
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    const Vec value = load(x + i);
    low = min(low, value);
    high = max(high, value);
  }
  float smallest = -reduce_max(zero() - low), most = reduce_max(high);
  for (; i < dim; ++i) {
    smallest = smallest < x[i] ? smallest : x[i];
    most = most > x[i] ? most : x[i];
  }
  *least = smallest;
  *largest = most;
}

// codes[i] = round(clip((x[i] - shift) * factor, least, most)) + bias
inline void store_row_codes(const float* x, int64_t dim, float shift, float factor, float least,
                            float most, int bias, uint8_t* codes) {
  constexpr int kLanes = Vec::kLanes;
  for (int64_t i = 0; i < dim; i += kLanes) {
    const int n = static_cast<int>(dim - i < kLanes ? dim - i : kLanes);
    const Vec value = (load_n(x + i, n) - set1(shift)) * set1(factor);
    store_codes(codes + i, min(max(value, set1(least)), set1(most)), bias, n);
  }
}

// e4m3 of x, |x| <= 448, rounded to nearest even.
inline uint8_t e4m3_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 24 & 0x80u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // From 2^-6 on: exponent and three bits of the mantissa. Below, multiples of 2^-9.
  const uint32_t normal = (magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
  const float absolute = x < 0.0f ? -x : x;
  const auto tiny = static_cast<uint32_t>(__builtin_rintf(absolute * 512.0f));
  return static_cast<uint8_t>(sign | (magnitude < 0x3c800000u ? tiny : normal - (120u << 3)));
}

// codes[i] = e4m3 of x[i] * factor, saturating.
inline void store_e4m3(const float* x, int64_t dim, float factor, uint8_t* codes) {
  for (int64_t i = 0; i < dim; ++i) {
    const float value = x[i] * factor;
    codes[i] = e4m3_of(value < -448.0f ? -448.0f : value > 448.0f ? 448.0f : value);
  }
}

// The largest |x| of a row, and not less than kLeastKvRange.
inline float largest_of_row(const float* x, int64_t dim) {
  float least, largest;
  row_range(x, dim, &least, &largest);
  largest = -least > largest ? -least : largest;
  return largest > kLeastKvRange ? largest : kLeastKvRange;
}

// Codes and scale of row `row` of latents in fp8 := x [L].
inline void store_latent_codes(const PagedCache& cache, int64_t row, const float* x, int64_t rank) {
  const float largest = largest_of_row(x, rank);
  cache.key_scale[row] = largest / 448.0f;
  store_e4m3(x, rank, 448.0f / largest, static_cast<uint8_t*>(cache.key) + row * rank);
}

// x [L] := what those stand for.
inline void load_latent_codes(const PagedCache& cache, int64_t row, int64_t rank, float* x) {
  constexpr int kLanes = Vec::kLanes;
  const uint8_t* codes = static_cast<const uint8_t*>(cache.key) + row * rank;
  const Vec scale = set1(cache.key_scale[row] * kE4m3Unit);
  for (int64_t i = 0; i < rank; i += kLanes) {
    const int n = static_cast<int>(rank - i < kLanes ? rank - i : kLanes);
    store_n(x + i, load_e4m3(codes, i, n) * scale, n);
  }
}

// Row `row` of the cache (counted over blocks, heads and slots) := x [D]. `codes`: D + 1 bytes.
inline void store_cache_row(const PagedCache& cache, bool is_key, int64_t row, int64_t head,
                            const float* x, int64_t dim, uint8_t* codes) {
  auto* to = static_cast<uint8_t*>(is_key ? cache.key : cache.value);
  float* scales = is_key ? cache.key_scale : cache.value_scale;
  float least, largest;
  switch (cache.format) {
    case KvFormat::kDense:
      return;  // rotate_head writes those
    case KvFormat::kInt8Static:
      return store_row_codes(x, dim, 0.0f, 1.0f / scales[head], -127.0f, 127.0f, 128,
                             to + row * dim);
    case KvFormat::kInt8Dynamic:
      largest = largest_of_row(x, dim);
      scales[row] = largest / 127.0f;
      return store_row_codes(x, dim, 0.0f, 127.0f / largest, -127.0f, 127.0f, 128, to + row * dim);
    case KvFormat::kFp8:
      return store_e4m3(x, dim, 1.0f / scales[head], to + row * dim);
    case KvFormat::kInt4: {
      row_range(x, dim, &least, &largest);
      float extent = largest - least;
      extent = extent > kLeastKvRange ? extent : kLeastKvRange;
      scales[2 * row] = extent / 15.0f;
      scales[2 * row + 1] = least;
      codes[dim] = 0;  // the high half of an odd row's last byte
      store_row_codes(x, dim, least, 15.0f / extent, 0.0f, 15.0f, 0, codes);
      const int64_t bytes = (dim + 1) / 2;
      for (int64_t i = 0; i < bytes; ++i) {
        to[row * bytes + i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
      }
      return;
    }
  }
}

}  // namespace regatta::cpu::REGATTA_ISA
