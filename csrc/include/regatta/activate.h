// What stands between an MLP's products: function(gate) * up, or function(up) without a gate.
#pragma once

#include "regatta/types.h"

namespace regatta {

// As predict.nn.blocks has them.
enum class Function : uint8_t {
  kSilu,         // x / (1 + exp(-x))
  kGelu,         // x / 2 * (1 + erf(x / sqrt(2)))
  kGeluTanh,     // x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))
  kRelu,         // max(x, 0)
  kReluSquared,  // max(x, 0)^2
};
constexpr int kNumFunctions = 5;

// With a clamp gates are at most that and ups at most that far from 0; up_offset is then added to
// ups. slope: silu is x / (1 + exp(-slope x)). All but the function and `gated` are of experts.
struct Activation {
  Function function = Function::kSilu;
  bool gated = true;
  float clamp = 0.0f;  // 0: there is none
  float slope = 1.0f;
  float up_offset = 0.0f;

  bool is_plain() const { return clamp == 0.0f && slope == 1.0f && up_offset == 0.0f; }
};

struct ActivateParams {
  const void* x = nullptr;  // [num_tokens, intermediate_size], gated twice as wide, gate first
  void* out = nullptr;      // [num_tokens, intermediate_size]
  int64_t num_tokens = 0;
  int64_t intermediate_size = 0;
  DType dtype = DType::kFloat32;
  Activation activation;
};

namespace cpu {
Status activate(const ActivateParams& params);
}

}  // namespace regatta
