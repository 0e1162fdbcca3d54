// The table of sums over ranks. Host code alone: any C++ compiler takes it.
#include "cuda/ranks/select.h"

namespace regatta::cuda {
namespace {

constexpr int64_t kAnyBytes = int64_t{1} << 62;

struct Row {
  int min_arch, max_ranks;
  int64_t max_one_shot_bytes;
};

// The first row that fits. Two ranks send the same bytes either way, and one hop is shorter. Of
// more, one shot sends size / 2 times the bytes of two; the borders are those at which others'
// kernels cross on NVLink 4, and half of them where links are half as wide.
constexpr Row kRows[] = {
    {0, 2, kAnyBytes}, {90, 4, 384 << 10}, {90, 8, 160 << 10},     {90, 1 << 20, 64 << 10},
    {0, 4, 192 << 10}, {0, 8, 80 << 10},   {0, 1 << 20, 32 << 10},
};

// Blocks of a row have its threads alone to poll with: many rows are faster spread over them all.
constexpr int64_t kRowsInNorm = 32, kBytesInNorm = 512 << 10;

}  // namespace

AllReduce select_all_reduce(int64_t bytes, int num_ranks, int architecture) {
  for (const Row& row : kRows) {
    if (architecture < row.min_arch || num_ranks > row.max_ranks) continue;
    return bytes <= row.max_one_shot_bytes ? AllReduce::kOneShot : AllReduce::kTwoShot;
  }
  return AllReduce::kTwoShot;
}

bool sums_in_norm(int64_t num_rows, int64_t bytes) {
  return num_rows <= kRowsInNorm && bytes <= kBytesInNorm;
}

}  // namespace regatta::cuda
