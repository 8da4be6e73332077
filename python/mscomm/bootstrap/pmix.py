"""Open MPI 4 and 5, PRRTE, Slurm's and LSF's PMIx: one string through the PMIx store, by a short-lived helper process.

PMIx_Init and PMIx_Finalize in this process would break MPI_Init before or after them (csrc/tools/pmix_helper.cc has the other half).
"""

from __future__ import annotations

import glob
import itertools
import math
import os
import subprocess
from collections.abc import Mapping

from mscomm.bootstrap import Invitation, kvs
from mscomm.cluster.deadline import Deadline
from mscomm.errors import BackendUnavailable, CollectiveTimeout

NAME = "PMIx (Open MPI)"

_NAMES = kvs.Names(
    rank=("PMIX_RANK", "OMPI_COMM_WORLD_RANK"),
    size=("OMPI_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE", "SLURM_STEP_NUM_TASKS"),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_RANK", "SLURM_LOCALID"),
    local_size=("OMPI_COMM_WORLD_LOCAL_SIZE", "JSM_NAMESPACE_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE"),
)
_HELPER = os.path.join(os.path.dirname(__file__), "pmix_helper")
_TIMED_OUT = 75  # the helper's exit status
_calls = itertools.count()  # a process that joins again, after release(), uses a new key


def detect(env: Mapping[str, str]) -> bool:
    return "PMIX_RANK" in env or "OMPI_COMM_WORLD_RANK" in env


def accept(env: Mapping[str, str], deadline: Deadline, permit_plain: bool) -> Invitation:
    """The connection to the hub that rank 0 starts; the others wait for rank 0 alone."""
    at = kvs.place(env, _NAMES, NAME)
    if "PMIX_NAMESPACE" not in env:
        raise BackendUnavailable(f"{NAME}: rank and size are set, but PMIX_NAMESPACE is not, so mpirun cannot be reached. {kvs.INSTEAD}")
    key = f"mscomm-{next(_calls)}"
    store = kvs.Store(
        publish=lambda text, deadline: _publish(env, key, text, deadline),
        fetch=lambda deadline: _help(env, "get", key, "", deadline),
    )
    return kvs.join(NAME, at, store, env, deadline, permit_plain)


def _publish(env: Mapping[str, str], key: str, text: str, deadline: Deadline) -> None:
    _help(env, "put", key, text, deadline)


def _help(env: Mapping[str, str], what: str, key: str, text: str, deadline: Deadline) -> str:
    """Run the helper; its output."""
    timeout_s = max(1, math.ceil(deadline.left()))
    command = [_HELPER, what, key, str(timeout_s), *libraries(env)]
    try:
        # The helper ends by itself at the deadline; one second more, and it hangs in libpmix.
        done = subprocess.run(command, input=text.encode(), capture_output=True, env=dict(env), timeout=timeout_s + 1)
    except OSError as error:
        raise BackendUnavailable(f"{NAME}: cannot run {_HELPER}: {error}. Install mscomm again. {kvs.INSTEAD}") from error
    except subprocess.TimeoutExpired as error:
        raise CollectiveTimeout(f"{NAME}: mpirun did not answer within {deadline.seconds:g} s; is it stopped or overloaded?") from error
    if done.returncode == _TIMED_OUT:
        raise CollectiveTimeout(
            f"{NAME}: rank 0 did not come to mscomm.init() within {deadline.seconds:g} s: it has ended, or never calls it", waiting_for=(0,)
        )
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()[-1000:] or f"exit status {done.returncode}"
        raise BackendUnavailable(
            f"{NAME}: cannot {what} the address of rank 0: {said}. PMIX_NAMESPACE={env.get('PMIX_NAMESPACE')}; has mpirun ended (a script "
            f"that starts it with & must wait for it), or was this process started by a rank, not by mpirun? {kvs.INSTEAD}"
        )
    return done.stdout.decode("ascii", errors="replace")


def libraries(env: Mapping[str, str]) -> list[str]:
    """Where libpmix may be, best first: the launcher's own (it fits the server), the loader's, the one beside mpirun."""
    beside = next((os.path.dirname(folder) for folder in env.get("PATH", "").split(":") if os.access(f"{folder}/mpirun", os.X_OK)), "")
    return [*_below(env.get("PMIX_PREFIX", "")), "libpmix.so.2", *_below(beside)]


def _below(prefix: str) -> list[str]:
    """The copies of libpmix under an installation prefix; where Open MPI brings its own, lib/openmpi has it."""
    return [path for folder in ("lib/openmpi", "lib*") for path in sorted(glob.glob(f"{prefix}/{folder}/libpmix.so.2"))] if prefix else []
