// Watches a group's calls that are running on a device, and frees the group at the end.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "backend/shared_group.h"
#include "base/call.h"
#include "base/deadline.h"
#include "base/error.h"
#include "device/runtime.h"

namespace mscomm {

class Watcher {
 public:
  // The watcher notifies an observer when calls complete, fail or take long. The observer may call VendorBackend::shut_down().
  class Observer {
   public:
    virtual ~Observer() = default;
    virtual void ended(uint64_t number) = 0;
    // Called repeatedly until shut_down() ends the group.
    virtual void failed(const Signature& call, const Error& error) = 0;
    virtual void waits(const Signature& call, double waited_s) = 0;
  };

  Watcher(std::shared_ptr<Runtime> runtime, int device, std::shared_ptr<SharedGroup> group)
      : runtime_(std::move(runtime)), device_(device), group_(std::move(group)) {}

  // The watcher thread runs this until finish() or stop() is called.
  void watch();
  void observe(Observer* observer);

  // All functions from here to order() must be called while the device is the thread's current device.
  EventHandle take_event();
  // Returns the group's own stream, for calls that do not run on the caller's stream.
  StreamHandle beside();
  // Watches a call that has been enqueued. before: if the call runs on the group's own stream, the event that the call waits for;
  // otherwise nullptr.
  void add(const Signature& call, StreamHandle stream, EventHandle before, const Deadline& deadline);
  // Records that a graph has captured the call. The call does not run now, but each time the graph runs.
  void captured(const Signature& call);
  // After order(), work that is enqueued on the stream waits until the device has completed the call with this number.
  void order(uint64_t number, StreamHandle stream);

  // Returns the number of calls that have not completed.
  size_t pending() const;
  // Makes the watcher thread abort the group.
  void abort();
  // Makes the watcher thread free the group and end. Waits until the thread has ended, but for at most frees_within_s +
  // aborts_within_s.
  void finish();
  // Ends the watcher thread. Returns false if the thread hangs in the library.
  bool stop();

 private:
  struct Pending {
    Signature call;
    StreamHandle stream;
    EventHandle event, before;
    Deadline deadline;
    double next_notice_s;
  };

  template <typename Words>
  void tell(const Words& words) {
    const std::lock_guard lock(telling_);
    if (observer_) words(*observer_);
  }
  bool end(bool& flag, double within_s);
  void give_back(const Pending& call);  // the caller must hold mutex_
  void watch_pending();
  void look_at_pending(std::unique_lock<std::mutex>& lock);
  void free_group(std::unique_lock<std::mutex>& lock);

  const std::shared_ptr<Runtime> runtime_;
  const int device_;
  const std::shared_ptr<SharedGroup> group_;
  StreamHandle beside_ = nullptr;  // created by the first call that needs it

  mutable std::mutex mutex_;  // protects the fields down to ended_; never held during a call to NCCL or HCCL
  std::condition_variable changed_;
  std::deque<Pending> pending_;      // ordered by number
  std::vector<EventHandle> events_;  // events that are not in use
  bool aborting_ = false, finishing_ = false, stopping_ = false;
  bool asleep_ = false;      // whether the thread sleeps until a caller enqueues a call and wakes it
  bool captured_ = false;    // whether a graph may contain calls of the group
  Clock::time_point moved_;  // when a call last completed, or was enqueued while none was pending
  bool over_ = false;        // whether the group has been freed or aborted, or the thread has failed
  bool ended_ = false;       // whether the thread has ended

  std::mutex telling_;  // protects observer_; held while the observer is called; the observer may take mutex_
  Observer* observer_ = nullptr;
};

}  // namespace mscomm
