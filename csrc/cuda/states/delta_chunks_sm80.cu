// The delta net of spans in chunks of 64 tokens, of heads of 128 keys and 128 values (delta_net.h).
//
// Layout: see DeltaArgs; bf16 and fp16. Architectures: sm_80 and later (mma.sync).
// With G the sums of g within a chunk, D_ij = exp(G_i - G_j) for j <= i, k of length 1:
//   A = below the diagonal (beta_i k_i . k_j D_ij), T = (I + A)^-1, P = (q_i . k_j D_ij), j <= i
//   N = T beta (V - exp(G) K S);  O = exp(G) Q S + P N;  S = exp(G_last) S + K^T exp(G_last - G) N
// delta_prepare has a block for each chunk and key head: convolutions, lengths, gates, and T and P
// of each value head that reads it, by a forward substitution in float32, a thread a column.
// delta_pass has a block for 64 or 32 of a head's values of a request, and goes from chunk to
// chunk: S is in registers in float32, and in shared memory as the products take it. What is next
// is copied while a chunk is computed.
// Source: Yang et al. 2024, gated delta net (WY form); T is not multiplied into K and V ahead, so
// that half as much is written and read, and the difference is rounded once.
// Bound: of one long prompt the chain of its chunks; of several the matrix units.
#include <algorithm>
#include <string>

#include "cuda/states/delta_spans.cuh"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kDim = 128;
constexpr int kWide = kDim + 8, kNarrow = kChunk + 8;  // rows in shared memory: 16 bytes apart of
constexpr int kSolveRow = kChunk + 4;                  // each other in banks
constexpr int kHeadsAtOnce = 3;                        // value heads: shared memory of two blocks
constexpr float kUnitEpsilon = 1e-6f;

// ------------------------------------------------------------------------------- delta_prepare

struct PrepareShared {
  float logs[kHeadsAtOnce][kChunk], strengths[kHeadsAtOnce][kChunk];
  alignas(16) float solve[kHeadsAtOnce][kChunk][kSolveRow];
};

template <class T>
constexpr int64_t prepare_bytes() {
  return 2 * kChunk * kWide * int64_t{sizeof(T)} + int64_t{sizeof(PrepareShared)};
}

// A block's part of the work.
struct Piece {
  SpanWork span;
  int src, dst, from, length;  // from: in the span
  bool is_last;                // of the span, with nothing behind it
};

// Four rows of 8 channels behind the convolution, and their lengths made 1 if `scale` is not 0;
// zeros behind the piece. To args.convolved, and to `rows` unless that is null.
template <class T>
__device__ __forceinline__ void convolve(const DeltaArgs& a, const Piece& piece, int first_channel,
                                         float scale, T* rows) {
  constexpr int kTaps = 4, kMine = 4, kWidth = 8;
  const int part = static_cast<int>(threadIdx.x % 16), group = static_cast<int>(threadIdx.x / 16);
  const int channel = first_channel + part * kWidth, first = group * kMine;
  float taps[kTaps][kWidth], sums[kMine][kWidth];
#pragma unroll
  for (int tap = 0; tap < kTaps; ++tap) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 x = load_four(a.conv + int64_t{tap} * a.conv_size() + channel + 4 * half);
      taps[tap][4 * half] = x.x, taps[tap][4 * half + 1] = x.y;
      taps[tap][4 * half + 2] = x.z, taps[tap][4 * half + 3] = x.w;
    }
  }
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
      sums[i][c] = a.conv_bias != nullptr ? a.conv_bias[channel + c] : 0.f;
    }
  }
#pragma unroll
  for (int i = 1 - kTaps; i < kMine; ++i) {  // an input, and the rows that read it
    const int row = first + i, token = piece.from + row;
    float x[kWidth] = {};
    if (row < piece.length) {
      if (token >= 0) {
        const Vec16<T> loaded =
            load16(static_cast<const T*>(a.qkvz) +
                   (piece.span.begin + token) * int64_t{a.row_size()} + channel);
#pragma unroll
        for (int c = 0; c < kWidth; ++c) x[c] = loaded.get(c);
      } else {
#pragma unroll
        for (int c = 0; c < kWidth; ++c) {
          x[c] = conv_input<T>(a, piece.span.begin, piece.src, token, channel + c);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
      const int tap = i - j + kTaps - 1;
      if (tap < 0 || tap >= kTaps) continue;
#pragma unroll
      for (int c = 0; c < kWidth; ++c) sums[j][c] = fmaf(taps[tap][c], x[c], sums[j][c]);
    }
  }
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const int row = first + i;
    float squares = 0.f;
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
      sums[i][c] = silu_of(sums[i][c]);
      squares = fmaf(sums[i][c], sums[i][c], squares);
    }
    float factor = 1.f;
    if (scale != 0.f) {
#pragma unroll
      for (int o = 8; o > 0; o /= 2) squares += __shfl_xor_sync(~0u, squares, o);
      factor = scale / sqrtf(squares + kUnitEpsilon);
    }
    const bool is_there = row < piece.length;
    Vec16<T> made;
#pragma unroll
    for (int c = 0; c < kWidth; ++c) made.set(c, is_there ? sums[i][c] * factor : 0.f);
    if (rows != nullptr) store16(rows + row * kWide + part * kWidth, made);
    if (is_there) {
      const int64_t at = piece.span.begin + piece.from + row;
      store16(static_cast<T*>(a.convolved) + at * a.conv_size() + channel, made);
    }
  }
}

// Keeps the last inputs of 128 channels for the step behind.
template <class T>
__device__ __forceinline__ void keep_columns(const DeltaArgs& a, const Piece& piece,
                                             int first_channel) {
  constexpr int kKept = 3;
  for (int i = static_cast<int>(threadIdx.x); i < kKept * kDim; i += kThreads) {
    const int row = i / kDim, channel = first_channel + i % kDim;
    a.conv_states[(int64_t{piece.dst} * kKept + row) * a.conv_size() + channel] =
        conv_input<T>(a, piece.span.begin, piece.src, piece.span.length - kKept + row, channel);
  }
}

// Sums of logarithms and strengths of a value head, by a warp; those behind the piece go on with
// nothing.
template <class T>
__device__ __forceinline__ void sum_gates(const DeltaArgs& a, const Piece& piece, int head,
                                          float* logs, float* strengths) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  float g[2] = {}, strength[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * lane + i;
    if (row < piece.length) {
      g[i] = gates_of<T>(a, head, piece.span.begin + piece.from + row, &strength[i]);
    }
  }
  const float both = g[0] + g[1];
  float sum = both;
#pragma unroll
  for (int o = 1; o < kWarp; o *= 2) {
    const float below = __shfl_up_sync(~0u, sum, o);
    if (lane >= o) sum += below;
  }
  const float before = __shfl_up_sync(~0u, sum, 1);
  const float first = (lane > 0 ? before : 0.f) + g[0];
  const float all[2] = {first, first + g[1]};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * lane + i;
    logs[row] = all[i], strengths[row] = strength[i];
    if (row < piece.length) {
      const int64_t at = int64_t{head} * a.num_tokens + piece.span.begin + piece.from + row;
      a.logs[at] = all[i], a.strengths[at] = strength[i];
    }
  }
}

// x: of a column of (I + A)^-1 the rows from kFirst on; those ahead are zeros.
template <int kFirst>
__device__ __forceinline__ void solve_column(const float (*matrix)[kSolveRow], int column,
                                             float (&x)[kChunk - kFirst]) {
#pragma unroll
  for (int i = kFirst; i < kChunk; ++i) {
    float sums[4] = {};
#pragma unroll
    for (int j = kFirst; j < i; j += 4) {
      const float4 four = load_four(&matrix[i][j]);
      const float a[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (j + n < i) sums[n] = fmaf(-a[n], x[j + n - kFirst], sums[n]);
      }
    }
    x[i - kFirst] = (i == column ? 1.f : 0.f) + ((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
}

template <class T, int kFirst>
__device__ __forceinline__ void solve_and_keep(const DeltaArgs& a, const Piece& piece, int head,
                                               const float (*matrix)[kSolveRow], int column) {
  float x[kChunk - kFirst];
  solve_column<kFirst>(matrix, column, x);
  T* to = static_cast<T*>(a.solved) +
          ((piece.span.begin + piece.from) * int64_t{a.value_heads} + head) * 2 * kChunk + column;
  const int64_t stride = int64_t{a.value_heads} * 2 * kChunk;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    if (i < piece.length) {
      to[i * stride] = Traits<T>::from_float(i < kFirst ? 0.f : x[i < kFirst ? 0 : i - kFirst]);
    }
  }
}

// 16 rows by 32 columns of x y^T, of rows of 128 in shared memory; as mma_m16n8k16 has them.
template <class T>
__device__ __forceinline__ void multiply_rows(const T* x, const T* y, int lane,
                                              float (&sums)[4][4]) {
#pragma unroll
  for (int n = 0; n < 4; ++n) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.f;
#pragma unroll
  for (int k = 0; k < kDim; k += 16) {
    uint32_t left[4];
    ldmatrix4(left, x + (lane % 16) * kWide + k + lane / 16 * 8);
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
      uint32_t right[4];
      ldmatrix4(right, y + (n * 8 + lane / 16 * 8 + lane % 8) * kWide + k + lane / 8 % 2 * 8);
      mma_m16n8k16<T>(sums[n], left, right[0], right[1]);
      mma_m16n8k16<T>(sums[n + 1], left, right[2], right[3]);
    }
  }
}

template <class T>
__global__ __launch_bounds__(kThreads, 2) void delta_prepare_kernel(DeltaArgs a) {
  extern __shared__ __align__(16) unsigned char prepare_memory[];
  T* const keys = reinterpret_cast<T*>(prepare_memory);
  T* const queries = keys + kChunk * kWide;
  PrepareShared& shared = *reinterpret_cast<PrepareShared*>(queries + kChunk * kWide);
  pdl_trigger();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  const int key_head = static_cast<int>(blockIdx.y), heads = a.value_heads / a.key_heads;
  int index = 0;
  const int seq = find_piece(a, static_cast<int>(blockIdx.x), &index);
  if (seq == a.num_seqs) return pdl_wait();  // what is behind waits for this launch alone
  Piece piece;
  piece.span = span_work(a, seq);
  piece.src = a.src[seq], piece.dst = a.dst[seq];
  piece.from = piece.span.from(index);
  piece.length = piece.span.to(index) - piece.from;
  piece.is_last = piece.from + piece.length == piece.span.length;
  const auto head_of = [&](int i) {
    return a.tiled ? i * a.key_heads + key_head : key_head * heads + i;
  };
  pdl_wait();

  const int query_channel = key_head * kDim, key_channel = a.key_size() + key_head * kDim;
  convolve(a, piece, query_channel, 0.08838834764831845f, queries);  // 128^-0.5
  convolve(a, piece, key_channel, 1.f, keys);
  for (int i = 0; i < heads; ++i) {
    convolve<T>(a, piece, 2 * a.key_size() + head_of(i) * kDim, 0.f, nullptr);
  }
  if (piece.is_last && piece.dst >= 0) {
    keep_columns<T>(a, piece, query_channel);
    keep_columns<T>(a, piece, key_channel);
    for (int i = 0; i < heads; ++i) {
      keep_columns<T>(a, piece, 2 * a.key_size() + head_of(i) * kDim);
    }
  }

  const int tile_row = warp % 4 * 16, tile_column = warp / 4 * 32;
  for (int begin = 0; begin < heads; begin += kHeadsAtOnce) {
    const int count = min(kHeadsAtOnce, heads - begin);
    if (warp < count) {
      sum_gates<T>(a, piece, head_of(begin + warp), shared.logs[warp], shared.strengths[warp]);
    }
    __syncthreads();
    float by_keys[4][4], by_queries[4][4];
    multiply_rows(keys + tile_row * kWide, keys + tile_column * kWide, lane, by_keys);
    multiply_rows(queries + tile_row * kWide, keys + tile_column * kWide, lane, by_queries);
    for (int i = 0; i < count; ++i) {
      const float* const logs = shared.logs[i];
      T* const weights =
          static_cast<T*>(a.solved) +
          ((piece.span.begin + piece.from) * int64_t{a.value_heads} + head_of(begin + i)) * 2 *
              kChunk +
          kChunk;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int column = tile_column + n * 8 + lane % 4 * 2;
        const float log0 = logs[column], log1 = logs[column + 1];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = tile_row + half * 8 + lane / 4;
          const float log = logs[row], strength = shared.strengths[i][row];
          // Masked ahead of exp, which may overflow above the diagonal.
          const float decay0 = __expf(column <= row ? log - log0 : 0.f);
          const float decay1 = __expf(column < row ? log - log1 : 0.f);
          float* const to = &shared.solve[i][row][column];
          to[0] = column < row ? strength * by_keys[n][2 * half] * decay0 : 0.f;
          to[1] = column + 1 < row ? strength * by_keys[n][2 * half + 1] * decay1 : 0.f;
          if (row < piece.length) {
            store_two(weights + row * int64_t{a.value_heads} * 2 * kChunk + column,
                      column <= row ? by_queries[n][2 * half] * decay0 : 0.f,
                      column < row ? by_queries[n][2 * half + 1] * decay1 : 0.f);
          }
        }
      }
    }
    __syncthreads();
    const int mine = thread / kChunk, column = thread % kChunk;  // a warp's columns: of one half
    if (mine < count) {
      if (column < kChunk / 2) {
        solve_and_keep<T, 0>(a, piece, head_of(begin + mine), shared.solve[mine], column);
      } else {
        solve_and_keep<T, kChunk / 2>(a, piece, head_of(begin + mine), shared.solve[mine], column);
      }
    }
    __syncthreads();
  }
}

// ---------------------------------------------------------------------------------- delta_pass

// Rows in shared memory of kColumns values of a state.
template <int kColumns>
constexpr int kPart = kColumns + 8;

template <class T, int kColumns>
struct PassStage {
  T keys[kChunk][kWide], queries[kChunk][kWide];
  T solved[kChunk][kNarrow], weights[kChunk][kNarrow];  // T and P
  T values[kChunk][kPart<kColumns>];                    // and beta (V - exp(G) K S) in their place
};

template <class T, int kColumns>
struct PassShared {
  T state[kDim][kPart<kColumns>];
  T written[kChunk][kPart<kColumns>];  // N
  T decayed[kChunk][kPart<kColumns>];  // exp(G_last - G) N
};

template <class T>
int64_t pass_bytes(int columns, int stages) {
  return columns == 64
             ? int64_t{sizeof(PassShared<T, 64>)} + stages * int64_t{sizeof(PassStage<T, 64>)}
             : int64_t{sizeof(PassShared<T, 32>)} + stages * int64_t{sizeof(PassStage<T, 32>)};
}

// What a thread needs of a chunk's gates: of its two rows, and of the last one.
struct RowGates {
  float logs[2], strengths[2], last;

  __device__ __forceinline__ void load(const DeltaArgs& a, const SpanWork& span, int piece,
                                       int head, int row) {
    const int from = span.from(piece), length = span.to(piece) - from;
    const int64_t at = int64_t{head} * a.num_tokens + span.begin + from;
    last = a.logs[at + length - 1];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool is_there = row + 8 * half < length;
      logs[half] = is_there ? a.logs[at + row + 8 * half] : last;
      strengths[half] = is_there ? a.strengths[at + row + 8 * half] : 0.f;
    }
  }
};

// Asks for a chunk's tensors; rows behind the piece are zeros.
template <class T, int kColumns>
__device__ __forceinline__ void copy_piece(const DeltaArgs& a, const SpanWork& span, int piece,
                                           int head, int first_column,
                                           PassStage<T, kColumns>* stage) {
  const int from = span.from(piece), length = span.to(piece) - from;
  const int64_t token = span.begin + from;
  const int key_head = a.key_head(head);
  const T* const rows = static_cast<const T*>(a.convolved) + token * a.conv_size();
  const T* const solved =
      static_cast<const T*>(a.solved) + (token * a.value_heads + head) * 2 * kChunk;
  constexpr int kUnit = 8;  // values of 16 bytes
  for (int i = static_cast<int>(threadIdx.x); i < kChunk * kDim / kUnit; i += kThreads) {
    const int row = i / (kDim / kUnit), column = i % (kDim / kUnit) * kUnit;
    const int bytes = row < length ? 16 : 0;
    const T* const at =
        rows + (row < length ? row : 0) * int64_t{a.conv_size()} + key_head * kDim + column;
    cp_async16(&stage->queries[row][column], at, bytes);
    cp_async16(&stage->keys[row][column], at + a.key_size(), bytes);
  }
  for (int i = static_cast<int>(threadIdx.x); i < kChunk * kChunk / kUnit; i += kThreads) {
    const int row = i / (kChunk / kUnit), column = i % (kChunk / kUnit) * kUnit;
    const int bytes = row < length ? 16 : 0, there = row < length ? row : 0;
    const T* const at = solved + there * int64_t{a.value_heads} * 2 * kChunk + column;
    cp_async16(&stage->solved[row][column], at, bytes);
    cp_async16(&stage->weights[row][column], at + kChunk, bytes);
  }
  for (int i = static_cast<int>(threadIdx.x); i < kChunk * kColumns / kUnit; i += kThreads) {
    const int row = i / (kColumns / kUnit), column = i % (kColumns / kUnit) * kUnit;
    const int there = row < length ? row : 0;
    cp_async16(&stage->values[row][column],
               rows + there * int64_t{a.conv_size()} + 2 * a.key_size() + head * kDim +
                   first_column + column,
               row < length ? 16 : 0);
  }
  cp_async_commit();
}

// sums [16, 8 kTiles] += left [16, 16 steps] right [16 steps, 8 kTiles]: of rows of kLeft and
// kRight values.
template <class T, int kLeft, int kRight, int kTiles>
__device__ __forceinline__ void multiply(const T* left, const T* right, int steps, int lane,
                                         float (&sums)[kTiles][4]) {
  for (int step = 0; step < steps; ++step) {
    uint32_t a[4];
    ldmatrix4(a, left + (lane % 16) * kLeft + step * 16 + lane / 16 * 8);
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      uint32_t b[4];
      ldmatrix4_trans(b, right + (step * 16 + lane % 16) * kRight + n * 8 + lane / 16 * 8);
      mma_m16n8k16<T>(sums[n], a, b[0], b[1]);
      mma_m16n8k16<T>(sums[n + 1], a, b[2], b[3]);
    }
  }
}

template <class T, class S, int kColumns, int kStages>
__global__ __launch_bounds__(kThreads, 1) void delta_pass_kernel(DeltaArgs a) {
  extern __shared__ __align__(16) unsigned char pass_memory[];
  using Stage = PassStage<T, kColumns>;
  auto& shared = *reinterpret_cast<PassShared<T, kColumns>*>(pass_memory);
  Stage* const stages = reinterpret_cast<Stage*>(pass_memory + sizeof(shared));
  constexpr int kTiles = kColumns / 16;  // of 8 columns, of a warp
  constexpr int kRow = kPart<kColumns>;
  pdl_trigger();
  const int first_column = static_cast<int>(blockIdx.x) * kColumns;
  const int head = static_cast<int>(blockIdx.y), seq = static_cast<int>(blockIdx.z);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  const SpanWork span = span_work(a, seq);
  if (span.num_pieces == 0) return pdl_wait();
  const int src = a.src[seq], dst = a.dst[seq];
  pdl_wait();
  copy_piece(a, span, 0, head, first_column, &stages[0]);

  // Of the state this warp has rows state_row .. + 15, of a chunk's products 16 rows by half of the
  // columns.
  const int state_row = warp * 16, tile_row = warp % 4 * 16,
            tile_column = warp / 4 * (kColumns / 2);
  const int row = tile_row + lane / 4, pair = lane % 4 * 2;
  S* const states = static_cast<S*>(a.states);
  const auto state_at = [&](int slot, int half, int n) {
    return ((int64_t{slot} * a.value_heads + head) * kDim + state_row + lane / 4 + 8 * half) *
               kDim +
           first_column + n * 8 + pair;
  };
  float state[kColumns / 8][4];
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 x = src >= 0 ? load_two(states + state_at(src, half, n)) : make_float2(0, 0);
      state[n][2 * half] = x.x, state[n][2 * half + 1] = x.y;
    }
  }
  const auto share_state = [&] {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        store_two(&shared.state[state_row + lane / 4 + 8 * half][n * 8 + pair], state[n][2 * half],
                  state[n][2 * half + 1]);
      }
    }
  };
  share_state();
  RowGates gates;
  gates.load(a, span, 0, head, row);
  cp_async_wait<0>();
  __syncthreads();

  for (int piece = 0; piece < span.num_pieces; ++piece) {
    Stage& stage = stages[kStages > 1 ? piece % kStages : 0];
    const bool has_next = piece + 1 < span.num_pieces;
    RowGates next = gates;
    if (has_next) {
      next.load(a, span, piece + 1, head, row);
      if constexpr (kStages > 1) {
        copy_piece(a, span, piece + 1, head, first_column, &stages[(piece + 1) % kStages]);
      }
    }
    float by_keys[kTiles][4] = {}, made[kTiles][4] = {};
    multiply<T, kWide, kRow>(&stage.keys[tile_row][0], &shared.state[0][tile_column], kDim / 16,
                             lane, by_keys);
    multiply<T, kWide, kRow>(&stage.queries[tile_row][0], &shared.state[0][tile_column], kDim / 16,
                             lane, made);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float decay = __expf(gates.logs[half]), strength = gates.strengths[half];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        T* const at = &stage.values[row + 8 * half][tile_column + n * 8 + pair];
        const float2 v = load_two(at);
        store_two(at, strength * (v.x - decay * by_keys[n][2 * half]),
                  strength * (v.y - decay * by_keys[n][2 * half + 1]));
        made[n][2 * half] *= decay, made[n][2 * half + 1] *= decay;
      }
    }
    __syncthreads();

    // Above the diagonal T and P are zeros.
    const int steps = tile_row / 16 + 1;
    float written[kTiles][4] = {};
    multiply<T, kNarrow, kRow>(&stage.solved[tile_row][0], &stage.values[0][tile_column], steps,
                               lane, written);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float decay = __expf(gates.last - gates.logs[half]);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float x = written[n][2 * half], y = written[n][2 * half + 1];
        const int column = tile_column + n * 8 + pair;
        store_two(&shared.written[row + 8 * half][column], x, y);
        store_two(&shared.decayed[row + 8 * half][column], x * decay, y * decay);
      }
    }
    __syncthreads();

    multiply<T, kNarrow, kRow>(&stage.weights[tile_row][0], &shared.written[0][tile_column], steps,
                               lane, made);
    const int from = span.from(piece), length = span.to(piece) - from;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + 8 * half >= length) continue;
      T* const to = static_cast<T*>(a.mixed) +
                    (span.begin + from + row + 8 * half) * int64_t{a.value_size()} + head * kDim +
                    first_column + tile_column + pair;
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
        store_two(to + n * 8, made[n][2 * half], made[n][2 * half + 1]);
    }

    const float decay = __expf(gates.last);
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) state[n][i] *= decay;
    }
#pragma unroll
    for (int k = 0; k < kChunk; k += 16) {
      uint32_t left[4];  // rows of the transposed keys
      ldmatrix4_trans(left,
                      &stage.keys[k + lane % 8 + lane / 16 * 8][state_row + lane / 8 % 2 * 8]);
#pragma unroll
      for (int n = 0; n < kColumns / 8; n += 2) {
        uint32_t right[4];
        ldmatrix4_trans(right, &shared.decayed[k + lane % 16][n * 8 + lane / 16 * 8]);
        mma_m16n8k16<T>(state[n], left, right[0], right[1]);
        mma_m16n8k16<T>(state[n + 1], left, right[2], right[3]);
      }
    }
    if (has_next) {
      share_state();
      if constexpr (kStages == 1) {
        __syncthreads();
        copy_piece(a, span, piece + 1, head, first_column, &stages[0]);
      }
      cp_async_wait<0>();
      __syncthreads();
    }
    gates = next;
  }

  if (dst < 0) return;
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      store_two(states + state_at(dst, half, n), state[n][2 * half], state[n][2 * half + 1]);
    }
  }
}

// Pieces of a step, at most: see span_work().
int64_t most_pieces(int64_t num_tokens, int64_t num_seqs) {
  const int64_t spans = std::min(num_seqs, num_tokens / (kFewTokens + 1));
  return num_tokens / kChunk + 2 * spans;
}

// A block of delta_pass: its columns, and chunks in shared memory.
struct PassTile {
  int columns, stages;
};

// The fewer columns, the more multiprocessors have a part of few requests. Bits do not depend on
// the tile. REGATTA_KERNEL's "delta_pass=32", "=64", "=32x1" and "=64x1" force one.
template <class T>
PassTile pass_tile(const DeltaArgs& args) {
  const int64_t blocks = int64_t{args.value_heads} * args.num_seqs * (kDim / 32);
  PassTile tile = {blocks <= num_multiprocessors() ? 32 : 64, 2};
  const std::string forced = forced_candidate("delta_pass");
  if (!forced.empty()) tile.columns = forced.rfind("32", 0) == 0 ? 32 : 64;
  const bool one = forced.size() > 2 && forced.substr(2) == "x1";
  if (one || pass_bytes<T>(tile.columns, 2) > max_shared_bytes()) tile.stages = 1;
  return tile;
}

}  // namespace

bool has_room_for_chunks() {
  return std::max(prepare_bytes<__half>(), pass_bytes<__half>(64, 1)) <= max_shared_bytes();
}

Status delta_prepare(const DeltaArgs& args, DType dtype, const Launch& launch_on) {
  const int64_t pieces = most_pieces(args.num_tokens, args.num_seqs);
  if (pieces == 0) return {};
  return dispatch_half(dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const LaunchConfig config(launch_on, grid_of(pieces, args.key_heads), kThreads,
                              prepare_bytes<T>());
    return launch(delta_prepare_kernel<T>, config, "delta_prepare", args);
  });
}

Status delta_pass(const DeltaArgs& args, DType dtype, DType states, const Launch& launch_on) {
  if (most_pieces(args.num_tokens, args.num_seqs) == 0) return {};
  return dispatch_half(dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const auto [columns, stages] = pass_tile<T>(args);
    const dim3 grid = grid_of(kDim / columns, args.value_heads, args.num_seqs);
    const LaunchConfig config(launch_on, grid, kThreads, pass_bytes<T>(columns, stages));
    const auto run = [&, wide = columns == 64, two = stages == 2](auto* s) {
      using S = std::remove_pointer_t<decltype(s)>;
      const auto kernel =
          wide ? (two ? delta_pass_kernel<T, S, 64, 2> : delta_pass_kernel<T, S, 64, 1>)
               : (two ? delta_pass_kernel<T, S, 32, 2> : delta_pass_kernel<T, S, 32, 1>);
      return launch(kernel, config, "delta_pass", args);
    };
    return states == DType::kBFloat16 ? run(static_cast<__nv_bfloat16*>(nullptr))
                                      : run(static_cast<float*>(nullptr));
  });
}

}  // namespace regatta::cuda
