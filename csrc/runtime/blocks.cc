#include "runtime/blocks.h"

#include <algorithm>
#include <utility>

#include "regatta/sum_of_ranks.h"
#include "runtime/adapters.h"

namespace regatta::runtime {
namespace {

size_t in_units(size_t bytes) {
  return (bytes + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t);
}

bool is_reader(const BlockParams* params) { return params->kind->reads_step; }

Status check_rows_kind(cuda::StepRows kind, int64_t num_rows, int64_t num_tokens,
                       int64_t num_seqs) {
  const bool last = kind == cuda::StepRows::kLast;
  if (kind == cuda::StepRows::kListed || num_rows == (last ? num_seqs : num_tokens)) return {};
  return Status::error("rows has " + std::to_string(num_rows) + " entries, which max_lens calls " +
                       (last ? "the last token of each of " + std::to_string(num_seqs) + " requests"
                             : "all of " + std::to_string(num_tokens) + " tokens"));
}

Status take_slots(const TensorView& view, const char* name, int64_t num_seqs, int64_t num_slots,
                  bool on_cpu, const int32_t** slots) {
  REGATTA_RETURN_IF_ERROR(take_ids(view, name, {num_seqs}, slots));
  for (int64_t i = 0; on_cpu && i < num_seqs; ++i) {
    if ((*slots)[i] >= -1 && (*slots)[i] < num_slots) continue;
    return Status::error(std::string(name) + "[" + std::to_string(i) + "] is " +
                         std::to_string((*slots)[i]) + " (allowed: -1 .. " +
                         std::to_string(num_slots - 1) + ")");
  }
  return {};
}

}  // namespace

Status Blocks::take(const std::string& text, const std::vector<int>& order, TensorList weights,
                    TensorList caches) {
  REGATTA_RETURN_IF_ERROR(check_activation(hidden_, "hidden"));
  REGATTA_RETURN_IF_ERROR(check_shape(hidden_, "hidden", {-1, -1}));
  num_rows_ = hidden_.shape[0];
  Tensors tensors(weights, caches, hidden_.dtype, hidden_.shape[1], on_cpu_, checks_products_);
  REGATTA_RETURN_IF_ERROR(take_params(text, order, tensors));
  REGATTA_RETURN_IF_ERROR(tensors.status());
  REGATTA_RETURN_IF_ERROR(tensors.check_all_weights_taken());
  num_pages_ = tensors.num_pages();
  num_slots_ = tensors.num_slots();
  reads_step_ = std::any_of(params_.begin(), params_.end(), is_reader);
  return reads_step_ ? tensors.check_all_caches_taken() : Status();
}

Status Blocks::take_params(const std::string& text, const std::vector<int>& order,
                           Tensors& tensors) {
  const std::vector<BlockRecord>* records;
  REGATTA_RETURN_IF_ERROR(block_records(text, &records));
  size_t units = 0;
  for (const int index : order) {
    if (index < 0 || index >= static_cast<int>(records->size())) {
      return Status::error("order has " + std::to_string(index) + ", and blocks has " +
                           std::to_string(records->size()) +
                           " records (allowed: 0 and more, less than that)");
    }
    units += in_units((*records)[index].kind->params_bytes);
  }
  room_.resize(units);
  params_.reserve(order.size());
  std::max_align_t* at = room_.data();
  for (const int index : order) {
    const BlockRecord& record = (*records)[index];
    params_.push_back(record.kind->take(at, record.fields.get(), tensors));
    at += in_units(record.kind->params_bytes);
  }
  return {};
}

Status Blocks::take_step(const StepViews& step) {
  const int64_t num_tokens = hidden_.shape[0];
  BlockParams read;
  if (reads_step_) {
    const TensorView(&fields)[kAdapterPages + 1] = step.fields;
    REGATTA_RETURN_IF_ERROR(
        take_ids(fields[kPositions], "positions", {num_tokens}, &read.positions));
    REGATTA_RETURN_IF_ERROR(
        take_ids(fields[kSlotMapping], "slot_mapping", {num_tokens}, &read.slot_mapping));
    REGATTA_RETURN_IF_ERROR(batch_of(fields[kCuSeqlensQ], fields[kContextLens],
                                     fields[kBlockTables], step.tree_mask, num_tokens,
                                     &read.batch));
    REGATTA_RETURN_IF_ERROR(limits_of(fields[kMaxLens], &limits_));
    if (step.prefix_lens.rank != 0) {
      REGATTA_RETURN_IF_ERROR(take_ids(step.prefix_lens, "prefix_lens", {read.batch.num_seqs},
                                       &read.batch.prefix_lens));
    }
    if (step.block_positions.rank != 0) {
      REGATTA_RETURN_IF_ERROR(
          take_ids(step.block_positions, "block_positions", {num_tokens}, &read.block_positions));
    }
  }
  if (has_states()) {
    const int64_t count = read.batch.num_seqs;
    REGATTA_RETURN_IF_ERROR(
        take_slots(step.state_src, "state_src", count, num_slots_, on_cpu_, &read.state_src));
    REGATTA_RETURN_IF_ERROR(
        take_slots(step.state_dst, "state_dst", count, num_slots_, on_cpu_, &read.state_dst));
  }
  if (step.fields[kAdapterIds].rank != 0) {
    REGATTA_RETURN_IF_ERROR(adapter_rows(step.fields[kAdapterIds], step.fields[kAdapterPages],
                                         num_pages_, num_tokens, on_cpu_, &read.adapters));
  }
  for (BlockParams* block : params_) {
    block->adapters = read.adapters;
    if (!is_reader(block)) continue;
    block->positions = read.positions;
    block->block_positions = read.block_positions;
    block->slot_mapping = read.slot_mapping;
    block->batch = read.batch;
    block->state_src = read.state_src;
    block->state_dst = read.state_dst;
  }
  return step.rows.rank == 0 ? Status() : take_rows(step.rows);
}

Status Blocks::check_narrows() const {
  const auto count = std::count_if(params_.begin(), params_.end(), is_reader);
  if (count == 1 && is_reader(params_[0])) return {};
  return Status::error("with rows the blocks have " + std::to_string(count) +
                       " attention blocks among " + std::to_string(params_.size()) +
                       " (allowed: one, which is the first)");
}

Status Blocks::take_rows(const TensorView& rows) {
  REGATTA_RETURN_IF_ERROR(check_narrows());
  const int32_t* ids;
  REGATTA_RETURN_IF_ERROR(take_ids(rows, "rows", {-1}, &ids));
  num_rows_ = rows.shape[0];
  for (BlockParams* block : params_) block->rows = ids;
  if (on_cpu_) return {};
  return check_rows_kind(limits_.rows, num_rows_, hidden_.shape[0], params_[0]->batch.num_seqs);
}

// Three pieces of memory take turns between blocks: what a block read stays for a parallel one
// behind it.
void Blocks::place(void* out, const Memory& memory) {
  const int64_t num_tokens = hidden_.shape[0];
  const int64_t bytes =
      std::max(num_rows_, num_tokens) * hidden_.shape[1] * dtype_size(hidden_.dtype);
  void* pieces[3] = {out};
  for (size_t i = 1; i < std::min<size_t>(params_.size(), 3); ++i) pieces[i] = memory(bytes);
  const void *input = hidden_.data, *before = nullptr;
  size_t left = params_.size();
  for (BlockParams* block : params_) {
    block->num_tokens = is_reader(block) ? num_tokens : num_rows_;
    block->num_rows = num_rows_;
    block->hidden = input;
    block->hidden_out = pieces[--left % 3];
    block->before = before;
    block->before_rows = before == hidden_.data ? block->rows : nullptr;
    block->num_before = num_tokens;
    before = std::exchange(input, block->hidden_out);
  }
}

Status Blocks::run() {
  for (BlockParams* block : params_) {
    REGATTA_RETURN_IF_ERROR(block->kind->run(*block));
    REGATTA_RETURN_IF_ERROR(take_failure_of_ranks());
  }
  return {};
}

}  // namespace regatta::runtime
