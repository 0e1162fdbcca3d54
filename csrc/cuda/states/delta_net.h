// The delta net between its products on GPUs, in three ways. Host code.
//
//   any     a block holds a state, and takes a span's tokens one after the other; all records
//   steps   the same of heads of 128 keys and values, the state in registers: a decode step is one
//           launch, which reads and writes each state once
//   chunks  spans of more than kFewTokens tokens in chunks of 64, by matrix units
//
// Bits depend on the way that a token goes, and on nothing else: not on what is beside it, nor
// where its span begins as long as that is at a multiple of 64 tokens or within kFewTokens of the
// end. Chunks count from a request's position 0.
#pragma once

#include "blocks/delta_net/block.h"
#include "cuda/host.h"
#include "regatta/cuda_ops.h"

namespace regatta::cuda {

constexpr int kFewTokens = 8;  // spans, and ends of spans behind their last chunk, that go by steps

enum class DeltaWay : uint8_t { kAny, kSteps, kChunks };

// What the kernels see. Names as in predict.nn.kinds.delta_net; T tokens, B requests, C conv_size.
struct DeltaArgs {
  const void* qkvz;          // [T, C + V E]
  const void* ba;            // [T, gate_size]
  void* mixed;               // [T, V E]
  const float* conv;         // [conv_width, C]
  const float* conv_bias;    // [C] or null
  const float* decay_log;    // [V]
  const float* step_bias;    // [V decays]
  const float* skip;         // [V] or null
  const float* out_norm;     // [E], or with norm_groups [V E]
  float* conv_states;        // [slots, conv_width - 1, C]
  void* states;              // [slots, V, D, E], float32 or bfloat16
  const int32_t* borders;    // [B + 1] of spans in the step's tokens
  const int32_t* contexts;   // [B] tokens with those before the step
  const int32_t *src, *dst;  // [B] slots; -1: zeros, nowhere. Those of a request differ.
  int num_tokens, num_seqs;
  int key_heads, value_heads, key_dim, value_dim, conv_width, norm_groups;
  float decay_bound, write_scale, epsilon;
  bool by_channel, delta, by_step, unit_keys, tiled, silu_gate, gate_first;
  // By chunks alone; see delta_chunks_sm80.cu.
  void* convolved;   // [T, C]
  void* solved;      // [T, V, 2, 64]
  float* logs;       // [V, T] sums of decays' logarithms within a chunk
  float* strengths;  // [V, T]
  // By any way but steps.
  float* outputs;  // [T, V E] ahead of norm and gate

  __host__ __device__ int key_size() const { return key_heads * key_dim; }
  __host__ __device__ int value_size() const { return value_heads * value_dim; }
  __host__ __device__ int conv_size() const { return 2 * key_size() + value_size(); }
  __host__ __device__ int row_size() const { return conv_size() + value_size(); }
  __host__ __device__ int decays() const { return by_channel ? key_dim : 1; }
  __host__ __device__ int gate_size() const {
    return value_heads * decays() + (by_step ? 0 : value_heads);
  }
  __host__ __device__ int key_head(int value_head) const {
    return tiled ? value_head % key_heads : value_head / (value_heads / key_heads);
  }
};

// Values of a step that its way needs beside qkvz, ba and mixed.
struct DeltaNeeds {
  int64_t convolved = 0, solved = 0;  // of the activations' dtype
  int64_t floats = 0;
};

// The fastest way that takes a block and a step of these limits on this GPU; REGATTA_KERNEL's
// "delta_net=any", "=steps" or "=chunks" where it takes them.
DeltaWay delta_way(const DeltaNetBlockParams& params, const AttentionLimits& limits);
DeltaNeeds delta_needs(const DeltaNetBlockParams& params, DeltaWay way);

// From the first products (made_qkvz, made_ba) to the input of the last one (mixed). Rows behind
// the last span become zeros. floats: DeltaNeeds::floats.
Status delta_net(const DeltaNetBlockParams& params, DeltaWay way, void* convolved, void* solved,
                 float* floats, const Launch& launch);

// The parts.
DeltaArgs delta_args(const DeltaNetBlockParams& params);
Status delta_any(const DeltaArgs& args, DType dtype, DType states, const Launch& launch);
// of_ends: of spans of more than kFewTokens tokens the ends alone, which go on where chunks ended.
Status delta_steps(const DeltaArgs& args, bool of_ends, DType dtype, DType states,
                   const Launch& launch);
// What chunks take, then the chunks: delta_chunks_sm80.cu.
Status delta_prepare(const DeltaArgs& args, DType dtype, const Launch& launch);
Status delta_pass(const DeltaArgs& args, DType dtype, DType states, const Launch& launch);
// Norm and gate of `from` (args.outputs, or null: args.mixed as it is) -> args.mixed. of_chunks:
// of tokens that went by chunks alone.
Status delta_norm(const DeltaArgs& args, const float* from, bool of_chunks, DType dtype,
                  const Launch& launch);
// Whether chunks have the shared memory that they need.
bool has_room_for_chunks();

}  // namespace regatta::cuda
