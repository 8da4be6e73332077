#include "device/cuda.h"

#include <array>
#include <cstdio>
#include <mutex>

#include "base/error.h"

namespace mscomm {

namespace {

// Of cuda.h; the names of functions are those that its macros stand for. tests/core/abi_test.cc compares them.
using Result = int;
using Device = int;
using Context = void*;
struct Uuid {
  std::array<unsigned char, 16> bytes;
};
constexpr Result success = 0, not_ready = 600;
constexpr unsigned stream_non_blocking = 1, event_disable_timing = 2;
constexpr int capture_mode_relaxed = 2, attribute_device_ordinal = 9;

struct Driver {
  explicit Driver(const Dynlib& library) {
    library.need(init, "cuInit");
    library.need(driver_version, "cuDriverGetVersion");
    library.need(device_count, "cuDeviceGetCount");
    library.need(device_name, "cuDeviceGetName");
    library.find(device_uuid, "cuDeviceGetUuid_v2");  // of a part of a GPU its own
    if (!device_uuid) library.need(device_uuid, "cuDeviceGetUuid");
    library.need(retain, "cuDevicePrimaryCtxRetain");
    library.need(set_current, "cuCtxSetCurrent");
    library.need(push, "cuCtxPushCurrent_v2");
    library.need(pop, "cuCtxPopCurrent_v2");
    library.need(priority_range, "cuCtxGetStreamPriorityRange");
    library.need(stream_create, "cuStreamCreateWithPriority");
    library.need(stream_destroy, "cuStreamDestroy_v2");
    library.need(stream_wait, "cuStreamWaitEvent");
    library.need(stream_captures, "cuStreamIsCapturing");
    library.need(event_create, "cuEventCreate");
    library.need(event_destroy, "cuEventDestroy_v2");
    library.need(event_record, "cuEventRecord");
    library.need(event_query, "cuEventQuery");
    library.need(copy, "cuMemcpyDtoDAsync_v2");
    library.need(pointer_attribute, "cuPointerGetAttribute");
    library.need(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
    library.need(allocate, "cuMemAlloc_v2");
    library.need(free, "cuMemFree_v2");
    library.need(error_name, "cuGetErrorName");
    library.need(error_string, "cuGetErrorString");
  }

  Result (*init)(unsigned flags);
  Result (*driver_version)(int* version);
  Result (*device_count)(int* count);
  Result (*device_name)(char* name, int length, Device device);
  Result (*device_uuid)(Uuid* uuid, Device device);
  Result (*retain)(Context* context, Device device);
  Result (*set_current)(Context context);
  Result (*push)(Context context);
  Result (*pop)(Context* context);
  Result (*priority_range)(int* least, int* greatest);
  Result (*stream_create)(StreamHandle* stream, unsigned flags, int priority);
  Result (*stream_destroy)(StreamHandle stream);
  Result (*stream_wait)(StreamHandle stream, EventHandle event, unsigned flags);
  Result (*stream_captures)(StreamHandle stream, int* status);
  Result (*event_create)(EventHandle* event, unsigned flags);
  Result (*event_destroy)(EventHandle event);
  Result (*event_record)(EventHandle event, StreamHandle stream);
  Result (*event_query)(EventHandle event);
  Result (*copy)(unsigned long long to, unsigned long long from, size_t bytes, StreamHandle stream);
  Result (*pointer_attribute)(void* value, int attribute, unsigned long long memory);
  Result (*exchange_capture_mode)(int* mode);
  Result (*allocate)(unsigned long long* memory, size_t bytes);
  Result (*free)(unsigned long long memory);
  Result (*error_name)(Result error, const char** name);
  Result (*error_string)(Result error, const char** text);
};

class Cuda final : public Runtime {
 public:
  explicit Cuda(Dynlib library) : library_(std::move(library)), driver_(library_) {
    if (const Result result = driver_.init(0); result != success)
      throw Error("BackendUnavailable", "the CUDA driver " + library_.path() + " finds no GPU: " + text_of(result));
    int count = 0;
    check(driver_.device_count(&count), "cuDeviceGetCount");
    contexts_.resize(static_cast<size_t>(count));
  }

  std::string version() const override {
    int version = 0;
    check(driver_.driver_version(&version), "cuDriverGetVersion");
    return "CUDA " + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10) + " (" + library_.path() + ")";
  }

  int devices() const override { return static_cast<int>(contexts_.size()); }

  std::string device_name(int device) const override {
    char name[256] = {};
    check(driver_.device_name(name, sizeof name, device), "cuDeviceGetName");
    return name;
  }

  std::string uuid(int device) const override {
    Uuid uuid{};
    check(driver_.device_uuid(&uuid, device), "cuDeviceGetUuid");
    std::string text = "GPU-";
    for (size_t i = 0; i < uuid.bytes.size(); i++) {
      char digits[4];
      std::snprintf(digits, sizeof digits, "%02x", uuid.bytes[i]);
      text += (i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "") + std::string(digits);
    }
    return text;
  }

  void use(int device) override { check(driver_.set_current(context_of(device)), "cuCtxSetCurrent"); }

  StreamHandle make_stream() override {
    int least = 0, greatest = 0;
    check(driver_.priority_range(&least, &greatest), "cuCtxGetStreamPriorityRange");
    StreamHandle stream = nullptr;
    check(driver_.stream_create(&stream, stream_non_blocking, greatest), "cuStreamCreateWithPriority");
    return stream;
  }
  // What cannot be destroyed is the device's, which has failed: there is nobody to tell.
  void destroy_stream(StreamHandle stream) noexcept override { (void)driver_.stream_destroy(stream); }

  EventHandle make_event() override {
    EventHandle event = nullptr;
    check(driver_.event_create(&event, event_disable_timing), "cuEventCreate");
    return event;
  }
  void destroy_event(EventHandle event) noexcept override { (void)driver_.event_destroy(event); }
  void record(EventHandle event, StreamHandle stream) override { check(driver_.event_record(event, stream), "cuEventRecord"); }
  void wait(StreamHandle stream, EventHandle event) override {
    check(driver_.stream_wait(stream, event, 0), "cuStreamWaitEvent");
  }
  bool passed(EventHandle event) override {
    const Result result = driver_.event_query(event);
    if (result != not_ready) check(result, "cuEventQuery");
    return result == success;
  }
  void copy(void* to, const void* from, size_t bytes, StreamHandle stream) override {
    check(driver_.copy(reinterpret_cast<uintptr_t>(to), reinterpret_cast<uintptr_t>(from), bytes, stream), "cuMemcpyDtoDAsync");
  }
  bool events_can_be_used_again() const override { return true; }
  void leave_captures_alone() override {
    int mode = capture_mode_relaxed;
    check(driver_.exchange_capture_mode(&mode), "cuThreadExchangeStreamCaptureMode");
  }
  int device_of(const void* memory) override {
    int device = -1;
    check(driver_.pointer_attribute(&device, attribute_device_ordinal, reinterpret_cast<uintptr_t>(memory)),
          "cuPointerGetAttribute");
    return device;
  }
  void* allocate(size_t bytes) override {
    unsigned long long memory = 0;
    check(driver_.allocate(&memory, bytes), "cuMemAlloc");
    return reinterpret_cast<void*>(memory);
  }
  void free(void* memory) noexcept override { (void)driver_.free(reinterpret_cast<uintptr_t>(memory)); }
  bool captures(StreamHandle stream) override {
    int status = 0;
    check(driver_.stream_captures(stream, &status), "cuStreamIsCapturing");
    return status != 0;
  }

 private:
  void push(int device) override { check(driver_.push(context_of(device)), "cuCtxPushCurrent"); }
  void pop() noexcept override {
    Context context;
    (void)driver_.pop(&context);
  }

  // The primary context, which the CUDA runtime of all array libraries uses too. Kept until the process ends.
  Context context_of(int device) {
    if (device < 0 || device >= devices())
      throw Error("ValueError", "there is no GPU " + std::to_string(device) + "; this process sees " + std::to_string(devices()));
    const std::lock_guard lock(mutex_);
    Context& context = contexts_[static_cast<size_t>(device)];
    if (!context) check(driver_.retain(&context, device), "cuDevicePrimaryCtxRetain");
    return context;
  }

  std::string text_of(Result result) const {
    const char *name = nullptr, *text = nullptr;
    (void)driver_.error_name(result, &name);
    (void)driver_.error_string(result, &text);
    return std::string(name ? name : "error") + " (" + std::to_string(result) + ")" + (text ? std::string(", ") + text : "");
  }

  void check(Result result, const char* what) const {
    if (result != success) throw Error("Error", std::string(what) + ": " + text_of(result));
  }

  const Dynlib library_;
  const Driver driver_;
  std::mutex mutex_;  // protects contexts_
  std::vector<Context> contexts_;
};

}  // namespace

std::unique_ptr<Runtime> open_cuda(const std::vector<Candidate>& candidates) {
  return std::make_unique<Cuda>(Dynlib("libcuda.so.1, NVIDIA's driver", candidates));
}

}  // namespace mscomm
