// The records of predict.nn.kinds.experts. Made by csrc/make_records.py: do not edit.
#pragma once

#include "regatta/kv_format.h"
#include "regatta/record_parts.h"
#include "regatta/scheme.h"

namespace regatta {

enum class Scoring : uint8_t { kSoftmax, kSigmoid };
inline constexpr const char* kScoringNames[] = {"softmax", "sigmoid"};
constexpr const auto& names_of(Scoring) { return kScoringNames; }
constexpr int kNumScorings = 2;

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
  GroupScore group_score = GroupScore::kMax;
};

template <class Setting>
void take(Router* to, Setting& setting) {
  setting.field("num_experts", &to->num_experts);
  setting.field("top_k", &to->top_k);
  setting.field("scoring", &to->scoring);
  setting.field("renormalize", &to->renormalize);
  setting.field("scale", &to->scale);
  setting.field("bias", &to->bias);
  setting.field("correction", &to->correction);
  setting.field("num_groups", &to->num_groups);
  setting.field("top_groups", &to->top_groups);
  setting.field("group_score", &to->group_score);
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
  SchemeId gate_up = SchemeId::kDense, down = SchemeId::kDense, shared_gate_up = SchemeId::kDense;
  SchemeId shared_down = SchemeId::kDense;
};

template <class Setting>
void take(ExpertFields* to, Setting& setting) {
  setting.field("router", &to->router);
  setting.field("intermediate_size", &to->intermediate_size);
  setting.field("activation", &to->activation);
  setting.field("norm", &to->norm);
  setting.field("up_bias", &to->up_bias);
  setting.field("down_bias", &to->down_bias);
  setting.field("shared_size", &to->shared_size);
  setting.field("shared_gate", &to->shared_gate);
  setting.field("post_norm", &to->post_norm);
  setting.field("post_norm_of", &to->post_norm_of);
  setting.field("residual", &to->residual);
  setting.field("gate_up", &to->gate_up);
  setting.field("down", &to->down);
  setting.field("shared_gate_up", &to->shared_gate_up);
  setting.field("shared_down", &to->shared_down);
}

}  // namespace regatta
