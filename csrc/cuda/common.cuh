// What every CUDA kernel here shares: launching (with programmatic dependent launch), 16-byte
// accesses, asynchronous copies, matrix instructions, and conversions between element types.
//
// Architectures: compiles for sm_75 and later. Wrappers of newer instructions exist everywhere and
// trap when executed on an architecture without them, so that one kernel source compiles for all;
// whoever launches a kernel checks the device first.
//
// Programmatic dependent launch (PDL), the contract between kernels of a stream
//  * A kernel launched with `LaunchConfig::pdl` may start before the one ahead of it has finished.
//    Every thread calls pdl_wait() before it touches anything that an earlier kernel writes, and
//    before it writes anything at all (an earlier kernel may still read it). Only constants, that
//    is weights and tables, may be read ahead of pdl_wait().
//  * pdl_trigger() says that the next kernel may start to be scheduled. It promises nothing about
//    data: pdl_wait() waits for the whole previous grid to finish, and its writes are then visible.
//    Call it first thing: a dependent block that waits costs only its shared memory and registers;
//    where that one copies weights meanwhile, not before this one has asked for nearly all of its
//    own. Let warps wait at pdl_wait(): those that try a barrier take instructions from the block
//    ahead.
//  * A kernel that is launched without the attribute needs neither, and is always safe.
//  * All of them ask for the largest share of shared memory. A multiprocessor changes it only when
//    it is empty: of two kernels with different shares the later one finds the first half of the
//    multiprocessors free, fills them with two blocks each and runs at half speed.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "capability.h"
#include "host.h"
#include "regatta/cuda_ops.h"
#include "regatta/types.h"

namespace regatta::cuda {

constexpr int kWarp = 32;

// ---------------------------------------------------------------------------------------- host

// The candidate that REGATTA_KERNEL names for an operator ("paged_attention=sm80,..."), or "".
inline std::string forced_candidate(const char* operator_name) {
  const char* text = std::getenv("REGATTA_KERNEL");
  const std::string all = text != nullptr ? text : "", key = std::string(operator_name) + "=";
  const size_t at = all.find(key);
  if (at == std::string::npos) return {};
  const size_t begin = at + key.size();
  return all.substr(begin, all.find(',', begin) - begin);
}

inline dim3 grid_of(int64_t x, int64_t y, int64_t z = 1) {
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z));
}

struct LaunchConfig {
  dim3 grid, block;
  size_t shared_bytes;  // dynamic
  cudaStream_t stream;
  bool pdl;                // the kernel keeps the contract above (sm_90 and later; else ignored)
  unsigned cluster_x = 1;  // blocks per cluster, along grid.x (sm_90 and later)

  LaunchConfig(const Launch& on, dim3 blocks, int64_t threads = 1, int64_t dynamic_bytes = 0)
      : grid(blocks),
        block(static_cast<unsigned>(threads)),
        shared_bytes(static_cast<size_t>(dynamic_bytes)),
        stream(on.stream),
        pdl(on.pdl) {}
  LaunchConfig(const Launch& on, int64_t blocks = 1, int64_t threads = 1, int64_t dynamic_bytes = 0)
      : LaunchConfig(on, grid_of(blocks, 1), threads, dynamic_bytes) {}
};

// Whether the current device overlaps dependent launches. Older ones must not be asked to.
inline bool has_dependent_launch() { return compute_capability() >= 90; }

inline int num_multiprocessors() {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

// Of a block, at most.
inline int max_shared_bytes() {
  int device = 0, bytes = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return bytes;
}

// Launches kernel(args...). Raises the kernel's shared-memory limit when it asks for more than the
// 48 KB that need no opt-in.
template <class... Params, class... Args>
Status launch(void (*kernel)(Params...), const LaunchConfig& config, const char* name,
              Args&&... args) {
  if (config.shared_bytes > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   static_cast<int>(config.shared_bytes));
    if (error != cudaSuccess) return cuda_status(error, name);
  }
  cudaLaunchConfig_t launch_config = {};
  launch_config.gridDim = config.grid;
  launch_config.blockDim = config.block;
  launch_config.dynamicSmemBytes = config.shared_bytes;
  launch_config.stream = config.stream;
  cudaLaunchAttribute attributes[2];
  unsigned count = 0;
  if (config.pdl && has_dependent_launch()) {
    const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                   cudaFuncAttributePreferredSharedMemoryCarveout,
                                                   cudaSharedmemCarveoutMaxShared);
    if (error != cudaSuccess) return cuda_status(error, name);
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (config.cluster_x > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = config.cluster_x;
    attributes[count].val.clusterDim.y = 1;
    attributes[count++].val.clusterDim.z = 1;
  }
  launch_config.attrs = attributes;
  launch_config.numAttrs = count;
  return cuda_status(
      cudaLaunchKernelEx(&launch_config, kernel, static_cast<Params>(std::forward<Args>(args))...),
      name);
}

// Calls f with a null pointer of the element type: [&](auto* t) { using T = ...; return ...; }.
template <class F>
Status dispatch_dtype(DType dtype, const char* name, F&& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(static_cast<float*>(nullptr));
    case DType::kBFloat16:
      return f(static_cast<__nv_bfloat16*>(nullptr));
    case DType::kFloat16:
      return f(static_cast<__half*>(nullptr));
    default:
      return Status::error(std::string(name) + ": dtype " + dtype_name(dtype) +
                           " is not supported (allowed: float32, bfloat16, float16)");
  }
}

// The same of the 16-bit types.
template <class F>
Status dispatch_half(DType dtype, F&& f) {
  return dtype == DType::kBFloat16 ? f(static_cast<__nv_bfloat16*>(nullptr))
                                   : f(static_cast<__half*>(nullptr));
}

// --------------------------------------------------------------------------- dependent launches

__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void wrong_architecture() { asm volatile("trap;"); }

// ------------------------------------------------------------------------------- element types

// Traits<T>: conversions, and the pair type that packed arithmetic uses.
template <class T>
struct Traits;

template <>
struct Traits<float> {
  using Pair = float2;
  static constexpr DType dtype = DType::kFloat32;
  static __device__ __forceinline__ float to_float(float x) { return x; }
  static __device__ __forceinline__ float from_float(float x) { return x; }
  static __device__ __forceinline__ float2 to_float2(Pair x) { return x; }
  static __device__ __forceinline__ Pair from_float2(float2 x) { return x; }
};

template <>
struct Traits<__nv_bfloat16> {
  using Pair = __nv_bfloat162;
  static constexpr DType dtype = DType::kBFloat16;
  static __device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
  static __device__ __forceinline__ __nv_bfloat16 from_float(float x) {
    return __float2bfloat16_rn(x);
  }
  static __device__ __forceinline__ float2 to_float2(Pair x) { return __bfloat1622float2(x); }
  static __device__ __forceinline__ Pair from_float2(float2 x) { return __float22bfloat162_rn(x); }
};

template <>
struct Traits<__half> {
  using Pair = __half2;
  static constexpr DType dtype = DType::kFloat16;
  static __device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
  static __device__ __forceinline__ __half from_float(float x) { return __float2half_rn(x); }
  static __device__ __forceinline__ float2 to_float2(Pair x) { return __half22float2(x); }
  static __device__ __forceinline__ Pair from_float2(float2 x) { return __float22half2_rn(x); }
};

// Sixteen bytes of T: 4 floats or 8 halves. Element i is v[i].
template <class T>
struct alignas(16) Vec16 {
  static constexpr int kSize = 16 / static_cast<int>(sizeof(T));
  T v[kSize];
  __device__ __forceinline__ float get(int i) const { return Traits<T>::to_float(v[i]); }
  __device__ __forceinline__ void set(int i, float x) { v[i] = Traits<T>::from_float(x); }
};

template <class To, class From>
__device__ __forceinline__ To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// --------------------------------------------------------------------------- 16-byte accesses

// p is aligned to 16 bytes in all of these.
template <class T>
__device__ __forceinline__ Vec16<T> load16(const T* p) {
  const uint4 x = *reinterpret_cast<const uint4*>(p);
  return bit_cast<Vec16<T>>(x);
}

// Past L1 (ld.cg), for what other multiprocessors may have written since this one began the launch.
template <class T>
__device__ __forceinline__ Vec16<T> load16_l2(const T* p) {
  return bit_cast<Vec16<T>>(__ldcg(reinterpret_cast<const uint4*>(p)));
}

// Policy word for load16_once: first to leave L2, so that what is read once does not push out what
// is read again. (Copies of Hopper's take the same word.)
__device__ __forceinline__ uint64_t policy_evict_first() {
  uint64_t policy = 0;
#if __CUDA_ARCH__ >= 800
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

// Read-only for the whole kernel, and read once (weights): stays out of L1.
template <class T>
__device__ __forceinline__ Vec16<T> load16_once(const T* p, uint64_t policy) {
  uint4 x;
#if __CUDA_ARCH__ >= 800
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p), "l"(policy));
#else
  x = __ldcs(reinterpret_cast<const uint4*>(p));
#endif
  return bit_cast<Vec16<T>>(x);
}

template <class T>
__device__ __forceinline__ void store16(T* p, const Vec16<T>& x) {
  *reinterpret_cast<uint4*>(p) = bit_cast<uint4>(x);
}

// --------------------------------------------------------------------- warp and block reductions

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int o = kWarp / 2; o > 0; o /= 2) x += __shfl_xor_sync(~0u, x, o);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int o = kWarp / 2; o > 0; o /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, o));
  return x;
}

// Over this lane and those below it.
__device__ __forceinline__ int warp_inclusive_scan(int x, int lane) {
#pragma unroll
  for (int o = 1; o < kWarp; o *= 2) {
    const int y = __shfl_up_sync(~0u, x, o);
    if (lane >= o) x += y;
  }
  return x;
}

__device__ __forceinline__ int warp_inclusive_scan(int x) {
  return warp_inclusive_scan(x, static_cast<int>(threadIdx.x % kWarp));
}

// Sum over the block, in every thread, in an order that depends on nothing. `scratch`: one float
// per warp in shared memory, free for reuse after the next __syncthreads().
__device__ __forceinline__ float block_sum(float x, float* scratch) {
  x = warp_sum(x);
  const int warps = (blockDim.x + kWarp - 1) / kWarp;
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = x;
  __syncthreads();
  float total = 0.f;
  for (int w = 0; w < warps; ++w) total += scratch[w];
  return total;
}

// ------------------------------------------------------------------ cp.async (sm_80 and later)

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copies `bytes` (0..16) from global to shared and zero-fills the rest of the 16. The source is
// not touched when bytes is 0, but must still be a valid address of the same allocation.
__device__ __forceinline__ void cp_async16(void* shared, const void* global, int bytes = 16) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes)
      : "memory");
#else
  uint4 x = make_uint4(0, 0, 0, 0);
  if (bytes == 16) {
    x = *static_cast<const uint4*>(global);
  } else {
    char* to = reinterpret_cast<char*>(&x);
    for (int i = 0; i < bytes; ++i) to[i] = static_cast<const char*>(global)[i];
  }
  *static_cast<uint4*>(shared) = x;
#endif
}

__device__ __forceinline__ void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most `kPending` of this thread's groups are unfinished.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// --------------------------------------------------- mma.sync (fp16: sm_75, bf16: sm_80 and later)

// Four 8x8 tiles of 16-bit elements; lane l passes the address of row l % 8 of tile l / 8.
__device__ __forceinline__ void ldmatrix4(uint32_t (&r)[4], uint32_t shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_row)
               : "memory");
}

__device__ __forceinline__ void ldmatrix4(uint32_t (&r)[4], const void* shared_row) {
  ldmatrix4(r, shared_address(shared_row));
}

__device__ __forceinline__ void ldmatrix4_trans(uint32_t (&r)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared_row))
               : "memory");
}

// d[16,8] += a[16,16] b[16,8]. Lane l holds, with g = l / 4 and c = 2 * (l % 4):
//   d: (g, c), (g, c+1), (g+8, c), (g+8, c+1)
//   a: pairs at (g, c), (g+8, c), (g, c+8), (g+8, c+8)     b: pairs at rows c, c+8 of column g
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1);

// C: the constraint of sums. What sm_75 does instead follows.
#if __CUDA_ARCH__ >= 800
#define REGATTA_MMA(SHAPE, C, ...)                                                \
  asm volatile("mma.sync.aligned." SHAPE                                          \
               " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : C(d[0]), C(d[1]), C(d[2]), C(d[3])                               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
#else
#define REGATTA_MMA(SHAPE, C, ...) __VA_ARGS__
#endif

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4],
                                                            uint32_t b0, uint32_t b1) {
  REGATTA_MMA("m16n8k16.row.col.f32.bf16.bf16.f32", "+f", wrong_architecture());
}

__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&d)[4], const uint32_t (&a)[4],
                                                     uint32_t b0, uint32_t b1) {
  REGATTA_MMA("m16n8k16.row.col.f32.f16.f16.f32", "+f", mma_m16n8k8(d, a[0], a[1], b0),
              mma_m16n8k8(d, a[2], a[3], b1));
}

// d[16, 8] += a[16, 32] b[8, 32]^T of int8. Lane l holds, with g = l / 4 and c = 4 * (l % 4), four
// values of a at (g, c), (g + 8, c), (g, c + 16), (g + 8, c + 16), of b at (g, c), (g, c + 16); d
// as mma_m16n8k16.
__device__ __forceinline__ void mma_m16n8k32(int (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  REGATTA_MMA("m16n8k32.row.col.s32.s8.s8.s32", "+r", wrong_architecture());
}

}  // namespace regatta::cuda
