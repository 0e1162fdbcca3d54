// Kinds of blocks. A folder of csrc/blocks is one: its kind.cc makes a KindOf, which is all that
// the outside needs; its cuda.cu makes the twin for GPUs (cuda/kinds.h).
//
// A record is read from the text that operators get:
//
//   "attention num_heads=32 num_kv_heads=8 head_dim=128 norm.kind=rms norm.epsilon=1e-06 qkv=dense"
//   "mlp intermediate_size=14336 activation.function=silu norm.kind=rms gate_up=w4a8 down=dense"
//
// Records are joined by "|". A field that is not named has its default; a norm is there when one of
// its fields is named. Kinds are named as predict/nn/kinds names them.
#pragma once

#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "regatta/blocks.h"
#include "runtime/settings.h"
#include "runtime/tensors.h"

namespace regatta::runtime {

class Kind {
 public:
  const char* const name;
  // Reads the tensors of a step, and may leave some rows alone: BlockParams::rows.
  const bool reads_step;
  const size_t params_bytes;

  virtual Status read(std::string_view fields, std::shared_ptr<const void>* record) const = 0;
  // Makes params at `at`, of params_bytes: the record, and its tensors off the lists.
  virtual BlockParams* take(void* at, const void* record, Tensors& tensors) const = 0;
  // On the CPU. params: may be changed.
  virtual Status run(BlockParams& params) const = 0;

 protected:
  Kind(const char* name, bool reads_step, size_t params_bytes);  // registers it
  ~Kind() = default;
};

// Params: of a block, a BlockParams with `block`, its record.
template <class Params>
class KindOf final : public Kind {
 public:
  using Record = decltype(Params::block);
  static_assert(std::is_trivially_destructible_v<Params>);

  KindOf(const char* name, bool reads_step, Status (*check)(const Record&),
         void (*take)(Params&, Tensors&), Status (*run)(Params&))
      : Kind(name, reads_step, sizeof(Params)), check_(check), take_(take), run_(run) {}

  Status read(std::string_view fields, std::shared_ptr<const void>* record) const override {
    auto made = std::make_shared<Record>();
    REGATTA_RETURN_IF_ERROR(read_fields(fields, made.get()));
    *record = made;
    return check_(*made);
  }

  BlockParams* take(void* at, const void* record, Tensors& tensors) const override {
    auto* const params = new (at) Params;
    params->kind = this;
    params->block = *static_cast<const Record*>(record);
    params->dtype = tensors.dtype();
    params->hidden_size = tensors.hidden_size();
    take_(*params, tensors);
    return params;
  }

  Status run(BlockParams& params) const override { return run_(static_cast<Params&>(params)); }

 private:
  Status (*check_)(const Record&);
  void (*take_)(Params&, Tensors&);
  Status (*run_)(Params&);
};

struct BlockRecord {
  const Kind* kind;
  std::shared_ptr<const void> fields;
};

// The records of `text`, which are kept.
Status block_records(const std::string& text, const std::vector<BlockRecord>** records);

}  // namespace regatta::runtime
