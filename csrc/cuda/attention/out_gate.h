// Gates of attention's outputs (AttentionBlock.out_gate) on GPUs. Host code.
#pragma once

#include "regatta/cuda_ops.h"

namespace regatta::cuda {

struct OutGateParams {
  const void* made = nullptr;  // [T, 2 Hq D + rest]: each head's query and gate, then what is left
  void* qkv = nullptr;         // [T, Hq D + rest]: the same without gates
  void* mixed = nullptr;       // [L, Hq D] of attention, times sigmoid(gate) in place
  // [L] the row of `made` that has a row's gates; null: the same. Others than 0 .. T - 1 leave it.
  const int32_t* rows = nullptr;
  int64_t num_tokens = 0, num_rows = 0;  // T, L
  int64_t num_heads = 0, head_dim = 0, rest = 0;
  DType dtype = DType::kFloat32;
};

// made -> qkv.
Status drop_gates(const OutGateParams& params, const Launch& launch);
// mixed, made -> mixed.
Status gate_outputs(const OutGateParams& params, const Launch& launch);

}  // namespace regatta::cuda
