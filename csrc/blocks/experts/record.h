// The records of predict.nn.kinds.experts. Made by csrc/make_records.py: do not edit.
#pragma once

#include "regatta/kv_format.h"
#include "regatta/record_parts.h"
#include "regatta/scheme.h"

#define TAKE(name) setting.field(#name, &to->name)

namespace regatta {

enum class Scoring : uint8_t { kSoftmax, kSigmoid, kSparseMixer };
inline constexpr const char* kScoringNames[] = {"softmax", "sigmoid", "sparse_mixer"};
constexpr const auto& names_of(Scoring) { return kScoringNames; }
constexpr int kNumScorings = 3;

enum class GroupScore : uint8_t { kMax, kTopTwo };
inline constexpr const char* kGroupScoreNames[] = {"max", "top_two"};
constexpr const auto& names_of(GroupScore) { return kGroupScoreNames; }
constexpr int kNumGroupScores = 2;

struct Router {
  int64_t num_experts = 0, top_k = 0;
  Scoring scoring = Scoring::kSoftmax;
  bool renormalize = false;
  float scale = 1.0f;
  bool bias = false, correction = false;
  int64_t num_groups = 1, top_groups = 1;
  float jitter = 0.0f;
  GroupScore group_score = GroupScore::kMax;
};

template <class Setting>
void take(Router* to, Setting& setting) {
  TAKE(num_experts), TAKE(top_k), TAKE(scoring), TAKE(renormalize), TAKE(scale), TAKE(bias),
      TAKE(correction), TAKE(num_groups), TAKE(top_groups), TAKE(jitter), TAKE(group_score);
}

struct ExpertFields {
  Router router;
  int64_t intermediate_size = 0;
  Activation activation;
  Norm norm;
  bool up_bias = false, down_bias = false;
  int64_t shared_size = 0;
  bool shared_gate = false;
  Norm post_norm;
  Placement post_norm_of = Placement::kOutput;
  Residual residual;
  bool partial = false;
  int64_t own_experts = 0, first_expert = 0;
  SchemeId gate_up = SchemeId::kDense, down = SchemeId::kDense, shared_gate_up = SchemeId::kDense;
  SchemeId shared_down = SchemeId::kDense;
};

template <class Setting>
void take(ExpertFields* to, Setting& setting) {
  TAKE(router), TAKE(intermediate_size), TAKE(activation), TAKE(norm), TAKE(up_bias),
      TAKE(down_bias), TAKE(shared_size), TAKE(shared_gate), TAKE(post_norm), TAKE(post_norm_of),
      TAKE(residual), TAKE(partial), TAKE(own_experts), TAKE(first_expert), TAKE(gate_up),
      TAKE(down), TAKE(shared_gate_up), TAKE(shared_down);
}

}  // namespace regatta

#undef TAKE
