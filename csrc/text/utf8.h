// UTF-8: where a character ends, and which bytes make none.
#pragma once

#include <cstdint>
#include <string_view>

namespace regatta::text {

inline constexpr char kReplacement[] = "\xEF\xBF\xBD";

enum class Utf8 { kWhole, kBroken, kCut };  // kCut: more bytes could make it a character

struct Utf8Step {
  Utf8 what;
  size_t size;  // of the character, or of the longest start of one that is replaced together
};

// The first character of `bytes`, which are not empty (Unicode 15, table 3-7).
inline Utf8Step utf8_step(std::string_view bytes) {
  const auto at = [&](size_t i) { return static_cast<uint8_t>(bytes[i]); };
  const uint8_t lead = at(0);
  if (lead < 0x80) return {Utf8::kWhole, 1};
  if (lead < 0xC2 || lead > 0xF4) return {Utf8::kBroken, 1};
  const size_t size = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  for (size_t i = 1; i < size; ++i, low = 0x80, high = 0xBF) {
    if (i == bytes.size()) return {Utf8::kCut, i};
    if (at(i) < low || at(i) > high) return {Utf8::kBroken, i};
  }
  return {Utf8::kWhole, size};
}

// The number of bytes in front of the first that is in no whole character.
inline size_t whole_utf8(std::string_view bytes) {
  size_t done = 0;
  while (done < bytes.size()) {
    const Utf8Step step = utf8_step(bytes.substr(done));
    if (step.what != Utf8::kWhole) break;
    done += step.size;
  }
  return done;
}

// Of valid UTF-8, which is not empty.
inline uint32_t first_code_point(std::string_view text) {
  const auto at = [&](size_t i) { return static_cast<uint32_t>(static_cast<uint8_t>(text[i])); };
  const uint32_t lead = at(0);
  if (lead < 0x80) return lead;
  if (lead < 0xE0) return (lead & 0x1F) << 6 | (at(1) & 0x3F);
  if (lead < 0xF0) return (lead & 0x0F) << 12 | (at(1) & 0x3F) << 6 | (at(2) & 0x3F);
  return (lead & 7) << 18 | (at(1) & 0x3F) << 12 | (at(2) & 0x3F) << 6 | (at(3) & 0x3F);
}

// Unicode's White_Space.
inline bool is_space(uint32_t c) {
  return (c >= 9 && c <= 13) || c == 32 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

// Bytes of white space at the start of valid UTF-8.
inline size_t spaces_at_start(std::string_view text) {
  size_t done = 0;
  while (done < text.size() && is_space(first_code_point(text.substr(done)))) {
    done += utf8_step(text.substr(done)).size;
  }
  return done;
}

inline size_t last_character(std::string_view text) {
  size_t start = text.size();
  do {
    --start;
  } while (start > 0 && (static_cast<uint8_t>(text[start]) & 0xC0) == 0x80);
  return start;
}

inline size_t spaces_at_end(std::string_view text) {
  size_t end = text.size();
  while (end > 0) {
    const size_t start = last_character(text.substr(0, end));
    if (!is_space(first_code_point(text.substr(start)))) break;
    end = start;
  }
  return text.size() - end;
}

}  // namespace regatta::text
