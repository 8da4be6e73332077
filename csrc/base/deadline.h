// A point in time that a wait must not pass; handed down from the call to the last system call.
#pragma once

#include <chrono>
#include <cmath>

namespace mscomm {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

class Deadline {
 public:
  // timeout_s may be infinite.
  explicit Deadline(double timeout_s) : start_(Clock::now()), timeout_s_(timeout_s) {}

  bool passed() const { return seconds_since(start_) >= timeout_s_; }
  double timeout_s() const { return timeout_s_; }
  Clock::time_point start() const { return start_; }

 private:
  Clock::time_point start_;
  double timeout_s_;
};

}  // namespace mscomm
