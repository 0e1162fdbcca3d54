// Checks products with packed weights of 8 and 4 bits against float references over odd shapes, and
// times those of a Llama-3-8B decode step and of its prefill, dense ones beside them.
//
//   nvcc -O3 -std=c++17 --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a \
//        -Icsrc/cuda -Icsrc/include csrc/cuda/bench/bench_packed.cu csrc/cuda/gem*.cu \
//        csrc/cuda/pack_weight.cu -o bench_packed
//   ./bench_packed check | chain [dense] | large | tune
#include <cstring>
#include <typeinfo>

#include "bench.cuh"

using namespace regatta;
using namespace regatta::bench;
using namespace regatta::cuda;

namespace {

// x of T, weight packed with 8 or 4 bits.
template <class T>
bool check_packed(int bits, const Case& c, Random& random) {
  const int64_t group_choice = random.below(3);  // 64, 128, or one group
  int64_t groups = 1;
  if (bits == 4 && group_choice < 2 && c.k % (64 << group_choice) == 0) {
    groups = c.k / (64 << group_choice);
  }
  const bool asymmetric = random.below(2);
  std::vector<float> xf = random.floats(c.m * c.k, 1.7f), scale(c.n * groups), zero(c.n * groups);
  for (float& v : scale) {
    v = (1.5f + random.uniform()) * (bits == 8 ? 0.01f : 0.15f) / std::sqrt(c.k);
  }
  for (float& v : zero) v = asymmetric ? static_cast<float>(random.below(17)) : 8.f;
  std::vector<int8_t> codes(c.n * c.k);
  for (int8_t& v : codes)
    v = static_cast<int8_t>(bits == 8 ? random.below(255) - 127 : random.below(16));
  std::vector<float> rounded_scale = scale;
  rounded<T>(rounded_scale);
  std::vector<float> wf(codes.size());
  for (int64_t n = 0; n < c.n; ++n) {
    for (int64_t k = 0; k < c.k; ++k) {
      const int64_t g = n * groups + k / (c.k / groups);
      wf[n * c.k + k] = bits == 8 ? codes[n * c.k + k] * scale[n]
                                  : (codes[n * c.k + k] - zero[g]) * rounded_scale[g];
    }
  }
  std::vector<float> w_rounded = wf;
  const std::vector<T> w_expected = rounded<T>(w_rounded);
  // Few rows: the scale is applied to sums. Many: to codes, rounded.
  GemmTile tile = {8 << random.below(5), 128 << random.below(2), 2 + random.below(3),
                   1 << random.below(4), random.below(6) - 1};
  const GemvTile gemv = {2 + random.below(3), 1 << random.below(3), 60 + random.below(150)};
  const int kernel = random.below(4);
  const bool tiles = kernel == 3 && !c.float_out && !c.sumsq_out;
  if (bits == 4 && (c.m > 8 || kernel == 0 || tiles)) wf = w_rounded;
  const Buffer<T> x(rounded<T>(xf));
  const Buffer<int8_t> codes_buffer(codes);
  const Buffer<float> scale_buffer(scale), zero_buffer(zero);
  const int64_t group_size = packed_group_size(c.k, groups);
  const Buffer<uint8_t> packed(packed_weight_bytes(c.n, c.k, bits, group_size));
  PackWeightParams pack;
  pack.codes = codes_buffer.data;
  pack.scale = scale_buffer.data;
  pack.zero = asymmetric ? zero_buffer.data : nullptr;
  pack.packed = packed.data;
  pack.out_features = c.n;
  pack.in_features = c.k;
  pack.num_groups = groups;
  pack.bits = bits;
  pack.dtype = Traits<T>::dtype;
  CHECK_STATUS(pack_weight(pack, nullptr));
  GemmParams p;
  p.operands = bits == 8 ? GemmOperands::kWeightInt8 : GemmOperands::kWeightInt4;
  p.x = x.data;
  p.weight = packed.data;
  p.weight_scale = bits == 8 ? scale_buffer.data : nullptr;
  p.group_size = group_size;
  p.dtype = pack.dtype;
  p.out_features = c.n;
  p.in_features = c.k;
  const Buffer<T> matrix(c.n * c.k);
  CHECK_STATUS(unpack_weight(p, matrix.data, nullptr));
  CHECK_CUDA(cudaDeviceSynchronize());
  const auto got = matrix.host();
  if (std::memcmp(got.data(), w_expected.data(), got.size() * sizeof(T)) != 0) {
    printf("FAIL unpack bits %d n %ld k %ld groups %ld %s\n", bits, c.n, c.k, groups,
           dtype_name(pack.dtype));
    return false;
  }
  const Runner runner = [&](const GemmParams& q) {
    if (kernel == 0) return gemm_packed_sm90(q, tile, nullptr);
    if (kernel == 1 && gemv_packed_sm90_refuses(q) == nullptr) {
      return gemv_packed_sm90(q, gemv, nullptr);
    }
    if (tiles && gemm_packed_tiles_sm90_refuses(q) == nullptr) {
      return gemm_packed_tiles_sm90(q, nullptr);
    }
    return gemm(q, {}, nullptr, nullptr);
  };
  char label[200];
  snprintf(label, sizeof(label),
           "packed %d bits, %ld groups, zeros %d, %s kernel %d tile %dx%d "
           "stages %d split %d, gemv %d slabs, %d blocks, %d KB",
           bits, groups, asymmetric, dtype_name(pack.dtype), kernel, tile.tokens, tile.features,
           tile.stages, tile.split, gemv.slabs, gemv.cluster, gemv.kilobytes);
  const double relative = Traits<T>::dtype == DType::kFloat16 ? 1e-3 : 8e-3;
  return check_product<T>(c, p, xf, wf, runner, label, c.float_out ? 2e-4 : relative, 3e-4);
}

constexpr int64_t kRows[] = {1, 2, 3, 5, 8, 9, 17, 33, 64, 100, 127, 128, 129, 257};
constexpr int64_t kShapes[][2] = {{64, 64},     {208, 144}, {80, 16},    {1008, 528},
                                  {264, 1040},  {8, 4112},  {1536, 2048}, {96, 2248},
                                  {2432, 640}};

int check_all() {
  Random random(11);
  int failures = 0;
  for (const int bits : {8, 4}) {
    int cases = 0, bad = 0;
    for (const int64_t m : kRows) {
      for (const auto& shape : kShapes) {
        for (int variant = 0; variant < (m <= 32 ? 4 : 2); ++variant) {
          Case c = {m, shape[0], shape[1]};
          c.gated = variant % 2 == 1 && c.n % 128 == 0;
          c.bias = random.below(2);
          c.residual = !c.gated && random.below(2);
          c.sumsq_out = !c.gated && random.below(2);
          c.float_out = !c.gated && random.below(4) == 0;
          bad += !(random.below(2) ? check_packed<__half>(bits, c, random)
                                            : check_packed<__nv_bfloat16>(bits, c, random));
          ++cases;
        }
      }
    }
    printf("packed, %d bits: %d cases, %d failures\n", bits, cases, bad);
    failures += bad;
  }
  return failures;
}

// --------------------------------------------------------------------------------------- timing

// Random bytes, or random numbers of 16 bits of moderate size.
__global__ void fill_kernel(uint8_t* p, int64_t n, uint32_t seed, bool numbers) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < n;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    p[i] = random_byte(i, seed);
    if (numbers && i % 2 == 1) p[i] = (p[i] & 0x83) | 0x38;
  }
}

struct Model {
  std::vector<uint8_t*> dense, codes;
  uint8_t *hidden, *qkv, *inner;  // 16-bit
  float* weight_scale;
  GemmResources resources;
  double weights = 0.;

  explicit Model(int64_t rows, bool with_dense) {
    for (int i = 0; i < kLayers * 4; ++i) {
      const int64_t n = kN[i % 4] * kK[i % 4];
      codes.push_back(filled(n, i, false));
      if (with_dense) dense.push_back(filled(n * 2, i, true));
      weights += static_cast<double>(n);
    }
    hidden = filled(rows * kHidden * 2, 98, true);
    qkv = filled(rows * kQkv * 2, 97, true);
    inner = filled(rows * kInner * 2, 96, true);
    CHECK_CUDA(cudaMalloc(&weight_scale, 2 * kInner * 4));
    set_kernel<<<64, 256>>>(weight_scale, 2 * kInner, 1e-3f);
    GemmParams widest;
    widest.num_rows = rows;
    widest.in_features = kHidden;
    widest.out_features = 2 * kInner;
    widest.gated = true;
    resources.scratch_bytes = gemm_scratch_bytes(widest);
    CHECK_CUDA(cudaMalloc(&resources.scratch, resources.scratch_bytes));
    if (!create_blas(&resources.blas).ok()) printf("no cuBLASLt\n");
    CHECK_CUDA(cudaDeviceSynchronize());
  }

  static uint8_t* filled(int64_t bytes, int seed, bool numbers) {
    uint8_t* p;
    CHECK_CUDA(cudaMalloc(&p, bytes));
    fill_kernel<<<2048, 256>>>(p, bytes, seed, numbers);
    return p;
  }

  GemmParams params(GemmOperands operands, int index, int64_t rows) const {
    const int kind = index % 4;
    const bool is_dense = operands == GemmOperands::kDense;
    GemmParams p;
    p.operands = operands;
    p.x = kind == kOutProjection ? qkv : kind == kDown ? inner : hidden;
    p.weight = (is_dense ? dense : codes)[index];
    p.weight_scale = operands == GemmOperands::kWeightInt8 ? weight_scale : nullptr;
    p.num_rows = rows;
    p.in_features = kK[kind];
    p.out_features = kN[kind];
    p.out = kind == kQkvProjection ? qkv : kind == kGateUp ? inner : hidden;
    if (kind == kOutProjection || kind == kDown) p.residual = hidden;
    p.gated = kind == kGateUp;
    return p;
  }
};

constexpr GemmOperands kFormats[] = {GemmOperands::kWeightInt8, GemmOperands::kWeightInt4,
                                     GemmOperands::kDense};
const char* name_of(GemmOperands operands) {
  return operands == GemmOperands::kDense        ? "dense"
         : operands == GemmOperands::kWeightInt8 ? "8 bits"
                                                 : "4 bits";
}

double bytes_per_weight(GemmOperands operands) {
  return operands == GemmOperands::kDense ? 2. : operands == GemmOperands::kWeightInt8 ? 1. : .53125;
}

int main_chain(bool with_dense) {
  const Model model(256, with_dense);
  printf("128 products, ms\n");
  for (const GemmOperands operands : kFormats) {
    if (operands == GemmOperands::kDense && !with_dense) continue;
    printf("%s", name_of(operands));
    for (const int64_t rows : {1, 2, 4, 8, 16, 32, 64, 128, 256}) {
      const double ms = graph_ms(
          [&](cudaStream_t stream) {
            for (int i = 0; i < kLayers * 4; ++i) {
              CHECK_STATUS(gemm(model.params(operands, i, rows), model.resources, nullptr, stream));
            }
          },
          9);
      printf(" | M %ld %.3f", rows, ms);
      if (rows == 1) printf(" (%.2f TB/s)", model.weights * bytes_per_weight(operands) / ms / 1e9);
    }
    printf("\n");
  }
  return 0;
}

// Microseconds per product of a kind, weights of all layers one after another.
double kind_us(const Model& model, GemmOperands operands, int kind, int64_t rows,
               const std::function<Status(const GemmParams&, cudaStream_t)>& product) {
  return 1e3 / kLayers * graph_ms(
                             [&](cudaStream_t stream) {
                               for (int i = 0; i < kLayers; ++i) {
                                 CHECK_STATUS(product(model.params(operands, i * 4 + kind, rows),
                                                      stream));
                               }
                             },
                             5);
}

int main_tune(int64_t only) {
  const Model model(256, false);
  for (const GemmOperands operands : {GemmOperands::kWeightInt8, GemmOperands::kWeightInt4}) {
    for (const int64_t rows : {1, 4, 8, 16, 32, 64, 128, 256}) {
      if (only != 0 && rows != only) continue;
      for (int kind = 0; kind < 4; ++kind) {
        const double floor =
            static_cast<double>(kN[kind] * kK[kind]) * bytes_per_weight(operands) / 4.66e6;
        printf("%s M %ld %s floor %.2f us, chosen %.2f |", name_of(operands), rows, kKindNames[kind],
               floor,
               kind_us(model, operands, kind, rows, [&](const GemmParams& p, cudaStream_t s) {
                 return gemm(p, model.resources, nullptr, s);
               }));
        std::vector<std::pair<double, std::string>> times;
        char label[64];
        if (rows <= 32) {
          for (const int slabs : {2, kind == kGateUp ? 4 : 3}) {
            for (const int cluster : {1, 2, 4}) {
              for (const int kilobytes : {112, 226}) {
                const GemvTile tile = {slabs, cluster, kilobytes};
                if (kilobytes == 112 && rows == 32) continue;
                snprintf(label, sizeof(label), "v%d/%d/%d", slabs, cluster, kilobytes);
                times.emplace_back(kind_us(model, operands, kind, rows,
                                           [&](const GemmParams& p, cudaStream_t s) {
                                             return gemv_packed_sm90(p, tile, s);
                                           }),
                                   label);
              }
            }
          }
        }
        if (rows > 8) {
          const int tokens = static_cast<int>(std::min<int64_t>(rows, 128));
          for (const int features : {128, 256}) {
            for (const int split : {1, 2, 4, 8}) {
              if (split > 2 && rows > 64 && kind == kGateUp) continue;
              for (const int kilobytes : {108, 220}) {
                const int64_t unit = operands == GemmOperands::kWeightInt8 ? 2048 : 1088;
                const int64_t stage = round_up(tokens * 256 + features / 16 * unit, 1024);
                const GemmTile tile = {tokens, features,
                                       static_cast<int>(kilobytes * 1024 / stage), split, -1};
                snprintf(label, sizeof(label), "%d/%d/%d", features, split, kilobytes);
                times.emplace_back(kind_us(model, operands, kind, rows,
                                           [&](const GemmParams& p, cudaStream_t s) {
                                             return gemm_packed_sm90(p, tile, s);
                                           }),
                                   label);
              }
            }
          }
        }
        std::sort(times.begin(), times.end());
        if (times.size() > 9) times.resize(9);
        for (const auto& [us, text] : times) printf(" %s %.2f", text.c_str(), us);
        printf("\n");
      }
    }
  }
  return 0;
}

int main_large() {
  const Model model(8192, true);
  uint8_t* matrix = Model::filled(4 * kHidden * kInner, 1, true);
  struct Way {
    const char* name;
    GemmOperands operands;
    std::function<Status(GemmParams, cudaStream_t)> run;
  };
  const auto chosen = [&](const GemmParams& p, cudaStream_t s) {
    return gemm(p, model.resources, nullptr, s);
  };
  const auto tiles = [&](const GemmParams& p, cudaStream_t s) {
    return gemm_packed_tiles_sm90(p, s);
  };
  const auto split = [&](const GemmParams& p, cudaStream_t s) { return gemm_packed_sm90(p, s); };
  const auto unpacked = [&](GemmParams p, cudaStream_t s) {
    const Status status = unpack_weight(p, matrix, s);
    if (!status.ok()) return status;
    p.weight = matrix;
    p.weight_scale = nullptr;
    p.operands = GemmOperands::kDense;
    return gemm(p, model.resources, nullptr, s);
  };
  const Way ways[] = {{"dense", GemmOperands::kDense, chosen},
                      {"8 bits, tiles", GemmOperands::kWeightInt8, tiles},
                      {"8 bits, split", GemmOperands::kWeightInt8, split},
                      {"8 bits, unpacked", GemmOperands::kWeightInt8, unpacked},
                      {"4 bits, tiles", GemmOperands::kWeightInt4, tiles},
                      {"4 bits, split", GemmOperands::kWeightInt4, split},
                      {"4 bits, unpacked", GemmOperands::kWeightInt4, unpacked}};
  for (const int64_t rows : {128, 256, 512, 1024, 8192}) {
    for (const Way& way : ways) {
      if (way.run.target_type() == typeid(split) && rows > 256) continue;
      double sum = 0.;
      printf("%-16s M %4ld", way.name, rows);
      for (int kind = 0; kind < 4; ++kind) {
        const double us = 250. * graph_ms(
                                     [&](cudaStream_t stream) {
                                       for (int r = 0; r < 4; ++r) {
                                         CHECK_STATUS(way.run(
                                             model.params(way.operands, r * 4 + kind, rows),
                                             stream));
                                       }
                                     },
                                     5);
        printf(" | %.1f us %.0f TFLOP/s", us, 2. * rows * kN[kind] * kK[kind] / us / 1e6);
        sum += us;
      }
      printf(" | 32 layers %.2f ms\n", sum * .032);
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "check";
  setvbuf(stdout, nullptr, _IOLBF, 4096);
  if (mode == "check") return check_all() != 0;
  if (mode == "large") return main_large();
  if (mode == "tune") return main_tune(argc > 2 ? std::atoi(argv[2]) : 0);
  return main_chain(argc > 2);
}
