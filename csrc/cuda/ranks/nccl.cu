// See nccl.h. Of NCCL's interface (nccl.h of 2.x, whose types stay) as much as is called here.
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <cstring>
#include <string>

#include "cuda/ranks/nccl.h"
#include "regatta/abi.h"

namespace regatta::cuda {
namespace {

constexpr int kIdBytes = 128;  // ncclUniqueId; predict/device/communicator.py knows it
struct UniqueId {
  char bytes[kIdBytes];
};
using Comm = void*;
using Result = int;  // 0: success
constexpr int kFloat16 = 6, kFloat32 = 7, kBFloat16 = 9, kSum = 0;

// The library's functions; `error` says why they are not there.
struct Nccl {
  std::string error = "not opened";
  Result (*get_unique_id)(UniqueId*) = nullptr;
  Result (*init_rank)(Comm*, int, UniqueId, int) = nullptr;
  Result (*all_reduce)(const void*, void*, size_t, int, int, Comm, cudaStream_t) = nullptr;
  Result (*all_gather)(const void*, void*, size_t, int, Comm, cudaStream_t) = nullptr;
  Result (*abort)(Comm) = nullptr;
  const char* (*error_string)(Result) = nullptr;
  const char* (*last_error)(Comm) = nullptr;

  void open(const char* path) {
    error.clear();
    void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      error = dlerror();
      return;
    }
    const auto find = [&](auto* function, const char* symbol) {
      *function =
          reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, symbol));
      if (*function == nullptr) error = std::string(path) + " has no " + symbol;
    };
    find(&get_unique_id, "ncclGetUniqueId");
    find(&init_rank, "ncclCommInitRank");
    find(&all_reduce, "ncclAllReduce");
    find(&all_gather, "ncclAllGather");
    find(&abort, "ncclCommAbort");
    find(&error_string, "ncclGetErrorString");
    find(&last_error, "ncclGetLastError");
  }
};

Nccl nccl;
Comm comm = nullptr;

Status status_of(Result result, const char* what) {
  if (result == 0) return {};
  const char* const last = nccl.last_error(comm);
  return Status::error(std::string(what) + ": " + nccl.error_string(result) +
                       (last == nullptr || *last == 0 ? "" : std::string(" (") + last + ")"));
}

const char* text_of(const Status& status) {
  static std::string text;
  text = status.message();
  return status.ok() ? nullptr : text.c_str();
}

Status open(int device, int rank, int size, const void* id) {
  if (!nccl.error.empty()) return Status::error("NCCL: " + nccl.error);
  if (cudaSetDevice(device) != cudaSuccess) return Status::error("NCCL: cudaSetDevice failed");
  UniqueId unique;
  std::memcpy(&unique, id, sizeof unique);
  return status_of(nccl.init_rank(&comm, size, unique, rank), "ncclCommInitRank");
}

Status make_id(void* id) {
  if (!nccl.error.empty()) return Status::error("NCCL: " + nccl.error);
  UniqueId unique;
  const Status status = status_of(nccl.get_unique_id(&unique), "ncclGetUniqueId");
  if (status.ok()) std::memcpy(id, &unique, sizeof unique);
  return status;
}

}  // namespace

bool has_nccl() { return comm != nullptr; }

Status nccl_sum(const void* in, void* out, int64_t count, DType dtype, CUstream_st* stream) {
  const int type = dtype == DType::kFloat32   ? kFloat32
                   : dtype == DType::kFloat16 ? kFloat16
                                              : kBFloat16;
  return status_of(nccl.all_reduce(in, out, static_cast<size_t>(count), type, kSum, comm, stream),
                   "ncclAllReduce");
}

Status nccl_gather(const float* part, float* parts, int64_t count, CUstream_st* stream) {
  return status_of(nccl.all_gather(part, parts, static_cast<size_t>(count), kFloat32, comm, stream),
                   "ncclAllGather");
}

}  // namespace regatta::cuda

// For ctypes; see predict/device/communicator.py.
REGATTA_EXPORT const char* regatta_gpu_nccl_find(const char* path) {
  regatta::cuda::nccl.open(path);
  return regatta::cuda::nccl.error.empty() ? nullptr : regatta::cuda::nccl.error.c_str();
}
REGATTA_EXPORT const char* regatta_gpu_nccl_id(void* id) {
  return regatta::cuda::text_of(regatta::cuda::make_id(id));
}
REGATTA_EXPORT const char* regatta_gpu_nccl_open(int device, int rank, int size, const void* id) {
  return regatta::cuda::text_of(regatta::cuda::open(device, rank, size, id));
}
REGATTA_EXPORT void regatta_gpu_nccl_close() {
  if (regatta::cuda::comm != nullptr) regatta::cuda::nccl.abort(regatta::cuda::comm);
  regatta::cuda::comm = nullptr;
}
