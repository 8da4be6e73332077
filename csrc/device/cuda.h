// The runtime of NVIDIA GPUs, over the CUDA driver's library. The CUDA runtime is not linked, so one build works with all
// drivers.
#pragma once

#include <memory>
#include <vector>

#include "base/dynlib.h"
#include "device/kernels.h"
#include "device/runtime.h"

namespace mscomm {

// Throws BackendUnavailable if there is no driver or no GPU. The image of the kernels must live as long as the process.
std::unique_ptr<Runtime> open_cuda(const std::vector<Candidate>& candidates, Image image = embedded_image());

}  // namespace mscomm
