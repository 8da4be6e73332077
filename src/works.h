// The handle of a call or a message that runs asynchronously. Its class in Python is `Work`.
#pragma once

#include <pybind11/numpy.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "src/calls.h"
#include "src/completions.h"

namespace mscomm {

// A call or a message that the core has started, and the objects that must live until it has completed.
struct Started {
  std::shared_ptr<Work> work{};          // nullptr if not started yet
  std::shared_ptr<PreparedCall> call{};  // nullptr if the arrays have been released; of a message, it has only the array
  py::object current{};                  // for a call on a device: a function that returns the array library's current stream
  size_t place = 0;                      // its index in Calls::running; valid while it is there
  std::recursive_mutex collecting{};     // lets only one of several waiting threads create the result; locked without the GIL
};

class Handle {
 public:
  // For Python subclasses that override all methods.
  Handle() = default;
  // part: true if the caller of start() calls PreparedCall::result() itself; this handle must then not call it.
  Handle(Calls& calls, std::shared_ptr<Started> started, bool part = false);
  Handle(Handle&&) = default;
  ~Handle() { warn_if_unfilled(); }

  // If the call or message has failed, wait() and join() throw the first cause of the group's failure instead of the error of
  // this call, because users should see the cause. exception() returns the cause for the same reason.

  // Waits until the call or message has completed. Returns its result: for a send, None. timeout: seconds or a
  // timedelta, or None for no limit. For a call on a device, if the timeout is None, wait() does not wait for the device.
  // Instead, work that is enqueued later on the array library's current stream waits for the call.
  py::object wait(py::handle timeout);
  // Waits like wait(), but does not create the result, because the Python Works that call join() combine several handles, and
  // create the result themselves. Returns false if the call or message has not completed within the given number of seconds.
  // Otherwise, releases the arrays, as wait() does, and returns true.
  bool join(std::optional<double> seconds);
  // Returns whether the call or message has completed. If a call has completed without an error, first fills `out`, as wait()
  // does.
  bool done();
  // Cancels a recv for which no message has arrived. Returns whether it did that.
  bool cancel();
  // Returns whether the call or message has completed with an error.
  bool failed() const { return started_ && started_->work->done() && started_->work->error(); }
  // Returns the error if the call or message has failed. Otherwise, returns None.
  py::object exception() const;
  // Makes the call or message add `token` to the list when it has completed, with or without an error.
  void when_ended(std::shared_ptr<Completions> list, uint64_t token) const;
  std::string repr() const;
  std::optional<Matched> matched() const { return started_ ? started_->work->matched() : std::nullopt; }

  // Lets the worker thread begin the call at once, if no thread has begun it.
  void hurry() const;

  // For the garbage collector.
  int traverse(visitproc visit, void* arg) const;
  void clear();

 private:
  void check_process() const;
  bool ended(std::optional<double> seconds);
  void collect();
  void let_go();
  // Warns the user if only result() fills `out`, and nobody has asked for the result.
  void warn_if_unfilled() noexcept;
  bool is_current() const;
  [[noreturn]] void raise_cause(const Error& symptom) const;

  pid_t owner_ = getpid();
  Calls* calls_ = nullptr;
  py::object core_, python_;  // the Python object that owns *calls_, and the Group of python/mscomm/group.py
  std::shared_ptr<Started> started_;
  bool part_ = false, collecting_ = false, collected_ = false;
  py::object result_ = py::none();  // valid if collected_ is true
};

// Both overloads of start() keep the arrays alive until the call or message has completed, even if the user drops the handle.
// numbers: as in Communicator::start(). part: as in the constructor of Handle.
Handle start(Calls& calls, std::shared_ptr<PreparedCall> call, double timeout_s, CallNumbers* numbers, bool part);
Handle start(Calls& calls, std::shared_ptr<PreparedCall> call, const Message& message, const Deadline& deadline);

// Removes completed calls and messages from calls.running. Looks only at the next few of them if there are many, because each
// call does this, and must not take longer the more are running.
inline constexpr size_t few = 8;
void forget_ended(Calls& calls, size_t most = few);
// Cancels each recv for which no message has arrived, and then waits until all started calls and messages have completed. Signal
// handlers run during the wait. Returns the descriptions of the cancelled recvs.
std::vector<std::string> drain(Calls& calls);

}  // namespace mscomm
