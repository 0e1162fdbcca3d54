// Checks products whose groups of rows (experts) have a packed weight each, of 8 and 4 bits, x of
// 16 bits and (w4a8) of 8, kernels and tiles at random, against float references of one group after
// another. Weights, scales and biases of experts without rows are NaN where they can be. In the
// batch-invariant mode an expert's rows have the bits that they have without the others. For
// Hopper.
//
//   packed_groups_check "8 bits"|"4 bits"|"8 bits in groups"|mxfp4|w4a8
#include "cuda/gemm/select.h"
#include "cuda/gemm/tiles.h"
#include "cuda/host.h"
#include "packed.cuh"

using namespace regatta;
using namespace regatta::native;
using namespace regatta::cuda;

namespace {

// Operands on the device, and what they stand for.
struct Operands {
  std::vector<float> xf, wf, wf_rounded;  // [M, K], [G, N, K]; with codes times scales as T
  std::unique_ptr<Buffer<uint8_t>> x, weight;
  std::unique_ptr<Buffer<float>> x_scale, weight_scale;
  GemmParams params;
};

template <class T>
std::unique_ptr<Buffer<uint8_t>> bytes_on_device(const std::vector<T>& values) {
  std::vector<uint8_t> bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return std::make_unique<Buffer<uint8_t>>(bytes);
}

// Weights of all experts, each packed where it lies in the stack. Nothing is packed where no row
// is: there the bytes stay 0xff.
template <class T>
void make_weights(GemmOperands operands, const Case& c, Random& random, Operands* o) {
  const int bits =
      operands == GemmOperands::kWeightInt8 || operands == GemmOperands::kWeightInt8Groups ? 8 : 4;
  const bool in_groups = operands != GemmOperands::kWeightInt8;
  const int64_t groups = in_groups ? random_groups(operands, c.k, random) : 1;  // of columns
  const bool mxfp4 = operands == GemmOperands::kWeightMxfp4;
  const bool asymmetric = in_groups && !mxfp4 && random.below(2);
  const int64_t group_size = packed_group_size(operands, c.k, groups);
  const int64_t bytes = packed_weight_bytes(c.n, c.k, operands, group_size);
  o->weight = std::make_unique<Buffer<uint8_t>>(c.groups() * bytes);
  std::vector<float> all_scales;
  for (int64_t g = 0; g < c.groups(); ++g) {
    if (c.rows(g) == 0) {
      for (auto* all : {&o->wf, &o->wf_rounded})
        all->resize(all->size() + c.n * c.k, std::nanf(""));
      all_scales.resize(all_scales.size() + c.n, std::nanf(""));
      continue;
    }
    std::vector<float> scale(c.n * groups), zero(c.n * groups, bits == 4 ? 8.f : 0.f);
    for (float& v : scale) {
      v = (1.5f + random.uniform()) * (bits == 8 ? 0.01f : 0.15f) / std::sqrt(c.k);
      if (mxfp4) v = random_power(random);
    }
    for (float& v : zero) {
      if (asymmetric)
        v = static_cast<float>(bits == 8 ? random.below(257) - 128 : random.below(17));
    }
    const std::vector<int8_t> codes =
        random_codes(c.n * c.k, bits == 8 ? -128 : 0, bits == 8 ? 256 : 16, random);
    const Buffer<int8_t> code_buffer(codes);
    const Buffer<float> scale_buffer(scale), zero_buffer(zero);
    PackWeightParams pack;
    pack.codes = code_buffer.data;
    pack.scale = scale_buffer.data;
    pack.zero = asymmetric ? zero_buffer.data : nullptr;
    pack.packed = o->weight->data + g * bytes;
    pack.out_features = c.n;
    pack.in_features = c.k;
    pack.num_groups = groups;
    pack.operands = operands;
    pack.dtype = Traits<T>::dtype;
    CHECK_STATUS(pack_weight(pack, nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
    all_scales.insert(all_scales.end(), scale.begin(), scale.begin() + c.n);
    if (operands == GemmOperands::kW4A8) {
      for (float& v : scale) v = w4a8_rounded(v);
    } else if (in_groups) {
      rounded<T>(scale);
    }
    std::vector<float> values =
        mxfp4 ? e2m1_dequantized(codes, scale) : dequantized(codes, scale, zero);
    o->wf.insert(o->wf.end(), values.begin(), values.end());
    if (in_groups && operands != GemmOperands::kW4A8) rounded<T>(values);
    o->wf_rounded.insert(o->wf_rounded.end(), values.begin(), values.end());
  }
  if (!in_groups) o->weight_scale = std::make_unique<Buffer<float>>(all_scales);
  o->params.operands = operands;
  o->params.group_size = group_size;
  o->params.weight = o->weight->data;
  o->params.weight_scale = in_groups ? nullptr : o->weight_scale->data;
}

template <class T>
Operands make_operands(GemmOperands operands, const Case& c, Random& random) {
  Operands o;
  make_weights<T>(operands, c, random, &o);
  if (operands == GemmOperands::kW4A8) {
    const std::vector<int8_t> codes = random_codes(c.m * c.k, -127, 255, random);
    std::vector<float> scale(c.m);
    for (float& v : scale) v = (1.5f + random.uniform()) * 0.01f;
    o.xf = dequantized(codes, scale, std::vector<float>(c.m));
    o.x = bytes_on_device(codes);
    o.x_scale = std::make_unique<Buffer<float>>(scale);
    o.params.x_scale = o.x_scale->data;
  } else {
    o.xf = random.floats(c.m * c.k, 1.7f);
    o.x = bytes_on_device(rounded<T>(o.xf));
  }
  o.params.x = o.x->data;
  return o;
}

// What the products of a case go through.
struct Way {
  GemmKernel kernel;
  bool forced = true;     // else: gemm()'s own choice, which `kernel` is
  PackedGroupsTile tile;  // of kSmallPacked
  GemvTile gemv;          // of kVectorPacked
  PackedTiles tiles;      // of kLargePacked
  bool chosen_tile = false;
  bool ready = false, twice = false;

  Status run(GemmParams p) const {
    p.group_ends_ready = ready;
    if (twice) {  // the launches may overlap
      const Status status = run_once(p);
      if (!status.ok()) return status;
      p.group_ends_ready = true;
    }
    return run_once(p);
  }

  // Whether codes times scales are rounded on the way to the tensor cores.
  bool rounds(const GemmParams& p) const {
    if (kernel != GemmKernel::kSmallPacked) return kernel != GemmKernel::kVectorPacked;
    const int tokens = forced && !chosen_tile ? tile.tokens : choose_packed_groups_tile(p).tokens;
    return tokens > 32 || p.group_size == 32;
  }

  std::string label() const {
    return std::string(kernel_name(kernel)) + (forced ? tile_label() : ", chosen") +
           (ready ? ", ends ready" : "") + (twice ? ", twice" : "");
  }

 private:
  std::string tile_label() const {
    char text[120];
    if (chosen_tile) return " of its own tile";
    if (kernel == GemmKernel::kVectorPacked) {
      snprintf(text, sizeof(text), " of %d KB, trigger %d", gemv.kilobytes, gemv.trigger);
    } else if (kernel == GemmKernel::kLargePacked) {
      snprintf(text, sizeof(text), " tiles of %d x %d", tiles.rows, tiles.tokens);
    } else {
      snprintf(text, sizeof(text), " tile of %d, %d blocks of %d KB, grain %d trigger %d",
               tile.tokens, tile.blocks, tile.kilobytes, tile.grain, tile.trigger);
    }
    return text;
  }

  Status run_once(const GemmParams& p) const {
    if (!forced) return gemm(p, {}, nullptr, nullptr);
    if (kernel == GemmKernel::kVectorPacked) {
      return chosen_tile ? gemv_packed_sm90(p, nullptr) : gemv_packed_sm90(p, gemv, nullptr);
    }
    if (kernel == GemmKernel::kLargePacked) {
      return chosen_tile ? gemm_packed_tiles_sm90(p, nullptr)
                         : gemm_packed_tiles_sm90(p, tiles, nullptr);
    }
    return chosen_tile ? gemm_packed_sm90(p, nullptr) : gemm_packed_groups_sm90(p, tile, nullptr);
  }
};

Way random_way(const GemmParams& p, Random& random) {
  constexpr int kTokens[] = {8, 16, 32, 64, 128};
  Way way;
  std::vector<GemmKernel> kernels = {GemmKernel::kSmallPacked};
  if (gemv_packed_sm90_refuses(p) == nullptr) kernels.push_back(GemmKernel::kVectorPacked);
  if (gemm_packed_tiles_sm90_refuses(p) == nullptr) kernels.push_back(GemmKernel::kLargePacked);
  way.kernel = kernels[random.below(static_cast<int>(kernels.size()))];
  way.tile = {kTokens[random.below(5)], 1 + random.below(3), 40 + random.below(180),
              1 << random.below(3), random.below(8) - 1};
  way.gemv = {1, 60 + random.below(150), random.below(8)};
  std::vector<PackedTiles> shapes;
  for (const PackedTileCost& shape : kPackedTiles) {
    if (shape.grouped && (shape.gated || !p.gated)) shapes.push_back({shape.rows, shape.tokens});
  }
  way.tiles = shapes[random.below(static_cast<int>(shapes.size()))];
  way.forced = random.below(4) != 0;
  way.chosen_tile = way.forced && random.below(3) == 0;
  way.ready = random.below(2);
  way.twice = random.below(2);
  if (way.forced) return way;
  const GemmCandidate* chosen = select_gemm(p, {90, num_multiprocessors(), 227 << 10});
  if (chosen != nullptr) way.kernel = chosen->kernel;
  return way;
}

// Whether the rows of an expert have the bits that they have without the others, in the
// batch-invariant mode. all: with an output.
bool check_alike(const Case& c, const GemmParams& all, const Buffer<uint8_t>& together,
                 const std::string& label) {
  const int64_t row_bytes = (c.gated ? c.n / 2 : c.n) * dtype_size(all.out_dtype);
  const int64_t x_bytes = c.k * (all.operands == GemmOperands::kW4A8 ? 1 : 2);
  is_batch_invariant = true;
  CHECK_STATUS(gemm(all, {}, nullptr, nullptr));
  const Buffer<uint8_t> apart(c.m * row_bytes);
  for (int64_t g = 0; g < c.groups(); ++g) {
    const int64_t first = c.first_row(g), count = c.rows(g);
    if (count == 0) continue;
    std::vector<int32_t> ends(c.groups(), 0);
    std::fill(ends.begin() + g, ends.end(), static_cast<int32_t>(count));
    const Buffer<int32_t> own_ends(ends);
    GemmParams p = all;
    p.group_ends = own_ends.data;
    p.num_rows = count;
    p.x = static_cast<const char*>(all.x) + first * x_bytes;
    if (all.x_scale != nullptr) p.x_scale = all.x_scale + first;
    p.out = apart.data + first * row_bytes;
    CHECK_STATUS(gemm(p, {}, nullptr, nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  is_batch_invariant = false;
  if (together.host() == apart.host()) return true;
  printf("FAIL %s m %ld experts %ld n %ld k %ld gated %d: experts' rows differ alone\n",
         label.c_str(), c.m, c.groups(), c.n, c.k, c.gated);
  return false;
}

template <class T>
bool check_alike(const Case& c, const Operands& o, const std::string& label) {
  const Buffer<int32_t> ends(c.ends);
  GemmParams p = o.params;
  p.num_rows = c.m;
  p.in_features = c.k;
  p.out_features = c.n;
  p.gated = c.gated;
  p.dtype = Traits<T>::dtype;
  p.out_dtype = c.float_out ? DType::kFloat32 : p.dtype;
  p.num_groups = c.groups();
  p.group_ends = ends.data;
  const Buffer<uint8_t> out(c.m * (c.gated ? c.n / 2 : c.n) * dtype_size(p.out_dtype));
  p.out = out.data;
  return check_alike(c, p, out, label);
}

// A product, and whether it is alike; returns the failures of the two.
template <class T>
int check_case(GemmOperands operands, const Case& c, const std::string& ends, Random& random) {
  const Operands o = make_operands<T>(operands, c, random);
  GemmParams sizes = o.params;
  sizes.num_rows = c.m;
  sizes.in_features = c.k;
  sizes.out_features = c.n;
  sizes.gated = c.gated;
  sizes.num_groups = c.groups();
  sizes.dtype = Traits<T>::dtype;
  sizes.out_dtype = c.float_out ? DType::kFloat32 : sizes.dtype;
  const Way way = random_way(sizes, random);
  const std::string label = std::string(name_of(operands)) + " of " +
                            std::to_string(o.params.group_size) + ", " +
                            dtype_name(Traits<T>::dtype) + ", " + ends + ", " + way.label();
  const bool w4a8 = operands == GemmOperands::kW4A8, half = Traits<T>::dtype == DType::kFloat16;
  const double relative = w4a8 ? (c.float_out ? 1e-5
                                  : half      ? 4.9e-4
                                              : 3.92e-3)
                               : (c.float_out ? 2e-4
                                  : half      ? 1e-3
                                              : 8e-3);
  const Runner runner = [&](const GemmParams& p) { return way.run(p); };
  const int wrong = !check_product<T>(c, o.params, o.xf, way.rounds(sizes) ? o.wf_rounded : o.wf,
                                      runner, label, relative, w4a8 ? 2e-5 : 3e-4);
  return wrong + !check_alike<T>(c, o, label);
}

// Rows and experts; rows and columns of a weight.
constexpr int64_t kRows[][2] = {{1, 8},   {8, 128}, {16, 8},    {33, 60},   {130, 5},  {257, 3},
                                {513, 2}, {700, 1}, {300, 512}, {1024, 60}, {1500, 7}, {640, 11}};
constexpr int64_t kShapes[][2] = {{64, 64},    {208, 144}, {80, 16},   {1008, 528},
                                  {264, 1040}, {8, 4112},  {384, 768}, {2816, 256}};
constexpr int64_t kMostValues = 12 << 20;  // of weights; the reference is slow

int check_all(GemmOperands operands) {
  Random random(static_cast<uint32_t>(operands) + 29);
  int cases = 0, bad = 0;
  for (const auto& rows : kRows) {
    for (const auto& shape : kShapes) {
      if (rows[1] * shape[0] * shape[1] > kMostValues) continue;
      for (int variant = 0; variant < 4; ++variant) {
        Case c = {rows[0], shape[0], columns_of(operands, shape[1])};
        const int way = random.below(kEndWays);
        c.ends = random_ends(c.m, rows[1], way, random);
        c.gated = variant % 2 == 1 && c.n % 32 == 0;
        c.bias = random.below(2);
        c.float_out = random.below(4) == 0;
        const std::string ends = "ends " + std::to_string(way);
        bad += variant / 2 == 0 ? check_case<__half>(operands, c, ends, random)
                                : check_case<__nv_bfloat16>(operands, c, ends, random);
        cases += 2;
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
  printf("packed_groups_check FORMAT, got '%s' (allowed:", format.c_str());
  for (const GemmOperands operands : kFormats) printf(" '%s'", name_of(operands));
  printf(")\n");
  return 2;
}
