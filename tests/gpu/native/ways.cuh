// Times of products: the ways of making one, and the products of a Llama-3-8B step.
#pragma once

#include <set>

#include "products.cuh"

extern "C" int regatta_launch_read(const void* data, int64_t bytes, void* sink, void* stream);

namespace regatta::native {

using Product = std::function<Status(const GemmParams&, cudaStream_t)>;

struct Way {
  std::string name;
  Product run;
  double us = 0.;  // of a launch; 0 where the kernel refuses
};

inline Way chosen_way(const cuda::GemmResources& resources = {}) {
  return {"chosen", [=](const GemmParams& p, cudaStream_t stream) {
            return cuda::gemm(p, resources, nullptr, stream);
          }};
}

// What is chosen, and each row of the table of candidates but the slowest one.
inline std::vector<Way> candidate_ways(GemmOperands operands,
                                       const cuda::GemmResources& resources) {
  std::vector<Way> ways = {chosen_way(resources)};
  std::set<std::string> known = {"generic"};
  for (const cuda::GemmCandidate& candidate : cuda::gemm_candidates()) {
    if (candidate.column != cuda::column_of(operands)) continue;
    if (!known.insert(candidate.name).second) continue;
    ways.push_back(
        {candidate.name, [=, name = candidate.name](const GemmParams& p, cudaStream_t s) {
           return cuda::gemm(p, resources, name, s);
         }});
  }
  return ways;
}

// One product of a model: the i-th launch has params(i); with -1, which runs alone, so that
// cuBLASLt may choose an algorithm, its output is no input.
struct Timed {
  std::string label;
  int launches;
  std::function<GemmParams(int)> params;
  double bytes, flops;  // of a launch

  double us(const Product& run) const {
    if (!run(params(-1), nullptr).ok() || !run(params(0), nullptr).ok()) return 0.;
    CHECK_CUDA(cudaDeviceSynchronize());
    return call_us(launches, 5,
                   [&](int i, cudaStream_t stream) { CHECK_STATUS(run(params(i), stream)); });
  }
  // Prints the times of all; most > 0: of the first and the fastest ones.
  void print(std::vector<Way>* ways, size_t most = 0) const {
    for (Way& way : *ways) way.us = us(way.run);
    std::vector<Way> shown = *ways;
    if (most > 0) {
      std::stable_sort(shown.begin() + 1, shown.end(),
                       [](const Way& a, const Way& b) { return a.us < b.us; });
    }
    printf("%s", label.c_str());
    size_t count = 0;
    for (const Way& way : shown) {
      if (way.us == 0. || (most > 0 && count++ > most)) continue;
      printf(" | %s %.2f us (%.2f TB/s, %.0f TFLOP/s)", way.name.c_str(), way.us,
             bytes / way.us / 1e6, flops / way.us / 1e6);
    }
    printf("\n");
  }
};

// From how many rows on a way is faster than another by 1 % at least.
class Threshold {
 public:
  void see(int64_t rows, double ours, double theirs) {
    const bool faster = theirs > 0. && theirs < .99 * ours;
    if (!faster) from_ = 0;
    if (faster && from_ == 0) from_ = rows;
  }
  int64_t from() const { return from_; }  // 0: nowhere

 private:
  int64_t from_ = 0;
};

// ---------------------------------------------------------------------------- tiles, for Hopper

// The tiles of gemm_sm90 for p: tokens, features, stages, split, trigger and blocks.
inline std::vector<Way> small_ways(const GemmParams& p) {
  std::vector<Way> ways = {chosen_way()};
  const cuda::GemmTile chosen = cuda::choose_gemm_tile(p);
  const bool groups = p.num_groups > 0;
  for (const int tokens : {chosen.tokens / 2, chosen.tokens, chosen.tokens * 2}) {
    for (const int features : {64, 128, 256}) {
      for (const int kilobytes : {50, 66, 104, 146, 212}) {
        for (const int shares : {1, 2, 4, 8}) {  // of k, or of groups blocks
          for (const int trigger : {-1, 4}) {
            const int stages = std::min(16, kilobytes * 8 / (features + tokens));
            if (tokens < 8 || tokens > (groups ? 64 : 128) || stages < 3) continue;
            if (groups && (features > 128 || shares > 2 || kilobytes * shares > 216)) continue;
            if (!groups && p.out_features / features * shares > 2200) continue;
            const cuda::GemmTile t = {tokens,  features,           stages, groups ? 1 : shares,
                                      trigger, groups ? shares : 1};
            ways.push_back(
                {format("{%d, %d, %d, %d, %d, %d}", t.tokens, t.features, t.stages, t.split,
                        t.trigger, t.blocks),
                 [t](const GemmParams& q, cudaStream_t s) { return cuda::gemm_sm90(q, t, s); }});
          }
        }
      }
    }
  }
  return ways;
}

inline Way packed_groups_way(const cuda::PackedGroupsTile& t) {
  return {
      format("%d tokens %d x %d KB grain %d trigger %d", t.tokens, t.blocks, t.kilobytes, t.grain,
             t.trigger),
      [t](const GemmParams& p, cudaStream_t s) { return cuda::gemm_packed_groups_sm90(p, t, s); }};
}

// The tiles of every kernel of packed weights for p; of groups those that differ in grains and
// triggers from the chosen one alone.
inline std::vector<Way> packed_ways(const GemmParams& p) {
  std::vector<Way> ways = {chosen_way()};
  const bool groups = p.num_groups > 0;
  const int64_t rows = cuda::GemmProblem(p).rows_of_weight();
  for (const int cluster : {1, 2}) {
    for (const int kilobytes : {112, 220}) {
      if (rows > 8 || (groups && cluster > 1)) continue;
      const cuda::GemvTile t = {cluster, kilobytes, p.gated && groups ? 4 : 3};
      ways.push_back(
          {format("vector %d x %d KB", cluster, kilobytes),
           [t](const GemmParams& q, cudaStream_t s) { return cuda::gemv_packed_sm90(q, t, s); }});
    }
  }
  for (const cuda::PackedTileCost& shape : cuda::kPackedTiles) {
    if (rows < (groups ? 8 : 65) || (groups && !shape.grouped) || (p.gated && !shape.gated))
      continue;
    ways.push_back({format("large %d x %d", shape.rows, shape.tokens),
                    [=](const GemmParams& q, cudaStream_t s) {
                      const cuda::PackedTiles t =
                          groups ? cuda::PackedTiles{shape.rows, shape.tokens}
                                 : cuda::packed_tiles_of(q, shape.rows, shape.tokens);
                      return cuda::gemm_packed_tiles_sm90(q, t, s);
                    }});
  }
  if (!groups) {
    const int tokens = static_cast<int>(std::clamp<int64_t>(rows, 16, 128));
    for (int split = 1; split <= 8 && rows >= 8; ++split) {
      const int64_t blocks =
          cuda::ceil_div(p.out_features, 128) * cuda::ceil_div(rows, tokens) * split;
      if (split > 1 && blocks > 132) continue;
      for (const int kilobytes : {110, 220}) {
        const int64_t unit = cuda::packed_weight_bytes(16, 128, p.operands, p.group_size);
        const int64_t stage = cuda::round_up(
            tokens * (p.operands == GemmOperands::kW4A8 ? 128 : 256) + 8 * unit, 1024);
        const cuda::GemmTile t = {tokens, 128, static_cast<int>(kilobytes * 1024 / stage), split,
                                  -1};
        ways.push_back(
            {format("small split %d, %d KB", split, kilobytes),
             [t](const GemmParams& q, cudaStream_t s) { return cuda::gemm_packed_sm90(q, t, s); }});
      }
    }
    return ways;
  }
  const cuda::PackedGroupsTile chosen = cuda::choose_packed_groups_tile(p);
  constexpr int kShared[][2] = {{1, 75}, {1, 112}, {1, 220}, {2, 56}, {2, 75}, {2, 112}, {3, 75}};
  for (const int tokens : {chosen.tokens / 2, chosen.tokens, chosen.tokens * 2}) {
    for (const auto& [blocks, kilobytes] : kShared) {
      if (tokens < 8 || tokens > 128) continue;
      ways.push_back(packed_groups_way({tokens, blocks, kilobytes, chosen.grain, chosen.trigger}));
    }
  }
  for (const int grain : {1, 2, 4}) {
    for (const int trigger : {-1, 0, 4}) {
      if (p.gated && grain > 2) continue;
      ways.push_back(
          packed_groups_way({chosen.tokens, chosen.blocks, chosen.kilobytes, grain, trigger}));
    }
  }
  return ways;
}

// ------------------------------------------------------------------------- a step of Llama-3-8B

constexpr int kLayers = 32;
constexpr int64_t kHidden = 4096, kInner = 14336, kQkv = 6144, kVocab = 128256;
enum Kind { kQkvProjection, kOutProjection, kGateUp, kDown, kHead, kKinds };
constexpr const char* kKindNames[] = {"qkv", "out", "gate_up", "down", "head"};
constexpr int64_t kN[] = {kQkv, kHidden, 2 * kInner, kHidden, kVocab};
constexpr int64_t kK[] = {kHidden, kHidden, kHidden, kInner, kHidden};

inline Buffer<float> ones(int64_t count) { return Buffer<float>(std::vector<float>(count, 1e-3f)); }
inline Buffer<uint8_t> filled(int64_t bytes, uint64_t seed) {
  Buffer<uint8_t> buffer(bytes);
  fill_bytes_kernel<<<2048, 256>>>(buffer.data, bytes, seed);
  return buffer;
}

// Products of `num_layers` layers in one format, and the head, of up to `rows` rows.
struct Llama {
  Format format;
  int num_layers;
  bool norms;  // 16 bits: folded into the products, as a step has them
  std::vector<std::unique_ptr<Buffer<uint8_t>>> weights;  // four of each layer, and the head
  Buffer<uint8_t> hidden, qkv, inner, codes, norm_weight;
  Buffer<float> x_scale, weight_scale, sumsq, logits;

  Llama(const Format& f, int64_t rows, bool with_norms = false, int layers = kLayers)
      : format(f),
        num_layers(layers),
        norms(with_norms && f.operands == GemmOperands::kDense),
        hidden(filled(rows * kHidden * 2, 98)),
        qkv(filled(rows * kQkv * 2, 97)),
        inner(filled(rows * 2 * kInner * 2, 96)),
        codes(filled(rows * kInner, 95)),
        norm_weight(filled(kHidden * 2, 94)),
        x_scale(ones(gemm_block_stride(rows) * cuda::ceil_div(kInner, kScaleBlock))),
        weight_scale(ones(kVocab)),
        sumsq(std::vector<float>(rows * kHidden / 16, 16.f)),
        logits(std::min<int64_t>(rows, 128) * kVocab) {
    for (int i = 0; i <= num_layers * 4; ++i) {
      const int kind = kind_of(i);
      if (kind == kHead && is_packed(f.operands)) break;
      weights.push_back(
          std::make_unique<Buffer<uint8_t>>(weight_bytes(format, kN[kind], kK[kind])));
      if (f.operands == GemmOperands::kDense) {
        fill_random(reinterpret_cast<__nv_bfloat16*>(weights.back()->data), kN[kind] * kK[kind], i,
                    1.f / std::sqrt(static_cast<float>(kK[kind])));
      } else {
        fill_bytes_kernel<<<2048, 256>>>(weights.back()->data, weights.back()->size, i);
      }
    }
    CHECK_CUDA(cudaDeviceSynchronize());
  }

  int kind_of(int index) const { return index == num_layers * 4 ? kHead : index % 4; }
  // Weights of a step of so many rows: a step of many has no head.
  int count(int64_t rows) const {
    return rows > 128 ? num_layers * 4 : static_cast<int>(weights.size());
  }
  double bytes(int64_t rows) const {
    double sum = 0.;
    for (int i = 0; i < count(rows); ++i) sum += static_cast<double>(weights[i]->size);
    return sum;
  }

  GemmParams params(int index, int64_t rows) const {
    const int kind = kind_of(index);
    GemmParams p;
    p.operands = format.operands;
    p.x = kind == kOutProjection ? qkv.data : kind == kDown ? inner.data : hidden.data;
    if (has_x_codes(format.operands)) p.x = codes.data, p.x_scale = x_scale.data;
    p.weight = weights[index]->data;
    if (is_codes(format.operands) || format.operands == GemmOperands::kWeightInt8) {
      p.weight_scale = weight_scale.data;
    }
    p.group_size = format.group_size;
    p.scale_rows = format.scale_rows;
    p.num_rows = rows;
    p.in_features = kK[kind];
    p.out_features = kN[kind];
    p.out = kind == kQkvProjection ? qkv.data : kind == kGateUp ? inner.data : hidden.data;
    if (kind == kHead) p.out = logits.data, p.out_dtype = DType::kFloat32;
    if (kind == kOutProjection || kind == kDown) p.residual = hidden.data;
    p.gated = kind == kGateUp;
    p.epsilon = 1e-5f;
    if (norms && p.residual != nullptr) p.sumsq_out = sumsq.data;
    if (norms && p.residual == nullptr) {
      p.sumsq = sumsq.data;
      p.num_sumsq = kHidden / gemm_sumsq_columns(rows);
    }
    return p;
  }
  // Of the 16-bit x of p, with the norm where a layer has one.
  QuantizeRowsParams quantization(const GemmParams& p) const {
    const Buffer<uint8_t>& x = p.in_features == kInner ? inner : p.residual ? qkv : hidden;
    QuantizeRowsParams q = quantization_of(x.data, codes, x_scale, p.num_rows, p.in_features);
    q.operands = p.operands == GemmOperands::kFp8 ? GemmOperands::kFp8 : GemmOperands::kInt8;
    q.blocks = p.scale_rows != 0;
    q.normalize = p.residual == nullptr;
    if (q.normalize) q.norm_weight = norm_weight.data;
    return q;
  }

  // Products of a kind, layers in turn: all of them while rows are few.
  Timed timed(int kind, int64_t rows) const {
    const int launches = rows > 256 ? std::min(num_layers, 4) : num_layers;
    return {native::format("%s M %ld %s", format.name, rows, kKindNames[kind]), launches,
            [=](int i) {
              GemmParams p =
                  params(kind == kHead ? num_layers * 4 : std::max(i, 0) * 4 + kind, rows);
              if (i < 0 && p.residual != nullptr) p.out = inner.data;
              return p;
            },
            static_cast<double>(weights[kind == kHead ? num_layers * 4 : kind]->size),
            2. * rows * kN[kind] * kK[kind]};
  }

  // Milliseconds of a step's products.
  double step_ms(int64_t rows, const Product& run, int replays = 9) const {
    return graph_ms(
        [&](cudaStream_t stream) {
          for (int i = 0; i < count(rows); ++i) CHECK_STATUS(run(params(i, rows), stream));
        },
        replays);
  }
};

// Times every way at each number of rows; last, what rows of select.cu take: from how many rows on
// each is faster than the first.
inline void time_ways(const Llama& model, const std::vector<int64_t>& all_rows, int num_kinds,
                      const std::function<std::vector<Way>(const GemmParams&)>& ways_of,
                      size_t most = 0) {
  std::vector<std::vector<Threshold>> thresholds(num_kinds);
  std::vector<std::string> names;
  for (const int64_t rows : all_rows) {
    double first = 0., fastest = 0.;
    for (int kind = 0; kind < num_kinds; ++kind) {
      if (kind == kHead && rows > 128) continue;
      const Timed timed = model.timed(kind, rows);
      std::vector<Way> ways = ways_of(timed.params(0));
      timed.print(&ways, most);
      double least = ways[0].us;
      thresholds[kind].resize(ways.size());
      names.clear();
      for (size_t i = 0; i < ways.size(); ++i) {
        if (ways[i].us > 0.) least = std::min(least, ways[i].us);
        thresholds[kind][i].see(rows, ways[0].us, ways[i].us);
        names.push_back(ways[i].name);
      }
      const int times = kind == kHead ? 1 : kLayers;
      first += ways[0].us * times, fastest += least * times;
    }
    printf("%s M %ld: a step %.3f ms, with the fastest %.3f\n", model.format.name, rows,
           first / 1e3, fastest / 1e3);
  }
  for (size_t i = 1; i < names.size() && most == 0; ++i) {
    printf("%s: %s is faster than %s from", model.format.name, names[i].c_str(), names[0].c_str());
    for (int kind = 0; kind < num_kinds; ++kind) {
      printf(" | %s %ld", kKindNames[kind], thresholds[kind][i].from());
    }
    printf(" rows (0: nowhere)\n");
  }
}

}  // namespace regatta::native
