// Four ranks as threads of one process on the CUDA and NCCL stand-ins, for ThreadSanitizer and AddressSanitizer: see
// sanitized.py.
#include <dlfcn.h>

#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int ranks = 4, rounds = 60;
constexpr size_t count = 3001;

void *cuda, *nccl;

struct Id {
  char bytes[128];
};

struct Config {
  size_t size = 24;
  unsigned magic = 0xcafebeef, version = 21403;
  int blocking = 0, unused = INT_MIN;
};

template <typename... Arguments>
int call(void* library, const char* name, Arguments... arguments) {
  const auto function = reinterpret_cast<int (*)(Arguments...)>(dlsym(library, name));
  if (!function) {
    fprintf(stderr, "%s is missing\n", name);
    abort();
  }
  return function(arguments...);
}

template <typename... Arguments>
void must(void* library, const char* name, Arguments... arguments) {
  const int code = call(library, name, arguments...);
  if (code && code != 7) {
    fprintf(stderr, "%s: %d\n", name, code);
    abort();
  }
}

void wait(uint64_t comm) {
  int state = 7;
  while (state == 7) must(nccl, "ncclCommGetAsyncError", comm, &state);
  if (state) abort();
}

void rank_main(int rank, const std::vector<Id>& ids) {
  uint64_t context, stream, other, event, data, out, comm = 0;
  must(cuda, "cuDevicePrimaryCtxRetain", &context, rank);
  must(cuda, "cuCtxPushCurrent_v2", context);
  must(cuda, "cuStreamCreate", &stream, 1u);
  must(cuda, "cuStreamCreate", &other, 0u);
  must(cuda, "cuEventCreate", &event, 2u);
  must(cuda, "cuMemAlloc_v2", &data, count * ranks * sizeof(float));
  must(cuda, "cuMemAlloc_v2", &out, count * ranks * sizeof(float));
  const auto collectives = [&](uint64_t on, bool polls) {
    const auto step = [&](const char* name, auto... arguments) {
      must(nccl, name, arguments...);
      if (polls) wait(on);
    };
    std::vector<float> host(count * ranks, static_cast<float>(rank + 1));
    for (int round = 0; round < rounds; ++round) {
      must(cuda, "cuMemcpyHtoDAsync_v2", data, static_cast<const void*>(host.data()), host.size() * sizeof(float), other);
      must(cuda, "cuEventRecord", event, other);
      must(cuda, "cuStreamWaitEvent", stream, event, 0u);
      step("ncclAllReduce", data, out, count, 7, 0, on, stream);
      step("ncclAlltoAll", data, out, count, 7, on, stream);
      must(nccl, "ncclGroupStart");
      must(nccl, "ncclSend", data, count, 7, (rank + 1) % ranks, on, stream);
      must(nccl, "ncclRecv", out, count, 7, (rank + ranks - 1) % ranks, on, other);
      step("ncclGroupEnd");
      step("ncclAllReduce", data, out, count, 7, 0, on, other);
      std::vector<float> back(count);
      must(cuda, "cuMemcpyDtoHAsync_v2", static_cast<void*>(back.data()), out, count * sizeof(float), other);
      must(cuda, "cuStreamSynchronize", other);
      must(cuda, "cuStreamSynchronize", stream);
      for (const float value : back)
        if (value != ranks * (ranks + 1) / 2) abort();
    }
  };
  must(nccl, "ncclCommInitRank", &comm, ranks, ids[0], rank);
  collectives(comm, false);
  uint64_t child = 0;
  must(nccl, "ncclCommSplit", comm, 0, -rank, &child, static_cast<void*>(nullptr));
  must(nccl, "ncclCommDestroy", child);
  must(nccl, "ncclCommDestroy", comm);
  Config config;
  must(nccl, "ncclCommInitRankConfig", &comm, ranks, ids[1], rank, &config);
  wait(comm);
  collectives(comm, true);
  // Rank 0 does not come: the others are stuck until they abort.
  if (rank) {
    must(nccl, "ncclAllReduce", data, out, count, 7, 0, comm, stream);
    wait(comm);
  }
  must(nccl, "ncclCommAbort", comm);
  must(cuda, "cuStreamSynchronize", stream);
  must(cuda, "cuMemFree_v2", data);
  must(cuda, "cuMemFree_v2", out);
  must(cuda, "cuEventDestroy_v2", event);
  must(cuda, "cuStreamDestroy_v2", stream);
  must(cuda, "cuStreamDestroy_v2", other);
  must(cuda, "cuDevicePrimaryCtxRelease_v2", rank);
}

}  // namespace

int main(int, char** arguments) {
  setenv("FAKE_DELAY_US", "50", 1);
  setenv("FAKE_CHUNK_KB", "4", 1);
  cuda = dlopen(arguments[1], RTLD_NOW);
  nccl = dlopen(arguments[2], RTLD_NOW);
  if (!cuda || !nccl) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  must(cuda, "cuInit", 0u);
  std::vector<Id> ids(2);
  for (Id& id : ids) must(nccl, "ncclGetUniqueId", &id);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(rank_main, rank, ids);
  for (std::thread& thread : threads) thread.join();
  char text[8192];
  const auto counters = reinterpret_cast<size_t (*)(char*, size_t)>(dlsym(cuda, "fake_counters"));
  counters(text, sizeof text);
  puts(text);
  return strstr(text, "\"violations\": {}") ? 0 : 1;
}
