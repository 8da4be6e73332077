// Huawei's HCCL for Ascend NPUs, opened at run time. The declarations are ours, after the headers of hccl and hcomm.
#pragma once

#include <memory>
#include <vector>

#include "backend/library.h"
#include "base/dynlib.h"

namespace mscomm {

// communicators: where the library may be that holds the functions of communicators; only newer releases have one. soc: the
// device's name, which decides HCCL's limits. Throws BackendUnavailable.
std::unique_ptr<Vendor> open_hccl(const std::vector<Candidate>& collectives, const std::vector<Candidate>& communicators,
                                  const std::string& soc);

}  // namespace mscomm
