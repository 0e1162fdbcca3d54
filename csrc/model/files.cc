#include "model/files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>
#include <vector>

#include "model/json.h"

namespace regatta::model {
namespace {

constexpr uint64_t kMaxHeader = 100'000'000;  // bytes: the format's own limit

struct StoredDtype {
  const char* name;
  DType dtype;
};
constexpr StoredDtype kStored[] = {
    {"F32", DType::kFloat32}, {"BF16", DType::kBFloat16}, {"F16", DType::kFloat16},
    {"I8", DType::kInt8},     {"U8", DType::kUInt8},      {"I32", DType::kInt32},
    {"I64", DType::kInt64},
};

struct Part {
  uint64_t begin, end;
  std::string name;
};

// What an entry says, and its view but for the data.
Status read_entry(const JsonValue& entry, Part* part, TensorView* view) {
  entry.check_keys({"dtype", "shape", "data_offsets"});
  const std::string dtype = entry.at("dtype").text(16);
  const auto* const stored =
      std::find_if(std::begin(kStored), std::end(kStored),
                   [&](const StoredDtype& each) { return dtype == each.name; });
  if (stored == std::end(kStored)) {
    std::string known;
    for (const StoredDtype& each : kStored)
      known += (known.empty() ? "" : ", ") + std::string(each.name);
    entry.fail("has dtype " + in_quotes(dtype) + " (allowed: " + known + ")");
    return entry.status();
  }
  view->dtype = stored->dtype;
  const std::vector<int64_t> shape =
      entry.at("shape").numbers(0, INT64_MAX, static_cast<size_t>(TensorView::kMaxRank));
  const std::vector<int64_t> offsets = entry.at("data_offsets").numbers(0, INT64_MAX, 2);
  if (offsets.size() != 2) entry.fail("has no two data_offsets");
  REGATTA_RETURN_IF_ERROR(entry.status());
  view->rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), view->shape);
  const bool is_empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
  int64_t bytes = is_empty ? 0 : dtype_size(view->dtype);
  for (const int64_t size : shape) {
    if (!__builtin_mul_overflow(bytes, size, &bytes)) continue;
    entry.fail("has a shape of more bytes than a number holds");
    return entry.status();
  }
  if (offsets[0] > offsets[1] || offsets[1] - offsets[0] != bytes) {
    entry.fail("lies in bytes " + std::to_string(offsets[0]) + " to " + std::to_string(offsets[1]) +
               ", and its shape needs " + std::to_string(bytes));
  }
  part->begin = static_cast<uint64_t>(offsets[0]);
  part->end = static_cast<uint64_t>(offsets[1]);
  return entry.status();
}

}  // namespace

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(const_cast<char*>(data_), size_);
}

Status MappedFile::open(const std::string& path, int64_t most, MappedFile* file) {
  const auto error_text = [](int number) { return std::generic_category().message(number); };
  const auto failed = [&](const std::string& why) {
    return Status::error(path + " cannot be read: " + why);
  };
  // Not one that waits, as a pipe does.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return failed(error_text(errno));
  struct stat found = {};
  const int said = fstat(descriptor, &found) == 0 ? 0 : errno;
  Status status;
  if (said != 0) {
    status = failed(error_text(said));
  } else if (!S_ISREG(found.st_mode)) {
    status = failed("it is no file");
  } else if (found.st_size > most) {
    status = failed("it has " + std::to_string(found.st_size) + " bytes (allowed: up to " +
                    std::to_string(most) + ")");
  } else if (found.st_size > 0) {
    const auto size = static_cast<size_t>(found.st_size);
    void* const data = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (data == MAP_FAILED) {
      status = failed(error_text(errno));
    } else {
      // What is not in memory yet is read in huge pages, where the system has them of files.
      madvise(data, size, MADV_HUGEPAGE);
      MappedFile made;
      made.data_ = static_cast<const char*>(data);
      made.size_ = size;
      *file = std::move(made);
    }
  }
  close(descriptor);
  return status;
}

Status read_safetensors(const std::string& path, std::string_view bytes,
                        std::map<std::string, TensorView>* tensors) {
  const auto broken = [&](const std::string& why) {
    return Status::error(path + " is not a whole safetensors file: " + why + "; copy it again");
  };
  if (bytes.size() < 8) return broken("it has " + std::to_string(bytes.size()) + " bytes");
  uint64_t header = 0;
  for (int i = 7; i >= 0; --i) header = header << 8 | static_cast<unsigned char>(bytes[i]);
  if (header > std::min<uint64_t>(bytes.size() - 8, kMaxHeader)) {
    return broken("its header claims " + std::to_string(header) + " bytes of " +
                  std::to_string(bytes.size()));
  }
  Json json;
  REGATTA_RETURN_IF_ERROR(parse_json(bytes.substr(8, header), "the header of " + path, &json));
  const uint64_t start = 8 + header, end = bytes.size() - start;
  Status status;
  std::vector<Part> parts;
  for (const auto& [name, entry] : JsonValue(&json, path, &status).items()) {
    if (name == "__metadata__") continue;
    Part part{0, 0, name};
    TensorView view;
    REGATTA_RETURN_IF_ERROR(read_entry(entry, &part, &view));
    if (part.end > end) {
      return broken("it has " + std::to_string(end) + " bytes behind its header, and " +
                    in_quotes(name) + " ends at " + std::to_string(part.end));
    }
    if (part.begin != part.end) view.data = bytes.data() + start + part.begin;
    const bool is_aligned = (start + part.begin) % kAlignment == 0;
    if (part.begin != part.end && !is_aligned && !is_padding(name)) {
      return Status::error(path + ": " + in_quotes(name) + " begins at byte " +
                           std::to_string(start + part.begin) + ", no multiple of " +
                           std::to_string(kAlignment) + "; export the folder again");
    }
    if (!tensors->emplace(name, view).second) {
      return Status::error(path + ": " + in_quotes(name) + " is there twice");
    }
    parts.push_back(std::move(part));
  }
  REGATTA_RETURN_IF_ERROR(status);
  std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  uint64_t at = 0;
  for (const Part& part : parts) {
    if (part.begin != at) {
      return broken(in_quotes(part.name) + " begins at byte " + std::to_string(part.begin) +
                    " behind the header, and the tensors ahead of it end at " + std::to_string(at));
    }
    at = part.end;
  }
  if (at == end) return {};
  return broken("its tensors end at byte " + std::to_string(at) + " of " + std::to_string(end) +
                " behind the header");
}

}  // namespace regatta::model
