// attention_decode_sm90.cuh for caches of 8-bit and 4-bit codes: products in fp16 for bf16 and fp16
// activations alike.
#include "attention_decode_sm90.cuh"

namespace regatta::cuda {
namespace {

template <int D>
Status run_format(const AttentionArgs& args, KvFormat format, const AttentionLimits& limits,
                  int num_sms, const Launch& launch_on) {
  switch (format) {
    case KvFormat::kInt8Static:
      return run_attention_decode_sm90<__half, D, KvFormat::kInt8Static>(args, limits, num_sms,
                                                                         launch_on);
    case KvFormat::kInt8Dynamic:
      return run_attention_decode_sm90<__half, D, KvFormat::kInt8Dynamic>(args, limits, num_sms,
                                                                          launch_on);
    case KvFormat::kFp8:
      return run_attention_decode_sm90<__half, D, KvFormat::kFp8>(args, limits, num_sms, launch_on);
    case KvFormat::kInt4:
      return run_attention_decode_sm90<__half, D, KvFormat::kInt4>(args, limits, num_sms,
                                                                   launch_on);
    case KvFormat::kDense:
      break;
  }
  return Status::error(std::string("attention_decode_sm90: kv_format ") +
                       kv_format_info(format).name +
                       " is not supported (allowed: int8_static, int8_dynamic, fp8, int4)");
}

}  // namespace

Status launch_attention_decode_quantized_sm90(const AttentionArgs& args, KvFormat format,
                                              int head_dim, const AttentionLimits& limits,
                                              int num_sms, const Launch& launch_on) {
  return dispatch_head_dim(head_dim, "attention_decode_sm90", [&](auto dim) {
    return run_format<decltype(dim)::value>(args, format, limits, num_sms, launch_on);
  });
}

}  // namespace regatta::cuda
