#include "model/cpu_network.h"

#include <sys/mman.h>

#include <algorithm>
#include <utility>

#include "cpu/thread_pool.h"
#include "model/around.h"

namespace regatta::model {
namespace {

constexpr size_t kPage = 4096;

int64_t bytes_of(const TensorView& view) {
  int64_t bytes = dtype_size(view.dtype);
  for (int i = 0; i < view.rank; ++i) bytes *= view.shape[i];
  return bytes;
}

size_t in_pages(int64_t bytes) { return (static_cast<size_t>(bytes) + kPage - 1) / kPage * kPage; }

TensorView view_of(const Ints& values) {
  TensorView view;
  view.data = values.data, view.dtype = DType::kInt32, view.rank = 1, view.shape[0] = values.size;
  return view;
}

TensorView view_of(const Ints& values, int64_t rows, int64_t columns) {
  TensorView view = view_of(values);
  view.rank = 2, view.shape[0] = rows, view.shape[1] = columns;
  return view;
}

runtime::StepViews views_of(const StepRows& rows) {
  runtime::StepViews step;
  step.fields[runtime::kPositions] = view_of(rows.positions);
  step.fields[runtime::kSlotMapping] = view_of(rows.slot_mapping);
  step.fields[runtime::kCuSeqlensQ] = view_of(rows.cu_seqlens_q);
  step.fields[runtime::kContextLens] = view_of(rows.context_lens);
  step.fields[runtime::kBlockTables] =
      view_of(rows.block_tables, rows.context_lens.size, rows.max_blocks);
  step.fields[runtime::kMaxLens] =
      view_of(Ints(rows.max_lens.data(), static_cast<int64_t>(rows.max_lens.size())));
  if (rows.prefix_lens.size != 0) {
    step.prefix_lens = view_of(rows.prefix_lens);
    step.block_positions = view_of(rows.block_positions);
  }
  return step;
}

Status check_all_below(const char* name, const Ints& values, int64_t end) {
  for (int64_t i = 0; i < values.size; ++i) {
    if (values[i] >= 0 && values[i] < end) continue;
    return Status::error(std::string(name) + "[" + std::to_string(i) + "] is " +
                         std::to_string(values[i]) + " (allowed: 0 .. " + std::to_string(end - 1) +
                         ")");
  }
  return {};
}

Status check_size(const char* name, int64_t size, int64_t wanted) {
  if (size == wanted) return {};
  return Status::error(std::string(name) + " has " + std::to_string(size) + " entries, expected " +
                       std::to_string(wanted));
}

}  // namespace

CpuNetwork::CpuNetwork(Folder folder, int64_t num_blocks) : folder_(std::move(folder)) {
  facts_ = folder_.facts;
  facts_.num_blocks = num_blocks;
}

CpuNetwork::~CpuNetwork() {
  if (memory_ != nullptr) munmap(memory_, memory_bytes_);
}

Status CpuNetwork::make(Folder folder, int64_t num_blocks, std::unique_ptr<Network>* network) {
  std::unique_ptr<CpuNetwork> made(new CpuNetwork(std::move(folder), num_blocks));
  REGATTA_RETURN_IF_ERROR(made->allocate());
  const std::vector<FolderLayer>& layers = made->folder_.layers;
  size_t last = 0;  // layer with a cache
  for (size_t i = 0; i < layers.size(); ++i) {
    const size_t end = i + 1 < layers.size() ? layers[i + 1].cache : made->caches_.size();
    if (end > layers[i].cache) last = i;
  }
  made->all_ = made->part(0, layers.size());
  made->ahead_ = made->part(0, last);
  made->last_ = made->part(last, layers.size());
  if (const Status status = made->check_records(); !status.ok()) {
    return Status::error(made->folder_.path + "/" + kFolderFile + ": " + status.message());
  }
  *network = std::move(made);
  return {};
}

// Pages that no request writes take no memory.
Status CpuNetwork::allocate() {
  for (const FolderCache& cache : folder_.caches) {
    caches_.push_back(cache.view);
    if (cache.is_given) continue;
    caches_.back().shape[0] = facts_.num_blocks;
    memory_bytes_ += in_pages(bytes_of(caches_.back()));
  }
  if (memory_bytes_ == 0) return {};
  void* const memory = mmap(nullptr, memory_bytes_, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    return Status::error("the KV cache of " + std::to_string(memory_bytes_ >> 20) +
                         " MiB cannot be allocated; open with fewer blocks");
  }
  memory_ = memory;
  auto* at = static_cast<char*>(memory);
  for (size_t i = 0; i < caches_.size(); ++i) {
    if (folder_.caches[i].is_given) continue;
    caches_[i].data = at;
    at += in_pages(bytes_of(caches_[i]));
  }
  return {};
}

CpuNetwork::Part CpuNetwork::part(size_t first, size_t end) const {
  const auto place = [&](size_t layer) {
    return layer < folder_.layers.size()
               ? folder_.layers[layer]
               : FolderLayer{folder_.order.size(), folder_.weights.size(), caches_.size()};
  };
  const FolderLayer from = place(first), to = place(end);
  Part made;
  made.order.assign(folder_.order.begin() + static_cast<std::ptrdiff_t>(from.block),
                    folder_.order.begin() + static_cast<std::ptrdiff_t>(to.block));
  made.weights = {folder_.weights.data() + from.weight, to.weight - from.weight};
  made.caches = {caches_.data() + from.cache, to.cache - from.cache};
  return made;
}

Status CpuNetwork::check_records() const {
  REGATTA_RETURN_IF_ERROR(check_around(folder_));
  TensorView hidden;
  hidden.dtype = facts_.dtype, hidden.rank = 2, hidden.shape[1] = folder_.hidden_size;
  for (size_t layer = 0; layer < folder_.layers.size(); ++layer) {
    const Part own = part(layer, layer + 1);
    runtime::Blocks made(hidden, /*on_cpu=*/true, /*checks_products=*/true);
    Status status = made.take(folder_.records, own.order, own.weights, own.caches);
    if (status.ok() && (made.has_states() || made.has_adapters())) {
      status = Status::error(
          "blocks have states or adapters of requests, which this library does not run yet");
    }
    if (!status.ok()) {
      return Status::error("layers[" + std::to_string(layer) + "]: " + status.message());
    }
  }
  runtime::Blocks all(hidden, /*on_cpu=*/true);
  REGATTA_RETURN_IF_ERROR(all.take(folder_.records, all_.order, all_.weights, all_.caches));
  // Whether what is behind the last cache may leave rows alone.
  runtime::Blocks last(hidden, /*on_cpu=*/true);
  REGATTA_RETURN_IF_ERROR(last.take(folder_.records, last_.order, last_.weights, last_.caches));
  return last.check_narrows();
}

Status CpuNetwork::check_rows(const StepRows& rows, const float* logits) const {
  const int64_t num_tokens = rows.token_ids.size, num_seqs = rows.context_lens.size;
  if (num_tokens < 1 || num_seqs < 1) {
    return Status::error("a step has " + std::to_string(num_tokens) + " tokens of " +
                         std::to_string(num_seqs) + " requests (allowed: 1 and more)");
  }
  REGATTA_RETURN_IF_ERROR(check_size("positions", rows.positions.size, num_tokens));
  REGATTA_RETURN_IF_ERROR(check_size("slot_mapping", rows.slot_mapping.size, num_tokens));
  REGATTA_RETURN_IF_ERROR(check_size("cu_seqlens_q", rows.cu_seqlens_q.size, num_seqs + 1));
  REGATTA_RETURN_IF_ERROR(
      check_size("block_tables", rows.block_tables.size, num_seqs * rows.max_blocks));
  REGATTA_RETURN_IF_ERROR(check_all_below("token_ids", rows.token_ids, facts_.vocab_size));
  REGATTA_RETURN_IF_ERROR(check_all_below("logit_indices", rows.logit_indices, num_tokens));
  if (rows.row_kind() == RowKind::kAll) {
    REGATTA_RETURN_IF_ERROR(check_size("logit_indices", rows.logit_indices.size, num_tokens));
    for (int64_t i = 0; i < num_tokens; ++i) {
      if (rows.logit_indices[i] == i) continue;
      return Status::error("logit_indices[" + std::to_string(i) + "] is " +
                           std::to_string(rows.logit_indices[i]) +
                           " of all tokens in order (allowed: " + std::to_string(i) + ")");
    }
  }
  if (rows.logit_indices.size < 1 || (logits == nullptr && rows.row_kind() != RowKind::kNone)) {
    return Status::error(
        "a step has no row of logits, or nowhere to write them (allowed: none with kNone, whose "
        "logit_indices are the last tokens)");
  }
  return {};
}

// hidden := the part's output.
Status CpuNetwork::run_part(const Part& part, const runtime::StepViews& step,
                            TensorView* hidden) const {
  cpu::Scratch& scratch = cpu::Scratch::mine();
  runtime::Blocks made(*hidden, /*on_cpu=*/true);
  REGATTA_RETURN_IF_ERROR(made.take(folder_.records, part.order, part.weights, part.caches));
  REGATTA_RETURN_IF_ERROR(made.take_step(step));
  TensorView out = *hidden;
  out.shape[0] = made.num_rows();
  void* const data = scratch.take<char>(bytes_of(out));
  out.data = data;
  made.place(data, [&](int64_t bytes) { return scratch.take<char>(bytes); });
  *hidden = out;
  return made.run();
}

Status CpuNetwork::run(const StepRows& rows, float* logits) {
  REGATTA_RETURN_IF_ERROR(check_rows(rows, logits));
  const cpu::Scratch::Scope scope(cpu::Scratch::mine());
  TensorView hidden;
  REGATTA_RETURN_IF_ERROR(embed(folder_, rows, &hidden));
  runtime::StepViews step = views_of(rows);
  if (rows.row_kind() == RowKind::kAll) {
    REGATTA_RETURN_IF_ERROR(run_part(all_, step, &hidden));
  } else {
    if (!ahead_.order.empty()) REGATTA_RETURN_IF_ERROR(run_part(ahead_, step, &hidden));
    step.rows = view_of(rows.logit_indices);
    REGATTA_RETURN_IF_ERROR(run_part(last_, step, &hidden));
  }
  return rows.row_kind() == RowKind::kNone ? Status() : head_logits(folder_, hidden, logits);
}

}  // namespace regatta::model
