// The kernel sets of this architecture, best first: the one list that dispatch.h and foreach_isa.h
// are made of. A list is a file per architecture with
//
//   REGATTA_ISAS(ROW, ...)   ROW(enum, name, namespace, pairs, tiles, needs, ...) for each set
//     pairs   multiplies bfloat16 in pairs along k, so that a head's dims must be even
//     tiles   products of bfloat16 and int8 have kernels of tiles
//     needs   the CPU's features, by the names of features_*.cc, with a space between two
//   REGATTA_IN_INT8_ISA(ISA, ...)   a call, in the best namespace for products of int8
//
// and behind `#ifdef REGATTA_COMPILE_ISAS` one #include per namespace, of its isa_*.inl. The first
// set that the CPU has runs. Scalar always fits: what stands behind it runs only where it is
// forced.
//
// A new set is a row and an #include of such a list, and its own files (isa.inl says which).
#if defined(__x86_64__)
#include "isas_x86.h"
#elif defined(__aarch64__)
#include "isas_arm.h"
#else
#error "kernels are written for x86-64 and for aarch64 (64-bit Arm)"
#endif
