// How a rank waits. Every wait goes through a Wait: it sleeps for a bounded time and calls look() at each wake.
#pragma once

#include <functional>
#include <vector>

#include "base/deadline.h"

namespace mscomm {

inline constexpr int longest_sleep_ms = 50;
// When a long wait is reported on stderr, counted from its beginning; after the second notice, one every notice_every_s.
inline constexpr double first_notice_s = 10, second_notice_s = 60, notice_every_s = 300;

// The ranks that the waiter still needs.
struct Missing {
  std::function<std::vector<int>()> ranks;
  // Whether it waits for them in shared memory. There a rank that is gone will never arrive, whereas data that it sent over a
  // link may still be on its way.
  bool by_memory;
  std::vector<int> operator()() const { return ranks(); }
};

// What a waiter checks: the communicator's abort flag, whether its peers are alive, Python's signals. look() throws to end the
// wait.
class Watch {
 public:
  virtual ~Watch() = default;
  virtual void look(const Deadline& deadline, const Missing& missing) = 0;
  // Whether somebody has aborted the group. Cheap enough for every turn of a spin loop.
  virtual bool broken() const = 0;
};

struct Wait {
  Watch& watch;
  Deadline deadline;
  int sleep_ms = longest_sleep_ms;  // longest sleep at a time
  void look(const Missing& missing) const { watch.look(deadline, missing); }
};

}  // namespace mscomm
