// A backend moves the bytes of a valid, numbered call: host.h those of the CPU's arrays, vendor.h those of a device's.
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
  // From any thread: makes every waiter on this and the peers' side look around; nothing will be sent any more.
  virtual void shut_down() = 0;
  // The group is broken: takes the memory that the failed call had given to the peers out of their reach. By the thread that ran
  // it.
  virtual void withdraw(const Call& call) = 0;
  // Compares what peers said that no call has read yet with this rank's own calls, without waiting; throws Differs.
  virtual void last_look() = 0;
  // The job is over for this rank: delivers what is still on its way.
  virtual void close() = 0;
  // In a forked child: closes the child's copies of the descriptors, and nothing else. Takes no lock.
  virtual void close_descriptors() = 0;
};

}  // namespace mscomm
