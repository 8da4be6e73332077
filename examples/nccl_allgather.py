"""Every rank contributes its rank number to an all_gather, and prints the numbers of all ranks.

mscomm run -n 4 nccl_allgather.py
mpirun -n 4 python nccl_allgather.py
"""

import importlib.util
import socket
import sys

import numpy as np

import mscomm


def count_hosts() -> int:
    """Return how many different host names the ranks have."""
    name = np.frombuffer(socket.gethostname().encode().ljust(64)[:64], np.uint8).reshape(1, 64)
    return len(np.unique(mscomm.all_gather(name), axis=0))


if __name__ == "__main__":
    mscomm.init()  # the backend: nccl if every rank has its own GPU, hccl if every rank has its own NPU, otherwise cpu
    backend = mscomm.get_backend()
    value = mscomm.get_rank()
    if backend == "nccl" and importlib.util.find_spec("cupy"):
        import cupy

        output = cupy.asnumpy(mscomm.all_gather(cupy.array([[value]], np.float32)))
    else:
        output = mscomm.all_gather(np.array([[value]], np.float32))

    hosts = count_hosts()
    if mscomm.get_rank() == 0:
        launcher, ranks = mscomm.get_launcher(), mscomm.get_group_size()
        sys.stderr.write(f"carried by {backend}, started by {launcher}: {ranks} ranks on {hosts} host(s)\n")

    # Write everything at once, so that the output of different ranks is not interleaved.
    sys.stdout.write(np.array2string(output, separator=", ") + "\n")
    sys.stdout.flush()
