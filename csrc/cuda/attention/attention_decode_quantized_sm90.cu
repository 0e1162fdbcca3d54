// attention_decode_sm90.cuh for caches of 8-bit and 4-bit codes: products in fp16 for bf16 and fp16
// activations alike.
#include "attention_decode_sm90.cuh"

namespace regatta::cuda {

Status launch_attention_decode_quantized_sm90(const AttentionArgs& args, KvFormat format,
                                              int head_dim, const AttentionLimits& limits,
                                              int num_sms, const Launch& launch_on) {
  return dispatch_head_dim(head_dim, "attention_decode_sm90", [&](auto dim) {
    return dispatch_codes(format, "attention_decode_sm90", [&](auto codes) {
      return run_attention_decode_sm90<__half, decltype(dim)::value, decltype(codes)::value>(
          args, limits, num_sms, launch_on);
    });
  });
}

}  // namespace regatta::cuda
