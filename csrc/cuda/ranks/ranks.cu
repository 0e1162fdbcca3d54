// Sums and joins over ranks on GPUs, and how they find each other's memory (exchange.cuh).
//
// Architectures: all; float32, bf16, fp16. Bound: bytes over NVLink, (N - 1) parts by one shot; two
// hops of 2 us where there are few.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/common.cuh"
#include "cuda/ranks/nccl.h"
#include "cuda/ranks/ranks.h"
#include "cuda/ranks/select.h"
#include "regatta/abi.h"

namespace regatta::cuda {
namespace {

// Of a part that a launch sums: what it fills stays in L2 while it is sent, summed and cleared. Of
// 64 MiB at once, launches of 16 MiB took twice as long for each byte as those of 8 (H200).
constexpr int64_t kLaunchBytes = 8 << 20;
constexpr uint32_t kSpare = 64;  // pieces of a slot, for slices that are no whole ones
constexpr int kMostThreads = 1024, kLeastThreads = 128;
constexpr int64_t kGatheredBytes = 32 << 20;
constexpr int kCheckSeconds = 20;

// ------------------------------------------------------------------------------------ kernels

// Piece `at` of `count` values, the last one with zeros behind, as it may be sent.
template <class T>
__device__ __forceinline__ uint4 load_piece(const T* from, uint32_t at, int64_t count) {
  constexpr int kSize = Vec16<T>::kSize;
  const int64_t first = int64_t{at} * kSize;
  if (first + kSize <= count) return sendable(bit_cast<uint4>(load16(from + first)));
  Vec16<T> v = {};
  for (int i = 0; first + i < count; ++i) v.v[i] = from[first + i];
  return sendable(bit_cast<uint4>(v));
}

template <class T>
__device__ __forceinline__ void store_piece(T* to, uint32_t at, int64_t count, uint4 piece) {
  constexpr int kSize = Vec16<T>::kSize;
  const int64_t first = int64_t{at} * kSize;
  const auto v = bit_cast<Vec16<T>>(piece);
  if (first + kSize <= count) return store16(to + first, v);
  for (int i = 0; first + i < count; ++i) to[first + i] = v.v[i];
}

__device__ __forceinline__ uint32_t first_piece() { return blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ uint32_t step_of_grid() { return gridDim.x * blockDim.x; }

// out may be in: a thread writes the pieces that it has read, behind all of them.
template <class T>
__global__ void __launch_bounds__(kMostThreads)
    one_shot_kernel(const __grid_constant__ Exchange exchange, const T* in, T* out, int64_t count,
                    uint32_t pieces) {
  pdl_trigger();
  pdl_wait();
  const Exchanging ranks(exchange);
  const uint32_t first = first_piece(), step = step_of_grid();
  for (uint32_t i = first; i < pieces; i += step) ranks.push(i, load_piece(in, i, count));
  ranks.count(pieces);
  ranks.clear(first, step);
  for (uint32_t i = first; i < pieces; i += step) {
    store_piece(out, i, count, sum_of<T>(ranks, i, load_piece(in, i, count)));
  }
}

// Rank r sums slice r. In a slot its part of that comes first, and what a rank has summed behind.
template <class T>
__global__ void __launch_bounds__(kMostThreads)
    two_shot_kernel(const __grid_constant__ Exchange exchange, const T* in, T* out, int64_t count,
                    uint32_t pieces, uint32_t slice) {
  pdl_trigger();
  pdl_wait();
  const Exchanging ranks(exchange);
  const uint32_t first = first_piece(), step = step_of_grid();
  const int rank = exchange.rank, size = exchange.size;
  const auto in_slice = [&](int of, uint32_t i) { return of * slice + i < pieces; };
  for (int k = 1; k < size; ++k) {
    const int of = rank + k < size ? rank + k : rank + k - size;
    for (uint32_t i = first; i < slice && in_slice(of, i); i += step) {
      ranks.push_to(of, i, load_piece(in, of * slice + i, count));
    }
  }
  ranks.count(2 * slice);
  ranks.clear(first, step);
  for (uint32_t i = first; i < slice && in_slice(rank, i); i += step) {
    const uint32_t at = rank * slice + i;
    const uint4 sum = sum_of<T>(ranks, i, load_piece(in, at, count));
    ranks.push(slice + i, sum);
    store_piece(out, at, count, sum);
  }
  for (int of = 0; of < size; ++of) {
    if (of == rank) continue;
    for (uint32_t i = first; i < slice && in_slice(of, i); i += step) {
      store_piece(out, of * slice + i, count, ranks.wait_for(of, slice + i));
    }
  }
}

struct Columns {
  int width, all_width;  // of a rank's rows, and of all
  int begins[Exchange::kMaxRanks + 1];
  bool whole;  // no piece lies in two rows, and none is behind a rank's columns

  // A rank's four words from `at` on, counted in its rows; some are behind its last.
  __device__ __forceinline__ void put(float* all, int rank, int64_t at, int count,
                                      const Vec16<float>& words) const {
    if (whole) {
      const int64_t row = at / width;
      store16(all + row * all_width + begins[rank] + (at - row * width), words);
      return;
    }
    for (int j = 0; j < count; ++j) {
      const int64_t row = (at + j) / width;
      const int column = begins[rank] + static_cast<int>(at + j - row * width);
      if (column < begins[rank + 1]) all[row * all_width + column] = words.v[j];
    }
  }
};

// Words of parts [rows, width] from word `begin` on, `count` of them, into rows of all ranks'
// columns.
__global__ void __launch_bounds__(kMostThreads)
    gather_kernel(const __grid_constant__ Exchange exchange,
                  const __grid_constant__ Columns columns, const float* part, float* all,
                  int64_t begin, int64_t count, uint32_t pieces) {
  pdl_trigger();
  pdl_wait();
  const Exchanging ranks(exchange);
  const uint32_t first = first_piece(), step = step_of_grid();
  for (uint32_t i = first; i < pieces; i += step) {
    ranks.push(i, load_piece(part + begin, i, count));
  }
  ranks.count(pieces);
  ranks.clear(first, step);
  for (uint32_t i = first; i < pieces; i += step) {
    const uint4 own = load_piece(part + begin, i, count);
    ranks.wait_for_all(i, own, [&](int rank, uint4 piece) {
      const int64_t at = int64_t{i} * 4;
      columns.put(all, rank, begin + at, static_cast<int>(min(count - at, int64_t{4})),
                  bit_cast<Vec16<float>>(piece));
    });
  }
}

// The same of parts that are here, [size, count] words.
__global__ void __launch_bounds__(kMostThreads)
    place_kernel(const __grid_constant__ Columns columns, const float* parts, float* all,
                 int64_t begin, int64_t count, int size) {
  pdl_trigger();
  pdl_wait();
  for (int64_t i = first_piece(); i < size * count; i += step_of_grid()) {
    const int rank = static_cast<int>(i / count);
    const int64_t at = begin + i - rank * count, row = at / columns.width;
    const int column = columns.begins[rank] + static_cast<int>(at - row * columns.width);
    if (column < columns.begins[rank + 1]) all[row * columns.all_width + column] = parts[i];
  }
}

__global__ void __launch_bounds__(kMostThreads) fill_kernel(uint4* to, int64_t count) {
  for (int64_t i = first_piece(); i < count; i += step_of_grid()) {
    to[i] = make_uint4(kNotYet, kNotYet, kNotYet, kNotYet);
  }
}

__global__ void __launch_bounds__(kLeastThreads)
    own_rows_kernel(const int32_t* ids, int32_t* rows, int count, int begin, int end, int other) {
  pdl_trigger();
  pdl_wait();
  const int i = blockIdx.x * kLeastThreads + threadIdx.x;
  if (i >= count) return;
  const int id = ids[i];
  rows[i] = id >= begin && id < end ? id - begin : other;
}

// --------------------------------------------------------------------------------------- host

// As many blocks as multiprocessors at most, one on each: all ranks' run at once.
LaunchConfig config_for(uint32_t pieces, const Launch& launch_on) {
  static const int64_t num_blocks = num_multiprocessors();
  const int64_t threads = std::clamp<int64_t>(
      round_up(ceil_div(int64_t{pieces}, num_blocks), int64_t{kWarp}), kLeastThreads, kMostThreads);
  return {launch_on, std::clamp<int64_t>(ceil_div(int64_t{pieces}, threads), 1, num_blocks),
          threads};
}

// What a rank has opened of all.
struct Opened {
  Exchange exchange;
  void* memory = nullptr;  // of this rank: slots, and its state behind
  std::vector<void*> others;
  void* registered = nullptr;

  Opened() = default;
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;
  ~Opened() {
    for (void* other : others) cudaIpcCloseMemHandle(other);
    if (registered != nullptr) cudaHostUnregister(registered);
    cudaFree(memory);
  }
};

std::unique_ptr<Opened> made, current;  // before all are open, and then
Links current_links = Links::kNone;
// Where NCCL alone takes parts from one to the other: ranks, and room for all their parts.
int num_ranks_of_nccl = 0;
float* gathered = nullptr;

uint32_t slot_pieces_of(int size) {
  return static_cast<uint32_t>(2 * kLaunchBytes / size / 16) + kSpare;  // two shots': see there
}

int64_t num_slot_bytes(int size) {
  return int64_t{Exchange::kTurns} * size * slot_pieces_of(size) * 16;
}

Status create(int size, void* handle) {
  static_assert(sizeof(cudaIpcMemHandle_t) == 64, "predict/device/communicator.py knows it");
  if (size < 2 || size > Exchange::kMaxRanks) {
    return Status::error("ranks on GPUs: " + std::to_string(size) + " (allowed: 2 to " +
                         std::to_string(Exchange::kMaxRanks) + ")");
  }
  auto opened = std::make_unique<Opened>();
  const int64_t bytes = num_slot_bytes(size);
  // A handle names a whole allocation: this is one of its own.
  REGATTA_RETURN_IF_ERROR(
      cuda_status(cudaMalloc(&opened->memory, bytes + sizeof(ExchangeState)), "ranks on GPUs"));
  auto* const slots = static_cast<uint4*>(opened->memory);
  fill_kernel<<<256, kMostThreads>>>(slots, bytes / 16);
  auto* const state = reinterpret_cast<ExchangeState*>(slots + bytes / 16);
  REGATTA_RETURN_IF_ERROR(
      cuda_status(cudaMemset(state, 0, sizeof(ExchangeState)), "ranks on GPUs"));
  REGATTA_RETURN_IF_ERROR(cuda_status(cudaDeviceSynchronize(), "ranks on GPUs"));
  opened->exchange.state = state;
  opened->exchange.size = size;
  opened->exchange.slot_pieces = slot_pieces_of(size);
  cudaIpcMemHandle_t own;
  REGATTA_RETURN_IF_ERROR(
      cuda_status(cudaIpcGetMemHandle(&own, opened->memory), "ranks on GPUs: cudaIpc"));
  std::memcpy(handle, &own, sizeof own);
  made = std::move(opened);
  return {};
}

// devices: of each rank, as this process numbers them. ends: the first word of a page that ranks
// share. links: of all ranks.
Status open(const void* handles, const int* devices, int rank, void* ends, Links links) {
  if (!made) return Status::error("ranks on GPUs: no memory was made");
  Exchange& exchange = made->exchange;
  exchange.rank = rank;
  for (int other = 0; other < exchange.size; ++other) {
    if (other == rank) {
      exchange.slots[other] = static_cast<uint4*>(made->memory);
      continue;
    }
    int can = devices[other] == devices[rank];  // of tests: ranks that share a GPU
    if (!can) {
      REGATTA_RETURN_IF_ERROR(
          cuda_status(cudaDeviceCanAccessPeer(&can, devices[rank], devices[other]), "peer access"));
    }
    if (!can) {
      return Status::error("GPU " + std::to_string(devices[rank]) + " cannot reach the memory of " +
                           "GPU " + std::to_string(devices[other]) +
                           " (no peer access); use GPUs that are linked (nvidia-smi topo -p2p w)");
    }
    cudaIpcMemHandle_t handle;
    std::memcpy(&handle, static_cast<const char*>(handles) + other * sizeof handle, sizeof handle);
    void* memory = nullptr;
    REGATTA_RETURN_IF_ERROR(cuda_status(
        cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess), "ranks on GPUs"));
    made->others.push_back(memory);
    exchange.slots[other] = static_cast<uint4*>(memory);
  }
  if (ends == nullptr) return Status::error("ranks on GPUs: this process is no rank");
  const auto page = static_cast<size_t>(getpagesize());
  REGATTA_RETURN_IF_ERROR(cuda_status(cudaHostRegister(ends, page, cudaHostRegisterMapped),
                                      "ranks on GPUs: cudaHostRegister"));
  made->registered = ends;
  void* on_gpu = nullptr;
  REGATTA_RETURN_IF_ERROR(cuda_status(cudaHostGetDevicePointer(&on_gpu, ends, 0), "ranks on GPUs"));
  exchange.ends = static_cast<const uint32_t*>(on_gpu);
  current = std::move(made);
  current_links = links;
  return {};
}

// One sum, seen by all: what a link says it can do it may not do.
Status check() {
  constexpr int kCount = 1000;
  float* values = nullptr;
  std::vector<float> host(kCount, 1.f + current->exchange.rank);
  REGATTA_RETURN_IF_ERROR(cuda_status(cudaMalloc(&values, kCount * 4), "ranks on GPUs"));
  const std::unique_ptr<float, cudaError_t (*)(void*)> owner(values,
                                                             [](void* p) { return cudaFree(p); });
  REGATTA_RETURN_IF_ERROR(
      cuda_status(cudaMemcpy(values, host.data(), kCount * 4, cudaMemcpyDefault), "ranks on GPUs"));
  REGATTA_RETURN_IF_ERROR(sum_ranks({values, values, kCount, DType::kFloat32}, {}));
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(kCheckSeconds);
  cudaError_t error;
  while ((error = cudaStreamQuery(nullptr)) == cudaErrorNotReady) {
    if (std::chrono::steady_clock::now() > until) {
      return Status::error("ranks on GPUs: what GPUs write into each other's memory does not come");
    }
    usleep(100);
  }
  REGATTA_RETURN_IF_ERROR(cuda_status(error, "ranks on GPUs"));
  REGATTA_RETURN_IF_ERROR(
      cuda_status(cudaMemcpy(host.data(), values, kCount * 4, cudaMemcpyDefault), "ranks on GPUs"));
  const float size = static_cast<float>(current->exchange.size);
  const float sum = size * (size + 1) / 2;
  if (std::any_of(host.begin(), host.end(), [&](float x) { return x != sum; })) {
    return Status::error("ranks on GPUs: what GPUs write into each other's memory comes wrong");
  }
  return {};
}

const char* text_of(const Status& status) {
  static std::string text;
  text = status.message();
  return status.ok() ? nullptr : text.c_str();
}

bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace

const Exchange* current_exchange() { return current ? &current->exchange : nullptr; }

NcclRoom nccl_room() {
  return gathered == nullptr ? NcclRoom{}
                             : NcclRoom{gathered, kGatheredBytes / 4, num_ranks_of_nccl};
}

SumProblem sum_problem(int64_t bytes) {
  const int size = current ? current->exchange.size : 1;
  return {bytes, size, compute_capability(), current_links, has_nccl()};
}

Status sum_ranks(const SumRanksParams& p, const Launch& launch_on) {
  const Exchange* const exchange = current_exchange();
  if (exchange == nullptr && !has_nccl()) {
    return Status::error("sum_ranks: this process has no other ranks");
  }
  if (!is_aligned(p.in) || !is_aligned(p.out)) {
    return Status::error("sum_ranks: rows must begin at multiples of 16 bytes");
  }
  return dispatch_dtype(p.dtype, "sum_ranks", [&](auto* t) -> Status {
    using T = std::remove_pointer_t<decltype(t)>;
    constexpr int64_t kSize = Vec16<T>::kSize;
    SumProblem problem = sum_problem(p.count * int64_t{sizeof(T)});
    const AllReduce chosen = p.by ? *p.by : select_all_reduce(problem);
    if (chosen == AllReduce::kNccl) {
      return nccl_sum(p.in, p.out, p.count, p.dtype, launch_on.stream);
    }
    problem.has_nccl = false;
    const int64_t slot_bytes = int64_t{exchange->slot_pieces - kSpare} * 16;
    const int64_t most_bytes =
        chosen == AllReduce::kOneShot ? std::min(kLaunchBytes, slot_bytes) : kLaunchBytes;
    const int64_t most = most_bytes / int64_t{sizeof(T)};
    for (int64_t begin = 0; begin < p.count; begin += most) {
      const int64_t count = std::min(most, p.count - begin);
      const auto pieces = static_cast<uint32_t>(ceil_div(count, kSize));
      const T* const in = static_cast<const T*>(p.in) + begin;
      T* const out = static_cast<T*>(p.out) + begin;
      problem.bytes = count * int64_t{sizeof(T)};
      const AllReduce by = p.by ? *p.by : select_all_reduce(problem);
      if (by == AllReduce::kOneShot) {
        REGATTA_RETURN_IF_ERROR(launch(one_shot_kernel<T>, config_for(pieces, launch_on),
                                       "sum_ranks", *exchange, in, out, count, pieces));
        continue;
      }
      const auto slice = static_cast<uint32_t>(ceil_div(pieces, uint32_t(exchange->size)));
      REGATTA_RETURN_IF_ERROR(launch(two_shot_kernel<T>, config_for(slice, launch_on), "sum_ranks",
                                     *exchange, in, out, count, pieces, slice));
    }
    return {};
  });
}

namespace {

// By NCCL, into memory of its own, and from there to their columns.
Status gather_by_nccl(const GatherColumnsParams& p, const Columns& columns, int size,
                      const Launch& launch_on) {
  const int64_t most = kGatheredBytes / 4 / size, words = p.num_rows * p.width;
  for (int64_t begin = 0; begin < words; begin += most) {
    const int64_t count = std::min(most, words - begin);
    REGATTA_RETURN_IF_ERROR(nccl_gather(p.part + begin, gathered, count, launch_on.stream));
    const auto pieces = static_cast<uint32_t>(ceil_div(size * count, int64_t{4}));
    REGATTA_RETURN_IF_ERROR(launch(place_kernel, config_for(pieces, launch_on), "gather_over_ranks",
                                   columns, gathered, p.all, begin, count, size));
  }
  return {};
}

}  // namespace

Status gather_over_ranks(const GatherColumnsParams& p, const Launch& launch_on) {
  const Exchange* const exchange = current_exchange();
  if (exchange == nullptr && gathered == nullptr) {
    return Status::error("gather_over_ranks: this process has no other ranks");
  }
  if (!is_aligned(p.part)) {
    return Status::error("gather_over_ranks: rows must begin at multiples of 16 bytes");
  }
  Columns columns = {};
  columns.width = static_cast<int>(p.width);
  const int size = exchange ? exchange->size : num_ranks_of_nccl;
  for (int rank = 0; rank < size; ++rank) {
    columns.begins[rank + 1] = columns.begins[rank] + p.counts[rank];
  }
  columns.all_width = columns.begins[size];
  columns.whole =
      p.width % 4 == 0 && columns.all_width == size * columns.width && is_aligned(p.all);
  if (exchange == nullptr) return gather_by_nccl(p, columns, size, launch_on);
  const int64_t most = int64_t{exchange->slot_pieces - kSpare} * 4, words = p.num_rows * p.width;
  for (int64_t begin = 0; begin < words; begin += most) {
    const int64_t count = std::min(most, words - begin);
    const auto pieces = static_cast<uint32_t>(ceil_div(count, int64_t{4}));
    REGATTA_RETURN_IF_ERROR(launch(gather_kernel, config_for(pieces, launch_on),
                                   "gather_over_ranks", *exchange, columns, p.part, p.all, begin,
                                   count, pieces));
  }
  return {};
}

Status own_rows(const OwnRowsParams& p, const Launch& launch_on) {
  if (p.count == 0) return {};
  return launch(own_rows_kernel,
                {launch_on, ceil_div(p.count, int64_t{kLeastThreads}), kLeastThreads}, "own_rows",
                p.token_ids, p.rows, static_cast<int>(p.count), static_cast<int>(p.begin),
                static_cast<int>(p.end), static_cast<int>(p.other));
}

}  // namespace regatta::cuda

// For ctypes; see predict/device/communicator.py. On the current device.
REGATTA_EXPORT const char* regatta_gpu_ranks_create(int device, int size, void* handle) {
  using namespace regatta::cuda;
  regatta::Status status = cuda_status(cudaSetDevice(device), "ranks on GPUs");
  if (status.ok()) status = create(size, handle);
  return text_of(status);
}
REGATTA_EXPORT const char* regatta_gpu_ranks_open(const void* handles, const int* devices, int rank,
                                                  void* ends, int links) {
  return regatta::cuda::text_of(
      regatta::cuda::open(handles, devices, rank, ends, static_cast<regatta::cuda::Links>(links)));
}
// Where no rank's GPU reaches another's memory.
REGATTA_EXPORT const char* regatta_gpu_ranks_by_nccl(int device, int size) {
  using namespace regatta::cuda;
  regatta::Status status = cuda_status(cudaSetDevice(device), "ranks on GPUs");
  if (status.ok()) status = cuda_status(cudaMalloc(&gathered, kGatheredBytes), "ranks on GPUs");
  num_ranks_of_nccl = size;
  return text_of(status);
}
REGATTA_EXPORT int regatta_gpu_ranks_want_nccl(int size, int links) {
  return regatta::cuda::wants_nccl(size, static_cast<regatta::cuda::Links>(links)) ? 1 : 0;
}
REGATTA_EXPORT const char* regatta_gpu_ranks_check() {
  return regatta::cuda::text_of(regatta::cuda::check());
}
REGATTA_EXPORT void regatta_gpu_ranks_close() {
  regatta::cuda::current.reset();
  regatta::cuda::made.reset();
  cudaFree(std::exchange(regatta::cuda::gathered, nullptr));
}
