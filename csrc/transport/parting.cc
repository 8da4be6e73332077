#include "transport/parting.h"

#include <sched.h>

#include <cstring>

namespace mscomm {

namespace {

// A rank looks for lower ranks on its CPU at most once per look_every, because it must read a cache line of each lower rank. A
// rank leaves its CPU at most once per part_every, because leaving takes tens of microseconds.
constexpr std::chrono::microseconds look_every{50}, part_every{1000};

// Moves this thread to another CPU of its affinity mask, by removing the CPU from the mask for a moment. Returns false if there
// is no other CPU.
bool leave(int cpu) {
  cpu_set_t allowed, elsewhere, all, now;
  if (sched_getaffinity(0, sizeof allowed, &allowed) < 0) return false;
  elsewhere = allowed;
  CPU_CLR(cpu, &elsewhere);
  if (CPU_COUNT(&elsewhere) == 0 || sched_setaffinity(0, sizeof elsewhere, &elsewhere) < 0) return false;
  // The kernel remembers the mask that was set last, and allows the CPUs that are both in it and in the thread's cpuset. So if
  // the mask is that of the cpuset, set all CPUs: otherwise the thread would not use the CPUs that the cpuset gets later.
  std::memset(&all, 0xff, sizeof all);
  sched_setaffinity(0, sizeof all, &all);
  // If these are more CPUs than before, the thread's mask was narrower than its cpuset.
  if (sched_getaffinity(0, sizeof now, &now) < 0 || !CPU_EQUAL(&now, &allowed)) sched_setaffinity(0, sizeof allowed, &allowed);
  return true;
}

}  // namespace

// If two ranks are waiting on the same CPU, the kernel takes milliseconds to separate them, and even longer if they yield to each
// other (see docs/performance.md). So the rank with the higher number moves.
void Parting::waits_awake(uint64_t round) {
  constexpr uint64_t cpu_bits = 16, recent_rounds = window_rounds;
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
  if (!shared || now - parted_ < part_every || !leave(cpu)) return;
  parted_ = now;
  number_++;
}

}  // namespace mscomm
