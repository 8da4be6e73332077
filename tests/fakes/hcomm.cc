// Implements HCCL's communicators without an NPU, on top of the libascendcl.so of acl.cc. The communicators are in libhcomm.so
// or, together with hccl.cc, in libhccl.so.
//
// FAKE_ASCEND says which product the device is: 910, A2 (the default), A3, 310P or 950.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <vector>

#include "communicator.h"
#include "hccl_core.h"

using namespace fake;
using namespace fake::hccl;

FAKE_EXPORT const Core* fake_hccl_core();

namespace {

constexpr size_t root_info_bytes = 4108;

Engine* acl() {
  static Engine* engine = find_engine({"libascendcl.so", "libacl_rt.so"}, reinterpret_cast<const void*>(&fake_hccl_core));
  return engine;
}

const std::string& profile() {
  static const std::string name = text("FAKE_ASCEND", "A2");
  return name;
}

// The types in the order of HCCL's numbers.
constexpr Type types[] = {Type::i8,  Type::i16, Type::i32, Type::f16, Type::f32, Type::i64,
                          Type::u64, Type::u8,  Type::u16, Type::u32, Type::f64, Type::bf16};

bool reduces(Type type) {
  static const std::map<std::string, std::set<Type>> by_profile = {
      {"910", {Type::i8, Type::i32, Type::i64, Type::f16, Type::f32}},
      {"A2", {Type::i8, Type::i16, Type::i32, Type::i64, Type::f16, Type::f32, Type::bf16}},
      {"A3", {Type::i8, Type::i16, Type::i32, Type::i64, Type::f16, Type::f32, Type::bf16}},
      {"310P", {Type::i8, Type::i16, Type::i32, Type::f16, Type::f32}},
      {"950", {Type::i8, Type::i16, Type::i32, Type::i64, Type::u64, Type::f16, Type::f32, Type::f64, Type::bf16}},
  };
  const auto found = by_profile.find(profile());
  return found != by_profile.end() && found->second.count(type);
}

bool type_of(int code, Type& type) {
  if (code < 0 || code >= static_cast<int>(std::size(types))) return false;
  type = types[code];
  return type != Type::bf16 || profile() != "910";
}

class HcclCommunicator : public Communicator {
 public:
  HcclCommunicator(Engine& engine, const std::string& id, int size, int rank, int device)
      : Communicator(engine, id, size, rank, device, e_runtime, e_remote) {
    engine.count("comms", 1);
  }
  ~HcclCommunicator() override { acl()->count("comms", -1); }

  std::atomic<bool> suspended{false};
  std::chrono::steady_clock::time_point deadline;
};

std::mutex comms_mutex;
std::map<Comm, std::shared_ptr<HcclCommunicator>>& comms() {
  static auto& all = *new std::map<Comm, std::shared_ptr<HcclCommunicator>>;
  return all;
}

Comm handle_of(std::shared_ptr<HcclCommunicator> comm) {
  static Comm last = 0x4c000000;
  std::lock_guard lock(comms_mutex);
  last += 16;
  comms()[last] = std::move(comm);
  return last;
}

std::shared_ptr<HcclCommunicator> find(Comm handle) {
  std::lock_guard lock(comms_mutex);
  const auto found = comms().find(handle);
  if (found != comms().end()) return found->second;
  if (handle && acl()) acl()->violation("dead_comm", "a call on a communicator that is not, or was destroyed");
  return nullptr;
}

// ---- communicators

Result connect(HcclCommunicator& comm) {
  // HCCL waits 120 s, or longer if HCCL_CONNECT_TIMEOUT says so. Tests cannot wait that long, so FAKE_CONNECT_TIMEOUT_MS sets a
  // shorter time.
  const int64_t seconds = std::max<int64_t>(120, number("HCCL_CONNECT_TIMEOUT", 120));
  const int64_t milliseconds = number("FAKE_CONNECT_TIMEOUT_MS", seconds * 1000);
  comm.deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
  Card card;
  card.device = acl()->uuid(comm.device);
  card.host = this_boot();
  card.version = comm.device;
  Meeting::Watch watch = comm.watch();
  watch.stopped = [&] { return std::chrono::steady_clock::now() > comm.deadline; };
  if (!comm.meeting().join(card, watch)) return e_timeout;
  const std::vector<Card> cards = comm.meeting().cards();
  const bool shares = (profile() == "A2" || profile() == "A3") && getenv("HCCL_HOST_SOCKET_PORT_RANGE");
  std::set<int> rings;
  for (size_t a = 0; a < cards.size(); ++a) {
    rings.insert(cards[a].version / 4);  // `version` holds the device's number
    for (size_t b = 0; b < a; ++b)
      if (!shares && cards[a].host == cards[b].host && cards[a].device == cards[b].device) return e_unavail;
  }
  // A 910 server accepts 1, 2, 4 or 8 ranks. Fewer than 8 ranks must all be on devices 0 to 3, or all on devices 4 to 7.
  if (profile() == "910" && ((comm.size & (comm.size - 1)) || comm.size > 8 || (comm.size < 8 && rings.size() > 1)))
    return e_para;
  return success;
}

Result create(Comm* place, const std::string& id, uint32_t size, uint32_t rank) {
  if (!place) return e_ptr;
  *place = 0;
  if (!size || rank >= size) return e_para;
  if (!acl() || acl()->current() < 0) return e_runtime;
  Operation nothing;
  nothing.name = "init";
  if (const int code = inject(nothing, static_cast<int>(rank))) return code;
  auto comm = std::make_shared<HcclCommunicator>(*acl(), id, static_cast<int>(size), static_cast<int>(rank), acl()->current());
  Communicator::Inside inside(acl(), comm.get());
  if (const Result result = connect(*comm)) {
    comm->meeting().leave();
    return result;
  }
  *place = handle_of(comm);
  return success;
}

// ---- operations

Result ready(HcclCommunicator& comm) {
  if (comm.suspended) return e_suspending;
  if (comm.error) return comm.error;
  if (acl()->current() != comm.device)
    acl()->violation("context", "an operation of a communicator from another device's context");
  return success;
}

Result collective(const char* name, const Wish* given, Comm handle, StreamHandle stream_handle) {
  const auto comm = find(handle);
  if (!comm) return handle ? e_para : e_ptr;
  Communicator::Inside inside(acl(), comm.get());
  if (const Result result = ready(*comm)) return result;
  const auto stream = acl()->stream(stream_handle, comm->device);
  if (!stream || stream->device() != comm->device) return e_para;
  const Wish& wish = *given;
  Operation operation;
  operation.name = name;
  operation.stream = stream;
  Signature& signature = operation.signature;
  signature.count = wish.count;
  if (!type_of(wish.type, signature.type)) return e_not_support;
  const bool folds = wish.fold != -1;
  if (folds) {
    static constexpr Fold all[] = {Fold::sum, Fold::prod, Fold::max, Fold::min};
    if (wish.fold < 0 || wish.fold > 3) return e_para;
    signature.fold = all[wish.fold];
    if (!reduces(signature.type)) return e_not_support;
    const bool small = signature.type == Type::i16 || signature.type == Type::bf16;
    if (signature.fold == Fold::prod && small) return e_not_support;
  }
  if (wish.root >= comm->size) return e_para;
  signature.root = wish.root < 0 ? 0 : static_cast<uint32_t>(wish.root);
  const bool root = wish.root < 0 || wish.root == comm->rank;
  const size_t part = wish.count * size_of(signature.type), all = part * static_cast<size_t>(comm->size);
  size_t sent = part, received = part;
  switch (wish.what) {
    case What::all_reduce:
      signature.kind = Kind::all_reduce;
      break;
    case What::all_gather:
      signature.kind = Kind::all_gather, received = all;
      break;
    case What::reduce_scatter:
      signature.kind = Kind::reduce_scatter, sent = all;
      break;
    case What::broadcast:
      signature.kind = Kind::broadcast, sent = root ? part : 0;
      break;
    case What::reduce:
      signature.kind = Kind::reduce, received = root ? part : 0;
      break;
  }
  for (const auto& [data, bytes] : {std::pair{wish.send, sent}, std::pair{static_cast<const void*>(wish.receive), received}}) {
    if (bytes && !data) return e_ptr;
    if (bytes && reinterpret_cast<uintptr_t>(data) % size_of(signature.type)) return e_para;
  }
  operation.send = acl()->find(reinterpret_cast<Address>(wish.send), sent);
  operation.receive = acl()->find(reinterpret_cast<Address>(wish.receive), received);
  if (const int code = inject(operation, comm->rank)) return code;
  if (!wish.count) return success;
  std::vector<Operation> one;
  one.push_back(std::move(operation));
  comm->launch(std::move(one));
  return success;
}

Result messages(const char* name, const Item* items, uint32_t count, Comm handle, StreamHandle stream_handle) {
  const auto comm = find(handle);
  if (!comm) return handle ? e_para : e_ptr;
  Communicator::Inside inside(acl(), comm.get());
  if (const Result result = ready(*comm)) return result;
  const auto stream = acl()->stream(stream_handle, comm->device);
  if (!stream || stream->device() != comm->device) return e_para;
  std::vector<Operation> operations;
  for (uint32_t i = 0; i < count; ++i) {
    const Item& item = items[i];
    Operation operation;
    operation.name = name;
    operation.stream = stream;
    operation.collective = false;
    operation.sends = item.kind == 0;
    operation.peer = static_cast<int>(item.peer);
    if (item.kind < 0 || item.kind > 1 || operation.peer >= comm->size) return e_para;
    if (!type_of(item.type, operation.signature.type)) return e_not_support;
    if (item.count && !item.data) return e_ptr;
    operation.signature.count = item.count;
    (operation.sends ? operation.send : operation.receive) =
        acl()->find(reinterpret_cast<Address>(item.data), item.count * size_of(operation.signature.type));
    operations.push_back(std::move(operation));
  }
  Operation injected;
  injected.name = name;
  if (const int code = inject(injected, comm->rank)) return code;
  if (operations.empty()) return success;
  operations.front().hangs = injected.hangs;
  operations.front().dies = injected.dies;
  operations.front().fails_later = injected.fails_later;
  comm->launch(std::move(operations));
  return success;
}

}  // namespace

FAKE_EXPORT const Core* fake_hccl_core() {
  static const Core core{collective, messages};
  return &core;
}

FAKE_EXPORT size_t fake_counters(char* to, size_t bytes) { return hand_over(acl() ? acl()->counters() : "{}", to, bytes); }

FAKE_EXPORT Result HcclGetRootInfo(char* info) {
  if (!info) return e_ptr;
  if (!acl() || acl()->current() < 0) return e_runtime;  // the root info describes the current device's server
  memset(info, 0, root_info_bytes);
  std::random_device random;
  for (size_t i = 0; i < 64; ++i) info[i] = static_cast<char>(random());
  for (size_t i = root_info_bytes - 8; i < root_info_bytes; ++i) info[i] = static_cast<char>(random());
  return success;
}

FAKE_EXPORT Result HcclCommInitRootInfo(uint32_t size, const char* info, uint32_t rank, Comm* comm) {
  if (!info || !comm) return e_ptr;
  return create(comm, hex_id(info, root_info_bytes), size, rank);
}

// HCCL has no abort. HcclCommDestroy waits for the operations that are under way, unless the communicator was suspended.
FAKE_EXPORT Result HcclCommDestroy(Comm handle) {
  const auto comm = find(handle);
  if (!comm) return handle ? e_para : e_ptr;
  Communicator::Inside inside(acl(), comm.get());
  comm->drain();
  comm->meeting().leave();
  std::lock_guard lock(comms_mutex);
  comms().erase(handle);
  return success;
}

FAKE_EXPORT Result HcclCommSuspend(Comm handle) {
  const auto comm = find(handle);
  if (!comm) return handle ? e_para : e_ptr;
  comm->suspended = true;
  if (!comm->idle()) comm->stop();
  return success;
}

FAKE_EXPORT Result HcclGetCommAsyncError(Comm handle, Result* error) {
  const auto comm = find(handle);
  if (!comm || !error) return e_ptr;
  *error = comm->suspended ? static_cast<Result>(e_suspending) : comm->error.load();
  return success;
}

FAKE_EXPORT uint32_t HcclGetCommConfigCapability() { return 4; }

FAKE_EXPORT const char* HcclGetErrorString(Result code) {
  static const std::map<Result, const char*> texts = {
      {0, "no error (of a stand-in)"},
      {1, "parameter error (of a stand-in)"},
      {2, "empty pointer error (of a stand-in)"},
      {3, "memory error (of a stand-in)"},
      {4, "internal error (of a stand-in)"},
      {5, "not support (of a stand-in)"},
      {6, "not found (of a stand-in)"},
      {7, "resource unavailable (of a stand-in)"},
      {8, "system call error (of a stand-in)"},
      {9, "timeout (of a stand-in)"},
      {11, "tcp connect fail (of a stand-in)"},
      {15, "runtime error (of a stand-in)"},
      {19, "network error (of a stand-in)"},
      {21, "remote error (of a stand-in)"},
      {22, "suspending (of a stand-in)"},
  };
  const auto found = texts.find(code);
  return found == texts.end() ? "unknown error" : found->second;
}
