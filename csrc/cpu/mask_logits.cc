// Masks on rows of logits, shared among threads by rows. Words of 32 allowed tokens, which are most
// of a row without a mask, are passed over. Bound: memory.
#include "regatta/mask_logits.h"

#include <algorithm>
#include <limits>

#include "thread_pool.h"

namespace regatta::cpu {
namespace {

constexpr int64_t kBits = 32;

void mask_row(float* logits, const int32_t* mask, int64_t vocab_size) {
  constexpr float kBanned = -std::numeric_limits<float>::infinity();
  for (int64_t first = 0; first < vocab_size; first += kBits) {
    const uint32_t word = static_cast<uint32_t>(mask[first / kBits]);
    if (word == ~0u) continue;
    const int64_t count = std::min(kBits, vocab_size - first);
    for (int64_t i = 0; i < count; ++i) {
      logits[first + i] = word >> i & 1 ? logits[first + i] : kBanned;
    }
  }
}

}  // namespace

Status mask_logits(const MaskLogitsParams& p) {
  parallel([&](Team& team) {
    team.for_chunks(p.num_rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        mask_row(p.logits + row * p.vocab_size, p.masks + row * p.num_words, p.vocab_size);
      }
    });
  });
  return {};
}

}  // namespace regatta::cpu
