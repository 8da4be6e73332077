#include "transport/gate.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>
#include <optional>

namespace mscomm {

namespace {

// How long a waiting rank polls before it sleeps. See "Waiting" in docs/performance.md.
constexpr std::chrono::microseconds awake{100};
// If there are more ranks than CPUs, a yield can be futile: the kernel gives the CPU straight back to the yielding rank. The
// kernel does this if that rank has used less than its share of the CPU time, or if its time slice is not over. In the meantime,
// the rank that all others are waiting for cannot run. So a rank goes to sleep when its consecutive futile yields have taken this
// long in total. This is about the time that a sleep and a wake-up take together.
constexpr std::chrono::microseconds as_long_as_a_sleep{5};
constexpr std::chrono::nanoseconds two_switches{1500};  // a yield that takes less time than two context switches was futile
// This many polls take about a microsecond. In a small call, most peers arrive within that time.
constexpr int polls_a_turn = 64;

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// The futex word is shared between processes, so FUTEX_PRIVATE_FLAG must not be set.
long futex(const std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout = nullptr) {
  return syscall(SYS_futex, &word, operation, value, timeout, nullptr, 0);
}

}  // namespace

void Gate::round(const Wait& wait) {
  round_++;
  here_ = 0;
  // This store, the loads in open() and all accesses to the sleeper count are seq_cst. So if one rank arrives while another goes
  // to sleep, at least one of the two notices the other.
  control_.slot(rank_).lines[round_ & 1].arrived.store(round_);
  if (open()) {
    if (control_.common().gate.sleepers.load() > 0) ring();
    return;
  }
  // Between polls this rank yields its CPU to other ranks. It does so even if there is a CPU for each rank, because the kernel
  // may have put two ranks on one CPU.
  const int polls = spin_ ? polls_a_turn : 1;
  std::optional<Clock::time_point> start;
  Clock::duration in_vain{};  // the total time of the latest consecutive futile yields
  while (!wait.watch.broken()) {
    for (int i = 0; i < polls; i++) {
      if (open()) return;
      pause_briefly();
    }
    const auto now = Clock::now();
    if (!start) {
      start = now;
      if (spin_) parting_.waits_awake(round_);
    }
    if (now - *start > awake || (!spin_ && in_vain > as_long_as_a_sleep)) break;
    sched_yield();
    const auto took = Clock::now() - now;
    in_vain = took < two_switches ? in_vain + took : Clock::duration{};
  }
  parting_.sleeps();
  sleep(wait);
}

bool Gate::open() {
  while (here_ < control_.size() && control_.slot(here_).lines[round_ & 1].arrived.load() >= round_) here_++;
  return here_ == control_.size();
}

void Gate::sleep(const Wait& wait) {
  auto& [bell, sleepers] = control_.common().gate;
  const timespec longest{wait.sleep_ms / 1000, wait.sleep_ms % 1000 * 1'000'000};
  while (!open()) {
    const uint32_t rung = bell.load();  // load the bell first, so that a ring() after this line ends the sleep
    wait.look({[this] { return missing(); }, true});
    sleepers.fetch_add(1);
    if (!open()) futex(bell, FUTEX_WAIT, rung, &longest);
    sleepers.fetch_sub(1);
  }
}

std::vector<int> Gate::missing() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < control_.size(); rank++)
    if (control_.slot(rank).lines[round_ & 1].arrived.load(std::memory_order_relaxed) < round_) ranks.push_back(rank);
  return ranks;
}

void Gate::ring() const {
  std::atomic<uint32_t>& bell = control_.common().gate.bell;
  bell.fetch_add(1);
  futex(bell, FUTEX_WAKE, INT_MAX);
}

}  // namespace mscomm
