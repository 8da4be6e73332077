// Records a group's most recent calls: what was called, when, and how it ended. Error messages and Python use these records. When
// the hub asks a rank which call it is in, the answer also comes from these records.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/call.h"
#include "base/deadline.h"

namespace mscomm {

struct Record {
  enum class State : uint8_t { inside, done, failed };
  Signature signature;
  State state;
  double began_s, took_s;  // began_s: the time of day, in seconds since 1970-01-01 UTC
};

class Recorder {
 public:
  void begin(const Signature& signature);
  void end(uint64_t number, Record::State state);
  // Does the same as end(number, done), without a lock. Only the thread that has begun the call may call done(), and only before
  // any later call begins.
  void done(uint64_t number);
  std::optional<Signature> find(uint64_t number) const;
  // Returns the newest call and its state.
  std::optional<std::pair<Signature, Record::State>> last() const;
  // Returns the records of calls with a number above `after`, oldest first.
  std::vector<Record> all(uint64_t after = 0) const;

 private:
  struct Entry {
    Signature signature;
    std::atomic<Record::State> state{Record::State::inside};
    // Readings of the CPU's time-stamp counter. Reading Clock would take three times as long.
    uint64_t began = 0;
    std::atomic<uint64_t> ended{0};
  };
  // One moment on all three clocks.
  struct Moment {
    uint64_t ticks;
    Clock::time_point clock;
    double day_s;
  };
  static Moment now();

  static constexpr size_t kept = 1024;
  const Moment created_ = now();
  mutable std::mutex mutex_;  // protects everything below, except that done() changes `state` and `ended` without it
  std::array<Entry, kept> ring_{};
  uint64_t newest_ = 0;  // the number of the newest call, or 0 if there is none
};

}  // namespace mscomm
