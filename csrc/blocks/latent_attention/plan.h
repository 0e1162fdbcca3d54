// Which tokens of a batch take which form of latent attention (cpu.cc), and how
// expanded contexts lie; and the products that it takes. Independent of the ISA.
#pragma once

#include <cstdint>
#include <vector>

#include "blocks/latent_attention/block.h"
#include "cpu/attention_plan.h"
#include "cpu/gemm.h"

namespace regatta::cpu {

// Adjacent tokens that are computed together.
struct LatentPiece {
  int64_t begin, end;
  bool expanded;
};

// Whether a span of so many tokens, which end a context of so many, is cheaper expanded.
bool is_cheaper_expanded(const LatentAttentionBlock& block, int64_t num_tokens, int64_t context);

// All tokens of a batch in pieces of one form and at most so many rows; padding is in the last one.
std::vector<LatentPiece> latent_pieces(const LatentAttentionBlock& block,
                                       const AttentionBatch& batch, int64_t max_rows);

// Whole contexts as blocks of kChunk tokens, context after context.
struct ExpandedContexts {
  struct Block {
    int32_t span;
    int32_t first;  // position of its first token
    int32_t count;  // of tokens
  };
  std::vector<Block> blocks;
  std::vector<int32_t> tables;  // [num_seqs, max_blocks]
  int64_t max_blocks = 1;

  explicit ExpandedContexts(const AttentionBatch& batch);
  int64_t num_rows() const { return static_cast<int64_t>(blocks.size()) * kChunk; }
};

// The block's products, looked up once; those of heads one behind the other.
struct LatentKernels {
  Gemm qkv_a, q_b, out;
  std::vector<TensorView> views;  // of single heads, which the others refer to
  std::vector<Gemm> key_up, value_up, key_absorb;
};

Status find_latent_kernels(const LatentAttentionBlockParams& p, LatentKernels* kernels);

// Rows that are taken through the phases at once: as many as have this much in scratch.
int64_t most_rows(const LatentAttentionBlock& block);

}  // namespace regatta::cpu
