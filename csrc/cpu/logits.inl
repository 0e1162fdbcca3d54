// See logits.cc.
#include "block.inl"

namespace regatta::cpu::REGATTA_ISA {

// logits := scaled and capped.
inline void bend_logits(float* logits, int64_t width, const LogitsParams& p) {
  for (int64_t i = 0; i < width; i += Vec::kLanes) {
    const int n = lanes_left(width - i);
    const Vec scaled = load_n(logits + i, n) * set1(p.scale);
    store_n(logits + i, p.softcap != 0.0f ? capped(scaled, p.softcap) : scaled, n);
  }
}

template <class T>
Status logits_typed(const LogitsParams& p, const Gemm& head) {
  const T* bias = static_cast<const T*>(p.bias);
  const bool bent = p.scale != 1.0f || p.softcap != 0.0f;
  const T* hidden = static_cast<const T*>(p.hidden);
  const T* norm_weight = static_cast<const T*>(p.norm_weight);
  for (int64_t begin = 0; begin < p.num_logits; begin += kMaxBlockRows) {
    const int64_t num_rows = std::min(kMaxBlockRows, p.num_logits - begin);
    Scratch::Scope scope(Scratch::mine());
    const PackedRows rows = make_rows(head, Scratch::mine(), num_rows, Fill::kByRow);
    parallel([&](Team& team) {
      {
        Scratch::Scope row_scope(team.scratch());
        float* normed = team.scratch().take<float>(p.hidden_size);
        team.for_each(num_rows, [&](int64_t row) {
          const int64_t index =
              p.logit_indices == nullptr ? begin + row : p.logit_indices[begin + row];
          const T* from = hidden + index * p.hidden_size;
          if (norm_weight) {
            rms_norm_row(from, norm_weight, normed, p.hidden_size, p.epsilon);
          } else {
            copy_row(from, normed, p.hidden_size);
          }
          pack_row(rows, row, normed);
        });
      }
      complete_rows(team, rows);
      gemm(team, head, rows, [&](const Tile& tile) {
        float* to = p.logits + begin * p.vocab_size;
        store_tile(tile, bias, to, p.vocab_size);
        for (int64_t i = tile.row; bent && i < tile.row + tile.num_rows; ++i) {
          bend_logits(to + i * p.vocab_size + tile.column, tile.num_columns, p);
        }
      });
    });
  }
  return {};
}

inline Status run_logits(const LogitsParams& p) {
  Gemm head;
  Status status =
      find_gemm(p.scheme, {p.head, p.num_head, p.hidden_size, p.vocab_size}, p.dtype, &head);
  if (!status.ok()) return Status::error("head: " + status.message());
  for (int64_t i = 0; p.logit_indices != nullptr && i < p.num_logits; ++i) {
    if (p.logit_indices[i] < 0 || p.logit_indices[i] >= p.num_tokens) {
      return Status::error("logit_indices[" + std::to_string(i) + "] is " +
                           std::to_string(p.logit_indices[i]) + " (allowed: 0 .. " +
                           std::to_string(p.num_tokens - 1) + ")");
    }
  }
  return with_dtype(p.dtype, [&](auto like) { return logits_typed<decltype(like)>(p, head); });
}

}  // namespace regatta::cpu::REGATTA_ISA
