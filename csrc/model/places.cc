// Twin of predict/nn/places.py, and of max_lens_of() of predict/nn/inputs.py.
#include <algorithm>

#include "model/network.h"

namespace regatta::model {
namespace {

constexpr int32_t kLongSpan = 128;  // predict.nn.inputs.LONG_SPAN

// The place of the first of a token in a prompt; the prompt's length where it is not there.
int32_t place_of(Ints prompt, int32_t token) {
  return static_cast<int32_t>(std::find(prompt.data, prompt.data + prompt.size, token) -
                              prompt.data);
}

// The part of the rotary table for a prompt: 0 up to `length` tokens, 1 up to twice that, and so
// on.
int32_t step_of(int64_t length, int64_t num_tokens) {
  int32_t step = 0;
  while (num_tokens > length) {
    length *= 2;
    ++step;
  }
  return step;
}

}  // namespace

std::array<int32_t, 5> max_lens_of(Ints lengths, Ints context_lens, RowKind rows) {
  int32_t longest = 0, context = 0, longest_short = 0, in_long = 0;
  for (int64_t i = 0; i < lengths.size; ++i) {
    longest = std::max(longest, lengths[i]);
    context = std::max(context, context_lens[i]);
    if (lengths[i] < kLongSpan) {
      longest_short = std::max(longest_short, lengths[i]);
    } else {
      in_long += context_lens[i];
    }
  }
  return {longest, context, longest_short, in_long, static_cast<int32_t>(rows)};
}

Places Positions::of(Ints prompt) const {
  Places places;
  if (kind == kSteps) {
    places.first_row = static_cast<int32_t>(step_rows * step_of(step_length, prompt.size));
  }
  if (kind != kPrefix) return places;
  places.num_prefix = place_of(prompt, end_id);
  places.mask_row = std::max(places.num_prefix - 1, 0);
  for (const int32_t mask : mask_ids) {
    const int32_t place = place_of(prompt, mask);
    if (place == prompt.size) continue;
    places.mask_row = place;
    break;
  }
  return places;
}

const StepRows& PlacedRows::place(const Positions& how, const StepRows& rows,
                                  const std::vector<Places>& places) {
  if (how.kind == Positions::kPlain) return rows;
  const bool prefix = how.kind == Positions::kPrefix;
  const auto num_tokens = static_cast<size_t>(rows.token_ids.size);
  placed_ = rows;
  positions_.resize(num_tokens);
  block_positions_.assign(prefix ? num_tokens : 0, 0);
  prefix_lens_.clear();
  for (size_t request = 0; request < places.size(); ++request) {
    const Places& place = places[request];
    prefix_lens_.push_back(place.num_prefix);
    const auto first = static_cast<int64_t>(request);
    for (int32_t t = rows.cu_seqlens_q[first]; t < rows.cu_seqlens_q[first + 1]; ++t) {
      const int32_t at = rows.positions[t];
      if (prefix) {
        positions_[t] = at < place.num_prefix ? at : place.mask_row;
        block_positions_[t] = std::max(at - place.num_prefix + 1, 0);
      } else {
        positions_[t] = at + place.first_row;
      }
    }
  }
  placed_.positions = positions_;
  if (prefix) {
    placed_.block_positions = block_positions_;
    placed_.prefix_lens = prefix_lens_;
  }
  return placed_;
}

}  // namespace regatta::model
