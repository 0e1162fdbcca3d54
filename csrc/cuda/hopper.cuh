// Hopper's own instructions: transaction barriers, bulk and tensor copies, clusters, wgmma.
//
// Architectures: sm_90 (wgmma: sm_90a). Elsewhere every wrapper traps, so that one source compiles
// for all architectures; see common.cuh.
#pragma once

#include <cuda.h>

#include "common.cuh"

// Instructions of sm_90, and of sm_90a: nothing elsewhere.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
#define REGATTA_SM90 1
#define REGATTA_SM90_ASM(...) asm volatile(__VA_ARGS__)
#else
#define REGATTA_SM90_ASM(...) static_cast<void>(0)
#endif
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define REGATTA_SM90A 1
#define REGATTA_SM90A_ASM(...) asm volatile(__VA_ARGS__)
#else
#define REGATTA_SM90A_ASM(...) static_cast<void>(0)
#endif

namespace regatta::cuda {

// ------------------------------------------------------------------------- transaction barriers

__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  REGATTA_SM90_ASM("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                   "r"(arrivals) : "memory");
}

// After barrier_init, before other threads or the copy engine use the barriers.
__device__ __forceinline__ void barrier_init_fence() {
  REGATTA_SM90_ASM("fence.mbarrier_init.release.cluster;" :: : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  REGATTA_SM90_ASM(
      "mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives, and makes the phase wait for `bytes` more from the copy engine.
__device__ __forceinline__ void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  REGATTA_SM90_ASM(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes) : "memory");
}

// Waits for the end of the phase with this parity (0 for the first).
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  REGATTA_SM90_ASM(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra end;\n"
      "bra again;\n"
      "end:\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity) : "memory");
}

// ----------------------------------------------------------------------- bulk and tensor copies

__device__ __forceinline__ uint64_t policy_evict_last() {
  uint64_t policy = 0;
  REGATTA_SM90_ASM("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Contiguous copy; addresses and bytes are multiples of 16.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t bytes,
                                          uint64_t* barrier, uint64_t policy) {
  REGATTA_SM90_ASM(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy) : "memory");
}

// The same without a policy.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t bytes,
                                          uint64_t* barrier) {
  REGATTA_SM90_ASM(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void tensor_map_prefetch(const CUtensorMap* map) {
  REGATTA_SM90_ASM("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// tensor_load_Nd(shared, map, x, y[, z, w, v], barrier, policy) copies a box of the tensor,
// innermost coordinate first; it counts the box's full size, also where that lies outside of the
// tensor (there it writes zeros). tensor_multicast_Nd(.., barrier, blocks, policy) copies into this
// address of every block of the cluster that `blocks` has a bit for; each counts the bytes at its
// own barrier.
#define REGATTA_COORDINATES_2 int x, int y
#define REGATTA_COORDINATES_3 REGATTA_COORDINATES_2, int z
#define REGATTA_COORDINATES_4 REGATTA_COORDINATES_3, int w
#define REGATTA_COORDINATES_5 REGATTA_COORDINATES_4, int v
// AT: the operands of the coordinates; P0 ..: those behind them.
#define REGATTA_TENSOR_COPIES(N, AT, P0, P1, P2, ...)                                              \
  __device__ __forceinline__ void tensor_load_##N##d(void* shared, const CUtensorMap* map,         \
                                                     REGATTA_COORDINATES_##N, uint64_t* barrier,   \
                                                     uint64_t policy) {                            \
    REGATTA_SM90_ASM("cp.async.bulk.tensor." #N                                                    \
                     "d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "       \
                     "[%0], [%1, {" AT "}], [" P0 "], " P1 ";" ::"r"(shared_address(shared)),      \
                     "l"(map), __VA_ARGS__, "r"(shared_address(barrier)), "l"(policy) : "memory"); \
  }                                                                                                \
  __device__ __forceinline__ void tensor_multicast_##N##d(                                         \
      void* shared, const CUtensorMap* map, REGATTA_COORDINATES_##N, uint64_t* barrier,            \
      uint16_t blocks, uint64_t policy) {                                                          \
    REGATTA_SM90_ASM("cp.async.bulk.tensor." #N                                                    \
                     "d.shared::cluster.global.mbarrier::complete_tx::bytes"                       \
                     ".multicast::cluster.L2::cache_hint [%0], [%1, {" AT "}], [" P0 "], " P1      \
                     ", " P2 ";" ::"r"(shared_address(shared)),                                    \
                     "l"(map), __VA_ARGS__, "r"(shared_address(barrier)), "h"(blocks),             \
                     "l"(policy) : "memory");                                                      \
  }

REGATTA_TENSOR_COPIES(2, "%2, %3", "%4", "%5", "%6", "r"(x), "r"(y))
REGATTA_TENSOR_COPIES(3, "%2, %3, %4", "%5", "%6", "%7", "r"(x), "r"(y), "r"(z))
REGATTA_TENSOR_COPIES(4, "%2, %3, %4, %5", "%6", "%7", "%8", "r"(x), "r"(y), "r"(z), "r"(w))
REGATTA_TENSOR_COPIES(5, "%2, %3, %4, %5, %6", "%7", "%8", "%9", "r"(x), "r"(y), "r"(z), "r"(w),
                      "r"(v))
// Orders this thread's earlier observations of ordinary writes before its later bulk copies.
__device__ __forceinline__ void async_proxy_fence() {
  REGATTA_SM90_ASM("fence.proxy.async;" :: : "memory");
}

// ------------------------------------------------------------------------------------- clusters

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank = 0;
  REGATTA_SM90_ASM("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of all blocks of the cluster; shared memory written before is visible after.
__device__ __forceinline__ void cluster_arrive() {
  REGATTA_SM90_ASM("barrier.cluster.arrive.release.aligned;" :: : "memory");
}

// Orders nothing: for blocks that only stay until nobody reads their shared memory any more.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  REGATTA_SM90_ASM("barrier.cluster.arrive.relaxed.aligned;" :: : "memory");
}

__device__ __forceinline__ void cluster_wait() {
  REGATTA_SM90_ASM("barrier.cluster.wait.acquire.aligned;" :: : "memory");
}

// The same shared-memory address in block `rank` of the cluster.
__device__ __forceinline__ uint32_t cluster_address(const void* shared, uint32_t rank) {
  uint32_t remote = 0;
  REGATTA_SM90_ASM(
      "mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(shared)),
      "r"(rank));
  return remote;
}

// Arrives at the same barrier of block `rank` of the cluster. Without .release.cluster, which would
// fence all of memory each time: what is handed over here are shared-memory tiles that the
// asynchronous proxy has read.
__device__ __forceinline__ void barrier_arrive_cluster(uint64_t* barrier, uint32_t rank) {
  REGATTA_SM90_ASM("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(
      cluster_address(barrier, rank)) : "memory");
}

// 16 bytes at the same shared-memory address of another block of the cluster.
__device__ __forceinline__ float4 load_cluster_float4(const float* shared, uint32_t rank) {
  float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
  REGATTA_SM90_ASM("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y),
                   "=f"(x.z), "=f"(x.w) : "r"(cluster_address(shared, rank)) : "memory");
  return x;
}

// The word *shared of block `rank` of the cluster becomes x.
__device__ __forceinline__ void store_cluster_word(const void* shared, uint32_t rank, uint32_t x) {
  REGATTA_SM90_ASM("st.shared::cluster.u32 [%0], %1;" ::"r"(cluster_address(shared, rank)),
                   "r"(x) : "memory");
}

__device__ __forceinline__ void store_cluster_float(const float* shared, uint32_t rank, float x) {
  store_cluster_word(shared, rank, __float_as_uint(x));
}

// Two floats of shared memory, through a pointer that the compiler takes for any memory's.
__device__ __forceinline__ float2 load_shared_float2(const float* shared) {
  float2 x;
  asm volatile("ld.volatile.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(x.x), "=f"(x.y)
               : "r"(shared_address(shared))
               : "memory");
  return x;
}

// Barrier `id` (1..15) among `threads` threads of the block, whole warps.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ------------------------------------------------------------------------------------ registers

// By all threads of a warpgroup: its threads own kCount registers from here on.
template <int kCount>
__device__ __forceinline__ void registers_give() {
  REGATTA_SM90A_ASM("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <int kCount>
__device__ __forceinline__ void registers_take() {
  REGATTA_SM90A_ASM("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Stores four 8 x 8 matrices of 16 bits, transposed; each lane has the address of one row.
__device__ __forceinline__ void store_matrix4_trans(void* shared_row, const uint32_t (&r)[4]) {
  REGATTA_SM90_ASM("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                       shared_address(shared_row)),
                   "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

}  // namespace regatta::cuda
