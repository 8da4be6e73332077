// Defines the functions that a stand-in runtime has in addition to the vendor's functions. The stand-in for the communication
// library calls fake_engine(), and tests call the other functions.
#include <unistd.h>

#include <condition_variable>
#include <cstring>
#include <mutex>
#include <set>
#include <vector>

#include "engine.h"

using namespace fake;

namespace {
constexpr int no_stream = 1, no_memory = 2;
}

FAKE_EXPORT Engine* fake_engine() { return &engine(); }

// Writes JSON with the number of existing handles of each kind, and the violations. Returns the number of bytes that the JSON
// needs.
FAKE_EXPORT size_t fake_counters(char* to, size_t bytes) { return hand_over(engine().counters(), to, bytes); }

// Returns the device whose managed memory contains this address, or -1 if there is none.
FAKE_EXPORT int fake_managed(Address address) {
  const Buffer buffer = engine().find(address, 0);
  return buffer.managed ? buffer.device : -1;
}

FAKE_EXPORT int fake_set_capturing(Handle handle, int capturing) {
  const auto stream = engine().stream(handle, engine().current());
  if (!stream) return no_stream;
  engine().set_capturing(*stream, capturing != 0);
  return 0;
}

// Does what a framework's kernel might do: waits for `delay_us`, then adds `add` to each of `count` floats.
FAKE_EXPORT int fake_compute(Address data, size_t count, float add, int delay_us, Handle handle) {
  const auto stream = engine().stream(handle, engine().current());
  if (!stream) return no_stream;
  const Buffer buffer = engine().find(data, count * sizeof(float));
  stream->enqueue([=, device = stream->device()] {
    if (delay_us > 0) usleep(static_cast<useconds_t>(delay_us));
    const auto bytes = engine().open(buffer, device);
    if (!bytes) return;
    auto* values = reinterpret_cast<float*>(bytes.get());
    for (size_t i = 0; i < count; ++i) values[i] += add;
  });
  return 0;
}

// Keeps the stream idle for this many microseconds.
FAKE_EXPORT int fake_sleep(int microseconds, Handle handle) {
  const auto stream = engine().stream(handle, engine().current());
  if (!stream) return no_stream;
  stream->enqueue([=] { usleep(static_cast<useconds_t>(microseconds)); }, false);
  return 0;
}

namespace {
std::mutex gates_mutex;
std::condition_variable gates_changed;
auto& closed_gates = *new std::set<int64_t>;
int64_t last_gate = 0;
}  // namespace

// Makes the stream wait, and returns a number. The stream continues when fake_release() is called with this number. Returns -1 if
// there is no such stream.
FAKE_EXPORT int64_t fake_hold(Handle handle) {
  const auto stream = engine().stream(handle, engine().current());
  if (!stream) return -1;
  int64_t gate;
  {
    std::lock_guard lock(gates_mutex);
    closed_gates.insert(gate = ++last_gate);
  }
  stream->enqueue(
      [gate] {
        std::unique_lock lock(gates_mutex);
        gates_changed.wait(lock, [&] { return !closed_gates.count(gate); });
      },
      false);
  return gate;
}

FAKE_EXPORT int fake_release(int64_t gate) {
  std::lock_guard lock(gates_mutex);
  gates_changed.notify_all();
  return closed_gates.erase(gate) ? 0 : no_stream;
}

// Blocks the driver until the stream has run the work that is on it now.
FAKE_EXPORT int fake_block_driver(Handle handle) {
  const auto stream = engine().stream(handle, engine().current());
  if (!stream) return no_stream;
  block_driver(stream);
  return 0;
}

// Makes a strided copy, as a framework's kernel might do. Shape and strides are in elements of `size` bytes. At most 8 dimensions
// are allowed.
FAKE_EXPORT int fake_copy_strided(Address to, const int64_t* to_strides, Address from, const int64_t* from_strides,
                                  const int64_t* shape, int dimensions, int64_t size, Handle handle) {
  const auto stream = engine().stream(handle, engine().current());
  if (!stream) return no_stream;
  if (dimensions < 0 || dimensions > 8 || size <= 0) return no_memory;
  const std::vector<int64_t> extent(shape, shape + dimensions), out(to_strides, to_strides + dimensions),
      in(from_strides, from_strides + dimensions);
  int64_t elements = 1;
  for (const int64_t n : extent) elements *= n;
  if (!elements) return 0;
  const auto target = engine().find(to, 1), source = engine().find(from, 1);
  if (!target.allocation || !source.allocation) return no_memory;
  stream->enqueue([=, device = stream->device()] {
    // Open the whole allocations, because negative strides can lead to addresses below the given address.
    const auto open = [&](const Buffer& one) {
      Buffer all = one;
      all.address = one.start;
      all.bytes = one.length;
      return engine().open(all, device);
    };
    const auto a = open(target), b = open(source);
    if (!a || !b) return;
    std::vector<int64_t> index(extent.size());
    for (int64_t left = elements; left; --left) {
      auto at = static_cast<int64_t>(to - target.start), of = static_cast<int64_t>(from - source.start);
      for (size_t i = 0; i < index.size(); ++i) {
        at += index[i] * out[i] * size;
        of += index[i] * in[i] * size;
      }
      if (at < 0 || of < 0 || at + size > static_cast<int64_t>(target.length) ||
          of + size > static_cast<int64_t>(source.length)) {
        engine().violation("out_of_bounds", "a strided copy beyond its allocation");
        return;
      }
      memcpy(a.get() + at, b.get() + of, static_cast<size_t>(size));
      for (size_t i = index.size(); i-- > 0;) {
        if (++index[i] < extent[i]) break;
        index[i] = 0;
      }
    }
  });
  return 0;
}
