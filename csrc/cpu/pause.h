// The hint of a waiting loop to its core.
#pragma once

namespace regatta::cpu {

inline void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  // Not YIELD, which most cores take for nothing: ISB waits for the pipeline, some tens of cycles
  // as x86's pause does.
  __asm__ volatile("isb" ::: "memory");
#endif
}

}  // namespace regatta::cpu
