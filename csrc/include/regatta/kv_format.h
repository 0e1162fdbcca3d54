// How keys, values and latents lie in the paged cache: the twin of predict/nn/cache_formats.py. No
// framework.
//
//   format        a row of D values           scale tensors                          x =
//   dense         D of the activations' dtype none                                   value
//   int8_static   D bytes, code + 128         [Hkv]                                  code * scale
//   int8_dynamic  D bytes, code + 128         [num_blocks, Hkv, block_size]          code * scale
//   fp8           D bytes, e4m3               [Hkv]                                  code * scale
//   int4          ceil(D / 2) bytes, the low  [num_blocks, Hkv, block_size, 2]       code * scale
//                 four bits hold the even dim scale, then minimum                      + minimum
//
// Scales are float32. Codes are rounded to nearest even: int8 in -127..127, int4 in 0..15, e4m3
// saturates at 448. Per token: scale = max|x| / 127, or (max - min) / 15, both with 1e-30 as the
// least numerator, so that a row of zeros has codes of zero and a scale that is not.
//
// Latents are dense, or fp8 with scales of their own: L bytes e4m3, and their tail of R values,
// which are rotated and not normed, as it is, in a tensor of the activations' dtype. Their scales
// are [num_blocks, 1, block_size], made by each write: max|x| / 448, with the same least numerator.
#pragma once

#include <cstdint>
#include <cstring>

namespace regatta {

enum class KvFormat : uint8_t { kDense, kInt8Static, kInt8Dynamic, kFp8, kInt4 };

constexpr int kNumKvFormats = 5;
constexpr float kLeastKvRange = 1e-30f;  // of max|x| and of max - min

struct KvFormatInfo {
  const char* name;
  int code_bits;      // 0: the activations' dtype
  bool token_scales;  // a scale per head and token, which each write makes; else per head, given
  int scale_floats;   // per head, or per head and token; 0: no scale tensors
};

constexpr KvFormatInfo kKvFormats[kNumKvFormats] = {{"dense", 0, false, 0},
                                                    {"int8_static", 8, false, 1},
                                                    {"int8_dynamic", 8, true, 1},
                                                    {"fp8", 8, false, 1},
                                                    {"int4", 4, true, 2}};

constexpr const KvFormatInfo& kv_format_info(KvFormat format) {
  return kKvFormats[static_cast<int>(format)];
}

// False where no format has that name.
inline bool parse_kv_format(const char* name, KvFormat* format) {
  for (int i = 0; i < kNumKvFormats; ++i) {
    if (std::strcmp(kKvFormats[i].name, name) != 0) continue;
    *format = static_cast<KvFormat>(i);
    return true;
  }
  return false;
}

// Cache tensors of a block that keeps so many kinds of rows: key and value, or latents alone; of
// each its rows, and its scales where the format has any.
constexpr int num_kv_tensors(KvFormat format, int num_kinds) {
  return kv_format_info(format).scale_floats ? 2 * num_kinds : num_kinds;
}

// The same of a block that keeps latents: these, or codes, tails and scales.
constexpr int num_latent_tensors(KvFormat format) { return format == KvFormat::kDense ? 1 : 3; }

// Bytes of one row, the key or value of one head and token. element_bytes: of the activations.
constexpr int64_t kv_row_bytes(KvFormat format, int64_t head_dim, int64_t element_bytes) {
  const int bits = kv_format_info(format).code_bits;
  return bits == 0 ? head_dim * element_bytes : (head_dim * bits + 7) / 8;
}

}  // namespace regatta
