// Implements libascendcl.so (and libacl_rt.so) without an NPU: AscendCL's C ABI on the simulated machine of engine.h.
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "engine.h"

using namespace fake;

namespace {

using Error = int;
using Context = Handle;

enum : Error {
  success = 0,
  invalid_parameter = 100000,
  uninitialized = 100001,
  repeated_initialize = 100002,
  rt_invalid_parameter = 107000,
  rt_invalid_device = 107001,
  rt_context_null = 107002,
  rt_stream_context = 107003,
  rt_no_memory = 207001,
  rt_no_device = 207004,
  rt_stream_timeout = 507046,
  rt_device_memory = 507053,
};

std::atomic<pid_t> initialized{0};
std::mutex devices_mutex;
auto& devices_set = *new std::map<int, int>;  // for each device: how many times threads switched to it, minus the resets

Context context_of(int device) { return device < 0 ? 0 : 0xACE00000 + 256 * (static_cast<Context>(device) + 1); }

Error ready() { return initialized.load() == getpid() ? success : uninitialized; }

Error current(int& device) {
  if (const Error error = ready()) return error;
  device = engine().current();
  if (device < 0) return rt_context_null;
  return engine().broken(device) ? rt_device_memory : success;
}

// A null stream means the context's default stream. This stream waits for no other stream.
Error stream_of(Handle handle, std::shared_ptr<Stream>& stream) {
  int device;
  if (const Error error = current(device)) return error;
  stream = engine().stream(handle, device);
  if (!stream) return rt_invalid_parameter;
  return stream->device() == device ? success : rt_stream_context;
}

Error settled(const Stream& stream) { return engine().broken(stream.device()) ? rt_device_memory : success; }

Deadline within(int milliseconds) {
  if (milliseconds < 0) return {};
  return std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
}

enum Copy { host_to_host, host_to_device, device_to_host, device_to_device, by_address };

Error copy(void* to, size_t room, const void* from, size_t bytes, int kind, Handle handle) {
  std::shared_ptr<Stream> stream;
  if (const Error error = stream_of(handle, stream)) return error;
  if (!to || !from || bytes > room || kind < 0 || kind > by_address) return invalid_parameter;
  if (!bytes) return success;
  const Buffer target = engine().find(reinterpret_cast<Address>(to), bytes),
               source = engine().find(reinterpret_cast<Address>(from), bytes);
  const bool to_device = target.where == Where::device, from_device = source.where == Where::device;
  for (const Buffer& one : {target, source}) {
    if (one.where == Where::device && !one.allocation) return rt_invalid_parameter;
    if (one.allocation && one.address + bytes > one.start + one.length) return rt_invalid_parameter;
  }
  const bool says_to = kind == host_to_device || kind == device_to_device;
  const bool says_from = kind == device_to_host || kind == device_to_device;
  if (kind != by_address && (says_to != to_device || says_from != from_device)) return rt_invalid_parameter;
  std::shared_ptr<std::vector<char>> staged;
  if (source.where == Where::host) {
    staged = std::make_shared<std::vector<char>>(bytes);
    memcpy(staged->data(), from, bytes);
  }
  const uint64_t number = stream->enqueue([=, device = stream->device()] {
    const auto out = target.where == Where::host ? std::shared_ptr<char>(static_cast<char*>(to), [](char*) {})
                                                 : engine().open(target, device, true);
    const auto in = staged ? std::shared_ptr<char>(staged, staged->data()) : engine().open(source, device, true);
    if (out && in) memmove(out.get(), in.get(), bytes);
  });
  if (target.where == Where::host) stream->wait(number);
  return settled(*stream);
}

}  // namespace

FAKE_EXPORT Error aclInit(const char* /*config*/) {
  pid_t nobody = 0;
  if (initialized.compare_exchange_strong(nobody, getpid())) return success;
  return repeated_initialize;
}

FAKE_EXPORT Error aclrtGetVersion(int32_t* major, int32_t* minor, int32_t* patch) {
  if (!major || !minor || !patch) return invalid_parameter;
  *major = 1, *minor = 15, *patch = 0;
  return success;
}

FAKE_EXPORT const char* aclGetRecentErrMsg() { return nullptr; }

FAKE_EXPORT const char* aclrtGetSocName() {
  static const std::string profile = text("FAKE_ASCEND", "A2");
  static const std::string usual = profile == "910" ? "Ascend910A" : profile == "A3" ? "Ascend910_9391" : "Ascend910B1";
  static const std::string name = text("FAKE_SOC_NAME", usual);
  return name.c_str();
}

FAKE_EXPORT Error aclrtGetDeviceCount(uint32_t* count) {
  if (const Error error = ready()) return error;
  if (!count) return invalid_parameter;
  *count = static_cast<uint32_t>(engine().devices());
  return *count ? success : rt_no_device;
}

FAKE_EXPORT Error aclrtSetDevice(int32_t device) {
  if (const Error error = ready()) return error;
  if (device < 0 || device >= engine().devices()) return rt_invalid_device;
  std::lock_guard lock(devices_mutex);
  if (engine().current() != device) engine().count("devices_set", 1), ++devices_set[device];
  engine().set_current(device);
  return success;
}

FAKE_EXPORT Error aclrtResetDevice(int32_t device) {
  if (const Error error = ready()) return error;
  if (device < 0 || device >= engine().devices()) return rt_invalid_device;
  std::lock_guard lock(devices_mutex);
  if (devices_set[device] > 0) engine().count("devices_set", -1), --devices_set[device];
  if (engine().current() == device) engine().set_current(-1);
  return success;
}

FAKE_EXPORT Error aclrtGetDevice(int32_t* device) {
  if (!device) return invalid_parameter;
  return current(*device);
}

FAKE_EXPORT Error aclrtGetCurrentContext(Context* context) {
  int device;
  if (const Error error = current(device)) return error;
  if (!context) return invalid_parameter;
  *context = context_of(device);
  return success;
}

FAKE_EXPORT Error aclrtSetCurrentContext(Context context) {
  if (const Error error = ready()) return error;
  const auto device = static_cast<int>((context - 0xACE00000) / 256) - 1;
  if (context <= 0xACE00000 || context != context_of(device) || device >= engine().devices()) return rt_invalid_parameter;
  std::lock_guard lock(devices_mutex);
  if (devices_set[device] < 1) return rt_invalid_parameter;  // the device was never set, or was reset since
  engine().set_current(device);
  return success;
}

FAKE_EXPORT Error aclrtCreateStream(Handle* stream) {
  int device;
  if (const Error error = current(device)) return error;
  if (!stream) return invalid_parameter;
  *stream = engine().create_stream(device, false);
  return success;
}

FAKE_EXPORT Error aclrtDestroyStream(Handle stream) {
  if (const Error error = ready()) return error;
  return stream > 2 && engine().destroy_stream(stream) ? success : rt_invalid_parameter;
}

FAKE_EXPORT Error aclrtSynchronizeStreamWithTimeout(Handle handle, int32_t milliseconds) {
  std::shared_ptr<Stream> stream;
  if (const Error error = stream_of(handle, stream)) return error;
  if (milliseconds < -1) return rt_invalid_parameter;
  if (!stream->wait(stream->tail(), within(milliseconds))) return rt_stream_timeout;
  return settled(*stream);
}

FAKE_EXPORT Error aclrtSynchronizeStream(Handle stream) { return aclrtSynchronizeStreamWithTimeout(stream, -1); }

FAKE_EXPORT Error aclrtStreamQuery(Handle handle, int* status) {
  std::shared_ptr<Stream> stream;
  if (const Error error = stream_of(handle, stream)) return error;
  if (!status) return invalid_parameter;
  *status = stream->reached(stream->tail()) ? 0 : 1;
  return success;
}

FAKE_EXPORT Error aclrtStreamWaitEvent(Handle handle, Handle event) {
  enter_driver();
  std::shared_ptr<Stream> stream;
  if (const Error error = stream_of(handle, stream)) return error;
  const auto mark = engine().mark(event);
  if (!mark) return rt_invalid_parameter;
  engine().wait_for(*stream, *mark);
  return success;
}

FAKE_EXPORT Error aclrtCreateEventWithFlag(Handle* event, uint32_t flag) {
  int device;
  if (const Error error = current(device)) return error;
  if (!event || !flag || flag & ~0x7bu) return invalid_parameter;
  *event = engine().create_event(device);
  return success;
}

FAKE_EXPORT Error aclrtCreateEventExWithFlag(Handle* event, uint32_t flag) { return aclrtCreateEventWithFlag(event, flag); }

FAKE_EXPORT Error aclrtDestroyEvent(Handle event) {
  if (const Error error = ready()) return error;
  return engine().destroy_event(event) ? success : rt_invalid_parameter;
}

FAKE_EXPORT Error aclrtRecordEvent(Handle event, Handle handle) {
  enter_driver();
  std::shared_ptr<Stream> stream;
  if (const Error error = stream_of(handle, stream)) return error;
  if (engine().event_device(event) != stream->device()) return rt_invalid_parameter;
  return engine().record(event, stream) ? success : rt_invalid_parameter;
}

FAKE_EXPORT Error aclrtQueryEventStatus(Handle event, int* status) {
  enter_driver();
  if (const Error error = ready()) return error;
  const auto mark = engine().mark(event);
  if (!mark || !status) return rt_invalid_parameter;
  *status = mark->reached() ? 1 : 0;
  return success;
}

FAKE_EXPORT Error aclrtMalloc(void** memory, size_t bytes, int policy) {
  int device;
  if (const Error error = current(device)) return error;
  if (!memory || !bytes || policy < 0 || policy > 7) return invalid_parameter;
  const Address address = engine().allocate(device, bytes);
  if (!address) return rt_no_memory;
  *memory = reinterpret_cast<void*>(address);
  return success;
}

FAKE_EXPORT Error aclrtFree(void* memory) {
  if (const Error error = ready()) return error;
  if (!memory) return invalid_parameter;
  return engine().release(reinterpret_cast<Address>(memory)) ? success : rt_invalid_parameter;
}

FAKE_EXPORT Error aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t bytes, int kind, Handle stream) {
  return copy(to, room, from, bytes, kind, stream);
}

FAKE_EXPORT Error aclrtMemsetAsync(void* to, size_t room, int32_t value, size_t bytes, Handle handle) {
  std::shared_ptr<Stream> stream;
  if (const Error error = stream_of(handle, stream)) return error;
  if (!to || bytes > room) return invalid_parameter;
  const Buffer buffer = engine().find(reinterpret_cast<Address>(to), bytes);
  if (!buffer.allocation) return rt_invalid_parameter;
  stream->enqueue([=, device = stream->device()] {
    if (const auto memory = engine().open(buffer, device, true)) memset(memory.get(), value, bytes);
  });
  return settled(*stream);
}

// Only the stand-in has this function. It allocates device memory that the host can use as well.
FAKE_EXPORT Error fake_malloc_managed(void** memory, size_t bytes) {
  int device;
  if (const Error error = current(device)) return error;
  if (!memory || !bytes) return invalid_parameter;
  const Address address = engine().allocate(device, bytes, true);
  if (!address) return rt_no_memory;
  *memory = reinterpret_cast<void*>(address);
  return success;
}

// Only the stand-in has this function. It frees memory in stream order, as a framework's caching allocator does.
FAKE_EXPORT Error fake_free_async(void* memory, Handle handle) {
  std::shared_ptr<Stream> stream;
  if (const Error error = stream_of(handle, stream)) return error;
  stream->enqueue([=] { engine().release(reinterpret_cast<Address>(memory)); }, false);
  return success;
}
