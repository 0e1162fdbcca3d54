// Checks and times paged_attention: attention_check [check|decode|small|many [FORMAT]|bench
// [prefill|decode|latency|short [brief]]|profile [prefill|FORMAT [BATCH LENGTH]]]. No framework.
//
// check: odd shapes against a float64 CPU reference over sampled rows; unused cache slots and the
// output hold NaN beforehand; rope_and_paged_attention() against its two parts. small: few of them,
// for compute-sanitizer. decode: the sm90 decode kernel alone. many: batches of many requests for
// it. bench: times in CUDA graphs. Build: nvcc -O3 -std=c++17 -Xcompiler -fopenmp
//        -I csrc/include -I csrc/cuda
//        -gencode=arch=compute_90a,code=sm_90a csrc/cuda/attention*.cu
//        csrc/cuda/rope_and_cache_write.cu csrc/cuda/bench/attention_check.cu
#include <numeric>

#include "bench.cuh"
#include "hopper.cuh"
#include "kv_host.h"
#include "regatta/cuda_ops.h"

using namespace regatta;

namespace {

__device__ __host__ inline uint32_t mix(uint64_t x) {
  x ^= x >> 33, x *= 0xff51afd7ed558ccdull, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ull, x ^= x >> 33;
  return static_cast<uint32_t>(x);
}

// Roughly normal, unit variance.
template <class T>
__global__ void fill_random(T* p, int64_t n, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    const uint32_t a = mix(seed * 0x9e3779b97f4a7c15ull + i),
                   b = mix(~seed * 0x9e3779b97f4a7c15ull + i);
    const float x = (a & 0xffff) + (a >> 16) + (b & 0xffff) + (b >> 16);
    p[i] = cuda::Traits<T>::from_float((x / 65536.f - 2.f) * 1.7320508f);
  }
}

// Codes: any, but for e4m3's NaN.
__global__ void fill_codes(uint8_t* p, int64_t n, uint64_t seed, bool e4m3) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    const uint8_t code = mix(seed * 0x9e3779b97f4a7c15ull + i);
    p[i] = e4m3 ? (code & 0x80) | (code & 0x7f) % 0x48 : code == 0 ? 1 : code;
  }
}

// Scales such that elements are about 1, different from row to row; minima that suit int4.
__global__ void fill_scales(float* p, int64_t n, uint64_t seed, int floats, float unit) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    const float x = mix(seed * 0x9e3779b97f4a7c15ull + i) / 4294967296.f;
    p[i] = floats == 2 && i % 2 == 1 ? -1.7f + x * 0.4f : unit * (0.5f + x);
  }
}

// Rows of unused slots become 0xff, NaN in every float type.
__global__ void poison(uint8_t* cache, const uint8_t* used, int64_t num_rows, int heads,
                       int block_size, int row_bytes) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < num_rows * row_bytes;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t row = i / row_bytes, block = row / (int64_t{heads} * block_size);
    if (!used[block * block_size + row % block_size]) cache[i] = 0xff;
  }
}

struct Span {
  int num_tokens, context_len;
};

struct Case {
  std::string name;
  std::vector<Span> spans;
  int heads, kv_heads, dim, block_size;
  int window = -1;
  int padding = 0;  // tokens behind the last span
  KvFormat format = KvFormat::kDense;
  bool tree = false;  // spans of up to 32 tokens are random trees
};

template <class T>
struct Setup {
  Case c;
  DType dtype = cuda::Traits<T>::dtype;
  int layers;
  int64_t num_tokens = 0, num_blocks = 0, max_blocks = 0;
  int64_t cache_rows = 0, cache_bytes = 0, scale_count = 0;  // of a layer's keys
  std::vector<int32_t> cu{0}, ctx, table;
  std::vector<uint32_t> tree;  // [T], one word per token
  uint32_t* d_tree;
  T *q, *out;
  uint8_t *k, *v;
  float *k_scale, *v_scale;
  int32_t *d_cu, *d_ctx, *d_table;
  void* workspace;
  int64_t workspace_bytes;
  cuda::AttentionLimits limits;

  Setup(const Case& which, int num_layers = 1) : c(which), layers(num_layers) {
    std::mt19937 rng(7);
    int64_t blocks = 3;
    for (const Span& s : c.spans) {
      cu.push_back(cu.back() + s.num_tokens);
      ctx.push_back(s.context_len);
      const int64_t n = cuda::ceil_div(s.context_len, c.block_size);
      max_blocks = std::max(max_blocks, n);
      blocks += n;
      limits.max_query_len = std::max<int64_t>(limits.max_query_len, s.num_tokens);
      limits.max_context_len = std::max<int64_t>(limits.max_context_len, s.context_len);
    }
    max_blocks = std::max<int64_t>(max_blocks, 1) + 1;
    num_blocks = blocks;
    num_tokens = cu.back() + c.padding;
    std::vector<int> ids(num_blocks);
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), rng);
    std::vector<uint8_t> used(num_blocks * c.block_size, 0);
    table.assign(c.spans.size() * max_blocks, -1);
    int next = 0;
    for (size_t b = 0; b < c.spans.size(); ++b) {
      for (int p = 0; p < c.spans[b].context_len; ++p) {
        int32_t& id = table[b * max_blocks + p / c.block_size];
        if (id < 0) id = ids[next++];
        used[int64_t{id} * c.block_size + p % c.block_size] = 1;
      }
    }
    const KvFormatInfo info = kv_format_info(c.format);
    const int64_t row_bytes = kv_row_bytes(c.format, c.dim, sizeof(T));
    cache_rows = num_blocks * c.kv_heads * c.block_size;
    cache_bytes = cache_rows * row_bytes;
    scale_count = info.scale_floats * (info.token_scales ? cache_rows : c.kv_heads);
    const int64_t q_elements = std::max<int64_t>(num_tokens, 1) * c.heads * c.dim;
    CHECK_CUDA(cudaMalloc(&q, q_elements * sizeof(T)));
    CHECK_CUDA(cudaMalloc(&out, q_elements * sizeof(T)));
    for (uint8_t** p : {&k, &v}) CHECK_CUDA(cudaMalloc(p, layers * cache_bytes));
    for (float** p : {&k_scale, &v_scale}) CHECK_CUDA(cudaMalloc(p, layers * scale_count * 4 + 16));
    tree.assign(num_tokens + 1, 1);
    for (size_t b = 0; b < c.spans.size(); ++b) {
      for (int t = 0; t < std::min(c.spans[b].num_tokens, 32);
           ++t) {  // a parent's ancestors and itself
        tree[cu[b] + t] = 1u << t | (t > 0 && rng() % 4 ? tree[cu[b] + rng() % t] : 0u);
      }
    }
    CHECK_CUDA(cudaMalloc(&d_tree, tree.size() * 4));
    CHECK_CUDA(cudaMemcpy(d_tree, tree.data(), tree.size() * 4, cudaMemcpyHostToDevice));
    CHECK_CUDA(cudaMalloc(&d_cu, cu.size() * 4));
    CHECK_CUDA(cudaMalloc(&d_ctx, ctx.size() * 4));
    CHECK_CUDA(cudaMalloc(&d_table, table.size() * 4));
    uint8_t* d_used;
    CHECK_CUDA(cudaMalloc(&d_used, used.size()));
    CHECK_CUDA(cudaMemcpy(d_used, used.data(), used.size(), cudaMemcpyHostToDevice));
    CHECK_CUDA(cudaMemcpy(d_cu, cu.data(), cu.size() * 4, cudaMemcpyHostToDevice));
    CHECK_CUDA(cudaMemcpy(d_ctx, ctx.data(), ctx.size() * 4, cudaMemcpyHostToDevice));
    CHECK_CUDA(cudaMemcpy(d_table, table.data(), table.size() * 4, cudaMemcpyHostToDevice));
    fill_random<<<1024, 256>>>(q, q_elements, 1);
    const bool dense = c.format == KvFormat::kDense;
    for (uint8_t* p : {k, v}) {
      const uint64_t seed = p == k ? 2 : 3;
      if (dense) {
        fill_random<<<1024, 256>>>(reinterpret_cast<T*>(p), layers * cache_bytes / sizeof(T), seed);
      } else {
        fill_codes<<<1024, 256>>>(p, layers * cache_bytes, seed, c.format == KvFormat::kFp8);
      }
    }
    const float unit = c.format == KvFormat::kInt4  ? 0.2f
                       : c.format == KvFormat::kFp8 ? 1.f
                                                    : 0.015f;
    for (float* p : {k_scale, v_scale}) {
      fill_scales<<<1024, 256>>>(p, layers * scale_count, p == k_scale ? 4 : 5, info.scale_floats,
                                 unit);
    }
    for (int layer = 0; layer < layers; ++layer) {
      for (uint8_t* p : {k, v}) {
        poison<<<1024, 256>>>(p + layer * cache_bytes, d_used, cache_rows, c.kv_heads, c.block_size,
                              static_cast<int>(row_bytes));
      }
      if (!info.token_scales) continue;
      for (float* p : {k_scale, v_scale}) {
        poison<<<1024, 256>>>(reinterpret_cast<uint8_t*>(p + layer * scale_count), d_used,
                              cache_rows, c.kv_heads, c.block_size, info.scale_floats * 4);
      }
    }
    CHECK_CUDA(cudaMemset(out, 0xff, q_elements * sizeof(T)));
    workspace_bytes = cuda::paged_attention_workspace_bytes(params(0), limits);
    CHECK_CUDA(cudaMalloc(&workspace, std::max<int64_t>(workspace_bytes, 1)));
    CHECK_CUDA(cudaMemset(workspace, 0, workspace_bytes));
    CHECK_CUDA(cudaDeviceSynchronize());
    CHECK_CUDA(cudaFree(d_used));
  }
  ~Setup() {
    for (void* p : {static_cast<void*>(q), static_cast<void*>(k), static_cast<void*>(v),
                    static_cast<void*>(k_scale), static_cast<void*>(v_scale),
                    static_cast<void*>(d_tree), static_cast<void*>(out), static_cast<void*>(d_cu),
                    static_cast<void*>(d_ctx), static_cast<void*>(d_table), workspace}) {
      CHECK_CUDA(cudaFree(p));
    }
  }
  PagedAttentionParams params(int layer) const {
    PagedAttentionParams p;
    p.dtype = dtype;
    p.q = q;
    p.cache.key = k + layer * cache_bytes;
    p.cache.value = v + layer * cache_bytes;
    p.cache.format = c.format;
    p.cache.key_scale = k_scale + layer * scale_count;
    p.cache.value_scale = v_scale + layer * scale_count;
    p.cache.num_blocks = num_blocks;
    p.cache.block_size = c.block_size;
    p.batch.cu_seqlens_q = d_cu;
    p.batch.context_lens = d_ctx;
    p.batch.block_tables = d_table;
    if (c.tree) p.batch.tree_mask = reinterpret_cast<int32_t*>(d_tree), p.batch.tree_words = 1;
    p.batch.num_tokens = num_tokens;
    p.batch.num_seqs = static_cast<int64_t>(c.spans.size());
    p.batch.max_blocks = max_blocks;
    p.out = out;
    p.num_heads = c.heads;
    p.num_kv_heads = c.kv_heads;
    p.head_dim = c.dim;
    p.softmax_scale = 1.f / std::sqrt(static_cast<float>(c.dim));
    p.window = c.window;
    return p;
  }
  void run(int layer, cudaStream_t stream, bool pdl) const {
    const Status status =
        cuda::paged_attention(params(layer), limits, workspace, workspace_bytes, {stream, pdl});
    if (!status.ok()) {
      std::printf("%s: %s\n", c.name.c_str(), status.message().c_str());
      std::exit(1);
    }
  }
};

// Relative error over sampled rows; infinite when an output is NaN or padding is not 0.
template <class T>
double error_of(const Setup<T>& s, int64_t budget) {
  const Case& c = s.c;
  const int64_t n = s.num_tokens * c.heads * c.dim;
  std::vector<T> q(n), out(n);
  std::vector<uint8_t> k(s.cache_bytes), v(s.cache_bytes);
  std::vector<float> k_scale(s.scale_count), v_scale(s.scale_count);
  CHECK_CUDA(cudaMemcpy(q.data(), s.q, n * sizeof(T), cudaMemcpyDeviceToHost));
  CHECK_CUDA(cudaMemcpy(out.data(), s.out, n * sizeof(T), cudaMemcpyDeviceToHost));
  CHECK_CUDA(cudaMemcpy(k.data(), s.k, k.size(), cudaMemcpyDeviceToHost));
  CHECK_CUDA(cudaMemcpy(v.data(), s.v, v.size(), cudaMemcpyDeviceToHost));
  CHECK_CUDA(cudaMemcpy(k_scale.data(), s.k_scale, k_scale.size() * 4, cudaMemcpyDeviceToHost));
  CHECK_CUDA(cudaMemcpy(v_scale.data(), s.v_scale, v_scale.size() * 4, cudaMemcpyDeviceToHost));
  for (int64_t i = 0; i < n; ++i) {
    if (!std::isfinite(host_float(out[i]))) return INFINITY;
    if (i >= int64_t{s.cu.back()} * c.heads * c.dim && host_float(out[i]) != 0.f) return INFINITY;
  }
  struct Job {
    int seq, token, head;
  };
  std::vector<Job> jobs;
  double work = 0;
  for (size_t b = 0; b < c.spans.size(); ++b) {
    for (int t = 0; t < c.spans[b].num_tokens; ++t) {
      for (int h = 0; h < c.heads; ++h) {
        jobs.push_back({static_cast<int>(b), t, h});
        work += double(c.spans[b].context_len) * c.dim;
      }
    }
  }
  std::mt19937 rng(3);
  std::shuffle(jobs.begin(), jobs.end(), rng);
  const double keep = std::min(1.0, budget / std::max(work, 1.0));
  jobs.resize(std::min<size_t>(jobs.size(), std::max<size_t>(64, jobs.size() * keep)));
  double difference = 0, norm = 0;
#pragma omp parallel for reduction(+ : difference, norm) schedule(dynamic, 4)
  for (size_t j = 0; j < jobs.size(); ++j) {
    const Span span = c.spans[jobs[j].seq];
    const int kv = jobs[j].head / (c.heads / c.kv_heads);
    const int64_t row = (int64_t{s.cu[jobs[j].seq]} + jobs[j].token) * c.heads + jobs[j].head;
    const int before = span.context_len - span.num_tokens;
    const bool tree = c.tree && span.num_tokens <= 32;
    const uint32_t mask = s.tree[s.cu[jobs[j].seq] + jobs[j].token];
    const int last = tree ? span.context_len - 1 : before + jobs[j].token;
    const int depth = tree ? before + __builtin_popcount(mask) - 1 : last;
    const int first = c.window < 0 ? 0 : std::max(0, depth - c.window + 1);
    auto seen = [&](int p) { return !tree || p < before || (mask >> (p - before) & 1); };
    std::vector<double> logits(std::max(0, last + 1), 0.0);
    auto at = [&](int p) {
      const int64_t block = s.table[jobs[j].seq * s.max_blocks + p / c.block_size];
      return (block * c.kv_heads + kv) * c.block_size + p % c.block_size;
    };
    auto element = [&](const std::vector<uint8_t>& cache, const std::vector<float>& scales,
                       int64_t at_row, int d) {
      return double(cache_element<T>(c.format, cache.data(), scales.data(), at_row, kv, d, c.dim));
    };
    double top = -INFINITY, sum = 0;
    for (int p = first; p <= last; ++p) {
      logits[p] = -INFINITY;
      if (!seen(p)) continue;
      const int64_t key = at(p);
      double x = 0;
      for (int d = 0; d < c.dim; ++d)
        x += double(host_float(q[row * c.dim + d])) * element(k, k_scale, key, d);
      logits[p] = x / std::sqrt(double(c.dim));
      top = std::max(top, logits[p]);
    }
    std::vector<double> expected(c.dim, 0.0);
    for (int p = first; p <= last; ++p) {
      if (!seen(p)) continue;
      const double w = std::exp(logits[p] - top);
      sum += w;
      const int64_t value = at(p);
      for (int d = 0; d < c.dim; ++d) expected[d] += w * element(v, v_scale, value, d);
    }
    for (int d = 0; d < c.dim; ++d) {
      const double want = sum > 0 ? expected[d] / sum : 0.0;
      const double got = host_float(out[row * c.dim + d]);
      difference += (got - want) * (got - want);
      norm += want * want;
    }
  }
  return norm > 0 ? std::sqrt(difference / norm) : difference;
}

int failures = 0, checks = 0;
bool verbose = false, decode_only = false;

template <class T>
void check(const Case& c, const char* kernel, double tolerance) {
  if (decode_only) {
    if (std::string(kernel) != "sm90") return;
    for (const Span& s : c.spans) {
      if (s.num_tokens > (c.tree ? 32 : 5)) return;
    }
  }
  setenv("REGATTA_KERNEL", (std::string("paged_attention=") + kernel).c_str(), 1);
  Setup<T> s(c);
  const int64_t bytes = s.num_tokens * c.heads * c.dim * sizeof(T);
  s.run(0, nullptr, false);
  CHECK_CUDA(cudaDeviceSynchronize());
  const double error = error_of(s, 10'000'000);
  // Again, from a graph with programmatic dependent launches: same bits.
  std::vector<uint8_t> once(bytes), again(bytes);
  CHECK_CUDA(cudaMemcpy(once.data(), s.out, bytes, cudaMemcpyDeviceToHost));
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK_CUDA(cudaStreamCreate(&stream));
  CHECK_CUDA(cudaMemsetAsync(s.out, 0xff, bytes, stream));
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  for (int i = 0; i < 3; ++i) s.run(0, stream, true);
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  CHECK_CUDA(cudaGraphLaunch(exec, stream));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  CHECK_CUDA(cudaMemcpy(again.data(), s.out, bytes, cudaMemcpyDeviceToHost));
  CHECK_CUDA(cudaGraphExecDestroy(exec));
  CHECK_CUDA(cudaGraphDestroy(graph));
  CHECK_CUDA(cudaStreamDestroy(stream));
  const bool same = once == again;
  const bool ok = error < tolerance && same;
  failures += !ok;
  if (!ok) std::printf("FAILED ");
  if (!ok || verbose) {
    std::printf("%-8s %-8s %-12s %-22s D %3d heads %2d/%2d block %3d window %5d: %.1e%s\n", kernel,
                dtype_name(s.dtype), kv_format_info(c.format).name, c.name.c_str(), c.dim, c.heads,
                c.kv_heads, c.block_size, c.window, error, same ? "" : " (replay differs)");
    std::fflush(stdout);
  }
  ++checks;
}

// rope_and_paged_attention() against rope_and_cache_write() and paged_attention(): what they leave
// in the caches, bit for bit, and their outputs. Spans of one token.
template <class T>
void check_fused(const Case& c, int rotary, bool norms) {
  unsetenv("REGATTA_KERNEL");
  Setup<T> s(c);
  const int64_t tokens = s.num_tokens, all = c.heads + 2 * c.kv_heads;
  std::vector<int32_t> positions(tokens, 0), slots(tokens, -1);
  for (size_t b = 0; b < c.spans.size(); ++b) {
    if (c.spans[b].num_tokens == 0) continue;
    const int p = c.spans[b].context_len - 1, t = s.cu[b];
    positions[t] = std::max(p, 0);
    if (p >= 0 && b % 5 != 3) {  // some are written nowhere
      slots[t] = s.table[b * s.max_blocks + p / c.block_size] * c.block_size + p % c.block_size;
    }
  }
  T *qkv, *q_norm, *k_norm, *q;
  float* angles;
  int32_t *d_positions, *d_slots;
  const int num_positions = static_cast<int>(s.limits.max_context_len) + 1;
  CHECK_CUDA(cudaMalloc(&qkv, tokens * all * c.dim * sizeof(T)));
  CHECK_CUDA(cudaMalloc(&q, tokens * c.heads * c.dim * sizeof(T)));
  CHECK_CUDA(cudaMalloc(&q_norm, c.dim * sizeof(T)));
  CHECK_CUDA(cudaMalloc(&k_norm, c.dim * sizeof(T)));
  CHECK_CUDA(cudaMalloc(&angles, int64_t{num_positions} * rotary * 4));
  CHECK_CUDA(cudaMalloc(&d_positions, tokens * 4));
  CHECK_CUDA(cudaMalloc(&d_slots, tokens * 4));
  fill_random<<<64, 256>>>(qkv, tokens * all * c.dim, 11);
  fill_random<<<64, 256>>>(q_norm, c.dim, 12);
  fill_random<<<64, 256>>>(k_norm, c.dim, 13);
  fill_random<<<64, 256>>>(angles, int64_t{num_positions} * rotary, 14);
  CHECK_CUDA(cudaMemcpy(d_positions, positions.data(), tokens * 4, cudaMemcpyHostToDevice));
  CHECK_CUDA(cudaMemcpy(d_slots, slots.data(), tokens * 4, cudaMemcpyHostToDevice));
  const PagedAttentionParams attention = [&] {
    PagedAttentionParams p = s.params(0);
    p.q = q;
    return p;
  }();
  RopeAndCacheWriteParams rope;
  rope.dtype = s.dtype;
  rope.qkv = qkv, rope.positions = d_positions, rope.slot_mapping = d_slots;
  rope.rope_cache = angles;
  rope.q_norm = norms ? q_norm : nullptr, rope.k_norm = norms ? k_norm : nullptr;
  rope.cache = attention.cache;
  rope.q_out = q;
  rope.num_tokens = tokens, rope.num_heads = c.heads, rope.num_kv_heads = c.kv_heads;
  rope.head_dim = c.dim, rope.rotary_dim = rotary, rope.num_positions = num_positions;
  rope.epsilon = 1e-6f;
  struct Result {
    std::vector<uint8_t> cache;
    std::vector<T> out;
  };
  const int64_t out_count = tokens * c.heads * c.dim;
  std::vector<uint8_t> before[4];
  const std::pair<void*, int64_t> parts[4] = {{s.k, s.cache_bytes},
                                              {s.v, s.cache_bytes},
                                              {s.k_scale, s.scale_count * 4},
                                              {s.v_scale, s.scale_count * 4}};
  for (int i = 0; i < 4; ++i) {
    before[i].resize(parts[i].second);
    CHECK_CUDA(
        cudaMemcpy(before[i].data(), parts[i].first, parts[i].second, cudaMemcpyDeviceToHost));
  }
  auto collect = [&](bool fused) {
    for (int i = 0; i < 4; ++i) {
      CHECK_CUDA(
          cudaMemcpy(parts[i].first, before[i].data(), parts[i].second, cudaMemcpyHostToDevice));
    }
    CHECK_CUDA(cudaMemset(s.out, 0xff, out_count * sizeof(T)));
    Status status;
    if (fused) {
      status = cuda::rope_and_paged_attention(rope, attention, s.limits, s.workspace,
                                              s.workspace_bytes, {nullptr, true});
    } else {
      status = cuda::rope_and_cache_write(rope, {nullptr, false});
      if (status.ok()) {
        status = cuda::paged_attention(attention, s.limits, s.workspace, s.workspace_bytes,
                                       {nullptr, false});
      }
    }
    if (!status.ok()) {
      std::printf("%s: %s\n", c.name.c_str(), status.message().c_str());
      std::exit(1);
    }
    CHECK_CUDA(cudaDeviceSynchronize());
    Result r;
    for (int i = 0; i < 4; ++i) {
      const size_t at = r.cache.size();
      r.cache.resize(at + parts[i].second);
      CHECK_CUDA(cudaMemcpy(&r.cache[at], parts[i].first, parts[i].second, cudaMemcpyDeviceToHost));
    }
    r.out.resize(out_count);
    CHECK_CUDA(cudaMemcpy(r.out.data(), s.out, out_count * sizeof(T), cudaMemcpyDeviceToHost));
    return r;
  };
  const Result apart = collect(false), together = collect(true);
  double difference = 0, norm = 0;
  for (int64_t i = 0; i < out_count; ++i) {
    // Where the new token is written nowhere, only the fused kernel sees it.
    const int64_t t = i / (int64_t{c.heads} * c.dim);
    if (t < s.cu.back() && slots[t] < 0) continue;
    const double a = host_float(apart.out[i]), b = host_float(together.out[i]);
    difference += (a - b) * (a - b), norm += a * a;
    if (!std::isfinite(b)) difference = INFINITY;
  }
  const double error = std::sqrt(difference / std::max(norm, 1e-30));
  const bool same = apart.cache == together.cache;
  const bool ok = same && error < 6e-3;
  failures += !ok;
  if (!ok || verbose) {
    std::printf("%sfused %-8s %-12s %-22s D %3d/%3d heads %2d/%2d block %3d window %5d: %.1e%s\n",
                ok ? "" : "FAILED ", dtype_name(s.dtype), kv_format_info(c.format).name,
                c.name.c_str(), c.dim, rotary, c.heads, c.kv_heads, c.block_size, c.window, error,
                same ? "" : " (caches differ)");
    std::fflush(stdout);
  }
  ++checks;
  for (void* p : {(void*)qkv, (void*)q, (void*)q_norm, (void*)k_norm, (void*)angles,
                  (void*)d_positions, (void*)d_slots}) {
    CHECK_CUDA(cudaFree(p));
  }
}

// A request's result does not depend on the lengths of the others: same bits.
template <class T>
void check_composition(const Case& c) {
  unsetenv("REGATTA_KERNEL");
  Setup<T> s(c);
  const int64_t count = s.num_tokens * c.heads * c.dim;
  std::vector<uint16_t> outs[2];
  for (std::vector<uint16_t>& out : outs) {
    s.run(0, nullptr, false);
    CHECK_CUDA(cudaDeviceSynchronize());
    out.resize(count);
    CHECK_CUDA(cudaMemcpy(out.data(), s.out, count * 2, cudaMemcpyDeviceToHost));
    for (size_t b = 1; b < c.spans.size(); b += 2) s.ctx[b] = (s.ctx[b] + 2) / 3;
    CHECK_CUDA(cudaMemcpy(s.d_ctx, s.ctx.data(), s.ctx.size() * 4, cudaMemcpyHostToDevice));
  }
  bool same = true;
  for (size_t b = 0; b < c.spans.size(); b += 2) {
    const int64_t row = int64_t{c.heads} * c.dim;
    same &=
        std::equal(&outs[0][s.cu[b] * row], &outs[0][s.cu[b + 1] * row], &outs[1][s.cu[b] * row]);
  }
  failures += !same, ++checks;
  if (!same) {
    std::printf("FAILED composition %s batch %zu\n", kv_format_info(c.format).name, c.spans.size());
  }
}

// Requests enough for every size of a team, short and long ones; dim 128, bfloat16.
void check_many(KvFormat format) {
  for (int batch : {format == KvFormat::kDense ? 36 : 70, 140}) {
    std::vector<Span> ones;
    for (int b = 0; b < batch; ++b) {
      const int length = b % 7 == 5 ? b * 37 % 1200 : b * 13 % 300;
      ones.push_back({length > 0 ? 1 : 0, length});
    }
    const int block = 16 << batch / 2 % 4;
    Case c{"many", ones, 32, 8, 128, block, -1, 3, format};
    check_fused<__nv_bfloat16>(c, 128, batch != 140);
    check_composition<__nv_bfloat16>(c);
    check<__nv_bfloat16>(c, "sm90", 6e-3);
    c.window = 100;
    check_fused<__nv_bfloat16>(c, 128, false);
    c.window = -1, c.heads = 80;
    check<__nv_bfloat16>(c, "sm90", 6e-3);
    for (size_t b = 0; b < ones.size(); b += 3) {
      c.spans[b].num_tokens = std::min(c.spans[b].context_len, 3);
    }
    c.heads = 32;
    check<__nv_bfloat16>(c, "sm90", 6e-3);
  }
}

// only: one format of the cache, and of dense ones nothing; null: everything.
void check_all(bool small, const KvFormat* only = nullptr) {
  const std::vector<Span> odd = {{0, 0},  {1, 1},   {1, 15},  {1, 16},  {1, 17}, {1, 63},  {1, 64},
                                 {1, 65}, {1, 127}, {1, 129}, {1, 300}, {0, 0},  {1, 1000}};
  const std::vector<Span> prompts = {{1, 1},   {5, 5},     {63, 63},   {64, 64},
                                     {65, 65}, {129, 129}, {200, 333}, {17, 500}};
  const std::vector<Span> mixed = {{1, 700}, {300, 300}, {1, 64}, {3, 90},
                                   {0, 0},   {77, 1200}, {1, 33}};
  const std::vector<Span> longer = {{1, 4096}, {1, 32768}, {1, 4097}, {130, 4096}};
  const std::vector<Span> very_long = {{1, 131072}, {4, 100001}};
  struct Heads {
    int heads, kv_heads;
  };
  std::vector<Case> cases;
  for (int dim : {64, 80, 96, 128, 256}) {
    int which = 0;
    for (Heads h : {Heads{4, 4}, Heads{8, 2}, Heads{14, 2}, Heads{16, 2}, Heads{20, 1}}) {
      const int block = 16 << which++ % 4;
      cases.push_back({"odd decode", odd, h.heads, h.kv_heads, dim, block, -1, 3});
      cases.push_back({"prompts", prompts, h.heads, h.kv_heads, dim, block});
      cases.push_back({"mixed", mixed, h.heads, h.kv_heads, dim, block, -1, 2});
      if (small) break;
      cases.push_back({"mixed, window", mixed, h.heads, h.kv_heads, dim, block, 100});
    }
    if (!small) cases.push_back({"4k and 32k", longer, 8, 2, dim, 64});
    if (!small) cases.push_back({"4k and 32k, window", longer, 8, 2, dim, 32, 1000});
  }
  if (!small) cases.push_back({"128k", very_long, 8, 2, 128, 64});
  if (only != nullptr) cases.clear();
  for (const Case& c : cases) {
    for (const char* kernel : {"sm90", "sm80"}) {
      check<__nv_bfloat16>(c, kernel, 6e-3);
      if (!small || c.dim == 128) check<__half>(c, kernel, 1e-3);
    }
    if (c.heads == 8 && c.name != "128k") check<float>(c, "generic", 1e-5);
  }
  for (int window : {-1, 20}) {
    if (only != nullptr) break;
    Case c{"trees", {{7, 7}, {1, 40}, {32, 300}, {0, 0}, {12, 1200}, {300, 400}},
           8,       2,
           128,     32,
           window,  2};
    c.tree = true;
    check<__nv_bfloat16>(c, "sm90", 6e-3);
    check<float>(c, "generic", 1e-5);
    c.dim = 80, c.format = KvFormat::kInt8Dynamic;
    c.spans.pop_back();
    check<__half>(c, "sm90", 2e-3);
  }
  std::vector<Span> ones;  // of one token, for the fused kernel
  for (const Span& s : odd) ones.push_back({s.num_tokens, s.context_len});
  ones.push_back({1, 5000});
  const std::vector<Span> drafts = {{4, 4}, {1, 77}, {5, 200}, {3, 1000}};
  const KvFormat formats[] = {KvFormat::kDense, KvFormat::kInt8Static, KvFormat::kInt8Dynamic,
                              KvFormat::kFp8, KvFormat::kInt4};
  for (KvFormat format : formats) {
    if (only != nullptr && format != *only) continue;
    for (int dim : {64, 80, 96, 128, 256}) {
      int which = 0;
      for (Heads h : {Heads{4, 4}, Heads{8, 2}, Heads{14, 2}, Heads{16, 2}, Heads{20, 1}}) {
        const int block = 16 << which++ % 4;
        if (format != KvFormat::kDense && h.heads != 8 && h.heads != 14 && h.heads != 20) continue;
        for (int window : {-1, 100}) {
          Case c{"ones", ones, h.heads, h.kv_heads, dim, block, window, 3, format};
          check_fused<__nv_bfloat16>(c, dim, false);
          check_fused<__half>(c, dim == 128 ? 64 : dim, true);
          if (format == KvFormat::kDense) continue;
          check<__nv_bfloat16>(c, "sm90", 6e-3);
          check<__half>(c, "sm90", 2e-3);
          c.name = "drafts", c.spans = drafts;
          check<__nv_bfloat16>(c, "sm90", 6e-3);
          c.name = "mixed", c.spans = mixed;
          check<__nv_bfloat16>(c, "generic", 6e-3);
          check<__nv_bfloat16>(c, "sm90", 8e-3);
          check<__half>(c, "sm90", 2e-3);
          c.name = "prompts", c.spans = prompts;
          check<__nv_bfloat16>(c, "sm90", 8e-3);
          if (small || h.heads != 8) break;
        }
        if (small) break;
      }
      if (small || format == KvFormat::kDense) continue;
      Case c{"4k and 32k", {{1, 4096}, {1, 32768}, {1, 4097}}, 8, 2, dim, 64, -1, 0, format};
      check<__nv_bfloat16>(c, "sm90", 6e-3);
    }
    if (!small) check_many(format);
  }
  std::printf("%d checks, %d failures\n", checks, failures);
}

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
  Step(const std::vector<int>& lengths, int block, KvFormat format, int layers)
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
    s.limits.max_context_len = std::max<int64_t>(s.limits.max_context_len, 8192);  // as in graphs
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
void bench_chain(int batch, int length, int megabytes, KvFormat format = KvFormat::kDense) {
  constexpr int kLayers = 16;
  const Step<__nv_bfloat16> step(std::vector<int>(batch, length), 64, format, kLayers);
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
void bench_step(const char* name, const std::vector<int>& lengths, int block, KvFormat format) {
  const double once = Step<__nv_bfloat16>(lengths, block, format, 1).bytes();
  const int layers = std::clamp(static_cast<int>(400e6 / once), 1, 32);
  const Step<__nv_bfloat16> step(lengths, block, format, layers);
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

void bench_step(int batch, int length, int block, KvFormat format) {
  bench_step(std::to_string(length).c_str(), std::vector<int>(batch, length), block, format);
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

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "check";
  cudaDeviceProp device;
  CHECK_CUDA(cudaGetDeviceProperties(&device, 0));
  std::printf("%s, %d multiprocessors\n", device.name, device.multiProcessorCount);
  const std::string what = argc > 2 ? argv[2] : "all";
  verbose = mode == "verbose", decode_only = mode == "decode";
  if (mode == "bench") {
    if (what == "all" || what == "latency") bench_latency();
    if (what == "all" || what == "short") bench_short(argc > 3);
    if (what == "all" || what == "decode") bench_bandwidth();
    if (what == "all" || what == "prefill") bench_prefills("sm90");
    if (what == "all") bench_prefills("sm80");
  } else if (mode == "many") {
    KvFormat format;
    if (parse_kv_format(what.c_str(), &format)) check_many(format);
    std::printf("%d checks, %d failures\n", checks, failures);
  } else if (mode == "profile") {  // one shape, for ncu
    if (what == "prefill") bench_prefill("sm90", 32, 8, 128, 16, 512, 64);
    KvFormat format;
    if (argc > 4 && parse_kv_format(what.c_str(), &format)) {  // FORMAT BATCH LENGTH
      const std::vector<int> lengths(std::atoi(argv[3]), std::atoi(argv[4]));
      const Step<__nv_bfloat16> step(lengths, 64, format, 4);
      for (int i = 0; i < 4; ++i) step.run(i, nullptr, true);
      CHECK_CUDA(cudaDeviceSynchronize());
      return 0;
    }
    if (parse_kv_format(what.c_str(), &format)) bench_decode(32, 8, 128, 64, 4096, 64, format);
  } else {
    KvFormat only;
    check_all(mode == "small", parse_kv_format(what.c_str(), &only) ? &only : nullptr);
  }
  return failures != 0;
}
