// The delta net of any record, token after token, and the norm and gate behind it (delta_net.h).
//
// Layout: see DeltaArgs. Architectures: sm_75 and later.
// A block has one value head of one request, its state in shared memory; a thread has columns of
// it. All in float. For sizes and forms that no other way takes, and for tests. Bound: the chain
// of a token.
#include "cuda/states/delta_spans.cuh"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr float kUnitEpsilon = 1e-6f;

int64_t shared_floats(const DeltaArgs& a) {
  return int64_t{a.key_dim} * a.value_dim + 3 * a.key_dim + a.value_dim + kWarps;
}

// x times `scale`, of length 1.
__device__ void make_unit(float* x, int size, float scale, float* scratch) {
  float squares = 0.f;
  for (int i = static_cast<int>(threadIdx.x); i < size; i += kThreads) {
    squares = fmaf(x[i], x[i], squares);
  }
  const float factor = scale / sqrtf(block_sum(squares, scratch) + kUnitEpsilon);
  for (int i = static_cast<int>(threadIdx.x); i < size; i += kThreads) x[i] *= factor;
  __syncthreads();
}

template <class T, class S>
__global__ __launch_bounds__(kThreads) void delta_any_kernel(DeltaArgs a) {
  extern __shared__ __align__(16) unsigned char any_memory[];
  pdl_trigger();
  pdl_wait();
  const int head = static_cast<int>(blockIdx.x), seq = static_cast<int>(blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x);
  const int dim = a.key_dim, width = a.value_dim, size = dim * width;
  float* const state = reinterpret_cast<float*>(any_memory);
  float *const q = state + size, *const k = q + dim, *const decay = k + dim;
  float *const v = decay + dim, *const scratch = v + width;
  const int begin = a.borders[seq], length = a.borders[seq + 1] - begin;
  const int src = a.src[seq], dst = a.dst[seq], key_head = a.key_head(head);
  const int64_t own = int64_t{head} * size, slot_size = int64_t{a.value_heads} * size;
  S* const states = static_cast<S*>(a.states);
  for (int token = a.borders[a.num_seqs] + seq; token < a.num_tokens; token += a.num_seqs) {
    for (int e = thread; e < width; e += kThreads) {
      a.outputs[int64_t{token} * a.value_size() + head * width + e] = 0.f;
    }
  }
  if (length == 0) return;
  for (int i = thread; i < size; i += kThreads) {
    state[i] = src < 0 ? 0.f : Traits<S>::to_float(states[src * slot_size + own + i]);
  }

  // Channel of a place among the head's queries, keys and values.
  const auto channel_of = [&](int i) {
    if (i < 2 * dim) return i / dim * a.key_size() + key_head * dim + i % dim;
    return 2 * a.key_size() + head * width + i - 2 * dim;
  };
  for (int token = 0; token < length; ++token) {
    const int64_t at = begin + token;
    for (int i = thread; i < 2 * dim + width; i += kThreads) {
      const float x = convolved<T>(a, begin, src, token, channel_of(i));
      (i < dim ? q[i] : i < 2 * dim ? k[i - dim] : v[i - 2 * dim]) = x;
    }
    const T* const gates = static_cast<const T*>(a.ba) + at * a.gate_size();
    const int first = (a.by_step ? 0 : a.value_heads) + head * a.decays();
    float strength = 0.f;
    for (int i = thread; i < a.decays(); i += kThreads) {
      const float x = Traits<T>::to_float(gates[first + i]) + a.step_bias[head * a.decays() + i];
      decay[i] = expf(log_decay(a, head, x, &strength));
    }
    if (a.by_step) {  // with one decay
      log_decay(a, head, Traits<T>::to_float(gates[first]) + a.step_bias[head], &strength);
    } else {
      strength = 1.f / (1.f + expf(-Traits<T>::to_float(gates[head])));
    }
    strength *= a.write_scale;
    __syncthreads();
    if (a.unit_keys) {
      make_unit(q, dim, 1.f / sqrtf(static_cast<float>(dim)), scratch);
      make_unit(k, dim, 1.f, scratch);
    }
    const int step = a.by_channel ? 1 : 0;
    for (int e = thread; e < width; e += kThreads) {
      float seen = 0.f;
      for (int i = 0; i < dim; ++i) {
        const float x = state[i * width + e] * decay[i * step];
        state[i * width + e] = x;
        seen = fmaf(k[i], x, seen);
      }
      const float written = strength * (a.delta ? v[e] - seen : v[e]);
      float made = 0.f;
      for (int i = 0; i < dim; ++i) {
        const float x = fmaf(k[i], written, state[i * width + e]);
        state[i * width + e] = x;
        made = fmaf(q[i], x, made);
      }
      if (a.skip != nullptr) made = fmaf(a.skip[head], v[e], made);
      a.outputs[at * a.value_size() + head * width + e] = made;
    }
    __syncthreads();
  }

  if (dst < 0) return;
  for (int i = thread; i < size; i += kThreads) {
    states[dst * slot_size + own + i] = Traits<S>::from_float(state[i]);
  }
  // The first of the heads that read a key head keeps its columns.
  const bool is_first = a.tiled ? head < a.key_heads : head % (a.value_heads / a.key_heads) == 0;
  const int kept = a.conv_width - 1;
  for (int i = thread + (is_first ? 0 : 2 * dim); i < 2 * dim + width; i += kThreads) {
    const int channel = channel_of(i);
    for (int j = 0; j < kept; ++j) {
      a.conv_states[(int64_t{dst} * kept + j) * a.conv_size() + channel] =
          conv_input<T>(a, begin, src, length - kept + j, channel);
    }
  }
}

// A warp has a group of a token. From: float outputs, or T as it lies in mixed.
template <class T, class From>
__global__ __launch_bounds__(kThreads) void delta_norm_kernel(DeltaArgs a, const From* from,
                                                              bool of_chunks) {
  pdl_trigger();
  pdl_wait();
  const int groups = a.norm_groups > 0 ? a.norm_groups : a.value_heads;
  const int width = a.value_size() / groups, lane = static_cast<int>(threadIdx.x % kWarp);
  const int64_t item = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  const int64_t token = item / groups;
  const int group = static_cast<int>(item % groups);
  if (token >= a.num_tokens) return;
  if (of_chunks) {
    const int seq = request_of(a.borders, a.num_seqs, static_cast<int>(token));
    if (seq == a.num_seqs) return;
    const SpanWork span = span_work(a, seq);
    if (token - span.begin >= span.in_chunks) return;
  }
  const int64_t at = token * a.value_size() + int64_t{group} * width;
  const T* const z =
      static_cast<const T*>(a.qkvz) + token * a.row_size() + a.conv_size() + int64_t{group} * width;
  const float* const factor = a.out_norm + (a.norm_groups > 0 ? int64_t{group} * width : 0);
  T* const to = static_cast<T*>(a.mixed) + at;
  from += at;
  const auto gate = [&](float x) { return a.silu_gate ? silu_of(x) : sigmoid_of(x); };
  if (width == 4 * kWarp && a.conv_size() % 4 == 0 && !a.gate_first) {
    const float4 o = load_four(from + 4 * lane), w = load_four(factor + 4 * lane);
    const float4 g = load_four(z + 4 * lane);
    const float mean = warp_sum(o.x * o.x + o.y * o.y + o.z * o.z + o.w * o.w) / width;
    const float scale = 1.f / sqrtf(mean + a.epsilon);
    store_four(to + 4 * lane,
               make_float4(o.x * scale * w.x * gate(g.x), o.y * scale * w.y * gate(g.y),
                           o.z * scale * w.z * gate(g.z), o.w * scale * w.w * gate(g.w)));
    return;
  }
  const auto input = [&](int i) {
    const float o = Traits<From>::to_float(from[i]);
    return a.gate_first ? o * gate(Traits<T>::to_float(z[i])) : o;
  };
  float squares = 0.f;
  for (int i = lane; i < width; i += kWarp) squares = fmaf(input(i), input(i), squares);
  const float scale = 1.f / sqrtf(warp_sum(squares) / width + a.epsilon);
  for (int i = lane; i < width; i += kWarp) {
    const float x = input(i) * scale * factor[i];
    to[i] = Traits<T>::from_float(a.gate_first ? x : x * gate(Traits<T>::to_float(z[i])));
  }
}

}  // namespace

Status delta_any(const DeltaArgs& args, DType dtype, DType states, const Launch& launch_on) {
  const int64_t bytes = shared_floats(args) * int64_t{sizeof(float)};
  if (bytes > max_shared_bytes()) {
    return Status::error("delta_net: a head of " + std::to_string(args.key_dim) + " keys and " +
                         std::to_string(args.value_dim) + " values takes " + std::to_string(bytes) +
                         " bytes of shared memory, and this GPU has " +
                         std::to_string(max_shared_bytes()) + "; set --device cpu");
  }
  return dispatch_states(dtype, states, "delta_net", [&](auto* t, auto* s) {
    using T = std::remove_pointer_t<decltype(t)>;
    using S = std::remove_pointer_t<decltype(s)>;
    const LaunchConfig config(launch_on, grid_of(args.value_heads, args.num_seqs), kThreads, bytes);
    return launch(delta_any_kernel<T, S>, config, "delta_any", args);
  });
}

Status delta_norm(const DeltaArgs& args, const float* from, bool of_chunks, DType dtype,
                  const Launch& launch_on) {
  const int64_t groups = args.norm_groups > 0 ? args.norm_groups : args.value_heads;
  const LaunchConfig config(launch_on, ceil_div(args.num_tokens * groups, kWarps), kThreads);
  return dispatch_dtype(dtype, "delta_net", [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    if (from != nullptr) {
      return launch(delta_norm_kernel<T, float>, config, "delta_norm", args, from, of_chunks);
    }
    return launch(delta_norm_kernel<T, T>, config, "delta_norm", args,
                  static_cast<const T*>(args.mixed), of_chunks);
  });
}

}  // namespace regatta::cuda
