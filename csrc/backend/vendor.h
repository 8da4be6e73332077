// The vendor backend enqueues calls on device arrays, using a vendor's library.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "backend/backend.h"
#include "backend/library.h"
#include "backend/shared_group.h"
#include "backend/watcher.h"
#include "base/deadline.h"
#include "device/runtime.h"

namespace mscomm {

// Runs the calls of one group on the arrays of one device: enqueues the calls, and starts the threads that watch them.
class VendorBackend final : public Backend {
 public:
  using Observer = Watcher::Observer;

  // Joins the group with this id, and waits until every rank has joined. `check` is called repeatedly during the wait, with
  // sleeps of at most 50 ms in between, and may throw to end the wait. Throws CollectiveTimeout at the deadline. If it throws, it
  // first waits until the library has aborted the group, but for at most aborts_within_s. Also throws if the watcher's threads
  // cannot be started, or cannot use the device.
  VendorBackend(std::shared_ptr<Vendor> vendor, std::shared_ptr<Runtime> runtime, int device, const std::string& id, int size,
                int rank, const Deadline& deadline, const std::function<void()>& check);
  ~VendorBackend() override;

  // Sets the observer. Must be called before the first run(), and with nullptr before the observer is destroyed.
  void observe(Observer* observer) { watcher_->observe(observer); }

  // Returns when the call has been enqueued. The observer is notified when the call has completed.
  void run(const Call& call, const Wait& wait) override;
  // After order(), work that is enqueued on the stream waits until the device has completed the call with this number.
  void order(uint64_t number, StreamHandle stream);
  // Packs or unpacks in stream order, with a kernel if the device has one for this packing, and with plain copies otherwise.
  // Throws RuntimeError if there is no such kernel and plain copies are not sufficient (see Packing::plain).
  void pack(const Packing& packing, StreamHandle stream);
  // Fills device memory with zeros, in stream order.
  void clear(void* memory, size_t bytes, StreamHandle stream);
  // Returns whether the device has kernels that scale elements and, if the dtypes differ, also cast them.
  bool converts(Dtype part, Dtype bucket) const { return runtime_->converts(device_, part, bucket); }
  // Returns why the library cannot reduce elements of this type with this operation, or "" if it can.
  std::string refuses(Dtype dtype, Op op) const { return group_->vendor().refuses(dtype, op); }
  // Returns the number of calls that have not completed.
  size_t pending() const { return watcher_->pending(); }

  void shut_down() override { watcher_->abort(); }
  void close() override { watcher_->finish(); }
  void close_descriptors() override {
    for (auto& thread : threads_) (void)thread.release();
  }

 private:
  VendorBackend(std::shared_ptr<Vendor> vendor, std::shared_ptr<Runtime> runtime, int device, int size, int rank);
  void take(std::unique_lock<Turn>& issuing, const Wait& wait);
  void settle(std::unique_lock<Turn>& issuing, const Wait& wait);
  void enqueue(const Call& call, StreamHandle stream);
  void enqueue_whole(VendorGroup& group, const Call& call, StreamHandle stream);
  void exchange(const Call& call, StreamHandle stream);

  const std::shared_ptr<Runtime> runtime_;
  const int device_, size_, rank_;
  Turn& issuing_;
  // The group and the watcher are shared with the watcher's threads, which may hang in the library and outlive this object.
  std::shared_ptr<SharedGroup> group_;
  std::shared_ptr<Watcher> watcher_;
  std::array<std::unique_ptr<std::thread>, 2> threads_;  // the watcher's; nullptr in a forked child
};

}  // namespace mscomm
