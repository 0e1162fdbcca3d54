// Products of one weight on Hopper: its own kernels in every format of the operands, and cuBLASLt.
// check: kernels and tiles at random against a double reference, over odd shapes. time: products of
// a Llama-3-8B step (bf16: 15.01 GB of weights) and of its prefill.
//
//   products_sm90 check bf16|float16|float32|fp8|int8|blocks|blas|tiles
//   products_sm90 check weight_int8|weight_int4|groups_int8|mxfp4|w4a8
//   products_sm90 time chain|candidates|tune [FORMAT ...] [ROWS ...] | compare
// chain: a step as one graph, with and without dependent launches and the quantization of each x,
// and cuBLASLt's bare products. candidates: each product by each kernel. tune: by each tile, what
// is chosen first. compare: codes by our kernels and by cuBLASLt, which is found in the folder
// REGATTA_CUBLASLT, or where the dynamic linker looks.
#include "ways.cuh"

using namespace regatta;
using namespace regatta::native;
using namespace regatta::cuda;

namespace {

// ----------------------------------------------------------------------------------------- check

// Any of gemm_sm90; packed: of gemm_packed_sm90.
GemmTile random_tile(bool packed, int tokens, Random& random) {
  GemmTile tile;
  tile.tokens = (packed ? 16 : 8) << random.below(packed ? 4 : tokens);
  tile.features = packed ? 128 : 64 << random.below(3);
  tile.stages = 2 + random.below(packed ? 3 : 2);
  tile.split = packed ? 1 + random.below(8) : 1 << random.below(4);
  tile.trigger = random.below(6) - 1;
  return tile;
}

std::string text_of(int kernel, const GemmTile& t) {
  return format("kernel %d tile %dx%d stages %d split %d trigger %d", kernel, t.tokens, t.features,
                t.stages, t.split, t.trigger);
}

template <class T>
void check_dense(Case c, const GemmResources& resources, Random& random) {
  c.norm = random.below(2);
  c.sumsq_out = !c.gated && random.below(2);
  // sm90 automatic, sm90 with any tile, stream, generic, blas, gemm's choice, tiles
  const int kernel = random.below(7), columns = 128 + 64 * random.below(3);
  const GemmTile tile = random_tile(false, 5, random);
  const bool use_mma = random.below(2);
  if (kernel == 2 && c.m > 8) c.sumsq_out = false;
  Operands o = dense_operands<T>(c, random);
  if (c.norm) add_norm(c, squares_of(o.xf, c, 48), 1e-5f, &o);
  const Runner runner = [&](const GemmParams& p) {
    return kernel == 0   ? gemm_sm90(p, nullptr)
           : kernel == 1 ? gemm_sm90(p, tile, nullptr)
           : kernel == 2 ? gemm_stream_sm80(p, use_mma, nullptr)
           : kernel == 3 ? gemm_generic(p, nullptr)
           : kernel == 4 && resources.blas != nullptr && gemm_blas_refuses(p) == nullptr
               ? gemm_blas(p, resources, nullptr)
           : kernel == 6 && gemm_tiles_sm90_refuses(p) == nullptr
               ? gemm_tiles_sm90(p, columns, nullptr)
               : gemm(p, resources, nullptr, nullptr);
  };
  // cuBLASLt's path rounds the scaled x, and gate and up, once more.
  const double absolute = kernel < 4 || kernel == 6   ? 1e-3
                          : std::is_same_v<T, __half> ? 4e-3
                                                      : 3e-2;
  check_product<T>(c, o, o.wf, runner, text_of(kernel, tile),
                   {relative_of<T>(c, 1e-4, 1e-3, 8e-3), absolute, true});
}

template <class T>
void check_dense_all(const Words&) {
  const GemmResources resources = blas_resources();
  Random random(7);
  each_case({1, 2, 3, 7, 8, 9, 16, 17, 31, 33, 64, 65, 100, 127, 128, 257, 600},
            {{{64, 64}},
             {{200, 136}},
             {{72, 8}},
             {{1008, 520}},
             {{257, 1032}},
             {{8, 4104}},
             {{6144, 1024}},
             {{4096, 4096}}},
            3, 16, random, [&](Case c, int variant) {
              c.float_out = variant == 2;
              check_dense<T>(c, resources, random);
            });
}

void check_float(const Words&) {
  Random random(7);
  Case cases[] = {{1, 65, 7}, {33, 257, 129}, {9, 130, 515}};
  for (Case& c : cases) {
    c.gated = c.m == 9;
    c.bias = c.norm = c.float_out = true;
    c.residual = c.sumsq_out = !c.gated;
    Operands o = dense_operands<float>(c, random);
    add_norm(c, squares_of(o.xf, c, 48), 1e-5f, &o);
    check_product<float>(c, o, o.wf,
                         [](const GemmParams& p) { return gemm(p, {}, nullptr, nullptr); },
                         "float32", {1e-4, 1e-3, true});
  }
}

// x and weight as codes of 8 bits; `theirs` in place of kernels by chance.
template <class T>
void check_codes(GemmOperands operands, const Case& c, Random& random,
                 const Runner& theirs = nullptr) {
  const bool fp8 = operands == GemmOperands::kFp8;
  const Operands o = coded_operands(operands, c, 0, false, random);
  GemmTile tile = random_tile(false, 5, random);
  tile.stages = 2 + random.below(3);
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
  // fp8: the hardware's own sums; cuBLASLt's path rounds gate and up once more.
  const double absolute = theirs && c.gated ? 3e-2 : fp8 ? 1.2e-2 : 3e-4;
  check_product<T>(c, o, o.wf, runner, text_of(kernel, tile) + format(" columns %d", columns),
                   {relative_of<T>(c, 2e-3, 1.5e-3, 8e-3), absolute});
}

// e4m3 with scales of blocks of 128 columns, x quantized by quantize_rows().
template <class T>
void check_blocks(const Case& c, Random& random, const Runner& theirs = nullptr) {
  const int64_t blocks = ceil_div(c.k, kScaleBlock), stride = gemm_block_stride(c.m);
  const int64_t scale_rows = random.below(2) || theirs ? kScaleBlock : 1;
  const bool normalize = random.below(2);
  Operands o = coded_operands(GemmOperands::kFp8, c, scale_rows, false, random);
  std::vector<float> xf = random.floats(c.m * c.k, 1.7f), normf = random.floats(c.k, 1.f);
  for (size_t i = 0; i < xf.size(); ++i) xf[i] *= i / kScaleBlock % 3 == 1 ? 0.03f : 1.f;
  const Buffer<T> x(rounded<T>(xf)), norm(rounded<T>(normf));
  const Buffer<uint8_t> codes(c.m * c.k);
  const Buffer<float> x_scale(blocks * stride);
  QuantizeRowsParams q = quantization_of(x.data, codes, x_scale, c.m, c.k, Traits<T>::dtype);
  q.norm_weight = normalize ? norm.data : nullptr;
  q.normalize = normalize;
  q.blocks = true;
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
      const float code = host_float(got[row * c.k + i]);
      const double step = std::max(std::fabs(value / by) / 16., 1. / 1024);
      if (!(std::fabs(code - value / by) <= step * 1.001)) ++bad;
      o.xf[row * c.k + i] = code * by;
    }
  }
  count_case(bad == 0, format("codes of blocks m %ld k %ld: %ld bad", c.m, c.k, bad));
  o.params.x = codes.data;
  o.params.x_scale = x_scale.data;
  GemmTile tile = random_tile(false, 4, random);
  tile.features = 64 << random.below(2), tile.stages = 2 + random.below(3);
  const int kernel = random.below(3);
  const Runner runner = [&](const GemmParams& g) {
    if (theirs) return theirs(g);
    if (kernel == 0) return gemm_sm90(g, tile, nullptr);
    if (kernel == 1 && gemm_tiles_sm90_refuses(g) == nullptr) {
      return gemm_tiles_sm90(g, 128, nullptr);
    }
    return gemm(g, {}, nullptr, nullptr);
  };
  check_product<T>(c, o, o.wf, runner, text_of(kernel, tile) + format(" of %ld rows", scale_rows),
                   {relative_of<T>(c, 2e-3, 1.5e-3, 8e-3), theirs && c.gated ? 3e-2 : 3e-3});
}

template <class T>
void check_coded(GemmOperands operands, bool blocks, const Case& c, Random& random,
                 const Runner& theirs = nullptr) {
  if (blocks) return check_blocks<T>(c, random, theirs);
  check_codes<T>(operands, c, random, theirs);
}

constexpr std::array<int64_t, 2> kCodeShapes[] = {
    {64, 64}, {208, 144}, {80, 16}, {1008, 528}, {264, 1040}, {8, 4112}, {1536, 2048}, {768, 640}};

void check_coded_all(GemmOperands operands, bool blocks) {
  Random random(11);
  each_case({1, 2, 5, 8, 9, 17, 33, 64, 100, 127, 128, 129, 257},
            {std::begin(kCodeShapes), std::end(kCodeShapes)}, 2, 16, random, [&](Case c, int) {
              c.sumsq_out = !blocks && !c.gated && random.below(2);
              c.float_out = !blocks && !c.gated && random.below(4) == 0;
              random.below(2) ? check_coded<__nv_bfloat16>(operands, blocks, c, random)
                              : check_coded<__half>(operands, blocks, c, random);
            });
}

// Blocks of gemm_tiles_sm90() that make several tiles, one after another.
void check_many_tiles(const Words&) {
  Random random(11);
  for (const int columns : {128, 192, 256}) {
    for (const bool gated : {false, true}) {
      Case c = {4153, 3072, 144};
      c.gated = gated;
      c.bias = columns != 192;
      c.residual = !gated;
      check_codes<__nv_bfloat16>(GemmOperands::kFp8, c, random, [&](const GemmParams& p) {
        return gemm_tiles_sm90(p, columns, nullptr);
      });
    }
  }
}

// By turns alone and as gemm() chooses; where cuBLASLt will not, ours.
void check_blas(const Words&) {
  Random random(13);
  const GemmResources resources = blas_resources();
  if (resources.blas == nullptr) return;
  int refused = 0, count = 0;
  const Runner theirs = [&](const GemmParams& p) {
    if (count % 3 == 0 && !p.gated && gemm_blas_codes_sm90_refuses(p) == nullptr &&
        gemm_tiles_sm90_refuses(p) == nullptr) {
      return gemm(p, resources, "blas_codes", nullptr);
    }
    const Status status = gemm_blas_codes_sm90(p, resources, nullptr);
    if (status.ok()) return status;
    if (++refused <= 4) printf("refused: %s\n", status.message().c_str());
    return gemm(p, {}, nullptr, nullptr);
  };
  constexpr std::array<int64_t, 2> kBlockShapes[] = {
      {208, 512}, {1536, 2048}, {768, 1936}, {64, 1536}};
  for (const bool blocks : {false, true}) {
    for (const int64_t rows : {1, 5, 64, 100, 129, 256, 257, 1000, 1024, 8000}) {
      const bool many = rows >= 1000;
      for (int i = 0; i < (many ? 2 : blocks ? 4 : 8); ++i) {
        // Of many rows the small shapes alone: numbers are drawn on the host.
        const auto shape = blocks ? kBlockShapes[many ? 0 : i] : kCodeShapes[many ? 3 + i : i];
        each_case({blocks ? round_up(rows, 128) : rows}, {shape}, 2, 16, random, [&](Case c, int) {
          c.float_out = !c.gated && !c.bias && !c.residual && random.below(2);
          random.below(2)
              ? check_coded<__half>(GemmOperands::kFp8, blocks, c, random, theirs)
              : check_coded<__nv_bfloat16>(GemmOperands::kFp8, blocks, c, random, theirs);
          ++count;
        });
      }
    }
  }
  printf("%d runs refused\n", refused);
}

// Weight packed, x of T or, of w4a8, of int8. There sums of a group are exact, so that an error is
// a float sum's over groups (65 roundings by 2^-24 of sums up to five times the outputs' size: 2e-5
// of it) and the output's rounding.
template <class T>
void check_packed(GemmOperands operands, Case c, Random& random) {
  const bool w4a8 = operands == GemmOperands::kW4A8;
  const bool in_groups = operands != GemmOperands::kWeightInt8;
  c.norm = !w4a8 && random.below(2);
  c.scaled_out = c.sumsq_out && !c.float_out && random.below(2);
  Operands o = packed_operands<T>(operands, c, 32, random);
  if (c.norm) add_norm(c, random.positive(c.m * 20, 1.f), .25f, &o);
  const GemmTile tile = random_tile(true, 4, random), wide_tile = {64, 128, 3, 1, -1};
  const GemvTile gemv = {1 << random.below(3), 60 + random.below(150), random.below(8)};
  const int kernel = w4a8 ? random.below(3) : c.m > 257 ? 3 : random.below(5);
  const bool tiles = kernel >= 3 && !c.float_out && !c.sumsq_out && !c.norm;
  const PackedTileCost& shape = kPackedTiles[c.gated ? 0 : random.below(9)];
  // Scales of groups are applied to sums where rows are few, else to codes, rounded.
  const bool many = (kernel == 0 ? tile.tokens : c.m) > 32 || o.params.group_size == 32;
  const bool by_matrix = !w4a8 && kernel == 2 && !c.gated && !c.scaled_out && c.m > 128;
  std::vector<float> matrix_values = o.wf;
  const std::vector<T> matrix_wanted = rounded<T>(matrix_values);
  std::vector<float> wf = o.wf;
  if (in_groups && !w4a8 && (tiles || (many && (kernel == 0 || c.m > 8)))) wf = o.wf_rounded;
  if (by_matrix) wf = matrix_values;
  const Buffer<T> matrix(c.n * c.k);
  if (!w4a8) {
    GemmParams p = o.params;
    c.describe<T>(&p);
    CHECK_STATUS(unpack_weight(p, matrix.data, nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
    if (!same_bits(matrix.host(), matrix_wanted)) {
      count_case(false, format("unpack of %ld columns, %s", p.group_size, c.text().c_str()));
      return;
    }
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
  const std::string label =
      format("groups of %ld, %s gemv of %d blocks, %d KB, tiles of %d x %d", o.params.group_size,
             text_of(kernel, tile).c_str(), gemv.cluster, gemv.kilobytes, shape.rows, shape.tokens);
  const Tolerance allowed = w4a8 ? Tolerance{relative_of<T>(c, 1e-5, 4.9e-4, 3.92e-3), 2e-5}
                                 : Tolerance{relative_of<T>(c, 2e-4, 1e-3, 8e-3), 3e-4};
  check_product<T>(c, o, wf, runner, label, allowed);
}

void check_packed_all(GemmOperands operands) {
  Random random(11);
  const auto check = [&](Case c, int) {
    if (operands == GemmOperands::kW4A8 && c.k % 16 != 0) return;
    c.k = columns_of(operands, c.k);
    c.sumsq_out = !c.gated && random.below(2);
    c.float_out = !c.gated && random.below(4) == 0;
    random.below(2) ? check_packed<__half>(operands, c, random)
                    : check_packed<__nv_bfloat16>(operands, c, random);
  };
  const std::vector<std::array<int64_t, 2>> shapes = {{64, 64},     {208, 144},  {80, 16},
                                                      {1008, 528},  {264, 1040}, {8, 4112},
                                                      {1536, 2048}, {96, 2248},  {2432, 640}};
  each_case({1, 2, 3, 5, 8, 9, 16, 17}, shapes, 4, 32, random, check);
  each_case({33, 64, 96, 100, 127, 128, 129, 257, 1800}, shapes, 2, 32, random, check);
}

// ------------------------------------------------------------------------------------------ time

// Bytes per second of a pure read.
double read_bandwidth() {
  const Buffer<uint8_t> buffer(int64_t{8} << 30), sink(16);
  return buffer.size / 1e9 /
         graph_ms(
             [&](cudaStream_t stream) {
               CHECK_CUDA(static_cast<cudaError_t>(
                   regatta_launch_read(buffer.data, buffer.size, sink.data, stream)));
             },
             5);
}

void time_chain(const Words& words) {
  const double peak = read_bandwidth();
  printf("pure read %.2f TB/s\n", peak);
  const GemmResources resources = blas_resources();
  for (const Format& f : rows_named(kFormats, words)) {
    const Llama model(f, 1024, true);
    for (const int64_t rows :
         words.numbers({1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024})) {
      const double ms = model.step_ms(rows, chosen_way().run);
      const double rate = model.bytes(rows) / ms / 1e9;
      printf("%s M %4ld: %d products, %.2f GB, %.3f ms, %.2f TB/s, %.0f %%", f.name, rows,
             model.count(rows), model.bytes(rows) / 1e9, ms, rate, 100 * rate / peak);
      printf(" | no PDL %.3f", model.step_ms(rows, [](GemmParams p, cudaStream_t stream) {
        p.dependent_launch = false;
        return gemm(p, {}, nullptr, stream);
      }));
      if (has_x_codes(f.operands)) {
        printf(" | with quantization %.3f",
               model.step_ms(rows, [&](const GemmParams& p, cudaStream_t stream) {
                 return gemm_quantized(p, model.quantization(p), {}, stream);
               }));
      }
      if (f.operands == GemmOperands::kDense && resources.blas != nullptr) {
        // Without norm, residual and activation. The first runs choose algorithms.
        const Product bare = [&](GemmParams p, cudaStream_t stream) {
          p.sumsq = p.sumsq_out = nullptr;
          p.residual = nullptr;
          p.gated = false;
          return gemm_blas(p, resources, stream);
        };
        for (int i = 0; i < model.count(rows); ++i) {
          if (i < 4 || model.kind_of(i) == kHead)
            CHECK_STATUS(bare(model.params(i, rows), nullptr));
        }
        CHECK_CUDA(cudaDeviceSynchronize());
        const double theirs = model.step_ms(rows, bare);
        printf(" | cuBLASLt, bare %.3f, %.2f TB/s", theirs, model.bytes(rows) / theirs / 1e9);
      }
      printf("\n");
    }
  }
}

void time_candidates(const Words& words) {
  const GemmResources resources = blas_resources();
  const std::vector<int64_t> rows =
      words.numbers({1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8000});
  const Buffer<uint8_t> matrix(2 * 2 * kInner * kHidden);
  GemmResources with_matrix = resources;
  with_matrix.matrix = matrix.data, with_matrix.matrix_bytes = matrix.size;
  for (const Format& f : rows_named(kFormats, words)) {
    const Llama model(f, *std::max_element(rows.begin(), rows.end()), true);
    time_ways(model, rows, is_packed(f.operands) ? 4 : kKinds,
              [&](const GemmParams& p) { return candidate_ways(p.operands, with_matrix); });
  }
}

// Of one row of codes: launches that quantize it, too.
std::vector<Way> stream_ways(const Llama& model) {
  std::vector<Way> ways = {{"chosen", [&](const GemmParams& p, cudaStream_t stream) {
                              return gemm_quantized(p, model.quantization(p), {}, stream);
                            }}};
  for (int blocks = 1; blocks <= 3; ++blocks) {
    for (const int stages : {2, 3, 4, 5, 6, 8, 10, 12}) {
      for (const bool early : {false, true}) {
        const StreamCodesTile tile = {stages, blocks, early};
        ways.push_back({format("stages %d blocks %d early %d", stages, blocks, early),
                        [=, &model](const GemmParams& p, cudaStream_t stream) {
                          const int room = 227 * 1024 / blocks - 1024;
                          if (1600 + p.in_features + stages * 16 * 1088 > room) {
                            return Status::error("too much shared memory");
                          }
                          const QuantizeRowsParams q = model.quantization(p);
                          return gemm_stream_codes_sm90(p, &q, tile, stream);
                        }});
      }
    }
  }
  return ways;
}

void time_tune(const Words& words) {
  const std::vector<int64_t> rows = words.numbers({1, 4, 8, 16, 32, 64, 128});
  for (const Format& f : rows_named(kFormats, words)) {
    const Llama model(f, *std::max_element(rows.begin(), rows.end()), true);
    time_ways(
        model, rows, is_packed(f.operands) ? 4 : kKinds,
        [&](const GemmParams& p) {
          if (is_packed(p.operands)) return packed_ways(p);
          const bool stream = is_codes(p.operands) && p.scale_rows == 0 && p.num_rows == 1;
          return stream ? stream_ways(model) : small_ways(p);
        },
        9);
  }
}

// gate_up with the codes that the next product takes as well: ours quantizes its output, cuBLASLt's
// is folded meanwhile.
void time_compare(const Words& words) {
  constexpr int64_t kMost = 8000;
  const GemmResources resources = blas_resources();
  const Buffer<uint8_t> next_codes(kMost * kInner);
  const Buffer<float> next_scale(kMost);
  const auto next_of = [&](const GemmParams& p) {
    return quantization_of(p.out, next_codes, next_scale, p.num_rows, p.out_features / 2);
  };
  for (const char* name : {"fp8", "blocks"}) {
    const Llama model(format_of(name), kMost, false, 4);
    std::vector<int64_t> rows =
        words.numbers({160, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8000});
    if (model.format.scale_rows != 0) {
      rows.erase(std::remove_if(rows.begin(), rows.end(), [](int64_t m) { return m % 128 != 0; }),
                 rows.end());
    }
    time_ways(model, rows, 4, [&](const GemmParams&) {
      return std::vector<Way>{chosen_way(), {"cuBLASLt", [&](const GemmParams& p, cudaStream_t s) {
                                               return gemm_blas_codes_sm90(p, resources, s);
                                             }}};
    });
    if (model.format.scale_rows != 0) continue;
    Threshold from;
    for (const int64_t m : rows) {
      std::vector<Way> ways = {{"with codes",
                                [&](const GemmParams& p, cudaStream_t s) {
                                  const Status status = gemm(p, {}, nullptr, s);
                                  return status.ok() ? quantize_rows(next_of(p), s) : status;
                                }},
                               {"cuBLASLt", [&](const GemmParams& p, cudaStream_t s) {
                                  return gemm_blas_unfolded_sm90(p, next_of(p), resources, s);
                                }}};
      model.timed(kGateUp, m).print(&ways);
      from.see(m, ways[0].us, ways[1].us);
    }
    printf("cuBLASLt is faster from | gate_up with codes %ld rows (0: nowhere)\n", from.from());
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<Part> parts = {
      {"check", "bf16", check_dense_all<__nv_bfloat16>},
      {"check", "float16", check_dense_all<__half>},
      {"check", "float32", check_float},
      {"check", "tiles", check_many_tiles},
      {"check", "blas", check_blas},
      {"time", "chain", time_chain},
      {"time", "candidates", time_candidates},
      {"time", "tune", time_tune},
      {"time", "compare", time_compare},
  };
  for (const Format& f : kFormats) {
    if (f.operands == GemmOperands::kDense || std::string(f.name) == "int4_32") continue;
    parts.push_back({"check", f.name, [&f](const Words&) {
                       if (is_packed(f.operands)) return check_packed_all(f.operands);
                       check_coded_all(f.operands, f.scale_rows != 0);
                     }});
  }
  return run_parts(argc, argv, parts);
}
