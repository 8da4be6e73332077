#include "device/cuda.h"

#include <array>
#include <cstdio>
#include <mutex>
#include <optional>
#include <type_traits>

#include "base/error.h"

namespace mscomm {

namespace {

// These declarations follow cuda.h, where macros such as cuMemAlloc stand for versioned names such as cuMemAlloc_v2. We look up
// the versioned names. tests/core/cuda_abi.cc compares the declarations with cuda.h.
using Result = int;
using Device = int;
using Context = void*;
using Function = void*;
using Module = void*;
using Library = void*;
using LoadedKernel = void*;
struct Uuid {
  std::array<unsigned char, 16> bytes;
};
constexpr Result success = 0, not_ready = 600;
constexpr unsigned stream_non_blocking = 1, event_disable_timing = 2;
constexpr int capture_mode_relaxed = 2, attribute_device_ordinal = 9;
constexpr int multiprocessor_count = 16;  // the number of the device attribute

struct Driver {
  const Dynlib& library;

  // Returns a null address if the driver is older than CUDA 12 or does not have the function. since_12() uses driver_version,
  // which must therefore be declared before all members that call since_12().
  Dynlib::Symbol since_12(const char* name) const {
    int version = 0;
    return driver_version(&version) == success && version >= 12000 ? library.find(name) : Dynlib::Symbol{};
  }

  Result (*init)(unsigned flags) = library.need("cuInit");
  Result (*driver_version)(int* version) = library.need("cuDriverGetVersion");
  Result (*device_count)(int* count) = library.need("cuDeviceGetCount");
  Result (*device_name)(char* name, int length, Device device) = library.need("cuDeviceGetName");
  // cuDeviceGetUuid_v2 returns a different uuid for each MIG instance of a GPU.
  Result (*device_uuid_v2)(Uuid* uuid, Device device) = library.find("cuDeviceGetUuid_v2");
  Result (*device_uuid)(Uuid* uuid, Device device) = device_uuid_v2 ? device_uuid_v2 : library.need("cuDeviceGetUuid");
  Result (*device_attribute)(int* value, int attribute, Device device) = library.need("cuDeviceGetAttribute");
  Result (*current_device)(Device* device) = library.need("cuCtxGetDevice");
  Result (*retain)(Context* context, Device device) = library.need("cuDevicePrimaryCtxRetain");
  Result (*current)(Context* context) = library.need("cuCtxGetCurrent");
  Result (*set_current)(Context context) = library.need("cuCtxSetCurrent");
  Result (*push)(Context context) = library.need("cuCtxPushCurrent_v2");
  Result (*pop)(Context* context) = library.need("cuCtxPopCurrent_v2");
  Result (*priority_range)(int* least, int* greatest) = library.need("cuCtxGetStreamPriorityRange");
  Result (*stream_create)(StreamHandle* stream, unsigned flags, int priority) = library.need("cuStreamCreateWithPriority");
  Result (*stream_destroy)(StreamHandle stream) = library.need("cuStreamDestroy_v2");
  Result (*stream_wait)(StreamHandle stream, EventHandle event, unsigned flags) = library.need("cuStreamWaitEvent");
  Result (*stream_captures)(StreamHandle stream, int* status) = library.need("cuStreamIsCapturing");
  Result (*event_create)(EventHandle* event, unsigned flags) = library.need("cuEventCreate");
  Result (*event_destroy)(EventHandle event) = library.need("cuEventDestroy_v2");
  Result (*event_record)(EventHandle event, StreamHandle stream) = library.need("cuEventRecord");
  Result (*event_query)(EventHandle event) = library.need("cuEventQuery");
  Result (*copy)(unsigned long long to, unsigned long long from, size_t bytes,
                 StreamHandle stream) = library.need("cuMemcpyDtoDAsync_v2");
  Result (*set)(unsigned long long memory, unsigned char byte, size_t bytes,
                StreamHandle stream) = library.need("cuMemsetD8Async");
  Result (*pointer_attribute)(void* value, int attribute, unsigned long long memory) = library.need("cuPointerGetAttribute");
  Result (*exchange_capture_mode)(int* mode) = library.need("cuThreadExchangeStreamCaptureMode");
  Result (*allocate)(unsigned long long* memory, size_t bytes) = library.need("cuMemAlloc_v2");
  Result (*free)(unsigned long long memory) = library.need("cuMemFree_v2");
  Result (*launch)(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned shared_bytes, StreamHandle stream, void** parameters,
                   void** extra) = library.need("cuLaunchKernel");
  Result (*module_load)(Module* module, const void* image) = library.need("cuModuleLoadData");
  Result (*module_function)(Function* function, Module module, const char* name) = library.need("cuModuleGetFunction");
  Result (*library_load)(Library* library, const void* image, int* jit_options, void** jit_values, unsigned jit_count,
                         int* options, void** values, unsigned count) = since_12("cuLibraryLoadData");
  Result (*library_kernel)(LoadedKernel* kernel, Library library, const char* name) = since_12("cuLibraryGetKernel");
  Result (*kernel_function)(Function* function, LoadedKernel kernel) = since_12("cuKernelGetFunction");
  Result (*function_load)(Function function) = since_12("cuFuncLoad");  // since CUDA 12.4
  Result (*error_name)(Result error, const char** name) = library.need("cuGetErrorName");
  Result (*error_string)(Result error, const char** text) = library.need("cuGetErrorString");
};

class Cuda final : public Runtime {
 public:
  Cuda(Dynlib library, Image image) : library_(std::move(library)), driver_{library_}, image_(image) {
    if (const Result result = driver_.init(0); result != success)
      throw Error("BackendUnavailable", "the CUDA driver " + library_.path() + " finds no GPU: " + text_of(result));
    devices_.resize(got("cuDeviceGetCount", driver_.device_count));
  }

  std::string version() const override {
    const int version = got("cuDriverGetVersion", driver_.driver_version);
    return "CUDA " + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10) + " (" + library_.path() + ")";
  }

  int devices() const override { return static_cast<int>(devices_.size()); }

  std::string device_name(int device) const override {
    char name[256] = {};
    check(driver_.device_name(name, sizeof name, device), "cuDeviceGetName");
    return name;
  }

  std::string uuid(int device) const override {
    const Uuid uuid = got("cuDeviceGetUuid", driver_.device_uuid, device);
    std::string text = "GPU-";
    for (size_t i = 0; i < uuid.bytes.size(); i++) {
      char digits[4];
      std::snprintf(digits, sizeof digits, "%02x", uuid.bytes[i]);
      text += (i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "") + std::string(digits);
    }
    return text;
  }

  void use(int device) override { check(driver_.set_current(used(device).context), "cuCtxSetCurrent"); }

  StreamHandle make_stream() override {
    int least = 0, greatest = 0;
    check(driver_.priority_range(&least, &greatest), "cuCtxGetStreamPriorityRange");
    return got("cuStreamCreateWithPriority", driver_.stream_create, stream_non_blocking, greatest);
  }
  // Destroying a stream fails only if the device has failed. The result is ignored, because the caller could do nothing about the
  // failure.
  void destroy_stream(StreamHandle stream) noexcept override { (void)driver_.stream_destroy(stream); }

  EventHandle make_event() override { return got("cuEventCreate", driver_.event_create, event_disable_timing); }
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
  void clear(void* memory, size_t bytes, StreamHandle stream) override {
    check(driver_.set(reinterpret_cast<uintptr_t>(memory), 0, bytes, stream), "cuMemsetD8Async");
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
  void* allocate(size_t bytes) override { return reinterpret_cast<void*>(got("cuMemAlloc", driver_.allocate, bytes)); }
  void free(void* memory) noexcept override { (void)driver_.free(reinterpret_cast<uintptr_t>(memory)); }
  bool pack(const Packing& packing, StreamHandle stream) override {
    const Used& device = used(got("cuCtxGetDevice", driver_.current_device));
    if (!device.without.empty()) return false;
    const auto launches = plan(packing, device.multiprocessors);
    if (!launches) return false;
    for (const Launch& one : *launches) {
      void* parameters[] = {const_cast<cuda::Batch*>(&one.batch)};  // the driver copies the batch
      check(driver_.launch(device.functions[one.kernel], one.blocks, 1, 1, cuda::threads, 1, 1, 0, stream, parameters, nullptr),
            "cuLaunchKernel");
    }
    return true;
  }
  std::string kernels(int device) override {
    const std::string embedded(image_.architectures);
    const Used& it = used(device);
    if (it.without.empty()) return std::to_string(it.functions.size()) + " loaded, of " + embedded;
    return "none, " + it.without + (embedded.empty() ? "" : "; embedded: " + embedded);
  }
  bool converts(int device, Dtype part, Dtype bucket) override {
    return used(device).without.empty() && kernels_convert(part, bucket);
  }
  bool captures(StreamHandle stream) override {
    int status = 0;
    check(driver_.stream_captures(stream, &status), "cuStreamIsCapturing");
    return status != 0;
  }

 private:
  bool push(int device) override {
    Context const wanted = used(device).context;
    Context current = nullptr;
    if (driver_.current(&current) == success && current == wanted) return false;
    check(driver_.push(wanted), "cuCtxPushCurrent");
    return true;
  }
  void pop() noexcept override {
    Context context;
    (void)driver_.pop(&context);
  }

  struct Used {
    Context context = nullptr;  // the device's primary context, which array libraries use as well
    int multiprocessors = 0;
    std::array<Function, mscomm::kernels.size()> functions{};
    std::string without;  // why the device has no kernels; "" if it has them
  };

  // Returns the device's context and kernels. Sets them up when the device is first used, and then keeps them until the process
  // ends.
  const Used& used(Device device) {
    if (device < 0 || device >= devices())
      throw Error("ValueError", "there is no GPU " + std::to_string(device) + "; this process sees " + std::to_string(devices()));
    const std::lock_guard lock(mutex_);
    std::optional<Used>& place = devices_[device];
    if (!place) {
      Used made;
      made.context = got("cuDevicePrimaryCtxRetain", driver_.retain, device);
      check(driver_.push(made.context), "cuCtxPushCurrent");
      made.without = load_kernels(device, made);
      pop();
      place = std::move(made);
    }
    return *place;
  }

  // Loads all kernels for the current device. If this fails, returns the reason. A failure is not an error: a device without
  // kernels packs by copying.
  std::string load_kernels(Device device, Used& to) {
    if (image_.bytes.empty()) return "this mscomm was built without nvcc";
    try {
      to.multiprocessors = got("cuDeviceGetAttribute", driver_.device_attribute, multiprocessor_count, device);
      const bool by_library = driver_.library_load && driver_.library_kernel && driver_.kernel_function;
      Module module = nullptr;
      if (!by_library) {
        module = got("cuModuleLoadData", driver_.module_load, image_.bytes.data());
      } else if (!loaded_) {
        loaded_ = got("cuLibraryLoadData", driver_.library_load, image_.bytes.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
      }
      for (size_t i = 0; i < to.functions.size(); i++) {
        const char* const name = mscomm::kernels[i].name;
        if (by_library) {
          auto* const kernel = got("cuLibraryGetKernel", driver_.library_kernel, loaded_, name);
          to.functions[i] = got("cuKernelGetFunction", driver_.kernel_function, kernel);
        } else {
          to.functions[i] = got("cuModuleGetFunction", driver_.module_function, module, name);
        }
        if (driver_.function_load) check(driver_.function_load(to.functions[i]), "cuFuncLoad");
      }
    } catch (const Error& error) {
      return error.what();
    }
    return {};
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

  // Calls a function of the driver, and returns what the function writes through its first argument. Throws if the call fails.
  template <typename Value, typename... Others>
  Value got(const char* what, Result (*function)(Value*, Others...), std::type_identity_t<Others>... others) const {
    Value value{};
    check(function(&value, others...), what);
    return value;
  }

  const Dynlib library_;
  const Driver driver_;
  const Image image_;
  std::mutex mutex_;          // protects the members below
  Library loaded_ = nullptr;  // the loaded image; it serves all devices
  std::vector<std::optional<Used>> devices_;
};

}  // namespace

std::unique_ptr<Runtime> open_cuda(const std::vector<Candidate>& candidates, Image image) {
  return std::make_unique<Cuda>(Dynlib("libcuda.so.1, NVIDIA's driver", candidates), image);
}

}  // namespace mscomm
