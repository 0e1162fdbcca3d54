// What the cases of kernel_sets.cc are made of: tensors with random values, an operator's run on
// two kernel sets, and the comparison.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/gemm.h"
#include "regatta/linear.h"
#include "regatta/pack_dense.h"
#include "regatta/pack_quantized.h"

namespace kernel_sets {

using namespace regatta;  // NOLINT(google-build-using-namespace): a program's own

// How far a set may be from scalar: of each value, that share of it and of the root mean square of
// all. Sets differ in the order of sums; with bfloat16 also in whether activations between two
// products are rounded to it, with int8 in codes that rounding puts on the other side of a half.
struct Tolerance {
  const char* op;  // "" : all others
  double float32, bfloat16, float16;
};
constexpr Tolerance kTolerances[] = {
    {"activate", 1e-5, 1e-2, 2e-3}, {"add", 1e-6, 8e-3, 1e-3},     {"embedding", 1e-6, 8e-3, 1e-3},
    {"int8", 2e-2, 4e-2, 3e-2},      // products of rows that become int8
    {"kv_codes", 4e-2, 6e-2, 4e-2},  // attention over codes that it writes itself
    {"norm", 1e-5, 1e-2, 2e-3},     {"pack_dense", 0.0, 0.0, 0.0}, {"sum_parts", 1e-6, 8e-3, 1e-3},
    {"", 5e-5, 3e-2, 4e-3},
};

inline double tolerance_of(const std::string& op, DType dtype) {
  for (const Tolerance& row : kTolerances) {
    if (op != row.op && *row.op) continue;
    return dtype == DType::kFloat32    ? row.float32
           : dtype == DType::kBFloat16 ? row.bfloat16
                                       : row.float16;
  }
  return 0.0;
}

class Tensor {
 public:
  Tensor(DType dtype, std::vector<int64_t> shape) : dtype_(dtype), shape_(std::move(shape)) {
    // 64 bytes behind the end, as tensors of a framework have room there: nothing is written.
    const size_t size = (num_bytes() + 127) / 64 * 64;
    data_ = static_cast<char*>(std::aligned_alloc(64, size));
    std::memset(data_, 0, size);
  }
  ~Tensor() { std::free(data_); }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  int64_t count() const {
    int64_t product = 1;
    for (const int64_t size : shape_) product *= size;
    return product;
  }
  size_t num_bytes() const { return static_cast<size_t>(count() * dtype_size(dtype_)); }
  DType dtype() const { return dtype_; }
  template <class T = void>
  T* data() const {
    return reinterpret_cast<T*>(data_);
  }
  std::vector<char> contents() const { return {data_, data_ + num_bytes()}; }
  void restore(const std::vector<char>& contents) {
    std::memcpy(data_, contents.data(), num_bytes());
  }
  TensorView view() const {
    TensorView view;
    view.data = data();
    view.dtype = dtype_;
    view.rank = static_cast<int>(shape_.size());
    std::copy(shape_.begin(), shape_.end(), view.shape);
    return view;
  }
  double value(int64_t i) const {
    switch (dtype_) {
      case DType::kFloat32:
        return data<float>()[i];
      case DType::kBFloat16:
        return to_float(data<bf16>()[i]);
      case DType::kFloat16:
        return to_float(data<fp16>()[i]);
      case DType::kInt8:
        return data<int8_t>()[i];
      case DType::kUInt8:
        return data<uint8_t>()[i];
      case DType::kInt32:
        return data<int32_t>()[i];
      case DType::kInt64:
        return static_cast<double>(data<int64_t>()[i]);
    }
    return 0.0;
  }
  void set(int64_t i, double value) {
    const auto single = static_cast<float>(value);
    switch (dtype_) {
      case DType::kFloat32:
        data<float>()[i] = single;
        break;
      case DType::kBFloat16:
        from_float(single, data<bf16>() + i);
        break;
      case DType::kFloat16:
        from_float(single, data<fp16>() + i);
        break;
      case DType::kInt8:
        data<int8_t>()[i] = static_cast<int8_t>(value);
        break;
      case DType::kUInt8:
        data<uint8_t>()[i] = static_cast<uint8_t>(value);
        break;
      case DType::kInt32:
        data<int32_t>()[i] = static_cast<int32_t>(value);
        break;
      case DType::kInt64:
        data<int64_t>()[i] = static_cast<int64_t>(value);
        break;
    }
  }

 private:
  DType dtype_;
  std::vector<int64_t> shape_;
  char* data_;
};

// The set under test, what was tested of it, and what failed.
class Bench {
 public:
  explicit Bench(std::string set) : set_(std::move(set)) {}

  // Tensors live as long as the bench's case.
  Tensor& empty(DType dtype, std::vector<int64_t> shape) {
    return tensors_.emplace_back(dtype, std::move(shape));
  }
  Tensor& normal(DType dtype, std::vector<int64_t> shape, double scale = 1.0, double mean = 0.0) {
    Tensor& tensor = empty(dtype, std::move(shape));
    std::normal_distribution<double> draw(mean, scale);
    for (int64_t i = 0; i < tensor.count(); ++i) tensor.set(i, draw(random_));
    return tensor;
  }
  Tensor& whole(DType dtype, std::vector<int64_t> shape, int least, int largest) {
    Tensor& tensor = empty(dtype, std::move(shape));
    std::uniform_int_distribution<int> draw(least, largest);
    for (int64_t i = 0; i < tensor.count(); ++i) tensor.set(i, draw(random_));
    return tensor;
  }
  Tensor& of(DType dtype, std::vector<double> values) {
    Tensor& tensor = empty(dtype, {static_cast<int64_t>(values.size())});
    for (size_t i = 0; i < values.size(); ++i) tensor.set(static_cast<int64_t>(i), values[i]);
    return tensor;
  }
  std::vector<TensorView>& views(std::vector<TensorView> made) {
    return views_.emplace_back(std::move(made));
  }

  // A matrix [in, out] as a scheme stores it; `experts` of them, if not 0. zeros: with zero points.
  LinearWeights linear(SchemeId scheme, DType dtype, int64_t in, int64_t out, int64_t experts = 0,
                       bool zeros = false, bool rounds = true, int64_t groups = 0) {
    const SchemeInfo& info = scheme_info(scheme);
    if (scheme == SchemeId::kDense) {
      const bool pairs = dtype == DType::kBFloat16;
      std::vector<int64_t> shape = {(out + 31) / 32, pairs ? (in + 1) / 2 : in, 32};
      if (pairs) shape.push_back(2);
      return stacked(experts, {{dtype, shape}}, [&](const std::vector<TensorView>& to) {
        Tensor& weight = normal(dtype, {out, in}, 1.0 / std::sqrt(static_cast<double>(in)));
        must(cpu::pack_dense(
            {weight.data(), const_cast<void*>(to[0].data), in, out, true, dtype, dtype}));
      });
    }
    PackQuantizedParams p;
    p.scheme = scheme;
    QuantizedLayout& layout = p.layout;
    layout.in_features = in;
    layout.out_features = out;
    if (groups == 0) groups = info.is_mxfp4 ? (in + 31) / 32 : info.has_groups ? (in + 63) / 64 : 1;
    layout.num_groups = groups;
    const bool eight = info.code_bits == 8;
    Tensor& scale = normal(DType::kFloat32, {out, groups}, 1e-3, eight ? 4e-3 : 3e-2);
    Tensor& zero = whole(DType::kFloat32, {out, groups}, eight ? -9 : 5, 11);
    p.scale = scale.data<float>();
    p.zero = zeros ? zero.data<float>() : nullptr;
    const auto codes_of = [&]() -> Tensor& {
      return whole(DType::kInt8, {out, in}, eight ? -127 : 0, eight ? 127 : 15);
    };
    p.codes = codes_of().data<int8_t>();
    must(cpu::plan_pack_quantized(p, &layout));
    int64_t packed[4], scales[4];
    layout.packed_shape(packed);
    layout.scales_shape(scales);
    const int rank = layout.rank_of_scales();
    std::vector<std::pair<DType, std::vector<int64_t>>> made = {
        {DType::kUInt8, {packed, packed + 4}}, {DType::kFloat32, {scales, scales + rank}}};
    for (int i = 2; i < info.num_tensors; ++i) {  // act; perm, or smooth and shift: none
      const bool permutes = info.num_tensors == 4 && i == 3;
      made.push_back({permutes ? DType::kInt32 : DType::kFloat32, {1}});
    }
    return stacked(experts, made, [&](const std::vector<TensorView>& to) {
      p.codes = codes_of().data<int8_t>();
      p.packed = static_cast<uint8_t*>(const_cast<void*>(to[0].data));
      p.scales = static_cast<float*>(const_cast<void*>(to[1].data));
      must(cpu::pack_quantized(p));
      *static_cast<float*>(const_cast<void*>(to[2].data)) = rounds ? 0.0f : 1.0f;
    });
  }

  // Runs an operator on scalar and on the set, from the same contents of `out`, and compares what
  // both wrote. `table`: the operator's; `op`: a row of kTolerances, and what is printed.
  void compare(const std::string& table, const std::string& op, DType dtype,
               const std::function<Status()>& run, const std::vector<Tensor*>& out,
               const std::string& what = "") {
    tested_.insert(table);
    std::vector<std::vector<char>> before, expected;
    for (Tensor* tensor : out) before.push_back(tensor->contents());
    must(cpu::force_kernel("scalar"));
    must(run());
    for (size_t i = 0; i < out.size(); ++i) {
      expected.push_back(out[i]->contents());
      out[i]->restore(before[i]);
    }
    run_on_set(run);
    ++num_compared_;
    for (size_t i = 0; i < out.size(); ++i) {
      const std::string name = op + " " + dtype_name(dtype) + (what.empty() ? "" : " " + what);
      check(name + (i ? ", output " + std::to_string(i) : ""), *out[i], expected[i],
            tolerance_of(op, dtype));
    }
  }

  void run_on_set(const std::function<Status()>& run) {
    must(cpu::force_kernel(set_.c_str()));
    must(run());
    must(cpu::force_kernel(""));
  }

  // Ends a case: its tensors go.
  void end_case() {
    tensors_.clear();
    views_.clear();
  }
  void fail(const std::string& what) {
    std::printf("FAILED: %s on %s\n", what.c_str(), set_.c_str());
    ++num_failed_;
  }
  const std::string& set() const { return set_; }
  const std::set<std::string>& tested() const { return tested_; }
  int num_compared() const { return num_compared_; }
  int num_failed() const { return num_failed_; }
  std::mt19937_64& random() { return random_; }

 private:
  void must(const Status& status) {
    if (status.ok()) return;
    std::printf("FAILED: %s: %s\n", set_.c_str(), status.message().c_str());
    std::exit(1);
  }

  template <class Fill>
  LinearWeights stacked(int64_t experts,
                        const std::vector<std::pair<DType, std::vector<int64_t>>>& made,
                        Fill&& fill) {
    std::vector<TensorView> all, one;
    for (const auto& [dtype, shape] : made) {
      std::vector<int64_t> full = shape;
      if (experts) full.insert(full.begin(), experts);
      all.push_back(empty(dtype, full).view());
      one.push_back(all.back());
    }
    for (int64_t e = 0; e < std::max<int64_t>(experts, 1); ++e) {
      fill(one);
      for (size_t i = 0; i < one.size(); ++i) {
        int64_t bytes = dtype_size(made[i].first);
        for (const int64_t size : made[i].second) bytes *= size;
        one[i].data = static_cast<const char*>(one[i].data) + bytes;
      }
    }
    LinearWeights weights;
    weights.tensors = views(all).data();
    return weights;
  }

  void check(const std::string& name, const Tensor& made, const std::vector<char>& contents,
             double tolerance) {
    Tensor expected(made.dtype(), {made.count()});
    expected.restore(contents);
    double squares = 0.0;
    int64_t finite = 0;
    for (int64_t i = 0; i < made.count(); ++i) {
      const double value = expected.value(i);
      if (std::isfinite(value)) squares += value * value, ++finite;
    }
    const double scale = std::sqrt(squares / std::max<double>(1.0, static_cast<double>(finite)));
    const bool is_code = made.dtype() == DType::kUInt8;
    for (int64_t i = 0; i < made.count(); ++i) {
      const double a = expected.value(i), b = made.value(i);
      if (a == b || (std::isnan(a) && std::isnan(b))) continue;
      const double allowed = is_code ? 1.0 : tolerance * (std::fabs(a) + scale);
      if (std::fabs(a - b) <= allowed) continue;
      if (is_code && halves_are_near(static_cast<int>(a), static_cast<int>(b))) continue;
      std::printf("%s [%lld]: scalar %g, %s %g, allowed %g\n", name.c_str(),
                  static_cast<long long>(i), a, set_.c_str(), b, allowed);
      return fail(name);
    }
  }
  static bool halves_are_near(int a, int b) {  // two codes of four bits
    return std::abs(a % 16 - b % 16) <= 1 && std::abs(a / 16 - b / 16) <= 1;
  }

  std::string set_;
  std::mt19937_64 random_{53};
  std::deque<Tensor> tensors_;
  std::deque<std::vector<TensorView>> views_;
  std::set<std::string> tested_;
  int num_compared_ = 0, num_failed_ = 0;
};

}  // namespace kernel_sets
