// The experts of a decoder layer, by the router's choice.
#include "regatta/blocks.h"

namespace regatta::cpu {

Status expert_block(const ExpertBlockParams&) { return Status::error("expert_block: unfinished"); }

}  // namespace regatta::cpu
