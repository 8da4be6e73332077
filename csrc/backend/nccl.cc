#include "backend/nccl.h"

#include <atomic>
#include <cstring>

#include "base/error.h"

namespace mscomm {

namespace {

using namespace nccl;

using Comm = void*;

struct Functions {
  const Dynlib& library;
  int (*get_version)(int* version) = library.need("ncclGetVersion");
  int (*get_unique_id)(UniqueId* id) = library.need("ncclGetUniqueId");
  const char* (*error_string)(int result) = library.need("ncclGetErrorString");
  const char* (*last_error)(Comm comm) = library.need("ncclGetLastError");
  int (*init)(Comm* comm, int size, UniqueId id, int rank, Config* config) = library.need("ncclCommInitRankConfig");
  int (*finalize)(Comm comm) = library.need("ncclCommFinalize");
  int (*destroy)(Comm comm) = library.need("ncclCommDestroy");
  int (*abort)(Comm comm) = library.need("ncclCommAbort");
  int (*async_error)(Comm comm, int* result) = library.need("ncclCommGetAsyncError");
  int (*all_reduce)(const void* x, void* out, size_t count, int type, int op, Comm comm,
                    StreamHandle stream) = library.need("ncclAllReduce");
  int (*all_gather)(const void* x, void* out, size_t count, int type, Comm comm,
                    StreamHandle stream) = library.need("ncclAllGather");
  int (*reduce_scatter)(const void* x, void* out, size_t count, int type, int op, Comm comm,
                        StreamHandle stream) = library.need("ncclReduceScatter");
  int (*broadcast)(const void* x, void* out, size_t count, int type, int root, Comm comm,
                   StreamHandle stream) = library.need("ncclBroadcast");
  int (*reduce)(const void* x, void* out, size_t count, int type, int op, int root, Comm comm,
                StreamHandle stream) = library.need("ncclReduce");
  int (*send)(const void* data, size_t count, int type, int peer, Comm comm, StreamHandle stream) = library.need("ncclSend");
  int (*recv)(void* data, size_t count, int type, int peer, Comm comm, StreamHandle stream) = library.need("ncclRecv");
  int (*group_start)() = library.need("ncclGroupStart");
  int (*group_end)() = library.need("ncclGroupEnd");
};

// NCCL's types in the order of Dtype, and its operations in the order of Op.
constexpr Numbers numbers{
    std::to_array<int>(
        {-1, int8, -1, int32, int64, uint8, -1, uint32, uint64, float16, bfloat16, float32, float64, -1, -1, -1, -1, -1, -1, -1}),
    std::to_array<int>({sum, prod, min, max, avg, -1, -1, -1}),
    uint8,
};

class Nccl final : public Vendor {
 public:
  explicit Nccl(Dynlib library) : library_(std::move(library)), functions{library_} {
    check(functions.get_version(&version_), "ncclGetVersion");
  }

  std::string_view name() const override { return "nccl"; }

  // Returns the version as text: "2.28.9" for 22809. Version codes before 2.9 have four digits: "2.7.8" for 2708.
  std::string version() const override {
    const int major = version_ < 10000 ? 1000 : 10000, minor = version_ % major / 100;
    return std::to_string(version_ / major) + "." + std::to_string(minor) + "." + std::to_string(version_ % 100);
  }

  const std::string& path() const override { return library_.path(); }
  const std::string& origin() const override { return library_.origin(); }

  std::string refuses(Dtype dtype, Op op) const override {
    if (reduction_of(numbers, dtype, op)) return "";
    const std::string what = "NCCL cannot reduce " + std::string(mscomm::name(dtype)) + " by " + std::string(mscomm::name(op));
    if (numbers.operations[static_cast<size_t>(op)] >= 0 && dtype != Dtype::boolean)
      return what +
             "; it supports int8, int32, int64, uint8, uint32, uint64, float16, bfloat16, float32 and float64, and the sum of "
             "complex numbers";
    return what + "; it supports sum, prod, min, max and avg";
  }

  std::string make_id() override {
    UniqueId id;
    check(functions.get_unique_id(&id), "ncclGetUniqueId");
    return {id.bytes, sizeof id.bytes};
  }

  std::unique_ptr<VendorGroup> join(const std::string& id, int size, int rank, std::shared_ptr<Runtime>, int) override;

  void check(int result, const char* what) const {
    if (result != success && result != in_progress) throw error(result, what);
  }

  // NCCL keeps only the most recent error message of the whole process, and never clears it. So the message may be about another
  // group.
  Error error(int result, const char* what) const {
    const char* last = functions.last_error(nullptr);
    std::string text =
        std::string(what) + ": " + functions.error_string(result) + " (" + std::to_string(result) + ", NCCL " + version() + ")";
    if (last && *last) text += "; NCCL's last message, possibly about another group: " + std::string(last);
    return {result == remote_error ? "PeerLost" : "Error", text};
  }

 private:
  const Dynlib library_;
  int version_ = 0;

 public:
  const Functions functions;
};

class NcclGroup final : public VendorGroup {
 public:
  NcclGroup(const Nccl& library, const std::string& id, int size, int rank) : library_(library), functions_(library.functions) {
    UniqueId unique;
    if (id.size() != sizeof unique.bytes)
      throw Error("Error", "nccl: the group's id has " + std::to_string(id.size()) + " bytes, expected 128");
    std::memcpy(unique.bytes, id.data(), sizeof unique.bytes);
    Config config;
    library_.check(functions_.init(&comm_, size, unique, rank, &config), "ncclCommInitRankConfig");
  }

  ~NcclGroup() override {
    if (comm_ && !aborted_) (void)(finished_ ? functions_.destroy(comm_) : functions_.abort(comm_));
  }

  void all_reduce(const void* x, void* out, size_t count, Dtype dtype, Op op, StreamHandle stream) override {
    const VendorReduction how = *reduction_of(numbers, dtype, op);
    library_.check(functions_.all_reduce(x, out, count * how.factor, how.type, how.op, comm_, stream), "ncclAllReduce");
  }

  void reduce(const void* x, void* out, size_t count, Dtype dtype, Op op, int root, StreamHandle stream) override {
    const VendorReduction how = *reduction_of(numbers, dtype, op);
    library_.check(functions_.reduce(x, out, count * how.factor, how.type, how.op, root, comm_, stream), "ncclReduce");
  }

  void reduce_scatter(const void* x, void* out, size_t count, Dtype dtype, Op op, StreamHandle stream) override {
    const VendorReduction how = *reduction_of(numbers, dtype, op);
    library_.check(functions_.reduce_scatter(x, out, count * how.factor, how.type, how.op, comm_, stream), "ncclReduceScatter");
  }

  void all_gather(const void* x, void* out, size_t bytes, StreamHandle stream) override {
    library_.check(functions_.all_gather(x, out, bytes, uint8, comm_, stream), "ncclAllGather");
  }

  void broadcast(const void* x, void* out, size_t bytes, int root, StreamHandle stream) override {
    library_.check(functions_.broadcast(x, out, bytes, uint8, root, comm_, stream), "ncclBroadcast");
  }

  void exchange(std::span<const Part> parts, StreamHandle stream) override {
    batch([&] {
      for (const Part& part : parts) {
        if (part.sends) library_.check(functions_.send(part.data, part.bytes, uint8, part.peer, comm_, stream), "ncclSend");
        else library_.check(functions_.recv(part.data, part.bytes, uint8, part.peer, comm_, stream), "ncclRecv");
      }
    });
  }

  void batch(const std::function<void()>& calls) override {
    library_.check(functions_.group_start(), "ncclGroupStart");
    try {
      calls();
    } catch (...) {
      (void)functions_.group_end();  // its result is ignored: the caller reports the error that ended the batch early
      throw;
    }
    library_.check(functions_.group_end(), "ncclGroupEnd");
  }

  bool busy() override {
    int result = success;
    library_.check(functions_.async_error(comm_, &result), "ncclCommGetAsyncError");
    if (result == in_progress) return true;
    if (result != success) throw library_.error(result, "nccl");
    return false;
  }

  void abort(bool) noexcept override {
    // The result is ignored, because an error in the abort itself would tell us nothing new. The work on the device ends at once,
    // but the call returns only when NCCL has freed the communicator, on non-blocking communicators, too.
    if (comm_ && !aborted_.exchange(true)) (void)functions_.abort(comm_);
  }

  void finish() override {
    finished_ = true;
    library_.check(functions_.finalize(comm_), "ncclCommFinalize");
  }

 private:
  const Nccl& library_;
  const Functions& functions_;
  Comm comm_ = nullptr;
  bool finished_ = false;
  std::atomic<bool> aborted_{false};
};

std::unique_ptr<VendorGroup> Nccl::join(const std::string& id, int size, int rank, std::shared_ptr<Runtime>, int) {
  return std::make_unique<NcclGroup>(*this, id, size, rank);
}

}  // namespace

std::unique_ptr<Vendor> open_nccl(const std::vector<Candidate>& candidates) {
  return std::make_unique<Nccl>(Dynlib("libnccl.so.2, NVIDIA's NCCL", candidates));
}

}  // namespace mscomm
