// How this process gives memory back to the system.
#include <malloc.h>

#include "regatta/abi.h"

// Paddle takes the result of every operator from malloc, and glibc maps and unmaps blocks of some
// hundred KiB and more each time: a fresh mapping costs a page fault per 4 KiB, on a virtual
// machine up to 3 us each, which is several times what a small operator takes (silu_mul of 512 x
// 4864 bfloat16: 4.1 ms, of which 3 are faults). This makes malloc keep what is freed, up to 256
// MiB, and serve blocks of up to 32 MiB (glibc's limit) from there. For the whole process, so the
// engine asks for it, not the library by itself. Does nothing under another malloc.
REGATTA_EXPORT void regatta_keep_freed_memory() {
#ifdef M_MMAP_THRESHOLD
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 256 << 20);
#endif
}
