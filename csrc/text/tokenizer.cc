#include "tokenizer.h"

#include <algorithm>

#include "utf8.h"

namespace regatta::text {

namespace {

// Rust's \w, which tokenizers looks for around added tokens with single_word.
constexpr char kWordCharacter[] = R"(\A[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\x{200C}\x{200D}])";

size_t count_raw(const std::vector<Added>& added) {
  return std::count_if(added.begin(), added.end(),
                       [](const Added& token) { return !(token.flags & kNormalized); });
}

}  // namespace

Tokenizer::Tokenizer(File file)
    : file_(std::move(file)),
      num_raw_(count_raw(file_.added)),
      steps_(file_.steps),
      bpe_(file_),
      word_(kWordCharacter) {}

// The longest added token that the text begins with, null for none. Tokens are in the order of
// their bytes: those that share a start stand together, and each byte narrows them down.
const Added* Tokenizer::added_at(std::string_view text, bool normalized) const {
  auto begin = file_.added.begin() + (normalized ? num_raw_ : 0);
  auto end = normalized ? file_.added.end() : file_.added.begin() + num_raw_;
  const Added* found = nullptr;
  for (size_t i = 0; i < text.size() && begin != end; ++i) {
    const auto byte = static_cast<uint8_t>(text[i]);
    const auto at = [i](const Added& token) { return static_cast<uint8_t>(token.content[i]); };
    begin = std::partition_point(
        begin, end, [&](const Added& t) { return t.content.size() <= i || at(t) < byte; });
    end = std::partition_point(begin, end, [&](const Added& t) { return at(t) == byte; });
    if (begin != end && begin->content.size() == i + 1) found = &*begin;
  }
  return found;
}

std::vector<Tokenizer::Part> Tokenizer::parts(std::string_view text, bool normalized,
                                              bool literal) const {
  std::vector<Part> found;
  const auto is_word = [&](std::string_view character) {
    bool matches = false;
    Retries retries(character.size());
    word_.matches(character, &retries, [&](size_t, size_t) { matches = true; });
    return matches;
  };
  size_t done = 0, run_end = 0;  // run_end: where the spaces behind an added token last ended
  for (size_t at = 0; at < text.size();) {
    const Added* const token = added_at(text.substr(at), normalized);
    if (!token) {
      ++at;
      continue;
    }
    size_t begin = at, end = at + token->content.size();
    at = end;  // whether it counts or not
    if (literal && (token->flags & kSpecial)) continue;
    if (token->flags & kSingleWord) {
      const std::string_view before = text.substr(0, begin), behind = text.substr(end);
      if (!before.empty() && is_word(before.substr(last_character(before)))) continue;
      if (!behind.empty() && is_word(behind.substr(0, utf8_step(behind).size))) continue;
    }
    if (token->flags & kLeft) {
      begin = begin < done ? done : begin - spaces_at_end(text.substr(done, begin - done));
    }
    if (token->flags & kRight) {
      run_end = std::max(run_end, end);
      end = run_end += spaces_at_start(text.substr(run_end));
    }
    if (done < begin) found.push_back({text.substr(done, begin - done), -1});
    found.push_back({text.substr(begin, end - begin), token->id});
    done = end;
  }
  if (done < text.size()) found.push_back({text.substr(done), -1});
  return found;
}

void Tokenizer::encode_plain(std::string_view text, bool at_start, Retries* retries,
                             std::vector<int32_t>* ids) const {
  steps_.cut(text, at_start, retries, [&](std::string_view word) { bpe_.encode(word, ids); });
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, bool add_special,
                                       bool literal) const {
  std::vector<int32_t> ids;
  Retries retries(text.size());
  if (add_special) ids.assign(file_.first.begin(), file_.first.end());
  for (const Part& part : parts(text, false, literal)) {
    if (part.id >= 0) {
      ids.push_back(static_cast<int32_t>(part.id));
      continue;
    }
    const bool is_first = part.text.data() == text.data();
    const std::string normal = steps_.normalized(part.text, is_first);
    for (const Part& inner : parts(normal, true, literal)) {
      const bool at_start = is_first && inner.text.data() == normal.data();
      if (inner.id >= 0) {
        ids.push_back(static_cast<int32_t>(inner.id));
      } else {
        encode_plain(inner.text, at_start, &retries, &ids);
      }
    }
  }
  if (add_special) ids.insert(ids.end(), file_.last.begin(), file_.last.end());
  return ids;
}

}  // namespace regatta::text
