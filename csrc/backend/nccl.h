// NVIDIA's NCCL, opened at run time. The declarations are ours, after nccl.h; tests/core/nccl_abi.cc compares the two.
#pragma once

#include <climits>
#include <memory>
#include <vector>

#include "backend/library.h"
#include "base/dynlib.h"

namespace mscomm {

namespace nccl {

enum Result { success = 0, remote_error = 6, in_progress = 7 };
enum DataType {
  int8 = 0,
  uint8 = 1,
  int32 = 2,
  uint32 = 3,
  int64 = 4,
  uint64 = 5,
  float16 = 6,
  float32 = 7,
  float64 = 8,
  bfloat16 = 9
};
enum RedOp { sum = 0, prod = 1, max = 2, min = 3, avg = 4 };

struct UniqueId {
  char bytes[128];
};

// ncclConfig_t as it was in 2.14, and the first field that was added later. Newer libraries read the fields that the given
// version had, and fill in the rest.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
  int cga_cluster_size = INT_MIN;  // unset
};

// "2.28.9" of 22809; before 2.9 the major version had one digit less.
std::string version_text(int code);

}  // namespace nccl

// Throws BackendUnavailable if there is no such library, or it is older than 2.14.
std::unique_ptr<Vendor> open_nccl(const std::vector<Candidate>& candidates);

}  // namespace mscomm
