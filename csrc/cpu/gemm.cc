#include "gemm.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace regatta::cpu {
namespace {

std::vector<const Scheme*>& schemes() {
  static std::vector<const Scheme*> table;
  return table;
}

}  // namespace

SchemeEntry::SchemeEntry(const Scheme* scheme) { schemes().push_back(scheme); }

Status find_gemm(SchemeId scheme, const Weight& weight, DType activation_dtype, Gemm* gemm) {
  const Isa isa = running_isa();
  std::string known;
  for (const Scheme* candidate : schemes()) {
    if (scheme != candidate->id) {
      known += (known.empty() ? "" : ", ") + std::string(scheme_info(candidate->id).name);
      continue;
    }
    Status status = candidate->check(weight, activation_dtype);
    if (!status.ok()) return status;
    gemm->weight = weight;
    gemm->kernels = candidate->kernels(isa, activation_dtype, weight);
    if (candidate->transform) gemm->transform = candidate->transform(weight, activation_dtype);
    if (gemm->kernels) return {};
    return Status::error(std::string("scheme '") + scheme_info(scheme).name + "' has no " +
                         isa_name(isa) + " kernel for " + dtype_name(activation_dtype) +
                         " activations");
  }
  return Status::error(std::string("scheme '") + scheme_info(scheme).name +
                       "' is not known to the CPU (known: " + known + ")");
}

Status find_linear(const char* name, const LinearWeights& weights, SchemeId scheme,
                   int64_t in_features, int64_t out_features, DType activation_dtype, Gemm* gemm) {
  const Status status = find_gemm(scheme, weight_of(weights, scheme, in_features, out_features),
                                  activation_dtype, gemm);
  return status.ok() ? status : Status::error(std::string(name) + ": " + status.message());
}

Status check_linear(const char* name, const LinearWeights& weights, SchemeId scheme,
                    int64_t in_features, int64_t out_features, DType activation_dtype) {
  Gemm gemm;
  Status status =
      find_linear(name, weights, scheme, in_features, out_features, activation_dtype, &gemm);
  const int32_t* const perm = gemm.transform.perm;
  for (int64_t i = 0; status.ok() && perm != nullptr && i < in_features; ++i) {
    if (perm[i] >= 0 && perm[i] < in_features) continue;
    status = Status::error(std::string(name) + ": perm[" + std::to_string(i) + "] is " +
                           std::to_string(perm[i]) + " (allowed: 0 .. " +
                           std::to_string(in_features - 1) + ")");
  }
  return status;
}

Gemm gemm_like(const Gemm& checked, SchemeId scheme, const TensorView* tensors,
               DType activation_dtype) {
  Gemm gemm = checked;
  gemm.weight.tensors = tensors;
  for (const Scheme* candidate : schemes()) {
    if (scheme != candidate->id || !candidate->transform) continue;
    gemm.transform = candidate->transform(gemm.weight, activation_dtype);
  }
  return gemm;
}

PackedRows make_rows(const Gemm& gemm, Scratch& scratch, int64_t num_rows, Fill fill,
                     int64_t max_tile_rows) {
  PackedRows rows;
  rows.kernels = gemm.kernels->of(num_rows);
  if (max_tile_rows == 0) max_tile_rows = rows.kernels->max_tile_rows;
  rows.format = rows.kernels->row_format;
  rows.num_rows = num_rows;
  rows.width = gemm.weight.in_features;
  rows.transform = gemm.transform;
  const bool whole_rows = rows.transform.any() || (rows.format == RowFormat::kInt8Rows &&
                                                   rows.transform.static_scale == 0.0f);
  if (whole_rows && fill == Fill::kByColumns) {
    rows.staged = scratch.take<float>(num_rows * rows.width);
  }
  // Balanced tiles: 13 rows are 7 + 6, not 12 + 1.
  const int64_t num_tiles = (num_rows + max_tile_rows - 1) / max_tile_rows;
  rows.tile_rows = num_tiles > 0 ? (num_rows + num_tiles - 1) / num_tiles : 1;
  rows.data = scratch.take<char>(rows.num_tiles() * rows.tile_bytes());
  return rows;
}

void copy_packed_row(const PackedRows& rows, int64_t from, const PackedRows& others, int64_t to) {
  const int64_t step = rows.tile_rows * kLineBytes, other_step = others.tile_rows * kLineBytes;
  const char* line = rows.line(from, 0);
  char* other = others.line(to, 0);
  for (int64_t i = 0; i < rows.num_lines(); ++i, line += step, other += other_step) {
    std::memcpy(other, line, kLineBytes);
  }
  if (!rows.has_blocks()) return;
  const int64_t tile = from / rows.tile_rows, other_tile = to / others.tile_rows;
  const BlockScale* scale = rows.block_scales(tile) + from - tile * rows.tile_rows;
  BlockScale* other_scale = others.block_scales(other_tile) + to - other_tile * others.tile_rows;
  for (int64_t i = 0; i < rows.num_blocks(); ++i) {
    other_scale[i * others.tile_rows] = scale[i * rows.tile_rows];
  }
}

}  // namespace regatta::cpu
