"""The job that this process takes part in: joining it, its groups, and leaving it."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import operator
import os
import platform
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from mscomm import bootstrap, environment, log, notices, tracebacks
from mscomm.accelerators import CPU, NAMES
from mscomm.bootstrap import ms_cluster
from mscomm.cluster import assemble, links, plan
from mscomm.cluster.deadline import Deadline, join_timeout_s, seconds_of
from mscomm.cluster.frames import FROM_HUB_BYTES, Frames
from mscomm.cluster.hello import CONTROL, UNKNOWN_RANK, package_version
from mscomm.cluster.member import Member, Welcome
from mscomm.context import device_id, device_target, plain_links_permitted
from mscomm.errors import Error, PeerLost, make
from mscomm.group import Group, NonMember, Work, printable

__all__ = ["Group", "Work"]

CPU_NAMES = ("gloo", "mccl", CPU)
AUTO = "auto"
_BACKEND_OF = {None: AUTO, "CPU": CPU, "GPU": "nccl", "Ascend": "hccl"}  # by MindSpore's device_target
WORLD_NAMES = ("hccl_world_group", "nccl_world_group", "mccl_world_group")
_NAME_BYTES = 200
_NAME_OF_SPLIT = re.compile(r"\.\d+\.-?\d+$")


class Making(NamedTuple):
    """A create_group or split call of this rank, to be made again in each epoch."""

    group: Group  # what came of it
    make: Callable[[Deadline], object]


class _Joined:
    """What init() made, until release()."""

    def __init__(self, job: assemble.Job, asked: assemble.Asked, algo: str, timeout_s: float) -> None:
        self.job = job
        self.asked = asked
        self.algo = algo
        self.timeout_s = timeout_s
        self.launcher = "none"
        self.local_rank = 0
        self.hub: Any = None  # its process, if this rank started it
        self.pid = os.getpid()
        self.forked = False  # in a child of the process that joined; every call asks, and getpid() would be slow
        self.world = Group("world", list(range(job.size)), timeout_s)
        self.groups: dict[str, Group] = {}  # in the order of their creation, the world first
        self.others: dict[str, NonMember] = {}  # groups without this rank whose create_group it called
        self.makings: list[Making] = []  # how rejoin() brings the others back, in this order
        self.splits: dict[str, int] = {}  # how often each group was split in this epoch
        self.creations: dict[str, int] = {}  # how often each list of ranks was given each name in this epoch

    @property
    def member(self) -> Member | None:
        return self.job.member

    @property
    def backend(self) -> str:
        return self.job.accelerator.name if self.job.accelerator else CPU

    def found(self, group: Group, deadline: Deadline, forced: list[str] | None = None) -> None:
        """Make the group, which all its ranks do, and let it begin to work. forced: algorithms, if not the job's."""
        ranks = hashlib.blake2b(repr(group.ranks).encode(), digest_size=8).hexdigest()
        key = f"{group.name}:{ranks}"
        turn = self.creations.get(key, 0) + 1
        id = plan.world_id(self.job.epoch) if group.name == "world" else f"{self.job.epoch}:{key}:{turn}"

        met = False

        def all_came() -> None:
            nonlocal met
            met, self.creations[key] = True, turn

        try:
            founded = self.job.found(id, group.name, group.ranks, deadline, all_came, forced or self.job.forced)
        except Error as symptom:
            if self.member is None or not met:  # a meeting that failed has failed for all of them
                raise
            cause = self.member.settle(id, symptom, 0)
            if cause is symptom:
                raise
            raise cause from symptom
        group.enter(self.job, id, founded)
        self.groups[group.name] = group
        self.others.pop(group.name, None)


_joined: _Joined | None = None
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

    backend_name: "gloo", "mccl" or "cpu" for the CPU core. "nccl": beside it NCCL, for arrays on NVIDIA GPUs; device
    is this rank's GPU, by default that of its place on the host, and becomes the current one. "hccl": likewise HCCL,
    for Ascend NPUs. None: what set_context(device_target=...) says, else nccl if every rank has a GPU of its own, else
    hccl likewise, else the CPU core, for all ranks alike; the driver is asked for that, so set CUDA_VISIBLE_DEVICES
    before. BackendUnavailable, on all ranks and with the reason of each, if one cannot use the backend that was named;
    Mismatch if they have different versions of it.

    timeout: the default of the collective calls, in seconds (MSCOMM_TIMEOUT, else 1800). Joining itself takes at most
    MS_TOPO_TIMEOUT seconds (600).

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
    global _joined
    asked = assemble.Asked(_backend(backend_name), _device(device))
    if _joined is not None and _joined.pid == os.getpid():
        if asked.backend not in (AUTO, _joined.backend):
            raise RuntimeError(
                f'init("{backend_name}"): this process has joined with backend {_joined.backend}; call release() first'
            )
        return
    timeout_s = environment.read("MSCOMM_TIMEOUT", os.environ) if timeout is None else seconds_of(timeout)
    algo = environment.read("MSCOMM_ALGO", os.environ)
    forced = assemble.forced_algorithms(algo)
    deadline = Deadline(join_timeout_s(os.environ))
    _watch_exit()

    began = time.monotonic()
    log.version(f"mscomm {package_version()}, Python {platform.python_version()}, NumPy {np.__version__}")
    launcher = bootstrap.find(os.environ, init_method, rank, world_size)
    if log.enabled(log.INFO):
        _tell_launcher(launcher)
    if launcher is None:
        log.set_rank(0)
        joined = _Joined(assemble.alone(asked), asked, algo, timeout_s)
        joined.found(joined.world, deadline)
    else:
        invitation = launcher.accept(os.environ, deadline, plain_links_permitted())
        device = invitation.device if asked.device is None else asked.device
        asked = asked._replace(device=device, local_rank=_local_rank_of(invitation))
        joined = _join(invitation, asked, algo, forced, timeout_s, deadline)
    _joined = joined
    notices.know_rank(joined.job.rank)
    _tell_variables_without_effect(launcher)
    log.info(f"joined as rank {joined.job.rank} of {joined.job.size} in {time.monotonic() - began:.3f} s")


def _tell_launcher(launcher: bootstrap.Launcher | None) -> None:
    if launcher is None:
        log.info("launcher: none, a job of one")
        return
    module = getattr(launcher, "__name__", "").removeprefix("mscomm.")  # none: init's arguments say it
    known_by = " ".join(f"{name}={text}" for name, text in environment.read_by(module, os.environ).items())
    log.info(f"launcher: {launcher.NAME}, known by {known_by or 'what init() was given'}")


def _tell_variables_without_effect(launcher: bootstrap.Launcher | None) -> None:
    given = environment.given(os.environ, environment.CLUSTER)
    names = ["MS_RECOVERY_PATH"]
    if launcher is None or launcher.NAME != ms_cluster.NAME:
        names.append("MS_ENABLE_RECOVERY")
    notices.tell_without_effect("environment", **{name: given.get(name) for name in names})


def _local_rank_of(invitation: bootstrap.Invitation) -> int | None:
    """As the launcher counts; None: it does not, or what it calls one host is divided."""
    return None if environment.read("MSCOMM_HOST_ID", os.environ) else invitation.local_rank


def _join(
    invitation: bootstrap.Invitation,
    asked: assemble.Asked,
    algo: str,
    forced: list[str],
    timeout_s: float,
    deadline: Deadline,
) -> _Joined:
    """From the invitation to a group that every rank is ready to use."""
    sock, rank = invitation.sock, invitation.rank
    with contextlib.ExitStack() as failing, assemble.unix_listener() as memory:
        failing.callback(sock.close)
        if not invitation.greeted:
            mine = links.newcomer(os.environ, UNKNOWN_RANK if rank is None else rank)
            links.greet(sock, invitation.key, CONTROL, mine, deadline)
        member = Member(
            Frames(sock, FROM_HUB_BYTES),
            key=invitation.key,
            rank=rank,
            node_id=invitation.node_id,
            hub=invitation.where,
        )
        failing.callback(member.close)
        welcome = member.join(assemble.facts(asked, invitation.size, algo, memory), deadline)
        log.set_rank(welcome.rank)
        with _telling(member, welcome.rank, welcome.epoch):
            job = assemble.share(member, welcome, memory, forced, deadline, asked.backend)
            joined = _Joined(job, asked, algo, timeout_s)
            joined.found(joined.world, deadline)
            member.ready(deadline)
        failing.pop_all()
    joined.launcher, joined.hub = invitation.launcher, invitation.hub
    joined.local_rank = job.neighbours().index(job.rank) if asked.local_rank is None else asked.local_rank
    return joined


@contextmanager
def _telling(member: Member, rank: int, epoch: int) -> Iterator[None]:
    """What goes wrong in the set-up of the world is told to the others, who must not wait for this rank."""
    world = plan.world_id(epoch)
    try:
        yield
    except Error as symptom:
        cause = member.settle(world, symptom, 0)
        if cause is symptom:
            raise
        # Where all ranks found the same, as that there is no libnccl, once is enough.
        raise cause from (None if str(cause) == str(symptom) else symptom)
    except BaseException as error:
        member.report("Aborted", f"rank {rank}: init: {type(error).__name__}: {error}", [rank])
        raise


def _backend(name: str | None) -> str:
    if name is None:
        name = _BACKEND_OF[device_target()]
    if name in CPU_NAMES:
        return CPU
    if name in (*NAMES, AUTO):
        return name
    raise ValueError(f"init: backend {name!r} is none of {', '.join(CPU_NAMES)}, nccl, hccl")


def _device(device: int | None) -> int | None:
    """The rank's device as its user says it: to init, or to set_context."""
    if device is None:
        device = device_id()
    try:
        return None if device is None else operator.index(device)
    except TypeError:
        raise TypeError(f"init: device {device!r} is not an integer") from None


def release() -> None:
    """Leave the job. Raises a group's failure if it came after this rank's last call and nobody has seen it yet.

    Calls that run beside the caller are waited for. A rank that has left is no failure until another one waits for it.
    An exit handler calls this too.
    """
    global _joined
    joined, _joined = _joined, None
    if joined is None or joined.pid != os.getpid():
        return
    groups = list(reversed(joined.groups.values()))
    unseen: Error | None = None
    for group in groups:
        group.drain()
        try:
            group.core.last_look()
        except Error as symptom:
            # A mismatch that no call of this rank has met: the others learn of it before this rank says bye.
            unseen = None if group.raised else group.settle(symptom)
    # First the word, then the end of the links: who still waits for this rank then knows that it left.
    if joined.member is not None:
        joined.member.leave(joined.world.core.where()[0])
    for group in groups:
        group.leave()
        failure = group.core.failure()
        if unseen is None and failure is not None and not group.raised:
            kind, text, ranks, waiting_for, _, _ = failure
            unseen = make(kind, text, ranks, waiting_for)
    if unseen is not None and not joined.world.raised:
        raise unseen


def is_initialized() -> bool:
    """Whether init() has joined a job that this process has not left."""
    return _joined is not None and _joined.pid == os.getpid()


def abort(reason: str) -> None:
    """End the job's communication: every rank's current and later calls raise Aborted with this rank and the reason."""
    joined = _here()
    _end_all(joined, printable(f"rank {joined.job.rank} called abort: {reason}"))


def _end_all(joined: _Joined, text: str) -> None:
    rank = joined.job.rank
    for group in joined.groups.values():
        group.raised = True
    if joined.member is not None:
        joined.member.report("Aborted", text, [rank])
    for group in joined.groups.values():
        group.core.abort("Aborted", [rank], [], text)


def rejoin(timeout: float | timedelta | None = None) -> int:
    """After PeerLost: wait until every lost rank was started again, and go on with all of them in a new epoch.

    Also after Aborted, if the rank that failed is started again. All ranks that are left call it; the new ones call
    init(). The groups come back in the order of their creation: a new rank makes the same create_group and split calls
    as at the start, but for groups that were destroyed. A split comes back where its parent and all its parts are still
    there. Groups of shrink() end. Arrays stay as they are; those of
    mscomm.empty that were made before are private memory from now on. What the ranks computed, they must bring to one
    state themselves. Returns the epoch's number, 1 for the first; that of two ranks can differ if another rank was lost
    meanwhile: the one that is behind meets PeerLost in its next call.

    timeout: seconds or a timedelta, None: MS_TOPO_TIMEOUT (600); then CollectiveTimeout, whose waiting_for names those
    that did not come; rejoin() may be called again. PeerLost if nobody starts the lost ranks again, which `mscomm run
    --max-restarts N` does, or if a rank has left the job. RuntimeError in a job of one rank.
    """
    joined = _here()
    if joined.member is None:
        raise RuntimeError("rejoin: this is a job of one rank")
    deadline = Deadline(join_timeout_s(os.environ) if timeout is None else seconds_of(timeout))
    while True:
        # From here on nobody of the old epoch can reach what this rank has in shared memory.
        for group in joined.groups.values():
            group.leave()
        if joined.job.heap is not None:
            joined.job.heap.retire()
        with assemble.unix_listener() as memory:
            facts = assemble.facts(joined.asked, joined.job.size, joined.algo, memory)
            welcome = joined.member.rejoin(facts, deadline)
            try:
                _begin_epoch(joined, joined.member, welcome, memory, deadline)
                return welcome.epoch
            except PeerLost:
                if deadline.passed:
                    raise
                # Another rank was lost on the way: whether it comes back, the next turn is told.


def _begin_epoch(joined: _Joined, member: Member, welcome: Welcome, memory: socket.socket, deadline: Deadline) -> None:
    """Everything of this rank's part in the job anew, but the control link and the Group objects."""
    with _telling(member, welcome.rank, welcome.epoch):
        joined.job = assemble.share(member, welcome, memory, joined.job.forced, deadline, joined.asked.backend)
        joined.creations.clear()
        joined.splits.clear()
        returning = [joined.world, *(making.group for making in joined.makings)]
        joined.groups = {name: group for name, group in joined.groups.items() if group in returning}
        joined.found(joined.world, deadline)
        member.ready(deadline)
    log.info(f"epoch {welcome.epoch} begins")
    for making in joined.makings:
        making.make(deadline)


# -- groups


def create_group(group: str, rank_ids: list[int]) -> Group:
    """Found a group of some of the ranks; all of them call it with the same name and the same list.

    rank_ids: ranks in the world; a rank's place in the list is its rank in the group. A rank that is not in the list
    need not call. If it does, nothing is sent, and it gets a Group that is False and raises RuntimeError at every use,
    as the name does: ask `if group:`. The same name and ranks again: the group that is there. Groups may overlap, and
    two threads may use two groups at once. It returns when all of the list have called it: ranks that are in several
    groups make them in one order.

    TypeError if group is no str or rank_ids no list of ints; ValueError for an empty list, a rank that is none, a rank
    that is named twice, or a name that has other ranks. Mismatch if the ranks do not agree on the list; PeerLost;
    CollectiveTimeout after MS_TOPO_TIMEOUT.

    >>> pair = mscomm.create_group("pair", [0, 1])
    >>> if pair:                                                           # ranks 0 and 1
    ...     print(mscomm.all_reduce(np.ones(1), group=pair))
    [2.]
    """
    joined = _here()
    if not isinstance(group, str):
        raise TypeError(f"create_group: the name is a {type(group).__name__}, expected a str")
    if not isinstance(rank_ids, list):
        raise TypeError(f"create_group: rank_ids is a {type(rank_ids).__name__}, expected a list of ints")
    _check_name("create_group", group)
    ranks = [_rank_in(joined.job.size, rank, "create_group: rank_ids") for rank in rank_ids]
    if not ranks:
        raise ValueError("create_group: rank_ids is empty")
    if len(set(ranks)) < len(ranks):
        twice = next(rank for rank in ranks if ranks.count(rank) > 1)
        raise ValueError(f"create_group: rank {twice} is in rank_ids {ranks.count(twice)} times")
    there = joined.groups.get(group)
    if there is not None:
        if there.ranks != ranks:
            raise ValueError(f"create_group: group {group!r} has the ranks {there.ranks}; destroy_group it first")
        return there
    if joined.job.rank not in ranks:
        joined.others[group] = NonMember(group, ranks, joined.job.rank)
        return joined.others[group]
    made = Group(group, ranks, joined.timeout_s)
    joined.found(made, Deadline(join_timeout_s(os.environ)))
    joined.makings.append(Making(made, lambda deadline: joined.found(made, deadline)))
    return made


def create_variant(group: str, algo: str) -> Group:
    """The world again, as a group whose collectives go by these algorithms, written as in MSCOMM_ALGO: to measure them.

    All ranks call it. rejoin() does not bring it back. Raises as create_group; ValueError for algo.
    """
    joined = _here()
    made = Group(group, list(joined.world.ranks), joined.timeout_s)
    joined.found(made, Deadline(join_timeout_s(os.environ)), assemble.forced_algorithms(algo))
    return made


def split(color: int | None, key: int = 0, *, group: Group | str | None = None) -> Group:
    """Divide a group: the ranks with the same color found a group, ordered by key, then by rank.

    All ranks of the group (None: the world) call it. color None: this rank takes part in none, and gets a Group that is
    False, as a non-member of create_group. As MPI_Comm_split. Raises as create_group.
    """
    joined = _here()
    parent = resolve(group)
    color = None if color is None else _in_64_bits("color", color)
    key = _in_64_bits("key", key)

    def found(deadline: Deadline) -> None:
        turn = joined.splits[parent.name] = joined.splits.get(parent.name, 0) + 1
        facts = {"color": color, "key": key}
        said = [facts]
        if joined.member:
            meeting = f"{joined.job.epoch}:split {turn}:{parent.id}"
            said = joined.member.meet(meeting, f"split of group {parent.name}", parent.ranks, facts, deadline).facts
        before, made.name = made.name, f"{parent.name}.{turn}.{color}"
        if color is None:
            return
        joined.groups.pop(before, None)  # in an earlier epoch, by another name perhaps
        alike = [(fact["key"], place) for place, fact in enumerate(said) if fact["color"] == color]
        ranks = [parent.ranks[place] for _, place in sorted(alike)]
        made.ranks, made.size = ranks, len(ranks)
        joined.found(made, deadline)

    made = Group("", [], joined.timeout_s) if color is not None else NonMember("", None, joined.job.rank)
    found(Deadline(join_timeout_s(os.environ)))
    joined.makings.append(Making(made, found))
    return made


def shrink(group: Group | str | None, name: str) -> Group:
    """After PeerLost: found a group of those ranks of the group that are still there, in their order.

    All of them call it. It lasts until rejoin(). Raises as create_group.
    """
    joined = _here()
    parent = resolve(group)
    _check_name("shrink", name)
    if name in joined.groups:
        raise ValueError(f"shrink: there is a group {name!r} already")
    deadline = Deadline(join_timeout_s(os.environ))
    ranks = parent.ranks
    if joined.member:
        meeting = f"{joined.job.epoch}:shrink to {name}:{parent.id}"
        ranks = joined.member.meet(meeting, f"shrink to {name!r}", ranks, {}, deadline, survivors=True).ranks
    made = Group(name, ranks, joined.timeout_s)
    joined.found(made, deadline)
    return made


def destroy_group(group: Group | str) -> None:
    """End this rank's part in the group, and free what it holds; a rank that is no member forgets the name.

    ValueError for the group of all ranks.
    """
    joined = _here()
    outside = joined.others.get(group) if isinstance(group, str) else group
    if isinstance(outside, NonMember):
        joined.makings = [making for making in joined.makings if making.group is not outside]
        if joined.others.get(outside.name) is outside:
            del joined.others[outside.name]
        return
    found = resolve(group)
    if found is joined.world:
        raise ValueError("destroy_group: the group of all ranks ends with release()")
    del joined.groups[found.name]
    joined.makings = [making for making in joined.makings if making.group is not found]
    found.drain()
    found.leave()


def get_process_group_ranks(group: Group | str | None = None) -> list[int]:
    """The group's ranks, as ranks in the world, in their order."""
    return list(resolve(group).ranks)


def get_world_rank_from_group_rank(group: Group | str, group_rank_id: int) -> int:
    """The rank in the world of a rank of the group."""
    found = resolve(group)
    return found.ranks[_rank_in(found.size, group_rank_id, "get_world_rank_from_group_rank: group_rank_id")]


def get_group_rank_from_world_rank(world_rank_id: int, group: Group | str) -> int:
    """The rank in the group of a rank of the world. ValueError if it is none of the group's."""
    found = resolve(group)
    rank = _rank_in(_here().job.size, world_rank_id, "get_group_rank_from_world_rank: world_rank_id")
    if rank not in found.ranks:
        raise ValueError(f"get_group_rank_from_world_rank: rank {rank} is not in group {found.name} {found.ranks}")
    return found.ranks.index(rank)


def _check_name(function: str, name: str) -> None:
    if name == "world" or name in WORLD_NAMES or not name:
        raise ValueError(f"{function}: {name!r} is the group of all ranks; choose another name")
    if _NAME_OF_SPLIT.search(name):
        raise ValueError(f"{function}: names that end in a number and a number, as {name!r}, are those of split")
    if len(printable(name)) > _NAME_BYTES or printable(name) != name:
        raise ValueError(
            f"{function}: a name has at most {_NAME_BYTES} characters, all of them UTF-8; not {name!r:.300}"
        )


def _in_64_bits(argument: str, number: int) -> int:
    number = operator.index(number)
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"split: {argument} {number} has more than 64 bits")
    return number


def _rank_in(size: int, rank: Any, what: str) -> int:
    try:
        rank = operator.index(rank)
    except TypeError:
        raise TypeError(f"{what}: {rank!r} is not an int") from None
    if not 0 <= rank < size:
        raise ValueError(f"{what}: {rank} is none of the ranks 0 to {size - 1}")
    return int(rank)


def get_rank(group: Group | str | None = None) -> int:
    """This process's rank in the group, from 0."""
    return resolve(group).rank


def get_group_size(group: Group | str | None = None) -> int:
    """How many ranks the group has."""
    return resolve(group).size


get_world_size = get_group_size


def get_local_rank(group: Group | str | None = None) -> int:
    """This process's place among the group's ranks of its host; in the world as the launcher counts them."""
    joined, found = _here(), resolve(group)
    if found is joined.world:
        return joined.local_rank
    local = [rank for rank, host in zip(found.ranks, found.hosts, strict=True) if host == found.hosts[found.rank]]
    return local.index(joined.job.rank)


def get_local_rank_size(group: Group | str | None = None) -> int:
    """How many ranks of the group are on this host."""
    found = resolve(group)
    return found.hosts.count(found.hosts[found.rank])


def get_backend(group: Group | str | None = None) -> str:
    """The job's backend: "cpu", or the accelerator's beside it, "nccl" or "hccl"."""
    resolve(group)
    return _here().backend


def get_launcher() -> str:
    """What started this job: "mscomm run", "MS_* cluster", "PMIx", ..., or "none" for a job of one."""
    return _here().launcher


def _here() -> _Joined:
    joined = _joined
    if joined is None:
        raise RuntimeError("mscomm: no job joined; call mscomm.init() first")
    if joined.forked:
        raise RuntimeError(
            f"mscomm: this process was forked from a rank (pid {joined.pid}) and is no rank itself;"
            " call mscomm in the parent"
        )
    return joined


def resolve(group: Group | str | None) -> Group:
    """The Group that the argument names. RuntimeError before init(), in a forked child, and if it lacks this rank."""
    joined = _joined
    if joined is None or joined.forked:
        joined = _here()  # which says what is wrong
    if group is None:
        return joined.world
    if isinstance(group, Group):
        if joined.groups.get(group.name) is not group:
            if isinstance(group, NonMember):
                raise group.refusal()
            raise ValueError(f"group {group.name!r} was destroyed, or is of a job that this process has left")
        return group
    if isinstance(group, str):
        if group in WORLD_NAMES:
            return joined.world
        if group in joined.groups:
            return joined.groups[group]
        if group in joined.others:
            raise joined.others[group].refusal()
        raise ValueError(f"no group is named {group!r}; there is {', '.join(joined.groups)}")
    raise TypeError(f"group is a {type(group).__name__}; expected None, a Group or the name of one")


def _in_child() -> None:
    if _joined is not None:
        _joined.forked = True


os.register_at_fork(after_in_child=_in_child)


def shared_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """An uninitialised array, in memory that the host's ranks share where there is such memory."""
    heap = _joined.job.heap if _joined is not None and _joined.pid == os.getpid() else None
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    memory = heap.allocate(size) if heap is not None else None
    return np.empty(shape, dtype) if memory is None else memory[:size].view(dtype).reshape(shape)


def _watch_exit() -> None:
    """Release at the end of the process, and tell the other ranks of an exception that ends it."""
    global _exit_handler_set
    full = environment.read("MSCOMM_TRACEBACK", os.environ) == "FULL"
    if _exit_handler_set:
        return
    _exit_handler_set = True
    atexit.register(_release_at_exit)
    sys.excepthook = _TellingHook(sys.excepthook, full)


def _release_at_exit() -> None:
    try:
        release()
    except Error as error:
        print(f"mscomm: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def _was_told(joined: _Joined, error: BaseException) -> bool:
    """Whether it is what a group of this rank has raised, which its ranks know."""
    return isinstance(error, Error) and any(group.raised for group in joined.groups.values())


class _TellingHook:
    """An excepthook that tells the other ranks why this one ends, then goes on to the hook before it.

    full: that one gets the traceback as it is, and not the user's part of it.
    """

    def __init__(self, before: Any, full: bool) -> None:
        self._before = before
        self._full = full

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        handler = signal.getsignal(signal.SIGINT)
        if issubclass(kind, KeyboardInterrupt) and handler and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # people press Ctrl-C twice
        else:
            handler = None
        try:
            self._tell_and_show(kind, error, trace)
        finally:
            if handler:
                signal.signal(signal.SIGINT, handler)

    def _tell_and_show(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        joined = _joined
        if joined is not None and (joined.pid != os.getpid() or joined.member is None):
            joined = None
        place = tracebacks.place(trace)
        where = f" ({place})" if place else ""
        if joined is not None and not _was_told(joined, error):
            words = "".join(traceback.format_exception_only(kind, error)).strip()
            _end_all(joined, printable(f"rank {joined.job.rank}: {words}{where}"))
        if not self._full:
            tracebacks.shorten(error)
            trace = tracebacks.users_part(trace)
            if joined is not None and issubclass(kind, KeyboardInterrupt) and self._before is sys.__excepthook__:
                print(f"KeyboardInterrupt{where}", file=sys.stderr, flush=True)  # all ranks get it: a line each
                return
        self._before(kind, error, trace)
