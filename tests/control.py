"""Helpers for the tests of the control plane: a hub in a thread and members in the same process, over real sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import pytest

from mscomm import errors
from mscomm.cluster import links, security
from mscomm.cluster.bytestream import ByteStream
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.frames import Frames
from mscomm.cluster.hello import CONTROL, LAUNCHER, UNKNOWN_RUN, Identity
from mscomm.cluster.hub import Hub
from mscomm.cluster.member import Member
from mscomm.cluster.plan import world_id

KEY = bytes(range(32))
ADMISSION = {purpose: security.admission_key(KEY, purpose) for purpose in (CONTROL, LAUNCHER)}
RUN = b"r" * 16
VERSION = links.package_version()
WORLD = world_id(0)


def soon() -> Deadline:
    """Return a deadline that only ends a hang."""
    return Deadline(60)


def eventually(condition, timeout_s=60.0):
    """Wait until another thread has made the condition true."""
    deadline = Deadline(timeout_s)
    while not condition():
        assert not deadline.passed, "it did not happen in time"
        time.sleep(0.005)


def raised(kind, function, *args):
    """Call the function, which must raise an error of this kind. Return the error."""
    with pytest.raises(kind) as caught:
        function(*args)
    return caught.value


@contextlib.contextmanager
def listening(family=socket.AF_INET):
    with socket.socket(family) as listener:
        listener.bind(
            ("127.0.0.1", 0) if family == socket.AF_INET else f"\0mscomm-test-{os.getpid()}-{time.monotonic_ns()}"
        )
        listener.listen(512)
        yield listener


class Communicator:
    """Stands in for the core's communicator. It has only the methods that a Member calls."""

    def __init__(self, place=(0, False, "")):
        self.aborts: list[errors.Error] = []
        self.departed: list[int] = []
        self.place = place

    def abort(self, verdict):
        self.aborts.append(verdict)

    def left(self, rank):
        self.departed.append(rank)

    def called(self, number):
        return ""

    def stuck(self):
        return 0

    def where(self):
        return self.place

    def failure(self):
        return None

    def notices(self):
        return []

    def wanted_data_links(self):
        return []


class NoLinks:
    """Stands in for GroupLinks, in a group that needs no link."""

    def dialled(self, rank, purpose, addresses):
        pytest.fail(f"rank {rank} asked for a connection to {addresses}")

    def wanted(self, peers):
        pytest.fail(f"links to {peers} are wanted")


class Job:
    """Runs a hub in a thread. The Members are in the same process, and connect to the hub by socket pairs or TCP."""

    def __init__(
        self, size, *, ranks_known=True, watched=False, restarts=False, topo_timeout_s=60.0, tcp=False, **more
    ):
        self.log: list[str] = []
        self.size = size
        options = {"ranks_known": ranks_known, "watched": watched, "restarts": restarts, **more}
        self.hub = Hub(size, key=KEY, topo_timeout_s=topo_timeout_s, log=self.log.append, **options)
        self.ends: dict[int, socket.socket] = {}
        self.listener = socket.create_server(("127.0.0.1", 0)) if tcp else None
        if self.listener:
            self.hub.listen(self.listener)
        else:
            for rank in range(size):
                ours, self.ends[rank] = socket.socketpair()
                self.hub.adopt(ours, rank)
        self.members: list[Member] = []
        self.links: list[Frames] = []  # links without a Member; __exit__() closes them, too
        self.outcome = None
        self.thread = threading.Thread(target=self._serve)

    def _serve(self):
        self.outcome = self.hub.serve()

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.hub.stop()
        for link in self.links:  # the hub gives launchers some time to close their links
            link.close()
        self.thread.join(60)
        assert not self.thread.is_alive()
        for member in self.members:
            member.close()
        for end in self.ends.values():
            end.close()
        if self.listener:
            self.listener.close()

    def member(self, rank=None, node_id=None):
        if self.listener:
            stream = greeted(self.listener.getsockname())
        else:
            sock = self.ends[rank]
            assert sock.recv(48) == self.hub.admission == ADMISSION[CONTROL] + self.hub.run
            stream = ByteStream(sock)
            stream.secret = ADMISSION[CONTROL]
        member = Member(Frames(stream), key=ADMISSION[CONTROL], rank=rank, node_id=node_id)
        self.members.append(member)
        return member

    def joined(self, ids=None, places=()):
        """Create all Members. Let them join, attach and become ready. Return (member, communicator) for each rank."""
        ids = ids or [None] * self.size
        results: dict[int, tuple] = {}
        failures: list[BaseException] = []

        def one(index):
            member = self.member(None if self.listener and ids[index] else index, ids[index])
            try:
                welcome = member.join({"size": self.size}, soon())
                place = places[welcome.rank] if places else (0, False, "")
                communicator = Communicator(place)
                member.attach(WORLD, communicator, NoLinks())
                member.ready(soon())
                results[welcome.rank] = (member, communicator, welcome)
            except errors.Error as error:
                failures.append(error)

        threads = [threading.Thread(target=one, args=(index,)) for index in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        return [results[rank][:2] for rank in range(self.size)]

    def again(self, rank):
        """Act as if a launcher had restarted the process of this rank. Return the Member of the new process."""
        ours, theirs = socket.socketpair()
        self.hub.adopt(ours, rank)
        self.ends[rank].close()
        self.ends[rank] = theirs
        return self.member(rank)

    def settled(self, timeout_s=60.0):
        self.thread.join(timeout_s)
        assert self.outcome is not None
        return self.outcome


def greeted(address, rank=-1, purpose=CONTROL, key=None, run=UNKNOWN_RUN):
    """Make a control link and exchange the hello, but do not join. Return the stream. key: another admission key."""
    identity = Identity(version=VERSION, rank=rank, run=run)
    return links.open_link(address, key or ADMISSION[purpose], purpose, identity, soon())


def key_file(path, content=KEY, mode=0o600):
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


class Waits:
    """Calls a function in a new thread. Keeps the function's result, or the mscomm error that the function raised."""

    def __init__(self, function, *args):
        self.result = self.error = None

        def call():
            try:
                self.result = function(*args)
            except errors.Error as error:
                self.error = error

        self.thread = threading.Thread(target=call)
        self.thread.start()

    def ended(self):
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self
