// How a rank waits. Every function that waits takes a Wait. The function sleeps for a bounded time, and calls Wait::look() each
// time it wakes.
#pragma once

#include <functional>
#include <vector>

#include "base/deadline.h"

namespace mscomm {

inline constexpr int longest_sleep_ms = 50;
// How many seconds after its beginning a long wait is reported on stderr. After the second notice, another one follows every
// notice_every_s.
inline constexpr double first_notice_s = 10, second_notice_s = 60, notice_every_s = 300;

// The ranks that the waiting rank still needs.
struct Missing {
  std::function<std::vector<int>()> ranks;
  // Whether the rank waits in shared memory. There, a rank that is gone never arrives. On a link, data from a rank that is gone
  // may still arrive.
  bool by_memory;
  std::vector<int> operator()() const { return ranks(); }
};

// A Watch checks whether a wait must end early: whether the group was aborted, a peer has died, or Python has a signal to handle.
// look() throws to end the wait.
class Watch {
 public:
  virtual ~Watch() = default;
  virtual void look(const Deadline& deadline, const Missing& missing) = 0;
  // Whether the group was aborted. This is cheap enough to call in every iteration of a polling loop.
  virtual bool broken() const = 0;
};

struct Wait {
  Watch& watch;
  Deadline deadline;
  int sleep_ms = longest_sleep_ms;  // the longest sleep between two calls of look()
  void look(const Missing& missing) const { watch.look(deadline, missing); }
};

}  // namespace mscomm
