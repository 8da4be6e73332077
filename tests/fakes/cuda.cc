// Implements libcuda.so.1 without a GPU: the CUDA driver's C ABI on the simulated machine of engine.h. It runs only the kernels
// of csrc/cuda (kernels.h).
#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "engine.h"
#include "kernels.h"

using namespace fake;

namespace {

using Result = int;
using Device = int;
using Context = Handle;
using Pointer = unsigned long long;

enum : Result {
  success = 0,
  invalid_value = 1,
  out_of_memory = 2,
  not_initialized = 3,
  no_device = 100,
  invalid_device = 101,
  invalid_context = 201,
  no_binary_for_gpu = 209,
  invalid_handle = 400,
  not_found = 500,
  not_ready = 600,
  illegal_address = 700,
  not_supported = 801,
  capture_unsupported = 900,
  captured_event = 907,
};

constexpr struct {
  Result code;
  const char *name, *text;
} results[] = {
    {success, "CUDA_SUCCESS", "no error"},
    {invalid_value, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {out_of_memory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {not_initialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {no_device, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {invalid_device, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {invalid_context, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {no_binary_for_gpu, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {invalid_handle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {not_found, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {not_ready, "CUDA_ERROR_NOT_READY", "device not ready"},
    {illegal_address, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {not_supported, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {capture_unsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {captured_event, "CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream"},
};

// The process that called cuInit. Like the real driver, the stand-in cannot be used in a forked child.
std::atomic<pid_t> initialized{0};

// Protects `retained`.
std::mutex retained_mutex;
// Counts how often the primary context of each device has been retained. The map is never destroyed, because threads of the
// tested library can still make calls when the process ends.
auto& retained = *new std::map<Device, int>;
thread_local std::vector<Device> contexts;  // this thread's context stack, as device numbers; -1 means no context

int driver_version() { return static_cast<int>(number("FAKE_CUDA_VERSION", 13000)); }

Context context_of(Device device) { return device < 0 ? 0 : 0xC0DE0000 + 256 * (static_cast<Context>(device) + 1); }

Device device_of(Context context) {
  if (context <= 0xC0DE0000 || (context - 0xC0DE0000) % 256) return -1;
  const auto device = static_cast<Device>((context - 0xC0DE0000) / 256 - 1);
  std::lock_guard lock(retained_mutex);
  const auto found = retained.find(device);
  return found != retained.end() && found->second > 0 ? device : -1;
}

Result ready() { return initialized.load() == getpid() ? success : not_initialized; }

// Stores the device of the current context in `device`.
Result current(Device& device) {
  if (const Result result = ready()) return result;
  device = contexts.empty() ? -1 : contexts.back();
  if (device < 0 || device_of(context_of(device)) < 0) return invalid_context;
  return engine().broken(device) ? illegal_address : success;
}

Result current() {
  Device device;
  return current(device);
}

Result stream_of(Handle handle, std::shared_ptr<Stream>& stream) {
  Device device;
  if (const Result result = current(device)) return result;
  stream = engine().stream(handle, device);
  return stream ? success : invalid_handle;
}

void set(std::vector<Device> stack) {
  contexts = std::move(stack);
  engine().set_current(contexts.empty() ? -1 : contexts.back());
}

Result settled(const Stream& stream) { return engine().broken(stream.device()) ? illegal_address : success; }

// Copies between any two kinds of memory.
Result copy(Pointer to, Pointer from, size_t bytes, Handle handle) {
  std::shared_ptr<Stream> stream;
  if (const Result result = stream_of(handle, stream)) return result;
  if (!bytes) return success;
  const Buffer target = engine().find(to, bytes), source = engine().find(from, bytes);
  for (const Buffer& one : {target, source}) {
    if (!one.address || (one.where == Where::device && !one.allocation)) return invalid_value;
    if (one.allocation && one.address + bytes > one.start + one.length) return invalid_value;
  }
  if (stream->capturing() && target.where == Where::host) return capture_unsupported;
  // A copy from pageable memory is staged before the call returns. A copy to pageable memory is complete when the call returns.
  std::shared_ptr<std::vector<char>> staged;
  if (source.where == Where::host) {
    staged = std::make_shared<std::vector<char>>(bytes);
    memcpy(staged->data(), reinterpret_cast<const void*>(from), bytes);
  }
  const uint64_t number = stream->enqueue([=, device = stream->device()] {
    const auto out = target.where == Where::host ? std::shared_ptr<char>(reinterpret_cast<char*>(to), [](char*) {})
                                                 : engine().open(target, device, true);
    const auto in = staged ? std::shared_ptr<char>(staged, staged->data()) : engine().open(source, device, true);
    if (out && in) memmove(out.get(), in.get(), bytes);
  });
  if (target.where == Where::host) stream->wait(number);
  return settled(*stream);
}

}  // namespace

FAKE_EXPORT Result cuGetErrorName(Result code, const char** name) {
  if (!name) return invalid_value;
  for (const auto& one : results)
    if (one.code == code) return *name = one.name, success;
  *name = nullptr;
  return invalid_value;
}

FAKE_EXPORT Result cuGetErrorString(Result code, const char** text) {
  if (!text) return invalid_value;
  for (const auto& one : results)
    if (one.code == code) return *text = one.text, success;
  *text = nullptr;
  return invalid_value;
}

FAKE_EXPORT Result cuInit(unsigned flags) {
  if (flags) return invalid_value;
  if (!engine().devices()) return no_device;
  pid_t nobody = 0;
  if (!initialized.compare_exchange_strong(nobody, getpid()) && nobody != getpid()) return not_initialized;
  return success;
}

FAKE_EXPORT Result cuDriverGetVersion(int* version) {
  if (!version) return invalid_value;
  *version = driver_version();
  return success;
}

FAKE_EXPORT Result cuDeviceGetCount(int* count) {
  if (const Result result = ready()) return result;
  if (!count) return invalid_value;
  *count = engine().devices();
  return success;
}

namespace {
Result check(Device device) {
  if (const Result result = ready()) return result;
  return device < 0 || device >= engine().devices() ? invalid_device : success;
}
}  // namespace

FAKE_EXPORT Result cuDeviceGet(Device* device, int ordinal) {
  if (const Result result = check(ordinal)) return result;
  if (!device) return invalid_value;
  *device = ordinal;
  return success;
}

FAKE_EXPORT Result cuDeviceGetName(char* name, int bytes, Device device) {
  if (const Result result = check(device)) return result;
  if (!name || bytes < 1) return invalid_value;
  snprintf(name, static_cast<size_t>(bytes), "Stand-in without a GPU");
  return success;
}

FAKE_EXPORT Result cuDeviceGetUuid_v2(unsigned char* uuid, Device device) {
  if (const Result result = check(device)) return result;
  if (!uuid) return invalid_value;
  memcpy(uuid, engine().uuid(device).data(), 16);
  return success;
}

FAKE_EXPORT Result cuDeviceGetUuid(unsigned char* uuid, Device device) { return cuDeviceGetUuid_v2(uuid, device); }

FAKE_EXPORT Result cuDeviceGetAttribute(int* value, int attribute, Device device) {
  if (const Result result = check(device)) return result;
  if (!value) return invalid_value;
  const int capability = static_cast<int>(number("FAKE_CUDA_CAPABILITY", 90));
  switch (attribute) {
    case 1:  // threads per block
      *value = 1024;
      break;
    case 2:
    case 3:  // threads per block in x, y
      *value = 1024;
      break;
    case 4:  // threads per block in z
      *value = 64;
      break;
    case 5:  // blocks per grid in x
      *value = 2147483647;
      break;
    case 6:
    case 7:
      *value = 65535;
      break;
    case 8:  // shared memory per block
      *value = 49152;
      break;
    case 10:  // threads per warp
      *value = 32;
      break;
    case 16:  // multiprocessors
      *value = 132;
      break;
    case 33:  // PCI bus
      *value = device + 1;
      break;
    case 34:  // PCI device
      *value = 0;
      break;
    case 39:  // threads per multiprocessor
      *value = 2048;
      break;
    case 40:  // asynchronous engines
    case 41:  // unified addressing
      *value = 1;
      break;
    case 50:  // PCI domain
      *value = 0;
      break;
    case 83:  // managed memory
    case 89:  // concurrent use of managed memory by host and device
      *value = 1;
      break;
    case 75:
      *value = capability / 10;
      break;
    case 76:
      *value = capability % 10;
      break;
    case 78:  // stream priorities
      *value = 1;
      break;
    case 115:  // memory pools
      *value = 1;
      break;
    default:
      return invalid_value;
  }
  return success;
}

FAKE_EXPORT Result cuDevicePrimaryCtxRetain(Context* context, Device device) {
  if (const Result result = check(device)) return result;
  if (!context) return invalid_value;
  {
    std::lock_guard lock(retained_mutex);
    ++retained[device];
  }
  engine().count("contexts", 1);
  *context = context_of(device);
  return success;
}

FAKE_EXPORT Result cuCtxPushCurrent_v2(Context context) {
  if (const Result result = ready()) return result;
  const Device device = device_of(context);
  if (device < 0) return invalid_context;
  auto stack = contexts;
  stack.push_back(device);
  set(std::move(stack));
  return success;
}

FAKE_EXPORT Result cuCtxPopCurrent_v2(Context* context) {
  if (const Result result = ready()) return result;
  if (contexts.empty() || contexts.back() < 0) return invalid_context;
  if (context) *context = context_of(contexts.back());
  auto stack = contexts;
  stack.pop_back();
  set(std::move(stack));
  return success;
}

FAKE_EXPORT Result cuCtxGetCurrent(Context* context) {
  if (const Result result = ready()) return result;
  if (!context) return invalid_value;
  *context = contexts.empty() ? 0 : context_of(contexts.back());
  return success;
}

FAKE_EXPORT Result cuCtxSetCurrent(Context context) {
  if (const Result result = ready()) return result;
  auto stack = contexts;
  if (!stack.empty()) stack.pop_back();
  if (context) {
    const Device device = device_of(context);
    if (device < 0) return invalid_context;
    stack.push_back(device);
  }
  set(std::move(stack));
  return success;
}

FAKE_EXPORT Result cuCtxGetDevice(Device* device) {
  if (!device) return invalid_value;
  return current(*device);
}

FAKE_EXPORT Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  if (const Result result = current()) return result;
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return success;
}

FAKE_EXPORT Result cuStreamCreateWithPriority(Handle* handle, unsigned flags, int /*priority*/) {
  Device device;
  if (const Result result = current(device)) return result;
  if (!handle || flags > 1) return invalid_value;
  *handle = engine().create_stream(device, !(flags & 1));
  return success;
}

FAKE_EXPORT Result cuStreamCreate(Handle* handle, unsigned flags) { return cuStreamCreateWithPriority(handle, flags, 0); }

FAKE_EXPORT Result cuStreamDestroy_v2(Handle handle) {
  if (const Result result = ready()) return result;
  return handle > 2 && engine().destroy_stream(handle) ? success : invalid_handle;
}

FAKE_EXPORT Result cuStreamSynchronize(Handle handle) {
  std::shared_ptr<Stream> stream;
  if (const Result result = stream_of(handle, stream)) return result;
  if (stream->capturing()) return capture_unsupported;
  stream->wait(stream->tail());
  return settled(*stream);
}

FAKE_EXPORT Result cuStreamQuery(Handle handle) {
  std::shared_ptr<Stream> stream;
  if (const Result result = stream_of(handle, stream)) return result;
  if (stream->capturing()) return capture_unsupported;
  if (const Result result = settled(*stream)) return result;
  return stream->reached(stream->tail()) ? success : not_ready;
}

FAKE_EXPORT Result cuStreamWaitEvent(Handle handle, Handle event, unsigned flags) {
  enter_driver();
  std::shared_ptr<Stream> stream;
  if (const Result result = stream_of(handle, stream)) return result;
  if (flags > 1) return invalid_value;
  const auto mark = engine().mark(event);
  if (!mark) return invalid_handle;
  if (mark->captured && !stream->capturing()) return captured_event;
  engine().wait_for(*stream, *mark);
  return success;
}

FAKE_EXPORT Result cuStreamIsCapturing(Handle handle, int* status) {
  std::shared_ptr<Stream> stream;
  if (const Result result = stream_of(handle, stream)) return result;
  if (!status) return invalid_value;
  *status = stream->capturing() ? 1 : 0;
  return success;
}

namespace {

// The driver has this rule: while a capture in global mode is under way, threads in global mode must not make calls that could be
// unsafe for the capture. If a thread makes such a call, the capture ends. Every thread starts in global mode.
enum { mode_global = 0, mode_relaxed = 2 };
std::atomic<int> global_captures{0};
thread_local int capture_mode = mode_global;

bool unsafe_for_captures(const char* call) {
  if (!global_captures || capture_mode == mode_relaxed) return false;
  engine().violation("capture", std::string(call) + " while a stream is being captured ends the capture");
  return true;
}

}  // namespace

FAKE_EXPORT Result cuThreadExchangeStreamCaptureMode(int* mode) {
  if (!mode || *mode < mode_global || *mode > mode_relaxed) return invalid_value;
  std::swap(*mode, capture_mode);
  return success;
}

FAKE_EXPORT Result cuStreamBeginCapture_v2(Handle handle, int mode) {
  std::shared_ptr<Stream> stream;
  if (const Result result = stream_of(handle, stream)) return result;
  if (mode < 0 || mode > 2) return invalid_value;
  if (handle < 2) return capture_unsupported;
  if (stream->capturing()) return 401;
  engine().set_capturing(*stream, true);
  if (mode == mode_global) global_captures++;
  return success;
}

FAKE_EXPORT Result cuStreamEndCapture(Handle handle, Handle* graph) {
  std::shared_ptr<Stream> stream;
  if (const Result result = stream_of(handle, stream)) return result;
  if (!graph) return invalid_value;
  if (!stream->capturing()) return 401;
  engine().set_capturing(*stream, false);
  if (global_captures) global_captures--;
  *graph = engine().take_graph(*stream);
  return success;
}

FAKE_EXPORT Result cuGraphLaunch(Handle executable, Handle handle) {
  std::shared_ptr<Stream> stream;
  if (const Result result = stream_of(handle, stream)) return result;
  return engine().launch_graph(executable, *stream) ? success : invalid_value;
}

FAKE_EXPORT Result cuGraphExecDestroy(Handle executable) { return engine().destroy_graph(executable) ? success : invalid_value; }

FAKE_EXPORT Result cuEventCreate(Handle* handle, unsigned flags) {
  Device device;
  if (const Result result = current(device)) return result;
  if (!handle || flags & ~7u) return invalid_value;
  *handle = engine().create_event(device);
  return success;
}

FAKE_EXPORT Result cuEventDestroy_v2(Handle handle) {
  if (const Result result = ready()) return result;
  return engine().destroy_event(handle) ? success : invalid_handle;
}

FAKE_EXPORT Result cuEventRecord(Handle event, Handle handle) {
  enter_driver();
  std::shared_ptr<Stream> stream;
  if (const Result result = stream_of(handle, stream)) return result;
  if (engine().event_device(event) != stream->device()) return invalid_handle;  // no such event, or an event of another context
  return engine().record(event, stream) ? success : invalid_handle;
}

FAKE_EXPORT Result cuEventQuery(Handle event) {
  enter_driver();
  if (const Result result = ready()) return result;
  if (unsafe_for_captures("cuEventQuery")) return capture_unsupported;
  const auto mark = engine().mark(event);
  if (!mark) return invalid_handle;
  if (mark->captured) return captured_event;
  if (mark->stream)
    if (const Result result = settled(*mark->stream)) return result;
  return mark->reached() ? success : not_ready;
}

FAKE_EXPORT Result cuMemAlloc_v2(Pointer* memory, size_t bytes) {
  Device device;
  if (const Result result = current(device)) return result;
  if (!memory || !bytes) return invalid_value;
  const Address address = engine().allocate(device, bytes);
  if (!address) return out_of_memory;
  *memory = address;
  return success;
}

// Host and device can use this memory at any time. If the host reads the memory before the stream has written it, the host sees
// the old value.
FAKE_EXPORT Result cuMemAllocManaged(Pointer* memory, size_t bytes, unsigned flags) {
  constexpr unsigned attach_global = 1, attach_host = 2;
  Device device;
  if (const Result result = current(device)) return result;
  if (!memory || !bytes || (flags != attach_global && flags != attach_host)) return invalid_value;
  const Address address = engine().allocate(device, bytes, true);
  if (!address) return out_of_memory;
  *memory = address;
  return success;
}

FAKE_EXPORT Result cuMemFree_v2(Pointer memory) {
  if (const Result result = current()) return result;
  if (!memory) return success;
  return engine().release(memory) ? success : invalid_value;
}

// Frees the memory in stream order, as a caching allocator does.
FAKE_EXPORT Result cuMemFreeAsync(Pointer memory, Handle handle) {
  std::shared_ptr<Stream> stream;
  if (const Result result = stream_of(handle, stream)) return result;
  const Buffer buffer = engine().find(memory, 1);
  if (buffer.where != Where::device || buffer.start != memory) return invalid_value;
  stream->enqueue([memory] { engine().release(memory); }, false);
  return success;
}

FAKE_EXPORT Result cuMemcpyHtoDAsync_v2(Pointer to, const void* from, size_t bytes, Handle stream) {
  return copy(to, reinterpret_cast<Pointer>(from), bytes, stream);
}
FAKE_EXPORT Result cuMemcpyDtoHAsync_v2(void* to, Pointer from, size_t bytes, Handle stream) {
  return copy(reinterpret_cast<Pointer>(to), from, bytes, stream);
}
FAKE_EXPORT Result cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, size_t bytes, Handle stream) {
  return copy(to, from, bytes, stream);
}

FAKE_EXPORT Result cuMemsetD8Async(Pointer to, unsigned char value, size_t count, Handle handle) {
  std::shared_ptr<Stream> stream;
  if (const Result result = stream_of(handle, stream)) return result;
  if (!count) return success;
  const Buffer buffer = engine().find(to, count);
  if (!buffer.allocation || to + count > buffer.start + buffer.length) return invalid_value;
  stream->enqueue([=, device = stream->device()] {
    if (const auto bytes = engine().open(buffer, device, true)) memset(bytes.get(), value, count);
  });
  return success;
}

// The functions from before CUDA 3.2 have 32-bit addresses and sizes. Code that calls them has looked up the wrong name.
#define OLD(name, ...)                                                                           \
  FAKE_EXPORT Result name(__VA_ARGS__) {                                                         \
    engine().violation("old_symbol", #name " was called: it has 32-bit addresses, ask for _v2"); \
    return invalid_value;                                                                        \
  }
OLD(cuMemAlloc, unsigned*, unsigned)
OLD(cuMemFree, unsigned)
OLD(cuMemcpyHtoD, unsigned, const void*, unsigned)
OLD(cuMemcpyDtoH, void*, unsigned, unsigned)
OLD(cuMemcpyHtoDAsync, unsigned, const void*, unsigned, Handle)
OLD(cuMemcpyDtoHAsync, void*, unsigned, unsigned, Handle)
OLD(cuMemcpyDtoDAsync, unsigned, unsigned, unsigned, Handle)
OLD(cuMemGetInfo, unsigned*, unsigned*)
OLD(cuMemGetAddressRange, unsigned*, unsigned*, unsigned)
OLD(cuDeviceTotalMem, unsigned*, int)
#undef OLD

namespace {
// Returns false if there is no such attribute.
bool attribute(const Buffer& buffer, int which, void* data) {
  const auto put = [&](auto value) { memcpy(data, &value, sizeof value); };
  const bool on_device = buffer.where == Where::device;
  switch (which) {
    case 1:
      put(context_of(buffer.device));
      break;
    case 2:
      put(on_device ? 2u : 1u);
      break;
    case 3:
      put(buffer.address);
      break;
    case 4:
      put(on_device && !buffer.managed ? Address{0} : buffer.address);
      break;
    case 7:
      put(buffer.allocation);
      break;
    case 8:
      put(buffer.managed ? 1u : 0u);
      break;
    case 9:
      put(buffer.device);
      break;
    case 11:
      put(buffer.start);
      break;
    case 12:
      put(buffer.length);
      break;
    case 13:
      put(1u);
      break;
    default:
      return false;
  }
  return true;
}
}  // namespace

FAKE_EXPORT Result cuPointerGetAttribute(void* data, int which, Pointer memory) {
  if (const Result result = ready()) return result;
  if (!data) return invalid_value;
  const Buffer buffer = engine().find(memory, 0);
  if (!buffer.allocation) return invalid_value;  // host memory that CUDA does not know
  return attribute(buffer, which, data) ? success : invalid_value;
}

// An image serves all contexts. A CUkernel is also its CUfunction in every context.
FAKE_EXPORT Result cuModuleLoadData(Handle* module, const void* image) {
  if (const Result result = current()) return result;
  if (!module || !image) return invalid_value;
  *module = can_run(image) ? 1 : 0;
  return *module ? success : no_binary_for_gpu;
}
FAKE_EXPORT Result cuLibraryLoadData(Handle* library, const void* image, int*, void**, unsigned, int*, void**, unsigned) {
  if (driver_version() < 12000) return not_supported;
  if (const Result result = ready()) return result;
  if (!library || !image) return invalid_value;
  *library = can_run(image) ? 1 : 0;
  return *library ? success : no_binary_for_gpu;
}
FAKE_EXPORT Result cuLibraryGetKernel(Handle* kernel, Handle library, const char* name) {
  if (library != 1) return invalid_handle;
  if (!kernel || !name) return invalid_value;
  *kernel = kernel_named(name);
  return *kernel ? success : not_found;
}
FAKE_EXPORT Result cuKernelGetFunction(Handle* function, Handle kernel) {
  if (const Result result = current()) return result;
  if (!function) return invalid_value;
  *function = kernel;
  return kernel ? success : invalid_handle;
}
FAKE_EXPORT Result cuModuleGetFunction(Handle* function, Handle module, const char* name) {
  if (const Result result = current()) return result;
  return cuLibraryGetKernel(function, module, name);
}
FAKE_EXPORT Result cuFuncLoad(Handle function) {
  if (const Result result = current()) return result;
  return function ? success : invalid_handle;
}
FAKE_EXPORT Result cuLaunchKernel(Handle function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                                  unsigned block_y, unsigned block_z, unsigned shared_bytes, Handle handle, void** parameters,
                                  void** extra) {
  std::shared_ptr<Stream> stream;
  if (const Result result = stream_of(handle, stream)) return result;
  if (grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 || shared_bytes || extra || !parameters) return invalid_value;
  return launch_kernel(function, grid_x, block_x, parameters[0], stream) ? success : invalid_value;
}
