// The short way of the process group that mscomm has for torch.distributed (python/mscomm/torch/process_group.py).
#pragma once

#include <pybind11/pybind11.h>

namespace mscomm {

// Returns a function of a Group of this module, and of the two arguments of ProcessGroup.allreduce in torch. It carries out the
// usual calls: one dense tensor on the host, whose elements lie in C order, and for which autograd has nothing to do, is summed
// while no profiler records. It then returns the tensor or, if the call is asynchronous, a Work. It leaves all other calls to its
// caller, and returns None.
//
// options: torch's class AllreduceOptions. sum: ReduceOp.SUM. profiler: the module torch.autograd.profiler.
pybind11::object usual_all_reduce(const pybind11::object& options, const pybind11::object& sum, const pybind11::object& profiler);

}  // namespace mscomm
