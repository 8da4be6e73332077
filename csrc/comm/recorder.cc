#include "comm/recorder.h"

#include <algorithm>
#include <chrono>

namespace mscomm {

void Recorder::begin(const Signature& signature) {
  const uint64_t now = ticks();
  const std::lock_guard lock(mutex_);
  Entry& entry = ring_[signature.number % kept];
  entry.signature = signature;
  entry.state.store(Record::State::inside, std::memory_order_relaxed);
  entry.began = now;
  entry.ended.store(now, std::memory_order_relaxed);
  newest_ = std::max(newest_, signature.number);
}

void Recorder::end(uint64_t number, Record::State state) {
  const uint64_t now = ticks();
  const std::lock_guard lock(mutex_);
  Entry& entry = ring_[number % kept];
  if (entry.signature.number != number) return;
  entry.state.store(state, std::memory_order_relaxed);
  entry.ended.store(now, std::memory_order_relaxed);
}

void Recorder::done(uint64_t number) {
  Entry& entry = ring_[number % kept];
  entry.ended.store(ticks(), std::memory_order_relaxed);
  entry.state.store(Record::State::done, std::memory_order_relaxed);
}

double day_of_clock_zero() {
  using Seconds = std::chrono::duration<double>;
  Clock::duration least = Clock::duration::max();
  double zero_s = 0;
  // The thread may be preempted between reading the two clocks, but this is unlikely to happen three times in a row. So read both
  // clocks three times, and use the readings with the shortest time between them.
  for (int i = 0; i < 3; i++) {
    const auto before = Clock::now();
    const Seconds day = std::chrono::system_clock::now().time_since_epoch();
    const auto between = Clock::now() - before;
    if (between >= least) continue;
    least = between;
    zero_s = (day - Seconds(before.time_since_epoch())).count();
  }
  return zero_s;
}

std::optional<Signature> Recorder::find(uint64_t number) const {
  const std::lock_guard lock(mutex_);
  const Signature& found = ring_[number % kept].signature;
  return number > 0 && found.number == number ? std::optional(found) : std::nullopt;
}

std::optional<std::pair<Signature, Record::State>> Recorder::last() const {
  const std::lock_guard lock(mutex_);
  if (newest_ == 0) return std::nullopt;
  const Entry& entry = ring_[newest_ % kept];
  return {{entry.signature, entry.state}};
}

std::vector<Record> Recorder::all(uint64_t after) const {
  const std::lock_guard lock(mutex_);
  const Moment now;
  const auto time = [&](uint64_t at) { return time_of(at, created_, now); };
  std::vector<Record> records;
  const uint64_t oldest = newest_ > kept ? newest_ - kept + 1 : 1;
  for (uint64_t number = std::max(oldest, after + 1); number <= newest_; number++) {
    const Entry& entry = ring_[number % kept];
    if (entry.signature.number == number) records.push_back({entry.signature, entry.state, time(entry.began), time(entry.ended)});
  }
  return records;
}

}  // namespace mscomm
