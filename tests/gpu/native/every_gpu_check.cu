// Checks the products with quantized weights that every GPU has (the candidates "mma"), tiles at
// random, against double references over odd shapes. The kinds of float8 need sm_89.
//
//   every_gpu_check
#include "product.cuh"

using namespace regatta;
using namespace regatta::cuda;
using namespace regatta::native;

namespace {

enum Kind { kPacked8, kPacked4, kCodesInt8, kCodesFp8, kCodesBlocks, kNumKinds };
constexpr const char* kNames[] = {"weight_only_int8", "weight_only_int4", "a8w8", "a8w8_fp8",
                                  "a8w8_fp8 in blocks"};

float value_of_e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                   : std::ldexp(8.f + static_cast<float>(mantissa), exponent - 10);
  return code & 0x80 ? -size : size;
}

// Tiles of gemm_mma.cuh, at random.
MmaTile random_tile(Kind kind, int64_t rows, Random& random) {
  switch (random.below(4)) {
    case 0:
      return {kind < kCodesInt8 ? 64 : 128, 4};
    case 1:
      return {64, 4};
    case 2:
      return {32, 2 << random.below(2)};
    default:
      return {8, (rows <= 8 ? 1 : 2) << random.below(2)};
  }
}

Runner runner_of(Kind kind, const MmaTile& tile, bool chosen) {
  return [=](const GemmParams& p) {
    if (chosen) return gemm(p, {}, "mma", nullptr);
    return kind < kCodesInt8 ? gemm_packed_mma(p, tile, nullptr) : gemm_codes_mma(p, tile, nullptr);
  };
}

template <class T>
bool check_packed(Kind kind, const Case& c, const Runner& runner, const std::string& label,
                  Random& random) {
  const int bits = kind == kPacked8 ? 8 : 4;
  const int64_t wanted = 64 << random.below(3);  // 64, 128 or one group
  const int64_t groups = bits == 4 && wanted < 256 && c.k % wanted == 0 ? c.k / wanted : 1;
  const bool asymmetric = random.below(2);
  std::vector<float> xf = random.floats(c.m * c.k, 1.7f), scale(c.n * groups), zero(c.n * groups);
  for (float& v : scale) {
    v = (1.5f + random.uniform()) * (bits == 8 ? 0.01f : 0.15f) / std::sqrt(c.k);
  }
  for (float& v : zero) v = asymmetric ? static_cast<float>(random.below(17)) : 8.f;
  std::vector<int8_t> codes(c.n * c.k);
  for (int8_t& v : codes) {
    v = static_cast<int8_t>(bits == 8 ? random.below(255) - 127 : random.below(16));
  }
  std::vector<float> scale_of_t = scale;
  rounded<T>(scale_of_t);
  std::vector<float> wf(codes.size());
  for (int64_t n = 0; n < c.n; ++n) {
    for (int64_t k = 0; k < c.k; ++k) {
      const int64_t g = n * groups + k / (c.k / groups);
      wf[n * c.k + k] = bits == 8 ? codes[n * c.k + k] * scale[n]
                                  : (codes[n * c.k + k] - zero[g]) * scale_of_t[g];
    }
  }
  // The scale is applied to codes of 4 bits, rounded; of 8 bits to sums.
  if (bits == 4) rounded<T>(wf);
  const Buffer<T> x(rounded<T>(xf));
  const Buffer<float> scale_buffer(scale);
  GemmParams p;
  p.operands = bits == 8 ? GemmOperands::kWeightInt8 : GemmOperands::kWeightInt4;
  const Packed packed(p.operands, Traits<T>::dtype, c, groups, codes, scale,
                      asymmetric ? &zero : nullptr);
  p.x = x.data;
  p.weight = packed.buffer.data;
  p.weight_scale = bits == 8 ? scale_buffer.data : nullptr;
  p.group_size = packed.group_size;
  const double relative = c.float_out ? 2e-4 : Traits<T>::dtype == DType::kFloat16 ? 1e-3 : 8e-3;
  return check_product<T>(
      c, p, xf, wf, runner,
      label + " groups " + std::to_string(groups) + " zeros " + std::to_string(asymmetric),
      relative, 3e-4);
}

template <class T>
bool check_codes(Kind kind, const Case& c, const Runner& runner, const std::string& label,
                 Random& random) {
  const bool fp8 = kind != kCodesInt8, blocks = kind == kCodesBlocks;
  const auto random_codes = [&](int64_t count, std::vector<float>& values) {
    std::vector<uint8_t> codes(count);
    values.resize(count);
    for (int64_t i = 0; i < count; ++i) {
      codes[i] = static_cast<uint8_t>(fp8 ? random.below(2) * 128 + random.below(127)
                                          : random.below(255) - 127);
      values[i] = fp8 ? value_of_e4m3(codes[i]) : static_cast<float>(static_cast<int8_t>(codes[i]));
    }
    return codes;
  };
  std::vector<float> xf, wf;
  const Buffer<uint8_t> x(random_codes(c.m * c.k, xf)), w(random_codes(c.n * c.k, wf));
  const int64_t num_blocks = ceil_div(c.k, kScaleBlock), stride = gemm_block_stride(c.m);
  const int64_t scale_rows = !blocks ? 0 : random.below(3) == 0 ? 1 : kScaleBlock;
  const int64_t weight_rows = blocks ? ceil_div(c.n, scale_rows) : c.n;
  constexpr float kSize = 1e-2f;
  // Scales of rows behind the last one stay NaN.
  std::vector<float> x_scale(blocks ? num_blocks * stride : c.m, NAN);
  std::vector<float> weight_scale = random.floats(weight_rows * (blocks ? num_blocks : 1), kSize);
  for (int64_t m = 0; m < c.m; ++m) {
    for (int64_t b = 0; b < (blocks ? num_blocks : 1); ++b) {
      x_scale[blocks ? b * stride + m : m] = kSize * (1.5f + random.uniform());
    }
    for (int64_t k = 0; k < c.k; ++k) {
      xf[m * c.k + k] *= x_scale[blocks ? k / kScaleBlock * stride + m : m];
    }
  }
  for (int64_t n = 0; n < c.n; ++n) {
    for (int64_t k = 0; k < c.k; ++k) {
      wf[n * c.k + k] *= weight_scale[blocks ? n / scale_rows * num_blocks + k / kScaleBlock : n];
    }
  }
  const Buffer<float> x_scales(x_scale), weight_scales(weight_scale);
  GemmParams p;
  p.operands = fp8 ? GemmOperands::kFp8 : GemmOperands::kInt8;
  p.x = x.data;
  p.weight = w.data;
  p.x_scale = x_scales.data;
  p.weight_scale = weight_scales.data;
  p.scale_rows = scale_rows;
  const double relative = c.float_out ? 2e-4 : Traits<T>::dtype == DType::kFloat16 ? 1e-3 : 8e-3;
  // e4m3: 13 bits of mantissa in sums of 128 columns, where the hardware has no more.
  return check_product<T>(c, p, xf, wf, runner, label + " scale rows " + std::to_string(scale_rows),
                          relative, fp8 ? 2e-3 : 3e-4);
}

template <class T>
bool check_case(Kind kind, const Case& c, Random& random) {
  const MmaTile tile = random_tile(kind, c.m, random);
  const bool chosen = random.below(2);
  char label[100];
  snprintf(label, sizeof(label), "%s %s tile %d x %d%s", kNames[kind], dtype_name(Traits<T>::dtype),
           tile.tokens, tile.pairs * 32, chosen ? " (chosen)" : "");
  const Runner runner = runner_of(kind, tile, chosen);
  return kind < kCodesInt8 ? check_packed<T>(kind, c, runner, label, random)
                           : check_codes<T>(kind, c, runner, label, random);
}

constexpr int64_t kRows[] = {1, 3, 8, 9, 17, 32, 33, 64, 65, 127, 129, 257};
constexpr int64_t kShapes[][2] = {{64, 64},  {208, 144},   {33, 72},   {992, 520}, {264, 1040},
                                  {8, 4112}, {1280, 1024}, {96, 2248}, {2432, 640}};

int check_all(int architecture) {
  Random random(11);
  int failures = 0;
  for (int kind = 0; kind < (architecture < 89 ? kCodesFp8 : kNumKinds); ++kind) {
    int cases = 0, bad = 0;
    for (const int64_t m : kRows) {
      for (const auto& shape : kShapes) {
        const bool codes = kind >= kCodesInt8;
        Case c = {m, shape[0], codes ? round_up(shape[1], 16) : shape[1]};
        c.gated = random.below(2) && c.n % (codes ? 2 : 32) == 0;
        c.bias = random.below(2);
        c.residual = !c.gated && random.below(2);
        c.sumsq_out = !c.gated && random.below(2);
        c.float_out = random.below(4) == 0;
        bad += !(random.below(2) ? check_case<__half>(static_cast<Kind>(kind), c, random)
                                 : check_case<__nv_bfloat16>(static_cast<Kind>(kind), c, random));
        ++cases;
      }
    }
    printf("%-20s %d cases, %d failures\n", kNames[kind], cases, bad);
    failures += bad;
  }
  return failures;
}

}  // namespace

int main() {
  setvbuf(stdout, nullptr, _IOLBF, 4096);
  cudaDeviceProp device;
  CHECK_CUDA(cudaGetDeviceProperties(&device, 0));
  return check_all(device.major * 10 + device.minor) != 0;
}
