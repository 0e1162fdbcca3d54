// Patches of pictures: a pixel has one of 256 values, so that each channel has a table of what
// becomes of them. Bound: memory (or the call itself).
#include "regatta/cut_patches.h"

#include <string>
#include <vector>

#include "thread_pool.h"

namespace regatta::cpu {
namespace {

constexpr int64_t kChunkPatches = 32;
constexpr int kValues = 256;  // of a pixel's channel

template <class T>
Status cut(const CutPatchesParams& p) {
  std::vector<T> made(kNumChannels * kValues);
  for (int c = 0; c < kNumChannels; ++c) {
    for (int value = 0; value < kValues; ++value) {
      const float scaled = static_cast<float>(value) * p.factor;
      from_float((scaled - p.mean[c]) / p.std[c], &made[c * kValues + value]);
    }
  }
  T zero;
  from_float(0.0f, &zero);
  parallel([&](Team& team) {
    team.for_chunks(p.num_patches, kChunkPatches, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const uint8_t* const pixels = p.pixels + p.origins[i];
        T* to = static_cast<T*>(p.out) + i * p.width;
        T* const row_end = to + p.width;
        for (int c = 0; c < kNumChannels; ++c) {
          const T* const table = made.data() + c * kValues;
          for (int64_t y = 0; y < p.side; ++y) {
            const uint8_t* const row = pixels + kNumChannels * y * p.strides[i] + c;
            for (int64_t x = 0; x < p.side; ++x) *to++ = table[row[kNumChannels * x]];
          }
        }
        while (to < row_end) *to++ = zero;
      }
    });
  });
  return {};
}

}  // namespace

Status cut_patches(const CutPatchesParams& p) {
  for (int64_t i = 0; i < p.num_patches; ++i) {
    const int64_t pixels = (p.side - 1) * p.strides[i] + p.side;
    if (p.strides[i] < p.side || p.origins[i] < 0 ||
        p.origins[i] + kNumChannels * pixels > p.num_bytes) {
      return Status::error("cut_patches: patch " + std::to_string(i) + " begins at byte " +
                           std::to_string(p.origins[i]) + ", in rows of " +
                           std::to_string(p.strides[i]) + " pixels (allowed: within the " +
                           std::to_string(p.num_bytes) + " bytes of the pictures)");
    }
  }
  switch (p.dtype) {
    case DType::kFloat32:
      return cut<float>(p);
    case DType::kBFloat16:
      return cut<bf16>(p);
    case DType::kFloat16:
      return cut<fp16>(p);
    default:
      return Status::error(std::string("cut_patches: dtype ") + dtype_name(p.dtype) +
                           " is not supported (allowed: float32, bfloat16, float16)");
  }
}

}  // namespace regatta::cpu
