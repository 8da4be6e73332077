// A backend moves the bytes of a call that has been checked and numbered. host.h does this for arrays in CPU memory, vendor.h for
// device arrays.
#pragma once

#include "base/call.h"
#include "net/wait.h"

namespace mscomm {

class Backend {
 public:
  virtual ~Backend() = default;
  // Runs the call. On the CPU, returns when x may be reused and out is complete. On a device, returns when the call has been
  // enqueued. Throws Error, or Differs if ranks made different calls.
  virtual void run(const Call& call, const Wait& wait) = 0;
  // Wakes all threads that are waiting in a call, on this rank and on its peers, so that they check whether the group is broken.
  // From then on, nothing more is sent. May be called from any thread.
  virtual void shut_down() = 0;
  // Makes sure that no peer can access the call's arrays any more. Called by the thread whose call failed, after the group was
  // broken. By default, this does nothing: peers never access arrays on a device.
  virtual void withdraw(const Call&) {}
  // Reads the headers that the peers have already sent, and compares them with this rank's own calls. Does not wait. Throws
  // Differs if a peer made a different call. By default, this does nothing: a backend for devices receives no headers.
  virtual void last_look() {}
  // Ends the group's communication, after delivering the data that is still on its way to the peers. Called when this rank leaves
  // the group. If the group is broken, this is called only for the device's backend, which then delivers nothing.
  virtual void close() = 0;
  // Called in a forked child. Closes the child's copies of the descriptors, and forgets the backend's threads, which exist only
  // in the parent. Takes no lock.
  virtual void close_descriptors() = 0;
};

}  // namespace mscomm
