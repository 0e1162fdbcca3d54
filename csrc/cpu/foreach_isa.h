// Compiles one .inl file once per instruction set. Deliberately without an include guard.
//
// Use once in a .cc, after EVERY other include (std, intrinsics, our headers):
//
//   #define REGATTA_INL "<op>.inl"
//   #include "foreach_isa.h"
//
// The .inl (no guard either) puts its code in `namespace regatta::cpu::REGATTA_ISA` (scalar, avx2,
// avx512, avx512_bf16), where the vector type of vec.inl is already defined. Rules:
//  * Never include a std or intrinsics header from an .inl: inline functions parsed inside the
//    target pragma would be compiled for that ISA and the linker may pick them for everybody.
//  * Everything in an .inl lives in the ISA namespace (no `inline` functions outside of it).
//  * Each ISA namespace is complete: every op, every dtype. Chosen at run time (cpu/dispatch.h).
//  * REGATTA_HAS_BF16_DOT is 1 where vdpbf16ps exists, REGATTA_HAS_VNNI where vpdpbusd does;
//    REGATTA_VECTOR_BITS is 0, 256 or 512.
//  * avx512_bf16 is the code of the instruction set "amx" too: its products have kernels of tiles
//    (tiles.inl) beside those of vectors, and running_isa() chooses.
//  * With `#define REGATTA_FOREACH_VNNI` there is one more namespace, avx512_vnni, for CPUs that
//    have vpdpbusd without vdpbf16ps. No op runs in it: kernels that others call may choose it.
//  * With -DREGATTA_LAST_ISA_ALONE avx512_bf16 stands for all others: a library for tests that look
//    at no other, with one set to compile. With -DREGATTA_TWO_ISAS avx2 stands for scalar, and
//    avx512_bf16 for the others: one set of each way to mask the ends of rows.

#ifndef REGATTA_INL
#error "define REGATTA_INL before including foreach_isa.h"
#endif

#include <immintrin.h>

// GCC 12 reports the "undefined" operands of its own intrinsics (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include "vec.h"

#if defined(REGATTA_LAST_ISA_ALONE) || defined(REGATTA_TWO_ISAS)
namespace regatta::cpu {
namespace avx512_bf16 {}
#ifdef REGATTA_TWO_ISAS
namespace avx2 {}
#else
namespace avx2 = avx512_bf16;
#endif
namespace scalar = avx2;
namespace avx512 = avx512_bf16;
namespace avx512_vnni = avx512_bf16;
}  // namespace regatta::cpu
#else
#define REGATTA_ISA scalar
#define REGATTA_VECTOR_BITS 0
#define REGATTA_HAS_VNNI 0
#define REGATTA_HAS_BF16_DOT 0
#include "isa.inl"
#endif

#ifndef REGATTA_LAST_ISA_ALONE
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define REGATTA_ISA avx2
#define REGATTA_VECTOR_BITS 256
#define REGATTA_HAS_VNNI 0
#define REGATTA_HAS_BF16_DOT 0
#include "isa.inl"
#pragma GCC pop_options
#endif

#if !defined(REGATTA_LAST_ISA_ALONE) && !defined(REGATTA_TWO_ISAS)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#define REGATTA_ISA avx512
#define REGATTA_VECTOR_BITS 512
#define REGATTA_HAS_VNNI 0
#define REGATTA_HAS_BF16_DOT 0
#include "isa.inl"
#pragma GCC pop_options

#ifdef REGATTA_FOREACH_VNNI
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#define REGATTA_ISA avx512_vnni
#define REGATTA_VECTOR_BITS 512
#define REGATTA_HAS_VNNI 1
#define REGATTA_HAS_BF16_DOT 0
#include "isa.inl"
#pragma GCC pop_options
#endif
#endif

#pragma GCC push_options
#pragma GCC target( \
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx512bf16")
#define REGATTA_ISA avx512_bf16
#define REGATTA_VECTOR_BITS 512
#define REGATTA_HAS_VNNI 1
#define REGATTA_HAS_BF16_DOT 1
#include "isa.inl"
#pragma GCC pop_options

#undef REGATTA_INL
