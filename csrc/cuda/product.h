// A product as the composed operators ask for it: of any scheme, with what comes ahead of it and
// behind it. Host code alone.
#pragma once

#include <algorithm>
#include <string>

#include "cuda/host.h"
#include "regatta/cuda_ops.h"
#include "regatta/gemm.h"
#include "regatta/scheme.h"

namespace regatta::cuda {

// Up to this many rows no product of ours needs scratch: see gemm/select.cu.
constexpr int64_t kRowsWithoutScratch = 64;

// How a kernel takes a scheme's weight.
constexpr GemmOperands operands_of(SchemeId scheme) { return scheme_info(scheme).operands; }
// And read as it is, weights alone being codes.
constexpr bool is_packed(SchemeId scheme) { return regatta::is_packed(operands_of(scheme)); }
// Whether activations are codes of the same kind.
constexpr bool takes_codes(SchemeId scheme) {
  return operands_of(scheme) == GemmOperands::kFp8 || operands_of(scheme) == GemmOperands::kInt8;
}
constexpr bool is_quantized(SchemeId scheme) { return scheme_info(scheme).code_bits != 0; }

// Cuts one piece of memory into parts; with base null it only counts.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}
  void* take(int64_t bytes) {
    char* part = base_ == nullptr ? nullptr : base_ + used_;
    used_ += round_up(bytes, 1024);
    return part;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

// x, out, sizes and what GemmParams says of them; run() sets weight, scales, operands and dtypes.
struct Product : GemmParams {
  const char* name;
  SchemeId scheme;
  const TensorView* tensors;          // the scheme's, of experts one behind the other
  const void* norm_weight = nullptr;  // of an RMS norm ahead of the product, or null
  void* normed = nullptr;             // [num_rows, in_features]: room for it
  Product* next = nullptr;            // of a gated one, the only reader of out
  QuantizeRowsParams coded;           // how x became codes already, if `codes` is not null

  Product(const char* name, SchemeId scheme, const LinearWeights& weights, const void* from,
          void* to, int64_t rows, int64_t in, int64_t columns)
      : name(name), scheme(scheme), tensors(weights.tensors) {
    bias = weights.bias;
    x = from;
    out = to;
    num_rows = rows;
    in_features = in;
    out_features = columns;
  }
};

// Memory that products need beside their tensors, for the widest of them: first `count` each, then
// `take`, then run.
class ProductScratch {
 public:
  // reads_sumsq: it scales its rows. num_groups: as Product's.
  void count(SchemeId scheme, DType dtype, int64_t rows, int64_t in_features, int64_t out_features,
             bool gated = false, bool reads_sumsq = false, int64_t num_groups = 0);
  // matrices: for weights that become one, too.
  void take(Arena& arena, void* blas, bool matrices = true);

 private:
  friend Status run(const Product& p, DType dtype, DType out_dtype, const ProductScratch& scratch,
                    const Launch& launch_on);
  friend QuantizeRowsParams quantization(const Product& p, const ProductScratch& scratch,
                                         DType dtype);

  int64_t rows_ = 0, width_ = 0;  // of codes
  bool has_codes_ = false, has_fp8_ = false, has_order_ = false;
  GemmResources gemm_;
  void* codes_ = nullptr;       // [rows, widest in_features], 16 bits each
  float* scale_ = nullptr;      // [rows], or of blocks
  void* next_codes_ = nullptr;  // e4m3 of the next product, while those before are read
  float* next_scale_ = nullptr;
  void* ordered_codes_ = nullptr;  // as codes, 8 bits each: of x in act-order, which `codes` has
};

Status run(const Product& p, DType dtype, DType out_dtype, const ProductScratch& scratch,
           const Launch& launch_on);

// How the activations of a product of codes become codes, the norm ahead of it included.
QuantizeRowsParams quantization(const Product& p, const ProductScratch& scratch, DType dtype);

// Whether run() makes the product's function, which is of a gate or not.
bool makes_function(const Product& p, DType dtype);

Status check_scratch(int64_t needed, const ComposedResources& resources, const char* what);

}  // namespace regatta::cuda
