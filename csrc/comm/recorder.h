// Records a group's most recent calls: what was called, when, and how it ended. Error messages and Python use these records, and
// a rank uses them to answer when the hub asks where it is.
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
  double began_s = 0;  // seconds since 1970-01-01 UTC
  double took_s = 0;
};

class Recorder {
 public:
  void begin(const Signature& signature, Clock::time_point now);
  void end(uint64_t number, Record::State state);
  std::optional<Record> find(uint64_t number) const;
  std::optional<Record> last() const;
  // Returns the records of calls with a number above `after`, oldest first.
  std::vector<Record> all(uint64_t after = 0) const;

 private:
  struct Entry {
    Signature signature;
    Record::State state = Record::State::inside;
    Clock::time_point began, ended;
  };
  class TimeOfDay;

  static constexpr size_t kept = 1024;
  mutable std::mutex mutex_;  // protects everything below; callers, the member's thread and Python use it
  std::array<Entry, kept> ring_{};
  uint64_t newest_ = 0;  // the number of the newest call, or 0 if there is none
};

}  // namespace mscomm
