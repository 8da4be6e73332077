// The handle of a call or a message that runs beside its caller: `Work` in Python.
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
  std::shared_ptr<Work> work{};          // nullptr: the core is about to start it
  std::shared_ptr<PreparedCall> call{};  // nullptr: a message, or a call whose result has been collected
  py::object array{};                    // of a message
  py::object current{};                  // of a call on a device: a function that returns its library's current stream
  std::recursive_mutex collecting{};     // lets one of two waiting threads make the result; locked without the GIL
};

class Handle {
 public:
  // For a subclass in Python, which has all methods of its own.
  Handle() = default;
  Handle(const Calls& calls, std::shared_ptr<Started> started);

  // The methods below throw what the user gets: the group's first cause in place of the call's own error.

  // Returns the result; None for a message. timeout: seconds or a timedelta; None: as long as it takes, but a call on a device is
  // then only ordered before what is enqueued later on the library's current stream.
  py::object wait(py::handle timeout);
  // Waits at most that long. Returns whether it has ended.
  bool ends_within(double seconds);
  bool done() const;
  // The error of a call that has ended; None if it ended well, or has not ended yet.
  py::object exception() const;
  std::optional<Matched> matched() const;

 private:
  void check_process() const;
  void collect();
  [[noreturn]] void raise_cause(const Error& symptom) const;

  pid_t owner_ = getpid();
  const Calls* calls_ = nullptr;
  py::object core_, python_;  // the owner of *calls_, and the Group of python/mscomm/group.py
  std::shared_ptr<Started> started_;
  bool collected_ = false;
  py::object result_ = py::none();  // once collected_
};

// These two hold what is given until it has ended, also if the user drops the handle.
// number: a reserved one, only of a call on a device; 0: the next.
Handle start(Calls& calls, std::shared_ptr<PreparedCall> call, double timeout_s, uint64_t number);
Handle start(Calls& calls, py::array array, const Message& message, const Deadline& deadline);

// Lets go of what has ended.
void forget_ended(Calls& calls);
// Waits until everything that was started has ended. Signal handlers run meanwhile.
void drain(Calls& calls);

}  // namespace mscomm
