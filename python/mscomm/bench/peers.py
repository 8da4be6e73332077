"""The peers that mscomm is compared with. torch.distributed's gloo runs in the ranks' own processes. MPIs run in
separate processes.

Each peer has two functions, `check` and `start`. `check` runs before anything is measured, and says what to install if
the peer is missing. Some peers appear twice, with their defaults and with a different setting. Two rows of PEERS are
not real peers: `private` is mscomm itself on ordinary arrays, and `memory` uses NumPy to read and write as many bytes
as the collective must read and write, without communication.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import mscomm
from mscomm.bench.contenders import Cell, Contender, Local, ourselves
from mscomm.bench.table import OPS, Buffers, Case, ring
from mscomm.errors import on_failure

START_S = 120.0
ROUND_S = 1800.0
_LAST_LINES = 12


class Missing(Exception):
    """Raised if a peer is not installed. The message says what to do."""


class Unfit(Exception):
    """Raised if a peer cannot do what is asked. The message says what the peer cannot do."""


def lacks(peer: str, collective: str) -> bool:
    """Return whether the peer lacks the collective. gloo has no scans. MPI's exscan gives rank 0 no defined result."""
    if peer in GLOO_INTERFACES:
        return collective in ("scan", "exscan")
    return collective == "exscan" and peer.removesuffix(SINGLE) in FLAVOURS


class Peer(NamedTuple):
    """A row of PEERS. `check` raises Missing if the peer is not installed. All ranks call `start` after init; `start`
    raises Unfit on at least one rank if the peer cannot do what is asked.
    """

    check: Callable[[Path | None], object]
    start: Callable[[Case, Path | None], Contender]


# -- gloo --------------------------------------------------------------------------------------------------------------


# The name of each gloo peer -> how many times GLOO_SOCKET_IFNAME names the interface. Each mention adds a set of
# connections. Successive calls use the sets in turn, so a blocking call uses only one set, however many there are.
GLOO_INTERFACES = {"torch-gloo": 1, "torch-gloo-4": 4}


def _check_gloo(prefix: Path | None) -> None:
    if find_spec("torch") is None:
        raise Missing("torch-gloo: torch is not in this environment. Run: pip install torch")


def _start_gloo(name: str, case: Case, prefix: Path | None) -> Contender:
    import torch
    import torch.distributed as dist

    from mscomm.arrays.torch import over

    ops = {op: getattr(dist.ReduceOp, "PRODUCT" if op == "prod" else op.upper()) for op in OPS if op != "avg"}
    if lacks(name, case.row.name):
        raise Unfit(f"torch-gloo has no {case.row.name}")
    if case.row.reduces and case.op not in ops:
        raise Unfit(f"torch-gloo has no {case.op}")
    warnings.simplefilter("ignore", FutureWarning)  # torch warns about functions that it renames
    torch.set_num_threads(1)
    given = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    interfaces = ",".join([given] * GLOO_INTERFACES[name])
    os.environ["GLOO_SOCKET_IFNAME"] = interfaces
    limit = timedelta(seconds=ROUND_S)
    if not dist.is_initialized():  # a second torch-gloo peer only creates another group in the same torch job
        folder = tempfile.mkdtemp(prefix="mscomm-bench-") if case.rank == 0 else ""
        if case.rank == 0:
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
        store = f"file://{mscomm.broadcast_object(folder)}/store"
        dist.init_process_group("gloo", init_method=store, rank=case.rank, world_size=case.ranks, timeout=limit)
    group = dist.new_group(timeout=limit, backend="gloo")
    os.environ["GLOO_SOCKET_IFNAME"] = given

    def bind(case: Case, buffers: Buffers) -> Callable[[], object]:
        x = over(buffers.x)
        out = x if buffers.out is None or buffers.in_place else over(buffers.out)
        row, root, n = case.row, case.root, case.ranks
        parts = list((out if row.out_in_parts else x).chunk(n)) if row.rooted and case.rank == root else None
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(x, ops[case.op], group),
            "all_gather": lambda: dist.all_gather_into_tensor(out, x, group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(out, x, ops[case.op], group),
            "broadcast": lambda: dist.broadcast(x, root, group),
            "reduce": lambda: dist.reduce(x, root, ops[case.op], group),
            "gather": lambda: dist.gather(x, parts, root, group),
            "scatter": lambda: dist.scatter(out, parts, root, group),
            "all_to_all": lambda: dist.all_to_all_single(out, x, group=group),
            "send_recv": lambda: ring(
                lambda to: dist.send(x, to, group), lambda source: dist.recv(out, source, group), case.rank, case.ranks
            ),
            "barrier": lambda: dist.barrier(group),
        }
        return calls[row.name]

    about = f"torch {torch.__version__}, private arrays, 1 thread, GLOO_SOCKET_IFNAME={interfaces}"
    return Local(name, about, case, np.empty, bind, _end_gloo)


def _end_gloo() -> None:
    import torch.distributed as dist

    if dist.is_initialized():  # the first torch-gloo peer that is closed ends the torch job of all torch-gloo peers
        dist.destroy_process_group()


# -- NumPy, which only reads and writes memory -------------------------------------------------------------------------


# How many parts a rank must read, and how many it must write, if n ranks share the work evenly. A part is 1/n of the
# message. Each x is read once, and each out is written once. all_reduce reads and writes the same array.
_MOVES: dict[str, Callable[[int], tuple[int, int]]] = {
    "all_reduce": lambda n: (n, n),
    "reduce": lambda n: (n, 1),
    "reduce_scatter": lambda n: (n, 1),
    "all_gather": lambda n: (1, n),
    "broadcast": lambda n: (1, n - 1),
    "gather": lambda n: (1, 1),
    "scatter": lambda n: (1, 1),
    "all_to_all": lambda n: (n, n),
    "scan": lambda n: (n, n),
    "exscan": lambda n: (n, n),
    "send_recv": lambda n: (n, n),
    "barrier": lambda n: (0, 0),
}
_BLOCK = 256 << 10  # bytes; a block stays in a core's cache while several passes go over it


def _start_memory(case: Case) -> Contender:
    """Return a contender that reads and writes as many bytes as the collective must, in each rank's own memory.

    Its time is for comparison, and is not a lower bound: a collective can be faster if its stores bypass the cache.
    Ranks do not wait for each other. So if ranks share CPUs, the time of a short call may leave out the time for which
    the other ranks use the CPU.
    """
    reads, writes = _MOVES[case.row.name](case.ranks)
    if case.row.name == "all_reduce":
        about = "adds 1 to an array of the message's size"
    else:
        about = f"reads {reads} and writes {writes} of {case.ranks} parts of the message"
    return Local("memory", f"no collective: in each rank NumPy {about}", case, np.empty, _memory_call, has_result=False)


def _memory_call(case: Case, buffers: Buffers) -> Callable[[], object]:
    elements = case.size(buffers.count) // case.dtype.itemsize
    if case.row.name == "all_reduce":
        y = mscomm.zeros(elements, case.dtype)
        one = np.ones(1, case.dtype)[0]
        return lambda: np.add(y, one, out=y)
    part = -(-elements // case.ranks)
    source, target = (mscomm.zeros((parts, part), case.dtype) for parts in _MOVES[case.row.name](case.ranks))
    step = _BLOCK // case.dtype.itemsize

    def call() -> None:
        for begin in range(0, part, step):
            block = slice(begin, begin + step)
            if case.row.reduces:
                np.add.reduce(source[:, block], axis=0, dtype=case.dtype, out=target[0, block])
            else:
                np.copyto(target[:, block], source[:, block])

    return call


# -- MPI ---------------------------------------------------------------------------------------------------------------


class Flavour(NamedTuple):
    """One kind of MPI: how to recognise its mpirun and its library, and what to install."""

    name: str
    words: str  # a regular expression that matches the version text of this MPI's mpirun and library
    package: str
    flags: list[str]  # the options of mpirun


def _openmpi_flags() -> list[str]:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [*root, "--oversubscribe", "--bind-to", "none"]


SINGLE = "-single"  # suffix of peers whose mpi4py requests MPI_THREAD_SINGLE, not MPI_THREAD_MULTIPLE

FLAVOURS = {
    "openmpi": Flavour("Open MPI", r"Open MPI|PRRTE|OpenRTE", "openmpi", _openmpi_flags()),
    "mpich": Flavour("MPICH", r"MPICH|HYDRA", "mpich", []),
}


class Installed(NamedTuple):
    """An installed MPI: its mpirun, and a Python with mpi4py that runs its ranks."""

    mpirun: Path
    python: Path


def find_mpi(peer: str, prefix: Path | None) -> Installed:
    """Find the MPI of `peer`: in the folder `prefix` if it is given, otherwise next to this Python or on PATH.

    If the MPI is not found, raise Missing, which says what to install.
    """
    peer = peer.removesuffix(SINGLE)
    flavour = FLAVOURS[peer]
    on_path = shutil.which("mpirun")
    places = [prefix] if prefix else [Path(sys.prefix), *([Path(on_path).parent.parent] if on_path else [])]
    for place in places:
        mpirun = place / "bin" / "mpirun"
        if not os.access(mpirun, os.X_OK):
            continue
        said = subprocess.run([mpirun, "--version"], capture_output=True, text=True, errors="replace", timeout=30)
        if not re.search(flavour.words, said.stdout + said.stderr):
            continue
        python = place / "bin" / "python"
        if not python.exists():
            python = Path(sys.executable)
        test = subprocess.run(
            [python, "-c", "import mpi4py, numpy"], capture_output=True, text=True, errors="replace", timeout=60
        )
        if test.returncode:
            last = test.stderr.strip().splitlines()[-1:]
            raise Missing(f"{peer}: {python}: {' '.join(last)}. Run: {python} -m pip install mpi4py numpy")
        return Installed(mpirun, python)
    if prefix:
        raise Missing(f"{peer}: {prefix}/bin has no mpirun of {flavour.name}")
    advice = f"pip install {flavour.package} mpi4py"
    if os.access(Path(sys.prefix) / "bin" / "mpirun", os.X_OK):  # another MPI has its mpirun at this path
        advice = (
            f"python -m venv {peer}; {peer}/bin/pip install {flavour.package} mpi4py numpy;"
            f" and give --{peer}-prefix {peer}"
        )
    raise Missing(f"{peer}: there is no mpirun of {flavour.name} in {sys.prefix}/bin or on PATH. Run: {advice}")


class Mpi:
    """An MPI job with one process for each rank, under its own mpirun.

    Rank 0 of the mscomm job controls the MPI job through a Unix socket to each MPI rank. An MPI rank reads a command,
    executes it, answers, and sleeps until the next command. Until all MPI ranks have answered, the other mscomm ranks
    sleep in a barrier.
    """

    def __init__(self, peer: str, case: Case, prefix: Path | None) -> None:
        self.name, self.about = peer, ""
        self._case = case
        # rank r of the MPI job will use the CPUs of rank r of the mscomm job
        self._masks = mscomm.all_gather_object(sorted(os.sched_getaffinity(0)))
        self._process: subprocess.Popen[bytes] | None = None
        self._links: list[_Link] = []
        self._cells = 0
        self._files = contextlib.ExitStack()
        if case.rank == 0:
            with on_failure(self._stop):
                self._start(find_mpi(peer, prefix), FLAVOURS[peer.removesuffix(SINGLE)])

    def _start(self, installed: Installed, flavour: Flavour) -> None:
        folder = self._files.enter_context(tempfile.TemporaryDirectory(prefix="mscomm-bench-"))
        self._log = Path(folder, "log")
        listener = self._files.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(f"{folder}/socket")
        listener.listen(self._case.ranks)
        listener.settimeout(0.2)
        script = Path(__file__).with_name("mpi_rank.py")
        command = [
            *(str(installed.mpirun), *flavour.flags, "-n", str(self._case.ranks)),
            *(str(installed.python), str(script), f"{folder}/socket", *(["single"] if SINGLE in self.name else [])),
        ]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment_for_mpirun(os.environ),
                start_new_session=True,
            )
        came: dict[int, _Link] = {}
        until = time.monotonic() + START_S
        while len(came) < self._case.ranks:
            if self._process.poll() is not None or time.monotonic() > until:
                raise self._failed(f"only {len(came)} of {self._case.ranks} ranks started")
            with contextlib.suppress(TimeoutError):
                sock, _ = listener.accept()
                link = _Link(sock)
                link.send(None)
                came[link.receive()["rank"]] = link
        self._links = [came[rank] for rank in range(self._case.ranks)]
        said = self._all([{"do": "settle", "cpus": mask} for mask in self._masks])
        library = re.sub(r"\s+", " ", said[0]["library"].replace("Version:", "").partition(",")[0])
        if not re.search(flavour.words, library):
            raise Unfit(f"{self.name}: mpi4py of {installed.python} loads {library}, not {flavour.name}")
        self.about = f"{library}, mpi4py {said[0]['mpi4py']}, private arrays, {said[0]['thread']}"
        self._all(_words_of(self._case))

    def _all(self, commands: list[dict[str, Any]] | dict[str, Any]) -> list[dict[str, Any]]:
        """Send each MPI rank its command, and return all answers in rank order. A single dict is sent to every rank."""
        if isinstance(commands, dict):
            commands = [commands] * len(self._links)
        try:
            for link, command in zip(self._links, commands, strict=True):
                link.send(command)
            answers = [link.receive() for link in self._links]
        except (OSError, ValueError) as error:
            raise self._failed(str(error)) from error
        for answer in answers:
            if "error" in answer:
                raise Unfit(f"{self.name}: {answer['error']}")
        return answers

    def _failed(self, what: str) -> RuntimeError:
        assert self._process is not None
        code = self._process.poll()
        state = "still runs" if code is None else f"ended with {code}"
        last = "\n".join(self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
        return RuntimeError(f"{self.name}: {what}; mpirun {state}. Its last lines:\n{last}")

    def ask(self, **command: Any) -> list[dict[str, Any]]:
        """On rank 0, send the command to all MPI ranks and return their answers. On the other ranks, return [].

        While the MPI ranks work, the other mscomm ranks wait without using a CPU.
        """
        try:
            return self._all(command) if self._case.rank == 0 else []
        finally:
            mscomm.barrier()

    def plan(self, case: Case) -> None:
        """Set the case for all cells that are created from now on."""
        self.ask(**_words_of(case))

    def cell(self, count: int, in_place: bool) -> Cell:
        self._cells += 1
        self.ask(do="cell", number=self._cells, count=count, in_place=in_place)
        return _MpiCell(self, self._cells)

    def close(self) -> None:
        self.ask(do="quit")
        self._stop()

    def _stop(self) -> None:
        for link in self._links:
            link.close()
        if self._process is not None:
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._files.close()


class _MpiCell:
    def __init__(self, mpi: Mpi, number: int) -> None:
        self._mpi, self._number = mpi, number

    def measure(self, warmup: int, iterations: int, op: str = "avg") -> list[float]:
        answers = self._mpi.ask(do="measure", number=self._number, warmup=warmup, iterations=iterations, op=op)
        return answers[0]["us"] if answers else []

    def wrong(self) -> int:
        return sum(answer["wrong"] for answer in self._mpi.ask(do="wrong", number=self._number))

    def close(self) -> None:
        self._mpi.ask(do="close", number=self._number)


class _Link:
    """A connection to one MPI rank, with one line of JSON per command and per answer."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(ROUND_S)
        self._sock = sock
        self._file = sock.makefile("rb")

    def send(self, command: dict[str, Any] | None) -> None:
        self._sock.sendall(json.dumps(command).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        line = self._file.readline()
        if not line:
            raise OSError("a rank has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._file.close()
        self._sock.close()


def _words_of(case: Case) -> dict[str, Any]:
    return {"do": "plan", "row": case.row.name, "dtype": case.dtype.name, "op": case.op, "root": case.root}


def environment_for_mpirun(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` without the variables of the launcher that started this process.

    OMPI_MCA_* variables are the user's settings, so they are kept unless an mpirun started this process. In that case,
    they may come from that mpirun, so they are left out, too.
    """
    launcher = r"(MS|MSCOMM|OMPI|PMIX|PMI|PRTE|HYDRA|HYDI|MPI|MPIR)_"
    inside_mpirun = "OMPI_COMM_WORLD_RANK" in env or "PMIX_RANK" in env
    return {
        name: value
        for name, value in env.items()
        if not re.match(launcher, name) or (name.startswith("OMPI_MCA_") and not inside_mpirun)
    }


PEERS = {
    **{name: Peer(_check_gloo, functools.partial(_start_gloo, name)) for name in GLOO_INTERFACES},
    **{
        name: Peer(functools.partial(find_mpi, name), functools.partial(Mpi, name))
        for flavour in FLAVOURS
        for name in (flavour, flavour + SINGLE)
    },
    "private": Peer(lambda prefix: None, lambda case, prefix: ourselves(case, False, "private")),
    "memory": Peer(lambda prefix: None, lambda case, prefix: _start_memory(case)),
}
