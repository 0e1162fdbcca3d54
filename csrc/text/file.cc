// Reads a text file: every size is checked before it is used, and what is behind the end is
// refused.
#include "file.h"

#include <cstring>

#include "utf8.h"

namespace regatta::text {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "text files are little-endian");

class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  [[noreturn]] void fail(const std::string& what) const {
    throw Failure{REGATTA_TEXT_BAD_FILE,
                  std::string("text file: ") + part_ + ": " + what + "; export it again"};
  }
  void require(bool holds, const std::string& what) const {
    if (!holds) fail(what);
  }
  void begin(const char* part) { part_ = part; }

  std::string_view take(uint64_t size) {
    if (size > bytes_.size() - at_) {
      fail("it ends at byte " + std::to_string(bytes_.size()) + ", " +
           std::to_string(size - (bytes_.size() - at_)) + " bytes too early");
    }
    at_ += size;
    return bytes_.substr(at_ - size, size);
  }
  uint32_t u32() {
    uint32_t value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  uint32_t below(uint64_t end, const char* what) {
    const uint32_t value = u32();
    if (value >= end) {
      fail(std::string(what) + " is " + std::to_string(value) + " (allowed: below " +
           std::to_string(end) + ")");
    }
    return value;
  }
  template <class Item>
  std::vector<Item> array(uint32_t count) {
    const std::string_view data = take(uint64_t{count} * sizeof(Item));
    std::vector<Item> items(count);
    if (count > 0) std::memcpy(items.data(), data.data(), data.size());
    return items;
  }
  std::vector<uint32_t> ids(uint32_t count, uint32_t end) {
    std::vector<uint32_t> found = array<uint32_t>(count);
    for (const uint32_t id : found) require(id < end, "id " + std::to_string(id) + " is too high");
    return found;
  }
  // Valid UTF-8 of at most `most` bytes.
  std::string text(uint32_t most) {
    const std::string_view found = take(below(uint64_t{most} + 1, "a text's size"));
    require(whole_utf8(found) == found.size(), "a text is no UTF-8");
    return std::string(found);
  }
  Strings strings(uint32_t count) {
    Strings found;
    found.offsets_ = array<uint32_t>(count + 1);
    require(found.offsets_[0] == 0, "texts do not begin at 0");
    for (size_t i = 0; i < count; ++i) {
      require(found.offsets_[i] <= found.offsets_[i + 1], "texts overlap");
    }
    found.bytes_ = take(found.offsets_[count]);
    return found;
  }
  bool at_end() const { return at_ == bytes_.size(); }

 private:
  std::string_view bytes_;
  size_t at_ = 0;
  const char* part_ = "header";
};

namespace {

constexpr char kMagic[] = "REGATEXT";

Step read_step(Reader& reader) {
  Step step;
  step.kind = static_cast<StepKind>(reader.u32());
  step.way = reader.u32();
  step.on = reader.below(2, "a switch") != 0;
  step.a = reader.text(kMaxPattern);
  step.b = reader.text(kMaxReplacement);
  const bool is_regex = step.kind == StepKind::kSplitRegex;
  reader.require(is_regex || step.a.size() <= kMaxReplacement, "a text is too long");
  uint32_t num_ways = 1;
  switch (step.kind) {
    case StepKind::kNfc:
      return step;
    case StepKind::kSplitRegex:
    case StepKind::kSplitText:
      num_ways = 5;
      break;
    case StepKind::kMetaspace:
    case StepKind::kPrepend:
      num_ways = 3;
      break;
    case StepKind::kReplace:
    case StepKind::kPrefixSpace:
      break;
    default:
      throw Failure{REGATTA_TEXT_UNSUPPORTED,
                    "text file: step " + std::to_string(static_cast<uint32_t>(step.kind)) +
                        " is not known to this library; use the library of the export's version"};
  }
  reader.require(step.way < num_ways, "a step has a way that it does not know");
  reader.require(!step.a.empty(), "a step has no text");
  return step;
}

void read_steps(Reader& reader, File* file) {
  const uint32_t count = reader.below(kMaxSteps + 1, "the number of steps");
  for (uint32_t i = 0; i < count; ++i) {
    file->steps.push_back(read_step(reader));
    reader.require(i == 0 || file->steps[i].kind >= StepKind::kPrefixSpace ||
                       file->steps[i - 1].kind < StepKind::kPrefixSpace,
                   "a step of the normalizer stands behind a cut");
  }
}

void read_added(Reader& reader, uint32_t num_ids, File* file) {
  const uint32_t count = reader.below(num_ids + 1, "the number of added tokens");
  for (uint32_t i = 0; i < count; ++i) {
    Added token;
    token.id = reader.below(num_ids, "an added token's id");
    token.flags = reader.below(32, "an added token's flags");
    token.content = reader.text(kMaxPattern);
    reader.require(!token.content.empty(), "an added token is empty");
    if (i > 0) {
      const Added& before = file->added.back();
      const uint32_t last = before.flags & kNormalized, now = token.flags & kNormalized;
      reader.require(last < now || (last == now && before.content < token.content),
                     "added tokens are not in order");
    }
    file->added.push_back(std::move(token));
  }
}

void read_texts(Reader& reader, uint32_t num_ids, File* file) {
  file->kinds = reader.array<uint8_t>(num_ids);
  file->texts = reader.strings(num_ids);
  for (uint32_t id = 0; id < num_ids; ++id) {
    const uint8_t kind = file->kinds[id] & 127;
    const std::string_view text = file->texts[id];
    const std::string which = "token " + std::to_string(id);
    reader.require(kind <= static_cast<uint8_t>(TextKind::kByte), which + " is of no known kind");
    if (kind == static_cast<uint8_t>(TextKind::kByte)) {
      reader.require(text.size() == 1, which + " is not one byte");
    } else if (!file->is(kByteLevel)) {
      reader.require(whole_utf8(text) == text.size(), which + " is no UTF-8");
    }
  }
}

void read_bpe(Reader& reader, uint32_t num_ids, File* file) {
  reader.begin("words");
  const uint32_t num_words = reader.below(num_ids + 1, "the number of words");
  file->word_ids = reader.ids(num_words, num_ids);
  file->words = reader.strings(num_words);
  for (uint32_t i = 1; i < num_words; ++i) {
    reader.require(file->words[i - 1] < file->words[i], "words are not in order");
  }
  reader.begin("merges");
  const uint32_t num_merges = reader.below(kMaxIds * 4, "the number of merges");
  file->merges = reader.array<Merge>(num_merges);
  for (uint32_t i = 0; i < num_merges; ++i) {
    const Merge& merge = file->merges[i];
    reader.require(merge.left < num_ids && merge.right < num_ids && merge.id < num_ids,
                   "a merge has an id that is too high");
    if (i == 0) continue;
    const Merge& before = file->merges[i - 1];
    reader.require(
        before.left < merge.left || (before.left == merge.left && before.right < merge.right),
        "merges are not in order");
  }
}

}  // namespace

File read_file(std::string_view bytes) {
  Reader reader(bytes);
  reader.require(bytes.size() <= kMaxFileBytes, "it has " + std::to_string(bytes.size()) +
                                                    " bytes (allowed: at most " +
                                                    std::to_string(kMaxFileBytes) + ")");
  reader.require(reader.take(8) == std::string_view(kMagic, 8), "it is none: it does not begin so");
  const uint32_t version = reader.u32();
  if (version != kFileVersion) {
    throw Failure{REGATTA_TEXT_UNSUPPORTED,
                  "text file: version " + std::to_string(version) + " (this library reads " +
                      std::to_string(kFileVersion) + "); export it again, or use its library"};
  }
  File file;
  reader.below(1, "the model");
  const uint32_t size = reader.u32();
  reader.require(size == bytes.size(), "it has " + std::to_string(bytes.size()) + " bytes of " +
                                           std::to_string(size) + ", so it was cut or joined");
  const uint32_t num_ids = reader.below(kMaxIds + 1, "the number of ids");
  file.flags = reader.below(32, "the flags");
  file.strip = reader.below(kMaxReplacement, "the number of stripped spaces");
  file.bare_start = reader.below(2, "a switch") != 0;
  const uint32_t unknown = reader.u32();
  reader.require(unknown == UINT32_MAX || unknown < num_ids, "the unknown token has no such id");
  file.unknown = unknown == UINT32_MAX ? -1 : int64_t{unknown};
  reader.begin("ids around a text");
  for (std::vector<uint32_t>* end : {&file.first, &file.last}) {
    *end = reader.ids(reader.below(kMaxReplacement, "their number"), num_ids);
  }
  reader.begin("steps");
  read_steps(reader, &file);
  reader.begin("added tokens");
  read_added(reader, num_ids, &file);
  reader.begin("texts of ids");
  read_texts(reader, num_ids, &file);
  read_bpe(reader, num_ids, &file);
  reader.require(reader.at_end(), "bytes follow the end");
  return file;
}

}  // namespace regatta::text
