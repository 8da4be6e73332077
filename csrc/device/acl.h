// Ascend NPUs, by AscendCL.
#pragma once

#include <memory>
#include <vector>

#include "base/dynlib.h"
#include "device/runtime.h"

namespace mscomm {

// Throws BackendUnavailable if there is no AscendCL, or no NPU.
std::unique_ptr<Runtime> open_acl(const std::vector<Candidate>& candidates);

}  // namespace mscomm
