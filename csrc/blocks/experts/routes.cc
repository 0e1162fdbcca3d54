#include "blocks/experts/routes.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace regatta::cpu {
namespace {

// The largest values offered, the best first; of equal ones the one that came first.
class Best {
 public:
  Best(int64_t size, int32_t* ids) : size_(size), ids_(ids) {}

  void offer(int32_t id, float value) {
    if (count_ == size_ && !(value > values_[size_ - 1])) return;
    int64_t at = count_ == size_ ? size_ - 1 : count_++;
    for (; at > 0 && value > values_[at - 1]; --at) {
      values_[at] = values_[at - 1];
      ids_[at] = ids_[at - 1];
    }
    values_[at] = value;
    ids_[at] = id;
  }

 private:
  int64_t size_, count_ = 0;
  int32_t* ids_;
  float values_[kMaxExperts];
};

// What counts for a group's choice: its largest value, or the sum of its two largest.
float group_score(GroupScore kind, const float* values, int64_t size) {
  float first = values[0], second = -std::numeric_limits<float>::infinity();
  for (int64_t i = 1; i < size; ++i) {
    second = std::max(second, std::min(first, values[i]));
    first = std::max(first, values[i]);
  }
  return kind == GroupScore::kTopTwo ? first + second : first;
}

void choose_among(const Router& router, const float* values, int32_t* ids) {
  const int64_t group_size = router.num_experts / router.num_groups;
  int32_t groups[kMaxExperts];
  Best best_groups(router.top_groups, groups);
  for (int64_t g = 0; g < router.num_groups; ++g) {
    const bool all = router.top_groups == router.num_groups;
    const float score =
        all ? 0.0f : group_score(router.group_score, values + g * group_size, group_size);
    best_groups.offer(static_cast<int32_t>(g), score);
  }
  std::sort(groups, groups + router.top_groups);  // the lower expert first where values are equal
  Best best(router.top_k, ids);
  for (int64_t i = 0; i < router.top_groups; ++i) {
    const int64_t begin = groups[i] * group_size;
    for (int64_t e = begin; e < begin + group_size; ++e) {
      best.offer(static_cast<int32_t>(e), values[e]);
    }
  }
}

// The weight of the i-th choice by the sparse mixer: its softmax among the near ones that are left.
float mixer_share(const Router& router, const float* logits, const int32_t* ids, int64_t i) {
  const float most = logits[ids[i]];
  float sum = 0.0f;
  for (int32_t e = 0; e < router.num_experts; ++e) {
    const float gap = (most - logits[e]) / std::max(std::fabs(logits[e]), most);
    if (gap > 2 * router.jitter || std::find(ids, ids + i, e) != ids + i) continue;
    sum += std::exp(logits[e] - most);
  }
  return 1.0f / sum;
}

}  // namespace

void choose_experts(const Router& router, const float* scores, const float* correction,
                    int32_t* ids, float* weights) {
  const int64_t count = router.num_experts, top_k = router.top_k;
  if (std::any_of(scores, scores + count, [](float score) { return std::isnan(score); })) {
    for (int64_t i = 0; i < top_k; ++i) {
      ids[i] = static_cast<int32_t>(i);
      weights[i] = std::numeric_limits<float>::quiet_NaN();
    }
    return;
  }
  if (correction) {
    float corrected[kMaxExperts];
    for (int64_t e = 0; e < count; ++e) corrected[e] = scores[e] + correction[e];
    choose_among(router, corrected, ids);
  } else {
    choose_among(router, scores, ids);
  }
  float sum = 0.0f;
  for (int64_t i = 0; i < top_k; ++i) sum += scores[ids[i]];
  for (int64_t i = 0; i < top_k; ++i) {
    const float score = router.scoring == Scoring::kSparseMixer
                            ? mixer_share(router, scores, ids, i)
                            : scores[ids[i]];
    weights[i] = (router.renormalize ? score / sum : score) * router.scale;
  }
}

RowsByExpert rows_by_expert(const int32_t* ids, int64_t num_rows, int64_t num_chosen,
                            int64_t num_experts, Scratch& scratch) {
  const int64_t num_places = num_rows * num_chosen;
  int32_t* used = scratch.take<int32_t>(num_experts);
  int32_t* index = scratch.take<int32_t>(num_experts);  // of an expert among `used`
  int64_t* begins = scratch.take<int64_t>(num_experts + 1);
  int64_t* next = scratch.take<int64_t>(num_experts);
  int32_t* rows = scratch.take<int32_t>(num_places);
  int32_t* owners = scratch.take<int32_t>(num_places);
  int32_t* places = scratch.take<int32_t>(num_places);
  std::fill(next, next + num_experts, 0);
  for (int64_t i = 0; i < num_places; ++i) {
    if (ids[i] >= 0) ++next[ids[i]];
  }
  RowsByExpert result = {0, 0, used, begins, rows, owners, places};
  int64_t begin = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    if (next[e] == 0) continue;
    index[e] = static_cast<int32_t>(result.num_used);
    used[result.num_used] = static_cast<int32_t>(e);
    begins[result.num_used++] = begin;
    begin += std::exchange(next[e], begin);
  }
  begins[result.num_used] = result.num_places = begin;
  for (int64_t i = 0; i < num_places; ++i) {
    if (ids[i] < 0) {
      places[i] = -1;
      continue;
    }
    const int64_t place = next[ids[i]]++;
    rows[place] = static_cast<int32_t>(i / num_chosen);
    owners[place] = index[ids[i]];
    places[i] = static_cast<int32_t>(place);
  }
  return result;
}

}  // namespace regatta::cpu
