// See communicator.cc.
#include "rows.inl"

namespace regatta::cpu::REGATTA_ISA {

template <class T>
Status sum_parts_typed(const SumPartsParams& p) {
  constexpr int64_t kChunkValues = 8192;
  T* out = static_cast<T*>(p.out);
  parallel(threads_for_bytes(p.count * (p.num_parts + 1) * int64_t{sizeof(T)}), [&](Team& team) {
    team.for_chunks(p.count, kChunkValues, [&](int64_t begin, int64_t end) {
      for_lanes(end - begin, [&](int64_t i, auto n) REGATTA_LAMBDA_INLINE {
        Vec sum = load_n(static_cast<const T*>(p.parts[0]) + begin + i, n);
        for (int part = 1; part < p.num_parts; ++part) {
          sum = sum + load_n(static_cast<const T*>(p.parts[part]) + begin + i, n);
        }
        store_n(out + begin + i, sum, n);
      });
    });
  });
  return {};
}

inline Status run_sum_parts(const SumPartsParams& p) {
  return with_dtype(p.dtype, [&](auto like) { return sum_parts_typed<decltype(like)>(p); });
}

}  // namespace regatta::cpu::REGATTA_ISA
