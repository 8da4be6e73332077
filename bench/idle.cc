// Replaces the CUDA driver and NCCL with functions that do nothing, to measure the cost of mscomm itself. Each function returns
// success at once, whatever its arguments are, and the device has always finished its work.
#include <cstddef>
#include <cstring>

#define FAKE_EXPORT extern "C" __attribute__((visibility("default")))
// IDLE defines a function that only returns success. GIVES defines a function that also stores a handle in `*to`.
#define IDLE(name) \
  FAKE_EXPORT int name() { return 0; }
#define GIVES(name) \
  FAKE_EXPORT int name(void** to) { return *to = &place, 0; }

static char place;
static thread_local void* current = nullptr;

IDLE(cuInit)
IDLE(cuCtxGetDevice)
IDLE(cuStreamDestroy_v2)
IDLE(cuStreamWaitEvent)
IDLE(cuEventDestroy_v2)
IDLE(cuEventRecord)
IDLE(cuEventQuery)
IDLE(cuMemcpyDtoDAsync_v2)
IDLE(cuMemsetD8Async)
IDLE(cuThreadExchangeStreamCaptureMode)
IDLE(cuMemAlloc_v2)
IDLE(cuMemFree_v2)
IDLE(cuLaunchKernel)
IDLE(cuModuleLoadData)
IDLE(cuModuleGetFunction)
IDLE(ncclCommFinalize)
IDLE(ncclCommDestroy)
IDLE(ncclCommAbort)
IDLE(ncclAllReduce)
IDLE(ncclAllGather)
IDLE(ncclReduceScatter)
IDLE(ncclBroadcast)
IDLE(ncclReduce)
IDLE(ncclSend)
IDLE(ncclRecv)
IDLE(ncclGroupStart)
IDLE(ncclGroupEnd)
GIVES(cuDevicePrimaryCtxRetain)
GIVES(cuStreamCreateWithPriority)
GIVES(cuEventCreate)
GIVES(ncclCommInitRankConfig)

FAKE_EXPORT int cuDriverGetVersion(int* version) { return *version = 11080, 0; }
FAKE_EXPORT int cuDeviceGetCount(int* count) { return *count = 8, 0; }
FAKE_EXPORT int cuDeviceGetName(char* name, int bytes, int) { return std::strncpy(name, "idle", static_cast<size_t>(bytes)), 0; }
FAKE_EXPORT int cuDeviceGetUuid(unsigned char* uuid, int device) {
  std::memset(uuid, device, 16);
  return 0;
}
FAKE_EXPORT int cuDeviceGetAttribute(int* value, int, int) { return *value = 1, 0; }
FAKE_EXPORT int cuCtxGetCurrent(void** context) { return *context = current, 0; }
FAKE_EXPORT int cuCtxSetCurrent(void* context) { return current = context, 0; }
FAKE_EXPORT int cuCtxPushCurrent_v2(void* context) { return current = context, 0; }  // the stack holds one context
FAKE_EXPORT int cuCtxPopCurrent_v2(void** context) { return *context = current, 0; }
FAKE_EXPORT int cuCtxGetStreamPriorityRange(int* least, int* greatest) { return *least = *greatest = 0, 0; }
FAKE_EXPORT int cuStreamIsCapturing(void*, int* status) { return *status = 0, 0; }
FAKE_EXPORT int cuPointerGetAttribute(int* value, int, unsigned long long) { return *value = 0, 0; }
FAKE_EXPORT int cuGetErrorName(int, const char** name) { return *name = "CUDA_SUCCESS", 0; }
FAKE_EXPORT int cuGetErrorString(int, const char** text) { return *text = "no error", 0; }

FAKE_EXPORT int ncclGetVersion(int* version) { return *version = 22809, 0; }
FAKE_EXPORT int ncclGetUniqueId(void* id) { return std::memset(id, 0, 128), 0; }
FAKE_EXPORT const char* ncclGetErrorString(int) { return "no error"; }
FAKE_EXPORT const char* ncclGetLastError(void*) { return ""; }
FAKE_EXPORT int ncclCommGetAsyncError(void*, int* result) { return *result = 0, 0; }
