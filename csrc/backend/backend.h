// A backend moves the bytes of a valid, numbered call: host.h moves those of arrays in the CPU's memory, vendor.h those of a
// device's arrays.
#pragma once

#include <memory>

#include "base/call.h"
#include "net/wait.h"

namespace mscomm {

class Backend {
 public:
  virtual ~Backend() = default;
  // Returns when x may be reused and out is complete. Throws Error, or Differs when ranks made different calls.
  virtual void run(const Call& call, const Wait& wait) = 0;
  // From any thread: wakes every waiter on this rank and on its peers, so that it looks around; nothing is sent any more.
  virtual void shut_down() = 0;
  // Called when the group is broken, by the thread that ran the failed call: takes the memory that the call had given to the
  // peers out of their reach.
  virtual void withdraw(const Call& call) = 0;
  // Compares headers of peers that no call has read yet with this rank's own calls, without waiting. Throws Differs.
  virtual void last_look() = 0;
  // Called when this rank leaves the group well: delivers what is still on its way.
  virtual void close() = 0;
  // In a forked child: closes the child's copies of the descriptors, and nothing else. Takes no lock.
  virtual void close_descriptors() = 0;
};

}  // namespace mscomm
