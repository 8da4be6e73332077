"""How long init() takes: from the first rank's entry to the last rank's return, imports done, all ranks entering at
one moment.

    mscomm run -n 8 bench/init_time.py
    mpirun -n 8 python bench/init_time.py

Prints one line on rank 0, in milliseconds.
"""

from __future__ import annotations

import os
import time

import numpy as np
import psutil

import mscomm

IMPORTED_AFTER_S = 3  # by then every rank has imported what it needs, also on two cores

init = mscomm.init
time.sleep(
    max(0.0, psutil.Process(os.getppid()).create_time() + IMPORTED_AFTER_S - time.time())
)  # one parent, one moment
entered = time.time()
init()
returned = time.time()

first = float(mscomm.all_reduce(np.array([entered]), "min")[0])
last = float(mscomm.all_reduce(np.array([returned]), "max")[0])
if mscomm.get_rank() == 0:
    print(f"init of {mscomm.get_group_size()} ranks by {mscomm.get_launcher()}: {(last - first) * 1e3:.1f} ms")
