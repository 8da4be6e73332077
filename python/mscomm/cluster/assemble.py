"""Sets up an epoch and its groups: gathers facts about this rank, shares memory with the ranks of its host, and
connects the ranks of a group.

A listener is open only while an epoch, a group or a message link is set up. At all other times, no socket listens and
no memfd is open.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mscomm import _core, accelerators, environment, log
from mscomm.accelerators import Accelerator
from mscomm.cluster import interfaces, links, plan
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.hello import DATA, MEMORY, MESSAGES, Identity, package_version
from mscomm.cluster.member import Member, Welcome
from mscomm.errors import Aborted, Error, PeerLost

_HUGE_PAGE = 2 << 20
_LARGE = 1 << 40  # bytes; all calls with at least this much data use the same algorithm
_ADDRESS_SPACE = 1 << 46  # bytes that the heaps may take in each process, whose address space has 2^47


# -- facts about this rank


class Asked(NamedTuple):
    """The backend that the user of this rank asked for: its name or "auto", and a device or None."""

    backend: str
    device: int | None
    local_rank: int | None = None  # this rank's number on its host, if the launcher gives it


def facts(asked: Asked, size: int, algo: str, memory: socket.socket) -> dict[str, Any]:
    """What this rank tells the others about itself. memory: where this rank listens for the other ranks of its host."""
    return {
        "version": package_version(),
        "backend": asked.backend,
        "size": size,
        "algo": algo,
        "host": host_id(),
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        "cpus": sorted(os.sched_getaffinity(0)),
        "quota": cpu_quota(),
        "memory": memory.getsockname(),
        **accelerators.facts(*asked, os.environ),
    }


def host_id() -> str:
    """An id that is equal for processes that can share memory: MSCOMM_HOST_ID, or else the boot id and namespaces."""
    if said := environment.read("MSCOMM_HOST_ID", os.environ):
        return f"MSCOMM_HOST_ID={said}"
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "ipc")]
    except OSError:
        return socket.gethostname()
    return " ".join([boot, *spaces])


def cpu_quota() -> float:
    """How many CPUs the cgroup lets its processes use; inf without a limit. Reads the CPU quota of cgroup v2 or v1."""
    for path, read in (
        ("/sys/fs/cgroup/cpu.max", lambda text: text.split()),
        (
            "/sys/fs/cgroup/cpu/cpu.cfs_quota_us",
            lambda text: [text, Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text()],
        ),
    ):
        with contextlib.suppress(OSError, ValueError):
            quota, period = read(Path(path).read_text())
            return float(quota) / float(period) if quota.strip() not in ("max", "-1") else float("inf")
    return float("inf")


def can_spin(members: Sequence[dict[str, Any]]) -> bool:
    """Whether each of these ranks can have a CPU of its own. `members`: the facts of all ranks of one host."""
    return len(members) <= cpus_of(members)


def cpus_of(members: Sequence[dict[str, Any]]) -> float:
    """How many CPUs these ranks of one host share: the CPUs in their affinity masks, at most the smallest quota."""
    cpus = {cpu for member in members for cpu in member["cpus"]}
    return float(min(len(cpus), *(member["quota"] for member in members)))


def forced_algorithms(algo: str) -> list[str]:
    """For each collective, the name of the algorithm that `algo` asks for; "" if it asks for none.

    algo: for example "all_reduce=ring,broadcast=tree", or just "ring" for every collective that has an algorithm of
    this name. ValueError if an item names no algorithm.
    """
    known = {(what, name) for what, name, _ in _core.algorithms()}
    names = {name for _, name in known}
    forced = dict.fromkeys(_core.collectives, "")
    for item in filter(None, (part.strip() for part in algo.split(","))):
        what, equals, name = (part.strip() for part in item.partition("="))
        if not equals and what in names:
            forced.update({collective: what for collective in forced if (collective, what) in known})
        elif (what, name) in known:
            forced[what] = name
        else:
            choices = "; ".join(
                f"{collective}={'|'.join(row for kind, row, _ in _core.algorithms() if kind == collective)}"
                for collective in forced
            )
            raise ValueError(
                f"MSCOMM_ALGO={algo!r}: {item!r} is no algorithm. Give collective=name, separated by commas: {choices}"
            )
    return list(forced.values())


def heap_bytes(ranks: int) -> int:
    """The size of a rank's heap: as large as the host's memory, or less if the address space has no room for that.

    The heap is sparse: a page takes memory only once it is used.
    """
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    room = _ADDRESS_SPACE if limit == resource.RLIM_INFINITY else limit // 4
    return max(_HUGE_PAGE, min(size, room // (ranks + 1)) // _HUGE_PAGE * _HUGE_PAGE)


# -- one epoch of the job


def chosen(core: _core.Group) -> dict[str, str]:
    """The algorithm of each collective, such as "direct", or "tree or ring" if large arrays use another algorithm."""
    small, large = core.chosen(0), core.chosen(_LARGE)
    return {what: name if name == large[what] else f"{name} or {large[what]}" for what, name in small.items()}


class Founded(NamedTuple):
    """A group's core. `control`: the control memory that this rank lent to the group for `control_ranks` ranks. It is
    None if another rank lent the memory, or if the group has no control memory.
    """

    core: _core.Group
    control: int | None
    control_ranks: int


class Epoch:
    """What all groups of one epoch have in common: the ranks, their hosts, and their shared memory."""

    def __init__(
        self,
        member: Member | None,
        welcome: Welcome,
        forced: list[str],
        heap: _core.Heap | None,
        peers: _core.Peers,
        accelerator: Accelerator | None,
    ) -> None:
        self.member = member
        self.rank = welcome.rank
        self.size = welcome.size
        self.number = welcome.epoch
        self.facts = welcome.facts
        self.key = welcome.key
        self.identity = Identity(welcome.job, package_version(), welcome.rank, welcome.epoch)
        self.hosts = plan.hosts(welcome.facts)
        self.names = rank_names(welcome.facts)
        self.forced = forced
        self.heap = heap
        self.peers = peers
        self.accelerator = accelerator  # None: the job's backend is the CPU core

    def neighbours(self) -> list[int]:
        """The ranks of this rank's host."""
        return [rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank]]

    def found(
        self,
        group: str,
        name: str,
        ranks: list[int],
        deadline: Deadline,
        all_came: Callable[[], None],
        forced: list[str],
    ) -> Founded:
        """Make a group of these ranks, which include this rank. All these ranks must call this.

        group: the id of the group at the hub. all_came: called when all ranks have come; from then on, no other group
        may use the id. forced: see forced_algorithms.
        """
        hosts = _numbered([self.hosts[rank] for rank in ranks])
        me = ranks.index(self.rank)
        rows = (_core.select(what, hosts, forced) for what in range(len(_core.collectives)))
        carriers = {carrier for row in rows for _, carrier in row}
        at_home = [rank for rank in ranks if self.hosts[rank] == self.hosts[self.rank]]
        by_arena = not carriers.isdisjoint(("arena", "both")) and len(at_home) > 1
        by_mesh = not carriers.isdisjoint(("mesh", "both")) and len(ranks) > 1
        what = "init" if name == "world" else f"create_group({name!r})"
        control = None
        came = met = False
        try:
            if by_arena and self.rank == min(at_home):
                assert self.heap
                control = self.heap.reserve_control(len(at_home))
            with contextlib.ExitStack() as closing:
                listening = [
                    closing.enter_context(self._listener(is_near)) for is_near in _needed(hosts, me) if by_mesh
                ]
                offered: dict[str, Any] = {"control": control, "data": [_address(listener) for listener in listening]}
                if self.accelerator and me == 0:
                    (vendor, runtime), device = self.accelerator.opened, self.accelerator.device
                    offered["device"] = vendor.make_id(runtime, device)
                told: dict[int, dict[str, Any]] = {self.rank: offered}
                if self.member and len(ranks) > 1:
                    came = True
                    told = dict(zip(*self.member.meet(group, what, ranks, offered, deadline, founds=True), strict=True))
                    met = True
                elif self.member:
                    self.member.check(group)  # a group of one rank has no meeting that could report an abort of the job
                all_came()
                spin = can_spin([self.facts[rank] for rank in self.neighbours()])
                fds = self._connect(group, ranks, listening, told, deadline) if by_mesh else []
                with _system_calls(self.rank, f"group {name}"):
                    core = _core.Group(
                        name=name,
                        peers=self.peers,
                        ranks=ranks,
                        rank=me,
                        epoch=self.number,
                        forced=forced,
                        control=told[min(at_home)]["control"] if by_arena else -1,
                        spin=spin,
                        links=fds,
                        news_fd=self.member.news_fd if self.member else -1,
                    )
            if self.accelerator:
                self._join_device(core, group, told[ranks[0]]["device"], deadline)
        except BaseException as error:
            if control is not None and not met:
                assert self.heap
                # If the hub did not refuse the meeting, it may have told the other ranks to use this memory. In that
                # case, the memory must never serve another group.
                if came and self.member and not self.member.was_refused(group):
                    self.heap.abandon_control(control, len(at_home))
                else:
                    self.heap.release_control(control, 0)
            if self.member and len(ranks) > 1:
                # This rank could not set itself up: tell the others, so that they do not wait for it.
                if met and not isinstance(error, Error):
                    text = f"rank {self.rank}: group {name}: {type(error).__name__}: {error}"
                    self.member.report(Aborted(text, [self.rank]), group)
                elif not came:
                    self.member.refuse(group, what, ranks, error)
            raise
        if log.enabled(log.INFO):
            used = [carrier for carrier, is_used in (("arena", by_arena), ("mesh", by_mesh)) if is_used]
            self._tell_founded(name, group, ranks, core, used, spin)
        return Founded(core, control, len(at_home))

    def _join_device(self, core: _core.Group, group: str, id: bytes, deadline: Deadline) -> None:
        assert self.accelerator
        (vendor, runtime), device = self.accelerator.opened, self.accelerator.device
        check: Callable[[], object] = functools.partial(self.member.check, group) if self.member else dict
        core.join_device(vendor, runtime, device, id, deadline.left(), check)

    def _tell_founded(
        self, name: str, id: str, ranks: list[int], core: _core.Group, carriers: list[str], spin: bool
    ) -> None:
        log.info(f"group {name} ({id}): rank {ranks.index(self.rank)} of {len(ranks)}, ranks {_numbers(ranks)}")
        by = ", ".join(f"{what} {algorithm}" for what, algorithm in chosen(core).items())
        log.info(f"group {name}: by {' and '.join(carriers) or 'copying'}: {by}")
        if "arena" in carriers:
            here = [self.facts[rank] for rank in self.neighbours()]
            log.info(
                f"group {name}: waits {'spin' if spin else 'yield'}: {len(here)} ranks on this host, "
                f"{cpus_of(here):g} CPUs for them"
            )

    def _listener(self, at_home: bool) -> socket.socket:
        if at_home:
            return unix_listener()
        assert self.member
        return links.listen(self.member.address(), 128, os.environ)

    def _connect(
        self,
        group: str,
        ranks: list[int],
        listening: list[socket.socket],
        told: dict[int, dict[str, Any]],
        deadline: Deadline,
    ) -> list[int]:
        """Connect to all ranks. Returns the authenticated descriptors in the order of `ranks`; -1 for this rank.

        Of two ranks, the later one in `ranks` connects to the other, over a unix socket if both are on one host.
        """
        assert self.member
        member = self.member
        fds = [-1] * len(ranks)
        me = ranks.index(self.rank)
        with _closing_unless_done(fds):
            for place in range(me):
                fds[place] = self.call(ranks[place], told[ranks[place]]["data"], DATA, deadline)
            came = links.accept_all(
                listening, ranks[me + 1 :], self.key, DATA, self.identity, deadline, check=lambda: member.check(group)
            )
            for rank, sock in came.items():
                fds[ranks.index(rank)] = sock.detach()
        return fds

    def call(self, rank: int, addresses: list[Any], purpose: int, deadline: Deadline) -> int:
        """Connect to the rank, at the first of these addresses that this rank can use. Returns the descriptor."""
        at_home = self.hosts[rank] == self.hosts[self.rank]
        address = next((one for one in addresses if isinstance(one, (str, bytes)) == at_home), None)
        if address is None:
            lacks = f"it gave no address for {'its own host' if at_home else 'other hosts'}"
            raise PeerLost(f"cannot reach rank {rank}: {lacks}", [rank])
        where = ""
        if not at_home:
            assert self.member
            host, port = address
            address = interfaces.dial_address(host, self.member.address()), port
            where = f" at {interfaces.endpoint(*address)}"
        with _reaching(rank, where), contextlib.ExitStack() as failing:
            sock = failing.enter_context(links.connect(address, deadline))
            links.greet(sock, self.key, purpose, self.identity, deadline)
            failing.pop_all()
        return sock.detach()

    def invite(self, group: str, rank: int, deadline: Deadline, check: Callable[[], None]) -> int:
        """Ask the rank to connect, whatever its program is doing. Returns the descriptor of the connection.

        The connection carries the group's messages from this rank to the other rank. check: called at least every
        100 ms; it may raise to end the wait.
        """
        assert self.member
        with self._listener(self.hosts[rank] == self.hosts[self.rank]) as listener:
            self.member.dial(group, rank, [_address(listener)], deadline)
            came = links.accept_all([listener], [rank], self.key, MESSAGES, self.identity, deadline, check=check)
        return came[rank].detach()


def share(
    member: Member, welcome: Welcome, memory: socket.socket, forced: list[str], deadline: Deadline, asked: str
) -> Epoch:
    """Set up what all groups of this epoch need, and return the Epoch. Every rank calls this.

    memory: the listener that facts() was given. asked: the backend's name, or "auto".
    """
    everyone = welcome.facts
    plan.agree(everyone)
    rank = welcome.rank
    hosts = plan.hosts(everyone)
    accelerator = choose(asked, rank, everyone)
    if accelerator:
        elsewhere = len(set(hosts)) > 1
        _set_up(accelerator, interfaces.name_of(member.address()) if elsewhere else None)
    neighbours = [peer for peer, host in enumerate(hosts) if host == hosts[rank]]
    names = rank_names(everyone)
    with contextlib.ExitStack() as closing:
        heap, heap_fds = None, [-1] * len(everyone)
        if len(neighbours) > 1:
            with _system_calls(rank, "init"):
                heap, heap_fd = _core.make_heap(
                    heap_bytes(len(neighbours)), bool(environment.read("MSCOMM_HUGE_PAGES", os.environ))
                )
            closing.callback(os.close, heap_fd)
            mine = Identity(welcome.job, package_version(), rank, welcome.epoch)
            fds = _exchange_memory(
                rank, neighbours, everyone, memory, heap_fd, welcome.key, mine, deadline, member, closing
            )
            for peer, fd in zip(neighbours, fds, strict=True):
                heap_fds[peer] = fd if peer != rank else -1
        if log.enabled(log.INFO):
            _tell_hosts(rank, hosts, everyone)
        if neighbours[0] == rank:
            _warn_of_threads([everyone[peer] for peer in neighbours])
        if rank == 0 and any(forced):
            _warn_of_forced(forced)
        pidfds = _pidfds(rank, neighbours, everyone, names)
        with _system_calls(rank, "init"):
            peers = _core.Peers(rank=rank, names=names, hosts=hosts, pidfds=pidfds, heap=heap, heap_fds=heap_fds)
    return Epoch(member, welcome, forced, heap, peers, accelerator)


def choose(asked: str, rank: int, everyone: Sequence[dict[str, Any]]) -> Accelerator | None:
    """Choose the backend from all ranks' facts. Returns this rank's accelerator for it; None for the CPU core."""
    chosen = accelerators.choose(asked, everyone, plan.hosts(everyone), rank_names(everyone))
    if rank == 0 and (asked == "auto" or chosen.backend != accelerators.CPU):
        log.info(f"backend {chosen.backend}: {chosen.reason}")
    if chosen.backend == accelerators.CPU:
        return None
    opened = accelerators.opened(chosen.backend)
    device = chosen.devices[rank]
    opened.runtime.use(device)
    log.info(
        f"{chosen.backend} {opened.vendor.version()} ({opened.vendor.path()}, {opened.vendor.origin()}), "
        f"{opened.runtime.version()}; device {device}, {opened.runtime.device_name(device)}; "
        f"kernels: {opened.runtime.kernels(device)}"
    )
    return Accelerator(chosen.backend, opened, device)


def _set_up(accelerator: Accelerator, interface: str | None) -> None:
    for variable, text in accelerators.set_up(accelerator.name, interface, os.environ).items():
        log.info(f"{variable}={text} was set for {accelerator.name}")


def _tell_hosts(rank: int, hosts: list[int], everyone: Sequence[dict[str, Any]]) -> None:
    here = [peer for peer, host in enumerate(hosts) if host == hosts[rank]]
    name = everyone[rank]["hostname"]
    log.info(f"hosts: {max(hosts) + 1}; {name} is number {hosts[rank]} and has the ranks {_numbers(here)}")
    if len(here) > 1:
        room = heap_bytes(len(here)) >> 20
        log.info(f"shared memory: room for {room} MiB of arrays a rank; pages come as they are used")
    else:
        log.info("shared memory: none, no other rank is on this host")


def _warn_of_threads(here: Sequence[dict[str, Any]]) -> None:
    """Warn if the ranks of this host have more OpenMP threads than CPUs. Only the lowest of these ranks calls this."""
    try:
        threads = environment.read("OMP_NUM_THREADS", os.environ)
    except ValueError as error:
        log.warn(str(error))
        return
    cpus = cpus_of(here)
    if threads is not None and threads > 1 and threads * len(here) > cpus:
        log.warn(
            f"OMP_NUM_THREADS={threads} on each of {len(here)} ranks makes {threads * len(here)} threads on {cpus:g} "
            f"CPUs: slow; OMP_NUM_THREADS={max(1, int(cpus // len(here)))} fits"
        )


def _warn_of_forced(forced: list[str]) -> None:
    items = [f"{what}={name}" for what, name in zip(_core.collectives, forced, strict=True) if name]
    ring = {"all_reduce=ring", "reduce_scatter=ring"} & set(items)
    own_order = "; ring adds floats in an order of its own" if ring else ""
    log.warn(f"MSCOMM_ALGO forces {', '.join(items)}{own_order}")


def alone(asked: Asked) -> Epoch:
    """The epoch of a job of one rank."""
    here = {"host": "", "hostname": socket.gethostname(), "pid": os.getpid(), "cpus": [0], "quota": 1.0}
    facts: list[dict[str, Any]] = [here | accelerators.facts(*asked, os.environ)]
    peers = _core.Peers(rank=0, names=rank_names(facts), hosts=[0], pidfds=[-1], heap=None, heap_fds=[])
    accelerator = choose(asked.backend, 0, facts)
    if accelerator:
        _set_up(accelerator, None)
    return Epoch(None, Welcome(0, 1, b"", 0, b"", facts), [""] * len(_core.collectives), None, peers, accelerator)


def rank_names(everyone: Sequence[dict[str, Any]]) -> list[str]:
    """The name of each rank in messages for the user."""
    return [f"rank {rank} (pid {fact['pid']} on host {fact['hostname']})" for rank, fact in enumerate(everyone)]


def unix_listener() -> socket.socket:
    """A listening unix socket without a name in any file system."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0mscomm-{secrets.token_hex(16)}")
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener


def _numbers(ranks: list[int]) -> str:
    """The ranks as text for the log: "0 to 7" if they are three or more consecutive ranks, otherwise each of them."""
    whole = ranks == list(range(ranks[0], ranks[0] + len(ranks)))
    return f"{ranks[0]} to {ranks[-1]}" if whole and len(ranks) > 2 else ", ".join(map(str, ranks))


def _numbered(hosts: list[int]) -> list[int]:
    """The host of each rank of a group, with the hosts numbered from 0 in the order of their first ranks."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(host, len(numbers)) for host in hosts]


def _needed(hosts: list[int], me: int) -> list[bool]:
    """Which listeners a rank needs, so that the ranks after it can connect.

    True means a listener for the rank's own host, False a listener for the other hosts.
    """
    return sorted({host == hosts[me] for host in hosts[me + 1 :]})


def _address(listener: socket.socket) -> Any:
    name = listener.getsockname()
    return list(name[:2]) if isinstance(name, tuple) else name


def _exchange_memory(
    rank: int,
    neighbours: list[int],
    everyone: Sequence[dict[str, Any]],
    listener: socket.socket,
    heap_fd: int,
    key: bytes,
    mine: Identity,
    deadline: Deadline,
    member: Member,
    closing: contextlib.ExitStack,
) -> list[int]:
    """Return the descriptors of the neighbours' heaps, in the order of `neighbours`.

    The first neighbour collects all descriptors and sends them to the others, so each of the others needs only one
    connection.
    """
    first, *others = neighbours
    if rank == first:
        heap_fds = [heap_fd]
        check = plan.world_id(mine.epoch)
        came = links.accept_all([listener], others, key, MEMORY, mine, deadline, check=lambda: member.check(check))
        for sock in came.values():
            closing.callback(sock.close)
        for peer in others:
            with _reaching(peer):
                heap_fds += links.recv_fds(came[peer], 1, deadline)
            closing.callback(os.close, heap_fds[-1])
        for peer, sock in came.items():
            with _reaching(peer):
                links.send_fds(sock, heap_fds, deadline)
        return heap_fds
    with _reaching(first), links.connect(everyone[first]["memory"], deadline) as sock:
        links.greet(sock, key, MEMORY, mine, deadline)
        links.send_fds(sock, [heap_fd], deadline)
        heap_fds = links.recv_fds(sock, len(neighbours), deadline)
    for fd in heap_fds:
        closing.callback(os.close, fd)
    return heap_fds


def _pidfds(rank: int, neighbours: list[int], everyone: Sequence[dict[str, Any]], names: list[str]) -> list[int]:
    """Return for each rank a pidfd, which tells the core at once that the rank's process has ended.

    There is -1 for this rank and for ranks of other hosts, and for all ranks before Linux 5.3.
    """
    fds = [-1] * len(everyone)
    with _closing_unless_done(fds):
        for peer in neighbours:
            if peer == rank:
                continue
            try:
                fds[peer] = os.pidfd_open(everyone[peer]["pid"])
            except ProcessLookupError:
                raise PeerLost(f"{names[peer]} ended while the group was set up", [peer]) from None
            except (OSError, AttributeError) as error:  # the system offers no pidfds, so rely on the hub
                if links.is_shortage(error):
                    raise
                return fds
    return fds


@contextlib.contextmanager
def _reaching(peer: int, where: str = "") -> Iterator[None]:
    """Turn an error while connecting to a peer into a symptom: a PeerLost that names the peer. The hub finds the cause.

    If this process lacks descriptors or memory, no peer is to blame, and the error is raised unchanged.
    """
    try:
        yield
    except (OSError, Error) as error:
        if links.is_shortage(error):
            raise
        raise PeerLost(f"cannot reach rank {peer}{where}: {error}", [peer]) from error


@contextlib.contextmanager
def _system_calls(rank: int, what: str) -> Iterator[None]:
    """Turn an Error of the core about a failed system call into an Aborted that names this rank."""
    try:
        yield
    except Error as error:
        raise Aborted(f"rank {rank}: {what}: {error}", [rank]) from error


@contextlib.contextmanager
def _closing_unless_done(fds: list[int]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for fd in fds:
            if fd >= 0:
                os.close(fd)
        raise
