#include "comm/recorder.h"

#include <algorithm>
#include <fstream>

namespace mscomm {

namespace {

// Whether the kernel has found that the CPU's counter cannot serve as a clock, and uses another source of time.
[[maybe_unused]] const bool rejected = [] {
  std::string source;
  std::ifstream("/sys/devices/system/clocksource/clocksource0/current_clocksource") >> source;
  return source == "hpet" || source == "acpi_pm";
}();

// Reads the counter of the CPU that counts at a constant rate on all cores. It is for records only: unlike Clock, it may jump if
// a virtual machine moves to another host, or if the host was suspended.
uint64_t ticks() {
#if defined(__x86_64__)
  if (!rejected) return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
  uint64_t now;
  asm volatile("mrs %0, cntvct_el0" : "=r"(now));
  return now;
#endif
  return static_cast<uint64_t>(Clock::now().time_since_epoch().count());
}

}  // namespace

void Recorder::begin(const Signature& signature) {
  const std::lock_guard lock(mutex_);
  Entry& entry = ring_[signature.number % kept];
  entry.signature = signature;
  entry.state.store(Record::State::inside, std::memory_order_relaxed);
  entry.began = ticks();
  entry.ended.store(entry.began, std::memory_order_relaxed);
  newest_ = std::max(newest_, signature.number);
}

void Recorder::end(uint64_t number, Record::State state) {
  const std::lock_guard lock(mutex_);
  Entry& entry = ring_[number % kept];
  if (entry.signature.number != number) return;
  done(number);
  entry.state.store(state, std::memory_order_relaxed);
}

void Recorder::done(uint64_t number) {
  Entry& entry = ring_[number % kept];
  entry.ended.store(ticks(), std::memory_order_relaxed);
  entry.state.store(Record::State::done, std::memory_order_release);  // a reader that sees this sees `ended`, too
}

// The thread may be preempted between reading the clocks, but this is unlikely to happen three times in a row. So now() reads the
// clocks three times, and returns the readings with the shortest time between them.
Recorder::Moment Recorder::now() {
  Moment best{};
  uint64_t least = UINT64_MAX;
  for (int i = 0; i < 3; i++) {
    const uint64_t before = ticks();
    const std::chrono::duration<double> day = std::chrono::system_clock::now().time_since_epoch();
    const Moment moment{ticks(), Clock::now(), day.count()};
    if (ticks() - before < least) least = ticks() - before, best = moment;
  }
  return best;
}

std::optional<Signature> Recorder::find(uint64_t number) const {
  const std::lock_guard lock(mutex_);
  const Signature& found = ring_[number % kept].signature;
  return number > 0 && found.number == number ? std::optional(found) : std::nullopt;
}

std::optional<std::pair<Signature, Record::State>> Recorder::last() const {
  const std::lock_guard lock(mutex_);
  if (newest_ == 0) return std::nullopt;
  return {{ring_[newest_ % kept].signature, ring_[newest_ % kept].state}};
}

std::vector<Record> Recorder::all(uint64_t after) const {
  const std::lock_guard lock(mutex_);
  const Moment last = now();
  const auto difference = [](uint64_t later, uint64_t earlier) {
    return static_cast<double>(static_cast<int64_t>(later - earlier));
  };
  const std::chrono::duration<double> age = last.clock - created_.clock;
  const double tick_s = age.count() / difference(last.ticks, created_.ticks);
  std::vector<Record> records;
  const uint64_t oldest = newest_ > kept ? newest_ - kept + 1 : 1;
  for (uint64_t number = std::max(oldest, after + 1); number <= newest_; number++) {
    const Entry& entry = ring_[number % kept];
    if (entry.signature.number == number)
      records.push_back({entry.signature, entry.state, last.day_s - difference(last.ticks, entry.began) * tick_s,
                         std::max(0.0, difference(entry.ended, entry.began) * tick_s)});
  }
  return records;
}

}  // namespace mscomm
