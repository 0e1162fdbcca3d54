// Checks products of codes (e4m3 and int8) and what makes the codes, kernels and tiles at random,
// against float references over odd shapes. For Hopper. Packed weights: packed_check.cu.
//
//   codes_check products|rows|blas
// cuBLASLt is found in the folder REGATTA_CUBLASLT, or where the dynamic linker looks.
#include <cuda_fp8.h>

#include <cstring>

#include "cuda/gemm/large/gemm_blas.cuh"
#include "cuda/gemm/select.h"
#include "product.cuh"

using namespace regatta;
using namespace regatta::native;
using namespace regatta::cuda;

namespace {

float e4m3_value(uint8_t bits) {
  __nv_fp8_e4m3 x;
  x.__x = bits;
  return static_cast<float>(x);
}

// x and weight as codes of 8 bits; `theirs` in place of kernels by chance.
template <class T>
bool check_codes(GemmOperands operands, const Case& c, Random& random,
                 const Runner& theirs = nullptr) {
  const bool fp8 = operands == GemmOperands::kFp8;
  std::vector<uint8_t> x(c.m * c.k), w(c.n * c.k);
  std::vector<float> xf(x.size()), wf(w.size()), xs(c.m), ws(c.n);
  for (float& v : xs) v = (1.5f + random.uniform()) * (fp8 ? 0.01f : 0.02f);
  for (float& v : ws) v = (1.5f + random.uniform()) * (fp8 ? 0.004f : 0.01f) / std::sqrt(c.k);
  const auto fill = [&](std::vector<uint8_t>& codes, std::vector<float>& values,
                        const std::vector<float>& scale) {
    for (size_t i = 0; i < codes.size(); ++i) {
      float value;
      if (fp8) {
        codes[i] = __nv_cvt_float_to_fp8(random.uniform() * 448.f, __NV_SATFINITE, __NV_E4M3);
        value = e4m3_value(codes[i]);
      } else {
        const int code = random.below(255) - 127;
        codes[i] = static_cast<uint8_t>(static_cast<int8_t>(code));
        value = static_cast<float>(code);
      }
      values[i] = value * scale[i / c.k];
    }
  };
  fill(x, xf, xs);
  fill(w, wf, ws);
  const Buffer<uint8_t> x_codes(x), w_codes(w);
  const Buffer<float> x_scale(xs), w_scale(ws);
  GemmParams p;
  p.operands = operands;
  p.x = x_codes.data;
  p.weight = w_codes.data;
  p.x_scale = x_scale.data;
  p.weight_scale = w_scale.data;
  GemmTile tile = {8 << random.below(5), 64 << random.below(3), 2 + random.below(3),
                   1 << random.below(4), random.below(6) - 1};
  const int columns = 128 + 64 * random.below(3), kernel = random.below(5);
  const Runner runner = [&](const GemmParams& q) {
    if (theirs) return theirs(q);
    if (kernel == 0) return gemm_sm90(q, tile, nullptr);
    if (kernel == 1) return gemm_sm90(q, nullptr);
    if (kernel == 4 && gemm_stream_codes_sm90_refuses(q) == nullptr) {
      return gemm_stream_codes_sm90(q, nullptr,
                                    {tile.stages, 1 + tile.tokens / 32, tile.trigger < 0}, nullptr);
    }
    if (kernel == 2 && gemm_tiles_sm90_refuses(q) == nullptr) {
      return gemm_tiles_sm90(q, columns, nullptr);
    }
    return gemm(q, {}, nullptr, nullptr);
  };
  char label[160];
  snprintf(label, sizeof(label), "%s %s kernel %d tile %dx%d stages %d split %d columns %d",
           fp8 ? "fp8" : "int8", dtype_name(Traits<T>::dtype), kernel, tile.tokens, tile.features,
           tile.stages, tile.split, columns);
  const double relative = Traits<T>::dtype == DType::kFloat16 ? 1.5e-3 : 8e-3;
  // fp8: the hardware's own sums; cuBLASLt's path rounds gate and up once more.
  return check_product<T>(c, p, xf, wf, runner, label, c.float_out ? 2e-3 : relative,
                          theirs && c.gated ? 3e-2
                          : fp8             ? 1.2e-2
                                            : 3e-4);
}

// e4m3 with scales of blocks of 128 columns, x quantized by quantize_rows().
template <class T>
bool check_blocks(const Case& c, Random& random, const Runner& theirs = nullptr) {
  const int64_t blocks = ceil_div(c.k, kScaleBlock);
  const int64_t scale_rows = random.below(2) || theirs ? kScaleBlock : 1;
  const bool normalize = random.below(2);
  std::vector<float> xf = random.floats(c.m * c.k, 1.7f), normf = random.floats(c.k, 1.f);
  for (size_t i = 0; i < xf.size(); ++i) xf[i] *= i / kScaleBlock % 3 == 1 ? 0.03f : 1.f;
  const Buffer<T> x(rounded<T>(xf)), norm(rounded<T>(normf));
  std::vector<uint8_t> w(c.n * c.k);
  std::vector<float> wf(w.size()), scale(ceil_div(c.n, scale_rows) * blocks);
  for (float& v : scale) v = (1.5f + random.uniform()) * 0.004f / std::sqrt(c.k);
  for (int64_t i = 0; i < c.n * c.k; ++i) {
    w[i] = __nv_cvt_float_to_fp8(random.uniform() * 448.f, __NV_SATFINITE, __NV_E4M3);
    wf[i] = e4m3_value(w[i]) * scale[i / c.k / scale_rows * blocks + i % c.k / kScaleBlock];
  }
  const int64_t stride = gemm_block_stride(c.m);
  const Buffer<uint8_t> w_codes(w), codes(c.m * c.k);
  const Buffer<float> w_scale(scale), x_scale(blocks * stride);
  QuantizeRowsParams q;
  q.x = x.data;
  q.norm_weight = normalize ? norm.data : nullptr;
  q.codes = codes.data;
  q.scale = x_scale.data;
  q.num_rows = c.m;
  q.width = c.k;
  q.epsilon = 1e-5f;
  q.normalize = normalize;
  q.blocks = true;
  q.dtype = Traits<T>::dtype;
  CHECK_STATUS(quantize_rows(q, nullptr));
  const auto got = codes.host();
  const auto got_scale = x_scale.host();
  int64_t bad = 0;
  for (int64_t row = 0; row < c.m; ++row) {
    double squares = 0.;
    for (int64_t i = 0; i < c.k; ++i) squares += std::pow(xf[row * c.k + i], 2.);
    const double r = normalize ? 1. / std::sqrt(squares / c.k + 1e-5) : 1.;
    for (int64_t i = 0; i < c.k; ++i) {
      const double value = xf[row * c.k + i] * r * (normalize ? normf[i] : 1.);
      const float by = got_scale[i / kScaleBlock * stride + row];
      const float code = e4m3_value(got[row * c.k + i]);
      const double step = std::max(std::fabs(value / by) / 16., 1. / 1024);
      if (!(std::fabs(code - value / by) <= step * 1.001)) ++bad;
      xf[row * c.k + i] = code * by;
    }
  }
  if (bad != 0) printf("FAIL codes of blocks m %ld k %ld: %ld bad\n", c.m, c.k, bad);
  GemmParams p;
  p.operands = GemmOperands::kFp8;
  p.x = codes.data;
  p.weight = w_codes.data;
  p.x_scale = x_scale.data;
  p.weight_scale = w_scale.data;
  p.scale_rows = scale_rows;
  const GemmTile tile = {8 << random.below(4), 64 << random.below(2), 2 + random.below(3),
                         1 << random.below(4), random.below(6) - 1};
  const int kernel = random.below(3);
  const Runner runner = [&](const GemmParams& g) {
    if (theirs) return theirs(g);
    if (kernel == 0) return gemm_sm90(g, tile, nullptr);
    if (kernel == 1 && gemm_tiles_sm90_refuses(g) == nullptr) {
      return gemm_tiles_sm90(g, 128, nullptr);
    }
    return gemm(g, {}, nullptr, nullptr);
  };
  char label[160];
  snprintf(label, sizeof(label), "blocks of %ld %s kernel %d tile %dx%d stages %d split %d",
           scale_rows, dtype_name(Traits<T>::dtype), kernel, tile.tokens, tile.features,
           tile.stages, tile.split);
  const double relative = Traits<T>::dtype == DType::kFloat16 ? 1.5e-3 : 8e-3;
  return bad == 0 && check_product<T>(c, p, xf, wf, runner, label, c.float_out ? 2e-3 : relative,
                                      theirs && c.gated ? 3e-2 : 3e-3);
}

// One launch gives what two give, and a row of int8 the same whatever its company.
template <class T>
int check_quantized(Random& random) {
  int failures = 0, cases = 0;
  for (const int64_t k : {16, 1040, 4096, 14336}) {
    for (const int64_t n : {64, 1008}) {
      for (int variant = 0; variant < 16; ++variant) {
        const bool fp8 = variant & 1, gated = variant & 2, normalize = variant & 4;
        const bool fixed = variant & 8;
        constexpr int64_t kCount = 13;
        const int64_t width = gated ? n / 2 : n;
        std::vector<float> xf = random.floats(kCount * k, 3.f), normf = random.floats(k, 1.f);
        std::vector<uint8_t> w(n * k);
        for (uint8_t& code : w) code = static_cast<uint8_t>(random.below(256) & 0xbf);
        const Buffer<uint8_t> weight(w);
        const Buffer<T> x(rounded<T>(xf)), norm(rounded<T>(normf)), out(kCount * width),
            alone(width);
        const Buffer<float> x_scale(kCount), weight_scale(std::vector<float>(n, 1e-3f)),
            static_scale(std::vector<float>{0.01f});
        const Buffer<uint8_t> codes(kCount * k);
        QuantizeRowsParams q;
        q.x = x.data;
        q.norm_weight = normalize ? norm.data : nullptr;
        q.static_scale = fixed ? static_scale.data : nullptr;
        q.codes = codes.data;
        q.scale = x_scale.data;
        q.width = k;
        q.epsilon = 1e-5f;
        q.normalize = normalize;
        q.operands = fp8 ? GemmOperands::kFp8 : GemmOperands::kInt8;
        q.dtype = Traits<T>::dtype;
        GemmParams p;
        p.operands = q.operands;
        p.weight = weight.data;
        p.weight_scale = weight_scale.data;
        p.in_features = k;
        p.out_features = n;
        p.gated = gated;
        p.dtype = p.out_dtype = q.dtype;
        const auto bits_of = [&](int64_t rows, int64_t first, bool one_launch,
                                 const Buffer<T>& to) {
          QuantizeRowsParams some = q;
          some.num_rows = p.num_rows = rows;
          some.x = x.data + first * k;
          p.x = codes.data;
          p.x_scale = x_scale.data;
          p.out = to.data;
          if (one_launch) {
            CHECK_STATUS(gemm_stream_codes_sm90(p, &some, nullptr));
          } else {
            CHECK_STATUS(quantize_rows(some, nullptr));
            CHECK_STATUS(gemm(p, {}, nullptr, nullptr));
          }
          CHECK_CUDA(cudaDeviceSynchronize());
          return to.host();
        };
        int bad = 0;
        const auto together = bits_of(kCount, 0, false, out);
        for (int64_t row = 0; row < kCount; ++row) {
          const auto one = bits_of(1, row, true, alone);
          const auto two = bits_of(1, row, false, alone);
          bad += std::memcmp(one.data(), two.data(), width * sizeof(T)) != 0;
          if (fp8) continue;  // whose sums are rounded by the hardware
          bad += std::memcmp(one.data(), together.data() + row * width, width * sizeof(T)) != 0;
        }
        if (bad != 0) {
          printf("FAIL quantized k %ld n %ld fp8 %d gated %d norm %d static %d: %d rows differ\n",
                 k, n, fp8, gated, normalize, fixed, bad);
        }
        failures += bad != 0;
        ++cases;
      }
    }
  }
  printf("quantized products: %d cases, %d failures\n", cases, failures);
  return failures;
}

template <class T>
int check_quantize(Random& random) {
  int failures = 0, cases = 0;
  for (const int64_t m : {1, 3, 130}) {
    for (const int64_t k : {8, 200, 4096, 14336}) {
      for (int variant = 0; variant < 16; ++variant) {
        const bool fp8 = variant & 1, fixed = variant & 2, normalize = variant & 4;
        const bool weighted = normalize && random.below(2), smooth = !fp8 && variant & 8;
        std::vector<float> x = random.floats(m * k, 3.f), norm = random.floats(k, 1.f);
        const std::vector<float> shift = random.floats(k, .5f), factor = random.floats(k, 2.f);
        if (m == 3) std::fill(x.begin() + k, x.begin() + 2 * k, 0.f);
        const Buffer<T> x_buffer(rounded<T>(x)), norm_buffer(rounded<T>(norm));
        const Buffer<float> shift_buffer(shift), factor_buffer(factor);
        const float fixed_scale = fp8 ? 0.005f : 0.02f;
        const Buffer<float> fixed_buffer(std::vector<float>{fixed ? fixed_scale : 0.f});
        const Buffer<uint8_t> codes(m * k);
        const Buffer<float> scale(m);
        QuantizeRowsParams p;
        p.x = x_buffer.data;
        p.norm_weight = weighted ? norm_buffer.data : nullptr;
        p.shift = smooth && random.below(2) ? shift_buffer.data : nullptr;
        p.smooth = smooth ? factor_buffer.data : nullptr;
        p.static_scale = fixed_buffer.data;
        p.codes = codes.data;
        p.scale = scale.data;
        p.num_rows = m;
        p.width = k;
        p.epsilon = 1e-5f;
        p.normalize = normalize;
        p.operands = fp8 ? GemmOperands::kFp8 : GemmOperands::kInt8;
        p.dtype = Traits<T>::dtype;
        CHECK_STATUS(quantize_rows(p, nullptr));
        const auto q = codes.host();
        const auto s = scale.host();
        int64_t bad = 0;
        for (int64_t row = 0; row < m; ++row) {
          double squares = 0., largest = 0.;
          for (int64_t i = 0; i < k; ++i) squares += std::pow(x[row * k + i], 2.);
          const double r = normalize ? 1. / std::sqrt(squares / k + 1e-5) : 1.;
          std::vector<double> v(k);
          for (int64_t i = 0; i < k; ++i) {
            v[i] = x[row * k + i] * r * (weighted ? norm[i] : 1.);
            if (p.shift != nullptr) v[i] += shift[i];
            if (p.smooth != nullptr) v[i] *= factor[i];
            largest = std::max(largest, std::fabs(v[i]));
          }
          const double limit = fp8 ? 448. : 127.;
          const double expected = fixed ? fixed_scale : largest > 0. ? largest / limit : 1.;
          // A row of zeros may have any scale.
          if (largest > 0. && std::fabs(s[row] - expected) > 1e-5 * expected) ++bad;
          for (int64_t i = 0; i < k; ++i) {
            const uint8_t code = q[row * k + i];
            const double at = std::max(-limit, std::min(limit, v[i] / expected));
            const double got = fp8 ? e4m3_value(code) : static_cast<int8_t>(code);
            const double step = fp8 ? std::max(std::fabs(at) / 16., 1. / 1024) : 0.5;
            if (!(std::fabs(got - at) <= step * 1.001)) ++bad;
          }
        }
        if (bad != 0) {
          printf(
              "FAIL quantize m %ld k %ld fp8 %d static %d norm %d weight %d smooth %d: %ld bad\n",
              m, k, fp8, fixed, normalize, weighted, smooth, bad);
        }
        failures += bad != 0;
        ++cases;
      }
    }
  }
  printf("quantize_rows: %d cases, %d failures\n", cases, failures);
  return failures;
}

// Rows have the same codes and scales whoever holds them.
template <class T>
int check_ways(Random& random) {
  int failures = 0, cases = 0;
  constexpr int64_t kValues = 130 * 32768;
  std::vector<float> xf = random.floats(kValues, 3.f), normf = random.floats(32768, 1.f);
  const Buffer<T> x(rounded<T>(xf)), norm(rounded<T>(normf));
  const Buffer<float> fixed(std::vector<float>{0.01f});
  struct Held {
    Buffer<uint8_t> codes{kValues + kGuard};
    Buffer<float> scale{1000 + kGuard};
  };
  const Held block, other;
  for (const int64_t k : {8, 200, 2048, 2056, 4096, 8200, 14336, 16384, 20000, 32768}) {
    for (const int64_t m : {1, 7, 130, 1000}) {
      for (int variant = 0; variant < 8; ++variant) {
        QuantizeRowsParams q;
        q.x = x.data;
        q.num_rows = m;
        q.width = k;
        q.epsilon = 1e-5f;
        q.operands = variant & 1 ? GemmOperands::kInt8 : GemmOperands::kFp8;
        q.static_scale = variant & 2 ? fixed.data : nullptr;
        q.normalize = variant & 4;
        if (q.normalize) q.norm_weight = norm.data;
        q.dtype = Traits<T>::dtype;
        if (m * k > kValues) continue;
        const auto run = [&](const Held& held, QuantizeWay way) {
          q.codes = held.codes.data;
          q.scale = held.scale.data;
          CHECK_CUDA(cudaMemset(held.codes.data, 0xff, held.codes.size));
          CHECK_CUDA(cudaMemset(held.scale.data, 0xff, held.scale.size * sizeof(float)));
          CHECK_STATUS(quantize_rows(q, way, nullptr));
          CHECK_CUDA(cudaDeviceSynchronize());
        };
        const auto scales = [](const Held& held) {
          const auto values = held.scale.host();
          std::vector<uint8_t> bytes(values.size() * sizeof(float));
          std::memcpy(bytes.data(), values.data(), bytes.size());
          return bytes;
        };
        for (const QuantizeWay way : {QuantizeWay::kWarp, QuantizeWay::kCluster}) {
          if (!can_quantize(q, way)) continue;
          run(block, QuantizeWay::kBlock);
          run(other, way);
          const bool same =
              block.codes.host() == other.codes.host() && scales(block) == scales(other);
          if (!same) {
            printf("FAIL %s %s m %ld k %ld int8 %d static %d norm %d\n", dtype_name(q.dtype),
                   way == QuantizeWay::kWarp ? "warp" : "cluster", m, k, variant & 1,
                   variant >> 1 & 1, variant >> 2);
          }
          failures += !same;
          ++cases;
        }
      }
    }
  }
  printf("quantize_rows by warps and clusters: %d cases, %d failures\n", cases, failures);
  return failures;
}

constexpr int64_t kRows[] = {1, 2, 5, 8, 9, 17, 33, 64, 100, 127, 128, 129, 257};
constexpr int64_t kShapes[][2] = {{64, 64},    {208, 144}, {80, 16},     {1008, 528},
                                  {264, 1040}, {8, 4112},  {1536, 2048}, {768, 640}};

// Scratch for products of up to `rows` rows and `columns` rows of weight, and cuBLASLt's handle.
GemmResources blas_resources(int64_t rows, int64_t columns) {
  GemmResources resources;
  GemmParams widest;
  widest.num_rows = rows;
  widest.out_features = columns;
  widest.gated = true;
  resources.scratch_bytes = gemm_scratch_bytes(widest);
  CHECK_CUDA(cudaMalloc(&resources.scratch, resources.scratch_bytes));
  const Status status = create_blas(&resources.blas);
  if (!status.ok()) printf("without cuBLASLt: %s\n", status.message().c_str());
  return resources;
}

// Rows quantized as they are folded have the codes of rows folded first.
template <class T>
int check_gated_rows(Random& random) {
  int failures = 0, cases = 0;
  for (const int64_t m : {1, 3, 130}) {
    for (const int64_t k : {8, 200, 2048, 2056, 4104, 14336, 20000}) {
      for (const int variant : {0, 1, 2, 3}) {
        std::vector<float> bothf = random.floats(m * 2 * k, 3.f);
        const Buffer<T> both(rounded<T>(bothf)), inner(m * k);
        const Buffer<float> fixed(std::vector<float>{0.004f});
        const int64_t num_scales = gemm_block_stride(m) * ceil_div(k, kScaleBlock);
        const Buffer<uint8_t> codes(m * k + kGuard), folded_codes(m * k + kGuard);
        const Buffer<float> scale(num_scales), folded_scale(num_scales);
        QuantizeRowsParams q;
        q.x = inner.data;
        q.static_scale = variant & 1 ? fixed.data : nullptr;
        q.codes = codes.data;
        q.scale = scale.data;
        q.num_rows = m;
        q.width = k;
        q.blocks = variant & 2;
        q.dtype = Traits<T>::dtype;
        CHECK_STATUS(fold_gate(both.data, inner.data, q.dtype, m, k, nullptr));
        CHECK_STATUS(quantize_rows(q, nullptr));
        q.x = both.data;
        q.codes = folded_codes.data;
        q.scale = folded_scale.data;
        q.gated = true;
        CHECK_STATUS(quantize_rows(q, nullptr));
        CHECK_CUDA(cudaDeviceSynchronize());
        const auto s = scale.host(), t = folded_scale.host();
        const bool same = codes.host() == folded_codes.host() &&
                          std::memcmp(s.data(), t.data(), s.size() * sizeof(float)) == 0;
        if (!same) {
          printf("FAIL gated rows m %ld k %ld static %d blocks %d\n", m, k, variant & 1,
                 variant >> 1);
        }
        failures += !same;
        ++cases;
      }
    }
  }
  printf("gated rows to codes: %d cases, %d failures\n", cases, failures);
  return failures;
}

// The same bits where a product is folded while it is quantized as where it is before.
template <class T>
int check_unfolded(const GemmResources& resources, Random& random) {
  int failures = 0, cases = 0, refused = 0;
  for (const int64_t m : {129, 257, 1024}) {
    for (const int64_t n : {1056, 4096}) {
      constexpr int64_t kWidth = 1040;
      std::vector<uint8_t> xv(m * kWidth), wv(n * kWidth);
      for (auto* codes : {&xv, &wv}) {
        for (uint8_t& code : *codes) code = static_cast<uint8_t>(random.below(256) & 0xb7);
      }
      const Buffer<uint8_t> x(xv), w(wv), codes(m * n), more_codes(m * n);
      const Buffer<T> out(m * n);
      const Buffer<float> x_scale(std::vector<float>(m, 0.01f));
      const Buffer<float> w_scale(std::vector<float>(n, 0.003f));
      const Buffer<float> scale(m), more_scale(m);
      GemmParams p;
      p.operands = GemmOperands::kFp8;
      p.x = x.data;
      p.weight = w.data;
      p.x_scale = x_scale.data;
      p.weight_scale = w_scale.data;
      p.num_rows = m;
      p.in_features = kWidth;
      p.out_features = n;
      p.dtype = p.out_dtype = Traits<T>::dtype;
      p.out = out.data;
      p.gated = true;
      if (!gemm_blas_codes_sm90(p, resources, nullptr).ok()) {
        ++refused;
        continue;
      }
      QuantizeRowsParams q;
      q.x = out.data;
      q.codes = codes.data;
      q.scale = scale.data;
      q.num_rows = m;
      q.width = n / 2;
      q.dtype = p.dtype;
      CHECK_STATUS(quantize_rows(q, nullptr));
      q.codes = more_codes.data;
      q.scale = more_scale.data;
      CHECK_STATUS(gemm_blas_unfolded_sm90(p, q, resources, nullptr));
      CHECK_CUDA(cudaDeviceSynchronize());
      const bool same = codes.host() == more_codes.host() && scale.host() == more_scale.host();
      if (!same) printf("FAIL unfolded m %ld n %ld\n", m, n);
      failures += !same;
      ++cases;
    }
  }
  printf("cuBLASLt unfolded: %d cases, %d failures, %d refused\n", cases, failures, refused);
  return failures;
}

int check_blas() {
  Random random(13);
  const GemmResources resources = blas_resources(8192, 4096);
  if (resources.blas == nullptr) return 0;
  int failures =
      check_unfolded<__nv_bfloat16>(resources, random) + check_unfolded<__half>(resources, random);
  int cases = 0, bad = 0, refused = 0;
  // By turns alone and as gemm() chooses; where cuBLASLt will not, ours.
  const Runner theirs = [&](const GemmParams& p) {
    if (cases % 3 == 0 && !p.gated && gemm_blas_codes_sm90_refuses(p) == nullptr &&
        gemm_tiles_sm90_refuses(p) == nullptr) {
      return gemm(p, resources, "blas_codes", nullptr);
    }
    const Status status = gemm_blas_codes_sm90(p, resources, nullptr);
    if (status.ok()) return status;
    if (++refused <= 4) {
      printf("refused: m %ld n %ld k %ld gated %d bias %d fp32 %d: %s\n", p.num_rows,
             p.out_features, p.in_features, p.gated, p.bias != nullptr,
             p.out_dtype == DType::kFloat32, status.message().c_str());
    }
    return gemm(p, {}, nullptr, nullptr);
  };
  constexpr int64_t kManyRows[] = {1, 5, 64, 100, 129, 256, 257, 1000, 1024, 8000};
  constexpr int64_t kBlockShapes[][2] = {{208, 512}, {1536, 2048}, {768, 1936}, {64, 1536}};
  for (const bool blocks : {false, true}) {
    cases = bad = refused = 0;
    for (const int64_t rows : kManyRows) {
      const int64_t m = blocks ? round_up(rows, 128) : rows;
      for (int i = 0; i < (rows >= 1000 ? 2 : blocks ? 4 : 8); ++i) {
        // Of many rows the small shapes alone: numbers are drawn on the host.
        const auto& shape =
            blocks ? kBlockShapes[rows >= 1000 ? 0 : i] : kShapes[rows >= 1000 ? 3 + i : i];
        for (int variant = 0; variant < 2; ++variant) {
          Case c = {m, shape[0], shape[1]};
          c.gated = variant == 1 && c.n % 16 == 0;
          c.bias = random.below(2);
          c.residual = !c.gated && random.below(2);
          c.float_out = !c.gated && !c.bias && !c.residual && random.below(2);
          const bool half = random.below(2);
          if (blocks) {
            bad += !(half ? check_blocks<__half>(c, random, theirs)
                          : check_blocks<__nv_bfloat16>(c, random, theirs));
          } else {
            bad += !(half ? check_codes<__half>(GemmOperands::kFp8, c, random, theirs)
                          : check_codes<__nv_bfloat16>(GemmOperands::kFp8, c, random, theirs));
          }
          ++cases;
        }
      }
    }
    printf("cuBLASLt, fp8%s: %d cases, %d failures, %d runs refused\n", blocks ? " in blocks" : "",
           cases, bad, refused);
    failures += bad;
  }
  return failures;
}

int check_rows() {
  Random random(11);
  return check_quantize<__nv_bfloat16>(random) + check_quantize<__half>(random) +
         check_ways<__nv_bfloat16>(random) + check_ways<__half>(random) +
         check_gated_rows<__nv_bfloat16>(random) + check_gated_rows<__half>(random);
}

// Blocks of gemm_tiles_sm90() that make several tiles, one after another.
int check_many_tiles(Random& random) {
  int cases = 0, bad = 0;
  for (const int columns : {128, 192, 256}) {
    for (const bool gated : {false, true}) {
      Case c = {4153, 3072, 144};
      c.gated = gated;
      c.bias = columns != 192;
      c.residual = !gated;
      const Runner tiles = [&](const GemmParams& p) {
        return gemm_tiles_sm90(p, columns, nullptr);
      };
      bad += !check_codes<__nv_bfloat16>(GemmOperands::kFp8, c, random, tiles);
      ++cases;
    }
  }
  printf("fp8, several tiles a block: %d cases, %d failures\n", cases, bad);
  return bad;
}

int check_products() {
  Random random(11);
  int failures = check_quantize<__nv_bfloat16>(random) + check_quantize<__half>(random);
  failures += check_quantized<__nv_bfloat16>(random) + check_quantized<__half>(random);
  failures += check_many_tiles(random);
  for (const GemmOperands operands : {GemmOperands::kFp8, GemmOperands::kInt8}) {
    int cases = 0, bad = 0;
    for (const int64_t m : kRows) {
      for (const auto& shape : kShapes) {
        for (int variant = 0; variant < 2; ++variant) {
          Case c = {m, shape[0], shape[1]};
          c.gated = variant == 1 && c.n % 16 == 0;
          c.bias = random.below(2);
          c.residual = !c.gated && random.below(2);
          c.sumsq_out = !c.gated && random.below(2);
          c.float_out = !c.gated && random.below(4) == 0;
          bad += !(random.below(2) ? check_codes<__nv_bfloat16>(operands, c, random)
                                   : check_codes<__half>(operands, c, random));
          ++cases;
        }
      }
    }
    printf("%s: %d cases, %d failures\n", operands == GemmOperands::kFp8 ? "fp8" : "int8", cases,
           bad);
    failures += bad;
  }
  {
    int cases = 0, bad = 0;
    for (const int64_t m : kRows) {
      for (const auto& shape : kShapes) {
        for (int variant = 0; variant < 2; ++variant) {
          Case c = {m, shape[0], shape[1]};
          c.gated = variant == 1 && c.n % 16 == 0;
          c.bias = random.below(2);
          c.residual = !c.gated && random.below(2);
          bad += !(random.below(2) ? check_blocks<__nv_bfloat16>(c, random)
                                   : check_blocks<__half>(c, random));
          ++cases;
        }
      }
    }
    printf("fp8 in blocks: %d cases, %d failures\n", cases, bad);
    failures += bad;
  }
  return failures;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string part = argc > 1 ? argv[1] : "";
  setvbuf(stdout, nullptr, _IOLBF, 4096);
  if (part == "products") return check_products() != 0;
  if (part == "rows") return check_rows() != 0;
  if (part == "blas") return check_blas() != 0;
  printf("codes_check products|rows|blas, got '%s'\n", part.c_str());
  return 2;
}
