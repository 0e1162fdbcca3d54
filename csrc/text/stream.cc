#include "stream.h"

#include <algorithm>

#include "utf8.h"

namespace regatta::text {

void Stream::add(int32_t id, std::string* out) {
  if (id < 0 || static_cast<size_t>(id) >= file_.kinds.size()) return;
  const auto kind = static_cast<TextKind>(file_.kinds[id] & 127);
  const bool is_special = (file_.kinds[id] & 128) != 0;
  if (kind == TextKind::kNone || (is_special && skip_special_)) return;
  const std::string_view text = file_.texts[id];
  const bool is_first = is_first_;
  is_first_ = false;
  if (file_.is(kByteLevel)) {
    add_bytes(text, out);
  } else if (kind == TextKind::kByte) {
    held_ += text;
  } else {
    end_run(out);
    if (is_first && file_.bare_start) {
      std::string bare(text);
      bare.erase(std::remove(bare.begin(), bare.end(), ' '), bare.end());
      put(bare, out);
    } else {
      put(text, out);
    }
  }
}

void Stream::begin_output() {
  num_of_prompt_ = held_.size();
  // A start of which nothing was said may still lose its spaces; one that was is past them.
  if (!is_first_) strip_ = 0;
}

void Stream::add_bytes(std::string_view bytes, std::string* out) {
  held_ += bytes;
  std::string_view rest = held_;
  while (!rest.empty()) {
    const Utf8Step step = utf8_step(rest);
    if (step.what == Utf8::kCut) break;
    if (step.what == Utf8::kWhole) {
      put(rest.substr(0, step.size), out);
    } else if (num_of_prompt_ == 0) {
      put_replacement(out);
    }
    num_of_prompt_ = 0;
    rest.remove_prefix(step.size);
  }
  held_.erase(0, held_.size() - rest.size());
}

void Stream::end_run(std::string* out) {
  const size_t whole = whole_utf8(held_);
  if (file_.is(kEachByte)) {
    if (!held_.empty()) strip_ = 0;
    std::string_view rest = std::string_view(held_).substr(num_of_prompt_);
    while (!rest.empty()) {
      const Utf8Step step = utf8_step(rest);
      const size_t size = step.what == Utf8::kWhole ? step.size : 1;
      put(step.what == Utf8::kWhole ? rest.substr(0, size) : kReplacement, out);
      rest.remove_prefix(size);
    }
  } else if (whole == held_.size()) {
    put(std::string_view(held_).substr(
            whole_utf8(std::string_view(held_).substr(0, num_of_prompt_))),
        out);
  } else {
    for (size_t i = num_of_prompt_; i < held_.size(); ++i) put_replacement(out);
  }
  held_.clear();
  num_of_prompt_ = 0;
}

void Stream::finish(std::string* out) {
  if (!file_.is(kByteLevel)) return end_run(out);
  if (!held_.empty() && num_of_prompt_ == 0) put_replacement(out);
  held_.clear();
  num_of_prompt_ = 0;
}

void Stream::pending(std::string* out) const {
  if (held_.empty() || file_.is(kByteLevel)) return;  // there it is the start of one character
  std::string rest;
  Stream(*this).finish(&rest);
  constexpr std::string_view kMark = kReplacement;
  while (rest.size() >= kMark.size() &&
         rest.compare(rest.size() - kMark.size(), kMark.size(), kMark) == 0) {
    rest.resize(rest.size() - kMark.size());
  }
  out->append(rest);
}

void Stream::put_replacement(std::string* out) { put(kReplacement, out); }

void Stream::put(std::string_view text, std::string* out) {
  while (strip_ > 0 && !text.empty() && text[0] == ' ') {
    text.remove_prefix(1);
    --strip_;
  }
  if (!text.empty()) strip_ = 0;
  out->append(text);
}

}  // namespace regatta::text
