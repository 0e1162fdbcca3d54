// See linear.cc.
#include "block.inl"

namespace regatta::cpu::REGATTA_ISA {

template <class T>
Status linear_typed(const LinearParams& p, const Gemm& weight) {
  const T* x = static_cast<const T*>(p.x);
  const T* bias = static_cast<const T*>(p.bias);
  T* out = static_cast<T*>(p.out);
  Scratch::Scope scope(Scratch::mine());
  for (int64_t begin = 0; begin < p.num_tokens; begin += kMaxBlockRows) {
    const int64_t num_rows = std::min(kMaxBlockRows, p.num_tokens - begin);
    Scratch::Scope block_scope(Scratch::mine());
    const PackedRows rows = make_rows(weight, Scratch::mine(), num_rows, Fill::kByRow);
    const int64_t (&parts)[3] = p.part_sizes;
    const Addend<T> addend(p.adapters, p.which, p.low_rank, begin, num_rows, p.in_features,
                           {parts[0], parts[1], parts[2]}, Scratch::mine());
    parallel([&](Team& team) {
      pack_rows(team, rows, x + begin * p.in_features, p.in_features);
      complete_rows(team, rows);
      shrink(team, addend, x + begin * p.in_features, p.in_features);
      gemm(team, weight, rows, [&](const Tile& tile) {
        addend.add(tile);
        store_tile(tile, bias, out + begin * p.out_features, p.out_features);
      });
    });
  }
  return {};
}

inline Status run_linear(const LinearParams& p) {
  Gemm weight;
  Status status = find_gemm(p.scheme, {p.weight, p.num_weights, p.in_features, p.out_features},
                            p.dtype, &weight);
  if (!status.ok()) return status;
  return with_dtype(p.dtype,
                    [&](auto zero_value) { return linear_typed<decltype(zero_value)>(p, weight); });
}

}  // namespace regatta::cpu::REGATTA_ISA
