// The composed operators: layers, logits and linear as sequences of the kernels beside this file.
//
// Host code alone. A layer is, in bf16 and fp16 with folded norms, five launches for decode:
//   qkv product (rows scaled by the sums of squares of its input)
//   rotary embedding and cache write (part of the next where every span is one token)
//   attention (one launch for decode, two for prefill)
//   out product + residual, leaving sums of squares
//   gate and up product with SiLU * up in its epilogue
//   down product + residual, leaving sums of squares
// Weight-only schemes carry norms instead, for few rows on sm_90: the out and down products leave
// their output times the next norm's weight beside it, and the next product scales its rows.
// Otherwise, and for many rows, an RMS norm precedes the first and the fourth. All but the first
// launch of a call may overlap the end of the one ahead (PDL, common.cuh).
#include <algorithm>

#include "host.h"
#include "regatta/abi.h"
#include "regatta/cuda_ops.h"
#include "regatta/gemm.h"
#include "sampling/finish_logits.h"

namespace regatta::cuda {
namespace {

// Up to this many rows no product of ours needs scratch: see gemm/select.cu.
constexpr int64_t kRowsWithoutScratch = 64;

// From so many rows on, rows are normed ahead of a product whose weight has the norm's folded in:
// cuBLASLt neither leaves sums of squares nor takes them.
constexpr int64_t kRowsNormedAhead = 129;

bool norms_ahead(int64_t rows) { return is_batch_invariant || rows >= kRowsNormedAhead; }

// How the GPU stores a linear, by its scheme. Tensors: dense, one; else packed, scales, act, and
// what the scheme adds (predict/schemes).
struct SchemeOnGpu {
  const char* name;
  GemmOperands operands;
  int num_tensors;
};
constexpr SchemeOnGpu kSchemes[] = {
    {"dense", GemmOperands::kDense, 1},
    {"dense_folded", GemmOperands::kDense, 1},
    {"a8w8_fp8", GemmOperands::kFp8, 3},
    {"a8w8", GemmOperands::kInt8, 5},                    // smooth, shift
    {"weight_only_int8", GemmOperands::kWeightInt8, 4},  // perm
    {"weight_only_int4", GemmOperands::kWeightInt4, 4},  // perm
    {"w4a8", GemmOperands::kW4A8, 4},                    // perm
};

const SchemeOnGpu* find_scheme(const std::string& name) {
  for (const SchemeOnGpu& scheme : kSchemes) {
    if (name == scheme.name) return &scheme;
  }
  return nullptr;
}

// Linear `index`'s scheme of a block's, which is one name or one per linear, joined by commas.
std::string scheme_at(const std::string& schemes, int index) {
  const size_t comma = schemes.find(',');
  if (comma == std::string::npos) return schemes;
  return index == 0 ? schemes.substr(0, comma) : schemes.substr(comma + 1);
}

bool is_folded(const std::string& scheme) { return scheme == "dense_folded"; }

// Whether linear `index` of a block's takes its rows' norm as a factor of each row, x being times
// the norm's weight already, and leaves the same for the next.
bool carries_norm(const std::string& schemes, int index, DType dtype, int64_t rows) {
  return scheme_at(schemes, index).rfind("weight_only", 0) == 0 &&
         gemm_packed_scales_out(dtype, rows);
}

// Whether both products of a block's are launches of one block per multiprocessor, which takes
// about half of its shared memory (packed_weight.cuh).
bool packed_by_halves(const std::string& schemes, int64_t rows) {
  const auto packed = [&](int index) {
    const SchemeOnGpu* scheme = find_scheme(scheme_at(schemes, index));
    return scheme != nullptr && scheme->operands >= GemmOperands::kWeightInt8;
  };
  return rows <= kRowsWithoutScratch && packed(0) && packed(1);
}

// Of any number of names.
bool is_quantized(const std::string& schemes) {
  return schemes.find("a8") != std::string::npos ||
         schemes.find("weight_only") != std::string::npos;
}

Status check_scheme(const std::string& schemes) {
  for (int i = 0; i < 2; ++i) {
    const std::string name = scheme_at(schemes, i);
    if (find_scheme(name) != nullptr) continue;
    std::string allowed;
    for (const SchemeOnGpu& scheme : kSchemes) {
      allowed += (allowed.empty() ? "" : ", ") + std::string(scheme.name);
    }
    return Status::error("scheme '" + name + "' is not known to the GPU (allowed: " + allowed +
                         ")");
  }
  return {};
}

struct Product {
  const char* name;
  const TensorView* weight;
  int num_weights;
  const void* bias;
  const void* x;
  void* out;
  int64_t num_rows, in_features, out_features;
  const void* residual = nullptr;
  bool gated = false;
  const float* sumsq = nullptr;
  int64_t num_sumsq = 0;
  float* sumsq_out = nullptr;
  void* scaled_out = nullptr;
  const void* next_norm_weight = nullptr;
  float epsilon = 0.f;
  std::string scheme = "dense";
  const void* norm_weight = nullptr;  // of a norm ahead of the product, or null
  void* normed = nullptr;             // [num_rows, in_features]: room for it
  Product* next = nullptr;            // of a gated one, the only reader of out
  QuantizeRowsParams coded;           // how x became codes already, if `codes` is not null
};

// Memory that a product needs beside its tensors.
struct ProductScratch {
  GemmResources gemm;
  void* codes = nullptr;       // [rows, widest in_features], 16 bits each
  float* scale = nullptr;      // [rows], or of blocks
  void* next_codes = nullptr;  // e4m3 of the next product, while those before are read
  float* next_scale = nullptr;
  void* ordered_codes = nullptr;  // as codes, 8 bits each: of x in act-order, which `codes` has

  // Of products of `rows` rows and in_features up to `width`.
  void take(class Arena& arena, const std::string& schemes, int64_t rows, int64_t width);
  // Beside that, of a product with a weight that becomes a matrix of so many bytes.
  void take_matrix(class Arena& arena, int64_t bytes);
};

GemmParams gemm_params(const Product& p, DType dtype, DType out_dtype) {
  GemmParams g;
  g.x = p.x;
  g.bias = p.bias;
  g.residual = p.residual;
  g.sumsq = p.sumsq;
  g.out = p.out;
  g.sumsq_out = p.sumsq_out;
  g.scaled_out = p.scaled_out;
  g.next_norm_weight = p.next_norm_weight;
  g.num_rows = p.num_rows;
  g.in_features = p.in_features;
  g.out_features = p.out_features;
  g.num_sumsq = p.num_sumsq;
  g.epsilon = p.epsilon;
  g.dtype = dtype;
  g.out_dtype = out_dtype;
  g.gated = p.gated;
  return g;
}

// Cuts one piece of memory into parts; with base null it only counts.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}
  void* take(int64_t bytes) {
    char* part = base_ == nullptr ? nullptr : base_ + used_;
    used_ += round_up(bytes, 1024);
    return part;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

void ProductScratch::take_matrix(Arena& arena, int64_t bytes) {
  gemm.matrix_bytes = bytes;
  if (bytes > 0) gemm.matrix = arena.take(bytes);
}

void ProductScratch::take(Arena& arena, const std::string& schemes, int64_t rows, int64_t width) {
  if (!is_quantized(schemes)) return;
  codes = arena.take(rows * width * 2);
  if (schemes.find("w4a8") != std::string::npos) ordered_codes = arena.take(rows * width);
  const bool fp8 = schemes.find("fp8") != std::string::npos;
  const int64_t scale_bytes =
      fp8 ? gemm_block_stride(rows) * ceil_div(width, kScaleBlock) * 4 : rows * 4;
  scale = static_cast<float*>(arena.take(scale_bytes));
  if (fp8 && rows >= kRowsBlasCodes) {
    if (codes != nullptr) next_codes = static_cast<uint8_t*>(codes) + rows * width;
    next_scale = static_cast<float*>(arena.take(scale_bytes));
  }
}

// Bytes of the matrix that a linear's weight becomes, as gemm_matrix_bytes().
int64_t matrix_bytes(const std::string& scheme_name, DType dtype, int64_t rows, int64_t in_features,
                     int64_t out_features, bool gated) {
  const SchemeOnGpu* scheme = find_scheme(scheme_name);
  if (scheme == nullptr) return 0;
  GemmParams g;
  g.operands = scheme->operands;
  g.dtype = g.out_dtype = dtype;
  g.num_rows = rows;
  g.in_features = in_features;
  g.out_features = out_features;
  g.gated = gated;
  return gemm_matrix_bytes(g);
}

Status norm(const void* x, const void* weight, void* out, int64_t rows, int64_t width,
            float epsilon, DType dtype, const Launch& launch_on) {
  NormParams p = {};
  p.x = x;
  p.weight = weight;
  p.out = out;
  p.num_tokens = rows;
  p.hidden_size = width;
  p.epsilon = epsilon;
  p.dtype = dtype;
  return norm(p, launch_on);
}

Status check_dense(const Product& p, DType dtype) {
  if (p.weight->rank == 2 && p.weight->dtype == dtype && p.weight->shape[0] == p.out_features &&
      p.weight->shape[1] == p.in_features) {
    return {};
  }
  return Status::error(std::string(p.name) + ": the weight is " + dtype_name(p.weight->dtype) +
                       " " + shape_string(*p.weight) + ", expected " + dtype_name(dtype) + " [" +
                       std::to_string(p.out_features) + ", " + std::to_string(p.in_features) +
                       "]; a GPU takes matrices as checkpoints store them, not packed");
}

// How activations become codes, the norm ahead of them included.
QuantizeRowsParams quantization(const Product& p, const ProductScratch& scratch, DType dtype,
                                GemmOperands operands) {
  const auto optional = [&](int index) {
    const bool given = index < p.num_weights && p.weight[index].shape[0] > 1;
    return given ? static_cast<const float*>(p.weight[index].data) : nullptr;
  };
  QuantizeRowsParams q;
  q.x = p.x;
  q.norm_weight = p.norm_weight;
  if (operands != GemmOperands::kW4A8) {
    q.smooth = optional(3);
    q.shift = optional(4);
  }
  q.static_scale = static_cast<const float*>(p.weight[2].data);
  q.codes = scratch.codes;
  q.scale = scratch.scale;
  q.num_rows = p.num_rows;
  q.width = p.in_features;
  q.epsilon = p.epsilon;
  q.normalize = p.norm_weight != nullptr;
  q.operands = operands == GemmOperands::kW4A8 ? GemmOperands::kInt8 : operands;
  q.blocks = p.weight[1].rank == 2;
  q.dtype = dtype;
  return q;
}

Status run(const Product& p, DType dtype, DType out_dtype, const ProductScratch& scratch,
           const Launch& launch_on) {
  const SchemeOnGpu* scheme = find_scheme(p.scheme);
  if (scheme == nullptr) return check_scheme(p.scheme);
  if (p.num_weights != scheme->num_tensors) {
    return Status::error(std::string(p.name) + ": the weight is " + std::to_string(p.num_weights) +
                         " tensors, expected " + std::to_string(scheme->num_tensors) + " for " +
                         p.scheme);
  }
  GemmParams g = gemm_params(p, dtype, out_dtype);
  g.operands = scheme->operands;
  g.weight = p.weight->data;
  Status status;
  if (g.operands == GemmOperands::kFp8 || g.operands == GemmOperands::kInt8) {
    g.weight_scale = static_cast<const float*>(p.weight[1].data);
    if (p.weight[1].rank == 2) {
      g.scale_rows = p.weight[1].shape[0] == p.out_features ? 1 : kScaleBlock;
    }
    if (p.coded.codes != nullptr) {
      g.x = p.coded.codes;
      g.x_scale = p.coded.scale;
      return gemm(g, scratch.gemm, nullptr, launch_on.stream);
    }
    const QuantizeRowsParams q = quantization(p, scratch, dtype, g.operands);
    if (p.next == nullptr || scratch.next_codes == nullptr || g.operands != GemmOperands::kFp8 ||
        p.next->scheme != p.scheme || p.next->num_weights != p.num_weights) {
      return gemm_quantized(g, q, scratch.gemm, launch_on.stream);
    }
    QuantizeRowsParams next = quantization(*p.next, scratch, dtype, g.operands);
    next.codes = scratch.next_codes;
    next.scale = scratch.next_scale;
    bool coded = false;
    status = gemm_to_codes(g, q, next, scratch.gemm, &coded, launch_on.stream);
    if (coded) p.next->coded = next;
    return status;
  }
  const bool ordered = p.num_weights == 4 && p.weight[3].shape[0] > 1;
  const bool to_codes = g.operands == GemmOperands::kW4A8;
  if (p.norm_weight != nullptr && (!to_codes || ordered)) {
    status =
        norm(p.x, p.norm_weight, p.normed, p.num_rows, p.in_features, p.epsilon, dtype, launch_on);
    if (!status.ok()) return status;
    g.x = p.normed;
  }
  if (g.operands == GemmOperands::kDense) {
    status = check_dense(p, dtype);
    return status.ok() ? gemm(g, scratch.gemm, nullptr, launch_on.stream) : status;
  }
  const int64_t unit = p.weight->shape[2];
  if (g.operands == GemmOperands::kWeightInt8 && !packed_unit_has_groups(unit)) {
    g.weight_scale = static_cast<const float*>(p.weight[1].data);
  } else {
    if (g.operands == GemmOperands::kWeightInt8) g.operands = GemmOperands::kWeightInt8Groups;
    g.group_size = packed_unit_group_size(unit);
  }
  if (ordered) {
    status = gather_columns(g.x, static_cast<const int32_t*>(p.weight[3].data), scratch.codes,
                            p.num_rows, p.in_features, launch_on.stream);
    if (!status.ok()) return status;
    g.x = scratch.codes;
  }
  if (to_codes) {
    QuantizeRowsParams q = quantization(p, scratch, dtype, g.operands);
    if (ordered) {
      q.x = g.x;
      q.norm_weight = nullptr, q.normalize = false;
      q.codes = scratch.ordered_codes;
    }
    return gemm_quantized(g, q, scratch.gemm, launch_on.stream);
  }
  return gemm(g, scratch.gemm, nullptr, launch_on.stream);
}

PagedAttentionParams attention_params(const AttentionBlockParams& p) {
  PagedAttentionParams a;
  a.dtype = p.dtype;
  a.cache = p.cache;
  a.batch = p.batch;
  a.num_heads = p.num_heads;
  a.num_kv_heads = p.num_kv_heads;
  a.head_dim = p.head_dim;
  a.softmax_scale = p.softmax_scale;
  a.window = p.window;
  return a;
}

struct LayerScratch {
  void* normed;  // [T, H]
  void* qkv;     // [T, (Hq + 2 Hkv) D]
  void* q;       // [T, Hq D]
  void* mixed;   // [T, Hq D]
  void* inner;   // [T, I]
  float* sumsq;  // [T, num_sumsq]
  int64_t num_sumsq;
  void* all_rows;  // [T, H], where some of them are the output
  void* attention;
  int64_t attention_bytes;
  int64_t zeroed_bytes;  // of attention
  ProductScratch product;
  int64_t total;

  LayerScratch(const AttentionBlockParams& a, const MlpBlockParams& m,
               const AttentionLimits& limits, const ComposedResources& resources) {
    const int64_t rows = a.batch.num_tokens, size = dtype_size(a.dtype);
    const PagedAttentionParams attended = attention_params(a);
    Arena arena(resources.scratch);
    attention_bytes = paged_attention_workspace_bytes(attended, limits);
    zeroed_bytes = paged_attention_zeroed_bytes(attended, limits);
    attention = arena.take(attention_bytes);
    normed = arena.take(rows * a.hidden_size * size);
    qkv = arena.take(rows * (a.num_heads + 2 * a.num_kv_heads) * a.head_dim * size);
    q = arena.take(rows * a.num_heads * a.head_dim * size);
    mixed = arena.take(rows * a.num_heads * a.head_dim * size);
    inner = arena.take(rows * m.intermediate_size * size);
    all_rows = a.rows == nullptr ? nullptr : arena.take(rows * a.hidden_size * size);
    num_sumsq = ceil_div(a.hidden_size, gemm_sumsq_columns(rows));
    sumsq = static_cast<float*>(arena.take(rows * num_sumsq * 4));
    if (rows > kRowsWithoutScratch) {
      GemmParams widest;
      widest.num_rows = rows;
      widest.in_features = a.hidden_size;
      widest.out_features = 2 * m.intermediate_size;
      widest.gated = true;
      const SchemeOnGpu* scheme = find_scheme(scheme_at(m.scheme, 0));
      if (scheme != nullptr) widest.operands = scheme->operands;
      // Counted, not read.
      widest.sumsq = norms_ahead(rows) ? nullptr : reinterpret_cast<const float*>(1);
      product.gemm.scratch_bytes = gemm_scratch_bytes(widest);
      product.gemm.scratch = arena.take(product.gemm.scratch_bytes);
      product.gemm.blas = resources.blas;
    }
    const int64_t mixed_size = a.num_heads * a.head_dim;
    product.take(arena, a.scheme + "," + m.scheme, rows,
                 std::max({a.hidden_size, mixed_size, m.intermediate_size}));
    const int64_t qkv_size = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim;
    const auto bytes_of = [&](const std::string& scheme, int64_t in, int64_t out, bool gated) {
      return matrix_bytes(scheme, a.dtype, rows, in, out, gated);
    };
    product.take_matrix(
        arena,
        std::max({bytes_of(scheme_at(a.scheme, 0), a.hidden_size, qkv_size, false),
                  bytes_of(scheme_at(a.scheme, 1), mixed_size, a.hidden_size, false),
                  bytes_of(scheme_at(m.scheme, 0), a.hidden_size, 2 * m.intermediate_size, true),
                  bytes_of(scheme_at(m.scheme, 1), m.intermediate_size, a.hidden_size, false)}));
    total = arena.used();
  }
};

Status check_scratch(int64_t needed, const ComposedResources& resources, const char* what) {
  if (needed == 0 || (resources.scratch != nullptr && resources.scratch_bytes >= needed)) return {};
  return Status::error(std::string(what) + ": scratch of " +
                       std::to_string(resources.scratch_bytes) + " bytes is too small (needs " +
                       std::to_string(needed) + ")");
}

// What passes between halves of layers in s.normed and s.sumsq, where norms are carried.
struct Carried {
  bool in = false;                    // by the half ahead; else this one begins with it
  const void* next_weight = nullptr;  // of the norm behind, which gets it from this half; or null
};

// Gives product `first` of a half the norm of its rows, `hidden`.
Status take_norm(Product& first, const void* hidden, const void* norm_weight, bool carries,
                 const Carried& carried, DType dtype, const LayerScratch& s,
                 const Launch& launch_on) {
  if (is_folded(first.scheme) && norms_ahead(first.num_rows)) {
    first.x = s.normed;
    return norm(hidden, nullptr, s.normed, first.num_rows, first.in_features, first.epsilon, dtype,
                launch_on);
  }
  if (is_folded(first.scheme) || carries) first.sumsq = s.sumsq, first.num_sumsq = s.num_sumsq;
  if (is_folded(first.scheme)) return {};
  first.normed = s.normed;
  if (!carries) {
    first.norm_weight = norm_weight;
    return {};
  }
  first.x = s.normed;
  if (carried.in) return {};
  RowSumsqParams p;
  p.x = hidden;
  p.sums = s.sumsq;
  p.norm_weight = norm_weight;
  p.scaled = s.normed;
  p.num_rows = first.num_rows;
  p.width = first.in_features;
  p.columns = gemm_sumsq_columns(first.num_rows);
  p.dtype = dtype;
  return row_sumsq(p, launch_on.stream);
}

// Lets product `last` of a half leave what the norm behind it needs.
void hand_norm(Product& last, bool folded, const Carried& carried, const LayerScratch& s) {
  if ((folded && !norms_ahead(last.num_rows)) || carried.next_weight != nullptr) {
    last.sumsq_out = s.sumsq;
  }
  if (carried.next_weight == nullptr) return;
  last.scaled_out = s.normed;
  last.next_norm_weight = carried.next_weight;
}

// Attention behind the cache write, of the last row of each span alone, each a span of its own that
// sees what is in the cache; their hidden to s.normed. It, s.qkv and s.sumsq are free by then.
Status attend_last_rows(const AttentionBlockParams& a, PagedAttentionParams attended,
                        const AttentionLimits& limits, const LayerScratch& s,
                        const Launch& launch_on) {
  const int64_t rows = a.batch.num_seqs, tokens = a.batch.num_tokens;
  const int64_t width = a.num_heads * a.head_dim;
  Status status = gather_rows({a.rows, s.q, s.qkv, rows, tokens, width, a.dtype}, launch_on);
  if (!status.ok()) return status;
  status =
      gather_rows({a.rows, a.hidden, s.normed, rows, tokens, a.hidden_size, a.dtype}, launch_on);
  if (!status.ok()) return status;
  auto* borders = reinterpret_cast<int32_t*>(s.sumsq);
  status = count_up(borders, rows + 1, launch_on);
  if (!status.ok()) return status;
  attended.q = s.qkv;
  attended.batch.cu_seqlens_q = borders;
  attended.batch.num_tokens = rows;
  return paged_attention(attended, {1, limits.max_context_len}, s.attention, s.attention_bytes,
                         launch_on);
}

// hidden -> hidden_out. Folded, s.sumsq has the sums of squares of hidden, then those of
// hidden_out.
Status attention_half(const AttentionBlockParams& a, const AttentionLimits& limits,
                      const Carried& carried, const LayerScratch& s, const Launch& launch_on) {
  const int64_t rows = a.batch.num_tokens, hidden = a.hidden_size;
  if (rows == 0) return {};
  const bool folded = is_folded(a.scheme);
  const DType dtype = a.dtype;
  Status status;

  Product qkv = {"qkv",      a.qkv,    a.num_qkv,
                 a.qkv_bias, a.hidden, s.qkv,
                 rows,       hidden,   (a.num_heads + 2 * a.num_kv_heads) * a.head_dim};
  qkv.scheme = scheme_at(a.scheme, 0);
  qkv.epsilon = a.epsilon;
  status = take_norm(qkv, a.hidden, a.norm_weight, carries_norm(a.scheme, 0, dtype, rows), carried,
                     dtype, s, launch_on);
  if (!status.ok()) return status;
  status = run(qkv, dtype, dtype, s.product, launch_on);
  if (!status.ok()) return status;

  RopeAndCacheWriteParams rope;
  rope.dtype = dtype;
  rope.qkv = s.qkv;
  rope.positions = a.positions;
  rope.slot_mapping = a.slot_mapping;
  rope.rope_cache = a.rope_cache;
  rope.q_norm = a.q_norm;
  rope.k_norm = a.k_norm;
  rope.cache = a.cache;
  rope.q_out = s.q;
  rope.num_tokens = rows;
  rope.num_heads = a.num_heads;
  rope.num_kv_heads = a.num_kv_heads;
  rope.head_dim = a.head_dim;
  rope.rotary_dim = a.rotary_dim;
  rope.num_positions = a.num_positions;
  rope.epsilon = a.epsilon;
  PagedAttentionParams attended = attention_params(a);
  attended.q = s.q;
  attended.out = s.mixed;
  const bool some = a.rows != nullptr && a.num_rows != rows;
  const bool lasts = some && a.num_rows == a.batch.num_seqs && a.batch.tree_mask == nullptr;
  if (lasts) {
    status = rope_and_cache_write(rope, launch_on);
    if (status.ok()) status = attend_last_rows(a, attended, limits, s, launch_on);
  } else {
    Launch between = launch_on;
    between.between_halves = packed_by_halves(a.scheme, rows);
    status =
        rope_and_paged_attention(rope, attended, limits, s.attention, s.attention_bytes, between);
  }
  if (!status.ok()) return status;

  Product out = {"out",   a.out,        a.num_out, a.out_bias,
                 s.mixed, a.hidden_out, rows,      a.num_heads * a.head_dim,
                 hidden,  a.hidden};
  out.scheme = scheme_at(a.scheme, 1);
  if (lasts) {
    out.num_rows = a.num_rows;
    out.residual = s.normed;
  } else {
    hand_norm(out, folded, carried, s);
    if (some) out.out = s.all_rows;
  }
  status = run(out, dtype, dtype, s.product, launch_on);
  if (!status.ok() || !some || lasts) return status;
  return gather_rows({a.rows, s.all_rows, a.hidden_out, a.num_rows, rows, hidden, dtype},
                     launch_on);
}

// hidden -> out, as attention_half.
Status mlp_half(const MlpBlockParams& m, const Carried& carried, const LayerScratch& s,
                const Launch& launch_on) {
  const int64_t rows = m.num_tokens, hidden = m.hidden_size;
  if (rows == 0) return {};
  const bool folded = is_folded(m.scheme);
  const DType dtype = m.dtype;
  Status status;

  Product gate_up = {"gate_up", m.gate_up, m.num_gate_up, m.gate_up_bias,         m.hidden,
                     s.inner,   rows,      hidden,        2 * m.intermediate_size};
  gate_up.gated = true;
  gate_up.scheme = scheme_at(m.scheme, 0);
  gate_up.epsilon = m.epsilon;
  status = take_norm(gate_up, m.hidden, m.norm_weight, carries_norm(m.scheme, 0, dtype, rows),
                     carried, dtype, s, launch_on);
  if (!status.ok()) return status;
  Product down = {"down", m.down, m.num_down,          m.down_bias, s.inner,
                  m.out,  rows,   m.intermediate_size, hidden,      m.hidden};
  down.scheme = scheme_at(m.scheme, 1);
  hand_norm(down, folded, carried, s);
  gate_up.next = &down;
  status = run(gate_up, dtype, dtype, s.product, launch_on);
  if (!status.ok()) return status;
  return run(down, dtype, dtype, s.product, launch_on);
}

// The other half of a block that is an operator of its own: no layer, but the same rows.
MlpBlockParams without_mlp(const AttentionBlockParams& a) {
  MlpBlockParams m = {};
  m.num_tokens = a.batch.num_tokens;
  m.hidden_size = a.hidden_size;
  m.dtype = a.dtype;
  m.scheme = a.scheme;
  return m;
}

AttentionBlockParams without_attention(const MlpBlockParams& m) {
  AttentionBlockParams a;
  a.hidden = m.hidden;
  a.batch.num_tokens = m.num_tokens;
  a.hidden_size = m.hidden_size;
  a.dtype = m.dtype;
  a.scheme = m.scheme;
  return a;
}

}  // namespace

int64_t layers_scratch_bytes(const AttentionBlockParams& attention, const MlpBlockParams& mlp,
                             const AttentionLimits& limits) {
  return LayerScratch(attention, mlp, limits, {}).total;
}

Status begin_layers(const AttentionBlockParams& attention, const MlpBlockParams& mlp,
                    const AttentionLimits& limits, const ComposedResources& resources,
                    const Launch& launch_on) {
  Status status = check_scheme(attention.scheme);
  if (status.ok()) status = check_scheme(mlp.scheme);
  if (!status.ok()) return status;
  const LayerScratch s(attention, mlp, limits, resources);
  status = check_scratch(s.total, resources, "layers");
  if (!status.ok() || attention.batch.num_tokens == 0) return status;
  if (s.zeroed_bytes > 0) {
    status =
        cuda_status(cudaMemsetAsync(s.attention, 0, s.zeroed_bytes, launch_on.stream), "layers");
    if (!status.ok()) return status;
  }
  const int64_t rows = attention.batch.num_tokens;
  if (!is_folded(attention.scheme) || norms_ahead(rows)) return {};
  RowSumsqParams p;
  p.x = attention.hidden;
  p.sums = s.sumsq;
  p.num_rows = rows;
  p.width = attention.hidden_size;
  p.columns = gemm_sumsq_columns(rows);
  p.dtype = attention.dtype;
  return row_sumsq(p, launch_on.stream);
}

Status layer(const AttentionBlockParams& a, const MlpBlockParams& m, const AttentionLimits& limits,
             bool is_first, const void* next_norm_weight, const ComposedResources& resources,
             const Launch& launch_on) {
  const LayerScratch s(a, m, limits, resources);
  const auto carries = [&](const std::string& schemes, int index) {
    return carries_norm(schemes, index, a.dtype, a.batch.num_tokens);
  };
  const bool between = carries(a.scheme, 1) && carries(m.scheme, 0);
  const bool behind = carries(m.scheme, 1) && carries(a.scheme, 0);
  const Carried attention = {behind && !is_first, between ? m.norm_weight : nullptr};
  const Carried mlp = {between, behind ? next_norm_weight : nullptr};
  const Status status = attention_half(a, limits, attention, s, launch_on);
  return status.ok() ? mlp_half(m, mlp, s, launch_on) : status;
}

int64_t attention_block_scratch_bytes(const AttentionBlockParams& params,
                                      const AttentionLimits& limits) {
  return layers_scratch_bytes(params, without_mlp(params), limits);
}

Status attention_block(const AttentionBlockParams& params, const AttentionLimits& limits,
                       const ComposedResources& resources, const Launch& launch_on) {
  const MlpBlockParams none = without_mlp(params);
  const Status status = begin_layers(params, none, limits, resources, launch_on);
  if (!status.ok()) return status;
  const LayerScratch s(params, none, limits, resources);
  return attention_half(params, limits, {}, s, launch_on);
}

int64_t mlp_block_scratch_bytes(const MlpBlockParams& params) {
  return layers_scratch_bytes(without_attention(params), params, {});
}

Status mlp_block(const MlpBlockParams& params, const ComposedResources& resources,
                 const Launch& launch_on) {
  const AttentionBlockParams none = without_attention(params);
  const Status status = begin_layers(none, params, {}, resources, launch_on);
  const LayerScratch s(none, params, {}, resources);
  return status.ok() ? mlp_half(params, {}, s, launch_on) : status;
}

int64_t attention_scratch_bytes(const PagedAttentionParams& params, const AttentionLimits& limits) {
  return paged_attention_workspace_bytes(params, limits);
}

Status attention(const PagedAttentionParams& params, const AttentionLimits& limits,
                 const ComposedResources& resources, const Launch& launch_on) {
  if (params.batch.num_tokens == 0) return {};
  // 0 bytes for limits and sizes that are not allowed, which paged_attention() refuses by name.
  const int64_t zeroed = paged_attention_zeroed_bytes(params, limits);
  if (zeroed > 0) {
    Status status =
        check_scratch(attention_scratch_bytes(params, limits), resources, "paged_attention");
    if (status.ok()) {
      status = cuda_status(cudaMemsetAsync(resources.scratch, 0, zeroed, launch_on.stream),
                           "paged_attention");
    }
    if (!status.ok()) return status;
  }
  return paged_attention(params, limits, resources.scratch, resources.scratch_bytes, launch_on);
}

namespace {

struct LinearScratch {
  ProductScratch product;
  int64_t total;

  LinearScratch(const LinearParams& p, const ComposedResources& resources) {
    Arena arena(resources.scratch);
    if (p.num_tokens > kRowsWithoutScratch) {
      GemmParams g;
      g.num_rows = p.num_tokens;
      g.in_features = p.in_features;
      g.out_features = p.out_features;
      product.gemm.scratch_bytes = gemm_scratch_bytes(g);
      product.gemm.scratch = arena.take(product.gemm.scratch_bytes);
      product.gemm.blas = resources.blas;
    }
    product.take(arena, p.scheme, p.num_tokens, p.in_features);
    product.take_matrix(
        arena, matrix_bytes(p.scheme, p.dtype, p.num_tokens, p.in_features, p.out_features, false));
    total = arena.used();
  }
};

}  // namespace

int64_t linear_scratch_bytes(const LinearParams& p) { return LinearScratch(p, {}).total; }

Status linear(const LinearParams& p, const ComposedResources& resources, const Launch& launch_on) {
  Status status = check_scheme(p.scheme);
  if (!status.ok()) return status;
  const LinearScratch s(p, resources);
  status = check_scratch(s.total, resources, "linear");
  if (!status.ok()) return status;
  Product product = {"linear", p.weight,     p.num_weights, p.bias,        p.x,
                     p.out,    p.num_tokens, p.in_features, p.out_features};
  product.scheme = p.scheme;
  return run(product, p.dtype, p.dtype, s.product, launch_on);
}

namespace {

struct LogitsScratch {
  void* normed;  // [L, H]
  ProductScratch product;
  int64_t total;

  LogitsScratch(const LogitsParams& p, const ComposedResources& resources) {
    Arena arena(resources.scratch);
    normed = arena.take(p.num_logits * p.hidden_size * dtype_size(p.dtype));
    if (p.num_logits > kRowsWithoutScratch) {
      GemmParams g;
      g.num_rows = p.num_logits;
      g.in_features = p.hidden_size;
      g.out_features = p.vocab_size;
      product.gemm.scratch_bytes = gemm_scratch_bytes(g);
      product.gemm.scratch = arena.take(product.gemm.scratch_bytes);
      product.gemm.blas = resources.blas;
    }
    product.take(arena, p.scheme, p.num_logits, p.hidden_size);  // its matrix would be too large
    total = arena.used();
  }
};

}  // namespace

int64_t logits_scratch_bytes(const LogitsParams& params) { return LogitsScratch(params, {}).total; }

Status logits(const LogitsParams& p, const ComposedResources& resources, const Launch& launch_on) {
  if (p.num_logits == 0) return {};
  Status status = check_scheme(p.scheme);
  if (!status.ok()) return status;
  const LogitsScratch s(p, resources);
  status = check_scratch(s.total, resources, "logits");
  if (!status.ok()) return status;
  const void* x = s.normed;
  if (p.norm_weight != nullptr) {
    NormParams normed;
    normed.x = p.hidden;
    normed.weight = p.norm_weight;
    normed.out = s.normed;
    normed.num_tokens = p.num_logits;
    normed.hidden_size = p.hidden_size;
    normed.epsilon = p.epsilon;
    normed.dtype = p.dtype;
    status = p.logit_indices == nullptr
                 ? norm(normed, launch_on)
                 : norm_rows(normed, p.logit_indices, p.num_tokens, launch_on);
  } else if (p.logit_indices != nullptr) {
    status = gather_rows(
        {p.logit_indices, p.hidden, s.normed, p.num_logits, p.num_tokens, p.hidden_size, p.dtype},
        launch_on);
  } else {
    x = p.hidden;
  }
  if (!status.ok()) return status;
  Product head = {"lm_head", p.head,       p.num_head,    nullptr,     x,
                  p.logits,  p.num_logits, p.hidden_size, p.vocab_size};
  head.scheme = p.scheme;
  status = run(head, p.dtype, DType::kFloat32, s.product, launch_on);
  const bool finishes = p.bias != nullptr || p.scale != 1.f || p.softcap != 0.f;
  if (!status.ok() || !finishes) return status;
  return finish_logits({p.logits, p.bias, p.num_logits, p.vocab_size, p.scale, p.softcap, p.dtype},
                       launch_on);
}

}  // namespace regatta::cuda

// For operators that this thread calls from now on; returns what was so before.
REGATTA_EXPORT int regatta_set_batch_invariant(int on) {
  const bool before = regatta::cuda::is_batch_invariant;
  regatta::cuda::is_batch_invariant = on != 0;
  return before;
}
