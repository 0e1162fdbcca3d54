// A caller's tokenizer (regatta.h) as an engine takes one.
#pragma once

#include <memory>

#include "engine/text.h"
#include "regatta.h"

namespace regatta::api {

// Throws Failure for a table without one of its functions.
class Tokenizer final : public engine::Text {
 public:
  explicit Tokenizer(const regatta_tokenizer& given);

  Status encode(const std::string& text, std::vector<int32_t>* ids) const override {
    return encode(text, false, ids);
  }
  Status decode(const std::vector<int32_t>& ids, bool skip_special,
                std::string* text) const override;
  Status stream(const std::vector<int32_t>& prompt_ids,
                std::unique_ptr<engine::TextStream>* stream) const override;

  Status encode(const std::string& text, bool add_special, std::vector<int32_t>* ids) const;

 private:
  regatta_tokenizer table_;
};

}  // namespace regatta::api
