"""Sets up an epoch and its groups: collects facts about this rank, shares memory with the other ranks on this host, and
connects the ranks of a group.

A rank has a listener open only while an epoch, a group or a link (group_links.py) is being set up. At all other times,
it has no listener and no memfd open.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import socket
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mscomm import _core, accelerators, environment, log
from mscomm.accelerators import Accelerator
from mscomm.cluster import interfaces, links, plan, prices
from mscomm.cluster.bytestream import ByteStream
from mscomm.cluster.cpus import can_spin, cpu_quota, cpus_of
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.hello import DATA, HUB, MEMORY, Identity, grouped, package_version
from mscomm.cluster.member import Member, Welcome
from mscomm.errors import Aborted, Error, PeerLost, on_failure

# The algorithms that add floats in an order of their own. mscomm uses them only if MSCOMM_ALGO names them.
OWN_ORDER = {(what, name) for what, name, _, own_order in _core.algorithms() if own_order}
_HUGE_PAGE = 2 << 20
_LARGEST_POWER = 40  # all calls with at least 2**40 bytes use the same algorithm
_ADDRESS_SPACE = 1 << 46  # bytes of address space for all heaps in a process; a process has 2^47 bytes in total


# -- facts about this rank


class Asked(NamedTuple):
    """What the user requested on this rank.

    backend: its name or "auto". device: its number, or None. algo: the text of MSCOMM_ALGO. prices: see prices.read.
    """

    backend: str
    device: int | None
    algo: str
    prices: list[float] | str | None
    local_rank: int | None = None  # this rank's number on its host; None if the launcher does not provide it

    def accelerators(self) -> dict[str, Any]:
        """Return the facts about this rank's accelerators."""
        return accelerators.facts(self.backend, self.device, self.local_rank, os.environ)


def facts(asked: Asked, size: int, memory: socket.socket, name: str) -> dict[str, Any]:
    """Return the facts that this rank tells the other ranks about itself.

    memory: the socket on which this rank listens for the other ranks of its host. name: the name of the job.
    """
    return {
        "version": package_version(),
        "backend": asked.backend,
        "job": name,
        "size": size,
        "algo": asked.algo,
        "prices": asked.prices,
        "host": host_id(),
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        "cpus": sorted(os.sched_getaffinity(0)),
        "quota": cpu_quota(),
        "memory": memory.getsockname(),
        **asked.accelerators(),
    }


def host_id() -> str:
    """Return an id that is the same for all processes that can share memory.

    The id is the value of MSCOMM_HOST_ID. If that is not set, the id consists of the boot id and the ids of this
    process's namespaces.
    """
    if said := environment.read("MSCOMM_HOST_ID", os.environ):
        return f"MSCOMM_HOST_ID={said}"
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "ipc")]
    except OSError:
        return socket.gethostname()
    return " ".join([boot, *spaces])


def forced_algorithms(algo: str) -> list[str]:
    """Return, for each collective, the name of the algorithm that `algo` requests; "" if it requests none.

    algo: for example "all_reduce=ring,broadcast=tree", or just "ring" for every collective that has an algorithm of
    this name. Raise ValueError if an item does not name an algorithm.
    """
    known = {(what, name) for what, name, *_ in _core.algorithms()}
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
                f"{collective}={'|'.join(row for kind, row, *_ in _core.algorithms() if kind == collective)}"
                for collective in forced
            )
            raise ValueError(
                f"MSCOMM_ALGO={algo!r}: {item!r} is not an algorithm. Give collective=name, separated by commas: "
                f"{choices}"
            )
    return list(forced.values())


def heap_bytes(ranks: int) -> int:
    """Return the size of a rank's heap: the size of the host's memory, or less if a limit of this process is lower.

    `ulimit -v` limits the address space, in which this rank maps the heaps of all ranks. `ulimit -f` limits the size of
    a file, and a heap is an in-memory file. The heap is sparse: a page uses memory only after it has been touched.
    """
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    space, file = (resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE))
    room = _ADDRESS_SPACE if space == resource.RLIM_INFINITY else space // 4
    size = min(size, room // (ranks + 1), size if file == resource.RLIM_INFINITY else file)
    return max(_HUGE_PAGE, size // _HUGE_PAGE * _HUGE_PAGE)


# -- one epoch of the job


def chosen(layout: _core.Layout) -> dict[str, str]:
    """Return each collective's algorithms as text, such as "direct", or "tree or ring" if large arrays use ring."""
    sizes = [2**power for power in range(_LARGEST_POWER + 1)]
    return {
        what: " or ".join(dict.fromkeys(layout.chosen(number, size) for size in sizes))
        for number, what in enumerate(_core.collectives)
    }


def creation(name: str) -> str:
    """Return how messages call the set-up of the group with this name."""
    return "init" if name == "world" else f"create_group({name!r})"


class Founded(NamedTuple):
    """A group's core, and the location of its control memory.

    `control`: the offset of the control memory in this rank's heap. `control` is None if the control memory is in
    another rank's heap, or if the group has no control memory. `control_ranks`: how many ranks share this memory.
    """

    core: _core.Group
    control: int | None
    control_ranks: int


class Epoch:
    """The state that all groups of one epoch share: the ranks, their hosts, and their shared memory."""

    peers: _core.Peers

    def __init__(self, member: Member | None, welcome: Welcome, forced: list[str]) -> None:
        self.member = member
        self.rank = welcome.rank
        self.size = welcome.size
        self.number = welcome.epoch
        self.run = welcome.run
        self.facts = welcome.facts
        self.key = welcome.key
        self.tls = welcome.tls
        self.restarts = welcome.restarts
        self._identity = Identity(version=package_version(), rank=welcome.rank, epoch=welcome.epoch, run=welcome.run)
        self.hosts = plan.hosts(welcome.facts)
        self.names = [f"rank {i} (pid {fact['pid']} on host {fact['hostname']})" for i, fact in enumerate(self.facts)]
        # the ranks on this rank's host, including this rank
        self.neighbours = [rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank]]
        self.forced = forced
        self.prices: list[float] | None = None  # see prices.agreed
        self.heap: _core.Heap | None = None
        self.accelerator: Accelerator | None = None  # None if the job's backend is the CPU core

    def identity(self, group: str, to: int = HUB) -> Identity:
        """Return this rank's identity for the hello of a link of the group. to: the rank to which it connects."""
        return self._identity._replace(group=grouped(group), to=to)

    def choose(self, asked: str) -> None:
        """Choose the backend from all ranks' facts, and set up this rank's accelerator for it."""
        chosen = accelerators.choose(asked, self.facts, self.hosts, self.names, self.tls == "certificates")
        if self.rank == 0 and (asked == "auto" or chosen.backend != accelerators.CPU):
            say = log.warn if "MSCOMM_ALLOW_PLAIN_DEVICE" in chosen.reason else log.info
            say(f"backend {chosen.backend}: {chosen.reason}")
        if chosen.backend == accelerators.CPU:
            return
        opened = accelerators.opened(chosen.backend)
        device = chosen.devices[self.rank]
        opened.runtime.use(device)
        log.info(
            f"{chosen.backend} {opened.vendor.version()} ({opened.vendor.path()}, {opened.vendor.origin()}), "
            f"{opened.runtime.version()}; device {device}, {opened.runtime.device_name(device)}; "
            f"kernels: {opened.runtime.kernels(device)}"
        )
        self.accelerator = Accelerator(chosen.backend, opened, device)
        several = len(set(self.hosts)) > 1
        interface = interfaces.name_of(self.member.address()) if self.member and several else None
        for variable, text in accelerators.set_up(chosen.backend, interface, os.environ).items():
            log.info(f"{variable}={text} was set for {chosen.backend}")
        if self.rank == 0 and (text := accelerators.warning(chosen.backend, os.environ)):
            log.warn(text)

    def found(
        self,
        group: str,
        name: str,
        ranks: list[int],
        deadline: Deadline,
        all_came: Callable[[], None],
        forced: list[str],
    ) -> Founded:
        """Set up the group of `ranks`, which include this rank. Each of these ranks must call found().

        group: the group id at the hub. all_came: a function that is called when all ranks have met. After that, no
        other group may use this id. forced: see forced_algorithms.
        """
        hosts = plan.hosts([self.facts[rank] for rank in ranks])
        me = ranks.index(self.rank)
        layout = _core.Layout(hosts=hosts, rank=me, forced=forced, prices=self.prices)
        at_home = [ranks[place] for place in layout.at_home]
        what = creation(name)
        device = (*self.accelerator.opened, self.accelerator.device) if self.accelerator else None
        control = None
        came = False
        core = None
        try:
            if layout.arena and self.rank == min(at_home):
                assert self.heap
                control = self.heap.reserve_control(len(at_home))
            with contextlib.ExitStack() as closing:
                # The partners at later indices connect to this rank: those on this host to one listener, and those on
                # other hosts to another.
                near = sorted({hosts[place] == hosts[me] for place in layout.partners if place > me})
                listening = [closing.enter_context(self._listener(is_near)) for is_near in near]
                offered: dict[str, Any] = {
                    "control": control,
                    "data": [links.address_of(listener) for listener in listening],
                }
                if device and me == 0:
                    offered["device"] = device[0].make_id(*device[1:])
                told: dict[int, dict[str, Any]] = {self.rank: offered}
                if self.member and len(ranks) > 1:
                    came = True
                    told = dict(zip(*self.member.meet(group, what, ranks, offered, deadline, founds=True), strict=True))
                elif self.member:
                    self.member.check(group)  # a group of one rank has no meeting that could report an abort of the job
                all_came()
                spin = can_spin([self.facts[rank] for rank in self.neighbours])
                streams = self._connect(group, ranks, layout, listening, told, deadline)
                with _system_calls(self.rank, f"group {name}"):
                    core = _core.Group(
                        name=name,
                        peers=self.peers,
                        ranks=ranks,
                        epoch=self.number,
                        layout=layout,
                        control=told[min(at_home)]["control"] if layout.arena else 0,
                        spin=spin,
                        links=[stream.sock.detach() if stream else -1 for stream in streams],
                        news_fd=self.member.news_fd if self.member else -1,
                        secrets=[self.secret(stream, place < me) for place, stream in enumerate(streams)],
                    )
            if device:
                check: Callable[[], object] = functools.partial(self.member.check, group) if self.member else dict
                core.join_device(*device, told[ranks[0]]["device"], deadline.left(), check)
        except BaseException as error:
            if control is not None and core is None:
                assert self.heap
                # If the hub did not refuse the meeting, other ranks may be using this memory. In that case, the heap
                # must keep the memory until these ranks have stopped using it.
                if came and self.member and not self.member.was_refused(group):
                    self.heap.abandon_control(control, len(at_home))
                else:
                    self.heap.release_control(control, 0)
            known = came and isinstance(error, Error)
            if self.member and len(ranks) > 1 and not known and not self.member.has_come(group):
                self.member.refuse(group, what, ranks, error)
            raise
        if log.enabled(log.INFO):
            self._tell_founded(name, group, ranks, layout, spin)
        return Founded(core, control, len(at_home))

    def drop(self, group: str, founded: Founded) -> None:
        """End this rank's part of a group that found() has set up.

        If the group's control memory is in this rank's heap, it is freed when no rank of the group uses it any more.
        """
        founded.core.close()
        if self.member:
            self.member.detach(group)
        if founded.control is not None and self.heap is not None:
            self.heap.release_control(founded.control, founded.control_ranks)

    def _tell_founded(self, name: str, id: str, ranks: list[int], layout: _core.Layout, spin: bool) -> None:
        log.info(f"group {name} ({id}): rank {layout.rank} of {len(ranks)}, ranks {plan.numbers(ranks)}")
        by = ", ".join(f"{what} {algorithm}" for what, algorithm in chosen(layout).items())
        carriers = ["arena"] * layout.arena + ["mesh"] * layout.mesh
        log.info(f"group {name}: by {' and '.join(carriers) or 'copying'}: {by}")
        if layout.arena:
            here = [self.facts[rank] for rank in self.neighbours]
            log.info(
                f"group {name}: waits {'spin' if spin else 'yield'}: {len(here)} ranks on this host, "
                f"{cpus_of(here):g} CPUs for them"
            )

    def _listener(self, at_home: bool) -> socket.socket:
        if at_home:
            return links.unix_listener(128)
        assert self.member
        # Let the backlog hold all ranks. If it were full, the kernel would not answer, and a rank that tries to connect
        # would report us as lost after MS_NODE_TIMEOUT. However, the kernel limits the backlog to
        # net.core.somaxconn.
        return links.listen(self.member.address(), max(128, self.size), os.environ)

    def _connect(
        self,
        group: str,
        ranks: list[int],
        layout: _core.Layout,
        listening: list[socket.socket],
        told: dict[int, dict[str, Any]],
        deadline: Deadline,
    ) -> list[ByteStream | None]:
        """Connect to the partners of this rank. Return the authenticated streams in the order of `ranks`.

        The others are None; GroupLinks connects to them when a call needs them. If the group has no mesh, return [].

        In each pair of ranks, the rank that is later in `ranks` connects to the earlier one. They use a unix socket if
        both are on the same host.
        """
        if not layout.mesh:
            return []
        assert self.member
        streams: list[ByteStream | None] = [None] * len(ranks)
        check = functools.partial(self.member.check, group)
        with on_failure(_close, streams):
            for place in (place for place in layout.partners if place < layout.rank):
                streams[place] = self.call(group, ranks[place], told[ranks[place]]["data"], DATA, deadline, check)
            later = [ranks[place] for place in layout.partners if place > layout.rank]
            came = links.accept_all(listening, later, self.key, DATA, self.identity(group), deadline, check=check)
            for rank, stream in came.items():
                streams[ranks.index(rank)] = stream
        return streams

    def call(
        self,
        group: str,
        rank: int,
        addresses: list[Any],
        purpose: int,
        deadline: Deadline,
        check: Callable[[], None] | None = None,
    ) -> ByteStream:
        """Connect to `rank`, at the first address in the list that this rank can use, for a link of the group.

        check: see links.greet().
        """
        at_home = self.hosts[rank] == self.hosts[self.rank]
        valid = [one for one in addresses if links.is_address(one)]
        address = next((one for one in valid if isinstance(one, (str, bytes)) == at_home), None)
        if address is None:
            lacks = f"it gave no address for {'its own host' if at_home else 'other hosts'}"
            raise PeerLost(f"cannot reach rank {rank}: {lacks}", [rank])
        where = ""
        if not at_home:
            assert self.member
            host, port = address
            address = interfaces.dial_address(host, self.member.address()), port
            where = f" at {interfaces.endpoint(*address)}"
        with _reaching(rank, where):
            return links.open_link(address, self.key, purpose, self.identity(group, rank), deadline, check=check)

    def secret(self, stream: ByteStream | None, connects: bool) -> tuple[bytes, bool] | None:
        """Return the key of a link's TLS and whether this rank begins its handshake; None for a link without TLS.

        The key is the secret of the link's hello, so it belongs to this connection alone. Links within a host have no
        TLS.
        """
        if not self.tls or stream is None or stream.sock.family == socket.AF_UNIX:
            return None
        return stream.secret, connects

    def invite(
        self, group: str, ranks: Sequence[int], purpose: int, deadline: Deadline, check: Callable[[], None]
    ) -> Generator[tuple[int, ByteStream]]:
        """Ask these ranks to connect to this rank, whatever their programs do. Yield (rank, stream) as they come.

        purpose: MESSAGES if the connections carry the group's messages from this rank, DATA if they carry collective
        calls. check: a function that is called at least every 100 ms. If it raises an error, the wait ends with this
        error.
        """
        assert self.member
        with contextlib.ExitStack() as closing:
            near = sorted({self.hosts[rank] == self.hosts[self.rank] for rank in ranks})
            listening = [closing.enter_context(self._listener(is_near)) for is_near in near]
            addresses = [links.address_of(listener) for listener in listening]
            mine = self.identity(group)
            for rank in ranks:
                closing.callback(self.member.connected, group, rank, purpose)
                self.member.dial(group, rank, purpose, addresses, deadline)
            yield from links.accept_each(listening, ranks, self.key, purpose, mine, deadline, check=check)


def share(
    member: Member, welcome: Welcome, memory: socket.socket, forced: list[str], deadline: Deadline, asked: str
) -> Epoch:
    """Set up the state that all groups of this epoch need, and return the Epoch. Every rank calls this.

    memory: the listener that was passed to facts(). asked: the name of the backend, or "auto".
    """
    plan.agree(welcome.facts)
    epoch = Epoch(member, welcome, forced)
    epoch.prices = prices.agreed(welcome.facts, welcome.epoch)
    epoch.choose(asked)
    rank, neighbours = epoch.rank, epoch.neighbours
    with contextlib.ExitStack() as closing:
        heap_fds = [-1] * epoch.size
        if len(neighbours) > 1:
            with _system_calls(rank, "init"):
                epoch.heap, heap_fd = _core.make_heap(
                    heap_bytes(len(neighbours)), bool(environment.read("MSCOMM_HUGE_PAGES", os.environ))
                )
            closing.callback(os.close, heap_fd)
            for peer, fd in zip(neighbours, _exchange_memory(epoch, memory, heap_fd, deadline, closing), strict=True):
                heap_fds[peer] = fd if peer != rank else -1
        if log.enabled(log.INFO):
            _tell_hosts(epoch)
        if neighbours[0] == rank:
            _warn_of_threads([epoch.facts[peer] for peer in neighbours])
        if rank == 0 and any(forced):
            _warn_of_forced(forced)
        if rank == 0:
            _tell_prices(epoch)
        if rank == 0 and not epoch.tls and max(epoch.hosts) > 0 and any(fact["link"] for fact in epoch.facts):
            log.warn("the links between hosts are not encrypted, as enable_ssl=False or --permit-plain permits")
        pidfds = _pidfds(epoch)
        with _system_calls(rank, "init"):
            epoch.peers = _core.Peers(
                rank=rank, names=epoch.names, hosts=epoch.hosts, pidfds=pidfds, heap=epoch.heap, heap_fds=heap_fds
            )
    return epoch


def _tell_hosts(epoch: Epoch) -> None:
    here, hosts = epoch.neighbours, epoch.hosts
    name = epoch.facts[epoch.rank]["hostname"]
    log.info(f"hosts: {max(hosts) + 1}; {name} is number {hosts[epoch.rank]} and has the ranks {plan.numbers(here)}")
    if len(here) > 1:
        room = heap_bytes(len(here)) >> 20
        log.info(f"shared memory: room for {room} MiB of arrays a rank; pages come as they are used")
    else:
        log.info("shared memory: none, no other rank is on this host")


def _warn_of_threads(here: Sequence[dict[str, Any]]) -> None:
    """Warn if OMP_NUM_THREADS gives the ranks of this host more threads than there are CPUs.

    Only the host's lowest rank calls this.
    """
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


def _tell_prices(epoch: Epoch) -> None:
    mine = epoch.facts[0].get("prices")
    if others := prices.without_effect(epoch.facts):
        log.warn(f"all ranks use the prices of rank 0; MSCOMM_TUNED has no effect on {plan.named(others)}")
    if isinstance(mine, str):
        log.warn(f"{mine}. All ranks use the default prices")
    if epoch.prices is None:
        return
    if max(epoch.hosts) == 0:
        log.warn("MSCOMM_TUNED has no effect on one host")
    named = zip(prices.Prices._fields, epoch.prices, strict=True)
    log.info("prices of MSCOMM_TUNED: " + ", ".join(f"{name} {price:.4g}" for name, price in named))


def _warn_of_forced(forced: list[str]) -> None:
    items = [(what, name) for what, name in zip(_core.collectives, forced, strict=True) if name]
    own_order = "; ring adds floats in an order of its own" if OWN_ORDER & set(items) else ""
    log.warn(f"MSCOMM_ALGO forces {', '.join(map('='.join, items))}{own_order}")


def alone(asked: Asked) -> Epoch:
    """Return the epoch of a job of one rank."""
    here = {"host": "", "hostname": socket.gethostname(), "pid": os.getpid(), "cpus": [0], "quota": 1.0}
    facts: list[dict[str, Any]] = [here | {"prices": asked.prices} | asked.accelerators()]
    prices.agreed(facts)
    welcome = Welcome(rank=0, size=1, run=b"", epoch=0, tls="", restarts=False, key=b"", facts=facts)
    epoch = Epoch(None, welcome, [""] * len(_core.collectives))
    epoch.peers = _core.Peers(rank=0, names=epoch.names, hosts=[0], pidfds=[-1], heap=None, heap_fds=[])
    epoch.choose(asked.backend)
    return epoch


def _exchange_memory(
    epoch: Epoch, listener: socket.socket, heap_fd: int, deadline: Deadline, closing: contextlib.ExitStack
) -> list[int]:
    """Return the descriptors of the neighbours' heaps, in the order of `epoch.neighbours`.

    The first neighbour collects all descriptors and sends them to the other neighbours, so each of the others needs
    only one connection.
    """
    first, *others = epoch.neighbours
    world = plan.world_id(epoch.number)
    assert epoch.member
    check = functools.partial(epoch.member.check, world)
    if epoch.rank == first:
        heap_fds = [heap_fd]
        came = links.accept_all([listener], others, epoch.key, MEMORY, epoch.identity(world), deadline, check=check)
        for stream in came.values():
            closing.callback(stream.close)
        for peer in others:
            with _reaching(peer):
                heap_fds += links.recv_fds(came[peer].sock, 1, deadline)
            closing.callback(os.close, heap_fds[-1])
        for peer, stream in came.items():
            with _reaching(peer):
                links.send_fds(stream.sock, heap_fds, deadline)
        return heap_fds
    with _reaching(first), contextlib.ExitStack() as closing_link:
        mine = epoch.identity(world, first)
        stream = links.open_link(epoch.facts[first]["memory"], epoch.key, MEMORY, mine, deadline, check=check)
        closing_link.callback(stream.close)
        links.send_fds(stream.sock, [heap_fd], deadline)
        heap_fds = links.recv_fds(stream.sock, len(epoch.neighbours), deadline)
    for fd in heap_fds:
        closing.callback(os.close, fd)
    return heap_fds


def _pidfds(epoch: Epoch) -> list[int]:
    """Return, for each rank, a pidfd or -1. With a pidfd, the core learns at once that the rank's process has ended.

    The entry is -1 for this rank and for ranks on other hosts. Before Linux 5.3, all entries are -1.
    """
    fds = [-1] * epoch.size
    with on_failure(links.close_all, fds):
        for peer in epoch.neighbours:
            if peer == epoch.rank:
                continue
            try:
                fds[peer] = os.pidfd_open(epoch.facts[peer]["pid"])
            except ProcessLookupError:
                raise PeerLost(f"{epoch.names[peer]} ended while the group was set up", [peer]) from None
            except (OSError, AttributeError) as error:  # the system offers no pidfds, so rely on the hub
                if links.is_shortage(error):
                    raise
                return fds
    return fds


def _close(streams: list[ByteStream | None]) -> None:
    for stream in filter(None, streams):
        stream.close()


@contextlib.contextmanager
def _reaching(peer: int, where: str = "") -> Iterator[None]:
    """Convert an error of the connection to the peer into a PeerLost that names the peer.

    The PeerLost is a symptom, for which the hub then finds the cause. If the error is a lack of descriptors or memory,
    no peer is to blame, and the error is raised unchanged.
    """
    try:
        yield
    except links.Checked as carrier:
        raise carrier.error from None
    except (OSError, Error) as error:
        if links.is_shortage(error):
            raise
        raise PeerLost(f"cannot reach rank {peer}{where}: {error}", [peer]) from error


@contextlib.contextmanager
def _system_calls(rank: int, what: str) -> Iterator[None]:
    """Convert an Error of the core, which reports a failed system call, into an Aborted that names this rank."""
    try:
        yield
    except Error as error:
        raise Aborted(f"rank {rank}: {what}: {error}", [rank]) from error
