// Implements libnccl.so.2 without a GPU: NCCL's C ABI and behaviour, on top of the libcuda.so.1 of cuda.cc and the meetings of
// meeting.h.
//
// fake_nccl_version says which version of NCCL this is. Types and settings of later versions are missing.
#include <arpa/inet.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "communicator.h"

using namespace fake;

extern const int fake_nccl_version;  // nccl_version.cc defines it, so that this file is compiled once for all versions

namespace {

using Result = int;
enum : Result {
  success = 0,
  unhandled_cuda_error = 1,
  system_error = 2,
  internal_error = 3,
  invalid_argument = 4,
  invalid_usage = 5,
  remote_error = 6,
  in_progress = 7,
};

const int version = fake_nccl_version;
constexpr uint32_t magic = 0xcafebeef;
constexpr int undefined = INT_MIN;

struct UniqueId {
  char bytes[128];
};

// Has the layout of ncclConfig_t in NCCL 2.32. `size` is the size of the struct in the caller's nccl.h, and config_bytes is the
// size of the struct in this version of NCCL.
struct Config {
  size_t size;
  unsigned magic, version;
  int blocking, cga_cluster_size, min_ctas, max_ctas;
  const char* net_name;
  int split_share, traffic_class;
  const char* comm_name;
  int collnet_enable, cta_policy, shrink_share, nvls_ctas, channels_per_net_peer, nvlink_centric_sched, graph_usage_mode,
      num_rma_ctx, max_p2p_peers, graph_stream_ordering, later[5];
};
static_assert(sizeof(Config) == 120 && offsetof(Config, net_name) == 32 && offsetof(Config, comm_name) == 48 &&
              offsetof(Config, collnet_enable) == 56 && offsetof(Config, graph_stream_ordering) == 92);

constexpr size_t bytes_of_config(int of) {
  return of >= 23200   ? 120
         : of >= 23003 ? 96
         : of >= 22900 ? 88
         : of >= 22800 ? 80
         : of >= 22700 ? 72
         : of >= 21800 ? 48
         : of >= 21700 ? 40
                       : 24;
}
const size_t config_bytes = bytes_of_config(version);

Config undefined_config() {
  Config config{};
  config.size = sizeof(Config);
  config.magic = magic;
  config.version = version;
  for (int* field : {&config.blocking, &config.cga_cluster_size, &config.min_ctas, &config.max_ctas, &config.split_share,
                     &config.traffic_class, &config.collnet_enable, &config.cta_policy, &config.shrink_share, &config.nvls_ctas,
                     &config.channels_per_net_peer, &config.nvlink_centric_sched, &config.graph_usage_mode, &config.num_rma_ctx,
                     &config.max_p2p_peers, &config.graph_stream_ordering})
    *field = undefined;
  for (int& field : config.later) field = undefined;
  return config;
}

// Protects the text of the last error. As in NCCL, the whole process has only one such text.
std::mutex last_error_mutex;
char last_error[1024];

__attribute__((format(printf, 2, 3))) Result fail(Result code, const char* format, ...) {
  std::lock_guard lock(last_error_mutex);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, sizeof last_error, format, arguments);
  va_end(arguments);
  return code;
}

Engine* cuda() {
  static Engine* engine = find_engine({"libcuda.so.1"}, reinterpret_cast<const void*>(&fail));
  return engine;
}

class Comm : public Communicator {
 public:
  Comm(Engine& engine, const std::string& id, int size, int rank, int device, const Config& config)
      : Communicator(engine, id, size, rank, device, unhandled_cuda_error, remote_error), config(config) {
    engine.count("comms", 1);
  }
  ~Comm() override { cuda()->count("comms", -1); }

  bool blocking() const { return config.blocking != 0; }

  // Runs `body`, the rest of a call, in the background while the caller polls.
  void go_on(std::function<Result()> body) {
    start_polls();
    spawn([this, self = shared_from_this(), body = std::move(body)] { end_polls(body()); });
  }
  void start_polls() {
    ++background;
    polls = static_cast<int>(number("FAKE_IN_PROGRESS_POLLS", 2));
  }
  void end_polls(Result result) {
    int none = 0;
    if (result) error.compare_exchange_strong(none, result);
    --background;
  }
  // Returns success if the next call is allowed. It is allowed only after polling has returned success.
  Result state() {
    if (error) return error;
    return background || polls > 0 ? in_progress : success;
  }
  Result poll() {
    if (error) return error;
    if (background) return in_progress;
    return polls.fetch_sub(1) > 0 ? in_progress : success;
  }
  void settle() {
    while (background) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  const Config config;
  std::atomic<int> background{0}, polls{0};
  std::atomic<bool> finalized{false};
  std::vector<uint64_t> hosts;  // the host of each rank
};

using Handle = fake::Handle;

std::mutex comms_mutex;
std::map<Handle, std::shared_ptr<Comm>>& comms() {
  static auto& all = *new std::map<Handle, std::shared_ptr<Comm>>;
  return all;
}

// Returns a handle that has never been used before.
Handle handle_of(std::shared_ptr<Comm> comm) {
  static Handle last = 0x4e000000;
  std::lock_guard lock(comms_mutex);
  last += 16;
  comms()[last] = std::move(comm);
  return last;
}

std::shared_ptr<Comm> find(Handle handle) {
  std::lock_guard lock(comms_mutex);
  const auto found = comms().find(handle);
  if (found != comms().end()) return found->second;
  if (handle && cuda()) cuda()->violation("dead_comm", "a call on a communicator that is not, or was destroyed");
  fail(invalid_argument, "the communicator is not valid");
  return nullptr;
}

void forget(Handle handle) {
  std::lock_guard lock(comms_mutex);
  comms().erase(handle);
}

Result ready(Comm& comm) {
  const Result state = comm.state();
  if (state == in_progress)
    return fail(invalid_argument, "the communicator was used before its last operation was polled to success");
  if (state) return fail(state, "the communicator is in error %d", state);
  if (comm.finalized) return fail(invalid_usage, "the communicator was finalized");
  return success;
}

uint64_t this_host() {
  static const uint64_t host = [] {
    const std::string name = text("NCCL_HOSTID", "");
    return name.empty() ? this_boot() : hash_of(name.data(), name.size());
  }();
  return host;
}

// ---- groups

struct Init {
  std::shared_ptr<Comm> comm;
  std::function<Result()> body;
  Handle* place;
};

struct Group {
  int depth = 0;
  Result error = success;
  std::vector<std::pair<std::shared_ptr<Comm>, Operation>> operations;
  std::vector<Init> inits;
  // If a thread makes a call on a communicator in a group, the thread counts as inside this communicator until the group ends.
  std::vector<std::unique_ptr<Communicator::Inside>> inside;
};
thread_local Group group;

Result end_group();

Result add(std::shared_ptr<Comm> comm, Operation operation) {
  if (group.depth) group.inside.push_back(std::make_unique<Communicator::Inside>(cuda(), comm.get()));
  ++group.depth;
  group.operations.emplace_back(std::move(comm), std::move(operation));
  return end_group();
}

Result launch(std::vector<std::pair<std::shared_ptr<Comm>, Operation>> operations) {
  std::vector<std::pair<std::shared_ptr<Comm>, std::vector<Operation>>> by_comm;
  for (auto& [comm, operation] : operations) {
    auto at = std::find_if(by_comm.begin(), by_comm.end(), [&, &comm = comm](auto& one) { return one.first == comm; });
    if (at == by_comm.end()) at = by_comm.insert(by_comm.end(), {comm, {}});
    at->second.push_back(std::move(operation));
  }
  for (const auto& [comm, all] : by_comm) {
    int open = 0;
    for (const Operation& one : all)
      if (!one.collective && one.peer == comm->rank) open += one.sends ? 1 : -1;
    if (open)
      return fail(invalid_usage, "rank %d has a %s to itself without its partner", comm->rank, open > 0 ? "send" : "receive");
    bool captures = false, runs = false;
    for (const Operation& one : all) (one.stream->capturing() ? captures : runs) = true;
    if (captures && runs) return fail(invalid_usage, "some streams of the group are capturing, others not");
  }
  const bool blocks = std::all_of(by_comm.begin(), by_comm.end(), [](const auto& one) { return one.first->blocking(); });
  if (blocks) {
    for (auto& [comm, all] : by_comm) comm->launch(std::move(all));
    return success;
  }
  for (auto& [comm, all] : by_comm) comm->start_polls();
  // One thread launches all operations, communicator by communicator, in the order in which the group first called the
  // communicators.
  spawn([by_comm = std::move(by_comm)]() mutable {
    // Sleep first, so that the caller's call returns before any of its operations is on a stream.
    std::this_thread::sleep_for(std::chrono::microseconds(number("FAKE_DELAY_US", 300)));
    for (auto& [comm, all] : by_comm) {
      comm->launch(std::move(all));
      comm->end_polls(success);
    }
  });
  return in_progress;
}

// Starts all inits at the same time, because they wait for each other.
Result start(std::vector<Init> inits) {
  bool blocks = true;
  for (const Init& init : inits)
    if (init.comm) blocks = blocks && init.comm->blocking();
  if (!blocks) {
    for (Init& init : inits)
      if (init.comm) init.comm->go_on(std::move(init.body));
    return in_progress;
  }
  std::vector<Result> results(inits.size());
  if (inits.size() == 1) {
    results[0] = inits[0].body();
  } else {
    std::vector<std::thread> threads;
    for (size_t i = 0; i < inits.size(); ++i) threads.emplace_back([&, i] { results[i] = inits[i].body(); });
    for (std::thread& thread : threads) thread.join();
  }
  Result result = success;
  for (size_t i = 0; i < inits.size(); ++i) {
    if (!results[i]) continue;
    if (inits[i].comm) inits[i].comm->error = results[i];
    if (!result) result = results[i];
    if (inits[i].place) {
      forget(*inits[i].place);
      *inits[i].place = 0;
    }
  }
  return result;
}

Result end_group() {
  if (!group.depth) return fail(invalid_usage, "ncclGroupEnd without ncclGroupStart");
  if (--group.depth) return success;
  Group all = std::exchange(group, {});
  if (all.error) {
    for (Init& init : all.inits)
      if (init.place) {
        forget(*init.place);
        *init.place = 0;
      }
    return all.error;
  }
  if (!all.inits.empty() && !all.operations.empty())
    return fail(invalid_usage, "communicators and operations were begun in one group");
  if (!all.inits.empty()) return start(std::move(all.inits));
  return all.operations.empty() ? success : launch(std::move(all.operations));
}

Result in_group(Result result) {
  if (group.depth && result && !group.error) group.error = result;
  return result;
}

Result begin(Init init) {
  if (group.depth) {
    group.inits.push_back(std::move(init));
    return success;
  }
  std::vector<Init> one;
  one.push_back(std::move(init));
  return start(std::move(one));
}

// ---- communicators

Result read_config(const Config* given, Config& config) {
  config = undefined_config();
  if (given) {
    size_t bytes;
    memcpy(&bytes, given, sizeof bytes);
    if (bytes < 16) {
      if (cuda()) cuda()->violation("config", "a configuration that is smaller than its header");
      return fail(invalid_argument, "the configuration says that it has %zu bytes", bytes);
    }
    memcpy(static_cast<void*>(&config), given, std::min(bytes, config_bytes));
    if (config.magic != magic)
      return fail(invalid_argument, "the configuration was not initialized: its magic is 0x%x", config.magic);
    const int of = static_cast<int>(config.version);
    if (bytes < bytes_of_config(std::min(of, version)))
      if (cuda()) cuda()->violation("config", "a configuration has fewer bytes than its version says");
    // If the caller's nccl.h is too old to have a field, the field is undefined.
    if (of < 21700) {
      config.cga_cluster_size = config.min_ctas = config.max_ctas = undefined;
      config.net_name = nullptr;
    }
    if (of < 21800) config.split_share = undefined;
    if (of < 22600) config.traffic_class = undefined;
    if (of < 22700) {
      config.comm_name = nullptr;
      config.collnet_enable = config.cta_policy = config.shrink_share = config.nvls_ctas = undefined;
    }
    if (of < 22800) config.channels_per_net_peer = config.nvlink_centric_sched = undefined;
    if (of < 22900) config.graph_usage_mode = config.num_rma_ctx = undefined;
    if (of < 23003) config.max_p2p_peers = undefined;
    if (of < 23007) config.graph_stream_ordering = undefined;
  }
  const struct {
    const char* name;
    int value, least, most;
  } ranges[] = {
      {"blocking", config.blocking, 0, 1},
      {"cgaClusterSize", config.cga_cluster_size, 0, 8},
      {"minCTAs", config.min_ctas, 1, 64},
      {"maxCTAs", config.max_ctas, 1, 64},
      {"splitShare", config.split_share, 0, 1},
      {"trafficClass", config.traffic_class, 0, INT_MAX},
      {"collnetEnable", config.collnet_enable, 0, 1},
      {"CTAPolicy", config.cta_policy, 0, 2},
      {"shrinkShare", config.shrink_share, 0, 1},
      {"nvlsCTAs", config.nvls_ctas, 1, INT_MAX},
      {"nChannelsPerNetPeer", config.channels_per_net_peer, 1, INT_MAX},
      {"nvlinkCentricSched", config.nvlink_centric_sched, 0, 1},
      {"graphUsageMode", config.graph_usage_mode, 0, 2},
      {"graphStreamOrdering", config.graph_stream_ordering, 0, 1},
  };
  for (const auto& field : ranges)
    if (field.value != undefined && (field.value < field.least || field.value > field.most))
      return fail(invalid_argument, "%s of the configuration is %d", field.name, field.value);
  if (config.min_ctas != undefined && config.max_ctas != undefined && config.min_ctas > config.max_ctas)
    return fail(invalid_argument, "minCTAs of the configuration is more than its maxCTAs");
  const auto forced = number("NCCL_COMM_BLOCKING", -1);
  if (forced == 0 || forced == 1) config.blocking = static_cast<int>(forced);
  if (config.blocking == undefined) config.blocking = 1;
  return success;
}

// Waits until all ranks have joined. Fails if two ranks have different versions of NCCL, or if two ranks of one host share a
// device and NCCL_MULTI_RANK_GPU_ENABLE does not allow it.
Result connect(Comm& comm) {
  Card card;
  card.device = cuda()->uuid(comm.device);
  card.host = this_host();
  card.version = version;
  if (!comm.meeting().join(card, comm.watch())) return fail(internal_error, "stopped while waiting for the other ranks");
  const std::vector<Card> cards = comm.meeting().cards();
  for (const Card& other : cards) comm.hosts.push_back(other.host);
  for (int rank = 0; rank < comm.size; ++rank)
    if (cards[static_cast<size_t>(rank)].version != version)
      return fail(invalid_usage, "Mismatched NCCL version: rank %d has %d, rank %d has %d", comm.rank, version, rank,
                  cards[static_cast<size_t>(rank)].version);
  if (version >= 23003 && number("NCCL_MULTI_RANK_GPU_ENABLE", 0) == 1) return success;
  for (int a = 0; a < comm.size; ++a)
    for (int b = 0; b < a; ++b) {
      const Card &one = cards[static_cast<size_t>(a)], &other = cards[static_cast<size_t>(b)];
      if (one.host == other.host && one.device == other.device)
        return fail(invalid_usage, "Duplicate GPU: ranks %d and %d have the same%s", b, a,
                    version >= 23003 ? " (NCCL_MULTI_RANK_GPU_ENABLE=1 would allow it)" : "");
    }
  return success;
}

Result create(Handle* place, const std::string& id, int size, int rank, int device, const Config& config) {
  auto comm = std::make_shared<Comm>(*cuda(), id, size, rank, device, config);
  *place = handle_of(comm);
  return begin({comm, [raw = comm.get()] { return connect(*raw); }, place});
}

Result init(Handle* place, int size, const UniqueId& id, int rank, const Config* given) {
  if (!place) return fail(invalid_argument, "no place for the communicator");
  *place = 0;
  if (size < 1 || rank < 0 || rank >= size) return fail(invalid_argument, "rank %d of %d ranks", rank, size);
  Config config;
  if (const Result result = read_config(given, config)) return result;
  if (!cuda()) return fail(unhandled_cuda_error, "CUDA driver: libcuda.so.1 cannot be opened");
  if (!cuda()->devices()) return fail(unhandled_cuda_error, "CUDA driver: no CUDA-capable device is detected");
  Operation nothing;
  nothing.name = "init";
  if (const int code = inject(nothing, rank)) return fail(code, "injected: init fails with %d", code);
  // A thread without a current device uses device 0, as with the CUDA runtime, on which NCCL is built.
  const int device = std::max(0, cuda()->current());
  return create(place, hex_id(&id, sizeof id), size, rank, device, config);
}

// ---- operations

bool type_of(int code, Type& type) {
  static constexpr Type types[] = {Type::i8,  Type::u8,  Type::i32, Type::u32,  Type::i64,  Type::u64,
                                   Type::f16, Type::f32, Type::f64, Type::bf16, Type::e4m3, Type::e5m2};
  if (code < 0 || code >= (version >= 22403 ? 12 : 10)) return false;
  type = types[code];
  return true;
}

struct Arguments {
  const char* name;
  const void* send;
  void* receive;
  size_t count;
  int type;
  int fold;  // -1 if the collective does not reduce
  int root;  // -1 if the collective has no root
  Handle comm, stream;
};

void check_overlap(const Comm& comm, const Operation& operation) {
  const Buffer &send = operation.send, &receive = operation.receive;
  if (!send.bytes || !receive.bytes) return;
  if (send.address + send.bytes <= receive.address || receive.address + receive.bytes <= send.address) return;
  const size_t part = operation.signature.count * size_of(operation.signature.type);
  const Address mine = static_cast<Address>(comm.rank) * part;
  bool fits = false;
  switch (operation.signature.kind) {
    case Kind::all_gather:
      fits = send.address == receive.address + mine;
      break;
    case Kind::reduce_scatter:
      fits = receive.address == send.address + mine;
      break;
    default:
      fits = send.address == receive.address;
  }
  if (!fits) cuda()->violation("overlap", operation.name + ": send and receive overlap, and not as in place");
}

Result enqueue(Kind kind, const Arguments& given) {
  const auto comm = find(given.comm);
  if (!comm) return in_group(invalid_argument);
  Communicator::Inside inside(cuda(), comm.get());
  if (const Result result = ready(*comm)) return in_group(result);
  Operation operation;
  operation.name = given.name;
  Signature& signature = operation.signature;
  signature.kind = kind;
  signature.count = given.count;
  if (!type_of(given.type, signature.type))
    return in_group(fail(invalid_argument, "%s: no type has number %d", given.name, given.type));
  const auto size = static_cast<size_t>(comm->size);
  if (given.root != -1 || kind == Kind::broadcast || kind == Kind::reduce) {
    if (given.root < 0 || given.root >= comm->size)
      return in_group(fail(invalid_argument, "%s: root %d of %d ranks", given.name, given.root, comm->size));
    signature.root = static_cast<uint32_t>(given.root);
  }
  const bool root = given.root == -1 || given.root == comm->rank;
  if (kind == Kind::all_reduce || kind == Kind::reduce || kind == Kind::reduce_scatter) {
    if (given.fold < 0 || given.fold > 4)
      return in_group(fail(invalid_argument, "%s: no operator has number %d", given.name, given.fold));
    static constexpr Fold folds[] = {Fold::sum, Fold::prod, Fold::max, Fold::min, Fold::average};
    signature.fold = folds[given.fold];
    if (signature.fold == Fold::average && !is_integer(signature.type)) {
      operation.scaled = true;
      operation.factor = reciprocal(signature.type, comm->size);
    }
  }
  operation.stream = cuda()->stream(given.stream, comm->device);
  if (!operation.stream) return in_group(fail(unhandled_cuda_error, "%s: the stream is not valid", given.name));
  if (operation.stream->device() != comm->device)
    return in_group(fail(invalid_usage, "%s: the stream is of device %d, the communicator of device %d", given.name,
                         operation.stream->device(), comm->device));
  if (const int code = inject(operation, comm->rank)) return in_group(fail(code, "injected: %s fails with %d", given.name, code));

  const size_t part = given.count * size_of(signature.type);
  const bool sends = root || kind != Kind::broadcast;
  const bool receives = root || kind != Kind::reduce;
  if (sends)
    operation.send = cuda()->find(reinterpret_cast<Address>(given.send), kind == Kind::reduce_scatter ? size * part : part);
  if (receives)
    operation.receive = cuda()->find(reinterpret_cast<Address>(given.receive), kind == Kind::all_gather ? size * part : part);
  if (!given.count) return success;  // an empty collective does nothing at all
  check_overlap(*comm, operation);
  return add(comm, std::move(operation));
}

Result message(const char* name, bool sends, const void* data, size_t count, int type, int peer, Handle handle, Handle stream) {
  const auto comm = find(handle);
  if (!comm) return in_group(invalid_argument);
  Communicator::Inside inside(cuda(), comm.get());
  if (const Result result = ready(*comm)) return in_group(result);
  Operation operation;
  operation.name = name;
  operation.collective = false;
  operation.sends = sends;
  operation.peer = peer;
  if (!type_of(type, operation.signature.type)) return in_group(fail(invalid_argument, "%s: no type has number %d", name, type));
  if (peer < 0 || peer >= comm->size) return in_group(fail(invalid_argument, "%s: peer %d of %d ranks", name, peer, comm->size));
  operation.stream = cuda()->stream(stream, comm->device);
  if (!operation.stream) return in_group(fail(unhandled_cuda_error, "%s: the stream is not valid", name));
  if (operation.stream->device() != comm->device)
    return in_group(fail(invalid_usage, "%s: the stream is of another device", name));
  if (const int code = inject(operation, comm->rank)) return in_group(fail(code, "injected: %s fails with %d", name, code));
  operation.signature.count = count;
  (sends ? operation.send : operation.receive) =
      cuda()->find(reinterpret_cast<Address>(data), count * size_of(operation.signature.type));
  return add(comm, std::move(operation));
}

}  // namespace

FAKE_EXPORT size_t fake_counters(char* to, size_t bytes) { return hand_over(cuda() ? cuda()->counters() : "{}", to, bytes); }

FAKE_EXPORT Result ncclGetVersion(int* to) {
  if (!to) return invalid_argument;
  *to = version;
  return success;
}

FAKE_EXPORT Result ncclGetUniqueId(UniqueId* id) {
  if (!id) return invalid_argument;
  memset(id, 0, sizeof *id);
  // Make the id look like a real one: a random number, then the address to which the ranks would connect.
  std::random_device random;
  for (int i = 0; i < 8; ++i) id->bytes[i] = static_cast<char>(random());
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(1024 + random() % 60000));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  memcpy(id->bytes + 8, &address, sizeof address);
  for (int i = 64; i < 128; ++i) id->bytes[i] = static_cast<char>(random());
  return success;
}

FAKE_EXPORT const char* ncclGetErrorString(Result code) {
  switch (code) {
    case success:
      return "no error";
    case unhandled_cuda_error:
      return "unhandled cuda error (of a stand-in)";
    case system_error:
      return "unhandled system error (of a stand-in)";
    case internal_error:
      return "internal error (of a stand-in)";
    case invalid_argument:
      return "invalid argument (of a stand-in)";
    case invalid_usage:
      return "invalid usage (of a stand-in)";
    case remote_error:
      return "remote process exited or there was a network error";
    case in_progress:
      return "NCCL operation in progress";
    case 8:
      return version >= 23003 ? "timeout" : "unknown result code";
    default:
      return "unknown result code";
  }
}

FAKE_EXPORT const char* ncclGetLastError(Handle) { return last_error; }

FAKE_EXPORT Result ncclCommInitRankConfig(Handle* comm, int size, UniqueId id, int rank, const Config* config) {
  return in_group(init(comm, size, id, rank, config));
}

FAKE_EXPORT Result ncclCommInitRank(Handle* comm, int size, UniqueId id, int rank) {
  return in_group(init(comm, size, id, rank, nullptr));
}

namespace {
// Waits until all ranks of this host have completed their operations and are finalizing as well.
Result finalize(Comm& comm) {
  if (!comm.drain()) return success;  // the communicator was aborted
  const uint64_t here = this_host();
  comm.meeting().finish(
      [&](int rank) { return static_cast<size_t>(rank) < comm.hosts.size() && comm.hosts[static_cast<size_t>(rank)] == here; },
      comm.watch());
  return success;
}
}  // namespace

FAKE_EXPORT Result ncclCommFinalize(Handle handle) {
  const auto comm = find(handle);
  if (!comm) return invalid_argument;
  Communicator::Inside inside(cuda(), comm.get());
  if (const Result result = ready(*comm)) return result;
  comm->finalized = true;
  if (comm->blocking()) return finalize(*comm);
  comm->go_on([raw = comm.get()] { return finalize(*raw); });
  return in_progress;
}

FAKE_EXPORT Result ncclCommDestroy(Handle handle) {
  if (!handle) return success;
  const auto comm = find(handle);
  if (!comm) return invalid_argument;
  Communicator::Inside inside(cuda(), comm.get());
  comm->settle();
  if (comm->error) {
    comm->stop();
  } else if (!comm->finalized.exchange(true)) {
    finalize(*comm);
  }
  comm->meeting().leave();
  forget(handle);
  return success;
}

FAKE_EXPORT Result ncclCommAbort(Handle handle) {
  if (!handle) return success;
  const auto comm = find(handle);
  if (!comm) return invalid_argument;
  Communicator::Inside inside(cuda(), comm.get());
  comm->stop();
  comm->settle();
  comm->meeting().leave();
  forget(handle);
  return success;
}

FAKE_EXPORT Result ncclCommGetAsyncError(Handle handle, Result* error) {
  const auto comm = find(handle);
  if (!comm || !error) return invalid_argument;
  *error = comm->poll();
  return success;
}

FAKE_EXPORT Result ncclAllReduce(const void* send, void* receive, size_t count, int type, int fold, Handle comm, Handle stream) {
  return enqueue(Kind::all_reduce, {"all_reduce", send, receive, count, type, fold, -1, comm, stream});
}

FAKE_EXPORT Result ncclReduce(const void* send, void* receive, size_t count, int type, int fold, int root, Handle comm,
                              Handle stream) {
  return enqueue(Kind::reduce, {"reduce", send, receive, count, type, fold, root, comm, stream});
}

FAKE_EXPORT Result ncclBroadcast(const void* send, void* receive, size_t count, int type, int root, Handle comm, Handle stream) {
  return enqueue(Kind::broadcast, {"broadcast", send, receive, count, type, -1, root, comm, stream});
}

FAKE_EXPORT Result ncclAllGather(const void* send, void* receive, size_t count, int type, Handle comm, Handle stream) {
  return enqueue(Kind::all_gather, {"all_gather", send, receive, count, type, -1, -1, comm, stream});
}

FAKE_EXPORT Result ncclReduceScatter(const void* send, void* receive, size_t count, int type, int fold, Handle comm,
                                     Handle stream) {
  return enqueue(Kind::reduce_scatter, {"reduce_scatter", send, receive, count, type, fold, -1, comm, stream});
}

FAKE_EXPORT Result ncclSend(const void* data, size_t count, int type, int peer, Handle comm, Handle stream) {
  return message("send", true, data, count, type, peer, comm, stream);
}

FAKE_EXPORT Result ncclRecv(void* data, size_t count, int type, int peer, Handle comm, Handle stream) {
  return message("recv", false, data, count, type, peer, comm, stream);
}

FAKE_EXPORT Result ncclGroupStart() {
  ++group.depth;
  return success;
}

FAKE_EXPORT Result ncclGroupEnd() {
  if (group.depth == 1) {
    const int nth = called("group_end");
    if (const Injection* now = injected("FAKE_FAIL", "group_end", nth, -1)) {
      group = {};
      return fail(now->code, "injected: group_end fails with %d", now->code);
    }
  }
  return end_group();
}
