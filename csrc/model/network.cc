#include "model/network.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <new>
#include <string>

#include "model/cpu_network.h"
#include "model/folder.h"

namespace regatta::model {
namespace {

constexpr int64_t kUsualSeqs = 8, kUsualStepTokens = 512;
constexpr int64_t kMaxSize = int64_t{1} << 28;
constexpr int64_t kMaxSlots = (int64_t{1} << 31) - 1;  // of the cache: numbers of 32 bits name them
constexpr int64_t kPrefixShare = 2;  // blocks beyond those of requests feed the cache of prefixes

std::string mib(int64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

// The first number behind `key` in a file of lines; -1 where there is none.
int64_t number_behind(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string word; file >> word;) {
    int64_t number;
    if (word == key && file >> number) return number;
  }
  return -1;
}

int64_t number_in(const char* path) {
  std::ifstream file(path);
  int64_t number;
  return file >> number ? number : -1;  // "max" is no number
}

// predict.system.host.available_memory_bytes.
int64_t available_memory() {
  int64_t available = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGE_SIZE);
  const int64_t kib = number_behind("/proc/meminfo", "MemAvailable:");
  if (kib >= 0) available = kib * 1024;
  const int64_t limit = number_in("/sys/fs/cgroup/memory.max");
  const int64_t used = number_in("/sys/fs/cgroup/memory.current");
  if (limit < 0 || used < 0) return available;
  int64_t files = 0;
  for (const char* key : {"inactive_file", "active_file"}) {
    files += std::max<int64_t>(0, number_behind("/sys/fs/cgroup/memory.stat", key));
  }
  return std::max<int64_t>(0, std::min(available, limit - used + files));
}

Status check_options(const OpenOptions& options) {
  for (const auto& [name, value, most] :
       {std::tuple("memory_limit", options.memory_limit, INT64_MAX),
        {"num_blocks", options.num_blocks, kMaxSize},
        {"num_seqs", options.num_seqs, kMaxSize},
        {"max_step_tokens", options.max_step_tokens, kMaxSize},
        {"max_length", options.max_length, kMaxSize}}) {
    if (value >= 0 && value <= most) continue;
    return Status::error(std::string(name) + " is " + std::to_string(value) + " (allowed: 0 to " +
                         std::to_string(most) + ", 0 for the usual)");
  }
  return {};
}

// The folder's max_length becomes that of the options.
Status add_up(Folder* folder, const OpenOptions& options, MemorySum* sum) {
  NetworkFacts& facts = folder->facts;
  if (options.max_length > facts.max_length) {
    return Status::error("max_length is " + std::to_string(options.max_length) + ", and " +
                         folder->path + " was exported with " + std::to_string(facts.max_length) +
                         " (allowed: up to that)");
  }
  if (options.max_length > 0) facts.max_length = options.max_length;
  const int64_t num_seqs = options.num_seqs > 0 ? options.num_seqs : kUsualSeqs;
  const int64_t step_tokens =
      options.max_step_tokens > 0 ? options.max_step_tokens : kUsualStepTokens;
  sum->weights = folder->weight_bytes();
  const int64_t rows = std::min(num_seqs, step_tokens);
  if (__builtin_mul_overflow(step_tokens, folder->step_values * dtype_size(facts.dtype),
                             &sum->step) ||
      __builtin_add_overflow(sum->step, rows * facts.vocab_size * 4, &sum->step)) {
    return Status::error("max_step_tokens is " + std::to_string(step_tokens) +
                         ", whose values no memory holds");
  }
  sum->limit = options.memory_limit > 0 ? options.memory_limit : available_memory();
  const int64_t least = (facts.max_length + facts.block_size - 1) / facts.block_size;
  const int64_t most = std::min(kMaxSize, kMaxSlots / facts.block_size);
  int64_t wanted = options.num_blocks;
  if (wanted > most || least > most) {
    return Status::error("num_blocks is " + std::to_string(std::max(wanted, least)) + " of " +
                         std::to_string(facts.block_size) + " tokens (allowed: up to " +
                         std::to_string(most) + ")");
  }
  if (wanted == 0) {
    wanted = std::min(most, num_seqs * least * (options.shares_prefixes ? kPrefixShare : 1));
  }
  const int64_t beside = sum->limit - sum->weights - sum->step;
  const int64_t fitting = std::max<int64_t>(0, beside) / facts.block_bytes;
  const int64_t needed = options.num_blocks > 0 ? wanted : std::min(wanted, least);
  sum->num_blocks = options.num_blocks > 0 ? wanted : std::max(needed, std::min(wanted, fitting));
  if (__builtin_mul_overflow(sum->num_blocks, facts.block_bytes, &sum->cache)) {
    return Status::error("num_blocks is " + std::to_string(wanted) + ", which no memory holds");
  }
  if (needed <= fitting) return {};
  return Status::error(folder->path + " does not fit: " + mib(sum->weights) + " of weights, " +
                       mib(sum->step) + " for the values of a step and " + mib(sum->cache) +
                       " for " + std::to_string(needed) + " cache blocks, and the limit is " +
                       mib(sum->limit) +
                       "; lower num_blocks, max_length or max_step_tokens, or raise memory_limit");
}

// What `call` returns, with an error where memory ends.
template <class Call>
Status guarded(Call call) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return Status::error("there is not enough memory");
  } catch (const std::exception& error) {
    return Status::error(error.what());
  }
}

}  // namespace

Status memory_sum(const std::string& path, const OpenOptions& options, MemorySum* sum) {
  return guarded([&] {
    REGATTA_RETURN_IF_ERROR(check_options(options));
    Folder folder;
    REGATTA_RETURN_IF_ERROR(read_folder(path, &folder));
    return add_up(&folder, options, sum);
  });
}

Status open(const std::string& path, const OpenOptions& options,
            std::unique_ptr<Network>* network) {
  return guarded([&] {
    REGATTA_RETURN_IF_ERROR(check_options(options));
    Folder folder;
    REGATTA_RETURN_IF_ERROR(read_folder(path, &folder));
    MemorySum sum;
    REGATTA_RETURN_IF_ERROR(add_up(&folder, options, &sum));
    return CpuNetwork::make(std::move(folder), sum.num_blocks, network);
  });
}

Status tokenizer_of(const std::string& path, TokenizerOf* tokenizer) {
  return guarded([&] {
    Folder folder;
    REGATTA_RETURN_IF_ERROR(read_folder(path, &folder));
    *tokenizer = folder.tokenizer;
    return Status();
  });
}

}  // namespace regatta::model
