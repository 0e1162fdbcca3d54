// The records of predict.nn.kinds.delta_net. Made by csrc/make_records.py: do not edit.
#pragma once

#include "regatta/kv_format.h"
#include "regatta/record_parts.h"
#include "regatta/scheme.h"

#define TAKE(name) setting.field(#name, &to->name)

namespace regatta {

enum class Decay : uint8_t { kHead, kChannel };
inline constexpr const char* kDecayNames[] = {"head", "channel"};
constexpr const auto& names_of(Decay) { return kDecayNames; }
constexpr int kNumDecays = 2;

enum class WriteBy : uint8_t { kSigmoid, kStep };
inline constexpr const char* kWriteByNames[] = {"sigmoid", "step"};
constexpr const auto& names_of(WriteBy) { return kWriteByNames; }
constexpr int kNumWriteBys = 2;

enum class OutGate : uint8_t { kSilu, kSigmoid };
inline constexpr const char* kOutGateNames[] = {"silu", "sigmoid"};
constexpr const auto& names_of(OutGate) { return kOutGateNames; }
constexpr int kNumOutGates = 2;

struct DeltaNetFields {
  int64_t num_key_heads = 0, num_value_heads = 0, key_dim = 0, value_dim = 0, conv_width = 4;
  bool conv_bias = false;
  Norm norm;
  Decay decay = Decay::kHead;
  float decay_bound = 0.0f;
  bool delta = true;
  WriteBy write = WriteBy::kSigmoid;
  float write_scale = 1.0f;
  bool unit_keys = true, skip = false, tiled_heads = false;
  Norm out_norm;
  int64_t norm_groups = 0;
  OutGate gate = OutGate::kSilu;
  bool gate_first = false, grouped_rows = false;
  Norm post_norm;
  Placement post_norm_of = Placement::kOutput;
  Residual residual;
  bool partial = false;
  SchemeId qkvz = SchemeId::kDense, ba = SchemeId::kDense, out = SchemeId::kDense;
  bool adapters = false;
};

template <class Setting>
void take(DeltaNetFields* to, Setting& setting) {
  TAKE(num_key_heads), TAKE(num_value_heads), TAKE(key_dim), TAKE(value_dim), TAKE(conv_width),
      TAKE(conv_bias), TAKE(norm), TAKE(decay), TAKE(decay_bound), TAKE(delta), TAKE(write),
      TAKE(write_scale), TAKE(unit_keys), TAKE(skip), TAKE(tiled_heads), TAKE(out_norm),
      TAKE(norm_groups), TAKE(gate), TAKE(gate_first), TAKE(grouped_rows), TAKE(post_norm),
      TAKE(post_norm_of), TAKE(residual), TAKE(partial), TAKE(qkvz), TAKE(ba), TAKE(out),
      TAKE(adapters);
}

}  // namespace regatta

#undef TAKE
