// Watches the calls of a group that are on a device, and frees the group at the end.
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
  // The watcher tells an observer what becomes of the calls. The observer may call VendorBackend::shut_down().
  class Observer {
   public:
    virtual ~Observer() = default;
    virtual void ended(uint64_t number) = 0;
    // Called again and again until shut_down() ends the group.
    virtual void failed(const Signature& call, const Error& error) = 0;
    virtual void waits(const Signature& call, double waited_s) = 0;
  };

  Watcher(std::shared_ptr<Runtime> runtime, int device, std::shared_ptr<SharedGroup> group)
      : runtime_(std::move(runtime)), device_(device), group_(std::move(group)) {}

  // The watching thread runs this until finish() or stop() is called.
  void watch();
  void observe(Observer* observer);

  // All functions from here to order() must be called while the device is the thread's current one.
  EventHandle take_event();
  // The group's own stream, for calls that run beside the caller's stream.
  StreamHandle beside();
  // Watches a call that has been enqueued. before: if the call runs on the group's own stream, the event that the call waits for.
  void add(const Signature& call, StreamHandle stream, EventHandle before, const Deadline& deadline);
  // Notes that a graph has captured the call. The call does not run now. It runs each time the graph runs.
  void captured(const Signature& call);
  // After order(), work that is enqueued on the stream waits until the device has ended the call with this number.
  void order(uint64_t number, StreamHandle stream);

  // The number of calls that have not ended.
  size_t pending() const;
  // Makes the watching thread abort the group.
  void abort();
  // Makes the watching thread free the group, and waits until that is done, but no longer than frees_within_s + aborts_within_s.
  void finish();
  // Ends the watching thread. Returns false if the thread hangs in the library.
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
  void give_back(const Pending& call);  // the caller must hold mutex_
  void watch_pending();
  void look_at_pending(std::unique_lock<std::mutex>& lock);
  void free_group(std::unique_lock<std::mutex>& lock);

  const std::shared_ptr<Runtime> runtime_;
  const int device_;
  const std::shared_ptr<SharedGroup> group_;
  StreamHandle beside_ = nullptr;  // made by the first call that needs it

  mutable std::mutex mutex_;  // protects the members below; never held while the library is called
  std::condition_variable changed_;
  std::deque<Pending> pending_;      // in the order of their numbers
  std::vector<EventHandle> events_;  // events that are not in use
  bool aborting_ = false, finishing_ = false, stopping_ = false;
  bool asleep_ = false;      // the thread sleeps until a caller that enqueues wakes it
  bool captured_ = false;    // a graph may contain calls of the group
  Clock::time_point moved_;  // when a call last ended, or was enqueued while none was pending
  bool over_ = false;        // the group has been freed or aborted, or the thread has failed
  bool ended_ = false;       // the thread has ended

  std::mutex telling_;  // protects observer_; held while the observer is called; the observer may take mutex_
  Observer* observer_ = nullptr;
};

}  // namespace mscomm
