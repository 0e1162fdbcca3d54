// The text of a record, read into its fields (record_parts.h and csrc/blocks/<kind>/record.h have
// a take() for each record).
#pragma once

#include <algorithm>
#include <charconv>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "regatta/kv_format.h"
#include "regatta/record_parts.h"
#include "regatta/scheme.h"

namespace regatta::runtime {

inline Status parse(std::string_view name, SchemeId* scheme) {
  if (parse_scheme(std::string(name).c_str(), scheme)) return {};
  return Status::error("scheme '" + std::string(name) + "' is not known (known: " +
                       scheme_names([](const SchemeInfo&) { return true; }) + ")");
}

inline Status parse(std::string_view name, KvFormat* format) {
  if (parse_kv_format(std::string(name).c_str(), format)) return {};
  std::string known;
  for (const KvFormatInfo& info : kKvFormats)
    known += (known.empty() ? "" : ", ") + std::string(info.name);
  return Status::error("kv_format is \"" + std::string(name) + "\" (allowed: " + known + ")");
}

// One "name=value", offered to the fields of a record until one takes it.
class Setting {
 public:
  // record: which has the fields, and a dot, if it is one within a block.
  Setting(std::string_view name, std::string_view value, std::string record = "")
      : record_(std::move(record)), name_(name), value_(value) {}

  // What was wrong: no field of that name, or its value.
  Status status() const {
    if (is_taken_) return status_;
    return Status::error("blocks: '" + record_ + std::string(name_) +
                         "' is no field (allowed: " + offered_ + ")");
  }

  template <class T>
  void field(std::string_view name, T* to) {
    if (is_taken_) return;
    if constexpr (std::is_class_v<T>) {
      within(name, to);
    } else {
      offered_ += (offered_.empty() ? "" : ", ") + record_ + std::string(name);
      if (name != name_) return;
      is_taken_ = true;
      read(to);
    }
  }

 private:
  // The fields of a record that is a field.
  template <class Record>
  void within(std::string_view name, Record* to) {
    const size_t size = name.size();
    if (name_.size() <= size || name_.substr(0, size) != name || name_[size] != '.') {
      offered_ += (offered_.empty() ? "" : ", ") + std::string(name) + ".*";
      return;
    }
    Setting inner(name_.substr(size + 1), value_, std::string(name) + ".");
    take(to, inner);
    if constexpr (std::is_same_v<Record, Norm>) to->is_there = true;
    status_ = inner.status();
    is_taken_ = true;
  }

  template <class T>
  void number(T* to) {
    const char* end = value_.data() + value_.size();
    const auto [last, error] = std::from_chars(value_.data(), end, *to);
    if (error != std::errc() || last != end) refuse("a number");
  }
  void read(int64_t* to) {
    number(to);
    // Products of a few sizes fit into 64 bits.
    constexpr int64_t kMost = int64_t{1} << 28;
    if (status_.ok() && (*to < -kMost || *to > kMost)) refuse("up to " + std::to_string(kMost));
  }
  void read(float* to) { number(to); }
  void read(bool* to) {
    if (value_ != "0" && value_ != "1") refuse("0 or 1");
    *to = value_ == "1";
  }
  void read(SchemeId* to) { status_ = parse(value_, to); }
  void read(KvFormat* to) { status_ = parse(value_, to); }
  template <class Choice>
  void read(Choice* to) {
    std::string allowed;
    int count = 0;
    for (const char* name : names_of(*to)) {
      if (value_ == name) return void(*to = static_cast<Choice>(count));
      ++count;
      allowed += (allowed.empty() ? "" : ", ") + std::string(name);
    }
    refuse(allowed);
  }

  void refuse(const std::string& allowed) {
    status_ = Status::error("blocks: " + record_ + std::string(name_) + " is '" +
                            std::string(value_) + "' (allowed: " + allowed + ")");
  }

  std::string record_;
  std::string_view name_, value_;
  std::string offered_;
  bool is_taken_ = false;
  Status status_;
};

// The part of `text` up to `separator`, taken off it.
inline std::string_view next_part(std::string_view* text, char separator) {
  const size_t end = std::min(text->find(separator), text->size());
  const std::string_view part = text->substr(0, end);
  text->remove_prefix(std::min(end + 1, text->size()));
  return part;
}

inline Status check_intermediate_size(int64_t size) {
  if (size >= 1) return {};
  return Status::error("blocks: intermediate_size is " + std::to_string(size) +
                       " (allowed: 1 and more)");
}

template <class Record>
Status read_fields(std::string_view fields, Record* record) {
  while (!fields.empty()) {
    const std::string_view part = next_part(&fields, ' ');
    const size_t equals = part.find('=');
    if (equals == std::string_view::npos) {
      return Status::error("blocks: '" + std::string(part) + "' is no field (allowed: name=value)");
    }
    Setting setting(part.substr(0, equals), part.substr(equals + 1));
    take(record, setting);
    REGATTA_RETURN_IF_ERROR(setting.status());
  }
  return {};
}

}  // namespace regatta::runtime
