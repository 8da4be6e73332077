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
  Entry& entry = ring_[number % kept];
  if (entry.signature.number != number) return;
  entry.state = state;
  entry.ended = Clock::now();
}

// Converts the times of recorded calls to the time of day. This is done only when a record is read, because calls are frequent
// and reads are rare.
class Recorder::TimeOfDay {
 public:
  TimeOfDay() {
    // The thread may be preempted between reading the two clocks, but hardly three times in a row. So read both clocks three
    // times, and use the pair of readings that are closest together.
    for (int i = 0; i < 3; i++) {
      const auto before = Clock::now();
      const Seconds day = std::chrono::system_clock::now().time_since_epoch();
      const auto after = Clock::now();
      if (i > 0 && after - before >= between_) continue;
      between_ = after - before;
      start_s_ = (day - Seconds(before.time_since_epoch())).count();
    }
  }
  Record record_of(const Entry& entry) const {
    return {entry.signature, entry.state, start_s_ + Seconds(entry.began.time_since_epoch()).count(),
            Seconds(entry.ended - entry.began).count()};
  }

 private:
  using Seconds = std::chrono::duration<double>;
  Clock::duration between_{};
  double start_s_ = 0;  // the time of day when Clock was zero
};

std::optional<Record> Recorder::find(uint64_t number) const {
  const std::lock_guard lock(mutex_);
  const Entry& entry = ring_[number % kept];
  if (number == 0 || entry.signature.number != number) return std::nullopt;
  return TimeOfDay().record_of(entry);
}

std::optional<Record> Recorder::last() const {
  const std::lock_guard lock(mutex_);
  if (newest_ == 0) return std::nullopt;
  return TimeOfDay().record_of(ring_[newest_ % kept]);
}

std::vector<Record> Recorder::all(uint64_t after) const {
  const TimeOfDay day;
  const std::lock_guard lock(mutex_);
  std::vector<Record> records;
  const uint64_t oldest = newest_ > kept ? newest_ - kept + 1 : 1;
  for (uint64_t number = std::max(oldest, after + 1); number <= newest_; number++) {
    const Entry& entry = ring_[number % kept];
    if (entry.signature.number == number) records.push_back(day.record_of(entry));
  }
  return records;
}

}  // namespace mscomm
