// One collective call as data: what all ranks must agree on (Signature), and what belongs to this rank alone (Call).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/types.h"

namespace mscomm {

inline constexpr int max_dims = 12;

// What all ranks of a call must agree on. Ranks compare it field by field or by its fingerprint. They copy it bytewise into slots
// and headers, so it has no padding and no pointers.
struct Signature {
  uint64_t number = 0;  // the call's place in the group's order, from 1
  Collective what = Collective::barrier;
  Dtype dtype = Dtype::uint8;
  Op op = Op::sum;
  uint8_t dims = 0;
  int32_t root = -1;   // -1: the call has no root
  uint64_t count = 0;  // the product of shape
  // The shape of x, if it is the same on all ranks. In the uneven forms axis 0 is the sum over the ranks; in an uneven all_to_all
  // it may also be 0.
  uint64_t shape[max_dims] = {};
  uint64_t digest = 0;  // hash of the arrays of a fused call, or of the counts of an uneven call; 0: any other call
  Function function = Function::barrier;
  uint8_t head = 0;    // 1: this call carries only the counts or the shape of the call after it, which carries the data
  uint8_t device = 0;  // 1: the arrays are on a device
  uint8_t zero[5] = {};

  bool operator==(const Signature&) const = default;
  bool valid() const {
    return what <= Collective::exscan && dtype <= Dtype::complex128 && op <= Op::bxor && dims <= max_dims &&
           function <= Function::scatter_object && head <= 1 && device <= 1;
  }
  // A 64-bit hash of the fields, which are mixed in word by word. Two signatures that differ in a single word never have the same
  // hash. If they differ in several words, they have the same hash with a chance of about one in 2^64.
  uint64_t fingerprint() const;
  // The call in words: "all_reduce #17 (float32[1024, 3], sum)".
  std::string text() const;
};
static_assert(sizeof(Signature) == 136);

struct Call {
  Signature signature;
  const void* x = nullptr;  // nullptr: this rank gives nothing
  size_t x_bytes = 0;
  void* out = nullptr;  // nullptr: this rank gets nothing
  size_t out_bytes = 0;
  // The number of elements in each rank's part, if the parts differ; empty if all parts have the same size. For all_to_all this
  // is an n x n matrix with one row for each sender. All ranks have the same counts. They add up to signature.count, but in
  // all_to_all signature.count may also be 0.
  std::vector<uint64_t> counts{};
  // The call runs in the order of this stream of the device. nullopt: the arrays are in CPU memory.
  std::optional<void*> stream{};
  bool beside = false;  // run on the group's own stream, after the work that `stream` has now

  size_t element_bytes() const { return size_of(signature.dtype); }
  // The size of the message that the signature describes.
  size_t bytes() const { return signature.count * element_bytes(); }
  const char* in() const { return static_cast<const char*>(x); }
  char* result() const { return static_cast<char*>(out); }
};

// Checks a call on one rank of a group of that size. This is the last check before memory is touched: the algorithms trust a call
// that passes it. Throws Error("ValueError") unless x and out have exactly the bytes that the collective reads and writes on this
// rank, the counts add up, the root is a rank, and the operation is defined on the type. Broadcast and scatter do not read x on
// ranks other than the root; it may be missing there.
void check(const Call& call, int rank, int size);

// Thrown when ranks made different calls under one number. calls: what each rank called, as far as this rank knows.
struct Differs {
  std::vector<std::pair<int, Signature>> calls;
};

// A number of bytes in words: "4 MiB", "7 B".
std::string in_units(uint64_t bytes);

}  // namespace mscomm
