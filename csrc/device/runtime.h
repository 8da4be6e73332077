// The functions that the vendor backend needs from a device's runtime library: the current device, streams, events and copies.
// Each vendor has one file that implements them.
#pragma once

#include <cstddef>
#include <string>

#include "device/packing.h"

namespace mscomm {

// The vendor library's handles, which are opaque to us.
using StreamHandle = void*;
using EventHandle = void*;

class Runtime {
 public:
  virtual ~Runtime() = default;

  virtual std::string version() const = 0;  // "CUDA 13.0 (/usr/lib/libcuda.so.1)"
  virtual int devices() const = 0;
  virtual std::string device_name(int device) const = 0;
  // Returns the device's uuid. Unlike a device's index, its uuid is the same in all processes.
  virtual std::string uuid(int device) const = 0;

  // Makes the device the thread's current device, and leaves it current.
  virtual void use(int device) = 0;
  // A guard: while it lives, the device is the thread's current device.
  class Current {
   public:
    Current(Runtime& runtime, int device) : runtime_(runtime), pushed_(runtime.push(device)) {}
    ~Current() {
      if (pushed_) runtime_.pop();
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    Runtime& runtime_;
    const bool pushed_;
  };

  // Makes sure that this thread's queries do not break a graph capture that another thread has begun. Called once by each
  // watcher thread.
  virtual void leave_captures_alone() {}

  // All functions below act on the current device, except those that take a device number.
  virtual StreamHandle make_stream() = 0;  // a high-priority stream that does not wait for any other stream
  virtual void destroy_stream(StreamHandle stream) noexcept = 0;
  virtual EventHandle make_event() = 0;
  virtual void destroy_event(EventHandle event) noexcept = 0;
  // Returns whether an event can be recorded again while something still waits for its previous recording.
  virtual bool events_can_be_used_again() const = 0;
  virtual void record(EventHandle event, StreamHandle stream) = 0;
  // After wait(), work that is enqueued on the stream waits for the event.
  virtual void wait(StreamHandle stream, EventHandle event) = 0;
  // Returns whether the stream has passed the event. Throws if the device has failed.
  virtual bool passed(EventHandle event) = 0;
  // Copies from device memory to device memory.
  virtual void copy(void* to, const void* from, size_t bytes, StreamHandle stream) = 0;
  // Fills the memory with zeros.
  virtual void clear(void* memory, size_t bytes, StreamHandle stream) = 0;
  // Returns the number of the device that the memory belongs to, or -1 if the vendor's library cannot tell.
  virtual int device_of(const void*) { return -1; }
  virtual void* allocate(size_t bytes) = 0;
  virtual void free(void* memory) noexcept = 0;
  // Packs with kernels, using one launch for every few hundred parts. Returns false, and enqueues nothing, if no kernel can
  // perform the packing.
  virtual bool pack(const Packing&, StreamHandle) { return false; }
  // Returns a human-readable text that says how many kernels the device has, or why it has none. The kernels are loaded when the
  // device is first used, because loading waits until the device has finished its work. Loading them later could hang, because
  // the device may then be waiting for a call that this process has yet to make.
  virtual std::string kernels(int) { return "none: this vendor's devices get copies"; }
  // Returns whether pack() can scale elements and, if the two dtypes (of the part and of the bucket) differ, also cast them.
  virtual bool converts(int, Dtype, Dtype) { return false; }
  // Returns whether work enqueued on the stream is being captured into a graph. Captured work is not sent to the device.
  virtual bool captures(StreamHandle) { return false; }

 protected:
  // Makes the device the thread's current device, and returns true. If the device is already current, which is usually the case,
  // does nothing and returns false.
  virtual bool push(int device) = 0;
  virtual void pop() noexcept = 0;
};

}  // namespace mscomm
