// Declares what libhccl.so needs from the library that contains the communicators. This library is libhcomm.so or libhccl.so
// itself.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fake::hccl {

using Result = int;
enum : Result {
  success = 0,
  e_para = 1,
  e_ptr = 2,
  e_memory = 3,
  e_internal = 4,
  e_not_support = 5,
  e_not_found = 6,
  e_unavail = 7,
  e_timeout = 9,
  e_runtime = 15,
  e_remote = 21,
  e_suspending = 22,
};

using Comm = uint64_t;
using StreamHandle = uint64_t;

enum class What : int {
  all_reduce,
  all_gather,
  reduce_scatter,
  broadcast,
  reduce,
};

// Describes one collective. `count` is the number of elements in the array or, if the array has a part for each rank, in one
// part.
struct Wish {
  What what;
  const void* send;
  void* receive;
  uint64_t count;
  int type;
  int fold;      // -1 if the collective does not reduce
  int64_t root;  // -1 if the collective has no root
};

// This struct has the layout of HcclSendRecvItem.
struct Item {
  int kind;  // 0 for a send, 1 for a receive
  void* data;
  uint64_t count;
  int type;
  uint32_t peer;
};
static_assert(sizeof(Item) == 32 && offsetof(Item, data) == 8 && offsetof(Item, type) == 24 && offsetof(Item, peer) == 28);

struct Core {
  Result (*collective)(const char* name, const Wish* wish, Comm comm, StreamHandle stream);
  Result (*messages)(const char* name, const Item* items, uint32_t count, Comm comm, StreamHandle stream);
};

}  // namespace fake::hccl
