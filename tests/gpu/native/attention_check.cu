// Checks paged_attention over odd shapes against a float64 reference of sampled rows, and
// rope_and_paged_attention() against its two parts. Unused cache slots and the output hold NaN
// beforehand.
//
//   attention_check spans|trees|FORMAT [small]
//
// spans: dense caches, by each kernel that this GPU has. FORMAT: dense, int8_static, int8_dynamic,
// fp8 or int4, through the kernels that the GPU chooses. small: few shapes, for compute-sanitizer.
#include "attention_setup.cuh"
#include "kv_host.h"

using namespace regatta;
using namespace regatta::native;

namespace {

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

int failures = 0, checks = 0;
bool is_hopper = false;

template <class T>
void check(const Case& c, const char* kernel, double tolerance) {
  if (!is_hopper && std::string(kernel) == "sm90") return;
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
  if (!ok) {
    std::printf(
        "FAILED %-8s %-8s %-12s %-22s D %3d heads %2d/%2d block %3d window %5d cap %.0f%s%s: "
        "%.1e%s\n",
        kernel, dtype_name(s.dtype), kv_format_info(c.format).name, c.name.c_str(), c.dim, c.heads,
        c.kv_heads, c.block_size, c.window, c.softcap, c.slopes ? " slopes" : "",
        c.sinks ? " sinks" : "", error, same ? "" : " (replay differs)");
    std::fflush(stdout);
  }
  ++checks;
}

// What the fused launch does to a head.
struct Fused {
  int rotary;  // 0: no rotation
  bool norms = false, interleaved = false, plus_one = false, query_table = false;
};

// rope_and_paged_attention() against rope_and_cache_write() and paged_attention(): what they leave
// in the caches, bit for bit, and their outputs. Spans of one token.
template <class T>
void check_fused(const Case& c, const Fused& f) {
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
  float *angles, *query_angles;
  int32_t *d_positions, *d_slots;
  const int num_positions = static_cast<int>(s.limits.max_context_len) + 1;
  CHECK_CUDA(cudaMalloc(&qkv, tokens * all * c.dim * sizeof(T)));
  CHECK_CUDA(cudaMalloc(&q, tokens * c.heads * c.dim * sizeof(T)));
  CHECK_CUDA(cudaMalloc(&q_norm, c.dim * sizeof(T)));
  CHECK_CUDA(cudaMalloc(&k_norm, c.dim * sizeof(T)));
  const int64_t num_angles = int64_t{num_positions} * f.rotary;
  CHECK_CUDA(cudaMalloc(&angles, num_angles * 4 + 4));
  CHECK_CUDA(cudaMalloc(&query_angles, num_angles * 4 + 4));
  CHECK_CUDA(cudaMalloc(&d_positions, tokens * 4));
  CHECK_CUDA(cudaMalloc(&d_slots, tokens * 4));
  fill_random<<<64, 256>>>(qkv, tokens * all * c.dim, 11);
  fill_random<<<64, 256>>>(q_norm, c.dim, 12);
  fill_random<<<64, 256>>>(k_norm, c.dim, 13);
  fill_random<<<64, 256>>>(angles, num_angles, 14);
  fill_random<<<64, 256>>>(query_angles, num_angles, 15);
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
  rope.rope_cache = f.rotary > 0 ? angles : nullptr;
  rope.query_rope_cache = f.query_table ? query_angles : nullptr;
  rope.q_norm = f.norms ? q_norm : nullptr, rope.k_norm = f.norms ? k_norm : nullptr;
  rope.cache = attention.cache;
  rope.q_out = q;
  rope.num_tokens = tokens, rope.num_heads = c.heads, rope.num_kv_heads = c.kv_heads;
  rope.head_dim = c.dim, rope.rotary_dim = f.rotary;
  rope.num_positions = f.rotary > 0 ? num_positions : 0;
  rope.epsilon = 1e-6f, rope.interleaved = f.interleaved, rope.plus_one = f.plus_one;
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
  if (!ok) {
    std::printf(
        "FAILED fused %-8s %-12s %-22s D %3d/%3d heads %2d/%2d block %3d window %5d "
        "cap %.0f%s%s%s%s%s%s: %.1e%s\n",
        dtype_name(s.dtype), kv_format_info(c.format).name, c.name.c_str(), c.dim, f.rotary,
        c.heads, c.kv_heads, c.block_size, c.window, c.softcap, c.slopes ? " slopes" : "",
        c.sinks ? " sinks" : "", f.norms ? " norms" : "", f.interleaved ? " interleaved" : "",
        f.plus_one ? " plus one" : "", f.query_table ? " own queries" : "", error,
        same ? "" : " (caches differ)");
    std::fflush(stdout);
  }
  ++checks;
  for (void* p : {(void*)qkv, (void*)q, (void*)q_norm, (void*)k_norm, (void*)angles,
                  (void*)query_angles, (void*)d_positions, (void*)d_slots}) {
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
    if (c.name == "many" && is_hopper) check_composition<__nv_bfloat16>(c);
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
  if (!small && is_hopper) check_many(format);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string part = argc > 1 ? argv[1] : "";
  const bool small = argc > 2 && std::string(argv[2]) == "small";
  cudaDeviceProp device;
  CHECK_CUDA(cudaGetDeviceProperties(&device, 0));
  is_hopper = device.major == 9 && device.minor == 0;
  KvFormat format;
  if (part == "spans") {
    check_spans(small);
  } else if (part == "trees") {
    check_trees();
  } else if (parse_kv_format(part.c_str(), &format)) {
    check_format(format, small);
  } else {
    std::printf("attention_check spans|trees|FORMAT [small], got '%s'\n", part.c_str());
    return 2;
  }
  std::printf("%s: %d cases, %d failures\n", part.c_str(), checks, failures);
  return failures != 0;
}
