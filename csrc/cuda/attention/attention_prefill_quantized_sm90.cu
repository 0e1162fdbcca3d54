// attention_prefill_sm90.cuh for caches of 8-bit and 4-bit codes.
#include "attention_prefill_sm90.cuh"

namespace regatta::cuda {
namespace {

template <class T, KvFormat kFormat>
Status run_head_dim(const AttentionArgs& args, int head_dim, int num_sms, const Launch& launch_on) {
  return dispatch_head_dim(head_dim, "attention_prefill_sm90", [&](auto dim) {
    return run_attention_prefill_sm90<T, decltype(dim)::value, kFormat>(args, 0, num_sms,
                                                                        launch_on);
  });
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
