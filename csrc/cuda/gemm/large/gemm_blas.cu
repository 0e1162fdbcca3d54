// y = epilogue(x w^T) for many rows through cuBLASLt, with small kernels where its epilogues end.
//
// Input: as GemmParams says; bf16 or fp16, in_features and out_features multiples of 8.
// Architectures: those of cuBLASLt (sm_75 and later; bf16: sm_80 and later).
// Algorithm: bias and residual are cuBLASLt's own (epilogue and beta). A row scale is applied to x
// first, into scratch: scaling rows commutes with the product, and x is the smaller side. A gated
// product goes to scratch, some rows at a time, and is folded by one pass. Sums of squares are one
// pass over the output. The algorithm of a shape is the fastest of the heuristic's first few, timed
// at first use (inside a graph capture, and for row counts that are no multiple of 64, the
// heuristic's first), and cached. Source: cuBLASLt's documentation. Bound: tensor cores.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <type_traits>

#include "cuda/gemm/gemm_epilogue.cuh"
#include "cuda/gemm/select.h"
#include "gemm_blas.cuh"
#include "regatta/gemm.h"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kAhead = 2;  // vectors of 16 bytes that a thread asks for before it waits

template <class T>
__global__ void __launch_bounds__(kThreads)
    scale_rows_kernel(const T* __restrict__ x, T* __restrict__ out, const Epilogue p,
                      const int64_t width) {
  __shared__ float scratch[8];
  const int64_t row = blockIdx.x;
  constexpr int kStep = kThreads * 8;
  const int64_t begin = threadIdx.x * 8;
  x += row * width;
  out += row * width;
  Vec16<T> first[kAhead];
#pragma unroll
  for (int k = 0; k < kAhead; ++k) {
    if (begin + k * kStep < width) first[k] = load16(x + begin + k * kStep);
  }
  float sum = 0.f;
  for (int i = threadIdx.x; i < p.num_sumsq; i += kThreads) sum += p.sumsq[row * p.num_sumsq + i];
  const float scale = rsqrtf(block_sum(sum, scratch) * p.inverse_width + p.epsilon);
  auto write = [&](Vec16<T> v, int64_t i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) v.set(j, v.get(j) * scale);
    store16(out + i, v);
  };
#pragma unroll
  for (int k = 0; k < kAhead; ++k) {
    if (begin + k * kStep < width) write(first[k], begin + k * kStep);
  }
  for (int64_t i = begin + kAhead * kStep; i < width; i += kStep) write(load16(x + i), i);
}

// Grid: rows x blocks of 8 kThreads columns.
template <class T>
__global__ void __launch_bounds__(kThreads)
    fold_gate_kernel(const T* __restrict__ both, T* __restrict__ out, const int64_t width) {
  const int64_t row = blockIdx.x, column = (blockIdx.y * kThreads + threadIdx.x) * 8;
  if (column >= width) return;
  const T* gate = both + row * 2 * width + column;
  const Vec16<T> g = load16(gate);
  const Vec16<T> u = load16(gate + width);
  Vec16<T> y;
#pragma unroll
  for (int j = 0; j < 8; ++j) y.set(j, __fdividef(g.get(j), 1.f + __expf(-g.get(j))) * u.get(j));
  store16(out + row * width + column, y);
}

// One block a row, `lanes` threads of consecutive 16 bytes a part: columns = lanes * Vec16::kSize.
template <class T>
__global__ void __launch_bounds__(kThreads)
    row_sumsq_kernel(const T* __restrict__ x, float* __restrict__ sums,
                     const T* __restrict__ norm_weight, T* __restrict__ scaled, const int64_t width,
                     const int lanes, const int64_t parts) {
  constexpr int kSize = Vec16<T>::kSize;
  const int64_t row = blockIdx.x;
  const int lane = threadIdx.x % lanes;
  // All threads of a warp stay in the loop: they add up by shuffles.
  for (int64_t first = 0; first < parts; first += kThreads / lanes) {
    const int64_t part = first + threadIdx.x / lanes, i = (part * lanes + lane) * kSize;
    float sum = 0.f;
    if (i < width) {
      const Vec16<T> v = load16(x + row * width + i);
#pragma unroll
      for (int j = 0; j < kSize; ++j) sum += v.get(j) * v.get(j);
      if (scaled != nullptr) {
        const Vec16<T> weight = load16(norm_weight + i);
        Vec16<T> y;
#pragma unroll
        for (int j = 0; j < kSize; ++j) y.set(j, v.get(j) * weight.get(j));
        store16(scaled + row * width + i, y);
      }
    }
    for (int offset = lanes / 2; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(~0u, sum, offset);
    }
    if (lane == 0 && part < parts) sums[row * parts + part] = sum;
  }
}

// For widths that are no multiple of 16 bytes: one warp a part.
template <class T>
__global__ void __launch_bounds__(kThreads)
    row_sumsq_odd_kernel(const T* __restrict__ x, float* __restrict__ sums,
                         const T* __restrict__ norm_weight, T* __restrict__ scaled,
                         const int64_t width, const int64_t columns, const int64_t parts) {
  const int64_t row = blockIdx.x;
  const int lane = threadIdx.x % kWarp;
  for (int64_t part = threadIdx.x / kWarp; part < parts; part += kThreads / kWarp) {
    float sum = 0.f;
    for (int64_t i = part * columns + lane; i < min(width, (part + 1) * columns); i += kWarp) {
      const float v = Traits<T>::to_float(x[row * width + i]);
      sum += v * v;
      if (scaled != nullptr) {
        const float weight = Traits<T>::to_float(norm_weight[i]);
        scaled[row * width + i] = Traits<T>::from_float(v * weight);
      }
    }
    sum = warp_sum(sum);
    if (lane == 0) sums[row * parts + part] = sum;
  }
}

template <class T>
__global__ void __launch_bounds__(256)
    fold_norm_kernel(T* __restrict__ weight, const T* __restrict__ norm, const int64_t width) {
  const int64_t row = blockIdx.x;
  for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
    T* w = weight + row * width + i;
    *w = Traits<T>::from_float(Traits<T>::to_float(*w) * Traits<T>::to_float(norm[i]));
  }
}

int64_t scaled_bytes(const GemmParams& p) {
  return p.sumsq == nullptr ? 0 : round_up(p.num_rows * p.in_features * 2, 256);
}

constexpr int64_t kTimedRows = 64;
constexpr int64_t kFoldedRows = 1024;

// Rows of a gated product that are folded before the next ones are made: of about kFoldedRows, most
// of both halves is still in L2.
int64_t folded_rows(const GemmParams& p) {
  if (p.operands != GemmOperands::kDense) return p.num_rows;
  const int64_t parts = std::max<int64_t>(1, (p.num_rows + kFoldedRows / 2) / kFoldedRows);
  return std::min(p.num_rows, round_up(ceil_div(p.num_rows, parts), kTimedRows));
}

int64_t both_bytes(const GemmParams& p) {
  return p.gated ? round_up(folded_rows(p) * p.out_features * 2, 256) : 0;
}

}  // namespace

Status fold_gate(const void* both, void* out, DType dtype, int64_t num_rows, int64_t width,
                 CUstream_st* stream) {
  const LaunchConfig config({stream}, grid_of(num_rows, ceil_div(width, kThreads * 8)), kThreads);
  return dispatch_dtype(dtype, "fold_gate", [&](auto* type) -> Status {
    using T = std::remove_pointer_t<decltype(type)>;
    if constexpr (sizeof(T) == 2) {
      return launch(fold_gate_kernel<T>, config, "fold_gate", static_cast<const T*>(both),
                    static_cast<T*>(out), width);
    }
    return Status::error("fold_gate: dtype must be bfloat16 or float16");
  });
}

Status row_sumsq(const RowSumsqParams& p, CUstream_st* stream) {
  if (p.num_rows == 0) return {};
  const LaunchConfig config({stream}, p.num_rows, 256);
  return dispatch_dtype(p.dtype, "row_sumsq", [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kSize = Vec16<T>::kSize;
    const int64_t parts = ceil_div(p.width, p.columns), lanes = p.columns / kSize;
    const auto* x = static_cast<const T*>(p.x);
    const auto* norm_weight = static_cast<const T*>(p.norm_weight);
    auto* scaled = static_cast<T*>(p.scaled);
    if (p.width % kSize != 0 || p.columns % kSize != 0 || lanes > kWarp || kWarp % lanes != 0) {
      return launch(row_sumsq_odd_kernel<T>, config, "row_sumsq", x, p.sums, norm_weight, scaled,
                    p.width, p.columns, parts);
    }
    return launch(row_sumsq_kernel<T>, config, "row_sumsq", x, p.sums, norm_weight, scaled, p.width,
                  static_cast<int>(lanes), parts);
  });
}

Status fold_norm_weight(void* weight, const void* norm_weight, DType dtype, int64_t out_features,
                        int64_t in_features, CUstream_st* stream) {
  if (out_features == 0) return {};
  const LaunchConfig config({stream}, out_features, 256);
  return dispatch_dtype(dtype, "fold_norm_weight", [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return launch(fold_norm_kernel<T>, config, "fold_norm_weight", static_cast<T*>(weight),
                  static_cast<const T*>(norm_weight), in_features);
  });
}

int64_t gemm_scratch_bytes(const GemmParams& p) {
  return kBlasWorkspaceBytes + scaled_bytes(p) + both_bytes(p);
}

#ifdef REGATTA_CUBLASLT

Lt::Lt() {
  const std::string name = "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);
  const char* folder = std::getenv("REGATTA_CUBLASLT");
  void* library = nullptr;
  if (folder != nullptr) {
    library = dlopen((std::string(folder) + "/" + name).c_str(), RTLD_NOW | RTLD_LOCAL);
  }
  if (library == nullptr) library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    error = name + " was not found; install it: pip install nvidia-cublas";
    return;
  }
  const auto find = [&](auto* function, const char* symbol) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, symbol));
    if (*function == nullptr) error = name + " has no " + symbol;
  };
  find(&create, "cublasLtCreate");
  find(&destroy, "cublasLtDestroy");
  find(&matmul, "cublasLtMatmul");
  find(&matmulDescCreate, "cublasLtMatmulDescCreate");
  find(&matmulDescDestroy, "cublasLtMatmulDescDestroy");
  find(&matmulDescSetAttribute, "cublasLtMatmulDescSetAttribute");
  find(&matrixLayoutCreate, "cublasLtMatrixLayoutCreate");
  find(&matrixLayoutDestroy, "cublasLtMatrixLayoutDestroy");
  find(&matmulPreferenceCreate, "cublasLtMatmulPreferenceCreate");
  find(&matmulPreferenceDestroy, "cublasLtMatmulPreferenceDestroy");
  find(&matmulPreferenceSetAttribute, "cublasLtMatmulPreferenceSetAttribute");
  find(&matmulAlgoGetHeuristic, "cublasLtMatmulAlgoGetHeuristic");
  find(&getStatusString, "cublasLtGetStatusString");
}

const Lt& lt() {
  static const Lt api;
  return api;
}

Status blas_status(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return {};
  return Status::error(std::string(what) + ": " + lt().getStatusString(status));
}

BlasKey blas_key(const GemmParams& p, int64_t rows) {
  return {p.operands, p.scale_rows, rows,    p.out_features,    p.in_features,
          p.dtype,    p.out_dtype,  p.gated, p.bias != nullptr, p.residual != nullptr};
}

namespace {

cudaDataType_t blas_type(DType dtype) {
  if (dtype == DType::kFloat32) return CUDA_R_32F;
  return dtype == DType::kBFloat16 ? CUDA_R_16BF : CUDA_R_16F;
}

template <class T>
void set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  lt().matmulDescSetAttribute(operation, attribute, &value, sizeof(value));
}

}  // namespace

// cuBLASLt counts columns first: out^T [N, M] = (weight^T)^T [N, K] x^T [K, M]. The weight is its
// A.
Matmul::Matmul(const GemmParams& p, DType out_dtype) {
  lt().matmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  set(operation, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  if (p.bias != nullptr) {
    set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set(operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
  }
  const bool codes = p.operands == GemmOperands::kFp8;
  if (codes) {
    const bool blocks = p.scale_rows != 0;
    set(operation, CUBLASLT_MATMUL_DESC_A_SCALE_MODE,
        static_cast<int32_t>(blocks ? CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F
                                    : CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F));
    set(operation, CUBLASLT_MATMUL_DESC_B_SCALE_MODE,
        static_cast<int32_t>(blocks ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F
                                    : CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F));
    set(operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.weight_scale);
    set(operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.x_scale);
    // Sums stay in the tensor cores, as ours do (gemm_sm90.cu says what that costs); those of
    // blocks go to floats anyway.
    if (!blocks) set(operation, CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t{1});
  }
  const cudaDataType_t type = codes ? CUDA_R_8F_E4M3 : blas_type(p.dtype);
  lt().matrixLayoutCreate(&weight, type, p.in_features, p.out_features, p.in_features);
  lt().matrixLayoutCreate(&x, type, p.in_features, p.num_rows, p.in_features);
  lt().matrixLayoutCreate(&out, blas_type(out_dtype), p.out_features, p.num_rows, p.out_features);
}

Matmul::~Matmul() {
  lt().matrixLayoutDestroy(out);
  lt().matrixLayoutDestroy(x);
  lt().matrixLayoutDestroy(weight);
  lt().matmulDescDestroy(operation);
}

bool can_time(cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(stream, &capture);
  return capture == cudaStreamCaptureStatusNone;
}

Status blas_product(Blas* blas, const BlasKey& key, const GemmParams& p, const void* x, void* out,
                    DType out_dtype, void* trial, bool keep, void* workspace, cudaStream_t stream) {
  const Matmul m(p, out_dtype);
  const float one = 1.f;
  const float beta = p.residual != nullptr ? 1.f : 0.f;
  const auto run = [&](const cublasLtMatmulAlgo_t& algorithm, void* to) {
    return lt().matmul(blas->handle, m.operation, &one, p.weight, m.weight, x, m.x, &beta,
                       p.residual != nullptr ? p.residual : to, m.out, to, m.out, &algorithm,
                       workspace, kBlasWorkspaceBytes, stream);
  };
  const std::lock_guard<std::mutex> lock(blas->mutex);
  const auto found = blas->algorithms.find(key);
  if (found != blas->algorithms.end()) return blas_status(run(found->second, out), "gemm_blas");
  cublasLtMatmulPreference_t preference;
  lt().matmulPreferenceCreate(&preference);
  const size_t limit = kBlasWorkspaceBytes;
  lt().matmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &limit,
                                    sizeof(limit));
  constexpr int kTried = 6;
  cublasLtMatmulHeuristicResult_t results[kTried];
  int count = 0;
  const cublasStatus_t status = lt().matmulAlgoGetHeuristic(
      blas->handle, m.operation, m.weight, m.x, m.out, m.out, preference, kTried, results, &count);
  lt().matmulPreferenceDestroy(preference);
  if (status != CUBLAS_STATUS_SUCCESS || count == 0) {
    return Status::error("gemm_blas: cuBLASLt has no algorithm for M " +
                         std::to_string(p.num_rows) + ", N " + std::to_string(p.out_features) +
                         ", K " + std::to_string(p.in_features));
  }
  int best = 0;
  const bool timed = trial != nullptr && can_time(stream);
  if (timed) {
    float best_ms = 1e30f;
    for (int i = 0; i < count; ++i) {
      const float ms =
          timed_ms(stream, [&] { return run(results[i].algo, trial) == CUBLAS_STATUS_SUCCESS; });
      if (ms < best_ms) best_ms = ms, best = i;
    }
  }
  if (timed || keep) blas->algorithms.emplace(key, results[best].algo);
  return blas_status(run(results[best].algo, out), "gemm_blas");
}

Status create_blas(void** blas) {
  if (!lt().error.empty()) return Status::error(lt().error);
  auto* made = new Blas;
  const Status status = blas_status(lt().create(&made->handle), "cublasLtCreate");
  if (!status.ok()) {
    delete made;
    return status;
  }
  *blas = made;
  return {};
}

void destroy_blas(void* blas) {
  if (blas == nullptr) return;
  lt().destroy(static_cast<Blas*>(blas)->handle);
  delete static_cast<Blas*>(blas);
}

Status gemm_blas(const GemmParams& p, const GemmResources& resources, CUstream_st* stream) {
  REGATTA_RETURN_IF_ERROR(refusal("gemm_blas", gemm_blas_refuses(p)));
  if (resources.blas == nullptr || resources.scratch_bytes < gemm_scratch_bytes(p)) {
    return Status::error("gemm_blas: needs create_blas() and " +
                         std::to_string(gemm_scratch_bytes(p)) + " bytes of scratch, got " +
                         std::to_string(resources.scratch_bytes));
  }
  if (p.num_rows == 0) return {};
  char* scratch = static_cast<char*>(resources.scratch);
  char* scaled = scratch + kBlasWorkspaceBytes;
  char* both = scaled + scaled_bytes(p);
  const int64_t width = p.gated ? p.out_features / 2 : p.out_features;
  return dispatch_dtype(p.dtype, "gemm_blas", [&](auto* type) -> Status {
    using T = std::remove_pointer_t<decltype(type)>;
    if constexpr (sizeof(T) == 2) {
      const LaunchConfig config({stream}, p.num_rows, 256);
      const void* x = p.x;
      if (p.sumsq != nullptr) {
        REGATTA_RETURN_IF_ERROR(launch(scale_rows_kernel<T>, config, "scale_rows",
                                       static_cast<const T*>(p.x), reinterpret_cast<T*>(scaled),
                                       make_epilogue(p), p.in_features));
        x = scaled;
      }
      // Timing costs some twenty runs, and a mixed batch has another number of rows each time: only
      // round numbers, which come again, are timed. Adding to `out` in place cannot be repeated.
      const auto product = [&](const GemmParams& part, const void* from, void* out) {
        const bool timed =
            part.num_rows % kTimedRows == 0 && (p.residual == nullptr || p.residual != p.out);
        return blas_product(static_cast<Blas*>(resources.blas), blas_key(part, part.num_rows), part,
                            from, out, p.gated ? p.dtype : p.out_dtype, timed ? out : nullptr,
                            /*keep=*/true, scratch, stream);
      };
      if (p.gated) {
        GemmParams part = p;
        const int64_t step = folded_rows(p);
        for (int64_t row = 0; row < p.num_rows; row += step) {
          part.num_rows = std::min(step, p.num_rows - row);
          Status status = product(part, static_cast<const T*>(x) + row * p.in_features, both);
          if (!status.ok()) return status;
          status = fold_gate(both, static_cast<T*>(p.out) + row * width, p.dtype, part.num_rows,
                             width, stream);
          if (!status.ok()) return status;
        }
        return {};
      }
      REGATTA_RETURN_IF_ERROR(product(p, x, p.out));
      if (p.sumsq_out != nullptr) {
        RowSumsqParams q;
        q.x = p.out;
        q.sums = p.sumsq_out;
        q.num_rows = p.num_rows;
        q.width = width;
        q.columns = gemm_sumsq_columns(p.num_rows);
        q.dtype = p.out_dtype;
        return row_sumsq(q, stream);
      }
    }
    return {};
  });
}
#else
Status create_blas(void**) { return Status::error("built without cuBLASLt"); }
void destroy_blas(void*) {}
Status gemm_blas(const GemmParams&, const GemmResources&, CUstream_st*) {
  return Status::error("gemm_blas: built without cuBLASLt");
}
#endif

}  // namespace regatta::cuda
