// See cpu.cc.
#include "cpu/causal_conv.inl"

namespace regatta::cpu::REGATTA_ISA {

inline float logistic(float x) { return 1.0f / (1.0f + __builtin_expf(-x)); }
inline float softplus(float x) { return x > 20.0f ? x : __builtin_log1pf(__builtin_expf(x)); }

// A head's token: what its state is multiplied by, and what it gets.
struct HeadToken {
  const float *q, *k, *v;  // [D], [D], [E]
  const float* decay;      // [1] or [D] factors
  int64_t decay_step;      // 0 or 1
  float strength;
};

// N vectors of value columns of a state [D, width]: the update by a token, and its output.
template <int N, class Lanes>
REGATTA_INLINE void update_columns(float* state, int64_t width, int64_t key_dim, bool delta,
                                   const HeadToken& token, const float* v, float* out, Lanes n) {
  Vec seen[N], made[N];
  for (int j = 0; j < N; ++j) seen[j] = made[j] = zero();
  for (int64_t i = 0; i < key_dim; ++i) {
    float* const row = state + i * width;
    const Vec decay = set1(token.decay[i * token.decay_step]), key = set1(token.k[i]);
    for (int j = 0; j < N; ++j) {
      const Vec value = load_n(row + j * Vec::kLanes, n) * decay;
      store_n(row + j * Vec::kLanes, value, n);
      if (delta) seen[j] = fma(key, value, seen[j]);
    }
  }
  for (int j = 0; j < N; ++j) {
    seen[j] = (load_n(v + j * Vec::kLanes, n) - seen[j]) * set1(token.strength);
  }
  for (int64_t i = 0; i < key_dim; ++i) {
    float* const row = state + i * width;
    const Vec key = set1(token.k[i]), query = set1(token.q[i]);
    for (int j = 0; j < N; ++j) {
      const Vec value = fma(key, seen[j], load_n(row + j * Vec::kLanes, n));
      store_n(row + j * Vec::kLanes, value, n);
      made[j] = fma(query, value, made[j]);
    }
  }
  for (int j = 0; j < N; ++j) store_n(out + j * Vec::kLanes, made[j], n);
}

inline void update_state(float* state, const DeltaNetBlock& block, const HeadToken& token,
                         float* out) {
  constexpr int64_t kWide = 4 * Vec::kLanes;
  const int64_t width = block.value_dim, key_dim = block.key_dim;
  int64_t e = 0;
  for (; e + kWide <= width; e += kWide) {
    update_columns<4>(state + e, width, key_dim, block.delta, token, token.v + e, out + e,
                      AllLanes());
  }
  for (; e < width; e += Vec::kLanes) {
    update_columns<1>(state + e, width, key_dim, block.delta, token, token.v + e, out + e,
                      lanes_left(width - e));
  }
}

// to = x, of length 1 times `scale`, or as it is.
inline void unit_row(const float* x, float* to, int64_t size, bool unit, float scale) {
  constexpr float kEpsilon = 1e-6f;
  if (!unit) return copy_row(x, to, size);
  Vec sum = zero();
  for (int64_t i = 0; i < size; i += Vec::kLanes) {
    const Vec value = load_n(x + i, lanes_left(size - i));
    sum = fma(value, value, sum);
  }
  const Vec factor = set1(scale / __builtin_sqrtf(reduce_add(sum) + kEpsilon));
  for_lanes(size, [&](int64_t i, auto n)
                      REGATTA_LAMBDA_INLINE { store_n(to + i, load_n(x + i, n) * factor, n); });
}

// The decays of value head h's token, [D] or [1], and its strength; gates: the token's row of ba.
template <class T>
float gates_of(const DeltaNetBlockParams& p, int64_t h, const T* gates, float* decay) {
  const DeltaNetBlock& block = p.block;
  const int64_t count = block.decays();
  const bool by_step = block.write == WriteBy::kStep;
  const T* const a = gates + (by_step ? 0 : block.num_value_heads) + h * count;
  const float rate = __builtin_expf(p.decay_log[h]);
  float step = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const float x = to_float(a[i]) + p.step_bias[h * count + i];
    step = softplus(x);
    const float g =
        block.decay_bound < 0.0f ? block.decay_bound * logistic(rate * x) : -rate * step;
    decay[i] = __builtin_expf(g);
  }
  return block.write_scale * (by_step ? step : logistic(to_float(gates[h])));
}

// All tokens of a request, of one value head. y: [T, conv_size]; out: [T, V * E].
template <class T>
void run_head(const DeltaNetBlockParams& p, Scratch& scratch, int64_t seq, int64_t h,
              const float* y, float* out) {
  Scratch::Scope scope(scratch);
  const DeltaNetBlock& block = p.block;
  const int64_t dim = block.key_dim, width = block.value_dim, heads = block.num_value_heads;
  const int64_t size = dim * width, group = heads / block.num_key_heads;
  const int64_t key_head = block.tiled_heads ? h % block.num_key_heads : h / group;
  const int32_t src = p.state_src[seq], dst = p.state_dst[seq];
  float* const state = dst < 0 ? scratch.take<float>(size) : p.states + (dst * heads + h) * size;
  if (src < 0) {
    for (int64_t i = 0; i < size; ++i) state[i] = 0.0f;
  } else if (src != dst) {
    copy_row(p.states + (src * heads + h) * size, state, size);
  }
  float *q = scratch.take<float>(dim), *k = scratch.take<float>(dim);
  float* const decay = scratch.take<float>(dim);
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(dim));
  const T* const gates = static_cast<const T*>(p.made_ba);
  for (int64_t t = p.batch.cu_seqlens_q[seq]; t < p.batch.cu_seqlens_q[seq + 1]; ++t) {
    const float* const row = y + t * block.conv_size();
    unit_row(row + key_head * dim, q, dim, block.unit_keys, scale);
    unit_row(row + block.key_size() + key_head * dim, k, dim, block.unit_keys, 1.0f);
    const float* const v = row + 2 * block.key_size() + h * width;
    const float strength = gates_of(p, h, gates + t * block.gate_size(), decay);
    float* const made = out + (t * heads + h) * width;
    update_state(state, block, {q, k, v, decay, block.decays() > 1 ? 1 : 0, strength}, made);
    if (p.skip) {
      const Vec by = set1(p.skip[h]);
      for_lanes(width, [&](int64_t i, auto n) REGATTA_LAMBDA_INLINE {
        store_n(made + i, fma(by, load_n(v + i, n), load_n(made + i, n)), n);
      });
    }
  }
}

// Norm and gate of a token's row o [V * E], which changes. z: its gates.
template <class T>
void gate_row(const DeltaNetBlockParams& p, float* o, const T* z, T* mixed) {
  const DeltaNetBlock& block = p.block;
  const int64_t size = block.value_size();
  const int64_t groups = block.norm_groups > 0 ? block.norm_groups : block.num_value_heads;
  const int64_t width = size / groups;
  const auto gated = [&](int64_t i, auto n, Vec value) REGATTA_LAMBDA_INLINE {
    const Vec gate = load_n(z + i, n);
    return value * (block.gate == OutGate::kSilu ? silu(gate) : sigmoid(gate));
  };
  if (block.gate_first) {
    for_lanes(size, [&](int64_t i, auto n) REGATTA_LAMBDA_INLINE {
      store_n(o + i, gated(i, n, load_n(o + i, n)), n);
    });
  }
  for (int64_t group = 0; group < groups; ++group) {
    float* const part = o + group * width;
    const float* const factor = p.out_norm + (block.norm_groups > 0 ? group * width : 0);
    rms_norm_row(part, factor, part, width, block.out_norm.epsilon);
  }
  for_lanes(size, [&](int64_t i, auto n) REGATTA_LAMBDA_INLINE {
    const Vec value = load_n(o + i, n);
    store_n(mixed + i, block.gate_first ? value : gated(i, n, value), n);
  });
}

template <class T>
Status delta_net_typed(const DeltaNetBlockParams& p) {
  constexpr int64_t kPart = 1024;  // channels
  const DeltaNetBlock& block = p.block;
  const int64_t conv = block.conv_size(), values = block.value_size(), row = conv + values;
  const int64_t seqs = p.batch.num_seqs, tokens = p.num_tokens, parts = (conv + kPart - 1) / kPart;
  const ConvSpans spans = {
      p.batch.cu_seqlens_q, p.state_src,      p.state_dst, seqs, tokens, p.conv_states, p.conv,
      p.conv_bias,          block.conv_width, conv};
  const T* const x = static_cast<const T*>(p.made_qkvz);
  const auto column = [&](int64_t token, int64_t c, int n)
                          REGATTA_LAMBDA_INLINE { return load_n(x + token * row + c, n); };
  Scratch& scratch = Scratch::mine();
  Scratch::Scope scope(scratch);
  float* const y = scratch.take<float>(tokens * conv);
  float* const o = scratch.take<float>(tokens * values);
  const int64_t used = seqs > 0 ? p.batch.cu_seqlens_q[seqs] : 0;
  parallel([&](Team& team) {
    for_span_tokens(
        team, spans, parts, [&](int64_t seq, int64_t token, int64_t place, int64_t part) {
          const int64_t begin = part * kPart;
          conv_token(spans, seq, token, place, begin, begin + kPart < conv ? begin + kPart : conv,
                     column, [&](int64_t c, int n, Vec sum) REGATTA_LAMBDA_INLINE {
                       store_n(y + token * conv + c, silu(sum), n);
                     });
        });
    team.barrier();
    const int64_t heads = block.num_value_heads;
    team.for_each(seqs * (heads + 1), [&](int64_t item) {
      if (item >= seqs * heads) return keep_columns(spans, item - seqs * heads, column);
      run_head<T>(p, team.scratch(), item / heads, item % heads, y, o);
    });
    team.barrier();
    for_rows(team, tokens, [&](int64_t token) {
      T* const mixed = static_cast<T*>(p.mixed) + token * values;
      float* const own = o + token * values;
      if (token >= used) {  // padding
        for (int64_t i = 0; i < values; ++i) own[i] = 0.0f;
      }
      gate_row(p, own, x + token * row + conv, mixed);
    });
  });
  return {};
}

inline Status run_delta_net(const DeltaNetBlockParams& p) {
  return with_dtype(p.dtype, [&](auto like) { return delta_net_typed<decltype(like)>(p); });
}

}  // namespace regatta::cpu::REGATTA_ISA
