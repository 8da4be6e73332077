// The functions that the vendor backend needs from a vendor's communication library. nccl.cc and hccl.cc implement them.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/types.h"
#include "device/runtime.h"

namespace mscomm {

// The bytes that this rank sends to or receives from one peer in an exchange.
struct Part {
  bool sends;
  int peer;
  void* data;
  size_t bytes;
};

// The library's numbers for types and operations. A number is -1 if the library cannot reduce the type, or does not know the
// operation. Initialize the arrays with std::to_array, so that the build fails if a new Dtype or Op has no number.
struct Numbers {
  std::array<int, dtypes.size()> types;            // indexed by Dtype; -1 for bool, complex and float8 types
  std::array<int, mscomm::ops.size()> operations;  // indexed by Op
  int byte;  // the number of the type with which bools are reduced: each bool is a byte that is 0 or 1
};

// A type and an operation, in the library's numbers. factor: how many elements of that type make up one of our elements.
struct VendorReduction {
  int type, op;
  size_t factor = 1;
};

// Returns the type and operation with which the library can reduce elements of `dtype` by `op`, or nullopt if it cannot. The
// real and imaginary parts of complex numbers are summed or averaged separately. For bools, the maximum serves as `or` and sum,
// and the minimum serves as `and` and product.
std::optional<VendorReduction> reduction_of(const Numbers& library, Dtype dtype, Op op);

// One rank's communicator in the library, on one device. All functions except abort() are called by one thread at a time, while
// the device is that thread's current device. They throw Error if the library returns an error.
class VendorGroup {
 public:
  virtual ~VendorGroup() = default;

  // The functions from all_reduce() to exchange() enqueue their operation and return at once. After one of them, or after a
  // whole batch, only busy() and abort() may be called until busy() has returned false. Counts are in elements. x and out may be
  // the same.
  virtual void all_reduce(const void* x, void* out, size_t count, Dtype dtype, Op op, StreamHandle stream) = 0;
  virtual void reduce(const void* x, void* out, size_t count, Dtype dtype, Op op, int root, StreamHandle stream) = 0;
  // count: the number of elements of out.
  virtual void reduce_scatter(const void* x, void* out, size_t count, Dtype dtype, Op op, StreamHandle stream) = 0;
  // bytes: the size of x. x may be this rank's part of out.
  virtual void all_gather(const void* x, void* out, size_t bytes, StreamHandle stream) = 0;
  // x is read only at the root.
  virtual void broadcast(const void* x, void* out, size_t bytes, int root, StreamHandle stream) = 0;
  // Moves all parts at once. There is at most one part from one rank to another, and none from this rank to itself.
  virtual void exchange(std::span<const Part> parts, StreamHandle stream) = 0;
  // Runs `calls`, which calls functions of this group. If the library can combine these calls, they become one operation.
  virtual void batch(const std::function<void()>& calls) = 0;

  // Returns whether the library is still joining the group, setting up the group's most recent call, or freeing the group. Throws
  // if the group has failed.
  virtual bool busy() = 0;
  // Ends the group's work on the device. May take a long time. May be called from any thread, but only once. After it, no other
  // function may be called. beside: whether another thread is inside the library; if so, abort() should make that thread return,
  // which HCCL can do only if it has the function HcclCommSuspend.
  virtual void abort(bool beside) noexcept = 0;
  // Starts to free the group, which has ended without an error. After busy() has returned false, the destructor frees the rest.
  virtual void finish() = 0;
};

class Vendor {
 public:
  virtual ~Vendor() = default;

  virtual std::string_view name() const = 0;    // "nccl"
  virtual std::string version() const = 0;      // "2.28.9"
  virtual const std::string& path() const = 0;  // the path of the library
  virtual const std::string& origin() const = 0;

  // Returns why the library cannot reduce elements of this type with this operation, or "" if it can.
  virtual std::string refuses(Dtype dtype, Op op) const = 0;
  // Creates the id of a new group. One rank of the group calls this while its device is the thread's current device, and passes
  // the id to the other ranks.
  virtual std::string make_id() = 0;
  // Joins the group with this id as the given rank. The given device must be the thread's current device. The group can be used
  // after busy() has returned false.
  virtual std::unique_ptr<VendorGroup> join(const std::string& id, int size, int rank, std::shared_ptr<Runtime> runtime,
                                            int device) = 0;
};

}  // namespace mscomm
