// See activate.cc.
// clang-format off: functions.inl uses what rows.inl defines
#include "rows.inl"
#include "functions.inl"
// clang-format on

namespace regatta::cpu::REGATTA_ISA {

template <class T>
Status activate_typed(const ActivateParams& p) {
  const T* x = static_cast<const T*>(p.x);
  T* out = static_cast<T*>(p.out);
  const int64_t width = p.intermediate_size, row_size = width * (p.activation.gated ? 2 : 1);
  const int64_t bytes = p.num_tokens * (row_size + width) * int64_t{sizeof(T)};
  const bool gated = p.activation.gated;
  with_function(p.activation.function, [&](auto function) {
    parallel(threads_for_bytes(bytes), [&](Team& team) {
      for_rows(team, p.num_tokens, [&](int64_t row) {
        const T* from = x + row * row_size;
        activate_row<decltype(function)::value>(p.activation, from, gated ? from + width : nullptr,
                                                out + row * width, width);
      });
    });
  });
  return {};
}

inline Status run_activate(const ActivateParams& p) {
  return with_dtype(p.dtype, [&](auto like) { return activate_typed<decltype(like)>(p); });
}

}  // namespace regatta::cpu::REGATTA_ISA
