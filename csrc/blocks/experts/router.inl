// The router of an expert block: logits in float32, scores, choice. Behind rows.inl.
namespace regatta::cpu::REGATTA_ISA {

// What the router says of rows. A shared MLP counts as one more choice of every row, the last: of
// expert E, weighted by its gate.
template <class T>
struct Routes {
  const T* x;  // [num_rows, hidden_size] the normed rows
  int64_t num_rows;
  int64_t num_chosen;
  int64_t stride;      // of logits
  float* logits;       // [num_rows, stride] -inf behind those of experts; then scores
  float* gate_logits;  // [num_rows] of the shared MLP
  int32_t* ids;        // [num_rows, num_chosen]
  float* weights;      // [num_rows, num_chosen]

  Routes(const ExpertBlock& block, const T* normed, int64_t rows, Scratch& scratch)
      : x(normed), num_rows(rows), num_chosen(block.router.top_k + (block.shared_size > 0)) {
    constexpr int64_t kMost = 16;  // lanes
    stride = (block.router.num_experts + kMost - 1) / kMost * kMost;
    logits = scratch.take<float>(rows * stride);
    gate_logits = scratch.take<float>(rows);
    ids = scratch.take<int32_t>(rows * num_chosen);
    weights = scratch.take<float>(rows * num_chosen);
  }
};

constexpr int kRouterOutputs = 4;
constexpr int kRouterRows = Vec::kLanes == 16 ? 4 : 2;  // 16 sums of 32 registers, 8 of 16

// sums[r][o] = rows[r] . outputs[o]. A sum's order depends on the width alone.
template <int kRows, class T>
void dot_rows(const T* const* rows, const T* const* outputs, int64_t width,
              float (*sums)[kRouterOutputs]) {
  Vec total[kRows][kRouterOutputs];
  for (auto& of_row : total) {
    for (Vec& sum : of_row) sum = zero();
  }
  const auto add = [&](auto&& columns) REGATTA_LAMBDA_INLINE {
    Vec x[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) x[r] = columns(rows[r]);
#pragma GCC unroll 4
    for (int o = 0; o < kRouterOutputs; ++o) {
      const Vec w = columns(outputs[o]);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) total[r][o] = fma(x[r], w, total[r][o]);
    }
  };
  for_lanes(width, [&](int64_t i, auto n) REGATTA_LAMBDA_INLINE {
    add([&](const T* of) REGATTA_LAMBDA_INLINE { return load_n(of + i, n); });
  });
  for (int r = 0; r < kRows; ++r) {
    for (int o = 0; o < kRouterOutputs; ++o) sums[r][o] = reduce_add(total[r][o]);
  }
}

// Logits of up to kRouterRows rows and kRouterOutputs outputs. Past the last ones the last are
// multiplied again.
template <class T>
void logits_of(const ExpertBlockParams& p, const Routes<T>& routes, int64_t first_row,
               int64_t first_output) {
  const int64_t experts = p.block.router.num_experts, width = p.hidden_size;
  const int64_t last_output = experts - (p.block.shared_gate ? 0 : 1);
  const T *rows[kRouterRows], *outputs[kRouterOutputs];
  for (int r = 0; r < kRouterRows; ++r) {
    rows[r] = routes.x + std::min(first_row + r, routes.num_rows - 1) * width;
  }
  for (int o = 0; o < kRouterOutputs; ++o) {
    const int64_t output = std::min(first_output + o, last_output);
    outputs[o] = static_cast<const T*>(output < experts ? p.router : p.shared_gate);
    if (output < experts) outputs[o] += output * width;
  }
  float sums[kRouterRows][kRouterOutputs];
  const int64_t num_rows = std::min<int64_t>(kRouterRows, routes.num_rows - first_row);
  if (num_rows == 1) {
    dot_rows<1>(rows, outputs, width, sums);
  } else {
    dot_rows<kRouterRows>(rows, outputs, width, sums);
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t row = first_row + r;
    for (int o = 0; o < kRouterOutputs && first_output + o <= last_output; ++o) {
      const int64_t output = first_output + o;
      float* to = output < experts ? routes.logits + row * routes.stride + output
                                   : routes.gate_logits + row;
      *to = sums[r][o] + (output < experts && p.router_bias ? p.router_bias[output] : 0.0f);
    }
  }
}

// values: of a multiple of Vec::kLanes; -inf becomes 0.
inline void softmax(float* values, int64_t count) {
  Vec most = load(values), sum = zero();
  for (int64_t i = 0; i < count; i += Vec::kLanes) most = max(most, load(values + i));
  most = set1(reduce_max(most));
  for (int64_t i = 0; i < count; i += Vec::kLanes) {
    const Vec value = exp(load(values + i) - most);
    sum = sum + value;
    store(values + i, value);
  }
  const Vec total = set1(reduce_add(sum));
  for (int64_t i = 0; i < count; i += Vec::kLanes) store(values + i, load(values + i) / total);
}

inline void sigmoids(float* values, int64_t count) {
  for_lanes(count, [&](int64_t i, auto n) REGATTA_LAMBDA_INLINE {
    store_n(values + i, sigmoid(load_n(values + i, n)), n);
  });
}

template <class T>
void choose_of_row(const ExpertBlockParams& p, const Routes<T>& routes, int64_t row) {
  const Router& router = p.block.router;
  float* scores = routes.logits + row * routes.stride;
  if (router.scoring == Scoring::kSoftmax) {
    for (int64_t e = router.num_experts; e < routes.stride; ++e) scores[e] = -__builtin_inff();
    softmax(scores, routes.stride);
  } else if (router.scoring == Scoring::kSigmoid) {
    sigmoids(scores, router.num_experts);
  }
  int32_t* ids = routes.ids + row * routes.num_chosen;
  float* weights = routes.weights + row * routes.num_chosen;
  choose_experts(router, scores, p.correction, ids, weights);
  const auto own = static_cast<int32_t>(p.block.num_own());
  const auto first = static_cast<int32_t>(p.block.first_expert);
  for (int64_t i = 0; i < router.top_k; ++i) {
    const int32_t id = ids[i] - first;
    ids[i] = id >= 0 && id < own ? id : -1;  // another rank's
  }
  if (p.block.shared_size == 0) return;
  ids[router.top_k] = own;
  float* gate = routes.gate_logits + row;
  if (p.block.shared_gate) sigmoids(gate, 1);
  weights[router.top_k] = p.block.shared_gate ? *gate : 1.0f;
}

// Chooses the experts of all rows; they are read behind the region or a barrier.
template <class T>
void route(Team& team, const ExpertBlockParams& p, const Routes<T>& routes) {
  const int64_t num_outputs = p.block.router.num_experts + (p.block.shared_gate ? 1 : 0);
  const int64_t row_blocks = (routes.num_rows + kRouterRows - 1) / kRouterRows;
  const int64_t output_blocks = (num_outputs + kRouterOutputs - 1) / kRouterOutputs;
  const int64_t count = row_blocks * output_blocks;
  for_rows(team, count, [&](int64_t i) {
    logits_of(p, routes, i / output_blocks * kRouterRows, i % output_blocks * kRouterOutputs);
  });
  team.barrier();
  for_rows(team, routes.num_rows, [&](int64_t row) { choose_of_row(p, routes, row); });
}

}  // namespace regatta::cpu::REGATTA_ISA
