// The tensors of a call's blocks, as the kinds take them off two lists.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "regatta/blocks.h"
#include "runtime/step.h"

namespace regatta::runtime {

struct TensorList {
  const TensorView* data = nullptr;
  size_t size = 0;
};

// Each function takes the next tensors and checks them. What is wrong first is kept: what is taken
// from then on is empty.
class Tensors {
 public:
  // checks_products: whether matrices are checked here, on a CPU, too, and not by products alone.
  Tensors(TensorList weights, TensorList caches, DType dtype, int64_t hidden_size, bool on_cpu,
          bool checks_products = false)
      : weights_{"weights", weights},
        caches_{"caches", caches},
        dtype_(dtype),
        hidden_size_(hidden_size),
        on_cpu_(on_cpu),
        checks_products_(checks_products) {}

  DType dtype() const { return dtype_; }
  int64_t hidden_size() const { return hidden_size_; }
  // Of adapters; below 0 without.
  int64_t num_pages() const { return num_pages_; }
  const Status& status() const { return status_; }
  // Whether nothing is left of a list.
  Status check_all_weights_taken() const { return check_all_taken(weights_); }
  Status check_all_caches_taken() const { return check_all_taken(caches_); }

  // Where what a record calls so runs on a CPU alone.
  void check_on_cpu(const char* what) {
    if (on_cpu_) return;
    check(Status::error(std::string("blocks: a block is ") + what + " (allowed on a CPU alone)"));
  }
  // A complaint of a kind.
  void check(const Status& status) {
    if (status_.ok()) status_ = status;
  }

  const void* vector(const char* name, int64_t size, bool is_there = true);
  NormWeights norm(const char* name, const Norm& norm, int64_t size);
  // of_adapters: parts that adapters add to; 0: it has no room for them.
  LinearWeights linear(const char* name, SchemeId scheme, int64_t in_features, int64_t out_features,
                       bool has_bias, int64_t of_adapters = 0);
  // Of so many experts: all tensors have one more dimension, the first.
  LinearWeights experts(const char* name, SchemeId scheme, int64_t num_experts, int64_t in_features,
                        int64_t out_features, bool has_bias);
  // Of heads, [rows, columns] each: packed on the CPU, which checks shapes itself.
  TensorView by_head(const char* name, int64_t num_heads, int64_t rows, int64_t columns);
  const TensorView& matrix(const char* name, const std::vector<int64_t>& shape);
  // Of float32.
  const TensorView& table(const char* name, const std::vector<int64_t>& shape);
  const float* floats(const char* name, int64_t size) {
    return static_cast<const float*>(table(name, {size}).data);
  }
  // cos | sin [positions, rotary dims] -> params. At most head_dim of them, in pairs.
  template <class Params>
  const TensorView& rope_table(Params* params, int64_t head_dim) {
    const TensorView& view = table("rope_cache", {-1, -1});
    check(set_rope_table(view, head_dim, params));
    return view;
  }
  PagedCache cache(KvFormat format, int64_t num_kv_heads, int64_t head_dim);
  // A state [slots, ...] of `shape` for each request, in float32; where dtype is not null and on
  // GPUs in bfloat16, too, which dtype says.
  float* state(const char* name, const std::vector<int64_t>& shape, DType* dtype = nullptr);
  // Slots of all states; below 0 without.
  int64_t num_slots() const { return num_slots_; }
  PagedCache latent_cache(KvFormat format, int64_t rank, int64_t tail);

 private:
  struct List {
    const char* name;
    TensorList tensors;
    size_t next = 0;
  };

  const TensorView* take(List& list, const char* what, size_t count);
  static Status check_all_taken(const List& list);
  void check_matrices(const char* name, const TensorView* tensors, SchemeId scheme, int64_t count,
                      int64_t in_features, int64_t out_features);
  LowRankWeights low_rank(const char* name, int64_t parts, int64_t in_features,
                          int64_t out_features);

  List weights_, caches_;
  DType dtype_;
  int64_t hidden_size_;
  bool on_cpu_, checks_products_;
  int64_t num_pages_ = -1, num_slots_ = -1;
  Status status_;
};

}  // namespace regatta::runtime
