// Watches the calls of a group that are on a device, and frees the group in the end.
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
  // Is told what becomes of calls. It may call VendorBackend::shut_down().
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

  // What the watching thread runs, until finish() or stop().
  void watch();
  void observe(Observer* observer);

  // The callers of these have made the device current.
  EventHandle take_event();
  // The stream for calls beside the caller's.
  StreamHandle beside();
  // Watches a call that has been enqueued. before: of a call beside the caller's stream, the event that it waits for.
  void add(const Signature& call, StreamHandle stream, EventHandle before, const Deadline& deadline);
  // A graph contains the call. It will run as often as the graph does, but does not run now.
  void captured(const Signature& call);
  // Makes what is enqueued on the stream from now on wait for that call.
  void order(uint64_t number, StreamHandle stream);

  // How many calls have not ended.
  size_t pending() const;
  // Has the group aborted.
  void abort();
  // Has the group freed, and waits for that.
  void finish();
  // Ends the watching thread. False: it hangs in the library.
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
  void give_back(const Pending& call);  // with mutex_
  void watch_pending();
  void look_at_pending(std::unique_lock<std::mutex>& lock);
  void free_group(std::unique_lock<std::mutex>& lock);

  const std::shared_ptr<Runtime> runtime_;
  const int device_;
  const std::shared_ptr<SharedGroup> group_;
  StreamHandle beside_ = nullptr;  // made by the first call that needs it

  mutable std::mutex mutex_;  // protects what follows; never held while the library is called
  std::condition_variable changed_;
  std::deque<Pending> pending_;      // in the order of their numbers
  std::vector<EventHandle> events_;  // that are not in use
  bool aborting_ = false, finishing_ = false, stopping_ = false;
  bool asleep_ = false;      // the thread looks again only when a caller that enqueues wakes it
  bool captured_ = false;    // a graph may contain calls of the group
  Clock::time_point moved_;  // when a call last ended, or was enqueued while none was pending
  bool over_ = false;        // the library has freed the group
  bool ended_ = false;       // the thread has ended, and has freed the rest

  std::mutex telling_;  // protects observer_, and is held while it is called; the observer may take mutex_ then
  Observer* observer_ = nullptr;
};

}  // namespace mscomm
