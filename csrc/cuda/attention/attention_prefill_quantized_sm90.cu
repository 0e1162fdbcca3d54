// attention_prefill_sm90.cuh for caches of 8-bit and 4-bit codes.
#include "attention_prefill_sm90.cuh"

namespace regatta::cuda {
namespace {

template <class T, KvFormat kFormat>
Status run_head_dim(const AttentionArgs& args, int head_dim, int num_sms, const Launch& launch_on) {
  switch (head_dim) {
    case 64:
      return run_attention_prefill_sm90<T, 64, kFormat>(args, 0, num_sms, launch_on);
    case 80:
      return run_attention_prefill_sm90<T, 80, kFormat>(args, 0, num_sms, launch_on);
    case 96:
      return run_attention_prefill_sm90<T, 96, kFormat>(args, 0, num_sms, launch_on);
    case 128:
      return run_attention_prefill_sm90<T, 128, kFormat>(args, 0, num_sms, launch_on);
    case 256:
      return run_attention_prefill_sm90<T, 256, kFormat>(args, 0, num_sms, launch_on);
  }
  return Status::error("attention_prefill_sm90: head_dim " + std::to_string(head_dim) +
                       " is not supported (allowed: 64, 80, 96, 128, 256)");
}

template <class T>
Status run_format(const AttentionArgs& args, KvFormat format, int head_dim, int num_sms,
                  const Launch& launch_on) {
  switch (format) {
    case KvFormat::kInt8Static:
      return run_head_dim<T, KvFormat::kInt8Static>(args, head_dim, num_sms, launch_on);
    case KvFormat::kInt8Dynamic:
      return run_head_dim<T, KvFormat::kInt8Dynamic>(args, head_dim, num_sms, launch_on);
    case KvFormat::kFp8:
      return run_head_dim<T, KvFormat::kFp8>(args, head_dim, num_sms, launch_on);
    case KvFormat::kInt4:
      return run_head_dim<T, KvFormat::kInt4>(args, head_dim, num_sms, launch_on);
    case KvFormat::kDense:
      break;
  }
  return Status::error("attention_prefill_sm90: a dense cache is not quantized");
}

}  // namespace

Status launch_attention_prefill_quantized_sm90(const AttentionArgs& args, DType dtype,
                                               KvFormat format, int head_dim, int num_sms,
                                               const Launch& launch_on) {
  return dtype == DType::kBFloat16
             ? run_format<__nv_bfloat16>(args, format, head_dim, num_sms, launch_on)
             : run_format<__half>(args, format, head_dim, num_sms, launch_on);
}

}  // namespace regatta::cuda
