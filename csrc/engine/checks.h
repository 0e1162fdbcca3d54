// What requests may say: the limits of predict/request.py and predict/system/bounds.py.
#pragma once

#include "engine/request.h"

namespace regatta::engine {

// An error names the field: what was got, what is allowed.
Status check_request(const Request& request, int64_t vocab_size, bool has_text);

}  // namespace regatta::engine
