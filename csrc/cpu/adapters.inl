// What adapters add to a linear's products (regatta/adapters.h). Behind block.inl.
//
// Two steps: `shrink` makes each row's few sums x A^T, a page for a thread at a time; `add` puts
// their products with B into a tile while it is in L1. A row's values depend on no other row.
#include <initializer_list>

namespace regatta::cpu::REGATTA_ISA {

// Of one linear, for some rows. Rows without an adapter cost nothing.
template <class T>
class Addend {
 public:
  // rows: of the tokens from `begin` on. part_sizes: output features of each part. Takes scratch
  // that lives as long as the caller's scope.
  Addend(const AdapterRows& rows, Adapted which, const LowRankWeights& weights, int64_t begin,
         int64_t num_rows, int64_t in_features, std::initializer_list<int64_t> part_sizes,
         Scratch& scratch)
      : width_(in_features), packed_width_((in_features + kPackedIn - 1) / kPackedIn * kPackedIn) {
    if (rows.ids == nullptr || weights.a == nullptr) return;
    for (const int64_t size : part_sizes) {
      if (size == 0) continue;
      part_begin_[num_parts_++] = out_features_;
      out_features_ += size;
    }
    part_begin_[num_parts_] = out_features_;
    num_groups_ = (out_features_ + kPackedOut - 1) / kPackedOut;
    a_ = static_cast<const T*>(weights.a);
    b_ = static_cast<const T*>(weights.b);
    pages_ = scratch.take<const int32_t*>(num_rows);
    jobs_ = scratch.take<Job>(num_rows * rows.max_pages);
    max_pages_ = rows.max_pages;
    for (int64_t i = 0; i < num_rows; ++i) {
      const int32_t id = rows.ids[begin + i];
      const auto row = id * kNumAdapted + static_cast<int64_t>(which);
      pages_[i] = id < 0 ? nullptr : rows.pages + row * max_pages_;
      for (int64_t j = 0; j < max_pages_ && id >= 0 && pages_[i][j] >= 0; ++j) {
        jobs_[num_jobs_++] = {static_cast<int32_t>(i), static_cast<int32_t>(j)};
      }
    }
    if (num_jobs_ > 0) sums_ = scratch.take<float>(num_rows * row_sums());
  }

  bool any() const { return num_jobs_ > 0; }

  // x: rows `stride` apart. Without a barrier before or behind it.
  template <class X>
  void shrink(Team& team, const X* x, int64_t stride) const {
    team.for_chunks(num_jobs_, rows_per_claim(team, num_jobs_), [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) {
        const Job& job = jobs_[i];
        for (int64_t part = 0; part < num_parts_; ++part) {
          const int64_t at = pages_[job.row][job.page] * num_parts_ + part;
          page_sums(x + job.row * stride, a_ + at * kPageRanks * packed_width_,
                    sums_ + job.row * row_sums() + (job.page * num_parts_ + part) * kPageRanks);
        }
      }
    });
  }

  // tile[i * kPanel + j], the products of row + i and column + j, becomes what they are with the
  // adapters' part.
  void add(int64_t row, int64_t num_rows, int64_t column, int64_t num_columns, float* tile) const {
    if (!any()) return;
    for (int64_t i = 0; i < num_rows; ++i) {
      const int32_t* pages = pages_[row + i];
      if (pages == nullptr) continue;
      const float* sums = sums_ + (row + i) * row_sums();
      for (int64_t page = 0; page < max_pages_ && pages[page] >= 0; ++page) {
        for (int64_t part = 0; part < num_parts_; ++part) {
          const int64_t first = std::max(column, part_begin_[part]) - column;
          const int64_t last = std::min(column + num_columns, part_begin_[part + 1]) - column;
          const int64_t at = pages[page] * num_groups_ + column / kPackedOut;
          add_page(sums + (page * num_parts_ + part) * kPageRanks,
                   b_ + at * kPageRanks * kPackedOut + first, last - first,
                   tile + i * kPanel + first);
        }
      }
    }
  }

 private:
  struct Job {
    int32_t row, page;  // the row's first, second, ...
  };

  int64_t row_sums() const { return max_pages_ * num_parts_ * kPageRanks; }

  template <class X>
  void page_sums(const X* x, const T* a, float* sums) const {
    static_assert(kPackedIn % Vec::kLanes == 0);
    Vec made[kPageRanks];
    for (Vec& each : made) each = zero();
    const auto add = [&](Vec value, const T* from) REGATTA_LAMBDA_INLINE {
      for (int r = 0; r < kPageRanks; ++r) {
        made[r] = fma(value, load(from + r * kPackedIn), made[r]);
      }
    };
    // Lanes of x behind the row's end are 0, as what is packed there.
    for_lanes(
        width_, [&](int64_t k) REGATTA_LAMBDA_INLINE { add(load(x + k), packed(a, k)); },
        [&](int64_t k, int n) REGATTA_LAMBDA_INLINE { add(load_n(x + k, n), packed(a, k)); });
    for (int r = 0; r < kPageRanks; ++r) sums[r] = reduce_add(made[r]);
  }

  // The first rank's values from column k on.
  static const T* packed(const T* a, int64_t k) {
    return a + k / kPackedIn * kPageRanks * kPackedIn + k % kPackedIn;
  }

  // values[0 .. count) += sums B, of columns in one group. Asks for the group behind it: each row's
  // adapter is a stream of its own, and few of them at a time are found by the hardware.
  void add_page(const float* sums, const T* b, int64_t count, float* values) const {
    static_assert(kPackedOut == kPanel);
    constexpr int64_t kLine = kLineBytes / sizeof(T);
    for (int64_t i = 0; i < kPageRanks * kPackedOut; i += kLine) {
      __builtin_prefetch(b + kPageRanks * kPackedOut + i);
    }
    const auto add = [&](Vec value, auto&& from) REGATTA_LAMBDA_INLINE {
      for (int r = 0; r < kPageRanks; ++r) value = fma(set1(sums[r]), from(r), value);
      return value;
    };
    for_lanes(
        count,
        [&](int64_t j) REGATTA_LAMBDA_INLINE {
          store(values + j, add(load(values + j), [&](int r) REGATTA_LAMBDA_INLINE {
                  return load(b + r * kPackedOut + j);
                }));
        },
        [&](int64_t j, int n) REGATTA_LAMBDA_INLINE {
          const auto rest = [&](int r)
                                REGATTA_LAMBDA_INLINE { return load_n(b + r * kPackedOut + j, n); };
          store_n(values + j, add(load_n(values + j, n), rest), n);
        });
  }

  static constexpr int kMaxParts = 3;
  int64_t width_, packed_width_;  // of inputs
  int64_t num_groups_ = 0;        // of kPackedOut outputs
  int64_t out_features_ = 0, num_parts_ = 0, max_pages_ = 0;
  int64_t part_begin_[kMaxParts + 1] = {};
  const T *a_ = nullptr, *b_ = nullptr;
  const int32_t** pages_ = nullptr;  // [rows] of each row's adapter; null: it has none
  Job* jobs_ = nullptr;
  int64_t num_jobs_ = 0;
  float* sums_ = nullptr;  // [rows, pages, parts, kPageRanks]
};

// Addend::shrink and the barrier that the product behind it needs; nothing where no row has one.
template <class T, class X>
inline void shrink(Team& team, const Addend<T>& addend, const X* x, int64_t stride) {
  if (!addend.any()) return;
  addend.shrink(team, x, stride);
  team.barrier();
}

// A block's input as its norm leaves it, rounded, where the sum or adapters read it.
template <class T>
struct Kept {
  T* kept = nullptr;        // where take_rows() puts it, or null
  const T* rows = nullptr;  // it; null where nobody asked

  // x: [num_rows, width] the block's input. for_addend: whether adapters read it.
  Kept(const Ending<T>& ending, const Norm& norm, const T* x, bool for_addend, int64_t num_rows,
       Scratch& scratch)
      : kept(ending.kept) {
    if (for_addend && norm.is_there && kept == nullptr) {
      kept = scratch.take<T>(num_rows * ending.rows.width);
    }
    rows = norm.is_there ? kept : x;
  }
};

}  // namespace regatta::cpu::REGATTA_ISA
