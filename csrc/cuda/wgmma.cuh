// wgmma: 64 rows by N columns of sums, by one warpgroup.
#pragma once

#include <cuda_fp8.h>

#include "hopper.cuh"

namespace regatta::cuda {

// Descriptor of a K-major operand tile in shared memory, 64 16-bit values (128 bytes) per row, with
// the copy engine's 128-byte swizzle; the tile is aligned to 1024 bytes. at(): what lies so many
// bytes on, another tile or another 16 values of k. Sums of 64 bits, both halves of them moved to
// uniform registers, were a sixth of the instructions of a loop that makes its left operands.
struct WgmmaTile {
  uint32_t low;

  __device__ __forceinline__ WgmmaTile at(int bytes) const { return {low + (bytes >> 4)}; }
  __device__ __forceinline__ operator uint64_t() const {
    constexpr uint64_t kStrideBytes = 1024;  // from 8 rows to the next 8
    constexpr uint64_t kSwizzle128 = 1;
    return (kStrideBytes >> 4) << 32 | kSwizzle128 << 62 | low;
  }
};

__device__ __forceinline__ WgmmaTile wgmma_descriptor(const void* shared) {
  uint32_t low = (shared_address(shared) & 0x3ffff) >> 4 | 1u << 16;
  asm("" : "+r"(low));  // made once: the compiler would make it again where it is used
  return {low};
}

__device__ __forceinline__ void wgmma_fence() {
  REGATTA_SM90A_ASM("wgmma.fence.sync.aligned;" :: : "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  REGATTA_SM90A_ASM("wgmma.commit_group.sync.aligned;" :: : "memory");
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  REGATTA_SM90A_ASM("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses of an accumulator across asynchronous instructions.
template <int kCount>
__device__ __forceinline__ void wgmma_pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void wgmma_pin(int (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// Descriptor of a right operand b[16, N] whose rows are contiguous ("MN-major"): panels of 64
// columns, 128 bytes per row with the copy engine's swizzle, `panel_bytes` apart; 16 rows at
// `shared`, which is aligned to 1024 bytes.
__device__ __forceinline__ uint64_t wgmma_descriptor_rows(const void* shared,
                                                          uint32_t panel_bytes) {
  constexpr uint64_t kStrideBytes = 1024;  // from 8 rows to the next 8
  constexpr uint64_t kSwizzle128 = 1;
  return (static_cast<uint64_t>(shared_address(shared)) & 0x3ffff) >> 4 |
         static_cast<uint64_t>(panel_bytes >> 4) << 16 | (kStrideBytes >> 4) << 32 |
         kSwizzle128 << 62;
}

// d[64, N] (+)= a[64, K] b[N, K]^T, K being 32 bytes; d is replaced when `accumulate` is 0, and is
// int32 of int8 operands. Thread t holds, with w = t / 32 % 4, g = t % 32 / 4, c = 2 * (t % 4) and
// j = 0 .. N/8-1:
//   d[4j], d[4j+1]: row 16w+g, columns 8j+c, 8j+c+1      d[4j+2], d[4j+3]: row 16w+g+8
// b is the descriptor of a swizzled tile. So is a, or it is four registers laid out as the left
// operand of mma m16n8k16 (8 bits: m16n8k32), warp w of the warpgroup holding rows 16w .. 16w + 15.
template <class T, int N>
struct Wgmma;

// d[64, N] (+)= a[64, 16] b[16, N]; b from wgmma_descriptor_rows, a and d as above.
template <class T, int N>
struct WgmmaRows;

// The names of d's registers in the instruction.
#define REGATTA_WGMMA_TEXT_4 "%0, %1, %2, %3"
#define REGATTA_WGMMA_TEXT_8 REGATTA_WGMMA_TEXT_4 ", %4, %5, %6, %7"
#define REGATTA_WGMMA_TEXT_16 REGATTA_WGMMA_TEXT_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define REGATTA_WGMMA_TEXT_32 \
  REGATTA_WGMMA_TEXT_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGATTA_WGMMA_TEXT_40 REGATTA_WGMMA_TEXT_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define REGATTA_WGMMA_TEXT_48 REGATTA_WGMMA_TEXT_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define REGATTA_WGMMA_TEXT_64 \
  REGATTA_WGMMA_TEXT_48       \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define REGATTA_WGMMA_TEXT_80 \
  REGATTA_WGMMA_TEXT_64       \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define REGATTA_WGMMA_TEXT_96 \
  REGATTA_WGMMA_TEXT_80       \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define REGATTA_WGMMA_TEXT_112 \
  REGATTA_WGMMA_TEXT_96        \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define REGATTA_WGMMA_TEXT_128                                                                   \
  REGATTA_WGMMA_TEXT_112                                                                         \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
  "%127"

// The same registers as operands with constraint C, from d[i] on.
#define REGATTA_WGMMA_4(C, i) C(d[i]), C(d[i + 1]), C(d[i + 2]), C(d[i + 3])
#define REGATTA_WGMMA_8(C, i) REGATTA_WGMMA_4(C, i), REGATTA_WGMMA_4(C, i + 4)
#define REGATTA_WGMMA_16(C, i) REGATTA_WGMMA_8(C, i), REGATTA_WGMMA_8(C, i + 8)
#define REGATTA_WGMMA_32(C, i) REGATTA_WGMMA_16(C, i), REGATTA_WGMMA_16(C, i + 16)
#define REGATTA_WGMMA_40(C, i) REGATTA_WGMMA_32(C, i), REGATTA_WGMMA_8(C, i + 32)
#define REGATTA_WGMMA_48(C, i) REGATTA_WGMMA_32(C, i), REGATTA_WGMMA_16(C, i + 32)
#define REGATTA_WGMMA_64(C, i) REGATTA_WGMMA_32(C, i), REGATTA_WGMMA_32(C, i + 32)
#define REGATTA_WGMMA_80(C, i) REGATTA_WGMMA_64(C, i), REGATTA_WGMMA_16(C, i + 64)
#define REGATTA_WGMMA_96(C, i) REGATTA_WGMMA_64(C, i), REGATTA_WGMMA_32(C, i + 64)
#define REGATTA_WGMMA_112(C, i) REGATTA_WGMMA_64(C, i), REGATTA_WGMMA_48(C, i + 64)
#define REGATTA_WGMMA_128(C, i) REGATTA_WGMMA_64(C, i), REGATTA_WGMMA_64(C, i + 64)

#ifdef REGATTA_SM90A
#define REGATTA_WGMMA_ASM(...) asm volatile(__VA_ARGS__)
#else
#define REGATTA_WGMMA_ASM(...) wrong_architecture()
#endif

// P: the operand that says whether to add. TAIL: immediate operands, signs and then transpositions.
#define REGATTA_WGMMA_RUN(C, N, COUNT, SHAPE, P, OPERANDS, TAIL, ...)                             \
  REGATTA_WGMMA_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, " P                                         \
                    ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N SHAPE                            \
                    " {" REGATTA_WGMMA_TEXT_##COUNT                                               \
                    "}, " OPERANDS ", p" TAIL ";\n}" : REGATTA_WGMMA_##COUNT(C, 0) : __VA_ARGS__, \
                    "l"(b), "r"(accumulate))

// P0 ..: the operands behind d.
#define REGATTA_WGMMA_TYPE(T, SUM, C, N, COUNT, SHAPE, TAIL, TAIL_A, P0, P1, P2, P3, P4, P5)     \
  template <>                                                                                    \
  struct Wgmma<T, N> {                                                                           \
    static __device__ __forceinline__ void run(SUM (&d)[COUNT], uint64_t a, uint64_t b,          \
                                               int accumulate) {                                 \
      REGATTA_WGMMA_RUN(C, N, COUNT, SHAPE, P2, P0 ", " P1, TAIL, "l"(a));                       \
    }                                                                                            \
    static __device__ __forceinline__ void run(SUM (&d)[COUNT], const uint32_t (&a)[4],          \
                                               uint64_t b, int accumulate) {                     \
      REGATTA_WGMMA_RUN(C, N, COUNT, SHAPE, P5, "{" P0 ", " P1 ", " P2 ", " P3 "}, " P4, TAIL_A, \
                        "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));                             \
    }                                                                                            \
  };

#define REGATTA_WGMMA_ROWS(T, N, COUNT, SHAPE, P0, P1, P2, P3, P4, P5)                      \
  template <>                                                                               \
  struct WgmmaRows<T, N> {                                                                  \
    static __device__ __forceinline__ void run(float (&d)[COUNT], const uint32_t (&a)[4],   \
                                               uint64_t b, int accumulate) {                \
      REGATTA_WGMMA_RUN("+f", N, COUNT, SHAPE, P5, "{" P0 ", " P1 ", " P2 ", " P3 "}, " P4, \
                        ", 1, 1, 1", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));           \
    }                                                                                       \
  };

#define REGATTA_WGMMA_WIDTH(N, COUNT, ...)                                                      \
  REGATTA_WGMMA_TYPE(__nv_bfloat16, float, "+f", N, COUNT, "k16.f32.bf16.bf16", ", 1, 1, 0, 0", \
                     ", 1, 1, 0", __VA_ARGS__)                                                  \
  REGATTA_WGMMA_TYPE(__half, float, "+f", N, COUNT, "k16.f32.f16.f16", ", 1, 1, 0, 0",          \
                     ", 1, 1, 0", __VA_ARGS__)                                                  \
  REGATTA_WGMMA_TYPE(__nv_fp8_e4m3, float, "+f", N, COUNT, "k32.f32.e4m3.e4m3", ", 1, 1",       \
                     ", 1, 1", __VA_ARGS__)                                                     \
  REGATTA_WGMMA_TYPE(int8_t, int, "+r", N, COUNT, "k32.s32.s8.s8", "", "", __VA_ARGS__)         \
  REGATTA_WGMMA_ROWS(__nv_bfloat16, N, COUNT, "k16.f32.bf16.bf16", __VA_ARGS__)                 \
  REGATTA_WGMMA_ROWS(__half, N, COUNT, "k16.f32.f16.f16", __VA_ARGS__)

REGATTA_WGMMA_WIDTH(8, 4, "%4", "%5", "%6", "%7", "%8", "%9")
REGATTA_WGMMA_WIDTH(16, 8, "%8", "%9", "%10", "%11", "%12", "%13")
REGATTA_WGMMA_WIDTH(32, 16, "%16", "%17", "%18", "%19", "%20", "%21")
REGATTA_WGMMA_WIDTH(64, 32, "%32", "%33", "%34", "%35", "%36", "%37")
REGATTA_WGMMA_WIDTH(80, 40, "%40", "%41", "%42", "%43", "%44", "%45")
REGATTA_WGMMA_WIDTH(96, 48, "%48", "%49", "%50", "%51", "%52", "%53")
REGATTA_WGMMA_WIDTH(128, 64, "%64", "%65", "%66", "%67", "%68", "%69")
REGATTA_WGMMA_WIDTH(160, 80, "%80", "%81", "%82", "%83", "%84", "%85")
REGATTA_WGMMA_WIDTH(192, 96, "%96", "%97", "%98", "%99", "%100", "%101")
REGATTA_WGMMA_WIDTH(224, 112, "%112", "%113", "%114", "%115", "%116", "%117")
REGATTA_WGMMA_WIDTH(256, 128, "%128", "%129", "%130", "%131", "%132", "%133")

}  // namespace regatta::cuda
