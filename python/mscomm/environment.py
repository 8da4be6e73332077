"""The table of all environment variables that mscomm reads.

A row has the variable's name, default, parser and meaning, and the modules that read the variable.

`read(name, env)` returns the value, or raises a ValueError that names the variable, its text and what was expected. The
page docs/env.md is written from this table by `python -m mscomm.environment`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

# The kinds of variables, by who sets the variable. The kinds are the headings of docs/env.md, in this order.
YOURS, CLUSTER, RUN, LAUNCHER = (
    "Yours to set",
    "A scheduler and workers",
    "Set by `mscomm run`",
    "Set by other launchers",
)
ABOUT = {
    YOURS: "All are optional. A variable that must be the same on every rank says so.",
    CLUSTER: "You set these to start a job by hand, or a cluster's operator does. Names and meanings are MindSpore's.",
    RUN: "Leave them alone: they tell a rank its place in the job.",
    LAUNCHER: "mscomm only reads these. If several variables mean the same, the first one that is set counts.",
}


class Variable(NamedTuple):
    """One row of the table. `readers`: the modules that read the variable, without the leading `mscomm.`."""

    name: str
    default: Any  # what read() returns if the variable is unset or empty
    parse: Callable[[str], Any]  # raises ValueError("expected ...") for an invalid text
    meaning: str
    readers: tuple[str, ...]
    set_by: str = YOURS

    def read(self, env: Mapping[str, str]) -> Any:
        """The parsed value of the variable in `env`, or its default if it is unset or empty."""
        text = env.get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise ValueError(f"{self.name}={text!r}: {error}") from None


# -- parsers -----------------------------------------------------------------------------------------------------------


def seconds_up_to(limit: float, expected: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value <= limit:
            raise ValueError(f"expected a number of seconds{expected}")
        return value

    return parse


seconds = seconds_up_to(float("inf"), " more than 0 (inf means no limit)")
silence = seconds_up_to(math.nextafter(86400, 0), ", more than 0 and less than a day")


def number(low: int, high: int, expected: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and low <= int(text) <= high):
            raise ValueError(f"expected {expected}")
        return int(text)

    return parse


def one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.upper() not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}")
        return text.upper()

    return parse


def ports(text: str) -> range:
    first, _, last = text.partition("-")
    low, high = (number(1, 65535, "a range of ports, e.g. 20000-20100")(part.strip()) for part in (first, last))
    if low > high:
        raise ValueError("expected a range of ports, e.g. 20000-20100, the lower one first")
    return range(low, high + 1)


def threads(text: str) -> int:
    """The first number of OMP_NUM_THREADS. OpenMP also allows a list, with a number for each level of nesting."""
    return number(1, 1 << 20, "a number of threads, 1 or more")(text.partition(",")[0].strip())


_switch = number(0, 1, "0 or 1")

LEVELS = ("VERSION", "WARN", "INFO", "TRACE")


# -- the table of variables --------------------------------------------------------------------------------------------


def _given(name: str, *readers: str, meaning: str, set_by: str = LAUNCHER) -> Variable:
    """A row for a variable that a launcher sets. read() returns the text unchecked; the modules `readers` check it."""
    return Variable(name, None, str, f"{meaning[0].upper()}{meaning[1:]}.", readers, set_by)


_RANK = "the rank"
_SIZE = "the number of ranks"
_LOCAL_RANK = "the rank's place on its host"
_LOCAL_SIZE = "the number of ranks on this host"

VARIABLES = (
    Variable(
        "MSCOMM_TIMEOUT",
        1800.0,
        seconds,
        "Seconds that a collective call may take if neither the call nor `init` gives a limit. `inf`: no limit.",
        ("job",),
    ),
    Variable(
        "MSCOMM_ALGO",
        "",
        str,
        "Forces algorithms: `all_reduce=ring,broadcast=tree`, or one name for every collective that has it."
        " The same value on every rank.",
        ("job",),
    ),
    Variable(
        "MSCOMM_NCCL_LIBRARY",
        None,
        str,
        "The file of NCCL; mscomm tries no other one then. Needed if NCCL is neither in site-packages nor found by the"
        " loader.",
        ("accelerators.nccl",),
    ),
    Variable(
        "MSCOMM_CUDA_LIBRARY",
        None,
        str,
        "The file of the CUDA driver, `libcuda.so.1`, if the loader does not find it.",
        ("accelerators.nccl",),
    ),
    Variable(
        "MSCOMM_HCCL_LIBRARY",
        None,
        str,
        "The file of HCCL, `libhccl.so`, if neither the loader nor CANN's own variables lead to it.",
        ("accelerators.hccl",),
    ),
    Variable(
        "MSCOMM_ACL_LIBRARY",
        None,
        str,
        "The file of AscendCL, `libascendcl.so`, in the same way.",
        ("accelerators.hccl",),
    ),
    Variable(
        "MSCOMM_HUGE_PAGES",
        1,
        _switch,
        "0: shared arrays are in a memfd, which has huge pages only if the kernel gives them to memfds. 1: if it does"
        " not, they are in a tmpfs of the process's own, which is mounted nowhere.",
        ("cluster.assemble", "cli.doctor"),
    ),
    Variable(
        "MSCOMM_RECORD",
        None,
        str,
        "A folder: after a failure each rank writes its last calls to `rank_<rank>.json` there."
        " `mscomm trace` reads them; `mscomm run --log_dir` sets it.",
        ("group", "cli.run"),
    ),
    Variable(
        "MSCOMM_TRACEBACK",
        None,
        one_of("SHORT", "FULL"),
        "`full`: the traceback of an exception that ends a rank also has mscomm's own frames, and the error that this"
        " rank saw itself of the first failure. Unset: neither.",
        ("exits", "launching.processes"),
    ),
    Variable(
        "MSCOMM_DEBUG",
        None,
        one_of(*LEVELS),
        "What mscomm writes to stderr: `VERSION`, `WARN`, `INFO` (how the job was set up) or `TRACE` (each call)."
        " Unset: warnings.",
        ("log",),
    ),
    Variable(
        "MSCOMM_DEBUG_FILE",
        None,
        str,
        "A file for these lines instead of stderr. `%h` becomes the host's name, `%p` the process id, `%r` the rank,"
        " `%%` a percent sign.",
        ("log",),
    ),
    Variable(
        "MSCOMM_JOB_KEY_FILE",
        None,
        str,
        "A file with the job's key: 32 bytes or more, or 64 hex digits.",
        ("cluster.security",),
    ),
    Variable(
        "MSCOMM_JOB_ID",
        None,
        str,
        "A name for the job, the same in all its processes. A process with another name, or with none, is refused. So"
        " two jobs that use the same port by mistake stay apart.",
        ("cluster.links",),
    ),
    Variable(
        "MSCOMM_SOCKET_IFNAME",
        None,
        str,
        "The network on which rank 0's hub and the ranks' links listen: names of interfaces, beginnings of names"
        " (`eth`) or networks (`10.0.0.0/8`), separated by commas; `^` before one excludes it."
        " Default: the address that routes to other networks.",
        ("cluster.interfaces",),
    ),
    Variable(
        "NCCL_SOCKET_IFNAME",
        None,
        str,
        "Read if `MSCOMM_SOCKET_IFNAME` is unset.",
        ("cluster.interfaces",),
    ),
    Variable(
        "GLOO_SOCKET_IFNAME",
        None,
        str,
        "Read if neither of these two is set. `mscomm bench --vs torch-gloo` sets it to `lo` if it is unset.",
        ("cluster.interfaces", "bench.peers"),
    ),
    Variable(
        "MSCOMM_PORT",
        None,
        number(1, 65535, "a port from 1 to 65535, the same on every rank"),
        "With a rank table, or Slurm's variables, over several hosts: the port of rank 0's host at which the ranks"
        " meet, the same on every rank. Default: one of eight ports between 61440 and 65535, computed from the job.",
        ("bootstrap.rendezvous",),
    ),
    Variable(
        "MSCOMM_PORTS",
        None,
        ports,
        "Ports that a firewall lets through between the hosts, such as `20000-20100`, the same on every rank. Whenever"
        " mscomm picks a TCP port to listen at, it takes one of these. Ports that you name yourself need not be among"
        " them. A host needs two or three ports for each of its ranks while groups are made.",
        ("cluster.links", "bootstrap.rendezvous"),
    ),
    Variable(
        "MSCOMM_SSH",
        "ssh",
        str,
        "The command that `mscomm run --hosts` uses for `ssh`, with its options: `ssh -p 2222 -i key`.",
        ("cli.remote",),
    ),
    Variable(
        "MSCOMM_HOST_ID",
        None,
        str,
        "Ranks with different values count as being on different hosts: they share no memory and talk over TCP."
        " For tests. Default: made of the boot's id and the process's namespaces.",
        ("cluster.assemble",),
    ),
    Variable(
        "OMP_NUM_THREADS",
        None,
        threads,
        "The number of threads of NumPy's and torch's libraries. If it is unset, `mscomm run` sets it to the number of"
        " CPUs divided by the number of ranks.",
        ("cli.run", "cli.doctor"),
    ),
    Variable(
        "MS_TOPO_TIMEOUT",
        600.0,
        seconds,
        "Seconds in which all ranks must have joined.",
        ("cluster.deadline",),
    ),
    Variable(
        "MS_NODE_TIMEOUT",
        30.0,
        silence,
        "Seconds of silence on a TCP connection after which its host counts as lost.",
        ("cluster.links",),
    ),
    Variable(
        "MS_ROLE",
        None,
        one_of("MS_SCHED", "MS_WORKER"),
        "`MS_SCHED`: `init()` serves the job and ends the process with it. `MS_WORKER`: this process is a rank.",
        ("bootstrap.ms_cluster",),
        CLUSTER,
    ),
    Variable(
        "MS_WORKER_NUM",
        None,
        number(1, 1 << 20, "the number of workers, 1 or more, the same in every process"),
        "How many workers there are, the same in every process.",
        ("bootstrap.ms_cluster",),
        CLUSTER,
    ),
    Variable(
        "MS_SCHED_HOST",
        None,
        str,
        "The scheduler's address or host name.",
        ("bootstrap.ms_cluster",),
        CLUSTER,
    ),
    Variable(
        "MS_SCHED_PORT",
        None,
        number(1, 65535, "a port from 1 to 65535, the same for the scheduler and all workers"),
        "The scheduler's port.",
        ("bootstrap.ms_cluster",),
        CLUSTER,
    ),
    Variable(
        "MS_NODE_ID",
        None,
        str,
        "A worker's name. If the names of all workers are numbers, these are the ranks.",
        ("bootstrap.ms_cluster",),
        CLUSTER,
    ),
    Variable(
        "MS_WORKER_IP",
        None,
        str,
        "The address from which a worker connects.",
        ("bootstrap.ms_cluster",),
        CLUSTER,
    ),
    Variable(
        "MS_SERVER_NUM",
        0,
        number(0, 0, "0: mscomm has no parameter servers"),
        "Must be 0: there are no parameter servers.",
        ("bootstrap.ms_cluster",),
        CLUSTER,
    ),
    Variable(
        "MS_ENABLE_RECOVERY",
        0,
        _switch,
        "1, for the scheduler: a lost worker may come back under its `MS_NODE_ID`; the others wait for it in `rejoin`."
        " With another launcher it has no effect, and rank 0 says so.",
        ("bootstrap.ms_cluster", "job"),
        CLUSTER,
    ),
    Variable(
        "MS_RECOVERY_PATH",
        None,
        str,
        "Has no effect, and rank 0 says so: the scheduler keeps no file. `Model.resume` goes on from checkpoints.",
        ("job",),
        CLUSTER,
    ),
    _given("MSCOMM_RANK", "bootstrap.launcher", set_by=RUN, meaning=_RANK),
    _given("MSCOMM_WORLD_SIZE", "bootstrap.launcher", set_by=RUN, meaning=_SIZE),
    _given("MSCOMM_LOCAL_RANK", "bootstrap.launcher", set_by=RUN, meaning=_LOCAL_RANK),
    _given("MSCOMM_LOCAL_WORLD_SIZE", "bootstrap.launcher", set_by=RUN, meaning=_LOCAL_SIZE),
    _given(
        "MSCOMM_RESTART_COUNT",
        "launching.processes",
        set_by=RUN,
        meaning="how often `mscomm run --max-restarts` has started this rank again; 0 at first",
    ),
    _given(
        "MSCOMM_SCHED",
        "bootstrap.launcher",
        set_by=RUN,
        meaning="on several hosts: where the launcher of node 0 listens",
    ),
    _given(
        "MSCOMM_KEY_FD",
        "bootstrap.launcher",
        set_by=RUN,
        meaning="on several hosts: an inherited descriptor, from which the job's key is read",
    ),
    _given(
        "MSCOMM_CONTROL_FD",
        "bootstrap.launcher",
        set_by=RUN,
        meaning="an inherited descriptor, the link to the launcher",
    ),
    _given("TORCHELASTIC_RUN_ID", "bootstrap.torchrun", meaning="torchrun: the job's name"),
    _given(
        "TORCHELASTIC_RESTART_COUNT", "bootstrap.torchrun", meaning="torchrun: how often it has started the job again"
    ),
    _given("RANK", "bootstrap.torchrun", "bootstrap.torch_env", meaning=f"torchrun and torch's programs: {_RANK}"),
    _given(
        "WORLD_SIZE",
        "bootstrap.torchrun",
        "bootstrap.torch_env",
        "bootstrap.kubernetes",
        meaning=f"torchrun, torch's programs, Kubernetes: {_SIZE}",
    ),
    _given("LOCAL_RANK", "bootstrap.torchrun", meaning=f"torchrun and torch's programs: {_LOCAL_RANK}"),
    _given("LOCAL_WORLD_SIZE", "bootstrap.torchrun", meaning=f"torchrun and torch's programs: {_LOCAL_SIZE}"),
    _given(
        "MASTER_ADDR",
        "bootstrap.torchrun",
        "bootstrap.torch_env",
        "bootstrap.kubernetes",
        meaning="torchrun, torch's programs, Kubernetes: the host of rank 0",
    ),
    _given(
        "MASTER_PORT",
        "bootstrap.torchrun",
        "bootstrap.kubernetes",
        meaning="torchrun, torch's programs: the port of torch's own store, beside which rank 0 listens; Kubernetes:"
        " the port of rank 0",
    ),
    _given("PET_NNODES", "cli.run", meaning="the default of `--nnodes`, for torchrun and `mscomm run`"),
    _given("PET_NPROC_PER_NODE", "cli.run", meaning="the default of `-n`"),
    _given("PET_NODE_RANK", "cli.run", meaning="the default of `--node-rank`"),
    _given("PET_MASTER_ADDR", "cli.run", meaning="the default of `--master-addr`"),
    _given("PET_MASTER_PORT", "cli.run", meaning="the default of `--master-port`"),
    _given("PMIX_RANK", "bootstrap.pmix", meaning=f"PMIx: {_RANK}"),
    _given("PMIX_NAMESPACE", "bootstrap.pmix", meaning="PMIx: the job's name"),
    _given("PMIX_PREFIX", "bootstrap.pmix", meaning="PMIx: the folder of its library"),
    _given("OMPI_COMM_WORLD_RANK", "bootstrap.pmix", meaning=f"Open MPI: {_RANK}"),
    _given("OMPI_COMM_WORLD_SIZE", "bootstrap.pmix", meaning=f"Open MPI: {_SIZE}"),
    _given("OMPI_COMM_WORLD_LOCAL_RANK", "bootstrap.pmix", meaning=f"Open MPI: {_LOCAL_RANK}"),
    _given("OMPI_COMM_WORLD_LOCAL_SIZE", "bootstrap.pmix", meaning=f"Open MPI: {_LOCAL_SIZE}"),
    _given("PMI_FD", "bootstrap.pmi", meaning="MPICH: an inherited descriptor, the link to mpirun"),
    _given("PMI_PORT", "bootstrap.pmi", meaning="MPICH: where mpirun listens, if there is no descriptor"),
    _given("PMI_ID", "bootstrap.pmi", meaning=f"MPICH: {_RANK}, with PMI_PORT"),
    _given("PMI_RANK", "bootstrap.pmi", meaning=f"MPICH, Intel MPI: {_RANK}"),
    _given("PMI_SIZE", "bootstrap.pmi", meaning=f"MPICH, Intel MPI: {_SIZE}"),
    _given("MPI_LOCALRANKID", "bootstrap.pmi", meaning=f"MPICH, Intel MPI: {_LOCAL_RANK}"),
    _given("MPI_LOCALNRANKS", "bootstrap.pmi", meaning=f"MPICH, Intel MPI: {_LOCAL_SIZE}"),
    _given("SLURM_STEP_NUM_TASKS", "bootstrap.pmix", "bootstrap.slurm", meaning=f"Slurm: {_SIZE}"),
    _given("SLURM_NTASKS", "bootstrap.slurm", meaning=f"Slurm: {_SIZE}, if the step has no number of its own"),
    _given("SLURM_PROCID", "bootstrap.slurm", meaning=f"Slurm: {_RANK}"),
    _given("SLURM_JOB_ID", "bootstrap.slurm", meaning="Slurm: the job"),
    _given("SLURM_STEP_ID", "bootstrap.slurm", meaning="Slurm: the step of the job"),
    _given("SLURM_STEP_NODELIST", "bootstrap.slurm", meaning="Slurm: the step's hosts"),
    _given("SLURM_JOB_NODELIST", "bootstrap.slurm", meaning="Slurm: the job's hosts"),
    _given("SLURM_NODELIST", "bootstrap.slurm", meaning="Slurm: the job's hosts, the older name"),
    _given("SLURM_LOCALID", "bootstrap.pmix", "bootstrap.pmi", "bootstrap.slurm", meaning=f"Slurm: {_LOCAL_RANK}"),
    _given("SLURM_STEP_TASKS_PER_NODE", "bootstrap.pmix", "bootstrap.pmi", meaning=f"Slurm: {_LOCAL_SIZE}"),
    _given("JSM_NAMESPACE_SIZE", "bootstrap.pmix", meaning=f"LSF: {_SIZE}"),
    _given("JSM_NAMESPACE_LOCAL_RANK", "bootstrap.pmix", meaning=f"LSF: {_LOCAL_RANK}"),
    _given("JSM_NAMESPACE_LOCAL_SIZE", "bootstrap.pmix", meaning=f"LSF: {_LOCAL_SIZE}"),
    _given("JOB_COMPLETION_INDEX", "bootstrap.kubernetes", meaning=f"Kubernetes: {_RANK}"),
    _given(
        "ASCEND_RT_VISIBLE_DEVICES",
        "accelerators.hccl",
        meaning="Ascend: the devices that the process sees, by their numbers on the host",
    ),
    _given("RANK_TABLE_FILE", "bootstrap.rank_table", meaning="a rank table: the file"),
    _given("MINDSPORE_HCCL_CONFIG_PATH", "bootstrap.rank_table", meaning="an older name of `RANK_TABLE_FILE`"),
    _given("RANK_ID", "bootstrap.rank_table", meaning=f"with a rank table: {_RANK}"),
    _given("RANK_SIZE", "bootstrap.rank_table", meaning=f"with a rank table: {_SIZE}; may be left out"),
    _given(
        "DEVICE_ID",
        "bootstrap.rank_table",
        meaning="with a rank table: the rank's device_id there; may be left out",
    ),
)

_BY_NAME = {variable.name: variable for variable in VARIABLES}


def read(name: str, env: Mapping[str, str]) -> Any:
    """The parsed value of a variable in `env`, or its default. Raises ValueError if the variable's text is invalid."""
    return _BY_NAME[name].read(env)


def given(env: Mapping[str, str], *set_by: str) -> dict[str, str]:
    """The names and texts of the variables that are set in `env`. set_by: the kinds to return, by default all.

    The texts may be shown, because no variable of the table holds a secret.
    """
    return {row.name: env[row.name] for row in VARIABLES if env.get(row.name) and row.set_by in (set_by or ABOUT)}


def read_by(module: str, env: Mapping[str, str]) -> dict[str, str]:
    """The names and texts of the variables that are set in `env` and that the module `module` reads."""
    return {row.name: env[row.name] for row in VARIABLES if module in row.readers and env.get(row.name)}


# -- the page docs/env.md ----------------------------------------------------------------------------------------------


def page() -> str:
    """The text of docs/env.md."""
    parts = [
        "# Environment variables",
        "",
        "<!-- Written by `python -m mscomm.environment` from python/mscomm/environment.py. Change that file. -->",
        "",
        "The variables that mscomm reads. An empty variable counts as unset. An invalid value raises an error that",
        "names the variable, its value and what was expected.",
    ]
    for kind, about in ABOUT.items():
        rows = [row for row in VARIABLES if row.set_by == kind]
        with_default = kind in (YOURS, CLUSTER)
        parts += ["", f"## {kind.replace('`', '')}", "", about, ""]
        parts += ["| variable | default | meaning |", "|---|---|---|"] if with_default else []
        parts += [] if with_default else ["| variable | meaning |", "|---|---|"]
        for row in rows:
            default = "" if row.default in (None, "") else f"{row.default}".removesuffix(".0")
            cells = [f"`{row.name}`", default, row.meaning] if with_default else [f"`{row.name}`", row.meaning]
            parts.append(f"| {' | '.join(cells)} |")
    return "\n".join(parts) + "\n"


def main(arguments: list[str]) -> None:
    path = arguments[0] if arguments else "docs/env.md"
    try:
        with open(path, "w") as file:
            file.write(page())
    except OSError as error:
        sys.exit(f"{path}: {error.strerror}; run this in the repository's root, or name the file to write")


if __name__ == "__main__":
    main(sys.argv[1:])
