// A vendor library's group that several threads of this process share.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "backend/library.h"
#include "base/error.h"

namespace mscomm {

// How many seconds we wait for the library to free a group, and to abort a group.
inline constexpr double frees_within_s = 5, aborts_within_s = 10;

// A mutex that can be locked with a timeout. It replaces std::timed_mutex, which ThreadSanitizer does not understand.
class Turn {
 public:
  void lock() {
    std::unique_lock lock(mutex_);
    free_.wait(lock, [this] { return !taken_; });
    taken_ = true;
  }
  bool try_lock() { return try_lock_for(std::chrono::seconds(0)); }
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

// Allows only one thread at a time to call the library for the group, except to abort it.
class SharedGroup {
 public:
  explicit SharedGroup(std::shared_ptr<Vendor> vendor) : vendor_(std::move(vendor)) {}

  // Joins the group; see Vendor::join.
  void join(const std::string& id, int size, int rank, std::shared_ptr<Runtime> runtime, int device) {
    const std::lock_guard lock(calling_);
    group_ = vendor_->join(id, size, rank, std::move(runtime), device);
  }
  Vendor& vendor() const { return *vendor_; }
  // Calls `question` with the library's group, and returns what `question` returns. Throws if the group was aborted.
  template <typename Question>
  auto ask(const Question& question) {
    const std::lock_guard lock(calling_);
    if (!group_ || aborted_) throw Error("Aborted", "the group was aborted");
    return question(*group_);
  }
  bool busy() {
    return ask([](VendorGroup& group) { return group.busy(); });
  }
  // Throws if the group has failed. Does nothing while another thread is inside the library, because that thread will see the
  // failure itself.
  void look();
  // abort() and finish() may take long, because the library frees the group on the thread that calls them. One thread calls one
  // of them, once.
  void abort();
  // Frees the group after it has ended without an error. captured: whether a graph may contain calls of the group.
  void finish(bool captured);

 private:
  const std::shared_ptr<Vendor> vendor_;
  Turn calling_;                        // protects group_
  std::unique_ptr<VendorGroup> group_;  // nullptr before join(), and after abort() or finish()
  std::atomic<bool> aborted_{false};    // whether group_ was aborted while a thread was inside the library
};

}  // namespace mscomm
