#include "transport/gate.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>
#include <utility>

#include "net/awake.h"

namespace mscomm {

namespace {

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
  bool placed = !spin_;
  const auto stopped = [&] {
    if (!std::exchange(placed, true)) parting_.waits_awake(round_);
    return wait.watch.broken();
  };
  if (awaits(spin_, [this] { return open(); }, stopped)) return;
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
