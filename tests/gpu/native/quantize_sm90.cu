// What makes codes of rows, on Hopper. check: quantize_rows() against doubles and its ways against
// each other, products that quantize their x or output. time: quantize_rows() by each way.
//
//   quantize_sm90 check rows|products|unfolded
//   quantize_sm90 time rows [ROWS ...]
// cuBLASLt is found in the folder REGATTA_CUBLASLT, or where the dynamic linker looks.
#include "cuda/gemm/large/gemm_blas.cuh"
#include "ways.cuh"

using namespace regatta;
using namespace regatta::native;
using namespace regatta::cuda;

namespace {

// One launch gives what two give, and a row of int8 the same whatever its company.
template <class T>
void check_quantized(Random& random) {
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
        QuantizeRowsParams q = quantization_of(x.data, codes, x_scale, kCount, k, Traits<T>::dtype);
        q.norm_weight = normalize ? norm.data : nullptr;
        q.static_scale = fixed ? static_scale.data : nullptr;
        q.normalize = normalize;
        q.operands = fp8 ? GemmOperands::kFp8 : GemmOperands::kInt8;
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
        count_case(bad == 0,
                   format("quantized k %ld n %ld fp8 %d gated %d norm %d static %d: %d rows differ",
                          k, n, fp8, gated, normalize, fixed, bad));
      }
    }
  }
}

template <class T>
void check_quantize(Random& random) {
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
        QuantizeRowsParams p = quantization_of(x_buffer.data, codes, scale, m, k, Traits<T>::dtype);
        p.norm_weight = weighted ? norm_buffer.data : nullptr;
        p.shift = smooth && random.below(2) ? shift_buffer.data : nullptr;
        p.smooth = smooth ? factor_buffer.data : nullptr;
        p.static_scale = fixed_buffer.data;
        p.normalize = normalize;
        p.operands = fp8 ? GemmOperands::kFp8 : GemmOperands::kInt8;
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
            const double got = fp8 ? host_float(code) : static_cast<int8_t>(code);
            const double step = fp8 ? std::max(std::fabs(at) / 16., 1. / 1024) : 0.5;
            if (!(std::fabs(got - at) <= step * 1.001)) ++bad;
          }
        }
        count_case(
            bad == 0,
            format("quantize m %ld k %ld fp8 %d static %d norm %d weight %d smooth %d: %ld bad", m,
                   k, fp8, fixed, normalize, weighted, smooth, bad));
      }
    }
  }
}

// Rows have the same codes and scales whoever holds them.
template <class T>
void check_ways(Random& random) {
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
        QuantizeRowsParams q =
            quantization_of(x.data, block.codes, block.scale, m, k, Traits<T>::dtype);
        q.operands = variant & 1 ? GemmOperands::kInt8 : GemmOperands::kFp8;
        q.static_scale = variant & 2 ? fixed.data : nullptr;
        q.normalize = variant & 4;
        if (q.normalize) q.norm_weight = norm.data;
        if (m * k > kValues) continue;
        const auto run = [&](const Held& held, QuantizeWay way) {
          q.codes = held.codes.data;
          q.scale = held.scale.data;
          held.codes.spoil(), held.scale.spoil();
          CHECK_STATUS(quantize_rows(q, way, nullptr));
          CHECK_CUDA(cudaDeviceSynchronize());
        };
        for (const QuantizeWay way : {QuantizeWay::kWarp, QuantizeWay::kCluster}) {
          if (!can_quantize(q, way)) continue;
          run(block, QuantizeWay::kBlock);
          run(other, way);
          const bool same = block.codes.host() == other.codes.host() &&
                            same_bits(block.scale.host(), other.scale.host());
          count_case(same,
                     format("%s %s m %ld k %ld int8 %d static %d norm %d", dtype_name(q.dtype),
                            way == QuantizeWay::kWarp ? "warp" : "cluster", m, k, variant & 1,
                            variant >> 1 & 1, variant >> 2));
        }
      }
    }
  }
}

// Rows quantized as they are folded have the codes of rows folded first.
template <class T>
void check_gated_rows(Random& random) {
  for (const int64_t m : {1, 3, 130}) {
    for (const int64_t k : {8, 200, 2048, 2056, 4104, 14336, 20000}) {
      for (const int variant : {0, 1, 2, 3}) {
        std::vector<float> bothf = random.floats(m * 2 * k, 3.f);
        const Buffer<T> both(rounded<T>(bothf)), inner(m * k);
        const Buffer<float> fixed(std::vector<float>{0.004f});
        const int64_t num_scales = gemm_block_stride(m) * ceil_div(k, kScaleBlock);
        const Buffer<uint8_t> codes(m * k + kGuard), folded_codes(m * k + kGuard);
        const Buffer<float> scale(num_scales), folded_scale(num_scales);
        QuantizeRowsParams q = quantization_of(inner.data, codes, scale, m, k, Traits<T>::dtype);
        q.static_scale = variant & 1 ? fixed.data : nullptr;
        q.blocks = variant & 2;
        CHECK_STATUS(fold_gate(both.data, inner.data, q.dtype, m, k, nullptr));
        CHECK_STATUS(quantize_rows(q, nullptr));
        q.x = both.data;
        q.codes = folded_codes.data;
        q.scale = folded_scale.data;
        q.gated = true;
        CHECK_STATUS(quantize_rows(q, nullptr));
        CHECK_CUDA(cudaDeviceSynchronize());
        count_case(
            codes.host() == folded_codes.host() && same_bits(scale.host(), folded_scale.host()),
            format("gated rows m %ld k %ld static %d blocks %d", m, k, variant & 1, variant >> 1));
      }
    }
  }
}

// The same bits where a product is folded while it is quantized as where it is before.
template <class T>
void check_unfolded(const GemmResources& resources, Random& random) {
  int refused = 0;
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
      QuantizeRowsParams q = quantization_of(out.data, codes, scale, m, n / 2, p.dtype);
      CHECK_STATUS(quantize_rows(q, nullptr));
      q.codes = more_codes.data;
      q.scale = more_scale.data;
      CHECK_STATUS(gemm_blas_unfolded_sm90(p, q, resources, nullptr));
      CHECK_CUDA(cudaDeviceSynchronize());
      count_case(codes.host() == more_codes.host() && scale.host() == more_scale.host(),
                 format("unfolded m %ld n %ld", m, n));
    }
  }
  printf("%d refused\n", refused);
}

template <class T>
void check_rows_of(Random& random) {
  check_quantize<T>(random);
  check_ways<T>(random);
  check_gated_rows<T>(random);
}

void time_quantize(const Words& words) {
  constexpr int64_t kMost = 8000;
  const Buffer<uint8_t> x = filled(kMost * 2 * kInner * 2, 1), norm_weight = filled(kHidden * 2, 2);
  const Buffer<uint8_t> codes(kMost * kInner);
  const Buffer<float> scale(kMost);
  struct Kind {
    const char* name;
    int64_t width;
    bool normalize, gated;
  };
  constexpr Kind kKindsOfRows[] = {{"4096", kHidden, false, false},
                                   {"4096 normalized", kHidden, true, false},
                                   {"14336", kInner, false, false},
                                   {"14336 gated", kInner, false, true}};
  for (const int64_t rows : words.numbers({1, 32, 128, 256, 1024, 8000})) {
    printf("quantize_rows M %4ld:", rows);
    for (const Kind& kind : kKindsOfRows) {
      QuantizeRowsParams q = quantization_of(x.data, codes, scale, rows, kind.width);
      q.norm_weight = kind.normalize ? norm_weight.data : nullptr;
      q.normalize = kind.normalize;
      q.gated = kind.gated;
      printf(" | %s", kind.name);
      constexpr const char* kWays[] = {"", ", warp", ", cluster"};
      for (const QuantizeWay way :
           {QuantizeWay::kBlock, QuantizeWay::kWarp, QuantizeWay::kCluster}) {
        if (!can_quantize(q, way)) continue;
        const double us = call_us(
            20, 9, [&](int, cudaStream_t stream) { CHECK_STATUS(quantize_rows(q, way, stream)); });
        printf("%s %.2f us (%.2f TB/s)", kWays[static_cast<int>(way)], us,
               (kind.gated ? 5. : 3.) * rows * kind.width / us / 1e6);
      }
    }
    printf("\n");
  }
}

}  // namespace

int main(int argc, char** argv) {
  Random random(11);
  return run_parts(argc, argv,
                   {{"check", "rows",
                     [&](const Words&) {
                       check_rows_of<__nv_bfloat16>(random);
                       check_rows_of<__half>(random);
                     }},
                    {"check", "products",
                     [&](const Words&) {
                       check_quantized<__nv_bfloat16>(random);
                       check_quantized<__half>(random);
                     }},
                    {"check", "unfolded",
                     [&](const Words&) {
                       const GemmResources resources = blas_resources();
                       if (resources.blas == nullptr) return;
                       check_unfolded<__nv_bfloat16>(resources, random);
                       check_unfolded<__half>(resources, random);
                     }},
                    {"time", "rows", time_quantize}});
}
