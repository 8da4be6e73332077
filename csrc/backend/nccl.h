// NVIDIA's NCCL, which is opened at run time. The declarations are our own; tests/core/nccl_abi.cc compares them with nccl.h.
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

// The fields that ncclConfig_t had in NCCL 2.14, and the first field that was added later. A newer library reads the fields of
// the version that is given here, and uses defaults for the rest.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
  int cga_cluster_size = INT_MIN;  // undefined, so NCCL chooses
};

// The version as text: "2.28.9" for 22809. Codes of versions before 2.9 have four digits: "2.7.8" for 2708.
std::string version_text(int code);

}  // namespace nccl

// Throws BackendUnavailable if NCCL is not found, or is older than 2.14.
std::unique_ptr<Vendor> open_nccl(const std::vector<Candidate>& candidates);

}  // namespace mscomm
