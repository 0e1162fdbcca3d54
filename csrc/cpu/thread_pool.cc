#include "thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "pause.h"
#include "regatta/abi.h"

namespace regatta::cpu {
namespace {

// A worker waits this long for the next region before it sleeps. Between two ops of a decode step
// lie 5-20 us of framework; waking a sleeper costs about as much again.
constexpr int64_t kSpinMicroseconds = 60;
// A waiting thread offers its core every so many pauses (1.5 us): if another process has taken the
// other core, the thread that it waits for may be queued behind it here. Offering costs 0.4 us.
constexpr int kPausesBeforeYield = 64;

int64_t now_us() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

int futex(std::atomic<uint32_t>* word, int op, uint32_t value) {
  static_assert(sizeof(std::atomic<uint32_t>) == 4, "futex words are 32 bits");
  return static_cast<int>(syscall(SYS_futex, reinterpret_cast<uint32_t*>(word),
                                  op | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0));
}

// CPU time per period over the period; 0 when there is no limit.
double cgroup_cpus() {
  double quota = 0.0, period = 0.0;
  if (FILE* file = std::fopen("/sys/fs/cgroup/cpu.max", "r")) {
    const int found = std::fscanf(file, "%lf %lf", &quota, &period);  // "max 100000": found 0
    std::fclose(file);
    return found == 2 && period > 0 ? quota / period : 0.0;
  }
  if (FILE* file = std::fopen("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "r")) {
    const int found = std::fscanf(file, "%lf", &quota);
    std::fclose(file);
    if (found != 1 || quota <= 0) return 0.0;
    file = std::fopen("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "r");
    if (!file) return 0.0;
    const int found_period = std::fscanf(file, "%lf", &period);
    std::fclose(file);
    return found_period == 1 && period > 0 ? quota / period : 0.0;
  }
  return 0.0;
}

// The CPUs that share a core with `cpu`, as the system spells them ("0,64"); one text per core.
std::string core_of(int cpu) {
  char path[96], siblings[256] = "";
  std::snprintf(path, sizeof(path), "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list",
                cpu);
  if (FILE* file = std::fopen(path, "r")) {
    if (!std::fgets(siblings, sizeof(siblings), file)) siblings[0] = 0;
    std::fclose(file);
  }
  return siblings[0] ? siblings : std::to_string(cpu);
}

// Cores, not hardware threads: two threads of one core share its multipliers and its path to
// memory, and a waiting one would take cycles from a working one.
int default_num_threads() {
  int count = static_cast<int>(std::thread::hardware_concurrency());
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    std::set<std::string> cores;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &set)) cores.insert(core_of(cpu));
    }
    count = static_cast<int>(cores.size());
  }
  const double limit = cgroup_cpus();
  if (limit > 0) count = std::min(count, static_cast<int>(limit + 0.5));
  return std::max(count, 1);
}

thread_local bool inside_region = false;

template <class Done>
void spin_until(Done&& done) {
  for (int spins = 1; !done(); ++spins) {
    pause_core();
    if (spins % kPausesBeforeYield == 0) sched_yield();
  }
}

// Workers 1 .. size-1; the caller of run() is thread 0. Regions are serialised by `mutex_`.
class Pool {
 public:
  static Pool& instance() {
    // Never destroyed: workers may outlive static destructors.
    static Pool* pool = [] {
      auto* created = new Pool;
      // A forked child has no workers; it starts its own at its first region.
      pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                     [] { instance().forget_workers(); });
      return created;
    }();
    return *pool;
  }

  // Relaxed, as the stores: a number that nothing else hangs on. Who acts on it holds the mutex.
  int size() const { return size_.load(std::memory_order_relaxed); }

  void resize(int count) {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_workers();
    size_.store(count < 1 ? default_num_threads() : count, std::memory_order_relaxed);
  }

  void run(int max_threads, internal::RegionFn fn, void* context) {
    std::lock_guard<std::mutex> lock(mutex_);
    const int count = std::min(std::max(max_threads, 1), size());
    if (count > 1 && workers_.empty()) start_workers();
    region_.num_threads = count;
    inside_region = true;
    int num_loops = internal::kMaxLoops;
    if (count == 1) {
      num_loops = run_part(fn, context, 0);
    } else {
      fn_ = fn;
      context_ = context;
      // Releases fn_, context_, num_threads and the loops' zeros to those who enter().
      members_.store(kOpen, std::memory_order_release);
      publish();
      num_loops = run_part(fn, context, 0);
      // From here on nobody enters; the context lives until those inside have left. Acquires what
      // those wrote who have left already, as the loads below do of the others: each leave()
      // releases, and stands in one release sequence with those behind it. It need not release:
      // this thread's own writes are its caller's.
      members_.fetch_and(~kOpen, std::memory_order_acq_rel);
      spin_until([&] { return members_.load(std::memory_order_acquire) == 0; });
    }
    region_.reset_loops(num_loops);
    inside_region = false;
    if (region_.failed.exchange(false, std::memory_order_relaxed)) throw std::bad_alloc();
  }

 private:
  Pool() { size_.store(default_num_threads(), std::memory_order_relaxed); }

  static constexpr uint32_t kOpen = 1u << 31;

  // Returns the number of loops, all that there may be where memory ended.
  int run_part(internal::RegionFn fn, void* context, int thread) {
    try {
      return fn(context, region_, thread);
    } catch (const std::bad_alloc&) {
      // Releases nothing that is used; whoever waits must only see it at some time.
      region_.failed.store(true, std::memory_order_relaxed);
      return internal::kMaxLoops;
    }
  }

  // The ticket is counted up, then sleepers are looked for; who goes to sleep counts itself, then
  // looks at the ticket. All four are sequentially consistent: in their one order either the ticket
  // is seen, or the sleeper is. With less, Arm (and x86's store buffer) may let both miss.
  void publish() {
    ticket_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) futex(&ticket_, FUTEX_WAKE, INT_MAX);
  }

  // Joins the open region, whichever it is by now. Until leave() its job stays valid.
  bool enter() {
    // Relaxed: a guess that the exchange checks. Acquire: pairs with the store of kOpen, whose
    // release sequence the additions and subtractions of members go on; a failure reads anew.
    uint32_t members = members_.load(std::memory_order_relaxed);
    while (members & kOpen) {
      if (members_.compare_exchange_weak(members, members + 1, std::memory_order_acquire)) {
        return true;
      }
    }
    return false;
  }
  // Releases all that this thread did in the region to run(), which waits for no member.
  void leave() { members_.fetch_sub(1, std::memory_order_release); }

  uint32_t wait_for_ticket(uint32_t seen) {
    int64_t deadline = 0;
    for (int spins = 1;; ++spins) {
      // Acquire: pairs with publish(). A worker that sees the ticket of stop_workers() sees
      // stopping_; one that sees a region's finds it open, or closed again.
      uint32_t ticket = ticket_.load(std::memory_order_acquire);
      if (ticket != seen) return ticket;
      pause_core();
      if (spins % kPausesBeforeYield) continue;
      sched_yield();
      const int64_t now = now_us();
      if (deadline == 0) deadline = now + kSpinMicroseconds;
      if (now < deadline) continue;
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      while ((ticket = ticket_.load(std::memory_order_seq_cst)) == seen) {
        futex(&ticket_, FUTEX_WAIT, seen);
      }
      // Relaxed: one too many costs a call of futex, and nothing else.
      sleepers_.fetch_sub(1, std::memory_order_relaxed);
      return ticket;
    }
  }

  void work(int thread, uint32_t seen) {
    inside_region = true;
    // Acquire: pairs with stop_workers(), though nothing is read behind it; the order that counts
    // is the ticket's.
    while (!stopping_.load(std::memory_order_acquire)) {
      seen = wait_for_ticket(seen);
      if (!enter()) continue;
      if (thread < region_.num_threads) run_part(fn_, context_, thread);
      leave();
    }
  }

  void start_workers() {
    // Relaxed: this thread alone counts tickets up, under the mutex.
    const uint32_t seen = ticket_.load(std::memory_order_relaxed);
    for (int thread = 1; thread < size(); ++thread) {
      workers_.emplace_back([this, thread, seen] { work(thread, seen); });
    }
  }

  void stop_workers() {
    if (workers_.empty()) return;
    stopping_.store(true, std::memory_order_release);
    publish();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
    // No worker is left; the next ones get it with their start.
    stopping_.store(false, std::memory_order_release);
  }

  void forget_workers() {
    // The thread objects name threads of the parent: leave them to leak, not to be joined.
    new (&workers_) std::vector<std::thread>;
    sleepers_.store(0, std::memory_order_relaxed);  // the child has one thread
    mutex_.unlock();
  }

  std::mutex mutex_;
  std::vector<std::thread> workers_;
  std::atomic<int> size_{1};
  internal::RegionFn fn_ = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<uint32_t> ticket_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<uint32_t> members_{
      0};  // kOpen while the region can be joined | workers inside
  alignas(64) internal::Region region_;
};

}  // namespace

namespace internal {

void too_many_loops() {
  std::fprintf(stderr, "regatta: a parallel region has more than %d loops\n", kMaxLoops);
  std::abort();
}

void run_region(int max_threads, RegionFn fn, void* context) {
  if (inside_region) {  // nested: the team's other members are busy
    Region alone;
    fn(context, alone, 0);
    return;
  }
  Pool::instance().run(max_threads, fn, context);
}

}  // namespace internal

void Team::wait_for(const std::atomic<int64_t>& done, int64_t count,
                    const internal::Region& region) {
  // Acquire: as in barrier().
  spin_until([&] {
    return done.load(std::memory_order_acquire) == count ||
           region.failed.load(std::memory_order_relaxed);
  });
  if (region.failed.load(std::memory_order_relaxed)) throw std::bad_alloc();
}

int num_threads() { return Pool::instance().size(); }
void set_num_threads(int count) { Pool::instance().resize(count); }

Scratch& Scratch::mine() {
  static thread_local Scratch scratch;
  return scratch;
}

Scratch::~Scratch() {
  for (int i = 0; i < num_blocks_; ++i) std::free(blocks_[i].data);
}

void* Scratch::take_bytes(size_t bytes) {
  bytes = (bytes + 63) & ~size_t{63};
  while (block_ < num_blocks_ && used_ + bytes > blocks_[block_].size) {
    ++block_;
    used_ = 0;
  }
  if (block_ == num_blocks_ && !add_block(bytes)) throw std::bad_alloc();
  void* pointer = blocks_[block_].data + used_;
  used_ += bytes;
  return pointer;
}

bool Scratch::add_block(size_t bytes) {
  constexpr size_t kHugePage = size_t{2} << 20;
  if (num_blocks_ == kMaxBlocks) return false;
  size_t size = std::max(bytes, num_blocks_ ? blocks_[num_blocks_ - 1].size * 2 : kHugePage);
  size = (size + kHugePage - 1) & ~(kHugePage - 1);
  char* data = static_cast<char*>(std::aligned_alloc(kHugePage, size));
  if (!data) return false;
  madvise(data, size, MADV_HUGEPAGE);  // activations of a prefill: spare the TLB
  blocks_[num_blocks_++] = {data, size};
  return true;
}

void Scratch::rewind(int block, size_t used) {
  block_ = block;
  used_ = used;
  // Back to empty: replace several blocks by one that is large enough for all of it next time.
  if (block == 0 && used == 0 && num_blocks_ > 1) {
    size_t total = 0;
    for (int i = 0; i < num_blocks_; ++i) {
      total += blocks_[i].size;
      std::free(blocks_[i].data);
    }
    num_blocks_ = 0;
    if (!add_block(total)) return;  // the next take tries again
  }
}

}  // namespace regatta::cpu

REGATTA_EXPORT void regatta_set_num_threads(int count) { regatta::cpu::set_num_threads(count); }
