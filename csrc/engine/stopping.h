// When a request ends: predict/engine/{stopping,appending}.py.
#pragma once

#include "engine/sequence.h"

namespace regatta::engine {

// Adds a token, whose text may complete a stop string; why the request ends with it. kError: its
// text cannot be made, and `error` of the sequence says why. stop_ids: the model's.
FinishReason append_token(Sequence* sequence, int32_t token, const Ids& stop_ids);

}  // namespace regatta::engine
