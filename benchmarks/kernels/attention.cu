// Times paged_attention() in CUDA graphs, alone and in a chain of products as a decode step has it.
//
//   attention [latency|short [brief]|decode|prefill|long [steps|prompts]]
//   attention once prefill [LENGTH] | once FORMAT [BATCH [LENGTH]]
#include "cuda/hopper.cuh"
#include "native/attention_setup.cuh"
#include "timing.cuh"

using namespace regatta;
using namespace regatta::native;

namespace {

// Microseconds per launch: a graph of all layers with programmatic dependent launches, replayed.
template <class T>
double time_case(const Case& c, int layers, const char* kernel) {
  setenv("REGATTA_KERNEL", (std::string("paged_attention=") + kernel).c_str(), 1);
  Setup<T> s(c, layers);
  const int launches = std::max(layers, 4);
  return 1e3 / launches *
         bench::graph_ms(
             [&](cudaStream_t stream) {
               for (int i = 0; i < launches; ++i) s.run(i % layers, stream, true);
             },
             10, 3);
}

void bench_prefill(const char* kernel, int heads, int kv_heads, int dim, int batch, int length,
                   int block, KvFormat format = KvFormat::kDense) {
  Case c{"prefill", std::vector<Span>(batch, Span{length, length}), heads, kv_heads, dim, block};
  c.format = format;
  const double us = time_case<__nv_bfloat16>(c, 1, kernel);
  const double flops = 2.0 * batch * heads * dim * double(length) * length;  // half of 4 D n^2
  std::printf(
      "prefill %s %-12s heads %2d/%2d D %3d block %3d  %2d x %5d: %9.1f us %6.1f TFLOP/s (%.0f %% "
      "of "
      "601)\n",
      kernel, kv_format_info(format).name, heads, kv_heads, dim, block, batch, length, us,
      flops / us / 1e6, flops / us / 1e6 / 6.01);
  std::fflush(stdout);
}

void bench_decode(int heads, int kv_heads, int dim, int batch, int length, int block,
                  KvFormat format = KvFormat::kDense, const char* kernel = "sm90") {
  Case c{"decode", std::vector<Span>(batch, Span{1, length}), heads, kv_heads, dim, block};
  c.format = format;
  const KvFormatInfo info = kv_format_info(format);
  const double row =
      kv_row_bytes(format, dim, 2) + (info.token_scales ? 4.0 * info.scale_floats : 0.0);
  const double bytes = 2.0 * batch * kv_heads * length * row;
  const int layers = std::clamp(static_cast<int>(400e6 / bytes), 1, 32);
  const double us = time_case<__nv_bfloat16>(c, layers, kernel);
  std::printf(
      "decode %-12s heads %2d/%2d D %3d block %3d  batch %3d x %6d: %8.2f us %5.2f TB/s "
      "(%.0f %% of 4.67)\n",
      info.name, heads, kv_heads, dim, block, batch, length, us, bytes / us / 1e6,
      bytes / us / 4.67e4);
  std::fflush(stdout);
}

// Reads weights as a product of one row does, under the same launch contract.
constexpr int kWeightStage = 8192, kWeightStages = 11;
__global__ void __launch_bounds__(128)
    read_weights(const uint8_t* weights, int64_t stages, uint32_t* out) {
  extern __shared__ __align__(128) uint8_t ring[];
  __shared__ uint64_t full[kWeightStages];
  const int tid = threadIdx.x;
  const auto load = [&](int64_t i) {
    const int64_t at = blockIdx.x + i * gridDim.x;
    if (tid != 0 || at >= stages) return;
    const int slot = static_cast<int>(i % kWeightStages);
    cuda::barrier_arrive_expect(&full[slot], kWeightStage);
    cuda::bulk_load(ring + slot * kWeightStage, weights + at * kWeightStage, kWeightStage,
                    &full[slot]);
  };
  if (tid == 0) {
    for (uint64_t& barrier : full) cuda::barrier_init(&barrier, 1);
    cuda::barrier_init_fence();
  }
  __syncthreads();
  for (int i = 0; i < kWeightStages; ++i) load(i);
  cuda::pdl_trigger();
  cuda::pdl_wait();
  uint32_t sum = 0;
  for (int64_t i = 0; blockIdx.x + i * gridDim.x < stages; ++i) {
    const int slot = static_cast<int>(i % kWeightStages);
    cuda::barrier_wait(&full[slot], i / kWeightStages % 2);
    const auto* const stage = reinterpret_cast<const uint4*>(ring + slot * kWeightStage);
    for (int u = tid; u < kWeightStage / 16; u += 128) sum += stage[u].x ^ stage[u].w;
    __syncthreads();
    load(i + kWeightStages);
  }
  if (sum == 12345) *out = sum;
}

// A layer's decode step of one token per request: rotary embedding, cache write, attention.
template <class T>
struct Step {
  static constexpr int kHeads = 32, kKvHeads = 8, kDim = 128;
  Setup<T> s;
  T *qkv, *q;
  float* angles;
  int32_t *positions, *slots;

  static Case shape(const std::vector<int>& lengths, int block, KvFormat format) {
    Case c{"step", {}, kHeads, kKvHeads, kDim, block};
    for (int length : lengths) c.spans.push_back({1, length});
    c.format = format;
    return c;
  }
  // max_context_len: that a graph is recorded for.
  Step(const std::vector<int>& lengths, int block, KvFormat format, int layers,
       int64_t max_context_len = 8192)
      : s(shape(lengths, block, format), layers) {
    const int batch = static_cast<int>(lengths.size());
    const int64_t num_positions = s.limits.max_context_len + 1;
    CHECK_CUDA(cudaMalloc(&qkv, int64_t{batch} * 48 * kDim * sizeof(T)));
    CHECK_CUDA(cudaMalloc(&q, int64_t{batch} * kHeads * kDim * sizeof(T)));
    CHECK_CUDA(cudaMalloc(&angles, num_positions * kDim * 4));
    CHECK_CUDA(cudaMalloc(&positions, batch * 4));
    CHECK_CUDA(cudaMalloc(&slots, batch * 4));
    fill_random<<<64, 256>>>(qkv, int64_t{batch} * 48 * kDim, 11);
    fill_random<<<64, 256>>>(angles, num_positions * kDim, 14);
    std::vector<int32_t> at(batch), slot(batch);
    for (int b = 0; b < batch; ++b) {
      at[b] = lengths[b] - 1;
      slot[b] = s.table[b * s.max_blocks + at[b] / block] * block + at[b] % block;
    }
    CHECK_CUDA(cudaMemcpy(positions, at.data(), batch * 4, cudaMemcpyHostToDevice));
    CHECK_CUDA(cudaMemcpy(slots, slot.data(), batch * 4, cudaMemcpyHostToDevice));
    s.limits.max_context_len = std::max(s.limits.max_context_len, max_context_len);
    const int64_t bytes = cuda::paged_attention_workspace_bytes(s.params(0), s.limits);
    CHECK_CUDA(cudaFree(s.workspace));
    CHECK_CUDA(cudaMalloc(&s.workspace, bytes));
    CHECK_CUDA(cudaMemset(s.workspace, 0, bytes));
    s.workspace_bytes = bytes;
  }
  ~Step() {
    for (void* p : {(void*)qkv, (void*)q, (void*)angles, (void*)positions, (void*)slots}) {
      CHECK_CUDA(cudaFree(p));
    }
  }
  // Of keys, values and scales, per layer.
  double bytes() const {
    const KvFormatInfo info = kv_format_info(s.c.format);
    const double row =
        kv_row_bytes(s.c.format, kDim, 2) + (info.token_scales ? 4.0 * info.scale_floats : 0.0);
    double tokens = 0;
    for (const Span& span : s.c.spans) tokens += span.context_len;
    return 2 * kKvHeads * row * tokens;
  }
  void run(int layer, cudaStream_t stream, bool together) const {
    PagedAttentionParams attention = s.params(layer);
    attention.q = q;
    RopeAndCacheWriteParams rope;
    rope.dtype = s.dtype;
    rope.qkv = qkv, rope.positions = positions, rope.slot_mapping = slots;
    rope.rope_cache = angles;
    rope.cache = attention.cache;
    rope.q_out = q;
    rope.num_tokens = s.num_tokens, rope.num_heads = kHeads, rope.num_kv_heads = kKvHeads;
    rope.head_dim = kDim, rope.rotary_dim = kDim;
    rope.num_positions = s.limits.max_context_len;
    if (together) {
      CHECK_STATUS(cuda::rope_and_paged_attention(rope, attention, s.limits, s.workspace,
                                                  s.workspace_bytes, {stream, true}));
    } else {
      CHECK_STATUS(cuda::rope_and_cache_write(rope, {stream, true}));
      CHECK_STATUS(cuda::paged_attention(attention, s.limits, s.workspace, s.workspace_bytes,
                                         {stream, true}));
    }
  }
};

// What rotary embedding, cache write and attention add to a chain of products that read `megabytes`
// each, as a decode step has them.
void bench_chain(int batch, int length, int megabytes, KvFormat format = KvFormat::kDense,
                 int64_t max_context_len = 8192) {
  constexpr int kLayers = 16;
  const Step<__nv_bfloat16> step(std::vector<int>(batch, length), 64, format, kLayers,
                                 max_context_len);
  uint8_t* weights;
  const int64_t stages = int64_t{megabytes} * 1000000 / kWeightStage;
  CHECK_CUDA(cudaMalloc(&weights, kLayers * stages * kWeightStage));
  CHECK_CUDA(cudaMemset(weights, 0x3c, kLayers * stages * kWeightStage));
  double times[3];
  for (int variant = 0; variant < 3; ++variant) {  // products alone, two launches, one launch
    const auto layers = [&](cudaStream_t stream) {
      for (int layer = 0; layer < kLayers; ++layer) {
        cuda::LaunchConfig config;
        config.grid = dim3(132);
        config.block = dim3(128);
        config.shared_bytes = kWeightStage * kWeightStages;
        config.stream = stream;
        config.pdl = true;
        CHECK_STATUS(cuda::launch(read_weights, config, "read_weights",
                                  weights + layer * stages * kWeightStage, stages,
                                  reinterpret_cast<uint32_t*>(step.q)));
        if (variant > 0) step.run(layer, stream, variant == 2);
      }
    };
    times[variant] = 1e3 / kLayers * bench::graph_ms(layers, 11, 4);
  }
  std::printf(
      "chain %-12s %d MB + batch %3d x %5d: %7.2f us alone, +%6.2f in two launches, +%6.2f "
      "in one (%.2f at 4.67 TB/s)\n",
      kv_format_info(format).name, megabytes, batch, length, times[0], times[1] - times[0],
      times[2] - times[0], step.bytes() / 4.67e6);
  std::fflush(stdout);
  CHECK_CUDA(cudaFree(weights));
}

// Layers of one launch each, in a graph: `name` says what `lengths` are.
void bench_step(const char* name, const std::vector<int>& lengths, int block, KvFormat format,
                int64_t max_context_len = 8192) {
  const double once = Step<__nv_bfloat16>(lengths, block, format, 1).bytes();
  const int layers = std::clamp(static_cast<int>(400e6 / once), 1, 32);
  const Step<__nv_bfloat16> step(lengths, block, format, layers, max_context_len);
  constexpr int kLaunches = 32;
  const double us = 1e3 / kLaunches *
                    bench::graph_ms(
                        [&](cudaStream_t stream) {
                          for (int i = 0; i < kLaunches; ++i) step.run(i % layers, stream, true);
                        },
                        10, 3);
  std::printf("step %-12s block %3d  batch %3zu x %6s: %8.2f us %5.2f TB/s (%.0f %% of 4.67)\n",
              kv_format_info(format).name, block, lengths.size(), name, us, once / us / 1e6,
              once / us / 4.67e4);
  std::fflush(stdout);
}

void bench_step(int batch, int length, int block, KvFormat format, int64_t max_context_len = 8192) {
  bench_step(std::to_string(length).c_str(), std::vector<int>(batch, length), block, format,
             max_context_len);
}

// Lengths between low and high, evenly spread and shuffled; of one request in 32, `long_one`.
std::vector<int> mixed_lengths(int batch, int low, int high, int long_one = 0) {
  std::vector<int> lengths(batch);
  for (int b = 0; b < batch; ++b) {
    lengths[b] = low + static_cast<int>(int64_t{high - low} * b / std::max(batch - 1, 1));
    if (long_one > 0 && b % 32 == 31) lengths[b] = long_one;
  }
  std::mt19937 rng(5);
  std::shuffle(lengths.begin(), lengths.end(), rng);
  return lengths;
}

void bench_short(bool brief) {
  for (KvFormat format : {KvFormat::kDense, KvFormat::kFp8, KvFormat::kInt8Static,
                          KvFormat::kInt8Dynamic, KvFormat::kInt4}) {
    const bool main_format = format == KvFormat::kDense || format == KvFormat::kFp8;
    for (int batch : {8, 32, 64, 128, 256}) {
      for (int length : {128, 192, 512, 1024, 4096}) {
        if (brief && (batch < 32 || length == 512 || (batch != 128 && length != 192))) continue;
        if (brief && !main_format && (batch != 128 || length == 128)) continue;
        if (int64_t{batch} * length <= 128 * 4096) bench_step(batch, length, 64, format);
      }
    }
    if (!main_format) continue;
    bench_step("100-280", mixed_lengths(128, 100, 280), 64, format);
    bench_step("128-1k", mixed_lengths(128, 128, 1024), 64, format);
    bench_step("1k-4k", mixed_lengths(96, 1024, 4096), 64, format);
    if (!brief) bench_step("+ 4k", mixed_lengths(128, 100, 280, 4096), 64, format);
    for (int block : {16, 128}) {
      if (!brief) bench_step(128, 192, block, format);
    }
    for (int length : {128, 192, 1024, 4096}) bench_chain(1, length, 50, format);
    for (int batch : {8, 32, 128}) {
      if (!brief) bench_chain(batch, 192, 50, format);
    }
  }
}

void bench_latency() {
  for (int length : {128, 1024, 4096}) bench_chain(1, length, 50);
  for (int batch : {8, 32}) bench_chain(batch, 1024, 50);
  bench_chain(1, 1024, 50, KvFormat::kInt8Static);
  for (KvFormat format :
       {KvFormat::kDense, KvFormat::kFp8, KvFormat::kInt8Dynamic, KvFormat::kInt4}) {
    bench_chain(64, 4096, 50, format);
  }
  for (int batch : {1, 2, 4, 8, 16, 32}) {
    for (int length : {128, 1024, 4096}) bench_decode(32, 8, 128, batch, length, 64);
  }
  bench_decode(32, 8, 128, 1, 32768, 64);
  bench_decode(32, 8, 128, 1, 131072, 64);
  bench_decode(14, 2, 64, 1, 1024, 64);
}

void bench_bandwidth() {
  for (int batch : {64, 128, 256}) {
    for (int length : {128, 1024, 4096}) {
      if (batch * length <= 128 * 4096) bench_decode(32, 8, 128, batch, length, 64);
    }
  }
  for (KvFormat format :
       {KvFormat::kInt8Static, KvFormat::kInt8Dynamic, KvFormat::kFp8, KvFormat::kInt4}) {
    bench_decode(32, 8, 128, 1, 1024, 64, format);
    bench_decode(32, 8, 128, 1, 32768, 64, format);
    for (int batch : {16, 64, 128}) bench_decode(32, 8, 128, batch, 4096, 64, format);
    bench_decode(32, 8, 128, 128, 1024, 16, format);
    for (int dim : {64, 80, 96, 256}) bench_decode(32, 8, dim, 64, 4096, 64, format);
  }
  bench_decode(32, 8, 128, 64, 4096, 16);
  for (int dim : {64, 80, 96, 256}) bench_decode(32, 8, dim, 64, 4096, 64);
  bench_decode(32, 32, 128, 16, 4096, 64);
  bench_decode(64, 4, 128, 64, 4096, 64);
  bench_decode(14, 2, 64, 64, 1024, 64);
}

void bench_prefills(const char* kernel) {
  for (int length : {1024, 4096, 8192}) bench_prefill(kernel, 32, 8, 128, 1, length, 64);
  bench_prefill(kernel, 32, 32, 128, 1, 8192, 64);
  bench_prefill(kernel, 32, 8, 128, 16, 512, 64);
  for (int dim : {64, 80, 96}) bench_prefill(kernel, 32, 8, dim, 1, 8192, 64);
  bench_prefill(kernel, 16, 8, 256, 1, 8192, 64);
  bench_prefill(kernel, 32, 8, 128, 1, 8192, 16);
  if (std::string(kernel) != "sm90") return;
  for (KvFormat format :
       {KvFormat::kInt8Static, KvFormat::kInt8Dynamic, KvFormat::kFp8, KvFormat::kInt4}) {
    for (int dim : {64, 80, 96, 128, 256}) bench_prefill(kernel, 32, 8, dim, 1, 8192, 64, format);
    bench_prefill(kernel, 32, 8, 128, 16, 512, 64, format);
  }
}

// Chunks of a prompt, as a server takes it.
void bench_prompt(int length, KvFormat format = KvFormat::kDense) {
  constexpr int kChunk = 8192, kHeads = 32, kDim = 128;
  double all_us = 0, all_flops = 0;
  for (int begin = 0; begin < length; begin += kChunk) {
    const int tokens = std::min(kChunk, length - begin);
    Case c{"prompt", {{tokens, begin + tokens}}, kHeads, 8, kDim, 64};
    c.format = format;
    const double us = time_case<__nv_bfloat16>(c, 1, "sm90");
    const double flops = 4.0 * kHeads * kDim * tokens * (begin + tokens / 2.0);
    std::printf("prompt %-12s %4d at %6d: %9.1f us %6.1f TFLOP/s\n", kv_format_info(format).name,
                tokens, begin, us, flops / us / 1e6);
    std::fflush(stdout);
    all_us += us, all_flops += flops;
  }
  std::printf("prompt %-12s %d: %.1f ms for 32 layers, %.1f TFLOP/s\n", kv_format_info(format).name,
              length, 32e-3 * all_us, all_flops / all_us / 1e6);
}

void bench_long_steps() {
  for (KvFormat format :
       {KvFormat::kDense, KvFormat::kInt8Static, KvFormat::kInt8Dynamic, KvFormat::kFp8}) {
    for (int batch : {1, 4, 8}) {
      for (int length : {1000, 4000, 32000}) bench_step(batch, length, 64, format, 33000);
    }
    bench_step(32, 8000, 64, format);
    bench_step(1, 100000, 64, format);
  }
  for (int length : {1000, 4000, 16000, 32000}) {
    bench_chain(8, length, 50, KvFormat::kDense, 33000);
  }
}

void bench_long_prompts() {
  bench_prompt(32000);
  bench_prompt(100000);
  for (Span span : {Span{200, 30000}, Span{1000, 12000}}) {
    const Case c{"prompt", {span}, 32, 8, 128, 64};
    std::printf("%d tokens behind %d: %.1f us\n", span.num_tokens,
                span.context_len - span.num_tokens, time_case<__nv_bfloat16>(c, 1, "sm90"));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "all";
  cudaDeviceProp device;
  CHECK_CUDA(cudaGetDeviceProperties(&device, 0));
  std::printf("%s, %d multiprocessors\n", device.name, device.multiProcessorCount);
  if (mode == "once" && argc > 2) {  // one shape, for profilers
    KvFormat format;
    if (std::string(argv[2]) == "prefill") {
      if (argc > 3) {  // the last chunk of a prompt
        const Setup<__nv_bfloat16> s({"prompt", {{8192, std::atoi(argv[3])}}, 32, 8, 128, 64});
        s.run(0, nullptr, false);
        CHECK_CUDA(cudaDeviceSynchronize());
      } else {
        bench_prefill("sm90", 32, 8, 128, 16, 512, 64);
      }
    } else if (parse_kv_format(argv[2], &format)) {
      const std::vector<int> lengths(argc > 3 ? std::atoi(argv[3]) : 64,
                                     argc > 4 ? std::atoi(argv[4]) : 4096);
      const Step<__nv_bfloat16> step(lengths, 64, format, 4);
      for (int i = 0; i < 4; ++i) step.run(i, nullptr, true);
      CHECK_CUDA(cudaDeviceSynchronize());
    }
    return 0;
  }
  if (mode == "all" || mode == "latency") bench_latency();
  if (mode == "all" || mode == "short") bench_short(argc > 2);
  if (mode == "all" || mode == "decode") bench_bandwidth();
  if (mode == "all" || mode == "prefill") bench_prefills("sm90");
  const std::string part = mode == "long" && argc > 2 ? argv[2] : "";
  if (mode == "all" || (mode == "long" && part != "prompts")) bench_long_steps();
  if (mode == "all" || (mode == "long" && part != "steps")) bench_long_prompts();
  if (mode == "all") bench_prefills("sm80");
  return 0;
}
