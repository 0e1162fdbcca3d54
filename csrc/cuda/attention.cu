// paged_attention on the GPU: checks, workspace, and the choice of kernels.
//
// A call is one or two launches: the decode kernel always (it also clears padding rows), and the
// prefill kernel when a span may be longer than one token. Under programmatic dependent launch the
// two overlap: the decode kernel triggers its dependent only after it has waited for everything in
// front, so the prefill kernel starts without a wait, and waits for the decode kernel before it
// ends; whoever waits for the prefill kernel thereby waits for both.
//
// Which candidate runs: the first of kCandidates that does not refuse. REGATTA_KERNEL may force one
// ("paged_attention=sm80").
#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "attention.cuh"

namespace regatta::cuda {
namespace {

struct Device {
  int architecture = 0;  // 90 for compute capability 9.0
  int num_sms = 0;
};

Status current_device(Device* device) {
  int id = 0, major = 0, minor = 0;
  cudaError_t error = cudaGetDevice(&id);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, id);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&device->num_sms, cudaDevAttrMultiProcessorCount, id);
  }
  device->architecture = major * 10 + minor;
  return cuda_status(error, "paged_attention");
}

bool one_of(int64_t x, std::initializer_list<int64_t> allowed) {
  return std::find(allowed.begin(), allowed.end(), x) != allowed.end();
}

std::string refuse_matrix(const PagedAttentionParams& p, const Device& device) {
  if (device.architecture < 80) return "needs sm_80 or later";
  if (p.dtype == DType::kFloat32) return "takes bfloat16 and float16";
  if (!one_of(p.head_dim, {64, 80, 96, 128, 256})) {
    return "head_dim " + std::to_string(p.head_dim) + " (allowed: 64, 80, 96, 128, 256)";
  }
  if (p.batch.num_seqs > 4096) return "more than 4096 requests";
  return {};
}

std::string refuse_sm90(const PagedAttentionParams& p, const Device& device) {
  if (device.architecture != 90) return "needs sm_90";
  if (!one_of(p.head_dim, {64, 128, 256})) {
    return "head_dim " + std::to_string(p.head_dim) + " (allowed: 64, 128, 256)";
  }
  return refuse_matrix(p, device);
}

std::string refuse_generic(const PagedAttentionParams& p, const Device&) {
  return p.head_dim > 256 ? "head_dim " + std::to_string(p.head_dim) + " is larger than 256" : "";
}

enum class Kernel { kSm90, kSm80, kGeneric };

struct Candidate {
  const char* name;
  Kernel kernel;
  std::string (*refuse)(const PagedAttentionParams&, const Device&);
};

constexpr Candidate kCandidates[] = {
    {"sm90", Kernel::kSm90, refuse_sm90},
    {"sm80", Kernel::kSm80, refuse_matrix},
    {"generic", Kernel::kGeneric, refuse_generic},
};

// The part of REGATTA_KERNEL that names this operator's candidate, or "".
std::string forced_candidate() {
  const char* text = std::getenv("REGATTA_KERNEL");
  const std::string all = text ? text : "";
  const std::string key = "paged_attention=";
  const size_t at = all.find(key);
  if (at == std::string::npos) return {};
  const size_t begin = at + key.size();
  return all.substr(begin, all.find(',', begin) - begin);
}

Status choose(const PagedAttentionParams& params, const Device& device, Kernel* kernel) {
  const std::string forced = forced_candidate();
  std::string reasons;
  for (const Candidate& candidate : kCandidates) {
    if (!forced.empty() && forced != candidate.name) continue;
    const std::string reason = candidate.refuse(params, device);
    if (reason.empty()) {
      *kernel = candidate.kernel;
      return {};
    }
    reasons += std::string("\n  ") + candidate.name + ": " + reason;
  }
  return Status::error("paged_attention: no kernel fits" + reasons);
}

Status check(const PagedAttentionParams& p, const AttentionLimits& limits) {
  if (!one_of(p.cache.block_size, {16, 32, 64, 128})) {
    return Status::error("block_size " + std::to_string(p.cache.block_size) +
                         " is not supported by paged_attention (allowed: 16, 32, 64, 128); set "
                         "--block_size");
  }
  if (p.num_kv_heads <= 0 || p.num_heads % p.num_kv_heads != 0) {
    return Status::error("paged_attention: num_heads " + std::to_string(p.num_heads) +
                         " must be a multiple of num_kv_heads " + std::to_string(p.num_kv_heads));
  }
  if (p.window == 0 || p.window < -1) {
    return Status::error("paged_attention: window " + std::to_string(p.window) +
                         " (allowed: -1 for none, or 1 and more)");
  }
  if (limits.max_query_len < 1 || limits.max_context_len < 0) {
    return Status::error("paged_attention: limits must be at least 1 token, got max_query_len " +
                         std::to_string(limits.max_query_len) + ", max_context_len " +
                         std::to_string(limits.max_context_len));
  }
  return {};
}

// Sizes of the decode kernel's workspace.
struct Workspace {
  int64_t units = 0;         // upper bound of (row tile, split) over the batch
  int64_t partial_rows = 0;  // rows kept per unit
  int64_t counter_bytes = 0, stats_bytes = 0, out_bytes = 0;

  Workspace(const PagedAttentionParams& p, const AttentionLimits& limits, int tile_rows) {
    const int64_t group = p.num_heads / p.num_kv_heads;
    const int64_t rows =
        std::max(group, std::min(limits.max_query_len * group, int64_t{kMaxDecodeRows}));
    // At most, by split_tokens().
    const int length = static_cast<int>(std::clamp<int64_t>(limits.max_context_len, 1, 1 << 30));
    const int64_t splits = length <= kMinSplit ? 1 : length <= 8192 ? 8 : kMaxSplits;
    const int64_t tiles_by_tokens = p.batch.num_seqs + p.batch.num_tokens * group / tile_rows;
    units = std::min(p.batch.num_seqs * ceil_div(rows, tile_rows), tiles_by_tokens) * splits;
    partial_rows = std::min<int64_t>(rows, tile_rows);
    const int64_t entries = units * p.num_kv_heads;
    counter_bytes = 256 + round_up(entries * 4, 256);  // the tickets first
    stats_bytes = round_up(entries * partial_rows * 8, 256);
    out_bytes = entries * partial_rows * p.head_dim * 4;
  }
  int64_t bytes() const { return counter_bytes + stats_bytes + out_bytes; }
};

}  // namespace

int64_t paged_attention_workspace_bytes(const PagedAttentionParams& params,
                                        const AttentionLimits& limits) {
  if (!check(params, limits).ok()) return 0;  // paged_attention() reports it
  // For any candidate: the largest, so that one allocation serves all.
  return std::max(Workspace(params, limits, 8).bytes(), Workspace(params, limits, 16).bytes());
}

int64_t paged_attention_zeroed_bytes(const PagedAttentionParams& params,
                                     const AttentionLimits& limits) {
  if (!check(params, limits).ok()) return 0;
  return std::max(Workspace(params, limits, 8).counter_bytes,
                  Workspace(params, limits, 16).counter_bytes);
}

Status paged_attention(const PagedAttentionParams& params, const AttentionLimits& limits,
                       void* workspace, int64_t workspace_bytes, const Launch& launch_on) {
  Status status = check(params, limits);
  if (!status.ok()) return status;
  if (params.batch.num_tokens == 0) return {};
  Device device;
  status = current_device(&device);
  if (!status.ok()) return status;
  Kernel kernel;
  status = choose(params, device, &kernel);
  if (!status.ok()) return status;

  AttentionArgs args = {};
  args.q = params.q;
  args.key = params.cache.key;
  args.value = params.cache.value;
  args.out = params.out;
  args.cu_seqlens_q = params.batch.cu_seqlens_q;
  args.context_lens = params.batch.context_lens;
  args.block_tables = params.batch.block_tables;
  args.num_tokens = static_cast<int>(params.batch.num_tokens);
  args.num_seqs = static_cast<int>(params.batch.num_seqs);
  args.max_blocks = static_cast<int>(params.batch.max_blocks);
  args.num_heads = static_cast<int>(params.num_heads);
  args.num_kv_heads = static_cast<int>(params.num_kv_heads);
  args.group = args.num_heads / args.num_kv_heads;
  args.block_shift = static_cast<int>(std::lround(std::log2(params.cache.block_size)));
  args.window =
      params.window < 0 || params.window > kNoWindow ? kNoWindow : static_cast<int>(params.window);
  args.scale_log2 = params.softmax_scale * 1.44269504088896340736f;
  const int head_dim = static_cast<int>(params.head_dim);
  if (kernel == Kernel::kGeneric) {
    return launch_attention_generic(args, params.dtype, head_dim, launch_on);
  }

  args.tile_rows = kernel == Kernel::kSm90 ? 8 : 16;
  const Workspace sizes(params, limits, args.tile_rows);
  if (workspace_bytes < sizes.bytes()) {
    return Status::error("paged_attention: workspace of " + std::to_string(workspace_bytes) +
                         " bytes is too small (needs " + std::to_string(sizes.bytes()) +
                         "); allocate paged_attention_workspace_bytes() for the same limits");
  }
  auto* bytes = static_cast<uint8_t*>(workspace);
  args.tickets = reinterpret_cast<int*>(bytes);
  args.counters = reinterpret_cast<int*>(bytes + 256);
  args.partial_stats = reinterpret_cast<float2*>(bytes + sizes.counter_bytes);
  args.partial_out = reinterpret_cast<float*>(bytes + sizes.counter_bytes + sizes.stats_bytes);
  args.partial_rows = static_cast<int>(sizes.partial_rows);

  const int64_t cache_rows =
      params.cache.num_blocks * params.num_kv_heads * params.cache.block_size;
  status =
      kernel == Kernel::kSm90
          ? launch_attention_decode_sm90(args, params.dtype, head_dim, cache_rows, device.num_sms,
                                         launch_on)
          : launch_attention_decode_sm80(args, params.dtype, head_dim, device.num_sms, launch_on);
  if (!status.ok() || is_decode_span(static_cast<int>(limits.max_query_len), args.group)) {
    return status;
  }
  return kernel == Kernel::kSm90
             ? launch_attention_prefill_sm90(args, params.dtype, head_dim, cache_rows,
                                             device.num_sms, launch_on)
             : launch_attention_prefill_sm80(args, params.dtype, head_dim, launch_on);
}

}  // namespace regatta::cuda
