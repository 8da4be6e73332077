"""A launcher's part in its job: the whole job, the part of node 0, or the part of another node.

On one host, each rank inherits its control link. If the job has several hosts, node 0 serves the hub at a TCP port, to
which all ranks connect. Each rank then inherits only a descriptor from which it reads the key.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

from mscomm.bootstrap import launcher, rendezvous
from mscomm.cluster import interfaces, links, security
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.frames import Frame, Frames
from mscomm.cluster.handlers import ERROR, check, field_of
from mscomm.cluster.hello import CONTROL, LAUNCHER
from mscomm.cluster.hub import Hub
from mscomm.cluster.protection import Protection
from mscomm.errors import BackendUnavailable, Error, PeerLost, of_fields
from mscomm.launching.output import Stream
from mscomm.threads import start_thread
from mscomm.writing import Output

LOOK_S = 0.2  # how often a launcher checks what no event reports, such as failures on other hosts

Say = Callable[[str], None]


class Part(Protocol):
    """One launcher's part in a job.

    The defaults of serve(), streams(), children(), forward() and needed() are for a launcher that starts no other
    launchers.

    `size`: the number of ranks in the job. `first`: the first rank of this host. `look_s`: the seconds between two
    calls of over(); None if the job has only this host. `remote`: whether a launcher on another host started this one.
    `torch_store`: the host of rank 0, and the port at which torch.distributed serves its store there if a script calls
    init_process_group(); open() sets it.
    """

    size: int
    torch_store: tuple[str, int]
    first: int = 0
    look_s: float | None = None
    remote: bool = False

    def open(self, stack: ExitStack, log: Say, tell: Say) -> None:
        """Prepare this part before any rank is started: listen, or connect to the listening launcher. This may wait.

        log: a function that writes a line to the scheduler's log. tell: a function that writes a line for the user.
        """

    def entrance(self, rank: int) -> tuple[socket.socket, dict[str, str]]:
        """Return the socket that the rank inherits, and the variables that tell the rank about it."""

    def serve(self, stack: ExitStack) -> None:
        """Start the hub and the other launchers that belong to this part. Call this after starting the ranks."""
        return

    def streams(self, stdout: Output, stderr: Output) -> list[Stream]:
        """Return the output streams of the launchers that this launcher started on other hosts."""
        return []

    def children(self) -> set[int]:
        """Return the process ids of the launchers' connections to other hosts."""
        return set()

    def forward(self, number: int) -> None:
        """Pass a signal on to the ranks of other hosts, if this launcher started their launchers."""
        return

    def ended(self, rank: int, how: str, badly: bool, again: bool) -> None:
        """Report that a rank of this host has ended. again: whether the launcher restarts the rank after this call."""

    def can_restart(self) -> bool:
        """Return whether a rank that is restarted now can take part in the job."""

    def verdict(self) -> Error | None:
        """Return the job's first failure, if this launcher knows it."""

    def over(self) -> Error | None:
        """Return why the job cannot continue, whichever host caused this; None if the job can continue."""

    def goes_on(self) -> bool:
        """Return whether ranks continue without the lost ranks (shrink), or wait to do so. If so, do not end them."""

    def complete(self) -> int:
        """Return how many times all ranks of the job have joined. After a failure, it grows when the job goes on."""

    def stopped(self, ranks: list[int]) -> None:
        """Report this host's ranks that have not ended if all of them are stopped. Otherwise, report an empty list."""

    def only_stopped(self) -> bool:
        """Return whether some ranks of the job have ended, and all others are stopped (SIGSTOP)."""

    def needed(self, well: bool) -> bool:
        """Return whether other hosts still need this launcher after its own ranks have ended.

        well: whether all ranks of this launcher ended without failure.
        """
        return False


class _WithHub(Part):
    """The methods of a launcher that serves the hub itself."""

    _hub: Hub

    def ended(self, rank: int, how: str, badly: bool, again: bool) -> None:
        self._hub.process_ended(rank, how, badly=badly, again=again)

    def can_restart(self) -> bool:
        return self._hub.can_restart

    def verdict(self) -> Error | None:
        return self._hub.verdict

    def over(self) -> Error | None:
        return self._hub.state.over

    def goes_on(self) -> bool:
        return self._hub.state.goes_on

    def complete(self) -> int:
        return self._hub.state.complete

    def stopped(self, ranks: list[int]) -> None:
        self._hub.stopped_here(ranks)

    def only_stopped(self) -> bool:
        return self._hub.state.only_stopped


@dataclass(eq=False)
class WholeJob(_WithHub):
    """The launcher of all ranks of a job on one host. The hub does not listen, so only those ranks can join."""

    size: int
    topo_timeout_s: float
    restarts: bool
    _only_stopped: bool = field(default=False, init=False)

    def open(self, stack: ExitStack, log: Say, tell: Say) -> None:
        # While this socket is bound but does not listen, rank 0 and its successors can listen at the port, because
        # torch sets SO_REUSEADDR, too. The kernel gives the port to nobody else.
        try:
            store = rendezvous.bind("127.0.0.1", 0)
        except OSError:  # this host has no IPv4, not even on its loopback interface
            store = rendezvous.bind("::1", 0)
        self.torch_store = stack.enter_context(store).getsockname()[:2]
        self._hub = _hub(self.size, security.new_key(), self.topo_timeout_s, self.restarts, log)

    def entrance(self, rank: int) -> tuple[socket.socket, dict[str, str]]:
        ours, theirs = socket.socketpair()
        self._hub.adopt(ours, rank)
        return theirs, {launcher.CONTROL_FD: launcher.descriptor(theirs)}

    def serve(self, stack: ExitStack) -> None:
        _serve(self._hub, stack)

    def stopped(self, ranks: list[int]) -> None:
        # This does not ask the hub, because the hub knows no ranks if the program does not call init().
        self._only_stopped = 0 < len(ranks) < self.size

    def only_stopped(self) -> bool:
        return self._only_stopped


@dataclass(eq=False)
class Node0(_WithHub):
    """Serves the hub at host:port for the ranks of all nodes, and tells the user the announcement when it listens."""

    nodes: int
    each: int
    host: str
    port: int
    protection: Protection
    topo_timeout_s: float
    restarts: bool
    announcement: str

    def __post_init__(self) -> None:
        self.size = self.nodes * self.each
        self.look_s = LOOK_S
        self._others = {
            f"node {node}": range(node * self.each, (node + 1) * self.each) for node in range(1, self.nodes)
        }
        self._layout = layout(self.nodes, self.each)
        self._pairs: list[socket.socket] = []  # our ends of the socket pairs from which the ranks read their admission
        self._local: set[int] = set()  # the ranks of this host
        self._job_began: bool | None = None  # whether a local rank called init(); None until all local ranks have ended

    def open(self, stack: ExitStack, log: Say, tell: Say) -> None:
        try:
            at = rendezvous.listening_address(self.host, self.port, os.environ, self.protection, tell)
            listener = stack.enter_context(rendezvous.bind(at, self.port))
        except OSError as error:
            name, taken = interfaces.endpoint(self.host, self.port), ""
            if error.errno == errno.EADDRINUSE:
                taken = rendezvous.contend(
                    self.host,
                    self.port,
                    lambda address: security.job_key(os.environ, address[0], address[1], self.protection),
                    os.environ,
                    self.protection,
                )
            raise BackendUnavailable(
                f"node 0 cannot listen at --master-addr, --master-port {name}: {rendezvous.words(error)}{taken}. "
                "Node 0 must be the host that has this address, and the port must be free; --master-port names another"
                ", on every node"
            ) from error
        host, port = listener.getsockname()[:2]
        self._key, file = security.scheduler_key(os.environ, host, port, self.protection)
        if file:
            stack.callback(file.remove)
        listener.listen(socket.SOMAXCONN)  # not earlier: the key file must exist before a node can connect
        self._serve_at(listener, log, tell)
        tell(self.announcement)

    def _serve_at(self, listener: socket.socket, log: Say, tell: Say) -> None:
        self._where = interfaces.endpoint(*listener.getsockname()[:2])
        self.torch_store = torch_store_of(self.host, listener.getsockname()[1])
        words = {"nodes": self._others, "layout": self._layout, "tell": tell}
        words["protection"] = self.protection
        self._hub = _hub(self.size, self._key, self.topo_timeout_s, self.restarts, log, **words)
        self._hub.listen(listener)
        self._until = float("inf")
        # The time by which ranks on other hosts have surely learned about a failure; inf if there is none.
        self._heard_at = float("inf")

    def entrance(self, rank: int) -> tuple[socket.socket, dict[str, str]]:
        ours, theirs, variables = _admission_link(self._hub.admission, self._where)
        self._pairs.append(ours)
        self._local.add(rank)
        return theirs, variables

    def serve(self, stack: ExitStack) -> None:
        self._thread = _serve(self._hub, stack)

    def needed(self, well: bool) -> bool:
        """Return whether ranks on other nodes are still in the job or, after a failure, need time to learn about it."""
        if self._job_began is None:  # check only once, because the kernel reports a reset only once
            self._job_began = any(_was_read(ours) for ours in self._pairs)
        if not self._job_began:  # no local rank called init(), so there is no job to wait for
            if len(self._hub.attended) >= self.size - len(self._local):
                return False
            # A node whose launcher has not connected yet still needs us, but only until the join timeout.
            self._until = min(self._until, time.monotonic() + self.topo_timeout_s)
        if well or self.goes_on():
            self._heard_at = float("inf")
        else:
            self._heard_at = min(self._heard_at, time.monotonic() + _HEAR_S)
        return self._thread.is_alive() and time.monotonic() < min(self._until, self._heard_at)


@dataclass(eq=False, repr=False)
class OtherNode(Part):
    """Connects to node 0's hub before any rank is started. Reports how ranks end, and hears whether the job failed."""

    size: int
    ranks: range
    name: str  # this node's name in messages
    layout: str  # what layout() returns
    host: str
    port: int
    protection: Protection
    topo_timeout_s: float
    key: bytes = b""  # the job's key, if the launcher of node 0 started this one, and sent the key
    rank_0: str = ""  # the host of rank 0, if that is not `host`

    def __post_init__(self) -> None:
        self.first = self.ranks.start
        self.torch_store = torch_store_of(self.rank_0 or self.host, self.port)
        self.look_s = LOOK_S
        self.remote = bool(self.key)
        self._over: Error | None = None
        self._goes_on = self._only_stopped = False
        self._complete = 0
        self._stopped: list[int] = []  # the ranks in the latest report of stopped ranks to the hub
        self._ended_well: set[int] = set()
        self._link: Frames | None = None

    def open(self, stack: ExitStack, log: Say, tell: Say) -> None:
        deadline = Deadline(self.topo_timeout_s)
        self._connect(deadline)
        stack.push(self._explain)
        words = {"first": self.ranks.start, "end": self.ranks.stop, "name": self.name, "layout": self.layout}
        assert self._link
        self._link.send({"t": "attend", **words}, deadline)
        state = self._link.receive(deadline)
        if state is None:
            raise Error(f"the job at {self._where} has ended already")
        if state["t"] == "refused":
            raise Error(f"the job at {self._where} refuses {self.name}: {field_of(state, 'why', str)}")
        self._hear(state)
        if self._over:
            raise Error(f"the job at {self._where} has failed already: {self._over}")

    def give_up(self, why: str) -> None:
        """Tell node 0, if it answers, why this node starts no ranks. Call this instead of open()."""
        with contextlib.suppress(Error, OSError):  # this node prints the reason anyway
            self._connect(Deadline(_GIVE_UP_S))
            self._tell_why(why)
            self._leave()

    def _explain(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Close the link at the end. If this launcher failed, first tell node 0 the reason."""
        if isinstance(error, Exception) and self._over is None:
            with contextlib.suppress(OSError):
                self._tell_why(str(error))
        self._leave()

    def _tell_why(self, why: str) -> None:
        if self._link:
            self._link.send({"t": "gave up", "name": self.name, "why": why[:1000]}, Deadline(_TELL_S))

    def _connect(self, deadline: Deadline) -> None:
        key = self.key

        def admission(address: Any) -> bytes:
            nonlocal key
            if not key:
                key = security.job_key(os.environ, address[0], address[1], self.protection)
            return security.admission_key(key, LAUNCHER)

        stream, _ = rendezvous.reach(
            [(rendezvous.connecting_address(self.host, self.port, os.environ, self.protection), self.port)],
            deadline,
            admission,
            links.newcomer(os.environ),
            f"no node 0 at {interfaces.endpoint(self.host, self.port)} (--master-addr, --master-port)",
            "Start `mscomm run --node-rank 0` with the same options on the host that has this address",
            purpose=LAUNCHER,
            protection=self.protection,
        )
        self._where = interfaces.endpoint(*stream.sock.getpeername()[:2])
        self._admission = security.admission_key(key, CONTROL) + stream.run  # what each rank of this node reads
        self._link = Frames(stream)

    def entrance(self, rank: int) -> tuple[socket.socket, dict[str, str]]:
        ours, theirs, variables = _admission_link(self._admission, self._where)
        ours.close()
        return theirs, variables

    def ended(self, rank: int, how: str, badly: bool, again: bool) -> None:
        if not badly:
            self._ended_well.add(rank)
        self._tell({"t": "ended", "rank": rank, "how": how, "badly": badly, "again": again})

    def stopped(self, ranks: list[int]) -> None:
        if ranks != self._stopped:
            self._stopped = ranks
            self._tell({"t": "stopped", "ranks": ranks})

    def only_stopped(self) -> bool:
        self.over()  # reads what node 0 has said
        return self._only_stopped

    def _tell(self, frame: Frame) -> None:
        if self._link:
            with contextlib.suppress(OSError):  # over() notices that the link has ended
                self._link.send(frame, Deadline(_TELL_S))

    def can_restart(self) -> bool:
        return self.over() is None

    def verdict(self) -> Error | None:
        return self.over()

    def over(self) -> Error | None:
        try:
            while self._link and (frames := self._link.arrived()) != []:
                if frames is None:
                    self._end("the launcher of node 0 has ended")
                for frame in frames or []:
                    self._hear(frame)
        except (Error, OSError) as error:
            self._end(f"the link to the launcher of node 0 failed: {error}")
        return self._over

    def goes_on(self) -> bool:
        self.over()  # reads what node 0 has said
        return self._goes_on

    def complete(self) -> int:
        self.over()  # reads what node 0 has said
        return self._complete

    def _hear(self, frame: Frame) -> None:
        if frame["t"] == "state":
            check(frame, {"goes_on": bool, "only_stopped": bool, "complete": int})
            if frame.get("over") is not None:
                over = field_of(frame, "over", dict)
                check({**over, "t": "state"}, ERROR)
                self._over = self._over or of_fields(over)
            self._goes_on, self._only_stopped = frame["goes_on"], frame["only_stopped"]
            self._complete = frame["complete"]
        elif frame["t"] == "end":
            self._leave()

    def _end(self, why: str) -> None:
        if self._link:
            if not self._ended_well.issuperset(self.ranks):  # if all ended well, nothing needs node 0
                self._over = self._over or PeerLost(f"{why} ({self._where})")
            self._leave()

    def _leave(self) -> None:
        """Close the link when node 0 has read everything.

        If we closed it with unread data on our side, the kernel could reset the connection, and node 0 could miss data
        that we sent.
        """
        link, self._link = self._link, None
        self._goes_on = self._only_stopped = False
        if link is None:
            return
        deadline = Deadline(_TELL_S)
        with contextlib.suppress(Error, OSError):  # node 0 may have ended already
            link.stream.close_for_writing()
            while link.receive(deadline) is not None:
                continue
        link.close()


_TELL_S = 2.0  # how long node 0 may take to read our message
_GIVE_UP_S = 5.0  # how long a launcher that failed tries to reach node 0
_HEAR_S = 7.0  # how long the launchers of other hosts may take to report how their ranks have ended


def layout(nodes: int, each: int) -> str:
    """Return the options that must be the same on every node, as text."""
    return f"--nnodes {nodes} -n {each}"


def torch_store_of(host: str, port: int) -> tuple[str, int]:
    """Return the torch_store of a job on several hosts. port: that of the hub, which all launchers know."""
    return host, rendezvous.ports_instead(port, os.environ)[0]


def _hub(size: int, key: bytes, topo_timeout_s: float, restarts: bool, log: Say, **nodes: Any) -> Hub:
    return Hub(
        size,
        key=key,
        topo_timeout_s=topo_timeout_s,
        ranks_known=True,
        named=links.job_of(os.environ),
        watched=True,
        restarts=restarts,
        log=log,
        **nodes,
    )


def _serve(hub: Hub, stack: ExitStack) -> threading.Thread:
    thread = threading.Thread(target=hub.serve, name="mscomm-hub", daemon=True)
    start_thread(thread)
    stack.callback(thread.join, 5.0)
    stack.callback(hub.stop)
    return thread


def _admission_link(admission: bytes, where: str) -> tuple[socket.socket, socket.socket, dict[str, str]]:
    """Create a socket pair from which a rank reads its admission (see Hub.admission).

    Return both ends, ours first, and the rank's variables.
    """
    ours, theirs = socket.socketpair()
    ours.sendall(admission)
    return ours, theirs, {launcher.SCHED: where, launcher.KEY_FD: launcher.descriptor(theirs)}


def _was_read(ours: socket.socket) -> bool:
    """Return whether the rank at the other end read its admission. Call this when the rank has ended.

    If the rank did not read it, the kernel reports a reset of the connection.
    """
    try:
        return ours.recv(1, socket.MSG_DONTWAIT) == b""
    except ConnectionResetError:
        return False
    except BlockingIOError:  # a child of the rank holds the descriptor: assume that the rank read it
        return True
