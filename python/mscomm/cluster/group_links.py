"""The links of a group that are set up when they are first needed.

These are the links for messages, and those for collective calls to ranks that are not partners (Layout.partners). One
of the two ranks listens and asks the other one, through the hub, to connect. The other rank's program need not be in a
call: the thread that reads its control link receives the request, and starts another thread that connects.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from mscomm import _core
from mscomm.cluster.assemble import Epoch
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.hello import DATA, MESSAGES
from mscomm.errors import Aborted, CollectiveTimeout, Error
from mscomm.threads import start_thread

_MOST_ANSWERING = 8  # threads; each one connects to one rank at a time


class GroupLinks:
    """The links of one group in one epoch. group: the group id at the hub."""

    def __init__(self, epoch: Epoch, core: _core.Group, group: str, ranks: list[int]) -> None:
        self._epoch = epoch
        self._core = core
        self._group = group
        self._ranks = ranks
        self._dialling = [threading.Lock() for _ in ranks]  # for each peer, held while the link to it is set up
        # peers to which this rank can send messages without a new link; this rank itself needs none
        self.linked = {ranks.index(epoch.rank)}
        self._inviting: set[int] = set()  # peers that this rank has asked to connect for collective calls
        self._asked: deque[tuple[int, int, Any]] = deque()  # the arguments of _answer, for each peer that has asked
        self._answering = 0  # how many threads serve _asked
        self._counting = threading.Lock()  # protects _asked and _answering

    # -- for messages: the sender asks the receiver

    def reach(self, peer: int, what: str, deadline: Deadline) -> None:
        """Set up the link for messages to the peer, unless there is one already. A failure breaks the group."""
        core, rank = self._core, self._ranks[peer]
        try:
            while not self._dialling[peer].acquire(timeout=min(deadline.left(), 0.1)):
                core.check(peer)
                if deadline.passed:
                    raise CollectiveTimeout(f"no connection came from rank {rank}", waiting_for=[rank])
            try:
                core.check(peer)
                if peer not in self.linked:
                    come = self._epoch.invite(self._group, [rank], MESSAGES, deadline, lambda: core.check(peer))
                    with contextlib.closing(come):
                        for _, stream in come:
                            core.add_link(True, peer, stream.sock.detach(), self._epoch.secret(stream, False))
                    self.linked.add(peer)
            finally:
                self._dialling[peer].release()
        except Error as symptom:
            if core.failure() is not None:  # another thread has failed, and has reported that to the hub
                raise
            error = symptom.again(f"{self._me}: {what}: {symptom}")
            core.fail(error)
            raise error from symptom
        except OSError as error:  # this process has run out of descriptors or memory
            core.fail(Aborted(f"{self._me}: {what}: {error}", [self._epoch.rank]))
            raise
        except BaseException:
            core.fail(Aborted(f"{self._me} was interrupted in {what}", [self._epoch.rank]))
            raise

    # -- for collective calls: the higher rank asks the lower one. The thread that reads the control link calls these.

    def wanted(self, peers: Sequence[int]) -> None:
        """Set up the links to these peers for collective calls. Return at once."""
        me = self._ranks.index(self._epoch.rank)
        self._invite([peer for peer in peers if peer < me])
        # A higher rank may not need the link, because it makes another call or a later one. Then it must be asked.
        if higher := [self._ranks[peer] for peer in peers if peer > me]:
            self._begin(higher, self._ask, higher)

    def dialled(self, rank: int, purpose: int, addresses: Any) -> None:
        """Connect to a rank that has asked for it. Return at once. addresses: see Member.dial()."""
        peer = self._ranks.index(rank)
        if purpose == DATA and not addresses:
            self._invite([peer])
            return
        # The core must expect the link before this thread reads the next control frame. That frame may say that the
        # peer has left, because it may leave right after it has sent something over the link.
        (self._core.expect_data_link if purpose == DATA else self._core.expect_incoming)(peer)
        with self._counting:
            self._asked.append((peer, purpose, addresses))
            if self._answering == _MOST_ANSWERING:
                return
            self._answering += 1
        self._begin([rank], self._answer_all)

    def _invite(self, peers: list[int]) -> None:
        if new := [peer for peer in peers if peer not in self._inviting]:
            self._inviting.update(new)
            for peer in new:
                self._core.expect_data_link(peer)
            self._begin([self._ranks[peer] for peer in new], self._accept, new)

    def _begin(self, ranks: list[int], function: Callable[..., None], *args: Any) -> None:
        """Call function(*args), which sets up links to these ranks, in a thread."""
        thread = threading.Thread(target=self._run, args=(ranks, function, *args), name="mscomm-dial", daemon=True)
        try:
            start_thread(thread)
        except RuntimeError as error:  # no memory for a thread, or the interpreter is shutting down
            if symptom := self._no_link(ranks, error):
                assert self._epoch.member is not None
                self._epoch.member.report(symptom, self._group)

    def _run(self, ranks: list[int], function: Callable[..., None], *args: Any) -> None:
        try:
            function(*args)
        except Exception as error:  # an Error, or a shortage in this process: the call that waits must learn of it
            if symptom := self._no_link(ranks, error):
                assert self._epoch.member is not None
                self._epoch.member.settle(self._group, symptom, -1)

    def _accept(self, peers: list[int]) -> None:
        ranks, missing = [self._ranks[peer] for peer in peers], set(peers)

        def check() -> None:
            for peer in missing:
                self._core.check(peer)

        # The call that needs the links has a deadline, and breaks the group when it has passed.
        with contextlib.closing(self._epoch.invite(self._group, ranks, DATA, Deadline(math.inf), check)) as come:
            for rank, stream in come:
                peer = self._ranks.index(rank)
                self._core.add_data_link(peer, stream.sock.detach(), self._epoch.secret(stream, False))
                missing.remove(peer)

    def _ask(self, ranks: list[int]) -> None:
        assert self._epoch.member is not None
        for rank in ranks:
            self._epoch.member.dial(self._group, rank, DATA, [], Deadline(math.inf))

    def _answer_all(self) -> None:
        while True:
            with self._counting:
                if not self._asked:
                    self._answering -= 1
                    return
                asked = self._asked.popleft()
            self._run([self._ranks[asked[0]]], self._answer, *asked)

    def _answer(self, peer: int, purpose: int, addresses: Any) -> None:
        me = self._ranks.index(self._epoch.rank)
        # The other rank waits already, until its own call fails. Whether it has left says nothing: it may have sent its
        # data and left. So this rank gives up only if the group breaks or ends, which the check of itself tells.
        stream = self._epoch.call(
            self._group, self._ranks[peer], addresses, purpose, Deadline(math.inf), lambda: self._core.check(me)
        )
        secret = self._epoch.secret(stream, True)
        if purpose == DATA:
            self._core.add_data_link(peer, stream.sock.detach(), secret)
            if self._epoch.member is not None:
                self._epoch.member.connected(self._group, self._ranks[peer], DATA)
        else:
            self._core.add_link(False, peer, stream.sock.detach(), secret)

    def _no_link(self, ranks: list[int], error: Exception) -> Error | None:
        """Break the group. Return the reason; None if the group is broken already, or this rank has left it."""
        if self._core.failure() is not None:
            return None
        text = f"{self._me}: no link to rank {', '.join(map(str, ranks))}: {error}"
        symptom = error.again(text) if isinstance(error, Error) else Aborted(text, [self._epoch.rank])
        self._core.fail(symptom)
        return symptom if self._core.failure() is not None else None

    @property
    def _me(self) -> str:
        return self._epoch.names[self._epoch.rank]
