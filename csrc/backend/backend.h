// A backend moves the bytes of a call that is valid and has its number. host.h does this for arrays in CPU memory, vendor.h for
// arrays on a device.
#pragma once

#include <memory>

#include "base/call.h"
#include "net/wait.h"

namespace mscomm {

class Backend {
 public:
  virtual ~Backend() = default;
  // On the CPU, returns when x may be reused and out is complete; on a device, when the call is enqueued. Throws Error, or
  // Differs if ranks made different calls.
  virtual void run(const Call& call, const Wait& wait) = 0;
  // Wakes every thread that waits in a call, on this rank and on its peers, so that it sees that the group is broken. After that
  // nothing is sent any more. May be called from any thread.
  virtual void shut_down() = 0;
  // Called by the thread whose call failed, after the group was broken. Makes sure that no peer can reach the call's arrays any
  // more.
  virtual void withdraw(const Call& call) = 0;
  // Compares headers that peers have sent, and no call has read yet, with this rank's own calls. Does not wait. Throws Differs.
  virtual void last_look() = 0;
  // Called when this rank leaves the group without an error. Delivers what is still on its way to the peers.
  virtual void close() = 0;
  // Called in a forked child. Only closes the child's copies of the descriptors, and takes no lock.
  virtual void close_descriptors() = 0;
};

}  // namespace mscomm
