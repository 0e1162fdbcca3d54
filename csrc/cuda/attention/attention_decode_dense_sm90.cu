// attention_decode_sm90.cuh for caches of the activations' type, and the choice among all formats.
#include "attention_decode_sm90.cuh"

namespace regatta::cuda {

Status launch_attention_decode_sm90(const AttentionArgs& args, DType dtype, KvFormat format,
                                    int head_dim, const AttentionLimits& limits, int num_sms,
                                    const Launch& launch_on) {
  if (format != KvFormat::kDense) {
    return launch_attention_decode_quantized_sm90(args, format, head_dim, limits, num_sms,
                                                  launch_on);
  }
  return dispatch_half(dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    return dispatch_head_dim(head_dim, "attention_decode_sm90", [&](auto dim) {
      return run_attention_decode_sm90<T, decltype(dim)::value, KvFormat::kDense>(
          args, limits, num_sms, launch_on);
    });
  });
}

}  // namespace regatta::cuda
