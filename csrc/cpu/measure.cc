// What this machine can do at best, for benchmarks to be compared with: bytes read from memory,
// multiply-adds in registers and tiles' of what they read, on the same threads that the kernels
// use.
#include <algorithm>
#include <chrono>
#include <type_traits>
#include <utility>

#include "dispatch.h"
#include "gemm.h"
#include "regatta/abi.h"
#include "thread_pool.h"

#define REGATTA_INL "measure.inl"
#include "foreach_isa.h"

namespace regatta::cpu {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

volatile float discarded;

}  // namespace
}  // namespace regatta::cpu

// Bytes per second of one pass over `data` by all threads; `bytes` should be well beyond the
// caches.
REGATTA_EXPORT double regatta_measure_read(const void* data, int64_t bytes) {
  using namespace regatta::cpu;
  constexpr int64_t kPiece = int64_t{1} << 20;
  const Isa isa = best_isa();
  const int64_t pieces = bytes / kPiece;
  const Clock::time_point begin = Clock::now();
  parallel([&](Team& team) {
    team.for_guided(pieces, [&](int64_t from, int64_t to) {
      discarded = REGATTA_IN_ISA(
          isa, read_streams(static_cast<const char*>(data) + from * kPiece, (to - from) * kPiece));
    });
    team.barrier();
  });
  return static_cast<double>(pieces * kPiece) / seconds_since(begin);
}

// Floating-point operations per second of all threads in registers: fused multiply-adds of float,
// or with `bf16_pairs` tiles, else vdpbf16ps (0 where this CPU has neither).
REGATTA_EXPORT double regatta_measure_flops(int bf16_pairs) {
  using namespace regatta::cpu;
  const Isa isa = best_isa();
  if (bf16_pairs && !has_pairs(isa)) return 0.0;
  constexpr int64_t kRounds = 100000;  // 0.2 ms or so
  const int64_t pieces = 40 * num_threads();
  double per_piece = 0.0;
  const Clock::time_point begin = Clock::now();
  parallel([&](Team& team) {
    team.for_each(pieces, [&](int64_t i) {
      float sink = 0.0f;
      const double count = bf16_pairs && has_tiles(isa)
                               ? REGATTA_IN_ISA(isa, multiply_tiles(kRounds / 4))
                               : REGATTA_IN_ISA(isa, multiply_add(kRounds, bf16_pairs != 0, &sink));
      if (i == 0) per_piece = count;
      discarded = sink;
    });
    team.barrier();
  });
  return per_piece * static_cast<double>(pieces) / seconds_since(begin);
}

// The same of bfloat16 by tiles that read one factor from `data`, of which a thread has an equal
// part: a few KiB stay in its first cache. 0 where no tiles run.
REGATTA_EXPORT double regatta_measure_tiles(const void* data, int64_t bytes) {
  using namespace regatta::cpu;
  constexpr int64_t kRoundBytes = int64_t{16} << 20;  // of a thread
  const Isa isa = best_isa();
  if (!has_tiles(isa)) return 0.0;
  const int64_t parts = num_threads(), part = bytes / parts;
  const int64_t rounds = std::max<int64_t>(1, kRoundBytes / part);
  double per_part = 0.0;
  const Clock::time_point begin = Clock::now();
  parallel([&](Team& team) {
    team.for_each(parts, [&](int64_t i) {
      const double count = REGATTA_IN_ISA(
          isa, stream_tiles(rounds, static_cast<const char*>(data) + i * part, part));
      if (i == 0) per_part = count;
    });
    team.barrier();
  });
  return per_part * static_cast<double>(parts) / seconds_since(begin);
}
