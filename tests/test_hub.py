"""The hub: which ranks may join, which failures it reports to which ranks, and when it ends."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgpack
import pytest
from control import ADMISSION, KEY, WORLD, Communicator, Job, NoLinks, Waits, eventually, greeted, raised, soon

from mscomm import errors
from mscomm.bootstrap import by_hand, kvs, rendezvous
from mscomm.cluster import hub, hub_process
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.frames import Frames, encode
from mscomm.cluster.hello import CONTROL
from mscomm.cluster.member import Member
from mscomm.cluster.protection import Protection


def test_members_join_learn_of_each_other_and_leave():
    with Job(3) as job:
        members = job.joined()
        for member, _ in members[:2]:
            member.leave(7)
        eventually(lambda: sorted(members[2][1].departed) == [0, 1])
        members[2][0].leave(7)
        assert job.settled() == (True, "all 3 ranks have left", None)
        assert not members[2][1].aborts


def test_a_welcome_carries_the_facts_of_all_by_rank():
    with Job(2, tcp=True) as job:
        welcomes = {}

        def join(rank):
            welcomes[rank] = job.member(rank).join({"size": 2, "colour": f"c{rank}"}, soon())

        other = threading.Thread(target=join, args=(1,))
        other.start()
        join(0)
        other.join()
        for rank in (0, 1):
            assert welcomes[rank].rank == rank
            assert welcomes[rank].size == 2
            assert welcomes[rank].run == job.hub.run
            assert [fact["colour"] for fact in welcomes[rank].facts] == ["c0", "c1"]
            assert welcomes[rank].facts[rank]["pid"] == os.getpid()
        assert welcomes[0].key == welcomes[1].key != KEY  # the session key of the epoch


def test_too_few_are_told_who_is_missing():
    with Job(3, topo_timeout_s=60, tcp=True) as job:
        texts = []

        def join(rank):
            with pytest.raises(errors.Error) as caught:
                job.member(rank).join({"size": 3}, soon())
            texts.append(str(caught.value))

        other = threading.Thread(target=join, args=(1,))
        other.start()
        third = threading.Thread(target=join, args=(0,))
        third.start()
        eventually(lambda: any("2 of 3" in line for line in job.log))
        job.hub._topo_until = 0.0  # the time is over
        socket.create_connection(job.listener.getsockname()).close()  # makes the hub look at the time again
        third.join()
        other.join()
        assert texts[0].startswith("only 2 of 3 ranks joined within 60 s (MS_TOPO_TIMEOUT): missing rank 2")
        assert texts[0] == texts[1]
        assert job.settled().ok is False


def test_nobody_came():
    with Job(3, topo_timeout_s=0.1, tcp=True) as job:
        assert "only 0 of 3" in job.settled().text


def test_one_too_many_is_refused_and_disturbs_nobody():
    with Job(2, ranks_known=False, tcp=True) as job:
        members = job.joined(ids=["a", "b"])
        with pytest.raises(errors.Error, match=r"the job at 127.0.0.1:\d+ already has its 2 workers"):
            job.member(node_id="c").join({"size": 2}, soon())
        assert not members[0][1].aborts


def test_a_taken_id_is_refused_with_the_name_of_its_holder():
    with Job(2, ranks_known=False, tcp=True) as job:
        first = job.member(node_id="worker_0")
        failed = threading.Thread(target=lambda: raised(errors.Error, first.join, {"size": 2}, soon()))
        failed.start()
        eventually(lambda: any("1 of 2" in line for line in job.log))
        with pytest.raises(errors.Error, match=rf"MS_NODE_ID=worker_0 is taken already: .*\(pid {os.getpid()} on host"):
            job.member(node_id="worker_0").join({"size": 2}, soon())
        job.hub.stop()
        failed.join()


def test_a_taken_rank_is_refused():
    with Job(2, tcp=True) as job:
        job_members = []
        first = threading.Thread(target=lambda: job_members.append(job.member(0).join({"size": 2}, soon())))
        first.start()
        eventually(lambda: any("1 of 2" in line for line in job.log))
        with pytest.raises(errors.Error, match="rank 0 is taken already: rank 0"):
            job.member(0).join({"size": 2}, soon())
        job.member(1).join({"size": 2}, soon())
        first.join()
        assert job_members[0].rank == 0


def test_another_worker_num_is_refused_naming_both():
    with (
        Job(2, ranks_known=False, tcp=True) as job,
        pytest.raises(errors.Error, match="MS_WORKER_NUM is 4 here and 2 at"),
    ):
        job.member().join({"size": 4}, soon())


def test_ids_decide_ranks_on_the_hub():
    with Job(3, ranks_known=False, tcp=True) as job:
        job.joined(ids=["2", "0", "1"])
        by_id = {member.node_id: member._welcome.rank for member in job.members}
        assert by_id == {"0": 0, "1": 1, "2": 2}


def test_a_member_lost_before_all_had_joined_is_told_to_the_others():
    with Job(3) as job:
        first = job.member(0)
        caught = []
        thread = threading.Thread(target=lambda: caught.append(raised(errors.PeerLost, first.join, {}, soon())))
        thread.start()
        eventually(lambda: any("1 of 3" in line for line in job.log))
        job.ends[2].close()
        thread.join()
        assert caught[0].ranks == (2,)
        with pytest.raises(errors.PeerLost, match="rank 2 ended before it joined"):  # ranks that join later fail, too
            job.member(1).join({}, soon())


def test_the_end_of_a_control_link_is_a_lost_rank_with_the_launchers_reason():
    with Job(3, watched=True) as job:
        members = job.joined()
        members[1][0].close()
        job.hub.process_ended(1, "killed by SIGKILL")
        eventually(lambda: members[0][1].aborts and members[2][1].aborts)
        lost = members[0][1].aborts[0]
        assert (lost.kind, lost.ranks, lost.waiting_for) == ("PeerLost", (1,), ())
        assert str(lost).startswith(f"rank 1 (pid {os.getpid()} on host ")
        assert str(lost).endswith("ended without release: killed by SIGKILL")


def test_a_process_that_ended_is_lost_though_a_child_of_its_holds_the_link():
    with Job(2, watched=True) as job:
        members = job.joined()
        job.hub.process_ended(1, "exit code 3")
        eventually(lambda: members[0][1].aborts)
        assert "exit code 3" in str(members[0][1].aborts[0])


def test_a_process_that_ends_badly_after_bye_is_the_first_cause():
    with Job(3, watched=True) as job:
        members = job.joined()
        members[1][0].leave(4)
        threading.Timer(0.05, job.hub.process_ended, (1, "exit code 3"), {"badly": True}).start()
        error = members[0][0].settle(WORLD, errors.PeerLost("rank 1 has left the job", [1]), 5)
        assert type(error) is errors.PeerLost
        assert str(error).startswith("rank 1 (pid ")
        assert str(error).endswith("left the job: exit code 3")
        eventually(lambda: members[2][1].aborts)


def test_needing_a_rank_whose_process_ended_well_is_still_an_error():
    with Job(2, watched=True) as job:
        members = job.joined()
        members[1][0].leave(4)
        job.hub.process_ended(1, "exit code 0")
        error = members[0][0].settle(WORLD, errors.PeerLost("rank 1 has left the job", [1]), 5)
        assert "exit code" not in str(error)
        assert error.ranks == (1,)


def test_a_member_that_does_not_read_does_not_stop_the_hub():
    with Job(3) as job:
        lazy = job.ends[2]
        assert lazy.recv(48) == job.hub.admission
        lazy.sendall(encode({"t": "join", "rank": 2, "node_id": None, "facts": {"pad": "x" * 60000}}, 1 << 16))
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        others = [job.member(rank) for rank in (0, 1)]
        threads = [threading.Thread(target=m.join, args=({"pad": "x" * 60000}, soon())) for m in others]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        others[0].report(errors.Aborted("enough", [0]))
        communicator = Communicator()
        others[1].attach(WORLD, communicator, NoLinks())
        eventually(lambda: communicator.aborts)


NESTED: list[Any] = []
for _ in range(500):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\xff" * 64,
        encode({"t": "welcome"}, 1000),
        encode({"t": "failed", "kind": 3}, 1000),
        b"\1\0\0\0\xc1",
        encode({"t": "failed", "kind": NESTED}, 10_000),
        encode({"t": "dial", "group": WORLD, "to": 0, "purpose": 4, "addresses": None}, 1000),
    ],
)
def test_nonsense_on_a_control_link_loses_that_rank_only(nonsense):
    with Job(2) as job:
        members = job.joined()
        members[1][0].frames.stream.send(nonsense)
        eventually(lambda: members[0][1].aborts)
        assert (members[0][1].aborts[0].kind, members[0][1].aborts[0].ranks) == ("PeerLost", (1,))
        assert "invalid data" in str(members[0][1].aborts[0])


def packed(*words):
    return b"".join(word if isinstance(word, bytes) else msgpack.packb(word) for word in words)


@pytest.mark.parametrize("kind", ["join", "meet"])
def test_deeply_nested_facts_end_that_link_only(kind):
    """msgpack decodes facts that are nested 1000 deep, but cannot encode them for the other ranks."""
    nested = packed(b"\x81", "x", b"\x91" * 1000, None)
    if kind == "join":
        body = packed(b"\x84", "t", "join", "rank", None, "node_id", None, "facts", nested)
    else:
        words = ("key", "k", "name", "barrier", "ranks", [0, 1], "founds", False, "survivors", False)
        body = packed(b"\x87", "t", "meet", *words, "facts", nested)
    frame = len(body).to_bytes(4, "little") + body
    with Job(2, tcp=True) as job:
        if kind == "join":
            with contextlib.closing(greeted(job.listener.getsockname())) as stream:
                stream.send_all(frame, soon())
                stream.await_bytes(soon())
                assert stream.receive(1) == b""
        members = job.joined()  # the job is as it was
        if kind == "meet":
            members[1][0].frames.stream.send(frame)
            eventually(lambda: members[0][1].aborts)
            assert "nested in more than 16 lists and maps" in str(members[0][1].aborts[0])
        job.hub.stop()
        job.thread.join()


def test_an_exception_in_the_hub_ends_that_link_only(monkeypatch):
    monkeypatch.setitem(hub.FROM_RANKS, "waits", lambda *_: 1 // 0)
    with Job(3) as job:
        members = job.joined()
        members[1][0].frames.send({"t": "waits", "key": "k"}, soon())
        eventually(lambda: members[0][1].aborts and members[2][1].aborts)
        assert members[0][1].aborts[0].ranks == (1,)
        assert "that the hub failed on (ZeroDivisionError: " in str(members[0][1].aborts[0])
        assert any("Traceback" in line for line in job.log)


@pytest.mark.parametrize("topo_timeout_s", [60.0, float("inf")])
def test_a_spawned_hub_serves_and_ends_by_itself(topo_timeout_s):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = hub_process.spawn(listener, 2, KEY, topo_timeout_s)
        address = listener.getsockname()
    try:
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes() + Path(f"/proc/{process.pid}/environ").read_bytes()
        assert KEY not in command
        assert KEY.hex().encode() not in command
        members = []
        for rank in (0, 1):
            members.append(Member(Frames(greeted(address, rank=rank)), key=ADMISSION[CONTROL], rank=rank))
        thread = threading.Thread(target=members[1].join, args=({}, soon()))
        thread.start()
        assert members[0].join({}, soon()).size == 2
        thread.join()
        for member in members:
            member.leave(0)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_a_spawned_hub_does_not_wait_for_a_child_that_another_thread_has_forked(monkeypatch):
    """The child holds the writing end of the pipe through which the hub gets its secrets, and lives for long."""
    popen, children = hub_process.Process, []

    def forks_first(*words, **options):
        child = os.fork()
        if child == 0:
            signal.pause()
        children.append(child)
        return popen(*words, **options)

    monkeypatch.setattr(hub_process, "Process", forks_first)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = hub_process.spawn(listener, 1, KEY, 60.0)
        try:
            member = Member(Frames(greeted(listener.getsockname(), rank=0)), key=ADMISSION[CONTROL], rank=0)
            assert member.join({}, soon()).size == 1
            member.leave(0)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("program", "how"),
    [
        ("import sys; sys.exit('it has no air\\n')", "ended with exit code 1: it has no air"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL: it wrote no error"),
    ],
)
def test_the_death_of_the_hub_is_told_as_what_it_is(monkeypatch, tmp_path, program, how):
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{program}\n")
    python.chmod(0o700)
    monkeypatch.setattr("multiprocessing.spawn._python_exe", str(python))  # first: the import reads sys.executable
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(errors.BackendUnavailable, match="the hub, which rank 0 has started, " + how):
        by_hand.launcher(f"tcp://127.0.0.1:{port}", 0, 2).accept({}, soon(), Protection())
    assert len(os.listdir("/proc/self/fd")) <= before
    assert not any(path.is_file() for path in tmp_path.glob("mscomm-*/*"))  # no key file is left


@pytest.mark.parametrize("passed", [b"", (40).to_bytes(8, "little"), (40).to_bytes(8, "little") + KEY, bytes(8)])
def test_a_hub_whose_rank_0_has_died_before_it_passed_the_key_ends(passed):
    """With a short key, anybody could join."""
    program = "import sys; from mscomm.cluster.hub_process import main; main(*sys.argv[1:])"
    reader, writer = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as listener, open(writer, "wb") as pipe:
        pipe.write(passed)
        pipe.close()
        fds = [listener.fileno(), reader]
        command = [sys.executable, "-c", program, ",".join(map(str, fds)), "2", "60", bytes(16).hex()]
        done = subprocess.run(command, pass_fds=fds, capture_output=True, text=True, timeout=60)
    os.close(reader)
    assert done.returncode == 1 and done.stderr == "rank 0 ended before it had passed on the key\n"


def test_a_hub_process_serves_more_ranks_than_its_soft_limit_of_descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener, contextlib.ExitStack() as stack:
        limit = len(os.listdir("/proc/self/fd")) + 32  # this process needs some, too
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            process = hub_process.spawn(listener, limit + 20, KEY, 30.0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        stack.callback(hub_process.end, process)
        ends = [greeted(listener.getsockname(), rank=rank) for rank in range(limit + 20)]
        for end in ends:
            stack.callback(end.close)
        assert len(ends) > limit


def test_a_hello_that_is_closed_before_it_joined_costs_the_job_nothing():
    with Job(2, tcp=True) as job:
        for rank in (0, 1, 1):
            greeted(job.listener.getsockname(), rank=rank).close()
        assert [
            len(member.meet("k", "barrier", [rank], {}, soon()).ranks) for rank, (member, _) in enumerate(job.joined())
        ] == [1, 1]


def test_a_rank_that_gives_up_before_it_joins_is_told_to_the_others():
    with Job(2, tcp=True) as job:
        member = Member(Frames(greeted(job.listener.getsockname(), rank=1)), key=b"", rank=1)
        member.give_up(ValueError("device 9 does not exist"))
        member.close()
        with pytest.raises(errors.PeerLost, match="rank 1 gave up before it joined: ValueError: device 9 does not"):
            job.member(0).join({}, soon())


@pytest.mark.parametrize("known", [True, False])
def test_a_process_without_a_seat_cannot_give_up_for_a_rank_that_is_there(known):
    with Job(2, tcp=True, ranks_known=known) as job:
        members = job.joined(None if known else ["0", "1"])
        stray = Member(Frames(greeted(job.listener.getsockname(), rank=1)), key=b"", rank=1)
        stray.give_up(ValueError("started twice"))
        stray.close()
        eventually(lambda: any("gave up before it joined: ValueError: started twice" in line for line in job.log))
        met = Waits(members[0][0].meet, "k", "barrier", [0, 1], {}, soon())
        assert members[1][0].meet("k", "barrier", [0, 1], {}, soon()).ranks == [0, 1]
        assert met.ended().result.ranks == [0, 1]


def test_many_that_leave_at_once_are_told_in_a_few_frames(monkeypatch):
    """If each of n ranks got a frame for each rank that leaves, the end of a job would take n squared frames."""
    told = []

    def broadcast(self, frame, ranks):
        told.extend([frame] if frame["t"] == "left" else [])
        plain(self, frame, ranks)

    plain = hub.Hub._broadcast
    monkeypatch.setattr(hub.Hub, "_broadcast", broadcast)
    with Job(20) as job:
        members = job.joined()
        began = time.monotonic()
        for member, _ in members[1:]:
            member.leave(7)
        eventually(lambda: sorted(members[0][1].departed) == list(range(1, 20)))
        assert len(told) <= 2 + (time.monotonic() - began) / hub._LEAVERS_EVERY_S


def test_who_never_joins_does_not_keep_the_hub():
    with Job(2, tcp=True) as job, contextlib.closing(greeted(job.listener.getsockname())) as lurker:
        for member, _ in job.joined():
            member.leave(0)
        assert job.settled().ok
        assert "the job is over" in Frames(lurker).receive(soon())["why"]


class Spawned(Exception):
    """Raised by the test's spawn(), which starts no process."""


class NoStore:
    """A launcher's store that nobody reads."""

    def answer(self, texts: list[str], deadline: Deadline) -> None:
        assert texts == ["mscomm1,failed"]


@pytest.mark.parametrize("seconds", [7200.0, float("inf")])
def test_the_hub_that_rank_0_starts_waits_as_long_as_the_user_said(seconds, monkeypatch):
    limits = []

    def spawn(listener, size, key, topo_timeout_s, named, protection):
        limits.append(topo_timeout_s)
        raise Spawned

    monkeypatch.setattr(hub_process, "spawn", spawn)
    place, deadline = rendezvous.Seat(0, 2, 0, one_host=True), Deadline(seconds)
    with pytest.raises(Spawned):
        kvs.Join("mpirun", place, NoStore(), {}, deadline, Protection()).invitation()
    with pytest.raises(Spawned):
        spot = rendezvous.Spot("a job")
        rendezvous.Meeting("srun", place, spot, {}, deadline, Protection(), "").invitation()
    assert len(limits) == 2 and all(7000 < limit <= seconds for limit in limits)


STARTER = """
import os, socket, sys
from mscomm.cluster import hub_process
with socket.create_server(("127.0.0.1", 0)) as listener:
    process = hub_process.spawn(listener, 2, bytes(range(32)), 600.0)
    print(process.pid, listener.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("streams", ["open", "closed"])
def test_a_spawned_hub_ends_when_rank_0_does_and_says_so(streams):
    code = STARTER if streams == "open" else f"import os\nos.close(2)\n{STARTER}"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as starter:
        pid, port = map(int, starter.stdout.readline().split())
        member = Member(Frames(greeted(("127.0.0.1", port), rank=1)), key=ADMISSION[CONTROL], rank=1)
        threading.Timer(0.1, starter.stdin.close).start()
        with pytest.raises(errors.PeerLost, match="rank 0 ended before it joined"):
            member.join({}, soon())
        member.close()
        eventually(
            lambda: not Path(f"/proc/{pid}").exists() or "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
        )


def test_the_next_spawn_reaps_the_last_hub():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = hub_process.spawn(listener, 1, KEY, 0.01)
        os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
        second = hub_process.spawn(listener, 1, KEY, 0.01)
        assert first.returncode is not None
        second.wait(60)


def test_the_hub_does_not_import_numpy():
    code = "import sys, mscomm.cluster.hub_process; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
