// Checks products of codes (e4m3 and int8) against float references over odd shapes, and times all
// products of a Llama-3-8B decode step and of its prefill. Packed weights: bench_packed.cu.
//
//   nvcc -O3 -std=c++17 --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a \
//        -Icsrc/cuda -Icsrc/include csrc/cuda/bench/bench_codes.cu csrc/cuda/gem*.cu \
//        csrc/cuda/quantize_rows.cu -o bench_codes
//   ./bench_codes check [blas|quantize] | accuracy | chain [fp8] | large | compare | quantize |
//                 tune fp8|int8 ROWS...
// cuBLASLt is found in the folder REGATTA_CUBLASLT, or where the dynamic linker looks.
#include <cuda_fp8.h>

#include <cstring>

#include "bench.cuh"
#include "gemm_blas.cuh"

using namespace regatta;
using namespace regatta::bench;
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
  CHECK_STATUS(create_blas(&resources.blas));
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
      gemm_blas_unfolded_sm90_faster(p, q, resources, nullptr);  // runs both
      CHECK_CUDA(cudaDeviceSynchronize());
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
  int failures =
      check_unfolded<__nv_bfloat16>(resources, random) + check_unfolded<__half>(resources, random);
  int cases = 0, bad = 0, refused = 0;
  // By turns alone and as gemm() chooses; where cuBLASLt will not, ours.
  const Runner theirs = [&](const GemmParams& p) {
    if (cases % 3 == 0 && gemm_blas_codes_sm90_refuses(p) == nullptr &&
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

int check_all() {
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

// Distance of e4m3 products of normal numbers from the products of the same codes in doubles, of
// the root mean square, and its mean toward zero: what the hardware's sums cost. And the distance
// from the products of the numbers themselves: what the codes cost.
int main_accuracy() {
  for (const int64_t k : {4096, 14336}) {
    constexpr int64_t kN = 256, kM = 128;
    std::mt19937 engine(5);
    std::normal_distribution<float> normal;
    std::vector<float> xf(kM * k), wf(kN * k), x_true, w_true, xs(kM), ws(kN);
    std::vector<uint8_t> x(kM * k), w(kN * k);
    const auto encode = [&](std::vector<float>& values, std::vector<float>& real,
                            std::vector<uint8_t>& codes, std::vector<float>& scale) {
      for (float& v : values) v = normal(engine);
      real = values;
      for (size_t row = 0; row < scale.size(); ++row) {
        float largest = 0.f;
        for (int64_t i = 0; i < k; ++i) largest = std::max(largest, std::fabs(values[row * k + i]));
        scale[row] = largest / 448.f;
        for (int64_t i = 0; i < k; ++i) {
          float& v = values[row * k + i];
          codes[row * k + i] = __nv_cvt_float_to_fp8(v / scale[row], __NV_SATFINITE, __NV_E4M3);
          v = e4m3_value(codes[row * k + i]) * scale[row];
        }
      }
    };
    encode(xf, x_true, x, xs);
    encode(wf, w_true, w, ws);
    const Buffer<float> expected(kM * kN), real(kM * kN), out(kM * kN);
    const Buffer<float> xb(xf), wb(wf), xt(x_true), wt(w_true), x_scale(xs), w_scale(ws);
    const Buffer<uint8_t> x_codes(x), w_codes(w);
    reference_kernel<<<kM * kN / 128, 128>>>(xb.data, wb.data, nullptr, nullptr, expected.data, kM,
                                             kN, k, false);
    reference_kernel<<<kM * kN / 128, 128>>>(xt.data, wt.data, nullptr, nullptr, real.data, kM, kN,
                                             k, false);
    const auto want = expected.host(), exact = real.host();
    GemmParams p;
    p.operands = GemmOperands::kFp8;
    p.x = x_codes.data;
    p.weight = w_codes.data;
    p.x_scale = x_scale.data;
    p.weight_scale = w_scale.data;
    p.out = out.data;
    p.out_dtype = DType::kFloat32;
    p.in_features = k;
    p.out_features = kN;
    const auto report = [&](const char* name, int64_t rows, const Runner& runner) {
      p.num_rows = rows;
      CHECK_STATUS(runner(p));
      CHECK_CUDA(cudaDeviceSynchronize());
      const auto got = out.host();
      double error = 0., size = 0., shrink = 0., cost = 0.;
      for (int64_t i = 0; i < rows * kN; ++i) {
        error += std::pow(got[i] - want[i], 2.);
        size += std::pow(want[i], 2.);
        shrink += (std::fabs(want[i]) - std::fabs(got[i])) / std::fabs(want[i] + 1e-9);
        cost += std::pow(want[i] - exact[i], 2.);
      }
      printf("K %ld %s M %ld: sums %.5f (toward zero %.5f), codes %.5f\n", k, name, rows,
             std::sqrt(error / size), shrink / (rows * kN), std::sqrt(cost / size));
    };
    report("stream_codes", 1,
           [](const GemmParams& q) { return gemm_stream_codes_sm90(q, nullptr, nullptr); });
    for (const int tokens : {32, 128}) {
      report("sm90", tokens, [&](const GemmParams& q) {
        return gemm_sm90(q, GemmTile{tokens, 128, 4, 1, 4}, nullptr);
      });
    }
    for (const int columns : {128, 256}) {
      report("tiles", 128,
             [&](const GemmParams& q) { return gemm_tiles_sm90(q, columns, nullptr); });
    }
  }
  return 0;
}

// --------------------------------------------------------------------------------------- timing

__global__ void fill_kernel(uint8_t* p, int64_t n, uint32_t seed) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < n;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    p[i] = random_byte(i, seed) & 0xb7;  // e4m3 without NaN, and of moderate size
  }
}

constexpr const char* kNames[] = {"dense", "fp8", "int8"};

struct Model {
  std::vector<uint8_t*> weights;
  uint8_t* codes;
  uint8_t *hidden, *qkv, *inner, *norm_weight;  // 16-bit
  float *x_scale, *weight_scale, *logits;
  double bytes = 0.;

  explicit Model(int64_t rows) {
    for (int i = 0; i < kLayers * 4 + 1; ++i) {
      const int kind = i == kLayers * 4 ? kHead : i % 4;
      const int64_t n = kN[kind] * kK[kind];
      uint8_t* w;
      CHECK_CUDA(cudaMalloc(&w, n));
      fill_kernel<<<2048, 256>>>(w, n, i);
      weights.push_back(w);
      bytes += static_cast<double>(n);
    }
    CHECK_CUDA(cudaMalloc(&codes, rows * kInner));
    CHECK_CUDA(cudaMalloc(&hidden, rows * kHidden * 2));
    CHECK_CUDA(cudaMalloc(&qkv, rows * kQkv * 2));
    CHECK_CUDA(cudaMalloc(&inner, rows * kInner * 2));
    const int64_t num_scales = gemm_block_stride(rows) * ceil_div(kInner, kScaleBlock);
    CHECK_CUDA(cudaMalloc(&x_scale, num_scales * 4));
    CHECK_CUDA(cudaMalloc(&weight_scale, kVocab * 4));
    CHECK_CUDA(cudaMalloc(&logits, std::min<int64_t>(rows, 128) * kVocab * 4));
    CHECK_CUDA(cudaMalloc(&norm_weight, kHidden * 2));
    fill_kernel<<<16, 256>>>(norm_weight, kHidden * 2, 97);
    fill_kernel<<<1024, 256>>>(codes, rows * kInner, 99);
    fill_kernel<<<1024, 256>>>(hidden, rows * kHidden * 2, 98);
    set_kernel<<<64, 256>>>(x_scale, num_scales, 1e-3f);
    set_kernel<<<64, 256>>>(weight_scale, kVocab, 1e-3f);
    CHECK_CUDA(cudaDeviceSynchronize());
  }

  using Launcher = std::function<Status(const GemmParams&, const QuantizeRowsParams*)>;

  // launcher: in place of gemm() or gemm_quantized().
  void run(GemmOperands operands, int index, int64_t rows, bool quantize, cudaStream_t stream,
           const Launcher& launcher = nullptr) const {
    const int kind = index == kLayers * 4 ? kHead : index % 4;
    GemmParams p;
    p.operands = operands;
    p.x = codes;
    p.x_scale = x_scale;
    p.weight = weights[index];
    p.weight_scale = weight_scale;
    p.num_rows = rows;
    p.in_features = kK[kind];
    p.out_features = kN[kind];
    p.out = kind == kQkvProjection ? qkv : kind == kGateUp ? inner : hidden;
    if (kind == kHead) p.out = logits, p.out_dtype = DType::kFloat32;
    if (kind == kOutProjection || kind == kDown) p.residual = hidden;
    p.gated = kind == kGateUp;
    QuantizeRowsParams q;
    if (quantize) {
      q.x = kind == kOutProjection ? qkv : kind == kDown ? inner : hidden;
      q.codes = codes;
      q.scale = x_scale;
      q.num_rows = rows;
      q.width = kK[kind];
      q.normalize = kind != kOutProjection && kind != kDown;
      q.operands = operands;
      if (q.normalize) q.norm_weight = norm_weight;
    }
    const QuantizeRowsParams* given = quantize ? &q : nullptr;
    if (launcher) {
      CHECK_STATUS(launcher(p, given));
    } else if (given != nullptr) {
      CHECK_STATUS(gemm_quantized(p, q, {}, stream));
    } else {
      CHECK_STATUS(gemm(p, {}, nullptr, stream));
    }
  }
};

// How one kind of product is launched.
struct Choice {
  bool stream = false;
  StreamCodesTile rows;
  GemmTile tile;
  std::string name() const {
    char text[80];
    if (stream) {
      snprintf(text, sizeof(text), "stream_codes stages %d blocks %d early %d", rows.stages,
               rows.blocks, rows.trigger_early);
    } else {
      snprintf(text, sizeof(text), "sm90 %dx%d stages %d split %d trigger %d", tile.tokens,
               tile.features, tile.stages, tile.split, tile.trigger);
    }
    return text;
  }
};

std::vector<Choice> choices_of(int kind, int64_t rows, bool quantizes) {
  std::vector<Choice> all;
  if (quantizes) {
    for (int blocks = 1; blocks <= 3; ++blocks) {
      for (const int stages : {2, 3, 4, 5, 6, 8, 10, 12}) {
        const int room = 227 * 1024 / blocks - 1024;
        if (1600 + kK[kind] + stages * 16 * 1088 > room) continue;
        for (const bool early : {false, true}) {
          Choice c;
          c.stream = true;
          c.rows = {stages, blocks, early};
          all.push_back(c);
        }
      }
    }
    return all;
  }
  int full = 8;
  while (full < rows) full *= 2;
  for (const int tokens : {full, full / 2}) {
    if (tokens < 8 || (tokens < full && rows < 64)) continue;
    for (const int features : {64, 128, 256}) {
      for (const int split : {1, 2, 4, 8}) {
        const int64_t blocks = ceil_div(kN[kind], features) * split * ceil_div(rows, tokens);
        if (blocks > 132 * 4 || blocks < 60) continue;
        for (const int kb : {48, 66, 102, 146, 204}) {
          const int stages = std::min(16, kb * 1024 / ((features + tokens) * 128));
          if (stages < 3 ||
              (kb > 48 && stages == 16 && kb * 1024 > 18 * (features + tokens) * 128)) {
            continue;
          }
          for (const int trigger : {-1, 4}) {
            Choice c;
            c.tile = {tokens, features, stages, split, trigger};
            all.push_back(c);
          }
        }
      }
    }
  }
  return all;
}

// Launches for all four products of a layer that make 32 layers fastest, quantization included: one
// product's after the other, the others as they are.
int main_tune(const char* what, const std::vector<int64_t>& all_rows) {
  const Model model(256);
  const GemmOperands operands =
      std::strcmp(what, "int8") == 0 ? GemmOperands::kInt8 : GemmOperands::kFp8;
  for (const int64_t rows : all_rows) {
    Choice now[4];
    const bool quantizes = rows == 1;
    const auto time = [&]() {
      return graph_ms(
          [&](cudaStream_t stream) {
            for (int i = 0; i < kLayers * 4; ++i) {
              const Choice& c = now[i % 4];
              model.run(operands, i, rows, true, stream,
                        [&](const GemmParams& p, const QuantizeRowsParams* q) {
                          if (!c.stream || !quantizes) CHECK_STATUS(quantize_rows(*q, stream));
                          if (!c.stream) return gemm_sm90(p, c.tile, stream);
                          return gemm_stream_codes_sm90(p, quantizes ? q : nullptr, c.rows, stream);
                        });
            }
          },
          3);
    };
    for (int kind = 0; kind < 4; ++kind) {
      GemmParams shape;
      shape.operands = operands;
      shape.num_rows = rows;
      shape.in_features = kK[kind];
      shape.out_features = kN[kind];
      now[kind].stream = quantizes;
      now[kind].rows = choose_stream_codes_tile(shape);
      now[kind].tile = choose_gemm_tile(shape);
    }
    double best = time();
    printf("%s M %ld: %.3f ms as it is\n", what, rows, best);
    if (quantizes) {  // all four alike first: their blocks share multiprocessors
      Choice chosen[4];
      std::copy(now, now + 4, chosen);
      for (const Choice& c : choices_of(kDown, rows, quantizes)) {
        std::fill(now, now + 4, c);
        const double ms = time();
        printf("  all %s: %.3f\n", c.name().c_str(), ms);
        if (ms < best) best = ms, std::copy(now, now + 4, chosen);
      }
      std::copy(chosen, chosen + 4, now);
    }
    for (const int kind : {2, 3, 0, 1}) {
      Choice chosen = now[kind];
      for (const Choice& c : choices_of(kind, rows, quantizes)) {
        now[kind] = c;
        const double ms = time();
        if (ms < best * 0.999) best = ms, chosen = c;
      }
      now[kind] = chosen;
    }
    printf("%s M %ld: %.3f ms at its best\n", what, rows, best);
    for (int kind = 0; kind < 4; ++kind) {
      printf("  %s: %s\n", kKindNames[kind], now[kind].name().c_str());
    }
  }
  return 0;
}

int main_chain(const char* only) {
  const Model model(256);
  printf("129 products of 8-bit codes, %.2f GB; bare, and with the quantization of each x, ms\n",
         model.bytes / 1e9);
  for (const GemmOperands operands : {GemmOperands::kFp8, GemmOperands::kInt8}) {
    const char* name = kNames[static_cast<int>(operands)];
    if (only != nullptr && std::strcmp(only, name) != 0) continue;
    for (const int64_t rows : {1, 8, 16, 32, 64, 128, 256}) {
      double ms[2];
      for (const bool quantize : {false, true}) {
        ms[quantize] = graph_ms(
            [&](cudaStream_t stream) {
              const int count = rows > 128 ? kLayers * 4 : kLayers * 4 + 1;
              for (int i = 0; i < count; ++i) model.run(operands, i, rows, quantize, stream);
            },
            9);
      }
      printf("%s M %3ld %.3f (%.2f TB/s) %.3f\n", name, rows, ms[0], model.bytes / ms[0] / 1e9,
             ms[1]);
    }
  }
  return 0;
}

// Ours beside cuBLASLt, four layers' weights in turn, in us and as a share of the tensor cores'
// 1,979 TFLOP/s. gate_up with the codes that the next product takes: ours quantizes its output,
// cuBLASLt's is folded meanwhile. Then the same with scales of blocks, without those codes.
int main_compare() {
  constexpr double kPeak = 1979.;
  constexpr int64_t kMost = 8000;
  const Model model(kMost);
  const GemmResources resources = blas_resources(kMost, 2 * kInner);
  const Buffer<uint8_t> next_codes(kMost * kInner);
  const Buffer<float> next_scale(kMost);
  using Product = std::function<Status(const GemmParams&, cudaStream_t)>;
  // 0 where it does not run. The first run chooses an algorithm, which a graph cannot.
  const auto time = [&](int kind, int64_t rows, int64_t scale_rows, const Product& product) {
    const auto launcher = [&](cudaStream_t stream) {
      return [&, stream](GemmParams p, const QuantizeRowsParams*) {
        p.scale_rows = scale_rows;
        return product(p, stream);
      };
    };
    bool runs = true;
    model.run(GemmOperands::kFp8, kind, rows, false, nullptr,
              [&](const GemmParams& p, const QuantizeRowsParams* q) {
                const Status status = launcher(nullptr)(p, q);
                runs = status.ok();
                if (!runs) printf("%s\n", status.message().c_str());
                return Status();
              });
    if (!runs) return 0.;
    return 250. * graph_ms(
                      [&](cudaStream_t stream) {
                        for (int r = 0; r < 4; ++r) {
                          model.run(GemmOperands::kFp8, r * 4 + kind, rows, false, stream,
                                    launcher(stream));
                        }
                      },
                      rows > 2048 ? 3 : 5);
  };
  const auto next_of = [&](const GemmParams& p) {
    QuantizeRowsParams q;
    q.x = p.out;
    q.codes = next_codes.data;
    q.scale = next_scale.data;
    q.num_rows = p.num_rows;
    q.width = p.out_features / 2;
    return q;
  };
  const Product ours = [](const GemmParams& p, cudaStream_t s) { return gemm(p, {}, nullptr, s); };
  const Product theirs = [&](const GemmParams& p, cudaStream_t s) {
    return gemm_blas_codes_sm90(p, resources, s);
  };
  const Product ours_coded = [&](const GemmParams& p, cudaStream_t s) {
    const Status status = gemm(p, {}, nullptr, s);
    return status.ok() ? quantize_rows(next_of(p), s) : status;
  };
  const Product theirs_coded = [&](const GemmParams& p, cudaStream_t s) {
    return gemm_blas_unfolded_sm90(p, next_of(p), resources, s);
  };
  for (const int64_t scale_rows : {int64_t{0}, kScaleBlock}) {
    for (const int64_t rows : {128, 256, 512, 1024, 2048, 8000}) {
      if (scale_rows != 0 && rows % 128 != 0) continue;
      double our_sum = 0., best_sum = 0.;
      printf("%sM %4ld", scale_rows != 0 ? "blocks " : "", rows);
      for (int kind = 0; kind < 4; ++kind) {
        const double flops = 2e-6 * rows * kN[kind] * kK[kind];
        const double a = time(kind, rows, scale_rows, ours);
        const double b = time(kind, rows, scale_rows, theirs);
        printf(" | %s %.1f us %.0f (%.0f %%), cuBLASLt %.1f us %.0f (%.0f %%)", kKindNames[kind], a,
               flops / a, 100. * flops / a / kPeak, b, b > 0. ? flops / b : 0.,
               b > 0. ? 100. * flops / b / kPeak : 0.);
        double our_us = a, their_us = b;
        if (kind == kGateUp && scale_rows == 0) {
          our_us = time(kind, rows, scale_rows, ours_coded);
          their_us = time(kind, rows, scale_rows, theirs_coded);
          printf(", with codes %.1f, cuBLASLt %.1f", our_us, their_us);
        }
        our_sum += our_us;
        best_sum += their_us > 0. ? std::min(our_us, their_us) : our_us;
      }
      printf(" | 32 layers %.2f ms, with the faster %.2f\n", our_sum * .032, best_sum * .032);
    }
  }
  return 0;
}

int main_quantize() {
  constexpr int64_t kMost = 8000;
  const Model model(kMost);
  const Buffer<__nv_bfloat16> both(kMost * 2 * kInner);
  CHECK_CUDA(cudaMemset(both.data, 0x3c, both.size * 2));
  struct Kind {
    const char* name;
    int64_t width;
    bool normalize, gated;
  };
  constexpr Kind kKindsOfRows[] = {{"4096", kHidden, false, false},
                                   {"4096 normalized", kHidden, true, false},
                                   {"14336", kInner, false, false},
                                   {"14336 gated", kInner, false, true}};
  for (const int64_t rows : {1, 32, 128, 256, 1024, 8000}) {
    printf("quantize_rows M %4ld:", rows);
    for (const Kind& kind : kKindsOfRows) {
      QuantizeRowsParams q;
      q.x = kind.gated             ? static_cast<const void*>(both.data)
            : kind.width == kInner ? model.inner
                                   : model.hidden;
      q.norm_weight = kind.normalize ? model.norm_weight : nullptr;
      q.codes = model.codes;
      q.scale = model.x_scale;
      q.num_rows = rows;
      q.width = kind.width;
      q.normalize = kind.normalize;
      q.gated = kind.gated;
      printf(" | %s", kind.name);
      constexpr const char* kWays[] = {"", ", warp", ", cluster"};
      for (const QuantizeWay way :
           {QuantizeWay::kBlock, QuantizeWay::kWarp, QuantizeWay::kCluster}) {
        if (!can_quantize(q, way)) continue;
        const double us = 50. * graph_ms(
                                    [&](cudaStream_t stream) {
                                      for (int i = 0; i < 20; ++i) {
                                        CHECK_STATUS(quantize_rows(q, way, stream));
                                      }
                                    },
                                    9);
        printf("%s %.2f us (%.2f TB/s)", kWays[static_cast<int>(way)], us,
               (kind.gated ? 5. : 3.) * rows * kind.width / us / 1e6);
      }
    }
    printf("\n");
  }
  return 0;
}

int main_large() {
  const Model model(8000);
  for (const GemmOperands operands : {GemmOperands::kFp8, GemmOperands::kInt8}) {
    for (const int64_t rows : {256, 1024, 8000}) {
      double sum = 0.;
      printf("%s M %4ld", kNames[static_cast<int>(operands)], rows);
      for (int kind = 0; kind < 4; ++kind) {
        const double us = 250. * graph_ms(
                                     [&](cudaStream_t stream) {
                                       for (int r = 0; r < 4; ++r) {
                                         model.run(operands, r * 4 + kind, rows, false, stream);
                                       }
                                     },
                                     5);
        printf(" | %.1f us %.0f TFLOP/s", us, 2. * rows * kN[kind] * kK[kind] / us / 1e6);
        sum += us;
      }
      const double all = graph_ms(
          [&](cudaStream_t stream) {
            for (int i = 0; i < 16; ++i) model.run(operands, i, rows, true, stream);
          },
          5);
      printf(" | 32 layers %.2f ms, with quantization %.2f\n", sum * .032, all * 8.);
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const char* mode = argc > 1 ? argv[1] : "check";
  setvbuf(stdout, nullptr, _IOLBF, 4096);
  if (std::strcmp(mode, "check") == 0) {
    const std::string what = argc > 2 ? argv[2] : "all";
    return (what == "blas" ? check_blas() : what == "quantize" ? check_rows() : check_all()) != 0;
  }
  if (std::strcmp(mode, "compare") == 0) return main_compare();
  if (std::strcmp(mode, "quantize") == 0) return main_quantize();
  if (std::strcmp(mode, "large") == 0) return main_large();
  if (std::strcmp(mode, "accuracy") == 0) return main_accuracy();
  if (std::strcmp(mode, "tune") == 0) {
    std::vector<int64_t> rows;
    for (int i = 3; i < argc; ++i) rows.push_back(std::atol(argv[i]));
    return main_tune(argc > 2 ? argv[2] : "fp8", rows);
  }
  return main_chain(argc > 2 ? argv[2] : nullptr);
}
