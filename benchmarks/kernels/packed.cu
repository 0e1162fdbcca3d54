// Times products with packed weights of 8 and 4 bits of a Llama-3-8B decode step and of its
// prefill, dense ones beside them.
//
//   packed chain [dense] | large [ROWS] | sweep | tune [ROWS [FORMAT]] | w4a8
//        | once [ROWS [FORMAT]]: each product of two layers, for profilers
//   FORMAT: "8 bits", "4 bits", "8 bits in groups", w4a8
#include <cstring>
#include <typeinfo>

#include "regatta/gemm.h"
#include "timing.cuh"

using namespace regatta;
using namespace regatta::bench;
using namespace regatta::cuda;

namespace {

constexpr GemmOperands kFormats[] = {GemmOperands::kWeightInt8, GemmOperands::kWeightInt4,
                                     GemmOperands::kWeightInt8Groups, GemmOperands::kW4A8};
const char* name_of(GemmOperands operands) {
  return operands == GemmOperands::kDense              ? "dense"
         : operands == GemmOperands::kWeightInt8       ? "8 bits"
         : operands == GemmOperands::kWeightInt4       ? "4 bits"
         : operands == GemmOperands::kWeightInt8Groups ? "8 bits in groups"
                                                       : "w4a8";
}

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
  uint8_t *hidden, *qkv, *inner, *norm_weight;  // 16-bit
  uint8_t* x_codes;
  float *weight_scale, *x_scale;
  GemmResources resources;
  double weights = 0.;

  explicit Model(int64_t rows, bool with_dense) {
    for (int i = 0; i < kLayers * 4; ++i) {
      const int64_t n = kN[i % 4] * kK[i % 4];
      codes.push_back(filled(n / 16 * 17, i, false));
      if (with_dense) dense.push_back(filled(n * 2, i, true));
      weights += static_cast<double>(n);
    }
    hidden = filled(rows * kHidden * 2, 98, true);
    qkv = filled(rows * kQkv * 2, 97, true);
    inner = filled(rows * kInner * 2, 96, true);
    norm_weight = filled(kHidden * 2, 94, true);
    CHECK_CUDA(cudaMalloc(&weight_scale, 2 * kInner * 4));
    set_kernel<<<64, 256>>>(weight_scale, 2 * kInner, 1e-3f);
    x_codes = filled(rows * kInner, 95, false);
    CHECK_CUDA(cudaMalloc(&x_scale, rows * 4));
    set_kernel<<<64, 256>>>(x_scale, rows, 1e-2f);
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
    p.group_size = operands == GemmOperands::kWeightInt8Groups ? 64 : 128;
    p.num_rows = rows;
    p.in_features = kK[kind];
    p.out_features = kN[kind];
    p.out = kind == kQkvProjection ? qkv : kind == kGateUp ? inner : hidden;
    if (kind == kOutProjection || kind == kDown) p.residual = hidden;
    p.gated = kind == kGateUp;
    if (operands == GemmOperands::kW4A8) {
      p.x = x_codes;
      p.x_scale = x_scale;
    }
    return p;
  }

  // Of the 16-bit x of the same product, with the norm where a layer has one.
  QuantizeRowsParams quantization(int index, int64_t rows) const {
    const int kind = index % 4;
    QuantizeRowsParams q;
    q.x = kind == kOutProjection ? qkv : kind == kDown ? inner : hidden;
    q.codes = x_codes;
    q.scale = x_scale;
    q.num_rows = rows;
    q.width = kK[kind];
    q.operands = GemmOperands::kInt8;
    q.normalize = kind == kQkvProjection || kind == kGateUp;
    if (q.normalize) q.norm_weight = norm_weight;
    return q;
  }
};

double bytes_per_weight(GemmOperands operands) {
  return operands == GemmOperands::kDense              ? 2.
         : operands == GemmOperands::kWeightInt8       ? 1.
         : operands == GemmOperands::kWeightInt8Groups ? 1.0625
                                                       : .53125;
}

int main_chain(bool with_dense) {
  const Model model(1024, with_dense);
  printf("128 products, ms\n");
  std::vector<GemmOperands> formats(std::begin(kFormats), std::end(kFormats));
  if (with_dense) formats.push_back(GemmOperands::kDense);
  for (const GemmOperands operands : formats) {
    printf("%s", name_of(operands));
    for (const int64_t rows : {1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024}) {
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

// kW4A8, as it is and with the quantization of each x.
int main_w4a8() {
  const Model model(1024, false);
  printf("128 products of w4a8, ms; with the quantization of each x\n");
  for (const int64_t rows : {1, 4, 8, 16, 32, 64, 128, 256, 1024}) {
    double ms[2];
    for (int quantize = 0; quantize < 2; ++quantize) {
      ms[quantize] = graph_ms(
          [&](cudaStream_t stream) {
            for (int i = 0; i < kLayers * 4; ++i) {
              const GemmParams p = model.params(GemmOperands::kW4A8, i, rows);
              CHECK_STATUS(quantize ? gemm_quantized(p, model.quantization(i, rows), {}, stream)
                                    : gemm(p, {}, nullptr, stream));
            }
          },
          9);
    }
    printf("M %ld %.3f %.3f\n", rows, ms[0], ms[1]);
  }
  return 0;
}

// Microseconds per product of a kind, weights of all layers one after another.
double kind_us(const Model& model, GemmOperands operands, int kind, int64_t rows,
               const std::function<Status(const GemmParams&, cudaStream_t)>& product) {
  return 1e3 / kLayers *
         graph_ms(
             [&](cudaStream_t stream) {
               for (int i = 0; i < kLayers; ++i) {
                 CHECK_STATUS(product(model.params(operands, i * 4 + kind, rows), stream));
               }
             },
             5);
}

int main_tune(int64_t only, const char* format) {
  const Model model(256, false);
  for (const GemmOperands operands : kFormats) {
    if (format != nullptr ? std::strcmp(format, name_of(operands)) != 0
                          : operands > GemmOperands::kWeightInt4) {
      continue;
    }
    const bool w4a8 = operands == GemmOperands::kW4A8;
    for (const int64_t rows : {1, 4, 8, 16, 32, 64, 128, 256}) {
      if (only != 0 && rows != only) continue;
      for (int kind = 0; kind < 4; ++kind) {
        const double floor =
            static_cast<double>(kN[kind] * kK[kind]) * bytes_per_weight(operands) / 4.66e6;
        printf("%s M %ld %s floor %.2f us, chosen %.2f |", name_of(operands), rows,
               kKindNames[kind], floor,
               kind_us(model, operands, kind, rows, [&](const GemmParams& p, cudaStream_t s) {
                 return gemm(p, model.resources, nullptr, s);
               }));
        std::vector<std::pair<double, std::string>> times;
        char label[64];
        if (rows <= 8) {
          for (const int cluster : {1, 2}) {
            for (const int kilobytes : {112, 226}) {
              const GemvTile tile = {cluster, kilobytes};
              snprintf(label, sizeof(label), "v%d/%d", cluster, kilobytes);
              times.emplace_back(kind_us(model, operands, kind, rows,
                                         [&](const GemmParams& p, cudaStream_t s) {
                                           return gemv_packed_sm90(p, tile, s);
                                         }),
                                 label);
            }
          }
        }
        if (rows >= 8) {
          const int tokens = static_cast<int>(std::clamp<int64_t>(rows, 16, 128));
          for (int split = 1; split <= 8; ++split) {
            const int64_t blocks = ceil_div(kN[kind], 128) * ceil_div(rows, tokens) * split;
            if (split > 1 && blocks > 132) continue;
            for (const int kilobytes : {110, 220}) {
              const auto unit = static_cast<int64_t>(2048 * bytes_per_weight(operands));
              const int64_t stage = round_up(tokens * (w4a8 ? 128 : 256) + 8 * unit, 1024);
              const GemmTile tile = {tokens, 128, static_cast<int>(kilobytes * 1024 / stage), split,
                                     -1};
              snprintf(label, sizeof(label), "%d/%d", split, kilobytes);
              times.emplace_back(kind_us(model, operands, kind, rows,
                                         [&](const GemmParams& p, cudaStream_t s) {
                                           return gemm_packed_sm90(p, tile, s);
                                         }),
                                 label);
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

int main_once(int64_t rows, const char* format) {
  const Model model(rows, false);
  for (const GemmOperands operands : kFormats) {
    if (std::strcmp(format, name_of(operands)) != 0) continue;
    for (int i = 0; i < 8; ++i) {
      CHECK_STATUS(gemm(model.params(operands, i, rows), model.resources, nullptr, nullptr));
      CHECK_CUDA(cudaDeviceSynchronize());
    }
  }
  return 0;
}

int main_large(int64_t only) {
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
  const auto tiles = [&](int rows, int tokens) {
    return [=](const GemmParams& p, cudaStream_t s) {
      return gemm_packed_tiles_sm90(
          p, p.gated ? packed_tiles_of(p, 256, 128) : packed_tiles_of(p, rows, tokens), s);
    };
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
  std::vector<Way> ways = {{"dense", GemmOperands::kDense, chosen}};
  for (const GemmOperands format : {GemmOperands::kWeightInt8, GemmOperands::kWeightInt4}) {
    ways.push_back({"chosen", format, chosen});
    ways.push_back({"256 x 128", format, tiles(256, 128)});
    ways.push_back({"192 x 192", format, tiles(192, 192)});
    ways.push_back({"192 x 128", format, tiles(192, 128)});
    ways.push_back({"128 x 256", format, tiles(128, 256)});
    ways.push_back({"128 x 224", format, tiles(128, 224)});
    ways.push_back({"128 x 192", format, tiles(128, 192)});
    ways.push_back({"128 x 160", format, tiles(128, 160)});
    ways.push_back({"128 x 128", format, tiles(128, 128)});
    ways.push_back({"128 x 64", format, tiles(128, 64)});
    ways.push_back({"split", format, split});
    ways.push_back({"unpacked", format, unpacked});
  }
  for (const int64_t rows :
       {96, 128, 160, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 1536, 2048, 4096, 8192}) {
    if (only != 0 && rows != only) continue;
    for (const Way& way : ways) {
      if (way.run.target_type() == typeid(split) && rows > 256) continue;
      double sum = 0.;
      printf("%-7s %-9s M %4ld", name_of(way.operands), way.name, rows);
      for (int kind = 0; kind < 4; ++kind) {
        const double us =
            250. *
            graph_ms(
                [&](cudaStream_t stream) {
                  for (int r = 0; r < 4; ++r) {
                    CHECK_STATUS(way.run(model.params(way.operands, r * 4 + kind, rows), stream));
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

// What is chosen for packed weights, beside dense ones: each product of a layer, many numbers of
// rows.
int main_sweep() {
  const Model model(2048, true);
  constexpr GemmOperands kSwept[] = {GemmOperands::kDense, GemmOperands::kWeightInt8,
                                     GemmOperands::kWeightInt4};
  printf("us of a product: dense, 8 bits, 4 bits; of all four, 8 and 4 bits as shares of dense\n");
  for (int64_t rows = 96; rows <= 2048; rows += rows < 1024 ? 32 : 128) {
    double sums[3] = {};
    printf("M %4ld", rows);
    for (int kind = 0; kind < 4; ++kind) {
      std::vector<Body> bodies;
      for (const GemmOperands operands : kSwept) {
        bodies.push_back([&, operands](cudaStream_t stream) {
          for (int i = 0; i < kLayers; ++i) {
            CHECK_STATUS(
                gemm(model.params(operands, i * 4 + kind, rows), model.resources, nullptr, stream));
          }
        });
      }
      const std::vector<double> ms = graphs_ms(bodies, 3, 6);
      printf(" | %s", kKindNames[kind]);
      for (int i = 0; i < 3; ++i) {
        sums[i] += ms[i] * 1e3 / kLayers;
        printf(" %.1f", ms[i] * 1e3 / kLayers);
      }
    }
    printf(" | %.1f %.1f %.1f | %.3f %.3f\n", sums[0], sums[1], sums[2], sums[1] / sums[0],
           sums[2] / sums[0]);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "chain";
  setvbuf(stdout, nullptr, _IOLBF, 4096);
  if (mode == "w4a8") return main_w4a8();
  if (mode == "sweep") return main_sweep();
  if (mode == "large") return main_large(argc > 2 ? std::atoi(argv[2]) : 0);
  if (mode == "once") {
    return main_once(argc > 2 ? std::atoi(argv[2]) : 32, argc > 3 ? argv[3] : "4 bits");
  }
  if (mode == "tune") {
    return main_tune(argc > 2 ? std::atoi(argv[2]) : 0, argc > 3 ? argv[3] : nullptr);
  }
  return main_chain(argc > 2);
}
