// The composed operators beside a decoder's blocks (walk.cu): attention, linear and logits as
// sequences of the kernels beside this file. Host code alone.
#include "cuda/adapters/adding.h"
#include "cuda/host.h"
#include "cuda/product.h"
#include "regatta/abi.h"
#include "regatta/cuda_ops.h"
#include "sampling/finish_logits.h"

namespace regatta::cuda {

int64_t attention_scratch_bytes(const PagedAttentionParams& params, const AttentionLimits& limits) {
  return paged_attention_workspace_bytes(params, limits);
}

Status attention(const PagedAttentionParams& params, const AttentionLimits& limits,
                 const ComposedResources& resources, const Launch& launch_on) {
  if (params.batch.num_tokens == 0) return {};
  // 0 bytes for limits and sizes that are not allowed, which paged_attention() refuses by name.
  const int64_t zeroed = paged_attention_zeroed_bytes(params, limits);
  if (zeroed > 0) {
    REGATTA_RETURN_IF_ERROR(
        check_scratch(attention_scratch_bytes(params, limits), resources, "paged_attention"));
    REGATTA_RETURN_IF_ERROR(cuda_status(
        cudaMemsetAsync(resources.scratch, 0, zeroed, launch_on.stream), "paged_attention"));
  }
  return paged_attention(params, limits, resources.scratch, resources.scratch_bytes, launch_on);
}

namespace {

Status check_num_tensors(const char* name, SchemeId scheme, int count) {
  const SchemeInfo& info = scheme_info(scheme);
  if (count == info.num_tensors) return {};
  return Status::error(std::string(name) + ": the weight is " + std::to_string(count) +
                       " tensors, expected " + std::to_string(info.num_tensors) + " for " +
                       info.name);
}

struct LinearScratch {
  AddingScratch adding;
  ProductScratch product;
  int64_t total;

  LinearScratch(const LinearParams& p, const ComposedResources& resources) {
    Arena arena(resources.scratch);
    product.count(p.scheme, p.dtype, p.num_tokens, p.in_features, p.out_features);
    product.take(arena, resources.blas);
    const auto parts = static_cast<int64_t>(
        std::count_if(p.part_sizes, p.part_sizes + 3, [](int64_t size) { return size > 0; }));
    adding.count(p.adapters, p.num_tokens, p.in_features, parts, p.out_features);
    adding.take(arena, p.dtype);
    total = arena.used();
  }
};

// What adapters add to `product`, ahead of it.
Status add_adapters(const LinearParams& p, const LinearScratch& s, Product& product,
                    const Launch& launch_on) {
  const int64_t (&parts)[3] = p.part_sizes;
  Adding adding =
      adding_to(product, p.low_rank, p.adapters, p.which, {parts[0], parts[1], parts[2]}, p.x,
                nullptr, /*ready=*/false, p.dtype, s.adding);
  if (takes_tiles(p.dtype, p.num_tokens)) {
    REGATTA_RETURN_IF_ERROR(sort_rows({p.adapters, p.num_tokens, s.adding.sorted}, launch_on));
  }
  return add_ahead(product, adding, nullptr, s.adding, launch_on);
}

}  // namespace

int64_t linear_scratch_bytes(const LinearParams& p) { return LinearScratch(p, {}).total; }

Status linear(const LinearParams& p, const ComposedResources& resources, const Launch& launch_on) {
  REGATTA_RETURN_IF_ERROR(check_num_tensors("linear", p.scheme, p.num_weights));
  const LinearScratch s(p, resources);
  REGATTA_RETURN_IF_ERROR(check_scratch(s.total, resources, "linear"));
  Product product("linear", p.scheme, {p.weight, p.bias}, p.x, p.out, p.num_tokens, p.in_features,
                  p.out_features);
  if (p.adapters.ids != nullptr && p.num_tokens > 0) {
    REGATTA_RETURN_IF_ERROR(add_adapters(p, s, product, launch_on));
  }
  return run(product, p.dtype, p.dtype, s.product, launch_on);
}

namespace {

struct LogitsScratch {
  void* normed;  // [L, H]
  ProductScratch product;
  int64_t total;

  LogitsScratch(const LogitsParams& p, const ComposedResources& resources) {
    Arena arena(resources.scratch);
    normed = arena.take(p.num_logits * p.hidden_size * dtype_size(p.dtype));
    product.count(p.scheme, p.dtype, p.num_logits, p.hidden_size, p.vocab_size);
    product.take(arena, resources.blas, /*matrices=*/false);  // its matrix would be too large
    total = arena.used();
  }
};

}  // namespace

int64_t logits_scratch_bytes(const LogitsParams& params) { return LogitsScratch(params, {}).total; }

Status logits(const LogitsParams& p, const ComposedResources& resources, const Launch& launch_on) {
  if (p.num_logits == 0) return {};
  REGATTA_RETURN_IF_ERROR(check_num_tensors("lm_head", p.scheme, p.num_head));
  const LogitsScratch s(p, resources);
  REGATTA_RETURN_IF_ERROR(check_scratch(s.total, resources, "logits"));
  const void* x = s.normed;
  if (p.norm_weight != nullptr) {
    NormParams normed;
    normed.x = p.hidden;
    normed.weight = p.norm_weight;
    normed.out = s.normed;
    normed.num_tokens = p.num_logits;
    normed.hidden_size = p.hidden_size;
    normed.epsilon = p.epsilon;
    normed.dtype = p.dtype;
    REGATTA_RETURN_IF_ERROR(p.logit_indices == nullptr
                                ? norm(normed, launch_on)
                                : norm_rows(normed, p.logit_indices, p.num_tokens, launch_on));
  } else if (p.logit_indices != nullptr) {
    REGATTA_RETURN_IF_ERROR(gather_rows(
        {p.logit_indices, p.hidden, s.normed, p.num_logits, p.num_tokens, p.hidden_size, p.dtype},
        launch_on));
  } else {
    x = p.hidden;
  }
  const Product head("lm_head", p.scheme, {p.head}, x, p.logits, p.num_logits, p.hidden_size,
                     p.vocab_size);
  REGATTA_RETURN_IF_ERROR(run(head, p.dtype, DType::kFloat32, s.product, launch_on));
  if (p.bias == nullptr && p.scale == 1.f && p.softcap == 0.f) return {};
  return finish_logits({p.logits, p.bias, p.num_logits, p.vocab_size, p.scale, p.softcap, p.dtype},
                       launch_on);
}

}  // namespace regatta::cuda

// For operators that this thread calls from now on; returns what was so before.
REGATTA_EXPORT int regatta_set_batch_invariant(int on) {
  const bool before = regatta::cuda::is_batch_invariant;
  regatta::cuda::is_batch_invariant = on != 0;
  return before;
}
