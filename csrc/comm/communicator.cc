#include "comm/communicator.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "base/thread.h"

namespace mscomm {

namespace {

thread_local bool worker_thread = false;

constexpr double delivery_s = 5;  // how long close() waits for messages to reach the peers' kernels
// The worker thread begins a queued call after grace_s. Many programs call Work.wait() earlier than that, and then wait() runs
// the call. So that start() need not wake the worker in such a program, the worker then checks every tick_s whether it is needed,
// until linger_s after the last start(). In other programs it does not check, because each check interrupts a computation.
constexpr double grace_s = 200e-6, tick_s = 1e-3, linger_s = 50e-3;
constexpr double patience_s = 1;  // see Patience

// Describes the call briefly: "all_reduce #7 (4 MiB)".
std::string brief(const Signature& call) {
  const std::string text = std::string(name(call.function)) + " #" + std::to_string(call.number);
  if (call.what == Collective::barrier) return text;
  return text + " (" + in_units(call.count * size_of(call.dtype)) + ")";
}

// Returns the lowest call number among the calls that differ. The call that noticed the difference may have a higher number.
int64_t number_of(const Differs& differs) {
  const auto number = [](const auto& one) { return one.second.number; };
  return static_cast<int64_t>(number(*std::ranges::min_element(differs.calls, {}, number)));
}

// All communicators of this process, for the fork handlers. all_mutex is held across a fork, so that the child sees a consistent
// list.
std::mutex all_mutex;
std::vector<Communicator*> all;

}  // namespace

// The Watch of a thread that runs queued calls in wait(). If a signal handler raises an exception, the call usually goes on, and
// wait() throws the exception when the call has ended. But if the call does not end within patience_s, or if a handler raises a
// second exception, then the call ends as a synchronous call does that is interrupted: the group is broken.
class Communicator::Patience final : public Watch {
 public:
  explicit Patience(Communicator& group) : group_(group) {}

  void look(const Deadline& deadline, const Missing& missing) override {
    group_.look_at_group(deadline, missing);
    bool ends = raised() && seconds_since(raised_at_) >= patience_s;
    try {
      group_.interrupt();
    } catch (const Interrupted& signal) {
      ends = raised();
      if (!raised()) raised_at_ = Clock::now();
      cause_ = signal.cause;
    }
    if (ends)
      throw Error("Aborted", group_.name_of(group_.rank_) + " was interrupted in " + group_.current(),
                  {group_.in_job(group_.rank_)});
  }
  bool broken() const override { return group_.broken(); }

  bool raised() const { return cause_ != nullptr; }
  void rethrow() const {
    if (raised()) std::rethrow_exception(cause_);
  }

 private:
  Communicator& group_;
  std::exception_ptr cause_;  // what the handler raised
  Clock::time_point raised_at_;
};

void Communicator::leave_caller(uint64_t ended) {
  bool next_is_queued = false;
  {
    const std::lock_guard lock(turn_mutex_);
    callers_--;
    if (ended) running_ = ended + 1;
    next_is_queued = !serving_ && !jobs_.empty();
  }
  turn_->notify_all();
  if (next_is_queued) job_->notify_one();
}

Work::~Work() {
  // In a forked child, leak the condition variable, because its destructor would wait for the parent's threads.
  if (getpid() != owner_) (void)ended_.release();
}

bool Work::wait(double timeout_s) {
  std::unique_lock lock(mutex_);
  return ended_->wait_for(lock, std::chrono::duration<double>(timeout_s), [this] { return done(); });
}

void Work::when_ended(std::function<void()> after) {
  {
    const std::lock_guard lock(mutex_);
    if (!done()) return after_.push_back(std::move(after));
  }
  after();
}

void Work::end(std::optional<Error> error, std::optional<Matched> matched) {
  std::vector<std::function<void()>> after;
  {
    const std::lock_guard lock(mutex_);
    after.swap(after_);
    error_ = std::move(error);
    matched_ = matched;
    done_ = true;
  }
  ended_->notify_all();
  for (const auto& function : after) function();
}

Communicator::Communicator(std::string group, std::vector<int> ranks, int rank, std::shared_ptr<Peers> peers,
                           std::unique_ptr<Backend> backend, uint32_t epoch, bool spin, Recorder& recorder, Hooks hooks)
    : group_(std::move(group)),
      ranks_(std::move(ranks)),
      rank_(rank),
      peers_(std::move(peers)),
      backend_(std::move(backend)),
      recorder_(recorder),
      hooks_(std::move(hooks)),
      left_(ranks_.size()),
      expected_(ranks_.size()),
      mailbox_(ranks_, rank_, epoch, spin) {
  static const int registered = pthread_atfork([] { all_mutex.lock(); }, [] { all_mutex.unlock(); }, in_child);
  if (registered != 0) throw system_error("pthread_atfork", registered);
  const std::lock_guard lock(all_mutex);
  all.push_back(this);
}

Communicator::~Communicator() {
  {
    const std::lock_guard lock(all_mutex);
    std::erase(all, this);
  }
  if (forked_) return;
  abort({or_no_memory([this] {
           return Error("Aborted", "group " + group_ + " was destroyed on rank " + std::to_string(in_job(rank_)),
                        {in_job(rank_)});
         }),
         false});
  if (worker_) stop_worker();
  if (device_) device_->observe(nullptr);
}

void Communicator::add_device(std::unique_ptr<VendorBackend> device) {
  {
    const std::lock_guard lock(state_mutex_);
    device_ = std::move(device);
    if (failure_) device_->shut_down();  // abort() came too early to do this
  }
  device_->observe(this);
}

void Communicator::stop_worker() {
  {
    const std::lock_guard lock(turn_mutex_);
    stopping_ = true;
  }
  job_->notify_one();
  worker_->join();
  worker_.reset();
}

void Communicator::check_usable() const {
  if (forked_)
    throw Error("RuntimeError", "mscomm: this process was forked from rank " + std::to_string(in_job(rank_)) +
                                    " and is not a rank itself; call mscomm in the parent");
  if (broken()) throw_failure();
}

// Returns the counter that holds the number of the next call. The caller must hold turn_mutex_.
uint64_t& Communicator::counter(CallNumbers* numbers) {
  check_usable();
  if (!numbers) return next_;
  if (&numbers->group_ != this) throw Error("RuntimeError", "mscomm: these call numbers belong to an earlier group");
  if (numbers->next_ == numbers->end_) throw Error("RuntimeError", "mscomm: all reserved call numbers have been taken");
  return numbers->next_;
}

// Returns the number of the newest call that must not be running on this thread when a call takes its number from `numbers`.
uint64_t Communicator::before(const CallNumbers* numbers) { return numbers ? numbers->next() - 1 : UINT64_MAX; }

// Throws if this thread is in a signal handler that has interrupted a call of this group. number: of the call that the handler
// makes or waits for.
void Communicator::check_no_handler(uint64_t number) const {
  if (Inside::calls(*this, number))
    throw Error("RuntimeError", "mscomm: a call in a signal handler that interrupted " + current() +
                                    " of the same group, group " + group_ +
                                    ": the two calls would wait for each other. Make this call after the other one has ended");
}

CallNumbers::CallNumbers(Communicator& group, int count) : group_(group) {
  group.check_usable();
  group.check_no_handler();
  const std::lock_guard lock(group.turn_mutex_);
  next_ = group.counter(nullptr);
  end_ = group.next_ = next_ + count;
}

void CallNumbers::give_up() {
  if (group_.forked_) return;
  uint64_t number = 0;
  {
    const std::lock_guard lock(group_.turn_mutex_);
    if (next_ == end_) return;
    number = std::exchange(next_, end_);
  }
  const auto why = [&] {
    const std::string what = group_.name_of(group_.rank_) + " was interrupted before call #" + std::to_string(number);
    return Error("Aborted", what, {group_.in_job(group_.rank_)});
  };
  group_.abort({or_no_memory(why), false, static_cast<int64_t>(number)});
  if (group_.hooks_.failed) group_.hooks_.failed();
}

void Communicator::check(const Call& call) const {
  check_usable();
  mscomm::check(call, rank_, size());
  if (call.stream) (void)device();
}

VendorBackend& Communicator::device() const {
  check_usable();
  if (!device_) throw Error("RuntimeError", "group " + group_ + " has no device: its ranks joined without devices");
  return *device_;
}

void Communicator::run(Call&& call, double timeout_s, CallNumbers* numbers) {
  check(call);
  check_no_handler(before(numbers));
  Caller inside(*this, &call.signature, numbers);
  execute(call, Deadline::from_first_look(timeout_s), inside.its_turn(), *this);
  inside.ended();
}

// start() and start_on_device() allocate memory before they take a number. If an allocation failed after a number was taken, all
// later calls would wait for a call that never runs.
std::shared_ptr<Work> Communicator::start(Call call, double timeout_s, CallNumbers* numbers) {
  if (call.stream) return start_on_device(std::move(call), timeout_s, numbers);
  check(call);
  auto work = std::make_shared<Work>();
  bool must_wake = false;
  {
    const std::lock_guard lock(turn_mutex_);
    uint64_t& next = counter(numbers);
    if (!worker_) worker_ = start_thread([this] { this->work(); });
    work->number_ = call.signature.number = next;
    auto later = jobs_.end();
    while (later != jobs_.begin() && std::prev(later)->work->number_ > work->number_) --later;
    // The worker thread may be waiting for this call, or a caller may be waiting for its turn after this call.
    must_wake = asleep_ || !waited_ || later != jobs_.end() || in_queue_ > 0;
    last_start_ = jobs_.insert(later, Job{std::move(call), Deadline(timeout_s), work})->deadline.start();
    next++;
    callers_++;
  }
  if (must_wake) job_->notify_one();
  return work;
}

std::shared_ptr<Work> Communicator::start_on_device(Call call, double timeout_s, CallNumbers* numbers) {
  check(call);
  check_no_handler(before(numbers));
  const Deadline deadline(timeout_s);
  call.beside = true;
  auto work = std::make_shared<Work>();
  std::map<uint64_t, std::shared_ptr<Work>> one{{0, work}};
  auto entry = one.extract(0);
  Caller inside(*this, &call.signature, numbers);
  entry.key() = work->number_ = call.signature.number;
  {
    const std::lock_guard lock(state_mutex_);
    on_device_.insert(std::move(entry));
  }
  execute(call, deadline, inside.its_turn(), *this);
  inside.ended();
  return work;
}

// The device backend calls ended(), failed() and waits() on its watcher thread, except that it calls ended() on the caller's
// thread if a graph has captured the call.
void Communicator::ended(uint64_t number) {
  recorder_.end(number, Record::State::done);
  std::shared_ptr<Work> work;
  {
    const std::lock_guard lock(state_mutex_);
    if (auto found = on_device_.extract(number)) work = std::move(found.mapped());
  }
  if (work) work->end(std::nullopt);
}

void Communicator::failed(const Signature& call, const Error& error) {
  recorder_.end(call.number, Record::State::failed);
  abort({or_no_memory([&] { return here(error, brief(call) + ": "); }), false, static_cast<int64_t>(call.number)});
  if (hooks_.failed) hooks_.failed();
}

// Prefixes the text of an error with the name of this rank and `what`.
Error Communicator::here(const Error& error, const std::string& what) const {
  return {error.kind, name_of(rank_) + ": " + what + error.what(), error.ranks, error.waiting_for};
}

void Communicator::waits(const Signature& call, double waited_s) {
  stuck_ = call.number;
  if (hooks_.failed) hooks_.failed();  // wakes the thread that calls stuck()
  if (waited_s >= first_notice_s) say(in_group() + brief(call) + " has not ended on the device for " + seconds_text(waited_s));
}

// Prints a line for the user.
void Communicator::say(const std::string& text) const {
  if (hooks_.notice) hooks_.notice("mscomm: rank " + std::to_string(in_job(rank_)) + ": " + text);
}

// Runs `part` and then completes `work`. `part` runs a started call, or throws if a started message has failed. The worker thread
// and the mailbox's thread use this function. It does not throw, because an exception that escaped from one of these threads
// would end the process. message: nullptr for a call.
void Communicator::complete(Work& work, const Transfer* message, const std::function<void()>& part) {
  std::optional<Error> failure;
  try {
    part();
  } catch (const Error& error) {
    failure = or_no_memory([&] { return error; });
  } catch (...) {
    // Most likely, the memory for an Error that describes the failure could not be allocated.
    failure = or_no_memory([this] {
      return Error("Error", "a call or message in the background of " + name_of(rank_) + " failed: out of memory?");
    });
    abort({*failure, false});
  }
  const bool failed = failure.has_value();
  leave_caller(failed ? 0 : work.number());
  // Call leave_caller() first. As soon as the work has completed, a thread that waits for the work may call close(), and close()
  // breaks the group if the group still has a caller.
  work.end(std::move(failure), message && !failed ? std::optional(message->matched()) : std::nullopt);
  if (failed && hooks_.failed) hooks_.failed();
}

// The main function of the worker thread. It never calls into Python, because such a call might never return while the process is
// exiting.
void Communicator::work() {
  worker_thread = true;
  std::unique_lock turn(turn_mutex_);
  while (true) {
    rest(turn);
    if (jobs_.empty()) return;
    run_queued(turn, nullptr, nullptr);
  }
}

// Returns whether a thread may begin the first queued call. Before its turn it may not, because a call with a lower, reserved
// number may still be started. If the call must fail, execute() throws the error. The caller holds turn_mutex_.
bool Communicator::can_begin() const {
  if (jobs_.empty()) return false;
  const Job& first = jobs_.front();
  return first.work->number_ == running_ || broken() || first.deadline.passed();
}

// Lets the worker thread sleep until it must run queued calls or must end.
void Communicator::rest(std::unique_lock<std::mutex>& turn) {
  const auto sleep = [&](double seconds) { job_->wait_for(turn, std::chrono::duration<double>(seconds)); };
  while (serving_ || !stopping_) {
    const bool ready = !serving_ && can_begin();
    const double age_s = ready ? seconds_since(jobs_.front().deadline.start()) : 0;
    if (ready && (hurry_ || in_queue_ > 0 || age_s >= grace_s)) return;
    if (ready) {
      sleep(grace_s - age_s);
    } else if (!serving_ && !jobs_.empty()) {
      sleep(longest_sleep_ms * 1e-3);
    } else if (waited_ && seconds_since(last_start_) < linger_s) {
      sleep(tick_s);
    } else {
      asleep_ = true;
      job_->wait(turn);
      asleep_ = false;
    }
  }
}

// Runs queued calls on this thread: all of them or, if `last` is given, those up to the call of `last`. Stops at a call that may
// not begin yet. The caller holds turn_mutex_, which is released during the calls. patience: nullptr on the worker thread.
void Communicator::run_queued(std::unique_lock<std::mutex>& turn, const Work* last, Patience* patience) {
  serving_ = true;
  for (bool goes_on = true; goes_on && can_begin();) {
    waited_ = patience != nullptr;
    const Job job = std::move(jobs_.front());
    jobs_.pop_front();
    const bool its_turn = running_ == job.work->number();
    turn.unlock();
    {
      const Inside inside(*this, job.work->number());
      Watch& watch = patience ? static_cast<Watch&>(*patience) : *this;
      const auto part = [&] { execute(job.call, job.deadline, its_turn, watch); };
      complete(*job.work, nullptr, std::ref(part));  // a reference, because a copy might need memory
    }
    goes_on = job.work.get() != last && !(patience && patience->raised());
    turn.lock();
  }
  serving_ = false;
  hurry_ = !jobs_.empty() && (hurry_ || (last && !last->done()));
  if (!jobs_.empty() || stopping_) job_->notify_one();
}

void Communicator::run_queued(const Work& work) {
  if (work.done()) return;
  check_no_handler(work.number());
  std::unique_lock turn(turn_mutex_);
  // A binary search: a thread that waits for thousands of calls in turn looks for each of them here.
  const auto job = std::ranges::lower_bound(jobs_, work.number(), {}, [](const Job& one) { return one.work->number(); });
  if (job == jobs_.end() || job->work.get() != &work) return;
  if (serving_) {
    hurry_ = true;
    return;
  }
  Patience patience(*this);
  run_queued(turn, &work, &patience);
  turn.unlock();
  patience.rethrow();
}

void Communicator::hurry() {
  {
    const std::lock_guard lock(turn_mutex_);
    if (jobs_.empty()) return;
    hurry_ = true;
  }
  job_->notify_one();
}

bool Communicator::wait(Work& work, std::optional<double> timeout_s) {
  const double sleep_s = std::min(timeout_s.value_or(longest_sleep_ms * 1e-3), longest_sleep_ms * 1e-3);
  if (const Transfer* transfer = work.transfer_.get()) {
    mailbox_.help(*transfer, sleep_s);
    return work.wait(transfer->done() ? sleep_s : 0);
  }
  // A thread that runs a call cannot leave it when timeout_s has passed.
  if (timeout_s) hurry();
  else run_queued(work);
  return work.wait(sleep_s);
}

// Runs one call. If the call fails, breaks the group, and throws the first cause of the group's failure.
void Communicator::execute(const Call& call, const Deadline& deadline, bool its_turn, Watch& watch) {
  try {
    if (!its_turn) queue_for(call.signature, deadline, watch);
    recorder_.begin(call.signature);
    next_notice_s_ = first_notice_s;
    backend_of(call).run(call, {watch, deadline});
    // Over the mesh, or if the cause is known before the next call: peers may have given up on this call.
    if (broken()) throw_failure();
  } catch (...) {
    fail(&call, "");
  }
  if (!call.stream) recorder_.done(call.signature.number);
}

void Communicator::queue_for(const Signature& call, const Deadline& deadline, Watch& watch) {
  struct Here {
    explicit Here(std::atomic<int>& count) : count(count) { count++; }
    ~Here() { count--; }
    std::atomic<int>& count;
  } const here(in_queue_);
  hurry();
  const uint64_t number = call.number;
  std::unique_lock lock(turn_mutex_);
  while (running_ != number) {
    if (broken()) throw_failure();
    turn_->wait_for(lock, std::chrono::milliseconds(longest_sleep_ms));
    if (running_ == number) break;
    lock.unlock();
    // The error names no missing ranks, because only the running call's thread knows which ranks are missing.
    if (deadline.passed() && !broken())
      throw timed_out(brief(call) + " on " + name_of(rank_), deadline, "waiting for its turn, after " + current());
    watch.look(deadline, {});
    lock.lock();
  }
}

// Returns the failure that the current exception is for the group. If a signal handler has thrown it, sets `interrupted`. Must be
// called in a catch block. call, message: as for fail().
Failure Communicator::describe(const Call* call, const std::string& message, std::exception_ptr& interrupted) const {
  const auto what = [&] { return (call ? brief(call->signature) : message) + ": "; };
  const int64_t number = call ? static_cast<int64_t>(call->signature.number) : -1;
  try {
    throw;
  } catch (const Differs& differs) {
    return {differing(differs), false, number_of(differs)};
  } catch (const Error& cause) {
    // An error of the kind "Error" comes from the system or from a vendor's library. Such an error, like most errors of a call
    // on a device, does not name the rank and the call yet.
    const bool is_whole = call && !call->stream && cause.kind != "Error";
    return {is_whole ? cause : here(cause, call ? what() : ""), false, number};
  } catch (const std::bad_alloc&) {
    return {call ? Error("MemoryError", current() + ": out of memory on rank " + std::to_string(in_job(rank_)))
                 : here(Error("MemoryError", "out of memory"), what()),
            false, number};
  } catch (const Interrupted& signal) {
    // A signal handler has raised a Python exception. The caller gets this exception unchanged; the peers get Aborted.
    interrupted = signal.cause;
    const std::string where = call ? " was interrupted in " + current() : ": interrupted in " + message;
    return {Error("Aborted", name_of(rank_) + where, {in_job(rank_)}), false, number};
  } catch (const std::exception& cause) {
    return {here(Error("Error", cause.what()), what()), false, number};
  }
}

// Breaks the group after a call or a message has failed. Must be called in a catch block. Throws the first cause of the group's
// failure, or the exception that a signal handler has thrown. If a message has failed, `call` is nullptr, and `message` describes
// the message.
void Communicator::fail(const Call* call, const std::string& message) {
  std::exception_ptr interrupted;
  Failure failure{no_memory, false, call ? static_cast<int64_t>(call->signature.number) : -1};
  try {
    failure = describe(call, message, interrupted);
  } catch (const std::bad_alloc&) {  // break the group nevertheless
  }
  if (call) break_off(*call, std::move(failure));
  else abort(std::move(failure));
  if (interrupted) std::rethrow_exception(interrupted);
  throw_failure();
}

// Breaks the group because of an error in a call, and makes the call's arrays inaccessible to the other ranks.
void Communicator::break_off(const Call& call, Failure failure) {
  const uint64_t number = call.signature.number;
  recorder_.end(number, Record::State::failed);
  const bool was_running = [&] {
    const std::lock_guard lock(turn_mutex_);
    return running_ == number;
  }();
  abort(std::move(failure));
  try {
    if (was_running) backend_of(call).withdraw(call);
  } catch (const std::exception& cause) {
    // Print this error instead of throwing it, because the caller must get the error that made the call fail.
    say(brief(call.signature) + " failed, but ranks that are stopped in it may still write to its arrays later: " + cause.what() +
        ". Use new arrays.");
  }
}

void Communicator::throw_failure() const {
  const std::lock_guard lock(state_mutex_);
  if (!failure_) throw Error("RuntimeError", "group " + group_ + " was released");
  throw failure_->error;
}

void Communicator::abort(Failure failure) {
  if (forked_) return;
  const std::lock_guard lock(state_mutex_);
  if (closed_ || (failure_ && (failure_->is_verdict || !failure.is_verdict))) return;
  failure_.emplace(std::move(failure));
  broken_ = true;
  backend_->shut_down();
  if (device_) device_->shut_down();
  mailbox_.shut_down();
  for (const auto& [number, work] : std::exchange(on_device_, {})) work->end(or_no_memory([this] { return failure_->error; }));
}

void Communicator::left(int rank) {
  const std::lock_guard lock(state_mutex_);
  for (int i = 0; i < size(); i++)
    if (in_job(i) == rank) left_[i] = true;
}

Where Communicator::where() const {
  const auto last = recorder_.last();
  if (!last) return {0, false, "has made no call yet" + in_messages()};
  static constexpr const char* words[] = {"is in ", "has ended ", "gave up in "};
  const auto& [signature, state] = *last;
  return {signature.number, state != Record::State::done, words[static_cast<int>(state)] + signature.text() + in_messages()};
}

std::optional<Failure> Communicator::failure() const {
  const std::lock_guard lock(state_mutex_);
  return failure_;
}

void Communicator::last_look() {
  if (forked_) return;
  const std::lock_guard turn(turn_mutex_);  // no call begins while this thread holds turn_mutex_
  // If another thread is in a call, that thread is using the links, and compares the peers' headers itself.
  if (broken() || callers_ > 0) return;
  try {
    return backend_->last_look();
  } catch (const Differs& differs) {
    abort({or_no_memory([&] { return differing(differs); }), false, number_of(differs)});
  } catch (Error& error) {
    const auto last = recorder_.last();
    abort({std::move(error), false, static_cast<int64_t>(last ? last->first.number : 0)});
  }
  throw_failure();
}

void Communicator::drain() const {
  while (!forked_ && device_ && device_->pending() > 0 && !broken()) {
    if (hooks_.interrupt) hooks_.interrupt();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void Communicator::close() {
  if (forked_) return;
  std::unique_lock turn(turn_mutex_);
  if (callers_ > 0) {
    turn.unlock();
    abort({or_no_memory([this] {
             return Error("Aborted",
                          name_of(rank_) + " released the group while a call or a message was running, after " + current(),
                          {in_job(rank_)});
           }),
           false});
    turn.lock();
    // The group is now broken, so each caller's call ends with an error when the caller next wakes up. The wait has a limit,
    // because close() may run in a signal handler that has interrupted a call. In that case, this thread is itself a caller, and
    // callers_ never becomes 0.
    if (!turn_->wait_for(turn, std::chrono::seconds(5), [this] { return callers_ == 0; }))
      throw Error("RuntimeError", "release: a call is still running on this group");
  }
  const bool whole = !broken();
  {
    const std::lock_guard lock(state_mutex_);
    if (closed_) return;
    closed_ = true;
    broken_ = true;  // so that later calls throw an error saying that the group was released
  }
  turn.unlock();
  if (worker_) stop_worker();
  if (whole) backend_->close();
  if (device_) device_->close();
  mailbox_.close(delivery_s);
}

void Communicator::interrupt() const {
  if (!hooks_.interrupt) return;
  try {
    hooks_.interrupt();
  } catch (...) {
    throw Interrupted{std::current_exception()};
  }
}

// Returns the error for a call or a message that waited too long. state: what the call or message was waiting for.
Error Communicator::timed_out(const std::string& what, const Deadline& deadline, const std::string& state,
                              const std::vector<int>& ranks) const {
  const std::string text = what + " did not end within " + seconds_text(deadline.timeout_s()) + ": " + state;
  return {"CollectiveTimeout", text, {}, in_job(ranks)};
}

void Communicator::look(const Deadline& deadline, const Missing& missing) {
  look_at_group(deadline, missing);
  if (!worker_thread) interrupt();
}

void Communicator::look_at_group(const Deadline& deadline, const Missing& missing) {
  if (broken()) throw_failure();
  const std::vector<int> ranks = missing();
  if (deadline.passed()) throw timed_out(current(), deadline, "waiting for " + named(ranks), ranks);
  look_for_the_dead(ranks, missing);
  const double waited_s = seconds_since(deadline.start());
  // A call that is waiting for its turn has no missing ranks and prints no notice. The running call prints the notice.
  if (!ranks.empty() && waited_s >= next_notice_s_) say_waiting(waited_s, ranks, missing);
}

void Communicator::look_for_the_dead(const std::vector<int>& ranks, const Missing& missing) const {
  // A peer may send its data over a link and then exit. So over links, a peer counts as lost only when its link has ended and all
  // its data has been read. The mesh detects this, so this function does nothing for ranks with a link.
  const auto has_link = [&](int rank) { return !missing.by_memory && missing.linked(rank); };
  for (int rank : ranks) {
    if (has_link(rank)) continue;
    const char* how = gone(rank);
    // Ask again, because the link may have been announced since, before the rank left.
    if (!how || has_link(rank)) continue;
    // Check again, because the rank may have arrived and then exited since `ranks` was computed.
    const std::vector<int> still = missing();
    if (std::ranges::find(still, rank) != still.end())
      // The text is "rank 3 (...) has left the job, but all_reduce #7 (4 MiB) waits for it", or "rank 3 (...) ended, but ...".
      throw peer_lost(in_job(rank), name_of(rank) + how + ", but " + current() + " waits for it");
  }
}

void Communicator::say_waiting(double waited_s, const std::vector<int>& ranks, const Missing& missing) {
  next_notice_s_ = waited_s >= second_notice_s ? waited_s + notice_every_s : second_notice_s;
  if (missing.speaks()) say(in_group() + current() + " has waited " + seconds_text(waited_s) + " for " + named(ranks));
}

Error Communicator::differing(const Differs& differs) const {
  auto calls = differs.calls;
  std::ranges::sort(calls, {}, [](const auto& one) { return one.first; });
  std::vector<std::pair<Signature, std::vector<int>>> kinds;
  for (const auto& [rank, signature] : calls) {
    auto same = std::ranges::find(kinds, signature, [](const auto& kind) { return kind.first; });
    if (same == kinds.end()) same = kinds.insert(kinds.end(), {signature, {}});
    same->second.push_back(in_job(rank));
  }
  std::vector<std::pair<std::string, std::vector<int>>> callers;
  for (const auto& [signature, ranks] : kinds) callers.emplace_back(signature.text(), ranks);
  return mismatch("the ranks of group " + group_, callers);
}

std::string Communicator::current() const {
  const auto last = recorder_.last();
  return last ? brief(last->first) : "the first call";
}

std::string Communicator::named(const std::vector<int>& ranks) const {
  if (ranks.empty()) return "a rank that stopped while joining the call";
  std::string text;
  for (size_t i = 0; i < ranks.size() && i < 16; i++) text += (i ? ", " : "") + name_of(ranks[i]);
  return ranks.size() > 16 ? text + " and " + std::to_string(ranks.size() - 16) + " more" : text;
}

void Communicator::in_child() {
  for (Communicator* communicator : all) {
    communicator->forked_ = true;
    communicator->backend_->close_descriptors();
    if (communicator->device_) communicator->device_->close_descriptors();
    communicator->mailbox_.close_descriptors();
    for (Descriptor& fd : communicator->peers_->pidfds) fd.close();
    // Leak what belongs to the parent. The worker thread does not exist in the child, and the destructors of the condition
    // variables would wait for the parent's threads. Clear the hook `failed`, because it wakes a thread that only the parent has.
    (void)communicator->worker_.release();
    (void)communicator->turn_.release();
    (void)communicator->job_.release();
    communicator->hooks_.failed = nullptr;
  }
  all_mutex.unlock();
}

}  // namespace mscomm
