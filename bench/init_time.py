"""Measures how long init() takes, from the first rank's call to the last rank's return. All ranks first finish their
imports, and then call init() at the same time.

    mscomm run -n 8 bench/init_time.py
    mpirun -n 8 python bench/init_time.py

Rank 0 prints this time in milliseconds.
"""

from __future__ import annotations

import os
import time

import numpy as np
import psutil

import mscomm

# The ranks call init() this many seconds after their parent has started. By then, every rank has done its imports, even
# on two cores.
IMPORTED_AFTER_S = 3

init = mscomm.init
time.sleep(
    max(0.0, psutil.Process(os.getppid()).create_time() + IMPORTED_AFTER_S - time.time())
)  # all ranks have the same parent, so they wake at the same time
entered = time.time()
init()
returned = time.time()

first = float(mscomm.all_reduce(np.array([entered]), "min")[0])
last = float(mscomm.all_reduce(np.array([returned]), "max")[0])
if mscomm.get_rank() == 0:
    print(f"init of {mscomm.get_group_size()} ranks by {mscomm.get_launcher()}: {(last - first) * 1e3:.1f} ms")
