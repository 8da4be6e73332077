// Implements libhccl.so without an NPU. This file has HCCL's collectives, and hcomm.cc has the communicators. If FAKE_ONE_LIBRARY
// is defined, hcomm.cc is part of this library, as in older releases of HCCL. Otherwise, hcomm.cc is in libhcomm.so, which this
// library opens, as in newer releases.
#include <dlfcn.h>
#include <unistd.h>

#include <string>

#include "engine.h"
#include "hccl_core.h"

using namespace fake::hccl;

FAKE_EXPORT const Core* fake_hccl_core();

namespace {

#ifdef FAKE_ONE_LIBRARY
const Core* core() { return fake_hccl_core(); }
#else
const Core* core() {
  static const Core* found = []() -> const Core* {
    void* library = dlopen("libhcomm.so", RTLD_NOW | RTLD_NOLOAD);
    Dl_info self{};
    if (!library && dladdr(reinterpret_cast<const void*>(&core), &self) && self.dli_fname) {
      const std::string path = self.dli_fname;
      library = dlopen((path.substr(0, path.find_last_of('/')) + "/libhcomm.so").c_str(), RTLD_NOW);
    }
    if (!library) library = dlopen("libhcomm.so", RTLD_NOW);
    if (!library) return nullptr;
    const auto find = reinterpret_cast<const Core* (*)()>(dlsym(library, "fake_hccl_core"));
    return find ? find() : nullptr;
  }();
  return found;
}
#endif

Result collective(const char* name, const Wish& wish, Comm comm, StreamHandle stream) {
  return core() ? core()->collective(name, &wish, comm, stream) : e_not_found;
}

}  // namespace

FAKE_EXPORT Result HcclAllReduce(void* send, void* receive, uint64_t count, int type, int fold, Comm comm, StreamHandle stream) {
  return collective("all_reduce", {What::all_reduce, send, receive, count, type, fold, -1}, comm, stream);
}

FAKE_EXPORT Result HcclReduce(void* send, void* receive, uint64_t count, int type, int fold, uint32_t root, Comm comm,
                              StreamHandle stream) {
  return collective("reduce", {What::reduce, send, receive, count, type, fold, root}, comm, stream);
}

FAKE_EXPORT Result HcclBroadcast(void* data, uint64_t count, int type, uint32_t root, Comm comm, StreamHandle stream) {
  return collective("broadcast", {What::broadcast, data, data, count, type, -1, root}, comm, stream);
}

FAKE_EXPORT Result HcclAllGather(void* send, void* receive, uint64_t count, int type, Comm comm, StreamHandle stream) {
  return collective("all_gather", {What::all_gather, send, receive, count, type, -1, -1}, comm, stream);
}

FAKE_EXPORT Result HcclReduceScatter(void* send, void* receive, uint64_t count, int type, int fold, Comm comm,
                                     StreamHandle stream) {
  return collective("reduce_scatter", {What::reduce_scatter, send, receive, count, type, fold, -1}, comm, stream);
}

FAKE_EXPORT Result HcclBatchSendRecv(Item* items, uint32_t count, Comm comm, StreamHandle stream) {
  if (!items) return e_ptr;
  if (!count) return e_para;
  return core() ? core()->messages("batch_send_recv", items, count, comm, stream) : e_not_found;
}
