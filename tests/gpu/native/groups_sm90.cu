// Products whose groups of rows have a weight each (experts), on Hopper, in every format. check:
// kernels and tiles at random against a reference of one group after another, and in the
// batch-invariant mode a group's bits beside others and alone. time: each token takes `top` experts
// at random, and every launch has tokens of its own. TB/s: of the weights of experts that are
// taken; TFLOP/s: of rows.
//
//   groups_sm90 check bf16|fp8|int8|blocks|weight_int8|weight_int4|groups_int8|mxfp4|w4a8
//   groups_sm90 time decode|prompt|chain|tune [TOKENS ...] [FORMAT ...] [MODEL]
// chain: both products of a layer in turn, the second one's ends ready or not, and with and without
// dependent launches. tune: by each tile, what is chosen first.
#include "ways.cuh"

using namespace regatta;
using namespace regatta::native;
using namespace regatta::cuda;

namespace {

// ----------------------------------------------------------------------------------------- check

// Kernels of groups by chance; what refuses leaves the product to gemm()'s choice.
Runner random_runner(bool dense, Random& random, std::string* label) {
  const GemmTile tile = {8 << random.below(4), 64 << random.below(2), 2 + random.below(3), 1,
                         random.below(6) - 1,  1 + random.below(2)};
  const int kernel = random.below(dense ? 7 : 4), columns = 128 + 64 * random.below(3);
  const bool ready = random.below(2);
  *label += format(" kernel %d tile %dx%d stages %d blocks %d columns %d ready %d", kernel,
                   tile.tokens, tile.features, tile.stages, tile.blocks, columns, ready);
  return [=](GemmParams p) {
    p.group_ends_ready = ready;
    if (kernel == 0) return gemm_sm90(p, tile, nullptr);
    if (kernel == 1) return gemm_sm90(p, nullptr);
    if (kernel == 2 && gemm_tiles_sm90_refuses(p) == nullptr) {
      return gemm_tiles_sm90(p, columns, nullptr);
    }
    if (kernel == 4 || kernel == 5) return gemm_stream_sm80(p, kernel == 4, nullptr);
    if (kernel == 6) return gemm_generic(p, nullptr);
    return gemm(p, {}, nullptr, nullptr);
  };
}

// What products of packed weights go through: a kernel with a tile, forced or of its own choice, or
// what gemm() chooses; once, or twice, when the launches may overlap. *rounds: whether codes times
// scales are rounded on the way to the tensor cores.
Runner random_packed_runner(const GemmParams& p, Random& random, std::string* label, bool* rounds) {
  std::vector<GemmKernel> kernels = {GemmKernel::kSmallPacked};
  if (gemv_packed_sm90_refuses(p) == nullptr) kernels.push_back(GemmKernel::kVectorPacked);
  if (gemm_packed_tiles_sm90_refuses(p) == nullptr) kernels.push_back(GemmKernel::kLargePacked);
  std::vector<PackedTiles> shapes;
  for (const PackedTileCost& shape : kPackedTiles) {
    if (shape.grouped && (shape.gated || !p.gated)) shapes.push_back({shape.rows, shape.tokens});
  }
  GemmKernel kernel = kernels[random.below(static_cast<int>(kernels.size()))];
  const PackedGroupsTile tile = {8 << random.below(5), 1 + random.below(3), 40 + random.below(180),
                                 1 << random.below(3), random.below(8) - 1};
  const GemvTile gemv = {1, 60 + random.below(150), random.below(8)};
  const PackedTiles tiles = shapes[random.below(static_cast<int>(shapes.size()))];
  const bool forced = random.below(4) != 0, own_tile = forced && random.below(3) == 0;
  const bool ready = random.below(2), twice = random.below(2);
  const GemmCandidate* chosen =
      forced ? nullptr : select_gemm(p, {90, num_multiprocessors(), 227 << 10});
  if (chosen != nullptr) kernel = chosen->kernel;
  const int tokens = forced && !own_tile ? tile.tokens : choose_packed_groups_tile(p).tokens;
  *rounds = kernel == GemmKernel::kSmallPacked ? tokens > 32 || p.group_size == 32
                                               : kernel != GemmKernel::kVectorPacked;
  *label += format(
      " %s forced %d own tile %d ready %d twice %d, vector of %d KB, trigger %d, tiles of %d x %d, "
      "tile of %d, %d blocks of %d KB, grain %d trigger %d",
      kernel_name(kernel), forced, own_tile, ready, twice, gemv.kilobytes, gemv.trigger, tiles.rows,
      tiles.tokens, tile.tokens, tile.blocks, tile.kilobytes, tile.grain, tile.trigger);
  const Runner once = [=](const GemmParams& q) {
    if (!forced) return gemm(q, {}, nullptr, nullptr);
    if (kernel == GemmKernel::kVectorPacked) {
      return own_tile ? gemv_packed_sm90(q, nullptr) : gemv_packed_sm90(q, gemv, nullptr);
    }
    if (kernel == GemmKernel::kLargePacked) {
      return own_tile ? gemm_packed_tiles_sm90(q, nullptr)
                      : gemm_packed_tiles_sm90(q, tiles, nullptr);
    }
    return own_tile ? gemm_packed_sm90(q, nullptr) : gemm_packed_groups_sm90(q, tile, nullptr);
  };
  return [=](GemmParams q) {
    q.group_ends_ready = ready;
    const Status status = once(q);
    if (!twice || !status.ok()) return status;
    q.group_ends_ready = true;
    return once(q);
  };
}

// Whether the rows of each group have the bits that they have without the others, in the
// batch-invariant mode: alone with their weight, or of packed weights beside empty groups.
template <class T>
void check_alike(const Case& c, const Operands& o, const std::string& label) {
  const bool packed = is_packed(o.params.operands);
  const int64_t x_bytes = c.k * (has_x_codes(o.params.operands) ? 1 : 2);
  const int64_t weight_bytes = c.n * c.k * (o.params.operands == GemmOperands::kDense ? 2 : 1);
  const Buffer<int32_t> ends(c.ends);
  GemmParams all = o.params;
  c.describe<T>(&all);
  all.group_ends = ends.data;
  const int64_t row_bytes = c.width() * dtype_size(all.out_dtype);
  const Buffer<uint8_t> together(c.m * row_bytes), apart(c.m * row_bytes);
  all.out = together.data;
  is_batch_invariant = true;
  CHECK_STATUS(gemm(all, {}, nullptr, nullptr));
  for (int64_t g = 0; g < c.groups(); ++g) {
    const int64_t first = c.first_row(g), count = c.rows(g);
    if (count == 0) continue;
    std::vector<int32_t> own(packed ? c.groups() : 1, 0);
    std::fill(own.begin() + (packed ? g : 0), own.end(), static_cast<int32_t>(count));
    const Buffer<int32_t> own_ends(own);
    GemmParams p = all;
    p.group_ends = own_ends.data;
    p.num_rows = count;
    p.x = static_cast<const char*>(all.x) + first * x_bytes;
    if (all.x_scale != nullptr) p.x_scale = all.x_scale + first;
    p.out = apart.data + first * row_bytes;
    if (!packed) {
      p.num_groups = 1;
      p.weight = static_cast<const char*>(all.weight) + g * weight_bytes;
      if (all.weight_scale != nullptr) p.weight_scale = all.weight_scale + g * c.n;
    }
    CHECK_STATUS(gemm(p, {}, nullptr, nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  is_batch_invariant = false;
  count_case(together.host() == apart.host(),
             label + " " + c.text() + ": a group differs from itself alone");
}

// What the tensor cores take from a sum of so many products of e4m3 codes, relative to it: they
// keep 14 bits, and cut off the rest with each 32 products. On average the sum is half of its end
// then.
double hardware_loss(int64_t k) { return static_cast<double>(k) / 32 / (1 << 15); }

template <class T>
void check_unpacked(const Format& f, const Case& c, std::string label, Random& random) {
  const bool dense = f.operands == GemmOperands::kDense, blocks = f.scale_rows != 0;
  const int64_t scale_rows = !blocks ? 0 : random.below(2) ? kScaleBlock : 1;
  const Runner runner = random_runner(dense, random, &label);
  const Operands o = dense ? dense_operands<T>(c, random)
                           : coded_operands(f.operands, c, scale_rows, false, random);
  const bool fp8 = f.operands == GemmOperands::kFp8 && !blocks;
  Tolerance allowed = {relative_of<T>(c, 2e-3, 1.5e-3, 8e-3), fp8 ? 1.2e-2 : blocks ? 3e-3 : 3e-4};
  if (fp8) allowed.relative += hardware_loss(c.k);
  check_product<T>(c, o, o.wf, runner, label, allowed);
  // Not of scales of blocks, whose rows are apart.
  if (!blocks) check_alike<T>(c, o, label);
}

template <class T>
void check_packed(const Format& f, const Case& c, std::string label, Random& random) {
  const Operands o = packed_operands<T>(f.operands, c, 32, random);
  GemmParams sizes = o.params;
  c.describe<T>(&sizes);
  bool rounds;
  const Runner runner = random_packed_runner(sizes, random, &label, &rounds);
  const bool w4a8 = f.operands == GemmOperands::kW4A8;
  const Tolerance allowed = w4a8 ? Tolerance{relative_of<T>(c, 1e-5, 4.9e-4, 3.92e-3), 2e-5}
                                 : Tolerance{relative_of<T>(c, 2e-4, 1e-3, 8e-3), 3e-4};
  check_product<T>(c, o, rounds ? o.wf_rounded : o.wf, runner, label, allowed);
  check_alike<T>(c, o, label);
}

// Rows and experts; rows and columns of a weight.
constexpr int64_t kRows[][2] = {{1, 8},     {5, 3},     {32, 4},   {8, 128}, {16, 8},
                                {33, 60},   {130, 5},   {257, 3},  {513, 2}, {700, 1},
                                {300, 512}, {1024, 60}, {1500, 7}, {640, 11}};
constexpr int64_t kShapes[][2] = {{64, 64},    {208, 144}, {80, 16},   {1008, 528},
                                  {264, 1040}, {8, 4112},  {384, 768}, {2816, 256}};
constexpr int64_t kMostValues = 12 << 20;  // of weights; the reference is slow

void check_all(const Format& f) {
  Random random(static_cast<uint32_t>(f.operands) + 17);
  const bool packed = is_packed(f.operands);
  for (const auto& rows : kRows) {
    for (const auto& shape : kShapes) {
      if (rows[1] * shape[0] * shape[1] > kMostValues) continue;
      for (int variant = 0; variant < 6; ++variant) {
        Case c = {rows[0], shape[0], columns_of(f.operands, shape[1])};
        const int way = random.below(kEndWays);
        c.ends = random_ends(c.m, rows[1], way, random);
        c.gated = variant % 3 == 1 && c.n % (packed ? 32 : 16) == 0;
        c.bias = random.below(2);
        c.float_out = variant % 3 == 2 || (packed && random.below(4) == 0);
        const std::string label = format("%s ends %d", f.name, way);
        const auto check = [&](auto type) {
          using T = decltype(type);
          packed ? check_packed<T>(f, c, label, random) : check_unpacked<T>(f, c, label, random);
        };
        variant < 3 ? check(__nv_bfloat16()) : check(__half());
      }
    }
  }
}

// ------------------------------------------------------------------------------------------ time

struct Experts {
  const char* name;
  int64_t groups, top, hidden, inner;
};
constexpr Experts kModels[] = {{"Qwen3-30B-A3B", 128, 8, 2048, 768},
                               {"Mixtral-8x7B", 8, 2, 4096, 14336},
                               {"DeepSeek-V2-Lite", 64, 6, 2048, 1408},
                               {"Qwen1.5-MoE", 60, 4, 2048, 1408},
                               {"gpt-oss-20b", 32, 4, 2880, 2880}};
constexpr const char* kProducts[] = {"gate_up", "down"};
constexpr int kLaunches = 16;  // of a graph, each with ends of its own
constexpr double kMostBytes = 12e9;

// Where the experts of each of kLaunches launches end, [kLaunches, G]; *mean: experts of a launch.
std::vector<int32_t> random_routing(const Experts& model, int64_t tokens, double* mean) {
  Random random(static_cast<uint32_t>(tokens) + 5);
  std::vector<int32_t> all;
  for (int i = 0; i < kLaunches; ++i) {
    std::vector<int32_t> counts(model.groups, 0);
    for (int64_t token = 0; token < tokens; ++token) {
      std::vector<bool> taken(model.groups);
      for (int64_t k = 0; k < model.top; ++k) {
        int expert = random.below(static_cast<int>(model.groups));
        while (taken[expert]) expert = random.below(static_cast<int>(model.groups));
        taken[expert] = true;
        ++counts[expert];
      }
    }
    int32_t end = 0;
    for (const int32_t count : counts) {
      *mean += (count > 0) / static_cast<double>(kLaunches);
      all.push_back(end += count);
    }
  }
  return all;
}

struct Routing {
  int64_t tokens;
  double mean_experts = 0;
  Buffer<int32_t> ends;

  Routing(const Experts& model, int64_t count)
      : tokens(count), ends(random_routing(model, count, &mean_experts)) {}
};

// A model's two products of experts: gates and ups, and down.
struct Model {
  Experts experts;
  Format form;
  std::vector<std::unique_ptr<Buffer<uint8_t>>> weights[2];  // of layers
  Buffer<uint8_t> hidden, inner, out;  // x stays as it is: zeros take less power
  Buffer<float> x_scale, weight_scale;

  Model(const Experts& e, const Format& f, int64_t rows)
      : experts(e),
        form(f),
        hidden(filled(rows * e.hidden * 2, 98)),
        inner(filled(rows * e.inner * 2, 99)),
        out(rows * std::max(e.hidden, e.inner) * 2),
        x_scale(ones(gemm_block_stride(rows) * ceil_div(std::max(e.hidden, e.inner), kScaleBlock))),
        weight_scale(ones(e.groups * std::max(2 * e.inner, e.hidden) *
                          ceil_div(std::max(e.hidden, e.inner), kScaleBlock))) {
    const double layer = static_cast<double>(bytes(0) + bytes(1)) * e.groups;
    const int layers = std::clamp(static_cast<int>(kMostBytes / layer), 1, 4);
    for (int i = 0; i < 2 * layers; ++i) {
      weights[i % 2].push_back(
          std::make_unique<Buffer<uint8_t>>(filled(bytes(i % 2) * e.groups, i)));
    }
    CHECK_CUDA(cudaDeviceSynchronize());
  }

  int64_t features(int product) const { return product == 0 ? 2 * experts.inner : experts.hidden; }
  int64_t depth(int product) const { return product == 0 ? experts.hidden : experts.inner; }
  int64_t bytes(int product) const {  // of an expert's weight
    return weight_bytes(form, features(product), depth(product));
  }

  GemmParams params(int product, int launch, const Routing& routing) const {
    GemmParams p;
    p.operands = form.operands;
    p.x = product == 0 ? hidden.data : inner.data;
    p.out = out.data;
    p.weight = weights[product][launch % weights[product].size()]->data;
    if (has_x_codes(form.operands)) p.x_scale = x_scale.data;
    if (is_codes(form.operands) || form.operands == GemmOperands::kWeightInt8) {
      p.weight_scale = weight_scale.data;
    }
    p.scale_rows = form.scale_rows;
    p.group_size = form.group_size;
    p.num_rows = routing.tokens * experts.top;
    p.in_features = depth(product);
    p.out_features = features(product);
    p.gated = product == 0;
    p.num_groups = experts.groups;
    p.group_ends = routing.ends.data + launch * experts.groups;
    return p;
  }

  Timed timed(int product, const Routing& routing) const {
    return {format("%s %s, %ld tokens, %.1f experts, %s", form.name, experts.name, routing.tokens,
                   routing.mean_experts, kProducts[product]),
            kLaunches, [=, &routing](int i) { return params(product, std::max(i, 0), routing); },
            routing.mean_experts * bytes(product),
            2. * routing.tokens * experts.top * features(product) * depth(product)};
  }
};

void time_candidates(const Model& model, const Routing& routing) {
  for (int product = 0; product < 2; ++product) {
    std::vector<Way> ways = candidate_ways(model.form.operands, {});
    // Past the choice, which leaves rows that may share an expert to others.
    ways.push_back({"vector", [](const GemmParams& p, cudaStream_t stream) {
                      if (p.num_rows > 32) return Status::error("too many rows");
                      return gemm_stream_sm80(p, false, stream);
                    }});
    model.timed(product, routing).print(&ways);
  }
}

void time_chain(const Model& model, const Routing& routing) {
  printf("%s %s, %ld tokens, %.1f experts, both products", model.form.name, model.experts.name,
         routing.tokens, routing.mean_experts);
  for (const int way : {2, 1, 0}) {
    const double us = 2 * call_us(2 * kLaunches, 7, [&](int i, cudaStream_t stream) {
                        GemmParams p = model.params(i % 2, i / 2, routing);
                        p.dependent_launch = way > 0;
                        p.group_ends_ready = way == 2 && i % 2 == 1;
                        CHECK_STATUS(gemm(p, {}, nullptr, stream));
                      });
    printf(" | %s %.1f us (%.2f TB/s)",
           way == 2   ? "ends ready"
           : way == 1 ? "not ready"
                      : "no PDL",
           us, routing.mean_experts * (model.bytes(0) + model.bytes(1)) / us / 1e6);
  }
  printf("\n");
}

void time_tune(const Model& model, const Routing& routing) {
  for (int product = 0; product < 2; ++product) {
    const Timed timed = model.timed(product, routing);
    const GemmParams p = timed.params(0);
    std::vector<Way> ways = is_packed(p.operands) ? packed_ways(p) : small_ways(p);
    timed.print(&ways, 9);
  }
}

// Of the formats that are named, or bf16.
std::function<void(const Words&)> each_model(const std::vector<int64_t>& usual,
                                             void (*time)(const Model&, const Routing&)) {
  return [=](const Words& words) {
    const std::vector<int64_t> tokens = words.numbers(usual);
    const int64_t most = *std::max_element(tokens.begin(), tokens.end());
    for (const Experts& experts : rows_named(kModels, words)) {
      for (const Format& f : rows_named(kFormats, words, 1)) {
        const Model model(experts, f, most * experts.top);
        for (const int64_t count : tokens) time(model, Routing(experts, count));
      }
    }
  };
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<int64_t> few = {1, 2, 4, 8, 16, 32, 64, 128, 256};
  std::vector<Part> parts = {
      {"time", "decode", each_model(few, time_candidates)},
      {"time", "prompt", each_model({1024, 2048, 4096, 8192}, time_candidates)},
      {"time", "chain", each_model(few, time_chain)},
      {"time", "tune", each_model({1, 2, 8, 32, 128}, time_tune)},
  };
  for (const Format& f : kFormats) {
    if (std::string(f.name) == "int4_32") continue;
    parts.push_back({"check", f.name, [&f](const Words&) { check_all(f); }});
  }
  return run_parts(argc, argv, parts);
}
