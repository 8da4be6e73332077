// NVIDIA GPUs, by the CUDA driver's library: no CUDA runtime is linked, so that one build serves all drivers.
#pragma once

#include <memory>
#include <vector>

#include "base/dynlib.h"
#include "device/runtime.h"

namespace mscomm {

// Throws BackendUnavailable if there is no driver, or no GPU.
std::unique_ptr<Runtime> open_cuda(const std::vector<Candidate>& candidates);

}  // namespace mscomm
