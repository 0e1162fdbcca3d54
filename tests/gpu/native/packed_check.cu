// Checks products with packed weights of 8 and 4 bits, x of 16 bits and (w4a8) of 8, kernels and
// tiles at random, against float references over odd shapes. For Hopper.
//
//   packed_check "8 bits"|"4 bits"|"8 bits in groups"|mxfp4|w4a8
#include <cstring>

#include "cuda/gemm/select.h"
#include "packed.cuh"

using namespace regatta;
using namespace regatta::native;
using namespace regatta::cuda;

namespace {

GemmTile random_tile(Random& random) {
  constexpr int kTokens[] = {16, 32, 64, 128};
  return {kTokens[random.below(4)], 128, 2 + random.below(3), 1 + random.below(8),
          random.below(6) - 1};
}

// Rows and tokens of tiles.
PackedTiles random_shape(bool gated, Random& random) {
  constexpr PackedTiles kShapes[] = {{256, 128}, {192, 192}, {192, 128}, {128, 256}, {128, 224},
                                     {128, 192}, {128, 160}, {128, 128}, {128, 64}};
  return kShapes[gated ? 0 : random.below(9)];
}

// x of T, weight packed.
template <class T>
bool check_packed(GemmOperands operands, Case c, Random& random) {
  const bool mxfp4 = operands == GemmOperands::kWeightMxfp4;
  const int bits = operands == GemmOperands::kWeightInt4 || mxfp4 ? 4 : 8;
  const bool in_groups = operands != GemmOperands::kWeightInt8;
  const int64_t groups = in_groups ? random_groups(operands, c.k, random) : 1;
  const bool asymmetric = in_groups && !mxfp4 && random.below(2);
  std::vector<float> xf = random.floats(c.m * c.k, 1.7f), scale(c.n * groups), zero(c.n * groups);
  for (float& v : scale) {
    v = (1.5f + random.uniform()) * (bits == 8 ? 0.01f : 0.15f) / std::sqrt(c.k);
    if (mxfp4) v = random_power(random);
  }
  for (float& v : zero) {
    v = static_cast<float>(bits == 8    ? asymmetric ? random.below(257) - 128 : 0
                           : asymmetric ? random.below(17)
                                        : 8);
  }
  const std::vector<int8_t> codes =
      random_codes(c.n * c.k, bits == 8 ? -128 : 0, bits == 8 ? 256 : 16, random);
  std::vector<float> rounded_scale = scale;
  rounded<T>(rounded_scale);
  std::vector<float> wf = mxfp4 ? e2m1_dequantized(codes, scale)
                                : dequantized(codes, in_groups ? rounded_scale : scale, zero);
  std::vector<float> w_rounded = wf;
  const std::vector<T> w_expected = rounded<T>(w_rounded);
  const GemmTile tile = random_tile(random);
  const GemvTile gemv = {1 << random.below(3), 60 + random.below(150), random.below(8)};
  const int kernel = c.m > 257 ? 3 : random.below(5);
  const bool tiles = kernel >= 3 && !c.float_out && !c.sumsq_out && !c.norm;
  const PackedTiles shape = random_shape(c.gated, random);
  const Buffer<T> x(rounded<T>(xf));
  // A norm of x: its rows' factors from sums of squares in parts.
  constexpr int64_t kParts = 20;
  std::vector<float> sumsq(c.m * kParts);
  if (c.norm) {
    for (float& v : sumsq) v = 1.5f + random.uniform();
    for (int64_t m = 0; m < c.m; ++m) {
      double sum = 0.;
      for (int64_t i = 0; i < kParts; ++i) sum += sumsq[m * kParts + i];
      const double factor = 1. / std::sqrt(sum / c.k + .25);
      for (int64_t k = 0; k < c.k; ++k) xf[m * c.k + k] *= static_cast<float>(factor);
    }
  }
  const Buffer<float> sumsq_buffer(sumsq);
  const Buffer<float> scale_buffer(scale);
  const Packed packed(operands, Traits<T>::dtype, c, groups, codes, scale,
                      asymmetric ? &zero : nullptr);
  // Scales of groups are applied to sums where rows are few, else to codes, rounded.
  const bool many = (kernel == 0 ? tile.tokens : c.m) > 32 || packed.group_size == 32;
  const bool by_matrix = kernel == 2 && !c.gated && !c.scaled_out && c.m > 128;
  if (by_matrix || (in_groups && (tiles || (many && (kernel == 0 || c.m > 8))))) wf = w_rounded;
  const GemmTile wide_tile = {64, 128, 3, 1, -1};
  GemmParams p;
  p.operands = operands;
  p.x = x.data;
  p.weight = packed.buffer.data;
  p.weight_scale = in_groups ? nullptr : scale_buffer.data;
  p.group_size = packed.group_size;
  if (c.norm) p.sumsq = sumsq_buffer.data, p.num_sumsq = kParts, p.epsilon = .25f;
  p.dtype = Traits<T>::dtype;
  p.out_features = c.n;
  p.in_features = c.k;
  const Buffer<T> matrix(c.n * c.k);
  CHECK_STATUS(unpack_weight(p, matrix.data, nullptr));
  CHECK_CUDA(cudaDeviceSynchronize());
  const auto got = matrix.host();
  if (std::memcmp(got.data(), w_expected.data(), got.size() * sizeof(T)) != 0) {
    printf("FAIL unpack bits %d n %ld k %ld groups %ld %s\n", bits, c.n, c.k, groups,
           dtype_name(p.dtype));
    return false;
  }
  const Runner runner = [&](const GemmParams& q) {
    if (kernel == 0) return gemm_packed_sm90(q, tile, nullptr);
    if (kernel == 1 && gemv_packed_sm90_refuses(q) == nullptr) {
      return gemv_packed_sm90(q, gemv, nullptr);
    }
    if (tiles) {  // the other one rounds codes times scales, too
      return gemm_packed_tiles_sm90_refuses(q) == nullptr
                 ? gemm_packed_tiles_sm90(q, packed_tiles_of(q, shape.rows, shape.tokens), nullptr)
                 : gemm_packed_sm90(q, wide_tile, nullptr);
    }
    if (by_matrix) {
      GemmResources room;
      room.matrix = matrix.data;
      room.matrix_bytes = c.n * c.k * static_cast<int64_t>(sizeof(T));
      return gemm(q, room, "matrix", nullptr);
    }
    return gemm(q, {}, nullptr, nullptr);
  };
  char label[240];
  snprintf(label, sizeof(label),
           "packed %d bits, %ld groups, zeros %d, %s kernel %d tile of %d, "
           "stages %d split %d, gemv of %d blocks, %d KB, tiles of %d x %d",
           bits, groups, asymmetric, dtype_name(p.dtype), kernel, tile.tokens, tile.stages,
           tile.split, gemv.cluster, gemv.kilobytes, shape.rows, shape.tokens);
  const double relative = Traits<T>::dtype == DType::kFloat16 ? 1e-3 : 8e-3;
  return check_product<T>(c, p, xf, wf, runner, label, c.float_out ? 2e-4 : relative, 3e-4);
}

// x int8, weight packed with 4 bits; out of T. Sums of a group are exact, so that an error is a
// float sum's over groups (65 roundings by 2^-24 of sums up to five times the outputs' size: 2e-5
// of it) and half a step of the output's last bit (2^-8 or 2^-11).
template <class T>
bool check_w4a8(const Case& c, Random& random) {
  const int64_t groups = random_groups(GemmOperands::kW4A8, c.k, random);
  const bool asymmetric = random.below(2);
  const std::vector<int8_t> x_codes = random_codes(c.m * c.k, -127, 255, random);
  const std::vector<int8_t> codes = random_codes(c.n * c.k, 0, 16, random);
  std::vector<float> x_scale(c.m), scale(c.n * groups), zero(c.n * groups), stored_scale;
  for (float& v : x_scale) v = (1.5f + random.uniform()) * 0.01f;
  for (float& v : scale) v = (1.5f + random.uniform()) * 0.15f / std::sqrt(c.k);
  for (float& v : zero) v = asymmetric ? static_cast<float>(random.below(17)) : 8.f;
  for (const float v : scale) stored_scale.push_back(w4a8_rounded(v));
  const std::vector<float> xf = dequantized(x_codes, x_scale, std::vector<float>(c.m));
  const std::vector<float> wf = dequantized(codes, stored_scale, zero);
  const Buffer<int8_t> x(x_codes);
  const Buffer<float> x_scale_buffer(x_scale);
  const Packed packed(GemmOperands::kW4A8, DType::kBFloat16, c, groups, codes, scale,
                      asymmetric ? &zero : nullptr);
  GemmParams p;
  p.operands = GemmOperands::kW4A8;
  p.x = x.data;
  p.x_scale = x_scale_buffer.data;
  p.weight = packed.buffer.data;
  p.group_size = packed.group_size;
  const GemmTile tile = random_tile(random);
  const GemvTile gemv = {1 << random.below(3), 60 + random.below(150), random.below(8)};
  const int kernel = random.below(3);
  const Runner runner = [&](const GemmParams& q) {
    if (kernel == 0) return gemm_packed_sm90(q, tile, nullptr);
    if (kernel == 1 && gemv_packed_sm90_refuses(q) == nullptr) {
      return gemv_packed_sm90(q, gemv, nullptr);
    }
    return gemm(q, {}, nullptr, nullptr);
  };
  char label[200];
  snprintf(label, sizeof(label),
           "w4a8, %ld groups, zeros %d, %s kernel %d tile of %d, stages %d split %d, gemv of "
           "%d blocks, %d KB",
           groups, asymmetric, dtype_name(Traits<T>::dtype), kernel, tile.tokens, tile.stages,
           tile.split, gemv.cluster, gemv.kilobytes);
  const double relative = c.float_out                           ? 1e-5
                          : Traits<T>::dtype == DType::kFloat16 ? 4.9e-4
                                                                : 3.92e-3;
  return check_product<T>(c, p, xf, wf, runner, label, relative, 2e-5);
}

constexpr int64_t kRows[] = {1, 2, 3, 5, 8, 9, 16, 17, 33, 64, 96, 100, 127, 128, 129, 257, 1800};
constexpr int64_t kShapes[][2] = {{64, 64},  {208, 144},   {80, 16},   {1008, 528}, {264, 1040},
                                  {8, 4112}, {1536, 2048}, {96, 2248}, {2432, 640}};

int check_all(GemmOperands operands) {
  Random random(11);
  const bool w4a8 = operands == GemmOperands::kW4A8;
  int cases = 0, bad = 0;
  for (const int64_t m : kRows) {
    for (const auto& shape : kShapes) {
      if (w4a8 && shape[1] % 16 != 0) continue;
      for (int variant = 0; variant < (m <= 32 ? 4 : 2); ++variant) {
        Case c = {m, shape[0], columns_of(operands, shape[1])};
        c.gated = variant % 2 == 1 && c.n % 32 == 0;
        c.bias = random.below(2);
        c.residual = !c.gated && random.below(2);
        c.sumsq_out = !c.gated && random.below(2);
        c.float_out = !c.gated && random.below(4) == 0;
        c.norm = !w4a8 && random.below(2);
        c.scaled_out = c.sumsq_out && !c.float_out && random.below(2);
        const bool half = random.below(2);
        if (w4a8) {
          bad += !(half ? check_w4a8<__half>(c, random) : check_w4a8<__nv_bfloat16>(c, random));
        } else {
          bad += !(half ? check_packed<__half>(operands, c, random)
                        : check_packed<__nv_bfloat16>(operands, c, random));
        }
        ++cases;
      }
    }
  }
  printf("%s: %d cases, %d failures\n", name_of(operands), cases, bad);
  return bad;
}

}  // namespace

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 4096);
  const std::string format = argc > 1 ? argv[1] : "";
  for (const GemmOperands operands : kFormats) {
    if (format == name_of(operands)) return check_all(operands) != 0;
  }
  printf("packed_check FORMAT, got '%s' (allowed:", format.c_str());
  for (const GemmOperands operands : kFormats) printf(" '%s'", name_of(operands));
  printf(")\n");
  return 2;
}
