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

// Ranks that wait for room wake only after a round whose number is a multiple of this.
constexpr uint64_t half_window = window_rounds / 2;

void ring_bell(Control::Common::Bell& bell) {
  bell.rung.fetch_add(1);
  futex(bell.rung, FUTEX_WAKE, INT_MAX);
}

}  // namespace

void Gate::make_room(const Wait& wait) {
  // The next round uses the line of round_ + 1 - window_rounds. A rank that has arrived at a later round no longer reads it. If
  // there is no room, this rank waits for about half the window, so that it does not wait again in the next call.
  if (round_ + 1 - all_arrived_ < window_rounds) return;
  const uint64_t half = (round_ + 1 - half_window) / half_window * half_window;
  struct Waits {
    explicit Waits(std::atomic<bool>& set) : set(set) { set.store(true); }
    ~Waits() { set.store(false); }
    std::atomic<bool>& set;
  } const waits(control_.slot(rank_).waits_for_room);
  wait_for({half, 0, control_.size(), Beside::room}, control_.common().gate.room, wait);
  all_arrived_ = half;
}

// The numbers of sleepers are read after open(). If they were read before it, a round of two ranks took 0.1 us longer.
void Gate::round(const Wait& wait) {
  round_++;
  control_.slot(rank_).line(round_).arrived.store(round_);  // see arrive() for the order
  Awaited everybody{round_, 0, control_.size(), Beside::arrived};
  if (open(everybody)) {
    auto& [all, single, room] = control_.common().gate;
    if (all.sleepers.load() > 0) ring_bell(all);
    if (round_ % half_window == 0 && room.sleepers.load() > 0) ring_bell(room);
  } else {
    wait_for(everybody, control_.common().gate.all, wait);
  }
  all_arrived_ = round_;
}

void Gate::arrive(bool awaited_alone) {
  round_++;
  // This store, the loads in open() and all accesses to the numbers of sleepers are seq_cst. So if one rank arrives while another
  // goes to sleep, at least one of the two notices the other.
  control_.slot(rank_).line(round_).arrived.store(round_);
  auto& [all, single, room] = control_.common().gate;
  Awaited everybody{round_, 0, control_.size(), Beside::nobody};
  if (all.sleepers.load() > 0 && open(everybody)) ring_bell(all);
  if (round_ % half_window == 0 && room.sleepers.load() > 0 && open(everybody)) ring_bell(room);
  if (awaited_alone && single.sleepers.load() > 0) ring_bell(single);
}

void Gate::wait_for_all_alone(const Wait& wait) {
  wait_for({round_, 0, control_.size(), Beside::nobody}, control_.common().gate.all, wait);
  all_arrived_ = round_;
}

void Gate::wait_for(int rank, const Wait& wait) {
  wait_for({round_, rank, rank + 1, Beside::arrived}, control_.common().gate.single, wait);
}

void Gate::wait_for(Awaited awaited, Bell& bell, const Wait& wait) {
  if (open(awaited)) return;
  bool placed = !spin_;
  const auto stopped = [&] {
    if (!std::exchange(placed, true)) parting_.waits_awake(round_);
    return wait.watch.broken();
  };
  if (awaits(spin_, [&] { return open(awaited); }, stopped)) return;
  parting_.sleeps();
  sleep(awaited, bell, wait);
}

bool Gate::open(Awaited& awaited) const {
  while (awaited.begin < awaited.end && has_arrived(awaited.begin, awaited.round)) awaited.begin++;
  return awaited.begin == awaited.end;
}

void Gate::sleep(Awaited& awaited, Bell& bell, const Wait& wait) const {
  const timespec longest{wait.sleep_ms / 1000, wait.sleep_ms % 1000 * 1'000'000};
  while (!open(awaited)) {
    const uint32_t rung = bell.rung.load();  // load it first, so that a ring_bell() after this line ends the sleep
    wait.look({[&] { return missing(awaited); }, true, [&] { return speaks(awaited.beside); }});
    bell.sleepers.fetch_add(1);
    if (!open(awaited)) futex(bell.rung, FUTEX_WAIT, rung, &longest);
    bell.sleepers.fetch_sub(1);
  }
}

std::vector<int> Gate::missing(const Awaited& awaited) const {
  std::vector<int> ranks;
  for (int rank = awaited.begin; rank < awaited.end; rank++)
    if (!has_arrived(rank, awaited.round)) ranks.push_back(rank);
  return ranks;
}

bool Gate::speaks(Beside beside) const {
  for (int lower = 0; lower < rank_ && beside != Beside::nobody; lower++)
    if (beside == Beside::room ? control_.slot(lower).waits_for_room.load() : has_arrived(lower, round_)) return false;
  return true;
}

void Gate::ring() const {
  auto& [all, single, room] = control_.common().gate;
  ring_bell(all);
  ring_bell(single);
  ring_bell(room);
}

}  // namespace mscomm
