// A call's blocks on a GPU, as their kinds see it (csrc/blocks/<kind>/cuda.cu): scratch, what
// passes from a block to the next, and the steps that kinds share. Host code.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <vector>

#include "cuda/adapters/adding.h"
#include "cuda/norm/sum_norm.h"
#include "cuda/product.h"
#include "regatta/blocks.h"

namespace regatta::cuda {

// Whether so many rows are normed ahead of a product whose weight has the norm's folded in.
bool norms_ahead(int64_t rows);

// Whether every product makes the function itself.
inline bool is_gates_silu(const Activation& activation) {
  return activation.gated && activation.function == Function::kSilu;
}

// What every block has, whatever its kind.
struct BlockView {
  const BlockParams& params;
  const Norm& norm;
  const Norm& post_norm;
  Placement post_norm_of;
  const Residual& residual;
  SchemeId first, last;      // of its products
  bool parallel = false;     // its norm reads what the block ahead read
  bool routes = false;       // a launch of its own norms, and its parts are summed behind the last
  bool partial = false;      // what it makes is summed over ranks ahead of all that follows
  bool shares_norm = false;  // several products read its norm: it lies in SharedScratch::normed

  // Whether its last product's epilogue makes its output.
  bool ends_in_product() const {
    return !routes && !partial && !post_norm.is_there && residual.is_of_product();
  }
};

// A kind that ranks do not share out has no field for it.
template <class Block, class = void>
constexpr bool kHasPartial = false;
template <class Block>
constexpr bool kHasPartial<Block, std::void_t<decltype(Block::partial)>> = true;

template <class Params>
BlockView view_of(const Params& p, SchemeId first, SchemeId last, bool parallel = false,
                  bool routes = false) {
  const auto& b = p.block;
  BlockView view{p, b.norm, b.post_norm, b.post_norm_of, b.residual, first, last, parallel, routes};
  if constexpr (kHasPartial<std::decay_t<decltype(b)>>) view.partial = b.partial;
  return view;
}

// Device memory of several buffers, each as large as the block that needs most of it wants.
class Buffers {
 public:
  Buffers() = default;
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;
  virtual ~Buffers() = default;

  // Lays them into the scratch; without memory this counts.
  virtual void take(Arena& arena, DType dtype) {
    for (Buffer* buffer : all_) {
      const int64_t size = buffer->value_bytes > 0 ? buffer->value_bytes : dtype_size(dtype);
      if (buffer->count > 0) buffer->memory = arena.take(buffer->count * size);
    }
  }
  // Ahead of the call's launches.
  virtual Status prepare(const Launch&) const { return {}; }

 protected:
  struct Buffer {
    int64_t value_bytes;  // 0: those of the activations' dtype
    int64_t count = 0;
    void* memory = nullptr;

    Buffer(Buffers* owner, int64_t bytes) : value_bytes(bytes) { owner->all_.push_back(this); }
  };
  template <class T, int64_t kBytes>
  class Of : Buffer {
   public:
    explicit Of(Buffers* owner) : Buffer(owner, kBytes) {}
    void need(int64_t count) { this->count = std::max(this->count, count); }
    T* data() const { return static_cast<T*>(memory); }
    operator T*() const { return data(); }  // where a kernel takes it
  };

 public:
  using Values = Of<void, 0>;  // of the activations' dtype
  using Bytes = Of<void, 1>;
  using Floats = Of<float, 4>;
  using Words = Of<int32_t, 4>;

 private:
  std::vector<Buffer*> all_;
};

Status zero_ahead(void* memory, int64_t bytes, const Launch& launch);

// What kinds share.
struct SharedScratch : Buffers {
  Values normed{this};     // [T, H]
  Values made{this};       // [T, H], by a last product that does not make the output, and of ranks
  Values some{this};       // [T, H], where some rows are the output
  Floats sumsq{this};      // [T, sums of squares of a row]
  Words wanted_ids{this};  // [L] the adapters of the rows that are the output
  AddingScratch adding;
  ProductScratch product;

  // What each block has; values: of its output.
  void need_block(const BlockView& block);
  // Of a linear of these rows; see AddingScratch::count().
  void need_adapters(const AdapterRows& rows, int64_t num_rows, int64_t in_features, int64_t parts,
                     int64_t residual);
};

// What a block's last launch left in scratch of its output, for the next block's norm.
enum class Handed : uint8_t {
  kNothing,
  kSumsq,   // shared.sumsq
  kScaled,  // shared.sumsq, and shared.normed is the output times the norm's weight
  kNormed,  // shared.normed is the output behind the norm
};

class KindOnGpu;

// A block of a call, with what its kind has for it.
struct WalkedBlock {
  const KindOnGpu* kind;
  const BlockParams* params;
  const Buffers* scratch;
};

// One call: its blocks in their order.
class Walk {
 public:
  const AttentionLimits& limits;
  const SharedScratch& shared;
  const Launch& launch;

  Walk(const std::vector<WalkedBlock>& blocks, const AttentionLimits& limits,
       const SharedScratch& shared, const Launch& launch)
      : limits(limits), shared(shared), launch(launch), blocks_(blocks) {}

  Status run();

  // The rows of a block's residual; null: there are none.
  const void* source_of(const BlockView& block) const {
    switch (block.residual.source) {
      case Source::kInput:
        return block.params.hidden;
      case Source::kNormed:
        return shared.normed;
      case Source::kNone:
        break;
    }
    return nullptr;
  }

  // What a block of these rows hands to the next from now on.
  Handed hand(const BlockView& block, int64_t rows, bool ends_in_product) {
    return handed_ = hands(block, rows, ends_in_product);
  }

  // Gives a block's first product its rows, `input` behind the norm.
  Status take_norm(Product& first, const BlockView& block, const void* input);
  // What several first products of a block read -> shared.normed, unless it is there.
  Status take_shared_norm(const BlockView& block);
  // A block's input -> shared.normed. folded: the norm's weight is in the product's.
  Status norm_rows(const BlockView& block, const void* input, int64_t rows, int64_t width,
                   bool folded);

  // Of `product`, whose x is there; see cuda::adding_to(). Its rows are sorted by their adapters
  // here. Of few rows shrink() makes its codes.
  Status adding_to(Product& product, const LowRankWeights& weights, const AdapterRows& rows,
                   Adapted which, std::initializer_list<int64_t> part_sizes, const void* x,
                   const void* norm_weight, DType dtype, Adding* adding);
  // The same of a block's first product, behind take_norm(). Whatever was handed, rows of a plain
  // norm are the input's: what is handed depends on where a step's layers are cut into calls.
  Status adding_to_first(Product& first, const LowRankWeights& weights, const AdapterRows& rows,
                         Adapted which, std::initializer_list<int64_t> part_sizes,
                         const BlockView& block, const void* input, Adding* adding);
  Status add_ahead(Product& product, Adding& adding, const void* residual) {
    return cuda::add_ahead(product, adding, residual, shared.adding, launch);
  }

  Status multiply(const Product& product, DType dtype) {
    return cuda::run(product, dtype, dtype, shared.product, launch);
  }
  // The first product of attention, of the block's input behind the norm, with what adapters add.
  Status multiply_first(Product& first, const LinearWeights& weights,
                        std::initializer_list<int64_t> part_sizes, const BlockView& block);
  // `up`, and the function of what it makes: by its epilogue, or of `functions` by another launch.
  Status multiply_up(Product& up, const Activation& activation, void* functions, DType dtype);

  // Whether some rows of a block that reads the step are the output, for what follows it; their
  // adapters are kept.
  Status keep_wanted(const BlockParams& block, bool some);
  // The adapters of the rows that are the output of attention ahead.
  AdapterRows of_wanted(AdapterRows rows) const {
    if (are_wanted_) rows.ids = shared.wanted_ids;
    return rows;
  }

  // Runs a block's last product, whose `out` is the block's output, and what follows it. source:
  // the residual's rows. hands_norm: whether the next block may have its norm from here. part: rows
  // that are added to the product ahead of the sum over ranks, or null.
  Status end_block(Product& last, const BlockView& block, const void* source, bool hands_norm,
                   const AdapterRows& rows, Adapted which, const LowRankWeights& low_rank,
                   const void* part = nullptr);
  // The same where some rows may be the output: last.x has all. some: [L, last.in_features], where
  // the output is the spans' last rows.
  Status end_rows(Product last, const BlockView& block, void* some, AdapterRows rows, Adapted which,
                  const LowRankWeights& low_rank);
  // Makes a block's output `out` of p.made, and what is handed of the next block's norm.
  Status sum(SumNormParams& p, const BlockView& block, const void* source, void* out, int64_t rows,
             int64_t width);

 private:
  Handed hands(const BlockView& block, int64_t rows, bool ends_in_product) const;
  BlockView next() const;
  bool are_inputs(const AdapterRows& rows) const;

  const std::vector<WalkedBlock>& blocks_;
  size_t at_ = 0;  // the block that runs
  Handed handed_ = Handed::kNothing;
  bool are_wanted_ = false;              // attention ahead has made some rows alone
  const int32_t* sorted_ids_ = nullptr;  // of the rows that shared.adding.sorted has
};

// A kind on GPUs: its cuda.cu makes a KindOnGpuOf, which is all that the outside needs.
class KindOnGpu {
 public:
  virtual BlockView view(const BlockParams& params) const = 0;
  virtual std::unique_ptr<Buffers> scratch() const = 0;
  // Adds what a block needs.
  virtual void count(const BlockParams& params, const AttentionLimits& limits,
                     SharedScratch& shared, Buffers& scratch) const = 0;
  // params.hidden -> params.hidden_out.
  virtual Status run(const BlockView& block, const Buffers& scratch, Walk& walk) const = 0;

 protected:
  explicit KindOnGpu(const char* name);  // registers it; name: of its runtime::Kind
  ~KindOnGpu() = default;
};

template <class Params, class Scratch>
class KindOnGpuOf final : public KindOnGpu {
 public:
  KindOnGpuOf(const char* name, BlockView (*view)(const Params&),
              void (*count)(const Params&, const AttentionLimits&, SharedScratch&, Scratch&),
              Status (*run)(const Params&, const BlockView&, const Scratch&, Walk&))
      : KindOnGpu(name), view_(view), count_(count), run_(run) {}

  BlockView view(const BlockParams& params) const override {
    return view_(static_cast<const Params&>(params));
  }
  std::unique_ptr<Buffers> scratch() const override { return std::make_unique<Scratch>(); }
  void count(const BlockParams& params, const AttentionLimits& limits, SharedScratch& shared,
             Buffers& scratch) const override {
    count_(static_cast<const Params&>(params), limits, shared, static_cast<Scratch&>(scratch));
  }
  Status run(const BlockView& block, const Buffers& scratch, Walk& walk) const override {
    return run_(static_cast<const Params&>(block.params), block,
                static_cast<const Scratch&>(scratch), walk);
  }

 private:
  BlockView (*view_)(const Params&);
  void (*count_)(const Params&, const AttentionLimits&, SharedScratch&, Scratch&);
  Status (*run_)(const Params&, const BlockView&, const Scratch&, Walk&);
};

}  // namespace regatta::cuda
