// clang-format off: the table below
// The vector of floats that kernels are written over. Included by foreach_isa.h; the functions
// below exist in each ISA namespace (vec_*.inl), always_inline.
//
//   struct Vec { static constexpr int kLanes; ... };      1 (scalar), 4 (neon*), 8 (avx2),
//                                                          16 (avx512*)
//
//   Vec zero();  Vec set1(float);                          all lanes
//   Vec load(const T*);           T = float, bf16, fp16    kLanes values, any alignment, to float
//   Vec load_n(const T*, int n);                           n in [0, kLanes]: the rest is 0, unread
//   void store(T*, Vec);          round to nearest even    kLanes values
//   void store_n(T*, Vec, int n);                          the rest is not written
//   void load_2k(const bf16*, Vec& even, Vec& odd);        2 * kLanes values, split by parity
//                                                          (VNNI pairs: even and odd k of a column)
//   a + b, a - b, a * b, a / b
//   max(a, b), min(a, b)          b where either is a NaN
//   fma(a, b, c) = a * b + c;  fnma(a, b, c) = c - a * b;  sqrt(a)
//   exp(a)       2 ulp; below -87.3 gives 0, above 88.7 inf, NaN stays
//   exp2_below0(a)  2^a for a <= 0, 1 ulp; exactly 1 at 0 and exactly 0 below -126, NaN stays
//   sigmoid(a), silu(a) = a * sigmoid(a)
//   float reduce_add(Vec), reduce_max(Vec)
//   void prefetch(const void*), prefetch_l2(const void*)
//   void transpose(Vec* rows)    kLanes x kLanes values in place; moves bits, converts nothing
//   Vec keep_lanes(Vec a, int begin, int end, Vec other)    a in lanes [begin, end), else other
//   uint32_t ge_mask(Vec a, Vec b)       bit i: a >= b in lane i (false where either is NaN)
//   Vec where_ge(Vec a, Vec b, Vec x)    x where a >= b, else 0
//   Vec max_magnitude(Vec m, Vec a)      max(m, |a|) for m >= 0; a NaN is larger than all
//   float reduce_magnitude(Vec m)        the largest of such m
//   int32_t store_int8(const Vec* a, int8_t*)   32 values to the nearest in [-127, 127], ties to
//                                        even; returns their sum. What a NaN becomes is not said.
//
// With REGATTA_HAS_BF16_DOT besides (avx512_bf16, neon_bf16):
//   struct VecBf16 { ... v; };                              2 * kLanes values, kLanes pairs
//   VecBf16 load_pairs(const bf16*);  VecBf16 set1_pair(const bf16*)   a pair to all lanes
//   Vec dot_pairs(Vec acc, VecBf16 a, VecBf16 b)            acc + a1*b1 + a0*b0 per lane
//   Vec round_bf16(Vec a)                                   the values as bf16 holds them
//   void interleave(bf16* out, const bf16* a, const bf16* b, int64_t count)
//                                         a0 b0 a1 b1 ...; zero pairs up to a multiple of kLanes
// Without REGATTA_HAS_CODE_TABLES, as the bits of kLanes pairs of bf16:
//   Vec join_pairs(Vec low, Vec high)     of adjacent values: low's, then high's
//   Vec zip_pairs(Vec a, Vec b)           a0 b0 a1 b1 ...
// With REGATTA_HAS_SWAPPED_PAIRS (avx512_bf16), where dot_pairs() is as fma() would while
// FlushDenormals lives:
//   Vec swapped_pairs(Vec a)                                a1 a0 a3 a2 ... of bf16 values
//   void split_pairs(Vec pairs, Vec& even, Vec& odd)        what load_2k() does to what it loads
//
// Codes of quantized cache rows (regatta/kv_format.h), in codes_*.inl; kv_rows.inl has them. `row`
// is a row's first byte, i a multiple of kLanes, n in [0, kLanes]; nothing past the n codes is
// read, lanes past them are any number.
//   Vec load_codes8(row, i, n)      code - 128
//   Vec load_codes4(row, i, n)      code - 8; two codes to a byte, the low bits first
//   Vec load_e4m3(row, i, n)        value / 256 (an exponent that float16 has)
//   void load_even_odd(const float* p, Vec& even, Vec& odd)   2 * kLanes floats, split by parity
//   void store_codes(uint8_t*, Vec a, int bias, int n)   round to nearest even + bias, a byte each
// `bf16`, `fp16`, to_float, from_float (one value) are in regatta/types.h.
//
// To add a function: add it to each vec_*.inl or codes_*.inl, and to this list.
// clang-format on
#pragma once

#include "regatta/types.h"

#define REGATTA_INLINE inline __attribute__((always_inline))
#define REGATTA_LAMBDA_INLINE __attribute__((always_inline))
