// See experts.h: the experts of few tokens, from the router's logits to the block's output.
//
// Architectures: sm_90 (bulk copies); bf16 and fp16, weights of theirs or e4m3 codes. The launches
// of few_tokens.cu, made to be on a multiprocessor together: their registers and shared memory fit
// beside each other, and `up` lets `down` begin at once. So `down` has chosen, and has its first
// weights, 192 KB of a multiprocessor's, when `up` ends.
//   1. up: a warp makes a gate and its up. Each warp has a ring of its own of pieces of both rows,
//      which bulk copies fill: no warp waits for another. Rows of shared experts need no choice:
//      they come first, and are asked for while the launch ahead ends.
//   2. down: a block makes 16 columns of the output. Their weights are cut into stages: a piece of
//      16 rows of one expert. A warp has three stages on their way, two into shared memory and one
//      into registers, in turn. It multiplies with mma.sync, weighs by the shares, and the warps'
//      sums are added in their order. A lane reads 16 bytes of two rows: the instruction's order of
//      k is permuted, for both operands alike. Its eight columns are the one token's, but odd rows
//      and columns have the halves of 128 bytes the other way round, and give the rows of their own
//      kind: rows that lie a multiple of 128 bytes apart then have no bank conflicts.
// e4m3 codes: as in few_tokens.cu.
// Bound: memory. Source: own.
#include <algorithm>

#include "cuda/common.cuh"
#include "cuda/experts/experts.h"
#include "cuda/experts/few_tokens.cuh"
#include "cuda/hopper.cuh"

namespace regatta::cuda {
namespace {

using namespace few;

constexpr int kUpWarps = 8, kUpThreads = kUpWarps * kWarp;
constexpr int kLeastDepth = 3, kMostDepth = 6;  // of a warp's ring of `up`, of pieces
constexpr int kTile = 16;  // columns of a block of `down`, and of a partial sum of squares
constexpr int kDownWarps = 8, kDownThreads = kDownWarps * kWarp;
constexpr int kSlots = 2;  // of a warp of `down`, in shared memory
// Bytes of a row in a stage, at most: a lane has an eighth of them in registers. Codes need others.
template <bool kCodes>
constexpr int kMostPiece = kCodes ? 384 : 512;
template <bool kCodes>
constexpr int kSteps = kMostPiece<kCodes> / 64;  // of 64 bytes of each row
static_assert(gemm_sumsq_columns(kMostFewTokens) == kTile);

// Shared memory of a multiprocessor, and what blocks have of it beside what they ask for.
constexpr int64_t kMemory = 228 << 10, kBesideUp = 5 << 10, kBesideDown = 8 << 10;

// piece: bytes of a row that travel at once; pieces: of a row; depth: of a warp's ring.
struct UpRing {
  int piece, pieces, depth;
  bool together;
};

// stages: of a tile of columns for a token, those of the shared experts first.
struct DownRing {
  int piece, pieces, shared_pieces, stages, tiles;
};

// Of a stage in shared memory: 16 pieces, and of codes their rows' scales.
template <bool kCodes>
__host__ __device__ constexpr int slot_bytes(int piece) {
  return kTile * piece + (kCodes ? 128 : 0);
}

// Bytes of a row of T, or of halves, in front of the rings.
constexpr int64_t row_bytes(int64_t width) { return round_up(2 * width, 128); }

// grid: (blocks, T). inner [T, S + K I]: shared, then those of each choice. Codes: no shared ones.
template <class T, bool kCodes>
__global__ void __launch_bounds__(kUpThreads, 4)
    few_tokens_up_sm90_kernel(const Args<T, kCodes> a, const UpRing ring) {
  extern __shared__ __align__(128) char memory[];  // x [H], then the warps' rings
  __shared__ ChooseRoom<false> room;
  __shared__ Chosen chosen;
  __shared__ uint64_t full[kUpWarps][kMostDepth];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int token = blockIdx.y;
  const int inner = a.intermediate_size, shared = a.shared_size;
  const int items = shared + a.top_k * inner, stride = gridDim.x * kUpWarps;
  const int width = a.hidden_size * static_cast<int>(sizeof(Element<T, kCodes>));  // in bytes
  char* const slots =
      memory + row_bytes(a.hidden_size) + static_cast<int64_t>(warp) * ring.depth * 2 * ring.piece;
  if (lane == 0) {
    for (int s = 0; s < ring.depth; ++s) barrier_init(&full[warp][s], 1);
    barrier_init_fence();
  }
  __syncwarp();

  // The gate's row among those of all experts; its up is as many further on as there are gates.
  const auto row_of = [&](int item) {
    const int k = (item - shared) / inner;
    return static_cast<int64_t>(chosen.ids[k]) * 2 * inner + (item - shared) % inner;
  };
  // Neighbours work in other blocks: the last round is spread over all of them.
  const int first = warp * gridDim.x + blockIdx.x;
  const uint64_t once = policy_evict_first();
  int asked = first, asked_piece = 0;
  const char *gate = nullptr, *up = nullptr;
  const auto ask = [&](int slot) {
    if (asked_piece == 0) {
      const bool is_shared = asked < shared;
      const auto* all = reinterpret_cast<const char*>(is_shared ? a.shared_gate_up : a.gate_up);
      gate = all + (is_shared ? asked : row_of(asked)) * width;
      up = gate + static_cast<int64_t>(is_shared ? shared : inner) * width;
    }
    if (lane == 0) {
      const int from = asked_piece * ring.piece, bytes = min(ring.piece, width - from);
      char* const to = slots + slot * 2 * ring.piece;
      barrier_arrive_expect(&full[warp][slot], 2 * bytes);
      bulk_load(to, gate + from, bytes, &full[warp][slot], once);
      bulk_load(to + ring.piece, up + from, bytes, &full[warp][slot], once);
    }
    if (++asked_piece == ring.pieces) asked_piece = 0, asked += stride;
  };
  int filled = 0;
  const auto fill = [&](int end) {
    for (; filled < ring.depth && asked < end; ++filled) ask(filled);
  };
  fill(shared);
  pdl_wait();
  if (ring.together) pdl_trigger();  // the logits are the next launch's, too

  const T* x = a.x + static_cast<int64_t>(token) * a.hidden_size;
  using R = Row<T, RowKind::kPlain, kMostVectors, kUpThreads>;
  [[maybe_unused]] Vec16<T> values[kCodes ? kMostVectors : 1];
  if constexpr (kCodes) {
    R::load(x, a.hidden_size, values);
  } else {
    for (int at = static_cast<int>(threadIdx.x) * 16; at < width; at += kUpThreads * 16) {
      cp_async16(memory + at, reinterpret_cast<const char*>(x) + at);
    }
    cp_async_commit();
  }
  choose_together<kUpThreads, false>(a.choose, token, room, chosen);
  fill(items);
  float x_scale = 1.f;
  if constexpr (kCodes) {
    __shared__ QuantizeScratch scratch;
    QuantizeRowsParams row;
    row.width = a.hidden_size;
    const Vec16<T> no_norm[R::kNumWeights] = {};
    auto* const to = reinterpret_cast<__half*>(memory);
    x_scale = quantize_row<T, true, RowKind::kPlain, kMostVectors, kUpThreads>(
                  row, values, no_norm, __ldg(a.gate_up_act), scratch, 1,
                  [&](int at, uint2 codes) { store_halves(to + at, codes); }) /
              kHalfUnit;
  } else {
    cp_async_wait<0>();
  }
  __syncthreads();

  // What a sum is multiplied by and what is added, for the lane that writes: an item ahead, since
  // they come from memory.
  struct Terms {
    float scale = 1.f, up_scale = 1.f, bias = 0.f, up_bias = 0.f;
  };
  const auto terms_of = [&](int item) {
    Terms terms;
    if (lane != 0 || item < shared || item >= items) return terms;
    if constexpr (kCodes) {
      terms.scale = __ldg(a.gate_up_scale + row_of(item));
      terms.up_scale = __ldg(a.gate_up_scale + row_of(item) + inner);
    }
    if (a.gate_up_bias != nullptr) {
      terms.bias = Traits<T>::to_float(a.gate_up_bias[row_of(item)]);
      terms.up_bias = Traits<T>::to_float(a.gate_up_bias[row_of(item) + inner]);
    }
    return terms;
  };
  Terms next = terms_of(first);
  T* to = a.inner + static_cast<int64_t>(token) * items;
  int slot = 0;
  uint32_t phase = 0;
  for (int item = first; item < items; item += stride) {
    const Terms now = next;
    next = terms_of(item + stride);
    float of_gate = 0.f, of_up = 0.f;
    for (int from = 0; from < width; from += ring.piece) {
      const char* const at = slots + slot * 2 * ring.piece;
      const int bytes = min(ring.piece, width - from);
      barrier_wait(&full[warp][slot], phase);
      for (int base = lane * 16; base < bytes; base += 2 * kWarp * 16) {
#pragma unroll
        for (int i = base; i < base + 2 * kWarp * 16; i += kWarp * 16) {
          if (i >= bytes) break;
          const uint4 gates = unit_at(at + i), ups = unit_at(at + ring.piece + i);
          if constexpr (kCodes) {
            const auto* const halves = reinterpret_cast<const __half*>(memory) + from + i;
            of_gate = dot_codes(gates, halves, of_gate);
            of_up = dot_codes(ups, halves, of_up);
          } else {
            const uint4 eight = unit_at(memory + from + i);
            of_gate = dot_unit<T>(gates, eight, of_gate);
            of_up = dot_unit<T>(ups, eight, of_up);
          }
        }
      }
      __syncwarp();  // all have read
      if (asked < items) ask(slot);
      if (++slot == ring.depth) slot = 0, phase ^= 1;
    }
    of_gate = warp_sum(of_gate);
    of_up = warp_sum(of_up);
    if (lane != 0) continue;
    if constexpr (kCodes) of_gate *= x_scale * now.scale, of_up *= x_scale * now.up_scale;
    of_gate += now.bias, of_up += now.up_bias;
    to[item] = Traits<T>::from_float(gate_of(a.activation, of_gate, of_up));
  }
}

// Where a lane reads: rows lane / 4 and lane / 4 + 8 of a stage.
struct LanePlace {
  int row, quarter, odd;
  __device__ __forceinline__ LanePlace() {
    const int lane = threadIdx.x % kWarp;
    row = lane / 4, quarter = lane % 4, odd = row % 2;
  }
  // Bytes from the piece's begin.
  __device__ __forceinline__ int at(int step) const {
    return step / 2 * 128 + (step % 2 ^ odd) * 64 + quarter * 16;
  }
};

// d += 16 rows of a stage times x, which begins where the piece does: values of T, or halves of
// codes. rows(step, at, low, high): 16 bytes of the lane's two rows.
template <class T, bool kCodes, class Rows>
__device__ __forceinline__ void multiply(float (&d)[2][4], const LanePlace& lane, int bytes,
                                         const char* x, Rows&& rows) {
#pragma unroll
  for (int step = 0; step < kSteps<kCodes>; ++step) {
    if (step / 2 * 128 >= bytes) break;
    const int at = lane.at(step);
    const bool inside = at < bytes;
    uint4 low = make_uint4(0, 0, 0, 0), high = low;
    if (inside) rows(step, at, low, high);
    if constexpr (kCodes) {
      // 16 halves; odd rows read the second eight first, against bank conflicts.
      uint4 one = make_uint4(0, 0, 0, 0), other = one;
      if (inside) {
        one = unit_at(x + 2 * at + lane.odd * 16);
        other = unit_at(x + 2 * at + 16 - lane.odd * 16);
      }
      const uint4 front = lane.odd ? other : one, back = lane.odd ? one : other;
      const uint32_t lows[4] = {low.x, low.y, low.z, low.w};
      const uint32_t highs[4] = {high.x, high.y, high.z, high.w};
      const uint32_t xs[8] = {front.x, front.y, front.z, front.w, back.x, back.y, back.z, back.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t four[4] = {bit_cast<uint32_t>(halves_of(lows[i] & 0xffff)),
                                  bit_cast<uint32_t>(halves_of(highs[i] & 0xffff)),
                                  bit_cast<uint32_t>(halves_of(lows[i] >> 16)),
                                  bit_cast<uint32_t>(halves_of(highs[i] >> 16))};
        mma_m16n8k16<__half>(d[i % 2], four, xs[2 * i], xs[2 * i + 1]);
      }
    } else {
      const uint4 b = inside ? unit_at(x + at) : make_uint4(0, 0, 0, 0);
      const uint32_t first[4] = {low.x, high.x, low.y, high.y};
      const uint32_t second[4] = {low.z, high.z, low.w, high.w};
      mma_m16n8k16<T>(d[0], first, b.x, b.y);
      mma_m16n8k16<T>(d[1], second, b.z, b.w);
    }
  }
}

// grid: blocks, which stay. Half of a multiprocessor's registers: a quarter is `up`'s, and the
// product behind finds the other half when that has ended.
template <class T, bool kCodes>
__global__ void __launch_bounds__(kDownThreads, 2)
    few_tokens_down_sm90_kernel(const Args<T, kCodes> a, const DownRing ring) {
  constexpr int kBytes = sizeof(Element<T, kCodes>);   // of a weight
  constexpr int kScaleBytes = kCodes ? kTile * 4 : 0;  // of a stage
  extern __shared__ __align__(128) char memory[];      // stages, then what `up` made [T, S + K I]
  __shared__ ChooseRoom<true> room;
  __shared__ Chosen chosen[kMostFewTokens];
  __shared__ uint64_t full[kDownWarps][kSlots];
  __shared__ float partial[2][kDownWarps][kTile];
  __shared__ uint4 sources[kTile / 8];
  __shared__ float scales[kMostFewTokens][kMaxChosen];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const LanePlace own;
  const int tokens = a.choose.num_tokens, width = a.shared_size + a.top_k * a.intermediate_size;
  char* const slots = memory + warp * kSlots * slot_bytes<kCodes>(ring.piece);
  char* const made = memory + kDownWarps * kSlots * slot_bytes<kCodes>(ring.piece);
  if (lane == 0) {
    for (int i = 0; i < kSlots; ++i) barrier_init(&full[warp][i], 1);
    barrier_init_fence();
  }
  __syncwarp();
  for (int token = 0; token < tokens; ++token) {
    choose_together<kDownThreads, true>(a.choose, token, room, chosen[token]);
  }

  struct Piece {
    int k, first, bytes;  // k: whose; -1: the shared experts'
  };
  const auto piece_of = [&](int stage) {
    const bool is_shared = stage < ring.shared_pieces;
    const int at = stage - ring.shared_pieces, k = is_shared ? -1 : at / ring.pieces;
    const int first = (is_shared ? stage : at - k * ring.pieces) * ring.piece;
    const int all = (is_shared ? a.shared_size : a.intermediate_size) * kBytes;
    return Piece{k, first, min(ring.piece, all - first)};
  };
  // What this warp asks for next.
  int tile = warp < ring.stages ? blockIdx.x : ring.tiles, token = 0, stage = warp;
  const auto advance = [&] {
    stage += kDownWarps;
    if (stage < ring.stages) return;
    stage = warp;
    if (++token == tokens) token = 0, tile += gridDim.x;
  };
  // Of a column of the tile; those past the end repeat the last one, and are not written.
  const auto weights_row = [&](int k, int row) {
    const int64_t column = min(tile * kTile + row, a.hidden_size - 1);
    if (k < 0) {
      return reinterpret_cast<const char*>(a.shared_down) + column * a.shared_size * kBytes;
    }
    const int64_t of_all = static_cast<int64_t>(chosen[token].ids[k]) * a.hidden_size + column;
    return reinterpret_cast<const char*>(a.down) + of_all * a.intermediate_size * kBytes;
  };
  const auto scales_at = [&](int k) {  // of codes, those of the tile
    const int64_t row = static_cast<int64_t>(chosen[token].ids[k]) * a.hidden_size;
    return a.down_scale + row + tile * kTile;
  };
  const uint64_t once = policy_evict_first();
  const auto copy = [&](int slot) {  // into shared memory
    if (tile >= ring.tiles) return;
    const Piece piece = piece_of(stage);
    char* const to = slots + slot * slot_bytes<kCodes>(ring.piece);
    uint64_t* const barrier = &full[warp][slot];
    if (lane == 0) barrier_arrive_expect(barrier, kTile * piece.bytes + kScaleBytes);
    __syncwarp();
    if (lane < kTile) {
      bulk_load(to + lane * ring.piece, weights_row(piece.k, lane) + piece.first, piece.bytes,
                barrier, once);
    } else if (kCodes && lane == kTile) {
      bulk_load(to + kTile * ring.piece, scales_at(piece.k), kScaleBytes, barrier);
    }
    advance();
  };
  float low_scale = 1.f, high_scale = 1.f;
  uint4 low[kSteps<kCodes>], high[kSteps<kCodes>];
  const auto load = [&] {  // into registers
    if (tile >= ring.tiles) return;
    const Piece piece = piece_of(stage);
    const char* const low_row = weights_row(piece.k, own.row) + piece.first;
    const char* const high_row = weights_row(piece.k, own.row + 8) + piece.first;
#pragma unroll
    for (int step = 0; step < kSteps<kCodes>; ++step) {
      const int at = own.at(step);
      if (at < piece.bytes) {
        low[step] = bit_cast<uint4>(load16_once(low_row + at, once));
        high[step] = bit_cast<uint4>(load16_once(high_row + at, once));
      }
    }
    if constexpr (kCodes) {
      low_scale = __ldg(scales_at(piece.k) + own.row);
      high_scale = __ldg(scales_at(piece.k) + own.row + 8);
    }
    advance();
  };
  for (int i = 0; i < kSlots; ++i) copy(i);
  load();
  pdl_trigger();
  pdl_wait();

  if constexpr (kCodes) {
    for (int t = 0; t < tokens; ++t) {
      make_codes(a, a.inner + t * width, reinterpret_cast<__half*>(made) + t * width, scales[t]);
    }
  } else {
    const int bytes = tokens * width * static_cast<int>(sizeof(T));
    for (int at = static_cast<int>(threadIdx.x) * 16; at < bytes; at += kDownThreads * 16) {
      cp_async16(made + at, reinterpret_cast<const char*>(a.inner) + at);
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
  }

  int slot = 0, buffer = 0;  // slot: where this warp's next stage is; kSlots: in registers
  uint32_t phase = 0;
  for (int now = blockIdx.x; now < ring.tiles; now += gridDim.x) {
    for (int t = 0; t < tokens; ++t, buffer ^= 1) {
      // The last warp finishes the columns: what it adds to the sums travels meanwhile.
      const int column = now * kTile + lane;
      const bool writes = warp == kDownWarps - 1 && lane < kTile && column < a.hidden_size;
      const int64_t place = static_cast<int64_t>(t) * a.hidden_size + column;
      if (writes && lane % 8 == 0) cp_async16(&sources[lane / 8], a.source + place);
      cp_async_commit();
      float bias = 0.f;
      if (writes) {
        for (int k = 0; k < a.top_k && a.down_bias != nullptr; ++k) {
          const int64_t row = static_cast<int64_t>(chosen[t].ids[k]) * a.hidden_size + column;
          bias = fmaf(chosen[t].shares[k], Traits<T>::to_float(a.down_bias[row]), bias);
        }
      }
      const float of_shared = a.shared_gate == nullptr ? 1.f : a.shared_gate[t];
      float sum_low = 0.f, sum_high = 0.f;
      for (int s = warp; s < ring.stages; s += kDownWarps) {
        const Piece piece = piece_of(s);
        const int first = t * width + (piece.k < 0 ? 0 : a.shared_size) +
                          max(piece.k, 0) * a.intermediate_size + piece.first / kBytes;
        const char* const x = made + 2 * first;
        float d[2][4] = {};
        float share = piece.k < 0 ? of_shared : chosen[t].shares[max(piece.k, 0)];
        if constexpr (kCodes) share *= scales[t][piece.k] / kHalfUnit;
        float low_share = share, high_share = share;
        if (slot == kSlots) {
          multiply<T, kCodes>(d, own, piece.bytes, x, [&](int step, int, uint4& l, uint4& h) {
            l = low[step], h = high[step];
          });
          if constexpr (kCodes) low_share *= low_scale, high_share *= high_scale;
          load();
          slot = 0, phase ^= 1;
        } else {
          const char* const stage_at = slots + slot * slot_bytes<kCodes>(ring.piece);
          const char* const row = stage_at + own.row * ring.piece;
          barrier_wait(&full[warp][slot], phase);
          multiply<T, kCodes>(d, own, piece.bytes, x, [&](int, int at, uint4& l, uint4& h) {
            l = unit_at(row + at), h = unit_at(row + 8 * ring.piece + at);
          });
          if constexpr (kCodes) {
            const auto* const of = reinterpret_cast<const float*>(stage_at + kTile * ring.piece);
            low_share *= of[own.row], high_share *= of[own.row + 8];
          }
          __syncwarp();  // all have read
          copy(slot++);
        }
        // Lane 4 i has rows i and i + 8 in the columns 0 and 1, of which one is of their kind.
        const float of_low = own.odd ? d[0][1] + d[1][1] : d[0][0] + d[1][0];
        const float of_high = own.odd ? d[0][3] + d[1][3] : d[0][2] + d[1][2];
        sum_low = fmaf(low_share, of_low, sum_low);
        sum_high = fmaf(high_share, of_high, sum_high);
      }
      if (own.quarter == 0) {
        partial[buffer][warp][own.row] = sum_low;
        partial[buffer][warp][own.row + 8] = sum_high;
      }
      cp_async_wait<0>();
      __syncthreads();
      if (warp != kDownWarps - 1) continue;
      float sum = bias;
      if (lane < kTile) {
#pragma unroll
        for (int w = 0; w < kDownWarps; ++w) sum += partial[buffer][w][lane];
      }
      const float source =
          writes ? Traits<T>::to_float(reinterpret_cast<const T*>(sources)[lane]) : 0.f;
      __syncwarp();  // all have read
      const T y = Traits<T>::from_float(fmaf(a.made_scale, sum, a.source_scale * source));
      if (writes) a.out[place] = y;
      if (a.sumsq == nullptr) continue;
      const float rounded = writes ? Traits<T>::to_float(y) : 0.f;
      const float squares = warp_sum(rounded * rounded);
      if (lane == 0) a.sumsq[static_cast<int64_t>(t) * ring.tiles + now] = squares;
    }
  }
}

// So many pieces of at most `most` bytes, whole units, that make `bytes`.
int piece_bytes(int64_t bytes, int64_t most, int64_t unit) {
  return static_cast<int>(round_up(ceil_div(bytes, ceil_div(bytes, most)), unit));
}

template <class T, bool kCodes>
Status run(const FewTokensParams& p, const FewTokensRings& rings, const Launch& launch_on) {
  constexpr int64_t kBytes = sizeof(Element<T, kCodes>);
  const Args<T, kCodes> a = make_args<T, kCodes>(p);
  const int64_t tokens = p.choose.num_tokens, top_k = p.choose.router.top_k;
  const int64_t items = p.shared_size + top_k * p.intermediate_size;
  const int multiprocessors = num_multiprocessors();

  DownRing down = {};
  down.piece = piece_bytes(p.intermediate_size * kBytes, kMostPiece<kCodes>, 128);
  down.pieces = static_cast<int>(ceil_div(p.intermediate_size * kBytes, down.piece));
  down.shared_pieces = static_cast<int>(ceil_div(p.shared_size * kBytes, down.piece));
  down.stages = down.shared_pieces + static_cast<int>(top_k) * down.pieces;
  down.tiles = static_cast<int>(ceil_div(p.hidden_size, kTile));
  const int64_t down_bytes =
      kDownWarps * kSlots * slot_bytes<kCodes>(down.piece) + row_bytes(tokens * items);

  UpRing up = {};
  up.piece = piece_bytes(p.hidden_size * kBytes, rings.piece, 512);
  up.pieces = static_cast<int>(ceil_div(p.hidden_size * kBytes, up.piece));
  up.together = rings.together;
  const int64_t own = row_bytes(p.hidden_size), of_depth = kUpWarps * 2 * up.piece;
  // Where both cannot be on a multiprocessor together, the ring is as deep as it can be.
  const int64_t left = (kMemory - kBesideUp - kBesideDown - down_bytes - own) / of_depth;
  const int64_t depth = rings.depth > 0 ? rings.depth : left < kLeastDepth ? kMostDepth : left;
  up.depth = static_cast<int>(std::min<int64_t>(depth, kMostDepth));
  LaunchConfig config;
  config.block = dim3(kUpThreads);
  config.grid = dim3(
      static_cast<unsigned>(std::min(ceil_div(items, kUpWarps), ceil_div(multiprocessors, tokens))),
      static_cast<unsigned>(tokens));
  config.stream = launch_on.stream;
  config.pdl = launch_on.pdl;
  config.shared_bytes = dynamic_bytes(own + up.depth * of_depth);
  Status status = launch(few_tokens_up_sm90_kernel<T, kCodes>, config, "few_tokens_up", a, up);
  if (!status.ok()) return status;
  config.block = dim3(kDownThreads);
  config.grid = dim3(static_cast<unsigned>(std::min(down.tiles, multiprocessors)));
  config.shared_bytes = dynamic_bytes(down_bytes);
  return launch(few_tokens_down_sm90_kernel<T, kCodes>, config, "few_tokens_down", a, down);
}

template <class T>
Status run_type(const FewTokensParams& p, const FewTokensRings& rings, const Launch& launch_on) {
  return p.gate_up_scale == nullptr ? run<T, false>(p, rings, launch_on)
                                    : run<T, true>(p, rings, launch_on);
}

}  // namespace

Status few_tokens_sm90(const FewTokensParams& p, const FewTokensRings& rings,
                       const Launch& launch_on) {
  if (p.choose.num_tokens == 0) return {};
  return p.dtype == DType::kBFloat16 ? run_type<__nv_bfloat16>(p, rings, launch_on)
                                     : run_type<__half>(p, rings, launch_on);
}

}  // namespace regatta::cuda
