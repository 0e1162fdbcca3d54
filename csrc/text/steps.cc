#include "steps.h"

#include <oniguruma.h>
#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>

#include "utf8.h"

namespace regatta::text {

namespace {

// What a search may try without a count; then four times as much again and again, from Retries.
constexpr unsigned long kFreeRetries = 1024;
// The steps together may make a text that much longer; more is no text of a tokenizer.
constexpr size_t kMaxGrowth = 16, kMinGrown = 1 << 12;

size_t most_grown(size_t size) { return size * kMaxGrowth + kMinGrown; }

void require_grown(bool holds) {
  if (!holds) {
    throw Failure{REGATTA_TEXT_FAILED, "the steps make the text more than " +
                                           std::to_string(kMaxGrowth) + " times as long"};
  }
}

std::string onig_message(int code, OnigErrorInfo* info) {
  UChar buffer[ONIG_MAX_ERROR_MESSAGE_LEN];
  const int size = onig_error_code_to_str(buffer, code, info);
  return std::string(reinterpret_cast<char*>(buffer), size);
}

struct FreeRegion {
  void operator()(OnigRegion* region) const { onig_region_free(region, 1); }
};
struct FreeParam {
  void operator()(OnigMatchParam* param) const { onig_free_match_param(param); }
};

std::string replaced(std::string_view text, const std::string& from, const std::string& to) {
  std::string out;
  size_t done = 0;
  for (size_t at; (at = text.find(from, done)) != text.npos; done = at + from.size()) {
    out.append(text, done, at - done).append(to);
    require_grown(out.size() <= most_grown(text.size()));
  }
  return out.append(text, done);
}

std::string composed(std::string_view text) {
  utf8proc_uint8_t* found = nullptr;
  const utf8proc_ssize_t size =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                   static_cast<utf8proc_ssize_t>(text.size()), &found,
                   static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  const std::unique_ptr<utf8proc_uint8_t, void (*)(void*)> held(found, std::free);
  if (size == UTF8PROC_ERROR_NOMEM) throw std::bad_alloc();
  if (size < 0) throw Failure{REGATTA_TEXT_FAILED, std::string("NFC: ") + utf8proc_errmsg(size)};
  return std::string(reinterpret_cast<char*>(found), size);
}

struct Span {
  size_t begin, end;
  bool matches;
};

// What tokenizers' SplitDelimiterBehavior leaves of spans that cover a text. Runs of matches are
// joined once, to what stands before (or behind) the first of them.
std::vector<Span> joined(std::vector<Span> spans, Behavior behavior) {
  if (behavior == Behavior::kIsolated) return spans;
  std::vector<Span> kept;
  bool before = false;  // whether the span that was last seen matches
  const auto see = [&](const Span& span, bool joins) {
    if (joins && !kept.empty()) {
      kept.back().begin = std::min(kept.back().begin, span.begin);
      kept.back().end = std::max(kept.back().end, span.end);
    } else {
      kept.push_back(span);
    }
    before = span.matches;
  };
  switch (behavior) {
    case Behavior::kRemoved:
      for (const Span& span : spans) {
        if (!span.matches) kept.push_back(span);
      }
      break;
    case Behavior::kContiguous:
      for (const Span& span : spans) see(span, span.matches == before);
      break;
    case Behavior::kWithPrevious:
      for (const Span& span : spans) see(span, span.matches && !before);
      break;
    default:
      for (auto span = spans.rbegin(); span != spans.rend(); ++span) {
        see(*span, span->matches && !before);
      }
      std::reverse(kept.begin(), kept.end());
  }
  return kept;
}

}  // namespace

void Regex::Free::operator()(re_pattern_buffer* regex) const { onig_free(regex); }

Regex::Regex(const std::string& pattern) {
  static const int ready = [] {
    OnigEncoding utf8 = ONIG_ENCODING_UTF8;
    return onig_initialize(&utf8, 1);
  }();
  const auto* begin = reinterpret_cast<const UChar*>(pattern.data());
  OnigErrorInfo info;
  regex_t* regex = nullptr;
  const int code = ready != ONIG_NORMAL
                       ? ready
                       : onig_new(&regex, begin, begin + pattern.size(), ONIG_OPTION_NONE,
                                  ONIG_ENCODING_UTF8, ONIG_SYNTAX_RUBY, &info);
  if (code != ONIG_NORMAL) {
    const std::string_view shown = std::string_view(pattern).substr(0, 200);
    throw Failure{REGATTA_TEXT_BAD_FILE, "text file: the regular expression " +
                                             std::string(shown.substr(0, whole_utf8(shown))) +
                                             " is none: " + onig_message(code, &info)};
  }
  regex_.reset(regex);
}

void Regex::matches(std::string_view text, Retries* retries,
                    const std::function<void(size_t, size_t)>& found) const {
  const std::unique_ptr<OnigRegion, FreeRegion> region(onig_region_new());
  const std::unique_ptr<OnigMatchParam, FreeParam> param(onig_new_match_param());
  if (!region || !param) throw std::bad_alloc();
  onig_initialize_match_param(param.get());
  const auto* begin = reinterpret_cast<const UChar*>(text.data());
  const UChar* const end = begin + text.size();
  size_t at = 0, last = text.npos;  // last: where the last match ended
  const auto searched = [&] {
    for (unsigned long limit = kFreeRetries;; limit *= 4) {
      onig_set_retry_limit_in_match_of_match_param(param.get(), limit);
      onig_set_retry_limit_in_search_of_match_param(param.get(), limit);
      const int code = onig_search_with_param(regex_.get(), begin, end, begin + at, end,
                                              region.get(), ONIG_OPTION_NONE, param.get());
      const bool gave_up =
          code == ONIGERR_RETRY_LIMIT_IN_MATCH_OVER || code == ONIGERR_RETRY_LIMIT_IN_SEARCH_OVER;
      if (!gave_up || !retries->take(limit * 4)) return code;
    }
  };
  while (at <= text.size()) {
    const int code = searched();
    if (code == ONIG_MISMATCH) return;
    if (code < 0) {
      throw Failure{REGATTA_TEXT_FAILED, "a regular expression gave up on a text of " +
                                             std::to_string(text.size()) +
                                             " bytes: " + onig_message(code, nullptr)};
    }
    const size_t from = region->beg[0], to = region->end[0];
    // An empty match right behind another one is none; else the search would stay there.
    if (from == to && to == last) {
      at += at < text.size() ? utf8_step(text.substr(at)).size : 1;
      continue;
    }
    at = last = to;
    found(from, to);
  }
}

Steps::Steps(const std::vector<Step>& steps) : steps_(steps) {
  for (const Step& step : steps) {
    if (step.kind < StepKind::kPrefixSpace) ++num_normalizers_;
    regexes_.push_back(step.kind == StepKind::kSplitRegex ? std::make_unique<Regex>(step.a)
                                                          : nullptr);
  }
}

bool Steps::prepends(const Step& step, bool at_start) {
  const auto scheme = static_cast<Prepend>(step.way);
  return scheme == Prepend::kAlways || (scheme == Prepend::kFirst && at_start);
}

std::string Steps::normalized(std::string_view text, bool at_start) const {
  std::string out(text);
  for (size_t i = 0; i < num_normalizers_ && !out.empty(); ++i) {
    const Step& step = steps_[i];
    if (step.kind == StepKind::kNfc) {
      out = composed(out);
    } else if (step.kind == StepKind::kPrepend) {
      if (prepends(step, at_start)) out.insert(0, step.a);
    } else {
      out = replaced(out, step.a, step.b);
    }
    require_grown(out.size() <= most_grown(text.size()));
  }
  return out;
}

void Steps::cut(std::string_view text, bool at_start, Retries* retries, const Word& word) const {
  size_t left = most_grown(text.size()) * (steps_.size() + 1);
  cut_from(num_normalizers_, text, at_start, {word, retries, left});
}

void Steps::cut_from(size_t index, std::string_view text, bool at_start, const Cutting& to) const {
  if (text.empty()) return;
  require_grown(text.size() <= to.left);
  to.left -= text.size();
  if (index == steps_.size()) return to.word(text);
  const Step& step = steps_[index];
  if (step.kind == StepKind::kPrefixSpace) {
    const bool has = text.substr(0, step.a.size()) == step.a;
    return cut_from(index + 1, has ? text : step.a + std::string(text), at_start, to);
  }
  if (step.kind == StepKind::kMetaspace) {
    std::string out = replaced(text, " ", step.a);
    const bool has = out.compare(0, step.a.size(), step.a) == 0;
    if (!has && prepends(step, at_start)) out.insert(0, step.a);
    if (!step.on) return cut_from(index + 1, out, at_start, to);
    return split(index, out, at_start, to);
  }
  split(index, text, at_start, to);
}

void Steps::split(size_t index, std::string_view text, bool at_start, const Cutting& to) const {
  const Step& step = steps_[index];
  const bool is_metaspace = step.kind == StepKind::kMetaspace;
  const bool inverts = !is_metaspace && step.on;
  std::vector<Span> spans;
  size_t done = 0;
  const auto found = [&](size_t begin, size_t end) {
    if (done != begin) spans.push_back({done, begin, inverts});
    spans.push_back({begin, end, !inverts});
    done = end;
  };
  if (regexes_[index]) {
    regexes_[index]->matches(text, to.retries, found);
  } else {
    for (size_t at; (at = text.find(step.a, done)) != text.npos;) found(at, at + step.a.size());
  }
  if (done != text.size()) spans.push_back({done, text.size(), inverts});
  const auto behavior = is_metaspace ? Behavior::kWithNext : static_cast<Behavior>(step.way);
  for (const Span& span : joined(std::move(spans), behavior)) {
    const std::string_view piece = text.substr(span.begin, span.end - span.begin);
    cut_from(index + 1, piece, at_start && span.begin == 0, to);
  }
}

}  // namespace regatta::text
