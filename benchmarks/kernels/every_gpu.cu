// Times the products with quantized weights that every GPU has (the candidates "mma") of a
// Llama-3-8B step, this GPU's own choice beside them; matrix: packed weights, multiplied as they
// are and made a matrix for cuBLASLt first, which the rows "matrix" of select.cu choose between.
//
//   every_gpu [matrix]
// cuBLASLt is found in the folder REGATTA_CUBLASLT, or where the dynamic linker looks.
#include "regatta/gemm.h"
#include "timing.cuh"

using namespace regatta;
using namespace regatta::cuda;
using namespace regatta::bench;

namespace {

enum Kind { kPacked8, kPacked4, kCodesInt8, kCodesFp8, kCodesBlocks, kNumKinds };
constexpr const char* kNames[] = {"weight_only_int8", "weight_only_int4", "a8w8", "a8w8_fp8",
                                  "a8w8_fp8 in blocks"};

__global__ void fill_kernel(uint8_t* p, int64_t n, uint32_t seed) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < n;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    // As halves, of moderate size.
    p[i] = i % 2 == 1 ? (random_byte(i, seed) & 0x83) | 0x38 : random_byte(i, seed);
  }
}

constexpr int kTimedLayers = 8;  // more than L2 holds

struct Model {
  uint8_t *weights[kTimedLayers][4], *x, *out;
  float *x_scale, *weight_scale;

  explicit Model(int64_t rows) {
    const auto filled = [](int64_t bytes, uint32_t seed) {
      uint8_t* p;
      CHECK_CUDA(cudaMalloc(&p, bytes));
      fill_kernel<<<2048, 256>>>(p, bytes, seed);
      return p;
    };
    const auto ones = [](int64_t count) {
      float* p;
      CHECK_CUDA(cudaMalloc(&p, count * 4));
      set_kernel<<<256, 256>>>(p, count, 1e-3f);
      return p;
    };
    for (int i = 0; i < kTimedLayers * 4; ++i) {
      weights[i / 4][i % 4] = filled(kN[i % 4] * kK[i % 4], i);
    }
    x = filled(rows * kInner * 2, 97);
    out = filled(rows * 2 * kInner * 2, 98);
    x_scale = ones(gemm_block_stride(rows) * ceil_div(kInner, kScaleBlock));
    weight_scale = ones(2 * kInner * ceil_div(kInner, kScaleBlock));
  }

  GemmParams params(Kind kind, int product, int layer, int64_t rows) const {
    GemmParams p;
    p.operands = kind == kPacked8     ? GemmOperands::kWeightInt8
                 : kind == kPacked4   ? GemmOperands::kWeightInt4
                 : kind == kCodesInt8 ? GemmOperands::kInt8
                                      : GemmOperands::kFp8;
    p.x = x;
    p.weight = weights[layer][product];
    p.x_scale = kind >= kCodesInt8 ? x_scale : nullptr;
    p.weight_scale = kind == kPacked4 ? nullptr : weight_scale;
    p.scale_rows = kind == kCodesBlocks ? kScaleBlock : 0;
    p.out = out;
    p.residual = product == kOutProjection || product == kDown ? x : nullptr;
    p.gated = product == kGateUp;
    p.num_rows = rows;
    p.in_features = kK[product];
    p.out_features = kN[product];
    return p;
  }
};

int time_all() {
  const Model model(1024);
  printf("us per product: mma (this GPU's choice)\n");
  for (int kind = 0; kind < kNumKinds; ++kind) {
    for (const int64_t rows : {1, 8, 32, 128, 1024}) {
      printf("%-18s M %4ld", kNames[kind], rows);
      double flops = 0., bytes = 0., total = 0.;
      for (int product = 0; product < 4; ++product) {
        const auto us = [&](const char* force) {
          return 1e3 / kTimedLayers *
                 graph_ms(
                     [&](cudaStream_t stream) {
                       for (int layer = 0; layer < kTimedLayers; ++layer) {
                         CHECK_STATUS(
                             gemm(model.params(static_cast<Kind>(kind), product, layer, rows), {},
                                  force, stream));
                       }
                     },
                     5);
        };
        const double own = us("mma"), chosen = us(nullptr);
        printf(" | %s %.1f (%.1f)", kKindNames[product], own, chosen);
        flops += 2. * rows * kN[product] * kK[product];
        bytes += kN[product] * kK[product] * (kind == kPacked4 ? .53125 : 1.);
        total += own;
      }
      printf(" | %.2f TB/s, %.0f TFLOP/s\n", bytes / total / 1e6, flops / total / 1e6);
    }
  }
  return 0;
}

// us of each product as it is and as a matrix first, and the rates; last, from how many rows on the
// matrix is faster for all that follow.
int time_matrix() {
  constexpr int64_t kMost = 4096;
  const Model model(kMost);
  const GemmResources resources = blas_resources(GemmOperands::kDense, kMost, 2 * kInner);
  uint8_t* matrix;
  CHECK_CUDA(cudaMalloc(&matrix, 2 * kHidden * kInner * 2));
  const auto as_matrix = [&](GemmParams p, cudaStream_t stream) {
    CHECK_STATUS(unpack_weight(p, matrix, stream));
    p.weight = matrix;
    p.weight_scale = nullptr;
    p.operands = GemmOperands::kDense;
    CHECK_STATUS(gemm(p, resources, "blas", stream));
  };
  for (const Kind kind : {kPacked8, kPacked4}) {
    int64_t from[4] = {};
    for (const int64_t rows : {128, 256, 384, 512, 768, 1024, 1536, 2048, 4096}) {
      printf("%-18s M %4ld", kNames[kind], rows);
      for (int product = 0; product < 4; ++product) {
        as_matrix(model.params(kind, product, 0, rows), nullptr);  // chooses an algorithm
        const auto us = [&](const auto& run) {
          return 1e3 / kTimedLayers *
                 graph_ms(
                     [&](cudaStream_t stream) {
                       for (int layer = 0; layer < kTimedLayers; ++layer) {
                         run(model.params(kind, product, layer, rows), stream);
                       }
                     },
                     5);
        };
        const double own = us([&](const GemmParams& p, cudaStream_t stream) {
          CHECK_STATUS(gemm(p, {}, "mma", stream));
        });
        const double first = us(as_matrix);
        const double flops = 2e-6 * rows * kN[product] * kK[product];
        printf(" | %s %.1f (%.0f TFLOP/s), matrix %.1f (%.0f)", kKindNames[product], own,
               flops / own, first, flops / first);
        if (first >= own) from[product] = 0;
        if (first < own && from[product] == 0) from[product] = rows;
      }
      printf("\n");
    }
    printf("%-18s a matrix is faster from", kNames[kind]);
    for (int product = 0; product < 4; ++product) {
      printf(" | %s %ld", kKindNames[product], from[product]);
    }
    printf(" rows (0: nowhere)\n");
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 4096);
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode.empty()) return time_all();
  if (mode == "matrix") return time_matrix();
  fprintf(stderr, "every_gpu: %s is not known (there is: matrix)\n", mode.c_str());
  return 2;
}
