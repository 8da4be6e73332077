"""Runs on all ranks except rank 0 in a job of conftest.py. Makes the calls that rank 0 announces, until STOP."""

from __future__ import annotations

import numpy as np

import mscomm
from mscomm.bench.contenders import mscomm_call
from mscomm.bench.table import COLLECTIVES, Buffers, Case

ROWS = list(COLLECTIVES)
STOP = -1


def case_of(name: str) -> Case:
    return Case(COLLECTIVES[name], np.dtype(np.float32), "sum", 0, mscomm.get_group_size(), mscomm.get_rank())


def buffers_of(case: Case, size: int, shared: bool) -> Buffers:
    buffers = Buffers(case, case.count(size), False, mscomm.empty if shared else np.empty)
    buffers.fill()
    return buffers


def main() -> None:
    mscomm.init()
    while True:
        row, size, shared, calls = (int(word) for word in mscomm.broadcast(np.zeros(4, np.int64), timeout=float("inf")))
        if row == STOP:
            return
        case = case_of(ROWS[row])
        buffers = buffers_of(case, size, bool(shared))
        call = mscomm_call(case, buffers)
        mscomm.barrier()
        for _ in range(calls):
            call()
        mscomm.all_reduce(np.array([buffers.wrong()]))


if __name__ == "__main__":
    main()
