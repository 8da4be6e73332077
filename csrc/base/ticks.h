// A clock for the records of calls. To read Clock takes 25 to 35 ns, which is a tenth of a short call between two ranks.
#pragma once

#include <cstdint>

#include "base/deadline.h"

namespace mscomm {

// Reads the counter of the CPU that counts at a constant rate on all cores. Its unit differs between CPUs. Use it for diagnostics
// only: unlike Clock, it may jump if a virtual machine moves to another host.
inline uint64_t ticks() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
  uint64_t now;
  asm volatile("mrs %0, cntvct_el0" : "=r"(now));
  return now;
#else
  return static_cast<uint64_t>(Clock::now().time_since_epoch().count());
#endif
}

// The moment at which it is created, on both clocks.
struct Moment {
  Clock::time_point clock = Clock::now();
  uint64_t ticks = mscomm::ticks();
};

// Converts ticks to Clock. The two moments give the rate of ticks(), so the longer the time between them, the better.
inline Clock::time_point time_of(uint64_t ticks, const Moment& first, const Moment& last) {
  const auto since = [&](uint64_t at) { return static_cast<double>(static_cast<int64_t>(at - first.ticks)); };
  const std::chrono::duration<double, Clock::period> between = last.clock - first.clock;
  return first.clock + std::chrono::duration_cast<Clock::duration>(between * (since(ticks) / since(last.ticks)));
}

}  // namespace mscomm
