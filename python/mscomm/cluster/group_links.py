"""The links for a group's messages. A rank sets up the link to a peer when it sends its first message to that peer.

The sender listens and asks the receiver, through the hub, to connect. The receiver's program need not be in a call: the
thread that reads the receiver's control link receives the request, and starts another thread that connects.
"""

from __future__ import annotations

import threading
from typing import Any

from mscomm import _core
from mscomm.cluster.assemble import Epoch
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.hello import MESSAGES
from mscomm.errors import Aborted, CollectiveTimeout, Error
from mscomm.threads import start_thread

_ANSWER_S = 30.0  # how long the receiver tries to connect to the sender, which is waiting already


class MessageLinks:
    """The message links of one group in one epoch. group: the group id at the hub."""

    def __init__(self, epoch: Epoch, core: _core.Group, group: str, ranks: list[int]) -> None:
        self._epoch = epoch
        self._core = core
        self._group = group
        self._ranks = ranks
        self._dialling = [threading.Lock() for _ in ranks]  # for each peer, held while the link to it is set up
        self.linked = {ranks.index(epoch.rank)}  # peers with an outgoing link, and this rank itself, which needs none

    def reach(self, peer: int, what: str, deadline: Deadline) -> None:
        """Set up the link to the peer, unless there is one already. A failure breaks the group."""
        core, rank = self._core, self._ranks[peer]
        try:
            while not self._dialling[peer].acquire(timeout=min(deadline.left(), 0.1)):
                core.check(peer)
                if deadline.passed:
                    raise CollectiveTimeout(f"no connection came from rank {rank}", waiting_for=[rank])
            try:
                core.check(peer)
                if peer not in self.linked:
                    stream = self._epoch.invite(self._group, rank, deadline, lambda: core.check(peer))
                    secret = self._epoch.secret(stream, False)
                    core.add_link(True, peer, stream.sock.detach(), secret)
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

    def dialled(self, rank: int, addresses: Any) -> None:
        """Connect to a rank that wants to send to this rank and has asked for a connection. Return at once."""
        peer = self._ranks.index(rank)
        # The thread that reads the control link calls this. The core must expect the peer's message link before this
        # thread reads the next control frame. That frame may say that the sender has left, because a sender may leave
        # right after its message.
        self._core.expect_incoming(peer)
        try:
            start_thread(threading.Thread(target=self._answer, args=(peer, addresses), name="mscomm-dial", daemon=True))
        except RuntimeError as error:  # no memory for a thread, or the interpreter is shutting down
            assert self._epoch.member is not None
            self._epoch.member.report(self._no_link(rank, error), self._group)

    def _answer(self, peer: int, addresses: Any) -> None:
        rank = self._ranks[peer]
        try:
            stream = self._epoch.call(self._group, rank, addresses, MESSAGES, Deadline(_ANSWER_S))
            self._core.add_link(False, peer, stream.sock.detach(), self._epoch.secret(stream, True))
        except (RuntimeError, OSError) as error:  # Error is a RuntimeError; an OSError is a shortage in this process
            symptom = self._no_link(rank, error)
            # _no_link() breaks the group, except if this rank has already left it. Then there is nothing to report.
            if self._core.failure() is not None and self._epoch.member is not None:
                self._epoch.member.settle(self._group, symptom, -1)

    def _no_link(self, rank: int, error: RuntimeError | OSError) -> Error:
        text = f"{self._me}: no link for messages from rank {rank}: {error}"
        symptom = error.again(text) if isinstance(error, Error) else Aborted(text, [self._epoch.rank])
        self._core.fail(symptom)
        return symptom

    @property
    def _me(self) -> str:
        return self._epoch.names[self._epoch.rank]
