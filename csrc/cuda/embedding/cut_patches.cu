// Patches of pictures, scaled and normalised, from bytes. See regatta/cut_patches.h.
//
// Architectures: all; any dtype of activations. One block per patch, a thread per value in turn.
// What lies outside of the pictures is zeros. Bound: bytes written.
#include <type_traits>

#include "cuda/common.cuh"
#include "regatta/cuda_ops.h"

namespace regatta::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void __launch_bounds__(kThreads) cut_patches_kernel(const CutPatchesParams p) {
  pdl_trigger();
  pdl_wait();
  const int64_t patch = blockIdx.x;
  const int64_t origin = p.origins[patch], stride = p.strides[patch];
  const int side = static_cast<int>(p.side), area = side * side;
  T* const out = static_cast<T*>(p.out) + patch * p.width;
  for (int i = static_cast<int>(threadIdx.x); i < p.width; i += kThreads) {
    float value = 0.f;
    const int c = i / area, y = i % area / side, x = i % side;
    const int64_t at = origin + kNumChannels * (y * stride + x) + c;
    if (c < kNumChannels && at >= 0 && at < p.num_bytes) {
      // As the host has it: no fused multiply and add.
      value = __fdiv_rn(__fsub_rn(__fmul_rn(static_cast<float>(p.pixels[at]), p.factor), p.mean[c]),
                        p.std[c]);
    }
    out[i] = Traits<T>::from_float(value);
  }
}

}  // namespace

Status cut_patches(const CutPatchesParams& params, const Launch& launch_on) {
  if (params.num_patches == 0 || params.width == 0) return {};
  return dispatch_dtype(params.dtype, "cut_patches", [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    return launch(cut_patches_kernel<T>, {launch_on, params.num_patches, kThreads}, "cut_patches",
                  params);
  });
}

}  // namespace regatta::cuda
