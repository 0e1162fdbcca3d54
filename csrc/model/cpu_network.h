// A network of a folder on this machine's processors, in the order of Python's static mode
// (predict.nn.decoder.forward): logits are the same bits.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "model/folder.h"
#include "model/network.h"
#include "runtime/blocks.h"

namespace regatta::model {

class CpuNetwork final : public Network {
 public:
  // folder: taken over. Checks each record against its tensors; num_blocks: of the cache.
  static Status make(Folder folder, int64_t num_blocks, std::unique_ptr<Network>* network);
  ~CpuNetwork() override;

  Status run(const StepRows& rows, float* logits) override;

 private:
  // Layers that share a call.
  struct Part {
    std::vector<int> order;
    runtime::TensorList weights, caches;
  };

  CpuNetwork(Folder folder, int64_t num_blocks);
  Status allocate();
  Part part(size_t first, size_t end) const;
  Status check_records() const;
  Status check_rows(const StepRows& rows, const float* logits) const;
  Status run_part(const Part& part, const runtime::StepViews& step, TensorView* hidden) const;

  Folder folder_;
  std::vector<TensorView> caches_;
  void* memory_ = nullptr;  // of caches_
  size_t memory_bytes_ = 0;
  // Behind the last layer with a cache only the rows with logits are needed.
  Part all_, ahead_, last_;
};

}  // namespace regatta::model
