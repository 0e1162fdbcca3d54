#include "model/around.h"

#include <utility>

#include "cpu/gemm.h"
#include "cpu/thread_pool.h"
#include "regatta/add.h"
#include "regatta/norm.h"
#include "runtime/operators.h"

namespace regatta::model {
namespace {

TensorView rows_of(DType dtype, int64_t count, int64_t width) {
  TensorView view;
  view.dtype = dtype;
  view.rank = 2;
  view.shape[0] = count, view.shape[1] = width;
  view.data = cpu::Scratch::mine().take<char>(count * width * dtype_size(dtype));
  return view;
}

TensorView ids_of(const Ints& ids) {
  TensorView view;
  view.data = ids.data, view.dtype = DType::kInt32, view.rank = 1, view.shape[0] = ids.size;
  return view;
}

runtime::TensorList list_of(const std::vector<TensorView>& tensors) {
  return {tensors.data(), tensors.size()};
}

void* data_of(const TensorView& view) { return const_cast<void*>(view.data); }

// x := its product with a linear.
Status project(const FolderLinear& linear, TensorView* x) {
  LinearParams p = {};
  p.out_features = linear.out_features, p.scheme = linear.scheme;
  REGATTA_RETURN_IF_ERROR(runtime::linear(*x, list_of(linear.tensors), linear.bias, &p));
  const TensorView out = rows_of(x->dtype, x->shape[0], linear.out_features);
  p.out = data_of(out);
  *x = out;
  return cpu::linear(p);
}

// x := its norm.
Status normed(const FolderNorm& norm, TensorView* x) {
  const TensorView out = rows_of(x->dtype, x->shape[0], x->shape[1]);
  NormParams p;
  p.x = x->data, p.weight = norm.weight.data, p.bias = norm.bias.data;
  p.out = data_of(out);
  p.residual_out = data_of(rows_of(x->dtype, x->shape[0], x->shape[1]));
  p.num_tokens = x->shape[0], p.hidden_size = x->shape[1];
  p.epsilon = norm.norm.epsilon, p.dtype = x->dtype;
  p.kind = norm.norm.kind, p.plus_one = norm.norm.plus_one;
  *x = out;
  return cpu::norm(p);
}

// Rows of a table: an embedding's, packed or not, or others' of its width.
Status take_rows(const runtime::EmbeddingViews& views, bool packed, int64_t width, float scale,
                 TensorView* out) {
  EmbeddingParams p = {};
  p.hidden_size = width, p.packed = packed, p.scale = scale;
  REGATTA_RETURN_IF_ERROR(runtime::embedding(views, &p));
  *out = rows_of(p.dtype, p.num_tokens, width);
  p.out = data_of(*out);
  return cpu::embedding(p);
}

// x := x * scale + other, where there is one.
Status add(const TensorView& other, float scale, TensorView* x) {
  const TensorView out = rows_of(x->dtype, x->shape[0], x->shape[1]);
  const int64_t count = x->shape[0] * x->shape[1];
  const void* const from = std::exchange(x->data, out.data);
  return cpu::add({from, other.data, data_of(out), count, scale, 1.0f, x->dtype});
}

Status check_vector(const TensorView& view, const char* name, const Folder& folder, int64_t size) {
  return view.rank == 0 ? Status() : runtime::check(view, name, folder.facts.dtype, {size});
}

Status check_norm(const FolderNorm& norm, const char* name, const Folder& folder, int64_t size) {
  REGATTA_RETURN_IF_ERROR(check_vector(norm.weight, name, folder, size));
  return check_vector(norm.bias, name, folder, size);
}

Status check_linear(const FolderLinear& linear, const char* name, const Folder& folder,
                    int64_t in_features, int64_t out_features) {
  if (!linear.is_there) return {};
  if (linear.out_features != out_features) {
    return Status::error(std::string(name) + " has out_features " +
                         std::to_string(linear.out_features) + ", expected " +
                         std::to_string(out_features));
  }
  REGATTA_RETURN_IF_ERROR(check_vector(linear.bias, name, folder, out_features));
  LinearWeights weights;
  weights.tensors = linear.tensors.data();
  return cpu::check_linear(name, weights, linear.scheme, in_features, out_features,
                           folder.facts.dtype);
}

}  // namespace

Status embed(const Folder& folder, const StepRows& rows, TensorView* hidden) {
  const FolderEmbedding& of = folder.embedding;
  const TensorView ids = ids_of(rows.token_ids);
  const TensorView positions = of.positions.rank == 0 ? TensorView() : ids_of(rows.positions);
  if (!of.projection.is_there && !of.norm.norm.is_there) {
    return take_rows({ids, of.table, of.positions, positions, {}, {}}, of.is_head, of.width,
                     of.scale, hidden);
  }
  REGATTA_RETURN_IF_ERROR(
      take_rows({ids, of.table, {}, {}, {}, {}}, of.is_head, of.width, 1.0f, hidden));
  if (of.scale != 1.0f) REGATTA_RETURN_IF_ERROR(add({}, of.scale, hidden));
  if (of.projection.is_there) REGATTA_RETURN_IF_ERROR(project(of.projection, hidden));
  if (of.positions.rank != 0) {
    TensorView more;
    REGATTA_RETURN_IF_ERROR(take_rows({positions, of.positions, {}, {}, {}, {}}, false,
                                      folder.hidden_size, 1.0f, &more));
    REGATTA_RETURN_IF_ERROR(add(more, 1.0f, hidden));
  }
  return of.norm.norm.is_there ? normed(of.norm, hidden) : Status();
}

Status head_logits(const Folder& folder, const TensorView& hidden, float* logits) {
  const FolderHead& of = folder.head;
  const bool is_fused = !of.projection.is_there && of.norm.norm.is_plain_rms();
  TensorView x = hidden;
  if (!is_fused && of.norm.norm.is_there) REGATTA_RETURN_IF_ERROR(normed(of.norm, &x));
  if (of.projection.is_there) REGATTA_RETURN_IF_ERROR(project(of.projection, &x));
  LogitsParams p = {};
  p.vocab_size = of.linear.out_features, p.scheme = of.linear.scheme;
  p.epsilon = is_fused ? of.norm.norm.epsilon : 0.0f;
  p.scale = of.scale, p.softcap = of.softcap;
  const TensorView weight = is_fused ? of.norm.weight : TensorView();
  REGATTA_RETURN_IF_ERROR(
      runtime::logits({x, weight, list_of(of.linear.tensors), of.linear.bias, {}}, &p));
  p.logits = logits;
  return cpu::logits(p);
}

Status check_around(const Folder& folder) {
  const FolderEmbedding& of = folder.embedding;
  const FolderHead& head = folder.head;
  const int64_t hidden = folder.hidden_size, vocab = folder.facts.vocab_size;
  TensorView no_ids;
  no_ids.dtype = DType::kInt32, no_ids.rank = 1;
  EmbeddingParams p = {};
  p.hidden_size = of.width, p.packed = of.is_head;
  REGATTA_RETURN_IF_ERROR(runtime::embedding({no_ids, of.table, {}, {}, {}, {}}, &p));
  if (p.vocab_size < vocab || p.dtype != folder.facts.dtype) {
    return Status::error("embedding's table " + shape_string(of.table) + " of " +
                         dtype_name(p.dtype) + " does not hold " + std::to_string(vocab) +
                         " tokens of " + dtype_name(folder.facts.dtype));
  }
  if (!of.projection.is_there && of.width != hidden) {
    return Status::error("embedding's width is " + std::to_string(of.width) +
                         " without a projection, expected " + std::to_string(hidden));
  }
  if (of.positions.rank != 0) {
    REGATTA_RETURN_IF_ERROR(
        runtime::check(of.positions, "embedding's positions", folder.facts.dtype, {-1, hidden}));
  }
  REGATTA_RETURN_IF_ERROR(
      check_linear(of.projection, "embedding's projection", folder, of.width, hidden));
  REGATTA_RETURN_IF_ERROR(check_norm(of.norm, "embedding's norm", folder, hidden));
  REGATTA_RETURN_IF_ERROR(check_norm(head.norm, "head's norm", folder, hidden));
  const int64_t width = head.projection.is_there ? head.projection.out_features : hidden;
  REGATTA_RETURN_IF_ERROR(
      check_linear(head.projection, "head's projection", folder, hidden, width));
  return check_linear(head.linear, "head", folder, width, vocab);
}

}  // namespace regatta::model
