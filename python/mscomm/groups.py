"""The job that this process takes part in: joining it, its group of all ranks, and leaving it."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import numpy as np

from mscomm import bootstrap
from mscomm.cluster import assemble, links
from mscomm.cluster.deadline import Deadline, join_timeout_s
from mscomm.cluster.frames import FROM_HUB_BYTES, Frames
from mscomm.cluster.hello import CONTROL, UNKNOWN_RANK, Identity, package_version
from mscomm.cluster.member import Member
from mscomm.context import plain_links_permitted
from mscomm.errors import BackendUnavailable, Error, make

CPU_NAMES = ("gloo", "mccl", "cpu")
WORLD_NAMES = ("hccl_world_group", "nccl_world_group", "mccl_world_group")
_CALL_S = 1800.0
_LINES_KEPT = 1024
_PACKAGE = os.path.dirname(__file__) + os.sep


class Group:
    """Ranks that make collective calls together. Attributes: name, rank, size, ranks (their ranks in the world)."""

    def __init__(
        self,
        name: str,
        ranks: list[int],
        rank: int,
        assembled: assemble.Assembled,
        member: Member | None,
        timeout_s: float,
    ):
        self.name = name
        self.rank = rank
        self.size = len(ranks)
        self.ranks = ranks
        self.core = assembled.core
        self.heap = assembled.heap
        self.hosts = assembled.hosts
        self.member = member
        self.timeout_s = timeout_s
        self.raised = False  # the user has seen the failure
        self._cause: Error | None = None  # what every call raises from now on
        self.record_dir = os.environ.get("MSCOMM_RECORD")
        self._lines: dict[int, str] | None = {} if self.record_dir else None  # by call number

    def __repr__(self) -> str:
        return f"<mscomm.Group {self.name}: rank {self.rank} of {self.size}>"

    def run(
        self,
        what: int,
        dtype: int,
        op: int,
        root: int,
        x: np.ndarray[Any, Any] | None,
        out: np.ndarray[Any, Any] | None,
        timeout: Any,
        fused: int = 0,
    ) -> None:
        """One collective call on checked arguments; every failure becomes the job's first cause here."""
        seconds = self.timeout_s if timeout is None else seconds_of(timeout)
        if self._lines is not None:
            number = self.core.where()[0] + 1
            self._lines[number] = _caller()
            self._lines.pop(number - _LINES_KEPT, None)
        try:
            self.core.run(what, dtype, op, root, x, out, seconds, fused)
        except Error as symptom:
            self._fail(symptom)
        except BaseException as error:
            # Not ours: a signal handler's exception. The group is broken, the others learn why, the exception passes.
            failure = self.core.failure()
            if failure is not None and self.member is not None:
                kind, text, ranks, _, _ = failure
                self.member.report("Aborted", f"{text}: {type(error).__name__}" if kind == "Aborted" else text, ranks)
                self.raised = True
                self._write_record(text)
            raise

    def _fail(self, symptom: Error) -> NoReturn:
        """Raise the job's first cause in place of what this rank saw of it; the same one each time."""
        cause = self.settle(symptom)
        self.raised = True
        if str(cause) != str(symptom):
            raise cause from symptom
        raise cause from None

    def settle(self, symptom: Error) -> Error:
        """The job's first cause, as a new exception; the others learn of the symptom."""
        if self._cause is None:
            self._cause = self._first_cause(symptom)
            self._write_record(str(self._cause))
        return make(type(self._cause).__name__, str(self._cause), self._cause.ranks, self._cause.waiting_for)

    def _first_cause(self, symptom: Error) -> Error:
        failure = self.core.failure()
        if (
            failure is not None and failure[4]
        ):  # the hub's verdict has come, perhaps while the symptom was on its way here
            kind, text, ranks, waiting_for, _ = failure
            return make(kind, text, ranks, waiting_for)
        return self.member.settle(symptom, self.core.where()[0]) if self.member is not None else symptom

    def _write_record(self, cause: str) -> None:
        """The last calls with their Python lines, to MSCOMM_RECORD/rank_<rank>.json."""
        if self.record_dir is None or self._lines is None:
            return
        calls = self.core.calls()
        for call in calls:
            call["line"] = self._lines.get(call["number"], "")
        path = Path(self.record_dir, f"rank_{self.rank}.json")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            partial.write_text(
                json.dumps({"rank": self.rank, "size": self.size, "cause": cause, "calls": calls}, indent=1)
            )
            partial.replace(path)
        except OSError as error:
            print(f"mscomm: rank {self.rank}: cannot write the record of the last calls: {error}", file=sys.stderr)


class _World:
    """What init() made, until release()."""

    def __init__(self, group: Group, backend: str, launcher: str, local_rank: int, member: Member | None, hub: Any):
        self.group = group
        self.backend = backend
        self.launcher = launcher
        self.local_rank = local_rank
        self.member = member
        self.hub = hub
        self.pid = os.getpid()


_world: _World | None = None
_exit_handler_set = False


def init(
    backend_name: str | None = None,
    *,
    init_method: Any = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: float | timedelta | None = None,
    device: int | None = None,
) -> None:
    """Join the job that the environment describes; return when all its ranks have.

    backend_name: "gloo", "mccl" or "cpu" for the CPU core; None decides for all ranks (in this release: cpu). "nccl"
    and "hccl" are not in this release: BackendUnavailable. timeout: the default of the collective calls, in seconds
    (MSCOMM_TIMEOUT, else 1800). Joining itself takes at most MS_TOPO_TIMEOUT seconds (600).

    Launchers: `mscomm run`, MS_ROLE and MS_SCHED_* (a scheduler and workers), torchrun, mpirun, Slurm, Kubernetes, a
    rank table; bootstrap.LAUNCHERS has them in the order in which they count. Without one: a job of one. In the
    process whose MS_ROLE is MS_SCHED, init() serves the job and ends the process with it.

    By hand: init_method="tcp://host:port" with rank and world_size; rank 0 listens there. Or init_method=comm, an
    mpi4py communicator.

    Calling it again with the same backend does nothing; with another it raises RuntimeError.

    >>> import mscomm
    >>> mscomm.init()
    >>> mscomm.get_rank(), mscomm.get_group_size()
    (0, 1)
    """
    global _world
    backend = _backend(backend_name)
    if _world is not None and _world.pid == os.getpid():
        if backend != _world.backend:
            raise RuntimeError(
                f'init("{backend_name}"): this process has joined with backend {_world.backend}; call release() first'
            )
        return
    del device  # an index of an accelerator; the CPU has none
    timeout_s = (
        seconds_of(os.environ.get("MSCOMM_TIMEOUT") or _CALL_S, "MSCOMM_TIMEOUT")
        if timeout is None
        else seconds_of(timeout)
    )
    algo = os.environ.get("MSCOMM_ALGO", "")
    forced = assemble.forced_algorithms(algo)
    deadline = Deadline(join_timeout_s(os.environ))

    launcher = bootstrap.find(os.environ, init_method, rank, world_size)
    if launcher is None:
        group = Group("world", [0], 0, assemble.alone("world"), None, timeout_s)
        _world = _World(group, backend, "none", 0, None, None)
    else:
        _world = _join(
            launcher.accept(os.environ, deadline, plain_links_permitted()), backend, algo, forced, timeout_s, deadline
        )
    _watch_exit()


def _join(
    invitation: bootstrap.Invitation, backend: str, algo: str, forced: list[str], timeout_s: float, deadline: Deadline
) -> _World:
    """From the invitation to a group that every rank is ready to use."""
    sock, rank = invitation.sock, invitation.rank
    with contextlib.ExitStack() as closing:
        failing = closing.enter_context(contextlib.ExitStack())
        failing.callback(sock.close)
        if not invitation.greeted:
            stranger = Identity(version=package_version(), rank=UNKNOWN_RANK if rank is None else rank)
            links.greet(sock, invitation.key, CONTROL, stranger, deadline)
        listening = assemble.listeners(sock)
        for listener in listening:
            closing.callback(listener.close)
        member = Member(
            Frames(sock, FROM_HUB_BYTES),
            key=invitation.key,
            rank=rank,
            node_id=invitation.node_id,
            hub=invitation.where,
        )
        failing.callback(member.close)
        welcome = member.join(assemble.facts(backend, invitation.size, algo, listening), deadline)
        rank = welcome.rank
        try:
            assembled = assemble.assemble("world", member, welcome, listening, forced, deadline)
        except Error as symptom:
            raise member.settle(symptom, 0) from symptom
        except BaseException as error:
            # The others must not wait for a rank that could not set itself up.
            member.report("Aborted", f"rank {rank}: init: {type(error).__name__}: {error}", [rank])
            raise
        member.attach(assembled.core)
        member.ready(deadline)
        failing.pop_all()
    group = Group("world", list(range(welcome.size)), rank, assembled, member, timeout_s)
    local = [r for r, host in enumerate(assembled.hosts) if host == assembled.hosts[rank]]
    local_rank = invitation.local_rank
    if local_rank is None or local_rank >= len(
        local
    ):  # unknown, or MSCOMM_HOST_ID divides what the launcher calls one host
        local_rank = local.index(rank)
    return _World(group, backend, invitation.launcher, local_rank, member, invitation.hub)


def _backend(name: str | None) -> str:
    if name is None or name in CPU_NAMES:
        return "cpu"
    if name in ("nccl", "hccl"):
        raise BackendUnavailable(
            f'init("{name}"): the {name} backend is not in this release of mscomm; use init("gloo"), the CPU core'
        )
    raise ValueError(f"init: backend {name!r} is none of {', '.join(CPU_NAMES)}, nccl, hccl")


def release() -> None:
    """Leave the job. Raises the group's failure if it came after this rank's last call and nobody has seen it yet.

    A rank that has left is no failure until another one waits for it. An exit handler calls this too.
    """
    global _world
    world, _world = _world, None
    if world is None or world.pid != os.getpid():
        return
    group = world.group
    unseen: Error | None = None
    try:
        group.core.last_look()
    except Error as symptom:
        # A mismatch that no call of this rank has met: the others learn of it before this rank says bye.
        unseen = group.settle(symptom)
    # First the word, then the end of the links: who still waits for this rank then knows that it left.
    if world.member is not None:
        world.member.leave(group.core.where()[0])
    group.core.close()
    failure = group.core.failure()
    if unseen is None and failure is not None:
        kind, text, ranks, waiting_for, _ = failure
        unseen = make(kind, text, ranks, waiting_for)
    if unseen is not None and not group.raised:
        raise unseen


def is_initialized() -> bool:
    """Whether init() has joined a job that this process has not left."""
    return _world is not None and _world.pid == os.getpid()


def abort(reason: str) -> None:
    """End the job's communication: every rank's current and later calls raise Aborted with this rank and the reason."""
    group = resolve(None)
    text = _printable(f"rank {group.rank} called abort: {reason}")
    group.raised = True
    if group.member is not None:
        group.member.report("Aborted", text, [group.rank])
    group.core.abort("Aborted", [group.rank], [], text)


def get_rank(group: Group | str | None = None) -> int:
    """This process's rank in the group, from 0."""
    return resolve(group).rank


def get_group_size(group: Group | str | None = None) -> int:
    """How many ranks the group has."""
    return resolve(group).size


get_world_size = get_group_size


def get_local_rank(group: Group | str | None = None) -> int:
    """This process's place among the ranks of its host, as the launcher counts; it is not always in rank order."""
    resolve(group)
    assert _world is not None
    return _world.local_rank


def get_local_rank_size(group: Group | str | None = None) -> int:
    """How many ranks of the group are on this host."""
    hosts = resolve(group).hosts
    return hosts.count(hosts[resolve(group).rank])


def get_backend(group: Group | str | None = None) -> str:
    """The backend by which the group moves data: "cpu"."""
    resolve(group)
    assert _world is not None
    return _world.backend


def get_launcher() -> str:
    """What started this job: "mscomm run", "MS_* cluster", "PMIx", "PMI", or "none" for a job of one."""
    resolve(None)
    assert _world is not None
    return _world.launcher


def resolve(group: Group | str | None) -> Group:
    """The Group that the argument names. RuntimeError before init(), and in a forked child."""
    if _world is None:
        raise RuntimeError("mscomm: no job joined; call mscomm.init() first")
    if _world.pid != os.getpid():
        raise RuntimeError(
            f"mscomm: this process was forked from a rank (pid {_world.pid}) and is no rank itself;"
            " call mscomm in the parent"
        )
    if group is None or group is _world.group:
        return _world.group
    if isinstance(group, str):
        if group == "world" or group in WORLD_NAMES:
            return _world.group
        raise ValueError(f"no group is named {group!r}; there is {_world.group.name}")
    raise TypeError(f"group is a {type(group).__name__}; expected None, a Group or the name of one")


def shared_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """An uninitialised array, in memory that the host's ranks share where there is such memory."""
    heap = _world.group.heap if _world is not None and _world.pid == os.getpid() else None
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    memory = heap.allocate(size) if heap is not None else None
    return np.empty(shape, dtype) if memory is None else memory[:size].view(dtype).reshape(shape)


def seconds_of(timeout: Any, name: str = "timeout") -> float:
    """A time-out in seconds: a number or a timedelta, more than 0; inf for none."""
    try:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: {timeout!r} is neither a number of seconds nor a timedelta") from None
    if not seconds > 0:
        raise ValueError(f"{name}: {timeout!r} is not more than 0 seconds (inf means none)")
    return seconds


def _caller() -> str:
    """File and line of the first frame outside mscomm."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _printable(text: str) -> str:
    """text as the wire can carry it: what is no UTF-8 (file names with stray bytes) in escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _watch_exit() -> None:
    global _exit_handler_set
    if _exit_handler_set:
        return
    _exit_handler_set = True
    atexit.register(_release_at_exit)
    sys.excepthook = _TellingHook(sys.excepthook)


def _release_at_exit() -> None:
    try:
        release()
    except Error as error:
        print(f"mscomm: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


class _TellingHook:
    """An excepthook that tells the other ranks why this one ends, then goes on to the hook before it."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        world = _world
        if world is not None and world.pid == os.getpid() and world.member is not None and not world.group.raised:
            frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(_PACKAGE)]
            where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
            words = "".join(traceback.format_exception_only(kind, error)).strip()
            rank = world.group.rank
            text = _printable(f"rank {rank}: {words}{where}")
            world.group.raised = True
            world.member.report("Aborted", text, [rank])
            world.group.core.abort("Aborted", [rank], [], text)
        self._before(kind, error, trace)
