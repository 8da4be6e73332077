// The short way of the process group that mscomm has for torch.distributed (python/mscomm/torch/process_group.py).
#pragma once

#include <pybind11/pybind11.h>

namespace mscomm {

// Returns a Python function with three arguments: a Group of this module, and the two arguments of ProcessGroup.allreduce in
// torch. The function carries out the usual calls. They sum one dense tensor on the host, whose elements lie in C order, and for
// which autograd has nothing to do, while no profiler records. The function returns the tensor or, if the call is asynchronous, a
// Work. For all other calls, it does nothing and returns None.
//
// options: torch's class AllreduceOptions. sum: ReduceOp.SUM. profiler: the module torch.autograd.profiler.
pybind11::object usual_all_reduce(const pybind11::object& options, const pybind11::object& sum, const pybind11::object& profiler);

}  // namespace mscomm
