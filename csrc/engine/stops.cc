#include "engine/stops.h"

namespace regatta::engine {

Status find_special_stops(const Text& text, Request* request, AnswerText::Hidden* hidden) {
  for (const std::string& stop : request->stop) {
    Ids ids;
    const Status encoded = text.encode(stop, &ids);
    if (!encoded.ok()) return Status::error("stop cannot be encoded: " + encoded.message());
    for (const int32_t id : ids) {
      std::string own, mark;
      REGATTA_RETURN_IF_ERROR(text.decode({id}, true, &own));
      REGATTA_RETURN_IF_ERROR(text.decode({id}, false, &mark));
      if (!own.empty() || mark.empty() || stop.find(mark) == std::string::npos) continue;
      if (ids.size() > 1) {
        hidden->emplace(id, mark);
      } else if (mark == stop) {
        request->stop_ids.push_back(id);
      }
    }
  }
  return {};
}

}  // namespace regatta::engine
