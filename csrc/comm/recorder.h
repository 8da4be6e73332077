// Records a group's most recent calls: what was called, when, and how it ended. Error messages and Python use these records. When
// the hub asks a rank which call it is in, the answer also comes from these records.
#pragma once

#include <array>
#include <mutex>
#include <optional>
#include <vector>

#include "base/call.h"
#include "base/deadline.h"

namespace mscomm {

struct Record {
  enum class State : uint8_t { inside, done, failed };
  Signature signature;
  State state = State::inside;
  Clock::time_point began, ended;
};

// Returns the time of day at which Clock was zero, in seconds since 1970-01-01 UTC.
double day_of_clock_zero();

class Recorder {
 public:
  void begin(const Signature& signature, Clock::time_point now);
  void end(uint64_t number, Record::State state);
  std::optional<Signature> find(uint64_t number) const;
  std::optional<Record> last() const;
  // Returns the records of calls with a number above `after`, oldest first.
  std::vector<Record> all(uint64_t after = 0) const;

 private:
  static constexpr size_t kept = 1024;
  mutable std::mutex mutex_;  // protects everything below
  std::array<Record, kept> ring_{};
  uint64_t newest_ = 0;  // the number of the newest call, or 0 if there is none
};

}  // namespace mscomm
