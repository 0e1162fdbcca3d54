// See embedding.cc.
#include "rows.inl"

namespace regatta::cpu::REGATTA_ISA {

// Bits are copied, so 2-byte dtypes are all alike.
template <class Word>
void copy_embeddings(const EmbeddingParams& p) {
  const Word* weight = static_cast<const Word*>(p.weight);
  Word* out = static_cast<Word*>(p.out);
  const int64_t width = p.hidden_size;
  const bool pairs = p.packed && p.dtype == DType::kBFloat16;
  const int64_t panel_words = (pairs ? (width + 1) / 2 * 2 : width) * kPanel;
  const Word* images = static_cast<const Word*>(p.image_table);
  const auto one_token = [&](int64_t token) {
    const int64_t id = p.token_ids[token];
    Word* to = out + token * width;
    if (images != nullptr && p.image_rows[token] >= 0) {
      __builtin_memcpy(to, images + p.image_rows[token] * width,
                       static_cast<size_t>(width) * sizeof(Word));
      return;
    }
    if (!p.packed) {
      __builtin_memcpy(to, weight + id * width, static_cast<size_t>(width) * sizeof(Word));
      return;
    }
    const Word* panel = weight + id / kPanel * panel_words;
    const int64_t column = id % kPanel;
    for (int64_t k = 0; k < width; ++k) {
      to[k] = pairs ? panel[(k / 2 * kPanel + column) * 2 + k % 2] : panel[k * kPanel + column];
    }
  };
  // A packed row touches one cache line per element (or pair).
  const int64_t bytes = p.num_tokens * width * (p.packed ? 64 : int64_t{sizeof(Word)});
  parallel(threads_for_bytes(bytes), [&](Team& team) {
    for_rows(team, p.num_tokens, [&](int64_t token) { one_token(token); });
  });
}

// out[i] := scale * out[i] + the row of its position.
template <class T>
Status finish_embeddings(const EmbeddingParams& p) {
  const T* table = static_cast<const T*>(p.position_table);
  T* out = static_cast<T*>(p.out);
  const int64_t width = p.hidden_size;
  const Vec scale = set1(p.scale);
  parallel(threads_for_bytes(p.num_tokens * width * 3 * int64_t{sizeof(T)}), [&](Team& team) {
    for_rows(team, p.num_tokens, [&](int64_t token) {
      if (p.image_table != nullptr && p.image_rows[token] >= 0) return;
      T* to = out + token * width;
      const T* add = table ? table + p.positions[token] * width : to;
      for (int64_t i = 0; i < width; i += Vec::kLanes) {
        const int n = lanes_left(width - i);
        const Vec scaled = load_n(to + i, n) * scale;
        store_n(to + i, table ? scaled + load_n(add + i, n) : scaled, n);
      }
    });
  });
  return {};
}

inline Status run_embedding(const EmbeddingParams& p) {
  for (int64_t i = 0; p.position_table != nullptr && i < p.num_tokens; ++i) {
    if (p.positions[i] < 0 || p.positions[i] >= p.num_positions) {
      return Status::error("positions[" + std::to_string(i) + "] is " +
                           std::to_string(p.positions[i]) + " (allowed: 0 .. " +
                           std::to_string(p.num_positions - 1) + ")");
    }
  }
  for (int64_t i = 0; p.image_table != nullptr && i < p.num_tokens; ++i) {
    if (p.image_rows[i] >= p.num_image_rows) {
      return Status::error("image_rows[" + std::to_string(i) + "] is " +
                           std::to_string(p.image_rows[i]) + " (allowed: -1 .. " +
                           std::to_string(p.num_image_rows - 1) + ")");
    }
  }
  for (int64_t i = 0; i < p.num_tokens; ++i) {
    if (p.token_ids[i] < 0 || p.token_ids[i] >= p.vocab_size) {
      return Status::error("token_ids[" + std::to_string(i) + "] is " +
                           std::to_string(p.token_ids[i]) + " (allowed: 0 .. " +
                           std::to_string(p.vocab_size - 1) + ")");
    }
  }
  if (p.dtype == DType::kFloat32) {
    copy_embeddings<uint32_t>(p);
  } else {
    copy_embeddings<uint16_t>(p);
  }
  if (p.scale == 1.0f && p.position_table == nullptr) return {};
  return with_dtype(p.dtype, [&](auto like) { return finish_embeddings<decltype(like)>(p); });
}

}  // namespace regatta::cpu::REGATTA_ISA
