#include "transport/parting.h"

#include <sched.h>

namespace mscomm {

namespace {

// A rank looks for lower ranks on its CPU at most once per look_every, because it must read a cache line of each lower rank. A
// rank leaves its CPU at most once per part_every, because leaving takes tens of microseconds.
constexpr std::chrono::microseconds look_every{50}, part_every{1000};

}  // namespace

// If two ranks are waiting on the same CPU, the kernel takes milliseconds to separate them, and even longer if they yield to each
// other (see docs/performance.md). So the rank with the higher number moves: it briefly removes that CPU from its own thread's
// affinity mask.
void Parting::waits_awake(uint64_t round) {
  constexpr uint64_t cpu_bits = 16, recent_rounds = 2;
  const int cpu = sched_getcpu();
  if (cpu < 0 || cpu >= CPU_SETSIZE) return;
  control_.slot(rank_).place.store(round << cpu_bits | static_cast<uint64_t>(cpu), std::memory_order_relaxed);
  const auto now = Clock::now();
  if (rank_ == 0 || now - looked_ < look_every) return;
  looked_ = now;
  bool shared = false;
  for (int rank = 0; rank < rank_; rank++) {
    const uint64_t place = control_.slot(rank).place.load(std::memory_order_relaxed);
    shared |= place != 0 && (place & 0xffff) == static_cast<uint64_t>(cpu) && (place >> cpu_bits) + recent_rounds >= round;
  }
  cpu_set_t allowed, elsewhere;
  if (!shared || now - parted_ < part_every || sched_getaffinity(0, sizeof allowed, &allowed) < 0) return;
  elsewhere = allowed;
  CPU_CLR(cpu, &elsewhere);
  if (CPU_COUNT(&elsewhere) == 0 || sched_setaffinity(0, sizeof elsewhere, &elsewhere) < 0) return;
  // Allow the same CPUs as before. If the cpuset has shrunk in the meantime, the kernel allows the remaining CPUs.
  sched_setaffinity(0, sizeof allowed, &allowed);
  parted_ = now;
  number_++;
}

}  // namespace mscomm
