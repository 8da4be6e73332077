"""A rank's side of its control link: which errors it raises, what it receives, and what a forked child keeps."""

from __future__ import annotations

import os
import socket
import sys
import threading

import numpy as np
import pytest
from control import KEY, WORLD, Communicator, Job, NoLinks, eventually, soon
from ranks import ranks

import mscomm
from mscomm import errors
from mscomm.cluster import judge
from mscomm.cluster.bytestream import ByteStream
from mscomm.cluster.frames import Frames
from mscomm.cluster.member import Member
from mscomm.cluster.protection import Protection
from mscomm.job import resolve
from mscomm.launching import parts
from mscomm.launching.parts import OtherNode


def test_settle_returns_the_first_cause_with_the_symptom_behind_it():
    with Job(3) as job:
        members = job.joined()
        members[1][0].report(errors.Aborted("rank 1: ValueError: no data (train.py:41)", [1]))
        symptom = errors.PeerLost("link to rank 1 ended", [1])
        error = members[0][0].settle(WORLD, symptom, 4)
        assert type(error) is errors.Aborted
        assert str(error) == "rank 1: ValueError: no data (train.py:41)"
        assert error.ranks == (1,)
        assert error.__cause__ is symptom
        eventually(lambda: [one.fields() for one in members[2][1].aborts] == [error.fields()])


def test_settle_asks_everybody_where_they_are_and_decides_when_all_have_answered(monkeypatch):
    monkeypatch.setattr(judge, "ANSWERS_WITHIN_S", 600.0)
    with Job(3, tcp=True) as job:
        members = job.joined(places=[(9, True, ""), (8, False, "is between calls, after #8"), (9, True, "")])
        error = members[0][0].settle(WORLD, errors.CollectiveTimeout("all_reduce #9 took over 1 s"), 9)
        assert error.waiting_for == (1,)
        assert "is between calls, after #8" in str(error)


@pytest.mark.parametrize("kind", ["PeerLost", "CollectiveTimeout", "Mismatch"])
def test_when_the_hub_is_gone_only_a_mismatch_needs_no_judge(kind):
    """If a rank is lost after the hub, the loss of the hub may be the reason. So the error must not name this rank."""
    with Job(2) as job:
        members = job.joined()
        job.hub.stop()
        job.thread.join()
        symptom = errors.make(kind, "link ended", [1])
        error = members[0][0].settle(WORLD, symptom, 1)
        if kind == "Mismatch":
            assert error is symptom
        else:
            assert error.kind == "Aborted" and error.ranks == () and "the scheduler is gone" in str(error)
            assert error.__cause__ is symptom


def test_a_hub_that_is_gone_aborts_the_members():
    with Job(2) as job:
        members = job.joined()
        job.hub.stop()
        eventually(lambda: members[0][1].aborts)
        assert (members[0][1].aborts[0].kind, members[0][1].aborts[0].ranks) == ("Aborted", ())
        assert "the scheduler is gone" in str(members[0][1].aborts[0])


@pytest.mark.parametrize(
    ("frame", "wrong"),
    [
        ({"t": "go", "epoch": "0"}, "'go' needs 'epoch' as int, not '0'"),
        ({"t": "go", "epoch": float("inf")}, "'go' needs 'epoch' as int, not inf"),
        ({"t": "left", "group": WORLD, "ranks": 1}, "'left' needs 'ranks' as list, not 1"),
    ],
)
def test_a_frame_with_a_wrong_field_ends_the_link(frame, wrong):
    ours, hub = socket.socketpair()
    member = Member(Frames(ByteStream(ours)), key=KEY, rank=0)
    with hub:
        Frames(ByteStream(hub)).send(frame, soon())
        with pytest.raises(errors.Aborted, match=f"the link to it failed: .*{wrong}"):
            member.join({}, soon())
        member.close()


@pytest.mark.parametrize("wrong", [{"over": 1}, {"over": {"kind": 1}}, {"goes_on": None}])
def test_a_launcher_ends_its_link_after_a_frame_with_a_wrong_field(wrong, monkeypatch):
    monkeypatch.setattr(parts, "_TELL_S", 0.1)
    node = OtherNode(4, range(2, 4), "node2", "-n 2", "10.0.0.1", 4000, Protection(), 60.0)
    ours, hub = socket.socketpair()
    node._link, node._where = Frames(ByteStream(ours)), "10.0.0.1:4000"
    with hub:
        state = {"t": "state", "over": None, "goes_on": False, "only_stopped": False, "complete": 0}
        Frames(ByteStream(hub)).send({**state, **wrong}, soon())
        over = node.over()
    assert isinstance(over, errors.PeerLost) and "the link to the launcher of node 0 failed: 'state' needs" in str(over)


def test_a_verdict_before_attach_is_kept():
    with Job(2) as job:
        second = job.member(1)
        thread = threading.Thread(target=second.join, args=({}, soon()))
        thread.start()
        first = job.member(0)
        first.join({}, soon())
        thread.join()
        second.report(errors.Aborted("rank 1 gave up", [1]))
        with pytest.raises(errors.Aborted, match="gave up"):
            first.ready(soon())
        communicator = Communicator()
        first.attach(WORLD, communicator, NoLinks())
        assert [(one.kind, one.ranks, str(one)) for one in communicator.aborts] == [("Aborted", (1,), "rank 1 gave up")]


def test_a_forked_child_lets_go_of_the_control_link():
    with Job(2) as job:
        members = job.joined()
        member = members[1][0]
        pid = os.fork()
        if pid == 0:
            member.report(errors.Aborted("a child must not say this", [1]))
            os._exit(0 if member.frames.stream.fileno() == -1 else 1)
        assert os.waitpid(pid, 0)[1] == 0
        member.leave(1)
        members[0][0].leave(1)
        assert job.settled().ok


@ranks(2)
def test_a_failing_worker_writes_to_no_descriptor_that_the_member_has_closed(rank):
    """After the member has closed the descriptor, its number may belong to another file, here a pipe. The core must not
    write to that file, so it has its own copy of the descriptor.
    """
    group = resolve(None)
    if rank == 1:
        eventually(lambda: group.core.failure() is not None)  # wait until rank 0 has broken the group
        os._exit(0)
    work = mscomm.all_reduce(np.ones(1), async_op=True)
    reader, writer = os.pipe()
    number = group.member.news_fd
    group.member.close()
    os.dup2(writer, number)
    group.core.abort(errors.Aborted("enough", [0]))
    group.core.close()  # returns when the worker thread has ended
    assert work.done()
    os.set_blocking(reader, False)
    with pytest.raises(BlockingIOError):
        os.read(reader, 8)
    os._exit(0)


class Noticing(Communicator):
    """A communicator that always has a notice for the user."""

    def __init__(self):
        super().__init__()
        self.told = 0

    def notices(self):
        self.told += 1
        return ["mscomm: rank 0 has waited 10 s"]


@pytest.mark.parametrize("stderr", ["nobody reads it", "closed", "full"])
def test_a_notice_that_cannot_be_written_neither_ends_nor_stops_the_member(stderr, monkeypatch):
    reader, writer = os.pipe()
    before = os.dup(2)
    monkeypatch.setattr(sys, "stderr", os.fdopen(2, "w", closefd=False))
    with Job(2) as job:
        (member, _), (other, _) = job.joined()
        noticing = Noticing()
        member.attach("0:g:1", noticing, NoLinks())
        try:
            if stderr == "closed":
                os.close(2)
            else:
                os.dup2(writer, 2)
            if stderr == "full":
                os.set_blocking(writer, False)
                with pytest.raises(BlockingIOError):
                    while True:
                        os.write(writer, bytes(4096))
                os.set_blocking(writer, True)
            else:
                os.close(writer)
            if stderr == "nobody reads it":
                os.close(reader)
            for turn in (1, 2):
                os.eventfd_write(member.news_fd, 1)
                eventually(lambda turn=turn: noticing.told == turn)
            other.leave(1)
            eventually(lambda: noticing.departed)  # the member still receives what the hub sends
            assert not noticing.aborts
        finally:
            os.dup2(before, 2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_member_that_cannot_go_on_reading_says_so(monkeypatch):
    with Job(2) as job:
        (_, communicator), (other, _) = job.joined()

        def refuse(rank):
            raise RecursionError("too deep")

        monkeypatch.setattr(communicator, "left", refuse)
        other.leave(1)
        eventually(lambda: communicator.aborts)
        assert communicator.aborts[0].kind == "Aborted"
        assert "RecursionError: too deep" in str(communicator.aborts[0])


@ranks(2)
def test_a_link_that_no_thread_can_be_started_for_is_a_failure_of_its_group_only(rank, group):
    pair = mscomm.create_group("pair", [0, 1])
    if rank == 1:
        start = threading.Thread.start

        def refuse(thread):
            if thread.name == "mscomm-dial":
                raise RuntimeError("can't create new thread at interpreter shutdown")
            start(thread)

        threading.Thread.start = refuse
    mscomm.barrier()
    why = "rank 1 .*: no link to rank 0: can't create new thread"
    with pytest.raises(mscomm.Error, match=why):
        if rank == 0:
            mscomm.send(np.ones(1), 1, group=pair)
        else:
            mscomm.recv(np.empty(1), 0, group=pair)
    mscomm.barrier()
    mscomm.barrier()
