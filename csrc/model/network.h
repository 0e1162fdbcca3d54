// What an engine needs of a network: a step's rows in, logits out. No framework, no Python.
//
// Dims: T tokens, B requests, L rows of logits, M blocks of the longest table, V vocabulary.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "regatta/types.h"

namespace regatta::model {

// Numbers that lie elsewhere: as long as the call.
struct Ints {
  const int32_t* data = nullptr;
  int64_t size = 0;

  Ints() = default;
  Ints(const int32_t* data, int64_t size) : data(data), size(size) {}
  Ints(const std::vector<int32_t>& values)  // NOLINT: a vector is such numbers
      : data(values.data()), size(static_cast<int64_t>(values.size())) {}
  int32_t operator[](int64_t i) const { return data[i]; }
};

// Which tokens `logit_indices` are: predict.nn.inputs.RowKind.
enum class RowKind : int32_t { kListed, kLast, kAll, kNone };

// The rows of predict.nn.inputs.FIELDS that every network reads, as span_inputs() of
// predict/engine/batch.py makes them.
struct StepRows {
  Ints token_ids;      // [T], request after request
  Ints positions;      // [T]
  Ints slot_mapping;   // [T]: block id * block_size + offset; -1 writes nothing
  Ints cu_seqlens_q;   // [B + 1]: borders in T
  Ints context_lens;   // [B]: tokens visible in the cache behind this step
  Ints block_tables;   // [B, max_blocks], -1 past the end
  Ints logit_indices;  // [L]: rows of T; where no logits are wanted, the last one of each request
  int64_t max_blocks = 0;  // M
  // Of Positions::kPrefix alone.
  Ints block_positions;                  // [T]: positions in the second dimension
  Ints prefix_lens;                      // [B]: first tokens, which all tokens see
  std::array<int32_t, 5> max_lens = {};  // what max_lens_of() says, the RowKind last

  RowKind row_kind() const { return static_cast<RowKind>(max_lens[4]); }
};

// predict.nn.inputs.max_lens_of: the longest span, the longest context, the longest short span, the
// contexts of long spans summed, and the RowKind. lengths, context_lens [B], B at least 1.
std::array<int32_t, 5> max_lens_of(Ints lengths, Ints context_lens, RowKind rows);

// Where the tokens of a request stand: predict.nn.places.
struct Places {
  int32_t first_row = 0;  // row of the rotary tables of token 0
  // With Positions::kPrefix: the first tokens, which all tokens see, and the row of those behind.
  int32_t num_prefix = 0, mask_row = 0;
};

// How a network gives positions to tokens.
struct Positions {
  enum Kind {
    kPlain,   // 0, 1, 2, ...
    kSteps,   // in the part of the rotary table that the prompt's length selects
    kPrefix,  // a prompt's first part sees both ways: it runs in one step, and shares no blocks
  };
  Kind kind = kPlain;
  int64_t step_length = 0, step_rows = 0;  // kSteps: tokens of the first part; rows of each
  int32_t end_id = -1;                     // kPrefix: ends a prefix
  std::vector<int32_t> mask_ids;           // kPrefix

  bool runs_whole() const { return kind == kPrefix; }
  // Of a request, by its prompt alone.
  Places of(Ints prompt) const;
};

// A step's rows, with the fields that depend on its requests' places. Where positions are plain,
// the rows themselves.
class PlacedRows {
 public:
  // places: [B], of the requests. Rows stay where they are as long as this.
  const StepRows& place(const Positions& how, const StepRows& rows,
                        const std::vector<Places>& places);

 private:
  StepRows placed_;
  std::vector<int32_t> positions_, block_positions_, prefix_lens_;
};

// How the model's maker would have answers sampled (generation_config.json); what it does not say
// is what a request has by itself.
struct SamplingDefaults {
  double temperature = 1.0;  // 0: greedy
  int64_t top_k = 0;
  double top_p = 1.0;
  double min_p = 0.0;
  double typical_p = 1.0;
  double repetition_penalty = 1.0;
  int64_t no_repeat_ngram_size = 0;
  int64_t max_new_tokens = 0;  // 0: it does not say
};

struct NetworkFacts {
  std::string model_type;
  DType dtype = DType::kFloat32;  // of activations
  int64_t vocab_size = 0;         // V
  int64_t max_length = 0;         // tokens of a request, prompt and answer
  int64_t block_size = 0;         // tokens of a cache block
  int64_t num_blocks = 0;
  int64_t block_bytes = 0;  // of one cache block over all layers
  std::vector<int32_t> stop_ids;
  SamplingDefaults sampling;
  Positions positions;
};

// A network over its own caches. One thread at a time calls run().
class Network {
 public:
  virtual ~Network() = default;

  const NetworkFacts& facts() const { return facts_; }

  // Computes a step, and writes its keys and values. logits [L, V], written whole; null where the
  // RowKind is kNone, which computes none. What is out of range, token ids first of all, is an
  // error, and nothing was written.
  virtual Status run(const StepRows& rows, float* logits) = 0;

 protected:
  NetworkFacts facts_;
};

// What a folder is opened with. Bytes are those of this machine.
struct OpenOptions {
  // Of weights, cache and a step's values together. 0: what the machine has available.
  int64_t memory_limit = 0;
  // 0: as many as num_seqs requests of max_length tokens fill, twice that where prefixes are
  // shared; less where memory_limit has no room for them, but those of one request at least.
  int64_t num_blocks = 0;
  int64_t num_seqs = 0;         // requests in a step, at most; 0: 8
  int64_t max_step_tokens = 0;  // tokens of a step, at most; 0: 512
  int64_t max_length = 0;       // 0: the folder's, which is the most
  bool shares_prefixes = true;
};

// What opening takes, in bytes. Nothing of the weights is read for it.
struct MemorySum {
  int64_t weights = 0;  // mapped
  int64_t cache = 0;
  int64_t step = 0;  // values of a step of max_step_tokens, roughly
  int64_t limit = 0;
  int64_t num_blocks = 0;
};

// Adds up what `path` takes; an error has the arithmetic where it does not fit.
Status memory_sum(const std::string& path, const OpenOptions& options, MemorySum* sum);

// Opens a folder that `export/export_model.py --runtime` wrote (docs/runtime-format.md). Sizes and
// headers are checked here, digests by verify(). The weights are mapped and used where they lie:
// files must not be changed while the network is there.
Status open(const std::string& path, const OpenOptions& options, std::unique_ptr<Network>* network);

// Whether each file of a folder is, byte for byte, the one that the export wrote (SHA-256).
Status verify(const std::string& path);

// The tokenizer of a folder. file: the path for regatta_text_open(); empty where it has none, and
// then `why` says why.
struct TokenizerOf {
  std::string file, why;
};
Status tokenizer_of(const std::string& path, TokenizerOf* tokenizer);

}  // namespace regatta::model
