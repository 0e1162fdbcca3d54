// Sums and joins over ranks, a process each with a GPU of its own, against the host; and their
// times in a graph. Where there are fewer GPUs than ranks these share them: slow, and as right.
//
//   ranks check sums|norms|columns|largest|ends [RANKS]
//   ranks time sums|norms|largest [RANKS]
//
// REGATTA_NCCL names libnccl.so.2: its sums are checked and timed beside the own ones.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>

#include "cuda/norm/sum_norm.h"
#include "cuda/ranks/select.h"
#include "native.cuh"
#include "regatta/cuda_ops.h"

extern "C" {
const char* regatta_gpu_ranks_create(int device, int size, void* handle);
const char* regatta_gpu_ranks_open(const void* handles, const int* devices, int rank, void* ends,
                                   int links);
const char* regatta_gpu_ranks_check();
const char* regatta_gpu_nccl_find(const char* path);
const char* regatta_gpu_nccl_id(void* id);
const char* regatta_gpu_nccl_open(int device, int rank, int size, const void* id);
}

using namespace regatta;
using namespace regatta::native;
using cuda::AllReduce;

namespace {

constexpr int kMost = 16;

struct Shared {
  alignas(4096) std::atomic<uint32_t> ends;
  alignas(4096) std::atomic<int> num_arrived;
  std::atomic<bool> failed;  // a process has ended
  cudaIpcMemHandle_t handles[kMost];
  uint64_t hashes[kMost];
  char nccl_id[128];
};

Shared* shared;
int rank = 0, size = 2, turns = 0;

void meet() {
  ++turns;
  shared->num_arrived.fetch_add(1);
  while (shared->num_arrived.load() < turns * size) {
    if (shared->failed) exit(1);
    usleep(20);
  }
}

void ok(const char* error) {
  if (error == nullptr) return;
  printf("rank %d: %s\n", rank, error);
  exit(1);
}

void join() {
  static bool joined = false;
  if (std::exchange(joined, true)) return;
  int count = 0, devices[kMost];
  CHECK_CUDA(cudaGetDeviceCount(&count));
  for (int r = 0; r < size; ++r) devices[r] = r % count;
  ok(regatta_gpu_ranks_create(devices[rank], size, &shared->handles[rank]));
  meet();
  ok(regatta_gpu_ranks_open(shared->handles, devices, rank, &shared->ends, 2));
  meet();
  ok(regatta_gpu_ranks_check());
  meet();
  const char* const nccl = std::getenv("REGATTA_NCCL");
  if (nccl == nullptr) return;
  setenv("NCCL_NVLS_ENABLE", "0", 1);
  ok(regatta_gpu_nccl_find(nccl));
  if (rank == 0) ok(regatta_gpu_nccl_id(shared->nccl_id));
  meet();
  ok(regatta_gpu_nccl_open(devices[rank], rank, size, shared->nccl_id));
  meet();
}

template <class T>
void sum_ranks(const T* in, T* out, int64_t count, cudaStream_t stream,
               const AllReduce* by = nullptr) {
  const cuda::SumRanksParams params = {in, out, count, cuda::Traits<T>::dtype, by};
  CHECK_STATUS(cuda::sum_ranks(params, cuda::Launch{stream, true}));
}

void sum_norm(const cuda::SumNormParams& params, cudaStream_t stream) {
  CHECK_STATUS(cuda::sum_norm(params, cuda::Launch{stream, true}));
}

// What rank r has at index i; now and then what is no ordinary number.
float value_of(int r, int64_t i, uint32_t seed) {
  const uint32_t bits = mix((uint64_t{seed} << 40) + i * 17 + r);
  if (i % 97 == 13) return -0.f;
  if (i % 1009 == 100 && r == 1) return NAN;
  if (i % 1009 == 101) return r == 0 ? INFINITY : 1.f;
  return (static_cast<int>(bits % 2001) - 1000) / 64.f;
}

template <class T>
std::vector<T> values_of(int r, int64_t count, uint32_t seed) {
  std::vector<T> v(count);
  for (int64_t i = 0; i < count; ++i) v[i] = host_from<T>(value_of(r, i, seed));
  return v;
}

// Whether each value is the sum in the order of ranks, rounded once.
template <class T>
bool is_sum(const std::vector<T>& got, uint32_t seed) {
  for (int64_t i = 0; i < static_cast<int64_t>(got.size()); ++i) {
    float sum = host_float(host_from<T>(value_of(0, i, seed)));
    for (int r = 1; r < size; ++r) sum += host_float(host_from<T>(value_of(r, i, seed)));
    const float wanted = host_float(host_from<T>(sum)), x = host_float(got[i]);
    if (!(x == wanted || (std::isnan(x) && std::isnan(wanted)))) {
      printf("rank %d: value %ld is %g, not %g\n", rank, static_cast<long>(i), x, wanted);
      return false;
    }
  }
  return true;
}

template <class T>
bool same_on_all_ranks(const std::vector<T>& v) {
  uint64_t hash = 1469598103934665603ull;
  const auto* bytes = reinterpret_cast<const uint8_t*>(v.data());
  for (size_t i = 0; i < v.size() * sizeof(T); ++i) hash = (hash ^ bytes[i]) * 1099511628211ull;
  shared->hashes[rank] = hash;
  meet();
  const bool same = std::equal(shared->hashes + 1, shared->hashes + size, shared->hashes);
  meet();
  return same;
}

template <class T>
void check_sums_of() {
  uint32_t seed = 1;
  for (const int64_t count : {1, 7, 4096, 4099, 100000, 1 << 20, 20'000'003}) {
    std::vector<T> first;
    for (const AllReduce by : {AllReduce::kOneShot, AllReduce::kTwoShot}) {
      const Buffer<T> in(values_of<T>(rank, count, seed)), out(count);
      // In place too, behind others of other sizes, in a graph that runs many times.
      run_graph([&](cudaStream_t stream) {
        for (const int64_t part : {count, std::min<int64_t>(count, 33), count}) {
          sum_ranks(in.data, out.data, part, stream, &by);
        }
      });
      const std::vector<T> got = out.host();
      const std::string name = format("%s %ld by %s", dtype_name(cuda::Traits<T>::dtype),
                                      static_cast<long>(count), int(by) == 0 ? "one" : "two");
      count_case(is_sum(got, seed), name + ": no sum");
      count_case(same_on_all_ranks(got), name + ": other bits on other ranks");
      if (by == AllReduce::kTwoShot) count_case(same_bits(got, first), name + ": other bits");
      first = got;
      sum_ranks(in.data, in.data, count, nullptr, &by);
      CHECK_CUDA(cudaDeviceSynchronize());
      count_case(same_bits(in.host(), got), name + ": other bits in place");
    }
    ++seed;
  }
  // Replays, whose turns do not begin where the recording's did.
  const int64_t count = 5000;
  const Buffer<T> in(values_of<T>(rank, count, seed)), out(count);
  TimedGraph graph([&](cudaStream_t stream) {
    for (const int64_t part : {count, int64_t{64}, int64_t{1000}, count}) {
      sum_ranks(in.data, out.data, part, stream);
    }
  });
  for (int i = 0; i < 50; ++i) {
    out.spoil();
    CHECK_CUDA(cudaDeviceSynchronize());
    graph.replay();
    count_case(is_sum(out.host(), seed), format("replay %d", i));
  }
}

// Two parts have one sum, in whatever order.
template <class T>
void check_nccl_of() {
  const AllReduce by = AllReduce::kNccl;
  for (const int64_t count : {7, 4099, 1 << 20}) {
    const Buffer<T> in(values_of<T>(rank, count, 5)), out(count);
    run_graph([&](cudaStream_t stream) { sum_ranks(in.data, out.data, count, stream, &by); });
    count_case(is_sum(out.host(), 5), format("%ld by NCCL: no sum", static_cast<long>(count)));
  }
}

void check_sums(const Words&) {
  join();
  if (std::getenv("REGATTA_NCCL") != nullptr && size == 2) {
    check_nccl_of<float>();
    check_nccl_of<__nv_bfloat16>();
    check_nccl_of<__half>();
  }
  check_sums_of<float>();
  check_sums_of<__nv_bfloat16>();
  check_sums_of<__half>();
}

struct NormOfSum {
  int64_t rows, width;
  Buffer<__nv_bfloat16> made, source, weight, out, normed;

  NormOfSum(int64_t rows, int64_t width)
      : rows(rows),
        width(width),
        made(values_of<__nv_bfloat16>(0, rows * width, 3)),
        source(rows * width),
        weight(width),
        out(rows * width),
        normed(rows * width) {
    std::vector<__nv_bfloat16> own(rows * width);
    for (int64_t i = 0; i < rows * width; ++i) {
      own[i] = host_from<__nv_bfloat16>((static_cast<int>(mix(i * 16 + rank) % 200) - 100) / 32.f);
    }
    made.put(own);
    fill_random(source.data, rows * width, 5);
    fill_random(weight.data, width, 6);
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  cuda::SumNormParams params(bool over_ranks) const {
    cuda::SumNormParams p;
    p.made = made.data, p.source = source.data, p.out = out.data, p.normed = normed.data;
    p.next_norm.is_there = true, p.next_norm.epsilon = 1e-5f;
    p.next_weights.weight = weight.data;
    p.num_rows = rows, p.width = width, p.over_ranks = over_ranks;
    p.summed = over_ranks ? const_cast<__nv_bfloat16*>(made.data) : nullptr;
    return p;
  }
};

// The norm's launch that sums is as the sum and the norm behind it.
void check_norms(const Words&) {
  join();
  for (const int64_t width : {64, 1000, 4096, 8192}) {
    for (const int64_t rows : {1, 3, 32, 40}) {
      NormOfSum of(rows, width);
      const Buffer<__nv_bfloat16> summed(rows * width);
      sum_ranks(of.made.data, summed.data, rows * width, nullptr);
      cuda::SumNormParams apart = of.params(false);
      apart.made = summed.data;
      sum_norm(apart, nullptr);
      CHECK_CUDA(cudaDeviceSynchronize());
      const auto out = of.out.host(), normed = of.normed.host();
      of.out.spoil(), of.normed.spoil();
      run_graph([&](cudaStream_t stream) { sum_norm(of.params(true), stream); });
      const std::string name = format("%ld x %ld", long(rows), long(width));
      count_case(same_bits(of.out.host(), out), name + ": other sums");
      count_case(same_bits(of.normed.host(), normed), name + ": other norms");
      count_case(same_on_all_ranks(normed), name + ": other bits on other ranks");
    }
  }
}

void check_columns(const Words&) {
  join();
  for (const int64_t rows : {1, 5, 128}) {
    for (const int width : {33, 64, 75'969}) {
      std::vector<int> counts;
      int all_width = 0;
      for (int r = 0; r < size; ++r) counts.push_back(width - 1 - r % 2), all_width += counts[r];
      const Buffer<float> part(values_of<float>(rank, rows * width, 9)), all(rows * all_width);
      const cuda::GatherColumnsParams params = {part.data, all.data, counts.data(), rows, width};
      run_graph([&](cudaStream_t stream) {
        CHECK_STATUS(cuda::gather_over_ranks(params, cuda::Launch{stream, true}));
      });
      const std::vector<float> got = all.host();
      bool right = true;
      int64_t at = 0;
      for (int64_t row = 0; row < rows; ++row) {
        for (int r = 0; r < size; ++r) {
          for (int column = 0; column < counts[r]; ++column, ++at) {
            const float wanted = value_of(r, row * width + column, 9);
            right = right && (got[at] == wanted || (std::isnan(got[at]) && std::isnan(wanted)));
          }
        }
      }
      count_case(right, format("%ld rows of %d columns", long(rows), width));
    }
  }
}

// Rows with equals, of nothing but -inf, with a NaN, an infinity, and zeros of both signs.
float logit_of(int r, int64_t row, int64_t column, int64_t width) {
  const auto bits = mix((uint64_t(r) << 40) + row * width + column);
  const bool here = column == 20 + row % 7;
  switch (row % 5) {
    case 1:
      return -INFINITY;
    case 2:
      if (here && r == 1) return NAN;
      break;
    case 3:
      if (here && r == size - 1) return INFINITY;
      break;
    case 4:
      return r == 0 ? -0.f : 0.f;
  }
  return (static_cast<int>(bits % 2001) - 1000) / 64.f;
}

cuda::LargestParams largest_params(const float* logits, int32_t* tokens, int64_t rows,
                                   int64_t width) {
  cuda::LargestParams p = {logits, tokens, rows, width};
  for (int r = 0; r < rank; ++r) p.begin += width - 1 - r % 2;
  p.count = width - 1 - rank % 2;
  return p;
}

void check_largest(const Words&) {
  join();
  for (const int64_t rows : {1, 5, 300}) {
    for (const int64_t width : {33, 64, 75'969}) {
      std::vector<float> own(rows * width, 1e9f);  // behind its tokens what would win
      std::vector<int32_t> wanted(rows);
      for (int64_t row = 0; row < rows; ++row) {
        float best = -INFINITY;
        int32_t token = 0;
        for (int r = 0; r < size; ++r) {
          for (int64_t i = 0; i < width - 1 - r % 2; ++i, ++token) {
            const float x = logit_of(r, row, i, width);
            if (r == rank) own[row * width + i] = x;
            if (std::isnan(x)) best = NAN, wanted[row] = -1;
            if (x > best) best = x, wanted[row] = token;
          }
        }
      }
      const Buffer<float> logits(own);
      const Buffer<int32_t> tokens(rows);
      TimedGraph graph([&](cudaStream_t stream) {
        const cuda::Launch on{stream, true};
        CHECK_STATUS(
            cuda::largest_over_ranks(largest_params(logits.data, tokens.data, rows, width), on));
      });
      for (int i = 0; i < 5; ++i) {  // turns other than the recording's
        tokens.spoil();
        CHECK_CUDA(cudaDeviceSynchronize());
        graph.replay();
        count_case(tokens.host() == wanted, format("%ld rows of %ld", long(rows), long(width)));
      }
    }
  }
}

// A rank waits for others that do not come, until all are told to end. The last part: turns are not
// alike behind it.
void check_ends(const Words&) {
  join();
  meet();
  if (rank == 0) {
    const Buffer<float> x(std::vector<float>(1000, 1.f));
    sum_ranks(x.data, x.data, 1000, nullptr);
    usleep(300'000);
    count_case(cudaStreamQuery(nullptr) == cudaErrorNotReady, "it did not wait");
    shared->ends = 1;
    const auto begin = std::chrono::steady_clock::now();
    CHECK_CUDA(cudaDeviceSynchronize());
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    count_case(took.count() < 1, format("it took %.1f s to end", took.count()));
  } else {
    count_case(true, "");
  }
  meet();
}

// Microseconds of a call of many in a graph that runs again and again.
double us(const std::function<void(cudaStream_t)>& call) {
  constexpr int kCalls = 66, kReplays = 20;
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaEvent_t begin, end;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  for (int i = 0; i < kCalls; ++i) call(stream);
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  meet();
  for (int i = 0; i < 3; ++i) CHECK_CUDA(cudaGraphLaunch(exec, stream));
  CHECK_CUDA(cudaEventRecord(begin, stream));
  for (int i = 0; i < kReplays; ++i) CHECK_CUDA(cudaGraphLaunch(exec, stream));
  CHECK_CUDA(cudaEventRecord(end, stream));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  float ms;
  CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
  cudaGraphExecDestroy(exec), cudaGraphDestroy(graph), cudaStreamDestroy(stream);
  meet();
  return 1e3 * ms / (kCalls * kReplays);
}

void time_sums(const Words&) {
  join();
  for (const int64_t bytes :
       {4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20, 8 << 20, 64 << 20}) {
    const Buffer<__nv_bfloat16> in(bytes / 2), out(bytes / 2);
    CHECK_CUDA(cudaMemset(in.data, 0, bytes));
    double times[3] = {};
    for (const AllReduce by : {AllReduce::kOneShot, AllReduce::kTwoShot, AllReduce::kNccl}) {
      if (by == AllReduce::kNccl && std::getenv("REGATTA_NCCL") == nullptr) continue;
      times[int(by)] = us([&](cudaStream_t s) { sum_ranks(in.data, out.data, bytes / 2, s, &by); });
    }
    const bool two = cuda::select_all_reduce({bytes, size, architecture()}) == AllReduce::kTwoShot;
    printf("%d ranks, %6ld KiB: %8.2f us by one shot, %8.2f by two, %8.2f by NCCL; chosen: %s\n",
           size, long(bytes >> 10), times[0], times[1], times[2], two ? "two" : "one");
  }
}

void time_norms(const Words&) {
  join();
  for (const int64_t rows : {1, 8, 32, 128}) {
    NormOfSum of(rows, 4096);
    const double alone = us([&](cudaStream_t s) { sum_norm(of.params(false), s); });
    const double summed = us([&](cudaStream_t s) { sum_norm(of.params(true), s); });
    const double sum =
        us([&](cudaStream_t s) { sum_ranks(of.made.data, of.out.data, rows * 4096, s); });
    printf("%d ranks, %3ld rows of 4096: norm %.2f us, sum %.2f, both %.2f\n", size, long(rows),
           alone, sum, summed);
  }
}

void time_largest(const Words&) {
  join();
  for (const int64_t rows : {1, 8, 32, 128}) {
    const int64_t width = 128'256 / size + 1;
    const Buffer<float> logits(rows * width), all(rows * width * size);
    const Buffer<int32_t> tokens(rows);
    CHECK_CUDA(cudaMemset(logits.data, 0, rows * width * 4));
    const cuda::LargestParams params = largest_params(logits.data, tokens.data, rows, width);
    const std::vector<int> counts(size, static_cast<int>(width - 1));
    const double apart = us([&](cudaStream_t s) {
      CHECK_STATUS(cuda::largest_over_ranks(params, cuda::Launch{s, true}));
    });
    const double joined = us([&](cudaStream_t s) {
      CHECK_STATUS(cuda::gather_over_ranks({logits.data, all.data, counts.data(), rows, width},
                                           cuda::Launch{s, true}));
    });
    printf("%d ranks, %3ld rows of %ld: the largest %.2f us, all logits joined %.2f\n", size,
           long(rows), long(width), apart, joined);
  }
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 3; i < argc; ++i) {
    if (std::isdigit(static_cast<unsigned char>(argv[i][0]))) size = std::atoi(argv[i]);
  }
  if (size < 2 || size > kMost) return 2;
  shared = static_cast<Shared*>(
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  // CUDA is of the processes alone: one that has it may not fork.
  for (rank = 0; rank < size; ++rank) {
    if (fork() != 0) continue;
    if (rank > 0) dup2(STDERR_FILENO, STDOUT_FILENO);
    exit(run_parts(argc, argv,
                   {{"check", "sums", check_sums},
                    {"check", "norms", check_norms},
                    {"check", "columns", check_columns},
                    {"check", "largest", check_largest},
                    {"check", "ends", check_ends},
                    {"time", "sums", time_sums},
                    {"time", "norms", time_norms},
                    {"time", "largest", time_largest}}));
  }
  int failed = 0, status;
  while (wait(&status) > 0) {
    if (status == 0 || failed) continue;
    failed = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
    shared->failed = true;
    shared->ends = 1;
  }
  return failed;
}
