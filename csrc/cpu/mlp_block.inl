// See mlp_block.cc.
#include "gemm.inl"

namespace regatta::cpu::REGATTA_ISA {

// silu(gate) * up of two tiles of products, into columns of the rows that `down` multiplies.
template <class T>
void silu_mul_tiles(const PackedRows& rows, int64_t row, int64_t num_rows, int64_t column,
                    const float* gate, const float* up, const T* bias, int64_t up_offset) {
  constexpr int kLanes = Vec::kLanes;
  float values[kPanel];
  for (int64_t i = 0; i < num_rows; ++i) {
    for (int j = 0; j < kPanel; j += kLanes) {
      Vec g = load(gate + i * kPanel + j);
      Vec u = load(up + i * kPanel + j);
      if (bias) {
        g = g + load(bias + column + j);
        u = u + load(bias + up_offset + column + j);
      }
      store(values + j, silu(g) * u);
    }
    pack_columns(rows, row + i, column, values, kPanel);
  }
}

template <class T>
Status mlp_block_typed(const MlpBlockParams& p, const Gemm& gate_up, const Gemm& down) {
  const T* norm_weight = static_cast<const T*>(p.norm_weight);
  const T* gate_up_bias = static_cast<const T*>(p.gate_up_bias);
  const T* down_bias = static_cast<const T*>(p.down_bias);
  const int64_t hidden_size = p.hidden_size;
  const int64_t intermediate = p.intermediate_size;
  // Gate and up of a column meet in one panel index only if up begins at a panel.
  const bool fused = intermediate % kPanel == 0;
  for (int64_t begin = 0; begin < p.num_tokens; begin += kMaxBlockRows) {
    const int64_t num_rows = std::min(kMaxBlockRows, p.num_tokens - begin);
    const T* hidden = static_cast<const T*>(p.hidden) + begin * hidden_size;
    T* out = static_cast<T*>(p.out) + begin * hidden_size;
    Scratch& shared = Scratch::mine();
    Scratch::Scope scope(shared);
    const PackedRows normed = make_rows(gate_up, shared, num_rows, Fill::kByRow);
    const PackedRows active = make_rows(down, shared, num_rows, Fill::kByColumns);
    float* products = fused ? nullptr : shared.take<float>(num_rows * 2 * intermediate);
    parallel([&](Team& team) {
      norm_rows(team, normed, hidden, hidden_size, norm_weight, p.epsilon);
      complete_rows(team, normed);
      if (fused) {
        gemm_halves(team, gate_up, normed,
                    [&](int64_t row, int64_t num, int64_t column, int64_t, const float* gate,
                        const float* up) {
                      silu_mul_tiles(active, row, num, column, gate, up, gate_up_bias,
                                     intermediate);
                    });
      } else {
        gemm(team, gate_up, normed,
             [&](int64_t row, int64_t num, int64_t column, int64_t num_columns, const float* tile) {
               store_tile(tile, row, num, column, num_columns, gate_up_bias,
                          static_cast<const float*>(nullptr), products, 2 * intermediate);
             });
        team.barrier();
        team.for_chunks(num_rows, rows_per_claim(team, num_rows), [&](int64_t from, int64_t to) {
          for (int64_t row = from; row < to; ++row) {
            float* gate = products + row * 2 * intermediate;
            silu_mul_row(gate, gate + intermediate, gate, intermediate);
            pack_row(active, row, gate);
          }
        });
      }
      complete_rows(team, active);
      gemm(team, down, active,
           [&](int64_t row, int64_t num, int64_t column, int64_t num_columns, const float* tile) {
             store_tile(tile, row, num, column, num_columns, down_bias, hidden, out, hidden_size);
           });
    });
  }
  return {};
}

inline Status run_mlp_block(const MlpBlockParams& p) {
  Gemm gate_up, down;
  Status status = find_gemm(scheme_at(p.scheme, 0, 2),
                            {p.gate_up, p.num_gate_up, p.hidden_size, 2 * p.intermediate_size},
                            p.dtype, REGATTA_ISA_ENUM, &gate_up);
  if (!status.ok()) return Status::error("gate_up: " + status.message());
  status =
      find_gemm(scheme_at(p.scheme, 1, 2), {p.down, p.num_down, p.intermediate_size, p.hidden_size},
                p.dtype, REGATTA_ISA_ENUM, &down);
  if (!status.ok()) return Status::error("down: " + status.message());
  return with_dtype(p.dtype,
                    [&](auto like) { return mlp_block_typed<decltype(like)>(p, gate_up, down); });
}

}  // namespace regatta::cpu::REGATTA_ISA
