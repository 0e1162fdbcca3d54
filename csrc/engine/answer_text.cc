#include "engine/answer_text.h"

#include <algorithm>

namespace regatta::engine {

Status AnswerText::append(int32_t token, bool may_stop, bool is_last, bool* completes) {
  std::string piece, pending;
  REGATTA_RETURN_IF_ERROR(stream_->add(token, &piece, &pending));
  if (is_last) {
    std::string rest;
    REGATTA_RETURN_IF_ERROR(stream_->finish(&rest));
    piece += rest;
    pending.clear();
  }
  const auto start = int64_t(text_.size()), size = int64_t(piece.size());
  text_ += piece;
  if (!may_stop) num_exempt_ = start + size + int64_t(pending.size());
  const int64_t first = num_exempt_ - start;
  int32_t node = node_;
  StopStrings::Match match = stops_.scan(&node, piece, first);
  if (match.end == 0 && !pending.empty()) {
    // Were this the last token, this would be its text.
    int32_t behind = node;
    match = stops_.scan(&behind, pending, first - size);
    if (match.end > 0) match = {match.begin + size, match.end + size};
  }
  int64_t end = start + match.end;
  const auto hidden = hidden_.find(token);
  if (match.end == 0 && hidden != hidden_.end()) {
    end = start + size;
    const auto length = int64_t(hidden->second.size());
    places_.emplace_back(end, length);
    match = stops_.scan(&node, hidden->second, may_stop ? 0 : length);
  }
  node_ = node;
  *completes = match.end > 0;
  if (*completes) {
    if (!include_stop_) end = begin_of(end, match.end - match.begin);
    text_ = (text_ + pending).substr(0, size_t(end));
  }
  has_ended_ = *completes || is_last;
  return {};
}

int64_t AnswerText::begin_of(int64_t end, int64_t length) const {
  for (auto place = places_.rbegin(); place != places_.rend(); ++place) {
    if (length <= end - place->first) break;
    length = std::max<int64_t>(length - (end - place->first) - place->second, 0);
    end = place->first;
  }
  return end - length;
}

Status AnswerText::finish() {
  if (has_ended_) return {};
  has_ended_ = true;
  std::string rest;
  REGATTA_RETURN_IF_ERROR(stream_->finish(&rest));
  text_ += rest;
  return {};
}

std::string AnswerText::take() {
  auto end = int64_t(text_.size());
  if (!has_ended_) end = begin_of(end, stops_.depth(node_));
  if (end <= num_taken_) return {};
  std::string piece = text_.substr(size_t(num_taken_), size_t(end - num_taken_));
  num_taken_ = end;
  return piece;
}

}  // namespace regatta::engine
