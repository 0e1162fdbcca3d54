// See cpu.cc.
// clang-format off: router.inl uses what block.inl includes
#include "cpu/block.inl"
#include "blocks/experts/router.inl"
// clang-format on

namespace regatta::cpu::REGATTA_ISA {

// A linear of E experts, or of the shared MLP alone.
struct ExpertLinear {
  const LinearWeights* weights = nullptr;
  SchemeId scheme = SchemeId::kDense;
  DType dtype = DType::kFloat32;
  Gemm first;  // expert 0's

  int64_t in_features() const { return first.weight.in_features; }
  int64_t out_features() const { return first.weight.out_features; }
};

// Tensors [E, ...] of all experts as those of one.
inline const TensorView* expert_tensors(const LinearWeights& weights, SchemeId scheme,
                                        int64_t expert, Scratch& scratch) {
  const int count = scheme_info(scheme).num_tensors;
  TensorView* views = scratch.take<TensorView>(count);
  for (int i = 0; i < count; ++i) {
    views[i] = weights.tensors[i];
    int64_t bytes = dtype_size(views[i].dtype);
    views[i].rank -= 1;
    for (int d = 0; d < views[i].rank; ++d) {
      views[i].shape[d] = weights.tensors[i].shape[d + 1];
      bytes *= views[i].shape[d];
    }
    views[i].data = static_cast<const char*>(views[i].data) + expert * bytes;
  }
  return views;
}

struct ExpertLinears {
  ExpertLinear gate_up, down, shared_gate_up, shared_down;

  // The tensors' shapes are checked once: all experts have the same.
  Status find(const ExpertBlockParams& p, Scratch& scratch) {
    const auto find = [&](const char* name, const LinearWeights& weights, SchemeId scheme,
                          bool of_experts, int64_t in, int64_t out, ExpertLinear* linear) {
      Weight weight = weight_of(weights, scheme, in, out);
      if (of_experts) weight.tensors = expert_tensors(weights, scheme, 0, scratch);
      *linear = {&weights, scheme, p.dtype, {}};
      const Status status = find_gemm(scheme, weight, p.dtype, &linear->first);
      return status.ok() ? status : Status::error(std::string(name) + ": " + status.message());
    };
    const ExpertBlock& b = p.block;
    const int64_t hidden = p.hidden_size, inner = b.intermediate_size;
    Status status = find("gate_up", p.gate_up, b.gate_up, true, hidden, b.up_size(), &gate_up);
    if (status.ok()) status = find("down", p.down, b.down, true, inner, hidden, &down);
    if (!status.ok() || b.shared_size == 0) return status;
    status = find("shared_gate_up", p.shared_gate_up, b.shared_gate_up, false, hidden,
                  b.shared_up_size(), &shared_gate_up);
    if (!status.ok()) return status;
    return find("shared_down", p.shared_down, b.shared_down, false, b.shared_size, hidden,
                &shared_down);
  }
};

// The MLP of an expert that has rows, or the shared one.
template <class T>
struct ExpertMlp {
  Gemm gate_up, down;
  const T* up_bias = nullptr;
  const T* down_bias = nullptr;
  int64_t begin = 0;  // its first place (RowsByExpert)
  PackedRows x, active;
  bool copies = false;        // its x is a copy of rows that are packed already
  float* products = nullptr;  // [rows, up_size], where gate and up begin at no panel together

  int64_t num_rows() const { return x.num_rows; }
  int64_t inner() const { return active.width; }
  int64_t up_size() const { return gate_up.weight.out_features; }
};

// A piece of the rows behind their routing: what the phases of the second region share.
template <class T>
struct ExpertPiece {
  const ExpertBlockParams& p;
  const Routes<T>& routes;
  RowsByExpert by_expert;
  PackedRows packed;  // all rows as experts' gate_up takes them, a row to a tile; or without data
  ExpertMlp<T>* mlps = nullptr;  // [num_used]

  int64_t num_mlps() const { return by_expert.num_used; }
  int64_t num_places() const { return by_expert.num_places; }
};

// Whether all experts round a row alike, and that is work: it is then done once.
inline bool packs_once(const Gemm& gate_up) {
  const RowTransform& transform = gate_up.transform;
  const RowFormat format = gate_up.kernels->row_format;
  const bool is_int8 = format == RowFormat::kInt8Blocks || format == RowFormat::kInt8Rows;
  return is_int8 && !transform.any() && transform.static_scale == 0.0f;
}

template <class T>
ExpertMlp<T> mlp_of(const ExpertBlockParams& p, const ExpertLinears& linears, int64_t expert,
                    int64_t num_rows, Scratch& scratch) {
  ExpertMlp<T> mlp;
  if (expert == p.block.num_own()) {
    mlp.gate_up = linears.shared_gate_up.first;
    mlp.down = linears.shared_down.first;
  } else {
    const auto gemm_of = [&](const ExpertLinear& linear) {
      return gemm_like(linear.first, linear.scheme,
                       expert_tensors(*linear.weights, linear.scheme, expert, scratch),
                       linear.dtype);
    };
    mlp.gate_up = gemm_of(linears.gate_up);
    mlp.down = gemm_of(linears.down);
    mlp.copies = packs_once(mlp.gate_up);
    const auto bias_of = [&](const ExpertLinear& linear) {
      const T* bias = static_cast<const T*>(linear.weights->bias);
      return bias ? bias + expert * linear.out_features() : nullptr;
    };
    mlp.up_bias = bias_of(linears.gate_up);
    mlp.down_bias = bias_of(linears.down);
  }
  mlp.x = make_rows(mlp.gate_up, scratch, num_rows, Fill::kByRow);
  mlp.active = make_rows(mlp.down, scratch, num_rows, Fill::kByColumns);
  if (mlp.inner() % kPanel != 0) mlp.products = scratch.take<float>(num_rows * mlp.up_size());
  return mlp;
}

template <class T>
void gather(Team& team, const ExpertPiece<T>& piece) {
  const int64_t count = piece.num_places(), width = piece.p.hidden_size;
  for_rows(team, count, [&](int64_t place) {
    const ExpertMlp<T>& mlp = piece.mlps[piece.by_expert.owners[place]];
    const int64_t row = piece.by_expert.rows[place];
    if (mlp.copies) {
      copy_packed_row(piece.packed, row, mlp.x, place - mlp.begin);
    } else {
      pack_row(mlp.x, place - mlp.begin, piece.routes.x + row * width);
    }
  });
}

template <class T>
GroupPlan plan_up(const ExpertPiece<T>& piece, Scratch& scratch) {
  GemmGroup* groups = scratch.take<GemmGroup>(piece.num_mlps());
  for (int64_t i = 0; i < piece.num_mlps(); ++i) {
    const ExpertMlp<T>& mlp = piece.mlps[i];
    const int64_t panels = mlp.gate_up.weight.num_panels();
    const bool in_halves = piece.p.block.activation.gated && !mlp.products;
    groups[i] = {&mlp.gate_up, &mlp.x, 0, in_halves ? panels / 2 : panels,
                 in_halves ? panels / 2 : 0};
  }
  return plan_groups(groups, piece.num_mlps(), scratch);
}

// gate_up and the activation: rows that down multiplies, behind a barrier.
template <class T>
void run_up(Team& team, const ExpertPiece<T>& piece, const GroupPlan& plan) {
  const Activation& activation = piece.p.block.activation;
  gemm_groups(team, plan, [&](const Tile& tile) {
    const ExpertMlp<T>& mlp = piece.mlps[tile.owner];
    if (mlp.products) return store_tile(tile, mlp.up_bias, mlp.products, mlp.up_size());
    activate_tile(activation, mlp.active, tile, mlp.up_bias, mlp.inner());
  });
  team.barrier();
  const auto of_rows = [&](auto&& is_wanted, auto&& body) {
    const auto wants = [&](int64_t i) { return is_wanted(piece.mlps[i]); };
    bool any = false;
    for (int64_t i = 0; i < piece.num_mlps() && !any; ++i) any = wants(i);
    if (!any) return;
    const int64_t count = piece.num_places();
    for_rows(team, count, [&](int64_t place) {
      const ExpertMlp<T>& mlp = piece.mlps[piece.by_expert.owners[place]];
      if (is_wanted(mlp)) body(mlp, place - mlp.begin);
    });
    team.barrier();
  };
  of_rows([](const ExpertMlp<T>& mlp) { return mlp.products != nullptr; },
          [&](const ExpertMlp<T>& mlp, int64_t row) {
            activate_products(activation, mlp.active, row, mlp.products + row * mlp.up_size());
          });
  of_rows([](const ExpertMlp<T>& mlp) { return mlp.active.staged != nullptr; },
          [](const ExpertMlp<T>& mlp, int64_t row) { round_staged_row(mlp.active, row); });
}

// Columns of down's products that are summed before the next ones are made.
struct Stripes {
  int64_t panels;  // of a stripe
  int64_t count;

  Stripes(int64_t num_places, int64_t num_panels) {
    constexpr int64_t kBytes = int64_t{8} << 20, kMostStripes = 16;
    const int64_t bytes = num_places * num_panels * kPanel * int64_t{sizeof(float)};
    count = std::min({bytes / kBytes + 1, kMostStripes, num_panels});
    panels = (num_panels + count - 1) / count;
    count = (num_panels + panels - 1) / panels;
  }
};

template <class T>
GroupPlan plan_down(const ExpertPiece<T>& piece, int64_t first_panel, int64_t num_panels,
                    Scratch& scratch) {
  GemmGroup* groups = scratch.take<GemmGroup>(piece.num_mlps());
  for (int64_t i = 0; i < piece.num_mlps(); ++i) {
    groups[i] = {&piece.mlps[i].down, &piece.mlps[i].active, first_panel, num_panels, 0};
  }
  return plan_groups(groups, piece.num_mlps(), scratch);
}

// Columns [first, first + count) of the sum of a row's products by its weights. A product whose
// weight is 0 counts for nothing, whatever it is; other ranks' experts have none here.
template <class T>
void sum_products(const ExpertPiece<T>& piece, int64_t row, const float* products, int64_t count,
                  float* total) {
  const int64_t num_chosen = piece.routes.num_chosen;
  const int32_t* places = piece.by_expert.places + row * num_chosen;
  const float* weights = piece.routes.weights + row * num_chosen;
  for (int64_t i = 0; i < count; i += Vec::kLanes) {
    const int n = lanes_left(count - i);
    Vec sum = zero();
    for (int64_t j = 0; j < num_chosen; ++j) {
      if (weights[j] == 0.0f || places[j] < 0) continue;
      sum = fma(set1(weights[j]), load_n(products + places[j] * count + i, n), sum);
    }
    store_n(total + i, sum, n);
  }
}

// down, the sums and what follows them. products: [places, columns of a stripe]; totals: [rows, H].
template <class T>
void run_down(Team& team, const ExpertPiece<T>& piece, const GroupPlan* plans,
              const Stripes& stripes, float* products, float* totals, const RowEnding<T>& ending) {
  const int64_t width = piece.p.hidden_size, num_rows = piece.routes.num_rows;
  for (int64_t s = 0; s < stripes.count; ++s) {
    const int64_t first = s * stripes.panels * kPanel;
    const int64_t columns = std::min(stripes.panels * kPanel, width - first);
    gemm_groups(team, plans[s], [&](const Tile& tile) {
      const ExpertMlp<T>& mlp = piece.mlps[tile.owner];
      Tile moved = tile;
      moved.row += mlp.begin;
      moved.column -= first;
      store_tile(moved, mlp.down_bias ? mlp.down_bias + first : nullptr, products, columns);
    });
    team.barrier();
    const bool is_last = s == stripes.count - 1;
    for_rows(team, num_rows, [&](int64_t row) {
      sum_products(piece, row, products, columns, totals + row * width + first);
      if (is_last && !ending.partial) ending.complete(row, totals + row * width);
    });
    if (!is_last || ending.partial) team.barrier();
  }
  if (!ending.partial) return;
  ending.sum_ranks(team, num_rows, totals);
  for_rows(team, num_rows, [&](int64_t row) { ending.complete(row, totals + row * width); });
}

// Rows of x and where they go.
template <class T>
void choose(Team& team, const ExpertBlockParams& p, const T* hidden, T* normed,
            const Routes<T>& routes, const PackedRows& packed) {
  const int64_t width = p.hidden_size, num_rows = routes.num_rows;
  if (normed) {
    Scratch::Scope scope(team.scratch());
    const RowNorm<T> norm = row_norm<T>(p.block.norm, p.norm);
    float* row = team.scratch().take<float>(width);
    for_rows(team, num_rows, [&](int64_t i) {
      norm_row(hidden + i * width, norm, row, width);
      copy_row(row, normed + i * width, width);
    });
    team.barrier();
  }
  if (packed.data) pack_rows(team, packed, routes.x, width);
  route(team, p, routes);
}

template <class T>
void expert_block_piece(const ExpertBlockParams& p, const ExpertLinears& linears, int64_t begin,
                        int64_t num_rows) {
  const int64_t width = p.hidden_size;
  Scratch& scratch = Scratch::mine();
  Scratch::Scope scope(scratch);
  const T* hidden = static_cast<const T*>(p.hidden) + begin * width;
  T* normed = p.block.norm.is_there ? scratch.take<T>(num_rows * width) : nullptr;
  const Routes<T> routes(p.block, normed ? normed : hidden, num_rows, scratch);
  ExpertPiece<T> piece = {p, routes};
  if (packs_once(linears.gate_up.first)) {
    piece.packed = make_rows(linears.gate_up.first, scratch, num_rows, Fill::kByRow, 1);
  }
  parallel([&](Team& team) { choose(team, p, hidden, normed, routes, piece.packed); });

  const int64_t num_owners = p.block.num_own() + (p.block.shared_size > 0 ? 1 : 0);
  piece.by_expert = rows_by_expert(routes.ids, num_rows, routes.num_chosen, num_owners, scratch);
  const RowsByExpert& by_expert = piece.by_expert;
  piece.mlps = scratch.take<ExpertMlp<T>>(by_expert.num_used);
  for (int64_t i = 0; i < by_expert.num_used; ++i) {
    const int64_t first = by_expert.begins[i], count = by_expert.begins[i + 1] - first;
    piece.mlps[i] = mlp_of<T>(p, linears, by_expert.used[i], count, scratch);
    piece.mlps[i].begin = first;
  }
  const GroupPlan up = plan_up(piece, scratch);
  const int64_t num_panels = linears.down.first.weight.num_panels();
  const Stripes stripes(piece.num_places(), num_panels);
  GroupPlan* down = scratch.take<GroupPlan>(stripes.count);
  for (int64_t s = 0; s < stripes.count; ++s) {
    const int64_t first = s * stripes.panels;
    down[s] = plan_down(piece, first, std::min(stripes.panels, num_panels - first), scratch);
  }
  float* products = scratch.take<float>(piece.num_places() * stripes.panels * kPanel);
  float* totals = scratch.take<float>(num_rows * width);
  const T* summed = p.block.residual.source == Source::kNormed ? routes.x : hidden;
  const RowEnding<T> ending(p.block, p.post_norm, summed,
                            static_cast<T*>(p.hidden_out) + begin * width, width);
  parallel([&](Team& team) {
    gather(team, piece);
    team.barrier();
    run_up(team, piece, up);
    run_down(team, piece, down, stripes, products, totals, ending);
  });
}

// Rows that are taken at once.
inline int64_t rows_of_piece(const ExpertBlockParams& p, const ExpertLinears& linears) {
  constexpr int64_t kBytes = int64_t{64} << 20, kMany = 16;  // few may take less each
  Scratch& scratch = Scratch::mine();
  Scratch::Scope scope(scratch);
  const auto bytes_of = [&](const ExpertLinear& up, const ExpertLinear& down) {
    const PackedRows active = make_rows(down.first, scratch, kMany, Fill::kByColumns);
    const PackedRows x = make_rows(up.first, scratch, kMany, Fill::kByRow);
    int64_t bytes =
        (x.num_tiles() * x.tile_bytes() + active.num_tiles() * active.tile_bytes()) / kMany;
    if (active.staged) bytes += active.width * int64_t{sizeof(float)};
    if (active.width % kPanel != 0) bytes += up.out_features() * int64_t{sizeof(float)};
    return bytes;
  };
  int64_t bytes = p.block.router.top_k * bytes_of(linears.gate_up, linears.down);
  if (p.block.shared_size > 0) bytes += bytes_of(linears.shared_gate_up, linears.shared_down);
  bytes += p.hidden_size * (dtype_size(p.dtype) + int64_t{sizeof(float)});
  const int64_t most = std::max(kMaxBlockRows, kBytes / bytes);
  const int64_t num_pieces = std::max<int64_t>(1, (p.num_tokens + most - 1) / most);
  return (p.num_tokens + num_pieces - 1) / num_pieces;
}

inline Status run_expert_block(const ExpertBlockParams& p) {
  Scratch& scratch = Scratch::mine();
  Scratch::Scope scope(scratch);
  ExpertLinears linears;
  const Status status = linears.find(p, scratch);
  if (!status.ok() || p.num_tokens == 0) return status;
  const int64_t most = rows_of_piece(p, linears);
  return with_dtype(p.dtype, [&](auto like) {
    for (int64_t begin = 0; begin < p.num_tokens; begin += most) {
      expert_block_piece<decltype(like)>(p, linears, begin, std::min(most, p.num_tokens - begin));
    }
    return Status();
  });
}

}  // namespace regatta::cpu::REGATTA_ISA
