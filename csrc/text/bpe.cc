#include "bpe.h"

#include <algorithm>
#include <cstdio>
#include <queue>

#include "utf8.h"

namespace regatta::text {

namespace {

// A token of a word while its neighbours are merged. end: what stands in `next` of the last.
struct Symbol {
  uint32_t id;
  uint32_t before, next;
  bool gone;
};
constexpr uint32_t kEnd = UINT32_MAX;

struct Candidate {
  uint32_t rank, at, id;
  bool operator<(const Candidate& other) const {  // the top of a queue is its greatest
    return rank != other.rank ? rank > other.rank : at > other.at;
  }
};

}  // namespace

Bpe::Bpe(const File& file) : file_(file), first_(file.kinds.size() + 1) {
  for (const Merge& merge : file.merges) ++first_[merge.left + 1];
  for (size_t i = 1; i < first_.size(); ++i) first_[i] += first_[i - 1];
  for (int byte = 0; byte < 256; ++byte) {
    const char letter = static_cast<char>(byte);
    char code[8];
    std::snprintf(code, sizeof code, "<0x%02X>", byte);
    single_[byte] = find(std::string_view(&letter, 1));
    byte_tokens_[byte] = find(code);
  }
}

int64_t Bpe::find(std::string_view word) const {
  size_t low = 0, high = file_.words.size();
  while (low < high) {
    const size_t middle = (low + high) / 2;
    const int order = file_.words[middle].compare(word);
    if (order == 0) return file_.word_ids[middle];
    if (order < 0) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return -1;
}

const Merge* Bpe::merge_of(uint32_t left, uint32_t right) const {
  const auto begin = file_.merges.begin() + first_[left],
             end = file_.merges.begin() + first_[left + 1];
  const auto found = std::lower_bound(
      begin, end, right, [](const Merge& merge, uint32_t id) { return merge.right < id; });
  return found == end || found->right != right ? nullptr : &*found;
}

// The tokens of single characters, or bytes. What no token is becomes byte tokens, else the unknown
// token, else nothing.
std::vector<uint32_t> Bpe::units(std::string_view word) const {
  std::vector<uint32_t> found;
  found.reserve(word.size());
  bool holds_unknown = false;  // one is due
  const auto put_unknown = [&] {
    if (holds_unknown) found.push_back(static_cast<uint32_t>(file_.unknown));
    holds_unknown = false;
  };
  for (size_t at = 0, size; at < word.size(); at += size) {
    size = file_.is(kByteLevel) ? 1 : utf8_step(word.substr(at)).size;
    const std::string_view unit = word.substr(at, size);
    const int64_t id = size == 1 ? single_[static_cast<uint8_t>(unit[0])] : find(unit);
    if (id >= 0) {
      put_unknown();
      found.push_back(static_cast<uint32_t>(id));
      continue;
    }
    const auto byte_token = [&](char byte) { return byte_tokens_[static_cast<uint8_t>(byte)]; };
    if (file_.is(kByteFallback) &&
        std::all_of(unit.begin(), unit.end(), [&](char byte) { return byte_token(byte) >= 0; })) {
      for (const char byte : unit) found.push_back(static_cast<uint32_t>(byte_token(byte)));
      continue;
    }
    if (file_.unknown < 0) continue;
    if (!file_.is(kFuseUnknown)) put_unknown();
    holds_unknown = true;
  }
  put_unknown();
  return found;
}

void Bpe::encode(std::string_view word, std::vector<int32_t>* ids) const {
  if (file_.is(kIgnoreMerges)) {
    const int64_t id = find(word);
    if (id >= 0) return ids->push_back(static_cast<int32_t>(id));
  }
  const std::vector<uint32_t> tokens = units(word);
  const auto size = static_cast<uint32_t>(tokens.size());
  std::vector<Symbol> symbols(size);
  std::vector<Candidate> heap;
  const auto candidate = [&](uint32_t at) -> const Merge* {
    return merge_of(symbols[at].id, symbols[symbols[at].next].id);
  };
  for (uint32_t i = 0; i < size; ++i) {
    symbols[i] = {tokens[i], i == 0 ? kEnd : i - 1, i + 1 == size ? kEnd : i + 1, false};
  }
  for (uint32_t i = 0; i + 1 < size; ++i) {
    if (const Merge* merge = candidate(i)) heap.push_back({merge->rank, i, merge->id});
  }
  std::priority_queue<Candidate> queue(std::less<Candidate>(), std::move(heap));
  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    Symbol& left = symbols[top.at];
    if (left.gone || left.next == kEnd) continue;
    const Merge* now = candidate(top.at);
    if (!now || now->id != top.id) continue;  // a neighbour was merged away meanwhile
    Symbol& right = symbols[left.next];
    left.id = top.id;
    left.next = right.next;
    right.gone = true;
    if (left.next != kEnd) symbols[left.next].before = top.at;
    for (const uint32_t at : {left.before, top.at}) {
      if (at == kEnd || symbols[at].next == kEnd) continue;
      if (const Merge* merge = candidate(at)) queue.push({merge->rank, at, merge->id});
    }
  }
  for (const Symbol& symbol : symbols) {
    if (!symbol.gone) ids->push_back(static_cast<int32_t>(symbol.id));
  }
}

}  // namespace regatta::text
