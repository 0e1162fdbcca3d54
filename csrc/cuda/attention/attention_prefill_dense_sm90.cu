// attention_prefill_sm90.cuh for caches of the activations' type, and the choice among all formats.
#include "attention_prefill_sm90.cuh"

namespace regatta::cuda {
namespace {

template <class T>
Status run_head_dim(const AttentionArgs& args, int head_dim, int64_t num_cache_rows, int num_sms,
                    const Launch& launch_on) {
  constexpr KvFormat kDense = KvFormat::kDense;
  switch (head_dim) {
    case 64:
      return run_attention_prefill_sm90<T, 64, kDense>(args, num_cache_rows, num_sms, launch_on);
    case 80:
      return run_attention_prefill_sm90<T, 80, kDense>(args, num_cache_rows, num_sms, launch_on);
    case 96:
      return run_attention_prefill_sm90<T, 96, kDense>(args, num_cache_rows, num_sms, launch_on);
    case 128:
      return run_attention_prefill_sm90<T, 128, kDense>(args, num_cache_rows, num_sms, launch_on);
    case 256:
      return run_attention_prefill_sm90<T, 256, kDense>(args, num_cache_rows, num_sms, launch_on);
  }
  return Status::error("attention_prefill_sm90: head_dim " + std::to_string(head_dim) +
                       " is not supported (allowed: 64, 80, 96, 128, 256)");
}

}  // namespace

Status launch_attention_prefill_sm90(const AttentionArgs& args, DType dtype, KvFormat format,
                                     int head_dim, int64_t num_cache_rows, int num_sms,
                                     const Launch& launch_on) {
  if (format != KvFormat::kDense) {
    return launch_attention_prefill_quantized_sm90(args, dtype, format, head_dim, num_sms,
                                                   launch_on);
  }
  return dtype == DType::kBFloat16
             ? run_head_dim<__nv_bfloat16>(args, head_dim, num_cache_rows, num_sms, launch_on)
             : run_head_dim<__half>(args, head_dim, num_cache_rows, num_sms, launch_on);
}

}  // namespace regatta::cuda
