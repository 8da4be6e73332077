// The handle of a call or a message that runs beside its caller. In Python, its class is `Work`.
#pragma once

#include <pybind11/numpy.h>

#include <memory>
#include <mutex>
#include <optional>

#include "comm/communicator.h"
#include "src/calls.h"

namespace mscomm {

// A call or a message that the core has started, and the objects that must live until it has ended.
struct Started {
  std::shared_ptr<Work> work{};          // nullptr: not started yet
  std::shared_ptr<PreparedCall> call{};  // nullptr: this is a message, or the result of the call has been collected
  py::object array{};                    // for a message: its array
  py::object current{};                  // for a call on a device: a function that returns the library's current stream
  std::recursive_mutex collecting{};     // lets only one of several waiting threads make the result; locked without the GIL
};

class Handle {
 public:
  // For a subclass in Python that overrides all methods.
  Handle() = default;
  Handle(Calls& calls, std::shared_ptr<Started> started);

  // The methods below throw what the user gets: the first cause of the group's failure, instead of the error of this call.

  // Waits until the call or message has ended. Returns the result of a call, or None for a message. timeout: seconds or a
  // timedelta; None: no limit. For a call on a device with the timeout None, wait() does not wait for the device: it makes the
  // work that is enqueued later on the library's current stream wait for the call.
  py::object wait(py::handle timeout);
  // Waits like wait(), but for at most the given seconds, and makes no result. Returns whether the call or message has ended.
  // For a call whose result the caller makes; lets go of the arrays.
  bool join(std::optional<double> seconds);
  bool done() const;
  // Returns the error of a call that has ended with an error. Otherwise returns None.
  py::object exception() const;
  std::optional<Matched> matched() const;

  // For the garbage collector.
  int traverse(visitproc visit, void* arg) const;
  void clear();

 private:
  void check_process() const;
  bool ended(std::optional<double> seconds);
  void collect();
  void let_go();
  bool is_current() const;
  [[noreturn]] void raise_cause(const Error& symptom) const;

  pid_t owner_ = getpid();
  Calls* calls_ = nullptr;
  py::object core_, python_;  // the Python object that owns *calls_, and the Group of python/mscomm/group.py
  std::shared_ptr<Started> started_;
  bool collecting_ = false, collected_ = false;
  py::object result_ = py::none();  // valid if collected_ is true
};

// Both functions keep the arrays alive until the call or message has ended, even if the user drops the handle.
// number: the number that was reserved for the call; 0: the next number. Only a call on a device can have a reserved number.
Handle start(Calls& calls, std::shared_ptr<PreparedCall> call, double timeout_s, uint64_t number);
Handle start(Calls& calls, py::array array, const Message& message, const Deadline& deadline);

// Removes the calls and messages that have ended from calls.running.
void forget_ended(Calls& calls);
// Waits until all started calls and messages have ended. Signal handlers run during the wait.
void drain(Calls& calls);

}  // namespace mscomm
