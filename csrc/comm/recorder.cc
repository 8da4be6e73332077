#include "comm/recorder.h"

#include <algorithm>
#include <chrono>

namespace mscomm {

void Recorder::begin(const Signature& signature) {
  using std::chrono::system_clock;
  const std::lock_guard lock(mutex_);
  const size_t at = signature.number % kept;
  ring_[at] = {signature, Record::State::inside, std::chrono::duration<double>(system_clock::now().time_since_epoch()).count(),
               0};
  started_[at] = Clock::now();
  newest_ = std::max(newest_, signature.number);
}

void Recorder::end(uint64_t number, Record::State state) {
  const std::lock_guard lock(mutex_);
  Record& record = ring_[number % kept];
  if (record.signature.number != number) return;
  record.state = state;
  record.took_s = seconds_since(started_[number % kept]);
}

std::optional<Record> Recorder::find(uint64_t number) const {
  const std::lock_guard lock(mutex_);
  const Record& record = ring_[number % kept];
  if (number == 0 || record.signature.number != number) return std::nullopt;
  return record;
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
