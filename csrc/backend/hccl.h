// Huawei's HCCL for Ascend NPUs. mscomm opens HCCL at run time, and declares its functions and types itself, as in the headers
// of hccl and hcomm.
#pragma once

#include <memory>
#include <vector>

#include "backend/library.h"
#include "base/dynlib.h"

namespace mscomm {

// Opens HCCL. Throws BackendUnavailable if it cannot be opened. communicators: where libhcomm may be; in newer CANN releases,
// the communicator functions are in that library. soc: the name of the device's type, which decides what HCCL can reduce.
std::unique_ptr<Vendor> open_hccl(const std::vector<Candidate>& collectives, const std::vector<Candidate>& communicators,
                                  const std::string& soc);

}  // namespace mscomm
