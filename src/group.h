// The group object that Python holds, and the helpers for calls between Python and the core: GIL, signals, exceptions.
#pragma once

#include <fcntl.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <exception>
#include <memory>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>
#include <variant>

#include "base/descriptor.h"
#include "comm/communicator.h"
#include "comm/founding.h"
#include "src/calls.h"
#include "src/errors.h"
#include "src/python.h"

namespace mscomm {

// Calls the function without the GIL, and returns its result. If the process is exiting when `function` returns, the thread waits
// until the process has ended. No destructor takes the GIL again, because stopping_at_exit() cannot be used there.
// If `away` is given, it counts this thread until the thread has the GIL again.
template <typename Function>
auto unlocked(const Function& function, std::atomic<int>* away = nullptr) {
  using Result = std::invoke_result_t<Function>;
  std::conditional_t<std::is_void_v<Result>, std::monostate, std::optional<Result>> result;
  std::exception_ptr thrown;
  if (away) ++*away;
  PyThreadState* const state = PyEval_SaveThread();
  try {
    if constexpr (std::is_void_v<Result>) function();
    else result.emplace(function());
  } catch (...) {
    thrown = std::current_exception();
  }
  while (python_is_ending()) pause();
  stopping_at_exit([&] { PyEval_RestoreThread(state); });
  if (away) --*away;
  if (thrown) std::rethrow_exception(thrown);
  if constexpr (!std::is_void_v<Result>) return *std::move(result);
}

inline void run_pending_signal_handlers() {
  if (python_is_ending()) return;
  std::optional<py::gil_scoped_acquire> gil;
  stopping_at_exit([&] { gil.emplace(); });
  check_signals();
}

// Duplicates the descriptor, so that the caller may close the original at any time. Returns -1 if fd is -1.
inline Descriptor copy_of(int fd) {
  Descriptor copy(fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 3));
  if (fd >= 0 && copy.get() < 0) throw system_error("fcntl(F_DUPFD_CLOEXEC)", errno);
  return copy;
}

// The group object that Python holds: one rank's part of a group, and what the bindings need to know about it.
struct Group {
  std::atomic<int> away{0};  // the number of threads in called(); a thread holds the GIL when it leaves called()
  std::unique_ptr<Calls> calls;
  Founded founded;  // destroyed before `calls`, because its threads use the arrays of started calls
  Communicator* const communicator = &founded.communicator();

  Group(Founding founding, const std::shared_ptr<Peers>& peers)
      : founded(std::move(founding), peers, run_pending_signal_handlers) {}

  Calls& ready() const {
    if (!calls) throw Error("RuntimeError", "mscomm: join_python has not been called on this group");
    return *calls;
  }

  // Does the same as unlocked(function), but counts this thread in `away` until the thread has the GIL again.
  template <typename Function>
  auto called(const Function& function) {
    return unlocked(function, &away);
  }

  // Ends this rank's part in the group. Call this without holding the GIL. After close(), the process may exit, and a thread
  // that asks for the GIL then stops (see stopping_at_exit()). So that the calls of other threads end well, close() ends them,
  // and then waits until these threads have the GIL again, but for at most 5 s.
  void close() {
    communicator->close();
    const Deadline deadline(5);
    while (away > 0 && !deadline.passed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
};

// Calls a function that may break the group, and returns its result. An exception is passed to the Python Group object, which
// raises the exception that the user gets.
template <typename Function>
auto failing(const Calls& calls, const Function& function) {
  try {
    return raising(function);
  } catch (py::error_already_set& error) {
    const py::object python = calls.python();
    if (python.is_none()) throw;
    const py::object value = error.value();
    if (error.trace()) PyException_SetTraceback(value.ptr(), error.trace().ptr());
    // Python's code in failed() gives up the GIL from time to time. So that it can tell why the call has failed, close() also
    // waits for this thread.
    ++calls.group->away;
    try {
      call_python(python.attr("failed"), value);
    } catch (...) {
      --calls.group->away;
      throw;
    }
    throw;  // not reached, because failed() raises
  }
}

}  // namespace mscomm
