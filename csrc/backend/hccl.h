// Huawei's HCCL for Ascend NPUs, opened at run time. The declarations are ours, after the headers of hccl and hcomm.
#pragma once

#include <memory>
#include <vector>

#include "backend/vendor.h"
#include "base/dynlib.h"

namespace mscomm {

// communicators: where the functions of communicators may be, which newer releases have in a library of their own; it need not
// be there. soc: the device's name, by which HCCL's limits go. Throws BackendUnavailable.
std::unique_ptr<Vendor> open_hccl(const std::vector<Candidate>& collectives, const std::vector<Candidate>& communicators,
                                  const std::string& soc);

}  // namespace mscomm
