// Runs steps of a file over a folder's network and writes their logits:
//
//   runtime_steps FOLDER NUM_BLOCKS IN OUT
//
// IN: int32 after int32. A step: T, B, M, L, whether prompts come with it; token_ids [T], positions
// [T], slot_mapping [T], cu_seqlens_q [B + 1], context_lens [B], block_tables [B, M], logit_indices
// [L], max_lens [5], of each prompt its length and its tokens. OUT: float32 [L, V] of each step.
// Prints what is wrong, or how long it took from the start to an open folder and to the first
// logits.
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <vector>

#include "model/network.h"

namespace {

using regatta::Status;
using regatta::model::Ints;
using regatta::model::Network;

int fail(const Status& status) {
  std::printf("%s\n", status.message().c_str());
  return 1;
}

class Numbers {
 public:
  explicit Numbers(const char* path) {
    std::ifstream file(path, std::ios::binary);
    const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
    values_.resize(bytes.size() / 4);
    std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(values_.data()));
  }
  bool left() const { return at_ < values_.size(); }
  int32_t next() { return values_.at(at_++); }
  Ints next(int64_t count) {
    const Ints ints(values_.data() + at_, count);
    at_ += static_cast<size_t>(count);
    return ints;
  }

 private:
  std::vector<int32_t> values_;
  size_t at_ = 0;
};

double since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
      .count();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const auto start = std::chrono::steady_clock::now();
  regatta::model::OpenOptions options;
  options.num_blocks = std::atoi(argv[2]);
  std::unique_ptr<Network> network;
  if (const Status status = regatta::model::open(argv[1], options, &network); !status.ok()) {
    return fail(status);
  }
  const double opened = since(start);
  double first = 0.0;
  Numbers in(argv[3]);
  std::FILE* const out = std::fopen(argv[4], "wb");
  std::vector<float> logits;
  while (in.left()) {
    const int32_t tokens = in.next(), seqs = in.next(), blocks = in.next(), rows = in.next();
    const int32_t has_places = in.next();
    regatta::model::StepRows step;
    step.token_ids = in.next(tokens), step.positions = in.next(tokens);
    step.slot_mapping = in.next(tokens), step.cu_seqlens_q = in.next(seqs + 1);
    step.context_lens = in.next(seqs), step.block_tables = in.next(seqs * blocks);
    step.logit_indices = in.next(rows), step.max_blocks = blocks;
    for (int32_t& len : step.max_lens) len = in.next();
    std::vector<regatta::model::Places> places;
    for (int32_t i = 0; has_places && i < seqs; ++i) {
      const int32_t length = in.next();
      places.push_back(network->facts().positions.of(in.next(length)));
    }
    regatta::model::PlacedRows placed;
    const regatta::model::StepRows& ready =
        has_places ? placed.place(network->facts().positions, step, places) : step;
    logits.assign(static_cast<size_t>(rows * network->facts().vocab_size), 0.0f);
    if (const Status status = network->run(ready, logits.data()); !status.ok()) {
      return fail(status);
    }
    if (first == 0.0) first = since(start);
    std::fwrite(logits.data(), sizeof(float), logits.size(), out);
  }
  std::fclose(out);
  std::printf("open %.0f us, first logits %.0f us\n", opened, first);
  return 0;
}
