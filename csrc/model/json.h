// Values of a JSON file, each with its place in it: what is wrong first is kept as a status that
// names file and key. Nothing throws.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "regatta/types.h"

namespace regatta::model {

using Json = nlohmann::json;

// Of `text`, a file's; an error where it is no JSON, or an object has a key twice.
Status parse_json(std::string_view text, const std::string& file, Json* json);

// "a" for messages, whatever it holds.
std::string in_quotes(std::string_view text);

class JsonValue {
 public:
  // status: where the first complaint goes; it and the value outlive this.
  JsonValue(const Json* value, std::string place, Status* status)
      : value_(value), place_(std::move(place)), status_(status) {}

  const std::string& place() const { return place_; }
  bool is_null() const { return value_->is_null(); }
  bool ok() const { return status_->ok(); }
  const Status& status() const { return *status_; }
  void fail(const std::string& what) const {
    if (ok()) *status_ = Status::error(place_ + " " + what);
  }

  // Each gives something harmless where it fails.
  int64_t number(int64_t low, int64_t high) const;
  double real() const;  // finite
  bool flag() const;
  std::string text(size_t most = 1 << 20) const;
  // The number of the one of `names` that it is.
  int one_of(std::initializer_list<const char*> names) const;
  std::vector<JsonValue> list(size_t most = 1 << 20) const;
  // Of numbers alone.
  std::vector<int64_t> numbers(int64_t low, int64_t high, size_t most = 1 << 20) const;
  // An object's keys and values.
  std::vector<std::pair<std::string, JsonValue>> items() const;

  // The value of a key that must be there.
  JsonValue at(const char* key) const;
  bool has(const char* key) const;
  // An object has no other keys than these.
  void check_keys(std::initializer_list<const char*> known) const;

 private:
  JsonValue null(const char* key) const;
  void expect(const char* what) const { fail(std::string("is ") + shown() + ", expected " + what); }
  std::string shown() const;

  const Json* value_;
  std::string place_;
  Status* status_;
};

}  // namespace regatta::model
