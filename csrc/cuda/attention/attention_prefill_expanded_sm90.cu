// attention_prefill_sm90.cuh for keys and values made of latents (latent/expanded.h).
#include "attention_prefill_sm90.cuh"

namespace regatta::cuda {
namespace {

template <class T>
Status run(const AttentionArgs& args, const void* shared_key, int64_t num_rows, int num_sms,
           const Launch& launch_on) {
  constexpr int D = 192, V = 128;
  constexpr DType dtype = Traits<T>::dtype;
  using S = PrefillShape<D, KvFormat::kDense, V>;
  const int columns = args.num_kv_heads * V;
  PrefillMaps maps = {};
  REGATTA_RETURN_IF_ERROR(encode_cache(&maps.key, args.key, dtype, num_rows, columns, S::kKeys));
  REGATTA_RETURN_IF_ERROR(
      encode_cache(&maps.value, args.value, dtype, num_rows, columns, S::kKeys));
  REGATTA_RETURN_IF_ERROR(
      encode_cache(&maps.shared_key, shared_key, dtype, num_rows, D - V, S::kKeys));
  return launch_prefill<S>(attention_prefill_sm90_kernel<T, D, V, KvFormat::kDense, false>, maps,
                           args, S::kKeys, num_sms, launch_on);
}

}  // namespace

Status launch_attention_prefill_expanded_sm90(const AttentionArgs& args, DType dtype,
                                              const void* shared_key, int64_t num_rows, int num_sms,
                                              const Launch& launch_on) {
  return dtype == DType::kBFloat16
             ? run<__nv_bfloat16>(args, shared_key, num_rows, num_sms, launch_on)
             : run<__half>(args, shared_key, num_rows, num_sms, launch_on);
}

}  // namespace regatta::cuda
