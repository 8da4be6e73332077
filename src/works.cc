#include "src/works.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "src/group.h"
#include "src/python.h"

namespace mscomm {

namespace {

// Takes a call or message out of calls.running. The caller destroys it, which may destroy its arrays and run Python code. If that
// code makes another call, the call changes `running`.
std::shared_ptr<Started> take(Calls& calls, size_t place) {
  auto& running = calls.running;
  std::swap(running[place], running.back());
  running[place]->place = place;
  auto taken = std::move(running.back());
  running.pop_back();
  return taken;
}

// Takes the call or message out of calls.running if it is there.
void remove(Calls& calls, const Started& one) {
  const auto& running = calls.running;
  if (one.place < running.size() && running[one.place].get() == &one) (void)take(calls, one.place);
}

template <typename Start>
Handle started(Calls& calls, std::shared_ptr<Started> one, bool part, const Start& start) {
  forget_ended(calls);
  // Store `one` before the start, so that its arrays stay alive. The core's threads may use the arrays as soon as the call or
  // message has started.
  one->place = calls.running.size();
  calls.running.push_back(one);
  try {
    one->work = calls.group->called(start);
  } catch (...) {
    remove(calls, *one);
    if (one->current) calls.failed.push_back(std::move(one));  // the device may still use the arrays
    throw;
  }
  return {calls, std::move(one), part};
}

// Waits for at most the given number of seconds, without the GIL. Returns whether the call or message has completed.
bool ended_within(const Calls& calls, Work& work, std::optional<double> seconds) {
  Communicator& group = *calls.group->communicator;
  for (const auto begun = Clock::now(); !work.done();) {
    const auto left_s = seconds ? std::optional(*seconds - seconds_since(begun)) : std::nullopt;
    if (left_s && *left_s <= 0) return false;
    calls.group->called([&] { return group.wait(work, left_s); });
    check_signals();
  }
  return true;
}

py::object as_exception(const Error& error) {
  raise(error);
  return py::error_already_set().value();
}

}  // namespace

Handle::Handle(Calls& calls, std::shared_ptr<Started> started, bool part)
    : calls_(&calls),
      core_(py::reinterpret_borrow<py::object>(calls.core)),
      python_(calls.python()),
      started_(std::move(started)),
      part_(part) {}

void Handle::warn_if_unfilled() noexcept {
  if (!started_ || part_ || collected_ || getpid() != owner_ || python_is_ending()) return;
  const auto call = started_->call;
  if (!call || !call->result_fills_out() || failed() || python_.is_none()) return;
  try {
    call_python(python_.attr("unfilled"), name(call->call.signature.function));
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("mscomm.Work");
  } catch (...) {  // out of memory, and a destructor cannot report it
  }
}

void Handle::check_process() const {
  if (!started_) throw py::type_error("mscomm: a Work is made by a call with async_op=True");
  if (getpid() != owner_) throw std::runtime_error("mscomm: this call was made in the parent process, before the fork");
}

py::object Handle::wait(py::handle timeout) {
  const auto seconds = timeout.is_none() ? std::nullopt : std::optional(seconds_of(timeout, "Work.wait", true));
  if (!ended(seconds)) {
    PyErr_Format(PyExc_TimeoutError, "Work.wait: the call did not end within %s; it is still running",
                 seconds_text(*seconds).c_str());
    throw py::error_already_set();
  }
  if (calls_->noted) call_python(python_.attr("ended"));
  collect();
  let_go();
  return result_;
}

bool Handle::join(std::optional<double> seconds) {
  const bool whether = ended(seconds);
  if (whether) let_go();
  return whether;
}

bool Handle::ended(std::optional<double> seconds) {
  check_process();
  if (!seconds && started_->current) {
    const auto stream = reinterpret_cast<StreamHandle>(call_python(started_->current).cast<uintptr_t>());
    try {
      // Without the GIL, because the driver may block this thread until another one has aborted the group.
      calls_->group->called([&] { calls_->group->communicator->device().order(started_->work->number(), stream); });
    } catch (const Error& error) {
      raise_cause(error);
    }
    return true;
  }
  if (!ended_within(*calls_, *started_->work, seconds)) return false;
  if (const auto error = started_->work->error()) raise_cause(*error);
  return true;
}

// Releases the arrays, but only if the call has completed without an error. While the device is still reading x, the array
// library must not reuse the memory of x. If a call on a device has failed, forget_ended() keeps its arrays.
void Handle::let_go() {
  if (!started_->work->done() || started_->work->error()) return;
  remove(*calls_, *started_);
  const auto call = std::move(started_->call);
}

bool Handle::done() {
  check_process();
  if (!started_->work->done()) return false;
  const auto call = started_->call;
  if (call && !part_ && !failed() && (call->result_fills_out() || call->written)) collect();
  return true;
}

void Handle::when_ended(std::shared_ptr<Completions> list, uint64_t token) const {
  check_process();
  list->expect();
  started_->work->when_ended([list = std::move(list), token] { list->add(token); });
}

std::string Handle::repr() const {
  const bool ended = started_ && started_->work->done();
  return std::string("<mscomm.Work: ") + (failed() ? "failed" : ended ? "completed" : "running") + ">";
}

void Handle::hurry() const {
  check_process();
  calls_->group->communicator->hurry();
}

bool Handle::cancel() {
  check_process();
  return !calls_->group->called([&] { return calls_->group->communicator->cancel({&started_->work, 1}); }).empty();
}

py::object Handle::exception() const {
  check_process();
  if (!started_->work->done()) return py::none();
  const auto error = started_->work->error();
  if (!error) return py::none();
  const py::object symptom = as_exception(*error);
  return is_current() ? call_python(python_.attr("cause_of"), symptom) : symptom;
}

// Returns whether the Python Group object still uses this core object. After rejoin(), the Group uses a new core object, for
// which an old failure is irrelevant.
bool Handle::is_current() const { return !python_.is_none() && core_.is(py::object(python_.attr("core"))); }

void Handle::raise_cause(const Error& symptom) const {
  if (is_current()) call_python(python_.attr("raise_cause"), as_exception(symptom));
  throw symptom;
}

void Handle::collect() {
  const auto call = started_->call;  // a second pointer, because another thread may reset started_->call in the meantime
  if (collected_ || !call) return;
  std::unique_lock lock(started_->collecting, std::defer_lock);
  // Wait for the lock without the GIL, because the thread that holds the lock may need the GIL.
  if (call->python_makes_result()) unlocked([&] { lock.lock(); });
  if (collected_ || collecting_) return;  // if collecting_ is true, this is a signal handler that interrupted result()
  collecting_ = true;
  try {
    result_ = call->result();
  } catch (...) {
    collecting_ = false;
    throw;
  }
  collecting_ = false;
  collected_ = true;
}

// As long as calls.running also holds the call, the arrays are in use, so the garbage collector must not visit them.
int Handle::traverse(visitproc visit, void* arg) const {
  Py_VISIT(core_.ptr());
  Py_VISIT(python_.ptr());
  Py_VISIT(result_.ptr());
  return started_ && started_.use_count() == 1 && started_->call.use_count() == 1 ? started_->call->traverse(visit, arg) : 0;
}

void Handle::clear() {
  warn_if_unfilled();
  const auto started = std::move(started_);
  const auto core = std::move(core_), python = std::move(python_), result = std::exchange(result_, py::none());
}

Handle start(Calls& calls, std::shared_ptr<PreparedCall> call, double timeout_s, CallNumbers* numbers, bool part) {
  auto one = std::make_shared<Started>();
  if (call->call.stream) one->current = memory_of(call->x ? *call->x : *call->target).attr("current");
  call->hold_memory();
  one->call = std::move(call);
  Handle handle = failing(calls, [&] {
    Call copy = one->call->call;
    return started(calls, one, part, [&] { return calls.group->communicator->start(std::move(copy), timeout_s, numbers); });
  });
  if (calls.noted && !numbers) call_python(calls.python().attr("noted"), one->work->number());
  return handle;
}

Handle start(Calls& calls, std::shared_ptr<PreparedCall> call, const Message& message, const Deadline& deadline) {
  auto one = std::make_shared<Started>();
  call->hold_memory();
  one->call = std::move(call);
  return failing(calls,
                 [&] { return started(calls, one, false, [&] { return calls.group->communicator->start(message, deadline); }); });
}

void forget_ended(Calls& calls, size_t most) {
  std::vector<std::shared_ptr<Started>> ended;
  size_t& at = calls.looked_at;
  for (size_t left = std::min(most, calls.running.size()); left > 0; left--) {
    if (at >= calls.running.size()) at = 0;
    const Started& one = *calls.running[at];
    if (one.work && one.work->done()) ended.push_back(take(calls, at));
    else at++;
  }
  // If a call on a device has failed, the device may use its arrays until the vendor's library has ended the group.
  std::ranges::copy_if(ended, std::back_inserter(calls.failed),
                       [](const auto& one) { return one->current && one->work->error(); });
}

std::vector<std::string> drain(Calls& calls) {
  // A call or message that another thread is about to start has no Work yet. drain() does not wait for it, because close() ends
  // it.
  std::vector<std::shared_ptr<Work>> works;
  for (const auto& one : calls.running)
    if (one->work) works.push_back(one->work);
  // This rank sends nothing from now on, and a peer may be waiting in the same way. So a recv could wait until its deadline.
  auto cancelled = calls.group->called([&] { return calls.group->communicator->cancel(works); });
  for (const auto& work : works) (void)ended_within(calls, *work, {});
  return cancelled;
}

}  // namespace mscomm
