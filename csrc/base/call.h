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
  // The shape of x, if it is the same on all ranks. In the uneven forms axis 0 is the sum over the ranks; in an uneven all_to_all
  // it may also be 0.
  uint64_t shape[max_dims] = {};
  uint64_t digest = 0;  // hash of what else must agree: arrays of a fused call, counts of an uneven one; 0: nothing else
  Function function = Function::barrier;
  uint8_t head = 0;    // 1: this call carries not the data, but the counts or the shape that go ahead of it
  uint8_t device = 0;  // 1: the arrays are on a device
  uint8_t zero[5] = {};

  bool operator==(const Signature&) const = default;
  bool valid() const {
    return what <= Collective::exscan && dtype <= Dtype::complex128 && op <= Op::bxor && dims <= max_dims &&
           function <= Function::scatter_object && head <= 1 && device <= 1;
  }
  // A 64-bit hash of the fields, which are mixed in word by word. Two signatures that differ in a single word never have the same
  // hash. Two that differ in several words can have the same one, with a chance of about one in 2^64.
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
  // For the uneven forms: the number of elements in each rank's part; for all_to_all an n x n matrix, one row for each sender.
  // Equal on all ranks. The sum of all is signature.count, which for all_to_all may also be 0. Empty: all parts have one size.
  std::vector<uint64_t> counts{};
  // The stream of the device in whose order the call runs. nullopt: the arrays are in the CPU's memory.
  std::optional<void*> stream{};
  bool beside = false;  // run on a stream of the group's own, after what `stream` has so far

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

// "4 MiB", "7 B"
std::string in_units(uint64_t bytes);

}  // namespace mscomm
