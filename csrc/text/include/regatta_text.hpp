// RAII over regatta_text.h: handles that close themselves, errors as exceptions of the caller's.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "regatta_text.h"

namespace regatta {

struct TextError : std::runtime_error {
  explicit TextError(regatta_text_status code)
      : std::runtime_error(regatta_text_error()), status(code) {}
  regatta_text_status status;
};

inline void check_text(regatta_text_status status) {
  if (status != REGATTA_TEXT_OK) throw TextError(status);
}

// Pieces of whole UTF-8, which join to the text of all ids.
class TextStream {
 public:
  std::string_view add(const int32_t* ids, size_t num_ids) {
    const char* piece;
    size_t size;
    check_text(regatta_text_stream_add(stream_.get(), ids, num_ids, &piece, &size));
    return {piece, size};
  }
  std::string_view add(int32_t id) { return add(&id, 1); }
  std::string_view finish() {
    const char* piece;
    size_t size;
    check_text(regatta_text_stream_finish(stream_.get(), &piece, &size));
    return {piece, size};
  }

 private:
  friend class Text;
  struct Close {
    void operator()(regatta_text_stream* stream) const { regatta_text_stream_close(stream); }
  };
  explicit TextStream(regatta_text_stream* stream) : stream_(stream) {}
  std::unique_ptr<regatta_text_stream, Close> stream_;
};

class Text {
 public:
  explicit Text(const std::string& path) {
    regatta_text* text = nullptr;
    check_text(regatta_text_open(path.c_str(), &text));
    text_.reset(text);
  }
  int32_t num_ids() const { return regatta_text_num_ids(text_.get()); }
  std::vector<int32_t> encode(std::string_view utf8,
                              uint32_t flags = REGATTA_TEXT_ADD_SPECIAL) const {
    std::vector<int32_t> ids(utf8.size() / 2 + 16);
    return filled(ids, [&](size_t* count) {
      return regatta_text_encode(text_.get(), utf8.data(), utf8.size(), flags, ids.data(),
                                 ids.size(), count);
    });
  }
  std::string decode(const std::vector<int32_t>& ids,
                     uint32_t flags = REGATTA_TEXT_SKIP_SPECIAL) const {
    std::string utf8(ids.size() * 8 + 16, '\0');
    return filled(utf8, [&](size_t* size) {
      return regatta_text_decode(text_.get(), ids.data(), ids.size(), flags, utf8.data(),
                                 utf8.size(), size);
    });
  }
  TextStream stream(const std::vector<int32_t>& prompt_ids = {},
                    uint32_t flags = REGATTA_TEXT_SKIP_SPECIAL) const {
    regatta_text_stream* stream = nullptr;
    check_text(regatta_text_stream_open(text_.get(), prompt_ids.data(), prompt_ids.size(), flags,
                                        &stream));
    return TextStream(stream);
  }

 private:
  struct Close {
    void operator()(regatta_text* text) const { regatta_text_close(text); }
  };
  template <class Buffer, class Call>
  static Buffer filled(Buffer& buffer, Call call) {
    size_t count = 0;
    regatta_text_status status = call(&count);
    if (status == REGATTA_TEXT_TOO_SMALL) {
      buffer.resize(count);
      status = call(&count);
    }
    check_text(status);
    buffer.resize(count);
    return std::move(buffer);
  }
  std::unique_ptr<regatta_text, Close> text_;
};

}  // namespace regatta
