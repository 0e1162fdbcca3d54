// Attention over latents of 512 + 64 values (DeepSeek), and what stands around it, on Hopper.
// check: latent_attention() over odd shapes, the kernel that the GPU chooses against the one that
// every GPU has (all rows) and against float64 (sampled rows), from a graph again, and in the
// batch-invariant mode; the products of few tokens by each head's matrix, and what is written ahead
// of attention, of odd shapes, too, against float64; both ways of writing against each other, bit
// by bit. Unused slots and the output hold NaN beforehand. time: in CUDA graphs, by each kernel,
// and what a decode step's layers launch from the product that makes queries and latents to the one
// behind attention, with the products of few tokens and with those of any number.
//
//   latent_sm90 check few|many|trees|heads
//   latent_sm90 time kernels | chain [CONTEXT ...]
#include "cuda/attention/latent/latent.h"
#include "paged_batch.cuh"
#include "products.cuh"

using namespace regatta;
using namespace regatta::native;

namespace {

constexpr int kLatentRank = 512, kLatentRope = 64, kLatentSize = kLatentRank + kLatentRope;

struct LatentCase {
  std::string name;
  std::vector<Span> spans;
  int heads, block_size = 64;
  bool tree = false;  // spans of up to 32 tokens are random trees
  int padding = 0;    // tokens behind the last span
  // Of the limits, where it is more than the longest one: a graph's.
  int most_context = 0;
};

// "": the one that the operator chooses.
void force_latent_kernel(const std::string& name) {
  setenv("REGATTA_KERNEL", name.empty() ? "" : ("latent_attention=" + name).c_str(), 1);
}

template <class T>
struct LatentSetup : PagedBatch {
  LatentCase c;
  int64_t num_rows, cache_values;  // num_rows: tokens by heads; cache_values: of a layer
  Buffer<T> q_latent, q_rope, out, cache;
  std::unique_ptr<Buffer<uint8_t>> workspace;  // of whichever kernel

  explicit LatentSetup(const LatentCase& which, int layers = 1)
      : PagedBatch(which.spans, which.block_size, which.padding, which.most_context),
        c(which),
        num_rows(num_tokens * which.heads),
        cache_values(num_blocks * which.block_size * kLatentSize),
        q_latent(num_rows * kLatentRank),
        q_rope(num_rows * kLatentRope),
        out(num_rows * kLatentRank),
        cache(layers * cache_values) {
    fill_random(q_latent.data, q_latent.size, 1);
    fill_random(q_rope.data, q_rope.size, 2);
    fill_random(cache.data, cache.size, 3);
    for (int layer = 0; layer < layers; ++layer) {
      poison<<<1024, 256>>>(reinterpret_cast<uint8_t*>(cache.data + layer * cache_values),
                            d_used.data, num_blocks * c.block_size, 1, c.block_size,
                            kLatentSize * sizeof(T));
    }
    int64_t bytes = 0;
    for (const char* kernel : {"", "sm80"}) {
      force_latent_kernel(kernel);
      bytes = std::max(bytes, cuda::latent_attention_workspace_bytes(params(0), limits));
    }
    workspace = std::make_unique<Buffer<uint8_t>>(bytes);
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  cuda::LatentAttentionParams params(int layer) const {
    cuda::LatentAttentionParams p;
    p.dtype = cuda::Traits<T>::dtype;
    p.q_latent = q_latent.data;
    p.q_rope = q_rope.data;
    p.cache = cache.data + layer * cache_values;
    p.num_blocks = num_blocks;
    p.block_size = c.block_size;
    p.batch = view(c.tree);
    p.out = out.data;
    p.num_heads = c.heads;
    p.latent_rank = kLatentRank;
    p.rope_size = kLatentRope;
    p.softmax_scale = 1.f / std::sqrt(static_cast<float>(kLatentSize));
    return p;
  }
  void run(int layer, cudaStream_t stream, bool pdl) const {
    CHECK_STATUS(cuda::latent_attention(params(layer), limits, workspace->data, {stream, pdl}));
  }
};

// What stands around attention over latents in a block of a model.
struct LatentHeads {
  int heads, rank = kLatentRank, nope = 128, rope = kLatentRope, value = 128;
  bool interleaved = true, codes = false;
};

// A step of it, from what the products ahead made to the rows of the one behind. `layers`:
// matrices of so many.
template <class T>
struct LatentStep {
  LatentHeads h;
  int64_t num_tokens, stride, num_slots, num_positions = 97, pairs, matrix;
  Buffer<T> made, norm_weight, key_absorb, value_up;
  Buffer<float> angles;
  Buffer<int32_t> positions, slots, ends;
  // With a row more, that stays NaN.
  Buffer<T> q_nope, q_rope, q_latent, mixed, values, rows;

  LatentStep(const LatentHeads& heads, const std::vector<int32_t>& slot_mapping,
             int64_t cache_slots, int layers = 1)
      : h(heads),
        num_tokens(static_cast<int64_t>(slot_mapping.size())),
        stride(h.heads * (h.nope + h.rope) + h.rank + h.rope),
        num_slots(cache_slots),
        pairs(num_tokens * h.heads),
        matrix(int64_t{h.heads} * h.rank),
        made(num_tokens * stride),
        norm_weight(h.rank),
        key_absorb(layers * matrix * h.nope),
        value_up(layers * matrix * h.value),
        angles(num_positions * h.rope),
        positions(some_positions(num_tokens, num_positions)),
        slots(slot_mapping),
        ends(h.heads),
        q_nope((pairs + 1) * h.nope),
        q_rope((pairs + 1) * h.rope),
        q_latent((pairs + 1) * h.rank),
        mixed((pairs + 1) * h.rank),
        values((pairs + 1) * h.value),
        rows((pairs + 1) * h.value) {
    fill_random(made.data, made.size, 11);
    fill_random(norm_weight.data, norm_weight.size, 12);
    fill_random(key_absorb.data, key_absorb.size, 13);
    fill_random(value_up.data, value_up.size, 14);
    fill_random(angles.data, angles.size, 15);
    fill_random(mixed.data, pairs * h.rank, 16);
    CHECK_CUDA(cudaDeviceSynchronize());
  }

  // Some of them past the table.
  static std::vector<int32_t> some_positions(int64_t tokens, int64_t count) {
    std::vector<int32_t> made;
    for (int64_t t = 0; t < tokens; ++t) {
      made.push_back(static_cast<int32_t>((t * 31 + 5) % (count + 2)));
    }
    return made;
  }

  // cache: [slots, rank + rope], or codes and what goes with them.
  cuda::LatentWriteParams write(void* cache, T* tail = nullptr, float* scales = nullptr) const {
    cuda::LatentWriteParams p;
    p.dtype = cuda::Traits<T>::dtype;
    p.q = made.data;
    p.q_stride = p.latent_stride = stride;
    p.latents = made.data + h.heads * (h.nope + h.rope);
    p.norm_weight = norm_weight.data;
    p.rope_cache = angles.data;
    p.positions = positions.data;
    p.slot_mapping = slots.data;
    p.cache = cache;
    p.tail = tail;
    p.scales = scales;
    p.q_nope = q_nope.data;
    p.q_rope = q_rope.data;
    p.head_ends = ends.data;
    p.num_tokens = num_tokens;
    p.num_heads = h.heads;
    p.latent_rank = h.rank;
    p.rope_size = h.rope;
    p.nope_size = h.nope;
    p.num_positions = num_positions;
    p.epsilon = 1e-6f;
    p.interleaved = h.interleaved;
    return p;
  }

  cuda::HeadProductParams product(const void* weight, int64_t in, int64_t out) const {
    cuda::HeadProductParams p;
    p.dtype = cuda::Traits<T>::dtype;
    p.weight = weight;
    p.num_tokens = num_tokens;
    p.num_heads = h.heads;
    p.in_features = in;
    p.out_features = out;
    return p;
  }
  // made -> q_latent.
  cuda::HeadProductParams queries(int layer = 0) const {
    auto p = product(key_absorb.data + layer * matrix * h.nope, h.nope, h.rank);
    p.x = made.data;
    p.x_token_stride = stride;
    p.x_head_stride = h.nope + h.rope;
    p.out = q_latent.data;
    p.out_token_stride = h.rank;
    p.out_head_stride = num_tokens * h.rank;
    return p;
  }
  // x, which is as mixed -> rows.
  cuda::HeadProductParams outputs(const T* x, int layer = 0) const {
    auto p = product(value_up.data + layer * matrix * h.value, h.rank, h.value);
    p.x = x;
    p.x_token_stride = h.rank;
    p.x_head_stride = num_tokens * h.rank;
    p.out = rows.data;
    p.out_token_stride = h.heads * h.value;
    p.out_head_stride = h.value;
    return p;
  }
};

// ----------------------------------------------------------------------------------------- check

void report(const LatentCase& c, const char* dtype, const char* what, double error,
            double tolerance) {
  count_error(format("%s %s %d heads, block %d%s: %s", dtype, c.name.c_str(), c.heads, c.block_size,
                     c.tree ? ", trees" : "", what),
              error, tolerance);
}

// One query of one head, token `token` of span `b`, in float64.
template <class T>
std::vector<double> attend(const LatentSetup<T>& s, const std::vector<T>& cache,
                           const std::vector<float>& query, size_t b, int token) {
  const Span span = s.c.spans[b];
  const int before = span.context_len - span.num_tokens;
  const bool tree = s.c.tree && span.num_tokens <= 32;
  std::vector<double> out(kLatentRank, 0.0);
  double top = -INFINITY, sum = 0;
  for (int p = 0; p < span.context_len; ++p) {
    const int other = p - before;
    if (other >= 0 && (tree ? !(s.tree[s.cu[b] + token] >> other & 1) : other > token)) continue;
    const T* const latent = &cache[int64_t{s.slot(b, p)} * kLatentSize];
    double logit = 0;
    for (int i = 0; i < kLatentSize; ++i) logit += double(query[i]) * host_float(latent[i]);
    logit /= std::sqrt(double(kLatentSize));
    const double most = std::max(top, logit), factor = std::exp(top - most);
    const double weight = std::exp(logit - most);
    top = most;
    sum = sum * factor + weight;
    for (int i = 0; i < kLatentRank; ++i) out[i] = out[i] * factor + weight * host_float(latent[i]);
  }
  for (double& x : out) x /= sum;
  return out;
}

// Of up to 48 rows, first and last ones among them.
template <class T>
double error_of_some(const LatentSetup<T>& s, const std::vector<T>& out) {
  const std::vector<T> cache = s.cache.host(), latent = s.q_latent.host(), rope = s.q_rope.host();
  struct Row {
    size_t span;
    int token, head;
  };
  std::vector<Row> rows;
  for (size_t b = 0; b < s.c.spans.size(); ++b) {
    for (int t = 0; t < s.c.spans[b].num_tokens; ++t) {
      for (int h = 0; h < s.c.heads; ++h) rows.push_back({b, t, h});
    }
  }
  if (rows.empty()) return 0;
  const Row last = rows.back();
  std::mt19937 rng(3);
  std::shuffle(rows.begin(), rows.end(), rng);
  rows.resize(std::min<size_t>(rows.size(), 47));
  rows.push_back(last);
  std::vector<Error> errors(rows.size());
#pragma omp parallel for schedule(dynamic, 1)
  for (size_t r = 0; r < rows.size(); ++r) {
    const Row& row = rows[r];
    const int64_t index = int64_t{row.head} * s.num_tokens + s.cu[row.span] + row.token;
    std::vector<float> query;
    for (int i = 0; i < kLatentRank; ++i) {
      query.push_back(host_float(latent[index * kLatentRank + i]));
    }
    for (int i = 0; i < kLatentRope; ++i)
      query.push_back(host_float(rope[index * kLatentRope + i]));
    const std::vector<double> wanted = attend(s, cache, query, row.span, row.token);
    for (int i = 0; i < kLatentRank; ++i) {
      errors[r].add(host_float(out[index * kLatentRank + i]), wanted[i]);
    }
  }
  double worst = 0;
  for (const Error& error : errors) worst = std::max(worst, error.value());
  return worst;
}

// The largest error of a row; infinite where padding was written.
template <class T>
double error_of_all(const LatentSetup<T>& s, const std::vector<T>& out, const std::vector<T>& old) {
  double worst = 0;
#pragma omp parallel for reduction(max : worst)
  for (int64_t row = 0; row < s.num_rows; ++row) {
    const bool padding = row % s.num_tokens >= s.cu.back();
    Error error;
    for (int64_t i = row * kLatentRank; i < (row + 1) * kLatentRank; ++i) {
      const double got = host_float(out[i]);
      if (padding) {
        error.add(std::isnan(got) ? 0 : INFINITY, 0);
      } else {
        error.add(got, host_float(old[i]));
      }
    }
    worst = std::max(worst, error.value());
  }
  return worst;
}

template <class T>
std::vector<T> output_of(const LatentSetup<T>& s, const char* kernel) {
  force_latent_kernel(kernel);
  s.out.spoil();
  s.run(0, nullptr, false);
  CHECK_CUDA(cudaDeviceSynchronize());
  return s.out.host();
}

// Three launches of a graph, with programmatic dependent launch.
template <class T>
std::vector<T> output_of_graph(const LatentSetup<T>& s) {
  force_latent_kernel("");
  s.out.spoil();
  run_graph([&](cudaStream_t stream) {
    for (int i = 0; i < 3; ++i) s.run(0, stream, true);
  });
  return s.out.host();
}

// In the batch-invariant mode: every other span's output has the same bits with other contexts
// beside it.
template <class T>
bool is_invariant(LatentSetup<T>& s, const std::vector<T>& first) {
  for (size_t b = 1; b < s.c.spans.size(); b += 2) {
    s.ctx[b] = std::max(s.c.spans[b].num_tokens, (s.ctx[b] + 2) / 3);
  }
  s.d_ctx.put(s.ctx);
  const std::vector<T> second = output_of(s, "");
  bool same = true;
  for (size_t b = 0; b < s.c.spans.size(); b += 2) {
    for (int h = 0; h < s.c.heads; ++h) {
      const int64_t at = (h * s.num_tokens + s.cu[b]) * kLatentRank;
      const int64_t count = int64_t{s.c.spans[b].num_tokens} * kLatentRank;
      same &= std::memcmp(&first[at], &second[at], count * sizeof(T)) == 0;
    }
  }
  return same;
}

template <class T>
void check(const LatentCase& c) {
  constexpr double kTolerance = std::is_same_v<T, __half> ? 2e-3 : 1e-2;  // of a row
  const char* const dtype = dtype_name(cuda::Traits<T>::dtype);
  LatentSetup<T> s(c);
  const std::vector<T> old = output_of(s, "sm80"), out = output_of(s, "");
  report(c, dtype, "differs from the mma kernel", error_of_all(s, out, old), kTolerance);
  report(c, dtype, "differs from float64", error_of_some(s, out), kTolerance);
  report(c, dtype, "differs from a graph", same_bits(out, output_of_graph(s)) ? 0 : INFINITY, 1);
  cuda::is_batch_invariant = true;
  const std::vector<T> whole = output_of(s, "");
  report(c, dtype, "batch-invariant", error_of_all(s, whole, old), kTolerance);
  report(c, dtype, "depends on the batch", is_invariant(s, whole) ? 0 : INFINITY, 1);
  cuda::is_batch_invariant = false;
}

std::vector<Span> equal(int count, Span span) { return std::vector<Span>(count, span); }

// Spans of 1 to 5 tokens over contexts of all lengths that tiles end at, or not.
std::vector<Span> uneven() {
  return {{1, 1},   {1, 63},   {2, 64}, {3, 65},  {1, 1000}, {0, 0},    {5, 8000}, {1, 127},
          {4, 129}, {1, 4097}, {5, 5},  {1, 200}, {2, 1},    {1, 3000}, {1, 64},   {3, 191}};
}

void check_few() {
  for (int heads : {16, 128, 20, 3, 80}) {
    for (int block_size : {64, 16, 128, 8, 192}) {
      if (block_size != 64 && heads != 16 && heads != 128) continue;
      std::vector<Span> spans = uneven();
      spans[12] = {1, 2};
      check<__nv_bfloat16>({"uneven", spans, heads, block_size, false, 3});
      check<__nv_bfloat16>({"one of 1", {{1, 1}}, heads, block_size});
      check<__nv_bfloat16>({"one of 1000", {{1, 1000}}, heads, block_size});
      check<__nv_bfloat16>({"one of 8000", {{1, 8000}}, heads, block_size});
      check<__nv_bfloat16>({"five of 65", equal(5, {3, 65}), heads, block_size, false, 1});
    }
    check<__half>({"uneven", {{1, 63}, {5, 8000}, {1, 1000}, {2, 65}}, heads});
    check<__nv_bfloat16>({"prompt", {{300, 300}}, heads});
    check<__nv_bfloat16>({"prompts", {{100, 163}, {1, 2000}, {65, 65}, {7, 500}}, heads, 16});
  }
}

void check_many() {
  check<__nv_bfloat16>({"32 x 8000", equal(32, {1, 8000}), 16});
  check<__nv_bfloat16>({"128 x 200", equal(128, {1, 200}), 16});
  check<__nv_bfloat16>({"64 x 8000", equal(64, {1, 8000}), 128});
  check<__nv_bfloat16>({"prompt of 1024", {{1024, 1024}}, 16});
  check<__nv_bfloat16>({"prompt of 4096", {{4096, 4096}}, 16});
  check<__nv_bfloat16>({"end of a prompt", {{600, 20000}, {1, 17000}}, 16});
  std::vector<Span> spans;
  for (int b = 0; b < 300; ++b)
    spans.push_back({b % 11 == 7 ? 0 : 1 + b % 3 / 2, 2 + b * 37 % 1500});
  check<__nv_bfloat16>({"300 requests", spans, 16});
  for (Span& span : spans) span.context_len = std::min(span.context_len, 300);
  check<__nv_bfloat16>({"300 short ones", spans, 128});
}

void check_trees() {
  for (int heads : {16, 128, 20}) {
    for (int block_size : {64, 16}) {
      const std::vector<Span> spans = {{5, 63},  {5, 1000}, {32, 97}, {1, 65},
                                       {33, 70}, {8, 8000}, {4, 4},   {17, 130}};
      check<__nv_bfloat16>({"drafts", spans, heads, block_size, true, 2});
      check<__half>({"drafts", {{5, 66}, {3, 1000}}, heads, block_size, true});
    }
  }
}

// Reports of a LatentStep.
struct StepReport {
  const char* dtype;
  LatentHeads h;
  int64_t num_tokens;

  void operator()(const char* what, double error, double tolerance) const {
    count_case(error < tolerance,
               format("%s %ld tokens, %d heads, %d + %d values, %d and %d of a head%s%s: %s %.1e",
                      dtype, num_tokens, h.heads, h.rank, h.rope, h.nope, h.value,
                      h.interleaved ? "" : ", by halves", h.codes ? ", codes" : "", what, error));
  }
};

template <class T>
std::vector<double> doubles(const Buffer<T>& buffer) {
  std::vector<double> out;
  for (const T x : buffer.host()) out.push_back(host_float(x));
  return out;
}

bool is_nan(const std::vector<double>& x, int64_t from) {
  return std::all_of(x.begin() + from, x.end(), [](double v) { return std::isnan(v); });
}

// A product's largest error of a row, of some rows, the last one among them; infinite where
// something behind them was written.
template <class T>
double error_of_product(const LatentStep<T>& s, const std::vector<double>& x, int64_t x_token,
                        int64_t x_head, const std::vector<double>& weight, int64_t in, int64_t outs,
                        const std::vector<double>& got, int64_t out_token, int64_t out_head) {
  std::vector<int64_t> some(s.pairs);
  std::iota(some.begin(), some.end(), 0);
  std::shuffle(some.begin(), some.end() - 1, std::mt19937(5));
  some.erase(some.begin(), some.end() - std::min<int64_t>(s.pairs, 300));
  double worst = is_nan(got, s.pairs * outs) ? 0 : INFINITY;
#pragma omp parallel for reduction(max : worst)
  for (size_t i = 0; i < some.size(); ++i) {
    const int64_t head = some[i] / s.num_tokens, token = some[i] % s.num_tokens;
    Error error;
    for (int64_t o = 0; o < outs; ++o) {
      double sum = 0;
      for (int64_t k = 0; k < in; ++k) {
        sum += x[token * x_token + head * x_head + k] * weight[(head * outs + o) * in + k];
      }
      error.add(got[token * out_token + head * out_head + o], sum);
    }
    worst = std::max(worst, error.value());
  }
  return worst;
}

// Of size `rope`, rotated by the row of the table for a token.
template <class T>
std::vector<double> turned(const LatentStep<T>& s, const double* x,
                           const std::vector<double>& table, int32_t position) {
  const int half = s.h.rope / 2;
  const double* const row = &table[std::min<int64_t>(position, s.num_positions - 1) * s.h.rope];
  std::vector<double> out(s.h.rope);
  for (int i = 0; i < half; ++i) {
    const int a = s.h.interleaved ? 2 * i : i, b = s.h.interleaved ? 2 * i + 1 : half + i;
    out[a] = x[a] * row[i] - x[b] * row[half + i];
    out[b] = x[b] * row[i] + x[a] * row[half + i];
  }
  return out;
}

// A cache of latents of either kind, NaN at first.
template <class T>
struct LatentCache {
  Buffer<T> values, tail;
  Buffer<uint8_t> codes;
  Buffer<float> scales;

  explicit LatentCache(const LatentStep<T>& s)
      : values(s.num_slots * (s.h.rank + s.h.rope)),
        tail(s.num_slots * s.h.rope),
        codes(s.num_slots * s.h.rank),
        scales(s.num_slots) {}
  cuda::LatentWriteParams of(const LatentStep<T>& s) const {
    return s.h.codes ? s.write(codes.data, tail.data, scales.data) : s.write(values.data);
  }
  bool operator==(const LatentCache& other) const {
    return same_bits(values.host(), other.values.host()) &&
           same_bits(tail.host(), other.tail.host()) && codes.host() == other.codes.host() &&
           same_bits(scales.host(), other.scales.host());
  }
};

// Of what was written of each token; infinite where another slot was.
template <class T>
double error_of_cache(const LatentStep<T>& s, const LatentCache<T>& cache,
                      const std::vector<double>& made, const std::vector<double>& table) {
  const std::vector<double> weight = doubles(s.norm_weight);
  const std::vector<int32_t> slots = s.slots.host(), positions = s.positions.host();
  const int rank = s.h.rank, rope = s.h.rope;
  const std::vector<double> rows = doubles(cache.values), tails = doubles(cache.tail);
  const std::vector<uint8_t> codes = cache.codes.host();
  const std::vector<float> scales = cache.scales.host();
  const auto kept = [&](int64_t slot, int i) {
    if (!s.h.codes) return rows[slot * (rank + rope) + i];
    return i < rank ? host_float(codes[slot * rank + i]) * scales[slot]
                    : tails[slot * rope + i - rank];
  };
  double worst = 0;
  std::vector<bool> used(s.num_slots);
  for (int64_t t = 0; t < s.num_tokens; ++t) {
    if (slots[t] < 0) continue;
    used[slots[t]] = true;
    const double* const x = &made[t * s.stride + s.h.heads * (s.h.nope + rope)];
    double sum = 0;
    for (int i = 0; i < rank; ++i) sum += x[i] * x[i];
    const double factor = 1 / std::sqrt(sum / rank + 1e-6);
    const std::vector<double> tail = turned(s, x + rank, table, positions[t]);
    Error latent, rest;
    for (int i = 0; i < rank; ++i) latent.add(kept(slots[t], i), x[i] * factor * weight[i]);
    for (int i = 0; i < rope; ++i) rest.add(kept(slots[t], rank + i), tail[i]);
    if (s.h.codes) {
      // e4m3 has three bits behind the first: a value is up to a sixteenth off.
      worst = std::max(worst, latent.value() < 1. / 16 ? 0. : HUGE_VAL);
    } else {
      worst = std::max(worst, latent.value());
    }
    worst = std::max(worst, rest.value());
  }
  for (int64_t slot = 0; slot < s.num_slots; ++slot) {
    for (int i = 0; i < rank + rope && !used[slot]; ++i) {
      if (!std::isnan(kept(slot, i))) worst = INFINITY;
    }
  }
  return worst;
}

template <class T>
double error_of_queries(const LatentStep<T>& s, const std::vector<double>& made,
                        const std::vector<double>& table) {
  const std::vector<double> got = doubles(s.q_rope);
  const std::vector<int32_t> positions = s.positions.host();
  double worst = is_nan(got, s.pairs * s.h.rope) ? 0 : INFINITY;
  for (int64_t pair = 0; pair < s.pairs; ++pair) {
    const int64_t head = pair / s.num_tokens, token = pair % s.num_tokens;
    const double* const x = &made[token * s.stride + head * (s.h.nope + s.h.rope) + s.h.nope];
    const std::vector<double> wanted = turned(s, x, table, positions[token]);
    Error error;
    for (int i = 0; i < s.h.rope; ++i) error.add(got[pair * s.h.rope + i], wanted[i]);
    worst = std::max(worst, error.value());
  }
  return worst;
}

template <class T>
bool copies_queries(const LatentStep<T>& s) {
  const std::vector<T> made = s.made.host(), got = s.q_nope.host();
  bool same = true;
  for (int64_t pair = 0; pair < s.pairs; ++pair) {
    const int64_t head = pair / s.num_tokens, token = pair % s.num_tokens;
    same &=
        std::memcmp(&got[pair * s.h.nope], &made[token * s.stride + head * (s.h.nope + s.h.rope)],
                    s.h.nope * sizeof(T)) == 0;
  }
  return same;
}

// Both launches, the second of what the first makes, three times in a graph.
template <class T>
std::vector<T> rows_of_graph(const LatentStep<T>& s, const LatentCache<T>& cache) {
  s.q_latent.spoil(), s.rows.spoil();
  run_graph([&](cudaStream_t stream) {
    for (int i = 0; i < 3; ++i) {
      CHECK_STATUS(cuda::latent_write_and_queries(cache.of(s), s.queries(), {stream, true}));
      CHECK_STATUS(cuda::head_product(s.outputs(s.q_latent.data), {stream, true}));
    }
  });
  return s.rows.host();
}

// Whether the first tokens have the same bits without the others.
template <class T>
bool is_alike_alone(const LatentStep<T>& s, const T* x, const std::vector<T>& rows,
                    int64_t tokens) {
  s.rows.spoil();
  cuda::HeadProductParams p = s.outputs(x);
  p.num_tokens = tokens;
  CHECK_STATUS(cuda::head_product(p, {}));
  const std::vector<T> alone = s.rows.host();
  return std::memcmp(alone.data(), rows.data(), tokens * s.h.heads * s.h.value * sizeof(T)) == 0;
}

// Tokens' slots, in no order; some tokens are padding.
std::vector<int32_t> some_slots(int tokens, int64_t num_slots) {
  std::vector<int32_t> slots(num_slots);
  std::iota(slots.begin(), slots.end(), 0);
  std::shuffle(slots.begin(), slots.end(), std::mt19937(9));
  slots.resize(tokens);
  for (int t = 5; t < tokens; t += 7) slots[t] = -1;
  return slots;
}

template <class T>
void check_writes(const LatentStep<T>& s, const StepReport& report, double tolerance) {
  const std::vector<double> made = doubles(s.made), table = doubles(s.angles);
  const LatentCache<T> cache(s);
  CHECK_STATUS(cuda::latent_write(cache.of(s), {}));
  report("queries", error_of_queries(s, made, table), tolerance);
  report("latents", error_of_cache(s, cache, made, table), tolerance);
  report("copied queries", copies_queries(s) ? 0 : INFINITY, 1);
  if constexpr (sizeof(T) == 2) {
    const LatentCache<T> other(s);
    const std::vector<T> rotated = s.q_rope.host();
    s.q_rope.spoil();
    CHECK_STATUS(cuda::latent_write_and_queries(other.of(s), s.queries(), {}));
    const bool same = cache == other && same_bits(rotated, s.q_rope.host());
    report("written beside the product", same ? 0 : INFINITY, 1);
  }
}

template <class T>
void check_products(const LatentStep<T>& s, const StepReport& report, double tolerance) {
  const LatentHeads& h = s.h;
  const LatentCache<T> cache(s);
  const int64_t head_size = h.nope + h.rope;
  CHECK_STATUS(cuda::latent_write_and_queries(cache.of(s), s.queries(), {}));
  report("queries' product",
         error_of_product(s, doubles(s.made), s.stride, head_size, doubles(s.key_absorb), h.nope,
                          h.rank, doubles(s.q_latent), h.rank, s.num_tokens * h.rank),
         tolerance);
  const std::vector<double> value_up = doubles(s.value_up);
  CHECK_STATUS(cuda::head_product(s.outputs(s.mixed.data), {}));
  const std::vector<T> rows = s.rows.host();
  report("values' product",
         error_of_product(s, doubles(s.mixed), h.rank, s.num_tokens * h.rank, value_up, h.rank,
                          h.value, doubles(s.rows), h.heads * h.value, h.value),
         tolerance);
  for (int64_t few : {int64_t{1}, s.num_tokens / 2}) {
    if (few == 0) continue;
    report("depends on the batch", is_alike_alone(s, s.mixed.data, rows, few) ? 0 : INFINITY, 1);
  }
  CHECK_STATUS(cuda::head_product(s.outputs(s.q_latent.data), {}));
  const std::vector<T> behind = s.rows.host();
  report("differs from a graph", same_bits(behind, rows_of_graph(s, cache)) ? 0 : INFINITY, 1);
}

template <class T>
void check_step(const LatentHeads& h, int tokens, bool has_products = sizeof(T) == 2) {
  constexpr double kTolerance = std::is_same_v<T, float>    ? 1e-5
                                : std::is_same_v<T, __half> ? 1e-3
                                                            : 5e-3;  // of a row
  const int64_t num_slots = tokens + 3;
  const LatentStep<T> s(h, some_slots(tokens, num_slots), num_slots);
  const StepReport report = {dtype_name(cuda::Traits<T>::dtype), h, tokens};
  if constexpr (sizeof(T) == 2) {
    const LatentCache<T> cache(s);
    if (has_products != (cuda::takes_queries(cache.of(s), s.queries()) &&
                         cuda::takes_head_product(s.outputs(s.mixed.data)))) {
      report("is taken, or is not", INFINITY, 1);
      return;
    }
  }
  if (has_products || sizeof(T) == 4) check_writes(s, report, kTolerance);
  if constexpr (sizeof(T) == 2) {
    if (has_products) check_products(s, report, kTolerance);
  }
}

void check_heads() {
  for (int tokens : {1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 100, 128}) {
    for (int heads : {16, 128, 3, 40}) {
      check_step<__nv_bfloat16>({heads}, tokens);
    }
    check_step<__half>({16, 512, 128, 64, 128, false}, tokens);
    check_step<__nv_bfloat16>({128, 512, 16, 64, 16, true, true}, tokens);
    check_step<__nv_bfloat16>({3, 24, 16, 8, 20}, tokens);
    check_step<__half>({16, 64, 32, 32, 48, false, true}, tokens);
    check_step<__nv_bfloat16>({20, 328, 120, 16, 130, false}, tokens);
    check_step<float>({16, 512, 128, 64, 128}, tokens);
    check_step<float>({3, 23, 7, 6, 20, true, true}, tokens);
    check_step<float>({5, 96, 16, 32, 32, false}, tokens);
  }
  check_step<__nv_bfloat16>({4, 520, 128, 64, 128}, 9, false);
  check_step<__nv_bfloat16>({4, 512, 136, 64, 128}, 9, false);
  check_step<__nv_bfloat16>({4, 512, 128, 64, 33}, 9, false);
  check_step<__nv_bfloat16>({4, 500, 128, 64, 128}, 9, false);
}

// ------------------------------------------------------------------------------------------ time

using Bf16 = __nv_bfloat16;
constexpr double kBandwidth = 4.66e6, kProducts = 800e6;  // an H200's, bytes and operations per us

LatentCase decode(int heads, int requests, int context) {
  return {"decode", std::vector<Span>(requests, Span{1, context}), heads};
}

// Pairs of a row and a token that it sees.
double num_pairs(const LatentCase& c) {
  double pairs = 0;
  for (const Span& s : c.spans) {
    pairs += double(c.heads) * s.num_tokens * (s.context_len - (s.num_tokens - 1) / 2.0);
  }
  return pairs;
}

double cache_bytes(const LatentCase& c) {
  double tokens = 0;
  for (const Span& s : c.spans) tokens += s.context_len;
  return tokens * kLatentSize * sizeof(Bf16);
}

// Both kernels over caches that L2 does not hold, where there is more than one layer.
void compare(const LatentCase& c) {
  const double bytes = cache_bytes(c), operations = 2 * num_pairs(c) * (kLatentSize + kLatentRank);
  const int layers = std::clamp(static_cast<int>(400e6 / bytes), 1, 32);
  const int launches = std::max(layers, 4);
  const LatentSetup<Bf16> s(c, layers);
  std::vector<Body> bodies;
  const char* const kernels[] = {"", "sm80"};
  for (const char* kernel : kernels) {
    bodies.push_back([&s, kernel, layers, launches](cudaStream_t stream) {
      force_latent_kernel(kernel);
      for (int i = 0; i < launches; ++i) s.run(i % layers, stream, true);
    });
  }
  const std::vector<double> ms = graphs_ms(bodies, 4, 6);
  const double limit = std::max(bytes / kBandwidth, operations / kProducts);
  for (size_t k = 0; k < bodies.size(); ++k) {
    const double us = 1e3 * ms[k] / launches;
    std::printf(
        "%-6s %3d heads %4zu x %6d tokens of %6d  %-6s %9.1f us %5.2f TB/s %6.1f TFLOP/s  %3.0f %% "
        "of %.1f us\n",
        c.name.c_str(), c.heads, c.spans.size(), c.spans[0].num_tokens, c.spans[0].context_len,
        *kernels[k] != '\0' ? kernels[k] : "chosen", us, bytes / us / 1e6, operations / us / 1e6,
        100 * limit / us, limit);
  }
}

// What a block launches between its outer products, of one token of each request: as csrc/blocks
// does with any number of tokens, with few, and each launch alone, layers in turn. Their matrices
// are more than L2 holds.
void compare_chain(int heads, int requests, int context, const cuda::GemmResources& resources) {
  const int layers = heads > 64 ? 8 : 27;
  LatentCase c = decode(heads, requests, context);
  c.most_context = 16384;  // graphs are of the engine's longest context
  const double bytes = cache_bytes(c);
  const int cache_layers = std::clamp(static_cast<int>(4e9 / bytes), 1, layers);
  force_latent_kernel("");
  const LatentSetup<Bf16> s(c, cache_layers);
  std::vector<int32_t> last;  // each request's last token
  for (size_t b = 0; b < s.ctx.size(); ++b) last.push_back(s.slot(b, s.ctx[b] - 1));
  const LatentStep<Bf16> step({heads}, last, s.num_blocks * c.block_size, layers);
  const auto write_params = [&](int layer) {
    return step.write(s.cache.data + layer % cache_layers * s.cache_values);
  };
  const auto multiply = [&](const Bf16* x, const Bf16* weight, Bf16* out, int64_t in, int64_t outs,
                            bool ready, cudaStream_t stream) {
    GemmParams p;
    p.x = x;
    p.weight = weight;
    p.out = out;
    p.num_rows = step.pairs;
    p.in_features = in;
    p.out_features = outs;
    p.num_groups = heads;
    p.group_ends = step.ends.data;
    p.group_ends_ready = ready;
    CHECK_STATUS(cuda::gemm(p, resources, nullptr, stream));
  };
  struct Launched {
    const char* name;
    std::function<void(int, cudaStream_t)> run;
    bool any, few;  // whether they have it
  };
  const Launched parts[] = {
      {"write",
       [&](int layer, cudaStream_t stream) {
         CHECK_STATUS(cuda::latent_write(write_params(layer), {stream, true}));
       },
       true, false},
      {"queries by gemm",
       [&](int layer, cudaStream_t stream) {
         multiply(step.q_nope.data, step.key_absorb.data + layer * step.matrix * step.h.nope,
                  step.q_latent.data, step.h.nope, kLatentRank, false, stream);
       },
       true, false},
      {"write and queries",
       [&](int layer, cudaStream_t stream) {
         CHECK_STATUS(cuda::latent_write_and_queries(write_params(layer), step.queries(layer),
                                                     {stream, true}));
       },
       false, true},
      {"attention",
       [&](int layer, cudaStream_t stream) {
         cuda::LatentAttentionParams p = s.params(layer % cache_layers);
         p.q_latent = step.q_latent.data;
         p.q_rope = step.q_rope.data;
         p.out = step.mixed.data;
         CHECK_STATUS(cuda::latent_attention(p, s.limits, s.workspace->data, {stream, true}));
       },
       true, true},
      {"values by gemm",
       [&](int layer, cudaStream_t stream) {
         multiply(step.mixed.data, step.value_up.data + layer * step.matrix * step.h.value,
                  step.values.data, kLatentRank, step.h.value, true, stream);
       },
       true, false},
      {"rows",
       [&](int, cudaStream_t stream) {
         cuda::HeadsToRowsParams p;
         p.x = step.values.data;
         p.out = step.rows.data;
         p.num_tokens = step.num_tokens;
         p.num_heads = heads;
         p.width = step.h.value;
         CHECK_STATUS(cuda::heads_to_rows(p, {stream, true}));
       },
       requests > 1, false},
      {"values",
       [&](int layer, cudaStream_t stream) {
         CHECK_STATUS(cuda::head_product(step.outputs(step.mixed.data, layer), {stream, true}));
       },
       false, true}};
  std::vector<Body> bodies;
  const auto add = [&](const std::function<bool(const Launched&)>& has) {
    bodies.push_back([&, has](cudaStream_t stream) {
      for (int layer = 0; layer < layers; ++layer) {
        for (const Launched& part : parts) {
          if (has(part)) part.run(layer, stream);
        }
      }
    });
  };
  add([](const Launched& part) { return part.any; });
  add([](const Launched& part) { return part.few; });
  for (const Launched& one : parts) {
    add([&one](const Launched& part) { return &part == &one; });
  }
  run_graph(bodies[0]);  // what reads what others write, once in the right order
  const std::vector<double> ms = graphs_ms(bodies, 4, 6);
  const double weights = 2. * heads * kLatentRank * 128 * sizeof(Bf16);
  std::printf("%3d heads %3d x %4d  us a layer: any %6.2f  few %6.2f  (bytes alone %.2f);", heads,
              requests, context, 1e3 * ms[0] / layers, 1e3 * ms[1] / layers,
              (weights + bytes) / kBandwidth);
  for (size_t k = 2; k < ms.size(); ++k) {
    std::printf("  %s %.2f", parts[k - 2].name, 1e3 * ms[k] / layers);
  }
  std::printf("\n");
}

void compare_chains(const Words& words) {
  const cuda::GemmResources resources = blas_resources();
  const std::vector<int64_t> asked = words.numbers({160, 8000});
  for (int heads : {16, 128}) {
    for (int64_t context : asked) {
      for (int requests : {1, 8, 32, 64, 128})
        compare_chain(heads, requests, static_cast<int>(context), resources);
    }
  }
}

void compare_all(const Words&) {
  for (const auto& [heads, requests, context] : {std::array{16, 32, 8000},
                                                 {16, 1, 1000},
                                                 {16, 1, 8000},
                                                 {16, 128, 200},
                                                 {16, 8, 32000},
                                                 {128, 64, 8000},
                                                 {128, 1, 8000},
                                                 {128, 128, 1000}}) {
    compare(decode(heads, requests, context));
  }
  for (int tokens : {1024, 4096}) compare({"prompt", {{tokens, tokens}}, 16});
  compare({"drafts", std::vector<Span>(32, Span{4, 8000}), 16});
  LatentCase mixed = decode(16, 31, 8000);
  mixed.name = "mixed";
  mixed.spans.push_back({512, 512});
  compare(mixed);
}

}  // namespace

int main(int argc, char** argv) {
  return run_parts(argc, argv,
                   {{"check", "few", [](const Words&) { check_few(); }},
                    {"check", "many", [](const Words&) { check_many(); }},
                    {"check", "trees", [](const Words&) { check_trees(); }},
                    {"check", "heads", [](const Words&) { check_heads(); }},
                    {"time", "kernels", compare_all},
                    {"time", "chain", compare_chains}});
}
