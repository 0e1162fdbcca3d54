// The delta net, token after token, of heads of 128 keys and 128 values, one decay and a
// convolution over four tokens (delta_net.h).
//
// Layout: see DeltaArgs. Architectures: sm_75 and later.
// A block has one value head of one request: 256 threads hold its state, 64 values each, warp w the
// rows 16 w .. 16 w + 15, lane l the columns 4 l .. 4 l + 3. The state is read ahead of pdl_wait(),
// and written once. Each token: convolution, lengths of q and k, S^T k and S^T q in one pass over
// the old state (o = exp(g) S^T q + (k . q) d), the update, norm and gate. Queries and keys of a
// head are convolved by each block whose value head reads them: 8 KB beside 128 KB of state.
// Bound: memory, the state twice; of one request the chain of a token.
#include "cuda/states/delta_spans.cuh"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kDim = 128;             // keys and values of a head
constexpr int kRows = kDim / kWarps;  // of the state, of a warp
constexpr int kKept = 3;              // columns ahead of a token
constexpr float kUnitEpsilon = 1e-6f;

struct StepShared {
  float q[kDim], k[kDim], v[kDim];
  float squares[kWarps], dots[kWarps];
  float parts[kWarps][2][kDim];  // of S^T k and of S^T q, by warps
  float sums[2][kDim];
};

// A channel's taps, and the inputs ahead of the next token.
struct Channel {
  int index;
  float taps[kKept + 1], bias, window[kKept];

  __device__ __forceinline__ void take(const DeltaArgs& a, int channel) {
    index = channel;
#pragma unroll
    for (int tap = 0; tap <= kKept; ++tap) taps[tap] = a.conv[tap * a.conv_size() + channel];
    bias = a.conv_bias != nullptr ? a.conv_bias[channel] : 0.f;
  }
  template <class T>
  __device__ __forceinline__ void begin(const DeltaArgs& a, int span, int src, int token) {
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
      window[j] = conv_input<T>(a, span, src, token - kKept + j, index);
    }
  }
  // Convolution and SiLU at the next token, whose input is x.
  __device__ __forceinline__ float next(float x) {
    float sum = bias;
#pragma unroll
    for (int j = 0; j < kKept; ++j) sum = fmaf(taps[j], window[j], sum);
    sum = fmaf(taps[kKept], x, sum);
#pragma unroll
    for (int j = 0; j + 1 < kKept; ++j) window[j] = window[j + 1];
    window[kKept - 1] = x;
    return silu_of(sum);
  }
  __device__ __forceinline__ void keep(const DeltaArgs& a, int dst) const {
    float* const to = a.conv_states + int64_t{dst} * kKept * a.conv_size() + index;
#pragma unroll
    for (int j = 0; j < kKept; ++j) to[int64_t{j} * a.conv_size()] = window[j];
  }
};

template <class T, class S>
__global__ __launch_bounds__(kThreads, 2) void delta_steps_kernel(DeltaArgs a, bool of_ends) {
  __shared__ StepShared shared;
  pdl_trigger();
  const int head = static_cast<int>(blockIdx.x), seq = static_cast<int>(blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  const int key_head = a.key_head(head), column = 4 * lane, row = warp * kRows;

  // The step's batch and states are complete when the launch ahead begins; but for ends, whose
  // states are of launches ahead.
  if (of_ends) pdl_wait();
  const SpanWork span = span_work(a, seq);
  const int src = a.src[seq], dst = a.dst[seq];
  const bool behind_chunks = of_ends && span.length > kFewTokens;
  const int first = behind_chunks ? span.in_chunks : 0;
  const int from = behind_chunks ? dst : src;
  const bool works = first < span.length;
  const bool has_values = thread < kDim;

  float state[kRows][4];
  Channel own, value;
  S* const states = static_cast<S*>(a.states);
  const auto row_at = [&](int slot, int i) {
    return ((int64_t{slot} * a.value_heads + head) * kDim + row + i) * kDim + column;
  };
  if (works) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float4 x = from >= 0 ? load_four(states + row_at(from, i)) : make_float4(0, 0, 0, 0);
      state[i][0] = x.x, state[i][1] = x.y, state[i][2] = x.z, state[i][3] = x.w;
    }
    own.take(a, thread / kDim * a.key_size() + key_head * kDim + thread % kDim);
    if (has_values) value.take(a, 2 * a.key_size() + head * kDim + thread);
  }
  if (!of_ends) pdl_wait();

  T* const mixed = static_cast<T*>(a.mixed);
  for (int token = a.borders[a.num_seqs] + seq; token < a.num_tokens; token += a.num_seqs) {
    if (has_values) {
      mixed[int64_t{token} * a.value_size() + head * kDim + thread] = Traits<T>::from_float(0.f);
    }
  }
  if (!works) return;

  own.begin<T>(a, span.begin, src, first);
  if (has_values) value.begin<T>(a, span.begin, src, first);
  const float4 factor = load_four(a.out_norm + column);
  for (int token = first; token < span.length; ++token) {
    const int64_t at = span.begin + token;
    const T* const inputs = static_cast<const T*>(a.qkvz) + at * a.row_size();
    const float x = own.next(Traits<T>::to_float(inputs[own.index]));
    const float v = has_values ? value.next(Traits<T>::to_float(inputs[value.index])) : 0.f;
    const float4 z = load_four(inputs + a.conv_size() + head * kDim + column);
    float strength;
    const float decay = expf(gates_of<T>(a, head, at, &strength));
    const float squares = warp_sum(x * x);
    if (lane == 0) shared.squares[warp] = squares;
    __syncthreads();
    if (has_values) shared.v[thread] = v;
    float length = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps / 2; ++w) length += shared.squares[thread / kDim * kWarps / 2 + w];
    const float unit = 1.f / sqrtf(length + kUnitEpsilon);
    (has_values ? shared.q : shared.k)[thread % kDim] =
        x * (has_values ? unit * 0.08838834764831845f : unit);  // 128^-0.5
    __syncthreads();

    float seen[4] = {}, made[4] = {}, dot = 0.f;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float k = shared.k[row + i], q = shared.q[row + i];
      dot = fmaf(k, q, dot);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        seen[j] = fmaf(k, state[i][j], seen[j]);
        made[j] = fmaf(q, state[i][j], made[j]);
      }
    }
    store_four(&shared.parts[warp][0][column], make_float4(seen[0], seen[1], seen[2], seen[3]));
    store_four(&shared.parts[warp][1][column], make_float4(made[0], made[1], made[2], made[3]));
    if (lane == 0) shared.dots[warp] = dot;
    __syncthreads();
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += shared.parts[w][thread / kDim][thread % kDim];
    shared.sums[thread / kDim][thread % kDim] = sum;
    dot = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) dot += shared.dots[w];
    __syncthreads();

    const float4 seen_all = load_four(&shared.sums[0][column]);
    const float4 made_all = load_four(&shared.sums[1][column]);
    const float4 values = load_four(&shared.v[column]);
    const float d[4] = {
        strength * (values.x - decay * seen_all.x), strength * (values.y - decay * seen_all.y),
        strength * (values.z - decay * seen_all.z), strength * (values.w - decay * seen_all.w)};
    const float4 o =
        make_float4(fmaf(dot, d[0], decay * made_all.x), fmaf(dot, d[1], decay * made_all.y),
                    fmaf(dot, d[2], decay * made_all.z), fmaf(dot, d[3], decay * made_all.w));
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float k = shared.k[row + i];
#pragma unroll
      for (int j = 0; j < 4; ++j) state[i][j] = fmaf(k, d[j], decay * state[i][j]);
    }
    if (warp != token % kWarps) continue;
    const float mean = warp_sum(o.x * o.x + o.y * o.y + o.z * o.z + o.w * o.w) / kDim;
    const float scale = 1.f / sqrtf(mean + a.epsilon);
    const auto gate = [&](float x) { return a.silu_gate ? silu_of(x) : sigmoid_of(x); };
    store_four(mixed + at * a.value_size() + head * kDim + column,
               make_float4(o.x * scale * factor.x * gate(z.x), o.y * scale * factor.y * gate(z.y),
                           o.z * scale * factor.z * gate(z.z), o.w * scale * factor.w * gate(z.w)));
  }

  if (dst < 0) return;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    store_four(states + row_at(dst, i),
               make_float4(state[i][0], state[i][1], state[i][2], state[i][3]));
  }
  if (has_values) value.keep(a, dst);
  // The first of the heads that read a key head keeps its columns.
  const bool is_first = a.tiled ? head < a.key_heads : head % (a.value_heads / a.key_heads) == 0;
  if (is_first) own.keep(a, dst);
}

}  // namespace

Status delta_steps(const DeltaArgs& args, bool of_ends, DType dtype, DType states,
                   const Launch& launch_on) {
  return dispatch_states(dtype, states, "delta_net", [&](auto* t, auto* s) {
    using T = std::remove_pointer_t<decltype(t)>;
    using S = std::remove_pointer_t<decltype(s)>;
    const LaunchConfig config(launch_on, grid_of(args.value_heads, args.num_seqs), kThreads);
    return launch(delta_steps_kernel<T, S>, config, "delta_steps", args, of_ends);
  });
}

}  // namespace regatta::cuda
