// What the vendor backend needs of a device's own library: the current device, streams, events and copies. One file per vendor.
#pragma once

#include <cstddef>
#include <string>

#include "device/packing.h"

namespace mscomm {

// Handles of the vendor's library, opaque to us.
using StreamHandle = void*;
using EventHandle = void*;

class Runtime {
 public:
  virtual ~Runtime() = default;

  virtual std::string version() const = 0;  // "CUDA 13.0 (/usr/lib/libcuda.so.1)"
  virtual int devices() const = 0;
  virtual std::string device_name(int device) const = 0;
  // Equal in all processes on all hosts, unlike an index.
  virtual std::string uuid(int device) const = 0;

  // Makes the device the thread's current one, also for the code that called us.
  virtual void use(int device) = 0;
  // A guard: while it lives, the device is the thread's current one.
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

  // For a thread that only watches: its queries must not break a graph capture that another thread has begun.
  virtual void leave_captures_alone() = 0;

  // All functions below act on the current device, except those that take a device's number.
  virtual StreamHandle make_stream() = 0;  // of high priority; waits for no other stream
  virtual void destroy_stream(StreamHandle stream) noexcept = 0;
  virtual EventHandle make_event() = 0;
  virtual void destroy_event(EventHandle event) noexcept = 0;
  // Whether an event can be recorded again while something still waits for its last recording.
  virtual bool events_can_be_used_again() const = 0;
  virtual void record(EventHandle event, StreamHandle stream) = 0;
  // Makes what is enqueued on the stream from now on wait for the event.
  virtual void wait(StreamHandle stream, EventHandle event) = 0;
  // Whether the stream has passed the event. Throws if the device has failed.
  virtual bool passed(EventHandle event) = 0;
  // From device memory to device memory.
  virtual void copy(void* to, const void* from, size_t bytes, StreamHandle stream) = 0;
  // Fills the memory with zeros.
  virtual void clear(void* memory, size_t bytes, StreamHandle stream) = 0;
  // The device that the memory belongs to.
  virtual int device_of(const void* memory) = 0;
  virtual void* allocate(size_t bytes) = 0;
  virtual void free(void* memory) noexcept = 0;
  // Packs by kernels, with one launch for some hundred parts. False: no kernel can do it, and nothing was enqueued.
  virtual bool pack(const Packing&, StreamHandle) { return false; }
  // Which kernels the device has, or why it has none; for people. Kernels are loaded when the device is first used. Loading waits
  // for the device, which later may be waiting for a call that this process has yet to make.
  virtual std::string kernels(int) { return "none: this vendor's devices get copies"; }
  // Whether pack() scales, and casts if the dtypes differ.
  virtual bool converts(int, Dtype, Dtype) { return false; }
  // Whether what is enqueued on the stream goes into a graph instead of to the device.
  virtual bool captures(StreamHandle stream) = 0;

 protected:
  // False: the device is the thread's current one already, as in most calls, and nothing was done.
  virtual bool push(int device) = 0;
  virtual void pop() noexcept = 0;
};

}  // namespace mscomm
