// Implements Runtime for Ascend NPUs, with AscendCL.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/dynlib.h"
#include "device/runtime.h"

namespace mscomm {

// visible: the numbers that this process's devices have on the host, if the process sees only some of the host's devices. Throws
// BackendUnavailable if there is no AscendCL or no NPU.
std::unique_ptr<Runtime> open_acl(const std::vector<Candidate>& candidates, std::vector<std::string> visible);

}  // namespace mscomm
