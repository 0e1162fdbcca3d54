// Blocks of a decoder, one after the other: one call of an operator. No framework.
//
// weights: block after block, in the order in which its kind takes them (csrc/blocks/<kind>/
// kind.cc). caches: of block after block, as regatta/kv_format.h has them. step: the tensors of
// predict.nn.inputs.FIELDS. Where no kind reads a step, nothing reads the caches: they may be
// empty, or hold what a traced program has in place of an empty list.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "regatta/cuda_ops.h"
#include "runtime/kinds.h"

namespace regatta::runtime {

// A tensor of rank 0 is not there.
struct StepViews {
  TensorView fields[kAdapterPages + 1];  // by StepField; those that are read
  TensorView tree_mask;                  // [T, words]
  // Of prompts that see themselves both ways, on a CPU: positions in the second dimension [T], and
  // the first tokens, which all see [B].
  TensorView block_positions, prefix_lens;
  TensorView state_src, state_dst;  // [B]
  // [L]: these alone are the output of the first block, which is the only one that reads the step,
  // and of what follows it.
  TensorView rows;
};

// So many bytes where the call computes, until its work is done.
using Memory = std::function<void*(int64_t bytes)>;

class Blocks {
 public:
  // hidden: [T, H]. checks_products: see Tensors.
  Blocks(const TensorView& hidden, bool on_cpu, bool checks_products = false)
      : hidden_(hidden), on_cpu_(on_cpu), checks_products_(checks_products) {}

  // Each reads and checks all. text: the blocks' records; order: which of them each block has.
  Status take(const std::string& text, const std::vector<int>& order, TensorList weights,
              TensorList caches);
  Status take_step(const StepViews& step);

  // Whether these blocks may have StepViews::rows, behind take().
  Status check_narrows() const;

  // What take_step() needs beside `rows`, behind take().
  bool reads_step() const { return reads_step_; }
  bool has_adapters() const { return num_pages_ >= 0; }
  bool has_states() const { return num_slots_ >= 0; }
  int64_t num_rows() const { return num_rows_; }  // of the output

  // Where each block reads and writes; the last one writes to `out` [num_rows(), H].
  void place(void* out, const Memory& memory);

  // On the CPU.
  Status run();

  // For cuda::blocks().
  const std::vector<BlockParams*>& params() const { return params_; }
  const cuda::AttentionLimits& limits() const { return limits_; }
  // The most that a product has.
  int64_t most_rows() const { return std::max(hidden_.shape[0], limits_.num_long_tokens); }

 private:
  Status take_params(const std::string& text, const std::vector<int>& order, Tensors& tensors);
  Status take_rows(const TensorView& rows);

  TensorView hidden_;
  bool on_cpu_, checks_products_;
  std::vector<BlockParams*> params_;
  std::vector<std::max_align_t> room_;  // of params_
  bool reads_step_ = false;
  int64_t num_pages_ = -1;  // of adapters
  int64_t num_slots_ = -1;  // of states
  int64_t num_rows_ = 0;
  cuda::AttentionLimits limits_;
};

}  // namespace regatta::runtime
