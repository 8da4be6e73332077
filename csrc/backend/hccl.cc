#include "backend/hccl.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <future>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/thread.h"

namespace mscomm {

namespace {

using Comm = void*;

// These numbers are from hccl_types.h. Type numbers above 11 are left out, because they differ between releases.
constexpr int success = 0;
constexpr size_t root_info_bytes = 4108;
enum Type { t_int8 = 0, t_int16 = 1, t_int32 = 2, t_float16 = 3, t_float32 = 4, t_int64 = 5, t_bfloat16 = 11 };
enum RedOp { r_sum = 0, r_prod = 1, r_max = 2, r_min = 3 };

struct Item {
  int receives;  // 1 to receive, 0 to send
  void* data;
  uint64_t count;
  int type;
  uint32_t peer;
};
static_assert(sizeof(Item) == 32 && offsetof(Item, peer) == 28);

// An error code, its meaning and, for some codes, what to check.
struct Meaning {
  int code;
  const char* words;
};
constexpr Meaning meanings[] = {
    {1, "wrong parameter"},
    {2, "a pointer is missing"},
    {3, "out of memory: each group takes twice HCCL_BUFFSIZE MiB"},
    {4, "internal error"},
    {5, "not supported by this device"},
    {6, "not found"},
    {7, "unavailable"},
    {8, "a system call failed"},
    {9, "timeout: a rank is missing, or HCCL_CONNECT_TIMEOUT or HCCL_EXEC_TIMEOUT is too short"},
    {10, "a file cannot be opened"},
    {11, "TCP connection failed: look at HCCL_SOCKET_IFNAME, HCCL_IF_IP and the ports from HCCL_IF_BASE_PORT"},
    {12, "RoCE connection failed: look at the devices' network"},
    {13, "TCP transfer failed"},
    {14, "RoCE transfer failed"},
    {15, "the runtime failed"},
    {16, "the driver failed"},
    {19, "network error"},
    {20, "try again"},
    {21, "a remote device failed, or its rank is gone"},
    {22, "the communicator is suspended"},
    {24, "out of device memory"},
};

struct Functions {
  const Dynlib& collectives;
  const Dynlib* communicators;  // nullptr if all functions are in `collectives`

  Dynlib::Symbol find(const char* name) const {
    const Dynlib::Symbol found = collectives.find(name);
    return found.address || !communicators ? found : communicators->find(name);
  }
  Dynlib::Symbol need(const char* name) const {
    const Dynlib::Symbol found = find(name);
    return found.address ? found : collectives.need(name);
  }

  int (*get_root_info)(void* info) = need("HcclGetRootInfo");
  int (*init)(uint32_t size, const void* info, uint32_t rank, Comm* comm) = need("HcclCommInitRootInfo");
  int (*destroy)(Comm comm) = need("HcclCommDestroy");
  int (*suspend)(Comm comm) = find("HcclCommSuspend");
  int (*async_error)(Comm comm, int* result) = need("HcclGetCommAsyncError");
  const char* (*error_string)(int result) = find("HcclGetErrorString");
  uint32_t (*capability)() = find("HcclGetCommConfigCapability");
  // These functions only read x, so x is const here, although it is not const in the library's headers.
  int (*all_reduce)(const void* x, void* out, uint64_t count, int type, int op, Comm comm,
                    StreamHandle stream) = need("HcclAllReduce");
  int (*reduce)(const void* x, void* out, uint64_t count, int type, int op, uint32_t root, Comm comm,
                StreamHandle stream) = need("HcclReduce");
  int (*reduce_scatter)(const void* x, void* out, uint64_t count, int type, int op, Comm comm,
                        StreamHandle stream) = need("HcclReduceScatter");
  int (*all_gather)(const void* x, void* out, uint64_t count, int type, Comm comm, StreamHandle stream) = need("HcclAllGather");
  int (*broadcast)(void* data, uint64_t count, int type, uint32_t root, Comm comm, StreamHandle stream) = need("HcclBroadcast");
  int (*batch_send_recv)(Item* items, uint32_t count, Comm comm, StreamHandle stream) = need("HcclBatchSendRecv");
};

// HCCL's types in the order of Dtype, and its operations in the order of Op.
constexpr Numbers numbers{
    std::to_array<int>({-1,         t_int8,    t_int16, t_int32, t_int64, -1, -1, -1, -1, t_float16,
                        t_bfloat16, t_float32, -1,      -1,      -1,      -1, -1, -1, -1, -1}),
    std::to_array<int>({r_sum, r_prod, r_min, r_max, -1, -1, -1, -1}),
    t_int8,
};

// The names of the first device generation, as aclrtGetSocName() returns them. Names such as Ascend910B1 are of the second
// generation.
constexpr std::array<std::string_view, 5> first_generation{"Ascend910A", "Ascend910B", "Ascend910ProA", "Ascend910ProB",
                                                           "Ascend910PremiumA"};

// Returns nullopt for reductions that the documentation of HcclAllReduce and HcclReduce excludes. The first device generation
// cannot reduce int16 or bfloat16. No device can reduce these two types by prod.
std::optional<VendorReduction> reduction_on(bool is_first_generation, Dtype dtype, Op op) {
  const auto found = reduction_of(numbers, dtype, op);
  const bool newer = found && (found->type == t_int16 || found->type == t_bfloat16);
  return newer && (is_first_generation || found->op == r_prod) ? std::nullopt : found;
}

class Hccl final : public Vendor {
 public:
  Hccl(Dynlib collectives, std::optional<Dynlib> communicators, const std::string& soc)
      : collectives_(std::move(collectives)),
        communicators_(std::move(communicators)),
        is_first_generation_(std::ranges::find(first_generation, soc) != first_generation.end()),
        functions{collectives_, communicators_ ? &*communicators_ : nullptr} {}

  std::string_view name() const override { return "hccl"; }
  // The library has no function that returns its version. Instead, this returns the number of settings that a communicator has,
  // because newer versions have more settings.
  std::string version() const override {
    return functions.capability ? "capability " + std::to_string(functions.capability()) : "without a version";
  }
  const std::string& path() const override { return collectives_.path(); }
  const std::string& origin() const override { return collectives_.origin(); }

  std::string refuses(Dtype dtype, Op op) const override {
    if (reduction_on(is_first_generation_, dtype, op)) return "";
    const std::string what = "HCCL cannot reduce " + std::string(mscomm::name(dtype)) + " by " + std::string(mscomm::name(op));
    if (op == Op::avg) return what + "; use sum, and divide by the number of ranks";
    const std::string newer = is_first_generation_ ? "" : "int16, bfloat16 (both not by prod), ";
    return what + " on this device; it supports sum, prod, min and max of " + newer + "int8, int32, int64, float16 and float32";
  }

  std::string make_id() override {
    std::string info(root_info_bytes, '\0');
    check(functions.get_root_info(info.data()), "HcclGetRootInfo");
    return info;
  }

  std::unique_ptr<VendorGroup> join(const std::string& id, int size, int rank, std::shared_ptr<Runtime> runtime,
                                    int device) override;

  VendorReduction reduction(Dtype dtype, Op op) const { return *reduction_on(is_first_generation_, dtype, op); }

  void check(int result, const char* what) const {
    if (result != success) throw error(result, what);
  }

  Error error(int result, const char* what) const {
    const auto* known = std::ranges::find(meanings, result, &Meaning::code);
    const char* own = functions.error_string ? functions.error_string(result) : nullptr;
    constexpr int remote = 21;
    return {result == remote ? "PeerLost" : "Error", std::string(what) + ": " + (own ? std::string(own) + ", " : "") + "code " +
                                                         std::to_string(result) +
                                                         (known != std::end(meanings) ? std::string(": ") + known->words : "")};
  }

 private:
  const Dynlib collectives_;
  const std::optional<Dynlib> communicators_;
  const bool is_first_generation_;

 public:
  const Functions functions;
};

// Holds what the library's join function returned. Destroys the communicator, unless HcclGroup has taken it.
struct Joined {
  int result;
  mutable std::unique_ptr<void, int (*)(Comm)> comm;
};

class HcclGroup final : public VendorGroup {
 public:
  HcclGroup(const Hccl& library, const std::string& id, int size, int rank, std::shared_ptr<Runtime> runtime, int device)
      : library_(library), functions_(library.functions), runtime_(std::move(runtime)), rank_(rank) {
    if (id.size() != root_info_bytes)
      throw Error("Error", "hccl: the group's id has " + std::to_string(id.size()) + " bytes, expected " +
                               std::to_string(root_info_bytes));
    // The library's join function waits for the other ranks. So a separate thread calls the function, and is left behind if the
    // function does not return. The thread can safely outlive this object, because it has its own copies of the function
    // pointers, and because the libraries are never closed.
    const auto join =
        std::make_shared<std::packaged_task<Joined()>>([functions = functions_, runtime = runtime_, id, size, rank, device] {
          const Runtime::Current current(*runtime, device);
          Comm comm = nullptr;
          const int result = functions.init(size, id.data(), rank, &comm);
          return Joined{result, {comm, functions.destroy}};
        });
    joining_ = join->get_future();
    start_thread([join] { (*join)(); })->detach();
  }

  ~HcclGroup() override {
    if (comm_ && !aborted_) (void)functions_.destroy(comm_);
    for (void* const memory : scratch_) runtime_->free(memory);
  }

  void all_reduce(const void* x, void* out, size_t count, Dtype dtype, Op op, StreamHandle stream) override {
    const VendorReduction how = library_.reduction(dtype, op);
    library_.check(functions_.all_reduce(x, out, count * how.factor, how.type, how.op, comm_, stream), "HcclAllReduce");
  }

  void reduce(const void* x, void* out, size_t count, Dtype dtype, Op op, int root, StreamHandle stream) override {
    const VendorReduction how = library_.reduction(dtype, op);
    // The library needs memory for the result on every rank, not only on the root.
    void* const target = rank_ == root ? out : scratch(count * size_of(dtype));
    library_.check(functions_.reduce(x, target, count * how.factor, how.type, how.op, root, comm_, stream), "HcclReduce");
  }

  void reduce_scatter(const void* x, void* out, size_t count, Dtype dtype, Op op, StreamHandle stream) override {
    const VendorReduction how = library_.reduction(dtype, op);
    library_.check(functions_.reduce_scatter(x, out, count * how.factor, how.type, how.op, comm_, stream), "HcclReduceScatter");
  }

  void all_gather(const void* x, void* out, size_t bytes, StreamHandle stream) override {
    library_.check(functions_.all_gather(x, out, bytes, t_int8, comm_, stream), "HcclAllGather");
  }

  void broadcast(const void* x, void* out, size_t bytes, int root, StreamHandle stream) override {
    if (rank_ == root && x != out) runtime_->copy(out, x, bytes, stream);  // the library takes one pointer for x and out
    library_.check(functions_.broadcast(out, bytes, t_int8, root, comm_, stream), "HcclBroadcast");
  }

  void exchange(std::span<const Part> parts, StreamHandle stream) override {
    std::vector<Item> items;
    for (const Part& part : parts)
      items.push_back({!part.sends, part.data, part.bytes, t_int8, static_cast<uint32_t>(part.peer)});
    library_.check(functions_.batch_send_recv(items.data(), static_cast<uint32_t>(items.size()), comm_, stream),
                   "HcclBatchSendRecv");
  }

  void batch(const std::function<void()>& calls) override { calls(); }

  bool busy() override {
    if (!comm_) {
      if (joining_.wait_for(std::chrono::seconds(0)) != std::future_status::ready) return true;
      const Joined& joined = joining_.get();
      library_.check(joined.result, "HcclCommInitRootInfo");
      comm_ = joined.comm.release();
    }
    int result = success;
    library_.check(functions_.async_error(comm_, &result), "HcclGetCommAsyncError");
    if (result != success) throw library_.error(result, "hccl");
    return false;
  }

  void abort(bool beside) noexcept override {
    if (!comm_ || aborted_.exchange(true)) return;
    // HCCL has no abort. If it has no suspend either, the work on the device ends after HCCL_EXEC_TIMEOUT. A communicator cannot
    // be destroyed while another thread is inside one of its functions. If there is such a thread (`beside`), the communicator is
    // leaked.
    if (functions_.suspend) (void)functions_.suspend(comm_);
    if (!beside) (void)functions_.destroy(comm_);
  }

  void finish() override {}

 private:
  void* scratch(size_t bytes) {
    if (bytes > scratch_bytes_) {
      scratch_bytes_ = std::max(bytes, 2 * scratch_bytes_);
      scratch_.push_back(runtime_->allocate(scratch_bytes_));
    }
    return scratch_.back();
  }

  const Hccl& library_;
  const Functions& functions_;
  const std::shared_ptr<Runtime> runtime_;
  const int rank_;
  std::shared_future<Joined> joining_;
  Comm comm_ = nullptr;
  std::atomic<bool> aborted_{false};
  std::vector<void*> scratch_;  // the last buffer is the largest; the device may still be using the others
  size_t scratch_bytes_ = 0;
};

std::unique_ptr<VendorGroup> Hccl::join(const std::string& id, int size, int rank, std::shared_ptr<Runtime> runtime, int device) {
  return std::make_unique<HcclGroup>(*this, id, size, rank, std::move(runtime), device);
}

}  // namespace

std::unique_ptr<Vendor> open_hccl(const std::vector<Candidate>& collectives, const std::vector<Candidate>& communicators,
                                  const std::string& soc) {
  // Each of the two libraries looks up the other's functions by name, so both are opened with global symbol visibility.
  Dynlib first("libhccl.so, CANN's HCCL", collectives, Dynlib::Names::everybodys);
  std::optional<Dynlib> second;
  if (!first.find("HcclCommInitRootInfo").address)
    second.emplace("libhcomm.so, CANN's communicators", communicators, Dynlib::Names::everybodys);
  return std::make_unique<Hccl>(std::move(first), std::move(second), soc);
}

}  // namespace mscomm
