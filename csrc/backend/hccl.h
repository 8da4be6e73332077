// Huawei's HCCL for Ascend NPUs, which is opened at run time. The declarations are our own, and follow the hccl and hcomm
// headers.
#pragma once

#include <memory>
#include <vector>

#include "backend/library.h"
#include "base/dynlib.h"

namespace mscomm {

// Opens HCCL. Throws BackendUnavailable if it cannot be opened. communicators: where libhcomm may be; in newer CANN releases, the
// communicator functions are in that library. soc: the device's name, on which HCCL's limits depend.
std::unique_ptr<Vendor> open_hccl(const std::vector<Candidate>& collectives, const std::vector<Candidate>& communicators,
                                  const std::string& soc);

}  // namespace mscomm
