"""Measures how long init() takes, from the first rank's entry to the last rank's return. All ranks have done their
imports before, and enter at the same time.

    mscomm run -n 8 bench/init_time.py
    mpirun -n 8 python bench/init_time.py

Rank 0 prints one line, in milliseconds.
"""

from __future__ import annotations

import os
import time

import numpy as np
import psutil

import mscomm

IMPORTED_AFTER_S = 3  # by then every rank has imported what it needs, even on two cores

init = mscomm.init
time.sleep(
    max(0.0, psutil.Process(os.getppid()).create_time() + IMPORTED_AFTER_S - time.time())
)  # all ranks have the same parent, and so start at the same time
entered = time.time()
init()
returned = time.time()

first = float(mscomm.all_reduce(np.array([entered]), "min")[0])
last = float(mscomm.all_reduce(np.array([returned]), "max")[0])
if mscomm.get_rank() == 0:
    print(f"init of {mscomm.get_group_size()} ranks by {mscomm.get_launcher()}: {(last - first) * 1e3:.1f} ms")
