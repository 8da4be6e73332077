"""Runs as a rank of an MPI job that `mscomm bench` compares with mscomm.

    mpirun -n 4 python mpi_rank.py SOCKET [single]

This script executes commands from a Unix socket, and sleeps between them. peers.py sends the commands. Commands and
answers are lines of JSON. The MPI's own Python environment needs numpy and mpi4py, but not mscomm, because table.py is
loaded from the folder of this file.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpi4py
import numpy as np

mpi4py.rc.threads = "single" not in sys.argv[2:]
from mpi4py import MPI  # noqa: E402 - the import reads mpi4py.rc

# Extend sys.path only after the imports above, so that numpy and mpi4py come from the MPI's own environment.
sys.path.insert(0, str(Path(__file__).parents[2]))
table = importlib.import_module("mscomm.bench.table")

# mscomm's name for a reduction -> the MPI operation for numbers, and the MPI operation for bool.
OPS = {
    "sum": (MPI.SUM, MPI.LOR),
    "prod": (MPI.PROD, MPI.LAND),
    "min": (MPI.MIN, MPI.LAND),
    "max": (MPI.MAX, MPI.LOR),
    "band": (MPI.BAND, MPI.LAND),
    "bor": (MPI.BOR, MPI.LOR),
    "bxor": (MPI.BXOR, MPI.LXOR),
}
THREADS = ("MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED", "MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE")


def bind(case: Any, buffers: Any) -> Callable[[], object]:
    """Return a function that makes one MPI call on these buffers."""
    comm, x, out, root = MPI.COMM_WORLD, buffers.x, buffers.out, case.root
    op = OPS.get(case.op, OPS["sum"])[case.dtype == np.bool_]
    send = MPI.IN_PLACE if buffers.in_place and out is not None else x
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: comm.Allreduce(send, out, op),
        "all_gather": lambda: comm.Allgather(x, out),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(x, out, op=op),
        "broadcast": lambda: comm.Bcast(x, root),
        "reduce": lambda: comm.Reduce(send, out, op, root),
        "gather": lambda: comm.Gather(x, out, root),
        "scatter": lambda: comm.Scatter(x if case.rank == root else None, out, root),
        "all_to_all": lambda: comm.Alltoall(x, out),
        "scan": lambda: comm.Scan(send, out, op),
        "send_recv": lambda: table.ring(
            lambda to: comm.Send(x, to), lambda source: comm.Recv(out, source), case.rank, case.ranks
        ),
        "barrier": comm.Barrier,
    }
    return calls[case.row.name]


class Rank:
    """Executes the commands, with one method for each command except "quit"."""

    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD
        self._cells: dict[int, tuple[Any, Callable[[], object]]] = {}
        self._case: Any = None

    def settle(self, cpus: list[int]) -> dict[str, Any]:
        os.sched_setaffinity(0, cpus)
        library = MPI.Get_library_version().strip("\0").splitlines()[0].strip()
        return {"library": library, "mpi4py": mpi4py.__version__, "thread": THREADS[MPI.Query_thread()]}

    def plan(self, row: str, dtype: str, op: str, root: int) -> dict[str, Any]:
        collective = table.COLLECTIVES[row]
        if row == "exscan":
            return {"error": "MPI has no exscan that defines the result of rank 0"}
        if collective.reduces and op not in OPS:
            return {"error": f"MPI has no {op}"}
        try:
            MPI.Datatype.fromcode(np.dtype(dtype).char)
        except (TypeError, ValueError, KeyError):
            return {"error": f"MPI has no {dtype}"}
        rank, ranks = self._comm.Get_rank(), self._comm.Get_size()
        self._case = table.Case(collective, np.dtype(dtype), op, root, ranks, rank)
        return {}

    def cell(self, number: int, count: int, in_place: bool) -> dict[str, Any]:
        buffers = table.Buffers(self._case, count, in_place, np.empty)
        self._cells[number] = buffers, bind(self._case, buffers)
        return {}

    def measure(self, number: int, warmup: int, iterations: int, op: str) -> dict[str, Any]:
        buffers, call = self._cells[number]
        buffers.fill_for_repetition()
        for _ in range(warmup):
            call()
        self._comm.Barrier()
        mine = table.times_ns(call, iterations)
        combined = np.empty_like(mine)
        self._comm.Allreduce(mine, combined, MPI.MAX if op == "max" else MPI.SUM)
        combined /= 1e3 * (1 if op == "max" else self._case.ranks)
        return {"us": combined.tolist()} if self._case.rank == 0 else {}

    def wrong(self, number: int) -> dict[str, Any]:
        buffers, call = self._cells[number]
        buffers.fill()
        self._comm.Barrier()
        call()
        return {"wrong": buffers.wrong()}

    def close(self, number: int) -> dict[str, Any]:
        del self._cells[number]
        return {}


def main(address: str) -> None:
    rank = Rank()
    answer: dict[str, Any]
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address)
        file = sock.makefile("rb")
        for line in file:  # waits for the next command; the loop ends if rank 0 of mscomm closes the socket
            command = json.loads(line)
            if command is None:
                answer = {"rank": MPI.COMM_WORLD.Get_rank()}
            elif command["do"] == "quit":
                answer = {}
            else:
                try:
                    answer = getattr(rank, command.pop("do"))(**command)
                except MPI.Exception as error:
                    answer = {"error": f"{type(error).__name__}: {error}"}
            sock.sendall(json.dumps(answer).encode() + b"\n")
            if command and command.get("do") == "quit":
                return
    MPI.COMM_WORLD.Abort(1)  # rank 0 of mscomm has ended: do not wait for other MPI ranks in MPI_Finalize


if __name__ == "__main__":
    main(sys.argv[1])
