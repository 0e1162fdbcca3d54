// Experts on GPUs: the router's choice, rows sorted by expert, products in groups, and the sum of
// what they made; or one launch of a single token. Host code.
#include <algorithm>

#include "blocks/experts/block.h"
#include "cuda/experts/experts.h"
#include "cuda/experts/forced.h"
#include "cuda/experts/select.h"
#include "cuda/walk.h"

namespace regatta::cuda {
namespace {

// Of expert blocks; P rows of tokens and their experts.
struct ExpertScratch : Buffers {
  Values sorted{this};       // [P, H], then the experts' outputs
  Values inner{this};        // [P, I], or of a single token [S + K I]
  Values functions{this};    // [P, 2 I], ahead of a function that is a launch of its own
  Values shared{this};       // [T, H]
  Floats logits{this};       // [T, E]
  Floats shared_gate{this};  // [T]
  Floats shares{this};       // [T, K]
  Words ids{this};           // [T, K]
  Words places{this};        // [T, K]
  Words ends{this};          // [E]
  Words counts{this};        // sort_counts()
};

// Of a linear of experts: the tensors of the first one.
class FirstExpert {
 public:
  FirstExpert(const LinearWeights& weights, SchemeId scheme) {
    for (int i = 0; i < scheme_info(scheme).num_tensors; ++i) {
      TensorView& view = views_[i];
      view = weights.tensors[i];
      --view.rank;
      std::copy(view.shape + 1, view.shape + 1 + view.rank, view.shape);
    }
  }
  const TensorView* data() const { return views_; }

 private:
  TensorView views_[5];
};

BlockView view(const ExpertBlockParams& e) {
  return view_of(e, e.block.gate_up, e.block.down, /*parallel=*/false, /*routes=*/true);
}

void count(const ExpertBlockParams& e, const AttentionLimits&, SharedScratch& shared,
           ExpertScratch& scratch) {
  const ExpertBlock& block = e.block;
  const int64_t num_experts = block.router.num_experts;
  const int64_t rows = e.num_tokens, pairs = rows * block.router.top_k;
  scratch.sorted.need(pairs * e.hidden_size);
  scratch.inner.need(pairs * block.intermediate_size + rows * block.shared_size);
  const bool folds = is_gates_silu(block.activation) && block.activation.is_plain();
  if (!folds) {
    scratch.functions.need(std::max(pairs * block.up_size(), rows * block.shared_up_size()));
  }
  scratch.logits.need(rows * num_experts);
  scratch.shared_gate.need(rows);
  scratch.shares.need(pairs);
  scratch.ids.need(pairs);
  scratch.places.need(pairs);
  if (pairs > 0) scratch.ends.need(kMaxExperts);
  scratch.counts.need(sort_counts(pairs, num_experts));
  shared.product.count(SchemeId::kDense, e.dtype, rows, e.hidden_size, num_experts);
  shared.product.count(block.gate_up, e.dtype, pairs, e.hidden_size, block.up_size(), folds, false,
                       block.num_own());
  shared.product.count(block.down, e.dtype, pairs, block.intermediate_size, e.hidden_size, false,
                       false, block.num_own());
  if (block.shared_size == 0) return;
  scratch.shared.need(rows * e.hidden_size);
  shared.product.count(block.shared_gate_up, e.dtype, rows, e.hidden_size, block.shared_up_size(),
                       folds);
  shared.product.count(block.shared_down, e.dtype, rows, block.shared_size, e.hidden_size);
}

// One block.
class ExpertRun {
 public:
  ExpertRun(const ExpertBlockParams& e, const ExpertScratch& x, Walk& walk)
      : e_(e), x_(x), walk_(walk) {}

  Status run(const BlockView& view) {
    const ExpertBlock& block = e_.block;
    const Router& router = block.router;
    RouteParams route;
    route.x = e_.hidden;
    route.norm = block.norm;
    route.norm_weights = e_.norm;
    route.normed = walk_.shared.normed;
    route.weight = e_.router;
    route.shared_gate = e_.shared_gate;
    route.logits = x_.logits;
    route.shared_gate_out = x_.shared_gate;
    route.num_tokens = e_.num_tokens;
    route.hidden_size = e_.hidden_size;
    route.dtype = e_.dtype;
    route.num_experts = router.num_experts;
    const ExpertProblem problem = problem_of();
    const int architecture = experts_capability(compute_capability());
    switch (select_router(problem, architecture)) {
      case RouterKernel::kStep:
        REGATTA_RETURN_IF_ERROR(route_step(route, walk_.launch));
        break;
      case RouterKernel::kNormAndProduct:
        REGATTA_RETURN_IF_ERROR(
            walk_.norm_rows(view, e_.hidden, e_.num_tokens, e_.hidden_size, false));
        REGATTA_RETURN_IF_ERROR(multiply_router());
        break;
      case RouterKernel::kRouteAndProduct:
        route.logits = nullptr;
        REGATTA_RETURN_IF_ERROR(cuda::route(route, walk_.launch));
        REGATTA_RETURN_IF_ERROR(multiply_router());
        break;
      case RouterKernel::kRoute:
        REGATTA_RETURN_IF_ERROR(cuda::route(route, walk_.launch));
    }
    if (select_experts(problem, architecture) == ExpertKernel::kOneToken) {
      OneTokenParams one = one_token_params(view, problem.weights == ExpertWeights::kCodes);
      if (view.partial) return sum_one_token(one, view);
      if (walk_.hand(view, e_.num_tokens, true) == Handed::kSumsq) {
        one.sumsq_out = walk_.shared.sumsq;
      }
      return one_token(one, walk_.launch);
    }
    if (block.shared_size > 0) REGATTA_RETURN_IF_ERROR(run_shared());
    ChooseAndSortParams sort;
    sort.choose = choose_args();
    sort.choose.ids = x_.ids;
    sort.choose.shares = x_.shares;
    sort.x = walk_.shared.normed;
    sort.sorted = x_.sorted;
    sort.ends = x_.ends;
    sort.places = x_.places;
    sort.counts = x_.counts;
    sort.hidden_size = e_.hidden_size;
    sort.dtype = e_.dtype;
    REGATTA_RETURN_IF_ERROR(choose_and_sort(sort, walk_.launch));
    REGATTA_RETURN_IF_ERROR(run_experts());
    walk_.hand(view, e_.num_tokens, false);
    SumNormParams p;
    p.made = x_.sorted;
    p.parts.places = x_.places;
    p.parts.shares = x_.shares;
    p.parts.top_k = router.top_k;
    p.parts.ready = true;  // both products came between
    if (block.shared_size > 0) p.parts.shared = x_.shared;
    if (block.shared_gate) p.parts.shared_gate = x_.shared_gate;
    return walk_.sum(p, view, walk_.source_of(view), e_.hidden_out, e_.num_tokens, e_.hidden_size);
  }

  ChooseArgs choose_args() const {
    ChooseArgs choose;
    choose.router = e_.block.router;
    choose.logits = x_.logits;
    choose.bias = e_.router_bias;
    choose.correction = e_.correction;
    choose.num_tokens = static_cast<int>(e_.num_tokens);
    choose.first_expert = static_cast<int>(e_.block.first_expert);
    choose.num_own = static_cast<int>(e_.block.num_own());
    return choose;
  }

  ExpertProblem problem_of() const {
    const ExpertBlock& block = e_.block;
    ExpertProblem p;
    p.dtype = e_.dtype;
    p.num_tokens = e_.num_tokens;
    p.hidden_size = e_.hidden_size;
    p.intermediate_size = block.intermediate_size;
    p.shared_size = block.shared_size;
    p.num_experts = block.router.num_experts;
    p.top_k = block.router.top_k;
    p.num_groups = block.router.num_groups;
    p.weights = weights_of();
    p.has_norm = block.norm.is_there;
    p.has_plain_norm = block.norm.is_there && block.norm.kind == NormKind::kRms && !block.norm.bias;
    p.has_shared_gate = e_.shared_gate != nullptr;
    p.has_post_norm = block.post_norm.is_there;
    p.gated = block.activation.gated;
    p.is_batch_invariant = is_batch_invariant;
    return p;
  }

  ExpertWeights weights_of() const {
    const ExpertBlock& block = e_.block;
    const auto all_are = [&](SchemeId scheme) {
      const bool shared = block.shared_gate_up == scheme && block.shared_down == scheme;
      return block.gate_up == scheme && block.down == scheme && (block.shared_size == 0 || shared);
    };
    if (all_are(SchemeId::kDense)) return ExpertWeights::kDense;
    // Scales of blocks have a dimension more.
    const bool by_rows = all_are(SchemeId::kA8W8Fp8) && e_.gate_up.tensors[1].rank == 2 &&
                         e_.down.tensors[1].rank == 2;
    return by_rows ? ExpertWeights::kCodes : ExpertWeights::kOther;
  }

  OneTokenParams one_token_params(const BlockView& view, bool codes) const {
    const ExpertBlock& block = e_.block;
    OneTokenParams p;
    p.choose = choose_args();
    p.x = walk_.shared.normed;
    p.gate_up = e_.gate_up.tensors[0].data;
    p.gate_up_bias = e_.gate_up.bias;
    p.down = e_.down.tensors[0].data;
    p.down_bias = e_.down.bias;
    if (codes) {
      const auto set = [](const LinearWeights& weights, const float** scale, const float** act) {
        *scale = static_cast<const float*>(weights.tensors[1].data);
        *act = static_cast<const float*>(weights.tensors[2].data);
      };
      set(e_.gate_up, &p.gate_up_scale, &p.gate_up_act);
      set(e_.down, &p.down_scale, &p.down_act);
    }
    if (block.shared_size > 0) {
      p.shared_gate_up = e_.shared_gate_up.tensors[0].data;
      p.shared_down = e_.shared_down.tensors[0].data;
    }
    if (block.shared_gate) p.shared_gate = x_.shared_gate;
    p.inner = x_.inner;
    p.source = walk_.source_of(view);
    p.out = e_.hidden_out;
    p.source_scale = block.residual.input_scale;
    p.made_scale = block.residual.output_scale;
    p.hidden_size = e_.hidden_size;
    p.intermediate_size = block.intermediate_size;
    p.shared_size = block.shared_size;
    p.activation = block.activation;
    p.dtype = e_.dtype;
    return p;
  }

  // A single token's experts, of which ranks sum what they made.
  Status sum_one_token(OneTokenParams& one, const BlockView& view) {
    one.source = nullptr;
    one.made_scale = 1.f;
    one.out = walk_.shared.made;
    REGATTA_RETURN_IF_ERROR(one_token(one, walk_.launch));
    walk_.hand(view, 1, false);
    SumNormParams p;
    p.made = walk_.shared.made;
    return walk_.sum(p, view, walk_.source_of(view), e_.hidden_out, 1, e_.hidden_size);
  }

  // The sorted rows -> what each pair's expert makes of it, in their place.
  Status run_experts() {
    const ExpertBlock& block = e_.block;
    const FirstExpert up(e_.gate_up, block.gate_up), down_weight(e_.down, block.down);
    const int64_t pairs = e_.num_tokens * block.router.top_k;
    Product gate_up("gate_up", block.gate_up, {up.data(), e_.gate_up.bias}, x_.sorted, x_.inner,
                    pairs, e_.hidden_size, block.up_size());
    Product down("down", block.down, {down_weight.data(), e_.down.bias}, x_.inner, x_.sorted, pairs,
                 block.intermediate_size, e_.hidden_size);
    for (Product* p : {&gate_up, &down}) {
      p->num_groups = block.num_own();
      p->group_ends = x_.ends;
    }
    down.group_ends_ready = true;  // gate_up came between
    REGATTA_RETURN_IF_ERROR(walk_.multiply_up(gate_up, block.activation, x_.functions, e_.dtype));
    return walk_.multiply(down, e_.dtype);
  }

  // shared.normed -> x.logits.
  Status multiply_router() {
    TensorView weight;
    weight.data = e_.router;
    weight.dtype = e_.dtype;
    weight.rank = 2;
    weight.shape[0] = e_.block.router.num_experts;
    weight.shape[1] = e_.hidden_size;
    return cuda::run({"router",
                      SchemeId::kDense,
                      {&weight},
                      walk_.shared.normed,
                      x_.logits,
                      e_.num_tokens,
                      e_.hidden_size,
                      e_.block.router.num_experts},
                     e_.dtype, DType::kFloat32, walk_.shared.product, walk_.launch);
  }

  // shared.normed -> x.shared.
  Status run_shared() {
    const ExpertBlock& block = e_.block;
    Product gate_up("shared_gate_up", block.shared_gate_up, e_.shared_gate_up, walk_.shared.normed,
                    x_.inner, e_.num_tokens, e_.hidden_size, block.shared_up_size());
    REGATTA_RETURN_IF_ERROR(walk_.multiply_up(gate_up, block.activation, x_.functions, e_.dtype));
    return walk_.multiply({"shared_down", block.shared_down, e_.shared_down, x_.inner, x_.shared,
                           e_.num_tokens, block.shared_size, e_.hidden_size},
                          e_.dtype);
  }

  const ExpertBlockParams& e_;
  const ExpertScratch& x_;
  Walk& walk_;
};

Status run(const ExpertBlockParams& e, const BlockView& view, const ExpertScratch& x, Walk& walk) {
  return ExpertRun(e, x, walk).run(view);
}

const KindOnGpuOf<ExpertBlockParams, ExpertScratch> kExperts("experts", view, count, run);

}  // namespace
}  // namespace regatta::cuda
