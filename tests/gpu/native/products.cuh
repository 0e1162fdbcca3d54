// Products in every format of their operands: a random one with what it stands for, its reference,
// and the comparison of a kernel's output with it.
#pragma once

#include <array>

#include "cuda/gemm/select.h"
#include "cuda/gemm/tiles.h"
#include "cuda/host.h"
#include "native.cuh"
#include "regatta/gemm.h"

namespace regatta::native {

// How x and weight are stored.
struct Format {
  const char* name;
  GemmOperands operands;
  int64_t group_size = 128;  // columns with a scale, where times are taken
  int64_t scale_rows = 0;
};
constexpr Format kFormats[] = {{"bf16", GemmOperands::kDense},
                               {"fp8", GemmOperands::kFp8},
                               {"blocks", GemmOperands::kFp8, 128, kScaleBlock},
                               {"int8", GemmOperands::kInt8},
                               {"weight_int8", GemmOperands::kWeightInt8},
                               {"weight_int4", GemmOperands::kWeightInt4},
                               {"int4_32", GemmOperands::kWeightInt4, 32},
                               {"groups_int8", GemmOperands::kWeightInt8Groups, 64},
                               {"mxfp4", GemmOperands::kWeightMxfp4, 32},
                               {"w4a8", GemmOperands::kW4A8}};
inline bool is_codes(GemmOperands operands) {  // and the weight is as well
  return operands == GemmOperands::kFp8 || operands == GemmOperands::kInt8;
}
inline bool has_x_codes(GemmOperands operands) {
  return is_codes(operands) || operands == GemmOperands::kW4A8;
}
inline const Format& format_of(const std::string& name) {
  return *std::find_if(std::begin(kFormats), std::end(kFormats),
                       [&](const Format& f) { return name == f.name; });
}
inline int64_t weight_bytes(const Format& f, int64_t rows, int64_t columns) {
  if (is_packed(f.operands)) {
    return cuda::packed_weight_bytes(rows, columns, f.operands, f.group_size);
  }
  return rows * columns * (f.operands == GemmOperands::kDense ? 2 : 1);
}

// Room for products of up to 8192 rows, and cuBLASLt's handle, or null where there is none.
inline cuda::GemmResources blas_resources() {
  cuda::GemmResources resources;
  resources.scratch_bytes = int64_t{1} << 30;
  CHECK_CUDA(cudaMalloc(&resources.scratch, resources.scratch_bytes));
  const Status status = cuda::create_blas(&resources.blas);
  if (!status.ok()) printf("without cuBLASLt: %s\n", status.message().c_str());
  return resources;
}

inline QuantizeRowsParams quantization_of(const void* x, const Buffer<uint8_t>& codes,
                                          const Buffer<float>& scale, int64_t rows, int64_t width,
                                          DType dtype = DType::kBFloat16) {
  QuantizeRowsParams q;
  q.x = x;
  q.codes = codes.data;
  q.scale = scale.data;
  q.num_rows = rows;
  q.width = width;
  q.epsilon = 1e-5f;
  q.dtype = dtype;
  return q;
}

// ----------------------------------------------------------------------------------------- cases

struct Case {
  int64_t m, n, k;
  bool gated = false, bias = false, residual = false, norm = false;
  bool sumsq_out = false, float_out = false, scaled_out = false;
  std::vector<int32_t> ends = {};  // of groups of rows with a weight each; empty: one weight

  int64_t width() const { return gated ? n / 2 : n; }  // of the output
  int64_t groups() const { return std::max<int64_t>(1, static_cast<int64_t>(ends.size())); }
  int64_t first_row(int64_t group) const { return group == 0 ? 0 : ends[group - 1]; }
  int64_t rows(int64_t group) const { return ends.empty() ? m : ends[group] - first_row(group); }
  // Its sizes and types.
  template <class T>
  void describe(GemmParams* p) const {
    p->num_rows = m;
    p->in_features = k;
    p->out_features = n;
    p->gated = gated;
    p->num_groups = static_cast<int64_t>(ends.size());
    p->dtype = cuda::Traits<T>::dtype;
    p->out_dtype = float_out ? DType::kFloat32 : p->dtype;
  }
  std::string text() const {
    return format(
        "m %ld groups %ld n %ld k %ld gated %d bias %d residual %d norm %d sumsq %d scaled %d fp32 "
        "%d",
        m, static_cast<int64_t>(ends.size()), n, k, gated, bias, residual, norm, sumsq_out,
        scaled_out, float_out);
  }
};

// Calls check(c) for `count` variants of each number of rows and each shape: every other one is
// gated where its rows of weight are a multiple of `gate_rows`, with biases and residuals by
// chance.
template <class Check>
void each_case(const std::vector<int64_t>& rows, const std::vector<std::array<int64_t, 2>>& shapes,
               int count, int64_t gate_rows, Random& random, const Check& check) {
  for (const int64_t m : rows) {
    for (const auto& shape : shapes) {
      for (int variant = 0; variant < count; ++variant) {
        Case c = {m, shape[0], shape[1]};
        c.gated = variant % 2 == 1 && c.n % gate_rows == 0;
        c.bias = random.below(2);
        c.residual = !c.gated && random.below(2);
        check(c, variant);
      }
    }
  }
}

// M rows over G groups, in one of kEndWays ways: where each group ends.
constexpr int kEndWays = 5;
inline std::vector<int32_t> random_ends(int64_t m, int64_t g, int way, Random& random) {
  const int groups = static_cast<int>(g);
  const int one = random.below(groups);
  std::vector<int32_t> ends(groups, 0);
  for (int64_t row = 0; row < m; ++row) {
    const int any = random.below(groups);
    ++ends[way == 0   ? any                               // alike
           : way == 1 ? random.below(any + 1)             // more and more
           : way == 2 ? one                               // all in one
           : way == 3 ? any / 3 * 3                       // two of three empty
                      : random.below(2) * (groups - 1)];  // the first and the last
  }
  for (int i = 1; i < groups; ++i) ends[i] += ends[i - 1];
  return ends;
}

// -------------------------------------------------------------------------------------- operands

// Operands on the device, and what they stand for. Of groups without rows weights and their scales
// are NaN where they can be.
struct Operands {
  std::vector<float> xf, wf;      // [M, K], [G, N, K]
  std::vector<float> wf_rounded;  // of packed weights: codes times scales of groups as T has them
  GemmParams params;
  std::vector<std::shared_ptr<void>> kept;

  template <class T>
  const T* put(const std::vector<T>& values) {
    const auto buffer = std::make_shared<Buffer<T>>(values);
    kept.push_back(buffer);
    return buffer->data;
  }
};

template <class T>
Operands dense_operands(const Case& c, Random& random) {
  Operands o;
  o.xf = random.floats(c.m * c.k, 1.7f);
  o.wf = random.floats(c.groups() * c.n * c.k, 1.7f / std::sqrt(static_cast<float>(c.k)));
  for (int64_t g = 0; g < c.groups(); ++g) {
    if (c.rows(g) == 0) std::fill_n(o.wf.begin() + g * c.n * c.k, c.n * c.k, std::nanf(""));
  }
  o.params.x = o.put(rounded<T>(o.xf));
  o.params.weight = o.put(rounded<T>(o.wf));
  return o;
}

// any: all codes alike, e4m3's smallest ones too, and scales of any sign. scale_rows: of blocks.
inline Operands coded_operands(GemmOperands operands, const Case& c, int64_t scale_rows, bool any,
                               Random& random) {
  const bool fp8 = operands == GemmOperands::kFp8, blocks = scale_rows != 0;
  const int64_t num_blocks = cuda::ceil_div(c.k, kScaleBlock), stride = gemm_block_stride(c.m);
  const auto code = [&]() -> uint8_t {
    if (!fp8) return static_cast<uint8_t>(random.below(255) - 127);
    if (any) return static_cast<uint8_t>(random.below(2) * 128 + random.below(127));
    return __nv_cvt_float_to_fp8(random.uniform() * 448.f, __NV_SATFINITE, __NV_E4M3);
  };
  const auto value = [&](uint8_t x) {
    return fp8 ? host_float(x) : static_cast<float>(static_cast<int8_t>(x));
  };
  Operands o;
  std::vector<uint8_t> x, weight;
  std::vector<float> x_scale = random.positive(blocks ? num_blocks * stride : c.m, .01f);
  const int64_t scales = blocks ? cuda::ceil_div(c.n, scale_rows) * num_blocks : c.n;  // of a group
  std::vector<float> weight_scale =
      any ? random.floats(c.groups() * scales, .01f)
          : random.positive(c.groups() * scales, .005f / std::sqrt(static_cast<float>(c.k)));
  for (int64_t i = 0; i < c.m * c.k; ++i) {
    const int64_t row = i / c.k, block = i % c.k / kScaleBlock;
    x.push_back(code());
    o.xf.push_back(value(x[i]) * x_scale[blocks ? block * stride + row : row]);
  }
  for (int64_t i = 0; i < c.groups() * c.n * c.k; ++i) {
    const int64_t g = i / (c.n * c.k), n = i / c.k % c.n, block = i % c.k / kScaleBlock;
    float& scale = weight_scale[g * scales + (blocks ? n / scale_rows * num_blocks + block : n)];
    const bool used = c.rows(g) > 0;
    if (!used) scale = std::nanf("");
    weight.push_back(used || !fp8 ? code() : 0x7f);
    o.wf.push_back(value(weight[i]) * scale);
  }
  for (int64_t i = 0; blocks && i < num_blocks * stride; ++i) {
    if (i % stride >= c.m) x_scale[i] = std::nanf("");
  }
  o.params.operands = operands;
  o.params.scale_rows = scale_rows;
  o.params.x = o.put(x);
  o.params.weight = o.put(weight);
  o.params.x_scale = o.put(x_scale);
  o.params.weight_scale = o.put(weight_scale);
  return o;
}

// Codes from `first` on. One draw seeds them all: a check's time would go into millions of draws.
inline std::vector<int8_t> random_codes(int64_t n, int first, int count, Random& random) {
  std::vector<int8_t> codes(n);
  uint64_t state = random.engine();
  for (int8_t& v : codes) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    v = static_cast<int8_t>(first + static_cast<int>((state >> 40) * count >> 24));
  }
  return codes;
}

// (code - zero) * scale of codes [n, k], scale and zero [n, groups]; of e2m1 codes their value *
// scale.
inline std::vector<float> dequantized(const std::vector<int8_t>& codes,
                                      const std::vector<float>& scale,
                                      const std::vector<float>& zero, bool e2m1) {
  constexpr float kMagnitudes[8] = {0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};
  std::vector<float> values(codes.size());
  const size_t columns = codes.size() / scale.size();
  for (size_t i = 0; i < codes.size(); ++i) {
    const size_t g = i / columns;
    const float magnitude = kMagnitudes[codes[i] & 7] * (codes[i] & 8 ? -1.f : 1.f);
    values[i] = (e2m1 ? magnitude : codes[i] - zero[g]) * scale[g];
  }
  return values;
}

// A scale of kW4A8 as pack_weight() stores it: without the last eight bits.
inline float w4a8_rounded(float scale) {
  uint32_t bits;
  std::memcpy(&bits, &scale, 4);
  bits = (bits + 0x80) & ~0xffu;
  std::memcpy(&scale, &bits, 4);
  return scale;
}

// The columns of a case: MXFP4 has whole groups of 32.
inline int64_t columns_of(GemmOperands operands, int64_t k) {
  return operands == GemmOperands::kWeightMxfp4 ? (k + 31) / 32 * 32 : k;
}

// x of T, or of kW4A8 codes; weights packed one after another, in groups of `least` columns (of
// kWeightInt4; MXFP4 has 32), 64 or 128, or one of all. Where no row is, nothing is packed: the
// bytes stay 0xff.
template <class T>
Operands packed_operands(GemmOperands operands, const Case& c, int least, Random& random) {
  const bool mxfp4 = operands == GemmOperands::kWeightMxfp4;
  const bool w4a8 = operands == GemmOperands::kW4A8;
  const bool in_groups = operands != GemmOperands::kWeightInt8;
  const int bits = cuda::code_bits(operands);
  const int64_t wanted = (operands == GemmOperands::kWeightInt4 ? least : 64) << random.below(3);
  const int64_t groups = mxfp4                                             ? c.k / 32
                         : in_groups && wanted <= 128 && c.k % wanted == 0 ? c.k / wanted
                                                                           : 1;
  const bool asymmetric = in_groups && !mxfp4 && random.below(2);
  Operands o;
  o.params.operands = operands;
  o.params.group_size = cuda::packed_group_size(operands, c.k, groups);
  const int64_t bytes = cuda::packed_weight_bytes(c.n, c.k, operands, o.params.group_size);
  const auto packed = std::make_shared<Buffer<uint8_t>>(c.groups() * bytes);
  o.kept.push_back(packed);
  std::vector<float> all_scales;
  for (int64_t g = 0; g < c.groups(); ++g) {
    if (c.rows(g) == 0) {
      for (auto* all : {&o.wf, &o.wf_rounded}) all->resize(all->size() + c.n * c.k, std::nanf(""));
      all_scales.resize(all_scales.size() + c.n, std::nanf(""));
      continue;
    }
    std::vector<float> scale =
        random.positive(c.n * groups, (bits == 8 ? 0.01f : 0.15f) / std::sqrt(c.k));
    std::vector<float> zero(c.n * groups, bits == 4 ? 8.f : 0.f);
    for (float& v : scale) v = mxfp4 ? std::ldexp(1.f, random.below(8) - 10) : v;
    for (float& v : zero) {
      if (!asymmetric) break;
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
    pack.packed = packed->data + g * bytes;
    pack.out_features = c.n;
    pack.in_features = c.k;
    pack.num_groups = groups;
    pack.operands = operands;
    pack.dtype = cuda::Traits<T>::dtype;
    CHECK_STATUS(cuda::pack_weight(pack, nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
    all_scales.insert(all_scales.end(), scale.begin(), scale.begin() + c.n);
    if (w4a8) {
      for (float& v : scale) v = w4a8_rounded(v);
    } else if (in_groups) {
      rounded<T>(scale);
    }
    std::vector<float> values = dequantized(codes, scale, zero, mxfp4);
    o.wf.insert(o.wf.end(), values.begin(), values.end());
    if (in_groups && !w4a8) rounded<T>(values);
    o.wf_rounded.insert(o.wf_rounded.end(), values.begin(), values.end());
  }
  o.params.weight = packed->data;
  if (!in_groups) o.params.weight_scale = o.put(all_scales);
  if (w4a8) {
    const std::vector<int8_t> codes = random_codes(c.m * c.k, -127, 255, random);
    const std::vector<float> scale = random.positive(c.m, 0.01f);
    o.xf = dequantized(codes, scale, std::vector<float>(c.m), false);
    o.params.x = o.put(codes);
    o.params.x_scale = o.put(scale);
  } else {
    o.xf = random.floats(c.m * c.k, 1.7f);
    o.params.x = o.put(rounded<T>(o.xf));
  }
  return o;
}

// Of each row of x the sums of squares of `span` columns each. Kernels of one row make them of x.
inline std::vector<float> squares_of(const std::vector<float>& x, const Case& c, int64_t span) {
  const int64_t parts = cuda::ceil_div(c.k, span);
  std::vector<float> sums(c.m * parts);
  for (int64_t i = 0; i < c.m * c.k; ++i) sums[i / c.k * parts + i % c.k / span] += x[i] * x[i];
  return sums;
}

// Gives x a norm: its rows' factors from sums of squares in parts.
inline void add_norm(const Case& c, const std::vector<float>& sumsq, float epsilon, Operands* o) {
  const int64_t parts = static_cast<int64_t>(sumsq.size()) / c.m;
  for (int64_t m = 0; m < c.m; ++m) {
    double sum = 0.;
    for (int64_t i = 0; i < parts; ++i) sum += sumsq[m * parts + i];
    const double factor = 1. / std::sqrt(sum / c.k + epsilon);
    for (int64_t k = 0; k < c.k; ++k) o->xf[m * c.k + k] *= static_cast<float>(factor);
  }
  o->params.sumsq = o->put(sumsq);
  o->params.num_sumsq = parts;
  o->params.epsilon = epsilon;
}

// ----------------------------------------------------------------------------------- comparison

// One thread per output, from the definition in gemm.h, over dequantized operands. slack: how far
// an output moves, at most, while each sum under it moves by 1; squares: the sums' squares, added.
static __global__ void reference_kernel(const float* x, const float* w, const float* bias,
                                        const float* residual, float* out, float* slack,
                                        double* squares, int64_t m_count, int64_t n_all,
                                        int64_t k_count, bool gated) {
  const int64_t width = gated ? n_all / 2 : n_all;
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i >= m_count * width) return;
  const int64_t m = i / width, n = i % width;
  const auto dot = [&](int64_t row) {
    double sum = 0.;
    for (int64_t k = 0; k < k_count; ++k) {
      sum += static_cast<double>(x[m * k_count + k]) * w[row * k_count + k];
    }
    return static_cast<float>(sum);
  };
  float y = dot(n), moves = 1.f;
  double square = static_cast<double>(y) * y;
  if (bias != nullptr) y += bias[n];
  if (gated) {
    float up = dot(width + n);
    square = (square + static_cast<double>(up) * up) / 2.;
    if (bias != nullptr) up += bias[width + n];
    y = y / (1.f + expf(-y));
    moves = 1.1f * fabsf(up) + fabsf(y);  // SiLU is nowhere steeper than 1.1
    y *= up;
  }
  if (residual != nullptr) y += residual[i];
  out[i] = y;
  slack[i] = moves;
  atomicAdd(squares, square);
}

using Runner = std::function<Status(const GemmParams&)>;

constexpr int64_t kGuard = 64;  // elements past every output that must stay as they were

template <class T>
bool is_untouched(const std::vector<T>& values, int64_t from) {
  const auto* const bytes = reinterpret_cast<const uint8_t*>(values.data());
  return std::all_of(bytes + from * sizeof(T), bytes + (from + kGuard) * sizeof(T),
                     [](uint8_t byte) { return byte == 0xff; });
}

// Allowed: `relative` of an output, and what comes of it where sums are off by `absolute` of the
// root of their mean square; flat: and `absolute`.
struct Tolerance {
  double relative, absolute;
  bool flat = false;
};

// Of an output, as its type is.
template <class T>
double relative_of(const Case& c, double of_float, double of_half, double of_bfloat16) {
  if (c.float_out || sizeof(T) == 4) return of_float;
  return std::is_same_v<T, __half> ? of_half : of_bfloat16;
}

// Compares runner's output with the reference of o.xf [M, K] and wf [N, K], of groups [G, N, K];
// o.params has the operands. Groups without rows have NaN for their biases. Two runs have the same
// bits, and nothing behind an output is written.
template <class T>
bool check_product(const Case& c, const Operands& o, const std::vector<float>& wf,
                   const Runner& runner, const std::string& label, const Tolerance& allowed) {
  const int64_t width = c.width();
  Random random(static_cast<uint32_t>(c.m * 131 + c.n * 17 + c.k));
  std::vector<float> biasf = random.floats(c.groups() * c.n, 1.f);
  std::vector<float> residualf = random.floats(c.m * width, 1.f);
  for (int64_t g = 0; g < c.groups(); ++g) {
    if (c.rows(g) == 0) std::fill_n(biasf.begin() + g * c.n, c.n, std::nanf(""));
  }
  const Buffer<T> bias(rounded<T>(biasf)), residual(rounded<T>(residualf));
  const Buffer<float> x(o.xf), w(wf), bias_values(biasf), residual_values(residualf);
  const Buffer<float> expected(c.m * width), slack(c.m * width);
  const Buffer<int32_t> ends(c.ends);
  const Buffer<double> squares(std::vector<double>{0.});
  const int64_t columns = gemm_sumsq_columns(c.m), parts = cuda::ceil_div(width, columns);
  const Buffer<uint8_t> out((c.m * width + kGuard) * 4), again((c.m * width + kGuard) * 4);
  const Buffer<float> sumsq(c.m * parts + kGuard);
  std::vector<float> norm_weightf = random.floats(width, 1.5f);
  const Buffer<T> norm_weight(rounded<T>(norm_weightf)), scaled(c.m * width + kGuard);
  for (int64_t g = 0; g < c.groups(); ++g) {
    const int64_t first = c.first_row(g), count = c.rows(g);
    if (count == 0) continue;
    reference_kernel<<<cuda::ceil_div(count * width, 128), 128>>>(
        x.data + first * c.k, w.data + g * c.n * c.k, c.bias ? bias_values.data + g * c.n : nullptr,
        c.residual ? residual_values.data + first * width : nullptr, expected.data + first * width,
        slack.data + first * width, squares.data, count, c.n, c.k, c.gated);
  }
  GemmParams p = o.params;
  c.describe<T>(&p);
  p.group_ends = c.ends.empty() ? nullptr : ends.data;
  p.bias = c.bias ? bias.data : nullptr;
  p.residual = c.residual ? residual.data : nullptr;
  p.sumsq_out = c.sumsq_out ? sumsq.data : nullptr;
  p.next_norm_weight = norm_weight.data;
  p.scaled_out = c.scaled_out ? scaled.data : nullptr;
  for (const Buffer<uint8_t>* to : {&again, &out}) {
    p.out = to->data;
    const Status status = runner(p);
    if (!status.ok()) return count_case(false, label + ": " + status.message());
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  const auto y = out.host();
  const auto ref = expected.host(), moves = slack.host();
  int64_t bad = y != again.host();
  const std::string differs = bad ? ", two runs differ" : "";
  const auto value = [&](int64_t i) {
    if (c.float_out) return reinterpret_cast<const float*>(y.data())[i];
    return static_cast<float>(reinterpret_cast<const T*>(y.data())[i]);
  };
  const double off = allowed.absolute * std::sqrt(squares.host()[0] / ref.size());
  // The least numbers of fp16 are 2^-24 apart.
  const double least = p.out_dtype == DType::kFloat16 ? 1. / (1 << 25) : 0.;
  double worst = 0.;
  int64_t worst_at = 0;
  for (int64_t i = 0; i < c.m * width; ++i) {
    const double sums = allowed.flat ? allowed.absolute : off * moves[i] + least;
    const double error =
        std::fabs(value(i) - ref[i]) / (allowed.relative * std::fabs(ref[i]) + sums);
    if (!(error <= 1.)) ++bad;
    if (!(error <= worst)) worst = error, worst_at = i;
  }
  bad += !is_untouched(y, c.m * width * dtype_size(p.out_dtype));
  if (c.sumsq_out) {
    const auto s = sumsq.host();
    for (int64_t i = 0; i < c.m * parts; ++i) {
      double sum = 0.;
      for (int64_t n = i % parts * columns; n < std::min(width, (i % parts + 1) * columns); ++n) {
        sum += std::pow(value(i / parts * width + n), 2.);
      }
      if (!(std::fabs(s[i] - sum) <= 1e-4 * sum + 1e-6)) ++bad;
    }
    bad += !is_untouched(s, c.m * parts);
  }
  if (c.scaled_out) {
    const auto s = scaled.host();
    std::vector<float> products(s.size(), std::nanf(""));
    for (int64_t i = 0; i < c.m * width; ++i) products[i] = value(i) * norm_weightf[i % width];
    const auto product = rounded<T>(products);
    bad += std::memcmp(s.data(), product.data(), c.m * width * sizeof(T)) != 0;
    bad += !is_untouched(s, c.m * width);
  }
  return count_case(bad == 0, format("%s %s: %ld bad, worst %.2f of the tolerance, %g in place of "
                                     "%g%s",
                                     label.c_str(), c.text().c_str(), bad, worst, value(worst_at),
                                     ref[worst_at], differs.c_str()));
}

}  // namespace regatta::native
