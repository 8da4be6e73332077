"""The first script of MindSpore's tutorial "Distributed Parallel Training Example (GPU)".

mpirun -n 4 python nccl_allgather.py

The import lines say mscomm instead of mindspore. Two other lines differ from the tutorial's: init() uses the GPUs if
every rank has one, otherwise the CPUs.
"""

import numpy as np
import mscomm.ops as ops
import mscomm.nn as nn
from mscomm import set_context, GRAPH_MODE, Tensor
from mscomm.communication import init, get_rank


class Net(nn.Cell):
    def __init__(self):
        super(Net, self).__init__()
        self.allgather = ops.AllGather()

    def construct(self, x):
        return self.allgather(x)


if __name__ == "__main__":
    set_context(mode=GRAPH_MODE)  # tutorial: set_context(mode=GRAPH_MODE, device_target="GPU")
    init()  # tutorial: init("nccl")
    value = get_rank()
    input_x = Tensor(np.array([[value]]).astype(np.float32))
    net = Net()
    output = net(input_x)
    print(output)
