// The pretended machine that the stand-ins of both vendors share: devices, their memory, streams and events.
//
// A vendor's runtime (libcuda.so.1, libascendcl.so) holds the one engine of the process; its communication library finds it
// there by fake_engine(). Both are built from these sources, so that an abstract class is interface enough between them.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace fake {

using Address = uint64_t;
using Handle = uint64_t;
using Uuid = std::array<unsigned char, 16>;
using Deadline = std::optional<std::chrono::steady_clock::time_point>;  // none: for ever, as the real ones wait

enum class Where { host, device };

// What work in a queue keeps of an argument: which memory it was when the caller named it.
struct Buffer {
  Address address = 0;
  size_t bytes = 0;
  Where where = Where::host;
  int device = -1;
  uint64_t allocation = 0;  // 0: none that the engine knows
  Address start = 0;        // of the allocation
  size_t length = 0;
  bool managed = false;  // the host reaches it, too
};

class Stream {
 public:
  virtual ~Stream() = default;
  virtual int device() const = 0;
  // To run when the stream gets there, on the stream's own thread; gives the work's number. `delayed`: only after FAKE_DELAY_US,
  // so that whoever does not wait is too early. A capturing stream keeps the work for its graph instead.
  virtual uint64_t enqueue(std::function<void()> work, bool delayed = true) = 0;
  virtual uint64_t tail() const = 0;
  virtual bool reached(uint64_t number) const = 0;
  virtual bool wait(uint64_t number, Deadline deadline = {}) = 0;  // false: the deadline passed
  virtual bool capturing() const = 0;
};

// A place in a stream.
struct Mark {
  std::shared_ptr<Stream> stream;
  uint64_t number = 0;
  bool captured = false;
  bool reached() const { return !stream || stream->reached(number); }
};

class Engine {
 public:
  virtual ~Engine() = default;

  virtual int devices() const = 0;
  virtual Uuid uuid(int device) const = 0;

  // The device of this thread, or -1. The vendor's runtime keeps it.
  virtual int current() const = 0;
  virtual void set_current(int device) = 0;

  // 0: no memory left. The host can read and write what it gets if that is managed, and not otherwise; memory is not zero.
  virtual Address allocate(int device, size_t bytes, bool managed = false) = 0;
  virtual bool release(Address address) = 0;
  // The buffer at an address, which may be any address inside an allocation.
  virtual Buffer find(Address address, size_t bytes) const = 0;
  // The bytes of a buffer, for work that runs. Empty, with the device in error, if it is no memory of that device or was
  // released since. of_any: another device's memory will do, as for a copy.
  virtual std::shared_ptr<char> open(const Buffer& buffer, int device, bool of_any = false) = 0;

  virtual Handle create_stream(int device, bool with_legacy) = 0;
  virtual bool destroy_stream(Handle handle) = 0;
  // 0 and 1 are the device's legacy default stream, 2 is the calling thread's. Empty: no such stream.
  virtual std::shared_ptr<Stream> stream(Handle handle, int device) = 0;
  virtual void wait_for(Stream& stream, const Mark& mark) = 0;
  virtual void set_capturing(Stream& stream, bool capturing) = 0;
  // take_graph returns what was captured; launch_graph enqueues it again, as often as it is called.
  virtual Handle take_graph(Stream& stream) = 0;
  virtual bool launch_graph(Handle graph, Stream& stream) = 0;
  virtual bool destroy_graph(Handle graph) = 0;

  virtual Handle create_event(int device) = 0;
  virtual bool destroy_event(Handle handle) = 0;
  virtual int event_device(Handle handle) const = 0;  // -1: no such event
  virtual bool record(Handle handle, std::shared_ptr<Stream> stream) = 0;
  virtual std::optional<Mark> mark(Handle handle) const = 0;

  // Whether work on the device has used a wrong address. Such a device stays unusable, as a real one does.
  virtual bool broken(int device) const = 0;

  // Something that real hardware would not have told, or would have crashed at.
  virtual void violation(const std::string& kind, const std::string& text) = 0;
  virtual void count(const std::string& kind, int64_t change) = 0;
  virtual std::string counters() const = 0;  // JSON
};

// Only in the runtime's library.
Engine& engine();

// Reads a number from the environment, where it says one.
int64_t number(const char* name, int64_t otherwise);
std::string text(const char* name, const std::string& otherwise);

// Copies JSON to a C caller; gives the length that it needs.
size_t hand_over(const std::string& json, char* to, size_t bytes);

// Starts a thread that takes no signal and that nobody joins: it may wait for what never comes.
void spawn(std::function<void()> body);

}  // namespace fake

#define FAKE_EXPORT extern "C" __attribute__((visibility("default")))
