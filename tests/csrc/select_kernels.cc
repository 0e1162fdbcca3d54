// Answers which kernels attend, over keys or latents, which route, sort and multiply for experts,
// and how ranks sum, for tests on a CPU.
//
//   select_kernels < FILE    per line "attention", "latents", "experts" or "sums" and NAME=VALUE
//                            words of the problem
//                            and the GPU. Printed is, of attention, the kernel and its launches, or
//                            what each candidate said on one line; of latents, the
//                            kernel, and whether long spans are expanded; of experts, what routes,
//                            what multiplies, and what sorts
#include <cstdio>
#include <iostream>
#include <map>
#include <sstream>
#include <string>

#include "cuda/attention/latent/select.h"
#include "cuda/attention/select.h"
#include "cuda/experts/select.h"
#include "cuda/ranks/select.h"

using namespace regatta;
using namespace regatta::cuda;

namespace {

// The words of a line by name; a word without a value is 1.
using Words = std::map<std::string, std::string>;

// Takes the word from `words`, where it is there.
template <class T>
void take(Words& words, const char* name, T* to) {
  const auto found = words.find(name);
  if (found == words.end()) return;
  *to = static_cast<T>(std::stoll(found->second));
  words.erase(found);
}

template <class Problem>
void take_shared(Words& words, Problem* p, int* architecture) {
  take(words, "arch", architecture);
  take(words, "dtype", &p->dtype);
  take(words, "tokens", &p->num_tokens);
  take(words, "batch_invariant", &p->is_batch_invariant);
}

std::string one_line(std::string text) {
  for (char& c : text) c = c == '\n' ? ';' : c;
  return text;
}

std::string attention(Words& words) {
  AttentionProblem p;
  int architecture = 90;
  std::string force = words.count("force") ? words["force"] : "";
  words.erase("force");
  take_shared(words, &p, &architecture);
  take(words, "format", &p.format);
  take(words, "head_dim", &p.head_dim);
  take(words, "heads", &p.num_heads);
  take(words, "kv_heads", &p.num_kv_heads);
  take(words, "seqs", &p.num_seqs);
  take(words, "query", &p.max_query_len);
  take(words, "context", &p.max_context_len);
  take(words, "window", &p.window);
  take(words, "trees", &p.has_trees);
  take(words, "tree_words", &p.tree_words);
  take(words, "prefixes", &p.has_prefixes);
  take(words, "rope", &p.has_plain_rope);
  take(words, "rotary_dim", &p.rotary_dim);
  AttentionLaunches launches;
  const Status status = select_attention(p, architecture, force, &launches);
  if (!status.ok()) return "none " + one_line(status.message());
  const char* const names[] = {"sm90", "sm80", "generic"};
  std::string text = names[static_cast<int>(launches.kernel)];
  if (launches.writes_cache) text += " rope";
  if (launches.decodes) text += " decode<=" + std::to_string(launches.max_decode_rows);
  if (launches.prefills) text += " prefill";
  if (launches.prefills && p.shares_prefill()) text += " shared";
  return text;
}

std::string latents(Words& words) {
  LatentProblem p;
  int architecture = 90;
  std::string force = words.count("force") ? words["force"] : "";
  words.erase("force");
  take_shared(words, &p, &architecture);
  take(words, "heads", &p.num_heads);
  take(words, "rank", &p.latent_rank);
  take(words, "rope_size", &p.rope_size);
  take(words, "nope", &p.nope_size);
  take(words, "codes", &p.has_codes);
  take(words, "block_size", &p.block_size);
  take(words, "query", &p.max_query_len);
  take(words, "short", &p.max_short_len);
  take(words, "long_tokens", &p.num_long_tokens);
  take(words, "trees", &p.has_trees);
  take(words, "absorbed", &p.is_absorbed);
  take(words, "shared_bytes", &p.max_shared_bytes);
  const char* const names[] = {"sm90", "mma16", "mma32", "mma64", "plain"};
  const auto kernel = select_latent_attention(p, architecture, force);
  std::string text = names[static_cast<int>(kernel)];
  if (select_long_spans(p, architecture) == LongSpans::kExpanded) {
    text += " expanded by " + std::to_string(expanded_heads(p));
  }
  return text;
}

std::string experts(Words& words) {
  ExpertProblem p;
  int architecture = 90;
  take_shared(words, &p, &architecture);
  take(words, "hidden", &p.hidden_size);
  take(words, "inner", &p.intermediate_size);
  take(words, "shared", &p.shared_size);
  take(words, "experts", &p.num_experts);
  take(words, "top_k", &p.top_k);
  take(words, "groups", &p.num_groups);
  take(words, "weights", &p.weights);
  take(words, "norm", &p.has_norm);
  take(words, "plain_norm", &p.has_plain_norm);
  take(words, "shared_gate", &p.has_shared_gate);
  take(words, "post_norm", &p.has_post_norm);
  take(words, "gated", &p.gated);
  const char* const routers[] = {"step", "norm+product", "route+product", "route"};
  const char* const kernels[] = {"one_token", "sorted"};
  const char* const sorts[] = {"together", "apart"};
  return std::string(routers[static_cast<int>(select_router(p, architecture))]) + " " +
         kernels[static_cast<int>(select_experts(p, architecture))] + " " +
         sorts[static_cast<int>(select_sort(p, architecture))];
}

std::string sums(Words& words) {
  int64_t rows = 1;
  SumProblem p;
  take(words, "arch", &p.architecture);
  take(words, "ranks", &p.num_ranks);
  take(words, "rows", &rows);
  take(words, "bytes", &p.bytes);
  take(words, "links", &p.links);
  take(words, "nccl", &p.has_nccl);
  const char* const ways[] = {"one shot", "two shots", "NCCL"};
  return std::string(ways[static_cast<int>(select_all_reduce(p))]) +
         (sums_in_norm(rows, p) ? " in norm" : "") +
         (wants_nccl(p.num_ranks, p.links) ? ", wants NCCL" : "");
}

}  // namespace

int main() {
  std::string line, word, kind;
  while (std::getline(std::cin, line)) {
    std::istringstream text(line);
    Words words;
    text >> kind;
    while (text >> word) {
      const size_t at = word.find('=');
      words[word.substr(0, at)] = at == std::string::npos ? "1" : word.substr(at + 1);
    }
    std::puts((kind == "attention" ? attention(words)
               : kind == "latents" ? latents(words)
               : kind == "sums"    ? sums(words)
                                   : experts(words))
                  .c_str());
    if (words.empty()) continue;
    std::fprintf(stderr, "select_kernels: %s is not known\n", words.begin()->first.c_str());
    return 1;
  }
  return 0;
}
