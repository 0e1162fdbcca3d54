#include "api/tokenizer.h"

#include <string>
#include <utility>

#include "api/border.h"

namespace regatta::api {
namespace {

constexpr int kTooSmall = REGATTA_TOO_SMALL;
constexpr size_t kMost = size_t{1} << 28;  // ids or bytes of one text

Status error_of(const regatta_tokenizer& table, const char* what) {
  const char* said = table.error();
  return Status::error(std::string("the tokenizer cannot ") + what + ": " +
                       (said != nullptr ? said : "it does not say why"));
}

// Calls with room for what is expected, and again where that was too little.
template <class Items, class Call>
Status filled(const regatta_tokenizer& table, const char* what, Items* items, Call call) {
  for (int attempt = 0;; ++attempt) {
    size_t count = 0;
    const int status = call(&count);
    if (status == 0 && count <= items->size()) {
      items->resize(count);
      return {};
    }
    if (status != kTooSmall || attempt == 1 || count > kMost) return error_of(table, what);
    items->resize(count);
  }
}

class Stream final : public engine::TextStream {
 public:
  Stream(const regatta_tokenizer& table, void* stream) : table_(table), stream_(stream) {}
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() override { table_.stream_close(stream_); }

  Status add(int32_t id, std::string* piece, std::string* pending) override {
    regatta_string found = {nullptr, 0}, left = {nullptr, 0};
    if (table_.stream_add(stream_, id, &found, &left) != 0) {
      return error_of(table_, "give the text of an id");
    }
    take(found, piece);
    take(left, pending);
    return {};
  }

  Status finish(std::string* piece) override {
    regatta_string found = {nullptr, 0};
    if (table_.stream_finish(stream_, &found) != 0) return error_of(table_, "finish a text");
    take(found, piece);
    return {};
  }

 private:
  static void take(const regatta_string& given, std::string* to) {
    to->assign(given.size > 0 ? given.data : "", given.size);
  }

  const regatta_tokenizer& table_;  // of the Tokenizer, which an engine keeps
  void* stream_;
};

}  // namespace

Tokenizer::Tokenizer(const regatta_tokenizer& given) : table_(taken(&given, {}, "tokenizer")) {
  require(table_.encode != nullptr && table_.decode != nullptr && table_.stream_open != nullptr &&
              table_.stream_add != nullptr && table_.stream_finish != nullptr &&
              table_.stream_close != nullptr && table_.error != nullptr,
          "a function of the tokenizer is null");
}

Status Tokenizer::encode(const std::string& text, bool add_special,
                         std::vector<int32_t>* ids) const {
  ids->resize(text.size() / 2 + 16);
  return filled(table_, "encode a text", ids, [&](size_t* count) {
    return table_.encode(table_.self, text.data(), text.size(), add_special ? 1 : 0, ids->data(),
                         ids->size(), count);
  });
}

Status Tokenizer::decode(const std::vector<int32_t>& ids, bool skip_special,
                         std::string* text) const {
  text->resize(ids.size() * 8 + 16);
  return filled(table_, "decode ids", text, [&](size_t* size) {
    return table_.decode(table_.self, ids.data(), ids.size(), skip_special ? 1 : 0, text->data(),
                         text->size(), size);
  });
}

Status Tokenizer::stream(const std::vector<int32_t>& prompt_ids,
                         std::unique_ptr<engine::TextStream>* stream) const {
  void* opened = nullptr;
  if (table_.stream_open(table_.self, prompt_ids.data(), prompt_ids.size(), &opened) != 0) {
    return error_of(table_, "open a stream");
  }
  *stream = std::make_unique<Stream>(table_, opened);
  return {};
}

}  // namespace regatta::api
