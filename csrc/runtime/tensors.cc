#include "runtime/tensors.h"

#include <algorithm>

#include "cpu/gemm.h"
#include "runtime/adapters.h"

namespace regatta::runtime {

const TensorView* Tensors::take(List& list, const char* what, size_t count) {
  static const TensorView kNone[8];
  if (status_.ok() && list.tensors.size - list.next < count) {
    status_ = Status::error(std::string(list.name) + " holds " + std::to_string(list.tensors.size) +
                            " tensors, and " + what + " is missing");
  }
  if (!status_.ok()) return kNone;
  list.next += count;
  return list.tensors.data + list.next - count;
}

Status Tensors::check_all_taken(const List& list) {
  const size_t left = list.tensors.size - list.next;
  if (left == 0) return {};
  return Status::error(std::string(list.name) + " holds " + std::to_string(left) +
                       " tensors more than the blocks need");
}

const void* Tensors::vector(const char* name, int64_t size, bool is_there) {
  return is_there ? matrix(name, {size}).data : nullptr;
}

NormWeights Tensors::norm(const char* name, const Norm& norm, int64_t size) {
  NormWeights weights;
  weights.weight = vector(name, size, norm.is_there);
  weights.bias = vector(name, size, norm.is_there && norm.bias);
  return weights;
}

LinearWeights Tensors::linear(const char* name, SchemeId scheme, int64_t in_features,
                              int64_t out_features, bool has_bias, int64_t of_adapters) {
  LinearWeights weights;
  weights.tensors = take(weights_, name, scheme_info(scheme).num_tensors);
  check_matrices(name, weights.tensors, scheme, 0, in_features, out_features);
  weights.bias = vector(name, out_features, has_bias);
  if (of_adapters > 0) weights.low_rank = low_rank(name, of_adapters, in_features, out_features);
  return weights;
}

// Of `count` matrices one behind the other; 0: there is one, without that dimension.
void Tensors::check_matrices(const char* name, const TensorView* tensors, SchemeId scheme,
                             int64_t count, int64_t in_features, int64_t out_features) {
  if (!checks_products_ || !status_.ok()) return;
  std::vector<TensorView> one(tensors, tensors + scheme_info(scheme).num_tensors);
  for (TensorView& view : one) {
    if (count == 0) break;
    std::copy(view.shape + 1, view.shape + TensorView::kMaxRank, view.shape);
    --view.rank;
  }
  const LinearWeights weights{one.data(), nullptr, {}};
  for (int64_t i = 0; i < std::max<int64_t>(count, 1) && status_.ok(); ++i) {
    check(cpu::check_linear(name, weights, scheme, in_features, out_features, dtype_));
    for (TensorView& view : one) {
      int64_t bytes = dtype_size(view.dtype);
      for (int d = 0; d < view.rank; ++d) bytes *= view.shape[d];
      view.data = static_cast<const char*>(view.data) + bytes;
    }
  }
}

LowRankWeights Tensors::low_rank(const char* linear, int64_t parts, int64_t in_features,
                                 int64_t out_features) {
  const std::string name = std::string(linear) + "'s adapters";
  LowRankWeights weights;
  const TensorView* const pair = take(weights_, name.c_str(), 2);
  check(low_rank_weights(pair[0], pair[1], name.c_str(), parts, in_features, out_features, dtype_,
                         on_cpu_, &weights));
  if (num_pages_ >= 0 && num_pages_ != weights.num_pages) {
    check(Status::error(name + " has " + std::to_string(weights.num_pages) +
                        " pages of adapters, and the linears before it " +
                        std::to_string(num_pages_)));
  }
  num_pages_ = weights.num_pages;
  return weights;
}

LinearWeights Tensors::experts(const char* name, SchemeId scheme, int64_t num_experts,
                               int64_t in_features, int64_t out_features, bool has_bias) {
  LinearWeights weights;
  const int count = scheme_info(scheme).num_tensors;
  weights.tensors = take(weights_, name, count);
  for (int i = 0; i < count; ++i) {
    const TensorView& tensor = weights.tensors[i];
    if (tensor.rank >= 2 && tensor.shape[0] == num_experts) continue;
    check(Status::error(std::string(name) + " is " + shape_string(tensor) + " (expected: [" +
                        std::to_string(num_experts) + ", ...], one for each expert)"));
  }
  check_matrices(name, weights.tensors, scheme, num_experts, in_features, out_features);
  if (has_bias) weights.bias = matrix(name, {num_experts, out_features}).data;
  return weights;
}

TensorView Tensors::by_head(const char* name, int64_t num_heads, int64_t rows, int64_t columns) {
  const TensorView& view = *take(weights_, name, 1);
  if (!on_cpu_) check(runtime::check(view, name, dtype_, {num_heads, rows, columns}));
  if (view.dtype != dtype_ || view.rank < 3 || view.shape[0] != num_heads) {
    check(Status::error(std::string(name) + " is " + shape_string(view) + " of " +
                        dtype_name(view.dtype) + " (expected: [" + std::to_string(num_heads) +
                        ", ...] of " + dtype_name(dtype_) + ", one for each head)"));
  }
  if (on_cpu_) check_matrices(name, &view, SchemeId::kDense, num_heads, columns, rows);
  return view;
}

const TensorView& Tensors::matrix(const char* name, const std::vector<int64_t>& shape) {
  const TensorView& view = *take(weights_, name, 1);
  check(runtime::check(view, name, dtype_, shape));
  return view;
}

const TensorView& Tensors::table(const char* name, const std::vector<int64_t>& shape) {
  const TensorView& view = *take(weights_, name, 1);
  check(runtime::check(view, name, DType::kFloat32, shape));
  return view;
}

PagedCache Tensors::cache(KvFormat format, int64_t num_kv_heads, int64_t head_dim) {
  PagedCache cache;
  check(cache_of(take(caches_, "a cache", num_kv_tensors(format, 2)), format, dtype_, num_kv_heads,
                 head_dim, &cache));
  return cache;
}

float* Tensors::state(const char* name, const std::vector<int64_t>& shape, DType* dtype) {
  const TensorView& view = *take(caches_, name, 1);
  std::vector<int64_t> whole = {num_slots_};
  whole.insert(whole.end(), shape.begin(), shape.end());
  const bool halves = dtype != nullptr && !on_cpu_ && view.dtype == DType::kBFloat16;
  const DType stored = halves ? DType::kBFloat16 : DType::kFloat32;
  if (dtype != nullptr) *dtype = stored;
  check(runtime::check(view, name, stored, whole));
  if (view.rank > 0) num_slots_ = view.shape[0];
  return static_cast<float*>(const_cast<void*>(view.data));
}

PagedCache Tensors::latent_cache(KvFormat format, int64_t rank, int64_t tail) {
  PagedCache cache;
  check(latent_cache_of(take(caches_, "a cache", num_latent_tensors(format)), format, dtype_, rank,
                        tail, &cache));
  return cache;
}

}  // namespace regatta::runtime
