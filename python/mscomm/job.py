"""Joins, leaves and rejoins jobs, and returns the ranks of their groups.

join() returns a Job, and a process may join several jobs. init() joins the default job, on which the other functions of
this module work unless they are given a group of another job.
"""

from __future__ import annotations

import contextlib
import operator
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np

from mscomm import _core, bootstrap, environment, exits, log, notices
from mscomm.accelerators import CPU, NAMES
from mscomm.arguments import checked_rank
from mscomm.bootstrap import again, ms_cluster
from mscomm.bootstrap.invitation import Invitation, Launcher
from mscomm.cluster import assemble, links, plan, prices
from mscomm.cluster.deadline import Deadline, join_timeout_s, seconds_of
from mscomm.cluster.frames import Frames
from mscomm.cluster.hello import UNKNOWN_RANK, package_version
from mscomm.cluster.member import Member, Welcome
from mscomm.cluster.security import KeyFile
from mscomm.context import given, protection
from mscomm.errors import Aborted, Error, PeerLost
from mscomm.group import Group, NonMember, printable

CPU_NAMES = ("gloo", "mccl", CPU)
AUTO = "auto"
# the backend for each device_target of set_context()
_BACKEND_OF = {None: AUTO, "CPU": CPU, "GPU": "nccl", "Ascend": "hccl"}
WORLD_NAMES = ("hccl_world_group", "nccl_world_group", "mccl_world_group")


class Limits(NamedTuple):
    """Time limits in seconds: of each call, and of joining and founding a group."""

    call_s: float
    join_s: float


class Making(NamedTuple):
    """A create_group or split call that this rank has made. rejoin() repeats it in each new epoch."""

    group: Group  # the result of the call
    make: Callable[[Deadline], object]


class Job:
    """A job that join() has joined. The same object is used until release(), even after rejoin().

    Attributes: name; world (the Group of all ranks, which functions of mscomm take as `group`); rank and size;
    local_rank; launcher ("mscomm run", "torchrun", ...); backend ("cpu", "nccl" or "hccl"); restarts (whether lost
    ranks are restarted, so that the others can rejoin()).

    >>> with mscomm.join(init_method="tcp://10.0.0.1:4000", rank=rank, world_size=2) as job:
    ...     total = mscomm.all_reduce(x, group=job.world)
    """

    def __init__(self, epoch: assemble.Epoch, asked: assemble.Asked, limits: Limits, name: str = "") -> None:
        self.name = name
        self.epoch = epoch
        self.asked = asked
        self.timeout_s, self.join_timeout_s = limits
        self.launcher = "none"
        self.local_rank = 0
        self.key_file: KeyFile | None = None  # the file through which this rank gave the job's key to the others
        self.pid = os.getpid()
        # True in a forked child of the process that joined. Calls check this flag because getpid() is slow.
        self.forked = False
        self.world = Group("world", list(range(epoch.size)), self.timeout_s)
        self.world.job_name = name
        self.groups: dict[str, Group] = {}  # by name, in the order of creation; the world comes first
        # groups, by name, for which this rank called create_group although it is not in the group
        self.others: dict[str, NonMember] = {}
        self.makings: list[Making] = []  # in the order in which rejoin() repeats them
        self.splits: dict[str, int] = {}  # how often each group was split in this epoch
        # how often a group with a given name and given ranks was created in this epoch
        self.creations: dict[tuple[Any, ...], int] = {}

    def __repr__(self) -> str:
        return f"<mscomm.Job {self.launcher}: rank {self.rank} of {self.size}>"

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        left_well = error is None or isinstance(error, GeneratorExit) or _is_success(error)
        if not left_well and self.is_ours:
            assert error is not None
            self.tell_of(error, f"{type(error).__name__}: {error}")  # the others must not wait for this rank
        try:
            self.release()
        except Error:
            if left_well:
                raise

    @property
    def rank(self) -> int:
        return self.epoch.rank

    @property
    def size(self) -> int:
        return self.epoch.size

    @property
    def member(self) -> Member | None:
        return self.epoch.member

    @property
    def restarts(self) -> bool:
        """Whether lost ranks of this job are restarted, so that the other ranks can rejoin()."""
        return self.epoch.restarts

    @property
    def backend(self) -> str:
        return self.epoch.accelerator.name if self.epoch.accelerator else CPU

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that joined, and not a forked child."""
        return self.pid == os.getpid()

    def deadline(self) -> Deadline:
        """Return the deadline of a group that is set up now."""
        return Deadline(self.join_timeout_s)

    def found(self, group: Group, deadline: Deadline, forced: list[str] | None = None) -> None:
        """Set up the group for use. All its ranks must call this.

        forced: the algorithms that the group must use. None means the algorithms that MSCOMM_ALGO forces.
        """
        key = (group.name, *group.ranks)
        turn = self.creations.get(key, 0) + 1
        id = plan.group_id(self.epoch.number, group.name, group.ranks, turn)

        before = self.groups.get(group.name)
        met = begun = False
        founded = None

        def all_came() -> None:
            nonlocal met
            met, self.creations[key] = True, turn

        try:
            # If a signal handler has interrupted an earlier attempt, this rank may not know that all ranks had come.
            while group.name != "world" and self.member and self.member.hear_out(id, group.name, deadline):
                self._not_set_up(id, group.name, "an earlier attempt was interrupted")
                self.creations[key] = turn
                turn += 1
                id = plan.group_id(self.epoch.number, group.name, group.ranks, turn)
            begun = True
            founded = self.epoch.found(id, group.name, group.ranks, deadline, all_came, forced or self.epoch.forced)
            group.enter(self.epoch, id, founded)
            group.job, group.job_name = self, self.name
            self.groups[group.name] = group
            self.others.pop(group.name, None)
        except Error as symptom:
            # If a rank of the group did not come, found() fails on every rank, so no report is needed.
            if self.member is None or not met:
                raise
            cause = self.member.settle(id, symptom, 0)
            if cause is symptom:
                raise
            raise cause from symptom
        except BaseException as error:
            if before is not group and self.groups.get(group.name) is group:
                del self.groups[group.name]
            if self.member and not begun:
                self.member.refuse(id, assemble.creation(group.name), group.ranks, error)
            elif self.member and self.member.has_met(id):
                self._not_set_up(id, group.name, f"{type(error).__name__}: {error}")
                self.creations[key] = turn
                if founded is None:
                    self.member.detach(id)
            if founded is not None:
                self.epoch.drop(id, founded)
                group.control = None  # drop() has released it
            raise

    def _not_set_up(self, id: str, name: str, why: str) -> None:
        """All ranks of this group have met, but this rank does not set up its part. Tell the other ranks."""
        assert self.member
        self.member.report(Aborted(f"rank {self.rank}: group {name}: {why}", [self.rank]), id)

    def refuse(self, name: str, ranks: list[int], error: BaseException) -> None:
        """Tell the other ranks of a group that this rank does not set up its part."""
        turn = self.creations.get((name, *ranks), 0) + 1
        id = plan.group_id(self.epoch.number, name, ranks, turn)
        if self.member:
            self.member.refuse(id, assemble.creation(name), ranks, error)

    def named(self, group: Group | str | None) -> Group:
        """Return the group with this name; None stands for the world. Raise RuntimeError if this rank is not in it."""
        if not isinstance(group, (str, type(None))):
            raise TypeError(f"group is a {type(group).__name__}; expected None, a Group or the name of one")
        if group is None or group in WORLD_NAMES:
            return self.world
        if group in self.groups:
            return self.groups[group]
        if group in self.others:
            raise self.others[group].refusal()
        raise ValueError(f"no group is named {group!r}; the groups are {', '.join(self.groups)}")

    def release(self) -> None:
        """Leave the job. If a group has failed and no call of this rank has raised the failure yet, raise it now.

        release() waits for asynchronous calls (async_op) that are still running, but cancels each recv for which no
        message has come, and warns. Another rank fails only if it waits for this rank after this rank has left. An exit
        handler also calls release(). A second call does nothing.
        """
        global _default
        if self is _default:
            _core.set_world(None)
            _default = None
        try:
            if self.world.job is not None and self.is_ours:
                self._leave()
        finally:  # if a signal handler has interrupted _leave(), the exit handler calls it again
            if self.world.job is None and self in _joined:
                _joined.remove(self)
                if not _joined:
                    again.left()

    def _leave(self) -> None:
        groups = list(reversed(self.groups.values()))
        unseen: Error | None = None
        for group in groups:
            group.drain()
            try:
                group.core.last_look()
            except Error as symptom:
                # A peer has sent a header for a call that differs from this rank's call. Tell the other ranks about the
                # mismatch before leaving, unless a call has already raised a failure of this group.
                unseen = None if group.raised else group.settle(symptom)
        # Tell the hub before closing the links. Ranks that are waiting for this rank then learn that it has left.
        if self.member is not None:
            self.member.leave(self.world.core.where()[0])
        for group in groups:
            group.leave()
            group.job = None
            failure = group.core.failure()
            if unseen is None and failure is not None and not group.raised:
                unseen = failure.error
        # These refer to this job. Without the cycles, its heap and its sockets are freed at once.
        for other in self.others.values():
            other.job = None
        self.groups, self.others, self.makings = {}, {}, []
        if self.key_file is not None:
            self.key_file.remove()
        if unseen is not None and not self.world.raised:
            raise unseen

    def abort(self, reason: str) -> None:
        """Break all groups on all ranks: all current and later calls raise Aborted. See the function abort()."""
        job_of(self.world)
        self._abort(f"rank {self.rank} called abort: {reason}")

    def tell_of(self, error: BaseException, words: str) -> None:
        """Abort the job because of an exception that ends this rank's part in it, unless all ranks know it already."""
        if not (isinstance(error, Error) and any(group.raised for group in self.groups.values())):
            self._abort(f"rank {self.rank}: {words}")

    def _abort(self, text: str) -> None:
        for group in self.groups.values():
            group.raised = True
        cause = Aborted(printable(text), [self.rank])
        if self.member is not None:
            self.member.report(cause)
        for group in self.groups.values():
            group.core.abort(cause)

    def rejoin(self, timeout: float | timedelta | None = None) -> int:
        """Continue with all ranks in a new epoch after PeerLost. See the function rejoin(), which does the same."""
        job_of(self.world)
        return self._rejoin(self.deadline() if timeout is None else Deadline(seconds_of(timeout, "rejoin")))

    def _rejoin(self, deadline: Deadline) -> int:
        if self.member is None:
            raise RuntimeError("rejoin: this is a job of one rank")
        while True:
            # Leave the groups and retire the heap, so that no rank that is still in the old epoch can access them.
            for group in self.groups.values():
                group.leave()
            if self.epoch.heap is not None:
                self.epoch.heap.retire()
            with links.unix_listener(128) as memory:
                facts = assemble.facts(self.asked, self.size, memory, self.name)
                welcome = self.member.rejoin(facts, deadline)
                try:
                    self._begin_epoch(self.member, welcome, memory, deadline)
                    return welcome.epoch
                except PeerLost:
                    if deadline.passed:
                        raise
                    # Another rank was lost in the meantime. Try again, because that rank may be restarted as well.

    def _begin_epoch(self, member: Member, welcome: Welcome, memory: socket.socket, deadline: Deadline) -> None:
        """Set up this rank for the new epoch. Only the control link and the Group objects of the old epoch are kept."""
        with _telling(member, welcome.rank, welcome.epoch):
            self.epoch = assemble.share(member, welcome, memory, self.epoch.forced, deadline, self.asked.backend)
            self.creations.clear()
            self.splits.clear()
            returning = [self.world, *(making.group for making in self.makings)]
            for group in self.groups.values():
                if group not in returning:
                    group.job = None
            self.groups = {name: group for name, group in self.groups.items() if group in returning}
            self.found(self.world, deadline)
            if self is _default:
                _core.set_world(self.world.core)
            member.ready(deadline)
        log.info(f"epoch {welcome.epoch} begins")
        for making in self.makings:
            making.make(deadline)


_default: Job | None = None
_joined: list[Job] = []  # in the order in which this process has joined them


def init(
    backend_name: str | None = None,
    *,
    init_method: Any = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: float | timedelta | None = None,
    join_timeout: float | timedelta | None = None,
    device: int | None = None,
) -> None:
    """Join the job that the environment describes. Return when all its ranks have joined.

    backend_name: "gloo", "mccl" and "cpu" use only the CPU core. "nccl" also uses NCCL, for arrays on NVIDIA GPUs, and
    "hccl" also uses HCCL, for arrays on Ascend NPUs. None means the backend of set_context(device_target=...). If the
    program has not set a device_target, init() chooses nccl if every rank has its own GPU, else hccl if every rank has
    its own NPU, else only the CPU core. All ranks use the same backend. If a rank cannot use the backend that was
    named, all ranks raise BackendUnavailable with the reason from each such rank. If the ranks have different versions
    of the backend, they raise Mismatch.

    device: the number of this rank's GPU or NPU, by default the local rank. init() makes it the current device. Set
    CUDA_VISIBLE_DEVICES before you call init(), because init() starts the driver, which reads the variable only once.

    timeout: the default timeout of collective calls, send and recv, in seconds or as a timedelta. None means
    MSCOMM_TIMEOUT (1800 s). join_timeout: how long to wait for the other ranks, in init() and when a group is created.
    None means MS_TOPO_TIMEOUT (600 s). If not all ranks have joined by then, raise CollectiveTimeout or
    BackendUnavailable.

    init() recognises these launchers: `mscomm run`, MS_ROLE and MS_SCHED_* (a scheduler and workers), torchrun, mpirun,
    Slurm, other launchers that set RANK, WORLD_SIZE and MASTER_ADDR, a rank table, and Kubernetes. If the variables of
    several launchers are set, init() uses the launcher that is first in bootstrap.LAUNCHERS. If no launcher's variables
    are set, this process is a job of one rank. If MS_ROLE is MS_SCHED, init() runs the scheduler of the job, and the
    process exits when the job ends.

    To join without a launcher, pass init_method="tcp://host:port", rank and world_size; rank 0 listens at this address.
    Alternatively, pass an mpi4py communicator as init_method.

    Calling init() again with the same backend does nothing. With another backend, it raises RuntimeError. After
    release(), all ranks can call init() again. join() has the same arguments, and joins a job besides this one.

    >>> import mscomm
    >>> mscomm.init()
    >>> mscomm.get_rank(), mscomm.get_group_size()
    (0, 1)
    """
    global _default
    if _default is not None and _default.is_ours:
        _device(device)
        if _backend(backend_name) not in (AUTO, _default.backend):
            raise RuntimeError(
                f'init("{backend_name}"): this process has joined with backend {_default.backend}; call release() first'
            )
        if rank not in (None, _default.rank) or world_size not in (None, _default.size):
            raise RuntimeError(
                f"init: rank={rank}, world_size={world_size}: this process has joined as rank {_default.rank} of "
                f"{_default.size}; call release() first, or join() another job"
            )
        return
    _default = join(
        backend_name,
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        join_timeout=join_timeout,
        device=device,
    )
    _core.set_world(_default.world.core)


def join(
    backend_name: str | None = None,
    *,
    name: str = "",
    init_method: Any = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: float | timedelta | None = None,
    join_timeout: float | timedelta | None = None,
    device: int | None = None,
) -> Job:
    """Join a job like init(), but without making it the default job. Return the Job.

    The arguments and errors are those of init(). A process may be in several jobs at once. They have the same ranks if
    they were joined through the same launcher, and each has groups, failures and time limits of its own. To use the
    job, pass job.world, or a group that was created with `job=job`, as the `group` of a call. A process whose lost
    ranks are restarted (`mscomm run --max-restarts`, MS_ENABLE_RECOVERY) can join only one job through its launcher.

    name: the name of the job, which must be the same on all its ranks. A library that joins a job of its own passes its
    name. All ranks must join jobs of the same name in the same order, and call one join after the other. Jobs of
    different names never meet, so a rank may join them in another order than the other ranks.

    >>> with mscomm.join() as job:
    ...     mscomm.all_reduce(x, group=job.world)
    """
    algo = environment.read("MSCOMM_ALGO", os.environ)
    forced = assemble.forced_algorithms(algo)
    asked = assemble.Asked(_backend(backend_name), _device(device), algo, prices.read(os.environ))
    limits = Limits(
        environment.read("MSCOMM_TIMEOUT", os.environ) if timeout is None else seconds_of(timeout, "init"),
        join_timeout_s(os.environ) if join_timeout is None else seconds_of(join_timeout, "init", "join_timeout"),
    )
    deadline = Deadline(limits.join_s)
    exits.watch(leave_all, _tell_others)
    exits.end_with_mpi_launcher()

    began = time.monotonic()
    log.version(f"mscomm {package_version()}, Python {platform.python_version()}, NumPy {np.__version__}")
    if not isinstance(name, str):
        raise TypeError(f"join: name is a {type(name).__name__}, expected a str")
    launcher = bootstrap.find(os.environ, init_method, rank, world_size, name)
    if log.enabled(log.INFO):
        _tell_launcher(launcher)
    if launcher is None:
        _tell_rank(0)
        job = Job(assemble.alone(asked), asked, limits, name)
        job.found(job.world, deadline)
    else:
        invitation = launcher.accept(os.environ, deadline, protection())
        device = invitation.device = invitation.device if asked.device is None else asked.device
        # The launcher's local rank is not valid if MSCOMM_HOST_ID defines the hosts.
        local_rank = None if environment.read("MSCOMM_HOST_ID", os.environ) else invitation.seat.local_rank
        asked = asked._replace(device=device, local_rank=local_rank)
        job = _join(invitation, asked, forced, limits, name, deadline, launcher)
    _joined.append(job)
    again.joined(launcher)
    if len(_joined) == 1:
        notices.know_rank(job.rank)
    _tell_variables_without_effect(launcher)
    log.info(f"joined as rank {job.rank} of {job.size} in {time.monotonic() - began:.3f} s")
    return job


def _tell_rank(rank: int) -> None:
    """Show the rank in the lines of the log. If this process is in several jobs, it is the rank in the first."""
    if not _joined:
        log.set_rank(rank)


def _tell_launcher(launcher: Launcher | None) -> None:
    if launcher is None:
        log.info("launcher: none, a job of one")
        return
    if isinstance(launcher, again.Again):
        log.info(f"launcher: {launcher.NAME}, through which this process has joined a job before")
        return
    module = getattr(launcher, "__name__", "").removeprefix("mscomm.")  # "" if init()'s arguments chose the launcher
    known_by = " ".join(f"{name}={text}" for name, text in environment.read_by(module, os.environ).items())
    log.info(f"launcher: {launcher.NAME}, known by {known_by or 'what init() was given'}")


def _tell_variables_without_effect(launcher: Launcher | None) -> None:
    given = environment.given(os.environ, environment.CLUSTER)
    names = []
    if launcher is None or launcher.NAME != ms_cluster.NAME:
        names = ["MS_RECOVERY_PATH", "MS_ENABLE_RECOVERY"]
    elif given.get("MS_ENABLE_RECOVERY") != "1":
        names = ["MS_RECOVERY_PATH"]
    notices.tell_without_effect("environment", **{name: given.get(name) for name in names})


def _join(
    invitation: Invitation,
    asked: assemble.Asked,
    forced: list[str],
    limits: Limits,
    name: str,
    deadline: Deadline,
    launcher: Launcher,
) -> Job:
    """Join the job to which this process is invited. Return when every rank is ready to use the world."""
    links.raise_descriptor_limit()
    rank = None if invitation.seat.rank == UNKNOWN_RANK else invitation.seat.rank
    frames = Frames(invitation.stream)
    member = Member(
        frames,
        key=invitation.key,
        rank=rank,
        node_id=invitation.node_id,
        hub=invitation.where,
        dial_again=invitation.dial_again,
    )
    with contextlib.ExitStack() as failing:
        if invitation.key_file is not None:
            failing.callback(invitation.key_file.remove)
        failing.callback(member.close)
        memory = failing.enter_context(links.unix_listener(128))
        try:
            facts = assemble.facts(asked, invitation.seat.size, memory, name)
        except BaseException as error:
            member.give_up(error)
            raise
        welcome = member.join(facts, deadline)
        _tell_rank(welcome.rank)
        job = Job(assemble.Epoch(member, welcome, forced), asked, limits, name)
        # All ranks have come. So all of them count this join, even if it fails from here on.
        again.remember(launcher, invitation, job.epoch, os.environ)
        try:
            job._begin_epoch(member, welcome, memory, deadline)
        except PeerLost:
            if not job.restarts or deadline.passed:
                raise
            # A rank was lost after all had joined. It will be restarted, so wait for it in the next epoch. First close
            # the listener: ranks that still set up this epoch may be waiting for an answer.
            memory.close()
            job._rejoin(deadline)
        memory.close()
        failing.pop_all()
    job.launcher, job.key_file = invitation.launcher, invitation.key_file
    job.local_rank = job.epoch.neighbours.index(job.rank) if asked.local_rank is None else asked.local_rank
    return job


@contextlib.contextmanager
def _telling(member: Member, rank: int, epoch: int) -> Iterator[None]:
    """A context for setting up the world. If that fails, tell the other ranks, so that they do not wait any longer."""
    world = plan.world_id(epoch)
    try:
        yield
    except Error as symptom:
        cause = member.settle(world, symptom, 0)
        if cause is symptom:
            raise
        # If cause and symptom have the same text, as when libnccl is missing on all ranks, show the text only once.
        raise cause from (None if str(cause) == str(symptom) else symptom)
    except BaseException as error:
        member.report(Aborted(f"rank {rank}: init: {type(error).__name__}: {error}", [rank]))
        raise


def _backend(name: str | None) -> str:
    if name is None:
        name = _BACKEND_OF[given("device_target")]
    if name in CPU_NAMES:
        return CPU
    if name in (*NAMES, AUTO):
        return name
    raise ValueError(f"init: backend {name!r} is not one of {', '.join(CPU_NAMES)}, nccl, hccl")


def _device(device: int | None) -> int | None:
    """Return the device that the user passed to init() or set_context(), or None."""
    if device is None:
        device = given("device_id")
    try:
        return None if device is None else operator.index(device)
    except TypeError:
        raise TypeError(f"init: device {device!r} is not an integer") from None


def release() -> None:
    """Leave the default job. If a group has failed and no call of this rank has raised the failure yet, raise it now.

    release() waits for asynchronous calls (async_op) that are still running, but cancels each recv for which no message
    has come, and warns. Another rank fails only if it waits for this rank after this rank has left. An exit handler
    also calls release(), and leaves all other jobs, too.
    """
    if _default is not None:
        _default.release()


def leave_all() -> None:
    """Leave all jobs, those that were joined last first. Raise the first failure that no call has raised yet."""
    with contextlib.ExitStack() as jobs:  # leaves all of them, even if one raises
        for job in _joined:
            jobs.callback(job.release)


def is_initialized() -> bool:
    """Return whether this process has joined a job and has not left it."""
    return _default is not None and _default.is_ours


def abort(reason: str, group: Group | str | None = None) -> None:
    """Stop communication: all current and later calls, on every rank, raise Aborted.

    group: the group whose calls are stopped. None means all groups of the default job, not only the group of all ranks.
    The error names this rank and the reason. After the end of one group, its ranks can destroy it and create it again.
    """
    if group is not None:
        found = resolve(group)
        found.abort(printable(f"rank {found.epoch.rank} called abort: {reason}"))
        return
    default().abort(reason)


def rejoin(timeout: float | timedelta | None = None) -> int:
    """After PeerLost, wait until every lost rank has been restarted, and continue with all ranks in a new epoch.

    The surviving ranks call rejoin(), and the restarted ranks call init(). This also works after Aborted if the rank
    that failed is restarted. Return the number of the epoch, which is 1 after the first rejoin(). If another rank is
    lost while rejoin() runs, two ranks may get different numbers. The rank with the lower number then raises PeerLost
    in its next call.

    The groups are created again in their original order. Therefore, a restarted rank must make the same create_group
    and split calls as it did at the start, except those for groups that were destroyed. The groups of a split are
    created again only if the parent and all groups of this split still exist. Groups from shrink() are not created
    again. Arrays keep their contents, but arrays that were created by mscomm.empty are in private memory from then on.
    The program itself must bring all ranks to the same state.

    timeout: seconds or a timedelta; None means MS_TOPO_TIMEOUT (600 s). After this time, rejoin() raises
    CollectiveTimeout, whose waiting_for holds the ranks that did not join. The program can then call rejoin() again.
    Raise PeerLost if a rank has left the job, or if nothing restarts lost ranks in this job. (Pass --max-restarts to
    `mscomm run` to have them restarted.) Raise RuntimeError in a job of one rank.
    """
    return default().rejoin(timeout)


def _tell_others(error: BaseException, words: str) -> bool:
    """Tell the other ranks about the exception that ends this rank, unless a failed group has already told them.

    Return whether there are other ranks.
    """
    jobs = [job for job in _joined if job.is_ours and job.member is not None]
    for job in jobs:
        job.tell_of(error, words)
    return bool(jobs)


def _is_success(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


# -- the default job, and the ranks of its groups


def default() -> Job:
    """Return the default job. Raise RuntimeError before init(), and in a forked child."""
    if _default is None:
        raise RuntimeError("mscomm: no job joined; call mscomm.init() first")
    return unforked(_default)


def unforked(job: Job) -> Job:
    """Return the job. Raise RuntimeError in a forked child of the process that joined it."""
    if job.forked:
        raise RuntimeError(
            f"mscomm: this process was forked from a rank (pid {job.pid}) and is not a rank itself;"
            " call mscomm in the parent"
        )
    return job


def resolve(group: Group | str | None) -> Group:
    """Return the group that the argument stands for: a Group of any job, the name of a group of the default job, or
    None for all ranks of the default job.

    Raise RuntimeError before init(), in a forked child, and if this rank is not in the group.
    """
    if isinstance(group, Group):
        job_of(group)
        return group
    job = _default
    if job is None or job.forked:
        job = default()  # default() raises the error
    return job.world if group is None else job.named(group)


def job_of(group: Group) -> Job:
    """Return the job of the group. Raise ValueError if the group has ended, and RuntimeError if it is not usable."""
    if isinstance(group, NonMember):
        raise group.refusal()
    if group.job is None:
        raise ValueError(f"group {group.name!r} was destroyed, or belongs to a job that this process has left")
    return unforked(group.job)


def _in_child() -> None:
    for job in _joined:
        job.forked = True
    _joined.clear()
    _core.set_world(None)


os.register_at_fork(after_in_child=_in_child)


def get_rank(group: Group | str | None = None) -> int:
    """Return the rank of this process in the group, counted from 0."""
    return resolve(group).rank


def get_group_size(group: Group | str | None = None) -> int:
    """Return the number of ranks in the group."""
    return resolve(group).size


get_world_size = get_group_size


def get_local_rank(group: Group | str | None = None) -> int:
    """Return the index of this process among the group's ranks on its host.

    For the world, return the local rank that the launcher assigned, unless it assigned none or MSCOMM_HOST_ID is set.
    """
    found = resolve(group)
    job = job_of(found)
    if found is job.world:
        return job.local_rank
    local = [rank for rank, host in zip(found.ranks, found.hosts, strict=True) if host == found.hosts[found.rank]]
    return local.index(job.rank)


def get_local_rank_size(group: Group | str | None = None) -> int:
    """Return the number of the group's ranks on this host."""
    found = resolve(group)
    return found.hosts.count(found.hosts[found.rank])


def get_backend(group: Group | str | None = None) -> str:
    """Return the backend of the group's job: "cpu", "nccl" or "hccl"."""
    return job_of(resolve(group)).backend


def get_launcher() -> str:
    """Return the launcher of this job: "mscomm run", "MS_* cluster", "PMIx", ...; "none" if there was no launcher."""
    return default().launcher


def get_process_group_ranks(group: Group | str | None = None) -> list[int]:
    """Return the rank in the world of each rank of the group, in the order of the ranks in the group."""
    return list(resolve(group).ranks)


def get_world_rank_from_group_rank(group: Group | str, group_rank_id: int) -> int:
    """Convert a rank in the group to a rank in the world."""
    found = resolve(group)
    return found.ranks[checked_rank("get_world_rank_from_group_rank", "group_rank_id", group_rank_id, found)]


def get_group_rank_from_world_rank(world_rank_id: int, group: Group | str) -> int:
    """Convert a rank in the world to a rank in the group. Raise ValueError if that rank is not in the group."""
    found = resolve(group)
    rank = checked_rank("get_group_rank_from_world_rank", "world_rank_id", world_rank_id, job_of(found).world)
    if rank not in found.ranks:
        raise ValueError(f"get_group_rank_from_world_rank: rank {rank} is not in group {found.name} {found.ranks}")
    return found.ranks.index(rank)


def shared_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Create an uninitialised array in the heap, or in private memory if there is no heap or it is full."""
    heap = _default.epoch.heap if _default is not None and _default.is_ours else None
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    memory = heap.allocate(size) if heap is not None else None
    return np.empty(shape, dtype) if memory is None else memory[:size].view(dtype).reshape(shape)
