// Adapters of requests (LoRA: Hu et al., 2021): what is added to a linear's products, row by row,
// from pages that hold the adapters in memory (after S-LoRA and Punica, 2023). No framework, no ISA
// code.
//
//   y[t] += B(x[t] A^T), where A and B are those of row t's adapter
//
// T tokens, S adapters, R pages of the largest, K input and N output features. A linear has one
// part or more, of some columns each, and each part has an A of its own.
#pragma once

#include <cstdint>

namespace regatta {

constexpr int64_t kPageRanks = 8;  // ranks of a page; what an adapter has fewer is zero

// The linears of a layer that adapters change; AdapterRows::pages has a row for each. kQkv: of
// latent attention qkv_a and q_b.
enum class Adapted : uint8_t { kQkv, kOut, kGateUp, kDown };
constexpr int64_t kNumAdapted = 4;

// Which adapter a row has, and which pages an adapter has.
struct AdapterRows {
  const int32_t* ids = nullptr;    // [T] of `pages`, -1: none. Null: no row has one
  const int32_t* pages = nullptr;  // [S, kNumAdapted, R]; -1 and below: no more of them
  int64_t num_adapters = 0;        // S
  int64_t max_pages = 0;           // R
};

// What all adapters add to one linear, in the activations' dtype; scales are in `b`. The CPU's are
// packed, so that what is read together lies together: columns in groups, zeros behind the last.
constexpr int64_t kPackedIn = 16, kPackedOut = 32;
struct LowRankWeights {
  const void* a = nullptr;  // [pages, parts, kPageRanks, K]; the CPU's [.., K / 16, kPageRanks, 16]
  const void* b = nullptr;  // [pages, kPageRanks, N]; the CPU's [pages, N / 32, kPageRanks, 32]
  int64_t num_pages = 0;
};

}  // namespace regatta
