// The records of predict.nn.blocks. Made by csrc/make_records.py: do not edit.
#pragma once

#include <cstdint>

#define TAKE(name) setting.field(#name, &to->name)

namespace regatta {

enum class NormKind : uint8_t { kRms, kLayer };
inline constexpr const char* kNormKindNames[] = {"rms", "layer"};
constexpr const auto& names_of(NormKind) { return kNormKindNames; }
constexpr int kNumNormKinds = 2;

enum class Function : uint8_t { kSilu, kGelu, kGeluTanh, kRelu, kReluSquared };
inline constexpr const char* kFunctionNames[] = {"silu", "gelu", "gelu_tanh", "relu",
                                                 "relu_squared"};
constexpr const auto& names_of(Function) { return kFunctionNames; }
constexpr int kNumFunctions = 5;

enum class PositionKind : uint8_t { kRotary, kAlibi, kNone };
inline constexpr const char* kPositionKindNames[] = {"rotary", "alibi", "none"};
constexpr const auto& names_of(PositionKind) { return kPositionKindNames; }
constexpr int kNumPositionKinds = 3;

enum class Placement : uint8_t { kOutput, kSum };
inline constexpr const char* kPlacementNames[] = {"output", "sum"};
constexpr const auto& names_of(Placement) { return kPlacementNames; }
constexpr int kNumPlacements = 2;

enum class Source : uint8_t { kInput, kNormed, kNone };
inline constexpr const char* kSourceNames[] = {"input", "normed", "none"};
constexpr const auto& names_of(Source) { return kSourceNames; }
constexpr int kNumSources = 3;

struct Norm {
  NormKind kind = NormKind::kRms;
  float epsilon = 1e-06f;
  bool bias = false, plus_one = false;
  bool is_there = false;

  // x / sqrt(mean(x^2) + epsilon) * weight.
  bool is_plain_rms() const { return is_there && kind == NormKind::kRms && !bias && !plus_one; }
};

template <class Setting>
void take(Norm* to, Setting& setting) {
  TAKE(kind), TAKE(epsilon), TAKE(bias), TAKE(plus_one);
}

struct Activation {
  Function function = Function::kSilu;
  bool gated = true;
  float clamp = 0.0f, slope = 1.0f, up_offset = 0.0f;

  bool is_plain() const { return clamp == 0.0f && slope == 1.0f && up_offset == 0.0f; }
};

template <class Setting>
void take(Activation* to, Setting& setting) {
  TAKE(function), TAKE(gated), TAKE(clamp), TAKE(slope), TAKE(up_offset);
}

struct Residual {
  Source source = Source::kInput;
  float input_scale = 1.0f, output_scale = 1.0f;

  bool is_plain_sum() const {
    return source == Source::kInput && input_scale == 1.0f && output_scale == 1.0f;
  }
  // Whether a product that adds rows, or none, makes it.
  bool is_of_product() const { return source == Source::kNone || is_plain_sum(); }
};

template <class Setting>
void take(Residual* to, Setting& setting) {
  TAKE(source), TAKE(input_scale), TAKE(output_scale);
}

struct Positions {
  PositionKind kind = PositionKind::kRotary;
  int64_t table = 0, query_table = -1;
  bool interleaved = false, two_dimensional = false;
  float scale = 1.0f;
};

template <class Setting>
void take(Positions* to, Setting& setting) {
  TAKE(kind), TAKE(table), TAKE(query_table), TAKE(interleaved), TAKE(two_dimensional), TAKE(scale);
}

}  // namespace regatta

#undef TAKE
