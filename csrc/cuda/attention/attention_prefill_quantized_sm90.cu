// attention_prefill_sm90.cuh for caches of 8-bit and 4-bit codes.
#include "attention_prefill_sm90.cuh"

namespace regatta::cuda {

Status launch_attention_prefill_quantized_sm90(const AttentionArgs& args, DType dtype,
                                               KvFormat format, int head_dim, int num_sms,
                                               const Launch& launch_on) {
  return dispatch_half(dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    return dispatch_head_dim(head_dim, "attention_prefill_sm90", [&](auto dim) {
      return dispatch_codes(format, "attention_prefill_sm90", [&](auto codes) {
        return run_attention_prefill_sm90<T, decltype(dim)::value, decltype(codes)::value>(
            args, 0, num_sms, launch_on);
      });
    });
  });
}

}  // namespace regatta::cuda
