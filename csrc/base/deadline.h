// The time at which a wait must end. Every function passes its deadline on to the functions that it calls, down to the system
// calls that wait.
#pragma once

#include <chrono>
#include <cstdio>
#include <optional>
#include <string>

namespace mscomm {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Returns a duration as text: "2.5 s", "17 s".
inline std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, seconds < 10 ? "%.3g s" : "%.0f s", seconds);
  return text;
}

class Deadline {
 public:
  // timeout_s may be infinite. spent_s: how many seconds of the timeout have already passed.
  explicit Deadline(double timeout_s, double spent_s = 0)
      : start_(Clock::now() - std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(spent_s))),
        timeout_s_(timeout_s) {}

  // Returns a deadline whose time begins with the first call of passed() or start(), so that a call that need not wait does not
  // read the clock. Only one thread may use it.
  static Deadline from_first_look(double timeout_s) { return {std::nullopt, timeout_s}; }

  bool passed() const { return seconds_since(start()) >= timeout_s_; }
  double timeout_s() const { return timeout_s_; }
  Clock::time_point start() const {
    if (!start_) start_ = Clock::now();
    return *start_;
  }

 private:
  Deadline(std::nullopt_t, double timeout_s) : timeout_s_(timeout_s) {}

  mutable std::optional<Clock::time_point> start_;
  double timeout_s_;
};

}  // namespace mscomm
