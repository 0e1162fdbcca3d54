// Biases, penalties for tokens seen before, and bans, on rows of logits.
//
// Architectures: all. One block per row; a row without a slot ends at once. Drafts make several
// rows of one request: each reads the tokens that are new in this step from the step's own input,
// and writes its newest one into the history, where no other row of the step reads.
//  1. Rules, a thread each: compared with the end of the history.
//  2. Penalties: the history's tokens are counted in a hash table in shared memory, in as many
//     parts as it takes to keep the table half empty; then each distinct token is changed once.
//  3. N-grams: each thread compares the end of the history with one place in it.
// Bound: scattered reads, one per token of the history and part, and one per distinct token.
#include "cuda/common.cuh"
#include "regatta/cuda_ops.h"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kTable = 4096;       // distinct tokens; 32 KiB, which every GPU has without asking
constexpr int kPart = kTable / 2;  // tokens of the history per part, on average
constexpr uint32_t kInPrompt = 1u << 31;  // beside a count of the output's tokens
constexpr int kRuleWords = 4;

// Murmur3's finalizer: every bit of the key changes every bit of the hash.
__device__ __forceinline__ uint32_t mixed(uint32_t x) {
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  return x ^ x >> 16;
}

struct History {
  const int32_t* old;    // the first `num_old` tokens
  const int32_t* fresh;  // token `i` from there on is fresh[i]
  int num_old, length, num_prompt;

  __device__ __forceinline__ int operator[](int i) const { return i < num_old ? old[i] : fresh[i]; }
};

// Logits of tokens first, first + 1, ...: a rank's may be some of them.
struct Logits {
  float* values;
  int first, size;

  // The column of a token; below 0 where there is none.
  __device__ __forceinline__ int column(int token) const {
    const int at = token - first;
    return token >= 0 && at < size ? at : -1;
  }
};

__device__ __forceinline__ void apply_rules(const History& history, const int32_t* rules,
                                            const Logits& logits) {
  const int num_rules = rules[0];
  for (int r = threadIdx.x; r < num_rules; r += kThreads) {
    const int32_t* rule = rules + 1 + kRuleWords * r;
    const int32_t* tokens = rules + rule[0];
    const int prefix = rule[1] - 1;
    if (prefix > history.length || history.length - history.num_prompt >= rule[3]) continue;
    bool ends = true;
    for (int i = prefix - 1; i >= 0 && ends; --i) {
      ends = tokens[i] == history[history.length - prefix + i];
    }
    const int at = logits.column(tokens[prefix]);
    // A token has one finite amount at most, so the order of additions does not matter.
    if (ends && at >= 0) atomicAdd(logits.values + at, __int_as_float(rule[2]));
  }
}

struct Penalties {
  float repetition, presence, frequency;

  __device__ __forceinline__ void apply(float* logit, uint32_t count) const {
    float x = *logit;
    x = x > 0.f ? x / repetition : x * repetition;
    const uint32_t in_output = count & ~kInPrompt;
    if (in_output > 0) x -= presence + frequency * static_cast<float>(in_output);
    *logit = x;
  }
};

// Counts token `i` of the history; false where the table is full of others.
__device__ __forceinline__ bool count_token(int* keys, uint32_t* counts, int id, uint32_t hash,
                                            bool in_prompt) {
  for (int step = 0; step < kTable; ++step) {
    const int at = static_cast<int>((hash + step) % kTable);
    const int found = atomicCAS(keys + at, -1, id);
    if (found != -1 && found != id) continue;
    if (in_prompt) {
      atomicOr(counts + at, kInPrompt);
    } else {
      atomicAdd(counts + at, 1u);
    }
    return true;
  }
  return false;
}

// For a token that found no place in the table (a history made to collide): its first thread
// counts it by itself.
__device__ __noinline__ void penalize_alone(const History& history, const Penalties& penalties,
                                            const Logits& logits, int i) {
  const int id = history[i];
  uint32_t count = 0;
  for (int j = 0; j < history.length; ++j) {
    if (history[j] != id) continue;
    if (j < i) return;
    count = j < history.num_prompt ? count | kInPrompt : count + 1;
  }
  penalties.apply(logits.values + logits.column(id), count);
}

__device__ __forceinline__ void penalize(const History& history, const Penalties& penalties,
                                         const Logits& logits, int* keys, uint32_t* counts) {
  const uint32_t num_parts = (history.length + kPart - 1) / kPart;
  for (uint32_t part = 0; part < num_parts; ++part) {
    for (int at = threadIdx.x; at < kTable; at += kThreads) keys[at] = -1, counts[at] = 0;
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < history.length; i += kThreads) {
      const int id = history[i];
      if (logits.column(id) < 0) continue;
      const uint32_t hash = mixed(id);
      if ((hash >> 12) % num_parts != part) continue;
      if (!count_token(keys, counts, id, hash, i < history.num_prompt)) {
        penalize_alone(history, penalties, logits, i);
      }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < kTable; at += kThreads) {
      if (keys[at] >= 0) penalties.apply(logits.values + logits.column(keys[at]), counts[at]);
    }
    __syncthreads();
  }
}

__device__ __forceinline__ void ban_repeats(const History& history, int size,
                                            const Logits& logits) {
  const int tail = history.length - (size - 1);  // where the n-gram to come begins
  for (int i = threadIdx.x; i < tail; i += kThreads) {
    bool repeats = true;
    for (int k = 0; k < size - 1 && repeats; ++k) repeats = history[i + k] == history[tail + k];
    if (!repeats) continue;
    const int at = logits.column(history[i + size - 1]);
    if (at >= 0) logits.values[at] = -INFINITY;
  }
}

__global__ void __launch_bounds__(kThreads) adjust_logits_kernel(const AdjustLogitsParams p) {
  __shared__ int keys[kTable];
  __shared__ uint32_t counts[kTable];
  pdl_trigger();
  pdl_wait();
  const int64_t row = blockIdx.x;
  const int slot = p.slot[row];
  if (slot < 0) return;
  const Logits logits = {p.logits + row * p.vocab_size, static_cast<int>(p.first_token),
                         static_cast<int>(p.vocab_size)};
  int32_t* old = p.history + slot * p.max_length;
  const int length = p.length[row];
  const int32_t* newest = p.token_ids + p.logit_indices[row];
  const History history = {old, newest - (length - 1), length - p.num_new[row], length,
                           p.num_prompt[row]};
  if (threadIdx.x == 0) old[length - 1] = *newest;
  apply_rules(history, p.rules + slot * p.rules_width, logits);
  __syncthreads();
  const Penalties penalties = {p.repetition[row], p.presence[row], p.frequency[row]};
  if (penalties.repetition != 1.f || penalties.presence != 0.f || penalties.frequency != 0.f) {
    penalize(history, penalties, logits, keys, counts);
  }
  const int ngram_size = p.no_repeat_ngram_size[row];
  if (ngram_size > 0) ban_repeats(history, ngram_size, logits);
}

}  // namespace

Status adjust_logits(const AdjustLogitsParams& params, const Launch& launch_on) {
  if (params.num_rows == 0) return {};
  return launch(adjust_logits_kernel, {launch_on, params.num_rows, kThreads}, "adjust_logits",
                params);
}

}  // namespace regatta::cuda
