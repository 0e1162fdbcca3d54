// The launchers of cuda/experts/experts.h as plain loops. See kernels.cc.
#include "cuda/experts/experts.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/expert_routes.h"
#include "kernel.h"
#include "rows.h"

namespace regatta::cuda {
namespace {

constexpr int64_t kMaxRouterGroups = 32;  // a warp's lanes, in choose.cuh

float sigmoid(float x) { return 1.f / (1.f + std::exp(-x)); }

// The logits are of the row behind the norm as it is, the shared gate of what is written of it.
template <class T>
void route_row(const RouteParams& p, const std::vector<float>& weight,
               const std::vector<float>& shared_gate, int64_t token) {
  std::vector<float> row(p.hidden_size);
  read_row(static_cast<const T*>(p.x) + token * p.hidden_size, p.hidden_size, row.data());
  if (p.norm.is_there) norm_row<T>(p.norm, p.norm_weights, &row);
  write_row(row.data(), p.hidden_size, static_cast<T*>(p.normed) + token * p.hidden_size);
  if (p.logits != nullptr) {
    for (int64_t e = 0; e < p.num_experts; ++e) {
      p.logits[token * p.num_experts + e] =
          dot(row.data(), weight.data() + e * p.hidden_size, p.hidden_size);
    }
  }
  if (p.shared_gate == nullptr) return;
  round_row<T>(&row);
  p.shared_gate_out[token] = sigmoid(dot(row.data(), shared_gate.data(), p.hidden_size));
}

void choose_of_token(const ChooseArgs& a, int64_t token) {
  const int64_t count = a.router.num_experts;
  std::vector<float> scores(a.logits + token * count, a.logits + (token + 1) * count);
  for (int64_t e = 0; a.bias != nullptr && e < count; ++e) scores[e] += a.bias[e];
  if (a.router.scoring == Scoring::kSigmoid) {
    for (float& score : scores) score = sigmoid(score);
  } else {
    float largest = -INFINITY, sum = 0.f;
    for (const float score : scores) largest = std::max(largest, score);
    for (float& score : scores) sum += score = std::exp(score - largest);
    for (float& score : scores) score /= sum;
  }
  cpu::choose_experts(a.router, scores.data(), a.correction, a.ids + token * a.router.top_k,
                      a.shares + token * a.router.top_k);
}

// Leaves ends, places and the sorted rows.
void sort_by_expert(const ChooseAndSortParams& p) {
  const Router& router = p.choose.router;
  const int64_t num_pairs = p.choose.num_tokens * router.top_k;
  const int64_t row_bytes = p.hidden_size * dtype_size(p.dtype);
  int32_t place = 0;
  for (int32_t e = 0; e < router.num_experts; ++e) {
    for (int64_t pair = 0; pair < num_pairs; ++pair) {
      if (p.choose.ids[pair] != e) continue;
      std::memcpy(static_cast<char*>(p.sorted) + place * row_bytes,
                  static_cast<const char*>(p.x) + pair / router.top_k * row_bytes, row_bytes);
      p.places[pair] = place++;
    }
    p.ends[e] = place;
  }
}

}  // namespace

Status route(const RouteParams& params, const Launch& on) {
  return queue(on.stream, "route", [p = params] {
    return dispatch(p.dtype, "route", [&](auto* like) {
      using T = ElementOf<decltype(like)>;
      std::vector<float> weight, shared_gate;
      if (p.logits != nullptr) {
        weight.resize(p.num_experts * p.hidden_size);
        read_row(static_cast<const T*>(p.weight), p.num_experts * p.hidden_size, weight.data());
      }
      if (p.shared_gate != nullptr) {
        shared_gate.resize(p.hidden_size);
        read_row(static_cast<const T*>(p.shared_gate), p.hidden_size, shared_gate.data());
      }
      for (int64_t t = 0; t < p.num_tokens; ++t) route_row<T>(p, weight, shared_gate, t);
      return Status();
    });
  });
}

bool takes_route_step(const RouteParams& p) { return p.norm.is_there; }

Status route_step(const RouteParams& params, const Launch& on) { return route(params, on); }

// The loops above and below serve any number of tokens.
bool takes_one_token(const OneTokenParams&) { return false; }

Status one_token(const OneTokenParams&, const Launch&) {
  return Status::error("one_token: the fake GPU has no loops for it");
}

int64_t sort_counts(int64_t, int64_t) { return 0; }

Status choose_and_sort(const ChooseAndSortParams& params, const Launch& on) {
  const Router& router = params.choose.router;
  if (router.num_experts > kMaxExperts || router.top_k > kMaxChosen ||
      router.num_groups > kMaxRouterGroups) {
    return Status::error("choose_and_sort: at most " + std::to_string(kMaxExperts) + " experts, " +
                         std::to_string(kMaxChosen) + " of them chosen, in " +
                         std::to_string(kMaxRouterGroups) + " groups");
  }
  return queue(on.stream, "choose_and_sort", [p = params] {
    for (int64_t t = 0; t < p.choose.num_tokens; ++t) choose_of_token(p.choose, t);
    sort_by_expert(p);
    return Status();
  });
}

}  // namespace regatta::cuda
