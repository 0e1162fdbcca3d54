// Stop strings of a request, as its tokenizer has them: predict/text/params.py.
#pragma once

#include "engine/answer_text.h"
#include "engine/request.h"

namespace regatta::engine {

// Adds to stop_ids the special tokens whose text is a stop string: the text of an answer leaves
// them out, so that no text in it could stop there. hidden: those that stand in stop strings among
// other tokens.
Status find_special_stops(const Text& text, Request* request, AnswerText::Hidden* hidden);

}  // namespace regatta::engine
