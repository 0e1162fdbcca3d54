// What the library says of itself and of this CPU (predict/device/library.py, doctor, benchmarks).
#include <string>

#include "dispatch.h"
#include "regatta/abi.h"
#include "thread_pool.h"

namespace regatta::cpu {
namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) >= 0x20) out += c;
  }
  return out + "\"";
}

// What products run by, as far as the CPU decides.
std::string instruction_set() {
  for (const OpTableBase* table : all_op_tables()) {
    if (std::string(table->op()) != "linear") continue;
    const std::string forced = table->forced();
    for (const CandidateInfo& candidate : table->candidates()) {
      if (candidate.accepts && (forced.empty() || forced == candidate.name)) return candidate.name;
    }
  }
  return "";
}

std::string info_json() {
  std::string out = "{\"abi\": " + std::to_string(REGATTA_ABI) +
                    ", \"threads\": " + std::to_string(num_threads()) +
                    ", \"instruction_set\": " + quoted(instruction_set()) + ", \"features\": [";
  const char* separator = "";
  for (const std::string& name : cpu_feature_names()) {
    out += separator + quoted(name);
    separator = ", ";
  }
  out += "], \"kernels\": {";
  separator = "";
  for (const OpTableBase* table : all_op_tables()) {
    out += separator + quoted(table->op()) + ": [";
    separator = "";
    for (const CandidateInfo& candidate : table->candidates()) {
      out += separator + ("{\"name\": " + quoted(candidate.name)) +
             ", \"accepts\": " + (candidate.accepts ? "true" : "false") +
             ", \"reason\": " + quoted(candidate.reason) + "}";
      separator = ", ";
    }
    out += "]";
    separator = ", ";
  }
  return out + "}}";
}

}  // namespace
}  // namespace regatta::cpu

// JSON: abi, threads, what products run by, features of this CPU, and per operator its candidates
// in order of preference with what the CPU says to them. Valid until the calling thread's next
// call.
REGATTA_EXPORT const char* regatta_cpu_info() {
  static thread_local std::string json;
  json = regatta::cpu::info_json();
  return json.c_str();
}
