// What pictures write, row by row. Bound: memory.
#include "regatta/picture_rows.h"

#include <cstring>
#include <string>

#include "thread_pool.h"

namespace regatta::cpu {
namespace {

constexpr int64_t kChunkRows = 16;

Status outside(const char* what, int64_t got, int64_t end) {
  return Status::error(std::string(what) + " holds " + std::to_string(got) + " (allowed: 0 .. " +
                       std::to_string(end - 1) + ")");
}

}  // namespace

Status put_rows(const PutRowsParams& p) {
  for (int64_t i = 0; i < p.num_rows; ++i) {
    if (p.rows[i] < 0 || p.rows[i] >= p.num_table_rows) {
      return outside("rows", p.rows[i], p.num_table_rows);
    }
  }
  const auto bytes = static_cast<size_t>(p.width * dtype_size(p.dtype));
  parallel([&](Team& team) {
    team.for_chunks(p.num_rows, kChunkRows, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        std::memcpy(static_cast<char*>(p.table) + p.rows[i] * bytes,
                    static_cast<const char*>(p.x) + i * bytes, bytes);
      }
    });
  });
  return {};
}

Status write_places(const WritePlacesParams& p) {
  if (p.first < 0 || p.first + p.num_places > p.num_table_rows) {
    return Status::error("write_places: rows " + std::to_string(p.first) + " to " +
                         std::to_string(p.first + p.num_places) + " (allowed: up to " +
                         std::to_string(p.num_table_rows) + ")");
  }
  for (int64_t i = 0; i < p.num_places * kNumAxes; ++i) {
    if (p.places[i] < 0 || p.places[i] >= p.first) return outside("places", p.places[i], p.first);
  }
  const int64_t angles = p.num_angles, width = 2 * angles;
  parallel([&](Team& team) {
    team.for_chunks(p.num_places, kChunkRows, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        float* const to = p.table + (p.first + t) * width;
        for (int64_t j = 0; j < angles; ++j) {
          const float* const from = p.table + p.places[t * kNumAxes + p.axes[j]] * width;
          to[j] = from[j];
          to[angles + j] = from[angles + j];
        }
      }
    });
  });
  return {};
}

}  // namespace regatta::cpu
