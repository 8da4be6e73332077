"""The table of all environment variables that mscomm reads.

A row has the variable's name, default, parser and meaning, and the modules that read the variable.

`read(name, env)` returns the value, or raises a ValueError that names the variable, its text and what was expected. The
command `python -m mscomm.environment` writes the page docs/env.md from this table.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

# The variables are grouped by who sets them. docs/env.md has a heading for each group, in this order.
YOURS, CLUSTER, RUN, LAUNCHER = (
    "Yours to set",
    "A scheduler and workers",
    "Set by `mscomm run`",
    "Set by other launchers",
)
ABOUT = {
    YOURS: "These variables are optional. The description says whether a variable must be the same on every rank.",
    CLUSTER: "If you start a job by hand, set these variables yourself. Otherwise the cluster operator sets them."
    " Names and meanings are MindSpore's.",
    RUN: "Do not change these variables: they tell a rank its place in the job. For PyTorch's `torch.distributed`,"
    " `mscomm run`\nalso sets `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`,"
    " and removes\ntorchrun's `TORCHELASTIC_*`.",
    LAUNCHER: "mscomm only reads these. If several variables have the same meaning, the first one that is set is used.",
}


class Variable(NamedTuple):
    """One row of the table. readers: the names of the modules that read the variable, without `mscomm.` in front."""

    name: str
    meaning: str
    readers: tuple[str, ...]
    default: Any = None  # what read() returns if the variable is unset or empty
    parse: Callable[[str], Any] = str  # raises ValueError("expected ...") for an invalid text
    set_by: str = YOURS
    secret: bool = False  # whether the text must not be printed

    def read(self, env: Mapping[str, str]) -> Any:
        """Return the parsed value of the variable in `env`, or the default if the variable is unset or empty."""
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
    """Return the first number of OMP_NUM_THREADS, which may be a list with one number for each level of nesting."""
    return number(1, 1 << 20, "a number of threads, 1 or more")(text.partition(",")[0].strip())


_switch = number(0, 1, "0 or 1")

LEVELS = ("VERSION", "WARN", "INFO", "TRACE")


# -- the table of variables --------------------------------------------------------------------------------------------


def _given(name: str, meaning: str, *readers: str, set_by: str = LAUNCHER) -> Variable:
    """Return a row for a variable that a launcher sets.

    read() returns the text of the variable unchecked. The modules in `readers` check the text.
    """
    return Variable(name, f"{meaning[0].upper()}{meaning[1:]}.", readers, set_by=set_by)


_RANK = "the rank"
_SIZE = "the number of ranks"
_LOCAL_RANK = "the rank's number on its host"
_LOCAL_SIZE = "the number of ranks on this host"

VARIABLES = (
    Variable(
        "MSCOMM_TIMEOUT",
        "The number of seconds that a collective call may take if neither the call nor `init` sets a limit. `inf`: no"
        " limit.",
        ("job",),
        default=1800.0,
        parse=seconds,
    ),
    Variable(
        "MSCOMM_ALGO",
        "Forces algorithms: `all_reduce=ring,broadcast=tree`, or one name for every collective that has it. Must be"
        " the same on every rank.",
        ("job",),
        default="",
    ),
    Variable(
        "MSCOMM_TUNED",
        "A file that `mscomm bench tune --json FILE` has written. It says what a message costs on this network. Only"
        " rank 0 needs it: all ranks choose their algorithms between hosts by rank 0's file.",
        ("cluster.prices",),
    ),
    Variable(
        "MSCOMM_NCCL_LIBRARY",
        "The NCCL library file. If it is set, mscomm tries no other file. Needed if NCCL is neither in site-packages"
        " nor found by the loader.",
        ("accelerators.nccl",),
    ),
    Variable(
        "MSCOMM_CUDA_LIBRARY",
        "The CUDA driver library file, `libcuda.so.1`. Needed if the loader does not find it.",
        ("accelerators.nccl",),
    ),
    Variable(
        "MSCOMM_HCCL_LIBRARY",
        "The HCCL library file, `libhccl.so`. Needed if it is found neither by the loader nor through CANN's own"
        " variables.",
        ("accelerators.hccl",),
    ),
    Variable(
        "MSCOMM_ACL_LIBRARY",
        "The AscendCL library file, `libascendcl.so`. Needed if it is found neither by the loader nor through CANN's"
        " own variables.",
        ("accelerators.hccl",),
    ),
    Variable(
        "MSCOMM_HUGE_PAGES",
        "1: shared arrays have huge pages if possible. If the kernel does not allow huge pages for memfds, mscomm puts"
        " the arrays into a tmpfs of the process, which is not attached to any directory. 0: shared arrays are always"
        " in a memfd.",
        ("cluster.assemble", "cli.doctor"),
        default=1,
        parse=_switch,
    ),
    Variable(
        "MSCOMM_RECORD",
        "A folder. After a failure, each rank writes its last calls to the file `rank_<rank>.json` in this folder."
        " `mscomm trace` reads these files. `mscomm run --log_dir` sets this variable.",
        ("group", "cli.run"),
    ),
    Variable(
        "MSCOMM_TRACEBACK",
        "`full`: if an exception ends a rank, the traceback also shows mscomm's own frames, and the error that the rank"
        " observed before it learned the first cause. Unset: the traceback shows neither.",
        ("exits", "launching.processes"),
        parse=one_of("SHORT", "FULL"),
    ),
    Variable(
        "MSCOMM_DEBUG",
        "What mscomm writes to stderr: `VERSION`, `WARN`, `INFO` (how the job was set up) or `TRACE` (each call)."
        " Unset: warnings.",
        ("log",),
        parse=one_of(*LEVELS),
    ),
    Variable(
        "MSCOMM_DEBUG_FILE",
        "A file to which the lines of `MSCOMM_DEBUG` are written, instead of stderr. `%h` stands for the host name,"
        " `%p` for the process id, `%r` for the rank, `%%` for a percent sign.",
        ("log",),
    ),
    Variable(
        "MSCOMM_JOB_KEY_FILE", "A file with the job key: 32 bytes or more, or 64 hex digits.", ("cluster.security",)
    ),
    Variable(
        "MSCOMM_SSL_CONFIG_FILE",
        "The path of `config.json`, which says where the certificates of TLS are. If it is set, the job uses TLS,"
        " unless the script calls `set_ps_context(enable_ssl=False)`."
        " `set_ps_context(config_file_path=)` has priority.",
        ("cluster.credentials",),
    ),
    Variable(
        "MSCOMM_SSL_SERVER_PASSWORD",
        "The password of the scheduler's private key. mscomm removes it from `os.environ` when it has read it. A file"
        " is safer: other processes of the user can see a process's environment.",
        ("cluster.credentials",),
        secret=True,
    ),
    Variable(
        "MSCOMM_SSL_SERVER_PASSWORD_FILE",
        "A file with this password, which only the current user may be able to read.",
        ("cluster.credentials",),
    ),
    Variable(
        "MSCOMM_SSL_CLIENT_PASSWORD",
        "The password of a worker's private key, like `MSCOMM_SSL_SERVER_PASSWORD`.",
        ("cluster.credentials",),
        secret=True,
    ),
    Variable(
        "MSCOMM_SSL_CLIENT_PASSWORD_FILE",
        "A file with this password, which only the current user may be able to read.",
        ("cluster.credentials",),
    ),
    Variable(
        "MSCOMM_ALLOW_PLAIN_DEVICE",
        "1: a job with TLS may use NCCL or HCCL across hosts, whose traffic is not encrypted. It must be set on every"
        " rank.",
        ("accelerators",),
        default=0,
        parse=_switch,
    ),
    Variable(
        "MSCOMM_JOB_ID",
        "A name for the job. Must be the same in all processes of the job. The job refuses a process that has a"
        " different name or none. So two jobs that use the same port by mistake stay separate.",
        ("cluster.links",),
    ),
    Variable(
        "MSCOMM_SOCKET_IFNAME",
        "The network on which rank 0's hub and the ranks listen for connections: interface names, prefixes of such"
        " names (`eth`) or networks (`10.0.0.0/8`), separated by commas; a leading `^` excludes an entry. Default: the"
        " address that routes to other networks.",
        ("cluster.interfaces",),
    ),
    Variable(
        "NCCL_COMM_BLOCKING",
        "With `1`, NCCL ignores that mscomm asks for communicators that do not block. Joining a group and the group's"
        " first call then have no time limit, so rank 0 warns.",
        ("accelerators.nccl",),
    ),
    Variable("NCCL_SOCKET_IFNAME", "Read if `MSCOMM_SOCKET_IFNAME` is unset.", ("cluster.interfaces",)),
    Variable(
        "GLOO_SOCKET_IFNAME",
        "Read if neither `MSCOMM_SOCKET_IFNAME` nor `NCCL_SOCKET_IFNAME` is set. If it is unset, `mscomm bench --vs"
        " torch-gloo` sets it to `lo`.",
        ("cluster.interfaces", "bench.peers"),
    ),
    Variable(
        "MSCOMM_PORT",
        "The port on which rank 0 listens for the other ranks, if a rank table or Slurm's variables describe a job on"
        " several hosts. Must be the same on every rank. Default: one of eight ports between 61440 and 65535, computed"
        " from the job.",
        ("bootstrap.rendezvous",),
        parse=number(1, 65535, "a port from 1 to 65535, the same on every rank"),
    ),
    Variable(
        "MSCOMM_PORTS",
        "A range of ports that a firewall between the hosts lets through, such as `20000-20100`. Must be the same on"
        " every rank. Whenever mscomm picks a TCP port to listen on, it picks a free port in this range. Ports that you"
        " specify yourself need not be in the range. While groups are being created, or ranks connect to each other"
        " for the first time, a host needs two or three ports for each of its ranks.",
        ("cluster.links", "bootstrap.rendezvous"),
        parse=ports,
    ),
    Variable(
        "MSCOMM_SSH",
        "The ssh command of `mscomm run --hosts`, with options: for example `ssh -p 2222 -i key`.",
        ("cli.remote",),
        default="ssh",
    ),
    Variable(
        "MSCOMM_HOST_ID",
        "Ranks with different values count as being on different hosts: they share no memory and communicate over TCP."
        " For tests. Default: derived from the boot id and the process's namespaces.",
        ("cluster.assemble",),
    ),
    Variable(
        "OMP_NUM_THREADS",
        "The number of threads that NumPy's and torch's libraries use. If it is unset, `mscomm run` sets it to the"
        " number of CPUs divided by the number of ranks.",
        ("cli.run", "cli.doctor"),
        parse=threads,
    ),
    Variable(
        "MS_TOPO_TIMEOUT",
        "The number of seconds within which all ranks must join the job.",
        ("cluster.deadline",),
        default=600.0,
        parse=seconds,
    ),
    Variable(
        "MS_NODE_TIMEOUT",
        "The number of seconds of silence on a TCP connection after which the host at its other end counts as lost.",
        ("cluster.links",),
        default=30.0,
        parse=silence,
    ),
    Variable(
        "MS_ROLE",
        "`MS_SCHED`: `init()` serves the job, and exits the process when the job ends. `MS_WORKER`: this process is a"
        " rank.",
        ("bootstrap.ms_cluster",),
        parse=one_of("MS_SCHED", "MS_WORKER"),
        set_by=CLUSTER,
    ),
    Variable(
        "MS_WORKER_NUM",
        "The number of workers. Must be the same in every process.",
        ("bootstrap.ms_cluster",),
        parse=number(1, 1 << 20, "the number of workers, 1 or more, the same in every process"),
        set_by=CLUSTER,
    ),
    Variable("MS_SCHED_HOST", "The scheduler's address or host name.", ("bootstrap.ms_cluster",), set_by=CLUSTER),
    Variable(
        "MS_SCHED_PORT",
        "The scheduler's port.",
        ("bootstrap.ms_cluster",),
        parse=number(1, 65535, "a port from 1 to 65535, the same for the scheduler and all workers"),
        set_by=CLUSTER,
    ),
    Variable(
        "MS_NODE_ID",
        "The worker's name. If the names of all workers are numbers, each worker's number is its rank.",
        ("bootstrap.ms_cluster",),
        set_by=CLUSTER,
    ),
    Variable("MS_WORKER_IP", "The address from which the worker connects.", ("bootstrap.ms_cluster",), set_by=CLUSTER),
    Variable(
        "MS_SERVER_NUM",
        "Must be 0: there are no parameter servers.",
        ("bootstrap.ms_cluster",),
        default=0,
        parse=number(0, 0, "0: mscomm has no parameter servers"),
        set_by=CLUSTER,
    ),
    Variable(
        "MS_ENABLE_RECOVERY",
        "1, for the scheduler and the workers: a lost worker may be started again with the same `MS_NODE_ID`, and the"
        " others wait for it in `rejoin`. If `MS_RECOVERY_PATH` is set, the scheduler may be started again, too. With"
        " any other launcher, the variable has no effect, and rank 0 says so.",
        ("bootstrap.ms_cluster", "job"),
        default=0,
        parse=_switch,
        set_by=CLUSTER,
    ),
    Variable(
        "MS_RECOVERY_PATH",
        "A folder in which the scheduler keeps the membership of the job, for the case that it is started again."
        " Without `MS_ENABLE_RECOVERY=1`, or with any other launcher, the variable has no effect, and rank 0 says so.",
        ("bootstrap.ms_cluster", "job"),
        set_by=CLUSTER,
    ),
    _given("MSCOMM_RANK", _RANK, "bootstrap.launcher", set_by=RUN),
    _given("MSCOMM_WORLD_SIZE", _SIZE, "bootstrap.launcher", set_by=RUN),
    _given("MSCOMM_LOCAL_RANK", _LOCAL_RANK, "bootstrap.launcher", set_by=RUN),
    _given("MSCOMM_LOCAL_WORLD_SIZE", _LOCAL_SIZE, "bootstrap.launcher", set_by=RUN),
    _given(
        "MSCOMM_RESTART_COUNT",
        "the number of times that `mscomm run --max-restarts` has restarted this rank; 0 at first",
        "launching.processes",
        set_by=RUN,
    ),
    _given(
        "MSCOMM_SCHED",
        "on several hosts: the address at which the launcher of node 0 listens",
        "bootstrap.launcher",
        set_by=RUN,
    ),
    _given(
        "MSCOMM_KEY_FD",
        "on several hosts: a descriptor that the rank inherits, from which it reads the job key, and its inode",
        "bootstrap.launcher",
        set_by=RUN,
    ),
    _given(
        "MSCOMM_CONTROL_FD",
        "the descriptor of the rank's connection to the launcher, which the rank inherits, and its inode",
        "bootstrap.launcher",
        set_by=RUN,
    ),
    _given(
        "MSCOMM_ENTRANCE",
        "the name of the launcher's unix socket, where a rank joins if a wrapper has closed that descriptor",
        "bootstrap.launcher",
        set_by=RUN,
    ),
    _given(
        "MSCOMM_CHILD_OF",
        "in a process that mscomm itself starts: the process that started it; removed when that process begins",
        "interpreter",
        set_by=RUN,
    ),
    _given(
        "MSCOMM_JOINED",
        "while a process is in a job, for its child processes: its process id, its rank, and a digest of the variables"
        " by which it has joined. `init()` sets it, unless the scheduler has numbered this worker",
        "bootstrap.again",
        set_by=RUN,
    ),
    _given("TORCHELASTIC_RUN_ID", "torchrun: the job's name", "bootstrap.torchrun"),
    _given("TORCHELASTIC_RESTART_COUNT", "torchrun: how many times it has restarted the job", "bootstrap.torchrun"),
    _given("RANK", f"torchrun and other torch launchers: {_RANK}", "bootstrap.torchrun", "bootstrap.torch_env"),
    _given(
        "WORLD_SIZE",
        f"torchrun, other torch launchers, Kubernetes: {_SIZE}",
        "bootstrap.torchrun",
        "bootstrap.torch_env",
        "bootstrap.kubernetes",
    ),
    _given("LOCAL_RANK", f"torchrun and other torch launchers: {_LOCAL_RANK}", "bootstrap.torchrun"),
    _given("LOCAL_WORLD_SIZE", f"torchrun and other torch launchers: {_LOCAL_SIZE}", "bootstrap.torchrun"),
    _given(
        "MASTER_ADDR",
        "torchrun, other torch launchers, Kubernetes: the host of rank 0",
        "bootstrap.torchrun",
        "bootstrap.torch_env",
        "bootstrap.kubernetes",
    ),
    _given(
        "MASTER_PORT",
        "torchrun, other torch launchers: the port of torch's own store; rank 0 listens on a later port."
        " Kubernetes: the port of rank 0",
        "bootstrap.torchrun",
        "bootstrap.kubernetes",
    ),
    _given("PET_NNODES", "the default for `--nnodes`, in torchrun and `mscomm run`", "cli.run"),
    _given("PET_NPROC_PER_NODE", "the default for `-n`", "cli.run"),
    _given("PET_NODE_RANK", "the default for `--node-rank`", "cli.run"),
    _given("PET_MASTER_ADDR", "the default for `--master-addr`", "cli.run"),
    _given("PET_MASTER_PORT", "the default for `--master-port`", "cli.run"),
    _given("PMIX_RANK", f"PMIx: {_RANK}", "bootstrap.pmix"),
    _given("PMIX_NAMESPACE", "PMIx: the job's name", "bootstrap.pmix"),
    _given("PMIX_PREFIX", "PMIx: the folder that contains its library", "bootstrap.pmix"),
    _given("OMPI_COMM_WORLD_RANK", f"Open MPI: {_RANK}", "bootstrap.pmix"),
    _given("OMPI_COMM_WORLD_SIZE", f"Open MPI: {_SIZE}", "bootstrap.pmix"),
    _given("OMPI_COMM_WORLD_LOCAL_RANK", f"Open MPI: {_LOCAL_RANK}", "bootstrap.pmix"),
    _given("OMPI_COMM_WORLD_LOCAL_SIZE", f"Open MPI: {_LOCAL_SIZE}", "bootstrap.pmix"),
    _given(
        "PMI_FD", "MPICH: the descriptor of the rank's connection to mpirun, which the rank inherits", "bootstrap.pmi"
    ),
    _given("PMI_PORT", "MPICH: the address of mpirun, if there is no descriptor", "bootstrap.pmi"),
    _given("PMI_ID", f"MPICH, with PMI_PORT: {_RANK}", "bootstrap.pmi"),
    _given("PMI_RANK", f"MPICH, Intel MPI: {_RANK}", "bootstrap.pmi"),
    _given("PMI_SIZE", f"MPICH, Intel MPI: {_SIZE}", "bootstrap.pmi"),
    _given("MPI_LOCALRANKID", f"MPICH, Intel MPI: {_LOCAL_RANK}", "bootstrap.pmi"),
    _given("MPI_LOCALNRANKS", f"MPICH, Intel MPI: {_LOCAL_SIZE}", "bootstrap.pmi"),
    _given("SLURM_STEP_NUM_TASKS", f"Slurm: {_SIZE}", "bootstrap.pmix", "bootstrap.slurm"),
    _given("SLURM_NTASKS", f"Slurm: {_SIZE}, if the step does not set its own", "bootstrap.slurm"),
    _given("SLURM_PROCID", f"Slurm: {_RANK}", "bootstrap.slurm"),
    _given("SLURM_JOB_ID", "Slurm: the job id", "bootstrap.slurm"),
    _given("SLURM_STEP_ID", "Slurm: the id of the job step", "bootstrap.slurm"),
    _given("SLURM_STEP_NODELIST", "Slurm: the step's hosts", "bootstrap.slurm"),
    _given("SLURM_JOB_NODELIST", "Slurm: the job's hosts", "bootstrap.slurm"),
    _given("SLURM_NODELIST", "Slurm: the job's hosts (an older name)", "bootstrap.slurm"),
    _given("SLURM_LOCALID", f"Slurm: {_LOCAL_RANK}", "bootstrap.pmix", "bootstrap.pmi", "bootstrap.slurm"),
    _given("SLURM_STEP_TASKS_PER_NODE", f"Slurm: {_LOCAL_SIZE}", "bootstrap.pmix", "bootstrap.pmi"),
    _given("JSM_NAMESPACE_SIZE", f"LSF: {_SIZE}", "bootstrap.pmix"),
    _given("JSM_NAMESPACE_LOCAL_RANK", f"LSF: {_LOCAL_RANK}", "bootstrap.pmix"),
    _given("JSM_NAMESPACE_LOCAL_SIZE", f"LSF: {_LOCAL_SIZE}", "bootstrap.pmix"),
    _given("JOB_COMPLETION_INDEX", f"Kubernetes: {_RANK}", "bootstrap.kubernetes"),
    _given(
        "ASCEND_RT_VISIBLE_DEVICES",
        "Ascend: the devices that are visible to the process, by their numbers on the host",
        "accelerators.hccl",
    ),
    _given("RANK_TABLE_FILE", "the path of the rank table", "bootstrap.rank_table"),
    _given("MINDSPORE_HCCL_CONFIG_PATH", "an older name for `RANK_TABLE_FILE`", "bootstrap.rank_table"),
    _given("RANK_ID", f"with a rank table: {_RANK}", "bootstrap.rank_table"),
    _given("RANK_SIZE", f"with a rank table: {_SIZE}; may be omitted", "bootstrap.rank_table"),
    _given("DEVICE_ID", "with a rank table: the rank's device_id in the table; may be omitted", "bootstrap.rank_table"),
)

_BY_NAME = {variable.name: variable for variable in VARIABLES}


def read(name: str, env: Mapping[str, str]) -> Any:
    """Return the parsed value of a variable in `env`, or its default.

    Raise ValueError if the variable's text is invalid.
    """
    return _BY_NAME[name].read(env)


def misspelt(env: Mapping[str, str]) -> dict[str, str]:
    """Return the names in `env` that look like misspelt names of our variables, and the names that may be meant."""
    ours = [name for name in _BY_NAME if name.startswith("MSCOMM_")]
    found: dict[str, str] = {}
    for name in env:
        if name.startswith("MSCOMM") and name not in _BY_NAME:
            import difflib  # takes 2 ms, which most jobs do not need

            near = difflib.get_close_matches(name, ours, 1, 0.85)
            found |= {name: near[0]} if near else {}
    return found


def given(env: Mapping[str, str], *set_by: str) -> dict[str, str]:
    """Return the names and texts of the variables that are set in `env`. set_by: the groups to return; by default, all.

    The texts can safely be printed: instead of a secret, there is "(hidden)".
    """
    return {row.name: _shown(row, env) for row in VARIABLES if env.get(row.name) and row.set_by in (set_by or ABOUT)}


def _shown(row: Variable, env: Mapping[str, str]) -> str:
    return "(hidden)" if row.secret else env[row.name]


def read_by(module: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the names and texts of the variables that are set in `env` and that `module` reads. See given()."""
    return {row.name: _shown(row, env) for row in VARIABLES if module in row.readers and env.get(row.name)}


# -- the page docs/env.md ----------------------------------------------------------------------------------------------


def page() -> str:
    """Return the text of docs/env.md."""
    parts = [
        "# Environment variables",
        "",
        "<!-- Written by `python -m mscomm.environment` from python/mscomm/environment.py. Change that file. -->",
        "",
        "This page lists the variables that mscomm reads. An empty variable counts as unset. An invalid value raises",
        "an error that names the variable, its value and what was expected.",
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
