// Drives the thread pool as hard as its rules allow, for builds with -fsanitize.
//
//   thread_pool_test            every case below; exit status 0, or 1 with what went wrong
//   thread_pool_test race       a region that breaks the rules: the sanitizer must report it
//
// Data that threads share is plain memory on purpose: only the pool's own atomics order it, so that
// a barrier, a start or an end that orders too little is a race that the sanitizer sees. Linked
// with csrc/cpu/thread_pool.cc and a few kernels through their framework-free functions.
#include "cpu/thread_pool.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "regatta/activate.h"
#include "regatta/norm.h"

namespace {

using regatta::cpu::parallel;
using regatta::cpu::Scratch;
using regatta::cpu::set_num_threads;
using regatta::cpu::Team;

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                \
    }                                                                              \
  } while (0)

// Three loops with a barrier after each: every element is written once per loop, and read by
// whichever thread has it in the next one.
void pipeline(int max_threads, int64_t count) {
  std::vector<int64_t> first(count, -1), second(count, -1);
  int64_t sum = -1;
  parallel(max_threads, [&](Team& team) {
    team.for_chunks(count, 7, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) first[i] = i;
    });
    team.barrier();
    team.for_guided(count, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) second[i] = first[count - 1 - i] * 2;
    });
    team.barrier();
    team.once([&] {
      sum = 0;
      for (int64_t value : second) sum += value;
    });
    team.barrier();
    CHECK(sum == count * (count - 1));  // every thread that takes part reads it
  });
  CHECK(sum == count * (count - 1));
}

void sizes_change_from_call_to_call() {
  for (int64_t i = 0; i < 400; ++i) pipeline(1 + i % 9, (i * 37) % 501);
}

void thread_counts_change_between_calls() {
  for (int i = 0; i < 40; ++i) {
    set_num_threads(1 + i % 6);
    CHECK(regatta::cpu::num_threads() == 1 + i % 6);
    pipeline(1 << 16, 100 + i);
    pipeline(2, i);
  }
}

// Workers fall asleep between these, and are woken.
void idle_workers_wake() {
  set_num_threads(4);
  for (int i = 0; i < 60; ++i) {
    pipeline(4, 64);
    usleep(i % 3 * 200);
  }
}

void several_callers_at_once() {
  set_num_threads(3);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([caller] {
      for (int64_t i = 0; i < 80; ++i) pipeline(1 + (i + caller) % 4, 50 + i);
    });
  }
  // Another one changes the number of threads while they run, and ends the workers with it.
  callers.emplace_back([] {
    for (int i = 0; i < 40; ++i) {
      set_num_threads(1 + i % 4);
      CHECK(regatta::cpu::num_threads() >= 1);
      std::this_thread::yield();
    }
  });
  for (std::thread& caller : callers) caller.join();
}

void nested_regions_run_alone() {
  set_num_threads(4);
  for (int i = 0; i < 40; ++i) {
    std::vector<int64_t> sums(24, 0);
    parallel([&](Team& team) {
      team.for_each(24, [&](int64_t index) {
        parallel([&](Team& inner) {
          CHECK(inner.num_threads() == 1);
          inner.for_each(10, [&](int64_t j) { sums[index] += j; });
        });
      });
    });
    for (int64_t sum : sums) CHECK(sum == 45);
  }
}

void scratch_is_each_threads_own() {
  set_num_threads(4);
  for (int i = 0; i < 60; ++i) {
    std::vector<int64_t> sums(40, 0);
    Scratch& mine = Scratch::mine();
    Scratch::Scope outer(mine);
    int64_t* shared = mine.take<int64_t>(40);
    parallel([&](Team& team) {
      team.for_each(40, [&](int64_t index) { shared[index] = index; });
      team.barrier();
      team.for_each(40, [&](int64_t index) {
        Scratch::Scope scope(team.scratch());
        // Sizes grow, so that arenas get new blocks and are put together again.
        const int64_t count = 1000 * (index + 1) * (1 + i % 5);
        int64_t* own = team.scratch().take<int64_t>(count);
        own[0] = own[count - 1] = shared[index];
        sums[index] = own[0] + own[count - 1];
      });
    });
    for (int64_t index = 0; index < 40; ++index) CHECK(sums[index] == 2 * index);
  }
}

#ifndef __SANITIZE_THREAD__  // which cannot follow a fork's child that starts threads
void forked_children_start_their_own_workers() {
  set_num_threads(3);
  pipeline(3, 100);
  for (int i = 0; i < 3; ++i) {
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      pipeline(3, 200);
      set_num_threads(2);
      pipeline(2, 200);
      _exit(0);
    }
    pipeline(3, 300);
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
}
#endif

void kernels_of_several_callers() {
  constexpr int64_t kRows = 24, kWidth = 512;
  set_num_threads(3);
  std::vector<float> gate_up(kRows * 2 * kWidth), weight(kWidth, 1.0f);
  for (size_t i = 0; i < gate_up.size(); ++i) gate_up[i] = 0.01f * static_cast<float>(i % 200) - 1;
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      std::vector<float> out(kRows * kWidth), normed(kRows * kWidth), kept(kRows * kWidth);
      for (int64_t rows = 1; rows <= kRows; ++rows) {
        regatta::ActivateParams silu{};
        silu.x = gate_up.data();
        silu.out = out.data();
        silu.num_tokens = rows;
        silu.intermediate_size = kWidth;
        silu.dtype = regatta::DType::kFloat32;
        CHECK(regatta::cpu::activate(silu).ok());
        regatta::NormParams norm{};
        norm.x = out.data();
        norm.weight = weight.data();
        norm.out = normed.data();
        norm.residual_out = kept.data();
        norm.num_tokens = rows;
        norm.hidden_size = kWidth;
        norm.epsilon = 1e-5f;
        norm.dtype = regatta::DType::kFloat32;
        CHECK(regatta::cpu::norm(norm).ok());
        double squares = 0;
        for (int64_t i = 0; i < kWidth; ++i) squares += normed[i] * normed[i];
        CHECK(std::fabs(squares / kWidth - 1) < 1e-2);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

// Where memory ends on one thread, the others leave their barriers, and the pool goes on.
void a_thread_without_memory_ends_its_region() {
  set_num_threads(3);
  for (int64_t unlucky = 0; unlucky < 40; ++unlucky) {
    bool thrown = false;
    try {
      parallel([&](Team& team) {
        for (int loop = 0; loop < 3; ++loop) {
          team.for_each(20, [&](int64_t i) {
            Scratch::Scope scope(team.scratch());
            team.scratch().take<char>(loop == 1 && i == unlucky ? int64_t{1} << 50 : 64);
          });
          team.barrier();
        }
      });
    } catch (const std::bad_alloc&) {
      thrown = true;
    }
    CHECK(thrown == (unlucky < 20));
    pipeline(3, 100);
  }
}

// Work outside the team's loops: two threads change one number with nothing between them.
void race() {
  set_num_threads(4);
  int64_t number = 0;
  for (int i = 0; i < 200; ++i) {
    parallel([&](Team& team) {
      ++number;
      team.for_each(64, [](int64_t) { usleep(1); });
      team.barrier();
    });
  }
  std::printf("%lld\n", static_cast<long long>(number));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "race") == 0) {
    race();
    return 0;
  }
  const struct {
    const char* name;
    void (*run)();
  } kCases[] = {
      {"sizes change from call to call", sizes_change_from_call_to_call},
      {"thread counts change between calls", thread_counts_change_between_calls},
      {"idle workers wake", idle_workers_wake},
      {"several callers at once", several_callers_at_once},
      {"nested regions run alone", nested_regions_run_alone},
      {"scratch is each thread's own", scratch_is_each_threads_own},
#ifndef __SANITIZE_THREAD__
      {"forked children start their own workers", forked_children_start_their_own_workers},
#endif
      {"kernels of several callers", kernels_of_several_callers},
      {"a thread without memory ends its region", a_thread_without_memory_ends_its_region},
  };
  for (const auto& each : kCases) {
    each.run();
    std::printf("%s: ok\n", each.name);
    std::fflush(stdout);
  }
  return 0;
}
