// Whether a folder's files are those that the export wrote.
#include <algorithm>
#include <atomic>
#include <exception>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "model/folder.h"
#include "model/network.h"
#include "model/sha256.h"

namespace regatta::model {
namespace {

struct Part {
  std::string_view bytes;
  const std::string* wanted;
  const FolderFile* file;
};

constexpr std::string_view kDigestKey = " \"digest\": \"";
constexpr size_t kDigits = 64;

// The last line of regatta.json has the digest of all bytes ahead of it.
Status verify_json(const std::string& path, std::string_view text) {
  const size_t at = text.rfind(kDigestKey);
  if (at == std::string_view::npos || text.size() < at + kDigestKey.size() + kDigits) {
    return Status::error(path + " has no digest at its end; copy it again");
  }
  const std::string_view wanted = text.substr(at + kDigestKey.size(), kDigits);
  if (text.substr(at + kDigestKey.size() + kDigits) == "\"\n}\n" &&
      sha256(text.substr(0, at)) == wanted) {
    return {};
  }
  return Status::error(path + " was edited or damaged: its digest is another one; copy it again");
}

// The number of the first part that has another digest; parts.size() where none has.
size_t first_wrong(const std::vector<Part>& parts) {
  std::atomic<size_t> next{0}, wrong{parts.size()};
  const auto work = [&] {
    for (size_t i = next++; i < parts.size(); i = next++) {
      if (sha256(parts[i].bytes) == *parts[i].wanted) continue;
      size_t before = wrong;
      while (i < before && !wrong.compare_exchange_weak(before, i)) {
      }
    }
  };
  const size_t most = std::max(1u, std::min(16u, std::thread::hardware_concurrency()));
  std::vector<std::thread> others;
  try {
    while (others.size() + 1 < std::min(most, parts.size())) others.emplace_back(work);
  } catch (const std::exception&) {
    // The threads that there are do the work.
  }
  work();
  for (std::thread& each : others) each.join();
  return wrong;
}

}  // namespace

Status verify(const std::string& path) {
  try {
    MappedFile text;
    const std::string own = path + "/" + kFolderFile;
    REGATTA_RETURN_IF_ERROR(MappedFile::open(own, INT64_MAX, &text));
    REGATTA_RETURN_IF_ERROR(verify_json(own, text.bytes()));
    Folder folder;
    REGATTA_RETURN_IF_ERROR(read_folder(path, &folder));
    std::vector<MappedFile> files(folder.listed.size());
    std::vector<Part> parts;
    for (size_t i = 0; i < files.size(); ++i) {
      const FolderFile& listed = folder.listed[i];
      REGATTA_RETURN_IF_ERROR(MappedFile::open(path + "/" + listed.name, INT64_MAX, &files[i]));
      for (size_t part = 0; part < listed.sha256.size(); ++part) {
        const std::string_view bytes = files[i].bytes();
        const size_t at = std::min(bytes.size(), part * static_cast<size_t>(kDigestBytes));
        parts.push_back(
            {bytes.substr(at, static_cast<size_t>(kDigestBytes)), &listed.sha256[part], &listed});
      }
    }
    const size_t wrong = first_wrong(parts);
    if (wrong == parts.size()) return {};
    return Status::error(path + "/" + parts[wrong].file->name +
                         " was edited or damaged: its digest is another one; copy it again");
  } catch (const std::exception& error) {
    return Status::error(path + " cannot be verified: " + error.what());
  }
}

}  // namespace regatta::model
