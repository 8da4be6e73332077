// The group object that Python holds, and the helpers for calls between Python and the core: GIL, signals, exceptions.
#pragma once

#include <fcntl.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>
#include <variant>

#include "backend/host.h"
#include "backend/vendor.h"
#include "comm/communicator.h"
#include "src/calls.h"
#include "src/errors.h"
#include "transport/arena.h"

namespace mscomm {

namespace py = pybind11;

inline bool python_is_ending() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Calls the function without the GIL, and returns its result. A guard object cannot take the GIL again in its destructor: if a
// daemon thread asks for the GIL while the process ends, Python before 3.14 ends the thread by unwinding its stack, and a stack
// cannot be unwound through a destructor. So a thread that needs the GIL while the process ends waits in this function for ever,
// as it would in Python 3.14.
template <typename Function>
auto unlocked(const Function& function) {
  using Result = std::invoke_result_t<Function>;
  std::conditional_t<std::is_void_v<Result>, std::monostate, std::optional<Result>> result;
  std::exception_ptr thrown;
  PyThreadState* const state = PyEval_SaveThread();
  try {
    if constexpr (std::is_void_v<Result>) function();
    else result.emplace(function());
  } catch (...) {
    thrown = std::current_exception();
  }
  while (python_is_ending()) pause();
  PyEval_RestoreThread(state);
  if (thrown) std::rethrow_exception(thrown);
  if constexpr (!std::is_void_v<Result>) return *std::move(result);
}

inline void run_pending_signal_handlers() {
  if (python_is_ending()) return;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// Returns a copy of the descriptor. The copy is closed when the last shared_ptr to it is gone, so the caller may close the
// original at any time. If fd is -1, nothing is copied, and the result points to -1.
inline std::shared_ptr<const int> copy_of(int fd) {
  if (fd < 0) return std::make_shared<const int>(-1);
  const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);
  if (copy < 0) throw system_error("fcntl(F_DUPFD_CLOEXEC)", errno);
  return {new int(copy), [](const int* owned) {
            close(*owned);
            delete owned;
          }};
}

// Descriptors that were taken over from Python. A descriptor that is handed on is replaced by -1. The destructor closes the
// others.
struct Descriptors {
  ~Descriptors() {
    for (const int fd : fds)
      if (fd >= 0) close(fd);
  }
  std::vector<int> fds;
};

// One rank's part of a group. Python makes it from the facts that the ranks of the group exchanged.
struct Group {
  const std::string name;
  Recorder recorder;
  const HostBackend* host;
  std::shared_ptr<Peers> peers;
  std::vector<int> ranks;
  std::mutex notices_mutex;  // protects notices
  std::vector<std::string> notices;
  std::atomic<int> away{0};  // the number of threads in called(), which a thread leaves with the GIL
  std::unique_ptr<Calls> calls;
  std::unique_ptr<Communicator> communicator;  // the last member, because its threads use the members above

  // control: the offset of the arena's memory in the heap of this host's lowest rank; -1: no arena. links: a socket for each
  // rank, which the group takes over; empty: no mesh. news_fd: an eventfd, which the caller keeps, or -1. The core writes to
  // news_fd when a started call, a started message or a call on the device has failed, when stuck() has a number, and when there
  // are notices for the user. So no thread of the core has to call Python: such a call might never return while the process ends.
  Group(std::string called, std::shared_ptr<Peers> job, std::vector<int> members, int rank, unsigned epoch,
        const std::vector<std::string>& forced, int64_t control, bool spin, const std::vector<int>& links, int news_fd)
      : name(std::move(called)), peers(std::move(job)), ranks(std::move(members)) {
    // `owned` is the first variable, so that the descriptors are closed if anything below fails.
    Descriptors owned{links};
    std::vector<std::optional<Stream>> streams(ranks.size());
    for (size_t peer = 0; peer < links.size(); peer++) {
      if (links[peer] < 0) continue;
      streams[peer].emplace(std::exchange(owned.fds[peer], -1), peers->names.at(static_cast<size_t>(ranks.at(peer))));
    }

    Layout layout{rank, static_cast<int>(ranks.size()), {}};
    std::map<int, int> numbers;  // a number for each host, in the order of the hosts' lowest ranks in the group
    for (int member : ranks) {
      const int host = peers->hosts.at(static_cast<size_t>(member));
      layout.host.push_back(numbers.emplace(host, static_cast<int>(numbers.size())).first->second);
    }
    Forced algorithms;
    for (size_t i = 0; i < algorithms.size(); i++) algorithms[i] = forced[i];

    std::unique_ptr<Arena> arena;
    if (control >= 0) {
      std::vector<int> at_home;
      int place = 0;
      for (int i = 0; i < layout.size; i++) {
        if (layout.host[static_cast<size_t>(i)] != layout.host[static_cast<size_t>(rank)]) continue;
        if (i == rank) place = static_cast<int>(at_home.size());
        at_home.push_back(ranks[static_cast<size_t>(i)]);
      }
      arena = std::make_unique<Arena>(std::move(at_home), place, peers->heaps, static_cast<uint64_t>(control), spin);
    }
    std::unique_ptr<Mesh> mesh;
    if (!links.empty())
      mesh = std::make_unique<Mesh>(ranks, rank, epoch, std::move(streams), [this](uint64_t number) {
        const auto record = recorder.find(number);
        return record ? std::optional(record->signature) : std::nullopt;
      });
    auto backend = std::make_unique<HostBackend>(std::move(layout), algorithms, std::move(arena), std::move(mesh));
    host = backend.get();
    const auto wake = [news = copy_of(news_fd)] {
      const uint64_t one = 1;
      // EAGAIN: the count of the eventfd is full. So its reader has not read it yet, but will do so.
      if (*news >= 0 && write(*news, &one, sizeof one) < 0 && errno != EAGAIN) return;
    };
    Communicator::Hooks hooks{run_pending_signal_handlers,
                              [this, wake](const std::string& text) {
                                {
                                  const std::lock_guard lock(notices_mutex);
                                  notices.push_back(text);
                                }
                                wake();
                              },
                              wake};
    communicator =
        std::make_unique<Communicator>(name, ranks, rank, peers, std::move(backend), epoch, recorder, std::move(hooks));
  }

  Calls& ready() const {
    if (!calls) throw Error("RuntimeError", "mscomm: join_python has not been called on this group");
    return *calls;
  }

  // Joins a device. Every rank of the group must call join_device() with the same id, which one rank has made (see make_id in
  // module.cc). `check` is called at least every 50 ms, and may throw an exception to end the wait.
  void join_device(std::shared_ptr<Vendor> vendor, std::shared_ptr<Runtime> runtime, int device, const std::string& id,
                   double timeout_s, const py::function& check) {
    communicator->add_device(unlocked([&] {
      return std::make_unique<VendorBackend>(std::move(vendor), std::move(runtime), device, id, communicator->size(),
                                             communicator->rank(), Deadline(timeout_s), [&check] {
                                               const py::gil_scoped_acquire gil;
                                               if (PyErr_CheckSignals() != 0) throw py::error_already_set();
                                               check();
                                             });
    }));
  }

  // Does the same as unlocked(function), but counts this thread in `away` until the thread has the GIL again.
  template <typename Function>
  auto called(const Function& function) {
    struct Counted {
      explicit Counted(std::atomic<int>& count) : count(count) { count++; }
      ~Counted() { count--; }
      std::atomic<int>& count;
    };
    const Counted counted(away);
    return unlocked(function);
  }

  // Ends this rank's part in the group. Call close() without the GIL. Threads whose calls end because of close() have the GIL
  // again when close() returns: the process may end next, and a thread must not ask for the GIL then. close() waits at most 5 s
  // for these threads.
  void close() {
    communicator->close();
    const Deadline deadline(5);
    while (away > 0 && !deadline.passed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
};

// Calls a function that may break the group, and returns its result. An exception goes to the Group of Python, which raises what
// the user gets.
template <typename Function>
auto failing(const Calls& calls, const Function& function) {
  try {
    try {
      return function();
    } catch (const Error& error) {
      raise(error);  // raise() runs Python code, in which a signal handler may raise another exception
      throw py::error_already_set();
    }
  } catch (py::error_already_set& error) {
    const py::object python = python_of(calls);
    if (python.is_none()) throw;
    const py::object value = error.value();
    if (error.trace()) PyException_SetTraceback(value.ptr(), error.trace().ptr());
    python.attr("failed")(value);
    throw;  // not reached, because failed() raises
  }
}

}  // namespace mscomm
