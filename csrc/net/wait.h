// How a rank waits: every wait passes through one Wait, which looks around at each bounded wake.
#pragma once

#include <functional>
#include <vector>

#include "base/deadline.h"

namespace mscomm {

inline constexpr int longest_sleep_ms = 50;
// When a wait is told of on stderr, after its beginning; from the second on every so often.
inline constexpr double first_notice_s = 10, second_notice_s = 60, notice_every_s = 300;

// Ranks that the waiter still needs; asked for only when somebody has to be named.
struct Missing {
  std::function<std::vector<int>()> ranks;
  // In shared memory a rank that is gone comes no more; what it sent over a link may still be on its way.
  bool by_memory;
  std::vector<int> operator()() const { return ranks(); }
};

// What there is to look at while waiting: the communicator's abort flag, its peers' lives, Python's signals. Throws to end the
// wait.
class Watch {
 public:
  virtual ~Watch() = default;
  virtual void look(const Deadline& deadline, const Missing& missing) = 0;
  // Cheap enough for every turn of a spin: has somebody aborted?
  virtual bool broken() const = 0;
};

struct Wait {
  Watch& watch;
  Deadline deadline;
  int sleep_ms = longest_sleep_ms;  // at a stretch
  void look(const Missing& missing) const { watch.look(deadline, missing); }
};

}  // namespace mscomm
