// One collective call as data: what all ranks must agree on (Signature), and what is this rank's own (Call).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/types.h"

namespace mscomm {

inline constexpr int max_dims = 12;

// Compared between ranks, field by field or by its fingerprint; travels in slots and headers as it is, so it has no padding and
// no pointer.
struct Signature {
  uint64_t number = 0;  // the call's place in the group's order, from 1
  Collective what = Collective::barrier;
  Dtype dtype = Dtype::uint8;
  Op op = Op::sum;
  uint8_t dims = 0;
  int32_t root = -1;   // -1: the collective has none
  uint64_t count = 0;  // the product of shape
  // Of x, where it is the same on all ranks; in the uneven forms axis 0 is the sum over the ranks, of all_to_all also 0.
  uint64_t shape[max_dims] = {};
  uint64_t digest = 0;  // of what else must agree: the arrays of a fused call, the counts of an uneven one; 0: nothing else
  Function function = Function::barrier;
  uint8_t head = 0;    // 1: not the data, but the counts or the shape that go ahead of it
  uint8_t device = 0;  // 1: of arrays on a device
  uint8_t zero[5] = {};

  bool operator==(const Signature&) const = default;
  bool valid() const {
    return what <= Collective::exscan && dtype <= Dtype::complex128 && op <= Op::bxor && dims <= max_dims &&
           function <= Function::scatter_object && head <= 1 && device <= 1;
  }
  // Of all fields. Signatures that differ in one of its steps have different ones; else by a chance of one in 2^64.
  uint64_t fingerprint() const;
  // "all_reduce #17 (float32[1024, 3], sum)"
  std::string text() const;
};
static_assert(sizeof(Signature) == 136);

struct Call {
  Signature signature;
  const void* x = nullptr;  // nullptr: this rank gives nothing
  size_t x_bytes = 0;
  void* out = nullptr;  // nullptr: this rank gets nothing
  size_t out_bytes = 0;
  // Of the uneven forms: elements of each rank's part; of all_to_all from each rank to each, n x n, a row a sender. Equal on all
  // ranks, and their sum is signature.count; of all_to_all that may be 0. Empty: all parts are alike.
  std::vector<uint64_t> counts{};
  // Of arrays on a device: on which of its streams the call has its place. None: they are the CPU's.
  std::optional<void*> stream{};
  bool beside = false;  // on a stream of the group's own, after what that stream has so far

  size_t element_bytes() const { return size_of(signature.dtype); }
  // Of the message that the signature describes.
  size_t bytes() const { return signature.count * element_bytes(); }
  const char* in() const { return static_cast<const char*>(x); }
  char* result() const { return static_cast<char*>(out); }
};

// The last line of defence before memory is touched, on a rank of a group of that size: the algorithms trust what passes. Throws
// Error("ValueError") unless x and out have just the bytes that the collective reads and writes on this rank (at other ranks than
// the root, x of broadcast and scatter is not read, and may be there or not), the counts add up, the root is a rank, and the
// operation is defined on the type.
void check(const Call& call, int rank, int size);

// Thrown when ranks made different calls under one number: what each rank that is known of did.
struct Differs {
  std::vector<std::pair<int, Signature>> calls;
};

// "4 MiB", "7 B"
std::string in_units(uint64_t bytes);

}  // namespace mscomm
