"""The control plane: hello, frames, door, plan, judge, hub and member, keys. Real sockets, threads and processes."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgpack
import pytest

from mscomm import errors
from mscomm.bootstrap import find, launcher, ms_cluster
from mscomm.cluster import hub as hub_module
from mscomm.cluster import links, plan, security
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.frames import Frames, Parser, encode
from mscomm.cluster.hello import Hello
from mscomm.cluster.hub import Hub
from mscomm.cluster.judge import Judge, Place
from mscomm.cluster.links import CONTROL, DATA, Identity
from mscomm.cluster.member import Member

KEY = bytes(range(32))
JOB = b"j" * 16
VERSION = links.package_version()


def soon() -> Deadline:
    return Deadline(5)


def eventually(condition, timeout_s=5.0):
    """Wait for what another thread does."""
    deadline = Deadline(timeout_s)
    while not condition():
        assert not deadline.passed, "it did not happen in time"
        time.sleep(0.005)


# -- hello


def converse(connector: Hello, acceptor: Hello) -> None:
    """Carry the bytes between the two ends until both are done."""
    to_acceptor = connector.feed(b"")
    while not (connector.done and acceptor.done):
        to_connector = acceptor.feed(to_acceptor)
        to_acceptor = connector.feed(to_connector)


def ends(mine=None, peer=None, ranks=(3,), keys=(KEY, KEY), purposes=(DATA, DATA)):
    mine = mine or Identity(JOB, VERSION, 3, 1)
    peer = peer or Identity(JOB, VERSION, 0, 1)
    return Hello.connector(keys[0], purposes[0], mine), Hello.acceptor(keys[1], purposes[1], peer, ranks)


def test_hello_tells_the_acceptor_who_came():
    connector, acceptor = ends()
    converse(connector, acceptor)
    assert acceptor.peer == Identity(JOB, VERSION, 3, 1)
    assert acceptor.refusal is None


def test_hello_works_one_byte_at_a_time_and_has_the_documented_sizes():
    connector, acceptor = ends()
    turns, sent, sizes = [(acceptor, connector), (connector, acceptor)], connector.feed(b""), []
    while sent:
        sizes.append(len(sent))
        (receiver, _), *_ = turns
        answers = [receiver.feed(sent[i : i + 1]) for i in range(len(sent))]
        sent = b"".join(answers)
        turns.reverse()
    assert sizes == [40, 72, 80, 40]
    assert connector.done
    assert acceptor.done


def test_connector_does_not_prove_itself_to_an_acceptor_with_another_key():
    connector, acceptor = ends(keys=(KEY, b"x" * 32))
    with pytest.raises(errors.AuthenticationError, match="does not have the key"):
        connector.feed(acceptor.feed(connector.feed(b"")))


def test_acceptor_says_nothing_to_a_wrong_proof():
    connector, acceptor = ends()
    proof = connector.feed(acceptor.feed(connector.feed(b"")))
    with pytest.raises(errors.AuthenticationError, match="could not prove"):
        acceptor.feed(proof[:-1] + bytes([proof[-1] ^ 1]))


def test_a_changed_verdict_is_noticed():
    connector, acceptor = ends()
    verdict = acceptor.feed(connector.feed(acceptor.feed(connector.feed(b""))))
    with pytest.raises(errors.AuthenticationError, match="forged"):
        connector.feed(b"\1" + verdict[1:])


@pytest.mark.parametrize(
    ("mine", "text"),
    [
        (Identity(b"k" * 16, VERSION, 3, 1), "another job"),
        (Identity(JOB, "9.9", 3, 1), "another version than mscomm 9.9"),
        (Identity(JOB, VERSION, 2, 1), "rank 2 is not expected"),
        (Identity(JOB, VERSION, -1, 1), "rank -1 is not expected"),
        (Identity(JOB, VERSION, 3, 0), "epoch 0 is not the present one"),
        (Identity(bytes(16), VERSION, -1, 0), "another job"),
    ],
)
def test_refusals_are_told_to_a_peer_with_the_key(mine, text):
    connector, acceptor = ends(mine=mine)
    with pytest.raises(errors.Error, match=text):
        converse(connector, acceptor)
    assert text in str(acceptor.refusal)
    assert acceptor.done


def test_a_control_link_may_know_nothing_yet():
    connector, acceptor = ends(mine=Identity(version=VERSION), purposes=(CONTROL, CONTROL))
    converse(connector, acceptor)
    assert acceptor.peer.rank == -1
    assert acceptor.refusal is None


def test_another_wire_version_is_named_on_both_ends():
    connector, acceptor = ends()
    first = connector.feed(b"")
    answer = acceptor.feed(first[:4] + struct.pack("<H", 7) + first[6:])
    assert "wire version 7" in str(acceptor.refusal)
    assert len(answer) == 72
    with pytest.raises(errors.Error, match="install the same mscomm everywhere"):
        connector.feed(answer)


def test_garbage_is_refused_at_its_first_bytes():
    _, acceptor = ends()
    with pytest.raises(links.NotMscomm, match="GET"):
        acceptor.feed(b"GET / HTTP/1.1\r\n")


def test_a_link_of_another_purpose_is_not_let_in():
    connector, acceptor = ends(purposes=(DATA, CONTROL))
    with pytest.raises(errors.Error, match="purpose 3"):
        acceptor.feed(connector.feed(b""))


# -- frames


def test_a_frame_over_the_limit_is_refused_before_it_is_read():
    with pytest.raises(errors.Error, match="limit is 1000"):
        Parser(1000).feed(struct.pack("<I", 1001))


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",
        b"",
        msgpack.packb([1]),
        msgpack.packb({1: 2}),
        msgpack.packb({"t": 5}),
        msgpack.packb({"t": "x"}) + b"\0",
    ],
)
def test_what_is_not_a_message_is_an_error(body):
    with pytest.raises(errors.Error):
        Parser(1000).feed(struct.pack("<I", len(body)) + body)


def test_deep_nesting_and_extensions_are_errors():
    deep = b"\x81\xa1t" + b"\x91" * 5000 + b"\xc0"
    extension = msgpack.packb({"t": "x", "e": msgpack.ExtType(5, b"abc")})
    for body in (deep, extension):
        with pytest.raises(errors.Error):
            Parser(1 << 16).feed(struct.pack("<I", len(body)) + body)


def test_frames_cross_a_socket_in_any_pieces():
    a, b = socket.socketpair()
    with a, b:
        receiver = Frames(b)
        data = encode({"t": "one", "x": list(range(100))}, 1 << 16) + encode({"t": "two"}, 1 << 16)
        threading.Thread(target=lambda: [a.send(data[i : i + 7]) for i in range(0, len(data), 7)]).start()
        assert receiver.receive(soon())["x"] == list(range(100))
        assert receiver.receive(soon()) == {"t": "two"}
        a.close()
        assert receiver.receive(soon()) is None


def test_a_send_to_somebody_who_does_not_read_ends_at_the_deadline():
    a, b = socket.socketpair()
    with a, b, pytest.raises(TimeoutError):
        Frames(a, send_limit=16 << 20).send({"t": "big", "x": bytes(8 << 20)}, Deadline(0.1))


# -- connections


def raised(kind, function, *args):
    """The error that the function must raise; for threads."""
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


def dial(listener, rank, key=KEY):
    sock = links.connect(listener.getsockname(), soon())
    try:
        links.greet(sock, key, DATA, Identity(JOB, VERSION, rank, 1), soon())
    except BaseException:
        sock.close()
        raise
    return sock


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
def test_accept_all_brings_every_wanted_rank_in(family):
    with listening(family) as listener, contextlib.ExitStack() as stack:
        threads = [
            threading.Thread(target=lambda r=r: stack.enter_context(dial(listener, r)).send(bytes([r])))
            for r in (1, 2, 5)
        ]
        for thread in threads:
            thread.start()
        came = links.accept_all(listener, {1, 2, 5}, KEY, DATA, Identity(JOB, VERSION, 0, 1), soon())
        assert {rank: sock.recv(1) for rank, sock in came.items()} == {1: b"\1", 2: b"\2", 5: b"\5"}
        for sock in came.values():
            assert sock.get_inheritable() is False
            if family == socket.AF_INET:
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            sock.close()
        for thread in threads:
            thread.join()


def test_a_flood_of_garbage_silence_and_wrong_keys_does_not_disturb_the_wanted():
    complaints: list[str] = []
    with listening() as listener, contextlib.ExitStack() as stack:
        for i in range(150):
            nuisance = stack.enter_context(socket.create_connection(listener.getsockname()))
            if i % 3 == 0:
                nuisance.send(b"GET / HTTP/1.1\r\n\r\n")
            elif i % 3 == 1:
                nuisance.send(b"MSCM")  # and never more
        outcome: list[BaseException] = []

        def thief():
            try:
                dial(listener, 1, key=b"wrong" + bytes(27)).close()
            except errors.AuthenticationError as error:
                outcome.append(error)

        def rank_1():
            stack.enter_context(dial(listener, 1))

        threads = [threading.Thread(target=thief), threading.Thread(target=rank_1)]
        results = {}
        acceptor = threading.Thread(
            target=lambda: results.update(
                links.accept_all(listener, {1, 2}, KEY, DATA, Identity(JOB, VERSION, 0, 1), soon(), complaints.append)
            )
        )
        started = time.monotonic()
        for thread in (acceptor, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        stack.enter_context(dial(listener, 2))
        acceptor.join()
        assert results.keys() == {1, 2}
        assert time.monotonic() - started < 3
        assert len(outcome) == 1
        assert len(complaints) <= 16
        for sock in results.values():
            sock.close()


def test_a_silent_connection_is_dropped_in_time(monkeypatch):
    monkeypatch.setattr(links, "HELLO_S", 0.1)
    with listening() as listener, socket.create_connection(listener.getsockname()) as silent:
        silent.send(b"MSCM")
        silent.settimeout(5)
        thread = threading.Thread(
            target=lambda: raised(
                errors.Error, links.accept_all, listener, {1}, KEY, DATA, Identity(JOB, VERSION), Deadline(1)
            )
        )
        thread.start()
        started = time.monotonic()
        with contextlib.suppress(ConnectionResetError):
            assert silent.recv(1) == b""
        assert time.monotonic() - started < 0.9
        thread.join()


def test_a_rank_that_is_there_already_cannot_be_taken():
    with listening() as listener:
        results = {}
        acceptor = threading.Thread(
            target=lambda: results.update(
                links.accept_all(listener, {1, 2}, KEY, DATA, Identity(JOB, VERSION, 0, 1), soon())
            )
        )
        acceptor.start()
        with dial(listener, 1):
            with pytest.raises(errors.Error, match="rank 1 is not expected there, or is connected already"):
                dial(listener, 1)
            with dial(listener, 2):
                acceptor.join()
        for sock in results.values():
            sock.close()


def test_accept_all_names_those_that_did_not_come():
    with listening() as listener, pytest.raises(errors.CollectiveTimeout, match=r"rank 4, 7 within 0\.1 s") as caught:
        links.accept_all(listener, {4, 7}, KEY, DATA, Identity(JOB, VERSION, 0, 1), Deadline(0.1))
    assert caught.value.waiting_for == (4, 7)


@pytest.mark.parametrize("words", [b"SSH-2.0-OpenSSH_9.9\r\n", b""])
def test_greet_says_that_the_other_end_is_no_mscomm(words):
    with listening() as listener, links.connect(listener.getsockname(), soon()) as sock:
        other, _ = listener.accept()
        with other:
            other.sendall(words)
            with pytest.raises(links.NotMscomm, match=r"what listens at 127.0.0.1:\d+ is not an mscomm scheduler"):
                links.greet(sock, KEY, CONTROL, Identity(), Deadline(0.2))


def test_more_descriptors_than_one_message_takes_cross_a_unix_socket():
    a, b = socket.socketpair()
    with a, b, open(os.devnull, "rb") as null:
        links.send_fds(a, [null.fileno()] * 300, soon())
        fds = links.recv_fds(b, 300, soon())
        try:
            assert len(set(fds)) == 300
            assert all(os.path.samestat(os.fstat(fd), os.fstat(null.fileno())) for fd in fds)
            assert not any(os.get_inheritable(fd) for fd in fds)
        finally:
            for fd in fds:
                os.close(fd)


def test_a_wrong_number_of_descriptors_leaks_none():
    a, b = socket.socketpair()
    with a, b, open(os.devnull, "rb") as null:
        links.send_fds(a, [null.fileno()] * 3, soon())
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(errors.Error, match=r"received 3 file descriptors where 2|received 2 file"):
            links.recv_fds(b, 2, soon())
        assert len(os.listdir("/proc/self/fd")) == before


# -- plan


def test_ids_that_are_all_numbers_are_ranks():
    assert plan.assign_ranks([plan.Arrival(i, "h") for i in ("2", "0", "1")]) == [2, 0, 1]


@pytest.mark.parametrize("ids", [("0", "0"), ("0", "2")])
def test_numbers_that_make_no_job_are_refused(ids):
    with pytest.raises(ValueError, match="MS_NODE_ID="):
        plan.assign_ranks([plan.Arrival(i, "h") for i in ids])


def test_hosts_are_contiguous_and_ids_sort_as_people_count():
    members = [("worker_10", "b"), (None, "a"), ("worker_2", "b"), (None, "a"), ("worker_1", "a")]
    assert plan.assign_ranks([plan.Arrival(*member) for member in members]) == [1, 3, 0, 4, 2]


def test_hosts_are_numbered_by_their_lowest_rank():
    assert plan.hosts([{"host": h} for h in "zaza"]) == [0, 1, 0, 1]


def test_agree_names_the_ranks_that_differ():
    facts = [{"version": "1", "size": 3, "backend": b, "algo": ""} for b in ("cpu", "cpu", "nccl")]
    with pytest.raises(errors.Mismatch, match="rank 2: 'nccl'") as caught:
        plan.agree(facts)
    assert caught.value.ranks == (2,)


# -- the verdict


def judge(watched=False):
    return Judge(lambda rank: f"rank {rank}", watched)


def test_an_explicit_cause_counts_at_once_and_only_the_first():
    court = judge()
    court.failed(1, "Mismatch", [1], "they differ", 4, range(3), now=0)
    court.failed(2, "Aborted", [2], "later", 4, range(3), now=0)
    assert court.verdict == ("Mismatch", (1,), (), "they differ")


def test_a_symptom_waits_for_what_the_lost_rank_says():
    court = judge()
    court.failed(0, "PeerLost", [2], "link to rank 2 ended", 4, range(3), now=0)
    assert court.verdict is None
    court.failed(2, "Aborted", [2], "ValueError in rank 2", 4, range(3), now=0.1)
    assert court.verdict.text == "ValueError in rank 2"


def test_a_symptom_is_believed_after_200_ms():
    court = judge()
    court.failed(0, "PeerLost", [2], "link to rank 2 ended", 4, range(3), now=0)
    court.look(0.19)
    assert court.verdict is None
    court.look(court.due())
    assert court.verdict == ("PeerLost", (2,), (), "link to rank 2 ended")


def test_the_end_of_a_control_link_settles_a_symptom():
    court = judge()
    court.failed(0, "PeerLost", [2], "link to rank 2 ended", 4, range(3), now=0)
    court.gone(2, "ended without release", now=0.01)
    assert court.verdict == ("PeerLost", (2,), (), "rank 2 ended without release")


def test_a_chain_of_symptoms_ends_at_the_rank_that_was_silent():
    court = judge()
    court.failed(0, "PeerLost", [1], "link to rank 1 ended", 4, range(3), now=0)
    court.failed(1, "PeerLost", [2], "link to rank 2 ended", 4, range(3), now=0.01)
    court.gone(1, "ended without release", now=0.02)  # it reported, then it ended: not the cause
    court.look(0.21)
    assert court.verdict.ranks == (2,)


def test_two_that_lost_each_other_do_not_wait():
    court = judge()
    court.failed(0, "PeerLost", [1], "link to rank 1 ended", 4, range(2), now=0)
    court.failed(1, "PeerLost", [0], "link to rank 0 ended", 4, range(2), now=0.01)
    assert court.verdict.ranks == (1,)


def test_needing_a_rank_that_left_is_no_symptom():
    court = judge()
    court.left(2, 3, now=0)
    court.failed(0, "PeerLost", [2], "rank 2 left", 4, range(2), now=0)
    assert court.verdict.text.endswith("rank 2 left")


def test_a_deadline_names_who_is_silent_or_behind_and_not_who_waits_too():
    court = judge()
    court.left(4, 6, now=0)
    court.failed(0, "CollectiveTimeout", [], "all_reduce #7 took over 5 s", 7, range(4), now=0)
    assert court.asking
    court.here(0, Place(7, False, "after it failed"), now=0.01)  # the asker's own answer says nothing
    court.here(1, Place(7, True, ""), now=0.01)
    court.here(2, Place(7, False, "computes"), now=0.01)
    assert court.verdict is None
    court.look(0.3)
    assert court.verdict.kind == "CollectiveTimeout"
    assert court.verdict.waiting_for == (2, 3, 4)
    assert court.verdict.text == (
        "all_reduce #7 took over 5 s. Waiting for: rank 2: computes; rank 3: gave no sign of life within 0.3 s; "
        "rank 4: ended well after call #6"
    )


def test_a_deadline_is_decided_when_all_have_answered():
    court = judge()
    court.failed(0, "CollectiveTimeout", [], "late", 7, range(3), now=0)
    court.here(1, Place(6, True, ""), now=0.01)
    court.failed(2, "CollectiveTimeout", [], "late too", 7, range(3), now=0.02)
    assert court.verdict.waiting_for == (1,)


def test_the_launcher_has_100_ms_to_say_how_a_process_ended():
    court = judge(watched=True)
    court.gone(1, "ended without release", now=0)
    assert court.verdict is None
    court.process_ended(1, "killed by SIGKILL", badly=True, now=0.05)
    assert court.verdict.text == "rank 1 ended without release: killed by SIGKILL"
    court = judge(watched=True)
    court.gone(1, "ended without release", now=0)
    court.look(0.1)
    assert court.verdict.text == "rank 1 ended without release"


# -- hub and members


class Communicator:
    """What the core's communicator is to a member."""

    def __init__(self, place=(0, False, "")):
        self.aborts: list[tuple] = []
        self.departed: list[int] = []
        self.place = place

    def abort(self, kind, ranks, waiting_for, text):
        self.aborts.append((kind, ranks, waiting_for, text))

    def left(self, rank):
        self.departed.append(rank)

    def where(self):
        return self.place


class Job:
    """A hub in a thread, and members in this process, each over its socket pair or over TCP."""

    def __init__(self, size, *, ranks_known=True, watched=False, topo_timeout_s=5.0, tcp=False):
        self.log: list[str] = []
        self.size = size
        self.hub = Hub(
            size, key=KEY, topo_timeout_s=topo_timeout_s, ranks_known=ranks_known, watched=watched, log=self.log.append
        )
        self.ends: dict[int, socket.socket] = {}
        self.listener = socket.create_server(("127.0.0.1", 0)) if tcp else None
        if self.listener:
            self.hub.listen(self.listener)
        else:
            for rank in range(size):
                ours, self.ends[rank] = socket.socketpair()
                self.hub.adopt(ours, rank)
        self.members: list[Member] = []
        self.outcome = None
        self.thread = threading.Thread(target=self._serve)

    def _serve(self):
        self.outcome = self.hub.serve()

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.hub.stop()
        self.thread.join(5)
        assert not self.thread.is_alive()
        for member in self.members:
            member.close()
        for end in self.ends.values():
            end.close()
        if self.listener:
            self.listener.close()

    def member(self, rank=None, node_id=None):
        if self.listener:
            sock = links.connect(self.listener.getsockname(), soon())
            links.greet(sock, KEY, CONTROL, Identity(version=VERSION), soon())
        else:
            sock = self.ends[rank]
            assert sock.recv(32) == KEY
        member = Member(Frames(sock), key=KEY, rank=rank, node_id=node_id)
        self.members.append(member)
        return member

    def joined(self, ids=None, places=()):
        """All members, joined, attached and ready, with their communicators, by rank."""
        ids = ids or [None] * self.size
        results: dict[int, tuple] = {}
        failures: list[BaseException] = []

        def one(index):
            member = self.member(None if self.listener and ids[index] else index, ids[index])
            try:
                welcome = member.join({"size": self.size}, soon())
                place = places[welcome.rank] if places else (0, False, "")
                communicator = Communicator(place)
                member.attach(communicator)
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

    def settled(self, timeout_s=5.0):
        self.thread.join(timeout_s)
        assert self.outcome is not None
        return self.outcome


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
            assert welcomes[rank].key == KEY
            assert [fact["colour"] for fact in welcomes[rank].facts] == ["c0", "c1"]
            assert welcomes[rank].facts[rank]["pid"] == os.getpid()


def test_too_few_are_told_who_is_missing():
    with Job(3, topo_timeout_s=0.3, tcp=True) as job:
        texts = []

        def join(rank):
            with pytest.raises(errors.Error) as caught:
                job.member(rank).join({"size": 3}, soon())
            texts.append(str(caught.value))

        other = threading.Thread(target=join, args=(1,))
        other.start()
        join(0)
        other.join()
        assert texts[0].startswith("only 2 of 3 ranks joined within 0.3 s (MS_TOPO_TIMEOUT): missing rank 2")
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
        by_id = {member._node_id: member._welcome.rank for member in job.members}
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
        with pytest.raises(errors.PeerLost, match="rank 2 ended before it joined"):  # and to those that come later
            job.member(1).join({}, soon())


def test_the_end_of_a_control_link_is_a_lost_rank_with_the_launchers_reason():
    with Job(3, watched=True) as job:
        members = job.joined()
        members[1][0].close()
        job.hub.process_ended(1, "killed by SIGKILL")
        eventually(lambda: members[0][1].aborts and members[2][1].aborts)
        kind, ranks, waiting_for, text = members[0][1].aborts[0]
        assert (kind, ranks, waiting_for) == ("PeerLost", [1], [])
        assert text.startswith(f"rank 1 (pid {os.getpid()} on host ")
        assert text.endswith("ended without release: killed by SIGKILL")


def test_a_process_that_ended_is_lost_though_a_child_of_its_holds_the_link():
    with Job(2, watched=True) as job:
        members = job.joined()
        job.hub.process_ended(1, "exit code 3")
        eventually(lambda: members[0][1].aborts)
        assert "exit code 3" in members[0][1].aborts[0][3]


def test_a_process_that_ends_badly_after_bye_is_the_first_cause():
    with Job(3, watched=True) as job:
        members = job.joined()
        members[1][0].leave(4)
        threading.Timer(0.05, job.hub.process_ended, (1, "exit code 3"), {"badly": True}).start()
        error = members[0][0].settle(errors.PeerLost("rank 1 has left the job", [1]), 5)
        assert type(error) is errors.PeerLost
        assert str(error).startswith("rank 1 (pid ")
        assert str(error).endswith("left the job: exit code 3")
        eventually(lambda: members[2][1].aborts)


def test_needing_a_rank_whose_process_ended_well_is_still_an_error():
    with Job(2, watched=True) as job:
        members = job.joined()
        members[1][0].leave(4)
        job.hub.process_ended(1, "exit code 0")
        error = members[0][0].settle(errors.PeerLost("rank 1 has left the job", [1]), 5)
        assert "exit code" not in str(error)
        assert error.ranks == (1,)


def test_settle_returns_the_first_cause_with_the_symptom_behind_it():
    with Job(3) as job:
        members = job.joined()
        members[1][0].report("Aborted", "rank 1: ValueError: no data (train.py:41)", [1])
        symptom = errors.PeerLost("link to rank 1 ended", [1])
        error = members[0][0].settle(symptom, 4)
        assert type(error) is errors.Aborted
        assert str(error) == "rank 1: ValueError: no data (train.py:41)"
        assert error.ranks == (1,)
        assert error.__cause__ is symptom
        eventually(lambda: members[2][1].aborts == [("Aborted", [1], [], str(error))])


def test_settle_asks_everybody_where_they_are():
    with Job(3, tcp=True) as job:
        members = job.joined(places=[(9, True, ""), (8, False, "is between calls, after #8"), (9, True, "")])
        started = time.monotonic()
        error = members[0][0].settle(errors.CollectiveTimeout("all_reduce #9 took over 1 s"), 9)
        assert time.monotonic() - started < 1
        assert error.waiting_for == (1,)
        assert "is between calls, after #8" in str(error)


def test_settle_returns_the_symptom_when_the_hub_is_gone():
    with Job(2) as job:
        members = job.joined()
        job.hub.stop()
        job.thread.join()
        symptom = errors.PeerLost("link ended", [1])
        assert members[0][0].settle(symptom, 1) is symptom


def test_a_hub_that_is_gone_aborts_the_members():
    with Job(2) as job:
        members = job.joined()
        job.hub.stop()
        eventually(lambda: members[0][1].aborts)
        kind, ranks, _, text = members[0][1].aborts[0]
        assert (kind, ranks) == ("Aborted", [])
        assert "the scheduler is gone" in text


def test_a_verdict_before_attach_is_kept():
    with Job(2) as job:
        second = job.member(1)
        thread = threading.Thread(target=second.join, args=({}, soon()))
        thread.start()
        first = job.member(0)
        first.join({}, soon())
        thread.join()
        second.report("Aborted", "rank 1 gave up", [1])
        with pytest.raises(errors.Aborted, match="gave up"):
            first.ready(soon())
        communicator = Communicator()
        first.attach(communicator)
        assert communicator.aborts == [("Aborted", [1], [], "rank 1 gave up")]


def test_a_member_that_does_not_read_does_not_stop_the_hub():
    with Job(3) as job:
        lazy = job.ends[2]
        assert lazy.recv(32) == KEY
        lazy.sendall(encode({"t": "join", "rank": 2, "node_id": None, "facts": {"pad": "x" * 60000}}, 1 << 16))
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        others = [job.member(rank) for rank in (0, 1)]
        threads = [threading.Thread(target=m.join, args=({"pad": "x" * 60000}, soon())) for m in others]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        others[0].report("Aborted", "enough", [0])
        communicator = Communicator()
        others[1].attach(communicator)
        eventually(lambda: communicator.aborts)


@pytest.mark.parametrize(
    "nonsense",
    [b"\xff" * 64, encode({"t": "welcome"}, 1000), encode({"t": "failed", "kind": 3}, 1000), b"\1\0\0\0\xc1"],
)
def test_nonsense_on_a_control_link_loses_that_rank_only(nonsense):
    with Job(2) as job:
        members = job.joined()
        members[1][0]._frames.sock.send(nonsense)
        eventually(lambda: members[0][1].aborts)
        assert members[0][1].aborts[0][:2] == ("PeerLost", [1])
        assert "nonsense" in members[0][1].aborts[0][3]


def test_a_forked_child_lets_go_of_the_control_link():
    with Job(2) as job:
        members = job.joined()
        member = members[1][0]
        pid = os.fork()
        if pid == 0:
            member.report("Aborted", "a child must not say this", [1])
            os._exit(0 if member._frames.sock.fileno() == -1 else 1)
        assert os.waitpid(pid, 0)[1] == 0
        member.leave(1)
        members[0][0].leave(1)
        assert job.settled().ok


def test_a_spawned_hub_serves_and_ends_by_itself():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = hub_module.spawn(listener, 2, KEY, 5.0)
        address = listener.getsockname()
    try:
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes() + Path(f"/proc/{process.pid}/environ").read_bytes()
        assert KEY not in command
        assert KEY.hex().encode() not in command
        members = []
        for rank in (0, 1):
            sock = links.connect(address, soon())
            links.greet(sock, KEY, CONTROL, Identity(version=VERSION, rank=rank), soon())
            members.append(Member(Frames(sock), key=KEY, rank=rank))
        thread = threading.Thread(target=members[1].join, args=({}, soon()))
        thread.start()
        assert members[0].join({}, soon()).size == 2
        thread.join()
        for member in members:
            member.leave(0)
        assert process.wait(5) == 0
    finally:
        process.kill()
        process.wait()


def greeted(address, rank=-1):
    """A control link that has proved itself and not joined."""
    sock = links.connect(address, soon())
    links.greet(sock, KEY, CONTROL, Identity(version=VERSION, rank=rank), soon())
    return sock


def test_a_rank_lost_between_hello_and_join_is_told_to_the_others():
    with Job(2, tcp=True) as job:
        greeted(job.listener.getsockname(), rank=1).close()
        with pytest.raises(errors.PeerLost, match="rank 1 ended before it joined"):
            job.member(0).join({}, soon())


def test_who_never_joins_does_not_keep_the_hub():
    with Job(2, tcp=True) as job, greeted(job.listener.getsockname()) as lurker:
        for member, _ in job.joined():
            member.leave(0)
        assert job.settled().ok
        assert "the job is over" in Frames(lurker).receive(soon())["why"]


STARTER = """
import os, socket, sys
from mscomm.cluster import hub
with socket.create_server(("127.0.0.1", 0)) as listener:
    process = hub.spawn(listener, 2, bytes(range(32)), 600.0)
    print(process.pid, listener.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("streams", ["open", "closed"])
def test_a_spawned_hub_ends_when_rank_0_does_and_says_so(streams):
    code = STARTER if streams == "open" else f"import os\nos.close(2)\n{STARTER}"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as starter:
        pid, port = map(int, starter.stdout.readline().split())
        member = Member(Frames(greeted(("127.0.0.1", port), rank=1)), key=KEY, rank=1)
        threading.Timer(0.1, starter.stdin.close).start()
        with pytest.raises(errors.PeerLost, match="rank 0 ended before it joined"):
            member.join({}, soon())
        member.close()
        eventually(
            lambda: not Path(f"/proc/{pid}").exists() or "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
        )


def test_the_next_spawn_reaps_the_last_hub():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = hub_module.spawn(listener, 1, KEY, 0.01)
        os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
        second = hub_module.spawn(listener, 1, KEY, 0.01)
        assert first.returncode is not None
        second.wait(5)


def test_the_hub_does_not_import_numpy():
    code = "import sys, mscomm.cluster.hub; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- keys


def key_file(path, content=KEY, mode=0o600):
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def test_a_key_is_32_bytes_or_64_hex_digits_or_more_bytes(tmp_path):
    assert security.read_key(key_file(tmp_path / "a")) == KEY
    assert security.read_key(key_file(tmp_path / "b", KEY.hex().encode() + b"\n")) == KEY
    assert len(security.read_key(key_file(tmp_path / "c", bytes(100)))) == 32


def test_unsafe_key_files_are_refused_with_advice(tmp_path):
    good = key_file(tmp_path / "good")
    (tmp_path / "link").symlink_to(good)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path, text in (
        (key_file(tmp_path / "short", b"abc"), "holds 3 bytes"),
        (key_file(tmp_path / "open", mode=0o640), "chmod 600"),
        (str(tmp_path / "link"), "not a symbolic link"),
        (str(tmp_path / "pipe"), "not a regular file"),
        (str(tmp_path / "absent"), "no such file"),
        (str(tmp_path), "not a regular file"),
    ):
        with pytest.raises(errors.AuthenticationError, match=text):
            security.read_key(path)


def test_a_key_file_of_somebody_else_is_refused(tmp_path, monkeypatch):
    path = key_file(tmp_path / "key")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(errors.AuthenticationError, match="belongs to uid"):
        security.read_key(path)


@pytest.fixture
def tmpdir_env(tmp_path, monkeypatch):
    """tempfile.gettempdir() is this folder, here and in child processes."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def test_a_loopback_scheduler_shares_its_key_in_a_private_file(tmpdir_env):
    key, file = security.scheduler_key({}, "127.0.0.1", 8117, False)
    assert Path(file.path).stat().st_mode & 0o777 == 0o600
    assert Path(file.path).parent.stat().st_mode & 0o777 == 0o700
    assert security.worker_key({}, "127.0.0.1", 8117, False) == key
    file.remove()
    assert not Path(file.path).exists()
    with pytest.raises(errors.AuthenticationError, match=r"the scheduler at 127.0.0.1:8117"):
        security.worker_key({}, "127.0.0.1", 8117, False)


def test_a_prepared_folder_is_not_trusted(tmpdir_env):
    folder = tmpdir_env / f"mscomm-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(errors.AuthenticationError, match="chmod 700"):
        security.scheduler_key({}, "127.0.0.1", 8117, False)
    folder.rmdir()
    folder.symlink_to(tmpdir_env)
    with pytest.raises(errors.AuthenticationError, match="symbolic link"):
        security.scheduler_key({}, "127.0.0.1", 8117, False)


def test_a_later_schedulers_key_is_not_removed(tmpdir_env):
    _, first = security.scheduler_key({}, "127.0.0.1", 8117, False)
    key, _ = security.scheduler_key({}, "127.0.0.1", 8117, False)
    first.remove()
    assert security.worker_key({}, "127.0.0.1", 8117, False) == key


def test_off_loopback_a_job_needs_a_key_or_permission(capsys, tmp_path):
    for ask in (security.worker_key, security.scheduler_key):
        with pytest.raises(errors.AuthenticationError, match=r"MSCOMM_JOB_KEY_FILE=(.|\n)*enable_ssl=False"):
            ask({}, "10.0.0.7", 8117, False)
    assert capsys.readouterr().err == ""
    key = security.worker_key({}, "10.0.0.7", 8117, True)
    assert "anybody who can reach 10.0.0.7:8117 can join" in capsys.readouterr().err
    assert security.scheduler_key({}, "10.0.0.7", 8117, True) == (key, None)
    env = {"MSCOMM_JOB_KEY_FILE": key_file(tmp_path / "key")}
    assert security.worker_key(env, "10.0.0.7", 8117, False) == KEY


# -- launchers


def test_without_a_launcher_it_is_a_job_of_one():
    assert find({"PATH": "/bin"}) is None


def test_the_own_launchers_link_is_taken_over_once(monkeypatch):
    monkeypatch.setattr(launcher, "_taken", set())
    ours, theirs = socket.socketpair()
    with ours:
        ours.send(KEY)
        env = dict(zip(launcher.VARIABLES, ("1", "4", "1", "4", str(theirs.detach())), strict=True))
        assert find(env) is launcher
        invitation = launcher.accept(env, soon(), False)
        with invitation.sock as sock:
            assert (invitation.rank, invitation.size, invitation.local_rank, invitation.key) == (1, 4, 1, KEY)
            assert sock.get_inheritable() is False
        with pytest.raises(errors.BackendUnavailable, match="can join its job once"):
            launcher.accept(env, soon(), False)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"MSCOMM_RANK": "4"}, "do not fit together"),
        ({"MSCOMM_RANK": "x"}, "MSCOMM_RANK='x'"),
        ({"MSCOMM_CONTROL_FD": ""}, "MSCOMM_CONTROL_FD=''"),
        ({"MSCOMM_CONTROL_FD": "9999"}, "MSCOMM_CONTROL_FD=9999: Bad file descriptor"),
        ({"MSCOMM_CONTROL_FD": "file"}, "is not a socket"),
        ({"MSCOMM_CONTROL_FD": "tcp"}, "is not a unix stream socket"),
    ],
)
def test_a_launcher_that_cannot_be_reached_is_an_error_and_no_job_of_one(change, text):
    env = {**dict(zip(launcher.VARIABLES, ("1", "4", "1", "4", "0"), strict=True)), **change}
    with open(os.devnull, "rb") as file, socket.socket() as tcp:
        names = {"file": str(file.fileno()), "tcp": str(tcp.fileno())}
        env["MSCOMM_CONTROL_FD"] = names.get(env["MSCOMM_CONTROL_FD"], env["MSCOMM_CONTROL_FD"])
        with pytest.raises(errors.BackendUnavailable, match=text):
            find(env).accept(env, soon(), False)


MS = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "8117"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"MS_ROLE": "MS_PSERVER"}, "MS_ROLE='MS_PSERVER'.*no parameter servers"),
        ({"MS_ROLE": "boss"}, "MS_ROLE='boss': expected MS_WORKER or MS_SCHED"),
        ({"MS_WORKER_NUM": "0"}, "MS_WORKER_NUM='0': expected the number of workers"),
        ({"MS_WORKER_NUM": ""}, "MS_WORKER_NUM is not set"),
        ({"MS_SCHED_PORT": "99999"}, "MS_SCHED_PORT='99999'"),
        ({"MS_SCHED_HOST": ""}, "MS_SCHED_HOST is not set"),
        ({"MS_SERVER_NUM": "2"}, "MS_SERVER_NUM='2': expected 0"),
        ({"MS_TOPO_TIMEOUT": "soon"}, "MS_TOPO_TIMEOUT='soon'"),
    ],
)
def test_each_ms_variable_is_checked(change, text):
    with pytest.raises(ValueError, match=text):
        ms_cluster.accept({**MS, **change}, soon(), False)


def test_a_worker_without_a_scheduler_says_where_it_looked():
    with listening() as taken:
        port = str(taken.getsockname()[1])
    env = {**MS, "MS_SCHED_PORT": port, "MS_TOPO_TIMEOUT": "0.3"}
    with pytest.raises(errors.BackendUnavailable, match=f"no scheduler at 127.0.0.1:{port}.*refused"):
        ms_cluster.accept(env, soon(), False)


def test_a_taken_port_is_named_with_what_to_do(tmpdir_env):
    with listening() as taken:
        env = {**MS, "MS_ROLE": "MS_SCHED", "MS_SCHED_PORT": str(taken.getsockname()[1])}
        with pytest.raises(errors.BackendUnavailable, match=r"the port is taken.*another MS_SCHED_PORT"):
            ms_cluster.serve(env)


def test_the_second_scheduler_at_a_port_leaves_the_key_of_the_first(tmpdir_env, monkeypatch):
    with listening() as taken:
        env = {**MS, "MS_ROLE": "MS_SCHED", "MS_SCHED_PORT": str(taken.getsockname()[1])}

    class Served(Exception):
        pass

    def second(*args):
        """The first one has bound the port, written its key, and does not listen yet."""
        monkeypatch.undo()
        monkeypatch.setattr("tempfile.tempdir", str(tmpdir_env))
        answer = write_key(*args)
        with pytest.raises(errors.BackendUnavailable, match="the port is taken"):
            ms_cluster.serve(env)
        assert Path(answer[1].path).exists()
        raise Served

    write_key = security.scheduler_key
    monkeypatch.setattr(security, "scheduler_key", second)
    with pytest.raises(Served):
        ms_cluster.serve(env)


WORKER = """
import os, time
from mscomm.bootstrap import ms_cluster
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.frames import Frames
from mscomm.cluster.member import Member
way = ms_cluster.accept(os.environ, Deadline(20), False)
member = Member(Frames(way.sock), key=way.key, node_id=way.node_id, hub=way.where)
welcome = member.join({"size": way.size}, Deadline(20))
member.ready(Deadline(20))
print(welcome.rank, welcome.size, flush=True)
member.leave(0)
"""
SCHEDULER = "import os; from mscomm.bootstrap import ms_cluster; ms_cluster.accept(os.environ, None, False)"


def test_workers_may_start_before_the_scheduler_and_the_key_file_goes_at_the_end(tmpdir_env):
    with listening() as taken:
        port = str(taken.getsockname()[1])
    env = {**os.environ, **MS, "MS_SCHED_HOST": "localhost", "MS_SCHED_PORT": port}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER], env={**env, "MS_NODE_ID": f"worker_{i}"}, stdout=subprocess.PIPE
        )
        for i in (1, 0)
    ]
    scheduler = subprocess.run(
        [sys.executable, "-c", SCHEDULER],
        env={**env, "MS_ROLE": "MS_SCHED"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    outputs = [worker.communicate(timeout=10)[0] for worker in workers]
    assert outputs == [b"1 2\n", b"0 2\n"]
    assert scheduler.returncode == 0, scheduler.stderr
    assert "all 2 workers have left" in scheduler.stdout
    assert not list(tmpdir_env.glob("mscomm-*/*"))


@pytest.mark.parametrize("closed", ["closed", "unread"])
def test_a_scheduler_needs_nobody_who_reads_its_log(tmpdir_env, closed):
    with listening() as taken:
        port = str(taken.getsockname()[1])
    env = {**os.environ, **MS, "MS_WORKER_NUM": "1", "MS_SCHED_PORT": port}
    reader, writer = os.pipe()
    os.close(reader)
    command = ["sh", "-c", 'exec "$0" "$@" >&-'] if closed == "closed" else []
    scheduler = subprocess.Popen(
        [*command, sys.executable, "-c", SCHEDULER], env={**env, "MS_ROLE": "MS_SCHED"}, stdout=writer
    )
    os.close(writer)
    done = subprocess.run([sys.executable, "-c", WORKER], env=env, capture_output=True, text=True, timeout=30)
    assert done.stdout == "0 1\n", done.stderr
    assert scheduler.wait(10) == 0


def test_a_scheduler_whose_job_fails_ends_with_1(tmpdir_env):
    with listening() as taken:
        port = str(taken.getsockname()[1])
    env = {**os.environ, **MS, "MS_ROLE": "MS_SCHED", "MS_SCHED_PORT": port, "MS_TOPO_TIMEOUT": "0.2"}
    done = subprocess.run(
        [sys.executable, "-m", "mscomm", "sched"], env=env, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 1
    assert "only 0 of 2 workers joined within 0.2 s" in done.stdout
    assert not list(tmpdir_env.glob("mscomm-*/*"))
