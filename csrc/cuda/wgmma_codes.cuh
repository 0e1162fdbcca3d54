// wgmma with the left operand in registers and both along k: weights that were codes.
#pragma once

#include "hopper.cuh"

namespace regatta::cuda {

// d[64, N] += a[64, 16] b[N, 16]^T. a is laid out as the left operand of mma_m16n8k16, warp w of
// the warpgroup holding rows 16w .. 16w + 15; b and d as in Wgmma (hopper.cuh).
template <class T, int N>
struct WgmmaCodes;

#define REGATTA_WGMMA_CODES_8(SHAPE)                            \
  asm volatile("wgmma.mma_async.sync.aligned." SHAPE            \
               " {"                                             \
               "%0, %1, %2, %3 "                                \
               "}, {%4, %5, %6, %7}, %8, 1, 1, 1, 0;"           \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

#define REGATTA_WGMMA_CODES_16(SHAPE)                                                    \
  asm volatile("wgmma.mma_async.sync.aligned." SHAPE                                     \
               " {"                                                                      \
               "%0, %1, %2, %3, %4, %5, %6, %7 "                                         \
               "}, {%8, %9, %10, %11}, %12, 1, 1, 1, 0;"                                 \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), \
                 "+f"(d[6]), "+f"(d[7])                                                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

#define REGATTA_WGMMA_CODES_32(SHAPE)                                                      \
  asm volatile("wgmma.mma_async.sync.aligned." SHAPE                                       \
               " {"                                                                        \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15 "     \
               "}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;"                                 \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),   \
                 "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), \
                 "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])                        \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

#define REGATTA_WGMMA_CODES_64(SHAPE)                                                              \
  asm volatile(                                                                                    \
      "wgmma.mma_async.sync.aligned." SHAPE                                                        \
      " {"                                                                                         \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "      \
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31 "                           \
      "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"                                                  \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),        \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),    \
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), \
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])                                         \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

#define REGATTA_WGMMA_CODES_128(SHAPE)                                                             \
  asm volatile(                                                                                    \
      "wgmma.mma_async.sync.aligned." SHAPE                                                        \
      " {"                                                                                         \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "      \
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "      \
      "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, "      \
      "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63 "                                     \
      "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 0;"                                                  \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),        \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),    \
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), \
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), \
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), \
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), \
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), \
        "+f"(d[63])                                                                                \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

#ifdef REGATTA_SM90A
#define REGATTA_WGMMA_CODES(N, SHAPE) REGATTA_WGMMA_CODES_##N(SHAPE)
#else
#define REGATTA_WGMMA_CODES(N, SHAPE) wrong_architecture()
#endif

#define REGATTA_WGMMA_CODES_TYPE(TYPE, N, SHAPE)                                          \
  template <>                                                                             \
  struct WgmmaCodes<TYPE, N> {                                                            \
    static __device__ __forceinline__ void run(float (&d)[N / 2], const uint32_t (&a)[4], \
                                               uint64_t b) {                              \
      REGATTA_WGMMA_CODES(N, "m64n" #N SHAPE);                                            \
    }                                                                                     \
  };
#define REGATTA_WGMMA_CODES_TYPES(N)                              \
  REGATTA_WGMMA_CODES_TYPE(__nv_bfloat16, N, "k16.f32.bf16.bf16") \
  REGATTA_WGMMA_CODES_TYPE(__half, N, "k16.f32.f16.f16")

REGATTA_WGMMA_CODES_TYPES(8)
REGATTA_WGMMA_CODES_TYPES(16)
REGATTA_WGMMA_CODES_TYPES(32)
REGATTA_WGMMA_CODES_TYPES(64)
REGATTA_WGMMA_CODES_TYPES(128)

#undef REGATTA_WGMMA_CODES_TYPES
#undef REGATTA_WGMMA_CODES_TYPE
#undef REGATTA_WGMMA_CODES
#undef REGATTA_WGMMA_CODES_8
#undef REGATTA_WGMMA_CODES_16
#undef REGATTA_WGMMA_CODES_32
#undef REGATTA_WGMMA_CODES_64
#undef REGATTA_WGMMA_CODES_128

}  // namespace regatta::cuda
