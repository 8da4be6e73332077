#include "backend/watcher.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <iterator>
#include <optional>
#include <string>
#include <utility>

#include "net/wait.h"

namespace mscomm {

namespace {

using namespace std::chrono_literals;

// How often the watching thread polls the calls on the device. For looks_often_s seconds after a call completes, or is enqueued
// while none is pending, the thread polls at intervals of first_look. After that, it polls at intervals of later_look or, if no
// call is pending, sleeps until the next call. It does not go to sleep earlier, because waking it costs the next caller a system
// call.
constexpr auto first_look = 1ms, later_look = 10ms;
constexpr double looks_often_s = 0.1;
// If no call has completed on the device for this many seconds, the watcher tells the observer, and the ranks compare their
// calls.
constexpr double compares_after_s = 1;

}  // namespace

bool Watcher::watches() const {
  const std::lock_guard lock(telling_);
  if (failed_) throw *failed_;
  return watches_;
}

void Watcher::observe(Observer* observer) {
  const std::lock_guard lock(telling_);
  observer_ = observer;
  if (observer_ && failed_) observer_->failed({}, *failed_);
}

Watcher::Event Watcher::take_event() {
  EventHandle event = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (events_.empty()) {
      if (runtime_->events_can_be_used_again()) events_.reserve(++made_);
    } else {
      event = events_.back();
      events_.pop_back();
    }
  }
  if (!event) event = runtime_->make_event();
  return {event, [this](EventHandle one) { give_back(one); }};
}

void Watcher::give_back(EventHandle event) noexcept {
  if (runtime_->events_can_be_used_again()) {
    const std::lock_guard lock(mutex_);
    if (!stopping_ && !finishing_) return events_.push_back(event);
  }
  runtime_->destroy_event(event);
}

StreamHandle Watcher::beside() {
  if (!beside_) beside_ = runtime_->make_stream();
  return beside_;
}

void Watcher::add(const Signature& call, StreamHandle stream, Event before, const Deadline& deadline) {
  Event event = take_event();
  runtime_->record(event.get(), stream);
  // Before the lock is taken, because an Event that is destroyed takes it, too.
  Pending pending{call, stream, std::move(event), std::move(before), deadline, compares_after_s};
  {
    const std::lock_guard lock(mutex_);
    if (pending_.empty()) moved_ = Clock::now();
    pending_.push_back(std::move(pending));
    if (!asleep_) return;
    asleep_ = false;
  }
  changed_.notify_all();
}

void Watcher::captured(const Signature& call) {
  {
    const std::lock_guard lock(mutex_);
    captured_ = true;
  }
  tell([&](Observer& observer) { observer.ended(call.number); });
}

void Watcher::order(uint64_t number, StreamHandle stream) {
  Event event;  // while we hold it, it is not reused for another call
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::ranges::find(pending_, number, [](const Pending& one) { return one.call.number; });
    if (found == pending_.end()) return;
    event = found->event;
  }
  runtime_->wait(stream, event.get());
  if (!runtime_->events_can_be_used_again()) keep_until_passed(std::move(event), stream);
}

// Keeps the event until the stream has passed the wait for it, because the event is destroyed when its last holder drops it.
void Watcher::keep_until_passed(Event event, StreamHandle stream) {
  Event behind = take_event();
  runtime_->record(behind.get(), stream);
  std::vector<std::pair<Event, Event>> kept;
  {
    const std::lock_guard lock(mutex_);
    kept.swap(awaited_);
  }
  std::erase_if(kept, [this](const auto& one) { return runtime_->passed(one.second.get()); });
  kept.emplace_back(std::move(event), std::move(behind));
  const std::lock_guard lock(mutex_);
  awaited_.insert(awaited_.end(), std::move_iterator(kept.begin()), std::move_iterator(kept.end()));
}

size_t Watcher::pending() const {
  const std::lock_guard lock(mutex_);
  return pending_.size();
}

void Watcher::abort() {
  const std::lock_guard lock(mutex_);
  aborting_ = true;
  changed_.notify_all();
}

void Watcher::finish() { end(finishing_, frees_within_s + aborts_within_s, true); }
bool Watcher::stop(bool watched) { return end(stopping_, aborts_within_s, watched); }

// Sets the flag, and waits until the threads have ended, for at most within_s. Returns whether they have ended.
bool Watcher::end(bool& flag, double within_s, bool watched) {
  std::unique_lock lock(mutex_);
  flag = true;
  changed_.notify_all();
  return changed_.wait_for(lock, std::chrono::duration<double>(within_s), [&] { return freed_ && (ended_ || !watched); });
}

// The main function of the thread that aborts or frees the group. It calls SharedGroup::finish() if the group has ended without
// an error. Otherwise, it calls SharedGroup::abort().
void Watcher::free_group() {
  std::optional<Runtime::Current> current;
  bool well = false, captured = false;
  try {
    current.emplace(*runtime_, device_);
    runtime_->leave_captures_alone();
  } catch (const std::exception&) {
    // The other thread reports that the device cannot be used. This thread must still abort the group.
  }
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return aborting_ || finishing_ || stopping_; });
    well = finishing_ && !aborting_;
    captured = captured_;
  }
  try {
    if (well) group_->finish(captured);
    else group_->abort();
  } catch (const std::exception&) {
    // There is no memory to keep a captured group. Nobody waits for this group any more, so there is nobody to tell.
  }
  const std::lock_guard lock(mutex_);
  freed_ = true;
  changed_.notify_all();
}

// The main function of the thread that watches the calls. If an error ends it early, the observer must be told, because no other
// thread watches the group. If there is no observer yet, watches() or observe() tells of the error.
void Watcher::watch() {
  try {
    const Runtime::Current current(*runtime_, device_);
    runtime_->leave_captures_alone();
    {
      const std::lock_guard lock(telling_);
      watches_ = true;
    }
    watch_pending();
  } catch (const std::exception& error) {
    const auto cause = [&] {
      return Error("Error", std::string("the thread that watches the device has failed: ") + error.what());
    };
    const std::lock_guard lock(telling_);
    failed_ = or_no_memory(cause);
    if (observer_) observer_->failed({}, *failed_);
  }
  const std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

void Watcher::watch_pending() {
  std::unique_lock lock(mutex_);
  while (!stopping_ && !finishing_) {
    if (aborting_ || (pending_.empty() && seconds_since(moved_) >= looks_often_s)) {
      asleep_ = true;
      changed_.wait(lock);
      asleep_ = false;
    } else {
      if (!pending_.empty()) {
        lock.unlock();
        look_at_pending();
        lock.lock();
      }
      if (aborting_ || finishing_ || stopping_) continue;
      changed_.wait_for(lock, seconds_since(moved_) < looks_often_s ? first_look : later_look);
    }
  }
  changed_.wait(lock, [this] { return freed_; });
  const std::vector<EventHandle> unused = std::exchange(events_, {});
  auto awaited = std::exchange(awaited_, {});
  lock.unlock();
  drop_pending();
  // Leave the events behind for which a stream of the program still waits. It is too late to destroy them later.
  std::erase_if(awaited, [this](const auto& one) { return runtime_->passed(one.second.get()); });
  if (!awaited.empty()) (void)new auto(std::move(awaited));
  for (const EventHandle event : unused) runtime_->destroy_event(event);
  if (beside_) runtime_->destroy_stream(std::exchange(beside_, nullptr));
}

void Watcher::drop_pending() {
  std::deque<Pending> dropped;  // declared before the lock, so that the events are dropped without mutex_
  const std::lock_guard lock(mutex_);
  dropped.swap(pending_);
}

// Tells the observer which calls have completed, which have failed and which are late.
void Watcher::look_at_pending() {
  std::vector<Pending> ended;  // declared before the lock, so that the events are dropped without mutex_
  std::vector<std::pair<Signature, double>> waiting;
  std::optional<std::pair<Signature, Error>> failed;
  std::unique_lock lock(mutex_);
  try {
    // Calls on one stream complete in order, but calls on different streams may overtake each other. `behind` holds the streams
    // whose oldest call has not completed.
    std::vector<StreamHandle> behind;
    for (size_t i = 0; i < pending_.size();) {
      Pending& one = pending_[i];  // stays at its place while the mutex is free: the other threads only append calls
      bool passed = false;
      if (std::find(behind.begin(), behind.end(), one.stream) == behind.end()) {
        lock.unlock();
        passed = runtime_->passed(one.event.get());
        lock.lock();
        if (!passed) behind.push_back(one.stream);
      }
      if (!passed) {
        i++;
        continue;
      }
      ended.push_back(std::move(one));
      pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
      moved_ = Clock::now();
    }
    // A call may be enqueued long before the device reaches it. So its timeout is not measured from when it was enqueued, but
    // from when a call last completed (moved_).
    const double still_s = seconds_since(moved_);
    for (const Pending& one : pending_)
      if (!failed && still_s >= one.deadline.timeout_s())
        failed = {one.call, Error("CollectiveTimeout", "it was enqueued, but did not end on the device within " +
                                                           seconds_text(one.deadline.timeout_s()))};
    if (!pending_.empty() && still_s >= pending_.front().next_notice_s) {
      double& next = pending_.front().next_notice_s;
      next = still_s >= second_notice_s ? still_s + notice_every_s : still_s >= first_notice_s ? second_notice_s : first_notice_s;
      waiting.emplace_back(pending_.front().call, still_s);
    }
  } catch (const Error& error) {
    if (!lock) lock.lock();
    failed = {pending_.front().call, error};
  }
  const Signature oldest = pending_.empty() ? Signature{} : pending_.front().call;
  const bool some_left = !pending_.empty();
  lock.unlock();
  if (some_left && !failed) {
    try {
      group_->look();
    } catch (const Error& error) {
      failed = {oldest, error};
    }
  }
  tell([&](Observer& observer) {
    for (const Pending& one : ended) observer.ended(one.call.number);
    for (const auto& [call, waited_s] : waiting) observer.waits(call, waited_s);
    if (failed) observer.failed(failed->first, failed->second);
  });
}

}  // namespace mscomm
