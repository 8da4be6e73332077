#include "device/acl.h"

#include <cstdint>
#include <mutex>

#include "base/error.h"

namespace mscomm {

namespace {

// These types and numbers are from acl/acl_rt.h.
using Result = int;
using Context = void*;
constexpr Result success = 0, repeated_initialize = 100002;
constexpr uint32_t event_sync = 1;
constexpr int device_to_device = 3;
constexpr int event_recorded = 1;  // in aclrtQueryEventStatus; in the older aclrtQueryEvent, 0 means recorded

struct Functions {
  const Dynlib& library;
  Result (*init)(const char* config) = library.need("aclInit");
  Result (*get_version)(int32_t* major, int32_t* minor, int32_t* patch) = library.need("aclrtGetVersion");
  Result (*device_count)(uint32_t* count) = library.need("aclrtGetDeviceCount");
  Result (*set_device)(int32_t device) = library.need("aclrtSetDevice");
  Result (*get_context)(Context* context) = library.need("aclrtGetCurrentContext");
  Result (*set_context)(Context context) = library.need("aclrtSetCurrentContext");
  Result (*create_stream)(StreamHandle* stream) = library.need("aclrtCreateStream");
  Result (*destroy_stream)(StreamHandle stream) = library.need("aclrtDestroyStream");
  Result (*stream_wait)(StreamHandle stream, EventHandle event) = library.need("aclrtStreamWaitEvent");
  Result (*create_event)(EventHandle* event, uint32_t flag) = library.need("aclrtCreateEventWithFlag");
  Result (*create_event_ex)(EventHandle* event, uint32_t flag) = library.find("aclrtCreateEventExWithFlag");
  Result (*destroy_event)(EventHandle event) = library.need("aclrtDestroyEvent");
  Result (*record_event)(EventHandle event, StreamHandle stream) = library.need("aclrtRecordEvent");
  Result (*query_event)(EventHandle event, int* status) = library.need("aclrtQueryEventStatus");
  Result (*copy)(void* to, size_t room, const void* from, size_t bytes, int kind,
                 StreamHandle stream) = library.need("aclrtMemcpyAsync");
  Result (*set)(void* memory, size_t room, int32_t byte, size_t bytes, StreamHandle stream) = library.need("aclrtMemsetAsync");
  Result (*allocate)(void** memory, size_t bytes, int policy) = library.need("aclrtMalloc");
  Result (*free)(void* memory) = library.need("aclrtFree");
  const char* (*soc_name)() = library.find("aclrtGetSocName");
  const char* (*recent_error)() = library.find("aclGetRecentErrMsg");
};

// The contexts that this thread's guards (Runtime::Current) will restore. nullptr means that the thread had no context.
thread_local std::vector<Context> before;

class Acl final : public Runtime {
 public:
  Acl(Dynlib library, std::vector<std::string> visible)
      : library_(std::move(library)), functions_{library_}, visible_(std::move(visible)) {
    // repeated_initialize is no failure: another library in this process has initialised AscendCL. mscomm never finalises it.
    if (const Result result = functions_.init(nullptr); result != success && result != repeated_initialize)
      throw Error("BackendUnavailable", library_.path() + ": aclInit: " + text_of(result));
    uint32_t count = 0;
    if (const Result result = functions_.device_count(&count); result != success || count == 0)
      throw Error("BackendUnavailable", "AscendCL, " + library_.path() + ", finds no NPU: " + text_of(result));
    contexts_.resize(count);
  }

  std::string version() const override {
    int32_t major = 0, minor = 0, patch = 0;
    check(functions_.get_version(&major, &minor, &patch), "aclrtGetVersion");
    const std::string number = std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
    return "AscendCL " + number + " (" + library_.path() + ")";
  }

  int devices() const override { return static_cast<int>(contexts_.size()); }

  std::string device_name(int) const override {
    const char* name = functions_.soc_name ? functions_.soc_name() : nullptr;
    return name ? name : "Ascend";
  }

  // AscendCL has no uuids, so this returns the device's number on its host, as far as this process knows it.
  std::string uuid(int device) const override {
    return "NPU-" + (static_cast<size_t>(device) < visible_.size() ? visible_[device] : std::to_string(device));
  }

  void use(int device) override { check(functions_.set_context(context_of(device)), "aclrtSetCurrentContext"); }

  StreamHandle make_stream() override {
    StreamHandle stream = nullptr;
    check(functions_.create_stream(&stream), "aclrtCreateStream");
    return stream;
  }
  void destroy_stream(StreamHandle stream) noexcept override { (void)functions_.destroy_stream(stream); }

  EventHandle make_event() override {
    EventHandle event = nullptr;
    const auto create = functions_.create_event_ex ? functions_.create_event_ex : functions_.create_event;
    check(create(&event, event_sync), "aclrtCreateEventWithFlag");
    return event;
  }
  void destroy_event(EventHandle event) noexcept override { (void)functions_.destroy_event(event); }
  // An event from aclrtCreateEventWithFlag must be reset before it is used again. This is not possible while something waits for
  // the event. An event from aclrtCreateEventExWithFlag needs no reset.
  bool events_can_be_used_again() const override { return functions_.create_event_ex != nullptr; }
  void record(EventHandle event, StreamHandle stream) override {
    check(functions_.record_event(event, stream), "aclrtRecordEvent");
  }
  void wait(StreamHandle stream, EventHandle event) override {
    check(functions_.stream_wait(stream, event), "aclrtStreamWaitEvent");
  }
  bool passed(EventHandle event) override {
    int status = 0;
    check(functions_.query_event(event, &status), "aclrtQueryEventStatus");
    return status == event_recorded;
  }

  void copy(void* to, const void* from, size_t bytes, StreamHandle stream) override {
    check(functions_.copy(to, bytes, from, bytes, device_to_device, stream), "aclrtMemcpyAsync");
  }
  void clear(void* memory, size_t bytes, StreamHandle stream) override {
    check(functions_.set(memory, bytes, 0, bytes, stream), "aclrtMemsetAsync");
  }
  void* allocate(size_t bytes) override {
    constexpr int huge_pages_first = 0;
    void* memory = nullptr;
    check(functions_.allocate(&memory, bytes, huge_pages_first), "aclrtMalloc");
    return memory;
  }
  void free(void* memory) noexcept override { (void)functions_.free(memory); }

 private:
  bool push(int device) override {
    Context old = nullptr;
    if (functions_.get_context(&old) != success) old = nullptr;  // the thread has no context yet
    Context const wanted = context_of(device);
    if (old == wanted) return false;
    check(functions_.set_context(wanted), "aclrtSetCurrentContext");
    before.push_back(old);
    return true;
  }
  void pop() noexcept override {
    const Context old = before.back();
    before.pop_back();
    if (old) (void)functions_.set_context(old);
  }

  // Returns the device's default context. All libraries that do not create a context of their own share it. It is kept until the
  // process ends.
  Context context_of(int device) {
    if (device < 0 || device >= devices())
      throw Error("ValueError", "there is no NPU " + std::to_string(device) + "; this process sees " + std::to_string(devices()));
    const std::lock_guard lock(mutex_);
    Context& context = contexts_[device];
    if (!context) {
      check(functions_.set_device(device), "aclrtSetDevice");
      check(functions_.get_context(&context), "aclrtGetCurrentContext");
    }
    return context;
  }

  std::string text_of(Result result) const {
    const char* recent = functions_.recent_error ? functions_.recent_error() : nullptr;
    return "error " + std::to_string(result) + (recent && *recent ? ", " + std::string(recent) : "");
  }

  void check(Result result, const char* what) const {
    if (result != success) throw Error("Error", std::string(what) + ": " + text_of(result));
  }

  const Dynlib library_;
  const Functions functions_;
  const std::vector<std::string> visible_;
  std::mutex mutex_;  // protects contexts_
  std::vector<Context> contexts_;
};

}  // namespace

std::unique_ptr<Runtime> open_acl(const std::vector<Candidate>& candidates, std::vector<std::string> visible) {
  return std::make_unique<Acl>(Dynlib("libascendcl.so, CANN's AscendCL", candidates, Dynlib::Names::everybodys),
                               std::move(visible));
}

}  // namespace mscomm
