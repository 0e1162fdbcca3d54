// regatta_silu_mul(gate_up [T, 2I]) -> [T, I]
#include "regatta/silu_mul.h"

#include "cuda_resources.h"

namespace regatta::binding {
namespace {

std::vector<paddle::Tensor> silu_mul(const paddle::Tensor& gate_up) {
  const Device device = device_of(gate_up, "gate_up");
  const TensorView gate_up_view = view(gate_up, "gate_up", device.place);
  check_activation(gate_up_view, "gate_up");
  check_shape(gate_up_view, "gate_up", {-1, -1});
  if (gate_up_view.shape[1] % 2) {
    fail("gate_up has " + std::to_string(gate_up_view.shape[1]) +
         " columns, expected an even number");
  }
  SiluMulParams params;
  params.num_tokens = gate_up_view.shape[0];
  params.intermediate_size = gate_up_view.shape[1] / 2;
  params.dtype = gate_up_view.dtype;
  paddle::Tensor out = device.empty({params.num_tokens, params.intermediate_size}, params.dtype);
  params.gate_up = gate_up_view.data;
  params.out = out.data();
  if (device.is_cpu()) throw_if_error(cpu::silu_mul(params));
#ifdef REGATTA_WITH_CUDA
  if (!device.is_cpu()) {
    make_current(device);
    throw_if_error(cuda::silu_mul(params, launch_on(device)));
  }
#endif
  return {out};
}

std::vector<std::vector<int64_t>> infer_shape(const std::vector<int64_t>& gate_up) {
  return {{gate_up[0], gate_up[1] < 0 ? -1 : gate_up[1] / 2}};
}

std::vector<paddle::DataType> infer_dtype(const paddle::DataType& gate_up) { return {gate_up}; }

}  // namespace
}  // namespace regatta::binding

PD_BUILD_OP(regatta_silu_mul)
    .Inputs({"gate_up"})
    .Outputs({"out"})
    .SetKernelFn(PD_KERNEL(regatta::binding::silu_mul))
    .SetInferShapeFn(PD_INFER_SHAPE(regatta::binding::infer_shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(regatta::binding::infer_dtype));
