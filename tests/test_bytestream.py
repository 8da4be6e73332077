"""Control links use only the functions of ByteStream, so an encrypted stream can take its place."""

from __future__ import annotations

import os
import socket

import control
import pytest
from control import WORLD, Job, eventually, soon

from mscomm import errors
from mscomm.cluster import hub
from mscomm.cluster.bytestream import ByteStream
from mscomm.cluster.deadline import Deadline


class Scrambled(ByteStream):
    """Changes every byte on the wire. Like TLS, it may hold bytes that the descriptor does not announce."""

    def __init__(self, sock):
        super().__init__(sock)
        self._held = b""

    def send(self, data):
        return super().send(bytes(byte ^ 0x5A for byte in data))

    def receive(self, most):
        if not self._held:
            arrived = super().receive(most)
            if not arrived:
                return arrived
            self._held = bytes(byte ^ 0x5A for byte in arrived)
        piece, self._held = self._held[:7], self._held[7:]
        return piece

    @property
    def pending(self):
        return bool(self._held)


def test_a_job_runs_over_another_stream(monkeypatch):
    monkeypatch.setattr(hub, "ByteStream", Scrambled)
    monkeypatch.setattr(control, "ByteStream", Scrambled)
    with Job(3, tcp=True) as job:
        members = job.joined()
        met = control.Waits(members[0][0].meet, "k", "barrier", [0, 1], {"x": 0}, soon())
        assert members[1][0].meet("k", "barrier", [0, 1], {"x": "y" * 1000}, soon()).facts == [
            {"x": 0},
            {"x": "y" * 1000},
        ]
        assert met.ended().result.facts[1]["x"] == "y" * 1000
        members[2][0].leave(4)
        eventually(lambda: members[0][1].departed == [2])
        members[1][0].report(errors.Aborted("rank 1: ValueError: no data", [1]))
        symptom = errors.PeerLost("the link to rank 1 ended", [1])
        assert str(members[0][0].settle(WORLD, symptom, 1)) == "rank 1: ValueError: no data"


@pytest.fixture(params=[ByteStream, Scrambled])
def ends(request):
    ours, theirs = map(request.param, socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def test_nothing_is_not_the_end(ends):
    ours, theirs = ends
    assert theirs.receive(100) is None
    ours.send_all(b"abc", soon())
    ours.close_for_writing()
    theirs.await_bytes(soon())
    assert (theirs.receive(100), theirs.receive(100)) == (b"abc", b"")
    theirs.send_all(b"still", soon())  # the other direction is open
    assert ours.receive(100) == b"still"
    theirs.shut_down()
    assert ours.receive(100) == b""
    with pytest.raises(BrokenPipeError):
        ours.send(b"x")


def test_a_send_that_nobody_reads_ends_at_the_deadline(ends):
    ours, _ = ends
    with pytest.raises(TimeoutError):
        ours.send_all(bytes(1 << 20), Deadline(0.1))
    assert ours.send(b"x") == 0
    with pytest.raises(TimeoutError):
        ours.await_bytes(Deadline(0.1))


def test_what_the_descriptor_does_not_announce_is_not_waited_for():
    ours, theirs = map(Scrambled, socket.socketpair())
    data = os.urandom(50)
    ours.send_all(data, soon())
    ours.close()
    got = b""
    while len(got) < len(data):
        theirs.await_bytes(Deadline(0.5))
        got += theirs.receive(1000)
    assert got == data and not theirs.pending
    theirs.close()
