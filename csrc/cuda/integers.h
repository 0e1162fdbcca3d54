// Arithmetic of sizes, for host and device. No CUDA.
#pragma once

#include <cstdint>

namespace regatta::cuda {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace regatta::cuda
