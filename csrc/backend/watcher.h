// Watches a group's calls that are running on a device, and frees the group at the end.
//
// One thread watches the calls, and calls the driver for this. A second thread aborts or frees the group. It waits until it must
// do so, and then calls the library without calling the driver first. This cannot be the first thread, which may be blocked in
// the driver. For example, cudaFree in another thread of the program holds the driver's lock until the device has done its work.
// If a rank is lost, the device never finishes the call that this rank has left. Only the abort ends that call.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
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

  // An event of the device. When its last holder drops it, the watcher takes it back.
  using Event = std::shared_ptr<void>;

  // The two threads run these functions until finish() or stop() is called.
  void watch();
  void free_group();
  // Returns whether the thread in watch() has begun to watch. Throws if it has failed.
  bool watches() const;
  // If the thread in watch() has failed already, tells the observer at once.
  void observe(Observer* observer);

  // All functions from here to order() must be called while the device is the thread's current device.
  Event take_event();
  // Returns the group's own stream, for calls that do not run on the caller's stream.
  StreamHandle beside();
  // Watches a call that has been enqueued. before: if the call runs on the group's own stream, the event that the call waits for;
  // otherwise nullptr.
  void add(const Signature& call, StreamHandle stream, Event before, const Deadline& deadline);
  // Records that a graph has captured the call. The call does not run now, but each time the graph runs.
  void captured(const Signature& call);
  // After order(), work that is enqueued on the stream waits until the device has completed the call with this number.
  void order(uint64_t number, StreamHandle stream);

  // Returns the number of calls that have not completed.
  size_t pending() const;
  // Starts to abort the group. Returns at once, whatever the other threads of the process do.
  void abort();
  // Makes the threads free the group and end. Waits until they have ended, but for at most frees_within_s + aborts_within_s.
  void finish();
  // Aborts the group if it has not been freed, and ends the threads. Returns false if one of them hangs in the library or the
  // driver. watched: whether there is a thread in watch().
  bool stop(bool watched);

 private:
  struct Pending {
    Signature call;
    StreamHandle stream;
    Event event, before;
    Deadline deadline;
    double next_notice_s;
  };

  template <typename Words>
  void tell(const Words& words) {
    const std::lock_guard lock(telling_);
    if (observer_) words(*observer_);
  }
  bool end(bool& flag, double within_s, bool watched);
  void give_back(EventHandle event) noexcept;
  void keep_until_passed(Event event, StreamHandle stream);
  void watch_pending();
  void look_at_pending();
  void drop_pending();

  const std::shared_ptr<Runtime> runtime_;
  const int device_;
  const std::shared_ptr<SharedGroup> group_;
  StreamHandle beside_ = nullptr;  // created by the first call that needs it

  // Protects the fields down to ended_. Never held during a call to NCCL, HCCL or the driver, nor while an Event is dropped.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<EventHandle> events_;               // events that are not in use
  size_t made_ = 0;                               // events that were created; events_ has room for all of them
  std::deque<Pending> pending_;                   // ordered by number; only the watching thread removes calls
  std::vector<std::pair<Event, Event>> awaited_;  // events that a stream may still wait for, each with one behind the wait
  bool aborting_ = false, finishing_ = false, stopping_ = false;
  bool asleep_ = false;      // whether the watching thread sleeps until a caller enqueues a call and wakes it
  bool captured_ = false;    // whether a graph may contain calls of the group
  Clock::time_point moved_;  // when a call last completed, or was enqueued while none was pending
  bool freed_ = false;       // whether the group has been freed or aborted
  bool ended_ = false;       // whether the watching thread has ended

  // Protects the fields below. Held while the observer is called. The observer may take mutex_.
  mutable std::mutex telling_;
  Observer* observer_ = nullptr;
  bool watches_ = false;         // whether the watching thread has begun to watch
  std::optional<Error> failed_;  // why the watching thread has failed
};

}  // namespace mscomm
