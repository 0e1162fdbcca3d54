#include "model/json.h"

#include <algorithm>
#include <cmath>

namespace regatta::model {
namespace {

constexpr size_t kMaxShown = 100;  // characters of a value from a file
constexpr int kMaxDepth = 64;

const Json& null_json() {
  static const Json* const null = new Json;
  return *null;
}

}  // namespace

std::string in_quotes(std::string_view text) {
  std::string shown = "\"";
  for (const char c : text.substr(0, kMaxShown)) {
    const auto byte = static_cast<unsigned char>(c);
    shown += byte < 0x20 || byte >= 0x7f ? '?' : c;
  }
  return shown + (text.size() > kMaxShown ? "...\"" : "\"");
}

Status parse_json(std::string_view text, const std::string& file, Json* json) {
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  std::string twice;
  bool too_deep = false;
  const auto note = [&](int depth, Json::parse_event_t event, Json& parsed) {
    too_deep |= depth > kMaxDepth;
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && twice.empty()) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!keys.back().insert(key).second) twice = in_quotes(key);
    }
    return !too_deep;
  };
  *json = Json::parse(text.begin(), text.end(), note, /*allow_exceptions=*/false);
  if (too_deep) return Status::error(file + " nests deeper than " + std::to_string(kMaxDepth));
  if (json->is_discarded()) {
    return Status::error(file + " is not JSON: it was cut or edited; copy it again");
  }
  return twice.empty() ? Status() : Status::error(file + " has the key " + twice + " twice");
}

std::string JsonValue::shown() const {
  if (value_->is_string()) return in_quotes(value_->get_ref<const std::string&>());
  if (value_->is_structured()) return std::string("an ") + value_->type_name();
  return value_->dump().substr(0, kMaxShown);
}

int64_t JsonValue::number(int64_t low, int64_t high) const {
  const bool is_small = value_->is_number_integer() &&
                        !(value_->is_number_unsigned() && value_->get<uint64_t>() > INT64_MAX);
  if (is_small) {
    const auto number = value_->get<int64_t>();
    if (number >= low && number <= high) return number;
  }
  expect(("a whole number of " + std::to_string(low) + " to " + std::to_string(high)).c_str());
  return low;
}

double JsonValue::real() const {
  if (value_->is_number() && std::isfinite(value_->get<double>())) return value_->get<double>();
  expect("a finite number");
  return 0.0;
}

bool JsonValue::flag() const {
  if (value_->is_boolean()) return value_->get<bool>();
  expect("true or false");
  return false;
}

std::string JsonValue::text(size_t most) const {
  if (value_->is_string() && value_->get_ref<const std::string&>().size() <= most) {
    return value_->get<std::string>();
  }
  expect(("a text of up to " + std::to_string(most) + " bytes").c_str());
  return "";
}

int JsonValue::one_of(std::initializer_list<const char*> names) const {
  std::string known;
  int number = 0;
  for (const char* name : names) {
    if (value_->is_string() && value_->get_ref<const std::string&>() == name) return number;
    known += (number++ ? ", " : "") + std::string(name);
  }
  expect(("one of " + known).c_str());
  return 0;
}

std::vector<JsonValue> JsonValue::list(size_t most) const {
  std::vector<JsonValue> values;
  if (!value_->is_array() || value_->size() > most) {
    expect(("a list of up to " + std::to_string(most)).c_str());
    return values;
  }
  values.reserve(value_->size());
  for (const Json& each : *value_) {
    values.emplace_back(&each, place_ + "[" + std::to_string(values.size()) + "]", status_);
  }
  return values;
}

std::vector<int64_t> JsonValue::numbers(int64_t low, int64_t high, size_t most) const {
  std::vector<int64_t> found;
  for (const JsonValue& each : list(most)) found.push_back(each.number(low, high));
  return found;
}

std::vector<std::pair<std::string, JsonValue>> JsonValue::items() const {
  std::vector<std::pair<std::string, JsonValue>> found;
  if (!value_->is_object()) {
    expect("an object");
    return found;
  }
  for (const auto& [key, value] : value_->items()) {
    found.emplace_back(key, JsonValue(&value, place_ + "." + in_quotes(key), status_));
  }
  return found;
}

JsonValue JsonValue::null(const char* key) const {
  return {&null_json(), place_ + "." + key, status_};
}

JsonValue JsonValue::at(const char* key) const {
  if (!value_->is_object()) {
    expect("an object");
    return null(key);
  }
  const auto found = value_->find(key);
  if (found != value_->end()) return {&*found, place_ + "." + key, status_};
  fail(std::string("has no key \"") + key + "\"");
  return null(key);
}

bool JsonValue::has(const char* key) const { return value_->is_object() && value_->contains(key); }

void JsonValue::check_keys(std::initializer_list<const char*> known) const {
  if (!value_->is_object()) return expect("an object");
  for (const auto& [key, value] : value_->items()) {
    const bool is_known =
        std::any_of(known.begin(), known.end(), [&](const char* name) { return key == name; });
    if (is_known) continue;
    std::string names;
    for (const char* name : known) names += (names.empty() ? "" : ", ") + std::string(name);
    return fail("has the key " + in_quotes(key) + ", which is not known (known: " + names + ")");
  }
}

}  // namespace regatta::model
