// Times products of codes (e4m3 and int8) of a Llama-3-8B decode step and of its prefill, and what
// makes the codes; accuracy: what the hardware's sums of e4m3 products cost.
//
//   codes chain [fp8|int8] | large | compare | quantize | accuracy | tune fp8|int8 ROWS...
// cuBLASLt is found in the folder REGATTA_CUBLASLT, or where the dynamic linker looks.
#include <cuda_fp8.h>

#include <cstring>

#include "cuda/gemm/large/gemm_blas.cuh"
#include "native/product.cuh"
#include "timing.cuh"

using namespace regatta;
using namespace regatta::bench;
using namespace regatta::cuda;

namespace {

float e4m3_value(uint8_t bits) {
  __nv_fp8_e4m3 x;
  x.__x = bits;
  return static_cast<float>(x);
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
    const Buffer<float> expected(kM * kN), real(kM * kN), out(kM * kN), slack(kM * kN);
    const Buffer<double> squares(std::vector<double>(1, 0.));
    const Buffer<float> xb(xf), wb(wf), xt(x_true), wt(w_true), x_scale(xs), w_scale(ws);
    const Buffer<uint8_t> x_codes(x), w_codes(w);
    const auto reference = [&](const Buffer<float>& a, const Buffer<float>& b,
                               const Buffer<float>& to) {
      reference_kernel<<<kM * kN / 128, 128>>>(a.data, b.data, nullptr, nullptr, to.data,
                                               slack.data, squares.data, kM, kN, k, false);
    };
    reference(xb, wb, expected);
    reference(xt, wt, real);
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

// The least number of rows from which on theirs is the faster by 1 % at least, or 0.
class Threshold {
 public:
  void see(int64_t rows, double ours, double theirs) {
    const bool faster = theirs > 0. && theirs < .99 * ours;
    if (!faster) from_ = 0;
    if (faster && from_ == 0) from_ = rows;
  }
  int64_t from() const { return from_; }

 private:
  int64_t from_ = 0;
};

// Ours beside cuBLASLt, four layers' weights in turn, in us and as a share of the tensor cores'
// 1,979 TFLOP/s. gate_up with the codes that the next product takes: ours quantizes its output,
// cuBLASLt's is folded meanwhile. Then the same with scales of blocks, without those codes. Last,
// what rows of select.cu take: from how many rows on cuBLASLt is faster.
int main_compare() {
  constexpr double kPeak = 1979.;
  constexpr int64_t kMost = 8000;
  const Model model(kMost);
  const GemmResources resources = blas_resources(GemmOperands::kFp8, kMost, 2 * kInner);
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
    Threshold thresholds[4], coded;
    for (const int64_t rows : {160, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8000}) {
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
        thresholds[kind].see(rows, a, b);
        if (kind == kGateUp && scale_rows == 0) {
          our_us = time(kind, rows, scale_rows, ours_coded);
          their_us = time(kind, rows, scale_rows, theirs_coded);
          printf(", with codes %.1f, cuBLASLt %.1f", our_us, their_us);
          coded.see(rows, our_us, their_us);
        }
        our_sum += our_us;
        best_sum += their_us > 0. ? std::min(our_us, their_us) : our_us;
      }
      printf(" | 32 layers %.2f ms, with the faster %.2f\n", our_sum * .032, best_sum * .032);
    }
    printf("%scuBLASLt is faster from", scale_rows != 0 ? "blocks: " : "");
    for (int kind = 0; kind < 4; ++kind) {
      printf(" | %s %ld", kKindNames[kind], thresholds[kind].from());
    }
    if (scale_rows == 0) printf(" | gate_up with codes %ld", coded.from());
    printf(" rows (0: nowhere)\n");
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
  const std::string mode = argc > 1 ? argv[1] : "chain";
  setvbuf(stdout, nullptr, _IOLBF, 4096);
  if (mode == "compare") return main_compare();
  if (mode == "quantize") return main_quantize();
  if (mode == "large") return main_large();
  if (mode == "accuracy") return main_accuracy();
  if (mode == "tune") {
    std::vector<int64_t> rows;
    for (int i = 3; i < argc; ++i) rows.push_back(std::atol(argv[i]));
    return main_tune(argc > 2 ? argv[2] : "fp8", rows);
  }
  return main_chain(argc > 2 ? argv[2] : nullptr);
}
