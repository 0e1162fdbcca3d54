// Files that are mapped, and the tensors of safetensors files in them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "regatta/types.h"

namespace regatta::model {

// A whole file, read only. Memory stays where it is when this moves.
class MappedFile {
 public:
  MappedFile() = default;
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  // A regular file of at most so many bytes.
  static Status open(const std::string& path, int64_t most, MappedFile* file);

  std::string_view bytes() const { return {data_, size_}; }

 private:
  const char* data_ = nullptr;
  size_t size_ = 0;
};

constexpr int64_t kAlignment = 64;  // of each tensor in its file
// Names of tensors that fill up to the next multiple begin so.
constexpr std::string_view kPadding = "padding.";
inline bool is_padding(std::string_view name) {
  return name.substr(0, kPadding.size()) == kPadding;
}

// Adds the tensors of a safetensors file to `tensors`, as they lie in `bytes`. Names file and
// tensor where a header is cut, edited, overlaps, or leaves bytes to nobody; where a name is there
// already; where a tensor does not begin at a multiple of kAlignment, or has a dtype or a rank that
// no operator takes.
Status read_safetensors(const std::string& path, std::string_view bytes,
                        std::map<std::string, TensorView>* tensors);

}  // namespace regatta::model
