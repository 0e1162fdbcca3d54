// Products with quantized weights by the kernels that every GPU has (the candidates "mma"). check:
// tiles at random, against double references over odd shapes. time: those of a Llama-3-8B step.
// float8 needs sm_89.
//
//   portable check weight_int8|weight_int4|int8|fp8|blocks
//   portable time mma|matrix [FORMAT ...] [ROWS ...]
// mma: this GPU's own choice beside them. matrix: packed weights, multiplied as they are and made a
// matrix for cuBLASLt first, which the rows "matrix" of select.cu choose between. cuBLASLt is found
// in the folder REGATTA_CUBLASLT, or where the dynamic linker looks.
#include "ways.cuh"

using namespace regatta;
using namespace regatta::cuda;
using namespace regatta::native;

namespace {

const Format kOwn[] = {format_of("weight_int8"), format_of("weight_int4"), format_of("int8"),
                       format_of("fp8"), format_of("blocks")};

// Tiles of gemm_mma.cuh, at random.
MmaTile random_tile(bool packed, int64_t rows, Random& random) {
  switch (random.below(4)) {
    case 0:
      return {packed ? 64 : 128, 4};
    case 1:
      return {64, 4};
    case 2:
      return {32, 2 << random.below(2)};
    default:
      return {8, (rows <= 8 ? 1 : 2) << random.below(2)};
  }
}

template <class T>
void check_case(const Format& f, const Case& c, Random& random) {
  const bool packed = is_packed(f.operands), chosen = random.below(2);
  const MmaTile tile = random_tile(packed, c.m, random);
  const int64_t scale_rows = f.scale_rows == 0 ? 0 : random.below(3) == 0 ? 1 : kScaleBlock;
  const Operands o = packed ? packed_operands<T>(f.operands, c, 64, random)
                            : coded_operands(f.operands, c, scale_rows, true, random);
  const Runner runner = [&](const GemmParams& p) {
    if (chosen) return gemm(p, {}, "mma", nullptr);
    return packed ? gemm_packed_mma(p, tile, nullptr) : gemm_codes_mma(p, tile, nullptr);
  };
  // e4m3: 13 bits of mantissa in sums of 128 columns, where the hardware has no more.
  const double absolute = f.operands == GemmOperands::kFp8 ? 2e-3 : 3e-4;
  check_product<T>(c, o, packed ? o.wf_rounded : o.wf, runner,
                   format("%s %s tile %d x %d, chosen %d, groups of %ld, scale rows %ld", f.name,
                          dtype_name(Traits<T>::dtype), tile.tokens, tile.pairs * 32, chosen,
                          o.params.group_size, scale_rows),
                   {relative_of<T>(c, 2e-4, 1e-3, 8e-3), absolute});
}

void check_all(const Format& f) {
  if (f.operands == GemmOperands::kFp8 && architecture() < 89) {
    printf("%s needs sm_89\n", f.name);
    return;
  }
  Random random(11);
  const bool codes = is_codes(f.operands);
  each_case({1, 3, 8, 9, 17, 32, 33, 64, 65, 127, 129, 257},
            {{{64, 64}},
             {{208, 144}},
             {{33, 72}},
             {{992, 520}},
             {{264, 1040}},
             {{8, 4112}},
             {{1280, 1024}},
             {{96, 2248}},
             {{2432, 640}}},
            2, codes ? 2 : 32, random, [&](Case c, int) {
              c.k = codes ? round_up(c.k, 16) : c.k;
              c.sumsq_out = !c.gated && random.below(2);
              c.float_out = random.below(4) == 0;
              random.below(2) ? check_case<__half>(f, c, random)
                              : check_case<__nv_bfloat16>(f, c, random);
            });
}

constexpr int kTimedLayers = 8;  // more than L2 holds

void time_mma(const Words& words) {
  const std::vector<int64_t> rows = words.numbers({1, 8, 32, 128, 1024});
  for (const Format& f : rows_named(kOwn, words)) {
    const Llama model(f, *std::max_element(rows.begin(), rows.end()), false, kTimedLayers);
    time_ways(model, rows, 4, [](const GemmParams&) {
      return std::vector<Way>{chosen_way(), {"mma", [](const GemmParams& p, cudaStream_t stream) {
                                               return gemm(p, {}, "mma", stream);
                                             }}};
    });
  }
}

// Last, from how many rows on the matrix is faster for all that follow.
void time_matrix(const Words& words) {
  const GemmResources resources = blas_resources();
  const Buffer<uint8_t> matrix(2 * kHidden * kInner * 2);
  const std::vector<int64_t> rows =
      words.numbers({128, 256, 384, 512, 768, 1024, 1536, 2048, 4096});
  for (const Format& f : rows_named(kOwn, words, 2)) {
    if (!is_packed(f.operands)) continue;
    const Llama model(f, *std::max_element(rows.begin(), rows.end()), false, kTimedLayers);
    time_ways(model, rows, 4, [&](const GemmParams&) {
      return std::vector<Way>{
          {"mma",
           [](const GemmParams& p, cudaStream_t stream) { return gemm(p, {}, "mma", stream); }},
          {"matrix", [&](GemmParams p, cudaStream_t stream) {
             const Status status = unpack_weight(p, matrix.data, stream);
             if (!status.ok()) return status;
             p.weight = matrix.data;
             p.weight_scale = nullptr;
             p.operands = GemmOperands::kDense;
             return gemm(p, resources, "blas", stream);
           }}};
    });
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<Part> parts = {{"time", "mma", time_mma}, {"time", "matrix", time_matrix}};
  for (const Format& f : kOwn) {
    parts.push_back({"check", f.name, [&f](const Words&) { check_all(f); }});
  }
  return run_parts(argc, argv, parts);
}
