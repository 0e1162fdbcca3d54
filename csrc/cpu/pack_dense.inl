// See pack_dense.cc.
#include "rows.inl"

namespace regatta::cpu::REGATTA_ISA {

template <class From, class To>
void pack_panel(const PackDenseParams& p, int64_t panel) {
  constexpr bool kPairs = std::is_same_v<To, bf16>;
  const From* weight = static_cast<const From*>(p.weight);
  const int64_t num_k = p.in_features;
  const int64_t padded = kPairs ? (num_k + 1) / 2 * 2 : num_k;
  To* out = static_cast<To*>(p.packed) + panel * padded * kPanel;
  const int64_t first = panel * kPanel;
  const int64_t columns = std::min(kPanel, p.out_features - first);
  if (padded != num_k || columns != kPanel) {
    __builtin_memset(out, 0, static_cast<size_t>(padded * kPanel) * sizeof(To));
  }
  // In tiles of 32 x 32: reads and writes both run along cache lines, whichever way is transposed.
  To tile[kPanel][kPanel];  // [k][column]
  for (int64_t k = 0; k < num_k; k += kPanel) {
    const int64_t depth = std::min(kPanel, num_k - k);
    if (p.transposed) {
      To line[kPanel];
      for (int64_t column = 0; column < columns; ++column) {
        copy_row(weight + (first + column) * num_k + k, line, depth);
        for (int64_t i = 0; i < depth; ++i) tile[i][column] = line[i];
      }
    } else {
      for (int64_t i = 0; i < depth; ++i) {
        copy_row(weight + (k + i) * p.out_features + first, tile[i], columns);
      }
    }
    for (int64_t i = 0; i < depth; ++i) {
      if (kPairs) {
        To* to = out + (k + i) / 2 * 2 * kPanel + (k + i) % 2;
        for (int64_t column = 0; column < columns; ++column) to[2 * column] = tile[i][column];
      } else {
        __builtin_memcpy(out + (k + i) * kPanel, tile[i],
                         static_cast<size_t>(columns) * sizeof(To));
      }
    }
  }
}

inline Status run_pack_dense(const PackDenseParams& p) {
  const int64_t num_panels = (p.out_features + kPanel - 1) / kPanel;
  return with_dtype(p.from, [&](auto from) {
    return with_dtype(p.to, [&](auto to) {
      parallel([&](Team& team) {
        team.for_chunks(num_panels, 1, [&](int64_t panel, int64_t) {
          pack_panel<decltype(from), decltype(to)>(p, panel);
        });
      });
      return Status();
    });
  });
}

}  // namespace regatta::cpu::REGATTA_ISA
