// The table of sums over ranks. Host code alone: any C++ compiler takes it.
#include "cuda/ranks/select.h"

namespace regatta::cuda {
namespace {

constexpr int64_t kAnyBytes = int64_t{1} << 62;
constexpr int kAnyRanks = 1 << 20;

struct Row {
  Links links;
  int min_arch, max_ranks;
  int64_t max_one_shot_bytes;
  int64_t max_own_bytes;  // beyond it NCCL sums, where it is there
};

// The first row that fits. Two ranks send the same bytes by any way, and one hop is shorter; on
// H200s one shot took 9.0 us against 9.7 for 2 MiB, and 33.8 against 27.9 for 8. Of
// more, one shot sends size / 2 times the bytes of two; the borders are those at which others'
// kernels cross on NVLink 4, and half of them where links are half as wide. Over PCIe the bytes of
// several ranks share one way to the host, on which NCCL's rings send each of them once.
constexpr Row kRows[] = {
    {Links::kNvlink, 90, 2, 4 << 20, kAnyBytes},
    {Links::kNvlink, 0, 2, kAnyBytes, kAnyBytes},
    {Links::kNvlink, 90, 4, 384 << 10, kAnyBytes},
    {Links::kNvlink, 90, 8, 160 << 10, kAnyBytes},
    {Links::kNvlink, 90, kAnyRanks, 64 << 10, kAnyBytes},
    {Links::kNvlink, 0, 4, 192 << 10, kAnyBytes},
    {Links::kNvlink, 0, 8, 80 << 10, kAnyBytes},
    {Links::kNvlink, 0, kAnyRanks, 32 << 10, kAnyBytes},
    {Links::kPcie, 0, 2, kAnyBytes, kAnyBytes},
    {Links::kPcie, 0, kAnyRanks, 16 << 10, 64 << 10},
    {Links::kNone, 0, kAnyRanks, 0, 0},
};

// Blocks of a row have its threads alone to poll with, and a multiprocessor has several of many
// rows.
constexpr int64_t kRowsInNorm = 128, kBytesInNorm = 1 << 20;

const Row& row_of(int num_ranks, int architecture, Links links) {
  const Row* row = kRows;
  while (row->links != links || architecture < row->min_arch || num_ranks > row->max_ranks) ++row;
  return *row;
}

}  // namespace

AllReduce select_all_reduce(const SumProblem& p) {
  const Row& row = row_of(p.num_ranks, p.architecture, p.links);
  if (p.has_nccl && p.bytes > row.max_own_bytes) return AllReduce::kNccl;
  return p.bytes <= row.max_one_shot_bytes ? AllReduce::kOneShot : AllReduce::kTwoShot;
}

bool wants_nccl(int num_ranks, Links links) {
  return row_of(num_ranks, 0, links).max_own_bytes < kAnyBytes;
}

bool sums_in_norm(int64_t num_rows, const SumProblem& p) {
  return num_rows <= kRowsInNorm && p.bytes <= kBytesInNorm &&
         select_all_reduce(p) != AllReduce::kNccl;
}

}  // namespace regatta::cuda
