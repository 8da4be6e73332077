// Ascend NPUs, by AscendCL.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/dynlib.h"
#include "device/runtime.h"

namespace mscomm {

// visible: the host's numbers of the devices that this process sees, if it sees only some of them. Throws BackendUnavailable if
// there is no AscendCL, or no NPU.
std::unique_ptr<Runtime> open_acl(const std::vector<Candidate>& candidates, std::vector<std::string> visible);

}  // namespace mscomm
