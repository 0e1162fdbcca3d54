// See cpu.cc.
#include "cpu/block.inl"

namespace regatta::cpu::REGATTA_ISA {

template <class T>
void mlp_block_piece(const MlpBlockParams& p, const Gemm& gate_up, const Gemm& down, int64_t begin,
                     int64_t num_rows) {
  const T* bias = static_cast<const T*>(p.gate_up.bias);
  const int64_t hidden_size = p.hidden_size, intermediate = p.block.intermediate_size;
  const int64_t up_size = p.block.up_size();
  const Activation& activation = p.block.activation;
  // A column's products are whole in one tile, gate and up in one panel index, only if up begins
  // at a panel.
  const bool fused = intermediate % kPanel == 0;
  const T* hidden = static_cast<const T*>(p.hidden) + begin * hidden_size;
  const T* input = static_cast<const T*>(p.input()) + begin * hidden_size;
  Scratch& shared = Scratch::mine();
  Scratch::Scope scope(shared);
  const PackedRows normed = make_rows(gate_up, shared, num_rows, Fill::kByRow);
  const PackedRows active = make_rows(down, shared, num_rows, Fill::kByColumns);
  float* products = fused ? nullptr : shared.take<float>(num_rows * up_size);
  const bool joins = p.block.joins;
  const Ending<T> ending(p.block, p.post_norm, p.down.bias, joins ? input : hidden,
                         static_cast<T*>(p.hidden_out) + begin * hidden_size, num_rows, hidden_size,
                         shared);
  const int64_t halves = activation.gated ? intermediate : 0;
  const Addend<T> up_addend(p.adapters, Adapted::kGateUp, p.gate_up.low_rank, begin, num_rows,
                            hidden_size, {halves, intermediate}, shared);
  const Addend<T> down_addend(p.adapters, Adapted::kDown, p.down.low_rank, begin, num_rows,
                              intermediate, {hidden_size}, shared);
  const Kept<T> kept(ending, p.block.norm, input, up_addend.any(), num_rows, shared);
  float* inner = fused && down_addend.any() ? shared.take<float>(num_rows * intermediate) : nullptr;
  const float* activated = fused ? inner : products;
  const int64_t activated_stride = fused ? intermediate : up_size;
  parallel([&](Team& team) {
    take_rows(team, normed, input, p.block.norm, p.norm, kept.kept);
    complete_rows(team, normed);
    shrink(team, up_addend, kept.rows, hidden_size);
    if (fused) {
      const auto activate = [&](const Tile& tile) {
        up_addend.add(tile);
        activate_tile(activation, active, tile, bias, intermediate, inner);
      };
      gemm(team, gate_up, normed, activate, activation.gated);
    } else {
      gemm(team, gate_up, normed, [&](const Tile& tile) {
        up_addend.add(tile);
        store_tile(tile, bias, products, up_size);
      });
      team.barrier();
      for_rows(team, num_rows, [&](int64_t row) {
        activate_products(activation, active, row, products + row * up_size);
      });
    }
    complete_rows(team, active);
    shrink(team, down_addend, activated, activated_stride);
    gemm(team, down, active, [&](const Tile& tile) {
      down_addend.add(tile);
      if (joins) add_to_tile(tile, hidden, hidden_size);
      ending(tile);
    });
    ending.complete(team);
  });
}

inline Status run_mlp_block(const MlpBlockParams& p) {
  const MlpBlock& block = p.block;
  Gemm gate_up, down;
  Status status = find_linear("gate_up", p.gate_up, block.gate_up, p.hidden_size, block.up_size(),
                              p.dtype, &gate_up);
  if (!status.ok()) return status;
  status = find_linear("down", p.down, block.down, block.intermediate_size, p.hidden_size, p.dtype,
                       &down);
  if (!status.ok()) return status;
  return with_dtype(p.dtype, [&](auto like) {
    for (int64_t begin = 0; begin < p.num_tokens; begin += kMaxBlockRows) {
      mlp_block_piece<decltype(like)>(p, gate_up, down, begin,
                                      std::min(kMaxBlockRows, p.num_tokens - begin));
    }
    return Status();
  });
}

}  // namespace regatta::cpu::REGATTA_ISA
