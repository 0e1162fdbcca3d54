// A decoder's blocks (regatta/blocks.h) as sequences of kernels: what kinds share. Host code.
//
// A decode step of a layer in Llama's form, bf16 or fp16 with folded norms, is five launches: qkv
// product, attention with rotary embedding and cache write, out product, gate and up product, down
// product. Folded norms are factors of rows: products leave sums of squares, the next one takes
// them. What passes from a block to the next is chosen from both records (Handed). What adapters
// add to a product is its residual, made by two launches ahead of it; to the first product of an
// MLP a launch behind it adds it, and applies the function. All but the first launch of a call may
// overlap the end of the one ahead (PDL, common.cuh).
#include <cstring>
#include <string>
#include <utility>

#include "cuda/walk.h"
#include "runtime/kinds.h"

namespace regatta::cuda {
namespace {

// From so many rows on, rows are normed ahead of a product whose weight has the norm's folded in:
// cuBLASLt neither leaves sums of squares nor takes them.
constexpr int64_t kRowsNormedAhead = 129;

// Sums of squares of a row, of so many rows in all.
int64_t sumsq_per_row(int64_t width, int64_t rows) {
  return ceil_div(width, gemm_sumsq_columns(rows));
}

bool is_folded(SchemeId scheme) { return scheme == SchemeId::kDenseFolded; }

// Whether a linear takes its rows' norm as a factor of each row, x being times the norm's weight
// already, and leaves the same for the next.
bool carries_norm(SchemeId scheme, DType dtype, int64_t rows) {
  const GemmOperands operands = operands_of(scheme);
  return (operands == GemmOperands::kWeightInt8 || operands == GemmOperands::kWeightInt4) &&
         gemm_packed_scales_out(dtype, rows);
}

struct Registered {
  const char* name;
  const KindOnGpu* kind;
};

std::vector<Registered>& kinds() {
  static auto* const all = new std::vector<Registered>;
  return *all;
}

const KindOnGpu* kind_of(const BlockParams& params) {
  for (const Registered& each : kinds()) {
    if (std::strcmp(each.name, params.kind->name) == 0) return each.kind;
  }
  return nullptr;
}

}  // namespace

KindOnGpu::KindOnGpu(const char* name) { kinds().push_back({name, this}); }

bool norms_ahead(int64_t rows) { return is_batch_invariant || rows >= kRowsNormedAhead; }

Status zero_ahead(void* memory, int64_t bytes, const Launch& launch) {
  if (bytes == 0 || memory == nullptr) return {};
  return cuda_status(cudaMemsetAsync(memory, 0, bytes, launch.stream), "blocks");
}

void SharedScratch::need_block(const BlockView& block) {
  const BlockParams& p = block.params;
  const int64_t values = p.num_tokens * p.hidden_size;
  normed.need(values);
  sumsq.need(p.num_tokens * sumsq_per_row(p.hidden_size, p.num_tokens));
  if (p.rows != nullptr) some.need(values);
  if (block.partial || (!block.routes && !block.ends_in_product())) made.need(values);
}

void SharedScratch::need_adapters(const AdapterRows& rows, int64_t num_rows, int64_t in_features,
                                  int64_t parts, int64_t residual) {
  if (rows.ids == nullptr) return;
  adding.count(rows, num_rows, in_features, parts, residual);
  wanted_ids.need(num_rows);
}

Status Walk::run() {
  for (at_ = 0; at_ < blocks_.size(); ++at_) {
    const WalkedBlock& block = blocks_[at_];
    if (block.params->num_tokens == 0) continue;
    REGATTA_RETURN_IF_ERROR(
        block.kind->run(block.kind->view(*block.params), *block.scratch, *this));
  }
  return {};
}

BlockView Walk::next() const { return blocks_[at_ + 1].kind->view(*blocks_[at_ + 1].params); }

Handed Walk::hands(const BlockView& block, int64_t rows, bool ends_in_product) const {
  if (at_ + 1 == blocks_.size()) return Handed::kNothing;
  const BlockView next = this->next();
  const DType dtype = block.params.dtype;
  if (next.parallel || next.routes || !next.norm.is_there) return Handed::kNothing;
  if (!ends_in_product) return Handed::kNormed;
  if (!next.norm.is_plain_rms() || next.residual.source == Source::kNormed || next.shares_norm) {
    return Handed::kNothing;
  }
  if (is_folded(next.first)) return norms_ahead(rows) ? Handed::kNothing : Handed::kSumsq;
  const bool carries =
      carries_norm(block.last, dtype, rows) && carries_norm(next.first, dtype, rows);
  return carries ? Handed::kScaled : Handed::kNothing;
}

Status Walk::take_norm(Product& first, const BlockView& block, const void* input) {
  const DType dtype = block.params.dtype;
  const Handed handed = block.parallel ? Handed::kNothing : handed_;
  first.x = input;
  first.epsilon = block.norm.epsilon;
  if (!block.norm.is_there) return {};
  const bool folded = is_folded(first.scheme);
  const bool carries = carries_norm(first.scheme, dtype, first.num_rows);
  if (handed == Handed::kNormed) {
    first.x = shared.normed;
    return {};
  }
  const bool plain = block.norm.is_plain_rms() && block.residual.source != Source::kNormed;
  if (!plain || (folded && norms_ahead(first.num_rows))) {
    first.x = shared.normed;
    return norm_rows(block, input, first.num_rows, first.in_features, folded);
  }
  if (!folded && !carries) {  // by the product
    first.normed = shared.normed;
    first.norm_weight = block.params.norm.weight;
    return {};
  }
  first.sumsq = shared.sumsq;
  first.num_sumsq = sumsq_per_row(first.in_features, first.num_rows);
  if (carries) first.x = shared.normed;
  if (handed != Handed::kNothing) return {};
  RowSumsqParams p;
  p.x = input;
  p.sums = shared.sumsq;
  if (carries) {
    p.norm_weight = block.params.norm.weight;
    p.scaled = shared.normed;
  }
  p.num_rows = first.num_rows;
  p.width = first.in_features;
  p.columns = gemm_sumsq_columns(first.num_rows);
  p.dtype = dtype;
  return row_sumsq(p, launch.stream);
}

Status Walk::take_shared_norm(const BlockView& block) {
  if (handed_ == Handed::kNormed) return {};
  const BlockParams& p = block.params;
  return norm_rows(block, p.hidden, p.num_tokens, p.hidden_size, false);
}

Status Walk::norm_rows(const BlockView& block, const void* input, int64_t rows, int64_t width,
                       bool folded) {
  NormParams p;
  p.x = input;
  p.weight = folded ? nullptr : block.params.norm.weight;
  p.bias = block.params.norm.bias;
  p.out = shared.normed;
  p.num_tokens = rows;
  p.hidden_size = width;
  p.epsilon = block.norm.epsilon;
  p.dtype = block.params.dtype;
  p.kind = block.norm.kind;
  p.plus_one = block.norm.plus_one;
  return norm(p, launch);
}

// Whether no launch shortly ahead writes the rows' adapters. Behind attention of another operator
// they may be those of some rows.
bool Walk::are_inputs(const AdapterRows& rows) const {
  return blocks_[0].params->kind->reads_step && rows.ids != shared.wanted_ids;
}

Status Walk::adding_to(Product& product, const LowRankWeights& weights, const AdapterRows& rows,
                       Adapted which, std::initializer_list<int64_t> part_sizes, const void* x,
                       const void* norm_weight, DType dtype, Adding* adding) {
  *adding = cuda::adding_to(product, weights, rows, which, part_sizes, x, norm_weight,
                            are_inputs(rows), dtype, shared.adding);
  if (takes_codes(product.scheme)) {
    const QuantizeRowsParams codes = quantization(product, shared.product, dtype);
    if (shrink_quantizes(adding->down, codes)) adding->down.quantize = product.coded = codes;
  }
  if (!takes_tiles(dtype, product.num_rows) || sorted_ids_ == rows.ids) return {};
  sorted_ids_ = rows.ids;
  return sort_rows({rows, product.num_rows, shared.adding.sorted}, launch);
}

Status Walk::adding_to_first(Product& first, const LowRankWeights& weights, const AdapterRows& rows,
                             Adapted which, std::initializer_list<int64_t> part_sizes,
                             const BlockView& block, const void* input, Adding* adding) {
  const bool by_factor = block.norm.is_plain_rms();
  const void* const x = !block.norm.is_there || by_factor ? input : shared.normed.data();
  const void* const norm_weight = by_factor ? block.params.norm.weight : nullptr;
  return adding_to(first, weights, rows, which, part_sizes, x, norm_weight, block.params.dtype,
                   adding);
}

Status Walk::multiply_first(Product& first, const LinearWeights& weights,
                            std::initializer_list<int64_t> part_sizes, const BlockView& block) {
  const BlockParams& p = block.params;
  REGATTA_RETURN_IF_ERROR(take_norm(first, block, p.hidden));
  if (p.adapters.ids != nullptr) {
    Adding adding;
    REGATTA_RETURN_IF_ERROR(adding_to_first(first, weights.low_rank, p.adapters, Adapted::kQkv,
                                            part_sizes, block, p.hidden, &adding));
    REGATTA_RETURN_IF_ERROR(add_ahead(first, adding, nullptr));
  }
  return multiply(first, p.dtype);
}

Status Walk::multiply_up(Product& up, const Activation& activation, void* functions, DType dtype) {
  up.gated = activation.gated;
  up.activates = !activation.gated;
  up.function = activation.function;
  if (activation.is_plain() && cuda::makes_function(up, dtype)) {
    return multiply(up, dtype);
  }
  up.gated = up.activates = false;
  void* const out = std::exchange(up.out, functions);
  REGATTA_RETURN_IF_ERROR(multiply(up, dtype));
  const int64_t width = up.out_features / (activation.gated ? 2 : 1);
  return activate({functions, out, up.num_rows, width, dtype, activation}, launch);
}

Status Walk::keep_wanted(const BlockParams& block, bool some) {
  are_wanted_ = some;
  if (!some || block.adapters.ids == nullptr) return {};
  return gather_rows({block.rows, block.adapters.ids, shared.wanted_ids, block.num_rows,
                      block.num_tokens, 1, DType::kFloat32},
                     launch);
}

Status Walk::end_block(Product& last, const BlockView& block, const void* source, bool hands_norm,
                       const AdapterRows& rows, Adapted which, const LowRankWeights& low_rank,
                       const void* part) {
  const DType dtype = block.params.dtype;
  const void* const added = block.ends_in_product() ? source : part;
  if (rows.ids != nullptr) {
    Adding adding;
    REGATTA_RETURN_IF_ERROR(adding_to(last, low_rank, rows, which, {last.out_features}, last.x,
                                      nullptr, dtype, &adding));
    REGATTA_RETURN_IF_ERROR(add_ahead(last, adding, added));
  } else {
    last.residual = added;
  }
  handed_ = hands_norm ? hands(block, last.num_rows, block.ends_in_product()) : Handed::kNothing;
  if (block.ends_in_product()) {
    if (handed_ == Handed::kSumsq || handed_ == Handed::kScaled) last.sumsq_out = shared.sumsq;
    if (handed_ == Handed::kScaled) {
      last.scaled_out = shared.normed;
      last.next_norm_weight = next().params.norm.weight;
    }
    return multiply(last, dtype);
  }
  SumNormParams p;
  p.made = shared.made;
  void* const out = std::exchange(last.out, shared.made);
  REGATTA_RETURN_IF_ERROR(multiply(last, dtype));
  return sum(p, block, source, out, last.num_rows, last.out_features);
}

Status Walk::end_rows(Product last, const BlockView& block, void* some, AdapterRows rows,
                      Adapted which, const LowRankWeights& low_rank) {
  const BlockParams& p = block.params;
  const bool has_some = p.rows != nullptr && limits.rows != StepRows::kAll;
  const bool lasts = has_some && limits.rows == StepRows::kLast;
  const void* source = source_of(block);
  REGATTA_RETURN_IF_ERROR(keep_wanted(p, has_some));
  const auto gather = [&](const void* from, void* to, int64_t width) {
    return gather_rows({p.rows, from, to, p.num_rows, p.num_tokens, width, p.dtype}, launch);
  };
  if (lasts) {
    REGATTA_RETURN_IF_ERROR(gather(last.x, some, last.in_features));
    REGATTA_RETURN_IF_ERROR(gather(source, shared.some, p.hidden_size));
    last.x = some, last.num_rows = p.num_rows, source = shared.some;
    if (rows.ids != nullptr) rows = of_wanted(rows);
  } else if (has_some) {
    last.out = shared.some;
  }
  REGATTA_RETURN_IF_ERROR(end_block(last, block, source, !has_some, rows, which, low_rank));
  return has_some && !lasts ? gather(shared.some, p.hidden_out, p.hidden_size) : Status();
}

Status Walk::sum(SumNormParams& p, const BlockView& block, const void* source, void* out,
                 int64_t rows, int64_t width) {
  p.over_ranks = block.partial;
  p.summed = shared.made;
  p.source = source;
  p.source_scale = block.residual.input_scale;
  p.made_scale = block.residual.output_scale;
  p.post_norm = block.post_norm;
  p.post_weights = block.params.post_norm;
  p.post_norm_of = block.post_norm_of;
  p.out = out;
  if (handed_ == Handed::kNormed) {
    const BlockView next = this->next();
    p.next_norm = next.norm;
    p.next_weights = next.params.norm;
    p.normed = shared.normed;
  }
  p.num_rows = rows;
  p.width = width;
  p.dtype = block.params.dtype;
  return sum_norm(p, launch);
}

Status blocks(const std::vector<BlockParams*>& params, const AttentionLimits& limits,
              const ResourcesFor& resources_for, const Launch& launch_on) {
  SharedScratch shared;
  std::vector<std::pair<const KindOnGpu*, std::unique_ptr<Buffers>>> own;  // of each kind
  std::vector<WalkedBlock> walked;
  for (const BlockParams* block : params) {
    const KindOnGpu* const kind = kind_of(*block);
    if (kind == nullptr) {
      return Status::error(std::string("blocks: kind ") + block->kind->name +
                           " does not run on GPUs; set --device cpu");
    }
    auto found =
        std::find_if(own.begin(), own.end(), [&](const auto& each) { return each.first == kind; });
    if (found == own.end()) found = own.emplace(own.end(), kind, kind->scratch());
    shared.need_block(kind->view(*block));
    kind->count(*block, limits, shared, *found->second);
    walked.push_back({kind, block, found->second.get()});
  }
  // Lays everything into the scratch; the bytes that it takes. Without scratch it only counts.
  const auto place = [&](const ComposedResources& resources) {
    Arena arena(resources.scratch);
    const DType dtype = params.empty() ? DType::kFloat32 : params[0]->dtype;
    shared.take(arena, dtype);
    for (const auto& each : own) each.second->take(arena, dtype);
    shared.adding.take(arena, dtype);
    shared.product.take(arena, resources.blas);
    return arena.used();
  };
  const ComposedResources resources = resources_for(place({}));
  REGATTA_RETURN_IF_ERROR(check_scratch(place(resources), resources, "blocks"));
  for (const auto& each : own) REGATTA_RETURN_IF_ERROR(each.second->prepare(launch_on));
  return Walk(walked, limits, shared, launch_on).run();
}

}  // namespace regatta::cuda
