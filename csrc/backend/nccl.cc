#include "backend/nccl.h"

#include <atomic>
#include <cstring>
#include <optional>

#include "base/error.h"

namespace mscomm {

namespace nccl {

std::string version_text(int code) {
  const int major = code < 10000 ? 1000 : 10000;
  return std::to_string(code / major) + "." + std::to_string(code % major / 100) + "." + std::to_string(code % 100);
}

}  // namespace nccl

namespace {

using namespace nccl;

using Comm = void*;

struct Functions {
  explicit Functions(const Dynlib& library) {
    library.need(get_version, "ncclGetVersion");
    library.need(get_unique_id, "ncclGetUniqueId");
    library.need(error_string, "ncclGetErrorString");
    library.need(last_error, "ncclGetLastError");
    library.need(init, "ncclCommInitRankConfig");
    library.need(finalize, "ncclCommFinalize");
    library.need(destroy, "ncclCommDestroy");
    library.need(abort, "ncclCommAbort");
    library.need(async_error, "ncclCommGetAsyncError");
    library.need(all_reduce, "ncclAllReduce");
    library.need(all_gather, "ncclAllGather");
    library.need(reduce_scatter, "ncclReduceScatter");
    library.need(broadcast, "ncclBroadcast");
    library.need(reduce, "ncclReduce");
    library.need(send, "ncclSend");
    library.need(recv, "ncclRecv");
    library.need(group_start, "ncclGroupStart");
    library.need(group_end, "ncclGroupEnd");
  }

  int (*get_version)(int* version);
  int (*get_unique_id)(UniqueId* id);
  const char* (*error_string)(int result);
  const char* (*last_error)(Comm comm);
  int (*init)(Comm* comm, int size, UniqueId id, int rank, Config* config);
  int (*finalize)(Comm comm);
  int (*destroy)(Comm comm);
  int (*abort)(Comm comm);
  int (*async_error)(Comm comm, int* result);
  int (*all_reduce)(const void* x, void* out, size_t count, int type, int op, Comm comm, StreamHandle stream);
  int (*all_gather)(const void* x, void* out, size_t count, int type, Comm comm, StreamHandle stream);
  int (*reduce_scatter)(const void* x, void* out, size_t count, int type, int op, Comm comm, StreamHandle stream);
  int (*broadcast)(const void* x, void* out, size_t count, int type, int root, Comm comm, StreamHandle stream);
  int (*reduce)(const void* x, void* out, size_t count, int type, int op, int root, Comm comm, StreamHandle stream);
  int (*send)(const void* data, size_t count, int type, int peer, Comm comm, StreamHandle stream);
  int (*recv)(void* data, size_t count, int type, int peer, Comm comm, StreamHandle stream);
  int (*group_start)();
  int (*group_end)();
};

// NCCL's types in the order of Dtype, and its operations in the order of Op.
constexpr Numbers numbers{
    {-1, int8, -1, int32, int64, uint8, -1, uint32, uint64, float16, bfloat16, float32, float64, -1, -1},
    {sum, prod, min, max, avg, -1, -1, -1},
    uint8,
};

std::string refusal(Dtype dtype, Op op) {
  if (reduction_of(numbers, dtype, op)) return "";
  const std::string what = "NCCL cannot reduce " + std::string(name(dtype)) + " by " + std::string(name(op));
  if (numbers.operations[static_cast<size_t>(op)] >= 0 && dtype != Dtype::boolean)
    return what +
           "; it knows int8, int32, int64, uint8, uint32, uint64, float16, bfloat16, float32 and float64, and sums complex";
  return what + "; it knows sum, prod, min, max and avg";
}

class Nccl;

class NcclGroup final : public VendorGroup {
 public:
  NcclGroup(const Nccl& library, const std::string& id, int size, int rank);
  ~NcclGroup() override;

  void all_reduce(const void* x, void* out, size_t count, Dtype dtype, Op op, StreamHandle stream) override;
  void reduce(const void* x, void* out, size_t count, Dtype dtype, Op op, int root, StreamHandle stream) override;
  void reduce_scatter(const void* x, void* out, size_t count, Dtype dtype, Op op, StreamHandle stream) override;
  void all_gather(const void* x, void* out, size_t bytes, StreamHandle stream) override;
  void broadcast(const void* x, void* out, size_t bytes, int root, StreamHandle stream) override;
  void exchange(std::span<const Part> parts, StreamHandle stream) override;
  void begin_batch() override;
  void end_batch() override;
  bool busy() override;
  void abort(bool beside) noexcept override;
  void finish() override;

 private:
  const Nccl& library_;
  const Functions& functions_;
  Comm comm_ = nullptr;
  bool finished_ = false;
  std::atomic<bool> aborted_{false};
};

class Nccl final : public Vendor {
 public:
  explicit Nccl(Dynlib library) : library_(std::move(library)), functions(library_) {
    check(functions.get_version(&version_), "ncclGetVersion");
  }

  std::string_view name() const override { return "nccl"; }
  std::string version() const override { return version_text(version_); }
  const std::string& path() const override { return library_.path(); }
  const std::string& origin() const override { return library_.origin(); }
  std::string refuses(Dtype dtype, Op op) const override { return refusal(dtype, op); }

  std::string make_id() override {
    UniqueId id;
    check(functions.get_unique_id(&id), "ncclGetUniqueId");
    return {id.bytes, sizeof id.bytes};
  }

  std::unique_ptr<VendorGroup> join(const std::string& id, int size, int rank, std::shared_ptr<Runtime>, int) override {
    return std::make_unique<NcclGroup>(*this, id, size, rank);
  }

  void check(int result, const char* what) const {
    if (result != success && result != in_progress) throw error(result, what);
  }

  // The library keeps only one error message, the last one, for the whole process, and never clears it.
  Error error(int result, const char* what) const {
    const char* last = functions.last_error(nullptr);
    std::string text =
        std::string(what) + ": " + functions.error_string(result) + " (" + std::to_string(result) + ", NCCL " + version() + ")";
    if (last && *last) text += "; NCCL's last message, perhaps of another group: " + std::string(last);
    return {result == remote_error ? "PeerLost" : "Error", text};
  }

 private:
  const Dynlib library_;
  int version_ = 0;

 public:
  const Functions functions;
};

NcclGroup::NcclGroup(const Nccl& library, const std::string& id, int size, int rank)
    : library_(library), functions_(library.functions) {
  UniqueId unique;
  if (id.size() != sizeof unique.bytes)
    throw Error("Error", "nccl: the group's id has " + std::to_string(id.size()) + " bytes, expected 128");
  std::memcpy(unique.bytes, id.data(), sizeof unique.bytes);
  Config config;
  library_.check(functions_.init(&comm_, size, unique, rank, &config), "ncclCommInitRankConfig");
}

NcclGroup::~NcclGroup() {
  if (comm_ && !aborted_) (void)(finished_ ? functions_.destroy(comm_) : functions_.abort(comm_));
}

void NcclGroup::all_reduce(const void* x, void* out, size_t count, Dtype dtype, Op op, StreamHandle stream) {
  const VendorReduction how = *reduction_of(numbers, dtype, op);
  library_.check(functions_.all_reduce(x, out, count * how.factor, how.type, how.op, comm_, stream), "ncclAllReduce");
}

void NcclGroup::reduce(const void* x, void* out, size_t count, Dtype dtype, Op op, int root, StreamHandle stream) {
  const VendorReduction how = *reduction_of(numbers, dtype, op);
  library_.check(functions_.reduce(x, out, count * how.factor, how.type, how.op, root, comm_, stream), "ncclReduce");
}

void NcclGroup::reduce_scatter(const void* x, void* out, size_t count, Dtype dtype, Op op, StreamHandle stream) {
  const VendorReduction how = *reduction_of(numbers, dtype, op);
  library_.check(functions_.reduce_scatter(x, out, count * how.factor, how.type, how.op, comm_, stream), "ncclReduceScatter");
}

void NcclGroup::all_gather(const void* x, void* out, size_t bytes, StreamHandle stream) {
  library_.check(functions_.all_gather(x, out, bytes, uint8, comm_, stream), "ncclAllGather");
}

void NcclGroup::broadcast(const void* x, void* out, size_t bytes, int root, StreamHandle stream) {
  library_.check(functions_.broadcast(x, out, bytes, uint8, root, comm_, stream), "ncclBroadcast");
}

void NcclGroup::exchange(std::span<const Part> parts, StreamHandle stream) {
  Batch batch(*this);
  for (const Part& part : parts) {
    if (part.sends) library_.check(functions_.send(part.data, part.bytes, uint8, part.peer, comm_, stream), "ncclSend");
    else library_.check(functions_.recv(part.data, part.bytes, uint8, part.peer, comm_, stream), "ncclRecv");
  }
  batch.end();
}

void NcclGroup::begin_batch() { library_.check(functions_.group_start(), "ncclGroupStart"); }

void NcclGroup::end_batch() { library_.check(functions_.group_end(), "ncclGroupEnd"); }

bool NcclGroup::busy() {
  int result = success;
  library_.check(functions_.async_error(comm_, &result), "ncclCommGetAsyncError");
  if (result == in_progress) return true;
  if (result != success) throw library_.error(result, "nccl");
  return false;
}

void NcclGroup::abort(bool) noexcept {
  // The result is ignored, because an error of the abort itself would tell nothing new. The library frees the communicator in a
  // thread of its own.
  if (comm_ && !aborted_.exchange(true)) (void)functions_.abort(comm_);
}

void NcclGroup::finish() {
  finished_ = true;
  library_.check(functions_.finalize(comm_), "ncclCommFinalize");
}

}  // namespace

std::unique_ptr<Vendor> open_nccl(const std::vector<Candidate>& candidates) {
  return std::make_unique<Nccl>(Dynlib("libnccl.so.2, NVIDIA's NCCL", candidates));
}

}  // namespace mscomm
