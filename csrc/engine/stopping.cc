#include "engine/stopping.h"

namespace regatta::engine {

FinishReason append_token(Sequence* sequence, int32_t token, const Ids& stop_ids) {
  const Request& request = sequence->request;
  sequence->ids.push_back(token);
  const bool may_stop = sequence->num_output_tokens() > request.min_new_tokens;
  const bool is_stop =
      holds(request.stop_ids, token) || (!request.ignore_eos && holds(stop_ids, token));
  // A stop token in the last allowed place is a stop.
  FinishReason reason = FinishReason::kNone;
  if (may_stop && is_stop) {
    reason = FinishReason::kStop;
  } else if (sequence->num_tokens() >= sequence->max_num_tokens) {
    reason = FinishReason::kLength;
  }
  if (!sequence->answer) return reason;
  bool completes = false;
  const Status status =
      sequence->answer->append(token, may_stop, reason != FinishReason::kNone, &completes);
  if (status.ok()) return completes ? FinishReason::kStop : reason;
  sequence->error = "its text cannot be made: " + status.message();
  return FinishReason::kError;
}

}  // namespace regatta::engine
