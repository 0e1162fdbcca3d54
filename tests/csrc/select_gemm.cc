// Answers which kernel multiplies, for tests on a CPU.
//
//   select_gemm table       every row of the table, in its order
//   select_gemm < FILE      a product and a GPU per line, as NAME=VALUE and NAME words; printed is
//   the
//                           row's number and its kernel, or "none" and what each candidate said
//   select_gemm groups < FILE   likewise; printed is the tile of gemm_packed_groups_sm90: tokens,
//                           blocks of a multiprocessor, their KiB, and slabs that go to one block
#include <cstdio>
#include <iostream>
#include <map>
#include <sstream>
#include <string>

#include "cuda/gemm/select.h"
#include "cuda/gemm/tiles.h"

using namespace regatta;
using namespace regatta::cuda;

namespace {

const std::map<std::string, GemmOperands> kOperands = {
    {"dense", GemmOperands::kDense},
    {"fp8", GemmOperands::kFp8},
    {"int8", GemmOperands::kInt8},
    {"weight_int8", GemmOperands::kWeightInt8},
    {"weight_int4", GemmOperands::kWeightInt4},
    {"weight_int8_groups", GemmOperands::kWeightInt8Groups},
    {"weight_mxfp4", GemmOperands::kWeightMxfp4},
    {"w4a8", GemmOperands::kW4A8},
};
const std::map<std::string, DType> kDTypes = {
    {"float32", DType::kFloat32}, {"bfloat16", DType::kBFloat16}, {"float16", DType::kFloat16}};

struct Question {
  GemmProblem problem;
  GemmArchitecture architecture;
  std::string force;
};

// False for a word that is not known.
bool read(const std::string& word, Question* question) {
  GemmProblem& p = question->problem;
  GemmArchitecture& a = question->architecture;
  const size_t at = word.find('=');
  const std::string name = word.substr(0, at);
  const std::map<std::string, bool*> flags = {
      {"gated", &p.gated},
      {"bias", &p.has_bias},
      {"residual", &p.has_residual},
      {"residual_is_out", &p.residual_is_out},
      {"sumsq", &p.has_sumsq},
      {"sumsq_out", &p.has_sumsq_out},
      {"scaled_out", &p.has_scaled_out},
      {"read_as_codes", &p.is_read_as_codes},
      {"batch_invariant", &p.is_batch_invariant},
      {"blas", &p.has_blas},
      {"matrix", &p.has_matrix},
  };
  const std::map<std::string, bool*> aligned = {
      {"operands_unaligned", &p.is_operands_aligned},
      {"bias_unaligned", &p.is_bias_aligned},
      {"out_unaligned", &p.is_out_aligned},
      {"scale_unaligned", &p.is_scale_aligned},
  };
  if (at == std::string::npos) {
    if (flags.count(name)) return *flags.at(name) = true;
    return aligned.count(name) && !(*aligned.at(name) = false);
  }
  const std::string value = word.substr(at + 1);
  if (name == "force") return !(question->force = value).empty();
  if (name == "operands") {
    if (!kOperands.count(value)) return false;
    p.operands = kOperands.at(value);
    p.has_weight_scale =
        column_of(p.operands) == GemmColumn::kCodes || p.operands == GemmOperands::kWeightInt8;
    p.has_x_scale =
        column_of(p.operands) == GemmColumn::kCodes || p.operands == GemmOperands::kW4A8;
    return true;
  }
  if (name == "dtype" || name == "out_dtype") {
    if (!kDTypes.count(value)) return false;
    (name == "dtype" ? p.dtype : p.out_dtype) = kDTypes.at(value);
    if (name == "dtype") p.out_dtype = p.dtype;
    return true;
  }
  const int64_t number = std::stoll(value);
  const std::map<std::string, int64_t*> numbers = {
      {"rows", &p.num_rows},         {"in", &p.in_features},        {"out", &p.out_features},
      {"group_size", &p.group_size}, {"scale_rows", &p.scale_rows}, {"groups", &p.num_groups},
      {"shared", &a.shared_bytes}};
  if (numbers.count(name)) {
    *numbers.at(name) = number;
  } else if (name == "arch") {
    a.compute_capability = static_cast<int>(number);
  } else if (name == "multiprocessors") {
    a.num_multiprocessors = static_cast<int>(number);
  } else {
    return false;
  }
  return true;
}

void print_choice(const Question& question) {
  std::string reasons;
  const GemmCandidate* chosen =
      select_gemm(question.problem, question.architecture,
                  question.force.empty() ? nullptr : question.force.c_str(), &reasons);
  if (chosen == nullptr) {
    std::printf("none %s\n", reasons.c_str());
    return;
  }
  const auto row = chosen - gemm_candidates().begin();
  std::printf("%d %s\n", static_cast<int>(row), kernel_name(chosen->kernel));
}

void print_groups_tile(const Question& question) {
  const PackedGroupsTile tile =
      choose_packed_groups_tile(question.problem, question.architecture.num_multiprocessors);
  std::printf("%d %d %d %d\n", tile.tokens, tile.blocks, tile.kilobytes, tile.grain);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "table") {
    for (const GemmCandidate& row : gemm_candidates()) {
      std::printf("%s %s %d %d %d\n", row.name, kernel_name(row.kernel), row.min_arch, row.max_arch,
                  row.is_alike);
    }
    return 0;
  }
  std::string line, word;
  while (std::getline(std::cin, line)) {
    Question question;
    std::istringstream words(line);
    while (words >> word) {
      if (read(word, &question)) continue;
      std::fprintf(stderr, "select_gemm: %s is not known\n", word.c_str());
      return 1;
    }
    mode == "groups" ? print_groups_tile(question) : print_choice(question);
  }
  return 0;
}
