// The launchers of cuda/adapters/low_rank.h as plain loops. See kernels.cc.
#include <cmath>
#include <cstdint>
#include <vector>

#include "cuda/adapters/low_rank.h"
#include "kernel.h"
#include "rows.h"

namespace regatta::cuda {
namespace {

// fn(number of the page among the adapter's, page) of each that a row's adapter has.
template <class Fn>
void for_pages(const AdapterRows& rows, Adapted which, int64_t num_pages, int64_t row, Fn&& fn) {
  const int64_t id = rows.ids[row];
  if (id < 0) return;
  const int32_t* pages = rows.pages + (id * kNumAdapted + int(which)) * rows.max_pages;
  for (int64_t i = 0; i < rows.max_pages && pages[i] >= 0 && pages[i] < num_pages; ++i) {
    fn(i, pages[i]);
  }
}

template <class T>
void shrink_row(const ShrinkParams& p, int64_t row) {
  const int64_t width = p.in_features, splits = shrink_splits(width);
  std::vector<float> x(width), a(width);
  read_row(static_cast<const T*>(p.x) + row * width, width, x.data());
  const float square = dot(x.data(), x.data(), width);
  if (p.norm_weight != nullptr) {
    read_row(static_cast<const T*>(p.norm_weight), width, a.data());
    for (int64_t i = 0; i < width; ++i) x[i] *= a[i];
  }
  for_pages(p.rows, p.which, p.weights.num_pages, row, [&](int64_t number, int64_t page) {
    for (int64_t split = 0; split < splits; ++split) {  // the first one has it all
      if (p.norm_weight != nullptr) p.squares[row * splits + split] = split == 0 ? square : 0.f;
      for (int64_t i = 0; i < p.num_parts * kPageRanks; ++i) {
        const int64_t part = i / kPageRanks, rank = i % kPageRanks;
        const int64_t piece = (row * splits + split) * p.num_parts + part;
        float& sum = p.sums[(piece * p.rows.max_pages + number) * kPageRanks + rank];
        const int64_t at = (page * p.num_parts + part) * kPageRanks + rank;
        read_row(static_cast<const T*>(p.weights.a) + at * width, width, a.data());
        sum = split == 0 ? dot(x.data(), a.data(), width) : 0.f;
      }
    }
  });
}

template <class T>
Status expand_row(const ExpandParams& p, int64_t row) {
  const int64_t width = p.out_features, splits = shrink_splits(p.in_features);
  std::vector<float> out(width), b(width);
  const auto* const residual = static_cast<const T*>(p.residual);
  if (residual != nullptr) read_row(residual + row * width, width, out.data());
  float factor = 1.f, square = 0.f;
  for (int64_t i = 0; p.squares != nullptr && i < splits; ++i) {
    square += p.squares[row * splits + i];
    factor = 1.f / std::sqrt(square / static_cast<float>(p.in_features) + p.epsilon);
  }
  for_pages(p.rows, p.which, p.weights.num_pages, row, [&](int64_t number, int64_t page) {
    for (int64_t rank = 0; rank < kPageRanks; ++rank) {
      const auto* from = static_cast<const T*>(p.weights.b) + (page * kPageRanks + rank) * width;
      read_row(from, width, b.data());
      int64_t part = 0;
      for (int64_t n = 0; n < width; ++n) {
        if (n == p.part_ends[part]) ++part;
        float sum = 0.f;
        for (int64_t split = 0; split < splits; ++split) {
          const int64_t piece = (row * splits + split) * p.num_parts + part;
          sum += p.sums[(piece * p.rows.max_pages + number) * kPageRanks + rank];
        }
        out[n] += factor * sum * b[n];
      }
    }
  });
  if (p.activation == nullptr) {
    write_row(out.data(), width, static_cast<T*>(p.out) + row * width);
    return {};
  }
  std::vector<T> summed(width);
  write_row(out.data(), width, summed.data());
  const int64_t outputs = width / (p.activation->gated ? 2 : 1);
  return cpu::activate(
      {summed.data(), static_cast<T*>(p.out) + row * outputs, 1, outputs, p.dtype, *p.activation});
}

}  // namespace

int64_t shrink_splits(int64_t in_features) { return ceil_div(in_features, 48); }

// Codes are made by a launch of their own.
bool shrink_quantizes(const ShrinkParams&, const QuantizeRowsParams&) { return false; }

// The loops know each row's adapter.
Status sort_rows(const SortRowsParams&, const Launch&) { return {}; }

Status shrink(const ShrinkParams& params, const Launch& on) {
  return queue(on.stream, "shrink", [p = params] {
    return dispatch(p.dtype, "shrink", [&](auto* like) {
      for (int64_t row = 0; row < p.num_rows; ++row) shrink_row<ElementOf<decltype(like)>>(p, row);
      return Status();
    });
  });
}

// Of its own, since the caller's may be gone when the launch runs.
static Activation activation_of(const ExpandParams& p) {
  return p.activation == nullptr ? Activation() : *p.activation;
}

Status expand(const ExpandParams& params, const Launch& on) {
  return queue(on.stream, "expand", [params, own = activation_of(params)] {
    ExpandParams p = params;
    if (p.activation != nullptr) p.activation = &own;
    return dispatch(p.dtype, "expand", [&](auto* like) {
      Status status;
      for (int64_t row = 0; status.ok() && row < p.num_rows; ++row) {
        status = expand_row<ElementOf<decltype(like)>>(p, row);
      }
      return status;
    });
  });
}

}  // namespace regatta::cuda
