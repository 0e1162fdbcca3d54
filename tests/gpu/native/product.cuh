// A product's reference, and the comparison of a kernel's output with it.
#pragma once

#include "buffers.cuh"
#include "regatta/gemm.h"

namespace regatta::native {

// One thread per output, from the definition in gemm.h, over dequantized operands. slack: how far
// an output moves, at most, while each sum under it moves by 1; squares: the sums' squares, added.
static __global__ void reference_kernel(const float* x, const float* w, const float* bias,
                                        const float* residual, float* out, float* slack,
                                        double* squares, int64_t m_count, int64_t n_all,
                                        int64_t k_count, bool gated) {
  const int64_t width = gated ? n_all / 2 : n_all;
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i >= m_count * width) return;
  const int64_t m = i / width, n = i % width;
  const auto dot = [&](int64_t row) {
    double sum = 0.;
    for (int64_t k = 0; k < k_count; ++k) {
      sum += static_cast<double>(x[m * k_count + k]) * w[row * k_count + k];
    }
    return static_cast<float>(sum);
  };
  float y = dot(n), moves = 1.f;
  double square = static_cast<double>(y) * y;
  if (bias != nullptr) y += bias[n];
  if (gated) {
    float up = dot(width + n);
    square = (square + static_cast<double>(up) * up) / 2.;
    if (bias != nullptr) up += bias[width + n];
    y = y / (1.f + expf(-y));
    moves = 1.1f * fabsf(up) + fabsf(y);  // SiLU is nowhere steeper than 1.1
    y *= up;
  }
  if (residual != nullptr) y += residual[i];
  out[i] = y;
  slack[i] = moves;
  atomicAdd(squares, square);
}

struct Case {
  int64_t m, n, k;
  bool gated, bias, residual, norm, sumsq_out, float_out, scaled_out;
  std::vector<int32_t> ends = {};  // of groups of rows with a weight each; empty: one weight

  int64_t groups() const { return std::max<int64_t>(1, static_cast<int64_t>(ends.size())); }
  int64_t first_row(int64_t group) const { return group == 0 ? 0 : ends[group - 1]; }
  int64_t rows(int64_t group) const { return ends.empty() ? m : ends[group] - first_row(group); }
};

// M rows over G groups, in one of kEndWays ways: where each group ends.
constexpr int kEndWays = 5;
inline std::vector<int32_t> random_ends(int64_t m, int64_t g, int way, Random& random) {
  const int groups = static_cast<int>(g);
  const int one = random.below(groups);
  std::vector<int32_t> ends(groups, 0);
  for (int64_t row = 0; row < m; ++row) {
    const int any = random.below(groups);
    ++ends[way == 0   ? any                               // alike
           : way == 1 ? random.below(any + 1)             // more and more
           : way == 2 ? one                               // all in one
           : way == 3 ? any / 3 * 3                       // two of three empty
                      : random.below(2) * (groups - 1)];  // the first and the last
  }
  for (int i = 1; i < groups; ++i) ends[i] += ends[i - 1];
  return ends;
}

// A weight [N, K] as pack_weight() leaves it. zero: of groups, or null.
struct Packed {
  int64_t group_size;
  Buffer<uint8_t> buffer;

  Packed(GemmOperands operands, DType dtype, const Case& c, int64_t groups,
         const std::vector<int8_t>& codes, const std::vector<float>& scale,
         const std::vector<float>* zero)
      : group_size(cuda::packed_group_size(operands, c.k, groups)),
        buffer(cuda::packed_weight_bytes(c.n, c.k, operands, group_size)) {
    const Buffer<int8_t> code_buffer(codes);
    const Buffer<float> scale_buffer(scale);
    const Buffer<float> zero_buffer(zero != nullptr ? *zero : std::vector<float>());
    PackWeightParams pack;
    pack.codes = code_buffer.data;
    pack.scale = scale_buffer.data;
    pack.zero = zero != nullptr ? zero_buffer.data : nullptr;
    pack.packed = buffer.data;
    pack.out_features = c.n;
    pack.in_features = c.k;
    pack.num_groups = groups;
    pack.operands = operands;
    pack.dtype = dtype;
    CHECK_STATUS(cuda::pack_weight(pack, nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
  }
};

using Runner = std::function<Status(const GemmParams&)>;

constexpr int64_t kGuard = 64;  // elements past every output that must stay as they were

// Compares runner's output with the reference of xf [M, K] and wf [N, K], of groups [G, N, K]; p
// has the operands. Groups without rows have NaN for their biases.
// Allowed: `relative` of an output, and what comes of it where sums are off by `absolute` of the
// root of their mean square.
template <class T>
bool check_product(const Case& c, GemmParams p, const std::vector<float>& xf,
                   const std::vector<float>& wf, const Runner& runner, const std::string& label,
                   double relative, double absolute) {
  const int64_t width = c.gated ? c.n / 2 : c.n;
  Random random(static_cast<uint32_t>(c.m * 131 + c.n * 17 + c.k));
  std::vector<float> biasf = random.floats(c.groups() * c.n, 1.f);
  std::vector<float> residualf = random.floats(c.m * width, 1.f);
  for (int64_t g = 0; g < c.groups(); ++g) {
    if (c.rows(g) == 0) std::fill_n(biasf.begin() + g * c.n, c.n, std::nanf(""));
  }
  const Buffer<T> bias(rounded<T>(biasf)), residual(rounded<T>(residualf));
  const Buffer<float> x(xf), w(wf), bias_values(biasf), residual_values(residualf);
  const Buffer<float> expected(c.m * width), slack(c.m * width);
  const Buffer<int32_t> ends(c.ends);
  const Buffer<double> squares(std::vector<double>{0.});
  const int64_t parts = cuda::ceil_div(width, gemm_sumsq_columns(c.m));
  const Buffer<uint8_t> out((c.m * width + kGuard) * 4), again((c.m * width + kGuard) * 4);
  const Buffer<float> sumsq(c.m * parts);
  std::vector<float> norm_weightf = random.floats(width, 1.5f);
  const Buffer<T> norm_weight(rounded<T>(norm_weightf)), scaled(c.m * width + kGuard);
  for (int64_t g = 0; g < c.groups(); ++g) {
    const int64_t first = c.first_row(g), count = c.rows(g);
    if (count == 0) continue;
    reference_kernel<<<cuda::ceil_div(count * width, 128), 128>>>(
        x.data + first * c.k, w.data + g * c.n * c.k, c.bias ? bias_values.data + g * c.n : nullptr,
        c.residual ? residual_values.data + first * width : nullptr, expected.data + first * width,
        slack.data + first * width, squares.data, count, c.n, c.k, c.gated);
  }
  p.num_groups = static_cast<int64_t>(c.ends.size());
  p.group_ends = c.ends.empty() ? nullptr : ends.data;
  p.num_rows = c.m;
  p.in_features = c.k;
  p.out_features = c.n;
  p.gated = c.gated;
  p.dtype = cuda::Traits<T>::dtype;
  p.out_dtype = c.float_out ? DType::kFloat32 : p.dtype;
  p.bias = c.bias ? bias.data : nullptr;
  p.residual = c.residual ? residual.data : nullptr;
  p.sumsq_out = c.sumsq_out ? sumsq.data : nullptr;
  p.next_norm_weight = norm_weight.data;
  p.scaled_out = c.scaled_out ? scaled.data : nullptr;
  for (const Buffer<uint8_t>* to : {&again, &out}) {
    p.out = to->data;
    const Status status = runner(p);
    if (!status.ok()) {
      printf("FAIL %s: %s\n", label.c_str(), status.message().c_str());
      return false;
    }
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  const auto y = out.host(), y2 = again.host();
  const auto ref = expected.host();
  int64_t bad = y != y2;
  if (bad) printf("FAIL %s: two runs differ\n", label.c_str());
  double worst = 0.;
  const auto value = [&](int64_t i) {
    if (c.float_out) return reinterpret_cast<const float*>(y.data())[i];
    return static_cast<float>(reinterpret_cast<const T*>(y.data())[i]);
  };
  const auto moves = slack.host();
  const double off = absolute * std::sqrt(squares.host()[0] / ref.size());
  // The least numbers of fp16 are 2^-24 apart.
  const bool is_half = !c.float_out && cuda::Traits<T>::dtype == DType::kFloat16;
  const double least = is_half ? 1. / (1 << 25) : 0.;
  int64_t worst_at = 0;
  for (int64_t i = 0; i < c.m * width; ++i) {
    const double error =
        std::fabs(value(i) - ref[i]) / (relative * std::fabs(ref[i]) + off * moves[i] + least);
    if (!(error <= 1.)) ++bad;
    if (!(error <= worst)) worst = error, worst_at = i;
  }
  const int64_t end = c.m * width * (c.float_out ? 4 : 2);
  for (int64_t i = end; i < end + kGuard; ++i) bad += y[i] != 0xff;
  if (c.sumsq_out) {
    const auto s = sumsq.host();
    const int64_t columns = gemm_sumsq_columns(c.m);
    for (int64_t i = 0; i < c.m * parts; ++i) {
      double sum = 0.;
      for (int64_t n = i % parts * columns; n < std::min(width, (i % parts + 1) * columns); ++n) {
        sum += std::pow(value(i / parts * width + n), 2.);
      }
      if (!(std::fabs(s[i] - sum) <= 1e-4 * sum + 1e-6)) ++bad;
    }
  }
  if (c.scaled_out) {
    const auto s = scaled.host();
    std::vector<float> products(s.size(), std::nanf(""));
    for (int64_t i = 0; i < c.m * width; ++i) products[i] = value(i) * norm_weightf[i % width];
    const auto product = rounded<T>(products);
    bad += std::memcmp(s.data(), product.data(), c.m * width * sizeof(T)) != 0;
    for (int64_t i = c.m * width; i < c.m * width + kGuard; ++i) {
      bad += reinterpret_cast<const uint16_t*>(s.data())[i] != 0xffff;
    }
  }
  if (bad != 0) {
    printf(
        "FAIL %s m %ld groups %ld n %ld k %ld gated %d bias %d residual %d sumsq %d scaled %d fp32 "
        "%d: %ld bad, worst %.2f of the tolerance, %g in place of %g\n",
        label.c_str(), c.m, static_cast<int64_t>(c.ends.size()), c.n, c.k, c.gated, c.bias,
        c.residual, c.sumsq_out, c.scaled_out, c.float_out, bad, worst, value(worst_at),
        ref[worst_at]);
  }
  return bad == 0;
}

}  // namespace regatta::native
