// Checks latent_attention of 512 + 64 values over odd shapes: the kernel that the GPU chooses
// against the one that every GPU has (all rows) and against float64 (sampled rows), from a graph
// again, and in the batch-invariant mode. Unused slots and the output hold NaN beforehand.
//
//   latent_check few|many|trees
#include "latent_setup.cuh"

using namespace regatta;
using namespace regatta::native;

namespace {

int failures = 0, cases = 0;

void report(const LatentCase& c, const char* dtype, const char* what, double error,
            double tolerance) {
  const bool ok = error < tolerance;
  failures += !ok, ++cases;
  if (ok) return;
  std::printf("FAILED %-8s %-16s %3d heads, block %3d%s: %s %.1e\n", dtype, c.name.c_str(), c.heads,
              c.block_size, c.tree ? ", trees" : "", what, error);
  std::fflush(stdout);
}

// Relative to `wanted`; infinite where got is not finite.
struct Error {
  double difference = 0, norm = 0;
  void add(double got, double wanted) {
    difference += std::isfinite(got) ? (got - wanted) * (got - wanted) : INFINITY;
    norm += wanted * wanted;
  }
  double value() const { return std::sqrt(difference / std::max(norm, 1e-30)); }
};

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
    const int64_t block = s.table[b * s.max_blocks + p / s.c.block_size];
    const T* const latent = &cache[(block * s.c.block_size + p % s.c.block_size) * kLatentSize];
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
  CHECK_CUDA(cudaMemset(s.out.data, 0xff, s.out.size * sizeof(T)));
  s.run(0, nullptr, false);
  CHECK_CUDA(cudaDeviceSynchronize());
  return s.out.host();
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// Three launches of a graph, with programmatic dependent launch.
template <class T>
std::vector<T> output_of_graph(const LatentSetup<T>& s) {
  force_latent_kernel("");
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK_CUDA(cudaStreamCreate(&stream));
  CHECK_CUDA(cudaMemsetAsync(s.out.data, 0xff, s.out.size * sizeof(T), stream));
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  for (int i = 0; i < 3; ++i) s.run(0, stream, true);
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  CHECK_CUDA(cudaGraphLaunch(exec, stream));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  CHECK_CUDA(cudaGraphExecDestroy(exec));
  CHECK_CUDA(cudaGraphDestroy(graph));
  CHECK_CUDA(cudaStreamDestroy(stream));
  return s.out.host();
}

// In the batch-invariant mode: every other span's output has the same bits with other contexts
// beside it.
template <class T>
bool is_invariant(LatentSetup<T>& s, const std::vector<T>& first) {
  for (size_t b = 1; b < s.c.spans.size(); b += 2) {
    s.ctx[b] = std::max(s.c.spans[b].num_tokens, (s.ctx[b] + 2) / 3);
  }
  CHECK_CUDA(cudaMemcpy(s.d_ctx, s.ctx.data(), s.ctx.size() * 4, cudaMemcpyHostToDevice));
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

}  // namespace

int main(int argc, char** argv) {
  const std::string part = argc > 1 ? argv[1] : "";
  if (part == "few") {
    check_few();
  } else if (part == "many") {
    check_many();
  } else if (part == "trees") {
    check_trees();
  } else {
    std::printf("latent_check few|many|trees\n");
    return 2;
  }
  std::printf("%d cases, %d failures\n", cases, failures);
  return failures > 0;
}
