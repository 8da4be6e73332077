// Implements Runtime for NVIDIA GPUs, using the CUDA driver library. The core is not linked with the CUDA runtime, so one build
// works with all drivers.
#pragma once

#include <memory>
#include <vector>

#include "base/dynlib.h"
#include "device/kernels.h"
#include "device/runtime.h"

namespace mscomm {

// Throws BackendUnavailable if there is no driver or no GPU. The kernel image must live as long as the process.
std::unique_ptr<Runtime> open_cuda(const std::vector<Candidate>& candidates, Image image = embedded_image());

}  // namespace mscomm
