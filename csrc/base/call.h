// One collective call as data: what all ranks must agree on (Signature), and what is this rank's own (Call).
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/types.h"

namespace mscomm {

inline constexpr int max_dims = 12;

// Compared field by field between ranks; travels in slots and headers as it is, so it has no padding and no pointer.
struct Signature {
  uint64_t number = 0;  // the call's place in the group's order, from 1
  Collective what = Collective::barrier;
  Dtype dtype = Dtype::uint8;
  Op op = Op::sum;
  uint8_t dims = 0;
  int32_t root = -1;   // -1: the collective has none
  uint64_t count = 0;  // elements of x
  uint64_t shape[max_dims] = {};
  uint64_t fused = 0;  // of a fused call: a digest of the arrays' shapes and types; 0: one array

  bool operator==(const Signature&) const = default;
  bool valid() const { return what <= Collective::barrier && dtype <= Dtype::complex128 && op <= Op::bxor && dims <= max_dims; }
  // "all_reduce #17 (float32[1024, 3], sum)"
  std::string text() const;
};
static_assert(sizeof(Signature) == 128);

struct Call {
  Signature signature;
  const void* x = nullptr;
  void* out = nullptr;
  size_t element_bytes = 1;

  size_t bytes() const { return signature.count * element_bytes; }
  const char* in() const { return static_cast<const char*>(x); }
  char* result() const { return static_cast<char*>(out); }
};

// Thrown when ranks made different calls under one number: what each rank that is known of did.
struct Differs {
  std::vector<std::pair<int, Signature>> calls;
};

// "4 MiB", "7 B"
std::string in_units(uint64_t bytes);

}  // namespace mscomm
