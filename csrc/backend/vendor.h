// What a vendor's communication library does for the vendor backend: nccl.cc and hccl.cc fill this in.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "backend/backend.h"
#include "base/deadline.h"
#include "base/error.h"
#include "device/runtime.h"

namespace mscomm {

// Bytes to or from one rank of an exchange.
struct Part {
  bool sends;
  int peer;
  void* data;
  size_t bytes;
};

// How a library numbers what it can reduce; -1: what it cannot.
struct Numbers {
  std::array<int, dtypes.size()> types;            // by Dtype, but for bool and complex numbers
  std::array<int, mscomm::ops.size()> operations;  // by Op
  int byte;                                        // the type for bools, which are bytes that are 0 or 1
};

// A type and an operation of the library's. factor: elements of that type for one of ours.
struct VendorReduction {
  int type, op;
  size_t factor = 1;
};

// Complex numbers are summed part by part; of bools the largest is their or, and their sum, the smallest their and.
std::optional<VendorReduction> reduction_of(const Numbers& library, Dtype dtype, Op op);

// A communicator of the library: one rank's end of it, on one device. All calls but abort() come from one thread at a time, with
// the device current. They throw Error for what the library refuses.
class VendorGroup {
 public:
  virtual ~VendorGroup() = default;

  // Each enqueues, and returns at once; then busy() must have said false before anything else is asked of the group. Counts are
  // of elements. x may be out.
  virtual void all_reduce(const void* x, void* out, size_t count, Dtype dtype, Op op, StreamHandle stream) = 0;
  virtual void reduce(const void* x, void* out, size_t count, Dtype dtype, Op op, int root, StreamHandle stream) = 0;
  // count: of out.
  virtual void reduce_scatter(const void* x, void* out, size_t count, Dtype dtype, Op op, StreamHandle stream) = 0;
  // bytes: of x. x may be at its place in out.
  virtual void all_gather(const void* x, void* out, size_t bytes, StreamHandle stream) = 0;
  // x counts at the root alone.
  virtual void broadcast(const void* x, void* out, size_t bytes, int root, StreamHandle stream) = 0;
  // All parts at once; from a rank to another at most one. Nothing of it is this rank's own.
  virtual void exchange(std::span<const Part> parts, StreamHandle stream) = 0;
  // What is called between the two is one operation of the library.
  virtual void begin_batch() = 0;
  virtual void end_batch() = 0;

  // Whether the library is still setting up what was called last. Throws the error that the group has met, at any time.
  virtual bool busy() = 0;
  // Ends what the device is doing for this group, from any thread, once; nothing is asked of the group after that. It may take
  // long. beside: another thread is inside a call, which this shall make return.
  virtual void abort(bool beside) noexcept = 0;
  // The group has come to its end well: begins to free it. When busy() says false, the destructor frees the rest.
  virtual void finish() = 0;
};

// The calls of its life are one operation; if one of them throws, so does the rest of the batch, which counts for nothing then.
class Batch {
 public:
  explicit Batch(VendorGroup& group);
  ~Batch();
  void end();
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

 private:
  VendorGroup& group_;
  bool ended_ = false;
};

class Vendor {
 public:
  virtual ~Vendor() = default;

  virtual std::string_view name() const = 0;    // "nccl"
  virtual std::string version() const = 0;      // "2.28.9"
  virtual const std::string& path() const = 0;  // of the library
  virtual const std::string& origin() const = 0;

  // Why the library cannot reduce such elements so; empty: it can.
  virtual std::string refuses(Dtype dtype, Op op) const = 0;
  // For all ranks of a group that is to be, from one of them, whose device is current.
  virtual std::string make_id() = 0;
  // One rank's end of that group, on the device, which is current; busy() tells when it can be used.
  virtual std::unique_ptr<VendorGroup> join(const std::string& id, int size, int rank, std::shared_ptr<Runtime> runtime,
                                            int device) = 0;
};

// Runs the calls of one group on arrays of one device: enqueues them, and watches from a thread of its own what becomes of them.
class VendorBackend final : public Backend {
 public:
  // Told of calls, from a thread that holds no lock.
  class Observer {
   public:
    virtual ~Observer() = default;
    virtual void ended(uint64_t number) = 0;
    // As long as nobody ends the group by shut_down(), again and again.
    virtual void failed(const Signature& call, const Error& error) = 0;
    virtual void waits(const Signature& call, double waited_s) = 0;
  };

  // Joins the group; every rank of it does, with the same id. check: called each 50 ms or more often; may throw to end the wait.
  // Throws CollectiveTimeout.
  VendorBackend(std::shared_ptr<Vendor> vendor, std::shared_ptr<Runtime> runtime, int device, const std::string& id, int size,
                int rank, const Deadline& deadline, const std::function<void()>& check);
  ~VendorBackend() override;

  // Before the first call; nullptr when the observer goes.
  void observe(Observer* observer);

  // Returns when the call has been enqueued on its stream, or beside it; the observer learns of its end.
  void run(const Call& call, const Wait& wait) override;
  // What is enqueued on the stream from now on comes after that call.
  void order(uint64_t number, StreamHandle stream);
  // In the order of the stream: by the device's kernels, else by copies, which can neither scale nor cast; RuntimeError then.
  void pack(const Packing& packing, StreamHandle stream);
  // All bytes of the device's memory zero, in the order of the stream.
  void clear(void* memory, size_t bytes, StreamHandle stream);
  // Whether the device has kernels that scale, and cast where the dtypes differ.
  bool converts(Dtype part, Dtype bucket) const;
  // Why the library cannot reduce such elements so; empty: it can.
  std::string refuses(Dtype dtype, Op op) const;
  // How many calls have not ended.
  size_t pending() const;

  void shut_down() override;
  void withdraw(const Call&) override {}  // the device alone has the arrays
  void last_look() override {}
  void close() override;
  void close_descriptors() override;

 private:
  class State;
  std::shared_ptr<State> state_;  // the watching thread's too, which the library may keep for longer than anybody waits
};

}  // namespace mscomm
