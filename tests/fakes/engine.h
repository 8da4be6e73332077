// Declares the simulated machine that the stand-ins for both vendors share. The machine has devices with memory, streams and
// events.
//
// A vendor's runtime (libcuda.so.1 or libascendcl.so) holds the only engine of the process. The vendor's communication library
// gets this engine by calling fake_engine(). build.py compiles the two libraries of a vendor with this header and with the
// same compiler, so the interface between them can be an abstract C++ class.
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
// Without a value, a wait lasts forever, as in the real libraries.
using Deadline = std::optional<std::chrono::steady_clock::time_point>;

enum class Where { host, device };

// Describes memory that enqueued work uses. The caller gets a Buffer from find() when it enqueues the work. If the memory is
// freed and the address is allocated again before the work runs, `allocation` still identifies the old allocation.
struct Buffer {
  Address address = 0;
  size_t bytes = 0;
  Where where = Where::host;
  int device = -1;
  uint64_t allocation = 0;  // 0 if the address is in no allocation of the engine
  Address start = 0;        // where the allocation begins
  size_t length = 0;
  bool managed = false;  // whether the host can use the memory as well
};

class Stream {
 public:
  virtual ~Stream() = default;
  virtual int device() const = 0;
  // Enqueues work. The stream's own thread runs the work of the stream in order. Returns the work's number. If `delayed` is true,
  // the thread waits FAKE_DELAY_US before it runs the work, so code that does not wait for the work reads too early. A capturing
  // stream does not run the work, but keeps it for a graph.
  virtual uint64_t enqueue(std::function<void()> work, bool delayed = true) = 0;
  virtual uint64_t tail() const = 0;
  virtual bool reached(uint64_t number) const = 0;
  virtual bool wait(uint64_t number, Deadline deadline = {}) = 0;  // returns false if the deadline has passed
  virtual bool capturing() const = 0;
};

// A position in a stream. It is reached when the stream has run all work up to `number`.
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

  // Returns the current device of the calling thread, or -1 if there is none. The vendor's runtime library sets the device.
  virtual int current() const = 0;
  virtual void set_current(int device) = 0;

  // Returns the address of new memory, or 0 if no memory is left. The memory begins with junk instead of zeros. The host can read
  // and write it only if it is managed.
  virtual Address allocate(int device, size_t bytes, bool managed = false) = 0;
  virtual bool release(Address address) = 0;
  // Returns the buffer that begins at this address. The address need not be the start of an allocation.
  virtual Buffer find(Address address, size_t bytes) const = 0;
  // Running work calls open() to access the bytes of a buffer. If the buffer is not memory of this device, or was released after
  // the work was enqueued, open() returns nullptr and marks the device as broken. If `of_any` is true, the memory can belong to
  // any device, as in a copy.
  virtual std::shared_ptr<char> open(const Buffer& buffer, int device, bool of_any = false) = 0;

  virtual Handle create_stream(int device, bool with_legacy) = 0;
  virtual bool destroy_stream(Handle handle) = 0;
  // Handles 0 and 1 mean the device's legacy default stream, and 2 means the calling thread's own default stream. Returns nullptr
  // if there is no such stream.
  virtual std::shared_ptr<Stream> stream(Handle handle, int device) = 0;
  virtual void wait_for(Stream& stream, const Mark& mark) = 0;
  virtual void set_capturing(Stream& stream, bool capturing) = 0;
  // take_graph returns a graph of the captured work. launch_graph enqueues this work, and can be called several times for one
  // graph.
  virtual Handle take_graph(Stream& stream) = 0;
  virtual bool launch_graph(Handle graph, Stream& stream) = 0;
  virtual bool destroy_graph(Handle graph) = 0;

  virtual Handle create_event(int device) = 0;
  virtual bool destroy_event(Handle handle) = 0;
  virtual int event_device(Handle handle) const = 0;  // returns -1 if there is no such event
  virtual bool record(Handle handle, std::shared_ptr<Stream> stream) = 0;
  virtual std::optional<Mark> mark(Handle handle) const = 0;

  // Returns whether work on the device has used a wrong address. Such a device stays unusable, as a real one would.
  virtual bool broken(int device) const = 0;

  // Counts a violation: a mistake by the caller that a real device would not report, or that would crash the program.
  virtual void violation(const std::string& kind, const std::string& text) = 0;
  virtual void count(const std::string& kind, int64_t change) = 0;
  virtual std::string counters() const = 0;  // as JSON
};

// Returns the engine of the process. Only the vendor's runtime library defines this function.
Engine& engine();

// A call of the driver may hold the driver's lock until the device has finished its work, as cudaFree does. All other calls then
// wait for it. block_driver() begins such a call, which waits for the work that is on the stream now. enter_driver() waits until no
// such call is left; the runtimes' functions that mscomm calls repeatedly begin with it.
void block_driver(std::shared_ptr<Stream> stream);
void enter_driver();

// number() returns an environment variable as a number, and text() returns it as text. Both return `otherwise` if the variable is
// not set or empty.
int64_t number(const char* name, int64_t otherwise);
std::string text(const char* name, const std::string& otherwise);

// Copies JSON into a C caller's memory. Returns the number of bytes that the whole JSON needs.
size_t hand_over(const std::string& json, char* to, size_t bytes);

// Starts a thread with all signals blocked. No other thread joins it, because its work can wait forever.
void spawn(std::function<void()> body);

}  // namespace fake

#define FAKE_EXPORT extern "C" __attribute__((visibility("default")))
