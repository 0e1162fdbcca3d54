// Every operator on every kernel set that this CPU has, against the scalar one: all schemes, cache
// formats and dtypes, odd shapes, random values. Prints a line for each set; ends with 0 where
// nothing differs by more than kTolerances say.
//
//   kernel_sets [SET...]     these sets alone; each must be there
//   kernel_sets --list       the sets that are there, best first
//
// With -DROWS_ALONE the operators of rows alone, which are compiled in seconds.
#include "kernel_sets.h"

#include <array>
#include <limits>

#include "blocks/attention/block.h"
#include "blocks/delta_net/block.h"
#include "blocks/experts/block.h"
#include "blocks/latent_attention/block.h"
#include "blocks/mlp/block.h"
#include "blocks/short_conv/block.h"
#include "regatta/activate.h"
#include "regatta/add.h"
#include "regatta/communicator.h"
#include "regatta/embedding.h"
#include "regatta/logits.h"
#include "regatta/norm.h"
#include "regatta/sample.h"

#define REGATTA_INL "kernel_sets.inl"
#include "cpu/foreach_isa.h"

namespace kernel_sets {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
constexpr DType kFloat = DType::kFloat32, kInt = DType::kInt32;

// --- numbers

void test_numbers(Bench& bench) {
  using namespace regatta::cpu;  // NOLINT(google-build-using-namespace): REGATTA_IN_ISA
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr int kProbes = scalar::kProbes, kAnswers = scalar::kAnswers;
  const float special[] = {0.0f,    -0.0f,    1.0f,    -1.0f,   kNan,  kInf,   -kInf,   88.8f,
                           -87.4f,  65520.0f, 70000.f, 1e-40f,  3e38f, -3e38f, 0.5f,    126.5f,
                           -126.5f, 1e10f,    -1e10f,  6.1e-5f, 1e-7f, 2.5f,   -126.0f, -125.9f};
  std::array<float, kProbes> x, y;
  std::normal_distribution<float> draw(0.0f, 4.0f);
  for (int i = 0; i < kProbes; ++i) {
    x[i] = i < 24 ? special[i] : draw(bench.random());
    y[i] = i % 3 ? special[(5 * i + 7) % 24] : draw(bench.random());
  }
  const auto isa_of = [](const std::string& name) {
    size_t i = 0;
    while (name != isa_name(static_cast<Isa>(i))) ++i;
    return static_cast<Isa>(i);
  };
  const Isa isa = isa_of(bench.set());
  std::vector<float> expected(kProbes * kAnswers), made(expected.size());
  scalar::probe(x.data(), y.data(), expected.data());
  REGATTA_IN_ISA(isa, probe(x.data(), y.data(), made.data()));
  for (int i = 0; i < kProbes * kAnswers; ++i) {
    const float a = expected[i], b = made[i];
    if (a == b || (std::isnan(a) && std::isnan(b)) || std::fabs(a - b) <= 4e-7f * std::fabs(a)) {
      continue;
    }
    // fma() rounds once, or twice, and what is below the least normal number may be 0.
    if (std::fabs(a - b) <= 2e-6f * std::fabs(x[i % kProbes] * y[i % kProbes])) continue;
    if (std::fabs(a - b) <= 1.2e-38f) continue;
    std::printf("answer %d of %g and %g: scalar %g, %s %g\n", i / kProbes, x[i % kProbes],
                y[i % kProbes], a, bench.set().c_str(), b);
    return bench.fail("vec.h");
  }
  std::array<float, 33> numbers;
  for (float& number : numbers) number = draw(bench.random());
  const float sum = scalar::probe_sum(numbers.data());
  const float other = REGATTA_IN_ISA(isa, probe_sum(numbers.data()));
  if (std::fabs(sum - other) > 1e-4f) bench.fail("sums of rests");
  // Beyond the range, at ties, and random ones.
  float wide[32] = {1e10f, -1e10f, kInf, -kInf, 126.5f, -126.5f, 0.5f, 1.5f, -0.5f, 127.4f, 200.0f};
  for (int i = 11; i < 32; ++i) wide[i] = 30.0f * draw(bench.random());
  int8_t a[32], b[32];
  const int32_t a_sum = scalar::probe_int8(wide, a);
  const int32_t b_sum = REGATTA_IN_ISA(isa, probe_int8(wide, b));
  if (a_sum != b_sum || std::memcmp(a, b, 32) != 0) bench.fail("store_int8");
}

// --- small operators

void test_rows(Bench& bench, DType dtype) {
  for (const int64_t width : {1, 7, 40, 131}) {
    const int64_t rows = 3;
    Tensor& x = bench.normal(dtype, {rows, 2 * width});
    Tensor& y = bench.normal(dtype, {rows, width});
    Tensor& z = bench.normal(dtype, {rows, width});
    Tensor& out = bench.empty(dtype, {rows, width});
    Tensor& sum = bench.empty(dtype, {rows, width});
    AddParams add;
    add.a = y.data(), add.b = z.data(), add.out = out.data();
    add.count = rows * width;
    add.a_scale = 0.7f, add.b_scale = -1.3f, add.dtype = dtype;
    bench.compare("add", "add", dtype, [&] { return cpu::add(add); }, {&out});
    for (const auto function : {Function::kSilu, Function::kGelu, Function::kGeluTanh,
                                Function::kRelu, Function::kReluSquared}) {
      ActivateParams activate;
      activate.x = x.data(), activate.out = out.data();
      activate.num_tokens = rows, activate.intermediate_size = width, activate.dtype = dtype;
      activate.activation.function = function;
      if (function == Function::kSilu && width == 40) {  // as gpt-oss has it
        activate.activation.clamp = 7.0f, activate.activation.slope = 1.702f;
        activate.activation.up_offset = 1.0f;
      }
      bench.compare(
          "activate", "activate", dtype, [&] { return cpu::activate(activate); }, {&out},
          kFunctionNames[static_cast<int>(function)]);
    }
    for (const bool layer : {false, true}) {
      NormParams norm;
      norm.x = y.data(), norm.residual = z.data();
      norm.out = out.data(), norm.residual_out = sum.data();
      norm.weight = bench.normal(dtype, {width}).data();
      norm.bias = layer ? bench.normal(dtype, {width}).data() : nullptr;
      norm.num_tokens = rows, norm.hidden_size = width, norm.epsilon = 1e-5f, norm.dtype = dtype;
      norm.kind = layer ? NormKind::kLayer : NormKind::kRms;
      norm.plus_one = !layer && width == 40;
      bench.compare("norm", "norm", dtype, [&] { return cpu::norm(norm); }, {&sum, &out});
    }
    SumPartsParams parts;
    parts.parts[0] = y.data(), parts.parts[1] = z.data(), parts.parts[2] = x.data();
    parts.num_parts = 3, parts.out = out.data(), parts.count = rows * width, parts.dtype = dtype;
    bench.compare("sum_parts", "sum_parts", dtype, [&] { return cpu::sum_parts(parts); }, {&out});
    PackDenseParams pack = {x.data(), nullptr, 2 * width, rows, true, dtype, dtype};
    const bool pairs = dtype == DType::kBFloat16;
    Tensor& packed = bench.empty(dtype, {(pairs ? (2 * width + 1) / 2 * 2 : 2 * width) * 32});
    pack.packed = packed.data();
    bench.compare("pack_dense", "pack_dense", dtype, [&] { return cpu::pack_dense(pack); },
                  {&packed});
  }
}

#ifndef ROWS_ALONE
void test_ends(Bench& bench, DType dtype) {
  const int64_t tokens = 5, vocab = 96, hidden = 77;
  Tensor& ids = bench.whole(kInt, {tokens}, 0, static_cast<int>(vocab) - 1);
  Tensor& weight = bench.normal(dtype, {vocab, hidden});
  Tensor& out = bench.empty(dtype, {tokens, hidden});
  const LinearWeights head = bench.linear(SchemeId::kDense, dtype, hidden, vocab);
  for (const bool packed : {false, true}) {
    EmbeddingParams embedding = {};
    embedding.token_ids = ids.data<int32_t>();
    embedding.weight = packed ? head.tensors[0].data : weight.data();
    embedding.out = out.data();
    embedding.num_tokens = tokens, embedding.vocab_size = vocab, embedding.hidden_size = hidden;
    embedding.packed = packed, embedding.dtype = dtype, embedding.scale = 1.25f;
    bench.compare("embedding", "embedding", dtype, [&] { return cpu::embedding(embedding); },
                  {&out});
  }
  Tensor& rows = bench.of(kInt, {4, 1});
  Tensor& logits = bench.empty(kFloat, {2, vocab});
  Tensor& norm = bench.normal(dtype, {hidden}, 0.1, 1.0);
  Tensor& bias = bench.normal(dtype, {vocab});
  LogitsParams p = {};
  p.hidden = bench.normal(dtype, {tokens, hidden}).data();
  p.norm_weight = norm.data(), p.bias = bias.data();
  p.head = head.tensors, p.num_head = 1;
  p.logit_indices = rows.data<int32_t>(), p.logits = logits.data<float>();
  p.num_tokens = tokens, p.num_logits = 2, p.hidden_size = hidden, p.vocab_size = vocab;
  p.epsilon = 1e-6f, p.dtype = dtype, p.scale = 0.5f, p.softcap = 20.0f;
  bench.compare("logits", "logits", dtype, [&] { return cpu::logits(p); }, {&logits});
}

void test_sample(Bench& bench) {
  const int64_t rows = 9, vocab = 1237;
  Tensor& logits = bench.normal(kFloat, {rows, vocab}, 3.0);
  logits.set(2 * vocab + 77, std::numeric_limits<double>::quiet_NaN());  // a row that yields -1
  logits.set(3 * vocab + 5, -std::numeric_limits<double>::infinity());
  Tensor& temperature = bench.of(kFloat, {0, 1, 1, 0.7, 0, 1.3, 0.9, 1, 1});
  Tensor& top_k = bench.of(kInt, {0, 20, 0, 0, 0, 50, 0, 1, 0});
  Tensor& top_p = bench.of(kFloat, {1, 0.9, 1, 0.8, 1, 1, 0.95, 1, 1});
  Tensor& min_p = bench.of(kFloat, {0, 0, 0, 0.02, 0, 0.1, 0, 0, 0});
  Tensor& typical = bench.of(kFloat, {1, 1, 1, 1, 1, 1, 0.9, 1, 1});
  Tensor& seeds = bench.whole(DType::kInt64, {rows}, 0, 1 << 30);
  Tensor& offsets = bench.whole(DType::kInt64, {rows}, 0, 99);
  Tensor& ids = bench.empty(kInt, {rows});
  SampleParams p;
  p.logits = logits.data<float>(), p.temperature = temperature.data<float>();
  p.top_k = top_k.data<int32_t>(), p.top_p = top_p.data<float>(), p.min_p = min_p.data<float>();
  p.typical_p = typical.data<float>(), p.seeds = seeds.data<int64_t>();
  p.offsets = offsets.data<int64_t>(), p.token_ids = ids.data<int32_t>();
  p.num_rows = rows, p.vocab_size = vocab;
  bench.compare("sample", "sample", kFloat, [&] { return cpu::sample(p); }, {&ids});
}

// --- products

const char* name_of(KvFormat format) { return kv_format_info(format).name; }

struct SchemeCase {
  SchemeId scheme;
  bool zeros, rounds;
  int64_t groups;  // 0: as the scheme usually has
};
constexpr SchemeCase kSchemeCases[] = {{SchemeId::kDense, false, false, 0},
                                       {SchemeId::kWeightOnlyInt8, false, true, 0},
                                       {SchemeId::kWeightOnlyInt8, true, true, 0},
                                       {SchemeId::kWeightOnlyInt8, false, false, 1},
                                       {SchemeId::kWeightOnlyInt8, true, false, 0},
                                       {SchemeId::kWeightOnlyInt8, false, true, 1},
                                       {SchemeId::kWeightOnlyInt4, false, true, 0},
                                       {SchemeId::kWeightOnlyInt4, true, true, 0},
                                       {SchemeId::kWeightOnlyInt4, false, false, 0},
                                       {SchemeId::kWeightOnlyInt4, true, false, 0},
                                       {SchemeId::kWeightOnlyMxfp4, false, false, 0},
                                       {SchemeId::kW4A8, false, false, 0},
                                       {SchemeId::kA8W8, false, true, 0}};

bool has_int8_rows(const SchemeCase& of, DType dtype) {
  if (scheme_info(of.scheme).activations == Activations::kInt8) return true;
  return of.rounds && of.scheme != SchemeId::kDense && dtype != kFloat;
}

void test_linear(Bench& bench, DType dtype) {
  for (const SchemeCase& of : kSchemeCases) {
    for (const int64_t in : {192, 77}) {
      if (in == 77 && of.scheme != SchemeId::kDense && of.groups != 1) continue;
      const int64_t out = 72;
      const LinearWeights weights =
          bench.linear(of.scheme, dtype, in, out, 0, of.zeros, of.rounds, of.groups);
      Tensor& bias = bench.normal(dtype, {out}, 0.1);
      for (const int64_t rows : {1, 2, 5, 31}) {
        Tensor& made = bench.empty(dtype, {rows, out});
        LinearParams p = {};
        p.x = bench.normal(dtype, {rows, in}).data();
        p.weight = weights.tensors, p.num_weights = scheme_info(of.scheme).num_tensors;
        p.bias = bias.data(), p.out = made.data();
        p.num_tokens = rows, p.in_features = in, p.out_features = out;
        p.dtype = dtype, p.scheme = of.scheme;
        const std::string what = std::string(scheme_info(of.scheme).name) +
                                 (of.zeros ? " zeros" : "") + (of.rounds ? " int8" : "") + " " +
                                 std::to_string(rows) + "x" + std::to_string(in);
        bench.compare(
            "linear", has_int8_rows(of, dtype) ? "int8" : "linear", dtype,
            [&] { return cpu::linear(p); }, {&made}, what);
        if (rows < 31) continue;
        // Rows alone are the same bits, whatever kernel few rows have.
        Tensor& alone = bench.empty(dtype, {2, out});
        p.out = alone.data(), p.num_tokens = 2;
        bench.run_on_set([&] { return cpu::linear(p); });
        if (std::memcmp(alone.data(), made.data(), alone.num_bytes()) != 0) {
          bench.fail(what + " " + dtype_name(dtype) + ": two rows are other bits alone");
        }
      }
    }
  }
}

// --- attention

// A step of some requests: spans of tokens behind contexts that are in the cache.
struct Step {
  Step(Bench& bench, std::vector<std::array<int64_t, 2>> spans, int64_t size) : block_size(size) {
    std::vector<double> borders = {0}, contexts, places, slots;
    for (const auto& [tokens, context] : spans) {
      most = std::max(most, (context + size - 1) / size);
    }
    std::vector<double> tables(spans.size() * static_cast<size_t>(most), 0.0);
    for (size_t i = 0; i < spans.size(); ++i) {
      const auto [tokens, context] = spans[i];
      const int64_t count = (context + size - 1) / size;
      for (int64_t b = 0; b < count; ++b) tables[i * most + b] = num_blocks + count - 1 - b;
      for (int64_t t = context - tokens; t < context; ++t) {
        places.push_back(static_cast<double>(t));
        slots.push_back(tables[i * most + t / size] * size + t % size);
      }
      num_blocks += count;
      borders.push_back(borders.back() + tokens);
      contexts.push_back(static_cast<double>(context));
      longest = std::max(longest, context);
    }
    num_tokens = static_cast<int64_t>(borders.back());
    positions = bench.of(kInt, places).data<int32_t>();
    slot_mapping = bench.of(kInt, slots).data<int32_t>();
    batch.cu_seqlens_q = bench.of(kInt, borders).data<int32_t>();
    batch.context_lens = bench.of(kInt, contexts).data<int32_t>();
    batch.block_tables = bench.of(kInt, tables).data<int32_t>();
    batch.num_tokens = num_tokens, batch.num_seqs = static_cast<int64_t>(spans.size());
    batch.max_blocks = most;
  }

  int64_t block_size, most = 1, num_blocks = 0, num_tokens = 0, longest = 0;
  const int32_t *positions, *slot_mapping;
  AttentionBatch batch;
};

// A cache with rows in it, and its tensors.
struct Cache {
  Cache(Bench& bench, const Step& step, KvFormat format, DType dtype, int64_t heads, int64_t dim) {
    const KvFormatInfo& info = kv_format_info(format);
    const std::vector<int64_t> rows = {step.num_blocks, heads, step.block_size};
    const auto made = [&]() -> Tensor& {
      if (info.code_bits == 0) return bench.normal(dtype, {rows[0], rows[1], rows[2], dim});
      const int64_t bytes = kv_row_bytes(format, dim, 2);
      // e4m3: no NaN, 0x7f and 0xff.
      const int largest = format == KvFormat::kFp8 ? 0x7e : 0xff;
      return bench.whole(DType::kUInt8, {rows[0], rows[1], rows[2], bytes}, 0, largest);
    };
    cache.format = format, cache.num_blocks = step.num_blocks, cache.block_size = step.block_size;
    tensors = {&made(), &made()};
    cache.key = tensors[0]->data(), cache.value = tensors[1]->data();
    if (info.code_bits == 0) return;
    std::vector<int64_t> shape = {heads};
    if (info.token_scales) shape = {rows[0], rows[1], rows[2], info.scale_floats};
    for (float** to : {&cache.key_scale, &cache.value_scale}) {
      const double unit = format == KvFormat::kFp8 ? 0.1 : info.code_bits == 8 ? 0.02 : 0.2;
      tensors.push_back(&bench.normal(kFloat, shape, unit / 8, unit));
      *to = tensors.back()->data<float>();
    }
  }

  PagedCache cache;
  std::vector<Tensor*> tensors;
};

float* rope_table(Bench& bench, int64_t positions, int64_t dim) {
  Tensor& table = bench.empty(kFloat, {positions, dim});
  for (int64_t i = 0; i < positions; ++i) {
    for (int64_t j = 0; j < dim / 2; ++j) {
      const double angle = i * std::pow(1e4, -2.0 * j / dim);
      table.set(i * dim + j, std::cos(angle));
      table.set(i * dim + dim / 2 + j, std::sin(angle));
    }
  }
  return table.data<float>();
}

void test_attention(Bench& bench, DType dtype) {
  const int64_t heads = 6, kv_heads = 2;
  for (const int64_t dim : {64, 36}) {
    const Step step(bench, {{1, 70}, {19, 23}, {1, 530}, {3, 3}}, 16);
    for (int f = 0; f < kNumKvFormats; ++f) {
      const auto format = static_cast<KvFormat>(f);
      Cache cache(bench, step, format, dtype, kv_heads, dim);
      Tensor& q = bench.normal(dtype, {step.num_tokens, heads * dim});
      Tensor& out = bench.empty(dtype, {step.num_tokens, heads * dim});
      PagedAttentionParams p;
      p.dtype = dtype, p.q = q.data(), p.out = out.data(), p.cache = cache.cache;
      p.batch = step.batch;
      p.num_heads = heads, p.num_kv_heads = kv_heads, p.head_dim = dim, p.softmax_scale = 0.1f;
      const auto attend = [&](const char* what) {
        bench.compare(
            "paged_attention", "paged_attention", dtype, [&] { return cpu::paged_attention(p); },
            {&out}, std::string(name_of(format)) + what);
      };
      attend("");
      if (dim == 36) {
        p.window = 17, p.softcap = 5.0f;
        p.sinks = bench.normal(kFloat, {heads}).data<float>();
        attend(", window, sinks");
        p.window = -1, p.softcap = 0.0f, p.sinks = nullptr;
        p.slopes = bench.normal(kFloat, {heads}, 0.01, 0.1).data<float>();
        attend(", slopes");
      }
      RopeAndCacheWriteParams write;
      write.dtype = dtype;
      write.qkv = bench.normal(dtype, {step.num_tokens, (heads + 2 * kv_heads) * dim}).data();
      write.positions = step.positions, write.slot_mapping = step.slot_mapping;
      write.rotary_dim = dim / 4 * 2, write.num_positions = step.longest;
      write.rope_cache = rope_table(bench, step.longest, write.rotary_dim);
      write.q_norm = bench.normal(dtype, {dim}, 0.1, 1.0).data();
      write.k_norm = bench.normal(dtype, {dim}, 0.1, 1.0).data();
      write.cache = cache.cache, write.q_out = out.data();
      write.num_tokens = step.num_tokens, write.num_heads = heads, write.num_kv_heads = kv_heads;
      write.head_dim = dim, write.epsilon = 1e-6f, write.interleaved = dim == 36;
      std::vector<Tensor*> written = {&out};
      written.insert(written.end(), cache.tensors.begin(), cache.tensors.end());
      bench.compare(
          "rope_and_cache_write", "rope_and_cache_write", dtype,
          [&] { return cpu::rope_and_cache_write(write); }, written, name_of(format));
    }
    bench.end_case();
  }
}

// --- blocks

// What every block has: hidden states, a norm, room for the output.
template <class Params>
Params block_params(Bench& bench, DType dtype, int64_t tokens, int64_t hidden, Tensor** out) {
  Params p;
  p.dtype = dtype, p.num_tokens = tokens, p.hidden_size = hidden;
  p.hidden = bench.normal(dtype, {tokens, hidden}).data();
  *out = &bench.empty(dtype, {tokens, hidden});
  p.hidden_out = (*out)->data();
  p.norm.weight = bench.normal(dtype, {hidden}, 0.1, 1.0).data();
  return p;
}

Norm rms() {
  Norm norm;
  norm.is_there = true;
  return norm;
}

void take_step(const Step& step, BlockParams* p) {
  p->positions = step.positions, p->slot_mapping = step.slot_mapping, p->batch = step.batch;
}

void test_attention_block(Bench& bench, DType dtype) {
  const int64_t hidden = 96, heads = 4, kv_heads = 2, dim = 32;
  for (int f = 0; f < kNumKvFormats; ++f) {
    const auto format = static_cast<KvFormat>(f);
    const Step step(bench, {{2, 20}, {1, 75}, {17, 17}}, 8);
    Cache cache(bench, step, format, dtype, kv_heads, dim);
    Tensor* out;
    auto p = block_params<AttentionBlockParams>(bench, dtype, step.num_tokens, hidden, &out);
    take_step(step, &p);
    AttentionBlock& block = p.block;
    block.num_heads = heads, block.num_kv_heads = kv_heads, block.head_dim = dim;
    block.softmax_scale = 0.17f, block.norm = block.qk_norm = rms(), block.kv_format = format;
    block.out_gate = f == 1;
    p.q_norm.weight = bench.normal(dtype, {dim}, 0.1, 1.0).data();
    p.k_norm.weight = bench.normal(dtype, {dim}, 0.1, 1.0).data();
    block.qkv = block.out = f == 2 ? SchemeId::kWeightOnlyInt8 : SchemeId::kDense;
    p.qkv = bench.linear(block.qkv, dtype, hidden, block.made_size());
    p.out = bench.linear(block.out, dtype, block.q_size(), hidden);
    p.rotary_dim = dim, p.num_positions = step.longest;
    p.rope_cache = rope_table(bench, step.longest, dim);
    p.cache = cache.cache;
    bench.compare(
        "attention_block", f ? "kv_codes" : "attention_block", dtype,
        [&] { return cpu::attention_block(p); }, {out}, name_of(format));
    bench.end_case();
  }
}

void test_latent_attention(Bench& bench, DType dtype) {
  const int64_t hidden = 96, heads = 3, rank = 64, own = 32, rotated = 16, values = 32;
  for (const bool codes : {false, true}) {
    for (const LatentForm form : {LatentForm::kAbsorbed, LatentForm::kExpanded}) {
      const Step step(bench, {{1, 40}, {9, 30}}, 16);
      Tensor* out;
      auto p =
          block_params<LatentAttentionBlockParams>(bench, dtype, step.num_tokens, hidden, &out);
      take_step(step, &p);
      LatentAttentionBlock& block = p.block;
      block.num_heads = heads, block.kv_lora_rank = rank, block.qk_nope_head_dim = own;
      block.qk_rope_head_dim = rotated, block.v_head_dim = values, block.q_lora_rank = 48;
      block.softmax_scale = 0.14f, block.norm = block.q_a_norm = block.kv_a_norm = rms();
      block.form = form, block.kv_format = codes ? KvFormat::kFp8 : KvFormat::kDense;
      p.q_a_norm.weight = bench.normal(dtype, {48}, 0.1, 1.0).data();
      p.kv_a_norm.weight = bench.normal(dtype, {rank}, 0.1, 1.0).data();
      p.qkv_a = bench.linear(SchemeId::kDense, dtype, hidden, block.a_size());
      p.q_b = bench.linear(SchemeId::kDense, dtype, 48, block.q_size());
      p.out = bench.linear(SchemeId::kDense, dtype, block.mixed_size(), hidden);
      p.kv_b.key_up = *bench.linear(SchemeId::kDense, dtype, rank, own, heads).tensors;
      p.kv_b.value_up = *bench.linear(SchemeId::kDense, dtype, rank, values, heads).tensors;
      p.kv_b.key_absorb = *bench.linear(SchemeId::kDense, dtype, own, rank, heads).tensors;
      p.rotary_dim = rotated, p.num_positions = step.longest;
      p.rope_cache = rope_table(bench, step.longest, rotated);
      const std::vector<int64_t> rows = {step.num_blocks, 1, step.block_size};
      const int64_t width = codes ? rank : rank + rotated;
      Tensor& latents = codes ? bench.whole(DType::kUInt8, {rows[0], 1, rows[2], width}, 0, 0x7e)
                              : bench.normal(dtype, {rows[0], 1, rows[2], width});
      PagedCache& cache = p.cache;
      cache.key = cache.value = latents.data();
      cache.num_blocks = step.num_blocks, cache.block_size = step.block_size;
      cache.format = block.kv_format;
      if (codes) {
        cache.key_scale = bench.normal(kFloat, rows, 1e-3, 1e-2).data<float>();
        cache.value_scale = cache.key_scale;
        cache.tail = bench.normal(dtype, {rows[0], 1, rows[2], rotated}).data();
      }
      bench.compare(
          "latent_attention_block", codes ? "kv_codes" : "latent_attention_block", dtype,
          [&] { return cpu::latent_attention_block(p); }, {out},
          std::string(kLatentFormNames[static_cast<int>(form)]) + (codes ? " fp8" : ""));
      bench.end_case();
    }
  }
}

void test_mlp(Bench& bench, DType dtype) {
  for (const SchemeCase& of : kSchemeCases) {
    const int64_t tokens = 5, hidden = 64, inner = 96;
    Tensor* out;
    auto p = block_params<MlpBlockParams>(bench, dtype, tokens, hidden, &out);
    p.block.intermediate_size = inner, p.block.norm = rms();
    p.block.gate_up = p.block.down = of.scheme;
    p.gate_up =
        bench.linear(of.scheme, dtype, hidden, 2 * inner, 0, of.zeros, of.rounds, of.groups);
    p.down = bench.linear(of.scheme, dtype, inner, hidden, 0, of.zeros, of.rounds, of.groups);
    bench.compare(
        "mlp_block", has_int8_rows(of, dtype) ? "int8" : "mlp_block", dtype,
        [&] { return cpu::mlp_block(p); }, {out}, scheme_info(of.scheme).name);
    bench.end_case();
  }
}

void test_experts(Bench& bench, DType dtype) {
  for (const SchemeId scheme : {SchemeId::kDense, SchemeId::kWeightOnlyMxfp4}) {
    const int64_t tokens = 7, hidden = 64, inner = 64, experts = 6;
    Tensor* out;
    auto p = block_params<ExpertBlockParams>(bench, dtype, tokens, hidden, &out);
    ExpertBlock& block = p.block;
    block.router.num_experts = experts, block.router.top_k = 2, block.router.renormalize = true;
    block.intermediate_size = inner, block.shared_size = 32, block.norm = rms();
    block.gate_up = block.down = scheme;
    // Scores far apart: sets choose the same experts.
    p.router = bench.normal(dtype, {experts, hidden}, 2.0).data();
    p.gate_up = bench.linear(scheme, dtype, hidden, 2 * inner, experts);
    p.down = bench.linear(scheme, dtype, inner, hidden, experts);
    p.shared_gate_up = bench.linear(SchemeId::kDense, dtype, hidden, 64);
    p.shared_down = bench.linear(SchemeId::kDense, dtype, 32, hidden);
    bench.compare(
        "expert_block", "expert_block", dtype, [&] { return cpu::expert_block(p); }, {out},
        scheme_info(scheme).name);
    bench.end_case();
  }
}

// Requests whose states are read from some slots and written to others.
struct States {
  explicit States(Bench& bench)
      : src(bench.of(kInt, {-1, 0, 2}).data<int32_t>()),
        dst(bench.of(kInt, {1, 0, 3}).data<int32_t>()) {}
  static constexpr int64_t kSlots = 4;
  const int32_t *src, *dst;
};

void test_delta_net(Bench& bench, DType dtype) {
  for (const Decay decay : {Decay::kHead, Decay::kChannel}) {
    const Step step(bench, {{6, 6}, {1, 9}, {3, 12}}, 16);
    const States states(bench);
    DeltaNetBlockParams p;
    DeltaNetBlock& block = p.block;
    block.num_key_heads = 2, block.num_value_heads = 4, block.key_dim = 24, block.value_dim = 20;
    block.decay = decay, block.norm = block.out_norm = rms();
    const int64_t tokens = step.num_tokens, made = block.num_value_heads * block.value_dim;
    p.dtype = dtype, p.num_tokens = tokens, p.hidden_size = made;
    take_step(step, &p);
    p.state_src = states.src, p.state_dst = states.dst;
    p.made_qkvz = bench.normal(dtype, {tokens, block.conv_size() + made}).data();
    p.made_ba = bench.normal(dtype, {tokens, block.gate_size()}).data();
    p.conv = bench.normal(kFloat, {block.conv_width, block.conv_size()}, 0.5).data<float>();
    p.decay_log = bench.normal(kFloat, {block.num_value_heads}).data<float>();
    p.step_bias = bench.normal(kFloat, {block.decay_size()}).data<float>();
    p.out_norm = bench.normal(kFloat, {block.value_dim}, 0.1, 1.0).data<float>();
    Tensor& conv_states =
        bench.normal(kFloat, {States::kSlots, block.conv_width - 1, block.conv_size()});
    Tensor& kept = bench.normal(
        kFloat, {States::kSlots, block.num_value_heads, block.key_dim, block.value_dim}, 0.3);
    Tensor& mixed = bench.empty(dtype, {tokens, made});
    p.conv_states = conv_states.data<float>(), p.states = kept.data<float>();
    p.mixed = mixed.data();
    bench.compare(
        "delta_net", "delta_net", dtype, [&] { return cpu::delta_net(p); },
        {&mixed, &kept, &conv_states}, kDecayNames[static_cast<int>(decay)]);
    bench.end_case();
  }
}

void test_short_conv(Bench& bench, DType dtype) {
  const Step step(bench, {{6, 6}, {1, 9}, {3, 12}}, 16);
  const States states(bench);
  ShortConvBlockParams p;
  p.block.size = 44;
  p.dtype = dtype, p.num_tokens = step.num_tokens, p.hidden_size = 44;
  take_step(step, &p);
  p.state_src = states.src, p.state_dst = states.dst;
  p.taps = bench.normal(kFloat, {3, 44}).data<float>();
  p.made_bcx = bench.normal(dtype, {step.num_tokens, 3 * 44}).data();
  Tensor& kept = bench.normal(kFloat, {States::kSlots, 2, 44});
  Tensor& mixed = bench.empty(dtype, {step.num_tokens, 44});
  p.states = kept.data<float>(), p.mixed = mixed.data();
  bench.compare("short_conv", "short_conv", dtype, [&] { return cpu::short_conv(p); },
                {&mixed, &kept});
  bench.end_case();
}

#endif  // ROWS_ALONE

bool test_set(const std::string& set) {
  Bench bench(set);
  for (const DType dtype : kDTypes) test_rows(bench, dtype);
  test_numbers(bench);  // behind operators, which refuse a set that the CPU lacks
#ifndef ROWS_ALONE
  test_sample(bench);
  for (const DType dtype : kDTypes) {
    test_ends(bench, dtype);
    test_linear(bench, dtype);
    bench.end_case();
    test_attention(bench, dtype);
    test_attention_block(bench, dtype);
    test_latent_attention(bench, dtype);
    test_mlp(bench, dtype);
    test_experts(bench, dtype);
    test_delta_net(bench, dtype);
    test_short_conv(bench, dtype);
  }
#endif
  for (const cpu::OpTableBase* table : cpu::all_op_tables()) {
    if (!bench.tested().count(table->op())) bench.fail(std::string("no test of ") + table->op());
  }
  std::printf("%s: %d comparisons, %d failed\n", set.c_str(), bench.num_compared(),
              bench.num_failed());
  return bench.num_failed() == 0;
}

// Sets of the list that are there, best first, but scalar.
std::vector<std::string> available() {
  std::vector<std::string> names;
  for (const cpu::CandidateInfo& row : cpu::all_op_tables().front()->candidates()) {
    if (row.accepts && row.name != std::string("scalar")) names.push_back(row.name);
  }
  return names;
}

}  // namespace
}  // namespace kernel_sets

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  std::vector<std::string> sets(argv + 1, argv + argc);
  const std::vector<std::string> there = kernel_sets::available();
  if (!sets.empty() && sets[0] == "--list") {
    for (const std::string& name : there) std::printf("%s\n", name.c_str());
    return 0;
  }
  if (sets.empty()) sets = there;
  bool passed = true;
  for (const std::string& set : sets) passed = kernel_sets::test_set(set) && passed;
  return passed ? 0 : 1;
}
