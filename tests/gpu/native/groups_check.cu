// Checks products whose groups of rows have a weight each (experts), kernels and tiles at random,
// against float references of one group after another. Weights, scales and biases of groups without
// rows are NaN. In the batch-invariant mode a group has the same bits beside others and alone. For
// Hopper.
//
//   groups_check dense|codes|blocks
#include <cuda_fp8.h>

#include "cuda/gemm/select.h"
#include "cuda/host.h"
#include "product.cuh"

using namespace regatta;
using namespace regatta::native;
using namespace regatta::cuda;

namespace {

enum class Kind { kDense, kFp8, kInt8, kBlocks };

// Operands on the device, and what they stand for.
struct Operands {
  std::vector<float> xf, wf;       // [M, K], [G, N, K]
  std::vector<uint8_t> x, weight;  // as stored
  std::vector<float> x_scale, weight_scale;
  std::unique_ptr<Buffer<uint8_t>> x_buffer, weight_buffer;
  std::unique_ptr<Buffer<float>> x_scale_buffer, weight_scale_buffer;
  GemmParams params;

  void place() {
    x_buffer = std::make_unique<Buffer<uint8_t>>(x);
    weight_buffer = std::make_unique<Buffer<uint8_t>>(weight);
    params.x = x_buffer->data;
    params.weight = weight_buffer->data;
    if (x_scale.empty()) return;
    x_scale_buffer = std::make_unique<Buffer<float>>(x_scale);
    weight_scale_buffer = std::make_unique<Buffer<float>>(weight_scale);
    params.x_scale = x_scale_buffer->data;
    params.weight_scale = weight_scale_buffer->data;
  }
};

float code_value(Kind kind, uint8_t code) {
  if (kind == Kind::kInt8) return static_cast<float>(static_cast<int8_t>(code));
  __nv_fp8_e4m3 x;
  x.__x = code;
  return static_cast<float>(x);
}

uint8_t random_code(Kind kind, Random& random) {
  if (kind == Kind::kInt8) return static_cast<uint8_t>(random.below(255) - 127);
  return __nv_cvt_float_to_fp8(random.uniform() * 448.f, __NV_SATFINITE, __NV_E4M3);
}

template <class T>
std::vector<uint8_t> bytes_of(const std::vector<T>& values) {
  std::vector<uint8_t> bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

template <class T>
Operands dense_operands(const Case& c, Random& random) {
  Operands o;
  o.xf = random.floats(c.m * c.k, 1.7f);
  o.wf = random.floats(c.groups() * c.n * c.k, 1.7f / std::sqrt(static_cast<float>(c.k)));
  for (int64_t g = 0; g < c.groups(); ++g) {
    if (c.rows(g) == 0) std::fill_n(o.wf.begin() + g * c.n * c.k, c.n * c.k, std::nanf(""));
  }
  o.x = bytes_of(rounded<T>(o.xf));
  o.weight = bytes_of(rounded<T>(o.wf));
  return o;
}

Operands coded_operands(Kind kind, const Case& c, int64_t scale_rows, Random& random) {
  const bool blocks = kind == Kind::kBlocks;
  const int64_t num_blocks = ceil_div(c.k, kScaleBlock), stride = gemm_block_stride(c.m);
  Operands o;
  o.params.operands = kind == Kind::kInt8 ? GemmOperands::kInt8 : GemmOperands::kFp8;
  o.params.scale_rows = blocks ? scale_rows : 0;
  const auto positive = [&](int64_t count, float scale) {
    std::vector<float> v = random.floats(count, 1.f);
    for (float& s : v) s = (1.5f + s) * scale;
    return v;
  };
  o.x_scale = positive(blocks ? num_blocks * stride : c.m, .01f);
  const int64_t scales = blocks ? ceil_div(c.n, scale_rows) * num_blocks : c.n;  // of a group
  o.weight_scale = positive(c.groups() * scales, .005f / std::sqrt(static_cast<float>(c.k)));
  for (int64_t i = 0; i < c.m * c.k; ++i) {
    const int64_t row = i / c.k, block = i % c.k / kScaleBlock;
    o.x.push_back(random_code(kind, random));
    o.xf.push_back(code_value(kind, o.x[i]) * o.x_scale[blocks ? block * stride + row : row]);
  }
  for (int64_t i = 0; i < c.groups() * c.n * c.k; ++i) {
    const int64_t g = i / (c.n * c.k), n = i / c.k % c.n, block = i % c.k / kScaleBlock;
    float& scale = o.weight_scale[g * scales + (blocks ? n / scale_rows * num_blocks + block : n)];
    const bool used = c.rows(g) > 0;
    if (!used) scale = std::nanf("");
    o.weight.push_back(used || kind == Kind::kInt8 ? random_code(kind, random) : 0x7f);
    o.wf.push_back(code_value(kind, o.weight[i]) * scale);
  }
  if (blocks) {
    for (int64_t i = 0; i < num_blocks * stride; ++i) {
      if (i % stride >= c.m) o.x_scale[i] = std::nanf("");
    }
  }
  return o;
}

// Kernels of groups by chance; what refuses leaves the product to gemm()'s choice.
Runner random_runner(Kind kind, Random& random, std::string* label) {
  const GemmTile tile = {8 << random.below(4), 64 << random.below(2), 2 + random.below(3), 1,
                         random.below(6) - 1,  1 + random.below(2)};
  const int kernel = random.below(kind == Kind::kDense ? 7 : 4);
  const int columns = 128 + 64 * random.below(3);
  const bool ready = random.below(2);
  *label += " kernel " + std::to_string(kernel) + " tile " + std::to_string(tile.tokens) + "x" +
            std::to_string(tile.features) + " stages " + std::to_string(tile.stages) + " blocks " +
            std::to_string(tile.blocks) + " columns " + std::to_string(columns) + " ready " +
            std::to_string(ready);
  return [=](GemmParams p) {
    p.group_ends_ready = ready;
    if (kernel == 0) return gemm_sm90(p, tile, nullptr);
    if (kernel == 1) return gemm_sm90(p, nullptr);
    if (kernel == 2 && gemm_tiles_sm90_refuses(p) == nullptr) {
      return gemm_tiles_sm90(p, columns, nullptr);
    }
    if (kernel == 4 || kernel == 5) return gemm_stream_sm80(p, kernel == 4, nullptr);
    if (kernel == 6) return gemm_generic(p, nullptr);
    return gemm(p, {}, nullptr, nullptr);
  };
}

// A product of one group as if it were alone, of params that have all of them. end: its number of
// rows, on the device.
GemmParams alone(const Case& c, int64_t group, const GemmParams& all, const int32_t* end) {
  const int64_t first = c.first_row(group), width = c.gated ? c.n / 2 : c.n;
  const int64_t size = all.operands == GemmOperands::kDense ? 2 : 1;
  const auto behind = [](const auto* from, int64_t bytes) {
    using Pointer = decltype(from);
    return from == nullptr ? from
                           : reinterpret_cast<Pointer>(reinterpret_cast<const char*>(from) + bytes);
  };
  GemmParams p = all;
  p.num_groups = 1;
  p.group_ends = end;
  p.num_rows = c.rows(group);
  p.x = behind(all.x, first * c.k * size);
  p.weight = behind(all.weight, group * c.n * c.k * size);
  p.bias = behind(all.bias, group * c.n * 2);
  p.x_scale = behind(all.x_scale, first * 4);
  p.weight_scale = behind(all.weight_scale, group * c.n * 4);
  p.out = static_cast<char*>(all.out) + first * width * dtype_size(all.out_dtype);
  return p;
}

// Whether each group has the bits that it has alone, in the batch-invariant mode. Not of scales of
// blocks, whose rows are apart.
template <class T>
bool check_alike(const Case& c, const Operands& o, const std::string& label) {
  const int64_t width = c.gated ? c.n / 2 : c.n;
  std::vector<int32_t> counts(c.groups());
  for (int64_t g = 0; g < c.groups(); ++g) counts[g] = static_cast<int32_t>(c.rows(g));
  const Buffer<int32_t> ends(c.ends), rows(counts);
  const Buffer<uint8_t> together(c.m * width * 4), apart(c.m * width * 4);
  GemmParams p = o.params;
  p.num_rows = c.m;
  p.in_features = c.k;
  p.out_features = c.n;
  p.gated = c.gated;
  p.dtype = Traits<T>::dtype;
  p.out_dtype = c.float_out ? DType::kFloat32 : p.dtype;
  p.num_groups = c.groups();
  p.group_ends = ends.data;
  p.out = together.data;
  is_batch_invariant = true;
  CHECK_STATUS(gemm(p, {}, nullptr, nullptr));
  p.out = apart.data;
  for (int64_t g = 0; g < c.groups(); ++g) {
    if (c.rows(g) > 0) CHECK_STATUS(gemm(alone(c, g, p, rows.data + g), {}, nullptr, nullptr));
  }
  is_batch_invariant = false;
  CHECK_CUDA(cudaDeviceSynchronize());
  if (together.host() == apart.host()) return true;
  printf("FAIL %s m %ld groups %ld n %ld k %ld gated %d: a group differs from itself alone\n",
         label.c_str(), c.m, c.groups(), c.n, c.k, c.gated);
  return false;
}

// What the tensor cores take from a sum of so many products of e4m3 codes, relative to it: they
// keep 14 bits, and cut off the rest with each 32 products. On average the sum is half of its end
// then.
double hardware_loss(int64_t k) { return static_cast<double>(k) / 32 / (1 << 15); }

constexpr int64_t kRows[][2] = {{1, 8},     {5, 3},     {32, 4},   {8, 128}, {16, 8},
                                {33, 60},   {130, 5},   {257, 3},  {513, 2}, {700, 1},
                                {300, 512}, {1024, 60}, {1500, 7}, {640, 11}};
constexpr int64_t kShapes[][2] = {{64, 64},    {208, 144}, {80, 16},   {1008, 528},
                                  {264, 1040}, {8, 4112},  {384, 768}, {2816, 256}};
constexpr int64_t kMostValues = 12 << 20;  // of weights; the reference is slow

template <class T>
int check(Kind kind) {
  Random random(static_cast<uint32_t>(kind) + 17);
  int failures = 0, cases = 0;
  for (const auto& rows : kRows) {
    for (const auto& shape : kShapes) {
      if (rows[1] * shape[0] * shape[1] > kMostValues) continue;
      for (int variant = 0; variant < 3; ++variant) {
        Case c = {rows[0], shape[0], shape[1]};
        const int way = random.below(kEndWays);
        c.ends = random_ends(c.m, rows[1], way, random);
        c.gated = variant == 1 && c.n % 16 == 0;
        c.bias = random.below(2);
        c.float_out = variant == 2;
        std::string label = std::string(dtype_name(Traits<T>::dtype)) + " operands " +
                            std::to_string(static_cast<int>(kind)) + " way " + std::to_string(way);
        const int64_t scale_rows = random.below(2) ? kScaleBlock : 1;
        const Runner runner = random_runner(kind, random, &label);
        Operands o = kind == Kind::kDense ? dense_operands<T>(c, random)
                                          : coded_operands(kind, c, scale_rows, random);
        o.place();
        double relative = c.float_out ? 2e-3 : Traits<T>::dtype == DType::kFloat16 ? 1.5e-3 : 8e-3;
        if (kind == Kind::kFp8) relative += hardware_loss(c.k);
        const double absolute = kind == Kind::kFp8 ? 1.2e-2 : kind == Kind::kBlocks ? 3e-3 : 3e-4;
        failures += !check_product<T>(c, o.params, o.xf, o.wf, runner, label, relative, absolute);
        ++cases;
        if (kind == Kind::kBlocks) continue;
        failures += !check_alike<T>(c, o, label);
        ++cases;
      }
    }
  }
  printf("%s operands %d: %d cases, %d failures\n", dtype_name(Traits<T>::dtype),
         static_cast<int>(kind), cases, failures);
  return failures;
}

int check_both(Kind kind) { return check<__nv_bfloat16>(kind) + check<__half>(kind); }

}  // namespace

int main(int argc, char** argv) {
  const std::string part = argc > 1 ? argv[1] : "";
  if (part == "dense") return check_both(Kind::kDense) != 0;
  if (part == "codes") return (check_both(Kind::kFp8) + check_both(Kind::kInt8)) != 0;
  if (part == "blocks") return check_both(Kind::kBlocks) != 0;
  printf("groups_check dense|codes|blocks, got '%s'\n", part.c_str());
  return 2;
}
