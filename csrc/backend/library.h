// What the vendor backend needs of a vendor's communication library; nccl.cc and hccl.cc implement it.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/types.h"
#include "device/runtime.h"

namespace mscomm {

// Bytes to or from one peer in an exchange.
struct Part {
  bool sends;
  int peer;
  void* data;
  size_t bytes;
};

// The library's numbers for the types and operations that it can reduce; -1: it cannot.
struct Numbers {
  std::array<int, dtypes.size()> types;            // by Dtype; bool and complex numbers have none
  std::array<int, mscomm::ops.size()> operations;  // by Op
  int byte;                                        // the type for bools, which are bytes that are 0 or 1
};

// A type and an operation, in the library's numbers. factor: elements of that type for one element of ours.
struct VendorReduction {
  int type, op;
  size_t factor = 1;
};

// How the library can compute op on dtype; nullopt: it cannot. Complex numbers are summed part by part. For bools, the maximum is
// the or and the sum, and the minimum is the and and the product.
std::optional<VendorReduction> reduction_of(const Numbers& library, Dtype dtype, Op op);

// One rank's communicator of the library, on one device. All functions but abort() are called by one thread at a time, with the
// device current. They throw Error if the library refuses.
class VendorGroup {
 public:
  virtual ~VendorGroup() = default;

  // Each of these enqueues and returns at once. Afterwards busy() must have returned false before anything else is called. Counts
  // are in elements. x may be out.
  virtual void all_reduce(const void* x, void* out, size_t count, Dtype dtype, Op op, StreamHandle stream) = 0;
  virtual void reduce(const void* x, void* out, size_t count, Dtype dtype, Op op, int root, StreamHandle stream) = 0;
  // count: elements of out.
  virtual void reduce_scatter(const void* x, void* out, size_t count, Dtype dtype, Op op, StreamHandle stream) = 0;
  // bytes: the size of x. x may be at its place in out.
  virtual void all_gather(const void* x, void* out, size_t bytes, StreamHandle stream) = 0;
  // x is read at the root only.
  virtual void broadcast(const void* x, void* out, size_t bytes, int root, StreamHandle stream) = 0;
  // Moves all parts at once. There is at most one part from a rank to another, and none from this rank to itself.
  virtual void exchange(std::span<const Part> parts, StreamHandle stream) = 0;
  // What is called between these two is one operation of the library.
  virtual void begin_batch() = 0;
  virtual void end_batch() = 0;

  // Whether the library is still setting up the last call. Throws the error that the group has met, whenever that was.
  virtual bool busy() = 0;
  // Ends what the device is doing for this group. May be called by any thread, once; nothing is called afterwards. It may take
  // long. beside: another thread is inside a call, and abort() must make it return.
  virtual void abort(bool beside) noexcept = 0;
  // Called when the group has ended without an error: begins to free it. Once busy() returns false, the destructor frees the
  // rest.
  virtual void finish() = 0;
};

// All calls during its life are one operation of the library. If one of them throws, the destructor closes the operation and
// ignores its errors.
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

  // Why the library cannot reduce elements of this type by this operation; empty: it can.
  virtual std::string refuses(Dtype dtype, Op op) const = 0;
  // The id of a new group. One of its ranks makes it, with its device current, and gives it to the others.
  virtual std::string make_id() = 0;
  // Joins that group as one rank, on the device, which is current. The group can be used once busy() returns false.
  virtual std::unique_ptr<VendorGroup> join(const std::string& id, int size, int rank, std::shared_ptr<Runtime> runtime,
                                            int device) = 0;
};

}  // namespace mscomm
