// How a rank waits. Every function that waits for peers in a call, or for a message, takes a Wait. Such a function sleeps for at
// most longest_sleep_ms at a time, and calls Wait::look() regularly while it waits.
#pragma once

#include <functional>
#include <vector>

#include "base/deadline.h"

namespace mscomm {

inline constexpr int longest_sleep_ms = 50;
// A long wait is reported on stderr after first_notice_s seconds, after second_notice_s seconds, and then every notice_every_s
// seconds.
inline constexpr double first_notice_s = 10, second_notice_s = 60, notice_every_s = 300;

// The ranks that a rank is waiting for. By default, there are none.
struct Missing {
  std::function<std::vector<int>()> ranks = [] { return std::vector<int>{}; };
  // Whether the rank is waiting in shared memory. There, nothing more can come from a peer whose process has exited. Over a link,
  // data from such a peer may still arrive.
  bool by_memory = false;
  // Returns whether this rank prints notices about a long wait. If several ranks wait for the same ranks, only one of them does.
  std::function<bool()> speaks = [] { return true; };
  // Returns whether a link to this rank exists or is being set up. If not, no data can arrive. Not called if by_memory is true.
  std::function<bool(int rank)> linked = [](int) { return true; };
  std::vector<int> operator()() const { return ranks(); }
};

// Returns `ranks` with each rank r replaced by numbers[r], such as its rank in a larger group.
inline std::vector<int> renumbered(std::vector<int> ranks, const std::vector<int>& numbers) {
  for (int& rank : ranks) rank = numbers[rank];
  return ranks;
}

// A Watch checks whether a wait must end early: whether the group was aborted, a peer has died, or Python has a signal to handle.
// look() throws to end the wait.
class Watch {
 public:
  virtual ~Watch() = default;
  virtual void look(const Deadline& deadline, const Missing& missing) = 0;
  // Returns whether the group was aborted. Cheap enough to be called in every iteration of a polling loop.
  virtual bool broken() const = 0;
};

struct Wait {
  Watch& watch;
  Deadline deadline;
  int sleep_ms = longest_sleep_ms;  // the longest sleep between two calls to look()
  void look(const Missing& missing) const { watch.look(deadline, missing); }
};

}  // namespace mscomm
