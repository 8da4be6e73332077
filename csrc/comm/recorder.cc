#include "comm/recorder.h"

#include <algorithm>
#include <chrono>

namespace mscomm {

void Recorder::begin(const Signature& signature, Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  ring_[signature.number % kept] = {signature, Record::State::inside, now, now};
  newest_ = std::max(newest_, signature.number);
}

void Recorder::end(uint64_t number, Record::State state) {
  const std::lock_guard lock(mutex_);
  Record& record = ring_[number % kept];
  if (record.signature.number != number) return;
  record.state = state;
  record.ended = Clock::now();
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

std::optional<Record> Recorder::last() const {
  const std::lock_guard lock(mutex_);
  if (newest_ == 0) return std::nullopt;
  return ring_[newest_ % kept];
}

std::vector<Record> Recorder::all(uint64_t after) const {
  const std::lock_guard lock(mutex_);
  std::vector<Record> records;
  const uint64_t oldest = newest_ > kept ? newest_ - kept + 1 : 1;
  for (uint64_t number = std::max(oldest, after + 1); number <= newest_; number++) {
    const Record& record = ring_[number % kept];
    if (record.signature.number == number) records.push_back(record);
  }
  return records;
}

}  // namespace mscomm
