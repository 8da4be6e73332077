// Tests how a rank leaves a CPU, on a simulated kernel. Like Linux since 6.2, this kernel remembers which CPUs a thread has asked
// for, and allows those of them that are in the thread's cpuset.
#include "transport/parting.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <initializer_list>

#include "check.h"

using namespace mscomm;

namespace {

cpu_set_t set_of(std::initializer_list<int> cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) CPU_SET(cpu, &set);
  return set;
}

struct Kernel {
  cpu_set_t cpuset, asked;
  int cpu = 0;

  cpu_set_t allowed() const {
    cpu_set_t both;
    CPU_AND(&both, &cpuset, &asked);
    return both;
  }
  bool allows(std::initializer_list<int> cpus) const {
    const cpu_set_t now = allowed(), expected = set_of(cpus);
    return CPU_EQUAL(&now, &expected);
  }
};

std::atomic<Kernel*> kernel{nullptr};  // nullptr: the real kernel

// Lets ranks 0 and 1 wait on CPU 0 of this kernel. Returns whether rank 1 has left the CPU.
bool rank_1_leaves(Kernel& simulated) {
  alignas(64) static char memory[sizeof(Control::Common) + 2 * sizeof(Control::Slot)];
  std::memset(memory, 0, sizeof memory);
  const Control control(memory, 2);
  Parting lower(control, 0), higher(control, 1);
  kernel = &simulated;
  lower.waits_awake(1);
  higher.waits_awake(window_rounds - 1);  // the ranks need not be in the same round
  kernel = nullptr;
  CHECK(lower.number() == 0);
  return higher.number() == 1;
}

}  // namespace

// These functions replace those of the C library in this executable.
extern "C" {
int sched_getcpu() noexcept {
  if (const Kernel* one = kernel) return one->cpu;
  unsigned cpu = 0;
  return syscall(SYS_getcpu, &cpu, nullptr, nullptr) < 0 ? -1 : static_cast<int>(cpu);
}

int sched_getaffinity(pid_t thread, size_t bytes, cpu_set_t* mask) noexcept {
  if (const Kernel* one = kernel) return *mask = one->allowed(), 0;
  std::memset(mask, 0, bytes);
  return syscall(SYS_sched_getaffinity, thread, bytes, mask) < 0 ? -1 : 0;
}

int sched_setaffinity(pid_t thread, size_t bytes, const cpu_set_t* mask) noexcept {
  Kernel* const one = kernel;
  if (!one) return static_cast<int>(syscall(SYS_sched_setaffinity, thread, bytes, mask));
  one->asked = *mask;
  const cpu_set_t now = one->allowed();
  if (CPU_ISSET(one->cpu, &now)) return 0;
  one->cpu = 0;
  while (!CPU_ISSET(one->cpu, &now)) one->cpu++;
  return 0;
}
}

SUITE(parting) {
  cpu_set_t all;
  std::memset(&all, 0xff, sizeof all);
  // A thread that has asked for nothing may use the CPUs that its cpuset gets later.
  Kernel unasked{set_of({0, 1}), all};
  CHECK(rank_1_leaves(unasked) && unasked.cpu == 1 && unasked.allows({0, 1}));
  unasked.cpuset = set_of({0, 1, 2, 3});
  CHECK(unasked.allows({0, 1, 2, 3}));
  // A thread that has asked for some of the CPUs stays on these.
  Kernel asked{set_of({0, 1, 2}), set_of({0, 2})};
  CHECK(rank_1_leaves(asked) && asked.cpu == 2 && asked.allows({0, 2}));
  asked.cpuset = set_of({0, 1, 2, 3});
  CHECK(asked.allows({0, 2}));
  // There is nowhere to go.
  Kernel one_cpu{set_of({0}), all};
  CHECK(!rank_1_leaves(one_cpu) && one_cpu.cpu == 0 && one_cpu.allows({0}));
}
