// What stands around a decoder's blocks, on a CPU: predict.ops.compiled's embed, before_head and
// logits, as the same operators in the same order.
//
// T tokens, L rows, H hidden size, V vocabulary. Memory is the thread's scratch.
#pragma once

#include "model/folder.h"
#include "model/network.h"

namespace regatta::model {

// hidden [T, H]: the first layer's input.
Status embed(const Folder& folder, const StepRows& rows, TensorView* hidden);

// logits [L, V] of hidden [L, H].
Status head_logits(const Folder& folder, const TensorView& hidden, float* logits);

// Whether the tensors of both fit together; reads none.
Status check_around(const Folder& folder);

}  // namespace regatta::model
