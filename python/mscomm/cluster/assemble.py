"""From a welcome to a working group: gathers facts about this rank, exchanges memory and links with the others, and
builds the core's group.

The listeners of a rank live from `Facts` to the end of `assemble`; afterwards no socket listens and no memfd is open.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mscomm import _core
from mscomm.cluster import links, plan
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.hello import DATA, MEMORY, Identity, package_version
from mscomm.cluster.member import Member, Welcome
from mscomm.errors import Error, PeerLost

_HUGE_PAGE = 2 << 20
_ADDRESS_SPACE = 1 << 46  # of the 2^47 bytes of a process, what the heaps of a host may map together


class Listeners(NamedTuple):
    """Where the others reach this rank during set-up."""

    memory: socket.socket  # abstract unix socket, for descriptors
    data: socket.socket  # TCP, for mesh links


class Assembled(NamedTuple):
    core: _core.Group
    heap: _core.Heap | None  # None: the ranks share no memory
    hosts: list[int]


def listeners(control: socket.socket) -> Listeners:
    """Listening sockets: the TCP one at the address by which this rank reaches the hub, or on loopback."""
    memory = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    memory.bind(f"\0mscomm-{secrets.token_hex(16)}")
    memory.listen(128)
    family = control.family if control.family in (socket.AF_INET, socket.AF_INET6) else socket.AF_INET
    address = control.getsockname()[0] if family == control.family else "127.0.0.1"
    data = socket.socket(family, socket.SOCK_STREAM)
    data.bind((address, 0))
    data.listen(128)
    return Listeners(memory, data)


def facts(backend: str, size: int, algo: str, at: Listeners) -> dict[str, Any]:
    """What this rank tells the others about itself."""
    return {
        "version": package_version(),
        "backend": backend,
        "size": size,
        "algo": algo,
        "host": host_id(),
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        "cpus": sorted(os.sched_getaffinity(0)),
        "quota": cpu_quota(),
        "memory": at.memory.getsockname(),
        "data": list(at.data.getsockname()[:2]),
    }


def host_id() -> str:
    """Equal for processes that can share memory: MSCOMM_HOST_ID, or the boot and the namespaces of this process."""
    if said := os.environ.get("MSCOMM_HOST_ID"):
        return f"MSCOMM_HOST_ID={said}"
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "ipc")]
    except OSError:
        return socket.gethostname()
    return " ".join([boot, *spaces])


def cpu_quota() -> float:
    """CPUs' worth of time that the cgroup allows; inf without a limit. cgroup v2's cpu.max, v1's cfs quota."""
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


def can_spin(members: list[dict[str, Any]]) -> bool:
    """Whether the host has a CPU for each of these ranks: the union of their masks, within the smallest quota."""
    cpus = {cpu for member in members for cpu in member["cpus"]}
    return bool(len(members) <= min(len(cpus), *(member["quota"] for member in members)))


def forced_algorithms(algo: str) -> list[str]:
    """The algorithm named for each collective, "" for none: of "all_reduce=ring,broadcast=tree", or one name for all.

    ValueError for what names no algorithm.
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
    """The size of a rank's heap: all of the host's memory, as far as the address space has room.

    It is sparse: unused pages do not exist.
    """
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    room = _ADDRESS_SPACE if limit == resource.RLIM_INFINITY else limit // 4
    return max(_HUGE_PAGE, min(size, room // (ranks + 1)) // _HUGE_PAGE * _HUGE_PAGE)


def assemble(
    name: str, member: Member, welcome: Welcome, at: Listeners, forced: list[str], deadline: Deadline
) -> Assembled:
    """Builds the core's group; what was opened on the way is closed again, whatever happens."""
    everyone = welcome.facts
    plan.agree(everyone)
    hosts = plan.hosts(everyone)
    rank, size = welcome.rank, welcome.size
    carriers = {_core.select(what, hosts, forced)[1] for what in range(len(_core.collectives))}
    mine = Identity(welcome.job, package_version(), rank, welcome.epoch)
    names = [f"rank {r} (pid {fact['pid']} on host {fact['hostname']})" for r, fact in enumerate(everyone)]

    with contextlib.ExitStack() as closing:
        heap, control_fd = None, -1
        heap_fds: list[int] = []
        if "arena" in carriers:
            heap, heap_fd = _core.make_heap(heap_bytes(size))
            closing.callback(os.close, heap_fd)
            control_fd, heap_fds = _exchange_memory(
                rank, everyone, at.memory, heap_fd, welcome.key, mine, deadline, member, closing
            )
        pidfds, link_fds = _pidfds(rank, hosts, everyone, names), []
        if "mesh" in carriers:
            with _closing_unless_done(pidfds):
                link_fds = _connect_mesh(rank, everyone, at.data, welcome.key, mine, deadline, member)
        core = _core.Group(
            name=name,
            rank=rank,
            hosts=hosts,
            epoch=welcome.epoch,
            names=names,
            forced=forced,
            pidfds=pidfds,
            heap=heap,
            control_fd=control_fd,
            heap_fds=heap_fds,
            spin=can_spin([fact for fact, host in zip(everyone, hosts, strict=True) if host == hosts[rank]]),
            links=link_fds,
            notice=lambda text: print(text, file=sys.stderr, flush=True),
        )
    return Assembled(core, heap, hosts)


def alone(name: str) -> Assembled:
    """The group of a job of one."""
    core = _core.Group(
        name=name,
        rank=0,
        hosts=[0],
        epoch=0,
        names=[f"rank 0 (pid {os.getpid()})"],
        forced=[""] * len(_core.collectives),
        pidfds=[-1],
        heap=None,
        control_fd=-1,
        heap_fds=[],
        spin=False,
        links=[],
        notice=print,
    )
    return Assembled(core, None, [0])


def _exchange_memory(
    rank: int,
    everyone: list[dict[str, Any]],
    listener: socket.socket,
    heap_fd: int,
    key: bytes,
    mine: Identity,
    deadline: Deadline,
    member: Member,
    closing: contextlib.ExitStack,
) -> tuple[int, list[int]]:
    """The control memory's descriptor and all heaps', by rank. Rank 0 collects and hands out: one connection a rank."""
    size = len(everyone)
    if rank == 0:
        control_fd = _core.make_control(size)
        closing.callback(os.close, control_fd)
        heap_fds = [heap_fd]
        came = links.accept_all(listener, range(1, size), key, MEMORY, mine, deadline, check=member.check)
        for sock in came.values():
            closing.callback(sock.close)
        for peer in range(1, size):
            with _reaching(peer):
                heap_fds += links.recv_fds(came[peer], 1, deadline)
            closing.callback(os.close, heap_fds[-1])
        for peer, sock in came.items():
            with _reaching(peer):
                links.send_fds(sock, [control_fd, *heap_fds], deadline)
        return control_fd, heap_fds
    with _reaching(0), links.connect(everyone[0]["memory"], deadline) as sock:
        links.greet(sock, key, MEMORY, mine, deadline)
        links.send_fds(sock, [heap_fd], deadline)
        control_fd, *heap_fds = links.recv_fds(sock, 1 + size, deadline)
    for fd in (control_fd, *heap_fds):
        closing.callback(os.close, fd)
    return control_fd, heap_fds


def _connect_mesh(
    rank: int,
    everyone: list[dict[str, Any]],
    listener: socket.socket,
    key: bytes,
    mine: Identity,
    deadline: Deadline,
    member: Member,
) -> list[int]:
    """A connected, authenticated socket to every other rank, by rank; -1 for this one. The higher rank connects."""
    fds = [-1] * len(everyone)
    with _closing_unless_done(fds):
        for peer in range(rank):
            host, port = everyone[peer]["data"]
            with _reaching(peer), contextlib.ExitStack() as failing:
                sock = failing.enter_context(links.connect((host, port), deadline))
                links.greet(sock, key, DATA, mine, deadline)
                failing.pop_all()
            fds[peer] = sock.detach()
        for peer, sock in links.accept_all(
            listener, range(rank + 1, len(everyone)), key, DATA, mine, deadline, check=member.check
        ).items():
            fds[peer] = sock.detach()
    return fds


def _pidfds(rank: int, hosts: list[int], everyone: list[dict[str, Any]], names: list[str]) -> list[int]:
    """By which the core sees at once that a process of this host has ended; -1 for others, and before Linux 5.3."""
    fds = [-1] * len(everyone)
    with _closing_unless_done(fds):
        for peer, fact in enumerate(everyone):
            if peer == rank or hosts[peer] != hosts[rank]:
                continue
            try:
                fds[peer] = os.pidfd_open(fact["pid"])
            except ProcessLookupError:
                raise PeerLost(f"{names[peer]} ended while the group was set up", [peer]) from None
            except (OSError, AttributeError):  # not in this kernel or this Python, or forbidden: the hub tells
                return fds
    return fds


@contextlib.contextmanager
def _reaching(peer: int) -> Iterator[None]:
    """Whatever goes wrong on the way to a peer is a symptom of that peer; the hub knows what is behind it."""
    try:
        yield
    except (OSError, Error) as error:
        raise PeerLost(f"cannot reach rank {peer} during init: {error}", [peer]) from error


@contextlib.contextmanager
def _closing_unless_done(fds: list[int]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for fd in fds:
            if fd >= 0:
                os.close(fd)
        raise
