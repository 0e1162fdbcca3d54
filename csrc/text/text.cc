// The border: nothing throws past it.
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>

#include "stream.h"
#include "tokenizer.h"
#include "utf8.h"

using regatta::text::Failure;
using regatta::text::Stream;
using regatta::text::Tokenizer;

struct regatta_text {
  std::shared_ptr<const Tokenizer> tokenizer;
};

struct regatta_text_stream {
  std::shared_ptr<const Tokenizer> tokenizer;
  Stream stream;
  std::string piece, pending;
};

namespace {

constexpr size_t kMaxMessage = 1024;
thread_local char last_error[kMaxMessage];  // no destructor, and room for it where memory ends

regatta_text_status failed(regatta_text_status status, const char* message) {
  const int size = std::snprintf(last_error, sizeof last_error, "%s", message);
  if (size >= static_cast<int>(sizeof last_error)) {  // a character may have been cut
    const size_t at = regatta::text::last_character({last_error, sizeof last_error - 1});
    if (regatta::text::utf8_step(last_error + at).what == regatta::text::Utf8::kCut) {
      last_error[at] = 0;
    }
  }
  return status;
}

// What `call` returns, and every exception as a status.
template <class Call>
regatta_text_status guarded(Call call) noexcept {
  try {
    call();
    return REGATTA_TEXT_OK;
  } catch (const Failure& failure) {
    return failed(failure.status, failure.message.c_str());
  } catch (const std::bad_alloc&) {
    return failed(REGATTA_TEXT_NO_MEMORY, "there is not enough memory");
  } catch (const std::exception& error) {
    return failed(REGATTA_TEXT_FAILED, error.what());
  }
}

void require(bool holds, const char* message) {
  if (!holds) throw Failure{REGATTA_TEXT_INVALID, message};
}

void check_flags(uint32_t flags, uint32_t allowed) {
  if (flags & ~allowed) {
    throw Failure{REGATTA_TEXT_INVALID, "flags are " + std::to_string(flags) +
                                            " (allowed: bits of " + std::to_string(allowed) + ")"};
  }
}

void check_ids(const int32_t* ids, size_t num_ids) {
  require(ids || num_ids == 0, "ids are null");
  for (size_t i = 0; i < num_ids; ++i) {
    if (ids[i] < 0) {
      throw Failure{REGATTA_TEXT_INVALID, "id " + std::to_string(i) + " is " +
                                              std::to_string(ids[i]) + " (allowed: 0 and above)"};
    }
  }
}

template <class Items, class Item>
void copy_out(const Items& items, Item* target, size_t capacity, size_t* count) {
  *count = items.size();
  if (items.size() > capacity) {
    throw Failure{REGATTA_TEXT_TOO_SMALL, "the result has " + std::to_string(items.size()) +
                                              " items, the buffer room for " +
                                              std::to_string(capacity)};
  }
  if (!items.empty()) std::memcpy(target, items.data(), items.size() * sizeof(Item));
}

std::string content_of(const char* path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path, "rb"), std::fclose);
  const auto fail = [&](const std::string& what) {
    throw Failure{REGATTA_TEXT_BAD_FILE, "cannot read " + std::string(path) + ": " + what};
  };
  if (!file) fail(std::strerror(errno));
  std::string bytes;
  char block[1 << 16];
  while (bytes.size() <= regatta::text::kMaxFileBytes) {  // a larger one is refused as it is read
    const size_t size = std::fread(block, 1, sizeof block, file.get());
    if (size == 0) break;
    bytes.append(block, size);
  }
  if (std::ferror(file.get())) fail(std::strerror(errno));
  return bytes;
}

void open_into(std::string_view bytes, regatta_text** text) {
  *text = new regatta_text{std::make_shared<const Tokenizer>(regatta::text::read_file(bytes))};
}

regatta_text_status give(regatta_text_stream* stream, const char** piece, size_t* size) {
  *piece = stream->piece.data();
  *size = stream->piece.size();
  return REGATTA_TEXT_OK;
}

}  // namespace

uint32_t regatta_text_version(void) { return REGATTA_TEXT_VERSION; }

const char* regatta_text_error(void) { return last_error; }

regatta_text_status regatta_text_open(const char* path, regatta_text** text) {
  return guarded([&] {
    require(path && text, "path or text is null");
    *text = nullptr;
    open_into(content_of(path), text);
  });
}

regatta_text_status regatta_text_read(const void* data, size_t size, regatta_text** text) {
  return guarded([&] {
    require((data || size == 0) && text, "data or text is null");
    *text = nullptr;
    open_into({static_cast<const char*>(data), size}, text);
  });
}

void regatta_text_close(regatta_text* text) { delete text; }

int32_t regatta_text_num_ids(const regatta_text* text) {
  return text ? static_cast<int32_t>(text->tokenizer->file().kinds.size()) : 0;
}

regatta_text_status regatta_text_encode(const regatta_text* text, const char* utf8, size_t size,
                                        uint32_t flags, int32_t* ids, size_t capacity,
                                        size_t* num_ids) {
  return guarded([&] {
    require(text && num_ids && (utf8 || size == 0) && (ids || capacity == 0),
            "an argument is null");
    check_flags(flags, REGATTA_TEXT_ADD_SPECIAL | REGATTA_TEXT_LITERAL);
    const std::string_view given(utf8 ? utf8 : "", size);
    const size_t whole = regatta::text::whole_utf8(given);
    if (whole != size) {
      throw Failure{REGATTA_TEXT_INVALID, "the text is no UTF-8 at byte " + std::to_string(whole)};
    }
    copy_out(text->tokenizer->encode(given, flags & REGATTA_TEXT_ADD_SPECIAL,
                                     flags & REGATTA_TEXT_LITERAL),
             ids, capacity, num_ids);
  });
}

regatta_text_status regatta_text_decode(const regatta_text* text, const int32_t* ids,
                                        size_t num_ids, uint32_t flags, char* utf8, size_t capacity,
                                        size_t* size) {
  return guarded([&] {
    require(text && size && (utf8 || capacity == 0), "an argument is null");
    check_flags(flags, REGATTA_TEXT_SKIP_SPECIAL);
    check_ids(ids, num_ids);
    Stream stream(text->tokenizer->file(), flags & REGATTA_TEXT_SKIP_SPECIAL);
    std::string out;
    for (size_t i = 0; i < num_ids; ++i) stream.add(ids[i], &out);
    stream.finish(&out);
    copy_out(out, utf8, capacity, size);
  });
}

regatta_text_status regatta_text_stream_open(const regatta_text* text, const int32_t* prompt_ids,
                                             size_t num_prompt_ids, uint32_t flags,
                                             regatta_text_stream** stream) {
  return guarded([&] {
    require(text && stream, "an argument is null");
    *stream = nullptr;
    check_flags(flags, REGATTA_TEXT_SKIP_SPECIAL);
    check_ids(prompt_ids, num_prompt_ids);
    auto made = std::unique_ptr<regatta_text_stream>(
        new regatta_text_stream{text->tokenizer,
                                Stream(text->tokenizer->file(), flags & REGATTA_TEXT_SKIP_SPECIAL),
                                {},
                                {}});
    for (size_t i = 0; i < num_prompt_ids; ++i) made->stream.add(prompt_ids[i], &made->piece);
    made->stream.begin_output();
    made->piece.clear();
    *stream = made.release();
  });
}

regatta_text_status regatta_text_stream_add(regatta_text_stream* stream, const int32_t* ids,
                                            size_t num_ids, const char** piece, size_t* size) {
  return guarded([&] {
    require(stream && piece && size, "an argument is null");
    check_ids(ids, num_ids);
    stream->piece.clear();
    for (size_t i = 0; i < num_ids; ++i) stream->stream.add(ids[i], &stream->piece);
    give(stream, piece, size);
  });
}

regatta_text_status regatta_text_stream_finish(regatta_text_stream* stream, const char** piece,
                                               size_t* size) {
  return guarded([&] {
    require(stream && piece && size, "an argument is null");
    stream->piece.clear();
    stream->stream.finish(&stream->piece);
    give(stream, piece, size);
  });
}

regatta_text_status regatta_text_stream_pending(regatta_text_stream* stream, const char** text,
                                                size_t* size) {
  return guarded([&] {
    require(stream && text && size, "an argument is null");
    stream->pending.clear();
    stream->stream.pending(&stream->pending);
    *text = stream->pending.data();
    *size = stream->pending.size();
  });
}

void regatta_text_stream_close(regatta_text_stream* stream) { delete stream; }
