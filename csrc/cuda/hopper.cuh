// Hopper's own instructions: transaction barriers, bulk and tensor copies, clusters, wgmma.
//
// Architectures: sm_90 (wgmma: sm_90a). Elsewhere every wrapper traps, so that one source compiles
// for all architectures; see common.cuh.
#pragma once

#include <cuda.h>

#include "common.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
#define REGATTA_SM90 1
#endif
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define REGATTA_SM90A 1
#endif

namespace regatta::cuda {

// ------------------------------------------------------------------------- transaction barriers

__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
#ifdef REGATTA_SM90
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
#endif
}

// After barrier_init, before other threads or the copy engine use the barriers.
__device__ __forceinline__ void barrier_init_fence() {
#ifdef REGATTA_SM90
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
#ifdef REGATTA_SM90
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
#endif
}

// Arrives, and makes the phase wait for `bytes` more from the copy engine.
__device__ __forceinline__ void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
#ifdef REGATTA_SM90
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
#endif
}

// Waits for the end of the phase with this parity (0 for the first).
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
#ifdef REGATTA_SM90
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra end;\n"
      "bra again;\n"
      "end:\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
#endif
}

// ----------------------------------------------------------------------- bulk and tensor copies

__device__ __forceinline__ uint64_t policy_evict_last() {
  uint64_t policy = 0;
#ifdef REGATTA_SM90
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

// Contiguous copy; addresses and bytes are multiples of 16.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t bytes,
                                          uint64_t* barrier, uint64_t policy) {
#ifdef REGATTA_SM90
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
#endif
}

// The same without a policy.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t bytes,
                                          uint64_t* barrier) {
#ifdef REGATTA_SM90
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
#endif
}

__device__ __forceinline__ void tensor_map_prefetch(const CUtensorMap* map) {
#ifdef REGATTA_SM90
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#endif
}

// Box at (x, y[, z, w, v]) of the tensor, innermost coordinate first; counts its full size, also
// where it lies outside of the tensor (there it writes zeros).
__device__ __forceinline__ void tensor_load_2d(void* shared, const CUtensorMap* map, int x, int y,
                                               uint64_t* barrier, uint64_t policy) {
#ifdef REGATTA_SM90
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
#endif
}

__device__ __forceinline__ void tensor_load_3d(void* shared, const CUtensorMap* map, int x, int y,
                                               int z, uint64_t* barrier, uint64_t policy) {
#ifdef REGATTA_SM90
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
#endif
}

__device__ __forceinline__ void tensor_load_4d(void* shared, const CUtensorMap* map, int x, int y,
                                               int z, int w, uint64_t* barrier, uint64_t policy) {
#ifdef REGATTA_SM90
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
#endif
}

__device__ __forceinline__ void tensor_load_5d(void* shared, const CUtensorMap* map, int x, int y,
                                               int z, int w, int v, uint64_t* barrier,
                                               uint64_t policy) {
#ifdef REGATTA_SM90
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
#endif
}

// The same into this address of every block of the cluster that `blocks` has a bit for; each counts
// the bytes at its own barrier.
__device__ __forceinline__ void tensor_multicast_2d(void* shared, const CUtensorMap* map, int x,
                                                    int y, uint64_t* barrier, uint16_t blocks,
                                                    uint64_t policy) {
#ifdef REGATTA_SM90
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(
          shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier)), "h"(blocks), "l"(policy)
      : "memory");
#endif
}

__device__ __forceinline__ void tensor_multicast_3d(void* shared, const CUtensorMap* map, int x,
                                                    int y, int z, uint64_t* barrier,
                                                    uint16_t blocks, uint64_t policy) {
#ifdef REGATTA_SM90
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6, %7;" ::"r"(
          shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "h"(blocks), "l"(policy)
      : "memory");
#endif
}

__device__ __forceinline__ void tensor_multicast_4d(void* shared, const CUtensorMap* map, int x,
                                                    int y, int z, int w, uint64_t* barrier,
                                                    uint16_t blocks, uint64_t policy) {
#ifdef REGATTA_SM90
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7, %8;" ::"r"(
          shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(barrier)), "h"(blocks),
      "l"(policy)
      : "memory");
#endif
}

__device__ __forceinline__ void tensor_multicast_5d(void* shared, const CUtensorMap* map, int x,
                                                    int y, int z, int w, int v, uint64_t* barrier,
                                                    uint16_t blocks, uint64_t policy) {
#ifdef REGATTA_SM90
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8, %9;" ::"r"(
          shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v), "r"(shared_address(barrier)), "h"(blocks),
      "l"(policy)
      : "memory");
#endif
}

// Orders this thread's earlier observations of ordinary writes before its later bulk copies.
__device__ __forceinline__ void async_proxy_fence() {
#ifdef REGATTA_SM90
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

// ------------------------------------------------------------------------------------- clusters

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank = 0;
#ifdef REGATTA_SM90
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

// All threads of all blocks of the cluster; shared memory written before is visible after.
__device__ __forceinline__ void cluster_arrive() {
#ifdef REGATTA_SM90
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

// Orders nothing: for blocks that only stay until nobody reads their shared memory any more.
__device__ __forceinline__ void cluster_arrive_relaxed() {
#ifdef REGATTA_SM90
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#ifdef REGATTA_SM90
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Arrives at the same barrier of block `rank` of the cluster.
__device__ __forceinline__ void barrier_arrive_cluster(uint64_t* barrier, uint32_t rank) {
#ifdef REGATTA_SM90
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(remote)
               : "r"(shared_address(barrier)), "r"(rank));
  // Without .release.cluster, which would fence all of memory each time: what is handed over here
  // are shared-memory tiles that the asynchronous proxy has read.
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote) : "memory");
#endif
}

// 16 bytes at the same shared-memory address of another block of the cluster.
__device__ __forceinline__ float4 load_cluster_float4(const float* shared, uint32_t rank) {
  float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
#ifdef REGATTA_SM90
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(remote)
               : "r"(shared_address(shared)), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(remote)
               : "memory");
#endif
  return x;
}

// The word *shared of block `rank` of the cluster becomes x.
__device__ __forceinline__ void store_cluster_word(const void* shared, uint32_t rank, uint32_t x) {
#ifdef REGATTA_SM90
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(remote)
               : "r"(shared_address(shared)), "r"(rank));
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(remote), "r"(x) : "memory");
#endif
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
#ifdef REGATTA_SM90A
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

template <int kCount>
__device__ __forceinline__ void registers_take() {
#ifdef REGATTA_SM90A
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

// Stores four 8 x 8 matrices of 16 bits, transposed; each lane has the address of one row.
__device__ __forceinline__ void store_matrix4_trans(void* shared_row, const uint32_t (&r)[4]) {
#ifdef REGATTA_SM90
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(shared_row)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
#endif
}

}  // namespace regatta::cuda
