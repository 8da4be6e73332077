// Huawei's HCCL for Ascend NPUs, which is opened at run time. The declarations are our own, and follow the headers of hccl and
// hcomm.
#pragma once

#include <memory>
#include <vector>

#include "backend/library.h"
#include "base/dynlib.h"

namespace mscomm {

// communicators: where libhcomm may be. In newer releases of CANN, the functions for communicators are in that library. soc: the
// device's name, on which HCCL's limits depend. Throws BackendUnavailable.
std::unique_ptr<Vendor> open_hccl(const std::vector<Candidate>& collectives, const std::vector<Candidate>& communicators,
                                  const std::string& soc);

}  // namespace mscomm
