"""`mscomm run`: starts and watches all ranks of a job, or the ranks of this host in a job on several hosts."""

from __future__ import annotations

import difflib
import itertools
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from mscomm import log
from mscomm.cluster.cpus import usable_cpus
from mscomm.cluster.deadline import join_timeout_s
from mscomm.cluster.protection import OF_SCHEDULER, of_command
from mscomm.environment import misspelt, read
from mscomm.launching.binding import POLICIES, Cpus, bound

if TYPE_CHECKING:
    from mscomm.cli.remote import Share

_HELP = """Start SCRIPT as N ranks, and watch them. SCRIPT is a .py file, a module after -m, pytest, or any program
after --.

Output is printed in whole lines, each with the rank in front. When a rank fails, the other ranks have 5 s to report
before they are ended. The exit status is that of the first rank that failed. With --log_dir, the output of each rank
is also kept in DIR/worker_<rank>.log.

The stdin of a rank is empty. With --stdin RANK, that rank has the stdin of this command, for input() and
breakpoint(). The other ranks skip their breakpoints.

With --max-restarts, a failed rank is started again with the same number, and MSCOMM_RESTART_COUNT tells it how many
times it has been restarted. The other ranks keep running: they catch mscomm.PeerLost and call mscomm.rejoin().
(torchrun has the same option, but restarts all ranks, and counts that as one restart.)

There are two ways to run on several hosts. With --hosts a:4,b:4 or --hostfile FILE, this command starts the ranks of
the other hosts through ssh. Or run this command on each host, with the same --nnodes, --master-addr and
--master-port, and with --node-rank 0 to N-1. Node 0 runs on the host of --master-addr, and prints the command line
for the other hosts, which need the same key in MSCOMM_JOB_KEY_FILE. The defaults come from the variables PET_NNODES,
PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT and PET_MAX_RESTARTS.
"""
DEFAULT_PORT = 8118  # msrun has the same default
_F = TypeVar("_F", bound=Callable[..., Any])


class Nodes(NamedTuple):
    """The number of hosts in the job, this host's number, and node 0's address. A job on one host has no address."""

    number: int
    rank: int
    host: str
    port: int


def _option(*names: str, **more: Any) -> Callable[[_F], _F]:
    """Return an option of `mscomm run`. Long names may be written with underscores, as in msrun, or with hyphens."""
    spellings = [(name, name.replace("_", "-")) if name.startswith("--") else (name,) for name in names]
    return click.option(*dict.fromkeys(itertools.chain.from_iterable(spellings)), **more)


@click.command("run", help=_HELP, context_settings={"allow_interspersed_args": False})
@_option(
    "-n",
    "-np",
    "--nproc_per_node",
    "per_node",
    metavar="N",
    help="The number of ranks on this host; auto: one per CPU.",
)
@_option("--worker_num", type=int, metavar="N", help="The number of ranks on all hosts together, as in msrun.")
@_option("--local_worker_num", type=int, metavar="N", help="Same as -n.")
@_option("--nnodes", metavar="N", help="The number of hosts (1).")
@_option("--node_rank", type=int, metavar="K", help="The number of this host, from 0.")
@_option("--master_addr", metavar="ADDRESS", help="The address at which the other hosts reach node 0.")
@_option("--master_port", type=click.IntRange(1, 65535), help=f"The port of node 0 ({DEFAULT_PORT}).")
@_option("--hosts", "-H", metavar="A:N,B:N", help="The hosts, including this one, and how many ranks each has.")
@_option(
    "--hostfile",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The same in a file, one host per line, as in Open MPI (host slots=4) or MPICH (host:4).",
)
@_option("--permit-plain", is_flag=True, help="Let anyone who can reach the port join, even from other machines.")
@_option(
    "--cluster_time_out",
    type=float,
    metavar="SECONDS",
    help="The time limit for all ranks to join; overrides MS_TOPO_TIMEOUT; negative: no limit.",
)
@_option("--join", type=bool, metavar="True", help="Accepted for msrun; this command always waits for the ranks.")
@_option(
    "--log_dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Also write the output of each rank to a file in this folder.",
)
@_option(
    "--max_restarts",
    type=click.IntRange(0),
    metavar="N",
    help="Restart failed ranks, at most N times in total on this host (0).",
)
@_option(
    "--grace",
    type=float,
    metavar="SECONDS",
    help="The time from SIGTERM to SIGKILL for ranks that are to end (30).",
)
@_option(
    "--timeout",
    type=float,
    metavar="SECONDS",
    help="End the job after this time, with exit status 124.",
)
@_option(
    "--env",
    "-x",
    "variables",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Set a variable for all ranks, or pass this host's on to the other hosts; may be repeated.",
)
@_option(
    "--standalone",
    is_flag=True,
    help="Accepted for torchrun: the job has one host, and needs no port.",
)
@_option(
    "--stdin",
    "stdin_rank",
    type=int,
    metavar="RANK",
    help="The rank that gets the stdin of this command, for breakpoint().",
)
@_option(
    "--bind_to",
    type=click.Choice(POLICIES),
    default="none",
    help="core: give each rank CPU cores of its own; numa: keep each rank on a NUMA node (none).",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as with python -m.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(
    per_node: str | None,
    worker_num: int | None,
    local_worker_num: int | None,
    nnodes: str | None,
    node_rank: int | None,
    master_addr: str | None,
    master_port: int | None,
    hosts: str | None,
    hostfile: Path | None,
    permit_plain: bool,
    cluster_time_out: float | None,
    join: bool | None,
    log_dir: Path | None,
    max_restarts: int | None,
    grace: float | None,
    timeout: float | None,
    variables: tuple[str, ...],
    standalone: bool,
    stdin_rank: int | None,
    bind_to: str,
    module: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    if join is False:
        raise click.ClickException("--join=False: mscomm run stays until the ranks have ended; put an & behind it")
    named = _set_variables(variables)
    if standalone:
        excluded = {"--nnodes": nnodes, "--node-rank": node_rank, "--hosts": hosts, "--hostfile": hostfile}
        if given := [name for name, value in excluded.items() if value not in (None, "1", 0)]:
            raise click.ClickException(f"--standalone: the job has only this host; leave out {given[0]}")
        nnodes = "1"
    per_node = per_node or os.environ.get("PET_NPROC_PER_NODE")
    if all(value is None for value in (worker_num, local_worker_num, per_node, hosts, hostfile)):
        _check_order(script, args)
    of_nodes = {"--nnodes": nnodes, "--node-rank": node_rank, "--master-addr": master_addr}
    shares, own = _shares(hosts, hostfile, per_node, worker_num, {**of_nodes, "--local_worker_num": local_worker_num})
    if shares:
        local, count = len(shares[own].ranks), 1
    else:
        local, count = sizes(per_node, worker_num, local_worker_num, nnodes or os.environ.get("PET_NNODES"))
    nodes = nodes_of(os.environ, count, node_rank, master_addr, master_port)
    if max_restarts is None:
        max_restarts = _number(os.environ, "PET_MAX_RESTARTS") or 0
    if grace is not None and not grace >= 0:
        raise click.ClickException(f"--grace {grace:g}: expected a number of seconds, 0 or more")
    if timeout is not None and not timeout > 0:
        raise click.ClickException(f"--timeout {timeout:g}: expected a number of seconds, more than 0")
    if cluster_time_out is not None:
        os.environ["MS_TOPO_TIMEOUT"] = str(cluster_time_out if cluster_time_out >= 0 else float("inf"))
    try:
        topo_timeout_s = join_timeout_s(os.environ)
        read("MSCOMM_TRACEBACK", os.environ)  # report a wrong value now, before Launch reads it
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    from mscomm.errors import Error
    from mscomm.launching.parts import Node0, OtherNode, Part, WholeJob, layout
    from mscomm.launching.processes import GRACE_S, Launch

    grace = GRACE_S if grace is None else grace
    _open_standard_streams()
    try:
        protection = of_command(os.environ, permit_plain, "mscomm run --permit-plain ...")
    except (Error, ValueError) as error:
        raise click.ClickException(str(error)) from error
    size, where = nodes.number * local, (nodes.host, nodes.port, protection, topo_timeout_s)
    part: Part
    if len(shares) > 1:
        from mscomm.cli.remote import Hosts, handed_over

        task = {"script": script, "args": args, "module": module, "max_restarts": max_restarts}
        task |= {"grace": grace, "limit": float("inf") if timeout is None else timeout, "bind_to": bind_to}
        task |= {"cwd": _folder_elsewhere(), "env": handed_over(os.environ, named)}
        task |= {"log_dir": str(log_dir.absolute()) if log_dir else ""}
        part = Hosts(shares, own, master_port, protection, topo_timeout_s, max_restarts > 0, task)
    elif nodes.number == 1:
        part = WholeJob(size, topo_timeout_s, max_restarts > 0)
    elif nodes.rank == 0:
        options = [*["--permit-plain"] * permit_plain, *(["--max-restarts", str(max_restarts)] if max_restarts else [])]
        options += [] if grace == GRACE_S else ["--grace", f"{grace:g}"]
        options += [] if timeout is None else ["--timeout", f"{timeout:g}"]
        options += [] if bind_to == "none" else ["--bind-to", bind_to]
        # The values may be secret, and this line may be in a log.
        options += [word for name in named for word in ("--env", f"{name}=VALUE")]
        others = _for_the_others(nodes, local, [*options, *["-m"] * module, script, *args])
        part = Node0(nodes.number, local, *where, max_restarts > 0, others)
    else:
        ranks = range(nodes.rank * local, (nodes.rank + 1) * local)
        name = f"node {nodes.rank} on host {socket.gethostname()}"
        part = OtherNode(size, ranks, name, layout(nodes.number, local), *where)
    if stdin_rank is not None and not part.first <= stdin_rank < part.first + local:
        here = f"this host has the ranks {part.first} to {part.first + local - 1}"
        raise click.ClickException(f"--stdin {stdin_rank}: {here}")
    stdin_rank = None if stdin_rank is None else stdin_rank - part.first
    try:
        line, env = prepare(script, args, module, local, log_dir)
        cpus = cpus_of_ranks(bind_to, local)
    except click.ClickException as error:
        if isinstance(part, OtherNode):
            error.show()
            part.give_up(error.message)
            sys.exit(error.exit_code)
        raise
    try:
        job = Launch(
            line,
            local,
            env,
            part,
            log_dir,
            max_restarts,
            stdin_rank,
            timeout_s=float("inf") if timeout is None else timeout,
            grace_s=grace,
            cpus=cpus,
        )
        status = job.run()
    except (Error, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    sys.exit(status)


def _set_variables(texts: Sequence[str]) -> list[str]:
    """Set the variables of --env in this process's environment, which the ranks inherit. Return their names."""
    names = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not name:
            raise click.ClickException(f"--env {text}: expected NAME or NAME=VALUE")
        if equals:
            os.environ[name] = value
        elif name not in os.environ:
            raise click.ClickException(f"--env {name}: this variable is not set here; give it a value: {name}=VALUE")
        names.append(name)
    return names


def _check_order(script: str, args: Sequence[str]) -> None:
    """Raise ClickException if the option for the number of ranks is behind the script."""
    spellings = ("-n", "-np", "--nproc_per_node", "--nproc-per-node", "--worker_num", "--worker-num")
    for place, word in enumerate(args):
        option, equals, _ = word.partition("=")
        if option in spellings:
            words = shlex.join(args[place : place + (1 if equals else 2)])
            raise click.ClickException(f"options of mscomm run come before the script: mscomm run {words} ... {script}")


def _shares(
    hosts: str | None, hostfile: Path | None, per_node: str | None, worker_num: int | None, others: Mapping[str, object]
) -> tuple[list[Share], int]:
    """Return the hosts of --hosts or --hostfile with their ranks, and this host's index; ([], 0) if neither is set.

    others: the options that cannot be combined with --hosts, and their values.
    """
    if hosts is None and hostfile is None:
        return [], 0
    from mscomm.cli import remote

    if hosts is not None and hostfile is not None:
        raise click.ClickException("--hosts and --hostfile: both name the hosts; give one of them")
    for name, value in others.items():
        if value is not None:
            option = "--hostfile" if hosts is None else "--hosts"
            raise click.ClickException(f"{option} says this already; leave out {name}")
    listed = remote.listed(hosts) if hosts is not None else remote.read_hostfile(hostfile or Path())
    shares = remote.shares(listed, _per_node(per_node))
    size = shares[-1].ranks.stop
    if worker_num not in (None, size):
        raise click.ClickException(f"--worker_num {worker_num}: the hosts have {size} ranks together")
    return shares, remote.own_place(shares)


def prepare(
    script: str, args: tuple[str, ...], module: bool, local: int, log_dir: Path | None
) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment for the ranks of this host.

    Raise ClickException if the command cannot run.
    """
    line = command_line(script, args, module)
    if log_dir:
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise click.ClickException(f"--log_dir {log_dir}: {error.strerror}") from error
    return line, environment(local, log_dir)


def cpus_of_ranks(policy: str, ranks: int) -> list[Cpus]:
    """Return the CPUs of each rank of this host (see binding.py). Raise ClickException if there are too few."""
    try:
        return bound(policy, ranks)
    except ValueError as error:
        raise click.ClickException(f"--bind-to {error}") from error


def _open_standard_streams() -> None:
    """Open /dev/null for each closed standard stream, so that no other descriptor gets the stream's number."""
    while (fd := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) < 3:
        continue
    os.close(fd)


def sizes(
    per_node: str | None, worker_num: int | None, local_worker_num: int | None, nnodes: str | None
) -> tuple[int, int]:
    """Return the number of ranks on this host and the number of hosts, from the options of torchrun and msrun."""
    local = {"-n": _per_node(per_node), "--local_worker_num": local_worker_num}
    given = {name: value for name, value in local.items() if value is not None}
    count = _nnodes(nnodes)
    if count is None:
        here = next(iter(given.values()), worker_num)
        count = max(1, worker_num // here) if worker_num and here and here > 0 and worker_num % here == 0 else 1
    if worker_num is not None and not given and worker_num % count == 0:
        given["--worker_num"] = worker_num // count
    if not given:
        raise click.ClickException("say how many ranks to start: mscomm run -n 4 script.py")
    name, size = next(iter(given.items()))
    if len(set(given.values())) > 1:
        text = ", ".join(f"{name} {value}" for name, value in given.items())
        raise click.ClickException(f"{text}: both say how many ranks this host has; give one of them")
    if size < 1:
        raise click.ClickException(f"{name} {size}: a job needs at least 1 rank")
    if worker_num is not None and worker_num != size * count:
        hosts = f"{count} hosts" if count > 1 else "1 host"
        raise click.ClickException(
            f"--worker_num {worker_num} is not {size} on each of {hosts}: every host has the same number of ranks"
        )
    return size, count


def _per_node(text: str | None) -> int | None:
    if text is None or re.fullmatch(r"-?\d+", text, re.ASCII):
        return None if text is None else int(text)
    if text in ("auto", "cpu"):
        return usable_cpus()
    raise click.ClickException(f"-n {text}: expected a number, or auto for one rank per CPU")


def _nnodes(text: str | None) -> int | None:
    """Return the number of hosts. Refuse a range such as 1:4, because the number of hosts is fixed for a job.

    torchrun accepts any MIN:MAX. This function accepts MIN:MAX only if both numbers are the same.
    """
    if text is None:
        return None
    least, _, most = text.partition(":")
    if not re.fullmatch(r"\d+", least, re.ASCII) or int(least) < 1 or most not in ("", least):
        raise click.ClickException(f"--nnodes {text}: expected the number of hosts, 1 or more; it is fixed for a job")
    return int(least)


def nodes_of(
    env: Mapping[str, str], count: int, node_rank: int | None, master_addr: str | None, master_port: int | None
) -> Nodes:
    """Return the Nodes of the job, from the options. If an option is missing, use its PET_* variable.

    Raise ClickException if a value is missing or invalid.
    """
    if node_rank is None:
        node_rank = _number(env, "PET_NODE_RANK")
    if count == 1:
        if node_rank:
            raise click.ClickException(f"--node-rank {node_rank}: a job of 1 host has only node 0; add --nnodes")
        return Nodes(1, 0, "", 0)
    if node_rank is None:
        raise click.ClickException(
            f"the job has {count} hosts: say which one this is, with --node-rank 0 (where --master-addr is) to "
            f"--node-rank {count - 1}"
        )
    if not 0 <= node_rank < count:
        raise click.ClickException(f"--node-rank {node_rank}: a job of {count} hosts has the nodes 0 to {count - 1}")
    host = (master_addr or env.get("PET_MASTER_ADDR", "")).strip("[]")
    if not host:
        raise click.ClickException(
            f"the job has {count} hosts: name node 0's address, as the others reach it, with --master-addr"
        )
    port = master_port or _number(env, "PET_MASTER_PORT") or DEFAULT_PORT
    if port >= 1 << 16:
        raise click.ClickException(f"PET_MASTER_PORT={port}: expected a port, at most 65535")
    return Nodes(count, node_rank, host, port)


def _number(env: Mapping[str, str], name: str) -> int | None:
    """Return the number in the variable, or None if it is not set. Raise ClickException if it is not a number."""
    text = env.get(name, "")
    if text and not text.isdecimal():
        raise click.ClickException(f"{name}={text!r}: expected a number")
    return int(text) if text else None


def _for_the_others(nodes: Nodes, local: int, rest: list[str]) -> str:
    """Return the message that tells the user what to type on the other hosts."""
    others = "1" if nodes.number == 2 else "K"
    words = ["mscomm", "run", "--nnodes", str(nodes.number), "--node-rank", others, "--master-addr", nodes.host]
    words += ["--master-port", str(nodes.port), "-n", str(local), *rest]
    names = ("MSCOMM_JOB_KEY_FILE", "MSCOMM_SSL_CONFIG_FILE", "MSCOMM_SSL_CLIENT_PASSWORD_FILE")
    given = {name: os.environ[name] for name in names if os.environ.get(name)}
    line = "".join(f"{name}={shlex.quote(path)} " for name, path in given.items())
    where = "on the other host" if nodes.number == 2 else f"on the other hosts, K = 1 to {nodes.number - 1}"
    return f"{where}:\n    {line}{shlex.join(words)}"


def command_line(script: str, args: tuple[str, ...], module: bool) -> list[str]:
    """Return the command that each rank runs. Raise ClickException if there is no such script or program."""
    if module or script == "pytest":
        return [sys.executable, "-m", script, *args]
    if script.endswith(".py"):
        if not Path(script).is_file():
            here = [str(path) for path in Path(script).parent.glob("*.py")]
            near = difflib.get_close_matches(script, here, 1)
            instead = f"; did you mean {near[0]}?" if near else ""
            raise click.ClickException(f"there is no script {script} (in {_folder()}){instead}")
        return [sys.executable, script, *args]
    program = shutil.which(script)
    if program is None:
        raise click.ClickException(f"{script} is neither a .py file nor a program that can be executed")
    return [program, *args]


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "this folder, which has been removed"


def _folder_elsewhere() -> str:
    """Return the folder in which the launchers on other hosts start the ranks."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise click.ClickException("this folder has been removed; --hosts starts the ranks in it") from None


def environment(size: int, log_dir: Path | None) -> dict[str, str]:
    """Return the ranks' environment, without the variables that differ between ranks."""
    env = dict(os.environ)
    cpus = usable_cpus()
    if "OMP_NUM_THREADS" not in env:
        env["OMP_NUM_THREADS"] = str(max(1, cpus // size))
        threads = env["OMP_NUM_THREADS"]
        log.notice(f"mscomm run: OMP_NUM_THREADS={threads} for each rank ({cpus} CPUs, {size} ranks)")
    for name, meant in misspelt(env).items():
        log.notice(f"mscomm run: mscomm reads no variable {name}; did you mean {meant}?")
    for name in OF_SCHEDULER:  # the scheduler is in this process
        env.pop(name, None)
    env.setdefault("PYTHONUNBUFFERED", "1")  # show each line when it is printed, and lose no line if the rank is killed
    if log_dir:
        env.setdefault("MSCOMM_RECORD", str(log_dir.absolute()))
    return env
