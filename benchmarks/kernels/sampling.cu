// Times adjust_logits, verify_window and sample over rows of 128,256 logits.
#include "native/logits.cuh"
#include "regatta/cuda_ops.h"
#include "timing.cuh"

using namespace regatta;
using namespace regatta::native;

namespace {

// Microseconds per call: 8 calls in a graph, median of replays.
double time_calls(const std::function<void(int, cudaStream_t)>& call, int calls = 8) {
  return 1e3 / calls *
         bench::graph_ms(
             [&](cudaStream_t stream) {
               for (int i = 0; i < calls; ++i) call(i, stream);
             },
             10, 4);
}

// Drafts of one rank in each row, in spans of 8 rows.
void bench_verify(int rows, int vocab, int rank, int top_k) {
  Twin<float> logits(size_t(rows) * vocab), floats(size_t(3) * rows);
  Twin<int32_t> top_ks(rows), num_drafts(rows), ids(rows + 1), indices(rows), verdicts(rows);
  Twin<int32_t> drawn(rows);
  std::vector<float> one(vocab);
  fill_logits(one, vocab, kNormal);
  std::vector<int> order(vocab);
  std::iota(order.begin(), order.end(), 0);
  std::nth_element(order.begin(), order.begin() + rank, order.end(),
                   [&](int a, int b) { return one[a] > one[b]; });
  for (int r = 0; r < rows; ++r) {
    std::copy_n(one.begin(), vocab, &logits.host[size_t(r) * vocab]);
    floats.host[r] = 1.0f, floats.host[rows + r] = 0.95f, floats.host[2 * rows + r] = 0.0f;
    top_ks.host[r] = top_k, num_drafts.host[r] = 7 - r % 8, indices.host[r] = r;
    ids.host[r + 1] = order[rank], drawn.host[r] = order[rank];
  }
  logits.upload(), floats.upload(), top_ks.upload(), num_drafts.upload(), ids.upload();
  indices.upload(), drawn.upload();
  VerifyWindowParams p;
  p.logits = logits.device, p.temperature = floats.device, p.top_p = floats.device + rows;
  p.min_p = floats.device + 2 * rows, p.top_k = top_ks.device, p.num_drafts = num_drafts.device;
  p.token_ids = ids.device, p.logit_indices = indices.device, p.verdicts = verdicts.device;
  p.drawn = drawn.device, p.num_rows = rows, p.num_tokens = rows + 1, p.vocab_size = vocab;
  p.window = 2, p.max_candidate_len = 5;
  const double us =
      time_calls([&](int, cudaStream_t s) { must(cuda::verify_window(p, {s, true})); });
  std::printf("verify_window %4d x %d, rank %d, top_k %2d: %7.2f us\n", rows, vocab, rank, top_k,
              us);
}

void bench_all() {
  const int vocab = 128256;
  for (int rows : {1, 64, 256}) {
    for (int length : {200, 2000, 8000}) {
      Twin<float> logits(size_t(rows) * vocab);
      Twin<int32_t> columns(size_t(8) * rows), ids(rows), indices(rows);
      Twin<int32_t> history(size_t(rows) * 8192), rules(size_t(rows) * 64);
      for (int32_t& token : history.host) token = rng() % vocab;
      const float ones[3] = {1.1f, 0.1f, 0.1f};
      for (int r = 0; r < rows; ++r) {
        for (int i = 0; i < 3; ++i) std::memcpy(&columns.host[i * rows + r], &ones[i], 4);
        columns.host[3 * rows + r] = indices.host[r] = r, columns.host[4 * rows + r] = length;
        columns.host[5 * rows + r] = length / 2, columns.host[6 * rows + r] = 1;
        columns.host[7 * rows + r] = 3;
      }
      logits.upload(), columns.upload(), ids.upload(), indices.upload(), history.upload();
      rules.upload();
      AdjustLogitsParams p;
      p.logits = logits.device;
      p.repetition = reinterpret_cast<const float*>(columns.device);
      p.presence = p.repetition + rows, p.frequency = p.presence + rows;
      p.slot = columns.device + 3 * rows, p.length = p.slot + rows, p.num_prompt = p.length + rows;
      p.num_new = p.num_prompt + rows, p.no_repeat_ngram_size = p.num_new + rows;
      p.token_ids = ids.device, p.logit_indices = indices.device, p.history = history.device;
      p.rules = rules.device, p.num_rows = rows, p.vocab_size = vocab, p.max_length = 8192;
      p.rules_width = 64;
      const double us =
          time_calls([&](int, cudaStream_t s) { must(cuda::adjust_logits(p, {s, true})); });
      std::printf("adjust %3d x %d, %4d tokens, penalties and 3-grams: %7.2f us\n", rows, vocab,
                  length, us);
    }
  }
  for (int rows : {8, 64, 512}) {
    for (int rank : {0, 2}) bench_verify(rows, vocab, rank, 0);
    bench_verify(rows, vocab, 2, 50);
  }
  for (Kind kind : {kNormal, kPeaked}) {
    for (int rows : {1, 8, 32, 64, 128, 256}) {
      Twin<float> logits(size_t(rows) * vocab), temperature(rows), top_p(rows), typical_p(rows);
      Twin<int32_t> top_k(rows), tokens(rows);
      Twin<int64_t> seeds(rows), offsets(rows);
      std::vector<float> one(vocab * 4);
      fill_logits(one, vocab, kind);
      for (int r = 0; r < rows; ++r)
        std::copy_n(&one[r % 4 * vocab], vocab, &logits.host[size_t(r) * vocab]);
      logits.upload();
      std::printf("sample %-6s %3d x 128256:", kKindNames[kind], rows);
      for (const Draw& d : {Draw{0, 0, 1, 0}, Draw{1, 0, 1, 0}, Draw{1, 0, 0.9f, 0},
                            Draw{0.7f, 50, 0.9f, 0}, Draw{1, 0, 1, 0, 0.9f}}) {
        for (int r = 0; r < rows; ++r) {
          typical_p.host[r] = d.typical_p;
          temperature.host[r] = d.temperature, top_k.host[r] = d.top_k, top_p.host[r] = d.top_p;
          seeds.host[r] = r, offsets.host[r] = r;
        }
        temperature.upload(), top_p.upload(), top_k.upload(), seeds.upload(), offsets.upload();
        typical_p.upload();
        SampleParams p;
        p.typical_p = typical_p.device;
        p.logits = logits.device, p.temperature = temperature.device, p.top_k = top_k.device;
        p.top_p = top_p.device, p.seeds = seeds.device, p.offsets = offsets.device;
        p.token_ids = tokens.device, p.num_rows = rows, p.vocab_size = vocab;
        const double us =
            time_calls([&](int, cudaStream_t s) { must(cuda::sample(p, {s, true})); });
        std::printf("  T %.1f k %2d p %.1f typical %.1f %7.2f us", d.temperature, d.top_k, d.top_p,
                    d.typical_p, us);
      }
      std::printf("\n");
    }
  }
}

}  // namespace

int main() {
  bench_all();
  return 0;
}
