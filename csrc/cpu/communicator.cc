// The communicator of ranks on a CPU: one memory file, which each rank has mapped.
//
// An exchange: a rank copies its part to its slot of this turn, counts itself as arrived, waits for
// all others, and reads their slots. Two turns of slots are enough: who has arrived at exchange k
// has read all of k - 1, and who has seen all arrive at k may write where k - 1 was read. What is
// larger than a slot goes in several exchanges. A waiting rank spins shortly, since ranks that have
// cores of their own arrive within microseconds of each other, then sleeps.
#include "regatta/communicator.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>

#include "dispatch.h"
#include "pause.h"
#include "regatta/abi.h"
#include "thread_pool.h"

#define REGATTA_INL "communicator.inl"
#include "foreach_isa.h"

namespace regatta::cpu {

REGATTA_OPERATOR(sum_parts, SumPartsParams)

namespace {

constexpr int64_t kSpinMicroseconds = 20;
constexpr long kSleepNanoseconds = 20'000'000;  // until it is looked whether all ends
constexpr int kPausesBeforeYield = 16;          // another rank may be queued behind this one

static_assert(sizeof(SharedWords) == 64 * (1 + SharedWords::kMaxRanks),
              "predict/ranks/control.py knows this layout");

int64_t num_bytes(int size) {
  return int64_t{sizeof(SharedWords)} + SharedWords::kNumTurns * size * SharedWords::kSlotBytes;
}

int64_t now_us() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Shared among processes.
void futex(std::atomic<uint32_t>* word, int op, uint32_t value, const timespec* timeout) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), op, value, timeout, nullptr, 0);
}

class SharedMemory final : public Communicator {
 public:
  SharedMemory(void* memory, int rank, int size)
      : memory_(static_cast<char*>(memory)),
        words_(static_cast<SharedWords*>(memory)),
        rank_(rank),
        size_(size),
        num_done_(words_->ranks[rank].num_arrived.load()) {}
  ~SharedMemory() override { munmap(memory_, static_cast<size_t>(num_bytes(size_))); }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const std::atomic<uint32_t>& ends() const override { return words_->all.ends; }

  Status sum(void* data, int64_t count, DType dtype) override {
    if (!is_activation_dtype(dtype)) {
      return Status::error(std::string("ranks sum float32, bfloat16 or float16, got ") +
                           dtype_name(dtype));
    }
    const int64_t bytes = dtype_size(dtype), most = SharedWords::kSlotBytes / bytes;
    for (int64_t begin = 0; begin < count; begin += most) {
      char* const part = static_cast<char*>(data) + begin * bytes;
      SumPartsParams params;
      params.count = std::min(most, count - begin);
      REGATTA_RETURN_IF_ERROR(exchange(part, params.count * bytes));
      for (int i = 0; i < size_; ++i) params.parts[i] = read_slot(i);
      params.num_parts = size_;
      params.out = part;
      params.dtype = dtype;
      REGATTA_RETURN_IF_ERROR(sum_parts(params));
    }
    return {};
  }

  Status gather(const void* part, void* all, int64_t bytes) override {
    for (int64_t begin = 0; begin < bytes; begin += SharedWords::kSlotBytes) {
      const int64_t length = std::min(SharedWords::kSlotBytes, bytes - begin);
      REGATTA_RETURN_IF_ERROR(exchange(static_cast<const char*>(part) + begin, length));
      for (int i = 0; i < size_; ++i) {
        std::memcpy(static_cast<char*>(all) + i * bytes + begin, read_slot(i),
                    static_cast<size_t>(length));
      }
    }
    return {};
  }

 private:
  char* slot(uint32_t exchange, int rank) const {
    const int64_t turn = exchange % SharedWords::kNumTurns;
    return memory_ + sizeof(SharedWords) + (turn * size_ + rank) * SharedWords::kSlotBytes;
  }
  const char* read_slot(int rank) const { return slot(num_done_ - 1, rank); }

  // num_arrived and num_waiting are sequentially consistent. The store of num_arrived releases the
  // slot's bytes, a load of it acquires them. And who arrives looks for waiting ranks behind it,
  // who waits counts itself ahead of looking: in their one order one of the two sees the other.
  Status exchange(const void* part, int64_t bytes) {
    std::memcpy(slot(num_done_, rank_), part, static_cast<size_t>(bytes));
    SharedWords::OfRank& own = words_->ranks[rank_];
    own.num_arrived.store(++num_done_);
    if (own.num_waiting.load() != 0) futex(&own.num_arrived, FUTEX_WAKE, 0x7fffffff, nullptr);
    for (int i = 0; i < size_; ++i) REGATTA_RETURN_IF_ERROR(wait_for(i));
    return {};
  }

  bool has_arrived(int rank) const {  // the counters may wrap around
    return static_cast<int32_t>(words_->ranks[rank].num_arrived.load() - num_done_) >= 0;
  }
  // Relaxed: a flag that is looked at again and again, with nothing to read behind it.
  bool is_ending() const { return ends().load(std::memory_order_relaxed) != 0; }

  Status wait_for(int rank) {
    if (has_arrived(rank)) return {};
    const int64_t until = now_us() + kSpinMicroseconds;
    for (int spins = 1; now_us() < until; ++spins) {
      pause_core();
      if (spins % kPausesBeforeYield == 0) sched_yield();
      if (has_arrived(rank)) return {};
    }
    SharedWords::OfRank& other = words_->ranks[rank];
    while (!has_arrived(rank)) {
      if (is_ending()) {
        return Status::error("rank " + std::to_string(rank_) + " waited for rank " +
                             std::to_string(rank) + ", and all ranks were told to end");
      }
      const timespec timeout = {0, kSleepNanoseconds};
      other.num_waiting.fetch_add(1);
      const uint32_t seen = other.num_arrived.load();
      if (!has_arrived(rank)) futex(&other.num_arrived, FUTEX_WAIT, seen, &timeout);
      other.num_waiting.fetch_sub(1);
    }
    return {};
  }

  char* const memory_;
  SharedWords* const words_;
  const int rank_, size_;
  uint32_t num_done_;  // exchanges
};

Communicator* current = nullptr;

// What a function for ctypes returns: null, or what went wrong, valid until the next call.
const char* text_of(const Status& status) {
  static std::string text;
  text = status.message();
  return status.ok() ? nullptr : text.c_str();
}

Status open(int fd, int rank, int size) {
  if (size < 1 || size > SharedWords::kMaxRanks || rank < 0 || rank >= size) {
    return Status::error("rank " + std::to_string(rank) + " of " + std::to_string(size) +
                         " (allowed: up to " + std::to_string(SharedWords::kMaxRanks) + ")");
  }
  struct stat found;
  if (fstat(fd, &found) != 0 || found.st_size < num_bytes(size)) {
    return Status::error("the ranks' memory file is not there, or too small");
  }
  void* const memory = mmap(nullptr, static_cast<size_t>(num_bytes(size)), PROT_READ | PROT_WRITE,
                            MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) {
    return Status::error(std::string("the ranks' memory file: ") + std::strerror(errno));
  }
  delete current;
  current = new SharedMemory(memory, rank, size);
  return {};
}

}  // namespace
}  // namespace regatta::cpu

namespace regatta {
Communicator* current_communicator() { return cpu::current; }
}  // namespace regatta

// For ctypes; see predict/ranks/communicator.py.
REGATTA_EXPORT int64_t regatta_communicator_bytes(int size) {
  return regatta::cpu::num_bytes(size);
}
REGATTA_EXPORT const char* regatta_communicator_open(int fd, int rank, int size) {
  return regatta::cpu::text_of(regatta::cpu::open(fd, rank, size));
}
REGATTA_EXPORT void regatta_communicator_close() {
  delete regatta::cpu::current;
  regatta::cpu::current = nullptr;
}
// The word that ends all waiting: see Communicator::ends(). Null with one rank.
REGATTA_EXPORT const void* regatta_communicator_ends() {
  return regatta::cpu::current ? &regatta::cpu::current->ends() : nullptr;
}
REGATTA_EXPORT const char* regatta_communicator_sum(void* data, int64_t count, int dtype) {
  if (!regatta::cpu::current) return nullptr;
  return regatta::cpu::text_of(
      regatta::cpu::current->sum(data, count, static_cast<regatta::DType>(dtype)));
}
REGATTA_EXPORT const char* regatta_communicator_gather(const void* part, void* all, int64_t bytes) {
  if (!regatta::cpu::current) {
    std::memcpy(all, part, static_cast<size_t>(bytes));
    return nullptr;
  }
  return regatta::cpu::text_of(regatta::cpu::current->gather(part, all, bytes));
}
