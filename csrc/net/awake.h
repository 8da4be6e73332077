// How a rank waits for shared memory to change, before it sleeps. See "Waiting" in docs/performance.md.
#pragma once

#include <sched.h>

#include <chrono>
#include <optional>

#include "base/deadline.h"

namespace mscomm {

// How long a waiting rank polls before it sleeps.
inline constexpr std::chrono::microseconds longest_awake{100};
// If there are more ranks than CPUs, a yield can be futile: the kernel gives the CPU straight back to the yielding rank. The
// kernel does this if that rank has used less than its share of the CPU time, or if its time slice is not over. In the meantime,
// the rank that all others are waiting for cannot run. So a rank goes to sleep when its consecutive futile yields have taken this
// long in total. This is about the time that a sleep and a wake-up take together.
inline constexpr std::chrono::microseconds as_long_as_a_sleep{5};
inline constexpr std::chrono::nanoseconds two_switches{
    1500};  // a yield that takes less time than two context switches was futile
// This many polls of memory take about a microsecond. In a small call, most peers arrive within that time. A poll of sockets is a
// system call, so a turn has few of them.
inline constexpr int polls_a_turn = 64, socket_polls_a_turn = 4;

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// Polls `changed` until it returns true, and then returns true. Returns false when it is time to sleep, or when `stopped` returns
// true. `stopped` is called after each turn of polls. spin: whether the host has a CPU for each rank.
template <typename Changed, typename Stopped>
bool awaits(bool spin, const Changed& changed, const Stopped& stopped, int a_turn = polls_a_turn) {
  // Between turns this rank yields its CPU to other ranks. It does so even if there is a CPU for each rank, because the kernel
  // may have put two ranks on one CPU.
  const int polls = spin ? a_turn : 1;
  std::optional<Clock::time_point> start;
  Clock::duration in_vain{};  // the total time of the latest consecutive futile yields
  while (true) {
    for (int i = 0; i < polls; i++) {
      if (changed()) return true;
      pause_briefly();
    }
    if (stopped()) return false;
    const auto now = Clock::now();
    if (!start) start = now;
    if (now - *start > longest_awake || (!spin && in_vain > as_long_as_a_sleep)) return false;
    sched_yield();
    const auto took = Clock::now() - now;
    in_vain = took < two_switches ? in_vain + took : Clock::duration{};
  }
}

}  // namespace mscomm
