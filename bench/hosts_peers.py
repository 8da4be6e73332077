"""The contenders of bench/hosts.py besides mscomm and gloo: "wire", "bare", and MPI over several hosts."""

from __future__ import annotations

import ctypes
import os
import select
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hosts_report import BARE, BARE_COLLECTIVES, WIRE

import mscomm
from mscomm.bench.contenders import Local
from mscomm.bench.peers import Flavour, Installed, Mpi
from mscomm.bench.table import Buffers, Case

WIRE_PORT, BARE_PORT = 29501, 29502  # the hosts are new, so the ports are free
BARE_SENDS_AHEAD = 128 << 10  # bytes; so that what is sent is still in the cache when the peer's kernel copies it
START_S = 60.0
STUCK_S = 60.0


class Layout(NamedTuple):
    """Where this rank is. All hosts have the same number of ranks, and rank 0 is on the first host."""

    names: list[str]  # of the hosts
    interface: str
    local_ranks: int
    rank: int

    @property
    def hosts(self) -> int:
        return len(self.names)

    @property
    def host(self) -> int:
        return self.rank // self.local_ranks

    @property
    def first_of_host(self) -> bool:
        return self.rank % self.local_ranks == 0


# -- wire


# For each collective: the least bytes that must go from each host to the next, if the hosts are in a ring and forward
# data. Each entry gets the message's size and the numbers of hosts and of ranks per host. Host 0 is the root.
LINKS: dict[str, Callable[[int, int, int], list[int]]] = {
    "all_reduce": lambda size, hosts, ranks: [2 * (hosts - 1) * size // hosts] * hosts,
    "all_gather": lambda size, hosts, ranks: [(hosts - 1) * size // hosts] * hosts,
    "reduce_scatter": lambda size, hosts, ranks: [(hosts - 1) * size // hosts] * hosts,
    "all_to_all": lambda size, hosts, ranks: [ranks * (hosts - 1) * size // hosts] * hosts,
    "broadcast": lambda size, hosts, ranks: [size] * (hosts - 1) + [0],
    "reduce": lambda size, hosts, ranks: [0] + [size] * (hosts - 1),
    "gather": lambda size, hosts, ranks: [0] * (hosts - 1) + [(hosts - 1) * size // hosts],
    "scatter": lambda size, hosts, ranks: [(hosts - 1) * size // hosts] + [0] * (hosts - 1),
}


def least_bytes(collective: str, size: int, layout: Layout) -> int:
    """Return the least bytes that the busiest host must send, or must receive, whichever is more."""
    return max(LINKS[collective](size, layout.hosts, layout.local_ranks))


def wire(case: Case, layout: Layout) -> Local:
    ring = Ring(layout) if layout.first_of_host else None
    mscomm.barrier()

    def bind(case: Case, buffers: Buffers) -> Callable[[], object]:
        links = LINKS[case.row.name](case.size(buffers.count), layout.hosts, layout.local_ranks)
        out, into = (memoryview(bytearray(links[host])) for host in (layout.host, layout.host - 1))
        return (lambda: ring.exchange(out, into)) if ring else lambda: None

    about = "no collective: one rank of each host sends to the next host what it must, and receives from the one before"
    return Local(WIRE, about, case, np.empty, bind, ring.close if ring else lambda: None, has_result=False)


class Ring:
    """Connects the hosts in a ring. Each host has a byte stream to the host on the right and one from the left."""

    def __init__(self, layout: Layout) -> None:
        with _listener(layout, WIRE_PORT) as listener:
            self._right = _connected(layout.names[(layout.host + 1) % layout.hosts], WIRE_PORT)
            self._left, _ = listener.accept()
        self._poll = select.poll()
        for sock in (self._right, self._left):
            _tune(sock)

    def exchange(self, out: memoryview, into: memoryview) -> None:
        """Send all of `out` to the right and fill `into` from the left, at the same time."""
        sent = got = 0
        while sent < len(out) or got < len(into):
            came = _moved(self._left.recv_into, into[got:])
            went = _moved(self._right.send, out[sent:])
            if came == 0 and got < len(into):
                raise ConnectionError("the host on the left has ended")
            got += came or 0
            sent += went or 0
            if not came and not went:
                self._wait(sent < len(out), got < len(into))

    def _wait(self, sending: bool, receiving: bool) -> None:
        self._poll.register(self._right, select.POLLOUT if sending else 0)
        self._poll.register(self._left, select.POLLIN if receiving else 0)
        if not self._poll.poll(STUCK_S * 1e3):
            raise TimeoutError(f"nothing moved between the hosts for {STUCK_S:g} s")

    def close(self) -> None:
        self._right.close()
        self._left.close()


def _moved(move: Callable[[memoryview], int], bytes_: memoryview) -> int | None:
    """Call `move`, a socket's send or recv_into. Return the bytes moved, or None if the socket is not ready."""
    try:
        return move(bytes_) if bytes_ else 0
    except BlockingIOError:
        return None


def _listener(layout: Layout, port: int) -> socket.socket:
    listener = socket.create_server((layout.names[layout.host], port))
    listener.settimeout(START_S)
    return listener


def _connected(host: str, port: int) -> socket.socket:
    """Connect to the listener on `host`. Try again until the host listens."""
    until = time.monotonic() + START_S
    while True:
        try:
            return socket.create_connection((host, port), timeout=START_S)
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(False)


# -- bare


def bare(case: Case, layout: Layout, library: Path) -> Local:
    """Return the contender whose calls are in bare.cc. `library` is this file, compiled. Each host must have one rank.

    If each rank has a CPU, the ranks spin. Otherwise they sleep in poll().
    """
    call = ctypes.CDLL(library, use_errno=True).bare_call
    socks = _mesh(layout)
    fds = (ctypes.c_int * layout.hosts)(*(sock.fileno() if sock else -1 for sock in socks))

    def bind(case: Case, buffers: Buffers) -> Callable[[], object]:
        x, out = (ctypes.c_void_p(None if array is None else array.ctypes.data) for array in (buffers.x, buffers.out))
        code, ranks, rank = BARE_COLLECTIVES.index(case.row.name), case.ranks, case.rank
        spin = case.ranks <= (os.cpu_count() or 1)
        part = ctypes.c_size_t(buffers.count * case.dtype.itemsize)

        def checked() -> None:
            if call(code, fds, ranks, rank, spin, x, out, part):
                raise ConnectionError(f"bare: errno {ctypes.get_errno()}")

        return checked

    def close() -> None:
        for sock in filter(None, socks):
            sock.close()

    about = "no library: a C++ function that uses non-blocking TCP sockets"
    return Local(BARE, about, case, np.empty, bind, close)


def _mesh(layout: Layout) -> list[socket.socket | None]:
    """Connect each rank with each other. Return the socket for each rank, and None for this rank."""
    socks: list[socket.socket | None] = [None] * layout.hosts
    with _listener(layout, BARE_PORT) as listener:
        for peer in range(layout.host):
            sock = socks[peer] = _connected(layout.names[peer], BARE_PORT)
            sock.sendall(bytes([layout.host]))
        for _ in range(layout.host + 1, layout.hosts):
            sock, _ = listener.accept()
            socks[sock.recv(1)[0]] = sock
    for one in filter(None, socks):
        _tune(one)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BARE_SENDS_AHEAD)
    mscomm.barrier()
    return socks


# -- MPI


class MpiOverHosts(Mpi):
    """An MPI job with as many ranks on each host as the mscomm job. `agent` is a program that replaces ssh."""

    def __init__(self, peer: str, case: Case, prefix: Path | None, layout: Layout, agent: str) -> None:
        self._layout, self._agent = layout, agent
        super().__init__(peer, case, prefix)

    def _start(self, installed: Installed, flavour: Flavour) -> None:
        flags = [*flavour.flags, *self._flags(installed, flavour)]
        super()._start(installed, flavour._replace(flags=flags))

    def _flags(self, installed: Installed, flavour: Flavour) -> Iterable[str]:
        layout = self._layout
        where = ",".join(f"{name}:{layout.local_ranks}" for name in layout.names)
        if flavour.package == "mpich":
            # The hosts have the same boot id, so UCX would use shared memory between them, too.
            env = {"UCX_TLS": "self,tcp", "UCX_NET_DEVICES": layout.interface}
            words = ["-launcher", "ssh", "-launcher-exec", self._agent, "-hosts", where, "-iface", layout.interface]
            return words + [word for name, value in env.items() for word in ("-genv", name, value)]
        ours = {"plm_ssh_agent": self._agent, "prte_if_include": layout.interface}
        theirs = {"btl": "self,sm,tcp", "pml": "ob1", "btl_tcp_if_include": layout.interface}
        if self._case.ranks > (os.cpu_count() or 1):  # each host believes that it has all CPUs of the machine
            theirs["mpi_yield_when_idle"] = "1"
        words = ["--prefix", str(installed.mpirun.parents[1]), "-H", where]
        words += [word for name, value in ours.items() for word in ("--prtemca", name, value)]
        return words + [word for name, value in theirs.items() for word in ("--mca", name, value)]


def start_mpi(peer: str, case: Case, layout: Layout, given: dict[str, Any]) -> MpiOverHosts:
    prefix = given["prefixes"].get(peer.partition("-")[0])
    return MpiOverHosts(peer, case, Path(prefix) if prefix else None, layout, given["agent"])
