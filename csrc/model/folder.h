// A folder that `export/export_model.py --runtime` wrote, read and checked: docs/runtime-format.md.
// Weights stay where the files are mapped.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/files.h"
#include "model/network.h"
#include "regatta/record_parts.h"
#include "regatta/scheme.h"
#include "regatta/types.h"

namespace regatta::model {

constexpr const char* kFolderFile = "regatta.json";
constexpr int64_t kFolderVersion = 1;

// What this build runs: "x86_64" or "aarch64"; null: nothing.
const char* own_target();

struct FolderNorm {
  Norm norm;                // is_there: whether it is
  TensorView weight, bias;  // of rank 0: none
};

struct FolderLinear {
  bool is_there = false;
  SchemeId scheme = SchemeId::kDense;
  std::vector<TensorView> tensors;
  TensorView bias;  // of rank 0: none
  int64_t out_features = 0;
};

struct FolderEmbedding {
  TensorView table;
  bool is_head = false;  // packed, as products read it
  int64_t width = 0;
  float scale = 1.0f;
  FolderLinear projection;
  TensorView positions;  // of rank 0: none
  FolderNorm norm;
};

struct FolderHead {
  FolderNorm norm;
  FolderLinear projection, linear;
  float scale = 1.0f, softcap = 0.0f;
};

// A tensor of a layer's cache: one that is given, or of this shape, its first size the blocks'.
struct FolderCache {
  TensorView view;
  bool is_given = false;
};

// Where a layer's blocks, their tensors and its cache begin in the lists of all layers.
struct FolderLayer {
  size_t block, weight, cache;
};

struct FolderFile {
  std::string name;
  int64_t num_bytes = 0;
  std::vector<std::string> sha256;  // of each kDigestBytes
};
constexpr int64_t kDigestBytes = int64_t{1} << 26;

struct Folder {
  std::string path;
  NetworkFacts facts;  // but num_blocks
  int64_t hidden_size = 0;
  int64_t step_values = 0;  // of a token in a step, of facts.dtype
  FolderEmbedding embedding;
  FolderHead head;
  std::string records;              // joined by "|"
  std::vector<int> order;           // the record of each block
  std::vector<TensorView> weights;  // of block after block
  std::vector<FolderCache> caches;  // of layer after layer
  std::vector<FolderLayer> layers;
  TokenizerOf tokenizer;
  std::vector<FolderFile> listed;
  std::vector<MappedFile> files;  // that hold the tensors

  int64_t weight_bytes() const;
};

// Reads the folder's headers, and no weight. An error names file and key.
Status read_folder(const std::string& path, Folder* folder);

}  // namespace regatta::model
