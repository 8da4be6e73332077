// Compares our declarations of the driver functions in csrc/device/cuda.cc with the driver's own header, cuda.h.
// tests/test_pack.py compiles this file if the header is installed.
#include <cuda.h>

#include <cstddef>
#include <type_traits>

// True if each parameter has the same size in both function types, and is a pointer in both or in neither. The parameters' types
// can still differ: our declarations use pointers for handles, ints for enums, and 64-bit integers for device addresses.
template <typename Theirs, typename Ours>
constexpr bool same_shape = false;
template <typename... A, typename... B>
constexpr bool same_shape<CUresult (*)(A...), int (*)(B...)> =
    ((sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B>) && ...);

static_assert(CUDA_SUCCESS == 0 && CUDA_ERROR_NOT_READY == 600);
static_assert(CU_STREAM_NON_BLOCKING == 1 && CU_EVENT_DISABLE_TIMING == 2 && CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT == 16);
static_assert(sizeof(CUuuid) == 16 && sizeof(CUdeviceptr) == 8);

static_assert(same_shape<decltype(&cuDeviceGetAttribute), int (*)(int*, int, int)>);
static_assert(same_shape<decltype(&cuCtxGetDevice), int (*)(int*)>);
static_assert(same_shape<decltype(&cuCtxGetCurrent), int (*)(void**)>);
static_assert(same_shape<decltype(&cuDevicePrimaryCtxRetain), int (*)(void**, int)>);
static_assert(same_shape<decltype(&cuStreamCreateWithPriority), int (*)(void**, unsigned, int)>);
static_assert(same_shape<decltype(&cuStreamWaitEvent), int (*)(void*, void*, unsigned)>);
static_assert(same_shape<decltype(&cuStreamIsCapturing), int (*)(void*, int*)>);
static_assert(same_shape<decltype(&cuEventCreate), int (*)(void**, unsigned)>);
static_assert(same_shape<decltype(&cuEventRecord), int (*)(void*, void*)>);
static_assert(same_shape<decltype(&cuMemcpyDtoDAsync), int (*)(unsigned long long, unsigned long long, size_t, void*)>);
static_assert(same_shape<decltype(&cuMemsetD8Async), int (*)(unsigned long long, unsigned char, size_t, void*)>);
static_assert(same_shape<decltype(&cuModuleLoadData), int (*)(void**, const void*)>);
static_assert(same_shape<decltype(&cuModuleGetFunction), int (*)(void**, void*, const char*)>);
static_assert(
    same_shape<decltype(&cuLibraryLoadData), int (*)(void**, const void*, int*, void**, unsigned, int*, void**, unsigned)>);
static_assert(same_shape<decltype(&cuLibraryGetKernel), int (*)(void**, void*, const char*)>);
static_assert(same_shape<decltype(&cuKernelGetFunction), int (*)(void**, void*)>);
#if CUDA_VERSION >= 12040
static_assert(same_shape<decltype(&cuFuncLoad), int (*)(void*)>);
#endif
static_assert(same_shape<decltype(&cuLaunchKernel), int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                                            unsigned, void*, void**, void**)>);
