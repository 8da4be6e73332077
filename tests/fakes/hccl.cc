// libhccl.so without an NPU: HCCL's collectives. The communicators are in hcomm.cc: in this library with FAKE_ONE_LIBRARY, as
// HCCL once was, or else in libhcomm.so, which this one opens, as it is now.
#include <dlfcn.h>
#include <unistd.h>

#include <string>
#include <vector>

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
  return core() ? core()->collective(name, &wish, 1, comm, stream) : e_not_found;
}

Result messages(const char* name, const std::vector<Item>& items, Comm comm, StreamHandle stream) {
  return core() ? core()->messages(name, items.data(), static_cast<uint32_t>(items.size()), comm, stream) : e_not_found;
}

char* at(const void* data, uint64_t elements, int type) {
  return static_cast<char*>(const_cast<void*>(data)) + elements * core()->bytes_of(type);
}

// To and from everybody; counts and displacements of elements, by rank.
Result all_to_all_v(const void* send, const uint64_t* send_counts, const uint64_t* send_at, int send_type, const void* receive,
                    const uint64_t* receive_counts, const uint64_t* receive_at, int receive_type, Comm comm,
                    StreamHandle stream) {
  if (!send_counts || !send_at || !receive_counts || !receive_at) return e_ptr;
  if (!core()) return e_not_found;
  uint32_t size, rank;
  if (const Result result = core()->size_and_rank(comm, &size, &rank)) return result;
  std::vector<Item> items;
  for (uint32_t peer = 0; peer < size; ++peer) {
    if (send_counts[peer]) items.push_back({0, at(send, send_at[peer], send_type), send_counts[peer], send_type, peer});
    if (receive_counts[peer])
      items.push_back({1, at(receive, receive_at[peer], receive_type), receive_counts[peer], receive_type, peer});
  }
  return messages("all_to_all", items, comm, stream);
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

FAKE_EXPORT Result HcclScatter(void* send, void* receive, uint64_t count, int type, uint32_t root, Comm comm,
                               StreamHandle stream) {
  return collective("scatter", {What::scatter, send, receive, count, type, -1, root}, comm, stream);
}

FAKE_EXPORT Result HcclAlltoAll(const void* send, uint64_t send_count, int send_type, const void* receive, uint64_t receive_count,
                                int receive_type, Comm comm, StreamHandle stream) {
  if (!send || !receive) return e_ptr;
  if (send == receive || send_count != receive_count || send_type != receive_type) return e_para;
  return collective("all_to_all", {What::all_to_all, send, const_cast<void*>(receive), send_count, send_type, -1, -1}, comm,
                    stream);
}

FAKE_EXPORT Result HcclAlltoAllV(const void* send, const void* send_counts, const void* send_at, int send_type,
                                 const void* receive, const void* receive_counts, const void* receive_at, int receive_type,
                                 Comm comm, StreamHandle stream) {
  if (send && send == receive) return e_para;
  return all_to_all_v(send, static_cast<const uint64_t*>(send_counts), static_cast<const uint64_t*>(send_at), send_type, receive,
                      static_cast<const uint64_t*>(receive_counts), static_cast<const uint64_t*>(receive_at), receive_type, comm,
                      stream);
}

// Element [i * size + j] of the matrix goes from i to j; parts lie behind each other.
FAKE_EXPORT Result HcclAlltoAllVC(const void* send, const void* matrix, int send_type, const void* receive, int receive_type,
                                  Comm comm, StreamHandle stream) {
  if (!matrix) return e_ptr;
  if (!core()) return e_not_found;
  uint32_t size, rank;
  if (const Result result = core()->size_and_rank(comm, &size, &rank)) return result;
  const auto* counts = static_cast<const uint64_t*>(matrix);
  std::vector<uint64_t> send_counts, send_at, receive_counts, receive_at;
  uint64_t sent = 0, received = 0;
  for (uint32_t peer = 0; peer < size; ++peer) {
    send_at.push_back(sent);
    receive_at.push_back(received);
    sent += send_counts.emplace_back(counts[rank * size + peer]);
    received += receive_counts.emplace_back(counts[peer * size + rank]);
  }
  return all_to_all_v(send, send_counts.data(), send_at.data(), send_type, receive, receive_counts.data(), receive_at.data(),
                      receive_type, comm, stream);
}

FAKE_EXPORT Result HcclAllGatherV(void* send, uint64_t send_count, void* receive, const void* counts, const void* displacements,
                                  int type, Comm comm, StreamHandle stream) {
  if (!counts || !displacements) return e_ptr;
  if (!core()) return e_not_found;
  uint32_t size, rank;
  if (const Result result = core()->size_and_rank(comm, &size, &rank)) return result;
  const auto *of = static_cast<const uint64_t*>(counts), *where = static_cast<const uint64_t*>(displacements);
  if (of[rank] != send_count) return e_para;
  std::vector<Item> items;
  for (uint32_t peer = 0; peer < size; ++peer) {
    if (send_count) items.push_back({0, send, send_count, type, peer});
    if (of[peer]) items.push_back({1, at(receive, where[peer], type), of[peer], type, peer});
  }
  return messages("all_gather", items, comm, stream);
}

FAKE_EXPORT Result HcclReduceScatterV(void* send, const void* counts, const void* displacements, void* receive, uint64_t count,
                                      int type, int fold, Comm comm, StreamHandle stream) {
  if (!counts || !displacements) return e_ptr;
  if (!core()) return e_not_found;
  uint32_t size, rank;
  if (const Result result = core()->size_and_rank(comm, &size, &rank)) return result;
  const auto *of = static_cast<const uint64_t*>(counts), *where = static_cast<const uint64_t*>(displacements);
  if (of[rank] != count) return e_para;
  std::vector<Wish> wishes;
  for (uint32_t root = 0; root < size; ++root)
    wishes.push_back({What::reduce, at(send, where[root], type), receive, of[root], type, fold, root});
  return core()->collective("reduce_scatter", wishes.data(), static_cast<int>(wishes.size()), comm, stream);
}

FAKE_EXPORT Result HcclBarrier(Comm comm, StreamHandle stream) {
  return collective("barrier", {What::barrier, nullptr, nullptr, 0, 7, -1, -1}, comm, stream);
}

FAKE_EXPORT Result HcclSend(void* data, uint64_t count, int type, uint32_t peer, Comm comm, StreamHandle stream) {
  return messages("send", {{0, data, count, type, peer}}, comm, stream);
}

FAKE_EXPORT Result HcclRecv(void* data, uint64_t count, int type, uint32_t peer, Comm comm, StreamHandle stream) {
  return messages("recv", {{1, data, count, type, peer}}, comm, stream);
}

FAKE_EXPORT Result HcclBatchSendRecv(Item* items, uint32_t count, Comm comm, StreamHandle stream) {
  if (!items) return e_ptr;
  if (!count) return e_para;
  return messages("batch_send_recv", std::vector<Item>(items, items + count), comm, stream);
}
