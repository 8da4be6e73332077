// Compares our declarations with nccl.h from NCCL's own package. tests/test_accelerators.py compiles this file if nccl.h is
// installed.
#include <cstddef>

#include "backend/nccl.h"
#include "nccl.h"

using namespace mscomm::nccl;

constexpr bool same(auto theirs, auto ours) { return static_cast<int>(theirs) == static_cast<int>(ours); }

static_assert(same(ncclSuccess, success) && same(ncclRemoteError, remote_error) && same(ncclInProgress, in_progress));
static_assert(same(ncclInt8, int8) && same(ncclUint8, uint8) && same(ncclInt32, int32) && same(ncclUint32, uint32) &&
              same(ncclInt64, int64) && same(ncclUint64, uint64) && same(ncclFloat16, float16) && same(ncclFloat32, float32) &&
              same(ncclFloat64, float64) && same(ncclBfloat16, bfloat16));
static_assert(same(ncclSum, sum) && same(ncclProd, prod) && same(ncclMax, max) && same(ncclMin, min) && same(ncclAvg, avg));
static_assert(sizeof(ncclUniqueId) == sizeof(UniqueId));
static_assert(offsetof(ncclConfig_t, size) == offsetof(Config, size) &&
              offsetof(ncclConfig_t, magic) == offsetof(Config, magic) &&
              offsetof(ncclConfig_t, version) == offsetof(Config, version) &&
              offsetof(ncclConfig_t, blocking) == offsetof(Config, blocking) &&
              offsetof(ncclConfig_t, cgaClusterSize) == offsetof(Config, cga_cluster_size));
static_assert(Config{}.magic == 0xcafebeef && Config{}.cga_cluster_size == NCCL_CONFIG_UNDEF_INT);

// True if the parameters and results of the two function types have the same sizes. The types themselves can differ:
// backend/nccl.cc uses pointers for handles, and ints for enums.
template <typename Theirs, typename Ours>
constexpr bool same_shape = false;
template <typename R, typename... A, typename S, typename... B>
constexpr bool same_shape<R (*)(A...), S (*)(B...)> = sizeof(R) == sizeof(S) && ((sizeof(A) == sizeof(B)) && ...);

static_assert(same_shape<decltype(&ncclCommInitRankConfig), int (*)(void**, int, UniqueId, int, Config*)>);
static_assert(same_shape<decltype(&ncclAllReduce), int (*)(const void*, void*, size_t, int, int, void*, void*)>);
static_assert(same_shape<decltype(&ncclAllGather), int (*)(const void*, void*, size_t, int, void*, void*)>);
static_assert(same_shape<decltype(&ncclReduceScatter), int (*)(const void*, void*, size_t, int, int, void*, void*)>);
static_assert(same_shape<decltype(&ncclBroadcast), int (*)(const void*, void*, size_t, int, int, void*, void*)>);
static_assert(same_shape<decltype(&ncclReduce), int (*)(const void*, void*, size_t, int, int, int, void*, void*)>);
static_assert(same_shape<decltype(&ncclSend), int (*)(const void*, size_t, int, int, void*, void*)>);
static_assert(same_shape<decltype(&ncclRecv), int (*)(void*, size_t, int, int, void*, void*)>);
static_assert(same_shape<decltype(&ncclCommGetAsyncError), int (*)(void*, int*)>);
