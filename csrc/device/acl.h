// Implements Runtime for Ascend NPUs, using AscendCL.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/dynlib.h"
#include "device/runtime.h"

namespace mscomm {

// Throws BackendUnavailable if there is no AscendCL or no NPU. visible: the numbers that this process's devices have on the host,
// if the process sees only some of the host's devices.
std::unique_ptr<Runtime> open_acl(const std::vector<Candidate>& candidates, std::vector<std::string> visible);

}  // namespace mscomm
