#include "model/folder.h"

#include <sys/stat.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "model/json.h"
#include "runtime/settings.h"

namespace regatta::model {
namespace {

constexpr int64_t kMaxJson = int64_t{64} << 20;  // bytes
constexpr int64_t kMaxFile = int64_t{1} << 50;
constexpr int64_t kMaxSize = int64_t{1} << 28;  // of a dimension
constexpr int64_t kMaxId = (int64_t{1} << 31) - 1;
// How the operators of this build read matrices: PACKINGS of export/runtime_folder.py.
constexpr const char* kDensePacking = "panels32";
constexpr const char* kCodesPacking = "panels32_quads";
constexpr const char* kExport = "; export the folder again with export/export_model.py --runtime";

class Reader {
 public:
  Reader(const std::string& path, Folder* folder) : path_(path), folder_(*folder) {}

  Status read();

 private:
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  JsonValue value(const Json& json) { return {&json, file(kFolderFile), &status_}; }

  void read_kind(const JsonValue& top);
  void read_facts(const JsonValue& top);
  void read_positions(const JsonValue& from);
  void read_sampling(const JsonValue& from);
  void read_files(const JsonValue& from);
  void read_text(const JsonValue& from);
  void read_embedding(const JsonValue& from);
  void read_head(const JsonValue& from);
  void read_layers(const JsonValue& top);
  void read_block(const JsonValue& from, int num_records);
  void read_cache(const JsonValue& from);
  Status open_files();
  Status check_used() const;

  TensorView tensor(const JsonValue& name);
  TensorView optional_tensor(const JsonValue& name) {
    return name.is_null() ? TensorView() : tensor(name);
  }
  FolderLinear linear(const JsonValue& from);
  FolderNorm norm(const JsonValue& from);

  std::string path_;
  Folder& folder_;
  Status status_;
  std::map<std::string, TensorView> tensors_;
  std::set<std::string> used_;
};

Status Reader::read() {
  MappedFile text;
  REGATTA_RETURN_IF_ERROR(MappedFile::open(file(kFolderFile), kMaxJson, &text));
  Json json;
  REGATTA_RETURN_IF_ERROR(parse_json(text.bytes(), file(kFolderFile), &json));
  const JsonValue top = value(json);
  read_kind(top);
  REGATTA_RETURN_IF_ERROR(status_);
  top.check_keys({"format",      "version",    "target",      "packing",    "model_type",
                  "dtype",       "vocab_size", "hidden_size", "max_length", "block_size",
                  "step_values", "positions",  "stop_ids",    "sampling",   "embedding",
                  "records",     "layers",     "head",        "text",       "files",
                  "digest"});
  read_facts(top);
  read_files(top.at("files"));
  read_text(top.at("text"));
  REGATTA_RETURN_IF_ERROR(status_);
  REGATTA_RETURN_IF_ERROR(open_files());
  read_embedding(top.at("embedding"));
  read_layers(top);
  read_head(top.at("head"));
  REGATTA_RETURN_IF_ERROR(status_);
  return check_used();
}

// What it is, ahead of all that another version may say otherwise.
void Reader::read_kind(const JsonValue& top) {
  const std::string format = top.at("format").text(64);
  if (top.ok() && format != "regatta")
    top.fail("has format " + in_quotes(format) + ", not \"regatta\"");
  const int64_t version = top.at("version").number(1, kMaxId);
  if (top.ok() && version != kFolderVersion) {
    top.fail("has version " + std::to_string(version) + ", and this library reads " +
             std::to_string(kFolderVersion) + kExport);
  }
  const std::string target = top.at("target").text(64);
  if (own_target() == nullptr || target != own_target()) {
    top.fail("has target " + in_quotes(target) + ", and this library is for " +
             (own_target() == nullptr ? "no target" : own_target()) + kExport + " --target " +
             (own_target() == nullptr ? "..." : own_target()));
  }
  const JsonValue packing = top.at("packing");
  packing.check_keys({"dense", "codes"});
  for (const auto& [key, wanted] : {std::pair("dense", kDensePacking), {"codes", kCodesPacking}}) {
    const std::string found = packing.at(key).text(64);
    if (packing.ok() && found != wanted) {
      packing.at(key).fail("is " + in_quotes(found) + ", and this library reads " + wanted +
                           kExport);
    }
  }
}

void Reader::read_facts(const JsonValue& top) {
  NetworkFacts& facts = folder_.facts;
  facts.model_type = top.at("model_type").text(64);
  facts.dtype = static_cast<DType>(top.at("dtype").one_of({"float32", "bfloat16", "float16"}));
  facts.vocab_size = top.at("vocab_size").number(1, kMaxSize);
  facts.max_length = top.at("max_length").number(2, kMaxSize);
  facts.block_size = top.at("block_size").number(1, 1 << 16);
  folder_.hidden_size = top.at("hidden_size").number(1, kMaxSize);
  folder_.step_values = top.at("step_values").number(1, int64_t{1} << 40);
  for (const int64_t id : top.at("stop_ids").numbers(0, kMaxId)) {
    facts.stop_ids.push_back(static_cast<int32_t>(id));
  }
  read_positions(top.at("positions"));
  read_sampling(top.at("sampling"));
}

void Reader::read_positions(const JsonValue& from) {
  Positions& to = folder_.facts.positions;
  to.kind = static_cast<Positions::Kind>(from.at("kind").one_of({"plain", "steps", "prefix"}));
  if (to.kind == Positions::kPlain) return from.check_keys({"kind"});
  if (to.kind == Positions::kSteps) {
    from.check_keys({"kind", "step_length", "step_rows"});
    to.step_length = from.at("step_length").number(1, kMaxSize);
    to.step_rows = from.at("step_rows").number(1, kMaxSize);
    return;
  }
  from.check_keys({"kind", "end_id", "mask_ids"});
  to.end_id = static_cast<int32_t>(from.at("end_id").number(0, kMaxId));
  for (const int64_t id : from.at("mask_ids").numbers(0, kMaxId)) {
    to.mask_ids.push_back(static_cast<int32_t>(id));
  }
}

void Reader::read_sampling(const JsonValue& from) {
  SamplingDefaults& to = folder_.facts.sampling;
  const auto real = [&](const char* key, double* value) {
    if (from.has(key)) *value = from.at(key).real();
  };
  const auto whole = [&](const char* key, int64_t low, int64_t* value) {
    if (from.has(key)) *value = from.at(key).number(low, kMaxId);
  };
  from.check_keys({"temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty",
                   "no_repeat_ngram_size", "max_new_tokens"});
  real("temperature", &to.temperature);
  whole("top_k", 0, &to.top_k);
  to.top_k = std::max<int64_t>(to.top_k, 0);  // -1 turns it off, too
  real("top_p", &to.top_p);
  real("min_p", &to.min_p);
  real("typical_p", &to.typical_p);
  real("repetition_penalty", &to.repetition_penalty);
  whole("no_repeat_ngram_size", 0, &to.no_repeat_ngram_size);
  whole("max_new_tokens", 1, &to.max_new_tokens);
}

void Reader::read_files(const JsonValue& from) {
  for (const auto& [name, entry] : from.items()) {
    if (name.empty() || name.find_first_of(std::string_view("/\\\0", 3)) != std::string::npos ||
        name == "." || name == ".." || name == kFolderFile) {
      return entry.fail("is no name of a file in the folder");
    }
    entry.check_keys({"num_bytes", "sha256"});
    FolderFile found{name, entry.at("num_bytes").number(0, kMaxFile), {}};
    for (const JsonValue& part : entry.at("sha256").list()) found.sha256.push_back(part.text(64));
    const auto parts = static_cast<size_t>(
        std::max<int64_t>(1, (found.num_bytes + kDigestBytes - 1) / kDigestBytes));
    if (found.sha256.size() != parts) {
      entry.fail("has " + std::to_string(found.sha256.size()) + " digests, expected " +
                 std::to_string(parts));
    }
    folder_.listed.push_back(std::move(found));
  }
}

void Reader::read_text(const JsonValue& from) {
  TokenizerOf& to = folder_.tokenizer;
  if (from.has("why")) {
    from.check_keys({"why"});
    to.why = from.at("why").text();
    return;
  }
  from.check_keys({"file"});
  const std::string name = from.at("file").text(256);
  const auto& listed = folder_.listed;
  const bool is_listed = std::any_of(listed.begin(), listed.end(),
                                     [&](const FolderFile& each) { return each.name == name; });
  if (!is_listed) from.fail("names " + in_quotes(name) + ", which is not among the files");
  to.file = file(name);
}

// Sizes of all files, and the headers of those with tensors.
Status Reader::open_files() {
  for (const FolderFile& listed : folder_.listed) {
    struct stat found = {};
    const std::string path = file(listed.name);
    if (stat(path.c_str(), &found) != 0 || !S_ISREG(found.st_mode)) {
      return Status::error(path + " is not there, and " + kFolderFile +
                           " lists it; copy the folder again");
    }
    if (found.st_size != listed.num_bytes) {
      return Status::error(path + " has " + std::to_string(found.st_size) + " bytes, and " +
                           kFolderFile + " says " + std::to_string(listed.num_bytes) +
                           "; copy the folder again");
    }
    constexpr std::string_view kEnd = ".safetensors";
    const std::string& name = listed.name;
    if (name.size() < kEnd.size() || name.substr(name.size() - kEnd.size()) != kEnd) continue;
    MappedFile mapped;
    REGATTA_RETURN_IF_ERROR(MappedFile::open(path, kMaxFile, &mapped));
    REGATTA_RETURN_IF_ERROR(read_safetensors(path, mapped.bytes(), &tensors_));
    folder_.files.push_back(std::move(mapped));
  }
  return {};
}

TensorView Reader::tensor(const JsonValue& name) {
  const std::string text = name.text(512);
  const auto found = tensors_.find(text);
  if (found == tensors_.end()) {
    name.fail("names " + in_quotes(text) + ", which no file of the folder holds");
    return {};
  }
  // Rank 0 is that of tensors which are not there.
  if (found->second.rank == 0) name.fail("names " + in_quotes(text) + ", which has no dimension");
  used_.insert(text);
  return found->second;
}

FolderLinear Reader::linear(const JsonValue& from) {
  FolderLinear made;
  if (from.is_null()) return made;
  from.check_keys({"scheme", "tensors", "bias", "out_features"});
  made.is_there = true;
  const std::string scheme = from.at("scheme").text(64);
  if (const Status parsed = runtime::parse(scheme, &made.scheme); !parsed.ok()) {
    from.at("scheme").fail(": " + parsed.message());
  }
  for (const JsonValue& name : from.at("tensors").list(16)) made.tensors.push_back(tensor(name));
  const auto wanted = static_cast<size_t>(scheme_info(made.scheme).num_tensors);
  if (made.tensors.size() != wanted) {
    from.at("tensors").fail("has " + std::to_string(made.tensors.size()) + " names, and " + scheme +
                            " takes " + std::to_string(wanted));
  }
  made.bias = optional_tensor(from.at("bias"));
  made.out_features = from.at("out_features").number(1, kMaxSize);
  return made;
}

FolderNorm Reader::norm(const JsonValue& from) {
  FolderNorm made;
  if (from.is_null()) return made;
  from.check_keys({"kind", "epsilon", "plus_one", "weight", "bias"});
  made.norm.is_there = true;
  made.norm.kind = static_cast<NormKind>(from.at("kind").one_of({"rms", "layer"}));
  made.norm.epsilon = static_cast<float>(from.at("epsilon").real());
  made.norm.plus_one = from.at("plus_one").flag();
  made.weight = tensor(from.at("weight"));
  made.bias = optional_tensor(from.at("bias"));
  made.norm.bias = made.bias.rank != 0;
  return made;
}

void Reader::read_embedding(const JsonValue& from) {
  FolderEmbedding& to = folder_.embedding;
  from.check_keys({"table", "is_head", "width", "scale", "projection", "positions", "norm"});
  to.table = tensor(from.at("table"));
  to.is_head = from.at("is_head").flag();
  to.width = from.at("width").number(1, kMaxSize);
  to.scale = static_cast<float>(from.at("scale").real());
  to.projection = linear(from.at("projection"));
  to.positions = optional_tensor(from.at("positions"));
  to.norm = norm(from.at("norm"));
}

void Reader::read_head(const JsonValue& from) {
  FolderHead& to = folder_.head;
  from.check_keys({"norm", "projection", "linear", "scale", "softcap"});
  to.norm = norm(from.at("norm"));
  to.projection = linear(from.at("projection"));
  to.linear = linear(from.at("linear"));
  if (!to.linear.is_there) from.at("linear").fail("is null: there is no matrix");
  to.scale = static_cast<float>(from.at("scale").real());
  to.softcap = static_cast<float>(from.at("softcap").real());
}

void Reader::read_layers(const JsonValue& top) {
  const std::vector<JsonValue> records = top.at("records").list(1 << 16);
  for (const JsonValue& each : records) {
    const std::string record = each.text(1 << 14);
    if (record.empty() || record.find('|') != std::string::npos) each.fail("is not one record");
    folder_.records += (folder_.records.empty() ? "" : "|") + record;
  }
  for (const JsonValue& layer : top.at("layers").list(1 << 16)) {
    layer.check_keys({"blocks", "cache"});
    folder_.layers.push_back({folder_.order.size(), folder_.weights.size(), folder_.caches.size()});
    for (const JsonValue& block : layer.at("blocks").list(64)) {
      read_block(block, static_cast<int>(records.size()));
    }
    for (const JsonValue& cache : layer.at("cache").list(16)) read_cache(cache);
  }
  // Scales that are given are none: the sum of memory divides by what a block takes.
  if (folder_.facts.block_bytes == 0) top.at("layers").fail("has no layer with a cache");
}

void Reader::read_block(const JsonValue& from, int num_records) {
  from.check_keys({"record", "weights"});
  if (num_records == 0) return from.fail("is of a record, and \"records\" has none");
  folder_.order.push_back(static_cast<int>(from.at("record").number(0, num_records - 1)));
  for (const JsonValue& name : from.at("weights").list(256)) {
    folder_.weights.push_back(tensor(name));
  }
}

void Reader::read_cache(const JsonValue& from) {
  FolderCache made;
  if (from.has("tensor")) {
    from.check_keys({"tensor"});
    made.view = tensor(from.at("tensor"));
    made.is_given = true;
    folder_.caches.push_back(made);
    return;
  }
  from.check_keys({"name", "dtype", "shape"});
  from.at("name").text(64);
  constexpr DType kOf[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kUInt8};
  TensorView& view = made.view;
  view.dtype = kOf[from.at("dtype").one_of({"float32", "bfloat16", "float16", "uint8"})];
  const std::vector<int64_t> shape =
      from.at("shape").numbers(-1, 1 << 20, static_cast<size_t>(TensorView::kMaxRank));
  // [blocks, heads, block_size, ...]
  if (shape.size() < 3 || shape[0] != -1 || shape[2] != folder_.facts.block_size ||
      std::any_of(shape.begin() + 1, shape.end(), [](int64_t size) { return size < 1; })) {
    return from.at("shape").fail("is not [-1, heads, block_size, ...], block_size " +
                                 std::to_string(folder_.facts.block_size));
  }
  view.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), view.shape);
  int64_t bytes = dtype_size(view.dtype);
  for (size_t i = 1; i < shape.size(); ++i) {
    if (__builtin_mul_overflow(bytes, shape[i], &bytes) || bytes > int64_t{1} << 40) {
      return from.at("shape").fail("is of more bytes than a block may have");
    }
  }
  folder_.facts.block_bytes += bytes;
  folder_.caches.push_back(made);
}

Status Reader::check_used() const {
  for (const auto& [name, view] : tensors_) {
    if (is_padding(name) || used_.count(name) != 0) continue;
    return Status::error(path_ + " holds the tensor " + in_quotes(name) + ", which " + kFolderFile +
                         " does not name" + kExport);
  }
  return {};
}

}  // namespace

const char* own_target() {
#if defined(__x86_64__)
  return "x86_64";
#elif defined(__aarch64__)
  return "aarch64";
#else
  return nullptr;
#endif
}

int64_t Folder::weight_bytes() const {
  int64_t sum = 0;
  for (const MappedFile& file : files) sum += static_cast<int64_t>(file.bytes().size());
  return sum;
}

Status read_folder(const std::string& path, Folder* folder) {
  folder->path = path;
  return Reader(path, folder).read();
}

}  // namespace regatta::model
