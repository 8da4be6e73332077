#include "src/works.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <limits>
#include <thread>
#include <utility>
#include <vector>

#include "src/group.h"

namespace mscomm {

namespace {

template <typename Start>
Handle started(Calls& calls, std::shared_ptr<Started> one, const Start& start) {
  forget_ended(calls);
  // Hold the arrays before the start, because the core's threads may use them from then on.
  calls.running.push_back(one);
  try {
    one->work = calls.group->called(start);
  } catch (...) {
    std::erase(calls.running, one);
    throw;
  }
  return {calls, std::move(one)};
}

// Waits at most the given seconds, without the GIL. Returns whether the call or message has ended.
bool ended_within(Work& work, double seconds) {
  for (const auto begun = Clock::now(); !work.done();) {
    const double left_s = seconds - seconds_since(begun);
    if (left_s <= 0) return false;
    unlocked([&] { return work.wait(std::min(left_s, 0.05)); });
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
  return true;
}

py::object as_exception(const Error& error) {
  raise(error);
  return py::error_already_set().value();
}

}  // namespace

Handle::Handle(const Calls& calls, std::shared_ptr<Started> started)
    : calls_(&calls),
      core_(py::reinterpret_borrow<py::object>(calls.core)),
      python_(python_of(calls)),
      started_(std::move(started)) {}

void Handle::check_process() const {
  if (!started_) throw py::type_error("mscomm: a Work is made by a call with async_op=True");
  if (getpid() != owner_) throw std::runtime_error("mscomm: this call was made by the process that forked this one");
}

py::object Handle::wait(py::handle timeout) {
  check_process();
  if (timeout.is_none() && started_->current) {
    const auto stream = reinterpret_cast<StreamHandle>(started_->current().cast<uintptr_t>());
    try {
      calls_->group->communicator->order(started_->work->number(), stream);
    } catch (const Error& error) {
      raise_cause(error);
    }
  } else {
    const double seconds = timeout.is_none() ? std::numeric_limits<double>::infinity() : seconds_of(timeout);
    if (!ends_within(seconds)) {
      PyErr_Format(PyExc_TimeoutError, "Work.wait: the call has not ended within %s; it goes on", seconds_text(seconds).c_str());
      throw py::error_already_set();
    }
  }
  if (calls_->noted) python_.attr("ended")();
  if (!collected_) collect();
  // Let go of x only when the device has ended the call. Otherwise the library could reuse the memory of x while the device still
  // reads it.
  if (started_->work->done()) started_->call.reset();
  return result_;
}

bool Handle::ends_within(double seconds) {
  check_process();
  if (!ended_within(*started_->work, seconds)) return false;
  if (const auto error = started_->work->error()) raise_cause(*error);
  return true;
}

bool Handle::done() const {
  check_process();
  return started_->work->done();
}

py::object Handle::exception() const {
  if (!done()) return py::none();
  const auto error = started_->work->error();
  if (!error) return py::none();
  const py::object symptom = as_exception(*error);
  return python_.is_none() ? symptom : python_.attr("cause_of")(symptom);
}

void Handle::raise_cause(const Error& symptom) const {
  if (!python_.is_none()) python_.attr("raise_cause")(as_exception(symptom));
  throw symptom;
}

std::optional<Matched> Handle::matched() const { return started_ ? started_->work->matched() : std::nullopt; }

void Handle::collect() {
  const auto call = started_->call;  // a second pointer, because another thread may reset started_->call meanwhile
  if (!call) return;
  std::unique_lock collecting(started_->collecting, std::defer_lock);
  // Wait for the lock without the GIL: a thread that holds the lock may need the GIL.
  if (call->python_makes_result()) unlocked([&] { collecting.lock(); });
  if (std::exchange(collected_, true)) return;
  try {
    result_ = call->result();
  } catch (...) {
    collected_ = false;
    throw;
  }
}

Handle start(Calls& calls, std::shared_ptr<PreparedCall> call, double timeout_s, uint64_t number) {
  auto one = std::make_shared<Started>();
  if (call->call.stream) one->current = memory_of(call->x ? *call->x : *call->target).attr("current");
  call->hold_memory();
  one->call = std::move(call);
  Handle handle = failing(calls, [&] {
    Call copy = one->call->call;
    copy.signature.number = number;
    return started(calls, one, [&] { return calls.group->communicator->start(std::move(copy), timeout_s); });
  });
  if (calls.noted && !number) python_of(calls).attr("noted")(one->work->number());
  return handle;
}

Handle start(Calls& calls, py::array array, const Message& message, const Deadline& deadline) {
  auto one = std::make_shared<Started>();
  one->array = std::move(array);
  return started(calls, std::move(one), [&] { return calls.group->communicator->start(message, deadline); });
}

void forget_ended(Calls& calls) {
  auto& running = calls.running;
  const auto ended =
      std::stable_partition(running.begin(), running.end(), [](const auto& one) { return !one->work || !one->work->done(); });
  // These calls and messages are destroyed only after `running` has been changed: their arrays may be destroyed with them, which
  // may run Python code that makes another call.
  const std::vector<std::shared_ptr<Started>> last(std::make_move_iterator(ended), std::make_move_iterator(running.end()));
  running.erase(ended, running.end());
}

void drain(Calls& calls) {
  for (forget_ended(calls); !calls.running.empty(); forget_ended(calls)) {
    unlocked([] { std::this_thread::sleep_for(std::chrono::milliseconds(1)); });
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

}  // namespace mscomm
