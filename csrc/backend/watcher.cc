#include "backend/watcher.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "net/wait.h"

namespace mscomm {

namespace {

using namespace std::chrono_literals;

// How often the watcher thread polls the calls on the device. For looks_often_s seconds after a call completes, or is enqueued
// while none is pending, the thread polls at intervals of first_look. After that, it polls at intervals of later_look or, if no
// call is pending, sleeps until the next call. It does not go to sleep earlier, because waking it costs the next caller a system
// call.
constexpr auto first_look = 1ms, later_look = 10ms;
constexpr double looks_often_s = 0.1;
// If no call has completed on the device for this many seconds, the watcher tells the observer, and the ranks compare their
// calls.
constexpr double compares_after_s = 1;

}  // namespace

void Watcher::observe(Observer* observer) {
  const std::lock_guard lock(telling_);
  observer_ = observer;
}

EventHandle Watcher::take_event() {
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

void Watcher::give_back(const Pending& call) {
  for (const EventHandle event : {call.event, call.before}) {
    if (!event) continue;
    if (runtime_->events_can_be_used_again()) events_.push_back(event);
    else runtime_->destroy_event(event);
  }
}

StreamHandle Watcher::beside() {
  if (!beside_) beside_ = runtime_->make_stream();
  return beside_;
}

void Watcher::add(const Signature& call, StreamHandle stream, EventHandle before, const Deadline& deadline) {
  const EventHandle event = take_event();
  runtime_->record(event, stream);
  {
    const std::lock_guard lock(mutex_);
    if (pending_.empty()) moved_ = Clock::now();
    pending_.push_back({call, stream, event, before, deadline, compares_after_s});
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
  const std::lock_guard lock(mutex_);  // keeps the event from being reused for another call
  for (const Pending& one : pending_)
    if (one.call.number == number) return runtime_->wait(stream, one.event);
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

void Watcher::finish() { end(finishing_, frees_within_s + aborts_within_s); }
bool Watcher::stop() { return end(stopping_, aborts_within_s); }

// Sets the flag, and waits until the watcher thread has ended, for at most within_s. Returns whether the thread has ended.
bool Watcher::end(bool& flag, double within_s) {
  std::unique_lock lock(mutex_);
  flag = true;
  changed_.notify_all();
  return changed_.wait_for(lock, std::chrono::duration<double>(within_s), [this] { return ended_; });
}

// The watcher thread's main function. If an error ends watch_pending() early, the observer must be told, because no other thread
// watches the group.
void Watcher::watch() {
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

void Watcher::watch_pending() {
  std::unique_lock lock(mutex_);
  while (!stopping_ && !finishing_) {
    if (aborting_ && !over_) {
      free_group(lock);
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
  if (!over_) free_group(lock);
  for (const Pending& one : std::exchange(pending_, {})) give_back(one);
  for (const EventHandle event : std::exchange(events_, {})) runtime_->destroy_event(event);
  if (beside_) runtime_->destroy_stream(std::exchange(beside_, nullptr));
}

// Frees the group with finish() if the group has ended without an error, and with abort() otherwise.
void Watcher::free_group(std::unique_lock<std::mutex>& lock) {
  const bool well = finishing_ && !aborting_, captured = captured_;
  lock.unlock();
  if (well) group_->finish(captured);
  else group_->abort();
  lock.lock();
  for (const Pending& one : std::exchange(pending_, {})) give_back(one);
  over_ = true;
}

// Tells the observer which calls have completed, which have failed and which are late.
void Watcher::look_at_pending(std::unique_lock<std::mutex>& lock) {
  std::vector<uint64_t> ended;
  std::vector<std::pair<Signature, double>> waiting;
  std::optional<std::pair<Signature, Error>> failed;
  try {
    // Calls on one stream complete in order, but calls on different streams may overtake each other. `behind` holds the streams
    // whose oldest call has not completed.
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
    for (const uint64_t number : ended) observer.ended(number);
    for (const auto& [call, waited_s] : waiting) observer.waits(call, waited_s);
    if (failed) observer.failed(failed->first, failed->second);
  });
  lock.lock();
}

}  // namespace mscomm
