// Attention over the paged cache. check: paged_attention() over odd shapes against a float64
// reference of sampled rows, and rope_and_paged_attention() against its two parts; unused cache
// slots and the output hold NaN beforehand. time: in CUDA graphs, alone and in a chain of products
// as a decode step has it.
//
//   attention check spans|trees|FORMAT [small]
//   attention time latency | short [brief] | decode | prefill [KERNEL] | long [steps|prompts]
// spans: dense caches, by each kernel that this GPU has. FORMAT: dense, int8_static, int8_dynamic,
// fp8 or int4, through the kernels that the GPU chooses. small: few shapes, for compute-sanitizer.
#include "paged_batch.cuh"
#include "regatta/gemm.h"

using namespace regatta;
using namespace regatta::native;

namespace {

// Codes: any, but for e4m3's NaN.
static __global__ void fill_codes(uint8_t* p, int64_t n, uint64_t seed, bool e4m3) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    const uint8_t code = mix(seed * 0x9e3779b97f4a7c15ull + i);
    p[i] = e4m3 ? (code & 0x80) | (code & 0x7f) % 0x48 : code == 0 ? 1 : code;
  }
}

// Scales such that elements are about 1, different from row to row; minima that suit int4.
static __global__ void fill_scales(float* p, int64_t n, uint64_t seed, int floats, float unit) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    const float x = mix(seed * 0x9e3779b97f4a7c15ull + i) / 4294967296.f;
    p[i] = floats == 2 && i % 2 == 1 ? -1.7f + x * 0.4f : unit * (0.5f + x);
  }
}

struct Case {
  std::string name;
  std::vector<Span> spans;
  int heads, kv_heads, dim, block_size;
  int window = -1;
  int padding = 0;  // tokens behind the last span
  KvFormat format = KvFormat::kDense;
  bool tree = false;  // spans of up to 32 tokens are random trees
  float softcap = 0.f;
  bool slopes = false;       // each head has one
  bool sinks = false;        // alike: far below all scores, as high as their sum, above, far above
  int64_t most_context = 0;  // of the limits

  std::string text() const {
    return native::format("%s %s D %d heads %d/%d block %d window %d cap %.0f%s%s%s", name.c_str(),
                          kv_format_info(format).name, dim, heads, kv_heads, block_size, window,
                          softcap, slopes ? " slopes" : "", sinks ? " sinks" : "",
                          tree ? " trees" : "");
  }
};

// A batch as paged_attention() takes it: random queries and a random cache.
template <class T>
struct Setup : PagedBatch {
  Case c;
  KvFormatInfo info;
  int layers;
  int64_t row_bytes, cache_rows, cache_bytes, scale_count;  // of a layer's keys
  std::vector<float> slopes, sinks;                         // [heads]
  Buffer<T> q, out;
  Buffer<uint8_t> k, v;
  Buffer<float> k_scale, v_scale, d_slopes, d_sinks;
  std::unique_ptr<Buffer<uint8_t>> workspace;

  explicit Setup(const Case& which, int num_layers = 1)
      : PagedBatch(which.spans, which.block_size, which.padding, which.most_context),
        c(which),
        info(kv_format_info(c.format)),
        layers(num_layers),
        row_bytes(kv_row_bytes(c.format, c.dim, sizeof(T))),
        cache_rows(num_blocks * c.kv_heads * c.block_size),
        cache_bytes(cache_rows * row_bytes),
        scale_count(info.scale_floats * (info.token_scales ? cache_rows : c.kv_heads)),
        slopes(c.heads),
        sinks(c.heads),
        q(std::max<int64_t>(num_tokens, 1) * c.heads * c.dim),
        out(q.size),
        k(layers * cache_bytes),
        v(layers * cache_bytes),
        k_scale(layers * scale_count + 4),
        v_scale(layers * scale_count + 4),
        d_slopes(c.heads),
        d_sinks(c.heads) {
    for (int h = 0; h < c.heads; ++h) {
      slopes[h] = std::exp2(-8.f * (h + 1) / c.heads);
      const float high = std::fmod(0.5f + 4.1f * h, 11.f);  // as the sum of 1 to some 10000 keys
      sinks[h] = h % 8 == 3 ? -1e4f : h % 8 == 5 ? 1e4f : h % 8 == 6 ? high + 30.f : high;
    }
    d_slopes.put(slopes), d_sinks.put(sinks);
    fill_random(q.data, q.size, 1);
    const float unit = c.format == KvFormat::kInt4  ? 0.2f
                       : c.format == KvFormat::kFp8 ? 1.f
                                                    : 0.015f;
    for (const bool keys : {true, false}) {
      uint8_t* const cache = keys ? k.data : v.data;
      float* const scales = keys ? k_scale.data : v_scale.data;
      if (c.format == KvFormat::kDense) {
        fill_random(reinterpret_cast<T*>(cache), k.size / sizeof(T), keys ? 2 : 3);
      } else {
        fill_codes<<<1024, 256>>>(cache, k.size, keys ? 2 : 3, c.format == KvFormat::kFp8);
      }
      fill_scales<<<1024, 256>>>(scales, layers * scale_count, keys ? 4 : 5, info.scale_floats,
                                 unit);
      for (int layer = 0; layer < layers; ++layer) {
        spoil_unused(cache + layer * cache_bytes, row_bytes);
        if (!info.token_scales) continue;
        spoil_unused(reinterpret_cast<uint8_t*>(scales + layer * scale_count),
                     info.scale_floats * 4);
      }
    }
    workspace =
        std::make_unique<Buffer<uint8_t>>(cuda::paged_attention_workspace_bytes(params(0), limits));
    CHECK_CUDA(cudaMemset(workspace->data, 0, workspace->size));
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  void spoil_unused(uint8_t* rows, int64_t bytes) const {
    poison<<<1024, 256>>>(rows, d_used.data, cache_rows, c.kv_heads, c.block_size,
                          static_cast<int>(bytes));
  }
  // Of the keys and values of all tokens, with their scales, of a layer.
  double read_bytes() const {
    const double row = row_bytes + (info.token_scales ? 4.0 * info.scale_floats : 0.0);
    return 2 * c.kv_heads * row * std::accumulate(ctx.begin(), ctx.end(), 0.);
  }
  PagedAttentionParams params(int layer) const {
    PagedAttentionParams p;
    p.dtype = cuda::Traits<T>::dtype;
    p.q = q.data;
    p.cache.key = k.data + layer * cache_bytes;
    p.cache.value = v.data + layer * cache_bytes;
    p.cache.format = c.format;
    p.cache.key_scale = k_scale.data + layer * scale_count;
    p.cache.value_scale = v_scale.data + layer * scale_count;
    p.cache.num_blocks = num_blocks;
    p.cache.block_size = c.block_size;
    p.batch = view(c.tree);
    p.out = out.data;
    p.num_heads = c.heads;
    p.num_kv_heads = c.kv_heads;
    p.head_dim = c.dim;
    p.softmax_scale = 1.f / std::sqrt(static_cast<float>(c.dim));
    p.window = c.window;
    p.softcap = c.softcap;
    p.slopes = c.slopes ? d_slopes.data : nullptr;
    p.sinks = c.sinks ? d_sinks.data : nullptr;
    return p;
  }
  void run(int layer, cudaStream_t stream, bool pdl) const {
    CHECK_STATUS(cuda::paged_attention(params(layer), limits, workspace->data, workspace->size,
                                       {stream, pdl}));
  }
};

// What the launch ahead of attention does to a head.
struct Fused {
  int rotary;  // 0: no rotation
  bool norms = false, interleaved = false, plus_one = false, query_table = false;
};

// Rotary embedding, cache write and attention of spans of one token, in one launch or two.
template <class T>
struct Step {
  Setup<T> s;
  Fused f;
  int64_t num_positions;
  Buffer<T> qkv, q, q_norm, k_norm;
  Buffer<float> angles, query_angles;
  Buffer<int32_t> positions, slots;

  // skips: every fifth span is written nowhere.
  Step(const Case& c, const Fused& fused, int layers, bool skips)
      : s(c, layers),
        f(fused),
        num_positions(s.limits.max_context_len + 1),
        qkv(s.num_tokens * (c.heads + 2 * c.kv_heads) * c.dim),
        q(s.num_tokens * c.heads * c.dim),
        q_norm(c.dim),
        k_norm(c.dim),
        angles(num_positions * f.rotary + 1),
        query_angles(num_positions * f.rotary + 1),
        positions(s.num_tokens),
        slots(s.num_tokens) {
    std::vector<int32_t> at(s.num_tokens, 0), slot(s.num_tokens, -1);
    for (size_t b = 0; b < c.spans.size(); ++b) {
      const int p = c.spans[b].context_len - 1, t = s.cu[b];
      if (c.spans[b].num_tokens == 0) continue;
      at[t] = std::max(p, 0);
      if (p >= 0 && !(skips && b % 5 == 3)) slot[t] = s.slot(b, p);
    }
    positions.put(at), slots.put(slot);
    fill_random(qkv.data, qkv.size, 11);
    fill_random(q_norm.data, c.dim, 12);
    fill_random(k_norm.data, c.dim, 13);
    fill_random(angles.data, angles.size, 14);
    fill_random(query_angles.data, angles.size, 15);
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  void run(int layer, cudaStream_t stream, bool together, bool pdl) const {
    PagedAttentionParams attention = s.params(layer);
    attention.q = q.data;
    RopeAndCacheWriteParams rope;
    rope.dtype = attention.dtype;
    rope.qkv = qkv.data, rope.positions = positions.data, rope.slot_mapping = slots.data;
    rope.rope_cache = f.rotary > 0 ? angles.data : nullptr;
    rope.query_rope_cache = f.query_table ? query_angles.data : nullptr;
    rope.q_norm = f.norms ? q_norm.data : nullptr, rope.k_norm = f.norms ? k_norm.data : nullptr;
    rope.cache = attention.cache;
    rope.q_out = q.data;
    rope.num_tokens = s.num_tokens, rope.num_heads = s.c.heads, rope.num_kv_heads = s.c.kv_heads;
    rope.head_dim = s.c.dim, rope.rotary_dim = f.rotary;
    rope.num_positions = f.rotary > 0 ? num_positions : 0;
    rope.epsilon = 1e-6f, rope.interleaved = f.interleaved, rope.plus_one = f.plus_one;
    if (together) {
      CHECK_STATUS(cuda::rope_and_paged_attention(rope, attention, s.limits, s.workspace->data,
                                                  s.workspace->size, {stream, pdl}));
    } else {
      CHECK_STATUS(cuda::rope_and_cache_write(rope, {stream, pdl}));
      CHECK_STATUS(cuda::paged_attention(attention, s.limits, s.workspace->data, s.workspace->size,
                                         {stream, pdl}));
    }
  }
};

void force_kernel(const char* kernel) {
  setenv("REGATTA_KERNEL", (std::string("paged_attention=") + kernel).c_str(), 1);
}

// ----------------------------------------------------------------------------------------- check

// Relative error over sampled rows; infinite when an output is NaN or padding is not 0.
template <class T>
double error_of(const Setup<T>& s, int64_t budget) {
  const Case& c = s.c;
  const int64_t n = s.num_tokens * c.heads * c.dim;
  const std::vector<T> q = s.q.host(), out = s.out.host();
  const std::vector<uint8_t> k = s.k.host(), v = s.v.host();
  const std::vector<float> k_scale = s.k_scale.host(), v_scale = s.v_scale.host();
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
      const int64_t slot = s.slot(jobs[j].seq, p), size = c.block_size;
      return (slot / size * c.kv_heads + kv) * size + slot % size;
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
      if (c.softcap > 0) logits[p] = c.softcap * std::tanh(logits[p] / c.softcap);
      if (c.slopes) logits[p] += double(s.slopes[jobs[j].head]) * (p - depth);
      top = std::max(top, logits[p]);
    }
    std::vector<double> expected(c.dim, 0.0);
    if (c.sinks) sum = std::exp(double(s.sinks[jobs[j].head]) - top);  // may be infinite
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

bool is_hopper() { return architecture() == 90; }

template <class T>
void check(const Case& c, const char* kernel, double tolerance) {
  if (!is_hopper() && std::string(kernel) == "sm90") return;
  force_kernel(kernel);
  Setup<T> s(c);
  s.run(0, nullptr, false);
  CHECK_CUDA(cudaDeviceSynchronize());
  const double error = error_of(s, 10'000'000);
  // Again, from a graph with programmatic dependent launches: same bits.
  const std::vector<T> once = s.out.host();
  s.out.spoil();
  run_graph([&](cudaStream_t stream) {
    for (int i = 0; i < 3; ++i) s.run(0, stream, true);
  });
  const bool same = same_bits(once, s.out.host());
  count_case(error < tolerance && same,
             format("%s %s %s: %.1e%s", kernel, dtype_name(cuda::Traits<T>::dtype),
                    c.text().c_str(), error, same ? "" : " (replay differs)"));
}

// rope_and_paged_attention() against rope_and_cache_write() and paged_attention(): what they leave
// in the caches, bit for bit, and their outputs. Spans of one token.
template <class T>
void check_fused(const Case& c, const Fused& f) {
  unsetenv("REGATTA_KERNEL");
  const Step<T> step(c, f, 1, true);
  const Setup<T>& s = step.s;
  struct Result {
    std::vector<uint8_t> k, v;
    std::vector<float> k_scale, v_scale;
    std::vector<T> out;
  };
  const auto state = [&] {
    CHECK_CUDA(cudaDeviceSynchronize());
    return Result{s.k.host(), s.v.host(), s.k_scale.host(), s.v_scale.host(), s.out.host()};
  };
  const Result before = state();
  const auto collect = [&](bool together) {
    s.k.put(before.k), s.v.put(before.v);
    s.k_scale.put(before.k_scale), s.v_scale.put(before.v_scale);
    s.out.spoil();
    step.run(0, nullptr, together, together);
    return state();
  };
  const Result apart = collect(false), together = collect(true);
  const std::vector<int32_t> slots = step.slots.host();
  Error error;
  for (int64_t i = 0; i < s.num_tokens * c.heads * c.dim; ++i) {
    // Where the new token is written nowhere, only the fused kernel sees it.
    const int64_t t = i / (int64_t{c.heads} * c.dim);
    if (t < s.cu.back() && slots[t] < 0) continue;
    error.add(host_float(together.out[i]), host_float(apart.out[i]));
  }
  const bool same = apart.k == together.k && apart.v == together.v &&
                    same_bits(apart.k_scale, together.k_scale) &&
                    same_bits(apart.v_scale, together.v_scale);
  count_case(
      same && error.value() < 6e-3,
      format("fused %s %s rotary %d%s%s%s%s: %.1e%s", dtype_name(cuda::Traits<T>::dtype),
             c.text().c_str(), f.rotary, f.norms ? " norms" : "",
             f.interleaved ? " interleaved" : "", f.plus_one ? " plus one" : "",
             f.query_table ? " own queries" : "", error.value(), same ? "" : " (caches differ)"));
}

// A request's result does not depend on the lengths of the others: same bits.
template <class T>
void check_composition(const Case& c) {
  unsetenv("REGATTA_KERNEL");
  Setup<T> s(c);
  std::vector<T> outs[2];
  for (std::vector<T>& out : outs) {
    s.run(0, nullptr, false);
    CHECK_CUDA(cudaDeviceSynchronize());
    out = s.out.host();
    for (size_t b = 1; b < c.spans.size(); b += 2) s.ctx[b] = (s.ctx[b] + 2) / 3;
    s.d_ctx.put(s.ctx);
  }
  bool same = true;
  const int64_t row = int64_t{c.heads} * c.dim;
  for (size_t b = 0; b < c.spans.size(); b += 2) {
    same &= std::memcmp(&outs[0][s.cu[b] * row], &outs[1][s.cu[b] * row],
                        (s.cu[b + 1] - s.cu[b]) * row * sizeof(T)) == 0;
  }
  count_case(same, "composition " + c.text());
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
    check_fused<__nv_bfloat16>(c, {128, batch != 140});
    check_composition<__nv_bfloat16>(c);
    check<__nv_bfloat16>(c, "sm90", 6e-3);
    c.window = 100;
    check_fused<__nv_bfloat16>(c, {128});
    check_fused<__nv_bfloat16>(c, {64, true, true});
    c.window = -1, c.heads = 80;
    check<__nv_bfloat16>(c, "sm90", 6e-3);
    for (size_t b = 0; b < ones.size(); b += 3) {
      c.spans[b].num_tokens = std::min(c.spans[b].context_len, 3);
    }
    c.heads = 32;
    check<__nv_bfloat16>(c, "sm90", 6e-3);
  }
}

struct Heads {
  int heads, kv_heads;
};
constexpr Heads kHeads[] = {{4, 4}, {8, 2}, {14, 2}, {16, 2}, {20, 1}};
constexpr int kHeadDims[] = {64, 80, 96, 128, 256};

std::vector<Span> odd_spans() {
  return {{0, 0},  {1, 1},   {1, 15},  {1, 16},  {1, 17}, {1, 63},  {1, 64},
          {1, 65}, {1, 127}, {1, 129}, {1, 300}, {0, 0},  {1, 1000}};
}

std::vector<Span> prompt_spans() {
  return {{1, 1}, {5, 5}, {63, 63}, {64, 64}, {65, 65}, {129, 129}, {200, 333}, {17, 500}};
}

std::vector<Span> mixed_spans() {
  return {{1, 700}, {300, 300}, {1, 64}, {3, 90}, {0, 0}, {77, 1200}, {1, 33}};
}

// What scores may become: the same case with a soft cap, with slopes, and with both and a window.
std::vector<Case> shaped(Case c) {
  std::vector<Case> cases(3, c);
  cases[0].softcap = 2.f;
  cases[1].slopes = true;
  cases[2].softcap = 3.f, cases[2].slopes = true, cases[2].window = 100;
  return cases;
}

// Sinks, wherever rows may end: in a warp, a team, a cluster, blocks that meet in memory, splits,
// and pieces of a shared item.
void check_sinks(KvFormat format, bool small) {
  const bool dense = format == KvFormat::kDense;
  std::vector<Case> cases;
  const auto add = [&](const char* name, const std::vector<Span>& spans, int heads, int kv_heads,
                       int dim, int block, int window = -1) {
    Case c{name, spans, heads, kv_heads, dim, block, window, 2, format};
    c.sinks = true;
    cases.push_back(c);
  };
  std::vector<Span> ones = odd_spans(), many;
  ones.push_back({1, 5000});
  for (int b = 0; b < 140; ++b) many.push_back({1, 1 + (b % 7 == 5 ? b * 37 % 1200 : b * 2)});
  for (int dim : kHeadDims) {
    add("odd decode", ones, 8, 2, dim, 16);
    add("drafts", {{4, 4}, {1, 77}, {5, 200}, {3, 1000}}, 14, 2, dim, 32);
    add("prompts", prompt_spans(), 14, 2, dim, 64);
    add("mixed, window", mixed_spans(), 8, 8, dim, 128, 100);
    if (small) continue;
    add("one", {{1, 9000}}, 8, 1, dim, 64);
    add("one prompt", {{300, 9000}}, 8, 2, dim, 64);
    add("4k and 32k", {{1, 4096}, {1, 32768}, {1, 4097}, {130, 4096}}, 8, 2, dim, 64);
    add("behind", {{1, 7000}, {33, 20000}, {64, 64}, {500, 5000}}, 8, 2, dim, 64);
    if (dim > 64) continue;
    add("one of 40k", {{1, 40000}}, 64, 8, dim, 64);  // gpt-oss's heads
    add("decode, window", std::vector<Span>(24, Span{1, 1500}), 64, 8, dim, 16, 128);
    add("many", many, 64, 8, dim, 64);
  }
  for (const Case& c : cases) {
    check<__nv_bfloat16>(c, "sm90", dense ? 6e-3 : 8e-3);
    check<__half>(c, "sm90", dense ? 1e-3 : 2e-3);
    if (dense) check<__nv_bfloat16>(c, "sm80", 6e-3);
    if (dense) check<__half>(c, "sm80", 1e-3);
    if (c.heads == 8 && dense) check<float>(c, "generic", 1e-5);
    if (c.heads == 8 && !dense) check<__nv_bfloat16>(c, "generic", 6e-3);
    const bool of_ones = std::all_of(c.spans.begin(), c.spans.end(),
                                     [](const Span& span) { return span.num_tokens <= 1; });
    if (of_ones) check_fused<__nv_bfloat16>(c, {c.dim, true});
    if (c.name == "many" && is_hopper()) check_composition<__nv_bfloat16>(c);
    if (c.dim > 64 || c.heads > 14) continue;
    for (const Case& each : shaped(c)) {
      check<__nv_bfloat16>(each, "sm90", dense ? 6e-3 : 8e-3);
      if (dense) check<__half>(each, "sm80", 1e-3);
    }
  }
}

// Dense caches, each kernel in turn. small: for compute-sanitizer.
void check_spans(bool small) {
  const std::vector<Span> longer = {{1, 4096}, {1, 32768}, {1, 4097}, {130, 4096}};
  const std::vector<Span> very_long = {{1, 131072}, {4, 100001}};
  // Few and many items that blocks share, beside some that are too short for it.
  const std::vector<std::vector<Span>> behind = {
      {{300, 9000}}, {{1, 7000}, {33, 20000}, {64, 64}, {500, 5000}}, {{2300, 8000}, {70, 70}}};
  std::vector<Case> cases;
  for (int dim : kHeadDims) {
    int which = 0;
    for (Heads h : kHeads) {
      const int block = 16 << which++ % 4;
      cases.push_back({"odd decode", odd_spans(), h.heads, h.kv_heads, dim, block, -1, 3});
      cases.push_back({"prompts", prompt_spans(), h.heads, h.kv_heads, dim, block});
      cases.push_back({"mixed", mixed_spans(), h.heads, h.kv_heads, dim, block, -1, 2});
      if (small) break;
      cases.push_back({"mixed, window", mixed_spans(), h.heads, h.kv_heads, dim, block, 100});
    }
    for (const std::vector<Span>& spans : {odd_spans(), mixed_spans(), prompt_spans()}) {
      for (const Case& c : shaped({"shaped", spans, 14, 2, dim, 32, -1, 2})) cases.push_back(c);
      if (small) break;
    }
    if (!small && dim >= 128) {
      for (const Case& c : shaped({"shaped", mixed_spans(), 8, 8, dim, 64, -1, 2})) {
        cases.push_back(c);
      }
      for (const Case& c : shaped({"shaped, 4k and 32k", longer, 8, 2, dim, 64})) {
        cases.push_back(c);
      }
    }
    if (!small) cases.push_back({"4k and 32k", longer, 8, 2, dim, 64});
    if (!small) cases.push_back({"4k and 32k, window", longer, 8, 2, dim, 32, 1000});
    for (const std::vector<Span>& spans : behind) {
      if (small) break;
      cases.push_back({"behind", spans, 8, 2, dim, 64, -1, 2});
      cases.push_back({"behind, window", spans, 14, 2, dim, 16, 4500});
      if (dim == 128) cases.push_back(shaped({"behind, shaped", spans, 8, 2, dim, 64})[0]);
    }
  }
  if (!small) cases.push_back({"128k", very_long, 8, 2, 128, 64});
  for (const Case& c : cases) {
    for (const char* kernel : {"sm90", "sm80"}) {
      check<__nv_bfloat16>(c, kernel, 6e-3);
      if (!small || c.dim == 128) check<__half>(c, kernel, 1e-3);
    }
    if (c.heads == 8 && c.name != "128k") check<float>(c, "generic", 1e-5);
  }
  check_sinks(KvFormat::kDense, small);
}

void check_trees() {
  for (int window : {-1, 20}) {
    Case c{"trees", {{7, 7}, {1, 40}, {32, 300}, {0, 0}, {12, 1200}, {300, 400}},
           8,       2,
           128,     32,
           window,  2};
    c.tree = true;
    check<__nv_bfloat16>(c, "sm90", 6e-3);
    check<float>(c, "generic", 1e-5);
    std::vector<Case> more = shaped(c);
    more.push_back(c);
    more.back().sinks = true;
    for (const Case& each : more) {
      check<__nv_bfloat16>(each, "sm90", 6e-3);
      check<float>(each, "generic", 1e-5);
    }
    c.dim = 80, c.format = KvFormat::kInt8Dynamic;
    c.spans.pop_back();
    check<__half>(c, "sm90", 2e-3);
    for (const Case& each : shaped(c)) check<__half>(each, "sm90", 2e-3);
  }
}

// Caches in one format, and the fused launch.
void check_format(KvFormat format, bool small) {
  std::vector<Span> ones = odd_spans();  // of one token, for the fused kernel
  ones.push_back({1, 5000});
  const std::vector<Span> drafts = {{4, 4}, {1, 77}, {5, 200}, {3, 1000}};
  for (int dim : kHeadDims) {
    int which = 0;
    for (Heads h : kHeads) {
      const int block = 16 << which++ % 4;
      if (format != KvFormat::kDense && h.heads != 8 && h.heads != 14 && h.heads != 20) continue;
      for (int window : {-1, 100}) {
        Case c{"ones", ones, h.heads, h.kv_heads, dim, block, window, 3, format};
        check_fused<__nv_bfloat16>(c, {dim});
        check_fused<__half>(c, {dim == 128 ? 64 : dim, true});
        if (h.heads == 14) {
          for (const Case& each : shaped(c)) check_fused<__half>(each, {dim, true});
          check_fused<__nv_bfloat16>(c, {0});
          check_fused<__half>(c, {0, true, false, true});
          check_fused<__half>(c, {dim, true, true});
          check_fused<__nv_bfloat16>(c, {32, false, true});
          check_fused<__half>(c, {dim, true, false, true});
          check_fused<__half>(c, {dim, true, true, true, true});
        }
        if (format == KvFormat::kDense) continue;
        check<__nv_bfloat16>(c, "sm90", 6e-3);
        check<__half>(c, "sm90", 2e-3);
        for (const std::vector<Span>& spans : {ones, drafts, mixed_spans(), prompt_spans()}) {
          if (window != -1 || h.heads != 8) break;
          Case base = c;
          base.name = "shaped", base.spans = spans;
          for (const Case& each : shaped(base)) {
            check<__nv_bfloat16>(each, "sm90", 8e-3);
            check<__half>(each, "sm90", 2e-3);
            check<__nv_bfloat16>(each, "generic", 6e-3);
          }
          if (small) break;
        }
        c.name = "drafts", c.spans = drafts;
        check<__nv_bfloat16>(c, "sm90", 6e-3);
        c.name = "mixed", c.spans = mixed_spans();
        check<__nv_bfloat16>(c, "generic", 6e-3);
        check<__nv_bfloat16>(c, "sm90", 8e-3);
        check<__half>(c, "sm90", 2e-3);
        c.name = "prompts", c.spans = prompt_spans();
        check<__nv_bfloat16>(c, "sm90", 8e-3);
        if (small || h.heads != 8) break;
      }
      if (small) break;
    }
    if (small) continue;
    const std::vector<Span> far = {{1, 20000}, {1, 50}, {1, 3001}, {0, 0}};
    check_fused<__nv_bfloat16>({"far", far, 8, 2, dim, 64, -1, 1, format}, {dim});
    check_fused<__half>({"far, window", far, 16, 2, dim, 32, 2000, 0, format}, {dim, true});
    if (format == KvFormat::kDense) continue;
    Case c{"4k and 32k", {{1, 4096}, {1, 32768}, {1, 4097}}, 8, 2, dim, 64, -1, 0, format};
    check<__nv_bfloat16>(c, "sm90", 6e-3);
    c.name = "behind", c.spans = {{1, 7000}, {33, 20000}, {64, 64}, {500, 5000}};
    check<__nv_bfloat16>(c, "sm90", 8e-3);
  }
  if (format != KvFormat::kDense) check_sinks(format, small);
  if (!small && is_hopper()) check_many(format);
}

// ------------------------------------------------------------------------------------------ time

using Bf16 = __nv_bfloat16;
constexpr double kBandwidth = 4.67;  // an H200's pure read, TB/s
constexpr KvFormat kCoded[] = {KvFormat::kInt8Static, KvFormat::kInt8Dynamic, KvFormat::kFp8,
                               KvFormat::kInt4};

// Layers whose caches L2 does not hold.
int layers_for(double bytes) { return std::clamp(static_cast<int>(400e6 / bytes), 1, 32); }

// Microseconds per launch of all layers in turn, and the bytes that one reads.
double time_case(const Case& c, const char* kernel, double* bytes = nullptr) {
  force_kernel(kernel);
  const double read = Setup<Bf16>(c).read_bytes();
  const int layers = bytes != nullptr ? layers_for(read) : 1;
  const Setup<Bf16> s(c, layers);
  if (bytes != nullptr) *bytes = read;
  return call_us(std::max(layers, 4), 10,
                 [&](int i, cudaStream_t stream) { s.run(i % layers, stream, true); });
}

void print_read(const Case& c, const char* what, double us, double bytes) {
  std::printf("%s, batch %3zu x %6s: %8.2f us %5.2f TB/s (%.0f %% of %.2f)\n", c.text().c_str(),
              c.spans.size(), what, us, bytes / us / 1e6, bytes / us / 1e4 / kBandwidth,
              kBandwidth);
}

void time_prefill(const char* kernel, int heads, int kv_heads, int dim, int batch, int length,
                  int block, KvFormat format = KvFormat::kDense) {
  const Case c = Case{
      "prefill", std::vector<Span>(batch, Span{length, length}), heads, kv_heads, dim, block, -1, 0,
      format};
  const double us = time_case(c, kernel);
  const double flops = 2.0 * batch * heads * dim * double(length) * length;  // half of 4 D n^2
  std::printf("%s, %s %2d x %5d: %9.1f us %6.1f TFLOP/s (%.0f %% of 601)\n", c.text().c_str(),
              kernel, batch, length, us, flops / us / 1e6, flops / us / 1e6 / 6.01);
}

void time_decode(int heads, int kv_heads, int dim, int batch, int length, int block,
                 KvFormat format = KvFormat::kDense) {
  const Case c =
      Case{"decode", std::vector<Span>(batch, Span{1, length}), heads, kv_heads, dim, block, -1, 0,
           format};
  double bytes;
  const double us = time_case(c, "sm90", &bytes);
  print_read(c, std::to_string(length).c_str(), us, bytes);
}

// A layer's decode step of one token per request, in graphs for contexts up to most_context.
Step<Bf16> decode_step(const std::vector<int>& lengths, int block, KvFormat format, int layers,
                       int64_t most_context) {
  unsetenv("REGATTA_KERNEL");
  Case c = Case{"step", {}, 32, 8, 128, block, -1, 0, format};
  for (int length : lengths) c.spans.push_back({1, length});
  c.most_context = most_context;
  return Step<Bf16>(c, {128}, layers, false);
}

// What rotary embedding, cache write and attention add to a chain of products of one row that read
// 50 MB each, as a decode step has them.
void time_in_chain(int batch, int length, KvFormat format = KvFormat::kDense,
                   int64_t most_context = 8192) {
  constexpr int kLayers = 16;
  constexpr int64_t kIn = 4096, kOut = 6144;
  const Step<Bf16> step =
      decode_step(std::vector<int>(batch, length), 64, format, kLayers, most_context);
  const Buffer<Bf16> weights(kLayers * kIn * kOut), x(kIn), out(kOut);
  fill_random(weights.data, weights.size, 1);
  fill_random(x.data, x.size, 2);
  double times[3];
  for (int variant = 0; variant < 3; ++variant) {  // products alone, two launches, one launch
    times[variant] = call_us(kLayers, 11, [&](int layer, cudaStream_t stream) {
      GemmParams p;
      p.x = x.data;
      p.weight = weights.data + layer * kIn * kOut;
      p.out = out.data;
      p.num_rows = 1;
      p.in_features = kIn;
      p.out_features = kOut;
      CHECK_STATUS(cuda::gemm(p, {}, nullptr, stream));
      if (variant > 0) step.run(layer, stream, variant == 2, true);
    });
  }
  std::printf(
      "chain %s 50 MB + batch %3d x %5d: %7.2f us alone, +%6.2f in two launches, +%6.2f in one "
      "(%.2f at %.2f TB/s)\n",
      kv_format_info(format).name, batch, length, times[0], times[1] - times[0],
      times[2] - times[0], step.s.read_bytes() / kBandwidth / 1e6, kBandwidth);
}

// Layers of one launch each, in a graph: `name` says what `lengths` are.
void time_step(const char* name, const std::vector<int>& lengths, int block, KvFormat format,
               int64_t most_context = 8192) {
  const double bytes = decode_step(lengths, block, format, 1, most_context).s.read_bytes();
  const int layers = layers_for(bytes);
  const Step<Bf16> step = decode_step(lengths, block, format, layers, most_context);
  const double us = call_us(
      32, 10, [&](int i, cudaStream_t stream) { step.run(i % layers, stream, true, true); });
  print_read(step.s.c, name, us, bytes);
}

void time_step(int batch, int length, int block, KvFormat format, int64_t most_context = 8192) {
  time_step(std::to_string(length).c_str(), std::vector<int>(batch, length), block, format,
            most_context);
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

void time_short(const Words& words) {
  const bool brief = words.has("brief");
  for (KvFormat format : {KvFormat::kDense, KvFormat::kFp8, KvFormat::kInt8Static,
                          KvFormat::kInt8Dynamic, KvFormat::kInt4}) {
    const bool main_format = format == KvFormat::kDense || format == KvFormat::kFp8;
    for (int batch : {8, 32, 64, 128, 256}) {
      for (int length : {128, 192, 512, 1024, 4096}) {
        if (brief && (batch < 32 || length == 512 || (batch != 128 && length != 192))) continue;
        if (brief && !main_format && (batch != 128 || length == 128)) continue;
        if (int64_t{batch} * length <= 128 * 4096) time_step(batch, length, 64, format);
      }
    }
    if (!main_format) continue;
    time_step("100-280", mixed_lengths(128, 100, 280), 64, format);
    time_step("128-1k", mixed_lengths(128, 128, 1024), 64, format);
    time_step("1k-4k", mixed_lengths(96, 1024, 4096), 64, format);
    if (!brief) time_step("+ 4k", mixed_lengths(128, 100, 280, 4096), 64, format);
    for (int block : {16, 128}) {
      if (!brief) time_step(128, 192, block, format);
    }
    for (int length : {128, 192, 1024, 4096}) time_in_chain(1, length, format);
    for (int batch : {8, 32, 128}) {
      if (!brief) time_in_chain(batch, 192, format);
    }
  }
}

void time_latency(const Words&) {
  for (int length : {128, 1024, 4096}) time_in_chain(1, length);
  for (int batch : {8, 32}) time_in_chain(batch, 1024);
  time_in_chain(1, 1024, KvFormat::kInt8Static);
  for (KvFormat format :
       {KvFormat::kDense, KvFormat::kFp8, KvFormat::kInt8Dynamic, KvFormat::kInt4}) {
    time_in_chain(64, 4096, format);
  }
  for (int batch : {1, 2, 4, 8, 16, 32}) {
    for (int length : {128, 1024, 4096}) time_decode(32, 8, 128, batch, length, 64);
  }
  time_decode(32, 8, 128, 1, 32768, 64);
  time_decode(32, 8, 128, 1, 131072, 64);
  time_decode(14, 2, 64, 1, 1024, 64);
}

void time_bandwidth(const Words&) {
  for (int batch : {64, 128, 256}) {
    for (int length : {128, 1024, 4096}) {
      if (batch * length <= 128 * 4096) time_decode(32, 8, 128, batch, length, 64);
    }
  }
  for (KvFormat format : kCoded) {
    time_decode(32, 8, 128, 1, 1024, 64, format);
    time_decode(32, 8, 128, 1, 32768, 64, format);
    for (int batch : {16, 64, 128}) time_decode(32, 8, 128, batch, 4096, 64, format);
    time_decode(32, 8, 128, 128, 1024, 16, format);
    for (int dim : {64, 80, 96, 256}) time_decode(32, 8, dim, 64, 4096, 64, format);
  }
  time_decode(32, 8, 128, 64, 4096, 16);
  for (int dim : {64, 80, 96, 256}) time_decode(32, 8, dim, 64, 4096, 64);
  time_decode(32, 32, 128, 16, 4096, 64);
  time_decode(64, 4, 128, 64, 4096, 64);
  time_decode(14, 2, 64, 64, 1024, 64);
}

void time_prefills(const Words& words) {
  const char* const kernel = words.empty() ? "sm90" : words[0].c_str();
  for (int length : {1024, 4096, 8192}) time_prefill(kernel, 32, 8, 128, 1, length, 64);
  time_prefill(kernel, 32, 32, 128, 1, 8192, 64);
  time_prefill(kernel, 32, 8, 128, 16, 512, 64);
  for (int dim : {64, 80, 96}) time_prefill(kernel, 32, 8, dim, 1, 8192, 64);
  time_prefill(kernel, 16, 8, 256, 1, 8192, 64);
  time_prefill(kernel, 32, 8, 128, 1, 8192, 16);
  if (std::string(kernel) != "sm90") return;
  for (KvFormat format : kCoded) {
    for (int dim : {64, 80, 96, 128, 256}) time_prefill(kernel, 32, 8, dim, 1, 8192, 64, format);
    time_prefill(kernel, 32, 8, 128, 16, 512, 64, format);
  }
}

// Chunks of a prompt, as a server takes it.
void time_prompt(int length, KvFormat format = KvFormat::kDense) {
  constexpr int kChunk = 8192, kHeads = 32, kDim = 128;
  double all_us = 0, all_flops = 0;
  for (int begin = 0; begin < length; begin += kChunk) {
    const int tokens = std::min(kChunk, length - begin);
    const double us = time_case(
        Case{"prompt", {{tokens, begin + tokens}}, kHeads, 8, kDim, 64, -1, 0, format}, "sm90");
    const double flops = 4.0 * kHeads * kDim * tokens * (begin + tokens / 2.0);
    std::printf("prompt %-12s %4d at %6d: %9.1f us %6.1f TFLOP/s\n", kv_format_info(format).name,
                tokens, begin, us, flops / us / 1e6);
    all_us += us, all_flops += flops;
  }
  std::printf("prompt %-12s %d: %.1f ms for 32 layers, %.1f TFLOP/s\n", kv_format_info(format).name,
              length, 32e-3 * all_us, all_flops / all_us / 1e6);
}

void time_long_prompts() {
  time_prompt(32000);
  time_prompt(100000);
  for (Span span : {Span{200, 30000}, Span{1000, 12000}}) {
    const Case c{"prompt", {span}, 32, 8, 128, 64};
    std::printf("%d tokens behind %d: %.1f us\n", span.num_tokens,
                span.context_len - span.num_tokens, time_case(c, "sm90"));
  }
}

void time_long(const Words& words) {
  if (words.has("prompts")) return time_long_prompts();
  for (KvFormat format :
       {KvFormat::kDense, KvFormat::kInt8Static, KvFormat::kInt8Dynamic, KvFormat::kFp8}) {
    for (int batch : {1, 4, 8}) {
      for (int length : {1000, 4000, 32000}) time_step(batch, length, 64, format, 33000);
    }
    time_step(32, 8000, 64, format);
    time_step(1, 100000, 64, format);
  }
  for (int length : {1000, 4000, 16000, 32000}) {
    time_in_chain(8, length, KvFormat::kDense, 33000);
  }
  if (!words.has("steps")) time_long_prompts();
}

}  // namespace

int main(int argc, char** argv) {
  const auto is_small = [](const Words& words) { return words.has("small"); };
  std::vector<Part> parts = {
      {"check", "spans", [&](const Words& words) { check_spans(is_small(words)); }},
      {"check", "trees", [](const Words&) { check_trees(); }},
      {"time", "latency", time_latency},
      {"time", "short", time_short},
      {"time", "decode", time_bandwidth},
      {"time", "prefill", time_prefills},
      {"time", "long", time_long},
  };
  for (const char* name : {"dense", "int8_static", "int8_dynamic", "fp8", "int4"}) {
    parts.push_back({"check", name, [=](const Words& words) {
                       KvFormat format;
                       if (parse_kv_format(name, &format)) check_format(format, is_small(words));
                     }});
  }
  return run_parts(argc, argv, parts);
}
