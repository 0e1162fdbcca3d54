// What stands in for the kernels of architectures that the library is not built for.
//
// csrc/build.py compiles op_smNN.cu for the architectures that it can run on. Where none of them is
// asked for, it is left out, and this file is compiled with REGATTA_WITHOUT_SMNN: all that others
// call of such files, as refusals. The linker finds what is missing here. No kernels.
#include "cuda/attention/attention.cuh"
#include "cuda/attention/latent/latent.h"
#include "cuda/attention/latent/latent_attention.cuh"
#include "cuda/experts/experts.h"
#include "cuda/states/delta_net.h"
#include "regatta/gemm.h"

namespace regatta::cuda {
namespace {

[[maybe_unused]] Status absent(const char* architecture) {
  return Status::error(std::string("the CUDA library is not built for this GPU; build it again: "
                                   "python csrc/setup_cuda.py install --arch ") +
                       architecture);
}

}  // namespace

#ifdef REGATTA_WITHOUT_SM80
Status gemm_stream_sm80(const GemmParams&, bool, CUstream_st*) { return absent("80"); }
Status launch_attention_decode_sm80(const AttentionArgs&, DType, int, int, const Launch&) {
  return absent("80");
}
Status launch_attention_prefill_sm80(const AttentionArgs&, DType, int, const Launch&) {
  return absent("80");
}
bool takes_head_product(const HeadProductParams&) { return false; }
bool takes_queries(const LatentWriteParams&, const HeadProductParams&) { return false; }
Status head_product(const HeadProductParams&, const Launch&) { return absent("80"); }
Status latent_write_and_queries(const LatentWriteParams&, const HeadProductParams&, const Launch&) {
  return absent("80");
}
bool has_room_for_chunks() { return false; }
Status delta_prepare(const DeltaArgs&, DType, const Launch&) { return absent("80"); }
Status delta_pass(const DeltaArgs&, DType, DType, const Launch&) { return absent("80"); }
#endif

#ifdef REGATTA_WITHOUT_SM89
Status gemm_codes_mma_sm89(const GemmParams&, const MmaTile&, CUstream_st*) { return absent("89"); }
#endif

#ifdef REGATTA_WITHOUT_SM90
Status gemm_sm90(const GemmParams&, CUstream_st*) { return absent("90a"); }
Status gemm_tiles_sm90(const GemmParams&, CUstream_st*) { return absent("90a"); }
bool gemm_stream_codes_sm90_quantizes(const GemmParams&, const QuantizeRowsParams&) {
  return false;
}
Status gemm_stream_codes_sm90(const GemmParams&, const QuantizeRowsParams*, CUstream_st*) {
  return absent("90a");
}
Status gemv_packed_sm90(const GemmParams&, CUstream_st*) { return absent("90a"); }
Status gemm_packed_sm90(const GemmParams&, CUstream_st*) { return absent("90a"); }
Status gemm_packed_tiles_sm90(const GemmParams&, CUstream_st*) { return absent("90a"); }
Status gemm_blas_codes_sm90(const GemmParams&, const GemmResources&, CUstream_st*) {
  return absent("90a");
}
Status gemm_blas_unfolded_sm90(const GemmParams&, const QuantizeRowsParams&, const GemmResources&,
                               CUstream_st*) {
  return absent("90a");
}
Status route_step(const RouteParams&, const Launch&) { return absent("90a"); }
Status launch_attention_decode_sm90(const AttentionArgs&, DType, KvFormat, int,
                                    const AttentionLimits&, int, const Launch&) {
  return absent("90a");
}
Status launch_attention_prefill_sm90(const AttentionArgs&, DType, KvFormat, int, int64_t, int,
                                     const Launch&) {
  return absent("90a");
}
Status launch_latent_attention_sm90(const LatentArgs&, const LatentPlan&, DType, int64_t,
                                    const Launch&) {
  return absent("90a");
}
Status launch_attention_prefill_expanded_sm90(const AttentionArgs&, DType, const void*, int64_t,
                                              int, const Launch&) {
  return absent("90a");
}
#endif

}  // namespace regatta::cuda
