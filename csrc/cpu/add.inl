// See add.cc.
#include "rows.inl"

namespace regatta::cpu::REGATTA_ISA {

template <class T>
Status add_typed(const AddParams& p) {
  constexpr int64_t kChunkValues = 8192;
  const T* a = static_cast<const T*>(p.a);
  const T* b = static_cast<const T*>(p.b);
  T* out = static_cast<T*>(p.out);
  const Vec a_scale = set1(p.a_scale), b_scale = set1(p.b_scale);
  const auto sum = [&](int64_t i, int n) REGATTA_LAMBDA_INLINE {
    const Vec scaled = load_n(a + i, n) * a_scale;
    store_n(out + i, b ? fma(load_n(b + i, n), b_scale, scaled) : scaled, n);
  };
  parallel(threads_for_bytes(p.count * 3 * int64_t{sizeof(T)}), [&](Team& team) {
    team.for_chunks(p.count, kChunkValues, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i += Vec::kLanes) {
        sum(i, static_cast<int>(end - i < Vec::kLanes ? end - i : Vec::kLanes));
      }
    });
  });
  return {};
}

inline Status run_add(const AddParams& p) {
  return with_dtype(p.dtype, [&](auto like) { return add_typed<decltype(like)>(p); });
}

}  // namespace regatta::cpu::REGATTA_ISA
