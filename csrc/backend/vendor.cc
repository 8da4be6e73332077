#include "backend/vendor.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

namespace mscomm {

namespace {

using namespace std::chrono_literals;

// How often the watching thread looks at the calls on the device: first_look until looks_often_s after something last happened,
// then later_look. It also looks for that long when no call is pending, because waking it costs the next caller a system call.
constexpr auto first_look = 1ms, later_look = 10ms;
constexpr double looks_often_s = 0.1;
// When no call has ended on the device for this long, the ranks compare their calls.
constexpr double compares_after_s = 1;
// How long we wait for the library to free a group, and to abort it.
constexpr double frees_within_s = 5, aborts_within_s = 10;

// For this long the library is asked without a pause whether it has set up a call; a thread that it starts for that takes about
// as long. After that we sleep in between, and each sleep takes 50 us longer than asked for.
constexpr auto asks_at_once = 200us;

// One thread at a time calls the library for a group. An abort waits at most this long for that thread.
constexpr auto call_takes_at_most = 1s;

// A mutex that can be waited for with a time limit. Not std::timed_mutex, which ThreadSanitizer does not understand.
class Turn {
 public:
  void lock() {
    std::unique_lock lock(mutex_);
    free_.wait(lock, [this] { return !taken_; });
    taken_ = true;
  }
  bool try_lock() { return try_lock_for(0s); }
  template <typename Time>
  bool try_lock_for(Time time) {
    std::unique_lock lock(mutex_);
    if (!free_.wait_for(lock, time, [this] { return !taken_; })) return false;
    return taken_ = true;
  }
  void unlock() {
    {
      const std::lock_guard lock(mutex_);
      taken_ = false;
    }
    free_.notify_one();
  }

 private:
  std::mutex mutex_;  // protects taken_
  std::condition_variable free_;
  bool taken_ = false;
};

// One turn for each device of the process, so that several groups enqueue there one after the other. An abort does not take it.
Turn& issuing_on(const Runtime* runtime, int device) {
  static std::mutex mutex;                                                 // protects all
  static auto& all = *new std::map<std::pair<const Runtime*, int>, Turn>;  // never destroyed: a thread left behind may use one
  const std::lock_guard lock(mutex);
  return all[{runtime, device}];
}

// Keeps a group that cannot be freed until the process ends.
void leave_behind(std::unique_ptr<VendorGroup> group) {
  static std::mutex mutex;  // protects left
  static auto& left = *new std::vector<std::unique_ptr<VendorGroup>>;
  const std::lock_guard lock(mutex);
  left.push_back(std::move(group));
}

}  // namespace

std::optional<VendorReduction> reduction_of(const Numbers& library, Dtype dtype, Op op) {
  const auto number = [&](Op one) { return library.operations[static_cast<size_t>(one)]; };
  VendorReduction found{library.types[static_cast<size_t>(dtype)], number(op)};
  if (dtype == Dtype::boolean) {
    const bool any = op == Op::sum || op == Op::max || op == Op::bor;
    const bool all = op == Op::prod || op == Op::min || op == Op::band;
    found = {library.byte, any ? number(Op::max) : all ? number(Op::min) : -1};
  } else if (dtype == Dtype::complex64 || dtype == Dtype::complex128) {
    const Dtype part = dtype == Dtype::complex64 ? Dtype::float32 : Dtype::float64;
    const bool by_parts = op == Op::sum || op == Op::avg;
    found = {library.types[static_cast<size_t>(part)], by_parts ? number(op) : -1, 2};
  }
  return found.type < 0 || found.op < 0 ? std::nullopt : std::optional(found);
}

Batch::Batch(VendorGroup& group) : group_(group) { group_.begin_batch(); }

void Batch::end() {
  ended_ = true;
  group_.end_batch();
}

Batch::~Batch() {
  if (ended_) return;
  try {
    group_.end_batch();
  } catch (const Error&) {
    // The error that has ended the batch early is the one to report.
  }
}

class VendorBackend::State : public std::enable_shared_from_this<State> {
 public:
  State(std::shared_ptr<Vendor> vendor, std::shared_ptr<Runtime> runtime, int device, int size, int rank)
      : vendor_(std::move(vendor)),
        runtime_(std::move(runtime)),
        device_(device),
        size_(static_cast<size_t>(size)),
        rank_(static_cast<size_t>(rank)),
        issuing_(issuing_on(runtime_.get(), device)) {}

  void join(const std::string& id, const Deadline& deadline, const std::function<void()>& check);
  void run(const Call& call, const Wait& wait);
  void order(uint64_t number, StreamHandle stream);
  void pack(const Packing& packing, StreamHandle stream);
  void clear(void* memory, size_t bytes, StreamHandle stream) {
    const Runtime::Current current(*runtime_, device_);
    if (bytes) runtime_->clear(memory, bytes, stream);
  }
  bool converts(Dtype part, Dtype bucket) const { return runtime_->converts(device_, part, bucket); }
  std::string refuses(Dtype dtype, Op op) const { return vendor_->refuses(dtype, op); }

  mutable std::mutex mutex_;  // protects what follows; never held while the library is called
  std::condition_variable changed_;
  struct Pending {
    Signature call;
    StreamHandle stream;
    EventHandle event;
    EventHandle before;  // of a call beside the caller's stream: what the call waits for
    Deadline deadline;
    double next_notice_s = compares_after_s;
  };
  std::deque<Pending> pending_;      // in the order of their numbers
  std::vector<EventHandle> events_;  // that are not in use
  bool aborting_ = false, finishing_ = false, stopping_ = false;
  bool asleep_ = false;      // the thread looks again only when a caller that enqueues wakes it
  bool captured_ = false;    // a graph may contain calls of the group
  Clock::time_point moved_;  // when a call last ended, or was enqueued while none was pending
  bool over_ = false;        // the library has freed the group
  bool ended_ = false;       // the thread has ended, and has freed the rest
  std::unique_ptr<std::thread> thread_;

  std::mutex telling_;  // protects observer_, and is held while it is called; the observer may take mutex_ then
  Observer* observer_ = nullptr;

 private:
  template <typename Words>
  void tell(const Words& words) {
    const std::lock_guard lock(telling_);
    if (observer_) words(*observer_);
  }
  // Calls the library for the group; throws if the group was aborted.
  template <typename Question>
  auto ask(const Question& question) {
    const std::lock_guard lock(calling_);
    if (!group_ || aborted_) throw Error("Aborted", "the group was aborted");
    return question(*group_);
  }
  static Missing nobody() {
    return {[] { return std::vector<int>{}; }, false};
  }
  void take(std::unique_lock<Turn>& issuing, const Wait& wait);
  void settle(std::unique_lock<Turn>& issuing, const Wait& wait);
  void enqueue(const Call& call, StreamHandle stream);
  void exchange(const Call& call, StreamHandle stream);
  EventHandle take_event();
  void give_back(const Pending& call) {  // with mutex_
    for (const EventHandle event : {call.event, call.before}) {
      if (!event) continue;
      if (runtime_->events_can_be_used_again()) events_.push_back(event);
      else runtime_->destroy_event(event);
    }
  }
  void watch();
  void watch_pending();
  void look_at_pending(std::unique_lock<std::mutex>& lock);
  void free_group(std::unique_lock<std::mutex>& lock, void (State::*free)());
  void abort_group();
  void finish_group();

  const std::shared_ptr<Vendor> vendor_;
  const std::shared_ptr<Runtime> runtime_;
  const int device_;
  const size_t size_, rank_;
  Turn& issuing_;
  Turn calling_;  // protects group_: one thread at a time calls the library for it
  std::unique_ptr<VendorGroup> group_;
  std::atomic<bool> aborted_{false};  // group_ was aborted while a caller was inside it
  StreamHandle beside_ = nullptr;     // the stream for calls beside the caller's; made by the first of them
};

void VendorBackend::State::join(const std::string& id, const Deadline& deadline, const std::function<void()>& check) {
  const Runtime::Current current(*runtime_, device_);
  group_ = vendor_->join(id, static_cast<int>(size_), static_cast<int>(rank_), runtime_, device_);
  auto pause = 100us;
  while (group_->busy()) {
    check();
    if (deadline.passed())
      throw Error("CollectiveTimeout", std::string(vendor_->name()) + " " + vendor_->version() +
                                           ": the ranks did not connect their devices within " +
                                           seconds_text(deadline.timeout_s()));
    std::this_thread::sleep_for(pause);
    pause = std::min<std::chrono::microseconds>(2 * pause, 50ms);
  }
  thread_ = std::make_unique<std::thread>([self = shared_from_this()] { self->watch(); });
}

void VendorBackend::State::run(const Call& call, const Wait& wait) {
  const Runtime::Current current(*runtime_, device_);
  std::unique_lock issuing(issuing_, std::defer_lock);
  take(issuing, wait);

  StreamHandle stream = *call.stream;
  const bool captured = runtime_->captures(stream);
  EventHandle before = nullptr;
  if (call.beside && !captured) {
    if (!beside_) beside_ = runtime_->make_stream();
    before = take_event();
    runtime_->record(before, stream);
    runtime_->wait(beside_, before);
    stream = beside_;
  }
  if (call.bytes() || !call.counts.empty()) {
    enqueue(call, stream);
    settle(issuing, wait);
  }
  if (captured) {  // the call will run as often as the graph does, but does not run now
    {
      const std::lock_guard lock(mutex_);
      captured_ = true;
    }
    tell([&](Observer& observer) { observer.ended(call.signature.number); });
    return;
  }
  const EventHandle event = take_event();
  runtime_->record(event, stream);
  {
    const std::lock_guard lock(mutex_);
    if (pending_.empty()) moved_ = Clock::now();
    pending_.push_back({call.signature, stream, event, before, wait.deadline});
    if (!asleep_) return;
    asleep_ = false;
  }
  changed_.notify_all();
}

void VendorBackend::State::take(std::unique_lock<Turn>& issuing, const Wait& wait) {
  while (!issuing.try_lock_for(std::chrono::milliseconds(longest_sleep_ms))) {
    if (wait.deadline.passed())
      throw Error("CollectiveTimeout", "it could not be enqueued within " + seconds_text(wait.deadline.timeout_s()) +
                                           ": another call on this device is being enqueued");
    wait.look(nobody());
  }
}

// Waits until the library has set up what was enqueued. In the first call of a kind it may connect to other ranks, which may be
// in a call of another group before. So the device's turn is released meanwhile.
void VendorBackend::State::settle(std::unique_lock<Turn>& issuing, const Wait& wait) {
  auto pause = 20us;
  std::optional<Clock::time_point> asked;
  while (ask([](VendorGroup& group) { return group.busy(); })) {
    if (!asked) asked = Clock::now();
    if (Clock::now() - *asked < asks_at_once) {
      if (issuing) issuing.unlock();
      std::this_thread::yield();
      continue;
    }
    if (wait.deadline.passed())
      throw Error("CollectiveTimeout", "it could not be enqueued within " + seconds_text(wait.deadline.timeout_s()) + ": " +
                                           std::string(vendor_->name()) + " waits for other ranks");
    if (issuing) issuing.unlock();
    wait.look(nobody());
    std::this_thread::sleep_for(pause);
    pause = std::min<std::chrono::microseconds>(2 * pause, 10ms);
  }
  if (!issuing) take(issuing, wait);
}

void VendorBackend::State::enqueue(const Call& call, StreamHandle stream) {
  const Signature& signature = call.signature;
  const uint64_t count = signature.count;
  const Dtype dtype = signature.dtype;
  const Op op = signature.op;
  if (reduces(signature.what))
    if (const std::string why = vendor_->refuses(dtype, op); !why.empty()) throw Error("ValueError", why);
  switch (signature.what) {
    case Collective::all_reduce:
      return ask([&](VendorGroup& group) { group.all_reduce(call.x, call.out, count, dtype, op, stream); });
    case Collective::reduce:
      return ask([&](VendorGroup& group) { group.reduce(call.x, call.out, count, dtype, op, signature.root, stream); });
    case Collective::broadcast: {
      const void* const x = static_cast<size_t>(signature.root) == rank_ ? call.x : call.out;
      return ask([&](VendorGroup& group) { group.broadcast(x, call.out, call.bytes(), signature.root, stream); });
    }
    case Collective::reduce_scatter:
      if (call.counts.empty())
        return ask([&](VendorGroup& group) { group.reduce_scatter(call.x, call.out, count / size_, dtype, op, stream); });
      return ask([&](VendorGroup& group) {
        Batch batch(group);
        const char* part = call.in();
        for (size_t rank = 0; rank < size_; rank++) {
          void* const out = rank == rank_ ? call.out : nullptr;
          if (call.counts[rank]) group.reduce(part, out, call.counts[rank], dtype, op, static_cast<int>(rank), stream);
          part += call.counts[rank] * call.element_bytes();
        }
        batch.end();
      });
    case Collective::all_gather:
      if (call.counts.empty()) return ask([&](VendorGroup& group) { group.all_gather(call.x, call.out, call.bytes(), stream); });
      return exchange(call, stream);
    case Collective::gather:
    case Collective::scatter:
    case Collective::all_to_all:
      return exchange(call, stream);
    case Collective::barrier:
      throw Error("Error", "a barrier has no array, and is the CPU's");
    case Collective::scan:
    case Collective::exscan:
      throw Error("Error", "a scan is the CPU's: no vendor's library has one");
  }
}

// The collectives that only move data: each rank sends and receives parts.
void VendorBackend::State::exchange(const Call& call, StreamHandle stream) {
  const Collective what = call.signature.what;
  const size_t element = call.element_bytes();
  const auto root = static_cast<size_t>(call.signature.root);
  const bool divides = what == Collective::scatter || what == Collective::all_to_all;
  // Bytes from one rank to another.
  const auto bytes = [&](size_t from, size_t to) {
    if ((what == Collective::gather && to != root) || (what == Collective::scatter && from != root)) return size_t{0};
    if (call.counts.empty()) return call.bytes() / (divides ? size_ : 1);
    const size_t which = what == Collective::all_to_all ? from * size_ + to : what == Collective::scatter ? to : from;
    return call.counts[which] * element;
  };
  const char* x = call.in();
  char* out = call.result();
  if (what == Collective::all_to_all && x < out + call.out_bytes && out < x + call.x_bytes)
    throw Error("ValueError", "all_to_all on a device: x and out overlap");
  std::vector<Part> parts;
  for (size_t peer = 0; peer < size_; peer++) {
    const size_t sent = bytes(rank_, peer), received = bytes(peer, rank_);
    if (peer == rank_) {
      if (sent && x != out) runtime_->copy(out, x, sent, stream);
    } else {
      // A part to send is only read.
      if (sent) parts.push_back({true, static_cast<int>(peer), const_cast<char*>(x), sent});
      if (received) parts.push_back({false, static_cast<int>(peer), out, received});
    }
    if (divides) x += sent;
    out += received;
  }
  if (!parts.empty()) ask([&](VendorGroup& group) { group.exchange(parts, stream); });
}

EventHandle VendorBackend::State::take_event() {
  {
    const std::lock_guard lock(mutex_);
    if (!events_.empty()) {
      const EventHandle event = events_.back();
      events_.pop_back();
      return event;
    }
  }
  return runtime_->make_event();
}

void VendorBackend::State::order(uint64_t number, StreamHandle stream) {
  const Runtime::Current current(*runtime_, device_);
  const std::lock_guard lock(mutex_);  // the event must not be reused meanwhile
  for (const Pending& one : pending_)
    if (one.call.number == number) return runtime_->wait(stream, one.event);
}

void VendorBackend::State::pack(const Packing& packing, StreamHandle stream) {
  const Runtime::Current current(*runtime_, device_);
  if (runtime_->pack(packing, stream)) return;
  if (!packing.plain()) {
    const std::string dtype(name(packing.dtype)), bucket(name(packing.bucket_dtype));
    throw Error("RuntimeError",
                (packing.packs ? "pack" : "unpack") + std::string(": no kernel on device ") + std::to_string(device_) +
                    " scales or casts between " + dtype + " parts and a " + bucket +
                    " bucket like these, and copies cannot. Ask Group.packs before. Kernels: " + runtime_->kernels(device_));
  }
  const size_t element = size_of(packing.dtype);
  for (const Packing::Part& part : packing.parts) {
    void* const place = static_cast<char*>(packing.bucket) + part.begin * element;
    if (part.count)
      runtime_->copy(packing.packs ? place : part.data, packing.packs ? part.data : place, part.count * element, stream);
  }
}

// The watching thread. An error that ends it early must end the group, because nobody else would see a failure.
void VendorBackend::State::watch() {
  try {
    const Runtime::Current current(*runtime_, device_);
    runtime_->leave_captures_alone();
    watch_pending();
  } catch (const std::exception& error) {
    const Error cause("Error", std::string("the thread that watches the device has failed: ") + error.what());
    tell([&](Observer& observer) { observer.failed({}, cause); });
  }
  const std::lock_guard lock(mutex_);
  over_ = ended_ = true;
  changed_.notify_all();
}

void VendorBackend::State::watch_pending() {
  std::unique_lock lock(mutex_);
  while (!stopping_ && !finishing_) {
    if (aborting_ && !over_) {
      free_group(lock, &State::abort_group);
    } else if (pending_.empty() && seconds_since(moved_) >= looks_often_s) {
      asleep_ = true;
      changed_.wait(lock);
      asleep_ = false;
    } else {
      if (!pending_.empty()) look_at_pending(lock);
      if ((aborting_ && !over_) || finishing_ || stopping_) continue;
      changed_.wait_for(lock, seconds_since(moved_) < looks_often_s ? first_look : later_look);
    }
  }
  if (!over_) free_group(lock, finishing_ && !aborting_ ? &State::finish_group : &State::abort_group);
  for (const Pending& one : std::exchange(pending_, {})) give_back(one);
  for (const EventHandle event : std::exchange(events_, {})) runtime_->destroy_event(event);
  if (beside_) runtime_->destroy_stream(std::exchange(beside_, nullptr));
}

void VendorBackend::State::free_group(std::unique_lock<std::mutex>& lock, void (State::*free)()) {
  lock.unlock();
  (this->*free)();
  lock.lock();
  for (const Pending& one : std::exchange(pending_, {})) give_back(one);
  over_ = true;
}

// Tells the observer which calls have ended, which have failed and which are late.
void VendorBackend::State::look_at_pending(std::unique_lock<std::mutex>& lock) {
  std::vector<uint64_t> ended;
  std::vector<std::pair<Signature, double>> waiting;
  std::optional<std::pair<Signature, Error>> failed;
  try {
    // Calls on one stream end in order, but calls on different streams may overtake each other.
    std::vector<StreamHandle> behind;
    for (auto one = pending_.begin(); one != pending_.end();) {
      if (std::find(behind.begin(), behind.end(), one->stream) != behind.end()) {
        ++one;
      } else if (runtime_->passed(one->event)) {
        ended.push_back(one->call.number);
        give_back(*one);
        one = pending_.erase(one);
        moved_ = Clock::now();
      } else {
        behind.push_back(one->stream);
        ++one;
      }
    }
    // A program may be far ahead of its device, so the timeout counts from when a call last ended.
    const double still_s = seconds_since(moved_);
    for (const Pending& one : pending_)
      if (!failed && still_s >= one.deadline.timeout_s())
        failed = {one.call, Error("CollectiveTimeout", "it was enqueued, but the device has not ended it within " +
                                                           seconds_text(one.deadline.timeout_s()))};
    if (!pending_.empty() && still_s >= pending_.front().next_notice_s) {
      double& next = pending_.front().next_notice_s;
      next = still_s >= second_notice_s ? still_s + notice_every_s : still_s >= first_notice_s ? second_notice_s : first_notice_s;
      waiting.emplace_back(pending_.front().call, still_s);
    }
  } catch (const Error& error) {
    failed = {pending_.front().call, error};
  }
  const Signature oldest = pending_.empty() ? Signature{} : pending_.front().call;
  const bool some_left = !pending_.empty();
  lock.unlock();
  if (some_left && !failed) {
    try {
      // A caller that is in the library now finds the error itself.
      if (const std::unique_lock calling(calling_, std::try_to_lock); calling && group_) (void)group_->busy();
    } catch (const Error& error) {
      failed = {oldest, error};
    }
  }
  tell([&](Observer& observer) {
    for (const uint64_t number : ended) observer.ended(number);
    for (const auto& [call, waited_s] : waiting) observer.waits(call, waited_s);
    if (failed) observer.failed(failed->first, failed->second);
  });
  lock.lock();
}

void VendorBackend::State::abort_group() {
  std::unique_ptr<VendorGroup> group;
  {
    // A caller is inside the library for microseconds, unless the library hangs; then this abort makes it return.
    std::unique_lock calling(calling_, call_takes_at_most);
    if (!calling) {
      aborted_ = true;
      if (group_) group_->abort(true);
      return;
    }
    group = std::move(group_);
  }
  if (group) group->abort(false);
}

void VendorBackend::State::finish_group() {
  const std::lock_guard calling(calling_);
  if (!group_) return;
  if (captured_) {
    // The library would wait for the graph to be destroyed.
    leave_behind(std::move(group_));
    return;
  }
  try {
    group_->finish();
    const Deadline deadline(frees_within_s);
    while (group_->busy() && !deadline.passed()) std::this_thread::sleep_for(1ms);
    if (deadline.passed()) group_->abort(false);
  } catch (const Error&) {
    group_->abort(false);  // another rank did not end well, which its own calls and the hub report
  }
  group_.reset();
}

// -- the backend

VendorBackend::VendorBackend(std::shared_ptr<Vendor> vendor, std::shared_ptr<Runtime> runtime, int device, const std::string& id,
                             int size, int rank, const Deadline& deadline, const std::function<void()>& check)
    : state_(std::make_shared<State>(std::move(vendor), std::move(runtime), device, size, rank)) {
  state_->join(id, deadline, check);
}

VendorBackend::~VendorBackend() {
  if (!state_->thread_) return;  // in a forked child
  observe(nullptr);
  std::unique_lock lock(state_->mutex_);
  state_->stopping_ = true;
  state_->changed_.notify_all();
  const bool ended =
      state_->changed_.wait_for(lock, std::chrono::duration<double>(aborts_within_s), [this] { return state_->ended_; });
  const std::unique_ptr<std::thread> thread = std::move(state_->thread_);
  lock.unlock();
  if (ended) thread->join();
  else thread->detach();  // it is inside the library, and shares ownership of what it uses
}

void VendorBackend::observe(Observer* observer) {
  const std::lock_guard lock(state_->telling_);
  state_->observer_ = observer;
}

void VendorBackend::run(const Call& call, const Wait& wait) { state_->run(call, wait); }

void VendorBackend::order(uint64_t number, StreamHandle stream) { state_->order(number, stream); }

void VendorBackend::pack(const Packing& packing, StreamHandle stream) { state_->pack(packing, stream); }
void VendorBackend::clear(void* memory, size_t bytes, StreamHandle stream) { state_->clear(memory, bytes, stream); }

bool VendorBackend::converts(Dtype part, Dtype bucket) const { return state_->converts(part, bucket); }

std::string VendorBackend::refuses(Dtype dtype, Op op) const { return state_->refuses(dtype, op); }

size_t VendorBackend::pending() const {
  const std::lock_guard lock(state_->mutex_);
  return state_->pending_.size();
}

void VendorBackend::shut_down() {
  {
    const std::lock_guard lock(state_->mutex_);
    state_->aborting_ = true;
  }
  state_->changed_.notify_all();
}

void VendorBackend::close() {
  std::unique_lock lock(state_->mutex_);
  state_->finishing_ = true;
  state_->changed_.notify_all();
  state_->changed_.wait_for(lock, std::chrono::duration<double>(frees_within_s + aborts_within_s),
                            [this] { return state_->ended_; });
}

void VendorBackend::close_descriptors() { (void)state_->thread_.release(); }

}  // namespace mscomm
