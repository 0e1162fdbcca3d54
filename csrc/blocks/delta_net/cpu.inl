// See cpu.cc.
#include "cpu/causal_conv.inl"

namespace regatta::cpu::REGATTA_ISA {

inline float logistic(float x) { return 1.0f / (1.0f + __builtin_expf(-x)); }
inline float softplus(float x) { return x > 20.0f ? x : __builtin_log1pf(__builtin_expf(x)); }

// A head's tokens, side by side: [n, D] each but the last two, [n].
struct HeadTokens {
  float* k;         // keys
  float* old_k;     // keys times decays, which meet the state as it was
  float* old_q;     // queries times decays
  float* decay;     // [n, D], or [n] where a head's channels have one
  float* strength;  // of what is written
  float* qk;        // q . k: how much of what is written a token sees itself
};

// Where a head's values lie, and what becomes of them.
struct HeadRows {
  const float* v;  // of the first token
  int64_t v_stride;
  float* out;
  int64_t out_stride;
  const float* skip;  // the head's factor of values in outputs, or null
  const float* from;  // the state [D, E] before, null: zeros
  float* to;          // behind the tokens, null: it is not kept

  HeadRows of_token(int64_t t) const {
    HeadRows rows = *this;
    rows.v += t * v_stride, rows.out += t * out_stride;
    return rows;
  }
};

// Lanes of `left` values, 0 where there are none left.
inline int lanes_of(int64_t left) { return left > 0 ? lanes_left(left) : 0; }

// N vectors of value columns [D, `stride` apart] on their way through tokens. Token by token
//   seen = S^T (decay k); made = S^T (decay q); d = strength (v - seen), or strength v
//   o = made + (q . k) d;  S = decay S + k d
// which is the same as with the decayed state, in one pass over it: the next token's sums are made
// of a row just as it is written. Each column's sums go over rows in order, so that neither N nor
// the number of tokens changes a bit.
template <int N, bool kByChannel>
struct Columns {
  Vec seen[N], made[N], written[N];

  REGATTA_INLINE void clear() {
    for (int j = 0; j < N; ++j) seen[j] = made[j] = zero();
  }

  // Sums of token t over the state `from`.
  REGATTA_INLINE void read(const HeadTokens& tokens, int64_t t, int64_t dim, const float* from,
                           int64_t stride) {
    clear();
    const float *k = tokens.old_k + t * dim, *q = tokens.old_q + t * dim;
    for (int64_t i = 0; i < dim; ++i) {
      const Vec key = set1(k[i]), query = set1(q[i]);
      for (int j = 0; j < N; ++j) {
        const Vec value = load(from + i * stride + j * Vec::kLanes);
        seen[j] = fma(key, value, seen[j]), made[j] = fma(query, value, made[j]);
      }
    }
  }

  // Of these sums what token t writes, and its output: columns [e, e + count) of its rows.
  REGATTA_INLINE void end(const HeadTokens& tokens, int64_t t, bool delta, const HeadRows& rows,
                          int64_t e, int64_t count) {
    const Vec strength = set1(tokens.strength[t]), qk = set1(tokens.qk[t]);
    for (int j = 0; j < N; ++j) {
      const int n = lanes_of(count - j * Vec::kLanes);
      const Vec value = load_n(rows.v + e + j * Vec::kLanes, n);
      written[j] = strength * (delta ? value - seen[j] : value);
      Vec output = fma(qk, written[j], made[j]);
      if (rows.skip) output = fma(set1(*rows.skip), value, output);
      store_n(rows.out + e + j * Vec::kLanes, output, n);
    }
  }

  REGATTA_INLINE Vec decay_of(const HeadTokens& tokens, int64_t t, int64_t dim, int64_t i) const {
    return set1(kByChannel ? tokens.decay[t * dim + i] : tokens.decay[t]);
  }

  // to = the state behind token t, of the one before it.
  template <class Store>
  REGATTA_INLINE void write(const HeadTokens& tokens, int64_t t, int64_t dim, const float* from,
                            int64_t from_stride, Store&& store_row) const {
    const float* const k = tokens.k + t * dim;
    Vec decay = decay_of(tokens, t, dim, 0);
    for (int64_t i = 0; i < dim; ++i) {
      const Vec key = set1(k[i]);
      if (kByChannel) decay = decay_of(tokens, t, dim, i);
      for (int j = 0; j < N; ++j) {
        const Vec value = load(from + i * from_stride + j * Vec::kLanes);
        store_row(i, j, fma(key, written[j], value * decay));
      }
    }
  }

  // The state [D, N vectors] behind token t, in place, and the sums of token t + 1.
  REGATTA_INLINE void step(const HeadTokens& tokens, int64_t t, int64_t dim, float* state) {
    clear();
    const float* const k = tokens.k + t * dim;
    const float *next_k = tokens.old_k + (t + 1) * dim, *next_q = tokens.old_q + (t + 1) * dim;
    Vec decay = decay_of(tokens, t, dim, 0);
    for (int64_t i = 0; i < dim; ++i) {
      const Vec key = set1(k[i]), seeing = set1(next_k[i]), query = set1(next_q[i]);
      if (kByChannel) decay = decay_of(tokens, t, dim, i);
      for (int j = 0; j < N; ++j) {
        float* const at = state + (i * N + j) * Vec::kLanes;
        const Vec value = fma(key, written[j], load(at) * decay);
        store(at, value);
        seen[j] = fma(seeing, value, seen[j]), made[j] = fma(query, value, made[j]);
      }
    }
  }
};

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

// Factors of tokens [begin, begin + count) of value head h. y: [T, conv_size].
template <class T>
void fill_tokens(const DeltaNetBlockParams& p, int64_t h, int64_t begin, int64_t count,
                 const float* y, const HeadTokens& tokens, float* q) {
  const DeltaNetBlock& block = p.block;
  const int64_t dim = block.key_dim, group = block.num_value_heads / block.num_key_heads;
  const int64_t key_head = block.tiled_heads ? h % block.num_key_heads : h / group;
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(dim));
  const T* const gates = static_cast<const T*>(p.made_ba);
  for (int64_t i = 0; i < count; ++i) {
    const float* const row = y + (begin + i) * block.conv_size();
    float* const k = tokens.k + i * dim;
    float* const decay = tokens.decay + i * block.decays();
    unit_row(row + key_head * dim, q, dim, block.unit_keys, scale);
    unit_row(row + block.key_size() + key_head * dim, k, dim, block.unit_keys, 1.0f);
    tokens.strength[i] = gates_of(p, h, gates + (begin + i) * block.gate_size(), decay);
    Vec sum = zero();
    for_lanes(dim, [&](int64_t c, auto n) REGATTA_LAMBDA_INLINE {
      const Vec by = block.decays() > 1 ? load_n(decay + c, n) : set1(decay[0]);
      const Vec key = load_n(k + c, n), query = load_n(q + c, n);
      sum = fma(query, key, sum);  // lanes past the end are zeros
      store_n(tokens.old_k + i * dim + c, key * by, n);
      store_n(tokens.old_q + i * dim + c, query * by, n);
    });
    tokens.qk[i] = reduce_add(sum);
  }
}

constexpr int kDirect = Vec::kLanes == 16 ? 8 : 4;  // vectors of columns of single tokens
constexpr int kTile = 2;                            // of spans, a state's part of 16 KB in L1
constexpr int64_t kPartTokens = 64;                 // of a span, whose factors are made at a time

// All columns of one token: the state is read where it lies, and written where it goes.
template <bool kByChannel>
void one_token(const DeltaNetBlock& block, const HeadTokens& tokens, const HeadRows& rows) {
  constexpr int64_t kWidth = kDirect * Vec::kLanes;
  constexpr float kZeros[kWidth] = {};
  const int64_t dim = block.key_dim, width = block.value_dim;
  const int64_t stride = rows.from ? width : 0;
  for (int64_t e = 0; e < width; e += kWidth) {
    const float* const from = rows.from ? rows.from + e : kZeros;
    Columns<kDirect, kByChannel> columns;
    columns.read(tokens, 0, dim, from, stride);
    columns.end(tokens, 0, block.delta, rows, e, kWidth);
    if (rows.to == nullptr) continue;
    float* const to = rows.to + e;
    columns.write(tokens, 0, dim, from, stride,
                  [&](int64_t i, int j, Vec value)
                      REGATTA_LAMBDA_INLINE { store(to + i * width + j * Vec::kLanes, value); });
  }
}

// Columns [e, e + count) of some tokens of a span. state: those, [D, kTile vectors].
template <bool kByChannel>
void some_tokens(const DeltaNetBlock& block, const HeadTokens& tokens, int64_t num_tokens,
                 const HeadRows& rows, int64_t e, int64_t count, float* state) {
  const int64_t dim = block.key_dim;
  Columns<kTile, kByChannel> columns;
  columns.read(tokens, 0, dim, state, kTile * Vec::kLanes);
  for (int64_t t = 0;; ++t) {
    columns.end(tokens, t, block.delta, rows.of_token(t), e, count);
    if (t + 1 == num_tokens) break;
    columns.step(tokens, t, dim, state);
  }
  columns.write(tokens, num_tokens - 1, dim, state, kTile * Vec::kLanes,
                [&](int64_t i, int j, Vec value)
                    REGATTA_LAMBDA_INLINE { store(state + (i * kTile + j) * Vec::kLanes, value); });
}

// fn(tile, its first column, its columns) of a state of `width` columns.
template <class Fn>
REGATTA_INLINE void for_tiles(int64_t width, Fn&& fn) {
  constexpr int64_t kWidth = kTile * Vec::kLanes;
  for (int64_t e = 0, tile = 0; e < width; e += kWidth, ++tile) {
    fn(tile, e, width - e < kWidth ? width - e : kWidth);
  }
}

// All tokens of a request, of one value head. y: [T, conv_size]; out: [T, V * E].
template <class T, bool kByChannel>
void run_head(const DeltaNetBlockParams& p, Scratch& scratch, int64_t seq, int64_t h,
              const float* y, float* out) {
  Scratch::Scope scope(scratch);
  const DeltaNetBlock& block = p.block;
  const int64_t dim = block.key_dim, width = block.value_dim, heads = block.num_value_heads;
  const int64_t size = dim * width, v_stride = block.conv_size();
  const int32_t src = p.state_src[seq], dst = p.state_dst[seq];
  const int64_t begin = p.batch.cu_seqlens_q[seq], end = p.batch.cu_seqlens_q[seq + 1];
  HeadRows rows = {y + begin * v_stride + 2 * block.key_size() + h * width,
                   v_stride,
                   out + (begin * heads + h) * width,
                   heads * width,
                   p.skip ? p.skip + h : nullptr,
                   src < 0 ? nullptr : p.states + (src * heads + h) * size,
                   dst < 0 ? nullptr : p.states + (dst * heads + h) * size};
  const int64_t most = end - begin < kPartTokens ? end - begin : kPartTokens;
  HeadTokens tokens;
  tokens.k = scratch.take<float>(most * dim);
  tokens.old_k = scratch.take<float>(most * dim);
  tokens.old_q = scratch.take<float>(most * dim);
  tokens.decay = scratch.take<float>(most * block.decays());
  tokens.strength = scratch.take<float>(most);
  tokens.qk = scratch.take<float>(most);
  float* const q = scratch.take<float>(dim);
  if (end - begin == 1 && width % (kDirect * Vec::kLanes) == 0) {
    fill_tokens<T>(p, h, begin, 1, y, tokens, q);
    return one_token<kByChannel>(block, tokens, rows);
  }
  constexpr int64_t kWidth = kTile * Vec::kLanes;
  float* const state = scratch.take<float>((width + kWidth - 1) / kWidth * kWidth * dim);
  for_tiles(width, [&](int64_t tile, int64_t e, int64_t count) {
    float* const to = state + tile * dim * kWidth;
    for (int64_t i = 0; i < dim; ++i) {
      for (int64_t c = 0; c < kWidth; c += Vec::kLanes) {
        const int n = lanes_of(count - c);
        store(to + i * kWidth + c, rows.from ? load_n(rows.from + i * width + e + c, n) : zero());
      }
    }
  });
  for (int64_t first = begin; first < end; first += kPartTokens) {
    const int64_t some = end - first < kPartTokens ? end - first : kPartTokens;
    fill_tokens<T>(p, h, first, some, y, tokens, q);
    const HeadRows part = rows.of_token(first - begin);
    for_tiles(width, [&](int64_t tile, int64_t e, int64_t count) {
      some_tokens<kByChannel>(block, tokens, some, part, e, count, state + tile * dim * kWidth);
    });
  }
  if (rows.to == nullptr) return;
  for_tiles(width, [&](int64_t tile, int64_t e, int64_t count) {
    const float* const from = state + tile * dim * kWidth;
    for (int64_t i = 0; i < dim; ++i) {
      for (int64_t c = 0; c < count; c += Vec::kLanes) {
        store_n(rows.to + i * width + e + c, load(from + i * kWidth + c), lanes_of(count - c));
      }
    }
  });
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
      const auto run = block.decays() > 1 ? run_head<T, true> : run_head<T, false>;
      run(p, team.scratch(), item / heads, item % heads, y, o);
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
