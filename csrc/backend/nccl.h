// NVIDIA's NCCL. mscomm opens NCCL at run time, and declares its functions and types itself. tests/core/nccl_abi.cc compares
// these declarations with nccl.h.
#pragma once

#include <climits>
#include <memory>
#include <vector>

#include "backend/library.h"
#include "base/dynlib.h"

namespace mscomm {

namespace nccl {

enum Result { success = 0, remote_error = 6, in_progress = 7 };
// The values of DataType and RedOp begin at 0, as in nccl.h.
enum DataType { int8, uint8, int32, uint32, int64, uint64, float16, float32, float64, bfloat16 };
enum RedOp { sum, prod, max, min, avg };

struct UniqueId {
  char bytes[128];
};

// The fields that ncclConfig_t had in NCCL 2.14, and cga_cluster_size, which newer releases have in the padding after these
// fields. `version` tells a newer library to read only the fields of NCCL 2.14, and to use defaults for the rest.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
  int cga_cluster_size = INT_MIN;  // NCCL_CONFIG_UNDEF_INT: NCCL chooses
};

}  // namespace nccl

// Opens NCCL. Throws BackendUnavailable if NCCL is not found, or is older than 2.14.
std::unique_ptr<Vendor> open_nccl(const std::vector<Candidate>& candidates);

}  // namespace mscomm
